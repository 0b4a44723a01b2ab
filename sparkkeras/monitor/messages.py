"""Events as messages for the page: JSON objects, in the order in which things happened.

Every message has a ``type``, the ``run`` that it is about, and the ``time`` in seconds since 1970: when the run began by the
system's clock, plus what has passed since by a monotonic one, so that differences are durations. The page computes what it
shows from them (`page/state.js`), in the browser, so that a saved file needs no Python. Epochs are counted from 0. Numbers
that JSON does not have are the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``.
"""

from __future__ import annotations

import json
import math
import secrets
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

import numpy as np

from sparkkeras.events import (
    CheckpointWritten,
    EpochMeasured,
    EpochRestarted,
    Event,
    Incident,
    MemberTrained,
    OutputWritten,
    PhaseStarted,
    RankChanged,
    RankReported,
    RowsTrained,
    RunEnded,
    RunResumed,
    RunStarted,
    TrialChanged,
    WorkerProgress,
    WorkersChanged,
    WorkersReported,
)
from sparkkeras.progress.pace import Pace, logs_by_epoch

MAX_OUTPUTS = 1000
"""The number of messages with output of a rank that are kept."""

PROGRESS_SECONDS = 0.5
"""The shortest interval between two messages about the progress within an epoch."""


class Messages:
    """All messages so far, of which one may replace an earlier one, such as the progress of the same run.

    One thread at a time may add, while others read: a list is only appended to, and its items are replaced by ``None``.

    Args:
        clock: A monotonic clock in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._added = clock()
        self._texts: list[str | None] = []
        self._places: dict[tuple[Any, ...], deque[int]] = {}

    def add(self, message: Mapping[str, Any], key: tuple[Any, ...] | None = None, most: int = 1) -> None:
        """Add a message.

        Args:
            message: The message.
            key: With a key, it replaces the oldest one with the same key if there are more than ``most``.
            most: See ``key``.
        """
        self._added = self._clock()
        self._texts.append(json.dumps(plain(message), separators=(",", ":"), allow_nan=False))
        if key is not None:
            places = self._places.setdefault(key, deque())
            places.append(len(self._texts) - 1)
            if len(places) > most:
                self._texts[places.popleft()] = None

    @property
    def age(self) -> float:
        """The seconds since the last message."""
        return self._clock() - self._added

    def __len__(self) -> int:
        return len(self._texts)

    def after(self, number: int, max_bytes: int | None = None) -> tuple[int, str]:
        """The messages from a number on, about so many bytes of them; returns the next number, and a JSON array."""
        found, size = [], 0
        following = max(0, number)
        while following < len(self._texts) and (max_bytes is None or size < max_bytes):
            text = self._texts[following]
            following += 1
            if text is not None:
                found.append(text)
                size += len(text)
        return following, f"[{','.join(found)}]"


class RunReporter:
    """Translates the events and Keras calls of a run, from its beginning.

    Args:
        messages: Gets the messages.
        started: The event that begins the run.
        wall_clock: The time in seconds since 1970, for the beginning of the run.
        clock: A monotonic clock in seconds.

    Attributes:
        kind: The kind of the run.
    """

    def __init__(
        self,
        messages: Messages,
        started: RunStarted,
        wall_clock: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._messages, self._clock = messages, clock
        self.kind = started.kind
        self._began, self._began_at = clock(), wall_clock()
        self._name = f"{datetime.fromtimestamp(self._began_at):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
        self._pace = Pace(started.epochs, clock)
        self._epoch, self._next_progress = started.initial_epoch, 0.0
        settings = {**_settings_of_search(started), **started.settings}
        parameters = [vars(each) for each in started.parameters]
        self._add("run", **{**vars(started), "settings": settings, "parameters": parameters})

    def end(self, status: str, error: BaseException | None = None) -> None:
        """The run ends.

        Args:
            status: ``"finished"``, ``"failed"``, ``"interrupted"`` or ``"stopped"``.
            error: The error that ended it.
        """
        is_failure = status == "failed" and error is not None
        line = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}" if is_failure else ""
        trace = "".join(traceback.format_exception(error)) if is_failure else ""
        self._add("end", status=status, error=line, traceback=trace, seconds=self._seconds)

    def add_history(self, epochs: Sequence[int], history: Mapping[str, Sequence[Any]]) -> None:
        """End the run after epochs with these logs; its durations are not known."""
        for epoch, logs in zip(epochs, logs_by_epoch(epochs, history), strict=True):
            self._add("epoch", epoch=epoch, logs=logs, rows=None, seconds=None, startup_seconds=None)
        self._add("end", status="finished", error="", traceback="", seconds=None)

    def epoch_begins(self, epoch: int) -> None:
        """Keras's ``on_epoch_begin``."""
        self._pace.begin_epoch(epoch)
        self._epoch, self._next_progress = epoch, 0.0

    def epoch_ends(self, epoch: int, logs: Mapping[str, Any]) -> None:
        """Keras's ``on_epoch_end``."""
        pace = self._pace
        rows = pace.rows or None  # Keras's own fit does not say
        self._add("epoch", epoch=epoch, logs=logs, rows=rows, seconds=pace.seconds, startup_seconds=pace.startup_seconds)
        pace.end_epoch()

    def batches_done(self, done: float, logs: Mapping[str, Any]) -> None:
        """Keras's ``on_train_batch_end``: the fraction of the epoch that is complete."""
        self._pace.note(done, logs)
        self._progress()

    def handle(self, event: Event) -> None:
        """Translate an event."""
        match event:
            case RunEnded(error):
                self.end(event.status, error)
            case PhaseStarted():
                self._add("phase", key=("phase",), **vars(event))
            case WorkersChanged(count):
                self._pace.handle(event)
                self._add("count", workers=count)
            case RunResumed(text, epochs, logs):
                self._add("resumed", text=text, epochs=epochs, history=_columns(logs))
            case RowsTrained() | WorkerProgress() | EpochRestarted():
                if self._pace.handle(event):
                    self._progress()
            case EpochMeasured(epoch, updates=updates):
                self._pace.handle(event)
                self._add("updates", epoch=epoch, **asdict(updates))
            case WorkersReported(epoch, workers):
                self._add(
                    "workers",
                    epoch=epoch,
                    worker=[each.worker for each in workers],
                    rows=[each.rows for each in workers],
                    seconds=[each.seconds for each in workers],
                )
            case Incident():
                self._add("incident", **vars(event))
            case CheckpointWritten():
                self._add("checkpoint", **vars(event))
            case TrialChanged(trial, params):
                self._trial(trial, params)
            case MemberTrained(member, epochs, logs):
                self._add("member", member=member, epochs=epochs, history=_columns(logs))
            case RankChanged():
                self._pace.handle(event)
                self._add("rank", **vars(event))
            case RankReported(rank):  # all epochs of rank 0, the last one of others
                left = self._pace.seconds_left if self._pace.handle(event) else None
                key = None if rank == 0 else ("report", rank)
                self._add("report", key=key, **vars(event), seconds_left=left)
            case OutputWritten(rank):
                self._add("output", key=("output", rank), most=MAX_OUTPUTS, **vars(event))

    def _add(self, of_type: str, /, key: tuple[Any, ...] | None = None, most: int = 1, **fields: Any) -> None:
        full_key = None if key is None else (self._name, *key)
        now = self._began_at + self._seconds
        self._messages.add({"type": of_type, "run": self._name, "time": now, **fields}, full_key, most)

    @property
    def _seconds(self) -> float:
        """The time since the run began."""
        return self._clock() - self._began

    def _progress(self) -> None:
        pace, now = self._pace, self._clock()
        if now >= self._next_progress:
            self._next_progress = now + PROGRESS_SECONDS
            self._add(
                "progress",
                key=("progress",),
                epoch=self._epoch,
                done=pace.done,
                rows=pace.rows,
                rows_per_second=pace.rows_per_second,
                startup_seconds=pace.startup_seconds,
                seconds_left=pace.seconds_left,
                logs=pace.logs,
            )

    def _trial(self, trial: Any, params: Mapping[str, Any]) -> None:
        self._add(
            "trial",
            key=("trial", trial.number),
            trial=trial.number,
            status=trial.status,
            params=params,
            value=trial.value,
            best_epoch=trial.best_epoch,
            values=trial.intermediate_values,
            seconds=trial.seconds,
            worker=trial.worker,
            attempts=trial.attempts,
            error=trial.error,
            traceback=trial.traceback,
        )


def _settings_of_search(started: RunStarted) -> dict[str, Any]:
    """What a search optimizes, and for how long, as settings."""
    if not started.metric:
        return {}
    found = {"metric": started.metric, "mode": "min" if started.minimizes else "max", "max_evals": started.max_trials}
    return {name: value for name, value in found.items() if value is not None}


def _columns(logs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The values of each metric by epoch; ``None`` in epochs without it."""
    names = dict.fromkeys(name for each in logs for name in each)
    return {name: [each.get(name) for each in logs] for name in names}


def plain(value: Any) -> Any:
    """A value in JSON's types."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else _NOT_FINITE.get(value, "NaN")
    if isinstance(value, Mapping):
        return {str(name): plain(member) for name, member in value.items()}
    if isinstance(value, (list, tuple, range)):
        return [plain(member) for member in value]
    try:
        array = np.asarray(value)
    except Exception:
        return str(value)
    return plain(array.tolist()) if array.dtype.kind in "biuf" else str(value)


_NOT_FINITE = {math.inf: "Infinity", -math.inf: "-Infinity"}
