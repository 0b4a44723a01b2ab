"""Validation by workers that hold their slots for the whole training, so that no Spark job of its own could start."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

from sparkkeras.data.block import Block
from sparkkeras.data.dataset import BlockStream, Rows
from sparkkeras.training.job import Job
from sparkkeras.worker.batches import BatchOptions


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


def validation_plan(job: Job, stack: ExitStack) -> ValidationPlan | None:
    """Distribute the rows to validate on among the workers with training rows; ``None`` without validation.

    Args:
        job: The job.
        stack: Keeps the rows available to the workers until it is closed.
    """
    validation = job.validation
    if validation is None:
        return None
    if validation.spans is not None:
        return ValidationPlan(validation.options, validation.spans, ())
    stored = stack.enter_context(validation.dataset.stored())
    parts = stack.enter_context(stored.everywhere())
    training = job.split.workers
    rows: list[tuple[Rows, ...]] = [()] * len(job.split.train)
    for offset, worker in enumerate(training):
        rows[worker] = tuple(parts[offset :: len(training)])
    return ValidationPlan(validation.options, None, tuple(rows))
