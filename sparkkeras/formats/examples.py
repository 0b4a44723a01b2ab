"""tf.train.Example, to and from Arrow columns, without TensorFlow. Knows neither files nor Spark.

An Example is a protocol buffer, in short a map from names to lists of int64, float32 or byte strings::

    Example  {1: Features}                         Features {1: repeated {1: name, 2: Feature}}
    Feature  {1: bytes | 2: floats | 3: int64s}    each of these {1: repeated value}

A column and one kind of list are the same bytes but for a few numbers between the rows, so columns are turned at once and
not value by value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkkeras.errors import DataError
from sparkkeras.weights import Array

if TYPE_CHECKING:
    import pyarrow as pa

BYTES, FLOATS, INTS = 1, 2, 3
KINDS = {BYTES: "bytes", FLOATS: "float", INTS: "int64"}
"""What messages call a list of values, by its number in a Feature."""

VALUES = {
    "boolean": INTS,
    "tinyint": INTS,
    "smallint": INTS,
    "int": INTS,
    "bigint": INTS,
    "float": FLOATS,
    "double": FLOATS,
    "string": BYTES,
    "binary": BYTES,
}
"""What stands for a value of each Spark type."""

Features = dict[bytes, tuple[int, Any]]
"""The features of an Example: the kind of each, and its values; see `parse`."""

_ABSENT: tuple[int, Any] = (0, b"")
_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5
_ENCODINGS = {BYTES: {_DELIMITED}, FLOATS: {_DELIMITED, _FIXED32}, INTS: {_DELIMITED, _VARINT}}
_DTYPES = {
    "boolean": np.dtype(np.bool_),
    "tinyint": np.dtype(np.int8),
    "smallint": np.dtype(np.int16),
    "int": np.dtype(np.int32),
    "bigint": np.dtype(np.int64),
    "float": np.dtype(np.float32),
    "double": np.dtype(np.float64),
}
_RANGES = {
    "boolean": (0, 1),
    "tinyint": (-(2**7), 2**7 - 1),
    "smallint": (-(2**15), 2**15 - 1),
    "int": (-(2**31), 2**31 - 1),
    "bigint": (-(2**63), 2**63 - 1),
}


@dataclass(frozen=True)
class Field:
    """A column that is a feature.

    Attributes:
        name: Its name.
        value: The Spark type of a value, one of `VALUES`.
        is_array: Whether a row holds any number of them, and not one.
        nullable: Whether records may lack it.
        is_vector: Whether the column, which is written, holds MLlib's vectors in Spark's form of them.
    """

    name: str
    value: str
    is_array: bool = False
    nullable: bool = True
    is_vector: bool = False

    @property
    def kind(self) -> int:
        """What its values are in an Example."""
        return VALUES[self.value]

    @property
    def type_name(self) -> str:
        """Its Spark type."""
        return f"array<{self.value}>" if self.is_array else self.value


# Writing


def encode(batch: pa.RecordBatch, fields: Sequence[Field]) -> list[bytes]:
    """The rows of a batch as Examples. A null is a feature that is not there.

    Args:
        batch: A column for each field, at least one.
        fields: What the columns are.

    Raises:
        DataError: An array holds a null.
    """
    entries = [_entries(field, column) for field, column in zip(fields, batch.columns, strict=True)]
    bodies = map(b"".join, zip(*entries, strict=True))
    return [b"".join((b"\n", _varint(len(body)), body)) for body in bodies]


def _entries(field: Field, column: pa.Array) -> list[bytes]:
    """What each row adds to its Example for a column."""
    name = field.name.encode()
    heads: dict[int, bytes] = {}
    entries = []
    for payload, good in zip(_payloads(field, column), column.is_valid().to_pylist(), strict=True):
        size = len(payload)
        if size not in heads:
            heads[size] = _head(name, field.kind, size)
        entries.append(heads[size] + payload if good else b"")
    return entries


def _head(name: bytes, kind: int, size: int) -> bytes:
    """All that stands before the values of a feature, if these have so many bytes."""
    numbers = b"\n" + _varint(size) if kind != BYTES and size else b""
    feature = bytes([kind << 3 | _DELIMITED]) + _varint(len(numbers) + size) + numbers
    entry = b"\n" + _varint(len(name)) + name + b"\x12" + _varint(len(feature) + size) + feature
    return b"\n" + _varint(len(entry) + size) + entry


def _payloads(field: Field, column: pa.Array) -> Iterator[bytes]:
    """The values of each row: numbers packed, each byte string behind its length."""
    flat, ends = _flat(field, column)
    if field.kind == BYTES:
        strings = [b"\n" + _varint(len(value)) + value for value in flat]
        return (b"".join(strings[start:end]) for start, end in _spans(ends))
    if field.kind == FLOATS:
        with np.errstate(over="ignore"):  # what float32 cannot hold is infinite there
            data, ends = flat.astype("<f4", copy=False).tobytes(), ends * 4
    else:
        data, sizes = _varints(flat)
        ends = np.concatenate([[0], np.cumsum(sizes)])[ends]
    return (data[start:end] for start, end in _spans(ends))


def _spans(ends: Array) -> Iterator[tuple[int, int]]:
    places = ends.tolist()
    return zip([0, *places], places, strict=False)


def _flat(field: Field, column: pa.Array) -> tuple[Any, Array]:
    """The values of all rows behind one another, and where each row's end. A null has as many as its type wants."""
    import pyarrow as pa

    if field.is_vector:
        column = _dense(column)
    if field.is_array:
        lengths = np.diff(column.offsets.to_numpy())
        lengths[~column.is_valid().to_numpy(zero_copy_only=False)] = 0
        flat, ends = column.flatten(), np.cumsum(lengths)
        if flat.null_count:
            raise DataError(
                f"column {field.name!r} holds an array with a null in it, which an Example cannot hold. Leave such values "
                f"out, for instance with array_compact({field.name}), or fill them with transform()."
            )
    else:
        flat, ends = column, np.arange(1, len(column) + 1)
    if field.kind == BYTES:
        return flat.cast(pa.binary()).fill_null(b"").to_pylist(), ends
    filled = flat.fill_null(False if field.value == "boolean" else 0)
    return filled.to_numpy(zero_copy_only=False), ends


def _dense(column: pa.Array) -> pa.Array:
    """MLlib's vectors as lists."""
    import pyarrow as pa

    def values(vector: dict[str, Any] | None) -> Any:
        if vector is None or vector["type"] == 1:
            return None if vector is None else vector["values"]
        full = np.zeros(vector["size"])
        full[vector["indices"]] = vector["values"]
        return full

    kinds = column.field("type")
    if not column.null_count and (kinds.to_numpy() == 1).all():
        return column.field("values")
    return pa.array([values(vector) for vector in column.to_pylist()], pa.list_(pa.float64()))


def _varint(value: int) -> bytes:
    if value < 0x80:
        return bytes([value])
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


_SHIFTS = np.arange(0, 70, 7, dtype=np.uint64)
_LIMITS = np.uint64(1) << _SHIFTS[1:]


def _varints(values: Array) -> tuple[bytes, Array]:
    """Whole numbers as varints behind one another, and the bytes of each; negative ones have ten."""
    numbers = values.astype(np.int64).view(np.uint64)
    sizes = np.searchsorted(_LIMITS, numbers, side="right") + 1
    places = np.arange(sizes.max(initial=1))
    groups = (numbers[:, None] >> _SHIFTS[: len(places)]).astype(np.uint8) & 0x7F
    groups[places < sizes[:, None] - 1] |= 0x80
    return groups[places < sizes[:, None]].tobytes(), sizes


# Reading


def parse(record: bytes) -> Features:
    """The features of an Example by name: the kind of each, and its values.

    The values of `BYTES` are a list of byte strings; of `FLOATS`, bytes of 4 each, little-endian; of `INTS`, varints. A
    feature of no kind is as good as none and has the kind 0.

    Raises:
        ValueError: It is no Example; the message says why.
    """
    features: Features = {}
    try:
        for number, encoding, start, end in _fields(record, 0, len(record)):
            if number == 1 and encoding == _DELIMITED:
                for part, wire, first, last in _fields(record, start, end):
                    if part == 1 and wire == _DELIMITED:
                        name, feature = _entry(record, first, last)
                        features[name] = feature
    except IndexError as error:
        raise ValueError("it ends within a number") from error
    return features


def _entry(data: bytes, start: int, end: int) -> tuple[bytes, tuple[int, Any]]:
    name, feature = b"", _ABSENT
    for number, encoding, first, last in _fields(data, start, end):
        if encoding == _DELIMITED and number == 1:
            name = data[first:last]
        elif encoding == _DELIMITED and number == 2:
            feature = _feature(data, first, last)
    return name, feature


def _feature(data: bytes, start: int, end: int) -> tuple[int, Any]:
    kind, parts = 0, list[bytes]()
    for number, encoding, first, last in _fields(data, start, end):
        if encoding != _DELIMITED or number not in KINDS:
            continue
        if number != kind:
            kind, parts = number, []
        for part, wire, begin, stop in _fields(data, first, last):
            if part == 1 and wire in _ENCODINGS[kind]:
                parts.append(data[begin:stop])
    if kind == BYTES:
        return kind, parts
    values = parts[0] if len(parts) == 1 else b"".join(parts)
    if kind == FLOATS and len(values) % 4:
        raise ValueError("a list of floats has a broken length")
    if kind == INTS and values and values[-1] >= 0x80:
        raise ValueError("a list of int64 ends within a number")
    return kind, values


def _fields(data: bytes, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """The fields of a message: number, encoding, and where the value begins and ends."""
    while start < end:
        tag = data[start]
        start += 1
        if tag >= 0x80:
            tag, start = _number(data, start - 1)
        encoding = tag & 7
        if encoding == _DELIMITED:
            size = data[start]
            start += 1
            if size >= 0x80:
                size, start = _number(data, start - 1)
            stop = start + size
        elif encoding == _VARINT:
            stop = _number(data, start)[1]
        elif encoding == _FIXED32:
            stop = start + 4
        elif encoding == _FIXED64:
            stop = start + 8
        else:
            raise ValueError(f"it has a field of the unknown encoding {encoding}")
        if stop > end:
            raise ValueError("a field reaches beyond its end")
        yield tag >> 3, encoding, start, stop
        start = stop


def _number(data: bytes, start: int) -> tuple[int, int]:
    """The varint that begins here, and where it ends."""
    value = shift = 0
    while True:
        byte = data[start]
        start += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, start
        shift += 7
        if shift > 63:
            raise ValueError("a number has more than ten bytes")


def decode(records: Sequence[Features], fields: Sequence[Field], first: int, file: str) -> pa.RecordBatch:
    """Consecutive records of a file as a batch with a column for each field. Features that are not there are null.

    Args:
        records: The records, parsed.
        fields: The columns.
        first: The number of the first record in the file, for messages.
        file: The file, for messages.

    Raises:
        DataError: A feature is of another kind than its column, has not one value where the column is no array, or a value
            that the column's type does not hold. It names file, record and feature.
    """
    import pyarrow as pa

    columns = []
    for field in fields:
        try:
            columns.append(_column(field, records))
        except _UnfitError as unfit:
            raise DataError(
                f"record {first + unfit.row} of {file}: feature {field.name!r} {unfit}, but the schema says "
                f"{field.name} {field.type_name}{'' if field.nullable else ' NOT NULL'}. Give schema= that fits all records."
            ) from None
    return pa.record_batch(columns, [field.name for field in fields])


class _UnfitError(Exception):
    """The value of a row does not fit its column; the message goes on from the feature's name."""

    def __init__(self, row: int, message: str) -> None:
        super().__init__(message)
        self.row = row


def _column(field: Field, records: Sequence[Features]) -> pa.Array:
    import pyarrow as pa

    name = field.name.encode()
    found = [record.get(name, _ABSENT) for record in records]
    good = np.array([kind != 0 for kind, _ in found], bool)
    if not good.all() and not field.nullable:
        raise _UnfitError(int(np.argmin(good)), "is missing")
    for row, (kind, _) in enumerate(found):
        if kind not in (0, field.kind):
            raise _UnfitError(row, f"holds {KINDS[kind]} values")
    values, ends = _values(field, [value for kind, value in found if kind])
    lengths = np.zeros(len(records), np.int64)
    lengths[good] = np.diff(ends, prepend=0)
    if not field.is_array and (lengths[good] != 1).any():
        row = int(np.argmax(good & (lengths != 1)))
        raise _UnfitError(row, f"has {lengths[row]} values")
    stops = np.cumsum(lengths)
    column = _typed(field, values, stops)
    if field.is_array:
        offsets = pa.array(np.concatenate([[0], stops]).astype(np.int32))
        return pa.ListArray.from_arrays(offsets, column, mask=None if good.all() else pa.array(~good))
    if good.all():
        return column
    return column.take(pa.array(stops - 1, mask=~good))


def _values(field: Field, found: Sequence[Any]) -> tuple[Any, Array]:
    """The values of all rows that have some behind one another, and where each row's end."""
    sizes = np.cumsum([len(values) for values in found], dtype=np.int64)
    if field.kind == BYTES:
        return list(chain.from_iterable(found)), sizes
    data = b"".join(found)
    if field.kind == FLOATS:
        return np.frombuffer(data, "<f4"), sizes // 4
    numbers, count = _from_varints(np.frombuffer(data, np.uint8))
    return numbers, count[sizes]


def _from_varints(data: Array) -> tuple[Array, Array]:
    """The int64 values of varints behind one another, and how many have ended before each byte and behind the last."""
    last = data < 0x80
    count = np.concatenate([[0], np.cumsum(last)])
    if last.all():
        return data.astype(np.int64), count
    starts = np.flatnonzero(np.concatenate([[True], last[:-1]]))
    places = np.arange(len(data)) - starts[count[:-1]]
    shifts = np.minimum(places * 7, 63).astype(np.uint64)
    return np.add.reduceat((data & 0x7F).astype(np.uint64) << shifts, starts).view(np.int64), count


def _typed(field: Field, values: Any, stops: Array) -> pa.Array:
    """Values in the type of their column."""
    import pyarrow as pa

    if field.kind == BYTES:
        try:
            return pa.array(values, pa.string() if field.value == "string" else pa.binary())
        except pa.ArrowInvalid:
            place = next(place for place, value in enumerate(values) if not is_text(value))
            raise _UnfitError(_row(place, stops), "holds bytes that are not UTF-8") from None
    if field.kind == FLOATS:
        return pa.array(values.astype(_DTYPES[field.value], copy=False))
    low, high = _RANGES[field.value]
    outside = (values < low) | (values > high)
    if outside.any():
        place = int(np.argmax(outside))
        raise _UnfitError(_row(place, stops), f"holds {values[place]}")
    return pa.array(values.astype(_DTYPES[field.value], copy=False))


def _row(place: int, stops: Array) -> int:
    """The row that a value stands in."""
    return int(np.searchsorted(stops, place, side="right"))


# What records hold


@dataclass(frozen=True)
class FeatureStats:
    """What was seen of a feature.

    Attributes:
        name: Its name.
        kind: What its values are.
        is_array: Whether a record had none or several.
        is_text: Whether all bytes were UTF-8.
        where: The first record that had it.
    """

    name: str
    kind: int
    is_array: bool
    is_text: bool
    where: str

    @classmethod
    def of(cls, name: str, kind: int, values: Any, where: str) -> FeatureStats:
        """What one record has."""
        count = len(values) if kind == BYTES else len(values) // 4 if kind == FLOATS else sum(v < 0x80 for v in values[:20])
        return cls(name, kind, count != 1, kind != BYTES or all(map(is_text, values)), where)

    def field(self, binary: bool) -> Field:
        """The column that it becomes."""
        texts = "string" if self.is_text and not binary else "binary"
        return Field(self.name, {BYTES: texts, FLOATS: "float", INTS: "bigint"}[self.kind], self.is_array)


def together(seen: Iterable[FeatureStats]) -> dict[str, FeatureStats]:
    """What was seen of each feature, by name.

    Raises:
        DataError: Records hold different kinds of values under one name.
    """
    known: dict[str, FeatureStats] = {}
    for new in seen:
        old = known.get(new.name, new)
        if old.kind != new.kind:
            raise DataError(
                f"feature {new.name!r} holds {KINDS[old.kind]} values in {old.where}, but {KINDS[new.kind]} values in "
                f"{new.where}: a column has one type. Load such files apart, each with its schema=."
            )
        known[new.name] = FeatureStats(
            old.name, old.kind, old.is_array or new.is_array, old.is_text and new.is_text, old.where
        )
    return known


def survey(records: Iterable[tuple[Features, str]]) -> dict[str, FeatureStats]:
    """What was seen of each feature in records, each with what messages call it.

    Raises:
        DataError: As `together`; or a name is not UTF-8.
    """

    def each() -> Iterator[FeatureStats]:
        for features, where in records:
            for name, (kind, values) in features.items():
                if not is_text(name):
                    raise DataError(f"{where} has a feature whose name {name!r} is not UTF-8, so it is no Example.")
                if kind:
                    yield FeatureStats.of(name.decode(), kind, values, where)

    return together(each())


def is_text(value: bytes) -> bool:
    """Whether bytes are UTF-8."""
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True
