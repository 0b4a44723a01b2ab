"""Rows and arrays become validated blocks; errors name partition and row."""

import datetime
import re
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyspark.ml.linalg import Vectors

from sparkkeras.data.block import BlockSpec, Form, LeafSpec, Structure, from_arrays
from sparkkeras.data.columns import ColumnValues, Leaf
from sparkkeras.data.labels import LabelRange, label_ranges
from sparkkeras.data.reader import Reader
from sparkkeras.data.schema import InputSpec, Schema
from sparkkeras.errors import DataError

ONE = Schema((InputSpec("inputs", (3,)),), (InputSpec("out", (1,)),))
TWO = Schema((InputSpec("age", (1,)), InputSpec("image", (2, 2))), (InputSpec("a", (1,)), InputSpec("b", (4,))))
PAIR = Structure.several(2)

ROW = [1.0, 2.0, 3.0]


def read(rows, reader=Reader(ONE), partition=2, first=10):  # noqa: B008
    return reader.read_rows(rows, reader.form_of(rows[0], partition), partition, first)


def error_of(rows, **given):
    with pytest.raises(DataError) as caught:
        read(rows, **given)
    return str(caught.value)


# Rows


def test_forgotten_keys_are_recognized():
    reader = Reader(ONE, labelled=False)
    message = error_of([("k0", np.array(ROW))], reader=reader)
    assert message.startswith("row 0 of partition 2 is a tuple of 2 values, of which only the second one fits the model")
    assert "pass keyed=True" in message
    assert read([(np.array(ROW), 5)], reader=reader).rows == 1


def test_a_null_that_cannot_be_nan_is_reported():
    text = Schema((InputSpec("text", (1,), text=True),))
    message = error_of(["a", None], reader=Reader(text, labelled=False, on_invalid="allow"))
    assert 'which strings and integers cannot be; for a DataFrame, on_invalid="null" predicts null for such rows' in message


def test_nan_is_not_suggested_for_the_indices_of_an_embedding():
    tokens = Schema((InputSpec("tokens", (3,), floating=True, indices=9),))
    assert error_of([ROW, None], reader=Reader(tokens, labelled=False)).endswith("replace them or drop the row.")
    assert "replaces them by NaN" in error_of([ROW, None], reader=Reader(ONE, labelled=False))


def test_pairs_of_lists_become_arrays():
    block = read([(ROW, 1), ([4.0, 5.0, 6.0], 0)])
    assert block.form == Form(Structure(), Structure())
    assert block.x.tolist() == [ROW, [4, 5, 6]]
    assert block.x.dtype == np.float32
    assert block.y.tolist() == [1, 0]
    assert block.y.dtype == np.int64


def test_triples_contain_sample_weights():
    block = read([(ROW, 1, 0.5), (ROW, 0, 2)])
    assert block.sample_weight.tolist() == [0.5, 2]
    assert block.sample_weight.dtype == np.float32


def test_a_sample_weight_of_none_is_ignored():
    assert read([(ROW, 1, None), (ROW, 0)]).sample_weight is None


def test_floats_are_cast_to_floatx_and_other_dtypes_are_kept():
    for given, expected in (("uint8", "uint8"), ("bool", "bool"), ("float16", "float32")):
        assert read([(np.ones(3, given), 1)]).x.dtype == expected
    assert read([(np.ones(3, np.float32), 1.5)], Reader(Schema(floatx="float64"))).x.dtype == np.float64


def test_several_inputs_as_tuples_and_dicts():
    image, label = np.ones((2, 2)), np.zeros(4)
    as_tuple = read([((1.0, image), (0, label))] * 2, Reader(TWO))
    assert as_tuple.form == Form(PAIR, PAIR)
    assert [array.shape for array in as_tuple.arrays] == [(2, 1), (2, 2, 2), (2,), (2, 4)]
    rows = [({"image": image, "age": 1.0}, {"a": 0, "b": label}), ({"age": 2.0, "image": image}, {"b": label, "a": 1})]
    as_dict = read(rows, Reader(TWO))
    assert as_dict.x["age"].tolist() == [[1], [2]]
    assert as_dict.y["a"].tolist() == [0, 1]


@pytest.mark.parametrize("declared", [(), (1,)])
def test_features_get_the_rank_that_the_input_declares(declared):
    reader = Reader(Schema((InputSpec("a", declared),)), labelled=False, on_invalid="allow")
    for given in ((), (1,)):
        x = np.full((4, *given), 1.5)
        x[1] = np.nan
        assert reader.read_arrays(x, None, None).x.shape == (4, *declared)
        missing = np.where(np.isnan(x), None, x)
        np.testing.assert_array_equal(reader.read_arrays(missing, None, None).x, x.reshape(4, *declared))
        leaf = ColumnValues(x.astype(np.float32), np.array([True, False, True, True]), "column 'a'")
        block, good = reader.read_columns([leaf], Form(Structure()), "partition 0", 0)
        np.testing.assert_array_equal(block.x, x.reshape(4, *declared))
        assert good is None
    assert Reader(reader.schema.before(len), labelled=False).read_arrays(np.ones((4, 1)), None, None).x.shape == (4, 1)


def test_spark_vectors_with_arrays():
    features = [Vectors.dense(1.0, 0.0, 3.0), Vectors.sparse(3, {0: 1.0, 2: 3.0}), np.array(ROW), [4.0, 5.0, 6.0]]
    rows = [[1, 0, 3], [1, 0, 3], ROW, [4, 5, 6]]
    labelled, predicting = [(each, 1) for each in features], Reader(ONE, labelled=False)
    for block in (read(labelled), read(labelled, predicting), read(features, predicting)):
        assert block.x.tolist() == rows
        assert block.x.dtype == np.float32


PAIRS = r"expected a pair \(x, y\) or a triple \(x, y, sample_weight\)"


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([5], f"^row 0 of partition 2 is int 5; {PAIRS}.*to_simple_rdd"),
        ([(1,)], f"^row 0 of partition 2 is .*{PAIRS}"),
        ([np.ones(2)], f"^row 0 of partition 2 is .*{PAIRS}"),
        ([type("LabeledPoint", (), {})()], r"Convert LabeledPoints with lp_to_simple_rdd\(rdd\), or .*SparkMLlibModel"),
        ([(ROW, 1), (ROW, 1), 5], f"^row 12 of partition 2: {PAIRS}, received int 5"),
        ([({"a": 1.0, "b": 2.0}, 1), ((1.0, 2.0), 1)], "^row 11 of partition 2: expected a dict .*received a tuple of 2"),
        ([(ROW, 1, 0.5), (ROW, 1)], "^row 11 of partition 2: some rows have a sample weight and others have none"),
        ([(ROW, 1), (ROW, 1, 0.5)], "^row 11 of partition 2: some rows have a sample weight and others have none"),
        ([(None, 1), (ROW, 1)], "^x of row 10 of partition 2 has missing values"),
        ([(ROW, 1), (ROW, None)], "^y of row 11 of partition 2 has missing values.*replace them or drop the row"),
        ([(ROW, 1), ([1.0, None, 3.0], 1)], "^x of row 11 of partition 2 has missing values"),
        ([(ROW, 1), (None, 1), (Vectors.dense(ROW), 1)], "^x of row 11 of partition 2 has missing values"),
        ([(ROW, 1, [0.5]), (ROW, 1, [None])], "^sample_weight of row 11 of partition 2 has missing values"),
        ([(ROW, 1), ([1.0, np.nan, 2.0], 1)], "^x holds NaN or an infinite value in row 11 of partition 2"),
        ([(ROW, 0.5), (ROW, np.inf)], '^y holds NaN or an infinite value in row 11 .*on_invalid="drop".*on_invalid="allow"'),
        ([(ROW, 1, 1.0), (ROW, 1, -np.inf)], "^sample_weight holds NaN or an infinite value in row 11 of partition 2"),
        ([([np.inf, -np.inf, 1.0], 1)], "in row 10 of partition 2"),
        ([(ROW, 1), ([np.inf, 0.0, 1.0], 1), ([-np.inf, 0.0, 1.0], 1)], "in row 11 of partition 2"),
        ([([1, 2, 3], 0), ([1, 2], 0)], "^x of row 11 of partition 2 has another shape than row 10.*keras.utils.pad_seq"),
        ([(np.ones(3), 0), (np.ones((3, 1)), 0)], "^x of row 11 of partition 2 has another shape than row 10"),
        (
            [(Vectors.dense(1.0, 2.0), 0), (Vectors.dense(1.0), 0)],
            "^x of row 11 of partition 2 has another shape than row 10",
        ),
        ([([[1, 2], [3]], 0), ([[1, 2], [3]], 0)], "row 10 of partition 2"),
        ([([[1, 2], [3, 4]], 0), ([[1, 2], [3]], 0)], "^x of row 11 of partition 2 is a ragged list"),
        ([(ROW, "cat")], "of partition 2 has dtype <U3; expected numbers or booleans.*StringLookup"),
        ([(b"\x89PNG\r\n\x1a\n1", 1)], r"of partition 2 has dtype \|S9; (?!.*StringLookup).*image_loader"),
        ([(ROW, 1 + 2j)], "Complex numbers are not supported: .*x.real, x.imag"),
        ([(np.array(["2020-01-01"], "datetime64[D]"), 1)], "Convert dates and times to numbers"),
    ],
)
def test_an_error_names_the_row_and_reason(rows, words):
    with pytest.raises(DataError, match=words):
        read(rows)


def test_large_finite_values_are_finite():
    large = [3e38, 3e38, 3e38]
    assert read([(large, 1)] * 4).rows == 4


def test_rows_that_are_not_finite_are_dropped():
    rows = [(ROW, 0, 1.0), ([np.nan] * 3, 1, 1.0), (ROW, 2, 1.0), (ROW, 3, np.inf), (ROW, np.nan, 1.0), (ROW, 5, 1.0)]
    block = read(rows, Reader(ONE, on_invalid="drop"))
    assert block.y.tolist() == [0, 2, 5]
    assert block.x.shape == (3, 3)
    assert block.sample_weight.shape == (3,)


def test_all_rows_may_be_dropped():
    block = read([([np.nan] * 3, 1)], Reader(ONE, on_invalid="drop"))
    assert block.rows == 0
    assert block.x.shape == (0, 3)


# Rows in prediction


@pytest.mark.parametrize("row", [ROW, (ROW, 1), (ROW, None), (ROW, 1, 0.5)])
def test_labels_are_ignored_in_prediction(row):
    block = read([row, row], Reader(ONE, labelled=False))
    assert block.x.tolist() == [ROW, ROW]
    assert (block.y, block.sample_weight) == (None, None)


@pytest.mark.parametrize("width", [2, 3])
def test_a_tuple_of_numbers_is_read_as_features(width):
    block = read([tuple(range(width))] * 2, Reader(Schema((InputSpec("in", (width,)),)), labelled=False))
    assert block.x.tolist() == [list(range(width))] * 2


def test_features_of_several_inputs():
    image = np.ones((2, 2))
    for row in ((1.0, image), ((1.0, image), (1, np.zeros(4)), 0.5), ({"age": 1.0, "image": image}, 1)):
        block = read([row, row], Reader(TWO, labelled=False))
        assert [array.shape for array in block.arrays] == [(2, 1), (2, 2, 2)]


# Arrays


def test_arrays_become_a_block():
    block = Reader(ONE).read_arrays(np.ones((4, 3)), [0, 1, 1, 0], np.ones(4))
    assert block.form == Form(Structure(), Structure(), Structure())
    assert [array.dtype.name for array in block.arrays] == ["float32", "int64", "float32"]


def test_arrays_of_the_right_dtype_are_not_copied():
    x = np.ones((4, 3), np.float32)
    assert np.shares_memory(Reader(ONE).read_arrays(x, np.ones(4), None).x, x)


def test_arrays_of_several_inputs():
    x, y = [np.ones((5, 1)), np.ones((5, 2, 2))], [np.ones(5), np.ones((5, 4))]
    assert Reader(TWO).read_arrays(x, y, None).form == Form(PAIR, PAIR)
    named = Reader(TWO).read_arrays({"image": x[1], "age": x[0]}, {"a": y[0], "b": y[1]}, None)
    assert named.form.labels == ["x['image']", "x['age']", "y['a']", "y['b']"]


def test_label_arrays_are_ignored_in_prediction():
    block = Reader(ONE, labelled=False).read_arrays(np.ones((4, 3)), np.ones(4), np.ones(4))
    assert block.y is None
    assert block.sample_weight is None


def test_prediction_accepts_zero_rows():
    assert Reader(ONE, labelled=False).read_arrays(np.ones((0, 3)), None, None).rows == 0


def test_rows_without_features_cannot_be_predicted():
    for row in (None, ([[1.0], [2.0, 3.0]], 1)):
        with pytest.raises(DataError, match="^x of row 10 of partition 2"):
            read([row], Reader(ONE, labelled=False))


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        (np.ones((4, 3)), None, "^labels are missing. Pass them as a separate argument, y="),
        ((np.ones((4, 3)), np.ones((4, 1))), None, "x is a tuple of 2 values, which are taken as inputs of the model. Pass"),
        (np.ones((4, 3)), np.ones(3), "^arrays must have the same number of rows: x has 4 rows, y has 3 rows"),
        (3, np.ones(3), "^x is int 3; expected an array"),
        (np.array(3.0), np.array(1.0), r"^x is a single value, 3\.0; expected an array with one row per sample\.$"),
        (
            [[1, 2, 3], [4, 5]],
            [0, 1],
            r"^x of row 1 of the arrays has another shape than row 0: \(2,\) instead of \(3,\).*pad_",
        ),
        (np.ones((2, 3)), ["a", "b"], "^y of the arrays has dtype <U1; expected numbers or booleans"),
        ({0: np.ones((2, 3))}, np.ones(2), "keys"),
        # timedelta64 is a subclass of NumPy's signed integer
        (np.ones((2, 3)), np.array([np.timedelta64(1, "s")] * 2, object), "Convert durations to numbers"),
    ],
)
def test_an_error_names_the_array_and_reason(x, y, words):
    with pytest.raises(DataError, match=words):
        Reader(ONE).read_arrays(x, y, None)


def error_of_arrays(*given, reader=Reader(ONE)):  # noqa: B008
    with pytest.raises(DataError) as caught:
        reader.read_arrays(*given)
    return str(caught.value)


def test_labels_may_be_optional():
    reader, row = Reader(ONE, labels_optional=True), np.ones(3)
    assert reader.read_arrays(np.ones((4, 3)), None, None).y is None
    assert reader.read_arrays(np.ones((4, 3)), np.ones(4), None).y is not None
    assert read([row, row], reader).y is None
    assert reader.form_of((row, 1.0), 0).y is not None


def test_an_error_names_the_row_of_an_array_that_is_not_finite():
    x = np.ones((6, 2, 3))
    x[4, 1, 2] = np.nan
    assert error_of_arrays(x, np.ones(6), None).startswith("x holds NaN or an infinite value in row 4 of the arrays.")
    assert Reader(ONE, on_invalid="drop").read_arrays(x, np.arange(6), None).y.tolist() == [0, 1, 2, 3, 5]
    assert Reader(ONE, on_invalid="allow").read_arrays(x, np.arange(6), None).rows == 6


# Inputs of the model


def test_rows_with_nested_features_are_told_from_pairs():
    nested = Structure(((0,), (1, 0), (1, 1)))
    reader = Reader(Schema(tuple(InputSpec(name, (2,)) for name in ("0", "1/0", "1/1")), x=nested), labelled=False)
    x, y = np.ones(2), np.ones(1)
    for row in ((x, (x, x)), ((x, (x, x)), y), ((x, (x, x)), (y, (y, y)))):
        assert reader.form_of(row, 0) == Form(nested)
        assert reader.read_rows([row], Form(nested), 0, 0).rows == 1


def test_another_structure_than_that_of_the_model_is_shown_next_to_it():
    inputs, outputs = ([InputSpec(name, (2,)) for name in names] for names in (("a", "b/c"), ("u", "v/0", "v/1")))
    of_y = Structure((("u",), ("v", 0), ("v", 1)))
    reader = Reader(Schema(tuple(inputs), tuple(outputs), x=Structure((("a",), ("b", "c"))), y=of_y))
    x, y = np.ones((3, 2)), np.ones(3)
    labels = {"u": y, "v": (y, y)}
    words = "the features are {'a': array}, but the model's inputs are {'a': array, 'b': {'c': array}}: pass x in this"
    with pytest.raises(DataError, match=re.escape(words)):
        reader.read_arrays({"a": x}, labels, None)
    words = "sample_weight is {'u': array}, but y is {'u': array, 'v': (array, array)}: pass one array of weights"
    with pytest.raises(DataError, match=re.escape(words)):
        reader.read_arrays({"a": x, "b": {"c": x}}, labels, {"u": y})


def test_optional_inputs_need_values():
    schema = Schema((InputSpec("a", (2,)), InputSpec("b", (2,), optional=True)), x=Structure.named(("a", "b")))
    reader, x = Reader(schema, labelled=False), np.ones((3, 2))
    advice = "'b' may be None in Keras .optional=True., but sparkkeras does not support this: pass an array for each input"
    with pytest.raises(DataError, match=rf"^x\[.*\] is None. {advice}"):
        reader.read_arrays([x, None], None, None)
    with pytest.raises(DataError, match=rf"features have the keys \['a'\], .* {advice}"):
        schema.check_features(reader.read_arrays({"a": x}, None, None).spec)
    with pytest.raises(DataError, match=rf"^row 0 of partition 1: x\['b'\] is None. {advice}"):
        reader.form_of({"a": x[0], "b": None}, 1)


def spec(*shapes, names=None):
    several = Structure.several(len(shapes)) if names is None else Structure.named(names)
    structure = Structure() if len(shapes) == 1 and names is None else several
    return BlockSpec(Form(structure), tuple(LeafSpec(shape, "float32") for shape in shapes))


@pytest.mark.parametrize(
    ("wanted", "given", "fits"),
    [
        ((3,), (4,), False),
        ((1,), (), True),
        ((), (1,), True),
        ((3,), (3, 1), True),
        ((1, 3), (3,), False),
        ((None, 5), (7, 5), True),
        ((None, 5), (7, 6), False),
        (None, (8, 8), True),
    ],
)
def test_takes_compares_shapes(wanted, given, fits):
    assert InputSpec("in", wanted).takes(given) is fits
    schema = Schema((InputSpec("in", wanted),))
    if fits:
        schema.check_features(spec(given))
    else:
        words = f"x does not fit the model's input 'in': it expects rows of shape {wanted}, received rows of shape {given}"
        with pytest.raises(DataError, match=re.escape(words)):
            schema.check_features(spec(given))


@pytest.mark.parametrize(("labelled", "param", "value"), [(True, "skip", None), (False, "keep", np.nan)])
def test_messages_name_the_param_of_spark_ml(labelled, param, value):
    given = Leaf(("c",)).read([pa.array([1.0, value])])
    with pytest.raises(DataError, match=rf"or pass on_invalid=.* \(in Spark ML handleInvalid=\"{param}\""):
        Reader(Schema(), labelled).read_columns([given], Form(Structure()), "partition 0", 0)


def test_several_inputs_are_matched_in_order_or_by_name():
    TWO.check_features(spec((1,), (2, 2)))
    TWO.check_features(spec((2, 2), (1,), names=("image", "age")))
    Schema().check_features(spec((5,), (6, 7)))  # of a model with unknown inputs


@pytest.mark.parametrize(
    ("schema", "given", "words"),
    [
        (TWO, spec((2, 2), (1,)), r"x\[0\] does not fit the model's input 'age'.*\(1,\).*\(2, 2\)"),
        (TWO, spec((2, 2), (1,), names=("age", "image")), r"x\['age'\] does not fit the model's input 'age'"),
        (TWO, spec((1,), (1,), names=("image", "weight")), r"\['image', 'weight'\], .*inputs are \['age', 'image'\]"),
        (TWO, spec((1,)), r"the model has 2 inputs \(age, image\), but the features are 1 array"),
        (ONE, spec((3,), (3,)), "the model has 1 input .*pass x as one array"),
        (ONE, spec(()), r"a single sample needs a batch axis: x\[None\]. In an RDD, a row is \(x, y\) with all"),
    ],
)
def test_an_error_names_the_input_that_features_do_not_fit(schema, given, words):
    with pytest.raises(DataError, match=words):
        schema.check_features(given)


def test_a_single_input_accepts_any_name():
    ONE.check_features(spec((3,), names=("features",)))
    with pytest.raises(DataError, match=r"x\['features'\] does not fit"):
        ONE.check_features(spec((4,), names=("features",)))


# Labels


def test_the_ranges_of_labels():
    y = np.array([0, 4]), np.array([[0.5, 1], [-2, 3]]), np.array([True, False])
    block = from_arrays(np.ones((2, 3)), y, None)
    assert label_ranges(block) == (LabelRange(0, 4, True), LabelRange(-2, 3, False), LabelRange(0, 1, True))
    assert label_ranges(block[:0]) == label_ranges(from_arrays(np.ones((2, 3)), None, None)) == ()
    assert LabelRange(0, 3, True).union(LabelRange(-1, 2, False)) == LabelRange(-1, 3, False)


# Python objects


def objects(*values):
    """A one-dimensional object array of any values."""
    made = np.empty(len(values), object)
    made[:] = values if values and not hasattr(values[0], "__len__") else list(values)
    return made


@pytest.mark.parametrize(
    ("y", "expected"),
    [
        (objects(1, 2.5), np.array([1, 2.5], np.float32)),
        (objects(True, np.False_), np.array([True, False])),
        ([Decimal("1.5"), Fraction(1, 2)], np.array([1.5, 0.5], np.float32)),
        (objects(2**70, 1), np.array([2.0**70, 1], np.float32)),
        (pd.Series([Vectors.dense(1.0, 2.0), Vectors.dense(3.0, 4.0)]), np.array([[1, 2], [3, 4]], np.float32)),
    ],
)
def test_objects_that_are_numbers_are_read_as_numbers(y, expected):
    for labels in (
        Reader(Schema()).read_arrays(np.ones((2, 3)), y, None).y,
        read([(ROW, each) for each in y], Reader(Schema())).y,
    ):
        np.testing.assert_array_equal(labels, expected)
        assert labels.dtype == expected.dtype


@pytest.mark.parametrize("missing", [None, pd.NA])
def test_none_in_arrays_is_handled_by_on_invalid(missing):
    x = np.array([[1] * 3, [2, missing, 2], [3.5] * 3], object)
    rows = list(zip(x, [0, 1, 2], strict=True))
    given = x, np.arange(3), None
    assert "x of row 1 of the arrays has missing values (None or NA): replace them" in error_of_arrays(*given)
    drop, allow = Reader(ONE, on_invalid="drop"), Reader(ONE, on_invalid="allow")
    for block in (drop.read_arrays(*given), read(rows, drop)):
        assert block.x.tolist() == [[1] * 3, [3.5] * 3]
        assert block.y.tolist() == [0, 2]
    for block in (allow.read_arrays(*given), read(rows, allow)):
        np.testing.assert_array_equal(block.x, [[1] * 3, [2, np.nan, 2], [3.5] * 3])


def test_integers_remain_integers_next_to_none():
    labels = Reader(ONE, on_invalid="drop").read_arrays(np.ones((3, 3)), [7, None, 8], None).y
    assert (labels.tolist(), labels.dtype) == ([7, 8], np.dtype(np.int64))


def test_none_cannot_become_nan_in_an_integer_input():
    schema = Schema((InputSpec("ids", (2,)),), (InputSpec("out", (1,)),))
    message = error_of_arrays([[1, None], [2, 3]], [0, 1], None, reader=Reader(schema, on_invalid="allow"))
    assert message == (
        'x of row 0 of the arrays has missing values (None or NA): replace them or drop the row, since on_invalid="allow" '
        'replaces missing numbers by NaN, which strings and integers cannot be; on_invalid="drop" drops such rows.'
    )


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        ("red", "is str 'red'; expected numbers or booleans. Encode text first.*StringLookup"),
        (datetime.date(2020, 1, 1), "Convert dates and times"),
        (datetime.timedelta(1), "Convert durations"),
        ({}, "is an empty dict; expected numbers or booleans"),
        pytest.param(10**400, "too large for float64", id="too large"),
    ],
)
def test_an_error_names_the_row_and_reason_of_a_non_numeric_object(value, advice):
    message = error_of([(ROW, objects(1, value)), (ROW, objects(1, 2.5))])
    assert re.match(f"y of (row 10 of )?partition 2 .*{advice}", message)
    message = error_of_arrays(np.ones((3, 3)), objects(1, 2.5, value), None)
    assert re.match(f"y of (row 2 of )?the arrays .*{advice}", message)


def test_a_row_is_valid_if_no_column_is_null():
    columns = [ColumnValues(np.arange(4.0), np.arange(4) != null, f"column {null}") for null in (0, 1)]
    form = Form(Structure.several(2))
    block, whole = Reader(Schema(), labelled=False, on_invalid="null").read_columns(columns, form, "partition 0", 0)
    assert (block.rows, whole.tolist()) == (4, [False, False, True, True])
    block, whole = Reader(Schema(), labelled=True, on_invalid="drop").read_columns(columns, form, "partition 0", 0)
    assert (block.arrays[0].tolist(), whole) == ([2.0, 3.0], None)


@pytest.mark.parametrize("kind", [bytearray, bytes])
def test_rows_of_encoded_images_have_other_advice_than_sequences(kind):
    images = [kind(b"\x89PNG\r\n\x1a\n" + bytes(range(1, size))) for size in (4, 9)]
    for values in (images, objects(*images)):
        message = error_of_arrays(values, [0, 1], None)
        assert "These are encoded images: decode them first, or use a DataFrame column with loader=image_loader" in message
        assert "Pad" not in message


def test_masked_values_raise_an_error_with_advice():
    masked = np.ma.masked_array(np.ones((2, 3)), mask=[[0, 0, 0], [0, 1, 1]])
    advice = r"a masked array with masked values \(2 of 6\)\. Use array\.filled\(np\.nan\) with on_invalid="
    with pytest.raises(DataError, match=f"^x of the arrays is {advice}"):
        Reader(ONE).read_arrays(masked, np.ones(2), None)
    with pytest.raises(DataError, match=f"^x is {advice}"):
        from_arrays(masked, np.ones(2), None)
    assert "x of row 11 of partition 2 is a masked array" in error_of([(masked[0], 1.0), (masked[1], 1.0)])
    assert read([(masked[0], 1.0)]).x.shape == (1, 3)


def test_a_pair_of_arrays_in_prediction_raises_an_error():
    reader = Reader(ONE, labelled=False)
    with pytest.raises(DataError, match=r"^x is a tuple of 2 arrays, like \(x, y\), .* pass only the features"):
        reader.read_arrays((np.ones((4, 3)), np.ones(4)), None, None)
    assert reader.read_arrays((np.ones(3), np.zeros(3)), None, None).x.shape == (2, 3)  # rows
    assert reader.read_arrays((np.ones((4, 3)),), None, None).rows == 4


def test_negative_sample_weights_raise_an_error():
    reader, x, y = Reader(ONE), np.ones((2, 3)), np.ones(2)
    with pytest.raises(DataError, match=r"^sample_weight of the arrays holds negative sample weights, down to -2: expected"):
        reader.read_arrays(x, y, np.array([1.0, -2.0]))
    assert reader.read_arrays(x, y, np.array([1.0, 0.0])).rows == 2
    form = Form(Structure(), Structure(), Structure())
    columns = [ColumnValues(values, None, f"column {name!r}") for name, values in (("x", x), ("y", y), ("w", -y))]
    with pytest.raises(DataError, match="^column 'w' of partition 3 holds negative sample weights, down to -1"):
        reader.read_columns(columns, form, "partition 3", 0)


def test_out_of_range_indices_of_an_embedding_raise_an_error():
    reader = Reader(Schema((InputSpec("words", (2,), indices=5),)), labelled=False)
    good, bad, form = np.array([[0, 4], [1, 2]]), np.array([[0, 4], [5, 2]]), Form(Structure())
    assert reader.read_arrays(good, None, None).rows == 2
    words = "is for the model's input 'words', which goes into an Embedding with input_dim=5, .* indices from 0 to 4"
    with pytest.raises(DataError, match=f"^x of the arrays {words}, but they range from 0 to 5"):
        reader.read_arrays(bad, None, None)
    with pytest.raises(DataError, match=f"^column 'w' of partition 3 {words}"):
        reader.read_columns([ColumnValues(bad, None, "column 'w'")], form, "partition 3", 0)
    lenient = Reader(reader.schema, labelled=False, on_invalid="null")
    assert lenient.read_columns([ColumnValues(bad, np.array([True, False]), "w")], form, "here", 0)[0].rows == 2
    assert Reader(reader.schema.before(len), labelled=False).read_arrays(bad, None, None).rows == 2


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_nan_is_not_an_index_and_hides_no_out_of_range_index(dtype):
    reader = Reader(Schema((InputSpec("words", (2,), indices=5),)), labelled=False, on_invalid="allow")
    for values, message in (
        ([[np.nan, 4], [5, 0]], "from 0 to 4, but they range from 0 to 5"),
        ([[-1, 4], [np.nan, np.nan]], "from 0 to 4, but they range from -1 to 4"),
        ([[np.nan, 4], [3, 0]], "goes into an Embedding, and that has no index for NaN"),
        ([[np.nan, np.nan]], "goes into an Embedding, and that has no index for NaN"),
    ):
        with pytest.raises(DataError, match=message):
            reader.read_arrays(np.array(values, dtype), None, None)
    null = Reader(reader.schema, labelled=False, on_invalid="null")
    column = [ColumnValues(np.array([[np.nan, 4], [3, 0]], dtype), None, "w")]
    assert null.read_columns(column, Form(Structure()), "here", 0)[0].rows == 2
