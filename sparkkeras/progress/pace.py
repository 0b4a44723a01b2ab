"""The speed of a training, and the time that is left, from its events."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sparkkeras.events import EpochMeasured, EpochProgress, Event, RowsTrained

_MIN_DONE = 0.02
"""The fraction of an epoch from which on the time that is left is estimated."""


class Pace:
    """What has been trained of the current epoch, and how fast, without the time in which workers start.

    Rounds (`RowsTrained`) count exactly; while one runs, the workers' own reports (`EpochProgress`) do.

    Args:
        epochs: The epoch at which training ends; ``None`` if it is unknown.
        clock: A clock in seconds.

    Attributes:
        rows: The rows of the epoch that all workers have trained on.
        done: The fraction of the epoch that is complete; ``None`` if it is unknown.
        startup_seconds: The part of the epoch's time in which workers started.
        logs: The metrics so far, if workers have reported any.
        measured: The parameter server's own measurement of the epoch, at its end.
    """

    def __init__(self, epochs: int | None, clock: Callable[[], float]) -> None:
        self._epochs, self._clock = epochs, clock
        self._epoch = 0
        self._seconds_before, self._epochs_before = 0.0, 0
        self._reset()

    def _reset(self) -> None:
        self._began = self._clock()
        self._rows_of_rounds = self.rows = 0
        self.startup_seconds = 0.0
        self.done: float | None = 0.0
        self.logs: Mapping[str, float] = {}
        self.measured: EpochMeasured | None = None

    def begin_epoch(self, epoch: int) -> None:
        """An epoch begins."""
        self._epoch = epoch
        self._reset()

    def end_epoch(self) -> None:
        """The epoch ends."""
        self._seconds_before += self.seconds
        self._epochs_before += 1

    def handle(self, event: Event) -> bool:
        """Take an event; returns whether there is news of the epoch."""
        match event:
            case RowsTrained(rows, done, startup):
                had_started = self._rows_of_rounds or not rows or self._epochs_before
                self._rows_of_rounds += rows
                if startup:
                    self.startup_seconds = startup if not had_started else self.startup_seconds + startup
                elif not had_started and not self.rows:  # with a parameter server, whose workers have started just now
                    self.startup_seconds = self._clock() - self._began
                if self._rows_of_rounds < self.rows and done < 1:
                    return False
                self.rows, self.done = self._rows_of_rounds, done
                return True
            case EpochProgress(epoch, rows, done, seconds, logs) if epoch == self._epoch and rows >= self._rows_of_rounds:
                if not self._rows_of_rounds:
                    self.startup_seconds = max(0.0, self._clock() - self._began - seconds)
                self.rows, self.done, self.logs = rows, done, logs
                return True
            case EpochMeasured():
                self.measured = event
                self.rows, self.startup_seconds = event.rows, event.startup_seconds
                return True
        return False

    @property
    def seconds(self) -> float:
        """The duration of the epoch so far, without start-up."""
        if self.measured is not None:
            return self.measured.seconds
        return max(0.0, self._clock() - self._began - self.startup_seconds)

    @property
    def rows_per_second(self) -> float:
        """The rows of all workers per second."""
        return self.rows / max(self.seconds, 1e-9)

    @property
    def seconds_left_of_epoch(self) -> float | None:
        """The time that the rest of the epoch takes at this speed; ``None`` if it is unknown."""
        if self.done is None or not _MIN_DONE <= self.done < 1:
            return None
        return self.seconds * (1 / self.done - 1)

    @property
    def seconds_left(self) -> float | None:
        """The time that the rest of the training takes; ``None`` if it is unknown."""
        if self._epochs is None or self.done is None or self._epochs_before + self.done < _MIN_DONE:
            return None
        per_epoch = (self._seconds_before + self.seconds) / (self._epochs_before + self.done)
        return per_epoch * max(0.0, self._epochs - self._epoch - self.done)
