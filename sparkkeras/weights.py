"""Conversion of lists of arrays to flat vectors, and weighted averages of these vectors.

Floating-point arrays (trainable weights, batch-norm statistics, optimizer moments) are stored in one vector, the trainable
weights first. Integer arrays (iterations, vocabulary sizes) are stored separately in ``integer_variables``: their mean has
no meaning, so an average takes the maximum.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def is_floating(dtype: Any) -> bool:
    """Whether a dtype is floating point, including those that NumPy itself does not define (bfloat16, float8)."""
    dtype = np.dtype(dtype)
    return bool(dtype.kind == "f" or dtype.name.startswith(("bfloat", "float8")))


@dataclass(frozen=True)
class Flat:
    """The values of a model's or an optimizer's variables, as one vector and the integer arrays.

    Attributes:
        vector: All floating-point arrays, concatenated. Shape (parameters,), float32, or float64 if any of them is float64.
        integer_variables: The arrays that are not floating point, unchanged.
    """

    vector: Array
    integer_variables: tuple[Array, ...] = ()

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return int(self.vector.nbytes) + sum(int(each.nbytes) for each in self.integer_variables)

    @property
    def checksum(self) -> int:
        """A CRC-32 of all values."""
        found = zlib.crc32(self.vector.tobytes())
        for each in self.integer_variables:
            found = zlib.crc32(each.tobytes(), found)
        return found

    def split(self, count: int) -> list[Flat]:
        """Split the vector into ``count`` chunks; the first one has the integer variables."""
        first, *rest = np.array_split(self.vector, count)
        return [Flat(first, self.integer_variables), *(Flat(chunk) for chunk in rest)]

    @classmethod
    def join(cls, chunks: Sequence[Flat]) -> Flat:
        """Join the chunks that `split` returned."""
        return cls(np.concatenate([chunk.vector for chunk in chunks]), chunks[0].integer_variables)


@dataclass(frozen=True)
class Layout:
    """The shapes and dtypes of a list of arrays, which convert it to a `Flat` and back.

    Attributes:
        shapes: The shape of each array.
        dtypes: The name of each array's dtype.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    @classmethod
    def of(cls, arrays: Sequence[Array]) -> Layout:
        """The layout of ``arrays``."""
        return cls(
            shapes=tuple(tuple(int(size) for size in array.shape) for array in arrays),
            dtypes=tuple(np.dtype(array.dtype).name for array in arrays),
        )

    def pack(self, arrays: Sequence[Array]) -> Flat:
        """Copy ``arrays`` into one vector."""
        floating = [array for array in arrays if is_floating(array.dtype)]
        integers = tuple(np.array(array) for array in arrays if not is_floating(array.dtype))
        wide = any(array.dtype == np.float64 for array in floating)
        vector = np.empty(sum(array.size for array in floating), np.float64 if wide else np.float32)
        start = 0
        for array in floating:
            vector[start : start + array.size] = array.reshape(-1)
            start += array.size
        return Flat(vector, integers)

    def unpack(self, flat: Flat) -> list[Array]:
        """Return the arrays in their original shapes and dtypes; those of the vector's dtype are views of it."""
        arrays: list[Array] = []
        start = 0
        integers = iter(flat.integer_variables)
        for shape, name in zip(self.shapes, self.dtypes, strict=True):
            dtype = np.dtype(name)
            if not is_floating(dtype):
                arrays.append(next(integers))
                continue
            size = int(np.prod(shape, dtype=np.int64))
            arrays.append(flat.vector[start : start + size].reshape(shape).astype(dtype, copy=False))
            start += size
        if start != flat.vector.size or next(integers, None) is not None:
            raise ValueError(f"a vector of {flat.vector.size} values does not fit a layout of {start} values")
        return arrays


def average(flats: Iterable[tuple[Flat, float]]) -> Flat:
    """The weighted mean of the vectors and the maximum of the integer variables.

    It is computed in float64, in the given order, as the first replica plus the mean of the differences from it: the same
    replicas give a bit-identical mean, and equal replicas give exactly these values.

    Args:
        flats: Pairs of a replica and its weight. At least one weight is positive.

    Raises:
        ValueError: There are no replicas, or no weight is positive.
    """
    first: Flat | None = None
    total: Array = np.empty(0)
    integers: tuple[Array, ...] = ()
    weight_sum = 0.0
    for flat, weight in flats:
        if first is None:
            first, total, integers = flat, np.zeros(flat.vector.shape, np.float64), flat.integer_variables
        else:
            total += weight * np.subtract(flat.vector, first.vector, dtype=np.float64)
            integers = tuple(np.maximum(mine, other) for mine, other in zip(integers, flat.integer_variables, strict=True))
        weight_sum += weight
    if first is None or weight_sum <= 0:
        raise ValueError("an average needs at least one replica with a positive weight")
    total /= weight_sum
    total += first.vector
    return Flat(total.astype(first.vector.dtype), integers)
