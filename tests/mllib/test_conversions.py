"""Conversions between arrays and MLlib's matrices and vectors."""

import pickle
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.ml import linalg as ml
from pyspark.mllib import linalg as mllib

from sparkkeras import ConfigurationError, DataError, encode_label, to_simple_rdd
from sparkkeras.mllib.conversions import from_matrix, from_vector, kind_of, to_matrix, to_vector

TABLE = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
SPARSE = np.array([[0.0, 7.0, 0.0], [8.0, 0.0, 9.0]])


def matrices(package):
    """``(matrix, equal array)`` for each kind of matrix in a package."""
    return {
        "dense": (package.DenseMatrix(2, 3, [1, 4, 2, 5, 3, 6]), TABLE),
        "transposed": (package.DenseMatrix(2, 3, [1, 2, 3, 4, 5, 6], True), TABLE),
        "sparse": (package.SparseMatrix(2, 3, [0, 1, 2, 3], [1, 0, 1], [8, 7, 9]), SPARSE),
        "sparse transposed": (package.SparseMatrix(2, 3, [0, 1, 3], [1, 0, 2], [7, 8, 9], True), SPARSE),
    }


@pytest.mark.parametrize("package", [mllib, ml], ids=["mllib", "ml"])
def test_every_kind_of_matrix_is_converted_to_an_array(package):
    for kind, (matrix, expected) in matrices(package).items():
        array = from_matrix(matrix)
        np.testing.assert_array_equal(array, expected, err_msg=kind)
        assert array.dtype == np.float64
        assert array.flags.c_contiguous
        assert kind_of(matrix) == "matrix"


@settings(max_examples=50, deadline=None)
@given(
    rows=st.integers(0, 5),
    columns=st.integers(0, 5),
    order=st.sampled_from("CF"),
    dtype=st.sampled_from(["float64", "float32", "int32", "uint8", "bool"]),
)
def test_a_round_trip_keeps_shape_and_values(rows, columns, order, dtype):
    array = np.asarray(np.arange(rows * columns).reshape(rows, columns).astype(dtype), order=order)
    np.testing.assert_array_equal(from_matrix(to_matrix(array)), array)
    np.testing.assert_array_equal(from_matrix(to_matrix(array[::-1])), array[::-1])
    for row in array:
        np.testing.assert_array_equal(from_vector(to_vector(row)), row)


@pytest.mark.parametrize("package", [mllib, ml], ids=["mllib", "ml"])
def test_every_kind_of_vector_is_converted_to_an_array(package):
    for vector in (package.DenseVector([0, 7, 0, 9]), package.SparseVector(4, {1: 7.0, 3: 9.0})):
        array = from_vector(vector)
        assert (array.tolist(), array.dtype, kind_of(vector)) == ([0, 7, 0, 9], np.float64, "vector")


@pytest.mark.parametrize("array", [TABLE.copy(), TABLE.copy(order="F")], ids=["C", "F"])
def test_conversions_copy_memory(array):
    """A backend may write into its input rows, and a user into predictions."""
    before, matrix, vector = array.copy(), to_matrix(array), to_vector(array[0])
    from_matrix(matrix)[:] = -1
    from_vector(vector)[:] = -1
    from_matrix(pickle.loads(pickle.dumps(matrix)))[:] = -1
    array[:] = -2
    np.testing.assert_array_equal(from_matrix(matrix), before)
    np.testing.assert_array_equal(from_vector(vector), before[0])


@pytest.mark.parametrize(
    ("convert", "value", "message"),
    [
        (to_matrix, TABLE[0], r"\(3,\): .*array\[None, :\]"),
        (to_matrix, np.zeros((4, 2, 3)), r"\(4, 2, 3\): .*array.reshape"),
        (to_matrix, 3.0, r"np.array\(\[\[value\]\]\)"),
        (to_matrix, [[1, 2], [3]], "row 1 has another"),
        (to_vector, TABLE, r"\(2, 3\): .*to_matrix"),
        (to_vector, [None, 1.0], "numbers or booleans"),
        (from_matrix, mllib.DenseVector([1.0]), "Matrix, received DenseVector"),
        (from_vector, to_matrix(TABLE), "Vector, received DenseMatrix"),
        (kind_of, TABLE, "Matrix .*SparkModel.predict"),
    ],
)
def test_values_that_cannot_be_converted_are_reported(convert, value, message):
    with pytest.raises(DataError, match=message):
        convert(value)


def test_labels_are_encoded_as_one_hot_rows():
    for label in (2, np.array([2.0]), Decimal(2)):
        assert encode_label(label, 3).tolist() == [0, 0, 1]
    for label, message in [
        (3, "from 0 to 2"),
        (-1, "out of range"),
        (0.5, "one whole"),
        ([1, 2], "one whole"),
        ("a", "whole"),
    ]:
        with pytest.raises(DataError, match=message):
            encode_label(label, 3)


def test_to_simple_rdd_without_a_spark_context_is_reported():
    with pytest.raises(ConfigurationError, match=r"^sc is .*to_simple_rdd\(sc, x, y\)"):
        to_simple_rdd(TABLE, np.ones(2))
