"""The speed of a training, and the time that is left, from its events; and the logs of its epochs, from a history."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sparkkeras.events import (
    EpochEnded,
    EpochMeasured,
    EpochRestarted,
    EpochStarted,
    Event,
    RankChanged,
    RankReported,
    RowsTrained,
    WorkerProgress,
    WorkersChanged,
)

_MIN_SECONDS = 1e-3
"""The shortest time from which a speed is computed."""

_MIN_DONE = 0.02
"""The fraction of an epoch from which on the time that is left is estimated."""


class Pace:
    """What has been trained of the current epoch, and how fast, without the time in which workers start.

    Rounds (`RowsTrained`) count exactly; while one runs, the workers' own reports (`WorkerProgress`) do. Of a function of
    `SparkRunner`, the epochs that its rank 0 reports count.

    Args:
        epochs: The epoch at which training ends; ``None`` if it is unknown.
        clock: A clock in seconds.

    Attributes:
        rows: The rows of the epoch that all workers have trained on.
        done: The fraction of the epoch that is complete; ``None`` if it is unknown.
        startup_seconds: The part of the epoch's time in which workers started; that of the first epoch includes all that
            happened before it since the pace was created.
        logs: The metrics so far, if workers have reported any.
        measured: The parameter server's own measurement of the epoch, at its end.
    """

    def __init__(self, epochs: int | None, clock: Callable[[], float]) -> None:
        self._epochs, self._clock = epochs, clock
        self._planned: Sequence[int | None] = ()
        self._startup_before, self._epochs_before = 0.0, 0
        self._first_reported: int | None = None
        self._created = clock()
        self.begin_epoch(0)

    def begin_epoch(self, epoch: int) -> None:
        """An epoch begins."""
        self._epoch = epoch
        self._is_open = True
        now = self._news_at = self._clock()
        self._began = now if self._epochs_before else self._created
        self._before_first = now - self._began
        self._ended: float | None = None
        self._reports: dict[int, WorkerProgress] = {}
        self._rows_of_rounds = self.rows = 0
        self._startup_of_rounds, self._is_estimated = self._before_first, False
        self.startup_seconds = self._before_first
        self.done: float | None = 0.0
        self.logs: Mapping[str, float] = {}
        self.measured: EpochMeasured | None = None

    def end_epoch(self) -> None:
        """The epoch ends; later reports about it do not count."""
        self._is_open, self._news_at = False, self._clock()
        self._startup_before += self.startup_seconds
        self._epochs_before += 1

    def handle(self, event: Event) -> bool:
        """Take an event; returns whether there is news of the epoch."""
        has_news = self._handle(event)
        if has_news:
            self._news_at = self._clock()
        return has_news

    def _handle(self, event: Event) -> bool:
        match event:
            case WorkersChanged(_, rows):
                self._planned = rows
                self._reports.clear()
            case EpochRestarted(rows):
                self._reports.clear()
                self._rows_of_rounds = self.rows = rows
            case EpochStarted(epoch):
                self.begin_epoch(epoch)
            case EpochEnded():
                self.end_epoch()
            case EpochMeasured():
                self.measured = event
                self.rows, self.startup_seconds = event.rows, self._before_first + event.startup_seconds
                return True
            case RankChanged(0, "started"):  # perhaps again
                self._first_reported, self._epochs_before = None, 0
            case RankReported(0, epoch, epochs, logs):
                if self._first_reported is None or epoch <= self._first_reported:
                    self._first_reported, self._created = epoch, self._clock()
                self._epochs, self._epoch, self._epochs_before = epochs, epoch, epoch - self._first_reported
                self._is_open, self.logs = False, logs
                return True
            case RowsTrained():
                return self._add_round(event)
            case WorkerProgress() if self._is_open and event.epoch >= self._epoch and self._ended is None:
                return self._add_report(event)
        return False

    def note(self, done: float, logs: Mapping[str, float]) -> None:
        """Note the fraction of the epoch that is complete, where rows are not known."""
        self.done, self.logs, self._news_at = done, logs, self._clock()

    def _add_round(self, event: RowsTrained) -> bool:
        is_first = not self._rows_of_rounds
        self._rows_of_rounds += event.rows
        if event.startup_seconds is not None:
            self._startup_of_rounds += event.startup_seconds
            self.startup_seconds = self._startup_of_rounds  # in place of an estimate
        elif is_first and event.rows:
            self._estimate_startup(0.0)  # workers have started just now
        if event.done >= 1 and self._ended is None:
            self._ended = self._clock()
        if self._rows_of_rounds < self.rows and event.done < 1:
            return False
        self.rows, self.done = self._rows_of_rounds, event.done
        return True

    def _add_report(self, event: WorkerProgress) -> bool:
        if not self._rows_of_rounds:
            self._estimate_startup(event.seconds)
        self._reports[event.worker] = event
        current = [each for each in self._reports.values() if each.epoch == self._epoch]
        ahead = [self._rows_of(each.worker) for each in self._reports.values() if each.epoch > self._epoch]
        rows = sum(each.rows for each in current) + sum(ahead)
        if rows < self._rows_of_rounds:
            return False
        known = [each for each in self._planned if each is not None]
        total = sum(known) if len(known) == len(self._planned) else 0
        self.rows, self.done, self.logs = rows, min(1.0, rows / total) if total else None, _mean_logs(current)
        return True

    def _rows_of(self, worker: int) -> int:
        """The rows of a worker in an epoch."""
        return self._planned[worker] or 0 if worker < len(self._planned) else 0

    def _estimate_startup(self, seconds: float) -> None:
        """Estimate the start-up in the first epoch, from how long a worker has trained when it reports first."""
        if not self._is_estimated and not self._epochs_before:
            self.startup_seconds = max(0.0, self._clock() - self._began - seconds)
        self._is_estimated = True

    @property
    def seconds(self) -> float:
        """The duration of the epoch's training so far, without start-up."""
        if self.measured is not None:
            return self.measured.seconds
        now = self._clock() if self._ended is None else self._ended
        return max(0.0, now - self._began - self.startup_seconds)

    @property
    def rows_per_second(self) -> float:
        """The rows of all workers per second; 0 before there is a time that can be measured."""
        return self.rows / self.seconds if self.seconds >= _MIN_SECONDS else 0.0

    @property
    def seconds_left_of_epoch(self) -> float | None:
        """The time that the rest of the epoch takes at this speed; ``None`` if it is unknown."""
        if self.done is None or not _MIN_DONE <= self.done < 1:
            return None
        return self.seconds * (1 / self.done - 1)

    @property
    def seconds_left(self) -> float | None:
        """The time until the last epoch ends, with validation and callbacks; ``None`` if it is unknown, or has ended."""
        if self._epochs is None or self.done is None:
            return None
        done = self._epochs_before + (self.done if self._is_open else 0.0)
        left = self._epochs - self._epoch - (self.done if self._is_open else 1.0)
        if done < _MIN_DONE or left <= 0:
            return None
        elapsed = self._news_at - self._created - self._startup_before - (self.startup_seconds if self._is_open else 0.0)
        return max(0.0, max(0.0, elapsed) / done * left - (self._clock() - self._news_at))


def _mean_logs(reports: Sequence[WorkerProgress]) -> Mapping[str, float]:
    """The means of the metrics, weighted by rows."""
    total = sum(each.rows for each in reports)
    if not total:
        return {}
    names = [name for name in reports[0].logs if all(name in each.logs for each in reports)]
    return {name: sum(each.logs[name] * each.rows for each in reports) / total for name in names}


def logs_by_epoch(
    epochs: Sequence[int], history: Mapping[str, Sequence[Any]], validation_freq: int | None = None
) -> list[dict[str, Any]]:
    """The logs of each epoch.

    A metric of validations that were made every few epochs has fewer values than there are epochs.

    Args:
        epochs: The epochs, counted from 0.
        history: The values of each metric, as in ``keras.callbacks.History.history``.
        validation_freq: The number of epochs from one validation to the next; ``None``: the one that gives as many values.
    """
    found: list[dict[str, Any]] = [{} for _ in epochs]
    for name, values in history.items():
        for index, value in zip(_places(epochs, len(values), validation_freq), values, strict=False):
            found[index][name] = value
    return found


def _places(epochs: Sequence[int], count: int, validation_freq: int | None) -> Sequence[int]:
    """The indices of the epochs to which so many values belong; the last ones if none fit."""
    if count >= len(epochs):
        return range(len(epochs))
    for frequency in range(2, max(epochs) + 2) if validation_freq is None else [validation_freq]:
        places = [index for index, epoch in enumerate(epochs) if (epoch + 1) % frequency == 0]
        if len(places) == count:
            return places
    return range(len(epochs) - count, len(epochs))
