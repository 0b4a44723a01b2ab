"""Conversion of values, also arrays of Python objects, to numeric arrays, with advice for values that are not numbers."""

from __future__ import annotations

import datetime
import numbers
import re
import types
from collections.abc import Generator, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, cast

import numpy as np

from sparkkeras.data.sparse import SparseRows
from sparkkeras.errors import counted
from sparkkeras.weights import Array, is_floating

_NUMBERS = (numbers.Real, Decimal, np.bool_)

Masked = tuple[Array, Array | None]
"""Values, and a mask of those that are missing, or of the rows without nulls; ``None`` if none is missing."""

_PAD = "Pad sequences with loader=PadSequences(maxlen) or keras.utils.pad_sequences."


class UnfitValuesError(Exception):
    """Values cannot be converted. The message continues their name.

    Attributes:
        row: The index of the row at fault, if it is a single one.
        ragged: Whether rows differ in shape.
    """

    def __init__(self, message: str, row: int | None = None, ragged: bool = False) -> None:
        super().__init__(message)
        self.row, self.ragged = row, ragged


class NotNumbersError(UnfitValuesError):
    """Values cannot be converted to a numeric array."""


def describe(value: Any) -> str:
    """A short description of a value, for messages: its type, and what identifies it. It runs no job on Spark."""
    kind = type(value)
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, SparseRows):
        return f"a sparse array of shape {value.shape} and dtype {value.dtype}"
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape} and dtype {value.dtype}"
    if isinstance(value, (Mapping, tuple, list)) and not value:
        return f"an empty {'dict' if isinstance(value, Mapping) else kind.__name__}"
    if isinstance(value, Mapping):
        return f"a dict with the keys {list(value)}"
    if isinstance(value, (tuple, list)):
        return f"a {kind.__name__} of {counted(len(value), 'value')}"
    if kind.__module__.startswith("pyspark.pandas"):
        return f"a pandas-on-Spark {kind.__name__}"
    if kind.__module__.startswith("pyspark.sql") and kind.__name__ == "DataFrame":
        return "a Spark DataFrame"
    if kind.__module__.partition(".")[0] == "pandas" and hasattr(value, "shape"):
        return f"a pandas {kind.__name__} of shape {value.shape}"
    if isinstance(value, Generator):
        return "a generator"
    if isinstance(value, (types.FunctionType, types.MethodType, types.BuiltinFunctionType)):
        return f"the function {value.__name__}"
    if not any("__repr__" in vars(each) for each in kind.__mro__[:-1]):
        return f"an object of the class {kind.__name__}"
    text = " ".join(repr(value).split())
    text = text if len(text) <= 60 else text[:57] + "..."
    return text if re.match(rf"<?([\w.]*\.)?{kind.__name__}\b", text) else f"{kind.__name__} {text}"


def to_numbers(value: Any, first: int = 0) -> Masked:
    """Convert a value to a numeric array and a mask of missing values.

    Python objects are converted if all of them are numbers, booleans, missing values (``None``, ``pandas.NA``), or rows of
    the same shape. Integers remain integers, even if some values are missing.

    Args:
        value: An array, or (nested) lists, with the rows on the first axis. Sparse rows remain sparse.
        first: The index of the first row, for messages.

    Returns:
        The values, with zeros in place of missing ones, and a boolean mask of the missing values in the same shape; ``None``
        if no value is missing.

    Raises:
        NotNumbersError: A value is not a number, rows differ in shape, or a masked array has masked values.
    """
    if isinstance(value, SparseRows):
        return cast("Array", value), None
    reject_masked(value, first)
    try:
        array = np.asarray(value)
    except ValueError as error:
        if not isinstance(value, (list, tuple)):
            raise NotNumbersError(f"cannot become an array: {error}. Expected numbers.") from error
        return _stacked(value, first)  # rows of different shapes, or rows that are missing as a whole
    if array.dtype == object:
        return _from_objects(array, first)
    if array.dtype.kind not in "fiub" and not is_floating(array.dtype):
        held = describe(value) if array.ndim == 0 else f"dtype {array.dtype}"
        raise NotNumbersError(f"{'is' if array.ndim == 0 else 'has'} {held}; expected numbers or booleans. {_advice(array)}")
    return array, None


def reject_masked(value: Any, first: int = 0) -> None:
    """Reject masked values, because ``numpy.asarray`` would drop their mask; see `to_numbers`."""
    for row, each in enumerate(value if isinstance(value, (list, tuple)) else [value], first):
        if isinstance(each, np.ma.MaskedArray) and np.ma.is_masked(each):
            raise NotNumbersError(
                f"is a masked array with masked values ({int(np.ma.getmaskarray(each).sum())} of {each.size}). Use "
                'array.filled(np.nan) with on_invalid="drop" or "allow", array.filled(value) with a value of your choice, '
                "or drop the masked rows (numpy.ma.compress_rows).",
                row if each is not value else None,
            )


def is_encoded_image(data: bytes) -> bool:
    """Whether bytes begin like an encoded image: JPEG, PNG, GIF, BMP, TIFF or WebP."""
    known = data.startswith((b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF87a", b"GIF89a", b"II*\0", b"MM\0*"))
    # A raw tensor may begin with these two letters, so compare the length in a bitmap's header as well.
    bitmap = data[:2] == b"BM" and int.from_bytes(data[2:6], "little") == len(data)
    return known or bitmap or (data[:4] == b"RIFF" and data[8:12] == b"WEBP")


def remedy(value: Any) -> str:
    """Advice on converting data of other libraries to arrays, to append to a message; empty for unknown types."""
    if type(value).__module__.startswith("scipy.sparse") and hasattr(value, "toarray"):
        return (
            " Convert sparse matrices with .toarray(): only the features and labels of SparkModel, of ensembles and of "
            "to_simple_rdd may be sparse."
        )
    if isinstance(value, type):
        return f" Call the class in a function: lambda worker, num_workers: {value.__name__}(worker, num_workers)."
    batches = isinstance(value, Iterator) or any(kind.__name__ == "PyDataset" for kind in type(value).__mro__)
    if batches or hasattr(value, "as_numpy_iterator"):  # a tf.data.Dataset
        return (
            " Pass a function make(worker, num_workers) instead, which creates it on each worker, or arrays, "
            "or read the data with Spark (load_tfrecords, spark.read)."
        )
    return ""


def _from_objects(array: Array, first: int) -> Masked:
    flat = array.ravel()
    kinds = set(map(type, flat))
    absent = {kind for kind in kinds if means_missing(kind)}
    found = kinds - absent
    # timedelta64 is a subclass of NumPy's signed integer.
    if not all(issubclass(kind, _NUMBERS) and not issubclass(kind, np.timedelta64) for kind in found):
        if array.ndim == 0:
            advice = remedy(array.item()).strip() or _advice(array)
            raise NotNumbersError(f"is {describe(array.item())}; expected numbers or booleans. {advice}")
        return _stacked(list(array), first)
    missing = None
    if absent:
        gaps = np.fromiter((type(each) in absent for each in flat), bool, len(flat))
        flat, missing = np.where(gaps, 0, flat), gaps.reshape(array.shape)
    return _converted(flat, found).reshape(array.shape), missing


def _converted(flat: Array, kinds: set[type]) -> Array:
    if kinds and all(issubclass(kind, (bool, np.bool_)) for kind in kinds):
        return flat.astype(bool)
    try:
        if kinds and all(issubclass(kind, (numbers.Integral, np.bool_)) for kind in kinds):
            whole = np.asarray(flat.tolist())
            return whole if whole.dtype != object else whole.astype(np.float64)
        return flat.astype(np.float64)
    except OverflowError as error:
        raise NotNumbersError(f"holds a number that is too large for float64 ({error})") from error


def _stacked(rows: Sequence[Any], first: int) -> Masked:
    """Stack rows of the same shape; in rows that are missing, all values are missing."""
    parts: list[Masked | None] = []
    shape, shaped = None, first
    for row, value in enumerate(rows, first):
        if means_missing(type(value)):
            parts.append(None)
            continue
        value = value.toArray() if hasattr(value, "toArray") else value
        try:
            part = to_numbers(value)
        except NotNumbersError as error:
            if error.ragged:
                raise NotNumbersError(
                    f"is a ragged list ({describe(value)}): its elements must have the same shape. {_PAD}", row
                ) from None
            raise NotNumbersError(str(error), row) from None
        if shape is None:
            shape, shaped = part[0].shape, row
        elif part[0].shape != shape:
            if part[0].dtype == np.uint8 and is_encoded_image(part[0].tobytes()):
                raise NotNumbersError(f"has another number of bytes than row {shaped}. {_ENCODED_IMAGES}", row)
            raise NotNumbersError(
                f"has another shape than row {shaped}: {part[0].shape} instead of {shape}. "
                f"All rows must have the same shape. {_PAD}",
                row,
                ragged=True,
            )
        parts.append(part)
    dtypes = [part[0].dtype for part in parts if part is not None] or [np.dtype(np.float64)]
    values = np.zeros((len(parts), *(shape or ())), np.result_type(*dtypes))
    missing = np.zeros(values.shape, bool)
    for row, each in enumerate(parts):
        if each is None:
            missing[row] = True
            continue
        values[row] = each[0]
        if each[1] is not None:
            missing[row] = each[1]
    return values, missing if missing.any() else None


def means_missing(kind: type) -> bool:
    """Whether objects of a type stand for a missing value."""
    return kind is type(None) or kind.__name__ == "NAType"  # pandas.NA, without an import of pandas


_ENCODED_IMAGES = "These are encoded images: decode them first, or use a DataFrame column with loader=image_loader(size)."


def _advice(array: Array) -> str:
    """Advice on converting a non-numeric array or object."""
    kind, held = array.dtype.kind, array.item() if array.ndim == 0 else None
    if kind == "S" and array.size and is_encoded_image(bytes(array.flat[0])):
        return _ENCODED_IMAGES
    if kind in "US" or isinstance(held, (str, bytes)):
        return "Encode text first, for instance with keras.layers.StringLookup in transform=."
    if kind == "c" or isinstance(held, complex):
        return (
            "Complex numbers are not supported: use real and imaginary parts as separate numbers "
            "(np.stack([x.real, x.imag], axis=-1)), or np.abs(x)."
        )
    if kind == "M" or isinstance(held, datetime.date):
        return (
            "Convert dates and times to numbers first, for instance to days since a fixed date: "
            '(x - np.datetime64("2000-01-01")) / np.timedelta64(1, "D").'
        )
    if kind == "m" or isinstance(held, datetime.timedelta):
        return 'Convert durations to numbers first, for instance to seconds: x / np.timedelta64(1, "s").'
    if kind == "V":
        return "Pass the fields of a structured array as separate arrays."
    return "Convert the values to numbers first."
