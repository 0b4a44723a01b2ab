"""The files of checkpoints: complete or absent on any file system, also where files and folders cannot be renamed.

::

    checkpoint-00000012-5f0c31aa/    a number that grows, and what distinguishes two processes that write at the same time
        model.keras                  the model, for Keras
        arrays.bin                   raw arrays, one after the other, except for those whose bytes are in model.keras
        state.json                   everything else, and where the arrays are
        manifest.json                sizes and digests of these files, and a checksum of itself; written last

A folder without a manifest was not completed. It is deleted when a later checkpoint is complete, and so are checkpoints
beyond the number to keep, their manifest first.

A manifest that is not valid is damage, and so are files that it does not match: a warning, and the checkpoint before is
used; without one, an error. A folder with such a manifest is not deleted. A writer that is killed leaves none: the manifest
appears when it is complete, by a rename, or at once in object stores. An error of the store, such as a time-out, is raised:
it says nothing about a checkpoint.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, BinaryIO

from sparkkeras import arguments
from sparkkeras.checkpoints import values
from sparkkeras.checkpoints.checkpoint import Checkpoint
from sparkkeras.errors import ConfigurationError, StorageError, counted, warn
from sparkkeras.spark import filesystem
from sparkkeras.spark.remote_files import ChecksumError
from sparkkeras.weights import Array

MODEL = "model.keras"
_ARRAYS, _STATE, _MANIFEST = "arrays.bin", "state.json", "manifest.json"
_FORMAT = 2
"""Format 1 has all arrays in ``arrays.bin``."""
_FOLDER = re.compile(r"checkpoint-([0-9]{8,})-[0-9a-f]{8}")
_KINDS = {
    "fit": "SparkModel.fit or KerasEstimator.fit",
    "ensemble": "SparkEnsemble.fit",
    "member": "a member of SparkEnsemble.fit",
    "run": "SparkRunner.run",
}
"""What writes checkpoints, by the value ``kind`` in their state."""


SaveModel = Callable[[io.RawIOBase], values.Spans]


class DamagedError(StorageError):
    """A checkpoint is not as it was written, or all checkpoints of a folder."""


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint that was read: its name, its values, and the bytes of its model (empty if it has none)."""

    name: str
    values: dict[str, Any]
    model: bytes


class CheckpointStore:
    """The folder of the checkpoints of one training.

    Args:
        path: The path, on any file system that Spark can access.
        keep: The number of checkpoints to keep.
    """

    def __init__(self, path: str, keep: int = 1) -> None:
        self.path = path.rstrip("/") or path
        self._keep = keep
        self._suffix = uuid.uuid4().hex[:8]
        self._last: int | None = None  # the number of the newest folder, when it was looked at last

    @classmethod
    def open(cls, checkpoint: object, resume: object) -> CheckpointStore | None:
        """Check the arguments ``checkpoint`` and ``resume`` of a user; ``None`` without checkpoints.

        Raises:
            ConfigurationError: An argument is not valid, or there are checkpoints that would not be used.
            StorageError: The folder cannot be read.
        """
        resumes = arguments.flag("resume", resume)
        found = arguments.instance("checkpoint", checkpoint, Checkpoint)
        if found is None:
            if resumes:
                raise ConfigurationError("resume=True: pass checkpoint=Checkpoint(path) with the folder to resume from.")
            return None
        store = cls(str(found.path), found.keep)
        store._number_of_newest()  # from here on, another process that writes there is noticed
        names = [] if resumes else store.names()
        if names:
            raise ConfigurationError(
                f"{store.path!r} has {counted(len(names), 'checkpoint')} of an earlier training, the newest is {names[0]}: "
                "pass resume=True to continue it, or another path to train from the start."
            )
        return store

    @property
    def needs_slot(self) -> bool:
        """Whether writing takes a slot of Spark, which training must leave free: with Spark Connect, for a URI."""
        return filesystem.needs_slot(self.path)

    def names(self) -> list[str]:
        """The names of the checkpoints that were completed, also of damaged ones, the newest first.

        Raises:
            StorageError: The folder cannot be read.
        """
        return [name for name in self._folders() if _MANIFEST in filesystem.names_in(f"{self.path}/{name}")]

    def newest(
        self, kind: str | None = None, accept: Callable[[StoredCheckpoint], bool] = lambda stored: True
    ) -> StoredCheckpoint | None:
        """Read the newest checkpoint that is not damaged; ``None`` if there is no checkpoint. Warns of damaged ones.

        Args:
            kind: The value ``kind`` in the state; ``None``: any.
            accept: Whether a checkpoint is of use; others are skipped.

        Raises:
            DamagedError: All checkpoints are damaged.
            StorageError: The folder or a file cannot be read, or a later version of sparkkeras wrote a checkpoint.
            ConfigurationError: The checkpoint is of another kind.
        """
        damaged: dict[str, DamagedError] = {}
        skipped = False
        for name in self.names():
            try:
                stored = self._read(name, self._files(name))
            except DamagedError as error:
                damaged[name] = error
                continue
            self._check(stored, kind)
            if not accept(stored):
                skipped = True
                continue
            for other, reason in damaged.items():
                warn(f"the checkpoint {self.path}/{other} is damaged, and {name} is used: {reason}")
            return stored
        if damaged and not skipped:
            each = " ".join(f"{name}: {reason}" for name, reason in damaged.items())
            raise DamagedError(
                f"all checkpoints in {self.path!r} are damaged: restore them from a copy, or use another path to train from "
                f"the start. {each}"
            )
        return None

    def _check(self, stored: StoredCheckpoint, kind: str | None) -> None:
        found = stored.values.get("kind")
        if kind is not None and found != kind:
            of = _KINDS.get(str(found), "something else")
            raise ConfigurationError(
                f"the checkpoint {self.path}/{stored.name} is of {of}, and this is {_KINDS[kind]}: pass another path."
            )

    def write(self, state: Mapping[str, Any], save_model: SaveModel | None = None) -> str:
        """Write a checkpoint, and then delete old ones and what was left incomplete before.

        Args:
            state: Values as `values.pack` accepts them, by name; ``kind`` is one of `newest`.
            save_model: Writes the model to a file, from its beginning to its end, and returns which arrays of the state
                are in it.

        Returns:
            The name of the checkpoint.

        Raises:
            StorageError: It cannot be written; those before it are unchanged.
            ConfigurationError: A value cannot be stored.
        """
        tree, arrays = values.pack(dict(state), "the state")
        if not filesystem.is_reachable(self.path):  # else this thread would start Spark anew
            raise StorageError(f"cannot write {self.path!r}: Spark has been stopped.")
        filesystem.make_folder(self.path)
        number = 1 + self._number_of_newest()
        name = f"checkpoint-{number:08d}-{self._suffix}"
        folder = f"{self.path}/{name}"
        filesystem.make_folder(folder)
        try:
            files = self._write_files(folder, tree, arrays, save_model)
            with filesystem.new_file(f"{folder}/{_MANIFEST}") as file:
                file.write(_manifest(files))
        except BaseException:
            with suppress(StorageError):
                filesystem.remove_folder(folder)  # perhaps the disk is full
            raise
        self._last = number
        with suppress(StorageError):  # what is left is deleted after the next one
            self._delete_old(name)
        return name

    def check_writable(self) -> None:
        """Check that the folder can be written, with an empty file that is removed, before training begins.

        Raises:
            StorageError: It cannot be written.
        """
        self._number_of_newest()
        if self.needs_slot:
            return  # a query for each file would take seconds
        filesystem.make_folder(self.path)
        probe = f"{self.path}/.{self._suffix}"
        with filesystem.new_file(probe, atomic=False):
            pass
        filesystem.remove(probe)

    def _number_of_newest(self) -> int:
        """The largest number of a folder.

        Raises:
            StorageError: Another process has written it since this one has written or looked.
        """
        newest = next(iter(self._folders()), None)
        number = 0 if newest is None else int(newest.split("-")[1])
        if newest is not None and self._last is not None and number > self._last and not newest.endswith(self._suffix):
            raise StorageError(
                f"another process has written {newest} to {self.path!r} meanwhile. Each training needs a folder of its own: "
                "end the other one, or pass another path."
            )
        self._last = number
        return number

    def _write_files(self, folder: str, tree: Any, arrays: Sequence[Array], save_model: SaveModel | None) -> dict[str, Any]:
        """Write all files but the manifest; returns their sizes and digests."""
        files: dict[str, Any] = {}
        in_model: values.Spans = {}
        if save_model is not None:
            with self._file(folder, MODEL, files) as file:
                in_model = save_model(file)
        with self._file(folder, _ARRAYS, files) as file:
            index = values.write_arrays(arrays, file.write, in_model)
        with self._file(folder, _STATE, files) as file:
            file.write(json.dumps({"arrays": index, "values": tree}).encode())
        return files

    def _folders(self) -> list[str]:
        """The folders with the name of a checkpoint, the newest first."""
        found = [name for name in filesystem.folders_in(self.path) if _FOLDER.fullmatch(name)]
        return sorted(found, key=lambda name: (int(name.split("-")[1]), name), reverse=True)

    @contextmanager
    def _file(self, folder: str, name: str, files: dict[str, Any]) -> Iterator[_Hashing]:
        """A file to write; its size and digest are added to ``files``."""
        with filesystem.new_file(f"{folder}/{name}", atomic=False) as file:
            hashing = _Hashing(file)
            yield hashing
        files[name] = {"size": hashing.size, "sha256": hashing.digest.hexdigest()}

    def _files(self, name: str) -> dict[str, Any]:
        """The sizes and digests in the manifest of a checkpoint.

        Raises:
            DamagedError: The manifest is not valid.
            StorageError: It cannot be read, or a later version of sparkkeras wrote it.
        """
        data = self._bytes(name, _MANIFEST)
        try:
            manifest = json.loads(data)
            content = manifest["content"]
            is_valid = manifest["checksum"] == _checksum(content)
        except (ValueError, TypeError, KeyError):
            is_valid = False
        if not is_valid:
            raise DamagedError(f"{_MANIFEST} is not valid.")
        if content["format"] > _FORMAT:
            raise StorageError(f"{self.path}/{name} was written by a later version of sparkkeras: upgrade to read it.")
        files: dict[str, Any] = content["files"]
        return files

    def _read(self, name: str, files: Mapping[str, Any]) -> StoredCheckpoint:
        data = {}
        present = filesystem.names_in(f"{self.path}/{name}")
        for file, expected in files.items():
            if file not in present:
                raise DamagedError(f"{file} is missing.")
            data[file] = self._bytes(name, file)
            if len(data[file]) != expected["size"]:
                raise DamagedError(f"{file} has {len(data[file])} bytes instead of {expected['size']}.")
            if hashlib.sha256(data[file]).hexdigest() != expected["sha256"]:
                raise DamagedError(f"{file} has other contents than were written.")
        state = json.loads(data[_STATE])
        model = data.get(MODEL, b"")
        arrays = values.read_arrays(bytearray(data[_ARRAYS]), model, state["arrays"])
        return StoredCheckpoint(name, values.unpack(state["values"], arrays), model)

    def _bytes(self, name: str, file: str) -> bytes:
        try:
            return filesystem.read_bytes(f"{self.path}/{name}/{file}")
        except ChecksumError as error:
            raise DamagedError(f"{file} has other contents than were written: {error}") from error

    def _delete_old(self, newest: str) -> None:
        """Delete checkpoints beyond the number to keep, and incomplete ones that are older than ``newest``."""
        folders, completed = self._folders(), self.names()
        older = folders[folders.index(newest) + 1 :] if newest in folders else []
        kept = 1
        for name in older:
            if name in completed:
                try:
                    self._files(name)
                except DamagedError:
                    continue
                kept += 1
            if name not in completed or kept > self._keep:
                filesystem.remove(f"{self.path}/{name}/{_MANIFEST}")  # from here on it is no checkpoint
                filesystem.remove_folder(f"{self.path}/{name}")


class _Hashing(io.RawIOBase):
    """A file to write to from its beginning to its end, with the size and digest of what was written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size = 0
        self.digest = hashlib.sha256()

    def write(self, data: Any) -> int:
        self._file.write(data)
        self.digest.update(data)
        self.size += len(data)
        return len(data)

    def tell(self) -> int:
        return self.size


def _manifest(files: Mapping[str, Any]) -> bytes:
    content = {"format": _FORMAT, "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "files": dict(files)}
    return json.dumps({"checksum": _checksum(content), "content": content}, indent=1).encode()


def _checksum(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
