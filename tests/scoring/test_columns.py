"""Scoring without Spark: the types of output columns, and predictions for batches of columns."""

import itertools
from dataclasses import replace

import keras
import numpy as np
import pyarrow as pa
import pytest

from sparkkeras import ConfigurationError, DataError, ModelError
from sparkkeras.data.dataset import TaskContext
from sparkkeras.data.local_dataset import LocalShared
from sparkkeras.data.reader import Reader
from sparkkeras.data.schema import InputSpec, Schema
from sparkkeras.modeling.outputs import Output, outputs_of
from sparkkeras.scoring.column_functions import ArgumentsToBlocks
from sparkkeras.scoring.columns import Scorer, ScoreTask, _column_names
from sparkkeras.sql import _CheckedFunction
from tests.models import regression

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


def called(model, x):
    """What the model returns, as arrays; `predict` would trace it."""
    return keras.tree.map_structure(keras.ops.convert_to_numpy, model(x))


def batches(x, *sizes):
    """The rows of an array in batches of these sizes."""
    column = pa.array(x.tolist(), pa.list_(pa.float32()))
    bounds = np.cumsum([0, *sizes])
    return [column[start:stop] for start, stop in itertools.pairwise(bounds)]


# Outputs


def typed(dtype):
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, dtype=dtype)])


def classes():
    inputs = keras.Input((3,))
    return keras.Model(inputs, keras.ops.argmax(keras.layers.Dense(4)(inputs), axis=-1))


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (lambda: typed("float64"), "array<double>"),
        (lambda: typed("mixed_bfloat16"), "array<float>"),
        (lambda: typed("float16"), "array<float>"),
        (classes, "int"),
    ],
)
def test_the_column_type_holds_the_predicted_values(build, name):
    model = build()
    assert Scorer.of(model).type_name == name
    assert score(model, *batches(X, 40)).to_pylist() == model.predict(X, verbose=0).tolist()


class Subclassed(keras.Model):
    def call(self, x):
        return x * 2


def test_a_model_with_unknown_output_shapes_raises_an_error():
    model = Subclassed()
    model(X)
    with pytest.raises(ModelError, match=r"keras\.Model\(inputs, model\(inputs\)\)"):
        Scorer.of(model)
    with pytest.raises(ModelError, match="built"):
        Scorer.of(keras.Sequential([keras.layers.Dense(2)]))


# Rows


@pytest.mark.core
def test_predictions_equal_those_of_keras_for_any_batch_sizes():
    model = regression()
    for sizes, batch_size in (((7, 33), 8), ((0, 20, 0, 20), 1024), ((1,) * 40, 8)):
        found = score(model, *batches(X, *sizes), batch_size=batch_size)
        assert found.type == pa.float32()
        np.testing.assert_allclose(found, called(model, X).ravel(), rtol=1e-6, atol=1e-6)
    assert list(task(model)(TaskContext(0), iter(batches(X, 0, 0)))) == []


@pytest.mark.parametrize("structure", [list, dict])
def test_several_outputs_are_a_struct_with_their_names(structure):
    model = two_by_two(structure)
    found = score(model, (pa.array([*X[:, :2].tolist(), None, [3.0, 4.0]]), pa.array([*X[:, 2].tolist(), 2.0, None])))
    assert found.is_valid().to_pylist() == [True] * 40 + [False] * 2
    expected = called(model, [X[:, :2], X[:, 2:]])
    price, kind = (expected[name] for name in ("price", "kind")) if structure is dict else expected
    np.testing.assert_allclose(found[:40].field("price"), price.ravel(), atol=1e-6)
    np.testing.assert_allclose(found[:40].field("kind").to_pylist(), kind, atol=1e-6)
    assert [field.name for field in found.type] == [output.name for output in outputs_of(model)]


def test_sequences_are_nested_arrays():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3, 2)), keras.layers.Dense(1)])
    x = np.random.default_rng(1).random((10, 3, 2)).astype(np.float32)
    found = score(model, pa.array(x.tolist()), pa.array(x.reshape(10, 6).tolist()))  # the second one flat
    expected = called(model, x)
    assert found.type == pa.list_(pa.list_(pa.float32()))
    np.testing.assert_allclose(found.to_pylist(), np.concatenate([expected, expected]), atol=1e-6)


@pytest.mark.parametrize("on_invalid", ["drop", "null"])
def test_only_valid_rows_reach_the_model_and_the_others_get_null(on_invalid):
    def finite(x, y):
        assert np.isfinite(x).all()
        return x

    model, x, bad = regression(), X.tolist(), [0, 3, 4, 5, 39, *range(16, 30)]
    for row in bad:
        x[row] = None
    x[7], x[8], x[9] = [1.0, None, 2.0], [1.0, 2.0, float("nan")], [float("inf"), 2.0, 3.0]
    expected = called(model, X).ravel().copy()
    expected[[7, 8, 9, *bad]] = np.nan
    column = pa.array(x, pa.list_(pa.float32()))
    for batch_size in (3, 100):
        scoring = task(model, batch_size=batch_size, on_invalid=on_invalid, transform=finite)
        parts = list(scoring(TaskContext(0), iter([column[:30], column[30:31], column[31:]])))
        assert [len(part) for part in parts] == [30, 1, 9]  # each batch gets its predictions
        found = pa.concat_arrays(parts)
        assert found.is_null().to_pylist() == np.isnan(expected).tolist()
        np.testing.assert_allclose(np.array(found.to_pylist(), float), expected, atol=1e-6)


def test_the_error_with_on_invalid_error_names_the_row():
    with pytest.raises(DataError, match="argument 1.*row 41 of partition 0"):
        score(regression(), *batches(X, 40), pa.array([[1.0, 2.0, 3.0], None], pa.list_(pa.float32())), on_invalid="error")


def test_nulls_and_nan_reach_the_model_as_nan_with_on_invalid_allow():
    rows = pa.array([[1.0, 2.0, float("nan")], [1.0, None, 3.0], None, [1.0, 2.0, 3.0]], pa.list_(pa.float32()))
    model, filled = regression(), np.array([[1, 2, 0], [1, 0, 3], [0, 0, 0], [1, 2, 3]])
    found = score(model, rows, on_invalid="allow", transform=lambda x, y: np.nan_to_num(x, nan=0.0))
    np.testing.assert_allclose(found.to_pylist(), called(model, filled.astype(np.float32)).ravel(), rtol=1e-5)
    assert np.isnan(score(model, rows, on_invalid="allow").to_pylist()).tolist() == [True, True, True, False]
    with pytest.raises(DataError, match='row 1 of .*on_invalid="allow" .*integers'):
        score(integers(), pa.array([1, None], pa.int32()), on_invalid="allow")


def test_the_number_of_arguments_of_a_function_depends_on_the_inputs():
    text = ArgumentsToBlocks(Reader(Schema((InputSpec("text", (1,), text=True),)), False), function="f()")
    assert "takes 1 string" in text.argument_count_error(2)
    with pytest.raises(DataError, match=r"takes 2 arguments.*\(a, b\); it received 1"):
        score(two_by_two(), (pa.array([1.0]),))


NULL, NAN = pa.array([1.0, None]), pa.array([1.0, np.nan])
NUMBERS = pa.array([1.0, 2.0])


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ((), r"^f\(\) takes 3 numbers.*received 0 arguments"),
        ((NUMBERS,) * 2, r"^the arguments of f\(\).*received .*\(2,\).*Choose other columns"),
        ((NUMBERS, pa.array(["a", "b"]), NUMBERS), r"^argument 2 of f\(\) .*string.*CAST"),
        ((pa.array([[1.0], [2.0, 3.0]]),), r"^argument 1 of f\(\).*loader=PadSequences"),
        ((NUMBERS, NUMBERS, NULL), r"^argument 3 of f\(\) has a null.*on_invalid=\"null\""),
        ((NUMBERS, NUMBERS, NAN), r"^argument 3 of f\(\) holds NaN.*on_invalid=\"allow\""),
    ],
)
def test_errors_in_arguments_of_a_function_name_the_function_and_the_argument(columns, message):
    read = ArgumentsToBlocks(Scorer.of(regression(), on_invalid="error").reader, function="f()")
    with pytest.raises(DataError, match=message):
        list(read.blocks(columns, "partition 0", 0))


@pytest.mark.parametrize(
    "columns",
    [(NUMBERS, pa.nulls(2), NUMBERS), (pa.nulls(2),), (pa.nulls(2), pa.array([[1.0, 2.0]] * 2)), (pa.nulls(2),) * 3],
    ids=["a number", "an array", "beside an array", "all"],
)
def test_an_untyped_null_of_sql_is_a_null(columns):
    found = score(regression(), columns)
    assert (found.type, found.to_pylist()) == (pa.float32(), [None, None])
    with pytest.raises(DataError, match=r"argument \d.* has a null in row 0"):
        score(regression(), columns, on_invalid="error")


# Names of output columns

TWO = (Output("price", "float32", 0), Output("kind", "float32", 1))
NESTED = (Output("u", "float32", 0), Output("v/w", "float32", 0))
ALIKE = (Output("b_c", "float32", 0), Output("b/c", "float32", 0))


@pytest.mark.parametrize(
    ("given", "outputs", "expected"),
    [
        ({"price": "p"}, TWO[:1], ["p"]),
        ("prediction", TWO, ["prediction_price", "prediction_kind"]),
        (["p", "k"], TWO, ["p", "k"]),
        ({"kind": "k", "price": "p"}, TWO, ["p", "k"]),
        ("prediction", NESTED, ["prediction_u", "prediction_v_w"]),
        ({"v": {"w": "one"}, "u": "two"}, NESTED, ["two", "one"]),
        ({"b_c": "p1", "b": {"c": "p2"}}, ALIKE, ["p1", "p2"]),
    ],
)
def test_every_output_has_a_column(given, outputs, expected):
    assert _column_names(given, outputs, ["id"]) == expected


@pytest.mark.parametrize(
    ("given", "outputs", "message"),
    [
        ("id_price", TWO, "'id_price_price'"),
        (["p"], TWO, "a different name for each"),
        (["p", "P"], TWO, "a different name"),
        (["p", ""], TWO, "a different name"),
        (5, TWO, "a different name"),
        ({"price": "p"}, TWO, "no column for 'kind'"),
        ({"price": "p", "kind": "k", "kinds": "l"}, TWO, "no output 'kinds'.*mean 'kind'"),
        (["p", "id"], TWO, r"'id' already exists.*drop\('id'\)"),
        (["p", "total"], TWO, "'Total' already exists"),
        ("p", ALIKE, "Pass output_col={'b_c': column"),
    ],
)
def test_invalid_names_of_output_columns_raise_an_error(given, outputs, message):
    with pytest.raises(ConfigurationError, match=message):
        _column_names(given, outputs, ["id", "Total", "id_price_price"])


def test_a_struct_cannot_have_fields_that_spark_does_not_distinguish():
    for outputs in (ALIKE, (Output("price", "float32", 0), Output("Price", "float32", 0))):
        scorer = replace(Scorer.of(two_by_two()), outputs=outputs)
        with pytest.raises(ConfigurationError, match=f"'{outputs[0].name}' and '{outputs[1].name}'"):
            scorer.function(None, ArgumentsToBlocks(scorer.reader))


def test_the_arguments_of_a_function_that_have_names_of_inputs_are_in_their_order():
    function = _CheckedFunction(lambda *_: None, ArgumentsToBlocks(Scorer.of(two_by_two()).reader, function="rate()"), None)
    assert repr(function) == "<rate() of columns for the inputs (a, b)>"
    for columns in (("b", "a"), (_Column("b"), _Column("A")), (_Column("b"), _Column("other + 1"))):
        with pytest.raises(ConfigurationError, match=r"rate\(\).*'a' gets 'b'"):
            function(*columns)


class _Column:
    """A column as Spark displays it."""

    def __init__(self, name):
        self.name = name

    def __str__(self):
        return f"Column<'{self.name}'>"
