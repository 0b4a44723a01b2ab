"""Blocks: structures of features and labels, and rows as arrays."""

import datetime
from decimal import Decimal

import ml_dtypes
import numpy as np
import pytest

from sparkkeras.data.block import (
    Form,
    Structure,
    concatenate,
    describe,
    from_arrays,
    piece_rows,
)
from sparkkeras.errors import DataError

A, B = np.arange(6.0).reshape(3, 2), np.arange(3)
ONE, PAIR, NAMED = Structure(), Structure.several(2), Structure.named(("a", "b"))
NESTED, TUPLES = Structure((("a",), ("b", "c"), ("b", "d"))), Structure(((0,), (1, 0), (1, 1)))


def numbered(rows, width=2):
    """A block whose values encode the row index."""
    x = np.repeat(np.arange(rows, dtype=np.float32)[:, None], width, axis=1)
    return from_arrays(x, np.arange(rows), np.arange(rows, dtype=np.float32) / 2)


# Structures


@pytest.mark.parametrize(
    ("value", "expected", "structure"),
    [
        ([1.0, 2.0], 1, ONE),
        ([A, A], None, ONE),  # a list of arrays is a list of rows, unless the model has several inputs
        ([A, B], 2, PAIR),
        ([1.0, 2.0], 2, PAIR),  # one row of a model with two scalar inputs
        ({"a": A, "b": {"c": A, "d": B}}, None, NESTED),
        ({"a": A, "b": (A, B)}, None, Structure((("a",), ("b", 0), ("b", 1)))),
        ({"a": A, "b": (A, B)}, 2, NAMED),  # a model without nested inputs: two rows, or one row of a matrix
        ([A, [1.0, 2.0]], TUPLES, TUPLES),
        ((A, A, B), NESTED, Structure.several(3)),
    ],
)
def test_structures_are_inferred_from_values(value, expected, structure):
    assert Structure.of(value, expected) == structure


def test_nested_values_are_flattened_by_name_and_built():
    value = {"b": ({"y": 1, "x": 2}, 3), "a": 4}
    structure = Structure((("a",), ("b", 0, "x"), ("b", 0, "y"), ("b", 1)))
    assert structure.flatten(value) == [4, 2, 1, 3]
    assert structure.build([4, 2, 1, 3]) == value
    with pytest.raises(ValueError, match=r"\['x', 'y'\], received .* \['x'\]"):
        structure.flatten({"a": 1, "b": ({"x": 1}, 2)})
    with pytest.raises(ValueError, match="tuple of 2 values, received"):
        PAIR.flatten((1, 2, 3))


def test_the_keys_of_nested_values_may_be_names():
    value = {"b/d": 3, "a": 1, "b/c": 2}
    assert Structure.of(value, NESTED) == NESTED
    assert NESTED.flatten(value) == [1, 2, 3]
    block = from_arrays({name: np.full(2, each) for name, each in value.items()}, None, None).in_structure(NESTED)
    assert block.form.x == NESTED
    assert [array[0] for array in block.arrays] == [1, 2, 3]


# Blocks


def test_a_slice_is_a_view_and_an_index_array_makes_a_copy():
    block = numbered(10)
    view, copy = block[2:5], block[np.array([7, 1, 1])]
    assert view.y.tolist() == [2, 3, 4]
    assert copy.y.tolist() == copy.x[:, 0].tolist() == [7, 1, 1]
    assert np.shares_memory(view.x, block.x)
    assert not np.shares_memory(copy.x, block.x)


def test_pieces_are_whole_batches_of_bounded_size():
    block = numbered(23)  # 2 * 4 + 8 + 4 = 20 bytes per row
    pieces = list(block.pieces(100, multiple=2))
    assert [piece.rows for piece in pieces] == [4, 4, 4, 4, 4, 3]
    assert all(piece.nbytes <= 100 for piece in pieces)
    assert np.array_equal(concatenate(pieces).y, block.y)
    assert [piece.rows for piece in block.pieces(1, multiple=10)] == [10, 10, 3]
    assert piece_rows(0, 100, multiple=3) == 99  # rows without values


def test_with_floats_casts_only_floating_arrays():
    half = from_arrays((A, B), A.astype(np.float32), None).with_floats("bfloat16")
    assert [array.dtype for array in half.arrays] == [ml_dtypes.bfloat16, np.int64, ml_dtypes.bfloat16]
    assert [array.dtype.name for array in half.with_floats("float32").arrays] == ["float32", "int64", "float32"]


# Transforms


def test_a_transform_is_applied_to_batches_without_weights():
    seen = []

    def transform(x, y):
        seen.append(len(x))
        return x * 10 + len(seen), y + 1

    block = numbered(7).transformed(transform, 3)
    assert seen == [3, 3, 1]
    assert block.x[:, 0].tolist() == [1, 11, 21, 32, 42, 52, 63]
    assert block.y.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert block.sample_weight.tolist() == [0, 0.5, 1, 1.5, 2, 2.5, 3]


def test_a_transform_may_change_shapes_and_structures_and_return_lists():
    block = numbered(4).transformed(lambda x, y: ((x[:, :1], x[:, None]), {"out": y}), 2)
    assert block.form == Form(PAIR, Structure.named(("out",)), ONE)
    assert [array.shape for array in block.arrays] == [(4, 1), (4, 1, 2), (4,), (4,)]
    block = from_arrays((A, B), (B, A), None)
    assert block.transformed(lambda x, y: (list(x), list(y)), 2).form == block.form


def test_a_block_without_rows_is_not_transformed():
    empty = numbered(0)
    assert empty.transformed(lambda x, y: 1 / 0, 2) is empty


@pytest.mark.parametrize("transform", [lambda x, y: x + 1, lambda x, y: (x + 1, None)])
def test_in_prediction_a_transform_may_return_only_features(transform):
    block = from_arrays(A, None, None).transformed(transform, 2, to_predict=True)
    assert np.array_equal(block.x, A + 1)
    assert block.y is None


def test_in_prediction_two_inputs_are_not_mistaken_for_features_and_labels():
    block = from_arrays((A, B), None, None).transformed(lambda x, y: (x[0] + 1, x[1]), 2, to_predict=True)
    assert block.y is None
    assert np.array_equal(block.x[0], A + 1)
    assert np.array_equal(block.x[1], B)


def test_in_training_a_transform_makes_labels_and_may_drop_rows():
    block = from_arrays(A, None, None).transformed(lambda x, y: (x[1:] + 1, x[1:]), len(A))
    assert np.array_equal(block.x, A[1:] + 1)
    assert np.array_equal(block.y, A[1:])
    with pytest.raises(ValueError, match=r"must return \(x, y\)"):
        from_arrays(A, None, None).transformed(lambda x, y: x, 2)


def test_python_objects_that_a_transform_returns_are_converted():
    objects = np.array([[Decimal("0.5"), 2], [True, 1.5]], object)
    block = from_arrays(A[:2], B[:2], None).transformed(lambda x, y: (objects, y.astype(object)), 2)
    assert block.x.tolist() == [[0.5, 2.0], [1.0, 1.5]]
    assert block.y.dtype.kind == "i"


@pytest.mark.parametrize(("value", "words"), [(None, "missing"), ("a", "Encode text")])
def test_non_numeric_values_of_a_transform_raise_an_error(value, words):
    with pytest.raises(ValueError, match=f"transform .* x of row 1 .*{words}"):
        from_arrays(A[:2], None, None).transformed(lambda x, y: np.array([0.5, value], object), 2, to_predict=True)


# Messages


def of_module(name):
    """An object of a class DataFrame, whose representation and shape take a Spark job."""
    return type("DataFrame", (), {"__module__": name, "__repr__": None, "shape": property(None)})()


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (A, "(3, 2)"),
        ([], "empty list"),
        (dict, "class dict"),
        (len, "function len"),
        ((x for x in "ab"), "generator"),
        (object(), "class object"),
        (datetime.date(2024, 5, 1), "datetime.date(2024, 5, 1)"),
        (of_module("pyspark.pandas.frame"), "pandas-on-Spark"),
        (of_module("pyspark.sql.connect.dataframe"), "Spark DataFrame"),
        ("x" * 500, "..."),
    ],
)
def test_values_are_described_shortly_and_without_a_job(value, word):
    assert word in describe(value)
    assert len(describe(value)) < 70


@pytest.mark.parametrize(
    ("transform", "weight", "received"),
    [
        (lambda x, y: (x[::2], y), None, "x has 2, y has 4"),
        (lambda x, y: (x, y.sum()), None, "x has 4, y is a single value"),
        (lambda x, y: (x[1:], y[1:]), np.ones(4), "sample_weight has 4"),
    ],
)
def test_a_transform_that_returns_arrays_of_different_lengths_raises_an_error(transform, weight, received):
    rows = from_arrays(np.ones((4, 2), np.float32), np.ones(4, np.float32), weight)
    with pytest.raises(DataError, match=f"^transform .*{received}"):
        rows.transformed(transform, 4)
