"""`PadSequences`: sequences of different lengths as arrays of one length."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from sparkkeras.arguments import integer, known_fields, one_of
from sparkkeras.data.block import describe
from sparkkeras.data.columns import RowLoader, read
from sparkkeras.data.numeric import Masked, NotNumbersError, means_missing, to_numbers
from sparkkeras.data.text import not_null
from sparkkeras.errors import ConfigurationError, DataError
from sparkkeras.weights import Array

if TYPE_CHECKING:
    import pyarrow as pa

Side = Literal["pre", "post"]

_DTYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64")
_NUMBER = r"(tinyint|smallint|int|bigint|float|double|boolean|decimal\(\d+,\d+\))"


@known_fields
@dataclass(frozen=True)
class PadSequences(RowLoader):
    """A loader that pads and truncates sequences to one length, for ``loader=`` of `SparkModel.fit` and others.

    It takes a column of arrays, the rows of an RDD, lists of lists, or an array of lists, and gives the values of
    ``keras.utils.pad_sequences`` with the same arguments. ``on_invalid`` applies to rows with nulls, as without a loader.

    Args:
        maxlen: The length of all sequences. It fits a model's input of this length, or of length ``None``.
        value: The value that shorter sequences are filled with.
        padding: Where it is added: ``"pre"``, before the sequence, or ``"post"``.
        truncating: Where longer sequences are cut: ``"pre"`` removes the first elements, ``"post"`` the last ones.
        dtype: The dtype of the result. ``None``: that of the data.
        step_shape: The shape of an element of a sequence, such as ``(3,)`` for a column of type ``array<array<float>>`` with
            three values for each time step. The default is for numbers.

    Raises:
        ConfigurationError: An argument is out of range.

    Example::

        texts = df.select("label", vectorize("words").alias("tokens"))  # tokens: array<int>
        SparkModel(model).fit(texts, features="tokens", loader=PadSequences(100, padding="post"))
    """

    maxlen: int
    value: float = 0
    padding: Side = "pre"
    truncating: Side = "pre"
    dtype: str | None = None
    step_shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        integer("maxlen", self.maxlen)
        one_of("padding", self.padding, ("pre", "post"))
        one_of("truncating", self.truncating, ("pre", "post"))
        if isinstance(self.value, bool) or not isinstance(self.value, (int, float, np.number)):
            raise ConfigurationError(f"value={self.value!r}: expected a number.")
        if self.dtype is not None:
            one_of("dtype", self.dtype, _DTYPES)
            if not _holds(self.dtype, self.value):
                raise ConfigurationError(
                    f"value={self.value!r} is not a value of dtype={self.dtype!r}: choose another dtype."
                )
        if not isinstance(self.step_shape, (tuple, list)):
            raise ConfigurationError(f"step_shape={self.step_shape!r}: expected a tuple of sizes, such as (3,).")
        sizes = tuple(integer(f"step_shape[{axis}]", size) for axis, size in enumerate(self.step_shape))
        object.__setattr__(self, "step_shape", sizes)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one row."""
        return (self.maxlen, *self.step_shape)

    @property
    def on_error(self) -> str:
        """``"error"``; rows with nulls are handled by ``on_invalid``."""
        return "error"

    def check(self, name: str, kind: str) -> None:
        """Check that the type of a column can hold sequences.

        Args:
            name: The name of the column.
            kind: Its Spark type, as a simple string.

        Raises:
            DataError: The type is not an array of numbers, nested as deep as ``step_shape`` says.
        """
        depth = 1 + len(self.step_shape)
        if re.fullmatch(f"{'array<' * depth}{_NUMBER}{'>' * depth}", kind):
            return
        advice = (
            "Encode text first, with a vocabulary, or by pyspark.ml.feature.StringIndexer before collect_list: it counts "
            "from 0, so add 1, since 0 is the padding."
        )
        if re.fullmatch(f"(array<)*{_NUMBER}>*", kind):
            advice = "Set step_shape to the shape of one element of a sequence; () if elements are numbers."
        elif kind.startswith("array<struct<"):
            advice = f"Take a field of the structs first: df.withColumn('sequence', df[{name!r}].getField('field'))."
        raise DataError(
            f"column {name!r} has the type {kind}; PadSequences with step_shape={self.step_shape} expects sequences: "
            f"{'array<' * depth}number{'>' * depth}. {advice}"
        )

    def load(self, column: pa.Array, name: str, where: str, first: int) -> tuple[Array, Array]:
        """Pad a column of sequences.

        Args:
            column: A column of lists.
            name: The name of the column, for error messages.
            where: The location of the rows, such as a partition, for error messages.
            first: The index of the first row in this location, for error messages.

        Returns:
            The sequences, shape (rows, *shape), and a mask of the rows without nulls, shape (rows,). Nulls are NaN in
            sequences of floating-point numbers, and ``value`` in others.

        Raises:
            DataError: The elements are not numbers of one shape.
        """
        import pyarrow as pa

        present = not_null(column)
        if pa.types.is_null(column.type) or pa.types.is_binary(column.type):  # a NULL of SQL has no other type
            return np.full((len(column), *self.shape), self.value, self.dtype or "float32"), np.zeros(len(column), bool)
        lists = column.drop_null()
        steps, complete = read(lists.flatten(), f"column {name!r}")
        lengths = lists.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
        try:
            values, missing = self._padded(steps, None if complete is None else ~complete, lengths, present)
        except NotNumbersError as error:
            raise DataError(f"column {name!r} of {where} {error}") from error
        if missing is None:
            return values, present
        if values.dtype.kind == "f":
            values[missing] = np.nan
        incomplete: Array = np.any(missing.reshape(len(values), -1), axis=1)
        return values, ~incomplete

    def load_rows(self, rows: Any, first: int = 0) -> Masked:
        """Pad the sequences in the rows of an RDD or in a list; see `RowLoader.load_rows`."""
        rows = list(rows)
        present = np.array([not means_missing(type(row)) for row in rows], bool)
        for number, row in enumerate(rows, first):
            if present[number - first] and (
                isinstance(row, (str, bytes)) or not hasattr(row, "__len__") or not np.ndim(row[:1])
            ):
                raise NotNumbersError(f"is {describe(row)}; expected a sequence of numbers for PadSequences.", number)
        given = [row for row, here in zip(rows, present, strict=True) if here]
        lengths = np.array([len(row) for row in given], np.int64)
        try:
            steps, missing = to_numbers(_joined(given))
        except NotNumbersError as error:
            if error.row is None:
                raise
            row = int(np.searchsorted(np.cumsum(lengths), error.row, side="right"))
            raise NotNumbersError(f"holds an element that {error}", first + int(np.flatnonzero(present)[row])) from error
        return self._padded(steps, missing, lengths, present)

    def _padded(self, steps: Array, missing: Array | None, lengths: Array, present: Array) -> Masked:
        """Arrange elements in rows of equal length.

        Args:
            steps: The elements of all sequences, one after another.
            missing: A mask of those that are missing: of elements, or of their values; ``None``: none.
            lengths: The length of each sequence.
            present: A mask of the rows that have a sequence.

        Returns:
            The rows, and a mask of the missing values in the same shape; ``None``: none.
        """
        if not len(steps):
            steps = np.zeros((0, *self.step_shape), self.dtype or np.float32)
        if steps.shape[1:] != self.step_shape:
            raise NotNumbersError(
                f"has sequences of elements of shape {steps.shape[1:]}, but PadSequences expects {self.step_shape}: "
                f"set step_shape={steps.shape[1:]}."
            )
        dtype = np.dtype(self.dtype or steps.dtype)
        if not np.can_cast(steps.dtype, dtype, "same_kind"):
            raise NotNumbersError(
                f"holds {steps.dtype} values, which dtype={self.dtype!r} would truncate: choose another dtype."
            )
        if not _holds(dtype, self.value):
            raise NotNumbersError(f"holds {dtype} values, of which value={self.value!r} is none: set dtype.")
        kept = np.minimum(lengths, self.maxlen)
        source = np.cumsum(lengths) - lengths + (lengths - kept if self.truncating == "pre" else 0)
        target = self.maxlen - kept if self.padding == "pre" else np.zeros_like(kept)
        step = np.arange(kept.sum()) - np.repeat(np.cumsum(kept) - kept, kept)
        chosen = step + np.repeat(source, kept)
        place = (np.repeat(np.flatnonzero(present), kept), step + np.repeat(target, kept))
        values = np.full((len(present), *self.shape), self.value, dtype)
        values[place] = steps[chosen]
        if missing is None and present.all():
            return values, None
        mask = np.zeros(values.shape, bool)
        mask[~present] = True
        if missing is not None:
            mask[place] = missing[chosen].reshape(len(chosen), *(missing.shape[1:] or (1,) * len(self.step_shape)))
        return values, mask


def _joined(rows: Sequence[Any]) -> Any:
    """The elements of all sequences, one after another."""
    arrays = [row for row in rows if isinstance(row, np.ndarray)]
    if arrays and len(arrays) == len(rows) and len({row.shape[1:] for row in arrays}) == 1:
        return np.concatenate(arrays)
    return list(chain.from_iterable(rows))


def _holds(dtype: Any, value: float) -> bool:
    """Whether a dtype can represent a value; floating-point dtypes may round it."""
    with np.errstate(all="ignore"):
        return np.dtype(dtype).kind == "f" or bool(np.asarray(value).astype(dtype) == value)
