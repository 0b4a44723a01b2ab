"""The ledger: which attempt may push for a partition, how far each partition is, and when an epoch is complete.

It has one lock with the store of the weights, so that both together are the state of a server.

Spark may run a partition's task again, twice at the same time, or long after it gave the task up. To apply every update
exactly once, a task takes a *lease* on its partition, and every push carries the lease's number and a sequence number:

- An attempt is identified by Spark's ``taskAttemptId``, since ``attemptNumber`` begins anew with each stage.
- A partition has one lease at a time. A second attempt waits while the first one's lease is valid, and gets the reply
  ``"done"`` if the first one has finished.
- A lease expires by the server's clock; every call that carries it renews it. An expired lease, or one whose connection has
  closed, is taken over only when another attempt asks for it. From then on all calls with the old lease are rejected.
- A push with a sequence number that was already applied is acknowledged and not applied again, so that a client can retry
  after a lost reply.
- A new attempt receives the partition's progress, and continues from there.

A push changes the store and then the ledger. A cut has weights, rule state and progress of the same pushes, so it is taken
when none is in between: pushes that have begun end first, and those that follow wait. In asynchronous mode an update is
applied under the lock, and other calls wait meanwhile.

The ledger only decides: it does no I/O. All of its methods are thread-safe.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from sparkkeras.parameter.exchange import (
    Cut,
    Directive,
    EpochEnd,
    EpochReport,
    EvaluationReport,
    ExchangePoint,
    LedgerProgress,
    PartitionPlan,
    PartitionProgress,
    ResumePoint,
    Settings,
)
from sparkkeras.parameter.store import Store, WeightChange
from sparkkeras.rpc.leases import LEASE_LOST, Leases
from sparkkeras.rpc.transport import RefusedError
from sparkkeras.weights import Array, Flat

BACKLOG = 4
"""The number of completed epochs that may wait for the driver before workers wait too: each holds a copy of the weights."""


@dataclass
class _Partition:
    """The state of a partition."""

    worker: int
    plan: PartitionPlan
    epoch: int
    sequence: int = 0
    batch: int = 0
    steps: int = 0
    rows: int = 0
    epoch_steps: int = 0
    epoch_rows: int = 0
    iterations: tuple[int, ...] = ()
    metrics: tuple[Array, ...] = ()
    started: bool = False
    done: bool = False
    left: bool = False
    optimizer: bytes = b""
    received: bytes = b""
    to_evaluate: set[int] = field(default_factory=set)

    @property
    def progress(self) -> PartitionProgress:
        """What this partition has reached."""
        return PartitionProgress(**{name: getattr(self, name) for name in _PROGRESS})

    def finished_batches(self, epoch: int) -> int:
        """The number of batches of an epoch that are finished, or will never be."""
        if self.done or self.epoch > epoch:
            return self.plan.batches
        return self.batch if self.epoch == epoch else 0


_PROGRESS = tuple(each.name for each in dataclasses.fields(PartitionProgress))


class Ledger:
    """Leases, sequence numbers, epochs and directives of the workers; see the module docstring.

    Args:
        store: The weights.
        plans: The plan of each partition.
        epochs: The epochs to train.
        num_concurrent: The number of partitions that train at the same time. After its first push a worker waits for the
            first pushes of this many partitions, since some still load the backend and trace the model.
        validates: Whether an epoch is validated.
        max_staleness: Bounded staleness: the number of exchanges by which a worker may be ahead of the slowest one that is
            alive and has not finished; ``None`` is no bound. Ho et al., More effective distributed ML via a stale
            synchronous parallel parameter server, 2013.
        lease_seconds: Seconds without a call after which a lease expires.
        warmup_timeout: Seconds after the first lease for which workers wait for the first pushes of others.
        on_epoch: Called when the last worker has reported an epoch; its result is kept with the epoch.
        on_cut: Called with a cut after the push that ended an epoch; by default no such cut is taken.
        clock: A monotonic clock in seconds.
        reached: The progress to continue from.
    """

    def __init__(
        self,
        store: Store,
        plans: Mapping[int, PartitionPlan],
        epochs: range,
        *,
        num_concurrent: int,
        validates: Callable[[int], bool],
        max_staleness: int | None,
        lease_seconds: float,
        warmup_timeout: float,
        on_epoch: Callable[[int], Any],
        on_cut: Callable[[Cut], None] | None = None,
        clock: Callable[[], float],
        reached: LedgerProgress | None = None,
    ) -> None:
        self.store = store
        self._epochs = epochs
        self._validates = validates
        self._max_staleness = max_staleness
        self._lease_seconds, self._warmup_timeout = lease_seconds, warmup_timeout
        self._on_epoch, self._on_cut, self._clock = on_epoch, on_cut, clock
        self._partitions = {worker: _Partition(worker, plan, epochs.start) for worker, plan in plans.items()}
        for worker, progress in ({} if reached is None else reached.partitions).items():
            for name in _PROGRESS:
                setattr(self._partitions[worker], name, getattr(progress, name))
        for partition in self._partitions.values():
            partition.done = partition.plan.batches == 0 or partition.left
        self._without_push = {
            worker: partition
            for worker, partition in self._partitions.items()
            if not partition.done and partition.epoch < epochs.stop
        }
        self._may_be_late = max(0, len(self._without_push) - num_concurrent)
        self._least_sequence = 0  # no partition in training has a smaller one
        self._lock = store.lock
        self._changed, self._turns = threading.Condition(self._lock), threading.Condition(self._lock)
        self._in_turn: set[int] = set()
        self._num_between = 0
        self._is_cut_due = False
        self._leases: Leases[int, int] = Leases(lease_seconds, clock)  # of partitions, held by attempts
        self._fenced: set[int] = set()
        self._first_start: float | None = None
        self._stopped = False
        self._settings: Settings | None = None
        self._next_epoch = epochs.start
        self._reports: dict[int, dict[int, EpochReport]] = {}
        self._evaluating: dict[int, EpochEnd] = {}
        self._evaluations: dict[int, dict[int, EvaluationReport]] = {}
        self._ended: list[EpochEnd] = []
        for report in () if reached is None else reached.reports:
            self._reports.setdefault(report.epoch, {})[report.worker] = report
        self.duplicates = self.takeovers = 0
        self.missing: list[int] = []

    # --- Calls of workers --------------------------------------------------------------------------------------------

    def lease(self, worker: int, attempt: int) -> ResumePoint | str:
        """Take the lease of a partition; ``"wait"`` while another attempt has it, ``"done"`` if there is nothing left to do.

        Raises:
            RefusedError: The attempt had the lease, and another attempt has taken it over.
        """
        with self._lock:
            partition = self._between_its_turns(worker)
            if attempt in self._fenced:
                raise _lease_lost(worker)
            if partition.done or self._stopped:
                return "done"
            held = self._leases.of(worker)
            if held is None or held.holder != attempt:
                if self._leases.is_held(worker):
                    return "wait"
                if held is not None:
                    self._fenced.add(held.holder)
                self.takeovers += partition.started
                held = self._leases.grant(worker, attempt)
            self._leases.renew(held.number)
            partition.started = True
            if self._first_start is None:
                self._first_start = self._clock()
            return ResumePoint(
                lease=held.number,
                sequence=partition.sequence,
                epoch=partition.epoch,
                batch=partition.batch,
                iterations=partition.iterations,
                metrics=partition.metrics,
                settings=self._settings,
            )

    def directive(self, worker: int, lease: int) -> Directive:
        """The next directive for a worker; renews its lease.

        Raises:
            RefusedError: The lease was taken over.
        """
        with self._lock:
            partition = self._renewed(worker, lease)
            return self._directive(partition)

    @contextmanager
    def pushing(self, worker: int, lease: int, sequence: int) -> Iterator[bool]:
        """The context in which a push is applied; yields whether to apply it. Other calls of the partition wait meanwhile.

        Raises:
            RefusedError: The lease was taken over, or an earlier push is missing.
        """
        with self._turn(worker) as partition:
            with self._lock:
                self._renewed(worker, lease)
                if sequence > partition.sequence + 1:
                    raise RefusedError(
                        "out of turn", f"worker {worker} sent push {sequence}; expected push {partition.sequence + 1}."
                    )
                new = sequence == partition.sequence + 1
                self.duplicates += not new
            yield new

    def keep_optimizer(self, worker: int, lease: int, optimizer: bytes) -> None:
        """Keep the optimizer variables of a worker, which count from its push at the end of the epoch on.

        Raises:
            RefusedError: The lease was taken over.
        """
        with self._lock:
            self._renewed(worker, lease).received = optimizer

    def pushed(self, worker: int, point: ExchangePoint) -> None:
        """Record an applied push; call it within `pushing`."""
        partition = self._partition(worker)
        with self._lock:
            partition.sequence += 1
            self._without_push.pop(worker, None)
            partition.batch = point.batch
            partition.steps += point.steps
            partition.rows += point.rows
            partition.epoch_steps += point.steps
            partition.epoch_rows += point.rows
            partition.iterations, partition.metrics = point.iterations, point.metrics
            if point.logs is not None:
                self._reports.setdefault(point.epoch, {})[worker] = EpochReport(
                    worker,
                    point.epoch,
                    partition.epoch_rows,
                    partition.epoch_steps,
                    point.seconds,
                    point.learning_rate,
                    point.iterations,
                    point.metrics,
                    point.logs,
                )
                partition.epoch, partition.batch = point.epoch + 1, 0
                partition.epoch_rows = partition.epoch_steps = 0
                partition.metrics = ()
                partition.optimizer, partition.received = partition.received or partition.optimizer, b""
                self._close_epochs()

    def evaluated(self, worker: int, lease: int, epoch: int, report: EvaluationReport | None) -> None:
        """Record a worker's report on its validation rows, if it has any, for the weights of an epoch. Idempotent.

        Raises:
            RefusedError: The lease was taken over.
        """
        with self._lock:
            partition = self._renewed(worker, lease)
            if epoch in partition.to_evaluate:
                partition.to_evaluate.discard(epoch)
                if report is not None:
                    self._evaluations.setdefault(epoch, {})[worker] = report
                self._deliver()

    def finish(self, worker: int, lease: int) -> None:
        """End a partition whose worker has nothing left to do. Idempotent.

        Raises:
            RefusedError: The lease was taken over.
        """
        with self._turn(worker) as partition, self._lock:
            if self._leases.is_finished(lease):
                return
            self._renewed(worker, lease)
            self._leases.finish(lease)
            partition.done = True
            partition.left = partition.epoch < self._epochs.stop and not self._stopped
            self._without_push.pop(worker, None)
            partition.to_evaluate.clear()
            self._close_epochs()
            self._deliver()

    def release(self, worker: int, lease: int, missing: bool = False) -> None:
        """Release the lease of an unfinished partition; another attempt may take it at once.

        Args:
            worker: The index of the worker.
            lease: The number of its lease; nothing happens if it was taken over.
            missing: Whether the worker did not find its rows where it ran, so that the driver must have them read again.
        """
        with self._lock:
            self._between_its_turns(worker)
            if self._leases.revoke(lease):
                if missing:
                    self.missing.append(worker)
                self._changed.notify_all()

    def expire(self, lease: int) -> None:
        """Expire a lease whose connection has closed: another attempt may take it, unless the holder calls before."""
        with self._lock:
            self._leases.expire(lease)

    # --- Calls of the driver -----------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop all workers at their next call."""
        with self._lock:
            self._stopped = True
            self._changed.notify_all()

    def change(self, change: WeightChange) -> int:
        """Apply a change of the driver to the weights, between two pushes; returns the new version."""
        with self._between_turns():
            return self.store.change(change)

    def cut(self) -> Cut:
        """Take a cut."""
        with self._between_turns():
            return self._cut()

    def reached(self) -> LedgerProgress:
        """What all partitions have reached."""
        with self._lock:
            reports = tuple(report for of_epoch in self._reports.values() for report in of_epoch.values())
            partitions = {worker: each.progress for worker, each in self._partitions.items()}
            return LedgerProgress(self._next_epoch, partitions, reports)

    def wait_for_cut(self) -> None:
        """Wait until the push that ended an epoch has itself ended, so that ``on_cut`` was called."""
        with self._between_turns():
            pass

    def put_settings(self, values: Sequence[float]) -> None:
        """Set the settings of all workers, such as the learning rate, from their next exchange on."""
        with self._lock:
            number = 0 if self._settings is None else self._settings[0]
            self._settings = number + 1, tuple(map(float, values))

    def wait(self, seconds: float) -> EpochEnd | None:
        """Wait for the next epoch that is complete and validated; ``None`` if there is none within ``seconds``."""
        with self._lock:
            if not self._ended:
                self._changed.wait(seconds)
            if not self._ended:
                return None
            return self._ended.pop(0)

    def drain(self, seconds: float) -> None:
        """Wait at most ``seconds`` until no live worker trains any more."""
        until = self._clock() + seconds
        with self._lock:
            while (now := self._clock()) < until and any(True for _ in self._active()):
                self._changed.wait(min(0.05, until - now))

    def wake(self) -> None:
        """End a `wait` early."""
        with self._lock:
            self._changed.notify_all()

    def undelivered(self) -> list[EpochEnd]:
        """The epochs that were not returned by `wait`, to release what they hold."""
        with self._lock:
            return [*self._ended, *self._evaluating.values()]

    def pop_missing(self) -> list[int]:
        """The partitions whose rows were not found where their task ran, since the last call."""
        with self._lock:
            missing, self.missing = self.missing, []
            return missing

    @property
    def next_epoch(self) -> int:
        """The first epoch that not all workers have reported."""
        with self._lock:
            return self._next_epoch

    def snapshot(self, epoch: int) -> Any:
        """The result of ``on_epoch`` for an epoch that is being evaluated.

        Raises:
            RefusedError: The epoch is not being evaluated.
        """
        with self._lock:
            if epoch not in self._evaluating:
                raise RefusedError("gone", f"epoch {epoch} is not being evaluated.")
            return self._evaluating[epoch].snapshot

    @property
    def rows(self) -> int:
        """The number of rows in all applied updates."""
        with self._lock:
            return sum(partition.rows for partition in self._partitions.values())

    @property
    def steps(self) -> dict[int, int]:
        """The number of applied optimizer steps, by partition."""
        with self._lock:
            return {worker: partition.steps for worker, partition in self._partitions.items() if partition.plan.batches}

    def progress(self, epoch: int) -> float:
        """The finished fraction of an epoch, from 0 to 1."""
        with self._lock:
            total = sum(partition.plan.batches for partition in self._partitions.values())
            finished = sum(partition.finished_batches(epoch) for partition in self._partitions.values())
            return finished / max(1, total)

    # --- Pushes, and what is done between them -----------------------------------------------------------------------

    @contextmanager
    def _turn(self, worker: int) -> Iterator[_Partition]:
        """The context of a call that may end an epoch: alone for its partition. A cut that is due follows the last one."""
        with self._lock:
            partition = self._partition(worker)
            self._turns.wait_for(lambda: not self._is_cut_due and not self._num_between and worker not in self._in_turn)
            self._in_turn.add(worker)
        try:
            yield partition
        finally:
            with self._lock:
                self._in_turn.discard(worker)
                ends_epoch = self._is_cut_due and not self._in_turn
            try:
                if ends_epoch and self._on_cut is not None:
                    self._on_cut(self._cut())  # without the lock: no other call enters before this cut is taken
            finally:
                with self._lock:
                    self._is_cut_due = self._is_cut_due and not ends_epoch
                    self._turns.notify_all()

    @contextmanager
    def _between_turns(self) -> Iterator[None]:
        """The context in which no call is within `_turn`, and no cut is due. Calls of other kinds need not wait for it."""
        try:
            with self._lock:
                self._num_between += 1
                self._turns.wait_for(lambda: not self._in_turn and not self._is_cut_due)
            yield
        finally:
            with self._lock:
                self._num_between -= 1
                self._turns.notify_all()

    # --- Internal methods, called under the lock ---------------------------------------------------------------------

    def _between_its_turns(self, worker: int) -> _Partition:
        """The partition, when no call of it is within `_turn`."""
        self._turns.wait_for(lambda: worker not in self._in_turn)
        return self._partition(worker)

    def _cut(self) -> Cut:
        with self.store.snapshot() as snapshot:
            weights = Flat(snapshot.weights.vector.copy(), snapshot.weights.integer_variables)
        return Cut(weights, self.store.rule_state(), self.reached(), snapshot.version)

    def _partition(self, worker: int) -> _Partition:
        if worker not in self._partitions:
            raise RefusedError("unknown", f"there is no worker {worker}.")
        return self._partitions[worker]

    def _renewed(self, worker: int, lease: int) -> _Partition:
        """The partition of a valid lease, which is renewed."""
        partition = self._partition(worker)
        held = self._leases.renew(lease)
        if held is None or held.key != worker:
            raise _lease_lost(worker)
        return partition

    def _directive(self, partition: _Partition) -> Directive:
        if self._stopped:
            return Directive(stop=True)
        finished = partition.epoch >= self._epochs.stop
        return Directive(
            wait=not finished and self._must_wait(partition),
            stay=finished and self._must_stay(partition),
            evaluate=tuple(sorted(partition.to_evaluate)),
            settings=self._settings,
        )

    def _must_wait(self, partition: _Partition) -> bool:
        if partition.sequence and self._is_warming_up():
            return True
        if len(self._ended) > BACKLOG:
            return True
        if self._max_staleness is None or partition.sequence - self._least_sequence <= self._max_staleness:
            return False
        unfinished = (p.sequence for p in self._partitions.values() if not p.done and p.epoch < self._epochs.stop)
        self._least_sequence = min(unfinished, default=self._least_sequence)
        training = (other.sequence for other in self._active() if other.epoch < self._epochs.stop)
        slowest = min(training, default=partition.sequence)
        return partition.sequence - slowest > self._max_staleness

    def _must_stay(self, partition: _Partition) -> bool:
        """Whether this worker will have more epochs to evaluate, and no other partition needs its slot."""
        if not partition.plan.validates:
            return False
        if partition.to_evaluate:
            return True
        # If a lease expired only recently, the next attempt may be about to take the same slot.
        if any(not p.done and not self._leases.is_held(p.worker, self._lease_seconds) for p in self._partitions.values()):
            return False  # the next attempt of that partition needs a slot
        return any(self._validates(epoch) for epoch in range(self._next_epoch, self._epochs.stop))

    def _is_warming_up(self) -> bool:
        """Whether workers wait for the first pushes of others: so far, too many partitions have none and are not lost.

        Every call of a worker asks this, so it looks only at as many partitions as it takes to know.
        """
        if self._first_start is None or self._clock() >= self._first_start + self._warmup_timeout:
            return False
        late = (p for p in self._without_push.values() if not p.started or self._leases.is_held(p.worker))
        return next(islice(late, self._may_be_late, None), None) is not None

    def _active(self) -> Iterator[_Partition]:
        """The unfinished partitions with a valid lease."""
        return (partition for worker, partition in self._partitions.items() if self._leases.is_held(worker))

    def _close_epochs(self) -> None:
        """Close the epochs that all workers have reported, without those that have left."""
        while self._next_epoch < self._epochs.stop and not self._stopped:
            epoch = self._next_epoch
            reports = self._reports.get(epoch, {})
            if not reports or any(not p.done and worker not in reports for worker, p in self._partitions.items()):
                return
            ordered = tuple(reports[worker] for worker in sorted(reports))
            validating = [p for p in self._partitions.values() if p.plan.validates and self._validates(epoch)]
            num_absent = sum(partition.done for partition in validating)
            self._evaluating[epoch] = EpochEnd(epoch, ordered, (), self._on_epoch(epoch), num_absent)
            self._is_cut_due = self._on_cut is not None
            self._next_epoch += 1
            del self._reports[epoch]
            for partition in validating:
                if not partition.done:
                    partition.to_evaluate.add(epoch)
            self._deliver()

    def _deliver(self) -> None:
        """Move the epochs that are closed and evaluated to `wait`, in their order."""
        for epoch in sorted(self._evaluating):
            if any(epoch in partition.to_evaluate for partition in self._partitions.values()):
                return
            end = self._evaluating.pop(epoch)
            reports = self._evaluations.pop(epoch, {})
            validation = tuple(reports[worker] for worker in sorted(reports))
            self._ended.append(dataclasses.replace(end, validation=validation))
            self._changed.notify_all()


def _lease_lost(worker: int) -> RefusedError:
    return RefusedError(
        LEASE_LOST,
        f"the lease of worker {worker} was taken over by another attempt of its task, which continues from the last applied "
        "update. The server rejects all further calls of this attempt.",
    )
