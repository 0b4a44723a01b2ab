"""What a strategy is asked to do, and what it reports of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import keras

from sparkkeras.data.dataset import Dataset
from sparkkeras.data.files import Handle
from sparkkeras.errors import ConfigurationError
from sparkkeras.modeling.archive import ModelArchive
from sparkkeras.parameter.options import ParameterServerOptions
from sparkkeras.parameter.rules import Average, State, UpdateRule
from sparkkeras.parameter.service import ParameterServerStats
from sparkkeras.worker.trainer import BatchOptions, FitOptions


@dataclass(frozen=True)
class TrainValidationSplit:
    """How the rows of each partition are shared out: the first ``train`` train, the ``validate`` behind them validate."""

    train: tuple[int, ...]
    validate: tuple[int, ...]

    @classmethod
    def split(cls, handles: Sequence[Handle], validation_split: float) -> TrainValidationSplit:
        """Put the last rows of each partition aside, as Keras does with the last rows of arrays.

        ``rows - floor(rows * (1 - validation_split))`` rows validate altogether, apportioned by the partitions' sizes
        (largest remainders); every partition with rows keeps one to train on.

        Raises:
            ConfigurationError: Rows are too few for the split.
        """
        sizes = [handle.rows for handle in handles]
        total = sum(sizes)
        wanted = total - int(total * (1.0 - validation_split))
        if validation_split == 0.0:
            return cls(tuple(sizes), (0,) * len(sizes))
        quotas = [wanted * size / max(total, 1) for size in sizes]
        counts = [min(int(quota), max(size - 1, 0)) for quota, size in zip(quotas, sizes, strict=True)]
        by_remainder = sorted(range(len(sizes)), key=lambda i: (counts[i] - quotas[i], i))
        while sum(counts) < wanted:
            before = sum(counts)
            for index in by_remainder:
                if sum(counts) < wanted and counts[index] < sizes[index] - 1:
                    counts[index] += 1
            if sum(counts) == before:
                break  # every partition is down to its last training row
        if sum(counts) == 0:
            raise ConfigurationError(
                f"validation_split={validation_split} of {total} rows in {len(sizes)} partitions leaves none to validate "
                "or none to train on: give more rows, fewer partitions (num_workers=), or validation_data."
            )
        return cls(tuple(size - count for size, count in zip(sizes, counts, strict=True)), tuple(counts))

    @property
    def validation_spans(self) -> tuple[tuple[int, int], ...]:
        """The rows of each partition that validate, as (start, stop)."""
        return tuple((train, train + count) for train, count in zip(self.train, self.validate, strict=True))


@dataclass(frozen=True)
class Validation:
    """What to validate on, and when.

    Attributes:
        dataset: Its rows; ``spans`` are those of the training dataset's partitions that a split has put aside.
        options: How they become batches.
        frequency: Every how many epochs.
    """

    dataset: Dataset
    options: BatchOptions
    frequency: int = 1
    spans: tuple[tuple[int, int], ...] | None = None


@dataclass
class Server:
    """The parameter server of a run.

    Attributes:
        transport: How calls travel.
        port: The port; 0 lets the system choose.
        options: Its settings.
        stats: What it did, once it has ended.
    """

    transport: str = "http"
    port: int = 0
    options: ParameterServerOptions = field(default_factory=ParameterServerOptions)
    stats: ParameterServerStats = field(default_factory=ParameterServerStats)


@dataclass(frozen=True)
class Coordination:
    """How workers agree on weights; see `Job` for the attributes."""

    frequency: str | int = "epoch"
    rule: UpdateRule = field(default_factory=Average)
    rule_state: State = field(default_factory=dict)
    server: Server = field(default_factory=Server)
    histories: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Job:
    """One call of ``fit``.

    Attributes:
        model: The master model. A strategy leaves the last finished round's state in it.
        archive: The same, packed.
        epochs: Train up to this epoch.
        initial_epoch: Begin at this one.
        frequency: ``"epoch"``, or how many batches there are between exchanges.
        rule: What becomes of the weights when replicas come back.
        rule_state: What the rule remembers; changed in place.
        split: Which rows train.
        options: How a worker trains.
        steps_per_epoch: At most so many batches in an epoch of a worker.
        validation: What to validate on.
        server: The parameter server, where workers train through one.
        histories: Where a record of each worker and epoch goes.
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
    histories: list[dict[str, Any]] = field(default_factory=list)

    @property
    def batches(self) -> int:
        """The batches in an epoch of the busiest worker."""
        return max((self.batches_of(worker) for worker in range(len(self.split.train))), default=0)

    def batches_of(self, worker: int) -> int:
        """The batches in an epoch of one worker."""
        batches = -(-self.split.train[worker] // self.options.batch_size)
        return batches if self.steps_per_epoch is None else min(batches, self.steps_per_epoch)

    @property
    def num_workers(self) -> int:
        """How many partitions have rows to train on."""
        return sum(rows > 0 for rows in self.split.train)
