"""The folder of a search: the Optuna study as a journal, and the models that are kept.

::

    journal.log              on a local path: a file of Optuna's JournalFileBackend
    journal/00000012.json    elsewhere: its lines, in files, since object stores cannot append to one
    models/00012.npz         the weights of a trial's best epoch, in the order of ``model.get_weights()``
    models/00012.keras       or the model that an objective returned
    search.lock              locked while a search runs in this folder

Only the driver writes. A line that was cut off when it died is removed by the next search.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import BaseJournalBackend, JournalFileBackend, JournalFileOpenLock

from sparkkeras.errors import ConfigurationError, StorageError
from sparkkeras.hyperopt.trials import Trial, losses, ranking_keys
from sparkkeras.spark import filesystem

Log = dict[str, Any]

_LOG, _SEGMENTS, _MODELS, _LOCK = "journal.log", "journal", "models", "search.lock"
_SEGMENT = re.compile(r"[0-9]{8}\.json")
_MODEL = re.compile(r"\.?([0-9]{5,})\.(npz|keras)(\.[0-9a-f]{32}\.tmp)?")  # temporary files start with a dot and end in .tmp


class JournalBackend(BaseJournalBackend):
    """The journal of a search, for ``optuna.storages.JournalStorage``, on any file system that Spark can access.

    Args:
        folder: The folder of the search, ``save_to=`` of `HyperParamModel.minimize`.

    Raises:
        StorageError: There is no search, or it cannot be read.

    Example::

        storage = optuna.storages.JournalStorage(JournalBackend("hdfs:///searches/digits"))
        study = optuna.load_study(study_name="sparkkeras", storage=storage)
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder.rstrip("/")
        path = filesystem.local_path(self._folder)
        self._path = None if path is None else Path(path) / _LOG
        if self._path is not None and not self._path.exists():
            raise StorageError(f"there is no search in {folder!r}: expected a folder with a file {_LOG}.")
        self._file = None if self._path is None else _file_backend(self._path)
        self._read: list[Log] = []  # of segments
        self._segments = 0

    def read_logs(self, log_number_from: int) -> Iterable[Log]:
        """The entries of the journal from this number on."""
        if self._file is not None:
            return self._file.read_logs(log_number_from)
        names = [name for name in filesystem.names_in(f"{self._folder}/{_SEGMENTS}") if _SEGMENT.fullmatch(name)]
        for name in sorted(names)[self._segments :]:
            self._read += json.loads(filesystem.read_bytes(f"{self._folder}/{_SEGMENTS}/{name}"))
            self._segments += 1
        return self._read[log_number_from:]

    def append_logs(self, logs: list[Log]) -> None:
        """Write more entries."""
        if self._file is not None and self._path is not None:
            size = self._path.stat().st_size
            try:
                self._file.append_logs(logs)
            except OSError:
                with suppress(OSError):
                    os.truncate(self._path, size)  # they may be written again
                raise
            return
        name = f"{self._folder}/{_SEGMENTS}/{self._segments:08d}.json"
        filesystem.write_bytes(name, json.dumps(logs).encode())
        self._segments += 1
        self._read += logs


def _file_backend(path: Path) -> JournalFileBackend:
    """Optuna's backend, with a lock that needs no symbolic links, which Windows and some file systems do not have."""
    return JournalFileBackend(str(path), JournalFileOpenLock(str(path)))


class _Buffer(BaseJournalBackend):
    """A journal in memory that is written when `flush` is called, so that no call waits for storage under a lock."""

    def __init__(self, backend: JournalBackend) -> None:
        self._backend, self._earlier = backend, list(backend.read_logs(0))
        self._count = len(self._earlier)
        self._pending: list[Log] = []
        self._unread: list[Log] = []  # by the storage, which reads each entry once

    def read_logs(self, log_number_from: int) -> Iterable[Log]:
        if log_number_from < self._count - len(self._unread):
            found, self._earlier = self._earlier[log_number_from:], []
            return found
        found, self._unread = self._unread[log_number_from - self._count + len(self._unread) :], []
        return found

    def append_logs(self, logs: list[Log]) -> None:
        self._count += len(logs)
        self._unread += logs
        self._pending += logs

    def flush(self) -> None:
        pending = self._pending[:]
        if pending:
            self._backend.append_logs(pending)
            del self._pending[: len(pending)]


class Journal:
    """The folder of a search. One thread may write to it while others call `wants`, `has_model` and `draft`.

    Args:
        folder: The path, on any file system that Spark can access; ``None``: the models are in a temporary folder, which is
            removed with this object, and the study in memory.
        keep: The number of models to keep, those of the best trials, and with several metrics at least those of the Pareto
            front; ``None`` keeps all.
        signs: For each metric 1 if smaller values are better, -1 if larger ones are.
        has_study: Whether the study is in the folder; else the user has a storage for it.
    """

    def __init__(self, folder: str | None, keep: int | None, *signs: float, has_study: bool = True) -> None:
        self._keep, self._signs = keep, signs
        scratch = tempfile.mkdtemp(prefix="sparkkeras-search-")
        weakref.finalize(self, shutil.rmtree, scratch, ignore_errors=True)
        self._drafts = Path(scratch)
        self._has_study = has_study and folder is not None
        self.folder = (folder or str(self._drafts / "search")).rstrip("/")
        self._buffer: _Buffer | None = None
        self._lock = threading.Lock()  # of the following three; never held while files are read or written
        self._kept: dict[int, tuple[float, ...]] = {}  # the losses of models
        self._files: dict[int, str] = {}
        self._written: set[int] = set()

    @contextmanager
    def opened(self) -> Iterator[BaseStorage | None]:
        """Lock the folder, and open the storage of its study; ``None`` for one in memory.

        Raises:
            ConfigurationError: The folder holds other files, or a search is running in it.
            StorageError: The folder cannot be read or written.
        """
        foreign = self._foreign_files()
        if foreign:
            raise ConfigurationError(
                f"save_to={self.folder!r} holds other files ({', '.join(foreign[:3])}): give a new or empty folder, or the "
                "folder of a search to resume."
            )
        for name in ("", f"/{_MODELS}"):
            filesystem.make_folder(self.folder + name)
        with _locked(self.folder):
            if self._has_study:
                _cut_last_line(self.folder)
                try:
                    self._buffer = _Buffer(JournalBackend(self.folder))
                    storage = JournalStorage(self._buffer)
                except (ValueError, KeyError, TypeError) as error:
                    raise StorageError(f"the journal in {self.folder!r} is damaged ({error}).") from error
            try:
                yield storage if self._buffer is not None else None
            finally:
                for draft in self._drafts.glob("*.draft"):
                    draft.unlink(missing_ok=True)

    @property
    def flush_seconds(self) -> float:
        """How long the reports of running trials may wait until they are written: elsewhere, each write makes a file."""
        return 1.0 if filesystem.local_path(self.folder) is not None else 30.0

    def flush(self) -> None:
        """Write what has changed in the study.

        Raises:
            StorageError: The folder cannot be written.
        """
        if self._buffer is not None:
            try:
                self._buffer.flush()
            except OSError as error:
                raise StorageError(f"the journal in {self.folder!r} cannot be written: {error}.") from error

    @property
    def has_study(self) -> bool:
        """Whether the folder is that of a search to resume."""
        return _LOG in filesystem.names_in(self.folder) or _SEGMENTS in filesystem.folders_in(self.folder)

    def _foreign_files(self) -> list[str]:
        """The files and folders in the folder, and models, that no search has written; none if it has a journal."""
        if self.has_study:
            return []
        names = [name for name in filesystem.names_in(self.folder) if not name.startswith(".")]
        folders = {name for name in filesystem.folders_in(self.folder) if not name.startswith(".")}
        found = filesystem.names_in(f"{self.folder}/{_MODELS}") if self._has_study else ()  # else the study is elsewhere
        models = [f"{_MODELS}/{name}" for name in found if not name.startswith(".")]
        others = sorted(folders - {"lost+found", _MODELS})  # the first one is of the file system
        return [name for name in names if name != _LOCK] + models + [f"{name}/" for name in others]

    def add(self, trials: Sequence[Trial]) -> None:
        """Add the trials of an earlier search, and remove the models that are not of the best ones."""
        self._written = {trial.number for trial in trials}
        found = {trial.number: losses(trial.values, self._signs) for trial in trials if trial.values}
        models = filesystem.names_in(f"{self.folder}/{_MODELS}")
        names = {name: int(match[1]) for name in models if (match := _MODEL.fullmatch(name))}
        complete = {number for name, number in names.items() if not name.startswith(".")}
        kept = self._to_keep({number: found[number] for number in complete & found.keys()})
        for name, number in names.items():
            if name.startswith(".") or number not in kept:
                filesystem.remove(f"{self.folder}/{_MODELS}/{name}")
            else:
                self._kept[number], self._files[number] = found[number], name

    def wants(self, *values: float) -> bool:
        """Whether the model of a trial with these values may be among those to keep; ties keep the earlier trial."""
        with self._lock:
            others = {number: self._kept[number] for number in self._written & self._kept.keys()}
        own = -1  # before all others with the same values, since its number may be smaller than theirs
        return own in self._to_keep({**others, own: losses(values, self._signs)})

    def draft(self, lease: int) -> Path:
        """The local path of the file in which the driver assembles an uploaded model; removed when the search ends."""
        return self._drafts / f"{lease}.draft"

    def keep_model(self, number: int, values: Sequence[float], draft: Path, suffix: str) -> None:
        """Keep the model of a trial; once it counts, `drop_surplus` can remove a worse one in exchange."""
        name = f"{number:05d}.{suffix}"
        filesystem.put_file(f"{self.folder}/{_MODELS}/{name}", draft)
        with self._lock:
            self._kept[number], self._files[number] = losses(values, self._signs), name

    def count_model(self, number: int) -> None:
        """Count the model of a trial, now that the trial is written."""
        with self._lock:
            self._written.add(number)

    def drop_surplus(self) -> None:
        """Remove the worst models beyond the number to keep."""
        with self._lock:
            written = {each: self._kept[each] for each in self._written & self._kept.keys()}
            surplus = {each: self._files.pop(each) for each in written.keys() - self._to_keep(written)}
            for each in surplus:
                del self._kept[each]
        for name in surplus.values():
            filesystem.remove(f"{self.folder}/{_MODELS}/{name}")

    def _to_keep(self, found: Mapping[int, tuple[float, ...]]) -> set[int]:
        """The numbers of the trials whose models are kept, of those with these losses.

        With several metrics, the whole front is among them: trials that leave it never return, so that a trial of the last
        front has a model, whatever came in between.
        """
        if not self._keep:
            return set() if self._keep == 0 else set(found)
        numbers = sorted(found)
        keys = ranking_keys([found[number] for number in numbers])
        front = sum(index == 0 for index, _ in keys) if len(self._signs) > 1 else 0
        best_first = [number for _, number in sorted(zip(keys, numbers, strict=True))]
        return set(best_first[: max(self._keep, front)])

    def has_model(self, number: int) -> bool:
        """Whether the model of a trial is kept."""
        return number in self._files

    def model_file(self, number: int) -> tuple[str, bytes]:
        """The file name and the bytes of a trial's model."""
        return self._files[number], filesystem.read_bytes(f"{self.folder}/{_MODELS}/{self._files[number]}")


def _cut_last_line(folder: str) -> None:
    """Remove what a driver has left of a line when it died, and Optuna's lock; a new folder gets an empty journal."""
    path = filesystem.local_path(folder)
    if path is not None:
        file = Path(path) / _LOG
        file.touch()
        Path(f"{file}.lock").unlink(missing_ok=True)
        with file.open("r+b") as opened:
            data = opened.read()
            opened.truncate(data.rfind(b"\n") + 1)


@contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Hold the lock of a folder on a local path; the operating system releases it if this process dies."""
    path = filesystem.local_path(folder)
    if path is None:
        yield
        return
    with (Path(path) / _LOCK).open("wb") as file:
        _lock(file, folder)
        yield


def _lock(file: BinaryIO, folder: str) -> None:
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigurationError(
            f"save_to={folder!r}: another search is running in this folder. Wait until it ends (a Search: until it is "
            "closed), or give another folder."
        ) from error
    except OSError as error:  # for example a network file system without locks
        raise StorageError(
            f"save_to={folder!r} cannot be locked ({error}): give a folder on another file system."
        ) from error
