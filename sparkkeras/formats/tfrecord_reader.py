"""Reading TFRecord files in batches of columns, and a sample of their records."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceReader, InputPartition

from sparkkeras.errors import DataError, known_names, warn
from sparkkeras.formats.examples import Features, Field, decode, parse
from sparkkeras.formats.records import EMPTY_BYTES, read_records
from sparkkeras.formats.tfrecord_files import open_file

if TYPE_CHECKING:
    import pyarrow as pa

_log = logging.getLogger(__name__)

SAMPLED_FILES = 8
SAMPLED_RECORDS = 256
_BATCH_RECORDS = 4096
_BATCH_BYTES = 16 << 20


def sampled_files(sizes: Mapping[str, int]) -> list[str]:
    """A few of the files with records, spread evenly over their names."""
    names = sorted(name for name, size in sizes.items() if size > EMPTY_BYTES)
    count = min(len(names), SAMPLED_FILES)
    return [names[number * len(names) // count] for number in range(count)]


@dataclass(frozen=True)
class TFRecordReader(DataSourceReader):
    """Reads each file as a partition.

    Attributes:
        files: Their pyarrow file system.
        names: Their paths on it.
        fields: The columns.
        schema: The Arrow schema that Spark expects.
    """

    files: Any
    names: list[str]
    fields: tuple[Field, ...]
    schema: pa.Schema

    def partitions(self) -> list[InputPartition]:
        """A partition for each file."""
        return [InputPartition(name) for name in self.names]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the file of a partition, in batches of the schema that Spark expects."""
        if partition.value is not None:  # which Spark passes if there are no partitions
            with open_file(self.files, partition.value) as file:
                for batch in read_batches(file, partition.value, self.fields):
                    yield batch.cast(self.schema)


def read_batches(file: io.BufferedReader, name: str, fields: Sequence[Field]) -> Iterator[pa.RecordBatch]:
    """Read a file in batches of at most some thousand records.

    Raises:
        DataError: The file is damaged, or a record does not fit the fields.
    """
    first, held, size = 0, list[Features](), 0
    for features, length in _parsed(file, name):
        held.append(features)
        size += length
        if len(held) == _BATCH_RECORDS or size > _BATCH_BYTES:
            yield decode(held, fields, first, name)
            first, held, size = first + len(held), [], 0
    if held:
        yield decode(held, fields, first, name)


def read_sample(files: Iterable[tuple[str, io.BufferedReader]]) -> Iterator[tuple[Features, str]]:
    """Read the first few hundred records over files, at most 16 MB, each with its name for error messages.

    Args:
        files: Names and files; each is taken from the iterable only after the end of the one before.
    """
    count = size = 0
    for name, file in files:
        with file:
            for number, (features, length) in enumerate(_parsed(file, name)):
                yield features, f"record {number} of {name}"
                count, size = count + 1, size + length
                if count == SAMPLED_RECORDS or size > _BATCH_BYTES:
                    return


def warn_of_unknown(path: str, fields: Sequence[Field], files: Iterable[tuple[str, io.BufferedReader]]) -> None:
    """Warn of columns of a schema that the first records lack: their names may be misspelled.

    Errors are ignored here; the task that reads the file raises them.

    Args:
        path: The path of the files, for messages.
        fields: The columns.
        files: Names and files; opened one after the other, until each column is found.
    """
    unknown, seen = {field.name for field in fields}, set[str]()
    try:
        for features, _ in read_sample(files):
            seen.update(name.decode(errors="replace") for name, (kind, _) in features.items() if kind)
            unknown -= seen
            if not unknown:
                return
    except Exception:
        _log.debug("cannot read the first records of %s", path, exc_info=True)
        return
    if seen:
        missing = [field.name for field in fields if field.name in unknown]
        warn(
            f"schema: the first records of {path!r} have no feature {' or '.join(map(repr, missing))}; the column is null "
            f"in records without the feature. {known_names(missing[0], seen)}"
        )


def _parsed(file: io.BufferedReader, name: str) -> Iterator[tuple[Features, int]]:
    """Yield the features of each record and its size in bytes."""
    for number, record in enumerate(read_records(file, name)):
        try:
            yield parse(record), len(record)
        except ValueError as error:
            raise DataError(f"record {number} of {name} is not a tf.train.Example: {error}.") from error
