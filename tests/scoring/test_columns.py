"""Scoring without Spark: the types of output columns, and predictions for batches of columns."""

import datetime
import io
import itertools
import os
import re
import warnings
from dataclasses import replace

import keras
import numpy as np
import pyarrow as pa
import pytest
from pyspark.util import handle_worker_exception

from sparkkeras import ConfigurationError, DataError, ModelError
from sparkkeras.data.dataset import TaskContext
from sparkkeras.data.local_dataset import LocalShared
from sparkkeras.data.reader import Reader
from sparkkeras.data.schema import InputSpec, Schema
from sparkkeras.modeling.outputs import Output, outputs_of
from sparkkeras.scoring.column_functions import ArgumentsToBlocks, OverColumns
from sparkkeras.scoring.columns import Scorer, ScoreTask, _column_names
from sparkkeras.spark.job_errors import translated
from sparkkeras.sql import _CheckedFunction
from tests.models import classifier, regression

X = np.random.default_rng(0).random((40, 3)).astype(np.float32)


def two_by_two(structure=list):
    """A model with two inputs and two outputs; those of a dict have other names than their layers."""
    keras.utils.set_random_seed(1)
    a, b = keras.Input((2,), name="a"), keras.Input((1,), name="b")
    both = keras.layers.Concatenate(name="both")([a, b])
    layers = ("price", "kind") if structure is list else ("first", "second")
    price, kind = (keras.layers.Dense(units, name=name)(both) for units, name in zip((1, 4), layers, strict=True))
    return keras.Model([a, b], [price, kind] if structure is list else {"price": price, "kind": kind}, name="two")


def task(model, *, batch_size=8, on_invalid="null", transform=None):
    scorer = Scorer.of(model, batch_size=batch_size, transform=transform, on_invalid=on_invalid)
    read = ArgumentsToBlocks(scorer.reader, fits=transform is None)
    return ScoreTask(
        LocalShared(scorer.archive), LocalShared(scorer.state), LocalShared(scorer.options), read, scorer.outputs
    )


def integers():
    """A model with an input of integers."""
    number = keras.Input((), dtype="int32")
    return keras.Model(number, keras.ops.cast(keras.ops.expand_dims(number, 1), "float32"))


def score(model, *batches, **given):
    """The column of all batches."""
    return pa.concat_arrays(list(task(model, **given)(TaskContext(0), iter(batches))))


def batches(x, *sizes):
    """The rows of an array in batches of these sizes."""
    column = pa.array(x.tolist(), pa.list_(pa.float32()))
    bounds = np.cumsum([0, *sizes])
    return [column[start:stop] for start, stop in itertools.pairwise(bounds)]


# Outputs


@pytest.mark.parametrize(("dtype", "name"), [("float64", "double"), ("mixed_bfloat16", "float"), ("float16", "float")])
def test_the_column_type_holds_the_predicted_values(dtype, name):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, dtype=dtype)])
    found = score(model, *batches(X, 40))
    assert Scorer.of(model).type_name == f"array<{name}>"
    assert found.to_pylist() == model.predict(X, verbose=0).tolist()


def test_integer_outputs_give_integer_columns():
    inputs = keras.Input((3,))
    model = keras.Model(inputs, keras.ops.argmax(keras.layers.Dense(4)(inputs), axis=-1))
    assert Scorer.of(model).type_name == "int"
    assert score(model, *batches(X, 40)).to_pylist() == model.predict(X, verbose=0).tolist()


class Subclassed(keras.Model):
    def __init__(self, **config):
        super().__init__(**config)
        self.dense = keras.layers.Dense(2)

    def call(self, x):
        return self.dense(x) * 2


def test_a_model_with_unknown_output_shapes_raises_an_error_and_can_be_wrapped():
    model = Subclassed()
    expected = np.asarray(model(X))
    with pytest.raises(ModelError, match=r"the shapes of its outputs.*keras\.Model\(inputs, model\(inputs\)\)"):
        Scorer.of(model)
    inputs = keras.Input((3,))
    found = score(keras.Model(inputs, model(inputs)), *batches(X, 40))
    np.testing.assert_allclose(found.to_pylist(), expected, atol=1e-6)


def test_a_model_that_is_not_built_raises_an_error():
    with pytest.raises(ModelError, match="built"):
        Scorer.of(keras.Sequential([keras.layers.Dense(2)]))


# Rows


@pytest.mark.parametrize(
    ("sizes", "batch_size"),
    [((40,), 1), pytest.param((7, 33), 8, marks=pytest.mark.core), ((1,) * 40, 8), ((0, 20, 0, 20), 1024)],
    ids=str,
)
def test_predictions_equal_those_of_keras_for_any_batch_sizes(sizes, batch_size):
    model = regression()
    found = score(model, *batches(X, *sizes), batch_size=batch_size)
    assert found.type == pa.float32()
    np.testing.assert_allclose(found, model.predict(X, verbose=0).ravel(), rtol=1e-6, atol=1e-6)


def test_predictions_of_the_same_batches_are_bit_identical():
    model = classifier(width=3)
    found = score(model, *batches(X, 40), batch_size=32)
    np.testing.assert_array_equal(found.to_pylist(), model.predict(X, batch_size=32, verbose=0))


def test_without_rows_there_are_no_predictions():
    assert list(task(regression())(TaskContext(0), iter(batches(X, 0, 0)))) == []


@pytest.mark.parametrize("structure", [list, dict])
def test_several_outputs_are_a_struct_with_their_names(structure):
    model = two_by_two(structure)
    found = score(model, (pa.array(X[:, :2].tolist()), pa.array(X[:, 2])))
    expected = model.predict([X[:, :2], X[:, 2:]], verbose=0)
    price, kind = (expected[name] for name in ("price", "kind")) if structure is dict else expected
    np.testing.assert_allclose(found.field("price"), price.ravel(), atol=1e-6)
    np.testing.assert_allclose(found.field("kind").to_pylist(), kind, atol=1e-6)
    assert [field.name for field in found.type] == [output.name for output in outputs_of(model)]


def test_sequences_are_nested_arrays():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3, 2)), keras.layers.Dense(1)])
    x = np.random.default_rng(1).random((10, 3, 2)).astype(np.float32)
    found = score(model, pa.array(x.tolist()), pa.array(x.reshape(10, 6).tolist()))  # the second one flat
    expected = model.predict(x, verbose=0)
    assert found.type == pa.list_(pa.list_(pa.float32()))
    np.testing.assert_allclose(found.to_pylist(), np.concatenate([expected, expected]), atol=1e-6)


def test_only_rows_with_nulls_get_null_predictions():
    model, x = regression(), X.tolist()
    for row in (0, 3, 4, 5, 39, *range(16, 30)):
        x[row] = None
    x[7] = [1.0, None, 2.0]
    bad = [values is None or None in values for values in x]
    expected = np.where(bad, np.nan, model.predict(X, verbose=0).ravel())
    column = pa.array(x, pa.list_(pa.float32()))
    for batch_size in (3, 100):
        parts = list(task(model, batch_size=batch_size)(TaskContext(0), iter([column[:30], column[30:31], column[31:]])))
        assert [len(part) for part in parts] == [30, 1, 9]  # each batch gets its predictions
        found = pa.concat_arrays(parts)
        assert found.is_null().to_pylist() == bad
        np.testing.assert_allclose(np.array(found.to_pylist(), float), expected, atol=1e-6)


@pytest.mark.parametrize("kind", [pa.float32(), pa.int8(), pa.list_(pa.float32())], ids=["float", "tinyint", "array"])
def test_the_predictions_of_a_column_of_nulls_are_null(kind):
    for model, predicted in ((regression(1), pa.float32()), (classifier(1), pa.list_(pa.float32()))):
        found = score(model, pa.nulls(3, kind), pa.nulls(2, kind))
        assert found.to_pylist() == [None] * 5
        assert found.type == predicted


def test_batches_of_nulls_may_come_before_and_after_sequences():
    model = keras.Sequential([keras.Input((None, 2)), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1)])
    nulls = pa.nulls(2, pa.list_(pa.list_(pa.float64())))
    found = score(model, nulls, pa.array([[[0.5, 0.5], [1.0, 1.0]], None]), nulls)
    assert found.is_valid().to_pylist() == [False, False, True, False, False, False]


def test_the_struct_of_an_invalid_row_is_null():
    columns = (pa.array([[1.0, 2.0], None, [3.0, 4.0]]), pa.array([1.0, 2.0, None]))
    found = score(two_by_two(), columns)
    assert found.is_valid().to_pylist() == [True, False, False]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[1.0, 2.0, 3.0], None], "argument 1.* has a null in row 41 of partition 0"),
        ([[1.0, 2.0, float("nan")]], "holds NaN or an infinite value in row 40 of partition 0"),
    ],
)
def test_the_error_with_on_invalid_error_names_the_row(rows, message):
    with pytest.raises(DataError, match=message):
        score(regression(), *batches(X, 40), pa.array(rows, pa.list_(pa.float32())), on_invalid="error")


def test_nulls_and_nan_reach_the_model_as_nan_with_on_invalid_allow():
    rows = pa.array([[1.0, 2.0, float("nan")], [1.0, None, 3.0], None, [1.0, 2.0, 3.0]], pa.list_(pa.float32()))
    model, filled = regression(), np.array([[1, 2, 0], [1, 0, 3], [0, 0, 0], [1, 2, 3]])
    found = score(model, rows, on_invalid="allow", transform=lambda x, y: np.nan_to_num(x, nan=0.0))
    np.testing.assert_allclose(found.to_pylist(), model.predict(filled, verbose=0).ravel(), rtol=1e-5)
    assert np.isnan(score(model, rows, on_invalid="allow").to_pylist()).tolist() == [True, True, True, False]
    with pytest.raises(DataError, match='has a null in row 1 of .* and on_invalid="allow" .* integers cannot be'):
        score(integers(), pa.array([1, None], pa.int32()), on_invalid="allow")


@pytest.mark.parametrize("on_invalid", ["drop", "null"])
def test_rows_that_are_not_finite_do_not_reach_the_model(on_invalid):
    def finite(x, y):
        assert np.isfinite(x).all()
        return x

    rows = [[1.0, 2.0, float("nan")], [1.0, 2.0, 3.0], None, [float("inf"), 2.0, 3.0]]
    found = score(regression(), pa.array(rows, pa.list_(pa.float32())), on_invalid=on_invalid, transform=finite)
    assert found.is_valid().to_pylist() == [False, True, False, False]


def test_a_transform_is_applied_before_the_model():
    model = regression()
    found = score(model, pa.array(X[:, 0]), transform=lambda x, y: np.stack([x, x * 2, x * 3], axis=1))
    np.testing.assert_allclose(found, model.predict(X[:, :1] * [1, 2, 3], verbose=0).ravel(), atol=1e-6)


def test_a_transform_must_keep_the_number_of_rows():
    with pytest.raises(DataError, match="transform returned 7 rows for a batch of 8: in predict, it must return one row"):
        score(regression(), *batches(X, 20, 20), transform=lambda x, y: x[:-1])


def test_columns_of_nested_outputs_are_named_by_path():
    nested = Output("u", "float32", 0), Output("v/w", "float32", 0)
    assert _column_names("prediction", nested, ()) == ["prediction_u", "prediction_v_w"]
    assert _column_names({"v": {"w": "one"}, "u": "two"}, nested, ()) == ["two", "one"]


def test_a_single_input_accepts_several_arguments_and_several_inputs_one_each():
    model = regression()
    found = score(model, tuple(pa.array(X[:, index]) for index in range(3)))
    np.testing.assert_allclose(found, model.predict(X, verbose=0).ravel(), atol=1e-6)
    with pytest.raises(DataError, match=r"the function takes 2 arguments, one for each input .* \(a, b\); it received 1"):
        score(two_by_two(), (pa.array([1.0]),))
    with pytest.raises(DataError, match=r"arguments of the function .*rows of shape \(3,\), received rows of shape \(2,\)"):
        score(model, (pa.array([1.0]), pa.array([2.0])))


def test_a_function_of_text_takes_strings():
    read = ArgumentsToBlocks(Reader(Schema((InputSpec("text", (1,), text=True),)), False), function="f()")
    assert read.argument_count_error(2) == "f() takes 1 string, or arrays that hold as many in all; it received 2 arguments."


NULL, NAN = pa.array([1.0, None]), pa.array([1.0, np.nan])
NUMBERS = pa.array([1.0, 2.0])


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ((), r"^f\(\) takes 3 numbers, or arrays or vectors that hold as many in all; it received 0 arguments\.$"),
        ((NUMBERS,) * 2, r"^the arguments of f\(\) do.* received rows of shape \(2,\)\. Choose other columns"),
        (
            (pa.array([[1.0], [2.0, 3.0]]),),
            r"^argument 1 of f\(\) holds arrays of different lengths .* pass loader=PadSequences",
        ),
        ((NUMBERS, pa.array(["a", "b"]), NUMBERS), r"^argument 2 of f\(\) has the type string; .* CAST\(\.\.\. AS DOUBLE\)"),
        ((pa.array([datetime.date(2020, 1, 1)] * 2),), r"^argument 1 of f\(\) has the type date; .* unix_date"),
        (
            (NUMBERS, NUMBERS, NULL),
            r"^argument 3 of f\(\) has a null .*WHERE .* pass on_invalid=\"null\"",
        ),
        ((NUMBERS, NUMBERS, NAN), r"^argument 3 of f\(\) holds NaN .* pass on_invalid=\"allow\""),
        (
            (pa.array([b"\xff\xd8\xff\xe0"] * 2),),
            r"^argument 1 of f\(\) holds encoded images.* pass loader=image_loader",
        ),
    ],
)
def test_errors_in_arguments_of_a_function_name_the_function_and_the_argument(columns, message):
    scorer = Scorer.of(regression(), on_invalid="error")
    read = ArgumentsToBlocks(scorer.reader, function="f()")
    with pytest.raises(DataError, match=message):
        list(read.blocks(columns, "partition 0", 0))


@pytest.mark.parametrize(
    "columns",
    [(NUMBERS, pa.nulls(2), NUMBERS), (pa.nulls(2),), (pa.nulls(2), pa.array([[1.0, 2.0]] * 2)), (pa.nulls(2),) * 3],
    ids=["a number", "an array", "beside an array", "all"],
)
def test_an_untyped_null_of_sql_is_a_null(columns):
    assert score(regression(), columns).to_pylist() == [None, None]
    strict = ArgumentsToBlocks(Scorer.of(regression(), on_invalid="error").reader, function="f()")
    with pytest.raises(DataError, match=r"^argument \d of f\(\) has a null in row 0"):
        list(strict.blocks(columns, "partition 0", 0))


def test_spark_reports_a_data_error_without_a_traceback(monkeypatch):
    def task(context, batches):
        raise DataError("too short") from ValueError("inner")
        yield

    monkeypatch.setattr("sparkkeras.scoring.column_functions.task_context", lambda: None)
    monkeypatch.delenv("SPARK_HIDE_TRACEBACK", raising=False)
    stream = io.BytesIO()
    try:
        list(OverColumns(task)(iter([])))
    except DataError as error:
        handle_worker_exception(error, stream)
    finally:
        del os.environ["SPARK_HIDE_TRACEBACK"]  # monkeypatch would set it again after the test
    report = stream.getvalue()[8:].decode()
    assert report == "sparkkeras.errors.DataError: too short\n"
    found = translated(RuntimeError(f"An exception was thrown from the Python worker:\n{report}\n\nJVM stacktrace:\n\tat x"))
    assert (type(found), str(found)) == (DataError, "too short")


# Names of output columns

TWO = (Output("price", "float32", 0), Output("kind", "float32", 1))


@pytest.mark.parametrize(
    ("given", "outputs", "expected"),
    [
        ({"price": "p"}, TWO[:1], ["p"]),
        ("prediction", TWO, ["prediction_price", "prediction_kind"]),
        (["p", "k"], TWO, ["p", "k"]),
        ({"kind": "k", "price": "p"}, TWO, ["p", "k"]),
    ],
)
def test_every_output_has_a_column(given, outputs, expected):
    assert _column_names(given, outputs, ["id"]) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("id_price", "'id_price_price'"),
        (["p"], r"expected a different name for each of the outputs \['price', 'kind'\]"),
        (["p", "P"], "expected a different name"),
        (["p", ""], "expected a different name"),
        (5, "expected a different name"),
        ({"price": "p"}, r"no column for 'kind', of the outputs \['price', 'kind'\]"),
        ({"price": "p", "kind": "k", "kinds": "l"}, "the model has no output 'kinds'.*Did you mean 'kind'"),
        (["p", "id"], r"the column 'id' already exists.*drop\('id'\)"),
        (["p", "total"], "the column 'Total' already exists"),
    ],
)
def test_invalid_names_of_output_columns_raise_an_error(given, message):
    with pytest.raises(ConfigurationError, match=message):
        _column_names(given, TWO, ["id", "Total", "id_price_price"])


ALIKE = (Output("b_c", "float32", 0), Output("b/c", "float32", 0))


def test_outputs_whose_columns_would_have_one_name_have_columns_by_output():
    with pytest.raises(ConfigurationError, match=r"\['b_c', 'b/c'\]. Pass output_col={'b_c': column, 'b/c': column}"):
        _column_names("p", ALIKE, ())
    assert _column_names({"b_c": "p1", "b": {"c": "p2"}}, ALIKE, ()) == ["p1", "p2"]


@pytest.mark.parametrize("outputs", [ALIKE, (Output("price", "float32", 0), Output("Price", "float32", 0))])
def test_a_struct_cannot_have_fields_that_spark_does_not_distinguish(outputs):
    scorer = replace(Scorer.of(two_by_two()), outputs=outputs)
    first, second = (re.escape(repr(output.name)) for output in outputs)
    with pytest.raises(ConfigurationError, match=rf"the outputs {first} and {second} would be .* Rename one of the outputs"):
        scorer.function(None, ArgumentsToBlocks(scorer.reader))


# Models in another state than at compile time


def test_a_model_that_was_frozen_or_quantized_after_training():
    model = regression(optimizer="adam")
    model.fit(X, X[:, 0], verbose=0)
    model.layers[0].trainable = False
    assert score(model, *batches(X, 40)).to_pylist() == model.predict(X, batch_size=8, verbose=0)[:, 0].tolist()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Layer .* does not have a `quantize` method")
        model.quantize("int8")
    assert score(model, *batches(X, 40)).to_pylist() == model.predict(X, batch_size=8, verbose=0)[:, 0].tolist()


def test_the_representation_of_a_function_of_columns_is_short():
    function = _CheckedFunction(lambda *_: None, ArgumentsToBlocks(Scorer.of(regression()).reader, function="price()"), None)
    assert re.fullmatch(r"<price\(\) of columns for the inputs \(\w+\)>", repr(function))


def test_the_arguments_of_a_function_that_have_names_of_inputs_are_in_their_order():
    function = _CheckedFunction(lambda *_: None, ArgumentsToBlocks(Scorer.of(two_by_two()).reader, function="rate()"), None)
    message = (
        r"^the arguments of rate\(\) are .* by position \('a' gets 'b', 'b' gets '%s'\), but 'b' is the name of the input"
    )
    for columns in (("b", "a"), (_Column("b"), _Column("A")), (_Column("b"), _Column("other + 1"))):
        with pytest.raises(ConfigurationError, match=message % re.escape(getattr(columns[1], "name", columns[1]))):
            function(*columns)


class _Column:
    """A column as Spark displays it."""

    def __init__(self, name):
        self.name = name

    def __str__(self):
        return f"Column<'{self.name}'>"
