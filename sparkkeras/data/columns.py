"""Conversion between Arrow columns and NumPy arrays. Imports neither Spark nor Keras.

Supported column types: numbers, booleans, decimals, (nested) lists of equal length, MLlib vectors in Spark's representation
(``struct<type, size, indices, values>``), raw tensors as bytes, and strings for inputs that take them. Numbers and lists
without nulls are not copied. Nulls are reported as a mask, so that the caller can drop these rows; values that do not fit
raise an error.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from sparkkeras.data.numeric import Masked, is_encoded_image
from sparkkeras.data.schema import InputSpec, RowShape, Schema
from sparkkeras.data.sparse import SparseRows
from sparkkeras.data.text import NotTextError, Text, is_text_type, not_null, read_text, side_by_side
from sparkkeras.errors import DataError, counted
from sparkkeras.weights import Array

if TYPE_CHECKING:
    import pyarrow as pa

IMAGE_STRUCT = "struct<origin:string,height:int,width:int,nChannels:int,mode:int,data:binary>"
"""The type of the column of Spark's image data source, as a simple string."""

VECTOR_FIELDS = ("type", "size", "indices", "values")
"""The fields in which Spark stores a vector; ``type`` is 0 for a sparse and 1 for a dense vector."""

_DTYPES = {1: ("uint8", "uint8"), 2: ("float16", "int16"), 4: ("float32", "int32"), 8: ("float64", "int64")}


class Loader(Protocol):
    """Converts one column to the array for one model input."""

    @property
    def shape(self) -> RowShape:
        """The shape of one row; ``None`` for sizes that depend on the column."""
        ...

    @property
    def on_error(self) -> str:
        """How rows that cannot be loaded are handled: ``"error"``, ``"null"`` or ``"drop"``."""
        ...

    def check(self, name: str, kind: str) -> None:
        """Reject a column whose Spark type ``kind`` (a simple string) cannot be loaded."""
        ...

    def __call__(self, column: pa.Array, name: str) -> tuple[Array, Array]:
        """The values of the rows, and a boolean mask of the valid rows, shape (rows,)."""
        ...


class PlacedLoader(ABC):
    """The base class of loaders whose error messages name the row.

    It is a base class and not a protocol, because an unrelated loader may have a method ``load`` with another meaning.
    """

    @abstractmethod
    def load(self, column: pa.Array, name: str, where: str, first: int) -> tuple[Array, Array]:
        """Load a column like ``__call__``. ``first`` is the index of its first row in ``where``, both for messages."""
        ...

    def __call__(self, column: pa.Array, name: str) -> tuple[Array, Array]:
        """Load rows whose position is unknown; see `load`."""
        return self.load(column, name, "the batch", 0)


class RowLoader(PlacedLoader):
    """The base class of loaders that convert the rows of RDDs and arrays too."""

    @abstractmethod
    def load_rows(self, rows: Any, first: int = 0) -> Masked:
        """Convert rows to an array and a mask of missing values; see `sparkkeras.data.numeric.to_numbers`."""
        ...


@dataclass(frozen=True)
class ColumnPart:
    """The part of an array that comes from one column.

    Attributes:
        name: The column's name in messages.
        width: The number of values per row that come from this column.
        good: A mask of the rows without nulls in this column; ``None``: all.
    """

    name: str
    width: int
    good: Array | None


@dataclass(frozen=True)
class ColumnValues:
    """The values of one array, read from its columns.

    Attributes:
        values: The values, shape (rows, ...).
        good: A mask of the rows without nulls; ``None``: all.
        label: The name of the array in messages.
        may_lack: Whether nulls are allowed whatever ``on_invalid`` is, because a loader handles them.
        parts: The part of each column, if several columns are concatenated.
    """

    values: Array
    good: Array | None
    label: str
    may_lack: bool = False
    parts: tuple[ColumnPart, ...] = ()

    def null_column(self, row: int) -> str:
        """The name, in messages, of the first column that is null in a row."""
        return next((part.name for part in self.parts if part.good is not None and not part.good[row]), self.label)

    def holding(self, position: int) -> str:
        """The name, in messages, of the column that holds the value at ``position`` of a row of all columns."""
        for part in self.parts:
            if position < part.width:
                return part.name
            position -= part.width
        return self.label


L = TypeVar("L")


def label_loaders(loaders: Mapping[str, L], schema: Schema) -> dict[str, L]:
    """The loaders of labels: those under the names of outputs. A name that is also that of an input means the input."""
    inputs = {spec.name for spec in schema.inputs}
    return {spec.name: loaders[spec.name] for spec in schema.outputs if spec.name in loaders and spec.name not in inputs}


@dataclass(frozen=True)
class Leaf:
    """One array of features, labels or sample weights, and the columns that it is made of.

    Attributes:
        columns: The names of the columns.
        together: Whether the columns are concatenated into one feature vector per row.
        input: The model's input, where it is known.
        fits: Whether the values must fit the input; ``False`` if a transform is applied first, or the input is unknown.
        loader: Converts the only column to an array, for instance of images.
        function: The SQL function whose arguments the columns are; empty for the columns of a DataFrame.
    """

    columns: tuple[str, ...]
    together: bool = False
    input: InputSpec | None = None
    fits: bool = True
    loader: Loader | None = None
    function: str = ""

    @property
    def label(self) -> str:
        """The name of the array in messages."""
        if len(self.columns) == 1:
            return self.shown(self.columns[0])
        return f"the arguments of {self.function}" if self.function else f"the columns {', '.join(self.columns)}"

    def shown(self, name: str) -> str:
        """The name of one column in messages."""
        return f"{name} of {self.function}" if self.function else f"column {name!r}"

    @property
    def takes_text(self) -> bool:
        """Whether the columns may hold strings."""
        return not self.fits or self.needs_text

    @property
    def needs_text(self) -> bool:
        """Whether the columns must hold strings."""
        return self.fits and self.input is not None and self.input.text

    def read(self, columns: Sequence[pa.Array], where: str = "the batch", first: int = 0) -> ColumnValues:
        """Read the values of all rows.

        Args:
            columns: The Arrow columns, in the order of ``self.columns``.
            where: What contains the rows, for messages.
            first: The index of the first of these rows in ``where``, for messages.

        Raises:
            DataError: Values have a type or size that cannot be converted to one array.
        """
        if self.loader is not None:
            columns = [_with_type(column) for column in columns]
            if isinstance(self.loader, PlacedLoader):
                loaded, good = self.loader.load(columns[0], self.columns[0], where, first)
            else:
                loaded, good = self.loader(columns[0], self.columns[0])
            may_lack = self.loader.on_error != "error"
            mask = None if good.all() else good
            return ColumnValues(self._fitted(loaded), mask, self.label, may_lack)
        is_text = self.needs_text or (not self.fits and all(is_text_type(column.type) for column in columns))
        shape = None if self.input is None else self.input.shape
        named = list(zip(map(self.shown, self.columns), columns, strict=True))
        if is_text:
            width = shape[0] if shape and len(columns) == 1 else None
            found = [_read_text(column, name, width) for name, column in named]
        else:
            floating = self.input is not None and self.input.floating
            found = [read(column, name, shape, floating) for name, column in named]
            if shape is not None:
                found = self._widened(found, shape)
        incomplete = [good for _, good in found if good is not None]
        complete = np.logical_and.reduce(incomplete) if incomplete else None
        if not self.together:
            return ColumnValues(self._fitted(found[0][0]), complete, self.label)
        values = side_by_side([values for values, _ in found]) if is_text else self._side_by_side(found)
        parts = (ColumnPart(name, _width(array), good) for (name, _), (array, good) in zip(named, found, strict=True))
        return ColumnValues(self._fitted(values), complete, self.label, parts=tuple(parts))

    def _widened(self, found: Sequence[Masked], shape: RowShape) -> list[Masked]:
        """The values, with zeros of the expected width for array columns of nulls only, whose width is unknown."""
        wanted = tuple(size or 1 for size in shape)
        missing = math.prod(wanted) - sum(_width(values) for values, _ in found if values.ndim < 3)
        widened = []
        for values, good in found:
            if good is not None and not good.any() and 0 in values.shape[1:]:
                row = (max(0, missing),) if self.together else wanted
                values, missing = np.zeros((len(values), *row), values.dtype), 0
            widened.append((values, good))
        return widened

    def _side_by_side(self, found: Sequence[Masked]) -> Array:
        parts = [values for values, _ in found]
        for name, part in zip(self.columns, parts, strict=True):
            if part.ndim > 2:
                raise DataError(
                    f"{self.shown(name)} has rows of shape {part.shape[1:]}, which cannot be combined with other "
                    "columns: expected numbers or flat arrays. Use this column alone, or flatten() it."
                )
        widths = [_width(part) for part in parts]
        dtype = np.result_type(*parts)
        if dtype.kind in "iub" and (self.input is None or self.input.floating):
            dtype = np.dtype(np.float32)
        together = np.empty((len(parts[0]), sum(widths)), dtype)
        start = 0
        for width, (part, good) in zip(widths, found, strict=True):
            mine = together[:, start : start + width]
            mine[...] = part.reshape(len(part), width)
            if good is not None and together.dtype.kind == "f":
                mine[~good & ~np.isnan(mine).any(axis=1)] = np.nan  # an array with a null inside already has its NaN
            start += width
        return together

    def _fitted(self, values: Array) -> Array:
        """Check that the values fit the model's input. Flat rows with the right number of values are reshaped."""
        if self.input is None or self.input.shape is None or not len(values):
            return values
        shape = tuple(values.shape[1:])
        if self.input.takes(shape):
            return values
        wanted = [size for size in self.input.shape if size is not None]
        if len(shape) == 1 and len(wanted) == len(self.input.shape) and shape[0] == math.prod(wanted):
            return values.reshape(len(values), *wanted)
        if self.fits:
            does = "does" if len(self.columns) == 1 else "do"
            raise DataError(
                f"{self.label} {does} not fit the model's {self.input.title}: it expects rows of shape "
                f"{self.input.shape}, received rows of shape {shape}. Choose other columns, or reshape them with transform=."
            )
        return values


def _with_type(column: pa.Array) -> pa.Array:
    """The column as loaders expect it: an untyped NULL column of SQL is cast to bytes."""
    import pyarrow as pa

    return column.cast(pa.binary()) if pa.types.is_null(column.type) else column


def _width(values: Array) -> int:
    """The number of values in a row of numbers or flat arrays."""
    return 1 if values.ndim == 1 else int(values.shape[1])


def _read_text(column: pa.Array, name: str, width: int | None) -> Masked:
    try:
        return read_text(column, width)
    except NotTextError as error:
        raise DataError(f"{name} {error}") from None


def read(
    column: pa.Array,
    name: str,
    shape: RowShape | None = None,
    floating: bool = False,
) -> Masked:
    """Convert a column to an array.

    A null inside an array becomes NaN in floating-point arrays and 0 in others; a row that is null as a whole becomes zeros.

    Args:
        column: The column.
        name: The column's name in messages.
        shape: The shape of one row, if known; required for bytes.
        floating: Whether the model takes floating-point numbers. Bytes of 2, 4 or 8 bytes per value are then read as floats,
            and integers are converted to floats if they have one byte, or are in arrays that contain nulls.

    Returns:
        The values, shape (rows, ...), and a mask of the rows without nulls; ``None`` if no row has any.

    Raises:
        DataError: The column cannot be converted to an array; the message names it.
    """
    try:
        return _spread(column, shape, floating)
    except _UnfitColumnError as unfit:
        loader = f" {unfit.images}, pass loader=image_loader(size)." if unfit.images else ""
        loader += " Pad them: pass loader=PadSequences(maxlen)." if unfit.sequences else ""
        raise DataError(f"{name} {unfit}{loader}") from None


def _spread(column: pa.Array, shape: RowShape | None, floating: bool) -> Masked:
    """The values of a column, with zeros for top-level nulls, and a mask of the rows without nulls, also inside."""
    if not column.null_count:
        return _values(column, shape, floating)
    good = not_null(column)
    values, inner = _values(column.drop_null(), shape, floating)
    spread = np.zeros((len(good), *values.shape[1:]), values.dtype)
    spread[good] = values
    if inner is not None:
        good[good] = inner
    return spread, good


class _UnfitColumnError(Exception):
    """A column cannot be converted to an array. The message continues the column's name.

    Attributes:
        images: The first words of the advice to use an image loader, if that may be the solution.
        sequences: Whether a loader of sequences may be the solution.
    """

    def __init__(self, message: str, images: str = "", sequences: bool = False) -> None:
        super().__init__(message)
        self.images, self.sequences = images, sequences


def _values(column: pa.Array, shape: RowShape | None, floating: bool) -> Masked:
    """The values of a column without top-level nulls, and a mask of the rows without nulls inside."""
    import pyarrow as pa

    kind = column.type
    if pa.types.is_null(kind):  # an untyped NULL column of SQL; without top-level nulls it has no rows
        return np.zeros((0, 0), np.float32 if floating else np.int64), None
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind):
        values = column.to_numpy(zero_copy_only=False)
        # Larger integers are converted later, by the Reader, which keeps one-byte integers: they may be images.
        return values.astype(np.float32) if floating and values.itemsize == 1 else values, None
    if pa.types.is_floating(kind):
        return column.to_numpy(), None
    if pa.types.is_decimal(kind):
        return column.cast(pa.float64()).to_numpy(), None
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _lists(column, floating)
    if pa.types.is_fixed_size_list(kind):
        return _inside(column.flatten(), len(column), kind.list_size, floating)
    if pa.types.is_struct(kind) and tuple(field.name for field in kind) == VECTOR_FIELDS:
        return _vectors(column), None
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return _tensors(column, shape, floating), None
    if (pa.types.is_string(kind) or pa.types.is_large_string(kind)) and _holds(column, _IMAGE_PATH.search):
        raise _UnfitColumnError("holds paths of images.", "To read and decode them")
    raise _UnfitColumnError(
        f"has the type {kind}; expected numbers, arrays or vectors. Encode text and categories first, for "
        "instance with pyspark.ml.feature.StringIndexer, or with keras.layers.StringLookup in transform=."
    )


_IMAGE_PATH = re.compile(r"\.(jpe?g|png|gif|bmp|tiff?|webp)$", re.IGNORECASE)


def _holds(column: pa.Array, recognize: Callable[[Any], Any]) -> bool:
    """Whether ``recognize`` matches one of the first values."""
    return any(map(recognize, column.slice(0, 8).to_pylist()))


def _lists(column: pa.Array, floating: bool) -> Masked:
    lengths = np.diff(column.offsets.to_numpy())
    return _inside(column.flatten(), len(column), _one_length(lengths, "arrays"), floating)


def _inside(flat: pa.Array, rows: int, length: int, floating: bool) -> Masked:
    """The values of lists of equal length, and a mask of the rows without nulls inside."""
    values, good = _spread(flat, None, floating)
    if flat.null_count:
        if floating and values.dtype.kind in "iu":
            values = values.astype(np.float64)
        if values.dtype.kind == "f":
            values[~not_null(flat)] = np.nan
    complete = None if good is None else np.all(good.reshape(rows, length), axis=1)
    return values.reshape(rows, length, *values.shape[1:]), complete


def _vectors(column: pa.Array) -> Array:
    import pyarrow as pa

    kinds, sizes, indices, values = (column.field(name) for name in VECTOR_FIELDS)
    dense = kinds.to_numpy() == 1
    lengths = np.diff(values.offsets.to_numpy())
    if dense.all():
        return np.asarray(_lists(values, floating=True)[0])
    widths = np.where(dense, lengths, sizes.fill_null(0).to_numpy())
    width = _one_length(widths, "vectors")
    stored = values.flatten().to_numpy()
    of_dense = np.repeat(dense, lengths)
    places = np.empty(len(stored), np.int64)
    places[~of_dense] = indices.filter(pa.array(~dense)).flatten().to_numpy()
    places[of_dense] = np.tile(np.arange(width), int(dense.sum()))
    return np.asarray(SparseRows(np.concatenate([[0], np.cumsum(lengths)]), places, stored, width))


def _tensors(column: pa.Array, shape: RowShape | None, floating: bool) -> Array:
    """Read raw tensors: C order, little-endian. The item size determines the dtype."""
    try:
        return _raw_tensors(column, shape, floating)
    except _UnfitColumnError:
        # Only after a failure: a tensor of the expected size may begin with the same bytes as an image.
        if _holds(column, is_encoded_image):
            raise _UnfitColumnError("holds encoded images.", "To decode them") from None
        raise


def _raw_tensors(column: pa.Array, shape: RowShape | None, floating: bool) -> Array:
    row = tuple(size for size in shape or () if size is not None)
    if shape is None or len(row) < len(shape):
        raise _UnfitColumnError(
            "contains bytes, which can be read as tensors only if the model's input has a fixed shape; its shape is "
            f"{shape}. Use a column of arrays instead.",
            "If these are encoded images",
        )
    size = math.prod(row)
    wide = column.type == "large_binary"
    offsets = np.frombuffer(column.buffers()[1], np.int64 if wide else np.int32)[column.offset :][: len(column) + 1]
    length = _one_length(np.diff(offsets), "byte strings")
    item, rest = divmod(length, max(1, size))
    if not len(column):
        return np.zeros((0, *row), np.float32)
    if rest or item not in _DTYPES:
        raise _UnfitColumnError(
            f"has {counted(length, 'byte')} per row; expected {counted(size, 'value')} of 1, 2, 4 or 8 bytes each for "
            f"rows of shape {shape}.",
            "If these are encoded images",
        )
    data = np.frombuffer(column.buffers()[2] or b"", np.uint8)[offsets[0] : offsets[-1]]
    return data.view(np.dtype(_DTYPES[item][0 if floating else 1]).newbyteorder("<")).reshape(len(column), *row)


def _one_length(lengths: Array, what: str) -> int:
    """The common length of all rows; 0 without rows."""
    if not len(lengths):
        return 0
    differing = np.flatnonzero(lengths != lengths[0])
    if len(differing):
        found = f"holds {what} of different lengths ({lengths[0]} and {lengths[differing[0]]})"
        if what == "byte strings":
            raise _UnfitColumnError(f"{found}, so they are not tensors of one shape.", "If they are encoded images")
        raise _UnfitColumnError(f"{found}: every row must have the same shape.", sequences=what == "arrays")
    return int(lengths[0])


# Arrays to columns


def to_column(array: Array, good: Array | None = None, missing: Array | None = None) -> pa.Array:
    """Convert an array to a column: numbers for shape (rows,), (nested) lists for more axes.

    Args:
        array: The values, shape (rows, ...). Sparse rows become vectors in Spark's representation, `Text` becomes strings.
        good: A mask of the rows that are not null, shape (rows,); ``None``: all.
        missing: A mask of the values that are null, in the shape of the array; ``None``: none.

    Raises:
        DataError: Values do not fit Spark's ``bigint``, or the array has more values than a column can hold.
    """
    import pyarrow as pa

    if isinstance(array, SparseRows):
        return _sparse_vectors(array)
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise DataError(
            f"the uint64 values, up to {array.max()}, do not fit Spark's largest integer type, bigint: cast them to "
            "float64, or take them modulo 2**63."
        )
    if array.size > np.iinfo(np.int32).max and array.ndim > 1:
        raise DataError(
            f"an array of shape {array.shape} has more than {np.iinfo(np.int32).max} values, the most that one column "
            "can hold: make several DataFrames of its rows, and union them."
        )
    nulls = None if good is None or good.all() else ~good
    if array.ndim == 1:
        return _flat_column(array, nulls if missing is None else missing if nulls is None else missing | nulls)
    column = _flat_column(array, missing)
    for axis in range(array.ndim - 1, 0, -1):
        count = math.prod(array.shape[:axis])
        offsets = pa.array(np.arange(count + 1, dtype=np.int32) * array.shape[axis])
        outer = axis == 1
        mask = pa.array(nulls) if outer and nulls is not None else None
        column = pa.ListArray.from_arrays(offsets, column, mask=mask)
    return column


def _flat_column(array: Array, missing: Array | None) -> pa.Array:
    """All values of an array, in C order, with nulls where they are missing."""
    import pyarrow as pa
    import pyarrow.compute as pc

    mask = None if missing is None else missing.reshape(-1)
    if isinstance(array, Text):
        return array.values if mask is None else pc.if_else(pa.array(mask), pa.scalar(None, pa.large_string()), array.values)
    array = array.astype(stored_as(array.dtype.name), copy=False)
    return pa.array(np.ascontiguousarray(array).reshape(-1), mask=mask)


def _sparse_vectors(rows: SparseRows) -> pa.Array:
    import pyarrow as pa

    if len(rows.values) > np.iinfo(np.int32).max:
        raise DataError(
            f"{counted(len(rows.values), 'stored value')} of a sparse array do not fit into one column: pass fewer rows."
        )
    starts = pa.array(rows.starts.astype(np.int32))
    kind, size = np.zeros(len(rows), np.int8), np.full(len(rows), rows.width, np.int32)
    indices = pa.ListArray.from_arrays(starts, pa.array(rows.columns.astype(np.int32)))
    values = pa.ListArray.from_arrays(starts, pa.array(rows.values.astype(np.float64)))
    return pa.StructArray.from_arrays([pa.array(kind), pa.array(size), indices, values], VECTOR_FIELDS)


def sparse_width(column: pa.Array) -> int:
    """The number of values in a row of a column of sparse vectors; 0 for other columns."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_struct(column.type) or tuple(field.name for field in column.type) != VECTOR_FIELDS:
        return 0
    return int(pc.max(column.field("size")).as_py() or 0)


def type_name(dtype: str, rank: int) -> str:
    """The Spark type of a column from `to_column`, for rows with ``rank`` axes and a dtype as returned by `stored_as`."""
    return "array<" * rank + _SPARK_TYPES[dtype] + ">" * rank


def stored_as(dtype: str) -> str:
    """The dtype in which Spark stores a NumPy or Keras dtype: itself, or a wider one. uint64 is stored as int64."""
    wider = {"uint8": "int16", "uint16": "int32", "uint32": "int64", "uint64": "int64"}
    return dtype if dtype in _SPARK_TYPES else wider.get(dtype, "float32")


_SPARK_TYPES = {
    "bool": "boolean",
    "int8": "tinyint",
    "int16": "smallint",
    "int32": "int",
    "int64": "bigint",
    "float32": "float",
    "float64": "double",
}
