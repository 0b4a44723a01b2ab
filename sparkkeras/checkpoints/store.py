"""The files of checkpoints: complete or absent on any file system, also where files and folders cannot be renamed.

::

    model-5f0c31aa.zip               the model without the values of its variables, for all checkpoints of one process
    checkpoint-00000012-5f0c31aa/    a number that grows, and what distinguishes two processes that write at the same time
        arrays.bin                   raw arrays, one after the other
        manifest.json                everything else, sizes and digests of the other files, and its own digest; written last

A folder without a manifest was not completed. It is deleted when a later checkpoint is complete, and so are checkpoints
beyond the number to keep, their manifest first, and the file of a model with the last checkpoint that needs it.

A manifest that is not valid is damage, and so are files that it does not match: a warning, and the checkpoint before is
used; without one, an error. A checkpoint that was found to be damaged is not deleted. A writer that is killed leaves none:
the manifest appears when it is complete, by a rename, or at once in object stores. An error of the store, such as a
time-out, is raised: it says nothing about a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkkeras import arguments
from sparkkeras.arguments import known_fields
from sparkkeras.checkpoints import values
from sparkkeras.errors import ConfigurationError, StorageError, counted, warn
from sparkkeras.spark import filesystem
from sparkkeras.spark.filesystem import ChecksumError

_ARRAYS, _MANIFEST = "arrays.bin", "manifest.json"
_FORMAT = 1
_FOLDER = re.compile(r"checkpoint-([0-9]{8,})-([0-9a-f]{8})")


@known_fields
@dataclass(frozen=True)
class Checkpoint:
    """Where and how often training writes checkpoints, from which it can be resumed.

    Args:
        path: The folder of the checkpoints of one training: a local path, or a URI that Spark can write (``hdfs://``,
            ``s3a://``, ``file:``), or with Spark Connect one that fsspec opens. It is created if it does not exist.
        every: ``"epoch"``, or a number of averaging rounds. A round is an epoch, or ``frequency`` batches. In the mode
            ``"allreduce"``, a number of steps, counted from the beginning of each epoch; then a round is so many steps.
            ``"asynchronous"`` and ``"hogwild"`` take ``"epoch"`` only.
        every_seconds: Write a checkpoint also if the last one is this many seconds old, at the end of a round; in the modes
            ``"asynchronous"`` and ``"hogwild"`` at any time.
        keep: The number of checkpoints to keep; older ones are deleted.

    Raises:
        ConfigurationError: A value is out of range.

    Example::

        spark_model.fit(df, epochs=100, checkpoint=Checkpoint("hdfs:///checkpoints/digits"), resume=True)
    """

    path: str | os.PathLike[str]
    every: str | int = "epoch"
    every_seconds: float | None = None
    keep: int = 3

    def __post_init__(self) -> None:
        path = arguments.path("path", self.path)
        object.__setattr__(self, "path", str(Path(path).expanduser()) if path.startswith("~") else path)
        object.__setattr__(self, "keep", arguments.integer("keep", self.keep))
        every, seconds = self.every, self.every_seconds
        if every != "epoch":
            if not arguments.is_integer(every) or int(every) < 1:
                raise ConfigurationError(f'every={every!r}: expected "epoch" or a positive whole number of rounds.')
            object.__setattr__(self, "every", int(every))
        if seconds is not None:
            if not arguments.is_number(seconds) or not 0 < seconds < float("inf"):
                raise ConfigurationError(f"every_seconds={seconds!r}: expected a positive number of seconds or None.")
            object.__setattr__(self, "every_seconds", float(seconds))


class DamagedError(StorageError):
    """A checkpoint is not as it was written, or all checkpoints of a folder."""


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint that was read: its name, its value, and the bytes of its model (empty if none was wanted)."""

    name: str
    value: Any
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
        self._model: dict[str, Any] | None = None  # the size and the digest of its file, if it was written
        self._damaged: set[str] = set()

    @classmethod
    def open(cls, checkpoint: object, resume: object, written: str = "") -> CheckpointStore | None:
        """Check the arguments ``checkpoint`` and ``resume`` of a user; ``None`` without checkpoints.

        Args:
            checkpoint: A `Checkpoint`, or ``None``.
            resume: Whether to continue.
            written: When checkpoints are written, in words, if the user cannot choose it.

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
        chosen = [f"every={found.every!r}"] if found.every != "epoch" else []
        chosen += [f"every_seconds={found.every_seconds!r}"] if found.every_seconds is not None else []
        if written and chosen:
            raise ConfigurationError(f"Checkpoint({', '.join(chosen)}): {written}. Leave this out.")
        store = cls(str(found.path), found.keep)
        store._number_of_newest()  # from here on, another process that writes there is noticed
        names = [] if resumes else store.names()
        if names:
            raise ConfigurationError(
                f"{store.path!r} has {counted(len(names), 'checkpoint')} of an earlier training, the newest is {names[0]}: "
                "pass resume=True to continue it, or another path to train from the start."
            )
        return store

    def names(self) -> list[str]:
        """The names of the checkpoints that were completed, also of damaged ones, the newest first.

        Raises:
            StorageError: The folder cannot be read.
        """
        return [name for name in self._folders() if _MANIFEST in filesystem.names_in(f"{self.path}/{name}")]

    def newest(
        self, kind: str | None = None, accept: Callable[[Any], bool] = lambda value: True, with_model: bool = False
    ) -> StoredCheckpoint | None:
        """Read the newest checkpoint that is not damaged; ``None`` if there is no checkpoint. Warns of damaged ones.

        Args:
            kind: What writes such checkpoints; ``None``: any.
            accept: Whether a value is of use; other checkpoints are skipped.
            with_model: Whether to read the model, too.

        Raises:
            DamagedError: All checkpoints are damaged.
            StorageError: The folder or a file cannot be read, or a later version of sparkkeras wrote a checkpoint.
            ConfigurationError: The checkpoint is of another kind.
        """
        damaged: dict[str, DamagedError] = {}
        skipped = False
        for name in self.names():
            try:
                stored = self._read(name, kind, with_model)
            except DamagedError as error:
                damaged[name] = error
                continue
            if not accept(stored.value):
                skipped = True
                continue
            self._damaged.update(damaged)
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

    def write(self, kind: str, value: Any, model: bytes = b"") -> str:
        """Write a checkpoint, and then delete old ones and what was left incomplete before.

        Args:
            kind: What writes it, as in messages.
            value: A value that `values.pack` accepts.
            model: The bytes of the model, the same in all calls: they are written once.

        Returns:
            The name of the checkpoint.

        Raises:
            StorageError: It cannot be written; those before it are unchanged.
            ConfigurationError: A value cannot be stored.
        """
        packed, pieces = values.pack(value, "the state")
        if not filesystem.is_reachable(self.path):  # else this thread would start Spark anew
            raise StorageError(f"cannot write {self.path!r}: Spark has been stopped.")
        filesystem.make_folder(self.path)
        number = 1 + self._number_of_newest()
        name = f"checkpoint-{number:08d}-{self._suffix}"
        folder = f"{self.path}/{name}"
        filesystem.make_folder(folder)
        try:
            arrays = _write_file(f"{folder}/{_ARRAYS}", pieces)
            if model and self._model is None:
                self._model = _write_file(f"{self.path}/{_model_of(name)}", [model])
            content = {
                "format": _FORMAT,
                "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "kind": kind,
                "arrays": arrays,
                "model": self._model,
                "value": packed,
            }
            text = json.dumps(content).encode()
            with filesystem.new_file(f"{folder}/{_MANIFEST}") as file:
                file.write(text + b"\n" + _digest(text))
        except BaseException:
            with suppress(StorageError):
                filesystem.remove(folder)  # perhaps the disk is full
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

    def _folders(self) -> list[str]:
        """The folders with the name of a checkpoint, the newest first."""
        found = [name for name in filesystem.folders_in(self.path) if _FOLDER.fullmatch(name)]
        return sorted(found, key=lambda name: (int(name.split("-")[1]), name), reverse=True)

    def _read(self, name: str, kind: str | None = None, with_model: bool = False) -> StoredCheckpoint:
        """Read a checkpoint.

        Raises:
            DamagedError: A file is not as it was written.
            StorageError: It cannot be read, or a later version of sparkkeras wrote it.
            ConfigurationError: It is of another kind.
        """
        text, _, digest = _bytes(f"{self.path}/{name}/{_MANIFEST}").rpartition(b"\n")
        if digest != _digest(text):
            raise DamagedError(f"{_MANIFEST} is not valid.")
        content = json.loads(text)
        if content["format"] > _FORMAT:
            raise StorageError(f"{self.path}/{name} was written by a later version of sparkkeras: upgrade to read it.")
        if kind is not None and content["kind"] != kind:
            raise ConfigurationError(
                f"the checkpoint {self.path}/{name} is of {content['kind']}, and this is {kind}: pass another path."
            )
        arrays = bytearray(self._read_file(f"{self.path}/{name}", _ARRAYS, content["arrays"]))
        model = self._read_file(self.path, _model_of(name), content["model"]) if with_model and content["model"] else b""
        return StoredCheckpoint(name, values.unpack(content["value"], arrays), model)

    def _read_file(self, folder: str, name: str, written: Mapping[str, Any]) -> bytes:
        if name not in filesystem.names_in(folder):
            raise DamagedError(f"{name} is missing.")
        data = _bytes(f"{folder}/{name}")
        if len(data) != written["size"]:
            raise DamagedError(f"{name} has {len(data)} bytes instead of {written['size']}.")
        if hashlib.sha256(data).hexdigest() != written["sha256"]:
            raise DamagedError(f"{name} has other contents than were written.")
        return data

    def _delete_old(self, newest: str) -> None:
        """Delete checkpoints beyond the number to keep, and incomplete ones that are older than ``newest``."""
        folders, completed = self._folders(), self.names()
        older = folders[folders.index(newest) + 1 :] if newest in folders else []
        older = [name for name in older if name not in self._damaged]
        kept = [name for name in older if name in completed][: self._keep - 1]
        for name in older:
            if name in kept:
                continue
            filesystem.remove(f"{self.path}/{name}/{_MANIFEST}")  # from here on it is no checkpoint
            folders.remove(name)
            if _model_of(name) not in map(_model_of, folders):
                filesystem.remove(f"{self.path}/{_model_of(name)}")
            filesystem.remove(f"{self.path}/{name}")


def _model_of(name: str) -> str:
    """The name of the file of the model of a checkpoint."""
    return f"model-{name.rpartition('-')[2]}.zip"


def _write_file(path: str, pieces: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write a file; returns its size and its digest."""
    size, digest = 0, hashlib.sha256()
    with filesystem.new_file(path, atomic=False) as file:
        for piece in pieces:
            file.write(piece)
            digest.update(piece)
            size += len(piece)
    return {"size": size, "sha256": digest.hexdigest()}


def _bytes(path: str) -> bytes:
    try:
        return filesystem.read_bytes(path)
    except ChecksumError as error:
        raise DamagedError(f"{path.rpartition('/')[2]} has other contents than were written: {error}") from error


def _digest(text: bytes) -> bytes:
    """The digest of a manifest, as a line of JSON."""
    return json.dumps(hashlib.sha256(text).hexdigest()).encode()
