"""Sparse matrices of SciPy as rows. They are sent in their compressed form, and made dense piece by piece on the workers.

Files have dense rows, which all have one size, so that any can be read from a memory map without an index.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sparkkeras.errors import DataError
from sparkkeras.weights import Array


@dataclass(frozen=True, eq=False)
class SparseRows:
    """Rows with few values that are not zero, in the representation of SciPy's csr matrices. It needs no SciPy.

    ``numpy.asarray`` gives the dense rows: use it only for a few of them, such as a piece of a block.

    Attributes:
        starts: Where each row begins in the other arrays, and where the last one ends, shape (rows + 1,).
        columns: The column of each stored value.
        values: The stored values. The values of a row have different columns.
        width: The number of columns.
    """

    starts: Array
    columns: Array
    values: Array
    width: int

    ndim = 2

    @classmethod
    def of(cls, matrix: Any) -> SparseRows:
        """The rows of a sparse matrix or array of SciPy, in any format.

        Raises:
            DataError: It does not have two axes, or its values are not numbers.
        """
        if len(matrix.shape) != 2 or matrix.dtype.kind not in "fiub":
            raise DataError(
                f"a sparse array of shape {matrix.shape} and dtype {matrix.dtype}: expected real numbers in two axes, "
                "(rows, columns). Use its real and imaginary parts, or an array (toarray)."
            )
        rows = matrix.tocsr()
        if not rows.has_canonical_format:
            rows = rows.copy()
            rows.sum_duplicates()
        return cls(rows.indptr, rows.indices, rows.data, int(rows.shape[1]))

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)."""
        return len(self.starts) - 1, self.width

    @property
    def size(self) -> int:
        """The number of values with the zeros that are not stored."""
        return len(self) * self.width

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values."""
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        """The size in memory in bytes."""
        return int(self.starts.nbytes + self.columns.nbytes + self.values.nbytes)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, rows: slice | Array | int) -> Any:
        """Select rows: a view for a slice of consecutive rows, a copy for indices, a dense array for a single index."""
        if isinstance(rows, (int, np.integer)):
            return np.asarray(self[np.array([rows])])[0]
        if isinstance(rows, slice):
            start, stop, step = rows.indices(len(self))
            if step == 1:
                inner = slice(*self.starts[[start, max(start, stop)]])
                starts = self.starts[start : max(start, stop) + 1] - inner.start
                return replace(self, starts=starts, columns=self.columns[inner], values=self.values[inner])
            rows = np.arange(start, stop, step)
        lengths = np.diff(self.starts)[rows]
        starts = np.concatenate([[0], np.cumsum(lengths)])
        chosen = np.arange(starts[-1]) + np.repeat(self.starts[:-1][rows] - starts[:-1], lengths)
        return replace(self, starts=starts, columns=self.columns[chosen], values=self.values[chosen])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """The dense rows."""
        dense = np.zeros(self.shape, dtype or self.dtype)
        dense[np.repeat(np.arange(len(self)), np.diff(self.starts)), self.columns] = self.values
        return dense

    @property
    def finite(self) -> Array:
        """A mask of the rows without NaN and infinite values."""
        finite = np.ones(len(self), bool)
        finite[np.repeat(np.arange(len(self)), np.diff(self.starts))[~np.isfinite(self.values)]] = False
        return finite

    def astype(self, dtype: Any, copy: bool = True) -> SparseRows:
        """Cast the values."""
        return replace(self, values=self.values.astype(dtype, copy=copy))

    def min(self) -> Any:
        """The smallest value, of at least one."""
        return min(self.values.min(initial=0), 0) if len(self.values) < self.size else self.values.min()

    def max(self) -> Any:
        """The largest value, of at least one."""
        return max(self.values.max(initial=0), 0) if len(self.values) < self.size else self.values.max()


def with_sparse_rows(value: Any) -> Any:
    """Convert the sparse matrices in an array, or in a tuple, list or dict of arrays; other values remain the same.

    Raises:
        DataError: See `SparseRows.of`.
    """
    if isinstance(value, Mapping) and any(map(is_sparse, value.values())):
        return {name: with_sparse_rows(each) for name, each in value.items()}
    if isinstance(value, (tuple, list)) and any(map(is_sparse, value)):
        return tuple(map(with_sparse_rows, value))
    return SparseRows.of(value) if is_sparse(value) else value


def dense_row(value: Any) -> Any:
    """A row in which vectors of Spark, and sparse arrays of SciPy with one row, are arrays."""
    if hasattr(value, "toArray"):
        return value.toArray()
    if not is_sparse(value):
        return value
    dense = value.toarray()
    return dense[0] if dense.ndim == 2 and len(dense) == 1 else dense


def is_sparse(value: Any) -> bool:
    """Whether a value is a sparse matrix or array of SciPy."""
    return type(value).__module__.startswith("scipy.sparse") and hasattr(value, "tocsr")
