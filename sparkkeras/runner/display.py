"""What the driver shows of a group of ranks: their output, their states, and a line with their progress."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

from sparkkeras.errors import counted
from sparkkeras.events import Events, OutputWritten, RankChanged
from sparkkeras.progress.pace import ReportedPace
from sparkkeras.progress.status_line import FIRST_LOG_SECONDS, StatusLine, format_duration, format_logs
from sparkkeras.runner.group import RankGroup


class Display:
    """Writes new output of the ranks, and emits it, their reports and their states as events.

    Args:
        group: The group.
        events: Gets the events.
        verbose: 0: silent, 1: with a line that shows the progress below the output (see `StatusLine`), 2: without it.
        clock: A monotonic clock in seconds.
    """

    def __init__(self, group: RankGroup, events: Events, verbose: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._group, self._events = group, events
        self._status = StatusLine(verbose, FIRST_LOG_SECONDS)
        self._states: list[tuple[str, int | None]] = [
            ("", None)
        ] * group.size  # with the attempt: Spark may start a rank again
        self._clock, self._began = clock, clock()
        self._pace = ReportedPace(clock)

    def update(self) -> None:
        """Show what is new."""
        lines, reports = self._group.console.take()
        if lines:
            self._status.write("\n".join(f"[{rank}] {line}" for rank, line in lines))
        for rank, of_rank in itertools.groupby(lines, key=lambda line: line[0]):
            self._events.emit(OutputWritten(rank, "".join(f"{line}\n" for _, line in of_rank)))
        states = self._group.states()
        for rank, state in enumerate(states):
            found = state, self._group.attempt(rank)
            if state and found != self._states[rank]:
                self._states[rank] = found
                if rank == 0 and state == "started":
                    self._pace.begin()
                self._events.emit(RankChanged(rank, state, self._group.host(rank)))
        for report in reports:
            if report.rank == 0:
                self._pace.add(report)
            self._events.emit(report)
        self._status.update(" - ".join([_counts(states), *self._progress()]))

    def clear(self) -> None:
        """Remove the line with the progress."""
        self._status.clear()

    def _progress(self) -> list[str]:
        elapsed, report, left = format_duration(self._clock() - self._began), self._pace.last, self._pace.seconds_left
        if report is None:
            return [elapsed]
        epoch, total = report.epoch + 1, report.epochs
        return [
            f"epoch {epoch}" + ("" if total is None or epoch > total else f" of {total}"),
            elapsed,
            *([] if left is None else [f"about {format_duration(left)} left"]),
            *([format_logs(report.logs)] if report.logs else []),
        ]


def _counts(states: list[str]) -> str:
    """How many ranks are in which state."""
    running, finished, size = states.count("started"), states.count("finished"), len(states)
    if finished:
        return f"{finished} of {counted(size, 'rank')} finished"
    if running < size:
        return f"{running} of {counted(size, 'rank')} started"
    return f"{counted(size, 'rank')} running"
