"""Conversion between Arrow columns and arrays; errors name the column."""

from dataclasses import dataclass
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from sparkkeras import DataError
from sparkkeras.data.columns import Leaf, read, stored_as, to_column, type_name
from sparkkeras.data.schema import InputSpec

VECTOR = pa.struct(
    [("type", pa.int8()), ("size", pa.int32()), ("indices", pa.list_(pa.int32())), ("values", pa.list_(pa.float64()))]
)


def dense(*values):
    return {"type": 1, "size": None, "indices": None, "values": list(values)}


def sparse(size, entries):
    return {"type": 0, "size": size, "indices": list(entries), "values": list(entries.values())}


def vectors(*rows):
    return pa.array(rows, VECTOR)


LISTS = pa.list_(pa.float32())
FIXED = pa.list_(pa.float32(), 2)
NESTED = pa.list_(pa.list_(pa.int64()))
KINDS = {
    "decimal": (pa.array([Decimal("1.25"), Decimal("-3.50")], pa.decimal128(38, 2)), [1.25, -3.5], "float64"),
    "fixed array": (pa.array([[1, 2], [3, 4]], FIXED), [[1, 2], [3, 4]], "float32"),
    "empty arrays": (pa.array([[], []], LISTS), [[], []], "float32"),
    "nested": (pa.array([[[1, 2]], [[3, 4]]], NESTED), [[[1, 2]], [[3, 4]]], "int64"),
    "dense vectors": (vectors(dense(1, 2), dense(3, 4)), [[1, 2], [3, 4]], "float64"),
    "mixed vectors": (
        vectors(sparse(3, {0: 1}), dense(4, 5, 6), sparse(3, {1: 2, 2: 3}), sparse(3, {})),
        [[1, 0, 0], [4, 5, 6], [0, 2, 3], [0, 0, 0]],
        "float64",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_column_of_every_kind_becomes_an_array_and_null_rows_are_masked(kind):
    column, expected, dtype = KINDS[kind]
    values, good = read(column, "column 'c'")
    assert (good, values.dtype, values.shape) == (None, dtype, np.shape(expected))
    np.testing.assert_array_equal(values, expected)
    for rows in (slice(1), slice(1, None)):
        np.testing.assert_array_equal(read(column[rows], "column 'c'")[0], expected[rows])
    with_nulls = pa.array([None, *column.to_pylist(), None], column.type)
    values, good = read(with_nulls, "column 'c'")
    assert good.tolist() == [False, *[True] * len(expected), False]
    np.testing.assert_array_equal(values[good], expected)
    assert not values[~good].any()


def test_rows_with_nulls_inside_are_masked():
    column = pa.array([[[1, None], [3, 4]], [[5, 6], None], None, [[7, 8], [9, 1]]], NESTED)
    values, good = read(column, "column 'c'")
    assert good.tolist() == [False, False, False, True]
    assert values[3].tolist() == [[7, 8], [9, 1]]
    assert read(pa.array([[1.0, 2.0], None, [None, 4.0]], FIXED), "column 'c'")[1].tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("column", "shape", "words"),
    [
        (pa.array(["a"]), None, "type string.*StringIndexer"),
        (pa.array([{"a": 1}]), None, "type struct"),
        (pa.array([[1.0], [1.0, 2.0]]), None, r"\(1 and 2\).*PadSequences"),
        (vectors(dense(1, 2), sparse(3, {0: 1})), None, r"\(2 and 3\)"),
        (pa.array([None, "/photos/1.JPG"]), (4, 4, 3), r"paths of images.*image_loader"),
        (pa.array([b"1234"]), (None, 2), r"shape is \(None, 2\)"),
        (pa.array([b"12345"]), (2,), "5 bytes per row"),
        (pa.array([b"123456"]), (2,), "6 bytes per row"),  # 3 bytes per value
        (pa.array([b"12345678", b"1234"]), (2,), r"\(8 and 4\).*pass loader="),
    ],
)
def test_an_unsupported_column_is_named_in_the_error(column, shape, words):
    with pytest.raises(DataError, match=f"^column 'c' .*{words}"):
        read(column, "column 'c'", shape)


# Tensors


@pytest.mark.parametrize("dtype", ["float64", "float16", "uint8", "int32"])
@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary()], ids=str)
def test_bytes_are_read_as_tensors_of_the_models_shape(dtype, kind):
    tensors = np.arange(24).reshape(4, 2, 3).astype(dtype)
    column = pa.array([None, *(tensor.tobytes() for tensor in tensors)], kind)
    values, good = read(column, "column 'c'", (2, 3), floating=dtype != "int32")
    assert values.dtype == dtype
    assert good.tolist() == [False, True, True, True, True]
    np.testing.assert_array_equal(values[1:], tensors)
    np.testing.assert_array_equal(read(column[2:4], "column 'c'", (2, 3), floating=dtype != "int32")[0], tensors[1:3])


def test_encoded_images_need_a_loader():
    """JPEG, PNG, GIF, BMP, TIFF and WebP."""
    for head in b"\xff\xd8\xff\xe0", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"BM\x0c\0\0\0......", b"II*\0", b"RIFF0000WEBPVP8 ":
        images = pa.array([head, None, head + b"more"] if head[:2] != b"BM" else [head, b"BM"])
        with pytest.raises(DataError, match="^column 'c' .*pass loader=image_loader"):
            read(images, "column 'c'", (4, 4, 3))


def test_tensors_that_begin_like_an_image_are_tensors():
    tensor = np.frombuffer(b"\xff\xd8\xff", np.uint8)
    np.testing.assert_array_equal(read(pa.array([tensor.tobytes()]), "column 'c'", (3,), floating=True)[0], [tensor])


# Columns of one input


def test_columns_are_concatenated():
    leaf = Leaf(("age", "paid", "scores", "v"), together=True, input=InputSpec("x", (6,), floating=True))
    scores = pa.array([[0.5, 1.5], [2.5, 3.5]])
    found = leaf.read([pa.array([30, 40]), pa.array([True, False]), scores, vectors(dense(7, 8), dense(9, 1))])
    assert found.good is None
    assert [found.holding(position) for position in (0, 1, 3, 5)] == [f"column {name!r}" for name in leaf.columns]
    np.testing.assert_array_equal(found.values, [[30, 1, 0.5, 1.5, 7, 8], [40, 0, 2.5, 3.5, 9, 1]])


def test_an_array_column_of_nulls_only_does_not_affect_other_columns():
    """Their width is unknown, but follows from the widths of the input and of the other columns."""
    leaf = Leaf(("b", "a"), together=True, input=InputSpec("x", (3,), floating=True))
    for kind in (LISTS, VECTOR):
        found = leaf.read([pa.array([7.0, 8.0]), pa.nulls(2, kind)])
        np.testing.assert_array_equal(found.values, [[7, np.nan, np.nan], [8, np.nan, np.nan]])
        assert found.good.tolist() == [False, False]


def test_integers_get_the_dtype_of_the_input_with_and_without_nulls():
    for floating, dtype in ((True, "float32"), (False, "int32")):
        leaf = Leaf(("a", "b"), together=True, input=InputSpec("x", (2,), floating=floating))
        assert leaf.read([pa.array([1], pa.int32()), pa.array([2], pa.int16())]).values.dtype == dtype
    leaf = Leaf(("a",), input=InputSpec("x", (2,), floating=True))
    for rows in ([[True, False]] * 2, [[True, False], None]):
        assert leaf.read([pa.array(rows, pa.list_(pa.bool_()))]).values.dtype == np.float32


@pytest.mark.parametrize("shape", [(1,), (4,), (None, 2)], ids=str)
def test_a_batch_of_nulls_only_has_invalid_rows_of_the_right_shape(shape):
    spec = InputSpec("x", shape, floating=True)
    columns = [pa.nulls(2, kind) for kind in (LISTS, NESTED, VECTOR)] + [pa.array([[None], [None]], NESTED)]
    if shape == (1,):
        columns += [pa.nulls(2, kind) for kind in (pa.float64(), pa.int32(), pa.bool_())]
    for column in columns:
        found = Leaf(("a",), input=spec).read([column])
        assert found.good.tolist() == [False, False]
        assert len(found.values) == 2
        assert spec.takes(found.values.shape[1:])


def test_empty_arrays_are_not_nulls():
    with pytest.raises(DataError, match=r"shape \(0,\)"):
        Leaf(("a",), input=InputSpec("x", (3,))).read([pa.array([[], None], LISTS)])


def test_only_null_values_become_nan():
    leaf = Leaf(("a", "b", "c"), together=True, input=InputSpec("x", (4,), floating=True))
    lists = pa.array([[1, None], [2, 3], None, [4, 5], [6, 7]], pa.list_(pa.int8()))
    nan, found = np.nan, leaf.read([pa.array([1, None, 3, 4, 5]), lists, pa.array([True, True, True, None, False])])
    assert found.good.tolist() == [False, False, False, False, True]
    expected = [[1, 1, nan, 1], [nan, 2, 3, 1], [3, nan, nan, 1], [4, 4, 5, nan], [5, 6, 7, 0]]
    np.testing.assert_array_equal(found.values, expected)
    whole_numbers = Leaf(("a", "b"), together=True, input=InputSpec("x", (2,)))
    assert whole_numbers.read([pa.array([1, None]), pa.array([2, 3])]).values.tolist() == [[1, 2], [0, 3]]


def test_flat_rows_are_reshaped_for_the_input_if_its_shape_is_known():
    leaf = Leaf(("image",), input=InputSpec("x", (2, 3)))
    assert leaf.read([pa.array([list(range(6))] * 2)]).values.tolist() == [[[0, 1, 2], [3, 4, 5]]] * 2
    flat = [pa.array([[1.0, 2.0]])]
    with pytest.raises(DataError, match=r"'image' .*'pixels'.*\(None, 2\), .*\(2,\)"):
        Leaf(("image",), input=InputSpec("pixels", (None, 2))).read(flat)
    assert Leaf(("image",), input=InputSpec("pixels", (None, 2)), fits=False).read(flat).values.shape == (1, 2)


def test_nested_arrays_cannot_be_combined_with_other_columns():
    with pytest.raises(DataError, match=r"column 'b' .*\(1, 2\).*flatten"):
        Leaf(("a", "b"), together=True).read([pa.array([1.0]), pa.array([[[1.0, 2.0]]])])


@dataclass(frozen=True)
class Lengths:
    """Loads the length of a string; empty strings cannot be loaded. Its method `load` has another meaning."""

    shape: tuple[int, ...] = ()
    on_error: str = "null"
    load = None

    def __call__(self, column, name):
        lengths = np.array([len(text) for text in column.to_pylist()], np.float32)
        return lengths, lengths > 0


def test_a_loader_converts_any_column():
    leaf = Leaf(("text",), input=InputSpec("x", (1,)), loader=Lengths())
    found = leaf.read([pa.array(["abc", "", "a"])])
    assert found.values.tolist() == [3, 0, 1]
    assert (found.good.tolist(), found.may_lack) == ([True, False, True], True)


# Arrays to columns


@settings(deadline=None, max_examples=60)
@given(
    array=arrays.arrays(
        st.sampled_from(["bool", "uint8", "int16", "int64", "float16", "float64"]),
        arrays.array_shapes(max_dims=4, max_side=3),
    ),
    data=st.data(),
)
def test_an_array_survives_the_round_trip(array, data):
    good = np.array(data.draw(st.lists(st.booleans(), min_size=len(array), max_size=len(array))))
    column = to_column(array, good)
    column.validate(full=True)
    assert column.is_valid().to_pylist() == good.tolist()
    values, found = read(column, "column 'c'")
    np.testing.assert_array_equal(values[good], array[good] if good.any() else values[good])
    assert found is None if good.all() else found.tolist() == good.tolist()


@pytest.mark.parametrize(
    "array", [np.zeros((0, 3)), np.zeros((2, 0, 3)), np.asfortranarray(np.arange(12.0).reshape(2, 3, 2))]
)
def test_empty_arrays_and_those_of_any_memory_order_become_columns(array):
    assert to_column(array).to_pylist() == array.tolist()


@pytest.mark.parametrize(
    ("dtype", "stored", "name"),
    [("bfloat16", "float32", "float"), ("bool", "bool", "boolean"), ("uint8", "int16", "smallint")],
)
def test_every_dtype_has_a_spark_type(dtype, stored, name):
    assert stored_as(dtype) == stored
    assert type_name(stored, 0) == name
    assert type_name(stored, 2) == f"array<array<{name}>>"


def test_integers_that_spark_cannot_store_raise_an_error():
    assert to_column(np.array([2**63 - 1], np.uint64)).to_pylist() == [2**63 - 1]
    with pytest.raises(DataError, match="18446744073709551615.*bigint"):
        to_column(np.array([2**64 - 1], np.uint64))
