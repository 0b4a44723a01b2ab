"""Who may push for which partition, how far each has come, and when an epoch is over.

Spark may run a partition's task again, twice at the same time, or long after it gave the task up. So that every update is
applied exactly once, a task takes a *lease* on its partition, and every push carries the lease's number and a sequence
number:

- A partition has one lease at a time. A second attempt waits while the first one's lease lives, and is answered so when the
  first one has finished.
- A lease lives on the server's clock and is renewed by every call that carries it. One that ran out, or whose connection
  has ended, is taken away only when another attempt asks for it. From then on whoever comes with the old one is refused.
- A push whose sequence number was applied before is acknowledged and not applied again, so a lost answer does no harm.
- A new attempt is sent how far the partition came, and goes on from there.

The ledger decides; it does no I/O and holds no weights. All of its methods may be called from any thread.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sparkkeras.rpc.transport import RefusedError
from sparkkeras.weights import Array

LEASE_LOST = "lease lost"
"""The kind of a refusal: the lease was taken over."""

BACKLOG = 4
"""With more epochs than this that the driver has not dealt with yet, workers wait: each holds a copy of the weights."""


@dataclass(frozen=True)
class PartitionPlan:
    """What is planned for a partition.

    Attributes:
        batches: The batches of its epoch; 0 where it has no rows to train on.
        validates: Whether it has rows to validate on.
    """

    batches: int
    validates: bool = False


@dataclass(frozen=True)
class EpochReport:
    """What one worker saw in an epoch.

    Attributes:
        worker: Which worker.
        epoch: Which epoch.
        rows: The rows that were applied.
        steps: The optimizer steps that were applied.
        seconds: How long the epoch took; of a worker that was replaced, the last attempt's part of it.
        learning_rate: The optimizer's learning rate at the end.
        metrics: The state of the metrics over these rows.
        logs: The figures of this worker alone.
    """

    worker: int
    epoch: int
    rows: int
    steps: int
    seconds: float
    learning_rate: float
    metrics: tuple[Array, ...]
    logs: dict[str, Any]


@dataclass(frozen=True)
class EpochEnd:
    """An epoch that all workers have reported.

    Attributes:
        epoch: Which.
        reports: What each worker saw, in the order of the workers.
        validation: The metric states over the validation rows, in the order of the workers.
        held: What was given by ``on_epoch`` when the last worker reported.
        absent: How many workers with validation rows had left before the epoch ended.
    """

    epoch: int
    reports: tuple[EpochReport, ...]
    validation: tuple[tuple[Array, ...], ...]
    held: Any
    absent: int = 0


@dataclass(frozen=True)
class ResumePoint:
    """How far a partition has come, as sent to an attempt that takes it up.

    Attributes:
        lease: The number of the lease.
        sequence: The pushes that were applied.
        epoch: The epoch to go on in.
        batch: The batches of it that are behind.
        steps: The optimizer steps of the partition in this run.
        metrics: The metric state of this epoch so far; empty at its beginning.
        learning_rate: A learning rate that was set, and how many were set before it and with it.
    """

    lease: int
    sequence: int
    epoch: int
    batch: int
    steps: int
    metrics: tuple[Array, ...]
    learning_rate: tuple[int, float] | None = None


@dataclass(frozen=True)
class Directive:
    """What a worker is sent in every answer.

    Attributes:
        stop: Training is over: leave.
        wait: Do not go on yet; ask again.
        stay: There will be something to validate; ask again, and do not finish.
        evaluate: Epochs whose weights this worker shall evaluate.
        learning_rate: A learning rate that was set, and how many were set before it.
    """

    stop: bool = False
    wait: bool = False
    stay: bool = False
    evaluate: tuple[int, ...] = ()
    learning_rate: tuple[int, float] | None = None


@dataclass
class _Lease:
    number: int
    attempt: int
    expires: float


@dataclass
class _Partition:
    """Where a partition stands. ``lock`` lets in one of its calls at a time, the application of its update included."""

    worker: int
    plan: PartitionPlan
    epoch: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    lease: _Lease | None = None
    sequence: int = 0
    batch: int = 0
    steps: int = 0
    rows: int = 0
    epoch_steps: int = 0
    epoch_rows: int = 0
    metrics: tuple[Array, ...] = ()
    started: bool = False
    done: bool = False
    to_evaluate: set[int] = field(default_factory=set)

    def is_held(self, now: float) -> bool:
        """Whether an attempt has a lease that lives."""
        return self.lease is not None and self.lease.expires > now

    def is_awaited(self, now: float, patience: float) -> bool:
        """Whether an attempt was lost so lately that the next one may be on its way to the same slot."""
        return self.lease is not None and self.lease.expires + patience > now

    def need_not_begin(self, now: float) -> bool:
        """Whether nobody need wait for its first push: it came, or whoever was to send it is gone."""
        lost = self.started and not self.is_held(now)
        return self.plan.batches > 0 and (self.sequence > 0 or self.done or lost)

    def behind(self, epoch: int) -> int:
        """The batches of an epoch that need not be waited for."""
        if self.done or self.epoch > epoch:
            return self.plan.batches
        return self.batch if self.epoch == epoch else 0


class Ledger:
    """See the module's words.

    Args:
        plans: What is planned for each partition.
        epochs: The epochs to go through.
        at_once: How many partitions train at the same time. After its first push a worker waits for those of so many, since
            some have the backend to load and the model to trace when others have long begun.
        validates: Whether an epoch is to be validated.
        max_staleness: By how many exchanges a worker may be ahead of the slowest one that is alive and has not finished;
            ``None`` is no bound. Ho et al., More effective distributed ML via a stale synchronous parallel parameter
            server, 2013.
        lease_seconds: How long a lease lives without a call.
        warmup_timeout: How long after the first lease they wait for that.
        on_epoch: Called when the last worker has reported an epoch; what it returns is kept with the epoch.
        clock: Seconds that never go back.
    """

    def __init__(
        self,
        plans: Mapping[int, PartitionPlan],
        epochs: range,
        *,
        at_once: int,
        validates: Callable[[int], bool],
        max_staleness: int | None,
        lease_seconds: float,
        warmup_timeout: float,
        on_epoch: Callable[[int], Any],
        clock: Callable[[], float],
    ) -> None:
        self._epochs = epochs
        self._at_once = min(at_once, sum(plan.batches > 0 for plan in plans.values()))
        self._validates = validates
        self._max_staleness = max_staleness
        self._lease_seconds, self._warmup_timeout = lease_seconds, warmup_timeout
        self._on_epoch, self._clock = on_epoch, clock
        self._partitions = {worker: _Partition(worker, plan, epochs.start) for worker, plan in plans.items()}
        for partition in self._partitions.values():
            partition.done = partition.plan.batches == 0
        self._lock = threading.Condition()
        self._numbers = itertools.count(1)
        self._fenced: set[int] = set()
        self._first_start: float | None = None
        self._stopped = False
        self._learning_rates: list[float] = []
        self._next_epoch = epochs.start
        self._reports: dict[int, dict[int, EpochReport]] = {}
        self._open: dict[int, EpochEnd] = {}
        self._evaluations: dict[int, dict[int, tuple[Array, ...]]] = {}
        self._ended: list[EpochEnd] = []
        self.duplicates = self.takeovers = 0
        self.missing: list[int] = []

    # --- What workers ask --------------------------------------------------------------------------------------------

    def lease(self, worker: int, attempt: int) -> ResumePoint | str:
        """Take the lease of a partition; ``"wait"`` while another attempt holds it, ``"done"`` if there is nothing left.

        Raises:
            RefusedError: The attempt had a lease and lost it.
        """
        partition = self._partition(worker)
        with partition.lock, self._lock:
            if attempt in self._fenced:
                raise RefusedError(LEASE_LOST, _lost(worker))
            if partition.done or self._stopped:
                return "done"
            now = self._clock()
            held = partition.lease
            if held is not None and held.attempt != attempt:
                if held.expires > now:
                    return "wait"
                self._fenced.add(held.attempt)
            if held is None or held.attempt != attempt:
                self.takeovers += partition.started
                partition.lease = held = _Lease(next(self._numbers), attempt, now)
            held.expires = now + self._lease_seconds
            partition.started = True
            if self._first_start is None:
                self._first_start = now
            return ResumePoint(
                lease=held.number,
                sequence=partition.sequence,
                epoch=partition.epoch,
                batch=partition.batch,
                steps=partition.steps,
                metrics=partition.metrics,
                learning_rate=self._learning_rate,
            )

    def directive(self, worker: int, lease: int) -> Directive:
        """What a worker is to do; renews its lease.

        Raises:
            RefusedError: The lease was taken over.
        """
        with self._lock:
            partition = self._held(worker, lease)
            return self._directive(partition)

    @contextmanager
    def pushing(self, worker: int, lease: int, sequence: int) -> Iterator[bool]:
        """While a push is applied; whether it is to be applied at all. Nothing else happens to the partition meanwhile.

        Raises:
            RefusedError: The lease was taken over, or a push is missing before this one.
        """
        partition = self._partition(worker)
        with partition.lock:
            with self._lock:
                self._held(worker, lease)
                if sequence > partition.sequence + 1:
                    raise RefusedError(
                        "out of turn", f"worker {worker} pushed {sequence} where {partition.sequence + 1} was due."
                    )
                new = sequence == partition.sequence + 1
                self.duplicates += not new
            yield new

    def pushed(
        self,
        worker: int,
        *,
        epoch: int,
        batch: int,
        steps: int,
        rows: int,
        metrics: tuple[Array, ...],
        ended: Mapping[str, Any] | None,
    ) -> None:
        """Note a push that was applied, inside of `pushing`.

        Args:
            worker: Whose.
            epoch: In which epoch.
            batch: The batches of the epoch that are behind now.
            steps: The optimizer steps that were applied.
            rows: The rows that they saw.
            metrics: The metric state of the epoch so far.
            ended: Where the epoch is over for this worker, its ``logs``, ``seconds`` and ``learning_rate``.
        """
        partition = self._partition(worker)
        with self._lock:
            partition.sequence += 1
            partition.batch = batch
            partition.steps += steps
            partition.rows += rows
            partition.epoch_steps += steps
            partition.epoch_rows += rows
            partition.metrics = metrics
            if ended is not None:
                report = EpochReport(worker, epoch, partition.epoch_rows, partition.epoch_steps, metrics=metrics, **ended)
                self._reports.setdefault(epoch, {})[worker] = report
                partition.epoch, partition.batch = epoch + 1, 0
                partition.epoch_rows = partition.epoch_steps = 0
                partition.metrics = ()
                self._close_epochs()

    def evaluated(self, worker: int, lease: int, epoch: int, metrics: tuple[Array, ...]) -> None:
        """Note the metric state of a worker's validation rows under the weights of an epoch. Twice is as good as once.

        Raises:
            RefusedError: The lease was taken over.
        """
        with self._lock:
            partition = self._held(worker, lease)
            if epoch in partition.to_evaluate:
                partition.to_evaluate.discard(epoch)
                if metrics:
                    self._evaluations.setdefault(epoch, {})[worker] = metrics
                self._deliver()

    def finish(self, worker: int, lease: int) -> None:
        """A worker has nothing left to do. Twice is as good as once.

        Raises:
            RefusedError: The lease was taken over.
        """
        partition = self._partition(worker)
        with partition.lock, self._lock:
            if partition.done and partition.lease is not None and partition.lease.number == lease:
                return
            self._held(worker, lease)
            partition.done = True
            partition.to_evaluate.clear()
            self._close_epochs()
            self._deliver()

    def release(self, worker: int, lease: int, missing: bool = False) -> None:
        """A worker gives its partition up unfinished; another attempt may have it at once.

        Args:
            worker: Which worker.
            lease: The number of its lease; one that was taken over is given up already.
            missing: Whether it found no rows where it ran, so that the driver must have them read again.
        """
        partition = self._partition(worker)
        with partition.lock, self._lock:
            if partition.lease is not None and partition.lease.number == lease:
                partition.lease = None
                if missing:
                    self.missing.append(worker)
                self._lock.notify_all()

    def doubt(self, worker: int, lease: int) -> None:
        """The connection of a lease's holder has ended: another attempt may take it, unless the holder calls again."""
        with self._lock:
            partition = self._partition(worker)
            if partition.lease is not None and partition.lease.number == lease:
                partition.lease.expires = self._clock()

    # --- What the driver asks ----------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Have all workers leave at their next call."""
        with self._lock:
            self._stopped = True
            self._lock.notify_all()

    def set_learning_rate(self, value: float) -> None:
        """Have all workers go on with another learning rate from their next exchange."""
        with self._lock:
            self._learning_rates.append(float(value))

    def wait(self, seconds: float) -> EpochEnd | None:
        """The next epoch that is over and validated; ``None`` if there is none within ``seconds``."""
        with self._lock:
            if not self._ended:
                self._lock.wait(seconds)
            if not self._ended:
                return None
            return self._ended.pop(0)

    def drain(self, seconds: float) -> None:
        """Wait until no worker trains any more that is alive, or so many seconds have passed."""
        until = self._clock() + seconds
        with self._lock:
            while (now := self._clock()) < until and any(True for _ in self._at_work(now)):
                self._lock.wait(min(0.05, until - now))

    def wake(self) -> None:
        """End a `wait` early."""
        with self._lock:
            self._lock.notify_all()

    def undelivered(self) -> list[EpochEnd]:
        """What is held for epochs that nobody will wait for any more."""
        with self._lock:
            return [*self._ended, *self._open.values()]

    def take_missing(self) -> list[int]:
        """Partitions whose rows were not found where their task ran, since the last time."""
        with self._lock:
            found, self.missing = self.missing, []
            return found

    def held(self, epoch: int) -> Any:
        """What `on_epoch` returned for an epoch that is being evaluated.

        Raises:
            RefusedError: It is not.
        """
        with self._lock:
            if epoch not in self._open:
                raise RefusedError("gone", f"epoch {epoch} is not being evaluated.")
            return self._open[epoch].held

    @property
    def rows(self) -> int:
        """The rows that were applied in all epochs."""
        with self._lock:
            return sum(partition.rows for partition in self._partitions.values())

    @property
    def steps(self) -> dict[int, int]:
        """The optimizer steps that were applied, by partition."""
        with self._lock:
            return {worker: partition.steps for worker, partition in self._partitions.items() if partition.plan.batches}

    def progress(self, epoch: int) -> float:
        """How much of an epoch is behind, from 0 to 1."""
        with self._lock:
            total = sum(partition.plan.batches for partition in self._partitions.values())
            behind = sum(partition.behind(epoch) for partition in self._partitions.values())
            return behind / max(1, total)

    # --- Inside, under the lock --------------------------------------------------------------------------------------

    @property
    def _learning_rate(self) -> tuple[int, float] | None:
        return (len(self._learning_rates), self._learning_rates[-1]) if self._learning_rates else None

    def _partition(self, worker: int) -> _Partition:
        if worker not in self._partitions:
            raise RefusedError("unknown", f"there is no worker {worker}.")
        return self._partitions[worker]

    def _held(self, worker: int, lease: int) -> _Partition:
        """The partition, whose lease is renewed."""
        partition = self._partition(worker)
        if partition.done or partition.lease is None or partition.lease.number != lease:
            raise RefusedError(LEASE_LOST, _lost(worker))
        partition.lease.expires = self._clock() + self._lease_seconds
        return partition

    def _directive(self, partition: _Partition) -> Directive:
        if self._stopped:
            return Directive(stop=True)
        finished = partition.epoch >= self._epochs.stop
        return Directive(
            wait=not finished and self._must_wait(partition),
            stay=finished and self._must_stay(partition),
            evaluate=tuple(sorted(partition.to_evaluate)),
            learning_rate=self._learning_rate,
        )

    def _must_wait(self, partition: _Partition) -> bool:
        now = self._clock()
        beginning = self._first_start is not None and now < self._first_start + self._warmup_timeout
        begun = sum(other.need_not_begin(now) for other in self._partitions.values())
        if partition.sequence and beginning and begun < self._at_once:
            return True
        if len(self._ended) > BACKLOG:
            return True
        if self._max_staleness is None:
            return False
        training = (other.sequence for other in self._at_work(now) if other.epoch < self._epochs.stop)
        slowest = min(training, default=partition.sequence)
        return partition.sequence - slowest > self._max_staleness

    def _must_stay(self, partition: _Partition) -> bool:
        """Whether epochs are still to come that this worker will have to evaluate, and nobody needs its slot."""
        if not partition.plan.validates:
            return False
        if partition.to_evaluate:
            return True
        now = self._clock()
        if any(not p.done and not p.is_awaited(now, self._lease_seconds) for p in self._partitions.values()):
            return False  # its next attempt needs a slot
        return any(self._validates(epoch) for epoch in range(self._next_epoch, self._epochs.stop))

    def _at_work(self, now: float) -> Iterator[_Partition]:
        """Those that are not done and have a lease that lives."""
        for partition in self._partitions.values():
            if not partition.done and partition.is_held(now):
                yield partition

    def _close_epochs(self) -> None:
        """Close every epoch that all workers have reported which will."""
        while self._next_epoch < self._epochs.stop and not self._stopped:
            epoch = self._next_epoch
            reports = self._reports.get(epoch, {})
            if not reports or any(not p.done and worker not in reports for worker, p in self._partitions.items()):
                return
            ordered = tuple(reports[worker] for worker in sorted(reports))
            validating = [p for p in self._partitions.values() if p.plan.validates and self._validates(epoch)]
            absent = sum(partition.done for partition in validating)
            self._open[epoch] = EpochEnd(epoch, ordered, (), self._on_epoch(epoch), absent)
            self._next_epoch += 1
            del self._reports[epoch]
            for partition in validating:
                if not partition.done:
                    partition.to_evaluate.add(epoch)
            self._deliver()

    def _deliver(self) -> None:
        """Hand over the epochs that are closed and evaluated, in their order."""
        for epoch in sorted(self._open):
            if any(epoch in partition.to_evaluate for partition in self._partitions.values()):
                return
            end = self._open.pop(epoch)
            found = self._evaluations.pop(epoch, {})
            validation = tuple(found[worker] for worker in sorted(found))
            self._ended.append(dataclasses.replace(end, validation=validation))
            self._lock.notify_all()


def _lost(worker: int) -> str:
    return (
        f"the lease of worker {worker} was taken over by another attempt of its task, which goes on from where the last "
        "accepted update stood. What this attempt sends now is not wanted."
    )
