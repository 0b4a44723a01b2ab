"""Conversion of tf.train.Example to and from Arrow columns, without TensorFlow or a SparkSession, and the types of both.

An Example is a protocol buffer message: a map from feature names to lists of int64, float32 or byte strings::

    Example  {1: Features}                         Features {1: repeated {1: name, 2: Feature}}
    Feature  {1: bytes | 2: floats | 3: int64s}    each of these {1: repeated value}

Apart from a few bytes between rows, an Arrow column and lists of one kind consist of the same bytes, so whole columns are
converted at once and not value by value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkkeras.errors import ConfigurationError, DataError, known_names
from sparkkeras.weights import Array

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import DataType, StructType

BYTES, FLOATS, INTS = 1, 2, 3
KINDS = {BYTES: "bytes", FLOATS: "float", INTS: "int64"}
"""The name of each kind of list in error messages, by its field number in a Feature."""

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
"""The kind of list that holds the values of each Spark type."""

Features = dict[bytes, tuple[int, Any]]
"""The features of an Example by name: ``(kind, values)``; see `parse`."""

_ABSENT: tuple[int, Any] = (0, b"")
_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5
_ENCODINGS = {BYTES: {_DELIMITED}, FLOATS: {_DELIMITED, _FIXED32}, INTS: {_DELIMITED, _VARINT}}
_DTYPES = {
    "boolean": "bool",
    "tinyint": "int8",
    "smallint": "int16",
    "int": "int32",
    "bigint": "int64",
    "float": "float32",
    "double": "float64",
}
"""The dtype of the values of each Spark type."""


@dataclass(frozen=True)
class Field:
    """A column and the feature that it is stored as.

    Attributes:
        name: The name of the column and of the feature.
        value: The Spark type of a single value, one of `VALUES`.
        is_array: Whether a row holds an array of values instead of a single value.
        nullable: Whether records may lack the feature.
        is_vector: Whether the column holds Spark's vectors, as structs; for writing only.
    """

    name: str
    value: str
    is_array: bool = False
    nullable: bool = True
    is_vector: bool = False

    @property
    def kind(self) -> int:
        """The kind of list in the Example: `BYTES`, `FLOATS` or `INTS`."""
        return VALUES[self.value]

    @property
    def type_name(self) -> str:
        """The Spark type of the column."""
        return f"array<{self.value}>" if self.is_array else self.value


# Writing


def encode(batch: pa.RecordBatch, fields: Sequence[Field]) -> list[bytes]:
    """Encode the rows of a batch as Examples. A null becomes a missing feature.

    Args:
        batch: A column for each field, at least one.
        fields: The descriptions of the columns.

    Raises:
        DataError: An array contains a null, or a finite double is beyond the range of float32.
    """
    entries = [_entries(field, column) for field, column in zip(fields, batch.columns, strict=True)]
    bodies = map(b"".join, zip(*entries, strict=True))
    return [b"".join((b"\n", _varint(len(body)), body)) for body in bodies]


def _entries(field: Field, column: pa.Array) -> list[bytes]:
    """The encoded map entry of each row for a column; empty for a null."""
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
    """The bytes of a map entry before the values, for values of ``size`` bytes."""
    numbers = b"\n" + _varint(size) if kind != BYTES and size else b""
    feature = bytes([kind << 3 | _DELIMITED]) + _varint(len(numbers) + size) + numbers
    entry = b"\n" + _varint(len(name)) + name + b"\x12" + _varint(len(feature) + size) + feature
    return b"\n" + _varint(len(entry) + size) + entry


def _payloads(field: Field, column: pa.Array) -> Iterator[bytes]:
    """The encoded values of each row: packed numbers, or byte strings with their lengths."""
    flat, ends = _flat(field, column)
    if field.kind == BYTES:
        strings = [b"\n" + _varint(len(value)) + value for value in flat]
        return (b"".join(strings[start:end]) for start, end in _spans(ends))
    if field.kind == FLOATS:
        data, ends = _float32(field, flat).tobytes(), ends * 4
    else:
        data, sizes = _varints(flat)
        ends = np.concatenate([[0], np.cumsum(sizes)])[ends]
    return (data[start:end] for start, end in _spans(ends))


def _float32(field: Field, values: Array) -> Array:
    with np.errstate(over="ignore"):
        rounded = values.astype("<f4", copy=False)
    overflows = np.isinf(rounded) & np.isfinite(values)
    if overflows.any():
        raise DataError(
            f"column {field.name!r} holds {values[np.argmax(overflows)]}, which an Example cannot hold: it stores "
            "floating-point numbers as float32, which ends at 3.4e+38. Scale the column, replace such values, or cast them "
            "to string."
        )
    return rounded


def _spans(ends: Array) -> Iterator[tuple[int, int]]:
    places = ends.tolist()
    return zip([0, *places], places, strict=False)


def _flat(field: Field, column: pa.Array) -> tuple[Any, Array]:
    """The concatenated values of all rows, and the end of each row's values. A null has one value, in arrays none."""
    import pyarrow as pa

    if field.is_vector:
        column = _dense(column)
    if field.is_array:
        flat, ends = column.flatten(), np.cumsum(column.value_lengths().fill_null(0))
        if flat.null_count:
            raise DataError(
                f"column {field.name!r} holds an array that contains a null, which an Example cannot hold. Remove nulls, "
                f"for instance with array_compact({field.name}), or fill them with transform()."
            )
    else:
        flat, ends = column, np.arange(1, len(column) + 1)
    if field.kind == BYTES:
        return flat.cast(pa.binary()).fill_null(b"").to_pylist(), ends
    filled = flat.fill_null(False if field.value == "boolean" else 0)
    return filled.to_numpy(zero_copy_only=False), ends


def _dense(column: pa.Array) -> pa.Array:
    """Convert dense and sparse vectors, as structs, to lists."""
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
    """Encode integers as concatenated varints; also returns the size of each in bytes. Negative numbers take ten bytes."""
    numbers = values.astype(np.int64).view(np.uint64)
    sizes = np.searchsorted(_LIMITS, numbers, side="right") + 1
    places = np.arange(sizes.max(initial=1))
    groups = (numbers[:, None] >> _SHIFTS[: len(places)]).astype(np.uint8) & 0x7F
    groups[places < sizes[:, None] - 1] |= 0x80
    return groups[places < sizes[:, None]].tobytes(), sizes


# Reading


def parse(record: bytes) -> Features:
    """Parse an Example into its features: ``{name: (kind, values)}``.

    The values of `BYTES` are a list of byte strings; of `FLOATS` bytes with 4 for each value, little-endian; of `INTS` bytes
    with varints. A feature without a list of values has the kind 0, which is treated as a missing feature.

    Raises:
        ValueError: The record is not an Example; the message has the reason.
    """
    features: Features = {}
    try:
        for number, start, end in _fields(record, 0, len(record)):
            if number == 1:
                for part, first, last in _fields(record, start, end):
                    if part == 1:
                        name, feature = _entry(record, first, last)
                        features[name] = feature
    except IndexError as error:
        raise ValueError("the record ends within a number") from error
    return features


def _entry(data: bytes, start: int, end: int) -> tuple[bytes, tuple[int, Any]]:
    name, feature = b"", _ABSENT
    for number, first, last in _fields(data, start, end):
        if number == 1:
            name = data[first:last]
        elif number == 2:
            feature = _feature(data, first, last)
    return name, feature


def _feature(data: bytes, start: int, end: int) -> tuple[int, Any]:
    kind, parts = 0, list[bytes]()
    for number, first, last in _fields(data, start, end):
        if number not in KINDS:
            continue
        if number != kind:
            kind, parts = number, []
        for part, begin, stop in _fields(data, first, last, _ENCODINGS[kind]):
            if part == 1:
                parts.append(data[begin:stop])
    if kind == BYTES:
        return kind, parts
    values = parts[0] if len(parts) == 1 else b"".join(parts)
    if kind == FLOATS and len(values) % 4:
        raise ValueError("the size of a list of floats is not a multiple of 4 bytes")
    if kind == INTS and values and values[-1] >= 0x80:
        raise ValueError("a list of int64 ends within a number")
    return kind, values


def _fields(data: bytes, start: int, end: int, wanted: Set[int] = _ENCODINGS[BYTES]) -> Iterator[tuple[int, int, int]]:
    """The fields of a message that have one of these wire types: field number, and the start and end of the value."""
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
            raise ValueError(f"a field has the unknown wire type {encoding}")
        if stop > end:
            raise ValueError("a field extends beyond the end of its message")
        if encoding in wanted:
            yield tag >> 3, start, stop
        start = stop


def _number(data: bytes, start: int) -> tuple[int, int]:
    """Decode the varint at ``start``: its value and its end."""
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
    """Convert consecutive records of a file to a batch with a column for each field. Missing features become null.

    Args:
        records: The parsed records.
        fields: The columns.
        first: The index of the first record in the file, for error messages.
        file: The name of the file, for error messages.

    Raises:
        DataError: A feature has another kind than its column, not exactly one value for a column that is not an array, or a
            value outside the range of the column's type. The message has the file, the record and the feature.
    """
    import pyarrow as pa

    columns = []
    for field in fields:
        try:
            columns.append(_column(field, records))
        except _UnfitFeatureError as unfit:
            raise DataError(
                f"record {first + unfit.row} of {file}: feature {field.name!r} {unfit}, but the schema says "
                f"{field.name} {field.type_name}{'' if field.nullable else ' NOT NULL'}. Set a schema that fits all records."
            ) from None
    return pa.record_batch(columns, [field.name for field in fields])


class _UnfitFeatureError(Exception):
    """The value of a row does not fit its column. The message continues after the feature's name."""

    def __init__(self, row: int, message: str) -> None:
        super().__init__(message)
        self.row = row


def _column(field: Field, records: Sequence[Features]) -> pa.Array:
    import pyarrow as pa

    name = field.name.encode()
    found = [record.get(name, _ABSENT) for record in records]
    good = np.array([kind != 0 for kind, _ in found], bool)
    if not good.all() and not field.nullable:
        raise _UnfitFeatureError(int(np.argmin(good)), "is missing")
    for row, (kind, _) in enumerate(found):
        if kind not in (0, field.kind):
            raise _UnfitFeatureError(row, f"holds {KINDS[kind]} values")
    values, ends = _values(field, [value for kind, value in found if kind])
    lengths = np.zeros(len(records), np.int64)
    lengths[good] = np.diff(ends, prepend=0)
    if not field.is_array and (lengths[good] != 1).any():
        row = int(np.argmax(good & (lengths != 1)))
        raise _UnfitFeatureError(row, f"has {lengths[row]} values")
    stops = np.cumsum(lengths)
    column = _typed(field, values, stops)
    if field.is_array:
        offsets = pa.array(np.concatenate([[0], stops]).astype(np.int32))
        return pa.ListArray.from_arrays(offsets, column, mask=None if good.all() else pa.array(~good))
    if good.all():
        return column
    return column.take(pa.array(stops - 1, mask=~good))


def _values(field: Field, found: Sequence[Any]) -> tuple[Any, Array]:
    """The concatenated values of all rows that have the feature, and the end of each row's values."""
    sizes = np.cumsum([len(values) for values in found], dtype=np.int64)
    if field.kind == BYTES:
        return list(chain.from_iterable(found)), sizes
    data = b"".join(found)
    if field.kind == FLOATS:
        return np.frombuffer(data, "<f4"), sizes // 4
    numbers, count = _from_varints(np.frombuffer(data, np.uint8))
    return numbers, count[sizes]


def _from_varints(data: Array) -> tuple[Array, Array]:
    """Decode concatenated varints to int64; also returns how many end before each byte, and in total as the last item."""
    last = data < 0x80
    count = np.concatenate([[0], np.cumsum(last)])
    if last.all():
        return data.astype(np.int64), count
    starts = np.flatnonzero(np.concatenate([[True], last[:-1]]))
    places = np.arange(len(data)) - starts[count[:-1]]
    shifts = np.minimum(places * 7, 63).astype(np.uint64)
    return np.add.reduceat((data & 0x7F).astype(np.uint64) << shifts, starts).view(np.int64), count


def _typed(field: Field, values: Any, stops: Array) -> pa.Array:
    """Convert values to the type of their column."""
    import pyarrow as pa

    if field.kind == BYTES:
        try:
            return pa.array(values, pa.string() if field.value == "string" else pa.binary())
        except pa.ArrowInvalid:
            place = next(place for place, value in enumerate(values) if not is_text(value))
            raise _UnfitFeatureError(_row(place, stops), "holds bytes that are not UTF-8") from None
    dtype = _DTYPES[field.value]
    if field.kind == INTS:
        low, high = (0, 1) if dtype == "bool" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        outside = (values < low) | (values > high)
        if outside.any():
            place = int(np.argmax(outside))
            raise _UnfitFeatureError(_row(place, stops), f"holds {values[place]}")
    return pa.array(values.astype(dtype, copy=False))


def _row(place: int, stops: Array) -> int:
    """The row that the value at ``place`` belongs to."""
    return int(np.searchsorted(stops, place, side="right"))


# Schemas: the columns of a DataFrame as features, and columns inferred from records


BINARY_WITH_SCHEMA = (
    "binary_features applies only without a schema: leave it out, and declare these columns binary in the schema."
)


def fields_of(schema: StructType, written: bool = False) -> tuple[Field, ...]:
    """The features for the columns of a schema to read, or of a DataFrame to write.

    Raises:
        DataError: An Example cannot hold the type of a column.
        ConfigurationError: A schema to read has no columns, or several with the same name; for a DataFrame a `DataError`.
    """
    if not 0 < len(schema.names) == len(set(schema.names)):
        what = f"has the columns {schema.names}; expected at least one column and unique names"
        raise (
            DataError(f"the DataFrame {what}: rename with toDF(...).") if written else ConfigurationError(f"schema {what}.")
        )
    return tuple(_field(field.name, field.dataType, written, field.nullable) for field in schema)


def _field(name: str, kind: DataType, written: bool, nullable: bool) -> Field:
    from pyspark.sql.types import ArrayType

    if written and type(kind).__name__ == "VectorUDT":
        return Field(name, "double", is_array=True, is_vector=True)
    is_array = isinstance(kind, ArrayType)
    value = kind.elementType if isinstance(kind, ArrayType) else kind
    known = value.simpleString().partition(" ")[0]  # the type of a string may be followed by its collation
    if known in VALUES:
        return Field(name, known, is_array, nullable)
    type_name = known.partition("(")[0].partition("<")[0]
    raise DataError(
        f"column {name!r} has the type {kind.simpleString()}, which an Example cannot hold: expected a number, a boolean, a "
        f"string, bytes, or an array of these. {_REMEDIES.get(type_name, 'Cast it to one of these.')}"
    )


_REMEDIES = {
    "date": "Use unix_date(), and date_from_unix_date() after loading, or cast it to string.",
    "timestamp": "Use unix_micros(), and timestamp_micros() after loading, or cast it to string.",
    "timestamp_ntz": "Cast it to string.",
    "decimal": "Cast it to double (float32 in the file) or to string.",
    "map": "Use map_keys() and map_values() as separate columns, or to_json().",
    "struct": "Select its fields as separate columns, or use to_json().",
    "array": "Use flatten(), and store the shape in a separate column.",
    "vector": "Load it as array<float> and use pyspark.ml.functions.array_to_vector().",
}


def ddl(fields: Sequence[Field]) -> str:
    """The schema of a DataFrame with columns for fields."""
    return ", ".join(
        f"`{field.name.replace('`', '``')}` {field.type_name}{'' if field.nullable else ' NOT NULL'}" for field in fields
    )


def infer_fields(stats: Mapping[str, FeatureStats], path: str, binary: Sequence[str] = ()) -> tuple[Field, ...]:
    """The columns for the features of sampled records, sorted by name.

    Args:
        stats: The statistics of the features, by name.
        path: The path of the files, for error messages.
        binary: Names of features that become binary even if their bytes are valid UTF-8.

    Raises:
        DataError: There are no features, or one of ``binary`` is unknown or does not hold bytes.
    """
    if not stats:
        raise DataError(
            f"cannot infer the columns of {path!r}: no record sampled there has features. Set schema, for instance 'x "
            "array<float>, y bigint'."
        )
    for name in binary:
        if name not in stats:
            raise DataError(f"binary_features: {path!r} has no feature {name!r}. {known_names(name, stats)}")
        if stats[name].kind != BYTES:
            raise DataError(
                f"binary_features: feature {name!r} holds {KINDS[stats[name].kind]} values in {stats[name].where}; expected "
                "bytes. Leave it out."
            )
    return tuple(stats[name].field(name in binary) for name in sorted(stats))


@dataclass(frozen=True)
class FeatureStats:
    """What sampled records show about a feature.

    Attributes:
        name: The name of the feature.
        kind: The kind of its values.
        is_array: Whether a record has no or several values.
        is_text: Whether all byte strings are valid UTF-8.
        where: The first record with the feature, for error messages.
    """

    name: str
    kind: int
    is_array: bool
    is_text: bool
    where: str

    @classmethod
    def of(cls, name: bytes, kind: int, values: Any, where: str) -> FeatureStats:
        """The statistics of one record."""
        if not is_text(name):
            raise DataError(f"{where} has a feature whose name {name!r} is not UTF-8, so it is not an Example.")
        count = len(values) if kind == BYTES else len(values) // 4 if kind == FLOATS else sum(v < 0x80 for v in values[:20])
        return cls(name.decode(), kind, count != 1, kind != BYTES or all(map(is_text, values)), where)

    def field(self, binary: bool) -> Field:
        """The column for the feature; ``binary`` keeps byte strings binary."""
        texts = "string" if self.is_text and not binary else "binary"
        return Field(self.name, {BYTES: texts, FLOATS: "float", INTS: "bigint"}[self.kind], self.is_array)


def merge_stats(stats: Iterable[FeatureStats]) -> dict[str, FeatureStats]:
    """Merge the statistics of each feature, by name.

    Raises:
        DataError: Records hold different kinds of values for the same feature.
    """
    known: dict[str, FeatureStats] = {}
    for new in stats:
        old = known.get(new.name, new)
        if old.kind != new.kind:
            raise DataError(
                f"feature {new.name!r} holds {KINDS[old.kind]} values in {old.where}, but {KINDS[new.kind]} values in "
                f"{new.where}, but a column has a single type. Load such files separately, each with its schema."
            )
        known[new.name] = replace(old, is_array=old.is_array or new.is_array, is_text=old.is_text and new.is_text)
    return known


def collect_stats(records: Iterable[tuple[Features, str]]) -> dict[str, FeatureStats]:
    """Collect the statistics of each feature from records; each record comes with its name for error messages.

    Raises:
        DataError: Records hold different kinds of values for the same feature, or a name is not UTF-8.
    """
    return merge_stats(
        FeatureStats.of(name, kind, values, where)
        for features, where in records
        for name, (kind, values) in features.items()
        if kind
    )


def is_text(value: bytes) -> bool:
    """Whether bytes are UTF-8."""
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True
