"""The progress of training on standard output."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import keras

from sparkkeras.errors import counted
from sparkkeras.events import EpochMeasured, Event, Incident, PhaseStarted, RowsTrained, RunResumed, Updates, WorkersChanged
from sparkkeras.scoring.inference import as_line
from sparkkeras.status_line import StatusLine

_WIDTH = 20
"""The length of the bar."""

_PRINTED = ("retry", "repair", "takeover", "executor")
"""The kinds of incidents that are printed; the others are also warnings."""

_MIN_STARTUP = 0.1
"""The shortest start-up, in seconds, that is printed."""


class Progress(keras.callbacks.Callback):  # type: ignore[misc]
    """Prints the progress of training: a Keras callback and an `EventListener`.

    Args:
        verbose: 0: silent, 1: a line that changes within an epoch (see `StatusLine`) and one line per epoch, 2: one line per
            epoch.
        epochs: The epoch at which training ends.
        missing_settings: Settings with which Spark would be faster.
    """

    def __init__(self, verbose: int, epochs: int, missing_settings: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._status, self._epochs = StatusLine(verbose), epochs
        self._missing_settings = missing_settings or {}
        self._num_workers = 0
        self._is_training = False
        self._rows = 0
        self._started = 0.0
        self._measured: EpochMeasured | None = None
        self._startup = 0.0

    def on_event(self, event: Event) -> None:
        """Print the parts of the progress that Keras's callbacks do not know."""
        match event:
            case PhaseStarted(text):
                self._status.update(f"{text} ...")
            case WorkersChanged(count) if count != self._num_workers:
                self._num_workers = count
                if self._is_training:
                    self._status.write(f"Training continues on {self._workers()}.")
            case RunResumed(text):
                self._status.write(text)
            case RowsTrained(rows, done, startup):
                self._rows += rows
                self._startup += startup
                if done < 1:
                    self._update(done)
            case Incident(kind, text) if kind in _PRINTED:
                self._status.write(f"{text[:1].upper()}{text[1:]}.")
            case EpochMeasured():
                self._measured = event

    def on_train_begin(self, logs: Any = None) -> None:
        """Print the number of workers, and settings with which Spark would start their tasks faster."""
        self._is_training = True
        self._status.write(f"Training on {self._workers()}.")
        if self._missing_settings:
            settings = " ".join(f"--conf {name}={value}" for name, value in self._missing_settings.items())
            self._status.write(f"Spark would start tasks faster with {settings}")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Print the epoch's number."""
        self._rows, self._started, self._startup, self._measured = 0, time.perf_counter(), 0.0, None
        self._status.write(f"Epoch {epoch + 1}/{self._epochs}")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Print the metrics."""
        self._status.write(f"{self._pace()} - {as_line(logs or {})}")

    def _update(self, done: float) -> None:
        filled = int(done * _WIDTH)
        self._status.update(f"[{'=' * filled}{'.' * (_WIDTH - filled)}] {self._pace()}")

    def _pace(self) -> str:
        """The workers, the duration and the speed of the epoch, without the time in which workers loaded Keras."""
        if self._measured is None:
            seconds, rows, startup = time.perf_counter() - self._started - self._startup, self._rows, self._startup
            updates = ""
        else:
            seconds, rows, startup = self._measured.seconds, self._measured.rows, self._measured.startup_seconds
            updates = f" - {_described(self._measured.updates)}"
        start = f" + {startup:.1f}s start-up" if startup >= _MIN_STARTUP else ""
        return f"{self._workers()} - {seconds:.1f}s{start} - {rows / max(seconds, 1e-9):,.0f} rows/s{updates}"

    def _workers(self) -> str:
        return counted(self._num_workers, "worker")


def _described(updates: Updates) -> str:
    return f"{updates.per_second:,.0f} updates/s - staleness {updates.mean_staleness:.1f} mean, {updates.max_staleness} max"
