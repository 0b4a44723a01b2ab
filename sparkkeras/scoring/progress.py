"""The progress of an evaluation or a prediction, from the storing of its rows on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from sparkkeras.data.dataset import Dataset
from sparkkeras.events import Events, PhaseStarted, RunStarted, WorkersChanged
from sparkkeras.modeling.archive import ModelArchive
from sparkkeras.progress.renderer import Progress
from sparkkeras.rpc.options import ServerOptions
from sparkkeras.sources.source import Source
from sparkkeras.spark.activity import watching_spark
from sparkkeras.spark.live_progress import live_progress
from sparkkeras.worker.progress import ProgressTarget


@contextmanager
def dataset_with_progress(
    pack: Callable[[], ModelArchive], source: Source, slices: int | None, text: str, verbose: int | str
) -> Iterator[tuple[ModelArchive, Dataset, ProgressTarget | None]]:
    """Pack a model and store the rows of a source; if ``verbose`` is set, show the progress of this, and of what follows.

    Args:
        pack: Packs the model.
        source: The rows.
        slices: The number of partitions for arrays; ``None``: the number of slots.
        text: What is done, for instance ``"Predicting"``.
        verbose: ``"auto"``, 0, 1 or 2.

    Yields:
        The packed model, the stored rows, and where workers send their progress; ``None``: nowhere.
    """
    level = 1 if verbose == "auto" else int(verbose)
    events = Events([Progress(level)] if level else [], within_epochs=level == 1)
    with ExitStack() as stack:
        stack.enter_context(events.running(RunStarted("score", text)))
        if events:
            stack.enter_context(watching_spark(events))
        events.emit(PhaseStarted("Packing the model"))
        archive = pack()
        events.emit(PhaseStarted("Starting workers, and storing rows"))
        dataset = stack.enter_context(source.dataset(slices=slices))
        events.emit(PhaseStarted(text))
        events.emit(WorkersChanged(1, (None if source.block is None else source.block.rows,)))
        yield archive, dataset, stack.enter_context(live_progress(events, dataset, ServerOptions()))
