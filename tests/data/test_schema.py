"""Rows and arrays become validated blocks; errors name partition and row."""

import datetime
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
from pyspark.ml.linalg import Vectors

from sparkkeras.data.block import BlockSpec, Form, LeafSpec, Structure, from_arrays
from sparkkeras.data.columns import ColumnValues
from sparkkeras.data.labels import LabelRange, label_ranges
from sparkkeras.data.reader import Reader
from sparkkeras.data.schema import InputSpec, Schema
from sparkkeras.errors import DataError

ONE = Schema((InputSpec("inputs", (3,)),), (InputSpec("out", (1,)),))
TWO = Schema((InputSpec("age", (1,)), InputSpec("image", (2, 2))), (InputSpec("a", (1,)), InputSpec("b", (4,))))
PAIR = Structure.several(2)
TRAINING, PREDICTING = Reader(ONE), Reader(ONE, labelled=False)
DROP, ALLOW = Reader(ONE, on_invalid="drop"), Reader(ONE, on_invalid="allow")

ROW = [1.0, 2.0, 3.0]


def objects(*values):
    """A one-dimensional object array of any values."""
    made = np.empty(len(values), object)
    made[:] = values if values and not hasattr(values[0], "__len__") else list(values)
    return made


def read(rows, reader=TRAINING):
    """Read the rows as those of partition 2 from row 10 on."""
    return reader.read_rows(rows, reader.form_of(rows[0], 2), 2, 10)


def error_of(rows, reader=TRAINING):
    with pytest.raises(DataError) as caught:
        read(rows, reader)
    return str(caught.value)


# Rows


def test_forgotten_keys_are_recognized():
    assert "pass keyed=True" in error_of([("k0", np.array(ROW))], PREDICTING)
    assert read([(np.array(ROW), 5)], PREDICTING).rows == 1


def test_on_invalid_is_suggested_where_it_helps():
    text = Reader(Schema((InputSpec("text", (1,), text=True),)), labelled=False, on_invalid="allow")
    tokens = Reader(Schema((InputSpec("tokens", (3,), floating=True, indices=9),)), labelled=False)
    assert 'on_invalid="null"' in error_of(["a", None], text)
    assert 'on_invalid="drop"' in error_of([([1, None, 3], 0)], ALLOW)
    assert "on_invalid" not in error_of([ROW, None], tokens)


def test_rows_are_pairs_or_triples():
    block = read([(ROW, 1), ([4.0, 5.0, 6.0], 0)])
    assert block.form == Form(Structure(), Structure())
    assert block.x.tolist() == [ROW, [4, 5, 6]]
    assert block.y.tolist() == [1, 0]
    assert (block.x.dtype, block.y.dtype) == (np.float32, np.int64)
    assert read([(ROW, 1, 0.5), (ROW, 0, 2)]).sample_weight.tolist() == [0.5, 2]
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
    as_dict = read([({"image": image, "age": age}, {"a": 0, "b": label}) for age in (1.0, 2.0)], Reader(TWO))
    assert as_dict.x["age"].tolist() == [[1], [2]]
    for row in ((1.0, image), ((1.0, image), (1, label), 0.5), ({"age": 1.0, "image": image}, 1)):
        assert len(read([row], Reader(TWO, labelled=False)).arrays) == 2


@pytest.mark.parametrize("declared", [(), (1,)])
@pytest.mark.parametrize("given", [(), (1,)])
def test_features_get_the_rank_that_the_input_declares(declared, given):
    reader = Reader(Schema((InputSpec("a", declared),)), labelled=False, on_invalid="allow")
    x = np.full((4, *given), 1.5)
    x[1] = np.nan
    expected = x.reshape(4, *declared)
    np.testing.assert_array_equal(reader.read_arrays(np.where(np.isnan(x), None, x), None, None).x, expected)
    leaf = ColumnValues(x.astype(np.float32), np.array([True, False, True, True]), "column 'a'")
    block, good = reader.read_columns([leaf], Form(Structure()), "partition 0", 0)
    np.testing.assert_array_equal(block.x, expected)
    assert good is None
    assert Reader(reader.schema.before(len), labelled=False).read_arrays(np.ones_like(x), None, None).x.shape == x.shape


def test_spark_vectors_with_arrays():
    features = [Vectors.dense(1.0, 0.0, 3.0), Vectors.sparse(3, {0: 1.0, 2: 3.0}), np.array(ROW), [4.0, 5.0, 6.0]]
    for block in (read([(each, 1) for each in features]), read(features, PREDICTING)):
        assert block.x.tolist() == [[1, 0, 3], [1, 0, 3], ROW, [4, 5, 6]]
        assert block.x.dtype == np.float32


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([5], "^row 0 of partition 2 .*pair.*triple.*to_simple_rdd"),
        ([type("LabeledPoint", (), {})()], "lp_to_simple_rdd.*SparkMLlibModel"),
        ([(ROW, 1), (ROW, 1), 5], "^row 12 .*received int 5"),
        ([({"a": 1.0, "b": 2.0}, 1), ((1.0, 2.0), 1)], "^row 11 .*expected a dict"),
        ([(ROW, 1, 0.5), (ROW, 1)], "^row 11 .*sample weight"),
        ([(ROW, 1), (None, 1), (Vectors.dense(ROW), 1)], "^x of row 11 .*missing"),
        ([(ROW, 1, [0.5]), (ROW, 1, [None])], "^sample_weight of row 11 .*missing"),
        ([(ROW, 0.5), (ROW, np.inf)], '^y .* row 11 .*"drop".*"allow"'),
        ([(ROW, 1), ([np.inf, 0.0, 1.0], 1), ([-np.inf, 0.0, 1.0], 1)], "in row 11 "),
        ([([1, 2, 3], 0), ([1, 2], 0)], "^x of row 11 .*shape.*pad_seq"),
        ([([[1, 2], [3, 4]], 0), ([[1, 2], [3]], 0)], "^x of row 11 .*ragged"),
        ([(ROW, "cat")], "^y of partition 2 .*StringLookup"),
        ([(b"\x89PNG\r\n\x1a\n1", 1)], "^x (?!.*StringLookup).*image_loader"),
        ([(bytearray(b"\x89PNG\r\n\x1a\n" + bytes(size)), 1) for size in (4, 9)], "^(?!.*Pad).*image_loader"),
        ([(ROW, 1 + 2j)], "Complex numbers"),
        ([(np.array(["2020-01-01"], "datetime64[D]"), 1)], "Convert dates"),
    ],
)
def test_an_error_names_the_row_and_reason(rows, words):
    with pytest.raises(DataError, match=words):
        read(rows)


def test_rows_that_are_not_finite_are_dropped():
    nothing = [np.nan] * 3
    rows = [(ROW, 0, 1.0), (nothing, 1, 1.0), (ROW, 2, 1.0), (ROW, 3, np.inf), (ROW, np.nan, 1.0), (ROW, 5, 1.0)]
    block = read(rows, DROP)
    assert block.y.tolist() == [0, 2, 5]
    assert (block.x.shape, block.sample_weight.shape) == ((3, 3), (3,))
    assert read([(nothing, 1)], DROP).x.shape == (0, 3)
    assert read([([3e38] * 3, 1)] * 4).rows == 4  # although their sum is infinite


def test_labels_of_rows_are_ignored_in_prediction():
    for row in (ROW, (ROW, 1), (ROW, None), (ROW, 1, 0.5)):
        block = read([row, row], PREDICTING)
        assert block.x.tolist() == [ROW, ROW]
        assert (block.y, block.sample_weight) == (None, None)
    for width in (2, 3):
        numbers = Reader(Schema((InputSpec("in", (width,)),)), labelled=False)
        assert read([tuple(range(width))], numbers).x.tolist() == [list(range(width))]


# Arrays


def test_arrays_become_a_block():
    x = np.ones((4, 3), np.float32)
    block = TRAINING.read_arrays(x, [0, 1, 1, 0], np.ones(4))
    assert [array.dtype.name for array in block.arrays] == ["float32", "int64", "float32"]
    assert np.shares_memory(block.x, x)
    features = PREDICTING.read_arrays(x, np.ones(4), np.ones(4))
    assert (features.y, features.sample_weight) == (None, None)
    assert PREDICTING.read_arrays(x[:0], None, None).rows == 0


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        (np.ones((4, 3)), None, "^labels are missing.*y="),
        ((np.ones((4, 3)), np.ones((4, 1))), None, "x is a tuple.*inputs"),
        (np.ones((4, 3)), np.ones(3), "x has 4 .*y has 3"),
        (3, np.ones(3), "^x is int 3"),
        (np.array(3.0), np.array(1.0), "^x is a single value"),
        ({0: np.ones((2, 3))}, np.ones(2), "keys"),
        (np.ones((3, 3)), objects(1, 2.5, "red"), "^y of row 2 of the arrays .*StringLookup"),
        (np.ones((2, 3)), objects(1, datetime.date(2020, 1, 1)), "Convert dates"),
        (np.ones((2, 3)), objects(1, datetime.timedelta(1)), "Convert durations"),
        (np.ones((2, 3)), objects(1, np.timedelta64(1, "s")), "Convert durations"),  # a subclass of NumPy's signed integer
        pytest.param(np.ones((2, 3)), objects(1, 10**400), "^y of the arrays .*too large", id="too large"),
    ],
)
def test_an_error_names_the_array_and_reason(x, y, words):
    with pytest.raises(DataError, match=words):
        TRAINING.read_arrays(x, y, None)


def test_labels_may_be_optional():
    reader, row = Reader(ONE, labels_optional=True), np.ones(3)
    assert reader.read_arrays(np.ones((4, 3)), None, None).y is None
    assert reader.read_arrays(np.ones((4, 3)), np.ones(4), None).y is not None
    assert read([row, row], reader).y is None
    assert reader.form_of((row, 1.0), 0).y is not None


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
    with pytest.raises(DataError, match=r"\{'a': array\}.*inputs are \{'a': array, 'b': "):
        reader.read_arrays({"a": x}, labels, None)
    with pytest.raises(DataError, match=r"sample_weight .*but y is \{'u': array, 'v': "):
        reader.read_arrays({"a": x, "b": {"c": x}}, labels, {"u": y})


def test_optional_inputs_need_values():
    schema = Schema((InputSpec("a", (2,)), InputSpec("b", (2,), optional=True)), x=Structure.named(("a", "b")))
    reader, x = Reader(schema, labelled=False), np.ones((3, 2))
    for read, where in (
        (lambda: reader.read_arrays([x, None], None, None), r"^x\[.*\] is None"),
        (lambda: schema.check_features(reader.read_arrays({"a": x}, None, None).spec), r"keys \['a'\]"),
        (lambda: reader.form_of({"a": x[0], "b": None}, 1), r"^row 0 of partition 1: x\['b'\]"),
    ):
        with pytest.raises(DataError, match=f"{where}.*'b' may be None"):
            read()


def spec(*shapes, names=None):
    several = Structure.several(len(shapes)) if names is None else Structure.named(names)
    structure = Structure() if len(shapes) == 1 and names is None else several
    return BlockSpec(Form(structure), tuple(LeafSpec(shape, "float32") for shape in shapes))


@pytest.mark.parametrize(
    ("schema", "given"),
    [
        (Schema((InputSpec("in", (None, 5)),)), spec((7, 5))),
        (Schema((InputSpec("in", None),)), spec((8, 8))),
        (ONE, spec((3, 1))),
        (TWO, spec((2, 2), (1,), names=("image", "age"))),
        (Schema(), spec((5,), (6, 7))),
    ],
)
def test_features_that_fit_the_inputs(schema, given):
    schema.check_features(given)


@pytest.mark.parametrize(
    ("schema", "given", "words"),
    [
        (Schema((InputSpec("in", (None, 5)),)), spec((7, 6)), r"\(None, 5\), received .*\(7, 6\)"),
        (ONE, spec((4,), names=("features",)), r"x\['features'\] does not fit"),
        (TWO, spec((2, 2), (1,)), r"x\[0\] .*'age'.*\(1,\).*\(2, 2\)"),
        (TWO, spec((2, 2), (1,), names=("age", "image")), r"x\['age'\] .*'age'"),
        (TWO, spec((1,), (1,), names=("image", "weight")), r"\['image', 'weight'\].*\['age', 'image'\]"),
        (TWO, spec((1,)), r"2 inputs \(age, image\).*1 array"),
        (ONE, spec(()), r"x\[None\]. In an RDD"),
    ],
)
def test_an_error_names_the_input_that_features_do_not_fit(schema, given, words):
    with pytest.raises(DataError, match=words):
        schema.check_features(given)


# Labels


def test_the_ranges_of_labels():
    y = np.array([0, 4]), np.array([[0.5, 1], [-2, 3]]), np.array([True, False])
    block = from_arrays(np.ones((2, 3)), y, None)
    assert label_ranges(block) == (LabelRange(0, 4, True), LabelRange(-2, 3, False), LabelRange(0, 1, True))
    assert label_ranges(block[:0]) == ()
    assert LabelRange(0, 3, True).union(LabelRange(-1, 2, False)) == LabelRange(-1, 3, False)


# Python objects


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
    labels = Reader(Schema()).read_arrays(np.ones((2, 3)), y, None).y
    np.testing.assert_array_equal(labels, expected)
    assert labels.dtype == expected.dtype


@pytest.mark.parametrize("missing", [None, pd.NA])
def test_none_in_arrays_is_handled_by_on_invalid(missing):
    x = np.array([[1] * 3, [2, missing, 2], [3.5] * 3], object)
    with pytest.raises(DataError, match="x of row 1 of the arrays .*missing"):
        TRAINING.read_arrays(x, np.arange(3), None)
    block = DROP.read_arrays(x, np.arange(3), None)
    assert (block.x.tolist(), block.y.tolist()) == ([[1] * 3, [3.5] * 3], [0, 2])
    np.testing.assert_array_equal(ALLOW.read_arrays(x, np.arange(3), None).x, [[1] * 3, [2, np.nan, 2], [3.5] * 3])
    labels = DROP.read_arrays(np.ones((3, 3)), [7, missing, 8], None).y
    assert (labels.tolist(), labels.dtype) == ([7, 8], np.int64)
    rows = list(zip(x, [0, 1, 2], strict=True))
    np.testing.assert_array_equal(read(rows, ALLOW).x, [[1] * 3, [2, np.nan, 2], [3.5] * 3])


def test_a_row_is_valid_if_no_column_is_null():
    columns = [ColumnValues(np.arange(4.0), np.arange(4) != null, f"column {null}") for null in (0, 1)]
    form = Form(Structure.several(2))
    block, whole = Reader(Schema(), labelled=False, on_invalid="null").read_columns(columns, form, "partition 0", 0)
    assert (block.rows, whole.tolist()) == (4, [False, False, True, True])
    block, whole = Reader(Schema(), labelled=True, on_invalid="drop").read_columns(columns, form, "partition 0", 0)
    assert (block.arrays[0].tolist(), whole) == ([2.0, 3.0], None)


def test_masked_values_raise_an_error_with_advice():
    masked = np.ma.masked_array(np.ones((2, 3)), mask=[[0, 0, 0], [0, 1, 1]])
    with pytest.raises(DataError, match=r"^x of the arrays .*\(2 of 6\).*filled"):
        TRAINING.read_arrays(masked, np.ones(2), None)
    with pytest.raises(DataError, match="^x is a masked array"):
        from_arrays(masked, np.ones(2), None)
    assert "row 11 of partition 2 is a masked array" in error_of([(masked[0], 1.0), (masked[1], 1.0)])


def test_a_pair_of_arrays_in_prediction_raises_an_error():
    with pytest.raises(DataError, match=r"like \(x, y\).*only the features"):
        PREDICTING.read_arrays((np.ones((4, 3)), np.ones(4)), None, None)
    assert PREDICTING.read_arrays((np.ones(3), np.zeros(3)), None, None).x.shape == (2, 3)  # rows
    assert PREDICTING.read_arrays((np.ones((4, 3)),), None, None).rows == 4


def test_negative_sample_weights_raise_an_error():
    x, y = np.ones((2, 3)), np.ones(2)
    assert TRAINING.read_arrays(x, y, np.array([1.0, 0.0])).rows == 2
    with pytest.raises(DataError, match="^sample_weight of the arrays .*-2"):
        TRAINING.read_arrays(x, y, np.array([1.0, -2.0]))
    columns = [ColumnValues(values, None, f"column {name!r}") for name, values in (("x", x), ("y", y), ("w", -y))]
    with pytest.raises(DataError, match="^column 'w' of partition 3 .*-1"):
        TRAINING.read_columns(columns, Form(Structure(), Structure(), Structure()), "partition 3", 0)


def test_out_of_range_indices_of_an_embedding_raise_an_error():
    schema = Schema((InputSpec("words", (2,), indices=5),))
    reader, bad, form = Reader(schema, labelled=False), np.array([[0, 4], [5, 2]]), Form(Structure())
    assert reader.read_arrays(bad[:1], None, None).rows == 1
    with pytest.raises(DataError, match="^x of the arrays .*'words'.*input_dim=5.*0 to 5"):
        reader.read_arrays(bad, None, None)
    with pytest.raises(DataError, match="^column 'w' of partition 3 .*input_dim=5"):
        reader.read_columns([ColumnValues(bad, None, "column 'w'")], form, "partition 3", 0)
    incomplete = ColumnValues(bad, np.array([True, False]), "w")
    lenient = Reader(schema, labelled=False, on_invalid="null")
    assert lenient.read_columns([incomplete], form, "here", 0)[0].rows == 2
    assert Reader(schema.before(len), labelled=False).read_arrays(bad, None, None).rows == 2


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([[np.nan, 4], [5, 0]], "range from 0 to 5"),
        ([[-1, 4], [np.nan, np.nan]], "range from -1 to 4"),
        ([[np.nan, 4], [3, 0]], "no index for NaN"),
        ([[np.nan, np.nan]], "no index for NaN"),
    ],
)
def test_nan_is_not_an_index_and_hides_no_out_of_range_index(values, message):
    schema, values = Schema((InputSpec("words", (2,), indices=5),)), np.array(values, np.float16)
    with pytest.raises(DataError, match=message):
        Reader(schema, labelled=False, on_invalid="allow").read_arrays(values, None, None)
    if "NaN" in message:
        column = [ColumnValues(values, None, "w")]
        block, _ = Reader(schema, labelled=False, on_invalid="null").read_columns(column, Form(Structure()), "here", 0)
        assert block.rows == len(values)
