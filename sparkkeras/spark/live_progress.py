"""The progress of all workers within an epoch, from what each of them reports."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress

from sparkkeras.data.dataset import DriverAddress
from sparkkeras.errors import ConfigurationError
from sparkkeras.events import EpochProgress, Events
from sparkkeras.rpc.options import ServerOptions
from sparkkeras.worker.progress import ProgressTarget, WorkerProgress

_WORKERS = 64
"""So many workers may always connect; more if the number of rows of each is known."""

EVENT_SECONDS = 0.5
"""The shortest interval of events."""


class LiveProgress:
    """Adds up the reports of workers, and emits their sums.

    Args:
        events: Gets an `EpochProgress` about once a second.
        rows: The rows of each worker in an epoch; ``None``: unknown.
        clock: A monotonic clock in seconds.
    """

    def __init__(self, events: Events, rows: Sequence[int | None], clock: Callable[[], float] = time.monotonic) -> None:
        self._events, self._rows, self._clock = events, rows, clock
        self._lock = threading.Lock()
        self._latest: dict[int, WorkerProgress] = {}
        self._next = 0.0

    def take(self, report: WorkerProgress) -> None:
        """Take the report of a worker, which replaces its last one."""
        with self._lock:
            self._latest[report.worker] = report
            now = self._clock()
            if now < self._next:
                return
            self._next = now + EVENT_SECONDS
            progress = self._sum()
        self._events.emit(progress)

    def _sum(self) -> EpochProgress:
        """The progress in the earliest epoch in which a worker is: others may be ahead in the asynchronous modes."""
        epoch = min(each.epoch for each in self._latest.values())
        current = [each for each in self._latest.values() if each.epoch == epoch]
        ahead = [self._rows[each.worker] or 0 for each in self._latest.values() if each.epoch > epoch]
        rows = sum(each.rows for each in current) + sum(ahead)
        known = [each for each in self._rows if each is not None]
        done = rows / sum(known) if len(known) == len(self._rows) and any(known) else None
        seconds = max(each.seconds for each in current)
        return EpochProgress(epoch, rows, None if done is None else min(done, 1.0), seconds, _mean_logs(current))


def _mean_logs(reports: Sequence[WorkerProgress]) -> Mapping[str, float]:
    """The means of the metrics, weighted by rows."""
    total = sum(each.rows for each in reports)
    if not total:
        return {}
    names = [name for name in reports[0].logs if all(name in each.logs for each in reports)]
    return {name: sum(each.logs[name] * each.rows for each in reports) / total for name in names}


@contextmanager
def live_progress(
    events: Events, driver: DriverAddress | None, options: ServerOptions, rows: Sequence[int | None]
) -> Iterator[ProgressTarget | None]:
    """Receive the progress of workers until the context ends.

    Args:
        events: Gets the sums.
        driver: How workers reach this process; ``None`` if they cannot.
        options: The settings of the server.
        rows: The rows of each worker in an epoch; ``None``: unknown.

    Yields:
        Where the workers send it; ``None`` if nobody wants it, or they cannot.
    """
    if driver is None or not events:
        yield None
        return
    with ExitStack() as stack:
        target = None
        with suppress(ImportError, ConfigurationError):  # without cryptography, or a port; training does not need it
            from sparkkeras.spark.progress_service import receiving

            num_workers = max(len(rows), _WORKERS)
            target = stack.enter_context(receiving(LiveProgress(events, rows).take, driver, options, num_workers))
        yield target
