"""Reading and writing DataFrames as TFRecord files of tf.train.Example, without a jar or TensorFlow, also on Spark Connect.

Reading: Spark lists the files. Workers stream local files themselves; Spark's ``binaryFile`` source reads files of other
file systems whole. Writing: workers use the file systems of pyarrow.
"""

from __future__ import annotations

import logging
import re
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from sparkkeras.arguments import one_of
from sparkkeras.data.block import describe
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
    merge_stats,
    parse,
)
from sparkkeras.formats.records import EMPTY_BYTES, LIBRARY, SUFFIXES, compressor, framed, read_records
from sparkkeras.sources.frame import is_frame
from sparkkeras.spark.cluster import translated
from sparkkeras.spark.connect import check_slots_for, cluster_of
from sparkkeras.spark.storage import has_scheme

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import DataType, StructType

_log = logging.getLogger(__name__)

_SCHEMES = ("file", "hdfs", "viewfs", "s3", "s3a", "gs", "gcs", "abfs", "abfss")
_OBJECT_STORES = {"s3", "gcs", "abfs"}
"""The file systems that cannot rename a folder, and where a file appears only when it is complete."""

_LARGEST_FILE = 2**31 - 1
_SAMPLED_FILES, _SAMPLED_RECORDS = 8, 256
_BATCH_RECORDS, _BATCH_BYTES = 4096, 16 << 20


def save_as_tfrecords(
    df: DataFrame,
    path: str,
    *,
    compression: Literal["gzip", "zlib"] | None = None,
    mode: Literal["error", "overwrite"] = "error",
) -> None:
    """Write a DataFrame to a folder of TFRecord files: one file per partition, one tf.train.Example per row.

    Integers and booleans become int64, floating-point numbers float32, strings (as UTF-8) and binary values bytes. Arrays
    of these become features with any number of values; Spark's vectors are written as arrays of float32. A null becomes a
    missing feature. The format has no doubles: doubles are rounded to float32, and become infinite beyond its range.

    The folder appears, or replaces an existing one, when it is complete, including ``_SUCCESS``; a failed job leaves
    nothing. Object stores cannot rename folders: there the files appear one by one, replaced files are deleted when all new
    ones exist, and ``_SUCCESS`` is written last.

    Args:
        df: The rows; at least one column.
        path: The folder. A path without a scheme is a local path; on a cluster it must be on a disk that the driver and all
            workers share. URIs (``file:``, ``hdfs:``, ``s3:`` or ``s3a:``, ``gs:``, ``abfs:``) are opened by pyarrow.fs, on
            the driver and on the workers, with the credentials that it finds there; it does not use Spark's.
        compression: ``"gzip"``, ``"zlib"`` or ``None``.
        mode: ``"error"`` raises if the path exists; ``"overwrite"`` replaces it.

    Raises:
        DataError: ``df`` is not a DataFrame, an Example cannot hold the type of a column, or an array contains a null.
        ConfigurationError: An argument is invalid.
        StorageError: The path already exists, or cannot be written.
        ClusterError: A worker lacks google-crc32c.
        WorkerError: A task failed.

    Example::

        save_as_tfrecords(df.select("features", "label"), "/shared/digits", compression="gzip")
    """
    if not is_frame(df):
        raise DataError(
            f"df is {describe(df)}; expected a Spark DataFrame: create one with spark.createDataFrame(...) or rdd.toDF()."
        )
    one_of("compression", compression, tuple(SUFFIXES))
    one_of("mode", mode, ("error", "overwrite"))
    fields = tuple(_field(field.name, field.dataType, written=True) for field in df.schema)
    names = [field.name for field in fields]
    if not names or len(set(names)) < len(names):
        raise DataError(
            f"the DataFrame has the columns {names}; expected at least one column and unique names: rename with toDF(...)."
        )
    target = _Target.of(path)
    target.check(mode)
    _check_workers(df.sparkSession)
    done = False
    try:
        target.prepare()
        task = _Write(fields, target.files, target.partial, target.complete, target.run_id, compression)
        target.commit({row.file: row.size for row in _rows(df, task, "file string, size bigint")}, mode)
        done = True
    except OSError as error:
        raise error if isinstance(error, StorageError) else StorageError(f"cannot write {path!r}: {error}.") from error
    finally:
        target.clean_up(done)


def load_tfrecords(
    spark: SparkSession,
    path: str,
    *,
    schema: StructType | str | None = None,
    binary_features: Sequence[str] = (),
) -> DataFrame:
    r"""Load TFRecord files of tf.train.Example as a DataFrame, lazily; the order of files is not defined.

    A feature that a record lacks becomes null. A record that does not fit the schema, and a damaged file, raises `DataError`
    in the task that reads it; the message has the file, the record (counted from 0) and the feature.

    With a schema, files are read when the DataFrame is evaluated. To detect misspelled names, this process reads the first
    records of local files (a few hundred records, at most 16 MB), and warns if they all lack a feature of the schema.

    Without a schema, the columns are inferred from a few hundred records at the start of several files: int64 becomes
    bigint, float32 becomes float, and bytes become string, or binary if they are not UTF-8. A feature becomes an array if a
    sampled record does not have exactly one value. Columns are sorted by name.

    Args:
        spark: The session (classic or Spark Connect).
        path: A file, a folder (all its files except hidden ones and those whose names start with ``_``) or a glob, on any
            file system that Spark reads. The characters ``*``, ``?``, ``[``, ``{`` and ``\`` are special; escape them with
            ``\``. A path without a scheme is a local path; on a cluster it must be on a disk that the driver and all workers
            share. Local files and ``file:`` URIs are streamed and may have any size. Files of other file systems are read
            whole by Spark: each must be smaller than 2 GiB and, without decompression, fit into a worker's memory. The
            compression (gzip, zlib) is detected from the content. Each file is read by a single task.
        schema: The columns to read, a StructType or DDL: ``"image array<float>, label bigint, name string"``. Supported
            types are boolean, tinyint, smallint, int, bigint, float, double, string, binary, and arrays of these. ``None``:
            inferred.
        binary_features: Names of features to load as binary even if their bytes are valid UTF-8; only without ``schema``.

    Raises:
        StorageError: The path does not exist or cannot be read, or a file is too large.
        DataError: The schema has an unsupported type; or, without a schema, the sampled files have no records, contradict
            each other, or are damaged.
        ConfigurationError: An argument is invalid, or ``schema`` and ``binary_features`` are both set.
        ClusterError: A worker lacks google-crc32c.

    Example::

        df = load_tfrecords(spark, "/shared/digits")
    """
    if not hasattr(spark, "read"):
        raise ConfigurationError(f"spark={spark!r}: expected a SparkSession, such as SparkSession.builder.getOrCreate().")
    if isinstance(binary_features, str):
        raise ConfigurationError(f"binary_features={binary_features!r}: expected a list of names, [{binary_features!r}].")
    if schema is not None and binary_features:
        raise ConfigurationError(
            "binary_features applies only without a schema: leave it out, and declare these columns binary in the schema."
        )
    fields = None if schema is None else _fields_of(schema)
    _check_workers(spark)
    found = InputFiles.of(spark, path)
    if fields is None:
        fields = _inferred(found, path, binary_features)
    else:
        _warn_of_unknown(found, path, fields)
    return found.frame.mapInArrow(_Read(fields), _schema_of(fields))


def _check_workers(session: SparkSession) -> None:
    """Check that the workers can import this package and the checksum library.

    Raises:
        ClusterError: A worker lacks one of them.
    """
    cluster_of(session).require(*LIBRARY, "TFRecord files")


def _rows(df: DataFrame, task: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]], schema: str) -> list[Any]:
    """Run a task over the partitions and collect the rows that it yields."""
    check_slots_for(df.sparkSession)
    try:
        return df.mapInArrow(task, schema).collect()
    except Exception as error:
        raise translated(error) from error


# Types


def _field(name: str, kind: DataType, written: bool, nullable: bool = True) -> Field:
    """The description of a column.

    Raises:
        DataError: An Example cannot hold the type.
    """
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


def _fields_of(schema: StructType | str) -> tuple[Field, ...]:
    from pyspark.errors import PySparkException
    from pyspark.sql.types import DataType, StructType

    columns: DataType | StructType | str = schema
    if isinstance(columns, str):
        try:
            columns = DataType.fromDDL(columns)
        except PySparkException as error:
            reason = str(error).strip().splitlines()[0]
            raise ConfigurationError(
                f"schema={schema!r} is not valid DDL, such as 'x array<float>, y bigint': {reason}"
            ) from error
    if not isinstance(columns, StructType):
        raise ConfigurationError(
            f"schema is {describe(schema)}; expected a StructType or DDL such as 'x array<float>, y bigint'."
        )
    names = columns.names
    if not names or len(set(names)) < len(names):
        raise ConfigurationError(f"schema has the columns {names}; expected at least one column and unique names.")
    return tuple(_field(field.name, field.dataType, False, field.nullable) for field in columns)


def _schema_of(fields: Sequence[Field]) -> StructType:
    """The schema of the loaded DataFrame."""
    from pyspark.sql import types

    values = {
        "boolean": types.BooleanType(),
        "tinyint": types.ByteType(),
        "smallint": types.ShortType(),
        "int": types.IntegerType(),
        "bigint": types.LongType(),
        "float": types.FloatType(),
        "double": types.DoubleType(),
        "string": types.StringType(),
        "binary": types.BinaryType(),
    }
    kinds = [types.ArrayType(values[field.value]) if field.is_array else values[field.value] for field in fields]
    return types.StructType(
        [types.StructField(field.name, kind, field.nullable) for field, kind in zip(fields, kinds, strict=True)]
    )


# Reading


@dataclass(frozen=True)
class InputFiles:
    """The input files.

    Attributes:
        spark: The session.
        frame: A row for each file: its path and, if workers cannot open the file themselves, its content.
        sizes: The size of each file in bytes.
    """

    spark: SparkSession
    frame: DataFrame
    sizes: dict[str, int]

    @classmethod
    def of(cls, spark: SparkSession, path: str) -> InputFiles:
        """List the files with Spark.

        Raises:
            StorageError: The path does not exist or cannot be read, or a file is too large for Spark to pass on.
        """
        uri = _uri(path)
        try:
            frame = spark.read.format("binaryFile").load(uri)
            sizes = {row.path: row.length for row in frame.select("path", "length").collect()}
        except Exception as error:
            reasons = [line.lstrip(": ") for line in str(error).strip().splitlines()]
            reason = reasons[1] if reasons[0].startswith("An error occurred while calling") else reasons[0]  # a line of Py4J
            if "PATH_NOT_FOUND" in reason:
                reason = "the path does not exist."
            raise StorageError(f"cannot read {path!r}: {reason}") from error
        local = all(_local(file) for file in sizes)
        for file, size in sizes.items():
            if not local and size > _LARGEST_FILE:
                raise StorageError(
                    f"{file} has {size} bytes; on this file system files must be smaller than 2 GiB. Write the data to more "
                    "files, or mount the file system on the workers and use a local path."
                )
        return cls(spark, frame.select("path") if local else frame.select("path", "content"), sizes)

    def sample(self) -> DataFrame | None:
        """A frame like `frame` with a few non-empty files; ``None`` if all files are empty."""
        files = sorted(file for file, size in self.sizes.items() if size > EMPTY_BYTES)
        if not files:
            return None
        count = min(len(files), _SAMPLED_FILES)
        spread = (files[number * len(files) // count] for number in range(count))
        reader = self.spark.read.format("binaryFile").option("recursiveFileLookup", "true")  # disables partition discovery
        return reader.load([_literal(file) for file in spread]).select(*self.frame.columns)


def _uri(path: str) -> str:
    """The URI for Spark; a path without a scheme is local, and not on Spark's default file system."""
    if not isinstance(path, str) or not path:
        raise ConfigurationError(f"path={path!r}: expected the path of a file or folder, or a glob, as a str.")
    if has_scheme(path):
        return path
    return f"file:{path}" if path.startswith("/") else f"file:{_literal(str(Path.cwd()))}/{path}"


def _literal(path: str) -> str:
    """Escape a path for use as a glob."""
    return re.sub(r"([\\*?\[\]{}])", r"\\\1", path)


def _local(file: str) -> bool:
    return file.startswith("file:")


def _on_disk(path: str) -> Path:
    """The local path for a path or ``file:`` URI. Spark does not decode ``%20``, so it is not decoded here either."""
    return Path(re.sub("^file:(/*(?=/))?", "", path)).absolute()


def _inferred(found: InputFiles, path: str, binary: Sequence[str]) -> tuple[Field, ...]:
    """Infer the columns from a sample of the records."""
    sample = found.sample()
    result = "name string, kind int, is_array boolean, is_text boolean, place string"
    rows = [] if sample is None else _rows(sample, _CollectStats(_SAMPLED_RECORDS), result)
    seen = merge_stats(FeatureStats(row.name, row.kind, row.is_array, row.is_text, row.place) for row in rows)
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


def _warn_of_unknown(found: InputFiles, path: str, fields: Sequence[Field]) -> None:
    """Warn of columns of a schema that the first records lack: their names may be misspelled.

    Reads local files only, without a Spark job. Errors are ignored here; the task that reads the file raises them.
    """
    files = sorted(file for file, size in found.sizes.items() if size > EMPTY_BYTES and _local(file))
    try:
        seen = _first_names(files[:_SAMPLED_FILES], {field.name for field in fields})
    except Exception:
        _log.debug("cannot read the first records of %s", path, exc_info=True)
        return
    unknown = [field.name for field in fields if field.name not in seen]
    if seen and unknown:
        warnings.warn(
            f"schema: the first records of {path!r} have no feature {' or '.join(map(repr, unknown))}; the column is null "
            f"in records without the feature. {known_names(unknown[0], seen)}",
            stacklevel=3,  # the line that calls load_tfrecords
        )


def _first_names(files: Sequence[str], wanted: set[str]) -> set[str]:
    """The names of the features in the first few hundred records, over as many files as necessary.

    Args:
        files: The files; a further one is opened only after the end of the one before.
        wanted: Reading stops when all of these names were found.
    """
    seen: set[str] = set()
    records = size = 0
    for name in files:
        with _opened(name) as file:
            for features, length in _parsed(file, name):
                seen.update(feature.decode(errors="replace") for feature, (kind, _) in features.items() if kind)
                records, size = records + 1, size + length
                if wanted <= seen or records == _SAMPLED_RECORDS or size > _BATCH_BYTES:
                    return seen
    return seen


@dataclass(frozen=True)
class _CollectStats:
    """Collects statistics of the features in the first records of files."""

    records: int

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield a row for each feature."""
        import pyarrow as pa

        seen = collect_stats(
            (features, f"record {number} of {name}")
            for name, file in _files(batches)
            for number, (features, _) in enumerate(islice(_parsed(file, name), self.records))
        ).values()
        yield pa.record_batch(
            [
                pa.array([one.name for one in seen], pa.string()),
                pa.array([one.kind for one in seen], pa.int32()),
                pa.array([one.is_array for one in seen], pa.bool_()),
                pa.array([one.is_text for one in seen], pa.bool_()),
                pa.array([one.where for one in seen], pa.string()),
            ],
            ["name", "kind", "is_array", "is_text", "place"],
        )


@dataclass(frozen=True)
class _Read:
    """Reads files and yields batches of columns."""

    fields: tuple[Field, ...]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield batches of at most some thousand records."""
        for name, file in _files(batches):
            first, held, size = 0, list[Features](), 0
            for features, length in _parsed(file, name):
                held.append(features)
                size += length
                if len(held) == _BATCH_RECORDS or size > _BATCH_BYTES:
                    yield decode(held, self.fields, first, name)
                    first, held, size = first + len(held), [], 0
            if held:
                yield decode(held, self.fields, first, name)


def _files(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield the name of each file and the open file, which is closed before the next one is opened."""
    import pyarrow as pa

    for batch in batches:
        for row, name in enumerate(batch.column(0).to_pylist()):
            if batch.num_columns > 1:
                yield name, pa.BufferReader(batch.column(1)[row].as_buffer())
                continue
            with _opened(name) as file:
                yield name, file


def _opened(name: str) -> IO[bytes]:
    try:
        return _on_disk(name).open("rb")
    except OSError as error:
        raise StorageError(
            f"a worker cannot read {name}: {error.strerror or error}. Local files must have the same path on all workers; "
            "otherwise use a file system such as hdfs: or s3a:."
        ) from error


def _parsed(file: IO[bytes], name: str) -> Iterator[tuple[Features, int]]:
    """Yield the features of each record and its size in bytes."""
    for number, record in enumerate(read_records(file, name)):
        try:
            yield parse(record), len(record)
        except ValueError as error:
            raise DataError(f"record {number} of {name} is not a tf.train.Example: {error}.") from error


# Writing


@dataclass(frozen=True)
class _Target:
    """The output folder.

    Attributes:
        files: Its pyarrow file system.
        path: Its path on this file system.
        label: The path that the user passed, for error messages.
        run_id: A unique part of the names of this run's temporary folders, and of its files in object stores.
        renames: Whether folders can be renamed, so that the output is written to a temporary folder and renamed at the end.
    """

    files: Any
    path: str
    label: str
    run_id: str
    renames: bool

    @classmethod
    def of(cls, path: str) -> _Target:
        """Create the target for a path.

        Raises:
            StorageError: pyarrow does not support the file system, or cannot reach it.
        """
        from pyarrow import fs

        if not isinstance(path, str) or not path.strip("/"):
            raise ConfigurationError(f"path={path!r}: expected the path of a folder, as a str.")
        scheme = path.partition(":")[0] if has_scheme(path) else "file"
        if scheme not in _SCHEMES:
            raise StorageError(
                f"cannot write {path!r}: pyarrow does not support {scheme!r}. {known_names(scheme, _SCHEMES)} Write to one "
                "of these and copy the files, or mount the file system and use its local path."
            )
        try:
            if scheme == "file":
                files, place = fs.LocalFileSystem(), str(_on_disk(path))
            else:
                files, place = fs.FileSystem.from_uri(re.sub("^s3a:", "s3:", path))
        except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
            raise StorageError(f"cannot reach {path!r} through pyarrow: {str(error).splitlines()[0]}") from error
        run_id = uuid.uuid4().hex[:12]
        return cls(files, place.rstrip("/"), path, run_id, files.type_name not in _OBJECT_STORES)

    @property
    def _temporary(self) -> str:
        return self._beside("tmp")

    def _beside(self, suffix: str) -> str:
        parent, slash, name = self.path.rpartition("/")
        return f"{parent}{slash}.{name}.{self.run_id}.{suffix}"

    @property
    def complete(self) -> str:
        """The folder for complete files."""
        return f"{self._temporary}/complete" if self.renames else self.path

    @property
    def partial(self) -> str | None:
        """The folder for files that are being written; ``None`` if files appear only when they are complete."""
        return f"{self._temporary}/partial" if self.renames else None

    def check(self, mode: str) -> None:
        """Raise `StorageError` if the folder exists, unless it is to be replaced."""
        try:
            exists = self._exists()
        except OSError as error:
            raise StorageError(f"cannot reach {self.label!r}: {error}.") from error
        if exists and mode == "error":
            raise StorageError(f'{self.label!r} already exists: set mode="overwrite" to replace it, or use another path.')

    def _exists(self) -> bool:
        from pyarrow import fs

        return bool(self.files.get_file_info(self.path).type != fs.FileType.NotFound)

    def prepare(self) -> None:
        """Create the folders that tasks write to."""
        for folder in (self.complete, self.partial):
            if folder is not None:
                self.files.create_dir(folder, recursive=True)

    def commit(self, written: dict[str, int], mode: str) -> None:
        """Check that all files of the tasks exist, and move them to the output folder."""
        found = {info.base_name: info.size for info in self._listed(self.complete)}
        lost = [name for name, size in written.items() if found.get(name) != size]
        if lost:
            raise StorageError(
                f"{len(lost)} of {len(written)} file(s) that workers wrote to {self.label!r} are not visible on the driver, "
                f"the first one {lost[0]}: use a path on a disk or file system that the driver and all workers share."
            )
        for info in self._listed(self.complete) if self.renames or mode == "overwrite" else ():
            if info.base_name not in written:  # from an unused task attempt, or replaced by this run
                self.files.delete_file(info.path)
        self._mark(self.complete)
        if not self.renames:
            return
        self.check(mode)  # another process may have created it in the meantime
        if not self._exists():
            self.files.move(self.complete, self.path)
            return
        old = self._beside("old")
        self.files.move(self.path, old)
        try:
            self.files.move(self.complete, self.path)
        except OSError:
            self.files.move(old, self.path)
            raise
        self._remove(old)

    def _remove(self, path: str) -> None:
        from pyarrow import fs

        if self.files.get_file_info(path).type == fs.FileType.Directory:
            self.files.delete_dir(path)
        else:
            self.files.delete_file(path)

    def _mark(self, folder: str) -> None:
        with self.files.open_output_stream(f"{folder}/_SUCCESS"):
            pass

    def _listed(self, folder: str) -> list[Any]:
        from pyarrow import fs

        selected = fs.FileSelector(folder, allow_not_found=True, recursive=not self.renames)
        return [info for info in self.files.get_file_info(selected) if info.type == fs.FileType.File]

    def clean_up(self, done: bool) -> None:
        """Remove the temporary files of this run; and in object stores, if it failed, its output files."""
        with suppress(OSError):
            if self.renames:
                self.files.delete_dir(self._temporary)
            elif not done:
                for info in self._listed(self.path):
                    if self.run_id in info.base_name:
                        self.files.delete_file(info.path)


@dataclass(frozen=True)
class _Write:
    """Writes each partition to a file.

    Attributes:
        fields: The columns.
        files: The pyarrow file system.
        partial: The folder for files that are being written; ``None`` if files appear only when they are complete.
        complete: The folder for complete files.
        run_id: A part of each file name if ``partial`` is ``None``.
        compression: The compression of the files, or ``None``.
    """

    fields: tuple[Field, ...]
    files: Any
    partial: str | None
    complete: str
    run_id: str
    compression: str | None

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write the file and yield a row with its name and size."""
        import pyarrow as pa
        from pyspark import TaskContext

        context = TaskContext.get()
        # Two attempts of a task may run at once, and one may continue after the commit. In an object store its file could
        # not be removed then, so both attempts use the same name and write the same rows.
        mark = self.run_id if self.partial is None else uuid.uuid4().hex[:12]
        name = f"part-{0 if context is None else context.partitionId():05d}-{mark}{SUFFIXES[self.compression]}"
        path = f"{self.partial or self.complete}/{name}"
        try:
            size = self._write(path, batches)
            if self.partial is not None:
                self.files.move(path, f"{self.complete}/{name}")
        except BaseException:
            with suppress(OSError):
                self.files.delete_file(path)
            raise
        yield pa.record_batch([pa.array([name]), pa.array([size], pa.int64())], ["file", "size"])

    def _write(self, path: str, batches: Iterator[pa.RecordBatch]) -> int:
        packed = compressor(self.compression)
        with self.files.open_output_stream(path, compression=None, buffer_size=1 << 20) as file:
            for batch in batches:
                for record in encode(batch, self.fields):
                    file.write(packed.compress(framed(record)))
            file.write(packed.flush())
            return int(file.tell())
