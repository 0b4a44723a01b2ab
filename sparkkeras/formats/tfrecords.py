"""Reading and writing DataFrames as TFRecord files of tf.train.Example, without a jar or TensorFlow, also on Spark Connect.

Reading: Spark lists the files. Workers stream local files themselves; Spark's ``binaryFile`` source reads files of other
file systems whole, with Spark's credentials. A data source of Spark's Python API could use only the file systems of pyarrow,
as `sparkkeras.formats.tfrecord_source` does. Writing uses that data source; on HDFS, where pyarrow does not find Hadoop's
native client, the driver writes with Spark's file systems.
"""

from __future__ import annotations

import io
import pickle
import re
import uuid
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from sparkkeras.arguments import known_arguments, one_of
from sparkkeras.data.block import describe
from sparkkeras.errors import ConfigurationError, DataError, StorageError
from sparkkeras.formats.examples import BINARY_WITH_SCHEMA, Field, collect_stats, ddl, fields_of, infer_fields, merge_stats
from sparkkeras.formats.records import LIBRARY, SUFFIXES
from sparkkeras.formats.tfrecord_files import file_system, only_subfolders, open_file
from sparkkeras.formats.tfrecord_source import (
    NewTFRecordFolder,
    encoded,
    read_batches,
    read_sample,
    sampled_files,
    warn_of_unknown,
)
from sparkkeras.sources.frame import is_frame
from sparkkeras.sources.tasks import task_context
from sparkkeras.spark import filesystem
from sparkkeras.spark.connect import AnyCluster, check_slots_for, cluster_of
from sparkkeras.spark.filesystem import has_scheme
from sparkkeras.spark.job_errors import kerberos_advice, translated

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

_LARGEST_FILE = 2**31 - 1


@known_arguments
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
    missing feature. The format has no doubles: doubles are rounded to float32. A finite double beyond the range of float32
    (3.4e38) is an error.

    The folder appears, or replaces an existing one, when it is complete, including ``_SUCCESS``; a failed job leaves
    nothing. Object stores cannot rename folders: there the files appear one by one, replaced files are deleted when all new
    ones exist, and ``_SUCCESS`` is written last.

    Args:
        df: The rows; at least one column.
        path: The folder. A path without a scheme is a local path; on a cluster it must be on a disk that the driver and all
            workers share. URIs (``file:``, ``hdfs:``, ``s3:`` or ``s3a:``, ``gs:``, ``abfs:``) are opened by pyarrow.fs, on
            the driver and on the workers, with the credentials that it finds there; it does not use Spark's. For ``hdfs:``
            it needs Hadoop's native client (libhdfs, ``ARROW_LIBHDFS_DIR``). Without it, the rows go through the driver,
            which writes one file after the other with Spark's file systems and credentials.
        compression: ``"gzip"``, ``"zlib"`` or ``None``.
        mode: ``"error"`` raises if the path exists; ``"overwrite"`` replaces it.

    Raises:
        DataError: ``df`` is not a DataFrame, an Example cannot hold the type of a column, an array contains a null, or a
            finite double is beyond the range of float32.
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
    if not isinstance(path, str) or not path:
        raise ConfigurationError(f"path={path!r}: expected the path of a folder, as a str.")
    fields = fields_of(df.schema, written=True)
    session = df.sparkSession
    cluster = _checked_workers(session)
    check_slots_for(session)
    with cluster.cancellable():
        if cluster.is_driver_here and _lacks_client(path):
            _save_through_driver(df, path.rstrip("/"), _Encode(fields, compression), mode)
            return
        try:
            if session not in _registered:
                session.dataSource.register(NewTFRecordFolder)
                _registered.add(session)
            # Spark looks for data sources in the active session, which only the first thread has until it is interrupted.
            session.createDataFrame([], "empty int")
            writer = df.write.format(NewTFRecordFolder.name()).option("compression", compression or "none")
            absolute = path if has_scheme(path) else str(Path(path).absolute())  # Spark has another working directory
            writer.mode("overwrite" if mode == "overwrite" else "append").save(absolute)
        except Exception as error:
            raise translated(error) from error


def _lacks_client(path: str) -> bool:
    """Whether a path is on HDFS, and pyarrow does not find Hadoop's native client here."""
    if path.partition(":")[0] not in ("hdfs", "viewfs"):  # which pyarrow opens with it
        return False
    try:
        file_system(path)
    except StorageError:
        return True
    return False


def _save_through_driver(df: DataFrame, folder: str, encode_rows: _Encode, mode: str) -> None:
    """Write with the file systems of Spark, which only this process can use: one partition after the other."""
    if filesystem.exists(folder) and mode == "error":  # an error before the job if the store cannot be reached
        raise StorageError(f'{folder!r} already exists: set mode="overwrite" to replace it, or use another path.')
    run_id = uuid.uuid4().hex[:12]
    with filesystem.new_folder(folder, overwrite=mode == "overwrite") as draft:
        try:
            pieces = df.mapInArrow(encode_rows, "part int, data binary").toLocalIterator(prefetchPartitions=True)
            for part, of_part in groupby(pieces, key=attrgetter("part")):
                path = f"{draft}/part-{part:05d}-{run_id}{SUFFIXES[encode_rows.compression]}"
                with filesystem.new_file(path, atomic=False) as file:
                    file.writelines(piece.data for piece in of_part)
            with filesystem.new_file(f"{draft}/_SUCCESS", atomic=False):
                pass
        except Exception as error:
            raise translated(error) from error


@dataclass(frozen=True)
class _Encode:
    """Encodes the rows of a partition as the bytes of a file, in pieces."""

    fields: tuple[Field, ...]
    compression: str | None

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        part = pa.array([task_context().worker], pa.int32())
        for pieces in encoded(batches, self.fields, self.compression):
            yield pa.RecordBatch.from_arrays([part, pa.array([b"".join(pieces)], pa.binary())], ["part", "data"])


_registered: weakref.WeakSet[SparkSession] = weakref.WeakSet()
"""The sessions that know the format of `save_as_tfrecords`; Spark logs a warning if it is registered again."""


@known_arguments
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
        path: A file, a folder (all its files except hidden ones and those whose names start with ``_``; of its subfolders
            only those with names like ``column=value``, which does not become a column) or a glob, on any file system that
            Spark reads. The characters ``*``, ``?``, ``[``, ``{`` and ``\`` are special; escape them with ``\``. A path
            without a scheme is a local path; on a cluster it must be on a disk that the driver and all workers share. Local
            files and ``file:`` URIs are streamed and may have any size. Files of other file systems are read whole by Spark:
            each must be smaller than 2 GiB and, without decompression, fit into a worker's memory. The compression (gzip,
            zlib) is detected from the content. Each file is read by a single task.
        schema: The columns to read, a StructType or DDL: ``"image array<float>, label bigint, name string"``. Supported
            types are boolean, tinyint, smallint, int, bigint, float, double, string, binary, and arrays of these. ``None``:
            inferred.
        binary_features: Names of features to load as binary even if their bytes are valid UTF-8; only without ``schema``.

    Raises:
        StorageError: The path does not exist, cannot be read or has files only in subfolders, or a file is too large.
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
        raise ConfigurationError(BINARY_WITH_SCHEMA)
    fields = None if schema is None else _fields_of(schema)
    _checked_workers(spark)
    frame, sizes = _listed(spark, path)
    if fields is None:
        fields = _inferred(spark, frame, sizes, path, binary_features)
    else:
        local = {file: size for file, size in sizes.items() if _local(file)}  # this process can read no others
        warn_of_unknown(path, fields, map(_opened, sampled_files(local)))
    return frame.mapInArrow(_Read(fields), ddl(fields))


def _checked_workers(session: SparkSession) -> AnyCluster:
    """The cluster of a session, whose workers can import this package and the checksum library.

    Raises:
        ClusterError: A worker lacks one of them.
    """
    cluster = cluster_of(session)
    cluster.require(*LIBRARY, "TFRecord files")
    return cluster


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
    return fields_of(columns)


def _listed(spark: SparkSession, path: str) -> tuple[DataFrame, dict[str, int]]:
    """List the files with Spark.

    Returns:
        A row for each file, with its path and, if workers cannot open the file themselves, its content; and the size of each
        file in bytes.

    Raises:
        StorageError: The path does not exist or cannot be read, all files are in subfolders that Spark does not read, or a
            file is too large for Spark to pass on.
    """
    uri = _uri(path)
    reader = spark.read.format("binaryFile")
    try:
        frame = reader.load(uri)
        sizes = {row.path: row.length for row in frame.select("path", "length").collect()}
        if not sizes and not reader.option("recursiveFileLookup", "true").load(uri).select("path").isEmpty():
            raise only_subfolders(path)
    except StorageError:
        raise
    except Exception as error:
        reasons = [line.lstrip(": ") for line in str(error).strip().splitlines()]
        reason = reasons[1] if reasons[0].startswith("An error occurred while calling") else reasons[0]  # a line of Py4J
        if "PATH_NOT_FOUND" in reason:
            reason = "the path does not exist."
        raise StorageError(f"cannot read {path!r}: {reason}{kerberos_advice(reason)}") from error
    local = all(map(_local, sizes))
    for file, size in sizes.items():
        if not local and size > _LARGEST_FILE:
            raise StorageError(
                f"{file} has {size} bytes; on this file system files must be smaller than 2 GiB. Write the data to more "
                "files, or mount the file system on the workers and use a local path."
            )
    return frame.select("path") if local else frame.select("path", "content"), sizes


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


def _inferred(
    spark: SparkSession, frame: DataFrame, sizes: dict[str, int], path: str, binary: Sequence[str]
) -> tuple[Field, ...]:
    """Infer the columns from a sample of the records in the files of `_listed`, in a Spark job."""
    names, rows = sampled_files(sizes), []
    if names:
        reader = spark.read.format("binaryFile").option("recursiveFileLookup", "true")  # disables partition discovery
        sample = reader.load([_literal(name) for name in names]).select(*frame.columns)
        check_slots_for(spark)
        try:
            rows = sample.mapInArrow(_collect_stats, "stats binary").collect()
        except Exception as error:
            raise translated(error) from error
    return infer_fields(merge_stats(chain.from_iterable(pickle.loads(row.stats) for row in rows)), path, binary)


def _collect_stats(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the pickled statistics of the features in the first records of files."""
    import pyarrow as pa

    sample = chain.from_iterable(read_sample([file]) for file in _files(batches))
    stats = list(collect_stats(sample).values())
    yield pa.record_batch([pa.array([pickle.dumps(stats)], pa.binary())], ["stats"])


@dataclass(frozen=True)
class _Read:
    """Reads files and yields batches of columns."""

    fields: tuple[Field, ...]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield batches of at most some thousand records."""
        for name, file in _files(batches):
            with file:
                yield from read_batches(file, name, self.fields)


def _files(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[str, io.BufferedReader]]:
    """Yield the name of each file, and the open file."""
    import pyarrow as pa

    for batch in batches:
        for row, name in enumerate(batch.column(0).to_pylist()):
            if batch.num_columns > 1:
                yield name, io.BufferedReader(pa.BufferReader(batch.column(1)[row].as_buffer()))
            else:
                yield _opened(name)


def _opened(name: str) -> tuple[str, io.BufferedReader]:
    return name, open_file(*file_system(name))
