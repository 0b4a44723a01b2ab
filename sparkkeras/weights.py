"""A list of arrays as one flat vector, and the averages of such vectors.

What is trained and what is gathered (batch-norm statistics, optimizer moments) is floating point and lives in one
vector, the trainable part first. What counts (iterations, vocabulary sizes) stays apart in ``counters``: a mean of
counters means nothing, so of several the largest is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def is_floating(dtype: Any) -> bool:
    """Whether a dtype is a floating one, with the small kinds that NumPy itself does not know (bfloat16, float8)."""
    dtype = np.dtype(dtype)
    return bool(dtype.kind == "f" or dtype.name.startswith(("bfloat", "float8")))


@dataclass(frozen=True)
class Flat:
    """The arrays of one model or optimizer at one moment.

    Attributes:
        vector: All floating arrays, one after the other. Shape (parameters,), float32, or float64 if any of them is.
        counters: The arrays that are not floating point, as they are.
    """

    vector: Array
    counters: tuple[Array, ...] = ()

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return int(self.vector.nbytes) + sum(int(counter.nbytes) for counter in self.counters)

    def split(self, count: int) -> list[Flat]:
        """``count`` stretches of the vector; the counters go with the first."""
        first, *rest = np.array_split(self.vector, count)
        return [Flat(first, self.counters), *(Flat(stretch) for stretch in rest)]

    @classmethod
    def join(cls, stretches: Sequence[Flat]) -> Flat:
        """The stretches as one again."""
        return cls(np.concatenate([stretch.vector for stretch in stretches]), stretches[0].counters)


@dataclass(frozen=True)
class Layout:
    """Where each array of a list lies in a `Flat`.

    Attributes:
        shapes: The shape of each array.
        dtypes: The dtype name of each array.
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
        counters = tuple(np.array(array) for array in arrays if not is_floating(array.dtype))
        wide = any(array.dtype == np.float64 for array in floating)
        vector = np.empty(sum(array.size for array in floating), np.float64 if wide else np.float32)
        start = 0
        for array in floating:
            vector[start : start + array.size] = array.reshape(-1)
            start += array.size
        return Flat(vector, counters)

    def unpack(self, flat: Flat) -> list[Array]:
        """The arrays again, in their shapes and dtypes. Floating ones are views where the dtype allows it."""
        arrays: list[Array] = []
        start = 0
        counters = iter(flat.counters)
        for shape, name in zip(self.shapes, self.dtypes, strict=True):
            dtype = np.dtype(name)
            if not is_floating(dtype):
                arrays.append(next(counters))
                continue
            size = int(np.prod(shape, dtype=np.int64))
            arrays.append(flat.vector[start : start + size].reshape(shape).astype(dtype, copy=False))
            start += size
        if start != flat.vector.size or next(counters, None) is not None:
            raise ValueError(f"a vector of {flat.vector.size} values does not fit a layout of {start}")
        return arrays


def average(flats: Iterable[tuple[Flat, float]]) -> Flat:
    """The weighted mean of the vectors and the largest of the counters.

    Formed in float64 and in the order given, as the first replica plus the mean of the differences from it: the same
    replicas give the same mean to the last bit, and equal replicas give themselves.

    Args:
        flats: Pairs of a replica and its weight. At least one weight is positive.
    """
    first: Flat | None = None
    total: Array = np.empty(0)
    counters: tuple[Array, ...] = ()
    weight_sum = 0.0
    for flat, weight in flats:
        if first is None:
            first, total, counters = flat, np.zeros(flat.vector.shape, np.float64), flat.counters
        else:
            total += weight * np.subtract(flat.vector, first.vector, dtype=np.float64)
            counters = tuple(np.maximum(mine, other) for mine, other in zip(counters, flat.counters, strict=True))
        weight_sum += weight
    if first is None or weight_sum <= 0:
        raise ValueError("an average needs at least one replica with a positive weight")
    total /= weight_sum
    total += first.vector
    return Flat(total.astype(first.vector.dtype), counters)
