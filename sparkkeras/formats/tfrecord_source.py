"""TFRecord files of tf.train.Example as a data source of Spark's Python API.

Spark creates the data source, plans reads and commits writes in Python processes on the driver's machine (behind Spark
Connect on the server's), which have no SparkSession, and which may lack this package, as executors may. So the class is
pickled with the code that it uses, and files are listed and opened with pyarrow.fs.
"""

from __future__ import annotations

import copyreg
import glob
import io
import pickle
import re
import sys
import threading
import uuid
from abc import ABCMeta
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, DataSourceReader, InputPartition, WriterCommitMessage

from sparkkeras.arguments import one_of
from sparkkeras.errors import ConfigurationError, DataError, StorageError, known_names
from sparkkeras.formats.examples import (
    BYTES,
    KINDS,
    VALUES,
    Features,
    FeatureStats,
    Field,
    collect_stats,
    decode,
    encode,
    parse,
)
from sparkkeras.formats.records import EMPTY_BYTES, SUFFIXES, compressor, framed, read_records
from sparkkeras.spark.filesystem import has_scheme

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import DataType, StructType

_SCHEMES = ("file", "hdfs", "viewfs", "s3", "s3a", "gs", "gcs", "abfs", "abfss")
_OBJECT_STORES = {"s3", "gcs", "abfs"}
"""The file systems that cannot rename a folder, and where a file appears only when it is complete."""

SAMPLED_FILES, SAMPLED_RECORDS = 8, 256
_BATCH_RECORDS, _BATCH_BYTES = 4096, 16 << 20
_BUFFER_BYTES = 1 << 20


class _PickledByValue(ABCMeta):
    """The type of classes that are pickled with the code that they use, instead of as the name of a module."""


_PICKLED = ("arguments", "errors", "formats.examples", "formats.records", "formats.tfrecord_source", "spark.filesystem")
"""The modules of this package with code that the data source uses."""

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


copyreg.pickle(_PickledByValue, _by_value)  # type: ignore[arg-type]


class TFRecordDataSource(DataSource, metaclass=_PickledByValue):
    """The format ``"tfrecord"`` for Spark's DataFrame readers and writers: files of tf.train.Example, without a jar.

    Columns and features correspond as in `sparkkeras.save_as_tfrecords` and `sparkkeras.load_tfrecords`. Spark sends the
    class to its processes together with the code that it uses: they need pyarrow and google-crc32c, and not this package.

    **Reading.** ``path`` is a file or a folder (all its files except hidden ones and those whose names start with ``_``); on
    local disks also a glob. Each file is a partition, which is streamed and may have any size. The compression is detected
    from the content. Without a schema, the columns are inferred from the first records of several files, which the driver
    reads when ``load`` is called.

    **Writing.** Spark supports the modes ``"append"`` and ``"overwrite"`` for such formats; for its other modes it raises
    an error (`sparkkeras.save_as_tfrecords` refuses existing paths). Each partition becomes a file. If a task fails, all
    files of the job are deleted. Overwriting replaces the folder when the new one is complete. Appending moves complete
    files into the folder one by one. ``_SUCCESS`` is written last. The option ``compression`` is ``none``, ``gzip`` or
    ``zlib``.

    Paths without a scheme are local paths, on a disk that the driver and all executors share. URIs (``file:``, ``hdfs:``,
    ``s3:`` or ``s3a:``, ``gs:``, ``abfs:``) are opened by pyarrow.fs with the credentials that it finds on each machine;
    it does not use Spark's. Object stores cannot rename folders: there, files appear one by one, and replaced files are
    deleted when all new ones exist.

    Raises:
        StorageError: The path does not exist, or cannot be read or written.
        DataError: An Example cannot hold the type of a column, a record does not fit the schema, a file is damaged, or the
            sampled files have no records or contradict each other.
        ConfigurationError: An option or the schema is invalid.
        ClusterError: google-crc32c is not installed.

        Spark's own exceptions contain the text of these errors.

    Example::

        spark.dataSource.register(TFRecordDataSource)
        df.write.format("tfrecord").mode("append").option("compression", "gzip").save("/shared/digits")
        spark.read.format("tfrecord").schema("features array<float>, label bigint").load("/shared/digits")
    """

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "tfrecord"

    def schema(self) -> str:
        """The columns of the files at the path, inferred from a sample of the records."""
        files, sizes = list_files(self._path)
        sample = (read_sample([(name, open_file(files, name))]) for name in sampled_files(sizes))
        return ddl(infer_fields(collect_stats(chain.from_iterable(sample)), self._path))

    def reader(self, schema: StructType) -> _Reader:
        """The reader of the files at the path."""
        from pyspark.sql.pandas.types import to_arrow_schema

        files, sizes = list_files(self._path)
        return _Reader(files, sorted(sizes), fields_of(schema), to_arrow_schema(schema))

    def writer(self, schema: StructType, overwrite: bool) -> Writer:
        """The writer of a job, whose temporary folders exist."""
        return self._writer(schema, "overwrite" if overwrite else "append")

    def _writer(self, schema: StructType, mode: str) -> Writer:
        compression = self.options.get("compression", "none").lower()
        one_of("compression", compression, ("none", *filter(None, SUFFIXES)))
        return Writer.of(self._path, fields_of(schema, written=True), mode, None if compression == "none" else compression)

    @property
    def _path(self) -> str:
        if "path" not in self.options:
            raise ConfigurationError("expected one path, of a file, a folder, or a local glob: load(path), save(path).")
        return str(self.options["path"])


class NewTFRecordFolder(TFRecordDataSource):
    """The format of `sparkkeras.save_as_tfrecords`: refuses existing paths instead of appending to them.

    Its name does not collide with a format ``"tfrecord"`` that users have registered.
    """

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "sparkkeras_tfrecord"

    def writer(self, schema: StructType, overwrite: bool) -> Writer:
        """The writer of a job, whose temporary folders exist."""
        return self._writer(schema, "overwrite" if overwrite else "error")


# Types


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


# Files


def file_system(path: str) -> tuple[Any, str]:
    """The pyarrow file system of a path, and the path on it.

    Raises:
        StorageError: pyarrow does not support the file system, or cannot reach it.
    """
    from pyarrow import fs

    scheme = path.partition(":")[0] if has_scheme(path) else "file"
    if scheme == "file":  # neither Spark nor this function decodes %20
        return fs.LocalFileSystem(), str(Path(re.sub("^file:(/*(?=/))?", "", path)).absolute())
    if scheme not in _SCHEMES:
        raise StorageError(
            f"cannot open {path!r}: pyarrow does not support {scheme!r}. {known_names(scheme, _SCHEMES)} Copy the files "
            "from or to one of these, or mount the file system and use its local path."
        )
    try:
        files, place = fs.FileSystem.from_uri(re.sub("^s3a:", "s3:", path))
    except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
        raise StorageError(f"cannot reach {path!r} through pyarrow: {str(error).splitlines()[0]}") from error
    return files, place


def list_files(path: str) -> tuple[Any, dict[str, int]]:
    """The pyarrow file system of a path, and the size in bytes of each file there.

    Raises:
        StorageError: The path does not exist, or cannot be reached.
    """
    from pyarrow import fs

    files, place = file_system(path)
    with _storage_errors(f"cannot read {path!r}"):
        kind = files.get_file_info(place).type
        if kind == fs.FileType.Directory:
            found = files.get_file_info(fs.FileSelector(place))
        else:
            is_pattern = kind == fs.FileType.NotFound and files.type_name == "local"
            found = files.get_file_info(glob.glob(place) if is_pattern else [place])  # noqa: PTH207 - of any path
    sizes = {info.path: info.size for info in found if info.is_file and not info.base_name.startswith((".", "_"))}
    if kind == fs.FileType.NotFound and not sizes:
        raise StorageError(f"cannot read {path!r}: the path does not exist.")
    return files, sizes


def sampled_files(sizes: Mapping[str, int]) -> list[str]:
    """A few of the files with records, spread evenly over their names."""
    names = sorted(name for name, size in sizes.items() if size > EMPTY_BYTES)
    count = min(len(names), SAMPLED_FILES)
    return [names[number * len(names) // count] for number in range(count)]


def open_file(files: Any, name: str) -> io.BufferedReader:
    """Open a file for reading.

    Args:
        files: The pyarrow file system.
        name: The path on it.

    Raises:
        StorageError: It cannot be opened.
    """
    try:
        return io.BufferedReader(files.open_input_file(name), _BUFFER_BYTES)
    except OSError as error:
        raise StorageError(
            f"a worker cannot read {name}: {error}. Local files must have the same path on all workers; otherwise use a "
            "file system such as hdfs: or s3a:."
        ) from error


@contextmanager
def _storage_errors(what: str) -> Iterator[None]:
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"{what}: {error}.") from error


# Reading


@dataclass(frozen=True)
class _Reader(DataSourceReader):
    """Reads files.

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
        return [InputPartition(name) for name in self.names]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
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


def _parsed(file: io.BufferedReader, name: str) -> Iterator[tuple[Features, int]]:
    """Yield the features of each record and its size in bytes."""
    for number, record in enumerate(read_records(file, name)):
        try:
            yield parse(record), len(record)
        except ValueError as error:
            raise DataError(f"record {number} of {name} is not a tf.train.Example: {error}.") from error


# Writing


@dataclass(frozen=True)
class _WrittenFile(WriterCommitMessage):
    """The name and the size in bytes of a file that a task has written."""

    name: str
    size: int


@dataclass(frozen=True)
class Writer(DataSourceArrowWriter):
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
    def of(cls, path: str, fields: tuple[Field, ...], mode: str, compression: str | None) -> Writer:
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
        return _storage_errors(f"cannot write {self.label!r}")

    def _exists(self) -> bool:
        """Return whether the path exists. Raise `StorageError` if it may not."""
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
        packed = compressor(self.compression)
        with self.files.open_output_stream(path, compression=None, buffer_size=_BUFFER_BYTES) as file:
            for batch in batches:
                for record in encode(batch, self.fields):
                    file.write(packed.compress(framed(record)))
            file.write(packed.flush())
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


def _beside(path: str) -> str:
    """The path of a hidden file beside a path, without the end of its name."""
    parent, slash, name = path.rpartition("/")
    return f"{parent}{slash}.{name}"


# Schema inference


def infer_fields(seen: Mapping[str, FeatureStats], path: str, binary: Sequence[str] = ()) -> tuple[Field, ...]:
    """The columns for the features of sampled records, sorted by name.

    Args:
        seen: The statistics of the features, by name.
        path: The path of the files, for error messages.
        binary: Names of features that become binary even if their bytes are valid UTF-8.

    Raises:
        DataError: There are no features, or one of ``binary`` is unknown or does not hold bytes.
    """
    if not seen:
        raise DataError(
            f"the sampled files of {path!r} have no records with features, so the columns cannot be inferred: set schema, "
            "for instance 'x array<float>, y bigint'."
        )
    for name in binary:
        if name not in seen:
            raise DataError(f"binary_features: {path!r} has no feature {name!r}. {known_names(name, seen)}")
        if seen[name].kind != BYTES:
            raise DataError(
                f"binary_features: feature {name!r} holds {KINDS[seen[name].kind]} values in {seen[name].where}; expected "
                "bytes. Leave it out."
            )
    return tuple(seen[name].field(name in binary) for name in sorted(seen))
