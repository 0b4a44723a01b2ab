"""Workers that die, return, run twice and repeat calls, in a small simulation of Spark.

Whatever happens, every planned batch is applied exactly once, and there is always a worker that may continue.
"""

import itertools
import random
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest

from sparkkeras.parameter.exchange import ExchangePoint, PartitionPlan
from sparkkeras.rpc.transport import RefusedError
from tests.parameter.servers import a_ledger

LEASE_SECONDS = 10.0
WARMUP_TIMEOUT = 15.0
MAX_EVENTS = 50_000


@dataclass
class Attempt:
    """A task of a partition that runs in a slot, unless Spark considers it lost."""

    worker: int
    number: int
    lease: int | None = None
    sequence: int = 0
    epoch: int = 0
    batch: int = 0
    lost: bool = False


class Spark:
    """Runs a task for every partition until all are done, and injects faults.

    Args:
        seed: The seed of all random choices.
        trouble: The probability of a fault.
        bound: The ledger's ``max_staleness``.
        early: Whether workers may end their training early.
    """

    def __init__(self, seed, trouble, bound=None, early=False):
        self.chance = random.Random(seed)
        self.trouble, self.early = trouble, early
        partitions = self.chance.randint(1, 5)
        self.plans = {
            worker: PartitionPlan(self.chance.choice([0, 1, 2, 3, 5]), validates=self.chance.random() < 0.5)
            for worker in range(partitions)
        }
        self.epochs = range(self.chance.randint(0, 2), 4)
        self.slots = self.chance.randint(1, partitions)
        self.now = 0.0
        self.ledger = a_ledger(
            self.plans.values(),
            epochs=self.epochs,
            num_concurrent=self.slots,
            validates=lambda epoch: epoch != 2,
            max_staleness=bound,
            lease_seconds=LEASE_SECONDS,
            warmup_timeout=WARMUP_TIMEOUT,
            on_epoch=lambda epoch: epoch,
            clock=lambda: self.now,
        )
        self.numbers = itertools.count(1)
        self.running = []
        self.done = set()
        self.left = set()
        self.applied = Counter()
        self.duplicates = 0
        self.ended = []

    def run(self):
        for _ in range(MAX_EVENTS):
            self.schedule()
            if not self.running:
                self.drain()
                return
            self.chance.choices(
                [self.turn, self.clock, self.drain, self.inject_fault, self.check_a_worker_may_continue],
                [60, 5, 5, 60 * self.trouble, 5],
            )[0]()
        raise AssertionError(f"does not end: {self.running}, {self.ledger._partitions}")

    def schedule(self):
        for worker in self.plans:
            seen = [attempt.worker for attempt in self.running if not attempt.lost]
            if len(seen) < self.slots and worker not in self.done and worker not in seen:
                self.running.append(Attempt(worker, next(self.numbers)))

    def turn(self):
        attempt = self.chance.choice(self.running)
        try:
            self.act(attempt)
        except RefusedError:
            self.running.remove(attempt)

    def act(self, attempt):
        if attempt.lease is None:
            self.take(attempt)
            return
        directive = self.directive(attempt)
        if directive.evaluate:
            self.ledger.evaluated(attempt.worker, attempt.lease, directive.evaluate[0], (np.array(attempt.worker),))
        elif directive.wait or directive.stay:
            pass
        elif attempt.epoch < self.epochs.stop and not (self.early and self.chance.random() < 0.05):
            self.push(attempt)
        else:
            if attempt.epoch < self.epochs.stop:
                self.left.add(attempt.worker)
            self.ledger.finish(attempt.worker, attempt.lease)
            self.end(attempt)

    def take(self, attempt):
        resumed = self.ledger.lease(attempt.worker, attempt.number)
        if resumed == "done":
            self.end(attempt)
        elif resumed != "wait":
            attempt.lease, attempt.sequence = resumed.lease, resumed.sequence
            attempt.epoch, attempt.batch = resumed.epoch, resumed.batch

    def push(self, attempt):
        first, batches = attempt.batch, self.plans[attempt.worker].batches
        stop = min(batches, first + self.chance.randint(1, 3))
        logs = {} if stop == batches else None
        for again in range(self.chance.choice([1, 1, 2])):
            with self.ledger.pushing(attempt.worker, attempt.lease, attempt.sequence + 1) as new:
                assert new == (not again)
                if not new:
                    self.duplicates += 1
                    continue
                steps = stop - first
                self.applied.update((attempt.worker, attempt.epoch, batch) for batch in range(first, stop))
                self.ledger.pushed(attempt.worker, ExchangePoint(attempt.epoch, stop, steps, steps, 0.1, 1.0, logs=logs))
        if self.chance.random() < self.trouble:
            self.running.remove(attempt)  # it dies before it receives the reply
            return
        attempt.sequence += 1
        attempt.epoch, attempt.batch = (attempt.epoch, stop) if logs is None else (attempt.epoch + 1, 0)

    def end(self, attempt):
        self.done.add(attempt.worker)
        self.running.remove(attempt)

    def inject_fault(self):
        attempt = self.chance.choice(self.running)
        what = self.chance.choice(["kill", "disconnect", "release", "lose", "stall", "speculate"])
        if what == "stall":
            self.now += 2 * LEASE_SECONDS
        elif what == "lose":
            attempt.lost = True
        elif what == "speculate":
            self.running.append(Attempt(attempt.worker, next(self.numbers), lost=True))
        else:
            self.running.remove(attempt)
            if attempt.lease is not None and what != "kill":
                if what == "disconnect":
                    self.ledger.expire(attempt.lease)
                else:
                    self.ledger.release(attempt.worker, attempt.lease)

    def clock(self):
        self.now += self.chance.uniform(0, 4)

    def drain(self):
        while (end := self.ledger.wait(0)) is not None:
            self.ended.append(end)

    def check_a_worker_may_continue(self):
        """Check that not all workers wait, once the warm-up is over and the leases of dead workers have expired."""
        self.each_training(lambda attempt: None)
        self.now += LEASE_SECONDS + WARMUP_TIMEOUT
        self.drain()
        self.each_training(self.directive)
        directives = self.each_training(self.directive)
        assert not directives or not all(directive.wait for directive in directives)

    def directive(self, attempt):
        return self.ledger.directive(attempt.worker, attempt.lease)

    def each_training(self, ask):
        """The replies to the attempts that have a lease and epochs left; attempts that were replaced end."""
        replies = []
        for attempt in list(self.running):
            try:
                if attempt.lease is None:
                    self.take(attempt)
                if attempt.lease is not None and attempt.epoch < self.epochs.stop:
                    replies.append(ask(attempt))
            except RefusedError:
                self.running.remove(attempt)
        return replies


def check(spark):
    """Check that every batch was applied once, and that every epoch was reported once, complete and in order."""
    planned = {
        (worker, epoch, batch)
        for worker, plan in spark.plans.items()
        for epoch in spark.epochs
        for batch in range(plan.batches)
    }
    assert set(spark.applied) <= planned
    assert all((count == 1) for count in spark.applied.values())
    assert {one for one in planned if one[0] not in spark.left} <= set(spark.applied)
    assert spark.ledger.rows == len(spark.applied)
    assert spark.ledger.duplicates == spark.duplicates
    trained = {worker for worker, plan in spark.plans.items() if plan.batches}
    stayed = trained - spark.left
    if stayed:
        assert [end.epoch for end in spark.ended] == list(spark.epochs)
    for end in spark.ended:
        rows = {report.worker: report.rows for report in end.reports}
        assert list(rows) == sorted(rows)
        assert stayed <= set(rows) <= trained
        assert all(rows[worker] == spark.plans[worker].batches for worker in rows)
        validators = [int(metrics[0]) for metrics in end.validation]
        assert validators == sorted(set(validators))
        assert all(spark.plans[worker].validates and end.epoch != 2 for worker in validators)
    assert len(spark.ended) == len({end.epoch for end in spark.ended})


@pytest.mark.parametrize(
    ("bound", "trouble", "early"),
    [(None, 0.15, False), (0, 0.02, False), (0, 0.15, False), (1, 0.15, False), (3, 0.0, False)]
    + [(None, 0.05, True), (0, 0.05, True)],
)
@pytest.mark.parametrize("runs", [60, pytest.param(5000, marks=pytest.mark.soak)])
def test_every_batch_is_applied_once_and_a_worker_may_always_continue(bound, trouble, early, runs):
    """Also if workers leave early."""
    left = 0
    for seed in range(runs):
        spark = Spark(seed, trouble, bound, early)
        spark.run()
        check(spark)
        left += bool(spark.left)
    assert (left > runs / 4) is early
