"""The description of a training run: the job that a strategy executes, and the objects that hold its results."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import keras

from sparkkeras.data.dataset import StoredDataset
from sparkkeras.data.files import Handle
from sparkkeras.errors import ConfigurationError, counted
from sparkkeras.events import Events
from sparkkeras.modeling.archive import ModelArchive
from sparkkeras.parameter.options import ParameterServerOptions
from sparkkeras.parameter.rules import Average, State, UpdateRule
from sparkkeras.parameter.stats import ParameterServerStats
from sparkkeras.training.recorder import NoRecorder, Recorder
from sparkkeras.worker.batches import BatchOptions, FitOptions

MAX_RESTARTS = 3
"""How often all-reduce training starts again, unless the user says otherwise."""


@dataclass(frozen=True)
class TrainValidationSplit:
    """How each partition's rows are split: the first ``train`` rows for training, the next ``validate`` for validation.

    ``None`` rows for training are all of an unknown number, see `Handle.rows`.
    """

    train: tuple[int | None, ...]
    validate: tuple[int, ...]

    @classmethod
    def split(cls, handles: Sequence[Handle], validation_split: float) -> TrainValidationSplit:
        """Use the last rows of each partition for validation, as Keras does with the last rows of arrays.

        In total ``rows - floor(rows * (1 - validation_split))`` rows are for validation. They are apportioned by the sizes
        of the partitions (largest remainder method); every partition with rows keeps at least one for training.

        Raises:
            ConfigurationError: There are too few rows for the split.
        """
        if validation_split == 0.0:
            return cls(tuple(handle.rows for handle in handles), (0,) * len(handles))
        sizes = [handle.rows or 0 for handle in handles]  # all are known, see `check_row_count`
        total = sum(sizes)
        wanted = total - int(total * (1.0 - validation_split))
        quotas = [wanted * size / max(total, 1) for size in sizes]
        counts = [min(int(quota), max(size - 1, 0)) for quota, size in zip(quotas, sizes, strict=True)]
        by_remainder = sorted(range(len(sizes)), key=lambda i: (counts[i] - quotas[i], i))
        while sum(counts) < wanted:
            before = sum(counts)
            for index in by_remainder:
                if sum(counts) < wanted and counts[index] < sizes[index] - 1:
                    counts[index] += 1
            if sum(counts) == before:
                break  # every partition has only one training row left
        if sum(counts) == 0:
            raise ConfigurationError(
                f"validation_split={validation_split} of {counted(total, 'row')} in {counted(len(sizes), 'partition')} "
                "leaves no rows to validate or none to train on: use more rows, fewer partitions (num_workers=), or "
                "validation_data."
            )
        return cls(tuple(size - count for size, count in zip(sizes, counts, strict=True)), tuple(counts))

    @property
    def workers(self) -> list[int]:
        """The partitions with rows to train on."""
        return [worker for worker, rows in enumerate(self.train) if rows != 0]

    @property
    def validation_spans(self) -> tuple[tuple[int, int], ...]:
        """The validation rows of each partition, as (start, stop)."""
        return tuple((train or 0, (train or 0) + count) for train, count in zip(self.train, self.validate, strict=True))


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
class Server:
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
    server: Server = field(default_factory=Server)
    gradient_dtype: str | None = None
    max_restarts: int = MAX_RESTARTS
    histories: list[dict[str, Any]] = field(default_factory=list)
    recorder: Recorder = field(default_factory=NoRecorder)
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
    server: Server = field(default_factory=Server)
    gradient_dtype: str | None = None
    max_restarts: int = MAX_RESTARTS
    histories: list[dict[str, Any]] = field(default_factory=list)
    recorder: Recorder = field(default_factory=NoRecorder)
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
