"""Writing TFRecord files: tasks write to temporary files, and the commit moves all of them to the output folder."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from sparkkeras.errors import ConfigurationError, StorageError
from sparkkeras.formats.examples import Field, encode
from sparkkeras.formats.records import SUFFIXES, compressor, framed
from sparkkeras.formats.tfrecord_files import BUFFER_BYTES, file_system, storage_errors

if TYPE_CHECKING:
    import pyarrow as pa

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
