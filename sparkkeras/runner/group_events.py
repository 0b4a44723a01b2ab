"""What a group of ranks does, as events."""

from __future__ import annotations

import itertools

from sparkkeras.events import Events, OutputWritten, RankChanged
from sparkkeras.runner.group import RankGroup


class GroupEvents:
    """Emits new output of the ranks, their reports and their states.

    Args:
        group: The group.
        events: Gets the events.
    """

    def __init__(self, group: RankGroup, events: Events) -> None:
        self._group, self._events = group, events
        self._emitted: dict[int, tuple[str, int | None]] = {}  # with the attempt: Spark may start a rank again

    def tick(self) -> None:
        """Emit what is new."""
        lines, reports = self._group.console.take()
        for rank, of_rank in itertools.groupby(lines, key=lambda line: line[0]):
            self._events.emit(OutputWritten(rank, "".join(f"{line}\n" for _, line in of_rank)))
        for rank, state in enumerate(self._group.states()):
            found = state, self._group.attempt(rank)
            if state and found != self._emitted.get(rank):
                self._emitted[rank] = found
                self._events.emit(RankChanged(rank, state, self._group.host(rank)))
        for report in reports:
            self._events.emit(report)
