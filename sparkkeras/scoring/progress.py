"""The progress of an evaluation or a prediction on standard output, from the storing of its rows on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from sparkkeras.data.dataset import Dataset
from sparkkeras.errors import counted
from sparkkeras.events import Event, Events, PhaseStarted, RunEnded, SparkTasks, WorkerProgress, WorkersChanged
from sparkkeras.modeling.archive import ModelArchive
from sparkkeras.progress.pace import Pace
from sparkkeras.progress.status_line import StatusLine, format_duration
from sparkkeras.rpc.options import ServerOptions
from sparkkeras.sources.source import Source
from sparkkeras.spark.activity import watching_spark
from sparkkeras.spark.live_progress import live_progress
from sparkkeras.worker.progress import ProgressTarget


class ScoringProgress:
    """Shows the rows that have been evaluated or predicted, or how far an ensemble is: an `EventListener`.

    Args:
        text: What is done, for instance ``"Predicting"``.
        rows: The number of rows; ``None`` if it is unknown.
        verbose: 0, 1 or 2; see `StatusLine`.
    """

    def __init__(self, text: str, rows: int | None, verbose: int) -> None:
        self._text, self._status = text, StatusLine(verbose)
        self._phase = text
        self._pace = Pace(1, time.perf_counter)
        self._pace.handle(WorkersChanged(1, (rows,)))

    def on_event(self, event: Event) -> None:
        """Update the line."""
        match event:
            case PhaseStarted(text):
                self._phase = text
                self._status.update(f"{text} ...", begins=True)
            case RunEnded():
                self.clear()
            case SparkTasks(done, total) if done and not self._pace.rows:
                self._status.update(f"{self._phase} ... {done} of {counted(total, 'task')}")
            case WorkerProgress() if self._pace.handle(event):
                pace, left = self._pace, self._pace.seconds_left
                share = "" if pace.done is None else f" ({pace.done:.0%})"
                rest = "" if left is None else f" - about {format_duration(left)} left"
                self._status.update(f"{self._text} ... {pace.rows:,} rows{share} - {pace.rows_per_second:,.0f} rows/s{rest}")

    def write(self, text: str) -> None:
        """Write a line that stays."""
        self._status.write(text)

    def clear(self) -> None:
        """Remove the line."""
        self._status.clear()


@contextmanager
def dataset_with_progress(
    pack: Callable[[], ModelArchive], source: Source, slices: int | None, text: str, verbose: int | str
) -> Iterator[tuple[ModelArchive, Dataset, ProgressTarget | None]]:
    """Pack a model and store the rows of a source; if ``verbose`` is set, show the progress of this, and of what follows.

    Args:
        pack: Packs the model.
        source: The rows.
        slices: The number of partitions for arrays; ``None``: the number of slots.
        text: See `ScoringProgress`.
        verbose: ``"auto"``, 0, 1 or 2.

    Yields:
        The packed model, the stored rows, and where workers send their progress; ``None``: nowhere.
    """
    if not verbose:
        archive = pack()
        with source.dataset(slices=slices) as dataset:
            yield archive, dataset, None
        return
    rows = None if source.block is None else source.block.rows
    level = 1 if verbose == "auto" else int(verbose)
    progress = ScoringProgress(text, rows, level)
    events = Events([progress], within_epochs=level == 1)
    with ExitStack() as stack:
        stack.callback(progress.clear)
        stack.enter_context(watching_spark(events))
        events.emit(PhaseStarted("Packing the model"))
        archive = pack()
        events.emit(PhaseStarted("Starting workers, and storing rows"))
        dataset = stack.enter_context(source.dataset(slices=slices))
        events.emit(PhaseStarted(text))
        yield archive, dataset, stack.enter_context(live_progress(events, dataset, ServerOptions()))
