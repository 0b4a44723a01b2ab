"""Strings in blocks, in memory and in memory-mapped files, and their conversion from arrays and Arrow columns.

Strings of a fixed width would all be as long as the longest one, and Python objects cannot be memory-mapped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from sparkkeras.data.numeric import Masked, UnfitValuesError, means_missing
from sparkkeras.weights import Array

if TYPE_CHECKING:
    import pyarrow as pa

STRING = "string"
"""The name of the dtype of strings in specs, as in Keras."""

TO_STRINGS = "Convert numbers with astype(str), or a column with cast('string')."
"""Advice on values that should be strings, for messages."""


class NotTextError(UnfitValuesError):
    """Values are not strings."""


class Text:
    """An array of strings as Arrow stores it: UTF-8 bytes, and the offset at which each string ends.

    NumPy pads every string to the length of the longest one, or stores Python objects, which cannot be memory-mapped. This
    class has as much of the interface of an array as blocks use, and is treated as one; `numpy.asarray` converts it to an
    array of ``str`` objects.

    Args:
        values: All strings, in C order. A ``pyarrow.LargeStringArray`` without nulls.
        shape: The shape, with the rows on the first axis.
    """

    dtype = np.dtype(object)
    """The dtype that NumPy has for Python objects."""

    def __init__(self, values: pa.Array, shape: tuple[int, ...]) -> None:
        self.values, self.shape = values, shape

    @classmethod
    def of(cls, values: pa.Array, shape: tuple[int, ...]) -> Array:
        """An instance, typed as the array that it is treated as."""
        return cast(Array, cls(values, shape))

    @classmethod
    def from_buffers(cls, offsets: Any, data: Any, shape: tuple[int, ...]) -> Array:
        """The inverse of `buffers`, without a copy: the buffers may be memory maps."""
        import pyarrow as pa

        parts = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
        return cls.of(pa.Array.from_buffers(pa.large_string(), len(offsets) - 1, parts), shape)

    @property
    def buffers(self) -> tuple[Array, Array]:
        """The offsets, int64, from 0 to the number of bytes, and the bytes."""
        if not self.size:
            return np.zeros(1, np.int64), np.zeros(0, np.uint8)
        _, offsets, data = self.values.buffers()
        ends = np.frombuffer(offsets, np.int64)[self.values.offset :][: self.size + 1]
        found = np.zeros(0, np.uint8) if data is None or not data.size else np.frombuffer(data, np.uint8)
        return ends - ends[0], found[ends[0] : ends[-1]]

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of strings."""
        return len(self.values)

    @property
    def nbytes(self) -> int:
        """The size of the strings and their offsets, in bytes."""
        return int(self.values.nbytes)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice | Array) -> Array:
        """Select rows: a view for a slice without a step, a copy for row indices."""
        import pyarrow as pa

        width = math.prod(self.shape[1:])
        if isinstance(rows, slice):
            start, stop, step = rows.indices(len(self))
            if step == 1:
                count = max(0, stop - start)
                return Text.of(self.values.slice(start * width, count * width), (count, *self.shape[1:]))
            rows = np.arange(start, stop, step)
        rows = np.asarray(rows)
        positions = rows if width == 1 else (rows[:, None] * width + np.arange(width)).reshape(-1)
        return Text.of(self.values.take(pa.array(positions)), (len(rows), *self.shape[1:]))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.asarray(self.values.to_numpy(zero_copy_only=False).reshape(self.shape), dtype)

    def __reduce__(self) -> Any:
        # Arrow would pickle the whole column with each slice of it.
        return Text.from_buffers, (*self.buffers, self.shape)

    def reshape(self, *shape: int) -> Array:
        """The same strings in another shape."""
        return Text.of(self.values, shape)


def strings_of(array: Array) -> pa.LargeStringArray:
    """All strings of an array of objects, or of a `Text`, in C order."""
    import pyarrow as pa

    return array.values if isinstance(array, Text) else pa.array(array.reshape(-1), pa.large_string())


def concatenate(arrays: Sequence[Array]) -> Array:
    """Like `numpy.concatenate`, also for `Text`."""
    import pyarrow as pa

    if not any(isinstance(array, Text) for array in arrays):
        return np.concatenate(arrays)
    texts = [array if isinstance(array, Text) else cast(Text, to_text(array)[0]) for array in arrays]
    rows = sum(map(len, texts))
    return Text.of(pa.concat_arrays([text.values for text in texts]), (rows, *texts[0].shape[1:]))


def empty_strings(shape: tuple[int, ...]) -> Array:
    """An array of empty strings."""
    return Text.from_buffers(np.zeros(math.prod(shape) + 1, np.int64), b"", shape)


# From arrays and Python objects


def holds_text(value: Any) -> bool:
    """Whether the first value of an array, or of (nested) lists, that is not missing is a string."""
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value.dtype.kind in "UST"  # also NumPy's StringDType
    if isinstance(value, (np.ndarray, list, tuple)):
        values: Iterable[Any] = value.flat if isinstance(value, np.ndarray) else value
        return holds_text(next((each for each in values if not _is_missing(each)), None))
    return isinstance(value, (str, bytes, Text))


def to_text(value: Any, first: int = 0) -> Masked:
    """Convert strings to `Text`, and a mask of missing values (``None``, ``pandas.NA``, NaN), which become empty strings.

    Args:
        value: An array of strings, or (nested) lists, with the rows on the first axis. Bytes must be UTF-8.
        first: The index of the first row, for messages.

    Returns:
        The strings, and a boolean mask of the missing ones in the same shape; ``None`` if none is missing.

    Raises:
        NotTextError: A value is not a string, or rows differ in shape.
    """
    import pyarrow as pa

    if isinstance(value, Text):
        return cast(Array, value), None
    array = value if isinstance(value, np.ndarray) else _objects(value)
    if not array.size:
        return empty_strings(array.shape), None
    if array.dtype.kind not in "OUST":
        raise NotTextError(f"has dtype {array.dtype}; {_EXPECTED}")
    flat = array.astype(object).reshape(-1)  # NumPy's own strings end at a NUL when Arrow reads them
    try:
        column = pa.array(flat, pa.large_string(), from_pandas=True)
    except (pa.ArrowException, ValueError, TypeError) as error:
        width = max(1, flat.size // max(1, len(array))) if array.ndim else 1
        for position, each in enumerate(flat):
            fault = _fault(each)
            if fault:
                raise NotTextError(fault, first + position // width if array.ndim else None) from error
        raise NotTextError(f"cannot become strings: {error}") from error
    missing = None
    if column.null_count:
        missing = ~not_null(column).reshape(array.shape)
        column = column.fill_null("")
    if array.ndim == 0:
        return array, missing
    return Text.of(column, array.shape), missing


_EXPECTED = f"expected strings. {TO_STRINGS}"


def _objects(value: Any) -> Array:
    """Strings and nested lists of them as an array of objects. NumPy's own strings would lose trailing NULs."""
    if not holds_text(value):
        try:
            return np.asarray(value)
        except ValueError:
            pass
    return np.asarray(value, object)


def _fault(value: Any) -> str:
    """What is wrong with a value that should be a string, as the end of a message; empty: nothing."""
    if isinstance(value, (list, tuple, np.ndarray)):
        return "has rows of strings of different shapes: every row must have the same number of strings."
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            return f"holds a string that UTF-8 cannot represent ({error.reason}). Clean it: s.encode('utf-8', 'replace')."
    elif isinstance(value, bytes):
        try:
            value.decode()
        except UnicodeDecodeError:
            return "holds bytes that are not text in UTF-8. Decode them first, with their encoding."
    elif not _is_missing(value):
        return f"holds {value!r}, of the type {type(value).__name__}; {_EXPECTED}"
    return ""


def _is_missing(value: Any) -> bool:
    return means_missing(type(value)) or (isinstance(value, float) and value != value)


# From columns


def not_null(column: pa.Array) -> Array:
    """A mask of the values of a column that are not null."""
    return np.asarray(column.is_valid().to_numpy(zero_copy_only=False))


def is_text_type(kind: pa.DataType) -> bool:
    """Whether an Arrow type is a string, or lists of strings."""
    import pyarrow as pa

    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def read_text(column: pa.Array, width: int | None) -> Masked:
    """Convert a column of strings, or of arrays of equally many strings, to `Text`.

    Args:
        column: The column. Null strings, and those of null rows, become empty.
        width: The number of strings in each row of a column of arrays without values, if known.

    Returns:
        The strings, shape (rows,) or (rows, width), and a mask of the rows without nulls; ``None``: all.

    Raises:
        NotTextError: The column is of another type, or its arrays differ in length.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    rows = len(column)
    good = not_null(column)
    if pa.types.is_null(column.type):
        column = column.cast(pa.large_string())
    if not is_text_type(column.type):
        raise NotTextError(f"has the type {column.type}; {_EXPECTED}")
    shape: tuple[int, ...] = (rows,)
    if pa.types.is_nested(column.type):
        known = column.drop_null()
        lengths = np.unique(pc.list_value_length(known)) if len(known) else np.array([width or 1])
        if len(lengths) > 1:
            raise NotTextError(
                f"holds arrays of different lengths ({lengths[0]} and {lengths[-1]}): every row must have the same number "
                "of strings. Join them to one string, for instance with array_join."
            )
        shape = (rows, int(lengths[0]))
        if column.null_count:
            column = pc.coalesce(column, pa.scalar([""] * shape[1], column.type))
        column = pc.list_flatten(column)
        good &= not_null(column).reshape(shape).all(axis=1)
    values = column.cast(pa.large_string())
    if values.null_count:
        values = values.fill_null("")
    return Text.of(values, shape), None if good.all() else good


def side_by_side(parts: Sequence[Array]) -> Array:
    """Join the columns of `Text` with the same rows to one of shape (rows, number of strings)."""
    rows = len(parts[0])
    widths = [math.prod(part.shape[1:]) for part in parts]
    joined = concatenate([part.reshape(part.size) for part in parts])
    starts = rows * np.cumsum([0, *widths])
    positions = [start + np.arange(rows * width).reshape(rows, width) for start, width in zip(starts, widths, strict=False)]
    ordered: Array = joined[np.concatenate(positions, axis=1).reshape(-1)]
    return ordered.reshape(rows, sum(widths))
