"""Workers that die, come back, come twice and repeat themselves, in a Spark of a few lines.

Whatever happens, all that was planned is applied exactly once, and there is always somebody who may go on.
"""

import itertools
import random
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest

from sparkkeras.parameter.ledger import Ledger, PartitionPlan
from sparkkeras.rpc.transport import RefusedError

LEASE_SECONDS = 10.0
START_SECONDS = 15.0
FAR_TOO_MANY = 50_000


@dataclass
class Attempt:
    """A task of a partition that runs in a slot, unless Spark has lost sight of it."""

    worker: int
    number: int
    lease: int | None = None
    sequence: int = 0
    epoch: int = 0
    batch: int = 0
    lost: bool = False


class Spark:
    """Runs a task for every partition until all are done, and makes it hard for them.

    Args:
        seed: Of all that is left to chance.
        trouble: How likely it is that an event is a bad one.
        bound: The ledger's ``max_staleness``.
        early: Whether workers may end their training early.
        calm: Whether no time passes and each partition has a slot.
    """

    def __init__(self, seed, trouble, bound=None, early=False, calm=False):
        self.chance = random.Random(seed)
        self.trouble, self.early, self.calm = trouble, early, calm
        partitions = self.chance.randint(1, 5)
        self.shares = {
            worker: PartitionPlan(self.chance.choice([0, 1, 2, 3, 5]), validates=self.chance.random() < 0.5)
            for worker in range(partitions)
        }
        self.epochs = range(self.chance.randint(0, 2), 4)
        self.slots = partitions if calm else self.chance.randint(1, partitions)
        self.now = 0.0
        self.ledger = Ledger(
            self.shares,
            self.epochs,
            at_once=self.slots,
            validates=lambda epoch: epoch != 2,
            max_staleness=bound,
            lease_seconds=LEASE_SECONDS,
            warmup_timeout=START_SECONDS,
            on_epoch=lambda epoch: epoch,
            clock=lambda: self.now,
        )
        self.numbers = itertools.count(1)
        self.running = []
        self.done = set()
        self.left = set()
        self.applied = Counter()
        self.duplicates = 0
        self.over = []

    def run(self):
        for _ in range(FAR_TOO_MANY):
            self.schedule()
            if not self.running:
                self.drain()
                return
            self.chance.choices(
                [self.turn, self.clock, self.drain, self.harm, self.check_somebody_may_go_on],
                [60, 0, 5, 0, 0] if self.calm else [60, 5, 5, 60 * self.trouble, 5],
            )[0]()
        raise AssertionError(f"no end: {self.running}, {self.ledger._partitions}")

    def schedule(self):
        for worker in self.shares:
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
        standing = self.ledger.lease(attempt.worker, attempt.number)
        if standing == "done":
            self.end(attempt)
        elif standing != "wait":
            attempt.lease, attempt.sequence = standing.lease, standing.sequence
            attempt.epoch, attempt.batch = standing.epoch, standing.batch

    def push(self, attempt):
        first, batches = attempt.batch, self.shares[attempt.worker].batches
        stop = min(batches, first + self.chance.randint(1, 3))
        ended = {"logs": {}, "seconds": 1.0, "learning_rate": 0.1} if stop == batches else None
        for again in range(self.chance.choice([1, 1, 2])):
            with self.ledger.pushing(attempt.worker, attempt.lease, attempt.sequence + 1) as new:
                assert new == (not again)
                if not new:
                    self.duplicates += 1
                    continue
                steps = stop - first
                self.applied.update((attempt.worker, attempt.epoch, batch) for batch in range(first, stop))
                self.ledger.pushed(
                    attempt.worker, epoch=attempt.epoch, batch=stop, steps=steps, rows=steps, metrics=(), ended=ended
                )
        if self.chance.random() < self.trouble:
            self.running.remove(attempt)  # it dies before it hears the answer
            return
        attempt.sequence += 1
        attempt.epoch, attempt.batch = (attempt.epoch + 1, 0) if ended else (attempt.epoch, stop)

    def end(self, attempt):
        self.done.add(attempt.worker)
        self.running.remove(attempt)

    def harm(self):
        attempt = self.chance.choice(self.running)
        what = self.chance.choice(["kill", "hang up", "give up", "lose", "stall", "speculate"])
        if what == "stall":
            self.now += 2 * LEASE_SECONDS
        elif what == "lose":
            attempt.lost = True
        elif what == "speculate":
            self.running.append(Attempt(attempt.worker, next(self.numbers), lost=True))
        else:
            self.running.remove(attempt)
            if attempt.lease is not None and what != "kill":
                (self.ledger.doubt if what == "hang up" else self.ledger.release)(attempt.worker, attempt.lease)

    def clock(self):
        self.now += self.chance.uniform(0, 4)

    def drain(self):
        while (end := self.ledger.wait(0)) is not None:
            self.over.append(end)

    def check_somebody_may_go_on(self):
        """After all have started, or waited for that, and the dead are known to be."""
        self.each_that_trains(lambda attempt: None)
        self.now += LEASE_SECONDS + START_SECONDS
        self.drain()
        self.each_that_trains(self.directive)
        told = self.each_that_trains(self.directive)
        assert not told or not all(directive.wait for directive in told)

    def directive(self, attempt):
        return self.ledger.directive(attempt.worker, attempt.lease)

    def each_that_trains(self, ask):
        """What is answered to those that have a lease and epochs left; those that were replaced end."""
        told = []
        for attempt in list(self.running):
            try:
                if attempt.lease is None:
                    self.take(attempt)
                if attempt.lease is not None and attempt.epoch < self.epochs.stop:
                    told.append(ask(attempt))
            except RefusedError:
                self.running.remove(attempt)
        return told


def all_of(spark):
    return {
        (worker, epoch, batch)
        for worker, share in spark.shares.items()
        for epoch in spark.epochs
        for batch in range(share.batches)
    }


def check(spark):
    """All was applied once, and every epoch was told once, whole and in its order."""
    planned = all_of(spark)
    assert set(spark.applied) <= planned
    assert all((count == 1) for count in spark.applied.values())
    assert {one for one in planned if one[0] not in spark.left} <= set(spark.applied)
    assert spark.ledger.rows == len(spark.applied)
    assert spark.ledger.duplicates == spark.duplicates
    trained = {worker for worker, share in spark.shares.items() if share.batches}
    stayed = trained - spark.left
    if stayed:
        assert [end.epoch for end in spark.over] == list(spark.epochs)
    for end in spark.over:
        rows = {report.worker: report.rows for report in end.reports}
        assert list(rows) == sorted(rows)
        assert stayed <= set(rows) <= trained
        assert all(rows[worker] == spark.shares[worker].batches for worker in rows)
        validators = [int(metrics[0]) for metrics in end.validation]
        assert validators == sorted(set(validators))
        assert all(spark.shares[worker].validates and end.epoch != 2 for worker in validators)
    assert len(spark.over) == len({end.epoch for end in spark.over})


runs = pytest.mark.parametrize("runs", [100, pytest.param(5000, marks=pytest.mark.soak)])


@pytest.mark.parametrize("bound", [None, 0, 1, 3])
@pytest.mark.parametrize("trouble", [0.0, 0.02, 0.15])
@runs
def test_all_is_applied_once_and_somebody_may_always_go_on(bound, trouble, runs):
    for seed in range(runs):
        spark = Spark(seed, trouble, bound)
        spark.run()
        check(spark)


@pytest.mark.parametrize("bound", [None, 0])
@runs
def test_nor_do_those_that_leave_early_hold_the_others_up(bound, runs):
    left = 0
    for seed in range(runs):
        spark = Spark(seed, 0.05, bound, early=True)
        spark.run()
        check(spark)
        left += bool(spark.left)
    assert left > runs / 4


@runs
def test_without_trouble_and_with_a_slot_for_each_all_that_can_validate_do(runs):
    for seed in range(runs):
        spark = Spark(seed, 0.0, calm=True)
        spark.run()
        validators = [worker for worker, share in spark.shares.items() if share.validates and share.batches]
        for end in spark.over:
            assert [int(metrics[0]) for metrics in end.validation] == (validators if end.epoch != 2 else [])
