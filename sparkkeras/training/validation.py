"""Validation of a run: the rows, and those that each worker evaluates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparkkeras.data.block import Block
from sparkkeras.data.dataset import BlockStream, Rows, StoredDataset
from sparkkeras.worker.batches import BatchOptions

if TYPE_CHECKING:
    from sparkkeras.training.run import Run


@dataclass(frozen=True)
class Validation:
    """The validation of a run.

    Attributes:
        dataset: The rows to validate on.
        options: How they become batches.
        frequency: The number of epochs from one validation to the next.
        spans: The rows of each partition to use, as (start, stop), where ``dataset`` is the training dataset and a split
            defines its validation rows. ``None``: all rows.
    """

    dataset: StoredDataset
    options: BatchOptions
    frequency: int = 1
    spans: tuple[tuple[int, int], ...] | None = None


@dataclass(frozen=True)
class ValidationPlan:
    """The rows that each worker evaluates: some of its partition, or some that every worker can open."""

    options: BatchOptions
    spans: tuple[tuple[int, int], ...] | None
    rows: tuple[tuple[Rows, ...], ...]

    def blocks(self, worker: int, trained: Block | BlockStream) -> Iterator[Block]:
        """The rows that a worker evaluates, which trains on ``trained``."""
        if self.spans is None:
            return (block for part in self.rows[worker] for block in part.blocks())
        assert isinstance(trained, Block), "only stored rows can be split"
        start, stop = self.spans[worker]
        return iter((trained[start:stop],) if stop > start else ())


def validation_plan(run: Run, stack: ExitStack) -> ValidationPlan | None:
    """Distribute the rows to validate on among the workers with training rows; ``None`` without validation.

    Args:
        run: The run.
        stack: Keeps the rows available to the workers until it is closed.
    """
    validation = run.validation
    if validation is None:
        return None
    if validation.spans is not None:
        return ValidationPlan(validation.options, validation.spans, ())
    stored = stack.enter_context(validation.dataset.stored())
    parts = stack.enter_context(stored.everywhere())
    training = run.split.workers
    rows: list[tuple[Rows, ...]] = [()] * len(run.split.train)
    for offset, worker in enumerate(training):
        rows[worker] = tuple(parts[offset :: len(training)])
    return ValidationPlan(validation.options, None, tuple(rows))
