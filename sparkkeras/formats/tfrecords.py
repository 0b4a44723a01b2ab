"""DataFrames as TFRecord files of tf.train.Example, and back. Needs neither a jar nor TensorFlow, and works through Spark
Connect as well.

What Spark lists is read where it can be streamed: files that the workers open themselves in pieces, all others as whole
files that Spark hands over. What is written goes through the file systems of Arrow.
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
    decode,
    encode,
    parse,
    survey,
    together,
)
from sparkkeras.formats.records import EMPTY_BYTES, LIBRARY, SUFFIXES, compressor, framed, read_records
from sparkkeras.sources.frame import is_frame
from sparkkeras.spark.cluster import translated
from sparkkeras.spark.connect import check_slots_for, cluster_of
from sparkkeras.spark.storage import has_scheme
from sparkkeras.worker import device

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import DataType, StructType

_log = logging.getLogger(__name__)

_SCHEMES = ("file", "hdfs", "viewfs", "s3", "s3a", "gs", "gcs", "abfs", "abfss")
_OBJECT_STORES = {"s3", "gcs", "abfs"}
"""The kinds of file system that cannot rename a folder, and where a file is there only once it is whole."""

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
    """Write a DataFrame as a folder of TFRecord files, one for each partition, each row a tf.train.Example.

    Whole numbers and booleans become int64, floating numbers float32, strings (in UTF-8) and binary columns bytes. Arrays
    of these, and MLlib's vectors as arrays of float32, become features of any number of values. A null becomes a feature
    that is not there. The format has no doubles: a double is rounded to float32, and infinite where that is too small.

    The folder appears, or is replaced, when all of it is there, ``_SUCCESS`` with it; a job that fails leaves nothing. In
    object stores, which cannot rename folders, the files appear one by one, those replaced go when all are there, and
    ``_SUCCESS`` comes last.

    Args:
        df: The rows; at least one column.
        path: The folder. A path without a scheme is this machine's, which on a cluster must be a disk that the workers
            share. Those with one (``file:``, ``hdfs:``, ``s3:`` or ``s3a:``, ``gs:``, ``abfs:``) are opened by pyarrow.fs,
            here and on the workers, with the credentials that it finds there; it does not know Spark's.
        compression: ``"gzip"``, ``"zlib"`` or none.
        mode: ``"error"`` refuses a path where something is; ``"overwrite"`` replaces it.

    Raises:
        DataError: It is no DataFrame, a column is of a type that an Example cannot hold, or an array holds a null.
        ConfigurationError: An argument is unknown.
        StorageError: Something is there already, or the path cannot be written.
        ClusterError: A worker lacks google-crc32c.
        WorkerError: A task failed.

    Example::

        save_as_tfrecords(df.select("features", "label"), "/shared/digits", compression="gzip")
    """
    if not is_frame(df):
        raise DataError(f"df is {describe(df)}; expected a DataFrame: rdd.toDF() or spark.createDataFrame() make one.")
    one_of("compression", compression, tuple(SUFFIXES))
    one_of("mode", mode, ("error", "overwrite"))
    fields = tuple(_field(field.name, field.dataType, written=True) for field in df.schema)
    names = [field.name for field in fields]
    if not names or len(set(names)) < len(names):
        raise DataError(f"the DataFrame has the columns {names}; expected at least one, and no name twice: use toDF(...).")
    target = _Target.of(path)
    target.check(mode)
    _equip(df.sparkSession)
    done = False
    try:
        target.prepare()
        task = _Write(fields, target.files, target.drafts, target.whole, target.run, compression)
        target.commit({row.file: row.size for row in _rows(df, task, "file string, size bigint")}, mode)
        done = True
    except OSError as error:
        raise error if isinstance(error, StorageError) else StorageError(f"cannot write {path!r}: {error}.") from error
    finally:
        target.tidy(done)


def load_tfrecords(
    spark: SparkSession,
    path: str,
    *,
    schema: StructType | str | None = None,
    binary_features: Sequence[str] = (),
) -> DataFrame:
    r"""TFRecord files of tf.train.Example as a DataFrame, read when it is asked for, in no particular order of files.

    A feature that a record lacks is null there. A record that does not fit the schema is a `DataError` in the task that
    meets it, with file, record (from 0) and feature; so is a damaged file.

    With a schema, files are read when the DataFrame is asked for, but for the first records, a few hundred or 16 MB at most,
    of those that this process can open: if they all lack a feature that the schema names, there is a warning. Files on other
    file systems are not looked at.

    Without a schema, some hundred records from the beginnings of several files are looked at: int64 becomes bigint, float32
    float, and bytes a string, or binary where they are not UTF-8. A feature is an array if one of these records has another
    number of values than one. Columns are in the order of their names.

    Args:
        spark: The session, also one of Spark Connect.
        path: A file, a folder (all files in it but hidden ones, and those that begin with ``_``), or a glob, on any file
            system that Spark reads. ``*``, ``?``, ``[``, ``{`` and ``\`` mean something; a ``\`` takes that away. A path
            without a scheme is this machine's, which on a cluster must be a disk that the workers share. Such files, and
            those of ``file:``, are streamed and may be of any size. Those of other file systems are read as a whole, by
            Spark: each must be below 2 GiB and fit, as it is on the disk, into the memory of a worker. Compression (gzip,
            zlib) is seen from the content. A file is one task's.
        schema: The columns that are wanted, a StructType or DDL: ``"image array<float>, label bigint, name string"``. Types
            are boolean, tinyint, smallint, int, bigint, float, double, string, binary, and arrays of these.
        binary_features: Features whose bytes stay binary though they could be text; only without ``schema``.

    Raises:
        StorageError: There is no such path, it cannot be read, or a file is too large.
        DataError: The schema has a type that an Example does not hold; or, without one, there are no records, they
            contradict each other, or a file is damaged where it was looked at.
        ConfigurationError: Arguments that do not go together.
        ClusterError: A worker lacks google-crc32c.

    Example::

        df = load_tfrecords(spark, "/shared/digits")
    """
    if not hasattr(spark, "read"):
        raise ConfigurationError(f"spark={spark!r}: expected a SparkSession, SparkSession.builder.getOrCreate().")
    if isinstance(binary_features, str):
        raise ConfigurationError(f"binary_features={binary_features!r}: expected a list of names, [{binary_features!r}].")
    if schema is not None and binary_features:
        raise ConfigurationError("binary_features says what to make of bytes where there is no schema: declare them binary.")
    fields = None if schema is None else _fields_of(schema)
    _equip(spark)
    found = InputFiles.of(spark, path)
    if fields is None:
        fields = _inferred(found, path, binary_features)
    else:
        _warn_of_unknown(found, path, fields)
    return found.frame.mapInArrow(_Read(fields), _ddl(fields))


def _equip(session: SparkSession) -> None:
    """See to it that workers have this package, and what it needs of others.

    Raises:
        ClusterError: They lack something.
    """
    cluster_of(session, device.worker_environment).require(*LIBRARY, "TFRecord files")


def _rows(df: DataFrame, task: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]], schema: str) -> list[Any]:
    """What a task yields over the partitions, as rows."""
    check_slots_for(df.sparkSession)
    try:
        return df.mapInArrow(task, schema).collect()
    except Exception as error:
        raise translated(error) from error


# Types


def _field(name: str, kind: DataType, written: bool, nullable: bool = True) -> Field:
    """A column as a feature.

    Raises:
        DataError: An Example cannot hold such values.
    """
    from pyspark.sql.types import ArrayType

    if written and type(kind).__name__ == "VectorUDT":
        return Field(name, "double", is_array=True, is_vector=True)
    is_array = isinstance(kind, ArrayType)
    value = kind.elementType if isinstance(kind, ArrayType) else kind
    known = value.simpleString().partition(" ")[0]  # a string may go on with its collation
    if known in VALUES:
        return Field(name, known, is_array, nullable)
    told = known.partition("(")[0].partition("<")[0]
    raise DataError(
        f"column {name!r} has the type {kind.simpleString()}, which an Example cannot hold: expected a number, a boolean, a "
        f"string, bytes, or an array of these. {_REMEDIES.get(told, 'Cast it to one of these.')}"
    )


_REMEDIES = {
    "date": "Use unix_date(), its number of days, and turn it back with date_from_unix_date(), or cast it to string.",
    "timestamp": "Use unix_micros(), and turn it back with timestamp_micros(), or cast it to string.",
    "timestamp_ntz": "Cast it to string.",
    "decimal": "Cast it to double (float32 in the file) or to string.",
    "map": "Use map_keys() and map_values() as columns of their own, or to_json().",
    "struct": "Select its fields as columns of their own, or use to_json().",
    "array": "Use flatten(), and keep the shape in a column of its own.",
    "vector": "Read it as array<float> and use pyspark.ml.functions.array_to_vector().",
}


def _fields_of(schema: StructType | str) -> tuple[Field, ...]:
    from pyspark.errors import PySparkException
    from pyspark.sql.types import DataType, StructType

    columns: DataType | StructType | str = schema
    if isinstance(columns, str):
        try:
            columns = DataType.fromDDL(columns)
        except PySparkException as error:
            told = str(error).strip().splitlines()[0]
            raise ConfigurationError(f"schema={schema!r} is no DDL, like 'x array<float>, y bigint': {told}") from error
    if not isinstance(columns, StructType):
        raise ConfigurationError(f"schema is {describe(schema)}; expected a StructType or DDL, 'x array<float>, y bigint'.")
    names = columns.names
    if not names or len(set(names)) < len(names):
        raise ConfigurationError(f"schema has the columns {names}: expected at least one, and no name twice.")
    return tuple(_field(field.name, field.dataType, False, field.nullable) for field in columns)


def _ddl(fields: Sequence[Field]) -> StructType:
    """The schema of what is read."""
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
    """The files of a path.

    Attributes:
        spark: The session.
        frame: A row for each file: its path, and its content where workers cannot open it.
        sizes: The bytes of each.
    """

    spark: SparkSession
    frame: DataFrame
    sizes: dict[str, int]

    @classmethod
    def of(cls, spark: SparkSession, path: str) -> InputFiles:
        """What Spark finds.

        Raises:
            StorageError: It finds nothing, or a file that it cannot hand over.
        """
        uri = _uri(path)
        try:
            frame = spark.read.format("binaryFile").load(uri)
            sizes = {row.path: row.length for row in frame.select("path", "length").collect()}
        except Exception as error:
            reasons = [line.lstrip(": ") for line in str(error).strip().splitlines()]
            reason = reasons[1] if reasons[0].startswith("An error occurred while calling") else reasons[0]  # that is Py4J's
            if "PATH_NOT_FOUND" in reason:
                reason = "there is no such file or folder."
            raise StorageError(f"cannot read {path!r}: {reason}") from error
        local = all(_local(file) for file in sizes)
        for file, size in sizes.items():
            if not local and size > _LARGEST_FILE:
                raise StorageError(
                    f"{file} has {size} bytes; on this file system files must be below 2 GiB. Write the data as more files, "
                    "or give the workers its file system as a disk."
                )
        return cls(spark, frame.select("path") if local else frame.select("path", "content"), sizes)

    def some(self) -> DataFrame | None:
        """As `frame`, of a few files that are not empty; ``None`` if all are."""
        files = sorted(file for file, size in self.sizes.items() if size > EMPTY_BYTES)
        if not files:
            return None
        count = min(len(files), _SAMPLED_FILES)
        spread = (files[number * len(files) // count] for number in range(count))
        reader = self.spark.read.format("binaryFile").option("recursiveFileLookup", "true")  # looks for no partitions
        return reader.load([_literal(file) for file in spread]).select(*self.frame.columns)


def _uri(path: str) -> str:
    """A path as Spark takes it; those without a scheme are this machine's, and not those of Spark's default file system."""
    if not isinstance(path, str) or not path:
        raise ConfigurationError(f"path={path!r}: expected the path of a file or a folder, or a glob, as a str.")
    if has_scheme(path):
        return path
    return f"file:{path}" if path.startswith("/") else f"file:{_literal(str(Path.cwd()))}/{path}"


def _literal(path: str) -> str:
    """A glob that means this path."""
    return re.sub(r"([\\*?\[\]{}])", r"\\\1", path)


def _local(file: str) -> bool:
    return file.startswith("file:")


def _on_disk(path: str) -> Path:
    """The path of a file of this machine, with or without its scheme. Spark knows no %20, so it is none here either."""
    return Path(re.sub("^file:(/*(?=/))?", "", path)).absolute()


def _inferred(found: InputFiles, path: str, binary: Sequence[str]) -> tuple[Field, ...]:
    """The columns that a sample of the records has."""
    some = found.some()
    result = "name string, kind int, is_array boolean, is_text boolean, place string"
    rows = [] if some is None else _rows(some, _Survey(_SAMPLED_RECORDS), result)
    seen = together(FeatureStats(row.name, row.kind, row.is_array, row.is_text, row.place) for row in rows)
    if not seen:
        raise DataError(
            f"{path!r} has no records with features among those looked at, so its columns are not known: give schema=, for "
            "instance 'x array<float>, y bigint'."
        )
    for name in binary:
        if name not in seen:
            raise DataError(f"binary_features: no feature {name!r} in {path!r}. {known_names(name, seen)}")
        if seen[name].kind != BYTES:
            raise DataError(f"binary_features: {name!r} is no bytes, but {KINDS[seen[name].kind]} in {seen[name].where}.")
    return tuple(seen[name].field(name in binary) for name in sorted(seen))


def _warn_of_unknown(found: InputFiles, path: str, fields: Sequence[Field]) -> None:
    """Warn of columns of a schema that the first records do not have: their names may be misspelt.

    Only files that this process opens itself are looked at, without a job. What is wrong with one is reported by its reader.
    """
    files = sorted(file for file, size in found.sizes.items() if size > EMPTY_BYTES and _local(file))
    try:
        seen = _first_names(files[:_SAMPLED_FILES], {field.name for field in fields})
    except Exception:
        _log.debug("cannot look at the first records of %s", path, exc_info=True)
        return
    unknown = [field.name for field in fields if field.name not in seen]
    if seen and unknown:
        warnings.warn(
            f"schema: none of the first records of {path!r} has a feature {' or '.join(map(repr, unknown))}, so the column "
            f"is null in all of them. {known_names(unknown[0], seen)}",
            stacklevel=3,  # the line that calls load_tfrecords
        )


def _first_names(files: Sequence[str], wanted: set[str]) -> set[str]:
    """The names of the features in some first records, those of the first file if it has enough of them.

    Args:
        files: The files; the next one is opened when the one before has ended.
        wanted: Names after which nothing more is read.
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
class _Survey:
    """Says what the first records of files hold."""

    records: int

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """A row for each feature."""
        import pyarrow as pa

        seen = survey(
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
    """Reads files as batches of columns."""

    fields: tuple[Field, ...]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The records, some thousand at a time."""
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
    """Each file: its name and itself, open until the next one is asked for."""
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
            f"a worker cannot read {name}: {error.strerror or error}. Files must lie where all workers see them, under the "
            "same path, or on a file system such as hdfs: or s3a:."
        ) from error


def _parsed(file: IO[bytes], name: str) -> Iterator[tuple[Features, int]]:
    """The features of each record, and its bytes."""
    for number, record in enumerate(read_records(file, name)):
        try:
            yield parse(record), len(record)
        except ValueError as error:
            raise DataError(f"record {number} of {name} is no tf.train.Example: {error}.") from error


# Writing


@dataclass(frozen=True)
class _Target:
    """A folder that is to be written.

    Attributes:
        files: Its file system, one of pyarrow's.
        path: Its path there.
        told: What messages call it.
        run: What is in the names of what this run leaves beside the folder, and of the files of object stores.
        renames: Whether a folder can be renamed, so that it is written beside and renamed when it is whole.
    """

    files: Any
    path: str
    told: str
    run: str
    renames: bool

    @classmethod
    def of(cls, path: str) -> _Target:
        """The target of a path.

        Raises:
            StorageError: pyarrow does not know or cannot reach its file system.
        """
        from pyarrow import fs

        if not isinstance(path, str) or not path.strip("/"):
            raise ConfigurationError(f"path={path!r}: expected the path of a folder, as a str.")
        scheme = path.partition(":")[0] if has_scheme(path) else "file"
        if scheme not in _SCHEMES:
            raise StorageError(
                f"cannot write {path!r}: {scheme!r} is no file system of pyarrow's. {known_names(scheme, _SCHEMES)} Write "
                "there and copy, or give a path below which the file system is mounted as a disk."
            )
        try:
            if scheme == "file":
                files, place = fs.LocalFileSystem(), str(_on_disk(path))
            else:
                files, place = fs.FileSystem.from_uri(re.sub("^s3a:", "s3:", path))
        except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
            raise StorageError(f"cannot reach {path!r} through pyarrow: {str(error).splitlines()[0]}") from error
        run = uuid.uuid4().hex[:12]
        return cls(files, place.rstrip("/"), path, run, files.type_name not in _OBJECT_STORES)

    @property
    def _draft(self) -> str:
        return self._beside("tmp")

    def _beside(self, suffix: str) -> str:
        parent, slash, name = self.path.rpartition("/")
        return f"{parent}{slash}.{name}.{self.run}.{suffix}"

    @property
    def whole(self) -> str:
        """Where files are put when they are whole."""
        return f"{self._draft}/whole" if self.renames else self.path

    @property
    def drafts(self) -> str | None:
        """Where they are before; ``None`` where a file is there only once it is whole."""
        return f"{self._draft}/drafts" if self.renames else None

    def check(self, mode: str) -> None:
        """Refuse what is there, unless it is to be replaced."""
        try:
            there = self._exists()
        except OSError as error:
            raise StorageError(f"cannot reach {self.told!r}: {error}.") from error
        if there and mode == "error":
            raise StorageError(f'{self.told!r} is there already: give mode="overwrite" to replace it, or another path.')

    def _exists(self) -> bool:
        from pyarrow import fs

        return bool(self.files.get_file_info(self.path).type != fs.FileType.NotFound)

    def prepare(self) -> None:
        """Make the folders that tasks write to."""
        for folder in (self.whole, self.drafts):
            if folder is not None:
                self.files.create_dir(folder, recursive=True)

    def commit(self, written: dict[str, int], mode: str) -> None:
        """Make what tasks have written the folder, when all of it is there."""
        found = {info.base_name: info.size for info in self._listed(self.whole)}
        lost = [name for name, size in written.items() if found.get(name) != size]
        if lost:
            raise StorageError(
                f"{len(lost)} of {len(written)} file(s) that workers wrote for {self.told!r} cannot be seen from here, the "
                f"first one {lost[0]}: the path must be on a disk that workers and driver share, or on a common file system."
            )
        for info in self._listed(self.whole) if self.renames or mode == "overwrite" else ():
            if info.base_name not in written:  # of an attempt that Spark did not need, or of what is replaced
                self.files.delete_file(info.path)
        self._mark(self.whole)
        if not self.renames:
            return
        self.check(mode)  # somebody else may have been faster
        if not self._exists():
            self.files.move(self.whole, self.path)
            return
        old = self._beside("old")
        self.files.move(self.path, old)
        try:
            self.files.move(self.whole, self.path)
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

    def tidy(self, done: bool) -> None:
        """Remove what is left of this run, but for the folder itself if it is done."""
        with suppress(OSError):
            if self.renames:
                self.files.delete_dir(self._draft)
            elif not done:
                for info in self._listed(self.path):
                    if self.run in info.base_name:
                        self.files.delete_file(info.path)


@dataclass(frozen=True)
class _Write:
    """Writes a partition as a file.

    Attributes:
        fields: Its columns.
        files: The file system.
        drafts: The folder for what is not whole; ``None`` where a file is there only once it is whole.
        whole: The folder of whole files.
        run: What is in the name of each file where there are no drafts.
        compression: How it is compressed.
    """

    fields: tuple[Field, ...]
    files: Any
    drafts: str | None
    whole: str
    run: str
    compression: str | None

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The name and the size of the file, as a row."""
        import pyarrow as pa
        from pyspark import TaskContext

        context = TaskContext.get()
        # Two attempts may be at it, and one may go on when the folder is whole: where a file cannot be taken back then, it
        # has the name of the other's, and the same rows.
        mark = self.run if self.drafts is None else uuid.uuid4().hex[:12]
        name = f"part-{0 if context is None else context.partitionId():05d}-{mark}{SUFFIXES[self.compression]}"
        draft = f"{self.drafts or self.whole}/{name}"
        try:
            size = self._write(draft, batches)
            if self.drafts is not None:
                self.files.move(draft, f"{self.whole}/{name}")
        except BaseException:
            with suppress(OSError):
                self.files.delete_file(draft)
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
