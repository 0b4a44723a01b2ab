"""What the driver shows of a group of ranks: their output, their states, and a line with their progress."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

from sparkkeras.errors import counted
from sparkkeras.events import Events, OutputWritten, RankChanged, RankReported
from sparkkeras.progress.status_line import StatusLine, format_duration, format_logs
from sparkkeras.runner.group import Group


class Display:
    """Writes new output of the ranks, and emits it, their reports and their states as events.

    Args:
        group: The group.
        events: Gets the events.
        has_line: Whether a line below the output shows the progress (see `StatusLine`).
        clock: A monotonic clock in seconds.
    """

    def __init__(
        self, group: Group, events: Events, has_line: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._group, self._events = group, events
        self._status = StatusLine(1 if has_line else 2)
        self._states = [("", "")] * group.size  # with the machine, which changes if Spark starts a rank again
        self._progress = _Progress(clock)

    def update(self) -> None:
        """Show what is new."""
        lines, reports = self._group.console.take()
        if lines:
            self._status.write("\n".join(f"[{rank}] {line}" for rank, line in lines))
        for rank, of_rank in itertools.groupby(lines, key=lambda line: line[0]):
            self._events.emit(OutputWritten(rank, "".join(f"{line}\n" for _, line in of_rank)))
        states = self._group.states()
        for rank, state in enumerate(states):
            shown = state, self._group.host(rank)
            if state and shown != self._states[rank]:
                self._states[rank] = shown
                self._events.emit(RankChanged(rank, *shown))
        for report in reports:
            self._progress.add(report)
            self._events.emit(report)
        self._status.update(f"{_counts(states)} - {self._progress}")

    def clear(self) -> None:
        """Remove the line with the progress."""
        self._status.clear()


class _Progress:
    """The progress of rank 0, from its reports."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._began = clock, clock()
        self._first: RankReported | None = None
        self._first_at = 0.0
        self._last: RankReported | None = None
        self._last_at = 0.0

    def add(self, report: RankReported) -> None:
        if report.rank == 0:
            self._last, self._last_at = report, self._clock()
            if self._first is None or report.epoch <= self._first.epoch:  # the rank has started again
                self._first, self._first_at = report, self._last_at

    def __str__(self) -> str:
        elapsed = format_duration(self._clock() - self._began)
        if self._last is None:
            return elapsed
        left = self._seconds_left()
        parts = [
            f"epoch {self._last.epoch + 1}" + ("" if self._last.epochs is None else f" of {self._last.epochs}"),
            elapsed,
            *([] if left is None else [f"about {format_duration(left)} left"]),
            *([format_logs(self._last.logs)] if self._last.logs else []),
        ]
        return " - ".join(parts)

    def _seconds_left(self) -> float | None:
        """The time that is left, once two epochs were reported."""
        first, last = self._first, self._last
        if first is None or last is None or last.epochs is None or last.epoch <= first.epoch:
            return None
        of_epoch = (self._last_at - self._first_at) / (last.epoch - first.epoch)
        return max(0.0, of_epoch * (last.epochs - last.epoch - 1) - (self._clock() - self._last_at))


def _counts(states: list[str]) -> str:
    """How many ranks are in which state."""
    running, finished, size = states.count("started"), states.count("finished"), len(states)
    if finished:
        return f"{finished} of {counted(size, 'rank')} finished"
    if running < size:
        return f"{running} of {counted(size, 'rank')} started"
    return f"{counted(size, 'rank')} running"
