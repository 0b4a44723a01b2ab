"""The description of a training run: the job that a strategy executes, and the objects that hold its results."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import keras

from sparkkeras.data.block import Block
from sparkkeras.data.dataset import BlockStream, Rows, StoredDataset
from sparkkeras.data.placement import TrainValidationSplit
from sparkkeras.events import Events
from sparkkeras.modeling.archive import ModelArchive
from sparkkeras.parameter.rules import Average, State, UpdateRule
from sparkkeras.parameter.stats import ParameterServerStats
from sparkkeras.rpc.options import ParameterServerOptions
from sparkkeras.training.recorder import Recorder
from sparkkeras.worker.batches import BatchOptions, FitOptions

MAX_RESTARTS = 3
"""How often all-reduce training starts again, unless the user says otherwise."""


@dataclass(frozen=True)
class Validation:
    """The validation of a training run.

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


@dataclass
class ServerSettings:
    """The parameter server of a training run.

    Attributes:
        transport: The name of the transport, ``"http"`` or ``"socket"``.
        port: The port; 0: any free port.
        options: Further settings.
        stats: The server's statistics, set when training ends.
    """

    transport: str = "http"
    port: int = 0
    options: ParameterServerOptions = field(default_factory=ParameterServerOptions)
    stats: ParameterServerStats = field(default_factory=ParameterServerStats)


@dataclass(frozen=True)
class Coordination:
    """How workers combine their weights; see `Job` for the attributes."""

    frequency: str | int = "epoch"
    rule: UpdateRule = field(default_factory=Average)
    rule_state: State = field(default_factory=dict)
    server: ServerSettings = field(default_factory=ServerSettings)
    gradient_dtype: str | None = None
    max_restarts: int = MAX_RESTARTS
    histories: list[dict[str, Any]] = field(default_factory=list)
    recorder: Recorder = field(default_factory=Recorder)
    events: Events = field(default_factory=Events)


@dataclass(frozen=True)
class Job:
    """One call of ``fit``.

    Attributes:
        model: The master model. The strategy puts the state of the last completed round into it.
        archive: The packed master model.
        epochs: The epoch, counted from 0, at which training ends.
        initial_epoch: The epoch at which it begins.
        frequency: ``"epoch"``, or the number of batches between two exchanges.
        rule: The update rule, which computes the next weights from the workers' weights.
        rule_state: The state of the rule, such as momentum; changed in place.
        split: The rows to train on, and those to validate on.
        options: How a worker trains.
        steps_per_epoch: The largest number of batches of a worker in an epoch; ``None``: all.
        validation: The validation; ``None``: no validation.
        server: The parameter server of the asynchronous modes.
        gradient_dtype: The dtype in which all-reduce training sends gradients; ``None``: their own.
        max_restarts: How often all-reduce training starts again after a worker has failed.
        histories: Receives a record for each worker and epoch.
        recorder: Gets the progress, to write checkpoints.
        events: Passes on what happens.
    """

    model: keras.Model
    archive: ModelArchive
    epochs: int
    initial_epoch: int
    frequency: str | int
    rule: UpdateRule
    rule_state: State
    split: TrainValidationSplit
    options: FitOptions
    steps_per_epoch: int | None = None
    validation: Validation | None = None
    server: ServerSettings = field(default_factory=ServerSettings)
    gradient_dtype: str | None = None
    max_restarts: int = MAX_RESTARTS
    histories: list[dict[str, Any]] = field(default_factory=list)
    recorder: Recorder = field(default_factory=Recorder)
    events: Events = field(default_factory=Events)

    @property
    def batches(self) -> int:
        """The number of batches per epoch of the worker with the most batches; see `batches_of`."""
        return max((self.batches_of(worker) for worker in range(len(self.split.train))), default=0)

    @property
    def steps(self) -> int | None:
        """`batches`, or ``None`` if their number is unknown until they have been read."""
        return None if self.steps_per_epoch is None and None in self.split.train else self.batches

    def batches_of(self, worker: int) -> int:
        """The largest possible number of batches per epoch of one worker; ``sys.maxsize`` if nothing limits it."""
        rows = self.split.train[worker]
        batches = sys.maxsize if rows is None else -(-rows // self.options.batch_size)
        return batches if self.steps_per_epoch is None else min(batches, self.steps_per_epoch)

    def rows_of_epoch(self, partitions: Sequence[int]) -> int | None:
        """The rows that a worker with these partitions trains on in an epoch; ``None`` if they are unknown."""
        counts = [self.split.train[partition] for partition in partitions]
        most = sys.maxsize if self.steps_per_epoch is None else self.steps_per_epoch * self.options.batch_size
        if None in counts:
            return None if self.steps_per_epoch is None else most
        return min(most, sum(count or 0 for count in counts))

    @property
    def num_workers(self) -> int:
        """The number of partitions with rows to train on."""
        return len(self.split.workers)


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
