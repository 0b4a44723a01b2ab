"""Leases, epochs and what workers are told, on a clock that the test moves."""

import threading
from contextlib import suppress

import numpy as np
import pytest

from sparkkeras.parameter.ledger import BACKLOG, LEASE_LOST, Directive, Ledger, PartitionPlan
from sparkkeras.rpc.transport import RefusedError

LEASE_SECONDS = 10.0
START_SECONDS = 60.0


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now

    def pass_by(self, seconds=LEASE_SECONDS):
        self.now += seconds


class Bench:
    """A ledger, its clock, and what pushes of a plain worker look like."""

    def __init__(self, *plans, epochs=range(2), at_once=1, validates=lambda epoch: False, max_staleness=None):
        self.clock = Clock()
        self.noted = []
        self.plans = dict(enumerate(plan if isinstance(plan, PartitionPlan) else PartitionPlan(plan) for plan in plans))
        self.ledger = Ledger(
            self.plans,
            epochs,
            at_once=at_once,
            validates=validates,
            max_staleness=max_staleness,
            lease_seconds=LEASE_SECONDS,
            warmup_timeout=START_SECONDS,
            on_epoch=self.on_epoch,
            clock=self.clock,
        )

    def on_epoch(self, epoch):
        self.noted.append(epoch)
        return f"weights of {epoch}"

    def take(self, worker, attempt=None):
        standing = self.ledger.lease(worker, 100 + worker if attempt is None else attempt)
        assert not isinstance(standing, str), standing
        return standing.lease

    def push(self, worker, lease, sequence, *, epoch=0, batch=1, steps=1, rows=4, metrics=(), ended=False):
        """Whether it was to be applied."""
        told = {"logs": {"loss": float(worker)}, "seconds": 1.5, "learning_rate": 0.25} if ended else None
        with self.ledger.pushing(worker, lease, sequence) as new:
            if new:
                self.ledger.pushed(worker, epoch=epoch, batch=batch, steps=steps, rows=rows, metrics=metrics, ended=told)
        return new

    def end(self, worker, lease, epoch, sequence=None):
        """One push that is all of an epoch, the first one being epoch 0's."""
        batches = self.plans[worker].batches
        assert self.push(worker, lease, sequence or epoch + 1, epoch=epoch, batch=batches, ended=True)

    def told(self, worker, lease):
        return self.ledger.directive(worker, lease)

    def over(self):
        """The epochs that are over."""
        found = []
        while (end := self.ledger.wait(0)) is not None:
            found.append(end)
        return found


def refused(kind, call, *args, **named):
    with pytest.raises(RefusedError) as caught:
        call(*args, **named)
    assert caught.value.kind == kind
    return str(caught.value)


def arrays(*numbers):
    return tuple(np.array(number, np.float32) for number in numbers)


# Leases


def test_a_lease_tells_where_to_begin():
    standing = Bench(3, epochs=range(4, 6)).ledger.lease(0, 7)
    assert (standing.sequence, standing.epoch, standing.batch, standing.steps, standing.metrics) == (0, 4, 0, 0, ())


def test_the_same_attempt_gets_the_same_lease_again():
    ledger = Bench(3).ledger
    assert ledger.lease(0, 7) == ledger.lease(0, 7)


def test_the_same_attempt_gets_its_lease_again_after_it_ran_out():
    bench = Bench(3)
    first = bench.take(0, 7)
    bench.clock.pass_by(5 * LEASE_SECONDS)
    assert bench.take(0, 7) == first
    assert bench.ledger.lease(0, 8) == "wait"


def test_another_attempt_waits_until_the_lease_runs_out():
    bench = Bench(3)
    bench.take(0, 7)
    assert bench.ledger.lease(0, 8) == "wait"
    bench.clock.pass_by(LEASE_SECONDS - 0.1)
    assert bench.ledger.lease(0, 8) == "wait"
    bench.clock.pass_by(0.1)
    assert bench.take(0, 8)


def test_a_lease_that_ran_out_is_good_until_another_attempt_asks():
    bench = Bench(3)
    lease = bench.take(0, 7)
    bench.clock.pass_by(5 * LEASE_SECONDS)
    assert bench.push(0, lease, 1)
    assert bench.ledger.lease(0, 8) == "wait"


@pytest.mark.parametrize(
    "call",
    [
        lambda bench, lease: bench.ledger.lease(0, 7),
        lambda bench, lease: bench.told(0, lease),
        lambda bench, lease: bench.push(0, lease, 2),
        lambda bench, lease: bench.push(0, lease, 1),
        lambda bench, lease: bench.ledger.evaluated(0, lease, 0, arrays(1)),
    ],
    ids=["lease", "directive", "push", "a push again", "evaluated"],
)
def test_every_call_that_carries_a_lease_renews_it(call):
    bench = Bench(3)
    lease = bench.take(0, 7)
    assert bench.push(0, lease, 1)
    bench.clock.pass_by(LEASE_SECONDS - 1)
    call(bench, lease)
    bench.clock.pass_by(LEASE_SECONDS - 1)
    assert bench.ledger.lease(0, 8) == "wait"


def test_asking_does_not_renew_the_lease_of_another():
    bench = Bench(3)
    bench.take(0, 7)
    bench.clock.pass_by(LEASE_SECONDS - 1)
    assert bench.ledger.lease(0, 8) == "wait"
    bench.clock.pass_by(1)
    assert bench.take(0, 8)


def test_the_numbers_of_leases_rise_over_all_partitions():
    bench = Bench(3, 3)
    numbers = []
    for attempt in range(4):
        for worker in (0, 1):
            numbers.append(bench.take(worker, 10 * attempt + worker))
        bench.clock.pass_by()
    assert numbers == sorted(set(numbers))


def test_an_attempt_whose_connection_ended_is_replaced_at_once():
    bench = Bench(3)
    lease = bench.take(0, 7)
    bench.ledger.doubt(0, lease)
    assert bench.take(0, 8) > lease


def test_a_doubt_ends_with_the_next_call():
    bench = Bench(3)
    lease = bench.take(0, 7)
    bench.ledger.doubt(0, lease)
    bench.told(0, lease)
    assert bench.ledger.lease(0, 8) == "wait"


def test_doubts_of_a_lease_that_was_taken_over_do_not_touch_the_new_one():
    bench = Bench(3)
    old = bench.take(0, 7)
    bench.clock.pass_by()
    bench.take(0, 8)
    bench.ledger.doubt(0, old)
    assert bench.ledger.lease(0, 9) == "wait"


def test_a_partition_that_was_given_up_is_free_at_once_and_goes_on_where_it_stood():
    bench = Bench(3)
    lease = bench.take(0, 7)
    bench.push(0, lease, 1)
    bench.ledger.release(0, lease)
    assert bench.ledger.lease(0, 8).sequence == 1
    refused(LEASE_LOST, bench.push, 0, lease, 2)


def test_who_gave_a_partition_up_may_take_it_again():
    bench = Bench(3)
    lease = bench.take(0, 7)
    bench.ledger.release(0, lease)
    assert bench.take(0, 7) > lease


def test_giving_up_a_lease_that_was_taken_over_does_nothing():
    bench = Bench(3)
    old = bench.take(0, 7)
    bench.clock.pass_by()
    bench.take(0, 8)
    bench.ledger.release(0, old, missing=True)
    assert bench.ledger.lease(0, 9) == "wait"
    assert bench.ledger.take_missing() == []


def test_partitions_whose_rows_are_missing_are_told_once():
    bench = Bench(3, 3, 3)
    for worker in (2, 0):
        bench.ledger.release(worker, bench.take(worker), missing=True)
    bench.ledger.release(1, bench.take(1))
    assert bench.ledger.take_missing() == [2, 0]
    assert bench.ledger.take_missing() == []


@pytest.mark.parametrize(
    "call",
    [
        lambda bench, lease: bench.ledger.lease(0, 7),
        lambda bench, lease: bench.told(0, lease),
        lambda bench, lease: bench.push(0, lease, 2),
        lambda bench, lease: bench.push(0, lease, 1),
        lambda bench, lease: bench.ledger.evaluated(0, lease, 0, ()),
        lambda bench, lease: bench.ledger.finish(0, lease),
    ],
    ids=["lease", "directive", "push", "a push again", "evaluated", "finish"],
)
@pytest.mark.parametrize("how", ["ran out", "in doubt"])
def test_an_attempt_that_was_replaced_is_refused_everywhere(call, how):
    bench = Bench(3)
    lease = bench.take(0, 7)
    bench.push(0, lease, 1)
    if how == "ran out":
        bench.clock.pass_by()
    else:
        bench.ledger.doubt(0, lease)
    new = bench.take(0, 8)
    words = refused(LEASE_LOST, call, bench, lease)
    assert "the lease of worker 0 was taken over by another attempt" in words
    assert bench.ledger.lease(0, 8).sequence == 1
    assert bench.push(0, new, 2)


def test_an_attempt_that_was_replaced_stays_refused_when_its_successor_is_gone_too():
    bench = Bench(3)
    bench.take(0, 7)
    bench.clock.pass_by()
    bench.ledger.release(0, bench.take(0, 8))
    refused(LEASE_LOST, bench.ledger.lease, 0, 7)
    assert bench.take(0, 9)


def test_who_comes_when_a_partition_is_done_is_told_so():
    bench = Bench(3)
    lease = bench.take(0, 7)
    bench.ledger.finish(0, lease)
    assert bench.ledger.lease(0, 8) == "done"
    assert bench.ledger.lease(0, 7) == "done"


def test_finishing_twice_is_as_good_as_once():
    bench = Bench(3)
    lease = bench.take(0)
    bench.ledger.finish(0, lease)
    bench.ledger.finish(0, lease)
    refused(LEASE_LOST, bench.ledger.finish, 0, lease + 1)


def test_who_has_finished_cannot_go_on():
    bench = Bench(3)
    lease = bench.take(0)
    bench.ledger.finish(0, lease)
    refused(LEASE_LOST, bench.told, 0, lease)
    refused(LEASE_LOST, bench.push, 0, lease, 1)
    refused(LEASE_LOST, bench.ledger.evaluated, 0, lease, 0, ())


@pytest.mark.parametrize("call", ["lease", "directive", "finish", "release"])
def test_a_worker_that_is_not_there_is_refused(call):
    words = refused("unknown", getattr(Bench(3).ledger, call), 5, 1)
    assert "there is no worker 5" in words


def test_a_partition_without_batches_is_done_from_the_beginning():
    assert Bench(3, 0).ledger.lease(1, 7) == "done"


# Pushes


def test_a_new_attempt_is_told_how_far_the_partition_came():
    bench = Bench(3)
    lease = bench.take(0, 7)
    bench.push(0, lease, 1, epoch=0, batch=2, steps=2, metrics=arrays(1, 2))
    bench.push(0, lease, 2, epoch=0, batch=3, steps=1, metrics=arrays(3, 4), ended=True)
    between = bench.ledger.lease(0, 7)
    assert (between.sequence, between.epoch, between.batch, between.steps, between.metrics) == (2, 1, 0, 3, ())
    bench.push(0, lease, 3, epoch=1, batch=2, steps=2, metrics=arrays(5, 6))
    bench.clock.pass_by()
    standing = bench.ledger.lease(0, 8)
    assert standing.lease > lease
    assert (standing.sequence, standing.epoch, standing.batch, standing.steps) == (3, 1, 2, 5)
    assert standing.metrics == arrays(5, 6)


def test_a_push_that_comes_again_is_counted_and_not_folded():
    bench = Bench(3)
    lease = bench.take(0)
    assert [bench.push(0, lease, sequence) for sequence in (1, 1, 2, 1, 2, 3)] == [True, False, True, False, False, True]
    assert bench.ledger.duplicates == 3
    assert bench.ledger.rows == 3 * 4
    assert bench.ledger.steps == {0: 3}


def test_a_push_before_which_one_is_missing_is_refused():
    bench = Bench(3)
    lease = bench.take(0)
    bench.push(0, lease, 1)
    assert "worker 0 pushed 3 where 2 was due" in refused("out of turn", bench.push, 0, lease, 3)
    assert bench.push(0, lease, 2)


def test_a_push_whose_fold_failed_may_come_again():
    bench = Bench(3)
    lease = bench.take(0)
    with suppress(ZeroDivisionError), bench.ledger.pushing(0, lease, 1) as new:
        assert new
        raise ZeroDivisionError
    assert bench.push(0, lease, 1)
    assert bench.ledger.duplicates == 0


def aside(work):
    """Run in a thread; its result comes as the only item."""
    done = []
    thread = threading.Thread(target=lambda: done.append(work()))
    thread.start()
    return thread, done


def test_a_takeover_waits_for_the_push_that_is_being_folded():
    bench = Bench(3)
    lease = bench.take(0, 7)
    with bench.ledger.pushing(0, lease, 1):
        bench.clock.pass_by(2 * LEASE_SECONDS)
        thread, standings = aside(lambda: bench.ledger.lease(0, 8))
        thread.join(0.1)
        assert thread.is_alive()
        bench.ledger.pushed(0, epoch=0, batch=2, steps=2, rows=8, metrics=(), ended=None)
    thread.join(120)
    assert (standings[0].sequence, standings[0].batch) == (1, 2)
    refused(LEASE_LOST, bench.push, 0, lease, 2)


@pytest.mark.parametrize("call", ["finish", "release"])
def test_no_partition_ends_while_its_push_is_being_folded(call):
    bench = Bench(3)
    lease = bench.take(0)
    with bench.ledger.pushing(0, lease, 1):
        thread, _ = aside(lambda: getattr(bench.ledger, call)(0, lease))
        thread.join(0.1)
        assert thread.is_alive()
        bench.ledger.pushed(0, epoch=0, batch=1, steps=1, rows=4, metrics=(), ended=None)
    thread.join(120)
    assert bench.ledger.steps == {0: 1}


def test_the_same_push_at_the_same_time_is_folded_once():
    bench = Bench(3)
    lease = bench.take(0)
    with bench.ledger.pushing(0, lease, 1) as new:
        assert new
        thread, again = aside(lambda: bench.push(0, lease, 1))
        thread.join(0.1)
        bench.ledger.pushed(0, epoch=0, batch=1, steps=1, rows=4, metrics=(), ended=None)
    thread.join(120)
    assert again == [False]
    assert bench.ledger.steps == {0: 1}


def test_partitions_do_not_wait_for_each_others_folds():
    bench = Bench(3, 3)
    leases = [bench.take(worker) for worker in (0, 1)]
    with bench.ledger.pushing(0, leases[0], 1):
        assert bench.push(1, leases[1], 1)
        assert bench.told(1, leases[1]) == Directive()


def test_renewing_does_not_wait_for_a_apply():
    bench = Bench(3)
    lease = bench.take(0)
    with bench.ledger.pushing(0, lease, 1):
        bench.clock.pass_by(LEASE_SECONDS - 1)
        bench.told(0, lease)
        assert bench.ledger._partitions[0].lease.expires == bench.clock.now + LEASE_SECONDS


def test_rows_and_steps_of_all_that_was_folded():
    bench = Bench(4, 0, 2)
    for worker, pushes in {0: 3, 2: 1}.items():
        lease = bench.take(worker)
        for sequence in range(1, pushes + 1):
            bench.push(worker, lease, sequence, steps=2, rows=10)
    assert bench.ledger.rows == 40
    assert bench.ledger.steps == {0: 6, 2: 2}


def test_how_much_of_an_epoch_is_behind():
    bench = Bench(4, 0, 12)
    assert bench.ledger.progress(0) == 0
    one, two = bench.take(0), bench.take(2)
    bench.push(0, one, 1, batch=2)
    bench.push(2, two, 1, batch=6)
    assert bench.ledger.progress(0) == 0.5
    bench.push(0, one, 2, batch=4, ended=True)
    assert bench.ledger.progress(0) == 10 / 16
    assert bench.ledger.progress(1) == 0
    bench.push(0, one, 3, epoch=1, batch=4)
    assert bench.ledger.progress(1) == 0.25
    bench.push(2, two, 2, batch=12, ended=True)
    assert bench.ledger.progress(0) == 1


def test_nothing_is_planned_at_all():
    ledger = Bench(0).ledger
    assert (ledger.progress(0), ledger.rows, ledger.steps) == (0, 0, {})


# Epochs


def test_an_epoch_is_over_when_all_have_reported_it():
    bench = Bench(3, 2)
    one, two = bench.take(1), bench.take(0)
    bench.end(1, one, 0)
    assert bench.over() == []
    bench.push(0, two, 1, steps=2, rows=7, batch=2)
    bench.push(0, two, 2, steps=1, rows=2, batch=3, metrics=arrays(5), ended=True)
    (end,) = bench.over()
    assert (end.epoch, end.held, end.validation) == (0, "weights of 0", ())
    first, second = end.reports
    assert (first.worker, first.epoch, first.rows, first.steps) == (0, 0, 9, 3)
    assert (second.worker, second.epoch, second.rows, second.steps) == (1, 0, 4, 1)
    assert (first.seconds, first.learning_rate, first.metrics, first.logs) == (1.5, 0.25, arrays(5), {"loss": 0.0})


def test_epochs_are_over_in_their_order():
    bench = Bench(1, 1, epochs=range(3))
    one, two = bench.take(0), bench.take(1)
    for epoch in range(3):
        bench.end(0, one, epoch)
    assert bench.over() == []
    bench.end(1, two, 0)
    assert [end.epoch for end in bench.over()] == [0]
    for epoch in (1, 2):
        bench.end(1, two, epoch)
    assert [end.epoch for end in bench.over()] == [1, 2]
    assert bench.noted == [0, 1, 2]


def test_a_partition_that_never_started_holds_epochs_up():
    bench = Bench(1, 1)
    bench.end(0, bench.take(0), 0)
    assert bench.over() == []


def test_a_partition_without_batches_does_not_hold_epochs_up():
    bench = Bench(0, 1, PartitionPlan(0, validates=True), validates=lambda epoch: True)
    bench.end(1, bench.take(1), 0)
    (end,) = bench.over()
    assert [report.worker for report in end.reports] == [1]


def test_a_report_counts_the_rows_of_all_attempts():
    bench = Bench(4)
    bench.push(0, bench.take(0, 7), 1, batch=3, steps=3, rows=12)
    bench.clock.pass_by()
    lease = bench.take(0, 8)
    bench.push(0, lease, 2, batch=4, steps=1, rows=2, ended=True)
    bench.push(0, lease, 3, epoch=1, batch=4, steps=4, rows=14, ended=True)
    first, second = bench.over()
    assert (first.reports[0].rows, first.reports[0].steps) == (14, 4)
    assert (second.reports[0].rows, second.reports[0].steps) == (14, 4)


def test_a_worker_that_left_early_does_not_hold_epochs_up():
    bench = Bench(1, 1, epochs=range(3))
    one, two = bench.take(0), bench.take(1)
    bench.end(0, one, 0)
    bench.end(1, two, 0)
    bench.end(1, two, 1)
    assert len(bench.over()) == 1
    bench.ledger.finish(0, one)
    (end,) = bench.over()
    assert [report.worker for report in end.reports] == [1]
    bench.end(1, two, 2)
    assert [end.epoch for end in bench.over()] == [2]


def test_what_a_worker_reported_before_it_left_counts():
    bench = Bench(1, 1)
    one, two = bench.take(0), bench.take(1)
    bench.end(0, one, 0)
    bench.ledger.finish(0, one)
    bench.end(1, two, 0)
    (end,) = bench.over()
    assert [report.worker for report in end.reports] == [0, 1]


def test_an_epoch_that_nobody_reported_is_not_over():
    bench = Bench(1, 1)
    for worker in (0, 1):
        bench.ledger.finish(worker, bench.take(worker))
    assert bench.over() == []


def test_epochs_go_on_from_the_first_that_was_asked_for():
    bench = Bench(1, epochs=range(5, 7))
    lease = bench.take(0)
    bench.end(0, lease, 5, sequence=1)
    bench.end(0, lease, 6, sequence=2)
    assert [end.epoch for end in bench.over()] == [5, 6]


def test_waiting_ends_with_an_epoch():
    bench = Bench(1)
    lease = bench.take(0)
    thread, found = aside(lambda: bench.ledger.wait(300))
    bench.end(0, lease, 0)
    thread.join(120)
    assert found[0].epoch == 0


@pytest.mark.parametrize(
    "end",
    [
        lambda bench, lease: bench.ledger.wake(),
        lambda bench, lease: bench.ledger.stop(),
        lambda bench, lease: bench.ledger.release(0, lease, missing=True),
    ],
    ids=["wake", "stop", "release"],
)
def test_waiting_ends_early(end):
    bench = Bench(1)
    lease = bench.take(0)
    waiting, found = aside(lambda: bench.ledger.wait(300))
    while not bench.ledger._lock._waiters:
        waiting.join(0.001)
    end(bench, lease)
    waiting.join(120)
    assert found == [None]


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


def test_an_epoch_is_over_when_all_that_validate_have_reported():
    bench, leases = trained(VALIDATING, PartitionPlan(1), VALIDATING)
    assert [bench.told(worker, lease).evaluate for worker, lease in enumerate(leases)] == [(0,), (), (0,)]
    bench.ledger.evaluated(2, leases[2], 0, arrays(7))
    assert bench.over() == []
    assert bench.told(2, leases[2]).evaluate == ()
    assert bench.ledger.held(0) == "weights of 0"
    bench.ledger.evaluated(0, leases[0], 0, arrays(5))
    (end,) = bench.over()
    assert end.validation == (arrays(5), arrays(7))
    assert end.held == "weights of 0"
    assert [report.worker for report in end.reports] == [0, 1, 2]


def test_nobody_evaluates_before_all_have_reported():
    bench = Bench(VALIDATING, 1, validates=always)
    one, two = bench.take(0), bench.take(1)
    bench.end(0, one, 0)
    assert bench.told(0, one).evaluate == ()
    bench.end(1, two, 0)
    assert bench.told(0, one).evaluate == (0,)


def test_the_weights_of_an_epoch_are_gone_when_it_is_over():
    bench, (lease,) = trained(VALIDATING)
    bench.ledger.evaluated(0, lease, 0, arrays(1))
    assert "epoch 0 is not being evaluated" in refused("gone", bench.ledger.held, 0)
    refused("gone", bench.ledger.held, 1)


def test_evaluating_twice_is_as_good_as_once():
    bench, leases = trained(VALIDATING, VALIDATING)
    bench.ledger.evaluated(0, leases[0], 0, arrays(1))
    bench.ledger.evaluated(0, leases[0], 0, arrays(9))
    assert bench.over() == []
    bench.ledger.evaluated(1, leases[1], 0, arrays(2))
    bench.ledger.evaluated(1, leases[1], 0, arrays(9))
    (end,) = bench.over()
    assert end.validation == (arrays(1), arrays(2))


def test_who_had_no_rows_after_all_is_left_out():
    bench, leases = trained(VALIDATING, VALIDATING)
    bench.ledger.evaluated(0, leases[0], 0, ())
    bench.ledger.evaluated(1, leases[1], 0, arrays(2))
    (end,) = bench.over()
    assert end.validation == (arrays(2),)


def test_who_leaves_is_not_waited_for():
    bench, leases = trained(VALIDATING, VALIDATING)
    bench.ledger.evaluated(0, leases[0], 0, arrays(5))
    bench.ledger.finish(1, leases[1])
    (end,) = bench.over()
    assert end.validation == (arrays(5),)


def test_who_left_before_the_epoch_was_over_is_not_asked():
    bench = Bench(VALIDATING, VALIDATING, epochs=range(1), validates=always)
    one, two = bench.take(0), bench.take(1)
    bench.end(0, one, 0)
    bench.ledger.finish(0, one)
    bench.end(1, two, 0)
    assert bench.over() == []
    bench.ledger.evaluated(1, two, 0, arrays(5))
    (end,) = bench.over()
    assert end.validation == (arrays(5),)
    assert [report.worker for report in end.reports] == [0, 1]


def test_an_epoch_is_over_when_all_that_validate_have_left():
    bench, leases = trained(VALIDATING, 1)
    bench.ledger.finish(0, leases[0])
    (end,) = bench.over()
    assert end.validation == ()


def test_a_new_attempt_evaluates_what_the_old_one_did_not():
    bench, (lease,) = trained(VALIDATING)
    bench.clock.pass_by()
    new = bench.take(0, 999)
    refused(LEASE_LOST, bench.ledger.evaluated, 0, lease, 0, arrays(1))
    assert bench.told(0, new).evaluate == (0,)
    bench.ledger.evaluated(0, new, 0, arrays(2))
    assert bench.over()[0].validation == (arrays(2),)


def test_only_some_epochs_are_validated():
    bench = Bench(VALIDATING, epochs=range(4), validates=lambda epoch: epoch % 2 == 1)
    lease = bench.take(0)
    for epoch in range(4):
        bench.end(0, lease, epoch)
    assert bench.told(0, lease).evaluate == (1, 3)
    assert [end.epoch for end in bench.over()] == [0]
    bench.ledger.evaluated(0, lease, 3, arrays(3))
    assert bench.over() == []
    bench.ledger.evaluated(0, lease, 1, arrays(1))
    assert [(end.epoch, end.validation) for end in bench.over()] == [(1, (arrays(1),)), (2, ()), (3, (arrays(3),))]


def test_where_nobody_can_validate_nobody_is_waited_for():
    bench, _ = trained(1, 1)
    assert len(bench.over()) == 1


def test_what_nobody_will_wait_for_is_handed_over_in_the_end():
    bench = Bench(VALIDATING, epochs=range(3), validates=lambda epoch: epoch > 0)
    lease = bench.take(0)
    for epoch in range(3):
        bench.end(0, lease, epoch)
    assert [end.held for end in bench.ledger.undelivered()] == ["weights of 0", "weights of 1", "weights of 2"]


# Staying to validate what is to come


def test_who_has_finished_training_stays_while_epochs_are_to_come():
    bench = Bench(VALIDATING, 2, epochs=range(2), validates=always)
    one, two = bench.take(0), bench.take(1)
    for epoch in range(2):
        bench.end(0, one, epoch)
    assert bench.told(0, one).stay
    assert not bench.told(1, two).stay
    bench.end(1, two, 0)
    bench.ledger.evaluated(0, one, 0, arrays(0))
    assert bench.told(0, one).stay
    bench.end(1, two, 1)
    assert bench.told(0, one) == Directive(stay=True, evaluate=(1,))
    bench.ledger.evaluated(0, one, 1, arrays(1))
    assert bench.told(0, one) == Directive()
    assert not bench.told(1, two).stay


def test_who_trains_is_not_told_to_stay():
    bench = Bench(VALIDATING, 1, epochs=range(2), validates=always)
    lease = bench.take(0)
    bench.take(1)
    assert not bench.told(0, lease).stay


@pytest.mark.parametrize(
    ("plan", "validates"),
    [(PartitionPlan(1), always), (VALIDATING, lambda epoch: False), (VALIDATING, lambda epoch: epoch == 0)],
)
def test_who_has_nothing_to_validate_does_not_stay(plan, validates):
    bench = Bench(plan, 1, epochs=range(2), validates=validates)
    one, two = bench.take(0), bench.take(1)
    for epoch in range(2):
        bench.end(0, one, epoch)
    bench.end(1, two, 0)
    bench.ledger.evaluated(0, one, 0, arrays(1))
    assert not bench.told(0, one).stay


@pytest.mark.parametrize("why", ["never started", "ran out", "in doubt", "given up"])
def test_nobody_stays_where_another_partition_needs_its_slot(why):
    bench = Bench(VALIDATING, 1, epochs=range(1), validates=always)
    one = bench.take(0)
    bench.end(0, one, 0)
    if why != "never started":
        two = bench.take(1)
        assert bench.told(0, one).stay
        if why == "ran out":
            bench.clock.pass_by()
        else:
            getattr(bench.ledger, "doubt" if why == "in doubt" else "release")(1, two)
    if why in {"ran out", "in doubt"}:  # its next attempt may be on its way to the slot that it had
        assert bench.told(0, one).stay
        bench.clock.pass_by()
    assert not bench.told(0, one).stay
    bench.take(1, 999)
    assert bench.told(0, one).stay


def test_what_there_is_to_evaluate_is_evaluated_even_where_a_slot_is_needed():
    bench, leases = trained(VALIDATING, VALIDATING)
    bench.ledger.doubt(1, leases[1])
    assert bench.told(0, leases[0]) == Directive(stay=True, evaluate=(0,))


def test_nobody_stays_for_those_that_have_left():
    bench = Bench(VALIDATING, 1, 0, epochs=range(1), validates=always)
    one, two = bench.take(0), bench.take(1)
    bench.end(1, two, 0)
    bench.ledger.finish(1, two)
    bench.end(0, one, 0)
    bench.ledger.evaluated(0, one, 0, arrays(1))
    assert bench.told(0, one) == Directive()


# Waiting


def test_those_that_have_pushed_first_wait_until_enough_have():
    bench = Bench(9, 9, 9, 9, at_once=3)
    one, two, three = (bench.take(worker) for worker in range(3))
    assert not bench.told(0, one).wait
    bench.push(0, one, 1)
    assert bench.told(0, one).wait
    assert not bench.told(1, two).wait
    bench.push(1, two, 1)
    assert bench.told(0, one).wait
    assert bench.told(1, two).wait
    bench.push(2, three, 1)
    assert not any(bench.told(worker, lease).wait for worker, lease in enumerate((one, two, three)))


def test_they_do_not_wait_for_ever():
    bench = Bench(9, 9, at_once=2)
    bench.clock.pass_by(1000)
    lease = bench.take(0)
    bench.push(0, lease, 1)
    bench.clock.pass_by(START_SECONDS - 0.5)
    assert bench.told(0, lease).wait
    bench.clock.pass_by(0.5)
    assert not bench.told(0, lease).wait


def test_a_second_attempt_is_not_another_worker():
    bench = Bench(9, 9, at_once=2)
    bench.push(0, bench.take(0, 7), 1)
    bench.clock.pass_by()
    again = bench.take(0, 8)
    bench.push(0, again, 2)
    assert bench.told(0, again).wait


def test_one_that_pushed_and_died_is_not_waited_for():
    bench = Bench(9, 9, at_once=2)
    dead, alive = bench.take(1), bench.take(0)
    bench.push(1, dead, 1)
    bench.ledger.doubt(1, dead)
    bench.push(0, alive, 1)
    assert not bench.told(0, alive).wait


def test_one_that_is_lost_before_its_first_push_is_not_waited_for():
    bench = Bench(9, 9, at_once=2)
    lost, alive = bench.take(1), bench.take(0)
    bench.push(0, alive, 1)
    assert bench.told(0, alive).wait
    bench.ledger.doubt(1, lost)
    assert not bench.told(0, alive).wait


def test_one_that_has_left_is_not_waited_for():
    bench = Bench(9, 9, at_once=2)
    lease = bench.take(0)
    bench.push(0, lease, 1)
    bench.ledger.finish(1, bench.take(1))
    assert not bench.told(0, lease).wait


def test_nobody_waits_for_more_than_there_are():
    bench = Bench(9, 0, 0, at_once=3)
    lease = bench.take(0)
    bench.push(0, lease, 1)
    assert not bench.told(0, lease).wait


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_nobody_gets_further_ahead_of_the_slowest_than_the_bound(bound):
    bench = Bench(20, 20, 20, max_staleness=bound)
    one, two, three = (bench.take(worker) for worker in range(3))
    bench.push(2, three, 1)
    for sequence in range(1, bound + 1):
        assert not bench.told(0, one).wait
        bench.push(0, one, sequence)
    assert not bench.told(0, one).wait
    bench.push(0, one, bound + 1)
    assert bench.told(0, one).wait
    assert not bench.told(1, two).wait
    bench.push(1, two, 1)
    assert not bench.told(0, one).wait


def test_without_a_bound_nobody_waits():
    bench = Bench(99, 99, max_staleness=None)
    lease = bench.take(0)
    bench.take(1)
    for sequence in range(1, 51):
        bench.push(0, lease, sequence)
    assert not bench.told(0, lease).wait


def ahead():
    """Worker 0 is ahead of worker 1, and waits."""
    bench = Bench(2, 2, 2, epochs=range(1), max_staleness=0)
    one, two = bench.take(0), bench.take(1)
    bench.push(0, one, 1)
    assert bench.told(0, one).wait
    return bench, one, two


def test_a_dead_worker_holds_nobody_up():
    bench, one, _ = ahead()
    bench.clock.pass_by(LEASE_SECONDS - 1)
    assert bench.told(0, one).wait
    bench.clock.pass_by(1)
    assert not bench.told(0, one).wait


@pytest.mark.parametrize("how", ["doubt", "release", "finish"])
def test_one_that_is_gone_holds_nobody_up(how):
    bench, one, two = ahead()
    getattr(bench.ledger, how)(1, two)
    assert not bench.told(0, one).wait


def test_one_that_has_ended_its_last_epoch_holds_nobody_up():
    bench, one, two = ahead()
    bench.push(1, two, 1, batch=2, ended=True)
    bench.push(0, one, 2)
    assert not bench.told(0, one).wait


def test_one_that_comes_back_is_waited_for_again():
    bench, one, two = ahead()
    bench.ledger.doubt(1, two)
    assert not bench.told(0, one).wait
    bench.take(1, 999)
    assert bench.told(0, one).wait


def test_who_has_ended_the_last_epoch_does_not_wait():
    bench, one, _ = ahead()
    bench.push(0, one, 2, batch=2, ended=True)
    assert bench.told(0, one) == Directive()


def test_workers_wait_for_a_driver_that_lags_behind():
    bench = Bench(1, 5, epochs=range(20))
    lease = bench.take(0)
    other = bench.take(1)
    bench.ledger.finish(1, other)
    for epoch in range(BACKLOG):
        bench.end(0, lease, epoch)
    assert not bench.told(0, lease).wait
    bench.end(0, lease, BACKLOG)
    assert bench.told(0, lease).wait
    assert bench.ledger.wait(0).epoch == 0
    assert not bench.told(0, lease).wait


# What the driver sets


def test_stop_is_told_to_all_and_nobody_begins():
    bench = Bench(1, 1, 1, at_once=3)
    one, two = bench.take(0), bench.take(1)
    bench.ledger.stop()
    assert bench.told(0, one) == bench.told(1, two) == Directive(stop=True)
    assert bench.ledger.lease(2, 7) == "done"


def test_no_epoch_is_over_after_a_stop():
    bench = Bench(1)
    lease = bench.take(0)
    bench.ledger.stop()
    bench.end(0, lease, 0)
    assert bench.over() == []
    assert bench.noted == []


def test_learning_rates_are_numbered_by_how_many_were_set():
    bench = Bench(1)
    lease = bench.take(0)
    assert bench.told(0, lease).learning_rate is None
    bench.ledger.set_learning_rate(0.5)
    assert bench.told(0, lease).learning_rate == (1, 0.5)
    bench.ledger.set_learning_rate(0.25)
    bench.ledger.set_learning_rate(0.25)
    assert bench.told(0, lease).learning_rate == (3, 0.25)


def test_an_attempt_that_begins_later_hears_of_the_learning_rate_that_was_set():
    bench = Bench(3)
    assert bench.ledger.lease(0, 7).learning_rate is None
    bench.ledger.set_learning_rate(0.5)
    bench.ledger.set_learning_rate(0.25)
    bench.clock.pass_by()
    assert bench.ledger.lease(0, 8).learning_rate == (2, 0.25)
