"""The progress of all that takes long on standard output: training, scoring, searches and functions of `SparkRunner`."""

from __future__ import annotations

import threading
import time

from sparkkeras.errors import counted
from sparkkeras.events import (
    EpochEnded,
    EpochStarted,
    Event,
    Incident,
    MemberTrained,
    OutputWritten,
    PhaseStarted,
    RankChanged,
    RankReported,
    RunEnded,
    RunResumed,
    RunStarted,
    SparkTasks,
    Updates,
    WorkersChanged,
)
from sparkkeras.progress.pace import Pace
from sparkkeras.progress.status_line import StatusLine, format_duration, format_logs

_WIDTH = 20
"""The length of the bar."""

_BEGINS = {
    "fit": ("Training on", "worker"),
    "ensemble": ("Training", "member"),
    "search": ("Loading Keras, then searching on", "worker"),
}
"""What begins with how many of what, by the kinds of runs for which it is printed."""

_PRINTED = ("retry", "repair", "takeover", "executor")
"""The kinds of incidents that are printed; the others are also warnings."""

_MIN_STARTUP = 0.1
"""The shortest start-up, in seconds, that is printed."""


class Progress:
    """Shows a run, as its events tell it: an `EventListener`. What precedes the first epoch is start-up.

    Args:
        verbose: 0: silent, 1: with a line that changes below lines that stay (see `StatusLine`), 2: only the latter, such as
            one for each epoch.

        wait_seconds: See `StatusLine`.

    Attributes:
        status: The lines.
    """

    def __init__(self, verbose: int, wait_seconds: float = 0.0) -> None:
        self.status = StatusLine(verbose, wait_seconds)
        self._lock = threading.RLock()  # events come from several threads
        self._run = RunStarted("", "")
        self._pace = Pace(None, time.monotonic)
        self._began = time.monotonic()
        self._num_workers = 0
        self._phase = ""
        self._states: dict[int, str] = {}  # of ranks
        self._report: RankReported | None = None

    def on_event(self, event: Event) -> None:
        """Show an event."""
        with self._lock:
            self._handle(event, self._pace.handle(event))

    def refresh(self) -> None:
        """Show the time that has passed."""
        with self._lock:
            self.status.update(self._line())

    def _handle(self, event: Event, has_news: bool) -> None:
        match event:
            case RunStarted():
                self._run = event
            case PhaseStarted(text):
                self._phase = text
                self.status.update(f"{text} ...", begins=True)
            case SparkTasks(done, total) if self._phase and done:
                self.status.update(f"{self._phase} ... {done} of {counted(total, 'task')}")
            case WorkersChanged(count) if self._run.kind in _BEGINS and count != self._num_workers:
                begins, unit = _BEGINS[self._run.kind]
                self.status.write(f"{'Training continues on' if self._num_workers else begins} {counted(count, unit)}.")
                self._num_workers, self._phase = count, ""
            case EpochStarted(epoch):
                self.status.write(f"Epoch {epoch + 1}/{self._run.epochs}")
                if self._phase:
                    self.status.update(f"{self._phase} ...", begins=self.status.changes)  # below the new line
            case EpochEnded(_, logs):
                self.status.write(f"{self._speed()} - {format_logs(logs)}")
            case MemberTrained(member, epochs, logs):
                self.status.write(f"Member {member} - {counted(len(epochs), 'epoch')} - {format_logs(logs[-1])}")
            case RunResumed(text):
                self.status.write(text)
            case OutputWritten(rank, text):
                self.status.write("\n".join(f"[{rank}] {line}" for line in text[:-1].split("\n")))
            case RankChanged(rank, state):
                self._states[rank] = state
            case RankReported(0):
                self._report = event
            case RunEnded():
                self.status.clear()
            case Incident(kind, text) if kind in _PRINTED:
                self.status.write(f"{text[:1].upper()}{text[1:]}.")
            case _ if has_news and self._pace.rows:
                self._phase = ""
                if self._pace.done != 1:
                    self.status.update(self._line())

    def _line(self) -> str:
        """The progress within the epoch, or of ranks."""
        pace, is_function = self._pace, self._run.kind == "function"
        left = pace.seconds_left if is_function else pace.seconds_left_of_epoch
        parts = [
            self._ranks() if is_function else f"{self._bar()} {self._speed()}",
            *([f"about {format_duration(left)} left"] if left is not None else []),
            *([format_logs(pace.logs)] if pace.logs else []),
        ]
        return " - ".join(parts)

    def _bar(self) -> str:
        if self._pace.done is None:
            return f"{self._pace.rows:,} rows"
        filled = int(self._pace.done * _WIDTH)
        return f"[{'=' * filled}{'.' * (_WIDTH - filled)}]"

    def _ranks(self) -> str:
        """How many ranks are in which state, the epoch that the first one has reported, and the time."""
        states, size, report = [*self._states.values()], self._run.settings["num_workers"], self._report
        running, finished, ranks = states.count("started"), states.count("finished"), counted(size, "rank")
        of = f"{finished} of {ranks} finished" if finished else f"{running} of {ranks} started"
        parts = [f"{ranks} running" if running == size else of]
        if report is not None:
            total = "" if report.epochs is None or report.epoch >= report.epochs else f" of {report.epochs}"
            parts.append(f"epoch {report.epoch + 1}{total}")
        return " - ".join([*parts, self._elapsed()])

    def _elapsed(self) -> str:
        return format_duration(time.monotonic() - self._began)

    def _speed(self) -> str:
        """The workers, the duration and the speed of the epoch, without the time before workers trained."""
        pace = self._pace
        workers = f"{counted(self._num_workers, 'worker')} - " if self._num_workers else ""
        startup = f" + {pace.startup_seconds:.1f}s start-up" if pace.startup_seconds >= _MIN_STARTUP else ""
        updates = "" if pace.measured is None else f" - {_described(pace.measured.updates)}"
        return f"{workers}{pace.seconds:.1f}s{startup} - {pace.rows_per_second:,.0f} rows/s{updates}"


def _described(updates: Updates) -> str:
    return f"{updates.per_second:,.0f} updates/s - staleness {updates.mean_staleness:.1f} mean, {updates.max_staleness} max"
