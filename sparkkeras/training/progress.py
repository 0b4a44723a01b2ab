"""The progress of training on standard output."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras

from sparkkeras.errors import counted
from sparkkeras.events import Event, Incident, PhaseStarted, RunEnded, RunResumed, SparkTasks, Updates, WorkersChanged
from sparkkeras.progress.pace import Pace
from sparkkeras.progress.status_line import StatusLine, format_duration, format_logs

_WIDTH = 20
"""The length of the bar."""

_PRINTED = ("retry", "repair", "takeover", "executor")
"""The kinds of incidents that are printed; the others are also warnings."""

_MIN_STARTUP = 0.1
"""The shortest start-up, in seconds, that is printed."""


class Progress(keras.callbacks.Callback):  # type: ignore[misc]
    """Prints the progress of training: a Keras callback and an `EventListener`. What precedes the first epoch is start-up.

    Args:
        verbose: 0: silent, 1: a line that changes within an epoch (see `StatusLine`) and one line per epoch, 2: one line per
            epoch.
        epochs: The epoch at which training ends.
        missing_settings: Settings with which Spark would be faster.
    """

    def __init__(self, verbose: int, epochs: int, missing_settings: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._status, self._epochs = StatusLine(verbose), epochs
        self._lock = threading.RLock()  # events come from other threads than Keras's calls
        self._missing_settings = missing_settings or {}
        self._pace = Pace(epochs, time.perf_counter)
        self._num_workers = 0
        self._is_training = False
        self._phase = ""

    def checking(self) -> AbstractContextManager[None]:
        """Show that the call is checked: a moment, unless it has large arrays, so a log has no line of it."""
        return self._status.showing("Checking the model and the data ...") if self._status.changes else nullcontext()

    def on_event(self, event: Event) -> None:
        """Print the parts of the progress that Keras's callbacks do not know."""
        with self._lock:
            self._handle(event)

    def _handle(self, event: Event) -> None:
        match event:
            case PhaseStarted(text):
                self._phase = text
                self._status.update(f"{text} ...", begins=True)
            case SparkTasks(done, total) if self._phase and done:
                self._status.update(f"{self._phase} ... {done} of {counted(total, 'task')}")
            case WorkersChanged(count):
                self._pace.handle(event)
                if self._is_training and count != self._num_workers:
                    self._status.write(f"Training continues on {counted(count, 'worker')}.")
                self._num_workers = count
            case RunResumed(text):
                self._status.write(text)
            case RunEnded():
                self._status.clear()
            case Incident(kind, text) if kind in _PRINTED:
                self._status.write(f"{text[:1].upper()}{text[1:]}.")
            case _ if self._pace.handle(event) and self._pace.rows:
                self._phase = ""
                if self._pace.done != 1:
                    self._update()

    def on_train_begin(self, logs: Any = None) -> None:
        """Print the number of workers, and settings with which Spark would start their tasks faster."""
        self._is_training = True
        self._status.write(f"Training on {self._workers()}.")
        if self._missing_settings:
            settings = "".join(f'.config("{name}", "{value}")' for name, value in self._missing_settings.items())
            self._status.write(f"Spark would start tasks faster with SparkSession.builder{settings}")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Print the epoch's number."""
        with self._lock:
            self._pace.begin_epoch(epoch)
            self._status.write(f"Epoch {epoch + 1}/{self._epochs}")
            if self._phase:
                self._status.update(f"{self._phase} ...", begins=self._status.changes)  # below the new line

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Print the metrics."""
        with self._lock:
            self._status.write(f"{self._speed()} - {format_logs(logs or {})}")
            self._pace.end_epoch()

    def _update(self) -> None:
        """Show the progress within the epoch."""
        pace = self._pace
        filled = int((pace.done or 0.0) * _WIDTH)
        bar = f"{pace.rows:,} rows" if pace.done is None else f"[{'=' * filled}{'.' * (_WIDTH - filled)}]"
        left = pace.seconds_left_of_epoch
        parts = [
            f"{bar} {self._speed()}",
            *([f"about {format_duration(left)} left"] if left is not None else []),
            *([format_logs(pace.logs)] if pace.logs else []),
        ]
        self._status.update(" - ".join(parts))

    def _speed(self) -> str:
        """The workers, the duration and the speed of the epoch, without the time before workers trained."""
        pace = self._pace
        startup = f" + {pace.startup_seconds:.1f}s start-up" if pace.startup_seconds >= _MIN_STARTUP else ""
        updates = "" if pace.measured is None else f" - {_described(pace.measured.updates)}"
        return f"{self._workers()} - {pace.seconds:.1f}s{startup} - {pace.rows_per_second:,.0f} rows/s{updates}"

    def _workers(self) -> str:
        return counted(self._num_workers, "worker")


def _described(updates: Updates) -> str:
    return f"{updates.per_second:,.0f} updates/s - staleness {updates.mean_staleness:.1f} mean, {updates.max_staleness} max"
