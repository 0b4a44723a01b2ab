"""Leases, epochs and directives, with a clock that the test controls."""

import threading
from contextlib import suppress

import numpy as np
import pytest

from sparkkeras.parameter.exchange import Directive, ExchangePoint, PartitionPlan
from sparkkeras.parameter.ledger import BACKLOG
from sparkkeras.rpc.leases import LEASE_LOST
from sparkkeras.rpc.transport import RefusedError
from tests.parameter.servers import a_ledger

LEASE_SECONDS = 10.0
WARMUP_TIMEOUT = 60.0


class Clock:
    """A clock that the test advances."""

    def __init__(self):
        self.now, self.reads = 1000.0, 0

    def __call__(self):
        self.reads += 1
        return self.now

    def advance(self, seconds=LEASE_SECONDS):
        self.now += seconds


class Bench:
    """A ledger and its clock, with the calls of a simple worker."""

    def __init__(self, *plans, epochs=range(2), num_concurrent=1, **options):
        self.clock = Clock()
        self.completed = []
        self.ledger = a_ledger(
            plans,
            epochs=epochs,
            num_concurrent=num_concurrent,
            lease_seconds=LEASE_SECONDS,
            warmup_timeout=WARMUP_TIMEOUT,
            on_epoch=self.on_epoch,
            clock=self.clock,
            **options,
        )

    def on_epoch(self, epoch):
        self.completed.append(epoch)
        return f"weights of {epoch}"

    def take(self, worker, attempt=None):
        resumed = self.ledger.lease(worker, 100 + worker if attempt is None else attempt)
        assert not isinstance(resumed, str), resumed
        return resumed.lease

    def push(self, worker, lease, sequence, *, epoch=0, batch=1, steps=1, rows=4, metrics=(), ended=False, iterations=()):
        """Push once; whether the push was to be applied."""
        logs = {"loss": float(worker)} if ended else None
        with self.ledger.pushing(worker, lease, sequence) as new:
            if new:
                self.ledger.pushed(worker, ExchangePoint(epoch, batch, steps, rows, 0.25, 1.5, metrics, logs, iterations))
        return new

    def end(self, worker, lease, epoch):
        """Push a whole epoch at once."""
        assert self.push(worker, lease, epoch + 1, epoch=epoch, ended=True)

    def directive(self, worker, lease):
        return self.ledger.directive(worker, lease)

    def ended_epochs(self):
        """The epochs that have ended."""
        found = []
        while (end := self.ledger.wait(0)) is not None:
            found.append(end)
        return found


def end_lease(bench, how, worker, lease):
    bench.ledger.expire(lease) if how == "expire" else getattr(bench.ledger, how)(worker, lease)


def rejected(kind, call, *args, **named):
    with pytest.raises(RefusedError) as caught:
        call(*args, **named)
    assert caught.value.kind == kind
    return str(caught.value)


def arrays(*numbers):
    return tuple(np.array(number, np.float32) for number in numbers)


# Leases


CALLS = {
    "lease": lambda bench, lease: bench.ledger.lease(0, 7),
    "directive": lambda bench, lease: bench.directive(0, lease),
    "push": lambda bench, lease: bench.push(0, lease, 2),
    "repeated push": lambda bench, lease: bench.push(0, lease, 1),
    "evaluated": lambda bench, lease: bench.ledger.evaluated(0, lease, 0, arrays(1)),
    "keep optimizer": lambda bench, lease: bench.ledger.keep_optimizer(0, lease, b"optimizer"),
    "finish": lambda bench, lease: bench.ledger.finish(0, lease),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_every_call_renews_the_lease_that_it_carries_and_is_rejected_after_a_takeover(call):
    bench = Bench(3)
    lease = bench.take(0, 7)
    assert bench.push(0, lease, 1)
    bench.clock.advance(LEASE_SECONDS - 1)
    if call is not CALLS["finish"]:
        call(bench, lease)
        bench.clock.advance(LEASE_SECONDS - 1)
        assert bench.ledger.lease(0, 8) == "wait"
    bench.clock.advance()
    new = bench.take(0, 8)
    message = rejected(LEASE_LOST, call, bench, lease)
    assert "taken over by another" in message
    sequence = bench.ledger.lease(0, 8).sequence
    assert sequence == (2 if call is CALLS["push"] else 1)
    assert bench.push(0, new, sequence + 1)


def test_partitions_with_missing_rows_are_reported_once():
    """But not by an attempt that was replaced, which releases nothing."""
    bench = Bench(3, 3, 3)
    for worker in (2, 0):
        bench.ledger.release(worker, bench.take(worker), missing=True)
    old = bench.take(1, 7)
    bench.clock.advance()
    bench.take(1, 8)
    bench.ledger.release(1, old, missing=True)
    assert bench.ledger.lease(1, 9) == "wait"
    assert bench.ledger.pop_missing() == [2, 0]
    assert bench.ledger.pop_missing() == []


def test_the_lease_of_another_partition_is_rejected():
    bench = Bench(3, 3)
    bench.take(0)
    rejected(LEASE_LOST, bench.directive, 0, bench.take(1))


def test_a_replaced_attempt_stays_rejected_after_its_successor_is_lost():
    bench = Bench(3)
    bench.take(0, 7)
    bench.clock.advance()
    bench.ledger.release(0, bench.take(0, 8))
    rejected(LEASE_LOST, bench.ledger.lease, 0, 7)
    assert bench.take(0, 9)


def test_a_finished_partition_stays_finished():
    bench = Bench(3)
    lease = bench.take(0, 7)
    bench.ledger.finish(0, lease)
    bench.ledger.finish(0, lease)  # as after a lost reply
    assert bench.ledger.lease(0, 7) == bench.ledger.lease(0, 8) == "done"
    rejected(LEASE_LOST, bench.ledger.finish, 0, lease + 1)
    rejected(LEASE_LOST, bench.directive, 0, lease)
    rejected(LEASE_LOST, bench.push, 0, lease, 1)


# Pushes


def test_a_new_attempt_receives_the_progress_of_the_partition():
    def progress(attempt):
        resumed = bench.ledger.lease(0, attempt)
        return resumed.sequence, resumed.epoch, resumed.batch, resumed.iterations, resumed.metrics

    bench = Bench(3)
    lease = bench.take(0, 7)
    bench.push(0, lease, 1, batch=2, metrics=arrays(1, 2), iterations=(7, 2))
    bench.push(0, lease, 2, batch=3, metrics=arrays(3, 4), ended=True, iterations=(8, 3))
    assert progress(7) == (2, 1, 0, (8, 3), ())
    bench.push(0, lease, 3, epoch=1, batch=2, metrics=arrays(5, 6), iterations=(10, 5))
    bench.clock.advance()
    assert progress(8) == (3, 1, 2, (10, 5), arrays(5, 6))


def test_a_repeated_push_is_counted_and_not_applied_and_one_out_of_sequence_is_rejected():
    bench = Bench(3)
    lease = bench.take(0)
    assert [bench.push(0, lease, sequence) for sequence in (1, 1, 2, 1, 2, 3)] == [True, False, True, False, False, True]
    assert "expected push 4" in rejected("out of turn", bench.push, 0, lease, 5)
    assert bench.ledger.duplicates == 3
    assert bench.ledger.rows == 3 * 4
    assert bench.ledger.steps == {0: 3}
    assert bench.push(0, lease, 4)


def test_a_push_that_failed_to_apply_may_be_repeated():
    bench = Bench(3)
    lease = bench.take(0)
    with suppress(ZeroDivisionError), bench.ledger.pushing(0, lease, 1) as new:
        assert new
        raise ZeroDivisionError
    assert bench.push(0, lease, 1)
    assert bench.ledger.duplicates == 0


def in_thread(work):
    """Run a function in a thread; returns the thread, and a list that gets the result."""
    done = []
    thread = threading.Thread(target=lambda: done.append(work()))
    thread.start()
    return thread, done


@pytest.mark.parametrize(
    ("call", "result"),
    [
        (lambda bench, lease: bench.ledger.lease(0, 8).batch, 2),
        (lambda bench, lease: bench.ledger.finish(0, lease), None),
        (lambda bench, lease: bench.ledger.release(0, lease), None),
        (lambda bench, lease: bench.push(0, lease, 1), False),
    ],
    ids=["takeover", "finish", "release", "the same push"],
)
def test_other_calls_of_a_partition_wait_for_a_push(call, result):
    bench = Bench(3)
    lease = bench.take(0, 7)
    with bench.ledger.pushing(0, lease, 1):
        bench.clock.advance(2 * LEASE_SECONDS)
        thread, found = in_thread(lambda: call(bench, lease))
        thread.join(0.1)
        assert thread.is_alive()
        bench.ledger.pushed(0, ExchangePoint(0, 2, 2, 8, 0.25, 1.5))
    thread.join(120)
    assert found == [result]
    assert bench.ledger.steps == {0: 2}


def test_a_push_keeps_neither_other_partitions_nor_renewals_waiting():
    bench = Bench(3, 3)
    one, two = bench.take(0), bench.take(1)
    with bench.ledger.pushing(0, one, 1):
        assert bench.push(1, two, 1)
        bench.clock.advance(LEASE_SECONDS - 1)
        assert bench.directive(0, one) == Directive()
    bench.clock.advance(LEASE_SECONDS - 1)
    assert bench.ledger.lease(0, 999) == "wait"


def test_the_progress_of_an_epoch():
    bench = Bench(4, 0, 12)
    assert bench.ledger.progress(0) == 0
    one, two = bench.take(0), bench.take(2)
    bench.push(0, one, 1, batch=4, ended=True)
    bench.push(2, two, 1, batch=6)
    assert (bench.ledger.progress(0), bench.ledger.progress(1)) == (10 / 16, 0)
    bench.push(0, one, 2, epoch=1, batch=4)
    bench.push(2, two, 2, batch=12, ended=True)
    assert (bench.ledger.progress(0), bench.ledger.progress(1)) == (1, 0.25)
    without_batches = Bench(0).ledger
    assert (without_batches.progress(0), without_batches.rows, without_batches.steps) == (0, 0, {})


# Epochs


def test_an_epoch_ends_when_all_workers_have_reported_it():
    bench = Bench(3, 2)
    one, two = bench.take(1), bench.take(0)
    bench.end(1, one, 0)
    assert bench.ended_epochs() == []
    bench.push(0, two, 1, steps=2, rows=7, batch=2)
    bench.push(0, two, 2, steps=1, rows=2, batch=3, metrics=arrays(5), ended=True)
    (end,) = bench.ended_epochs()
    assert (end.epoch, end.snapshot, end.validation) == (0, "weights of 0", ())
    first, second = end.reports
    assert (first.worker, first.epoch, first.rows, first.steps) == (0, 0, 9, 3)
    assert (second.worker, second.epoch, second.rows, second.steps) == (1, 0, 4, 1)
    assert (first.seconds, first.learning_rate, first.metrics, first.logs) == (1.5, 0.25, arrays(5), {"loss": 0.0})


def test_an_epoch_does_not_wait_for_a_worker_that_has_left():
    bench = Bench(1, 1, epochs=range(3))
    one, two = bench.take(0), bench.take(1)
    bench.end(0, one, 0)
    bench.end(1, two, 0)
    bench.end(1, two, 1)
    assert len(bench.ended_epochs()) == 1
    bench.ledger.finish(0, one)
    (end,) = bench.ended_epochs()
    assert [report.worker for report in end.reports] == [1]
    bench.end(1, two, 2)
    assert [end.epoch for end in bench.ended_epochs()] == [2]


def test_an_epoch_without_reports_does_not_end():
    bench = Bench(1, 1)
    for worker in (0, 1):
        bench.ledger.finish(worker, bench.take(worker))
    assert bench.ended_epochs() == []


@pytest.mark.parametrize(
    ("call", "epochs"),
    [
        (lambda bench, lease: bench.end(0, lease, 0), [0]),
        (lambda bench, lease: bench.ledger.wake(), []),
        (lambda bench, lease: bench.ledger.stop(), []),
        (lambda bench, lease: bench.ledger.release(0, lease, missing=True), []),
    ],
    ids=["end of an epoch", "wake", "stop", "release"],
)
def test_wait_returns_early(call, epochs):
    bench = Bench(1)
    lease = bench.take(0)
    waiting, found = in_thread(lambda: bench.ledger.wait(300))
    while not bench.ledger._changed._waiters:
        waiting.join(0.001)
    call(bench, lease)
    waiting.join(120)
    assert [end.epoch for end in found if end] == epochs
    assert len(found) == 1


# Validation

VALIDATING = PartitionPlan(1, validates=True)


def always(epoch):
    return True


def trained(*plans, epochs=range(1), **of_bench):
    """A bench whose workers have reported epoch 0, and their leases."""
    bench = Bench(*plans, epochs=epochs, validates=of_bench.pop("validates", always), **of_bench)
    leases = [bench.take(worker) for worker in range(len(plans))]
    for worker, lease in enumerate(leases):
        bench.end(worker, lease, 0)
    return bench, leases


def test_an_epoch_ends_when_all_validating_workers_have_reported():
    bench, leases = trained(VALIDATING, PartitionPlan(1), VALIDATING)
    assert [bench.directive(worker, lease).evaluate for worker, lease in enumerate(leases)] == [(0,), (), (0,)]
    for number in (7, 9):  # as after a lost reply
        bench.ledger.evaluated(2, leases[2], 0, arrays(number))
    assert bench.ended_epochs() == []
    assert bench.directive(2, leases[2]).evaluate == ()
    assert bench.ledger.snapshot(0) == "weights of 0"
    for number in (5, 9):
        bench.ledger.evaluated(0, leases[0], 0, arrays(number))
    (end,) = bench.ended_epochs()
    assert end.validation == (arrays(5), arrays(7))
    assert end.snapshot == "weights of 0"
    assert [report.worker for report in end.reports] == [0, 1, 2]
    rejected("gone", bench.ledger.snapshot, 0)


@pytest.mark.parametrize(
    "leave",
    [lambda ledger, lease: ledger.evaluated(1, lease, 0, None), lambda ledger, lease: ledger.finish(1, lease)],
    ids=["no rows", "leaves"],
)
def test_validation_does_not_wait_for_a_worker_without_rows_or_one_that_leaves(leave):
    bench, leases = trained(VALIDATING, VALIDATING)
    bench.ledger.evaluated(0, leases[0], 0, arrays(5))
    leave(bench.ledger, leases[1])
    (end,) = bench.ended_epochs()
    assert end.validation == (arrays(5),)


def test_a_new_attempt_evaluates_the_epochs_that_the_old_one_did_not():
    bench, (lease,) = trained(VALIDATING)
    bench.clock.advance()
    new = bench.take(0, 999)
    rejected(LEASE_LOST, bench.ledger.evaluated, 0, lease, 0, arrays(1))
    assert bench.directive(0, new).evaluate == (0,)
    bench.ledger.evaluated(0, new, 0, arrays(2))
    assert bench.ended_epochs()[0].validation == (arrays(2),)


def test_only_some_epochs_are_validated():
    bench = Bench(VALIDATING, epochs=range(4), validates=lambda epoch: epoch % 2 == 1)
    lease = bench.take(0)
    for epoch in range(4):
        bench.end(0, lease, epoch)
    assert bench.directive(0, lease).evaluate == (1, 3)
    assert [end.snapshot for end in bench.ledger.undelivered()] == [f"weights of {epoch}" for epoch in range(4)]
    assert [end.epoch for end in bench.ended_epochs()] == [0]
    bench.ledger.evaluated(0, lease, 3, arrays(3))
    assert bench.ended_epochs() == []
    bench.ledger.evaluated(0, lease, 1, arrays(1))
    assert [(end.epoch, end.validation) for end in bench.ended_epochs()] == [(1, (arrays(1),)), (2, ()), (3, (arrays(3),))]


# Staying to validate later epochs


def test_a_worker_that_has_finished_training_stays_for_later_epochs():
    bench = Bench(VALIDATING, 2, epochs=range(2), validates=always)
    one, two = bench.take(0), bench.take(1)
    assert not bench.directive(0, one).stay
    for epoch in range(2):
        bench.end(0, one, epoch)
    assert bench.directive(0, one) == Directive(stay=True)
    assert not bench.directive(1, two).stay
    bench.end(1, two, 0)
    bench.ledger.evaluated(0, one, 0, arrays(0))
    assert bench.directive(0, one).stay
    bench.end(1, two, 1)
    assert bench.directive(0, one) == Directive(stay=True, evaluate=(1,))
    bench.ledger.evaluated(0, one, 1, arrays(1))
    assert bench.directive(0, one) == Directive()
    assert not bench.directive(1, two).stay


@pytest.mark.parametrize(
    ("plan", "validates"),
    [(PartitionPlan(1), always), (VALIDATING, lambda epoch: False), (VALIDATING, lambda epoch: epoch == 0)],
)
def test_a_worker_with_nothing_to_validate_does_not_stay(plan, validates):
    bench = Bench(plan, 1, epochs=range(2), validates=validates)
    one, two = bench.take(0), bench.take(1)
    for epoch in range(2):
        bench.end(0, one, epoch)
    bench.end(1, two, 0)
    bench.ledger.evaluated(0, one, 0, arrays(1))
    assert not bench.directive(0, one).stay


@pytest.mark.parametrize("why", ["never started", "expired", "connection closed", "released"])
def test_a_worker_does_not_stay_if_another_partition_needs_its_slot(why):
    bench = Bench(VALIDATING, 1, epochs=range(1), validates=always)
    one = bench.take(0)
    bench.end(0, one, 0)
    if why != "never started":
        two = bench.take(1)
        assert bench.directive(0, one).stay
        if why == "expired":
            bench.clock.advance()
        else:
            end_lease(bench, "expire" if why == "connection closed" else "release", 1, two)
    if why in {"expired", "connection closed"}:  # its next attempt may be about to take the same slot
        assert bench.directive(0, one).stay
        bench.clock.advance()
    assert not bench.directive(0, one).stay
    bench.take(1, 999)
    assert bench.directive(0, one).stay


def test_pending_epochs_are_evaluated_even_if_a_slot_is_needed():
    bench, leases = trained(VALIDATING, VALIDATING)
    bench.ledger.expire(leases[1])
    assert bench.directive(0, leases[0]) == Directive(stay=True, evaluate=(0,))


# Waiting


def test_workers_wait_until_enough_workers_have_pushed():
    bench = Bench(9, 9, 9, 9, num_concurrent=3)
    one, two, three = (bench.take(worker) for worker in range(3))
    assert not bench.directive(0, one).wait
    bench.push(0, one, 1)
    assert bench.directive(0, one).wait
    assert not bench.directive(1, two).wait
    bench.push(1, two, 1)
    assert bench.directive(0, one).wait
    assert bench.directive(1, two).wait
    bench.push(2, three, 1)
    assert not any(bench.directive(worker, lease).wait for worker, lease in enumerate((one, two, three)))


def test_the_wait_for_first_pushes_times_out():
    """A second attempt does not count as another worker."""
    bench = Bench(9, 9, num_concurrent=2)
    bench.clock.advance(1000)
    bench.push(0, bench.take(0, 7), 1)
    bench.clock.advance()
    lease = bench.take(0, 8)
    bench.push(0, lease, 2)
    bench.clock.advance(WARMUP_TIMEOUT - LEASE_SECONDS - 0.5)
    assert bench.directive(0, lease).wait
    bench.clock.advance(0.5)
    assert not bench.directive(0, lease).wait


@pytest.mark.parametrize(("pushes", "max_staleness"), [(0, None), (1, 2), (2, 2)])
def test_the_cost_of_a_call_does_not_grow_with_the_number_of_workers(pushes, max_staleness):
    """Every call looks at some leases, and reads the clock for each."""
    costs = []
    for workers in (4, 40):
        bench = Bench(*[9] * workers, num_concurrent=workers, max_staleness=max_staleness)
        leases = [bench.take(worker) for worker in range(workers)]
        for sequence in range(1, pushes + 1):
            for worker, lease in enumerate(leases):
                bench.push(worker, lease, sequence)
        bench.push(0, leases[0], pushes + 1)
        bench.directive(0, leases[0])  # may look at all of them, but not each time
        bench.clock.reads = 0
        bench.directive(0, leases[0])
        costs.append(bench.clock.reads)
    assert costs[0] == costs[1]


@pytest.mark.parametrize("bound", [0, 3])
def test_no_worker_gets_further_ahead_of_the_slowest_than_the_bound(bound):
    bench = Bench(20, 20, max_staleness=bound)
    one, two = bench.take(0), bench.take(1)
    for sequence in range(1, bound + 2):
        assert not bench.directive(0, one).wait
        bench.push(0, one, sequence)
    assert bench.directive(0, one).wait
    assert not bench.directive(1, two).wait
    bench.push(1, two, 1)
    assert not bench.directive(0, one).wait


@pytest.mark.parametrize("how", ["expire", "release", "finish"])
@pytest.mark.parametrize(
    ("batches", "options"),
    [(0, {"num_concurrent": 3}), (9, {"max_staleness": 0})],
    ids=["first push", "bound"],
)
def test_workers_do_not_wait_for_one_that_is_gone(batches, options, how):
    """Nor for the first push of a partition without batches, nor at the bound for one that has not started."""
    bench = Bench(9, 9, batches, **options)
    alive, gone = bench.take(0), bench.take(1)
    bench.push(0, alive, 1)
    assert bench.directive(0, alive).wait
    end_lease(bench, how, 1, gone)
    assert not bench.directive(0, alive).wait
    if how != "finish":
        bench.take(1, 999)
        assert bench.directive(0, alive).wait


def test_workers_that_have_finished_their_epochs_neither_wait_nor_keep_others_waiting():
    bench = Bench(2, 2, 2, epochs=range(1), max_staleness=0)
    one, two = bench.take(0), bench.take(1)
    bench.push(1, two, 1, batch=2, ended=True)
    bench.push(0, one, 1)
    bench.push(0, one, 2)
    assert not bench.directive(0, one).wait
    bench.take(2)
    assert bench.directive(0, one).wait
    assert bench.directive(1, two) == Directive()


def test_workers_wait_for_a_driver_with_a_backlog():
    bench = Bench(1, 5, epochs=range(20))
    lease = bench.take(0)
    other = bench.take(1)
    bench.ledger.finish(1, other)
    for epoch in range(BACKLOG):
        bench.end(0, lease, epoch)
    assert not bench.directive(0, lease).wait
    bench.end(0, lease, BACKLOG)
    assert bench.directive(0, lease).wait
    assert bench.ledger.wait(0).epoch == 0
    assert not bench.directive(0, lease).wait


# Calls of the driver


def test_stop_reaches_all_workers_and_new_attempts_and_no_epoch_ends_after_it():
    bench = Bench(1, 1, num_concurrent=2)
    one, two = bench.take(0), bench.take(1)
    bench.ledger.stop()
    assert bench.directive(0, one) == bench.directive(1, two) == Directive(stop=True)
    assert bench.ledger.lease(1, 999) == "done"
    for worker, lease in enumerate((one, two)):
        bench.end(worker, lease, 0)
        bench.ledger.finish(worker, lease)
    assert bench.ended_epochs() == bench.completed == []


def test_settings_are_numbered():
    bench = Bench(1)
    assert bench.ledger.lease(0, 7).settings is None
    lease = bench.take(0, 7)
    bench.ledger.put_settings([0.5])
    assert bench.directive(0, lease).settings == (1, (0.5,))
    bench.ledger.put_settings([0.25])
    bench.ledger.put_settings([0.25])
    assert bench.directive(0, lease).settings == (3, (0.25,))
    bench.clock.advance()
    assert bench.ledger.lease(0, 8).settings == (3, (0.25,))


# Continuing


def test_workers_that_have_completed_all_epochs_do_not_keep_others_waiting():
    """Worker 0 only validates after the checkpoint."""
    plans = [PartitionPlan(2, validates=True)] * 2
    first = Bench(*plans, num_concurrent=2, validates=lambda epoch: True)
    ahead, late = first.take(0), first.take(1)
    first.push(1, late, 1)
    for epoch in range(2):
        first.end(0, ahead, epoch)
    second = Bench(*plans, num_concurrent=2, validates=lambda epoch: True, reached=first.ledger.cut().progress)
    second.take(0)
    lease = second.take(1)
    assert second.push(1, lease, 2, batch=2, ended=True)
    assert not second.directive(1, lease).wait


@pytest.mark.parametrize("by_driver", [False, True])
def test_a_worker_that_has_stopped_trains_again_only_if_the_driver_has_stopped_it(by_driver):
    """And not its callback."""
    first = Bench(1, 1, epochs=range(3), num_concurrent=2)
    stopped, other = first.take(0), first.take(1)
    first.end(0, stopped, 0)
    first.end(1, other, 0)
    if by_driver:
        first.ledger.stop()
    first.ledger.finish(0, stopped)
    second = Bench(1, 1, epochs=range(1, 3), num_concurrent=2, reached=first.ledger.cut().progress)
    assert (second.ledger.lease(0, 7) == "done") is not by_driver
    assert second.ledger.lease(1, 8).epoch == 1
