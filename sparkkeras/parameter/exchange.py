"""Records of what workers and the parameter server tell each other, and of what the server knows.

Workers of every training mode load this file, so it imports no transport.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sparkkeras.parameter.rules import State
from sparkkeras.weights import Array, Flat

MAX_LOG_VALUES = 100
"""The logs of a worker leave out longer vectors; the metrics of all workers have them, from the metric state."""


Settings = tuple[int, tuple[float, ...]]
"""The last values that the driver set, such as the learning rate, after the number of times that it set some."""

ReadField = Callable[[str, Callable[[Any], Any]], Any]
"""The method ``field`` of a call: reads a field by its name, and converts it."""


@dataclass(frozen=True)
class ExchangePoint:
    """A worker's progress in an epoch when it exchanges weights.

    Attributes:
        epoch: The index of the epoch.
        batch: The number of batches of the epoch that are done.
        steps: The optimizer steps since the last exchange.
        rows: The rows of these steps.
        learning_rate: The optimizer's learning rate at the last of these steps.
        seconds: The duration of the epoch so far; if the worker was replaced, of the last attempt's part of it.
        metrics: The metric state of the epoch so far.
        logs: This worker's logs at the end of the epoch; ``None`` before.
        iterations: The number of iterations of each optimizer, with those before this run: a ``train_step`` may apply one
            more often than another.
    """

    epoch: int
    batch: int
    steps: int
    rows: int
    learning_rate: float
    seconds: float
    metrics: tuple[Array, ...] = ()
    logs: dict[str, Any] | None = None
    iterations: tuple[int, ...] = ()

    def pack(self) -> dict[str, Any]:
        """The fields of a call. The metric state is not one of them: it travels in the body."""
        logs = None if self.logs is None else _json_values(self.logs)
        numbers = {name: getattr(self, name) for name in (*_INTEGERS, *_FLOATS)}
        return {**numbers, "logs": logs, "iterations": self.iterations}

    @classmethod
    def unpack(cls, field: ReadField, metrics: tuple[Array, ...]) -> ExchangePoint:
        """The record from a call, given its method ``field``."""
        epoch, batch, steps, rows = (field(name, int) for name in _INTEGERS)
        learning_rate, seconds = (field(name, float) for name in _FLOATS)
        iterations = field("iterations", lambda counts: tuple(map(int, counts)))
        logs = field("logs", lambda logs: None if logs is None else dict(logs))
        return cls(epoch, batch, steps, rows, learning_rate, seconds, metrics, logs, iterations)


@dataclass(frozen=True)
class EvaluationReport:
    """What a worker has found on rows that it has evaluated.

    Attributes:
        metrics: The metric state.
        rows: The number of rows.
        logs: The values that its model has reported, by name.
    """

    metrics: tuple[Array, ...]
    rows: int
    logs: dict[str, Any]

    def pack(self) -> dict[str, Any]:
        """The fields of a call, without the metric state."""
        return {"rows": self.rows, "logs": _json_values(self.logs)}

    @classmethod
    def unpack(cls, field: ReadField, metrics: tuple[Array, ...]) -> EvaluationReport:
        """The inverse of `pack`, given the method ``field`` of a call."""
        return cls(metrics, field("rows", int), field("logs", dict))


@dataclass(frozen=True)
class PartitionPlan:
    """The plan of a partition.

    Attributes:
        batches: The number of batches per epoch; 0 if the partition has no training rows.
        validates: Whether the partition has validation rows.
    """

    batches: int
    validates: bool = False


@dataclass(frozen=True)
class EpochReport:
    """The report of one worker on an epoch.

    Attributes:
        worker: The index of the worker.
        epoch: The index of the epoch.
        rows: The number of rows in the applied updates.
        steps: The number of applied optimizer steps.
        seconds: The duration of the epoch in seconds; if the worker was replaced, of the last attempt's part of it.
        learning_rate: The optimizer's learning rate at the end of the epoch.
        iterations: The number of iterations of each optimizer at the end of the epoch.
        metrics: The state of the metrics over these rows.
        logs: The logs of this worker alone.
    """

    worker: int
    epoch: int
    rows: int
    steps: int
    seconds: float
    learning_rate: float
    iterations: tuple[int, ...]
    metrics: tuple[Array, ...]
    logs: dict[str, Any]


@dataclass(frozen=True)
class EpochEnd:
    """An epoch that all workers have reported.

    Attributes:
        epoch: The index of the epoch.
        reports: The reports of the workers, in the order of the workers.
        validation: The reports on the validation rows, in the order of the workers.
        snapshot: The result of ``on_epoch``, which is called when the last worker reports.
        num_absent: The number of workers with validation rows that had left before the epoch ended.
    """

    epoch: int
    reports: tuple[EpochReport, ...]
    validation: tuple[EvaluationReport, ...]
    snapshot: Any
    num_absent: int = 0


@dataclass(frozen=True)
class ResumePoint:
    """The progress of a partition, as sent to an attempt that takes its lease.

    Attributes:
        lease: The number of the lease.
        sequence: The number of applied pushes.
        epoch: The epoch to continue with.
        batch: The number of finished batches of that epoch.
        iterations: The number of iterations of each optimizer after the last applied push; empty before the first one.
        metrics: The metric state of that epoch so far; empty at its beginning.
        settings: See `Settings`; ``None`` if the driver set none.
    """

    lease: int
    sequence: int
    epoch: int
    batch: int
    iterations: tuple[int, ...]
    metrics: tuple[Array, ...]
    settings: Settings | None = None


@dataclass(frozen=True)
class Directive:
    """The server's instructions to a worker, part of the replies to its calls.

    Attributes:
        stop: Training is over; end the task.
        wait: Do not train on yet; poll again.
        stay: There will be epochs to validate; poll again, and do not finish.
        evaluate: The epochs whose weights this worker has to evaluate.
        settings: See `Settings`; ``None`` if the driver set none.
    """

    stop: bool = False
    wait: bool = False
    stay: bool = False
    evaluate: tuple[int, ...] = ()
    settings: Settings | None = None


@dataclass(frozen=True)
class PartitionProgress:
    """What a partition has reached.

    Attributes:
        sequence: The number of applied pushes.
        epoch: The epoch to continue with.
        batch: The number of finished batches of that epoch.
        steps: The number of applied optimizer steps.
        rows: The number of rows in the applied updates.
        epoch_steps: The steps of the current epoch.
        epoch_rows: The rows of the current epoch.
        iterations: The number of iterations of each optimizer.
        metrics: The metric state of the current epoch.
        left: Whether the worker has left before the last epoch, because a callback of its own has stopped it.
        optimizer: The optimizer variables at the end of the last epoch, as they were sent; empty before.
    """

    sequence: int
    epoch: int
    batch: int
    steps: int
    rows: int
    epoch_steps: int
    epoch_rows: int
    iterations: tuple[int, ...]
    metrics: tuple[Array, ...]
    left: bool
    optimizer: bytes


@dataclass(frozen=True)
class LedgerProgress:
    """What all partitions have reached.

    Attributes:
        next_epoch: The first epoch that not all workers have reported.
        partitions: The progress of each partition.
        reports: The reports on epochs from ``next_epoch`` on.
        sets_outside: Whether the driver has set variables outside the model, so that its values count, not the workers'.
    """

    next_epoch: int
    partitions: dict[int, PartitionProgress]
    reports: tuple[EpochReport, ...]
    sets_outside: bool = False


@dataclass(frozen=True)
class Cut:
    """What a server needs to continue.

    Attributes:
        weights: The weights; a copy.
        rule_state: The state of the rule; a copy.
        progress: The progress of the workers, whose updates are exactly those in the weights.
        version: The version of the weights.
    """

    weights: Flat
    rule_state: State
    progress: LedgerProgress
    version: int = 0


@dataclass(frozen=True)
class ParameterServerStats:
    """Statistics of the parameter server over one ``fit``.

    Attributes:
        transport: ``"http"`` or ``"socket"``.
        seconds: How long the server ran, in seconds.
        pulls: The number of pulls.
        cached_pulls: The pulls that sent no weights, because the worker already had the newest.
        pushes: The number of applied updates.
        duplicates: The updates that a worker sent again after a lost reply; they were not applied again.
        rejected_requests: The number of rejected calls, by reason.
        received_bytes: The size of all received updates and reports, in bytes.
        sent_bytes: The size of all sent weights, in bytes.
        staleness: The number of updates, by staleness: the number of other updates that were applied since the update's
            base.
        steps: The number of applied optimizer steps, by worker.
        takeovers: How often another attempt of a worker's task continued for one that was lost.
    """

    transport: str = ""
    seconds: float = 0.0
    pulls: int = 0
    cached_pulls: int = 0
    pushes: int = 0
    duplicates: int = 0
    rejected_requests: dict[str, int] = field(default_factory=dict)
    received_bytes: int = 0
    sent_bytes: int = 0
    staleness: dict[int, int] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    takeovers: int = 0

    def __str__(self) -> str:
        return (
            f"{self.pushes} updates in {self.seconds:.1f} s over {self.transport or 'no transport'} "
            f"({self.updates_per_second:.1f} per second), staleness {self.mean_staleness:.1f} on average and "
            f"{self.max_staleness} at most; {self.pulls} pulls, {self.received_bytes / 1e6:.1f} MB received, "
            f"{self.sent_bytes / 1e6:.1f} MB sent; {self.duplicates} duplicates, "
            f"{sum(self.rejected_requests.values())} rejected, {self.takeovers} takeovers"
        )

    @property
    def updates_per_second(self) -> float:
        """Applied updates per second; 0 if the server did not run."""
        return self.pushes / self.seconds if self.seconds else 0.0

    @property
    def mean_staleness(self) -> float:
        """The mean staleness over all updates; 0 if there were none."""
        return sum(value * count for value, count in self.staleness.items()) / max(1, self.pushes)

    @property
    def max_staleness(self) -> int:
        """The largest staleness of an update; 0 if there were none."""
        return max(self.staleness, default=0)


_INTEGERS, _FLOATS = ("epoch", "batch", "steps", "rows"), ("learning_rate", "seconds")


def _json_values(logs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _json_value(value) for name, value in logs.items()}


def _json_value(value: Any) -> Any:
    array = np.asarray(value)
    return array.tolist() if array.size <= MAX_LOG_VALUES else None
