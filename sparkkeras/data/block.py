"""Blocks: consecutive rows as arrays, with the structure that the model takes them in.

A model takes one array, a tuple of arrays or a dict of arrays for its features, and likewise for its labels and sample
weights. A `Structure` says which of these it is; a `Form` says it for all three sides; a `Block` is a form with its
arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparkkeras.data.numeric import NotNumbersError, refuse_masked, to_numbers
from sparkkeras.data.numeric import describe as describe
from sparkkeras.errors import DataError
from sparkkeras.weights import Array, is_floating


@dataclass(frozen=True)
class Structure:
    """One array, a tuple of ``count`` arrays, or a dict of arrays by ``names``."""

    count: int = 1
    names: tuple[str, ...] | None = None
    bare: bool = True

    @classmethod
    def of(cls, value: Any, expected: int | None) -> Structure:
        """The structure of features, labels or weights, of one row or of many.

        Args:
            value: An array, a scalar, a list of numbers, a tuple or list of these, or a dict of them.
            expected: How many arrays the model takes on this side; ``None`` where it does not say (a subclassed model).
        """
        if isinstance(value, Mapping):
            if not all(isinstance(name, str) for name in value):
                raise ValueError(f"expected names as the keys of a dict, received {describe(value)}")
            return cls(len(value), tuple(value), bare=False)
        if isinstance(value, (tuple, list)):
            arrays = all(isinstance(part, np.ndarray) and part.ndim > 0 for part in value) and len(value) > 0
            if expected is None and isinstance(value, tuple) and arrays:
                return cls(len(value), bare=False)
            if expected == len(value) and (expected > 1 or arrays):
                return cls(len(value), bare=False)
        return cls()

    def flatten(self, value: Any) -> list[Any]:
        """The leaves of ``value``, which has this structure.

        Raises:
            ValueError: It has another structure.
        """
        if self.bare:
            return [value]
        if self.names is not None:
            if not isinstance(value, Mapping) or set(value) != set(self.names):
                raise ValueError(f"expected a dict with the keys {list(self.names)}, received {describe(value)}")
            return [value[name] for name in self.names]
        if not isinstance(value, (tuple, list)) or len(value) != self.count:
            raise ValueError(f"expected a tuple of {self.count}, received {describe(value)}")
        return list(value)

    def build(self, leaves: Sequence[Any]) -> Any:
        """The value again."""
        if self.bare:
            return leaves[0]
        if self.names is not None:
            return dict(zip(self.names, leaves, strict=True))
        return tuple(leaves)

    def labels(self, side: str) -> list[str]:
        """What the leaves are called in messages: ``x``, ``x[0]``, ``x['age']``."""
        if self.bare:
            return [side]
        if self.names is not None:
            return [f"{side}[{name!r}]" for name in self.names]
        return [f"{side}[{index}]" for index in range(self.count)]


@dataclass(frozen=True)
class Form:
    """The structures of features, labels and sample weights. ``None``: there are none."""

    x: Structure
    y: Structure | None = None
    weight: Structure | None = None

    @property
    def sides(self) -> list[tuple[str, Structure]]:
        """The sides that are there, in the order of their arrays."""
        named = [("x", self.x), ("y", self.y), ("sample_weight", self.weight)]
        return [(name, structure) for name, structure in named if structure is not None]

    @property
    def labels(self) -> list[str]:
        """What each array is called in messages."""
        return [label for side, structure in self.sides for label in structure.labels(side)]

    def span(self, side: str) -> slice:
        """Where the arrays of one side stand among all."""
        start = 0
        for name, structure in self.sides:
            if name == side:
                return slice(start, start + structure.count)
            start += structure.count
        return slice(start, start)


@dataclass(frozen=True)
class LeafSpec:
    """The shape of one row of an array, and its dtype name."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def row_bytes(self) -> int:
        """The bytes that one row takes."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class BlockSpec:
    """A form with the shape and dtype of each array."""

    form: Form
    leaves: tuple[LeafSpec, ...]

    @property
    def row_bytes(self) -> int:
        """The bytes that one row takes in all arrays."""
        return sum(leaf.row_bytes for leaf in self.leaves)

    def zeros(self, rows: int = 1) -> Block:
        """A block of zeros."""
        return Block(self.form, tuple(np.zeros((rows, *leaf.shape), leaf.dtype) for leaf in self.leaves))


@dataclass(frozen=True)
class Block:
    """Consecutive rows. Every array has the rows on its first axis."""

    form: Form
    arrays: tuple[Array, ...]

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return int(self.arrays[0].shape[0])

    @property
    def x(self) -> Any:
        """The features, in the structure that the model takes."""
        return self.form.x.build(self.arrays[self.form.span("x")])

    @property
    def y(self) -> Any:
        """The labels, or ``None``."""
        return None if self.form.y is None else self.form.y.build(self.arrays[self.form.span("y")])

    @property
    def sample_weight(self) -> Any:
        """The sample weights, or ``None``."""
        return None if self.form.weight is None else self.form.weight.build(self.arrays[self.form.span("sample_weight")])

    @property
    def spec(self) -> BlockSpec:
        """Form, shapes and dtypes."""
        leaves = tuple(LeafSpec(array.shape[1:], np.dtype(array.dtype).name) for array in self.arrays)
        return BlockSpec(self.form, leaves)

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays."""
        return sum(int(array.nbytes) for array in self.arrays)

    def __getitem__(self, rows: slice | Array) -> Block:
        """Some of the rows: a view for a slice, a copy for an array of row numbers."""
        if isinstance(rows, slice):
            return Block(self.form, tuple(array[rows] for array in self.arrays))
        # Not array[rows]: of a memory map that is a view of a copy, and no check shows that the memory is not shared.
        return Block(self.form, tuple(np.take(np.asarray(array), rows, axis=0) for array in self.arrays))

    def pieces(self, max_bytes: int, multiple: int = 1) -> Iterator[Block]:
        """The block in views of at most ``max_bytes`` (at least ``multiple`` rows), each a multiple of ``multiple``."""
        return self.batches(piece_rows(self.spec.row_bytes, max_bytes, multiple))

    def batches(self, rows: int) -> Iterator[Block]:
        """The block in views of ``rows`` rows; the last may be shorter."""
        for start in range(0, self.rows, rows):
            yield self[start : start + rows]

    def transformed(self, transform: Callable[[Any, Any], Any] | None, batch_size: int) -> Block:
        """The block after ``transform(x, y) -> (x, y)`` on each batch of ``batch_size`` rows; weights stay as they are."""
        if transform is None or self.rows == 0:
            return self
        return concatenate([_transform_batch(batch, transform) for batch in self.batches(batch_size)])

    def with_floats(self, dtype: str) -> Block:
        """The block with its floating arrays in one dtype."""
        return Block(self.form, tuple(a.astype(dtype, copy=False) if is_floating(a.dtype) else a for a in self.arrays))


def piece_rows(row_bytes: int, max_bytes: int, multiple: int = 1) -> int:
    """How many rows fit ``max_bytes``, as a multiple of ``multiple`` and at least that."""
    return max(1, max_bytes // max(1, row_bytes) // multiple) * multiple


def concatenate(blocks: Sequence[Block]) -> Block:
    """Several blocks of one form as one."""
    if len(blocks) == 1:
        return blocks[0]
    columns = zip(*(block.arrays for block in blocks), strict=True)
    return Block(blocks[0].form, tuple(np.concatenate(column) for column in columns))


def changed(before: BlockSpec, after: BlockSpec) -> str:
    """How two specs differ, and what to do about it, for messages."""
    if before.form != after.form:
        return f"the structure changes from {before.form.labels} to {after.form.labels}: every row must have the same."
    for label, one, two in zip(before.form.labels, before.leaves, after.leaves, strict=True):
        if one != two:
            return (
                f"{label} changes from shape {one.shape}, {one.dtype} to shape {two.shape}, {two.dtype}: every row must "
                "have the same shape and type. Convert it, for instance with float() or numpy.asarray(..., dtype)."
            )
    return "they are the same."


def _transform_batch(batch: Block, transform: Callable[[Any, Any], Any]) -> Block:
    given = transform(batch.x, batch.y)
    if batch.y is None and not (isinstance(given, tuple) and len(given) == 2 and given[1] is None):
        given = (given, None)
    if not isinstance(given, tuple) or len(given) != 2:
        raise ValueError(f"transform must return (x, y); it returned {describe(given)}")
    x, y = given
    if x is None or (y is None and batch.y is not None):
        raise ValueError(f"transform must return (x, y); its {'x' if x is None else 'y'} is None")
    made = from_arrays(x, y, batch.sample_weight, expected_x=batch.form.x.count if not batch.form.x.bare else None)
    block = Block(made.form, tuple(map(_returned_numbers, made.form.labels, made.arrays)))
    counts = {label: len(array) if array.ndim else None for label, array in zip(made.form.labels, block.arrays, strict=True)}
    if None in counts.values() or len(set(counts.values())) > 1:
        received = ", ".join(
            f"{label} is a single value" if rows is None else f"{label} has {rows}" for label, rows in counts.items()
        )
        kept = "" if batch.form.weight is None else " Sample weights are not transformed, so no rows can be left out."
        raise DataError(
            f"transform must return arrays with the same number of rows; for a batch of {batch.rows} rows, {received}.{kept}"
        )
    if batch.y is None and block.rows != batch.rows:
        raise DataError(
            f"transform gave {block.rows} rows for a batch of {batch.rows}: to predict, it must return a row for each, in "
            "their order."
        )
    return block


def _returned_numbers(label: str, array: Array) -> Array:
    """What a transform returned as an array of numbers: Python objects are converted, as in the data of `fit`."""
    try:
        values, missing = to_numbers(array)
    except NotNumbersError as error:
        where = "" if error.row is None else f" of row {error.row} of the batch"
        raise ValueError(f"transform must return arrays of numbers; {label}{where} {error}") from error
    if missing is not None:
        row = int(np.argmax(missing.reshape(len(missing), -1).any(axis=1))) if missing.ndim else 0
        raise ValueError(f"transform must return arrays of numbers; {label} of row {row} of the batch is or holds None")
    return values


def from_arrays(x: Any, y: Any, sample_weight: Any, expected_x: int | None = None, expected_y: int | None = None) -> Block:
    """A block of arrays that have the rows on their first axis; structures are read off the values.

    A list of arrays counts as a tuple of them: several inputs, outputs or weights.
    """
    x, y, sample_weight = (_tupled(side) for side in (x, y, sample_weight))
    form = Form(
        Structure.of(x, expected_x),
        None if y is None else Structure.of(y, expected_y),
        None if sample_weight is None else Structure.of(sample_weight, expected_y),
    )
    values = [value for value in (x, y, sample_weight) if value is not None]
    leaves = [leaf for (_, structure), value in zip(form.sides, values, strict=True) for leaf in structure.flatten(value)]
    for label, leaf in zip(form.labels, leaves, strict=True):
        try:
            refuse_masked(leaf)
        except NotNumbersError as error:
            raise DataError(f"{label} {error}") from error
    return Block(form, tuple(map(np.asarray, leaves)))


def _tupled(value: Any) -> Any:
    several = isinstance(value, list) and value and all(isinstance(part, np.ndarray) and part.ndim for part in value)
    return tuple(value) if several else value
