"""The journal of a search on disk: its settings, each trial that has ended, and the models that are kept.

::

    search.json              the settings; only a search with the same ones can resume here
    trials/00012.json        a trial that has ended
    models/00012.npz         the weights of its best epoch, in the order of ``model.get_weights()``
    models/00012.keras       or the model that an objective returned
    search.lock              locked while a search runs in this folder

Files are written atomically, so a search can resume however the previous one ended. A trial's file has the number that the
algorithm chose for each label, from which the space computes the hyper-parameters: to resume, nothing is unpickled.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from sparkkeras.errors import ConfigurationError, StorageError
from sparkkeras.hyperopt.trials import Trial, losses, ranking_keys
from sparkkeras.spark import filesystem

_FORMAT = 1
"""The version of the files."""

_SEARCH, _LOCK = "search.json", "search.lock"
_SEARCH_FILES, _NO_FILES = re.compile(r"search\.(json|lock)"), re.compile(r"(?!)")
_TRIAL = re.compile(r"[0-9]{5,}\.json")
_MODEL = re.compile(r"\.?([0-9]{5,})\.(npz|keras)(\.[0-9a-f]{32}\.tmp)?")  # temporary files start with a dot and end in .tmp


class Journal:
    """The folder of a search. One thread may write to it while others call `wants`, `has_model` and `draft`.

    Args:
        folder: The path, on any file system that Spark can access; ``None`` makes a temporary folder, which is removed with
            this object.
        keep: The number of models to keep, those of the best trials, and with several metrics at least those of the Pareto
            front; ``None`` keeps all.
        signs: For each metric 1 if smaller values are better, -1 if larger ones are.
    """

    def __init__(self, folder: str | None, keep: int | None, *signs: float) -> None:
        self._keep, self._signs = keep, signs
        scratch = tempfile.mkdtemp(prefix="sparkkeras-search-")
        weakref.finalize(self, shutil.rmtree, scratch, ignore_errors=True)
        self._drafts = Path(scratch)
        self.folder = (folder or str(self._drafts / "search")).rstrip("/")
        self._lock = threading.Lock()  # of the following three; never held while files are read or written
        self._kept: dict[int, tuple[float, ...]] = {}  # the losses of models
        self._files: dict[int, str] = {}
        self._written: set[int] = set()

    @contextmanager
    def opened(self, settings: Mapping[str, Any], params: Callable[[Mapping[str, Any]], Any]) -> Iterator[list[Trial]]:
        """Start or resume a search in this folder, and lock it; yields the trials that have ended.

        Args:
            settings: The settings of the search, as JSON values.
            params: Makes the hyper-parameters of a trial from its ``chosen`` values.

        Raises:
            ConfigurationError: The folder holds another search or other files, or a search is running in it.
            StorageError: The folder cannot be read or written.
        """
        foreign = [] if self.settings() else self._foreign_files()
        if foreign:
            raise ConfigurationError(
                f"save_to={self.folder!r} holds other files ({', '.join(foreign[:3])}): give a new or empty folder, or the "
                "folder of a search to resume."
            )
        for name in ("", "/trials", "/models"):
            filesystem.make_folder(self.folder + name)
        with _locked(self.folder):
            self._check(settings)
            trials = [self._read(name, params) for name in self._trials()]
            self._find_models(trials)
            try:
                yield trials
            finally:
                for draft in self._drafts.glob("*.draft"):
                    draft.unlink(missing_ok=True)

    def settings(self) -> dict[str, Any]:
        """The settings of the search in this folder; empty if there is none."""
        return self._json(_SEARCH) if _SEARCH in filesystem.names_in(self.folder) else {}

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
        """Keep the model of a trial; once the trial is written, `drop_surplus` can remove a worse one in exchange."""
        name = f"{number:05d}.{suffix}"
        filesystem.put_file(f"{self.folder}/models/{name}", draft)
        with self._lock:
            self._kept[number], self._files[number] = losses(values, self._signs), name

    def drop_surplus(self) -> None:
        """Remove the worst models beyond the number to keep; a model counts only once its trial is written."""
        written = {number: self._kept[number] for number in self._written & self._kept.keys()}
        for number in sorted(written.keys() - self._to_keep(written)):
            self._drop(number)

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
        return self._files[number], filesystem.read_bytes(f"{self.folder}/models/{self._files[number]}")

    def write(self, trial: Trial) -> None:
        """Write a trial that has ended."""
        fields = {field.name: getattr(trial, field.name) for field in dataclasses.fields(trial)}
        fields["params"] = repr(trial.params)  # only for readers: a resumed search computes them from the chosen values
        filesystem.write_bytes(f"{self.folder}/trials/{trial.number:05d}.json", json.dumps(fields, indent=1).encode())
        with self._lock:
            self._written.add(trial.number)

    def _trials(self) -> list[str]:
        return [name for name in filesystem.names_in(f"{self.folder}/trials") if _TRIAL.fullmatch(name)]

    def _foreign_files(self) -> list[str]:
        """The files and folders in the folder, and the files in those of trials and models, that no search has written."""
        models = _MODEL if self._trials() else _NO_FILES  # a search writes no models without trials
        patterns = {"": _SEARCH_FILES, "trials/": _TRIAL, "models/": models}
        others = set(filesystem.folders_in(self.folder)) - {
            "trials",
            "models",
            "lost+found",
        }  # the last one is of the file system
        folders = [f"{name}/" for name in sorted(others) if not name.startswith(".")]
        return folders + [
            subfolder + name
            for subfolder, pattern in patterns.items()
            for name in filesystem.names_in(f"{self.folder}/{subfolder}")
            if not name.startswith(".") and not pattern.fullmatch(name)
        ]

    def _check(self, settings: Mapping[str, Any]) -> None:
        given = {"format": _FORMAT, **settings}
        saved = self.settings()
        if not saved or not self._trials():  # without trials there is nothing to resume
            self._write_settings(given)
            return
        if saved.get("format", _FORMAT) > _FORMAT:
            raise ConfigurationError(
                f"save_to={self.folder!r} was written by a later version of sparkkeras: upgrade sparkkeras to resume it."
            )
        differing = [name for name in settings if saved.get(name) != given[name]]
        if "parameters" in differing and "space" in differing:  # different labels imply a different space
            differing.remove("space")
        if differing:
            differences = "; ".join(_difference(name, saved, given) for name in differing)
            raise ConfigurationError(
                f"save_to={self.folder!r} holds another search: {differences}. Resume it with the same arguments, or give "
                "another folder."
            )

    def _write_settings(self, settings: Mapping[str, Any]) -> None:
        filesystem.write_bytes(f"{self.folder}/{_SEARCH}", json.dumps(settings, indent=1).encode())

    def _read(self, name: str, params: Callable[[Mapping[str, Any]], Any]) -> Trial:
        saved = self._json(f"trials/{name}")
        if not {"number", "status", "chosen", "intermediate_values"} <= saved.keys():
            raise self._damaged(f"trials/{name}", "it lacks fields of a trial")
        converted = {"params": params(saved["chosen"]), "intermediate_values": tuple(saved["intermediate_values"])}
        try:
            return Trial(**{**saved, **converted})
        except (TypeError, ValueError) as error:
            raise self._damaged(f"trials/{name}", str(error)) from error

    def _json(self, name: str) -> dict[str, Any]:
        try:
            saved = json.loads(filesystem.read_bytes(f"{self.folder}/{name}"))
        except ValueError as error:
            raise self._damaged(name, str(error)) from error
        if not isinstance(saved, dict):
            raise self._damaged(name, "it is not a JSON object")
        return saved

    def _damaged(self, name: str, reason: str) -> StorageError:
        return StorageError(f"{self.folder + '/' + name!r} is damaged ({reason}): remove it to resume without it.")

    def _find_models(self, trials: Sequence[Trial]) -> None:
        """Index the models in the folder, and remove those that are not of the best trials."""
        self._written = {trial.number for trial in trials}
        found = {trial.number: losses(trial.values, self._signs) for trial in trials if trial.values}
        names = {
            name: int(match[1]) for name in filesystem.names_in(f"{self.folder}/models") if (match := _MODEL.fullmatch(name))
        }
        complete = {number for name, number in names.items() if not name.startswith(".")}
        kept = self._to_keep({number: found[number] for number in complete & found.keys()})
        for name, number in names.items():
            if name.startswith(".") or number not in kept:
                filesystem.remove(f"{self.folder}/models/{name}")
            else:
                self._kept[number], self._files[number] = found[number], name

    def _drop(self, number: int) -> None:
        with self._lock:
            name = self._files.pop(number)
            del self._kept[number]
        filesystem.remove(f"{self.folder}/models/{name}")


def _difference(name: str, saved: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """Describe how a saved setting differs from the given one."""
    if name == "space":
        return "the ranges, options or conditions of its space differ (the labels are the same)"
    if name != "parameters":
        return f"its {name} differs ({saved.get(name)!r} in the folder, {given[name]!r} now)"
    old, new = set(saved.get(name) or ()), set(given[name])
    only = [
        f"only {where}: {', '.join(map(repr, sorted(labels)))}"
        for where, labels in (("in the folder", old - new), ("now", new - old))
        if labels
    ]
    return f"the labels of its space differ ({'; '.join(only)})"


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
