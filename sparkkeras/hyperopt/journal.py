"""A search on disk: what it searches, each trial that has ended, and the models that are kept.

::

    search.json              what is searched; another search cannot go on here
    trials/00012.json        a trial that has ended
    models/00012.npz         the weights of its best epoch, in the order of ``model.get_weights()``
    models/00012.keras       or the model that an objective returned
    search.lock              held while a search goes on here

Every file is whole or not there at all, so a search goes on where it was, however it ended.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from sparkkeras.errors import ConfigurationError, StorageError
from sparkkeras.hyperopt.trials import Trial, ranked
from sparkkeras.spark import storage

_FORMAT = 1
_SEARCH, _LOCK = "search.json", "search.lock"
_OWN, _NONE = re.compile(r"search\.(json|lock)"), re.compile(r"(?!)")
_TRIAL = re.compile(r"[0-9]{5,}\.json")
_MODEL = re.compile(r"\.?([0-9]{5,})\.(npz|keras)(\.[0-9a-f]{32}\.tmp)?")  # drafts have a dot before, and an end


class Journal:
    """The folder of a search.

    Args:
        folder: Where it is, on any file system that Spark reaches; ``None``: a temporary one, which goes with this object.
        keep: How many models are kept, those of the best trials; ``None`` is all of them.
        sign: 1 where small values are good, -1 where large ones are.
    """

    def __init__(self, folder: str | None, keep: int | None, sign: float) -> None:
        self._keep, self._sign = keep, sign
        scratch = tempfile.mkdtemp(prefix="sparkkeras-search-")
        weakref.finalize(self, shutil.rmtree, scratch, ignore_errors=True)
        self._drafts = Path(scratch)
        self.folder = (folder or str(self._drafts / "search")).rstrip("/")
        self._kept: dict[int, float] = {}
        self._files: dict[int, str] = {}
        self._written: set[int] = set()

    @contextmanager
    def opened(self, settings: Mapping[str, Any], params: Callable[[Mapping[str, Any]], Any]) -> Iterator[list[Trial]]:
        """Begin here, or go on; gives the trials that have ended.

        Args:
            settings: What is searched, as JSON knows it.
            params: What the space makes of a choice.

        Raises:
            ConfigurationError: Another search has been here, or one is going on here now.
            StorageError: The folder cannot be read or written.
        """
        others = [] if self.settings() else self._others()
        if others:
            raise ConfigurationError(
                f"save_to={self.folder!r} holds other things ({', '.join(others[:3])}): give a folder that is new, empty, "
                "or that of a search to go on with."
            )
        for name in ("", "/trials", "/models"):
            storage.make_folder(self.folder + name)
        with _locked(self.folder):
            self._check(settings)
            trials = [self._read(name, params) for name in self._trials()]
            self._find_models(trials)
            yield trials

    def settings(self) -> dict[str, Any]:
        """What is searched here; empty where nothing has been yet."""
        return self._json(_SEARCH) if _SEARCH in storage.names_in(self.folder) else {}

    def wants(self, value: float) -> bool:
        """Whether the model of a trial with this value may have to be kept; of equal ones that of the earlier trial is."""
        better = [number for number in self._written & self._kept.keys() if self._kept[number] < self._sign * value]
        return self._keep is None or len(better) < self._keep

    def draft(self, lease: int) -> Path:
        """Where the model of a trial is put together on this machine, piece by piece."""
        return self._drafts / f"{lease}.draft"

    def drop_drafts(self) -> None:
        """Remove what is left of models that nobody will finish."""
        for draft in self._drafts.glob("*.draft"):
            draft.unlink(missing_ok=True)

    def keep_model(self, number: int, value: float, draft: Path, suffix: str) -> None:
        """Keep the model of a trial; once the trial is written down, `drop_surplus` lets go of another one for it."""
        name = f"{number:05d}.{suffix}"
        storage.put_file(f"{self.folder}/models/{name}", draft)
        self._kept[number], self._files[number] = self._sign * value, name

    def drop_surplus(self) -> None:
        """Let go of the worst models, if they are too many; trials that are not written down take no other one's place."""
        written = sorted(self._written & self._kept.keys(), key=lambda number: (self._kept[number], number))
        for number in [] if self._keep is None else written[self._keep :]:
            self._drop(number)

    def has_model(self, number: int) -> bool:
        """Whether the model of a trial is kept."""
        return number in self._files

    def model_file(self, number: int) -> tuple[str, bytes]:
        """The name and the bytes of a trial's model."""
        return self._files[number], storage.read_bytes(f"{self.folder}/models/{self._files[number]}")

    def write(self, trial: Trial) -> None:
        """Write down a trial that has ended."""
        told = {field.name: getattr(trial, field.name) for field in dataclasses.fields(trial)}
        told["params"] = repr(trial.params)  # for people; the space makes them of what was chosen
        storage.write_bytes(f"{self.folder}/trials/{trial.number:05d}.json", json.dumps(told, indent=1).encode())
        self._written.add(trial.number)

    def _trials(self) -> list[str]:
        return [name for name in storage.names_in(f"{self.folder}/trials") if _TRIAL.fullmatch(name)]

    def _others(self) -> list[str]:
        """What is in the folder, and in those that are to hold trials and models, that no search has left there."""
        ours = {"": _OWN, "trials/": _TRIAL, "models/": _MODEL if self._trials() else _NONE}  # models go with trials
        return [
            below + name
            for below, known in ours.items()
            for name in storage.names_in(f"{self.folder}/{below}")
            if not name.startswith(".") and not known.fullmatch(name)
        ]

    def _check(self, settings: Mapping[str, Any]) -> None:
        told = {"format": _FORMAT, **settings}
        before = self.settings()
        if not before or not self._trials():  # nothing has come of what may be there
            storage.write_bytes(f"{self.folder}/{_SEARCH}", json.dumps(told, indent=1).encode())
            return
        if before.get("format", 0) > _FORMAT:
            raise ConfigurationError(
                f"save_to={self.folder!r} was written by a later version of sparkkeras: upgrade to go on."
            )
        other = [name for name in told if before.get(name) != told[name]]
        if "parameters" in other and "space" in other:  # other labels are another space
            other.remove("space")
        if other:
            differences = "; ".join(_difference(name, before, told) for name in other)
            raise ConfigurationError(
                f"save_to={self.folder!r} holds another search: {differences}. Go on with the same arguments, or give "
                "another folder."
            )

    def _read(self, name: str, params: Callable[[Mapping[str, Any]], Any]) -> Trial:
        told = self._json(f"trials/{name}")
        if not {"number", "status", "chosen", "intermediate_values"} <= told.keys():
            raise self._damaged(f"trials/{name}", "it is no trial")
        known = {field.name for field in dataclasses.fields(Trial)}
        made = {"params": params(told["chosen"]), "intermediate_values": tuple(told["intermediate_values"])}
        return Trial(**{**{key: told[key] for key in told if key in known}, **made})

    def _json(self, name: str) -> dict[str, Any]:
        try:
            told = json.loads(storage.read_bytes(f"{self.folder}/{name}"))
        except ValueError as error:
            raise self._damaged(name, str(error)) from error
        if not isinstance(told, dict):
            raise self._damaged(name, "it is no dict")
        return told

    def _damaged(self, name: str, how: str) -> StorageError:
        return StorageError(f"{self.folder + '/' + name!r} is damaged ({how}): remove it to go on without it.")

    def _find_models(self, trials: Sequence[Trial]) -> None:
        """Learn which models are here, and remove those that nobody would ask for."""
        self._written = {trial.number for trial in trials}
        values = {trial.number: trial.value for trial in ranked(trials, self._sign)[: self._keep]}
        for name in storage.names_in(f"{self.folder}/models"):
            ours = _MODEL.fullmatch(name)
            if ours is None:  # somebody else's
                continue
            number = int(ours[1])
            value = None if name.startswith(".") else values.get(number)
            if value is None:
                storage.remove(f"{self.folder}/models/{name}")
            else:
                self._kept[number], self._files[number] = self._sign * value, name

    def _drop(self, number: int) -> None:
        storage.remove(f"{self.folder}/models/{self._files.pop(number)}")
        del self._kept[number]


def _difference(name: str, before: Mapping[str, Any], told: Mapping[str, Any]) -> str:
    """How a setting of the search in a folder differs from what it is now."""
    if name == "space":
        return "the ranges, options or conditions of its space differ (the labels are the same)"
    if name != "parameters":
        return f"its {name} differs ({before.get(name)!r} there, {told[name]!r} now)"
    there, now = set(before.get(name) or ()), set(told[name])
    only = [
        f"only {where}: {', '.join(map(repr, sorted(labels)))}"
        for where, labels in (("there", there - now), ("now", now - there))
        if labels
    ]
    return f"the labels of its space differ ({'; '.join(only)})"


@contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Hold the folder's lock, where it is on this machine; the system lets go of it if this process dies."""
    if storage.has_scheme(folder):
        yield
        return
    with (Path(folder) / _LOCK).open("wb") as file:
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
            f"save_to={folder!r}: another search is going on there. Wait for its end, or give another folder."
        ) from error
    except OSError as error:  # a network's file system without locks, perhaps
        raise StorageError(f"save_to={folder!r} cannot be locked ({error}): give one on another file system.") from error
