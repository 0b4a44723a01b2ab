"""Blocks: consecutive rows as arrays, in the structure that the model expects.

Features, labels and sample weights are each one array, or a tuple or dict of arrays, of tuples or of dicts. A `Structure`
describes one of the three, a `Form` all three, and a `Block` is a form with its arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from sparkkeras.data.numeric import UnfitValuesError, reject_masked, to_numbers
from sparkkeras.data.numeric import describe as describe
from sparkkeras.data.sparse import SparseRows
from sparkkeras.data.text import STRING, Text, empty_strings, holds_text, to_text
from sparkkeras.data.text import concatenate as concatenate_arrays
from sparkkeras.errors import ConfigurationError, DataError, counted
from sparkkeras.weights import Array, is_floating

Path = tuple[str | int, ...]
"""Where an array is: the keys of dicts and the indices of tuples around it, from the outside in."""


@dataclass(frozen=True)
class Structure:
    """One array, or dicts and tuples of arrays, also nested, as the paths of the arrays in their order.

    The only array has the path ``()``; ``(("a",), ("b", 0), ("b", 1))`` is ``{"a": ..., "b": (..., ...)}``.
    """

    paths: tuple[Path, ...] = ((),)

    @classmethod
    def named(cls, names: Iterable[str]) -> Structure:
        """A dict of arrays."""
        return cls(tuple((name,) for name in names))

    @classmethod
    def several(cls, count: int) -> Structure:
        """A tuple of arrays."""
        return cls(tuple((index,) for index in range(count)))

    @classmethod
    def of(cls, value: Any, expected: int | Structure | None) -> Structure:
        """Infer the structure of features, labels or weights, of one row or of many.

        Args:
            value: An array, a scalar, a list of numbers, a tuple or list of these, or a dict of them; also nested.
            expected: The number of arrays that the model expects here, or their structure; ``None`` if unknown (a
                subclassed model).

        Raises:
            ValueError: A dict has keys that are not strings.
        """
        if isinstance(value, Mapping) and not value:
            raise ValueError("expected an array, or a dict or tuple of arrays, received an empty dict")
        found = cls(tuple(path for path, _ in items_by_path(value, cls() if isinstance(expected, int) else expected)))
        count = expected.count if isinstance(expected, Structure) else expected
        if found.bare and isinstance(value, (tuple, list)) and count == len(value):
            return cls.several(count) if count > 1 or _are_arrays(tuple(value)) else found
        if isinstance(expected, Structure) and expected.is_nested and set(found.names or ()) == set(expected.names or ()):
            return expected  # the keys may be names: {"a": ..., "b/c": ..., "b/d": ...}
        return found

    @property
    def count(self) -> int:
        """The number of arrays."""
        return len(self.paths)

    @property
    def bare(self) -> bool:
        """Whether there is one array, in no dict or tuple."""
        return self.paths == ((),)

    @property
    def is_nested(self) -> bool:
        """Whether there are dicts or tuples in others."""
        return any(len(path) > 1 for path in self.paths)

    @property
    def names(self) -> tuple[str, ...] | None:
        """The names of the arrays, such as ``age``, or ``b/0`` for those in others; ``None`` for one array, or a tuple."""
        return tuple(map(name_of, self.paths)) if self.is_nested or self._is_dict else None

    @property
    def _is_dict(self) -> bool:
        return isinstance(next(iter(self.parts), None), str)

    @cached_property
    def parts(self) -> dict[str | int, Structure]:
        """The structures in the outermost dict or tuple, by key or index; empty for one array."""
        found: dict[str | int, list[Path]] = {}
        for path in self.paths:
            if path:
                found.setdefault(path[0], []).append(path[1:])
        return {key: Structure(tuple(paths)) for key, paths in found.items()}

    def flatten(self, value: Any) -> list[Any]:
        """The arrays of ``value`` as a list.

        Raises:
            ValueError: ``value`` does not have this structure.
        """
        if self.bare:
            return [value]
        parts = self.parts
        names = list(map(name_of, self.paths))
        if self.is_nested and isinstance(value, Mapping) and set(value) == set(names):
            return [value[name] for name in names]
        if self._is_dict:
            if not isinstance(value, Mapping) or set(value) != set(parts):
                raise ValueError(f"expected a dict with the keys {list(parts)}, received {describe(value)}")
        elif not isinstance(value, (tuple, list)) or len(value) != len(parts):
            raise ValueError(f"expected a tuple of {counted(len(parts), 'value')}, received {describe(value)}")
        return [leaf for key, part in parts.items() for leaf in part.flatten(value[key])]

    def build(self, leaves: Sequence[Any]) -> Any:
        """The inverse of `flatten`."""
        if self.bare:
            return leaves[0]
        remaining = iter(leaves)
        built = {key: part.build(list(islice(remaining, part.count))) for key, part in self.parts.items()}
        return built if self._is_dict else tuple(built.values())

    def shown(self, leaf: str = "array") -> str:
        """The structure in messages: ``{'a': array, 'b': {'c': array, 'd': array}}``."""
        if self.bare:
            return leaf
        parts = [(f"{key!r}: " if self._is_dict else "") + part.shown(leaf) for key, part in self.parts.items()]
        if self._is_dict:
            return f"{{{', '.join(parts)}}}"
        return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"

    def labels(self, side: str) -> list[str]:
        """The names of the arrays in messages: ``x``, ``x[0]``, ``x['age']``, ``x['b']['c']``."""
        return [side + "".join(f"[{key!r}]" for key in path) for path in self.paths]


def items_by_path(value: Any, expected: Structure | None) -> Iterator[tuple[Path, Any]]:
    """The parts of nested dicts with their paths, and those of tuples where the expected structure has one, too.

    Args:
        value: A dict, a tuple, or something else.
        expected: The expected structure; ``None`` if it is unknown: then tuples of arrays in others have parts.

    Raises:
        ValueError: A dict has keys that are not strings.
    """
    known = {} if expected is None else expected.parts
    if isinstance(value, Mapping):
        if not all(isinstance(name, str) for name in value):
            raise ValueError(f"expected a dict with strings as keys, received {describe(value)}")
        parts: Iterable[tuple[str | int, Any]] = value.items()
    elif (
        _are_arrays(value)
        if expected is None
        else isinstance(value, (tuple, list)) and list(known) == list(range(len(value)))
    ):
        parts = enumerate(value)
    else:
        yield (), value
        return
    for key, part in parts:
        inner = None if expected is None else known.get(key, Structure())
        yield from (((key, *path), each) for path, each in items_by_path(part, inner))


def by_name(value: Mapping[str, Any], expected: Structure | None = None) -> dict[str, Any]:
    """The values in a dict, perhaps of dicts, by names as those of `Structure.names`; see `items_by_path`.

    Raises:
        ConfigurationError: A dict has keys that are not strings.
    """
    try:
        return {name_of(path): each for path, each in items_by_path(value, expected or Structure())}
    except ValueError as error:
        raise ConfigurationError(f"{error}.") from error


def name_of(path: Path) -> str:
    """The name of an array; see `Structure.names`."""
    return "/".join(map(str, path))


def in_column_name(name: str) -> str:
    """A name of `Structure.names` as a part of the name of a column."""
    return name.replace("/", "_")


def in_field(name: str) -> str:
    """A name of `Structure.names` as the name of a field in a struct: ``b.c`` for ``b/c``."""
    return name.replace("/", ".")


def _are_arrays(value: Any) -> bool:
    """Whether a value is a tuple of arrays, of tuples of these, or of dicts."""
    if not isinstance(value, tuple) or not value:
        return False
    arrays = (np.ndarray, SparseRows)
    return all(
        part.ndim > 0 if isinstance(part, arrays) else isinstance(part, Mapping) or _are_arrays(part) for part in value
    )


@dataclass(frozen=True)
class Form:
    """The structures of features, labels and sample weights; ``None`` for labels or weights that are absent."""

    x: Structure
    y: Structure | None = None
    weight: Structure | None = None

    @classmethod
    def of(cls, x: Any, y: Any, weight: Any, expected_x: int | Structure | None, expected_y: int | Structure | None) -> Form:
        """The form of features, labels and sample weights; see `Structure.of`."""
        others = (None if side is None else Structure.of(side, expected_y) for side in (y, weight))
        return cls(Structure.of(x, expected_x), *others)

    def flatten(self, x: Any, y: Any, weight: Any) -> list[Any]:
        """The arrays of features, labels and sample weights that are present; see `Structure.flatten`."""
        sides = zip((self.x, self.y, self.weight), (x, y, weight), strict=True)
        return [leaf for structure, value in sides if structure is not None for leaf in structure.flatten(value)]

    @property
    def sides(self) -> list[tuple[str, Structure]]:
        """The names and structures that are present, in the order of their arrays."""
        named = [("x", self.x), ("y", self.y), ("sample_weight", self.weight)]
        return [(name, structure) for name, structure in named if structure is not None]

    @property
    def labels(self) -> list[str]:
        """The name of each array in messages."""
        return [label for side, structure in self.sides for label in structure.labels(side)]

    def span(self, side: str) -> slice:
        """The positions of the arrays of ``"x"``, ``"y"`` or ``"sample_weight"`` among all arrays."""
        start = 0
        for name, structure in self.sides:
            if name == side:
                return slice(start, start + structure.count)
            start += structure.count
        return slice(start, start)


@dataclass(frozen=True)
class LeafSpec:
    """The shape of one row of an array, and the name of its dtype: one of NumPy's, or ``"string"``."""

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, array: Array) -> LeafSpec:
        """The spec of an array."""
        return cls(array.shape[1:], STRING if array.dtype == object else np.dtype(array.dtype).name)

    @property
    def is_text(self) -> bool:
        """Whether the values are strings."""
        return self.dtype == STRING

    @property
    def row_bytes(self) -> int:
        """The size of one row in bytes; of strings, which differ in length, that of their offsets."""
        item = 8 if self.is_text else np.dtype(self.dtype).itemsize
        return math.prod(self.shape) * item

    def zeros(self, rows: int) -> Array:
        """An array of zeros, or of empty strings."""
        shape = (rows, *self.shape)
        return empty_strings(shape) if self.is_text else np.zeros(shape, self.dtype)


@dataclass(frozen=True)
class BlockSpec:
    """A form with the shape and dtype of each array."""

    form: Form
    leaves: tuple[LeafSpec, ...]

    @property
    def row_bytes(self) -> int:
        """The size of one row of all arrays in bytes; see `LeafSpec.row_bytes`."""
        return sum(leaf.row_bytes for leaf in self.leaves)

    @property
    def ranks(self) -> tuple[str, str]:
        """The number of axes of each array of features, and of each other array, as keys for models."""
        ranks, features = [len(leaf.shape) for leaf in self.leaves], self.form.x.count
        return repr(ranks[:features]), repr(ranks[features:])

    def zeros(self, rows: int = 1) -> Block:
        """A block of zeros, with empty strings."""
        return Block(self.form, tuple(leaf.zeros(rows) for leaf in self.leaves))


@dataclass(frozen=True)
class Block:
    """Consecutive rows. The first axis of every array is the row axis.

    Strings are in the arrays as `Text`; `x` and `y` return them as arrays of ``str`` objects. On the way to the workers,
    arrays may be `SparseRows`; blocks that a task receives are dense.
    """

    form: Form
    arrays: tuple[Array, ...]

    @property
    def rows(self) -> int:
        """The number of rows."""
        return int(self.arrays[0].shape[0])

    @property
    def x(self) -> Any:
        """The features, in the structure that the model expects."""
        return self._built("x", self.form.x)

    @property
    def y(self) -> Any:
        """The labels, or ``None``."""
        return self._built("y", self.form.y)

    @property
    def sample_weight(self) -> Any:
        """The sample weights, or ``None``."""
        return self._built("sample_weight", self.form.weight)

    def _built(self, side: str, structure: Structure | None) -> Any:
        arrays = [np.asarray(array) if isinstance(array, Text) else array for array in self.arrays[self.form.span(side)]]
        return None if structure is None else structure.build(arrays)

    @property
    def spec(self) -> BlockSpec:
        """The form, with the shape of a row and the dtype of each array."""
        return BlockSpec(self.form, tuple(map(LeafSpec.of, self.arrays)))

    @property
    def nbytes(self) -> int:
        """The size of all arrays in bytes."""
        return sum(int(array.nbytes) for array in self.arrays)

    @property
    def row_bytes(self) -> int:
        """The size of one dense row of all arrays in bytes; with strings, the mean, rounded up."""
        return max(self.spec.row_bytes, -(-self.nbytes // max(1, self.rows)))

    def __getitem__(self, rows: slice | Array) -> Block:
        """Select rows: a view for a slice, a copy for an array of row indices."""
        if isinstance(rows, slice):
            return Block(self.form, tuple(array[rows] for array in self.arrays))
        # Not array[rows]: for a memory map this returns a view of a copy, which looks as if it shared the file's memory.
        return Block(
            self.form,
            tuple(
                a[rows] if isinstance(a, (Text, SparseRows)) else np.take(np.asarray(a), rows, axis=0) for a in self.arrays
            ),
        )

    @property
    def is_sparse(self) -> bool:
        """Whether there are sparse arrays."""
        return any(isinstance(array, SparseRows) for array in self.arrays)

    def dense(self) -> Block:
        """The block with dense arrays."""
        return Block(self.form, tuple(np.asarray(a) if isinstance(a, SparseRows) else a for a in self.arrays))

    def dense_pieces(self, max_bytes: int) -> Iterator[Block]:
        """The rows with dense arrays: the block itself, or if it is sparse, pieces of at most ``max_bytes`` each."""
        return (piece.dense() for piece in self.pieces(max_bytes)) if self.is_sparse else iter((self,))

    def pieces(self, max_bytes: int, multiple: int = 1) -> Iterator[Block]:
        """Views of the block of at most ``max_bytes`` each. Their rows are a multiple of ``multiple``, and at least that."""
        return self.batches(piece_rows(self.row_bytes, max_bytes, multiple))

    def batches(self, rows: int) -> Iterator[Block]:
        """Views of the block of ``rows`` rows each; the last one may be shorter."""
        for start in range(0, self.rows, rows):
            yield self[start : start + rows]

    def transformed(self, transform: Callable[[Any, Any], Any] | None, batch_size: int, to_predict: bool = False) -> Block:
        """Apply ``transform(x, y) -> (x, y)`` to each batch of ``batch_size`` rows. Sample weights are not transformed.

        Args:
            transform: The transform; ``None``: none. It may make labels for rows that have none.
            batch_size: The number of rows in a batch.
            to_predict: Whether the rows are features to predict. Then the transform may return ``x`` alone, and must return
                one row for each row.

        Raises:
            ValueError: The transform does not return a pair of arrays of numbers, or of strings as features.
            DataError: The returned arrays differ in their number of rows or, in prediction, do not match the batch's.
        """
        if transform is None or self.rows == 0:
            return self
        return concatenate([_transform_batch(batch, transform, to_predict) for batch in self.batches(batch_size)])

    def in_structure(self, structure: Structure | None) -> Block:
        """Features given as a tuple, or by names, get another structure of as many arrays; others stay as they are."""
        x = self.form.x
        if structure is None or x.count != structure.count:
            return self
        if x.names is None:
            return Block(replace(self.form, x=structure), self.arrays)
        if set(x.names) != set(structure.names or ()) or set(x.paths) == set(structure.paths):
            return self
        of_names = dict(zip(x.names, self.arrays, strict=False))
        arrays = (*(of_names[name] for name in structure.names or ()), *self.arrays[x.count :])
        return Block(replace(self.form, x=structure), arrays)

    def with_floats(self, dtype: str) -> Block:
        """Cast all floating-point arrays to one dtype."""
        return Block(self.form, tuple(a.astype(dtype, copy=False) if is_floating(a.dtype) else a for a in self.arrays))


def piece_rows(row_bytes: int, max_bytes: int, multiple: int = 1) -> int:
    """The number of rows that fit into ``max_bytes``, rounded down to a multiple of ``multiple``, but at least that."""
    return max(1, max_bytes // max(1, row_bytes) // multiple) * multiple


def concatenate(blocks: Sequence[Block]) -> Block:
    """Concatenate blocks of the same form."""
    if len(blocks) == 1:
        return blocks[0]
    columns = zip(*(block.arrays for block in blocks), strict=True)
    return Block(blocks[0].form, tuple(map(concatenate_arrays, columns)))


def concatenate_alike(blocks: Iterable[Block]) -> Block | None:
    """Concatenate blocks; ``None`` if there are none.

    Raises:
        DataError: The blocks differ in structure, shape or dtype.
    """
    read: list[Block] = []
    for block in blocks:
        if read and block.spec != read[0].spec:
            raise DataError(changed(read[0].spec, block.spec))
        read.append(block)
    return concatenate(read) if read else None


def changed(before: BlockSpec, after: BlockSpec) -> str:
    """Describe for a message how two specs differ and how to fix it."""
    if before.form != after.form:
        return (
            f"the structure changes from {before.form.labels} to {after.form.labels}: all rows must have the same structure."
        )
    for label, one, two in zip(before.form.labels, before.leaves, after.leaves, strict=True):
        if one != two:
            dtypes = ("", "") if one.dtype == two.dtype else (f", {one.dtype}", f", {two.dtype}")
            return (
                f"{label} changes from shape {one.shape}{dtypes[0]} to shape {two.shape}{dtypes[1]}: every row must "
                "have the same shape and dtype. "
                + (
                    "Convert it, for instance with float() or numpy.asarray(..., dtype)."
                    if one.shape == two.shape
                    else "Pad sequences of different lengths with loader=PadSequences(maxlen)."
                )
            )
    return "they are the same."


def _transform_batch(batch: Block, transform: Callable[[Any, Any], Any], to_predict: bool) -> Block:
    given = transform(batch.x, batch.y)
    is_pair = isinstance(given, tuple) and len(given) == 2
    if to_predict and not (is_pair and given[1] is None):
        given = (given, None)
    elif not is_pair:
        without = "" if batch.y is not None else "; return (x, None) to train without labels"
        raise ValueError(f"transform must return (x, y); it returned {describe(given)}{without}")
    x, y = given
    if x is None or (y is None and batch.y is not None):
        raise ValueError(f"transform must return (x, y); its {'x' if x is None else 'y'} is None")
    expected_x, expected_y = (None if side is None or side.bare else side for side in (batch.form.x, batch.form.y))
    made = from_arrays(x, y, batch.sample_weight, expected_x, expected_y)
    features = made.form.x.count
    returned = enumerate(zip(made.form.labels, made.arrays, strict=True))
    block = Block(made.form, tuple(_returned(label, array, index < features) for index, (label, array) in returned))
    counts = {label: len(array) if array.ndim else None for label, array in zip(made.form.labels, block.arrays, strict=True)}
    if None in counts.values() or len(set(counts.values())) > 1:
        received = ", ".join(
            f"{label} is a single value" if rows is None else f"{label} has {rows}" for label, rows in counts.items()
        )
        kept = "" if batch.form.weight is None else " Sample weights are not transformed, so a transform cannot drop rows."
        raise DataError(
            f"transform must return arrays with the same number of rows; for a batch of "
            f"{counted(batch.rows, 'row')}, {received}.{kept}"
        )
    if to_predict and block.rows != batch.rows:
        raise DataError(
            f"transform returned {counted(block.rows, 'row')} for a batch of {batch.rows}: in predict, it must return one "
            "row for each row of the batch, in the same order."
        )
    return block


def _returned(label: str, array: Array, is_feature: bool) -> Array:
    """Convert an array that a transform returned, also of Python objects, as in the data of `fit`."""
    try:
        values, missing = to_text(array) if is_feature and holds_text(array) else to_numbers(array)
    except UnfitValuesError as error:
        where = "" if error.row is None else f" of row {error.row} of the batch"
        raise ValueError(f"transform must return arrays of numbers; {label}{where} {error}") from error
    if missing is not None:
        row = int(np.argmax(missing.reshape(len(missing), -1).any(axis=1))) if missing.ndim else 0
        raise ValueError(
            f"transform must return arrays of numbers; {label} of row {row} of the batch has missing values (None or NA)"
        )
    return values


def from_arrays(
    x: Any,
    y: Any,
    sample_weight: Any,
    expected_x: int | Structure | None = None,
    expected_y: int | Structure | None = None,
) -> Block:
    """Make a block of arrays whose first axis is the row axis; the structures are inferred from the values.

    A list of arrays is treated as a tuple: several inputs, outputs or weights.

    Raises:
        DataError: A masked array has masked values.
    """
    x, y, sample_weight = (_tupled(side) for side in (x, y, sample_weight))
    form = Form.of(x, y, sample_weight, expected_x, expected_y)
    leaves = form.flatten(x, y, sample_weight)
    for label, leaf in zip(form.labels, leaves, strict=True):
        try:
            reject_masked(leaf)
        except UnfitValuesError as error:
            raise DataError(f"{label} {error}") from error
    arrays: list[Any] = [leaf if isinstance(leaf, SparseRows) else np.asarray(leaf) for leaf in leaves]
    return Block(form, tuple(arrays))


def _tupled(value: Any) -> Any:
    several = isinstance(value, list) and value and all(isinstance(p, (np.ndarray, SparseRows)) and p.ndim for p in value)
    return tuple(value) if several else value


MIB = 1024 * 1024

INLINE_BYTES = 64 * 1024
"""Values and results of up to this size travel with the task; larger ones through a broadcast or a file."""

BLOCK_BYTES = 4 * MIB
"""Rows are gathered from an RDD, and copied from files to a model, in blocks of about this size."""

PIECE_BYTES = 8 * MIB
"""Workers merge results in pieces of this size."""

CHUNK_BYTES = 32 * MIB
"""Arrays and values are sent to workers in chunks of this size: the server of Spark Connect holds a chunk several times."""

HELD_BYTES = 64 * MIB
"""A worker holds predictions, and what a loader makes of its rows, up to about this size."""

EPOCH_BYTES = 32 * MIB
"""TensorFlow reads rows of up to about this size at once: its datasets in memory start faster than others."""
