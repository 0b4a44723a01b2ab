"""TFRecord files of tf.train.Example as a data source of Spark's Python API.

Spark creates the data source, plans reads and commits writes in Python processes on the driver's machine (behind Spark
Connect on the server's), which have no SparkSession, and which may lack this package, as executors may. So the class is
pickled with the code that it uses (`_PICKLED`), and files are listed and opened with pyarrow.fs.
"""

from __future__ import annotations

import copyreg
import io
import logging
import pickle
import sys
import threading
import uuid
from abc import ABCMeta
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    InputPartition,
    WriterCommitMessage,
)

from sparkkeras.arguments import one_of
from sparkkeras.errors import ConfigurationError, DataError, StorageError, known_names, warn
from sparkkeras.formats.examples import (
    BINARY_WITH_SCHEMA,
    Features,
    Field,
    collect_stats,
    ddl,
    decode,
    encode,
    fields_of,
    infer_fields,
    parse,
)
from sparkkeras.formats.records import EMPTY_BYTES, SUFFIXES, compressor, framed, read_records
from sparkkeras.formats.tfrecord_files import BUFFER_BYTES, file_system, list_files, open_file, storage_errors

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

_log = logging.getLogger(__name__)

# Reading files in batches of columns, and a sample of their records

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


# Writing: tasks write to temporary files, and the commit moves all of them to the output folder


_OBJECT_STORES = {"s3", "gcs", "abfs"}
"""The file systems, by pyarrow's names, that cannot rename a folder, and where a file appears only when it is complete.

Spark's have other names, in `sparkkeras.spark.filesystem`, and rename folders in Azure, as pyarrow does not (arrow#40405).
"""


@dataclass(frozen=True)
class _WrittenFile(WriterCommitMessage):
    """The name and the size in bytes of a file that a task has written."""

    name: str
    size: int


@dataclass(frozen=True)
class TFRecordWriter(DataSourceArrowWriter):
    """Writes each partition to a file, and moves all files to the output folder at the end.

    Attributes:
        fields: The columns.
        mode: ``"append"``, ``"overwrite"`` or ``"error"``.
        compression: The compression of the files, or ``None``.
        label: The path that the user passed, for error messages.
        files: The pyarrow file system of the output folder.
        path: Its path on this file system.
        run_id: A unique part of the names of this run's files and temporary folders.
        temporary: The folder that the output is written to and that is renamed at the end; ``None`` where folders cannot be
            renamed, and files appear only when they are complete.
    """

    fields: tuple[Field, ...]
    mode: str
    compression: str | None
    label: str
    files: Any
    path: str
    run_id: str
    temporary: str | None

    @classmethod
    def of(cls, path: str, fields: tuple[Field, ...], mode: str, compression: str | None) -> TFRecordWriter:
        """Create the writer of a job, and the folders that its tasks write to.

        Raises:
            ConfigurationError: The path does not name a folder.
            StorageError: The path already exists and may not, or cannot be reached.
        """
        if not path.strip("/"):
            raise ConfigurationError(f"path={path!r}: expected the path of a folder, as a str.")
        files, place = file_system(path)
        place, run_id = place.rstrip("/"), uuid.uuid4().hex[:12]
        temporary = None if files.type_name in _OBJECT_STORES else f"{_beside(place)}.{run_id}.tmp"
        writer = cls(fields, mode, compression, path, files, place, run_id, temporary)
        with writer._errors():
            writer._exists()
            files.create_dir(writer._complete, recursive=True)
            files.create_dir(writer._partial, recursive=True)
        return writer

    @property
    def _complete(self) -> str:
        """The folder for complete files."""
        return f"{self.temporary}/complete" if self.temporary else self.path

    @property
    def _partial(self) -> str:
        """The folder for files that are being written."""
        return f"{self.temporary}/partial" if self.temporary else self.path

    def _errors(self) -> Any:
        return storage_errors(f"cannot write {self.label!r}")

    def _exists(self) -> bool:
        """Return whether the output folder exists. Raise `StorageError` if the mode does not allow what is at the path."""
        from pyarrow import fs

        found = self.files.get_file_info(self.path).type
        if self.mode == "error" and found != fs.FileType.NotFound:
            raise StorageError(f'{self.label!r} already exists: set mode="overwrite" to replace it, or use another path.')
        if self.mode == "append" and found == fs.FileType.File:
            raise StorageError(f"{self.label!r} is a file: append to a folder, or write to another path.")
        return bool(found != fs.FileType.NotFound)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> _WrittenFile:
        """Write the file of a partition, and return its name and size."""
        from pyspark import TaskContext

        context = TaskContext.get()
        # Two attempts of a task may run at once, and one may continue after the commit. In an object store its file could
        # not be removed then, so both attempts use the same name and write the same rows.
        attempt = f"-{uuid.uuid4().hex[:8]}" if self.temporary else ""
        partition = 0 if context is None else context.partitionId()
        name = f"part-{partition:05d}-{self.run_id}{attempt}{SUFFIXES[self.compression]}"
        path = f"{self._partial}/{name}"
        try:
            size = self._write(path, iterator)
            if self.temporary:
                self.files.move(path, f"{self._complete}/{name}")
        except BaseException:
            with suppress(OSError):
                self.files.delete_file(path)
            raise
        return _WrittenFile(name, size)

    def _write(self, path: str, batches: Iterator[pa.RecordBatch]) -> int:
        with self.files.open_output_stream(path, compression=None, buffer_size=BUFFER_BYTES) as file:
            for pieces in encoded(batches, self.fields, self.compression):
                for piece in pieces:
                    file.write(piece)
            return int(file.tell())

    def commit(self, messages: Sequence[Any]) -> None:
        """Check that all files of the tasks exist, and move them to the output folder."""
        with self._errors():
            written = {message.name: message.size for message in messages if message is not None}
            found = self._listed(self._complete)
            sizes = {info.base_name: info.size for info in found}
            lost = [name for name, size in written.items() if sizes.get(name) != size]
            if lost:
                raise StorageError(
                    f"{len(lost)} of {len(written)} file(s) that workers wrote to {self.label!r} are not visible on the "
                    f"driver, the first one {lost[0]}: use a path on a disk or file system that the driver and all workers "
                    "share."
                )
            for info in found if self.temporary or self.mode == "overwrite" else ():
                if info.base_name not in written:  # from an unused task attempt, or replaced by this run
                    self.files.delete_file(info.path)
            if not self.temporary:
                self._mark(self.path)
            elif not self._exists():  # another process may have created it in the meantime
                self._mark(self._complete)
                self.files.move(self._complete, self.path)
            elif self.mode == "append":
                for name in written:
                    self.files.move(f"{self._complete}/{name}", f"{self.path}/{name}")
                self._mark(self.path)
            else:
                self._replace()
        self._remove_temporary()

    def _replace(self) -> None:
        from pyarrow import fs

        self._mark(self._complete)
        old = f"{_beside(self.path)}.{self.run_id}.old"
        self.files.move(self.path, old)
        try:
            self.files.move(self._complete, self.path)
        except OSError:
            self.files.move(old, self.path)
            raise
        if self.files.get_file_info(old).type == fs.FileType.Directory:
            self.files.delete_dir(old)
        else:
            self.files.delete_file(old)

    def _mark(self, folder: str) -> None:
        with self.files.open_output_stream(f"{folder}/_SUCCESS"):
            pass

    def _listed(self, folder: str) -> list[Any]:
        from pyarrow import fs

        selected = fs.FileSelector(folder, allow_not_found=True, recursive=self.temporary is None)
        return [info for info in self.files.get_file_info(selected) if info.type == fs.FileType.File]

    def abort(self, messages: Sequence[Any]) -> None:
        """Delete the files of this run."""
        self._remove_temporary()
        with suppress(OSError):
            for info in self._listed(self.path) if self.mode == "append" or not self.temporary else ():
                if self.run_id in info.base_name:
                    self.files.delete_file(info.path)

    def _remove_temporary(self) -> None:
        if self.temporary:
            with suppress(OSError):
                self.files.delete_dir(self.temporary)


def encoded(
    batches: Iterator[pa.RecordBatch], fields: Sequence[Field], compression: str | None
) -> Iterator[Iterable[bytes]]:
    """Encode rows as the bytes of a file: pieces of them for each batch, and at the end."""
    packed = compressor(compression)
    for batch in batches:
        yield (packed.compress(framed(record)) for record in encode(batch, fields))
    yield (packed.flush(),)


def _beside(path: str) -> str:
    """The path of a hidden file beside a path, without the end of its name."""
    parent, slash, name = path.rpartition("/")
    return f"{parent}{slash}.{name}"


# The data source


class _PickledByValue(ABCMeta):
    """The type of classes that are pickled with the code that they use, instead of as the name of a module."""


_PICKLED = (
    "arguments",
    "errors",
    "formats.examples",
    "formats.records",
    "formats.tfrecord_files",
    "formats.tfrecord_source",
    "spark.filesystem",
)
"""The modules of this package with code that the data source uses."""

_OPTIONS = ("binary_features", "compression")
_OPTIONS_OF_SPARK = ("path", "paths", "location", "owner", "provider")
"""The options that Spark adds; the last three when it creates a table."""

_pickling = threading.Lock()


def _by_value(kind: type) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
    from pyspark import cloudpickle

    modules = [sys.modules[f"sparkkeras.{name}"] for name in _PICKLED]
    with _pickling:
        for module in modules:
            cloudpickle.register_pickle_by_value(module)
        try:
            return pickle.loads, (cloudpickle.dumps(kind),)
        finally:
            for module in modules:
                cloudpickle.unregister_pickle_by_value(module)


copyreg.pickle(_PickledByValue, _by_value)


class TFRecordDataSource(DataSource, metaclass=_PickledByValue):
    """The format ``"tfrecord"`` for Spark's DataFrame readers and writers: files of tf.train.Example, without a jar.

    Columns and features correspond as in `sparkkeras.save_as_tfrecords` and `sparkkeras.load_tfrecords`. Spark sends the
    class to its processes together with the code that it uses: they need pyarrow and google-crc32c, and not this package.

    **Reading.** ``path`` is a file or a folder; on local disks also a glob. Of a folder, all files are read except hidden
    ones and those whose names start with ``_``, and of its subfolders those with names like ``column=value``, which does not
    become a column. Each file is a partition, which is streamed and may have any size. The compression is detected from the
    content. Without a schema, the columns are inferred from the first records of several files, which the driver reads when
    ``load`` is called. With a schema, the driver reads first records when the query is planned, and writes a warning to its
    standard error (with Spark Connect, to the server's) if they all lack a column of the schema.

    **Writing.** Spark supports the modes ``"append"`` and ``"overwrite"`` for such formats; for its other modes it raises
    an error (`sparkkeras.save_as_tfrecords` rejects existing paths). Each partition becomes a file. If a task fails, all
    files of the job are deleted. Overwriting replaces the folder when the new one is complete. Appending moves complete
    files into the folder one by one. ``_SUCCESS`` is written last. There is no ``partitionBy``, and no streaming.

    **Options.** ``compression`` (of the files to write): ``none``, ``gzip`` or ``zlib``. ``binary_features`` (only without a
    schema): names of features to load as binary even if their bytes are valid UTF-8, separated by commas. SQL reads and
    writes a view with the same options, so reading accepts ``compression`` and writing ``binary_features``, without effect.

    Paths without a scheme are local paths, on a disk that the driver and all executors share. URIs (``file:``, ``hdfs:``,
    ``s3:`` or ``s3a:``, ``gs:``, ``abfs:``) are opened by pyarrow.fs with the credentials that it finds on each machine;
    it does not use Spark's. Object stores cannot rename folders: there, files appear one by one, and replaced files are
    deleted when all new ones exist.

    Raises:
        StorageError: The path does not exist, cannot be read or written, or has files only in subfolders.
        DataError: An Example cannot hold the type of a column or a value, a record does not fit the schema, a file is
            damaged, or the sampled files have no records or contradict each other.
        ConfigurationError: An option is unknown, or an option or the schema is invalid.
        ClusterError: google-crc32c is not installed.

    Spark's own exceptions contain the text of these errors.

    Example::

        spark.dataSource.register(TFRecordDataSource)
        df.write.format("tfrecord").mode("append").option("compression", "gzip").save("/shared/digits")
        spark.read.format("tfrecord").schema("features array<float>, label bigint").load("/shared/digits")
    """

    _infers = False
    """Whether the columns are inferred from the files; otherwise the user has set them."""

    _mode = "append"
    """The mode of the writer, unless it overwrites."""

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "tfrecord"

    def schema(self) -> str:
        """The columns of the files at the path, inferred from a sample of the records."""
        self._check_options()
        self._infers = True  # Spark calls reader() of this object or of its copy
        files, sizes = list_files(self._path)
        sample = (read_sample([(name, open_file(files, name))]) for name in sampled_files(sizes))
        return ddl(infer_fields(collect_stats(chain.from_iterable(sample)), self._path, self._binary_features))

    def reader(self, schema: StructType) -> TFRecordReader:
        """The reader of the files at the path."""
        from pyspark.sql.pandas.types import to_arrow_schema

        self._check_options()
        fields = fields_of(schema)
        files, sizes = list_files(self._path)
        if not self._infers:
            if self._binary_features:
                raise ConfigurationError(BINARY_WITH_SCHEMA)
            warn_of_unknown(self._path, fields, ((name, open_file(files, name)) for name in sampled_files(sizes)))
        return TFRecordReader(files, sorted(sizes), fields, to_arrow_schema(schema))

    def writer(self, schema: StructType, overwrite: bool) -> TFRecordWriter:
        """The writer of a job, whose temporary folders exist."""
        self._check_options()
        name = self.options.get("compression", "none").lower()
        one_of("compression", name, ("none", *filter(None, SUFFIXES)))
        compression = None if name == "none" else name
        mode = "overwrite" if overwrite else self._mode
        return TFRecordWriter.of(self._path, fields_of(schema, written=True), mode, compression)

    def _check_options(self) -> None:
        for name in self.options:
            if name not in (*_OPTIONS, *_OPTIONS_OF_SPARK):
                raise ConfigurationError(f"the format tfrecord has no option {name!r}. {known_names(name, _OPTIONS)}")

    @property
    def _path(self) -> str:
        if "paths" in self.options:
            raise ConfigurationError(
                f"paths={self.options['paths']}: expected one path, of a file, a folder, or a local glob. Load the "
                "paths one by one, and combine the DataFrames with union()."
            )
        if "path" not in self.options:
            raise ConfigurationError(
                "the path is missing: pass it to load(path) or save(path). In SQL, use CREATE TEMPORARY VIEW ... USING "
                "tfrecord OPTIONS (path '...'), because Spark does not pass the path of a table to this format."
            )
        return str(self.options["path"])

    @property
    def _binary_features(self) -> list[str]:
        return [name for each in self.options.get("binary_features", "").split(",") if (name := each.strip())]


class NewTFRecordFolder(TFRecordDataSource):
    """The format of `sparkkeras.save_as_tfrecords`: refuses existing paths instead of appending to them.

    Its name does not collide with a format ``"tfrecord"`` that users have registered.
    """

    _mode = "error"

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "sparkkeras_tfrecord"
