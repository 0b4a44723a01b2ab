"""Files on the file systems of a Spark Connect server, which its queries read and write, with its credentials.

A client of Spark Connect has no JVM, and queries cannot write a file with a name of ours: Spark writes folders of files. So
the file ``model.keras`` is a Parquet data set, the folder ``model.keras.parquet``, whose rows are its bytes in pieces.
Plain files, which a classic session has written, are read as they are; and `sparkkeras.spark.filesystem` reads the data sets
in a classic session.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import unquote

from sparkkeras.data.block import CHUNK_BYTES, MIB
from sparkkeras.errors import SparkKerasError, StorageError
from sparkkeras.spark.connect import (
    RemoteCluster,
    cancelled_by_interrupt,
    disable_plan_cache,
    restore_plan_cache,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

SUFFIX = ".parquet"
"""The end of the names of data sets."""

SCHEMA = "index int, data binary"
"""The rows of a data set: pieces of the file, and their order. An empty file has one row."""

PIECE_BYTES = 4 * MIB
PIECES_READ = 32
"""The number of pieces that a query returns: Spark limits the size of results."""

_NO_FILES = "org.apache.hadoop.mapreduce.lib.output.NullOutputFormat"


class ChecksumError(StorageError):
    """The contents of a file are not those that were written."""


class RemoteFiles:
    """The file systems of a Spark Connect server.

    Args:
        session: The session.
    """

    def __init__(self, session: SparkSession) -> None:
        self._session = session

    def read(self, path: str) -> bytes:
        """Read a file.

        Raises:
            StorageError: It does not exist, is not complete, or cannot be read.
        """
        with self.query("read", path):
            kinds = self._kinds(path)
            if path in kinds:
                frame = self._reader().load(escaped(path)).select("content")
                return b"".join(frame.toArrow().column(0).to_pylist())
            if path + SUFFIX in kinds:
                frame = self._session.read.schema(SCHEMA).parquet(escaped(path + SUFFIX))
                return joined(self._pieces(frame), path)
            if kinds:
                raise StorageError(f"cannot read {path!r}: it is a folder; expected a file.")
        raise StorageError(f"cannot read {path!r}: it does not exist.")

    def write(self, path: str, source: BinaryIO) -> None:
        """Write a file, in a query for each chunk. Until all have ended, there is none, or one that is not complete.

        Raises:
            StorageError: It cannot be written.
        """
        with self.query("write", path):
            RemoteCluster(self._session)  # sends this package to the workers, where they lack it
            disable_plan_cache(self._session)
            try:
                index, chunk = 0, source.read(CHUNK_BYTES)
                while chunk or not index:
                    rows = self._session.range(0, 1, 1, 1).mapInArrow(WritePieces(index, chunk), SCHEMA)
                    writer = rows.write.mode("append" if index else "overwrite").option("compression", "uncompressed")
                    writer.option("partitionOverwriteMode", "static").parquet(path + SUFFIX)
                    index += max(1, -(-len(chunk) // PIECE_BYTES))
                    chunk = source.read(CHUNK_BYTES)
            finally:
                with suppress(Exception):  # the server may be gone
                    restore_plan_cache(self._session)

    def files(self, folder: str) -> list[str]:
        """The paths of all files in a folder and its subfolders, relative to it; empty if it does not exist.

        Raises:
            StorageError: It cannot be read.
        """
        with self.query("read", folder):
            start = local_part(folder).rstrip("/") + "/"
            found = [local_part(unquote(file)) for file in self._found(escaped(folder))]
            strange = [file for file in found if not file.startswith(start)]
            if strange:
                raise StorageError(f"cannot read {folder!r}: Spark lists {strange[0]!r} there; expected files in {start!r}.")
        names = (posixpath.split(file.removeprefix(start)) for file in found)
        return sorted(
            {
                inside.removesuffix(SUFFIX) if inside.endswith(SUFFIX) else posixpath.join(inside, name)
                for inside, name in names
            }
        )

    def exists(self, folder: str) -> bool:
        """Whether there is a file or a folder with files; an empty folder counts as none.

        Raises:
            StorageError: It cannot be read.
        """
        with self.query("read", folder):
            return bool(self._found(escaped(folder)))

    def remove(self, path: str) -> None:
        """Remove a file, if it exists.

        Raises:
            StorageError: It exists, and cannot be removed.
        """
        with self.query("remove", path):
            for each in self._kinds(path) & {path, path + SUFFIX}:
                self._remove(each)

    def remove_folder(self, folder: str) -> None:
        """Remove a folder with everything in it, if it exists.

        Raises:
            StorageError: It cannot be removed.
        """
        with self.query("remove", folder):
            self._remove(folder)

    def _remove(self, path: str) -> None:
        """Overwrite a path with no rows, for which Spark removes it first.

        Partitions without rows have no files, and this format of Hadoop does not create the folder either. If the server is
        configured to commit files in another way, an empty folder may remain, which is not listed.
        """
        nothing = self._session.createDataFrame([], "value string, partition int").write.mode("overwrite")
        nothing = nothing.option("partitionOverwriteMode", "static").option("mapreduce.job.outputformat.class", _NO_FILES)
        nothing.option("mapreduce.fileoutputcommitter.marksuccessfuljobs", "false").partitionBy("partition").text(path)

    def _pieces(self, frame: DataFrame) -> Iterator[dict[str, Any]]:
        start, rows = 0, 1
        while rows:
            found = frame.where(f"index >= {start} AND index < {start + PIECES_READ}").toArrow().to_pylist()
            yield from found
            start, rows = start + PIECES_READ, len(found)

    def _kinds(self, path: str) -> set[str]:
        """What exists of a path: the plain file, the data set, or else the folder."""
        pattern = f"{escaped(path)}{{,{SUFFIX}}}"
        name = posixpath.basename(path)
        kinds = {f"{name}{SUFFIX}": path + SUFFIX}
        found = set()
        # The pattern is given twice: of a single path, Spark looks for metadata of a stream, and warns if it is a pattern.
        for file in self._found(pattern, pattern):
            folder, last = posixpath.split(unquote(file))
            is_plain = last == name and posixpath.basename(folder) != name + SUFFIX
            found.add(path if is_plain else kinds.get(posixpath.basename(folder), f"{path}/"))
        return found

    def _found(self, *patterns: str) -> list[str]:
        """The files of patterns, and in folders that they match. Reads no contents, and starts no job."""
        try:
            found: list[str] = self._reader().load(list(patterns)).inputFiles()
        except Exception as error:
            if "[PATH_NOT_FOUND]" in str(error):
                return []
            raise
        return found

    def _reader(self) -> Any:
        return self._session.read.format("binaryFile").option("recursiveFileLookup", "true")

    @contextmanager
    def query(self, verb: str, path: str) -> Iterator[None]:
        """Queries of this block end with an interrupt (Ctrl-C), and their errors become a StorageError.

        Args:
            verb: What the queries do, for the message: "read", "write" or "remove".
            path: The file or folder that they do it with.
        """
        try:
            with cancelled_by_interrupt(self._session):
                yield
        except SparkKerasError:
            raise
        except Exception as error:
            raise StorageError(f"cannot {verb} {path!r} with Spark Connect: {reason_of(error)}") from error


@dataclass(frozen=True)
class WritePieces:
    """Yields the rows of a chunk; runs on a worker.

    Attributes:
        start: The index of the first row.
        chunk: The bytes.
    """

    start: int
    chunk: bytes

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the rows, each in its own batch."""
        import pyarrow as pa

        for _ in batches:
            pass
        for index, start in enumerate(range(0, len(self.chunk) or 1, PIECE_BYTES), self.start):
            piece = pa.array([self.chunk[start : start + PIECE_BYTES]], pa.binary())
            yield pa.record_batch([pa.array([index], pa.int32()), piece], ["index", "data"])


def read_data_set(folder: Path, path: str) -> bytes:
    """The contents of the file that a data set in a folder of this machine is; ``path`` is the file, for the message.

    Raises:
        StorageError: It is not complete.
    """
    from pyarrow import parquet

    return joined((row for each in folder.glob(f"part-*{SUFFIX}") for row in parquet.read_table(each).to_pylist()), path)


def joined(rows: Iterator[dict[str, Any]], path: str) -> bytes:
    """The bytes of a file from the rows of its data set.

    Raises:
        StorageError: There are no rows, or not all.
    """
    pieces = {row["index"]: row["data"] for row in rows}
    if not pieces or set(pieces) != set(range(len(pieces))):
        raise ChecksumError(f"cannot read {path!r}: {path + SUFFIX!r} is not complete.")
    return b"".join(pieces[index] for index in range(len(pieces)))


def escaped(path: str) -> str:
    """A pattern of Hadoop that matches only this path."""
    return re.sub(r"([\\{}\[\]*?])", r"\\\1", path)


def reason_of(error: Exception) -> str:
    """The message of an error of Spark, without the stack trace that Spark Connect appends."""
    return str(error).partition("\n\nJVM stacktrace:")[0]


def local_part(uri: str) -> str:
    """The path of a URI, without scheme and authority."""
    return posixpath.normpath(re.sub(r"^[A-Za-z][A-Za-z0-9+.-]+:(//[^/]*)?/*", "/", uri))
