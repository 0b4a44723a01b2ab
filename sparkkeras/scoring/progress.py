"""The progress of an evaluation or a prediction on standard output."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from sparkkeras.data.dataset import Dataset, ReachesDriver
from sparkkeras.errors import counted
from sparkkeras.events import Event, Events, SparkTasks, WorkerProgress, WorkersChanged
from sparkkeras.progress.pace import Pace
from sparkkeras.progress.status_line import StatusLine, format_duration
from sparkkeras.rpc.options import ServerOptions
from sparkkeras.spark.activity import watching_spark
from sparkkeras.spark.live_progress import live_progress
from sparkkeras.worker.progress import ProgressTarget


class ScoringProgress:
    """Shows the rows that have been evaluated or predicted: an `EventListener`.

    Args:
        text: What is done, for instance ``"Predicting"``.
        rows: The number of rows; ``None`` if it is unknown.
        verbose: See `StatusLine`.
    """

    def __init__(self, text: str, rows: int | None, verbose: int) -> None:
        self._text, self._status = text, StatusLine(verbose)
        self._pace = Pace(1, time.perf_counter)
        self._pace.handle(WorkersChanged(1, (rows,)))

    def on_event(self, event: Event) -> None:
        """Update the line."""
        match event:
            case SparkTasks(done, total) if done and not self._pace.rows:
                self._status.update(f"{self._text} ... {done} of {counted(total, 'task')}")
            case WorkerProgress() if self._pace.handle(event):
                pace, left = self._pace, self._pace.seconds_left
                share = "" if pace.done is None else f" ({pace.done:.0%})"
                rest = "" if left is None else f" - about {format_duration(left)} left"
                self._status.update(f"{self._text} ... {pace.rows:,} rows{share} - {pace.rows_per_second:,.0f} rows/s{rest}")

    def clear(self) -> None:
        """Remove the line."""
        self._status.clear()


@contextmanager
def scoring_progress(text: str, dataset: Dataset, rows: int | None, verbose: int | str) -> Iterator[ProgressTarget | None]:
    """Show the progress until the context ends, if ``verbose`` is set.

    Args:
        text: See `ScoringProgress`.
        dataset: The rows.
        rows: Their number; ``None`` if it is unknown.
        verbose: ``"auto"``, 0, 1 or 2.

    Yields:
        Where workers send their progress; ``None``: nowhere.
    """
    if not verbose:
        yield None
        return
    progress = ScoringProgress(text, rows, 1 if verbose == "auto" else int(verbose))
    events = Events([progress])
    driver = dataset.driver if isinstance(dataset, ReachesDriver) else None
    with watching_spark(events, hides_bars=True), live_progress(events, driver, ServerOptions()) as target:
        try:
            yield target
        finally:
            progress.clear()
