"""Sparse matrices as rows: like the dense ones, without being dense anywhere but in pieces."""

import pickle

import numpy as np
import pytest
from scipy import sparse

from sparkkeras.data.block import Form, Structure, from_arrays
from sparkkeras.data.columns import Leaf, sparse_width, to_column
from sparkkeras.data.labels import LabelRange, label_ranges
from sparkkeras.data.reader import Reader
from sparkkeras.data.schema import InputSpec, Schema
from sparkkeras.data.sparse import SparseRows, with_sparse_rows
from sparkkeras.errors import DataError
from sparkkeras.sources import frame
from sparkkeras.sources.source import as_source

DENSE = np.array([[0, 1.5, 0, 2], [0, 0, 0, 0], [3, 0, 0, 0], [4, 5, 6, 7], [0, 0, -1, 0]])
SPARSE = SparseRows.of(sparse.csr_matrix(DENSE))
X = Schema((InputSpec("x", (4,), floating=True),))


def test_rows_are_selected_like_those_of_an_array():
    for rows in (slice(1, 4), slice(3, 1), slice(None, None, 2), np.array([3, 0, 3]), 2, -1):
        np.testing.assert_array_equal(np.asarray(SPARSE[rows]), DENSE[rows])
    np.testing.assert_array_equal(SPARSE[1:][1:3], DENSE[2:4])
    assert SPARSE[2:4].nbytes < SPARSE.nbytes
    assert len(pickle.dumps(SPARSE[:1])) < len(pickle.dumps(SPARSE))


def test_every_format_of_scipy_is_read_and_values_at_the_same_place_are_added():
    for make in (sparse.csr_array, sparse.csc_matrix, sparse.coo_array):
        np.testing.assert_array_equal(SparseRows.of(make(DENSE)), DENSE)
    matrix = sparse.csr_matrix((np.array([1.0, 2.0, 4.0]), np.array([1, 1, 0]), np.array([0, 3])), shape=(1, 2))
    assert np.asarray(SparseRows.of(matrix)).tolist() == [[4, 3]]
    assert matrix.nnz == 3


@pytest.mark.parametrize("matrix", [sparse.csr_matrix(DENSE * 1j), sparse.coo_array(np.ones(3))])
def test_other_sparse_arrays_raise_an_error(matrix):
    with pytest.raises(DataError, match="real numbers in two"):
        SparseRows.of(matrix)


def test_ranges_include_the_values_that_are_not_stored():
    for array in (DENSE, DENSE[3:4], np.abs(DENSE), -np.abs(DENSE)):
        block = from_arrays(np.ones(len(array)), with_sparse_rows(sparse.csr_matrix(array)), None)
        assert label_ranges(block) == (LabelRange.of(array),)


def test_sparse_features_and_labels_in_sources():
    block = as_source(sparse.csr_matrix(DENSE), Reader(X), sparse.csr_matrix(DENSE)).block
    assert block.is_sparse
    assert block.x.dtype == np.float32
    assert block.spec == as_source(DENSE, Reader(X), DENSE).block.spec
    np.testing.assert_array_equal(block.dense().arrays, [DENSE, DENSE])
    for piece, start in zip(block.dense_pieces(2 * block.row_bytes), (0, 2, 4), strict=True):
        assert not piece.is_sparse
        np.testing.assert_array_equal(piece.x, DENSE[start : start + 2])
    two = Schema((InputSpec("a", (4,)), InputSpec("b", (4,), floating=True)))
    given = {"a": DENSE.astype(int), "b": sparse.coo_array(DENSE.astype(int))}
    block = as_source(given, Reader(two, labelled=False), None).block
    assert [isinstance(array, SparseRows) for array in block.arrays] == [False, True]
    assert [array.dtype for array in block.arrays] == [int, np.float32]  # as the inputs of the model
    assert block[np.array([1, 2])].rows == 2


def test_values_that_are_not_finite_follow_on_invalid():
    damaged = DENSE.copy()
    damaged[0, 1], damaged[3, 2] = np.nan, np.inf
    given = sparse.csr_matrix(damaged), np.arange(5)
    with pytest.raises(DataError, match="^x .* row 0 of the"):
        as_source(given[0], Reader(X), given[1])
    kept = as_source(given[0], Reader(X, on_invalid="drop"), given[1]).block
    np.testing.assert_array_equal(kept.dense().x, DENSE[[1, 2, 4]])
    assert kept.y.tolist() == [1, 2, 4]
    np.testing.assert_array_equal(as_source(given[0], Reader(X, on_invalid="allow"), given[1]).block.dense().x, damaged)


def test_indices_out_of_range_are_found():
    indices = Schema((InputSpec("x", (4,), indices=6),))
    with pytest.raises(DataError, match="from -1 to 7"):
        as_source(sparse.csr_matrix(DENSE.astype(int)), Reader(indices, labelled=False))


def test_rows_of_rdds_may_be_sparse():
    reader = Reader(X)
    matrix = sparse.csr_matrix(DENSE)
    block = reader.read_rows([(matrix[row], row) for row in range(5)], reader.form_of((matrix[0], 0), 0), 0, 0)
    np.testing.assert_array_equal(block.x, DENSE)


def test_a_column_of_sparse_vectors_becomes_several_blocks(monkeypatch):
    column = to_column(SPARSE)
    assert (sparse_width(column), sparse_width(to_column(DENSE))) == (4, 0)
    np.testing.assert_array_equal(Leaf(("c",)).read([column[1:]]).values, DENSE[1:])
    monkeypatch.setattr(frame, "HELD_BYTES", 2 * 8 * 4)
    selection = frame.Selection(Reader(X, labelled=False), Form(Structure()), (Leaf(("c",), input=X.inputs[0]),))
    blocks = [block for block, _ in selection.blocks([column], "partition 0", 0)]
    assert [block.rows for block in blocks] == [2, 2, 1]
    np.testing.assert_array_equal(np.concatenate([block.x for block in blocks]), DENSE)
