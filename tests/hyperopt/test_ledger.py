"""The assignment of trials to workers, and the end of a search, on a simulated clock."""

import random
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace

import pytest

from sparkkeras.errors import ConfigurationError
from sparkkeras.hyperopt.ledger import (
    ATTEMPTS,
    CONTINUE,
    PRUNE,
    STOP,
    UPLOAD_SECONDS,
    Limits,
    TrialLedger,
    Worker,
)
from sparkkeras.hyperopt.trials import FAILED, OK, PRUNED, RUNNING, STOPPED, Trial
from sparkkeras.rpc.leases import LEASE_LOST
from sparkkeras.rpc.transport import RefusedError

LEASE_SECONDS = 10.0


def suggested(number, trials=()):
    return Trial(number, {"x": number * 10}, chosen={"x": number})


class Clock:
    """A clock that a test advances."""

    now = 1000.0

    def advance(self, seconds=LEASE_SECONDS + 0.1):
        self.now += seconds


class Study:
    """A study in memory, which numbers trials and records its calls.

    Args:
        earlier: The trials of an earlier call.
        suggest: Makes a trial, or returns ``None``, given its number and all others.
        prune: Decides about a report, given the number of the trial, the epoch and the value.
    """

    def __init__(self, earlier, suggest, prune):
        self._earlier, self._suggest, self._prune = earlier, suggest, prune
        self.suggest_calls, self.reports = [], []

    def earlier(self):
        return list(self._earlier)

    def ask(self, trials):
        number = len(trials)
        self.suggest_calls.append(number)
        return self._suggest(number, trials)

    def report(self, *given):
        self.reports.append(given)
        return self._prune(*given)

    def tell(self, trial):
        pass


class Bench(TrialLedger):
    """A ledger with its clock, its study, and the trials that it saves, which takes no time."""

    def __init__(self, *, clock=None, earlier=(), suggest=suggested, prune=lambda *report: False, save=None, **limits):
        self.clock, self.ended = clock or Clock(), []
        self.source = Study(earlier, suggest, prune)
        limits = Limits(**({"lease_seconds": LEASE_SECONDS} | limits))
        super().__init__(self.source, limits, lambda: self.clock.now, save=save or self.save)

    def save(self, trial, model):
        self.ended.append(trial)
        self.saved(trial.number)

    def start(self, worker="w", task=0, attempt=0):
        """The number and the lease of the next trial."""
        assignment = self.ask(Worker(worker, task, attempt))
        assert assignment is not None, self.reason
        return assignment.number, assignment.lease

    def end(self, lease, value=None, status=OK, **fields):
        self.finish(lease, replace(self.extend_for_upload(lease), value=value, status=status, **fields))

    def run(self, *values):
        """Run trials with these values one after the other; ``None`` fails."""
        for value in values:
            _, lease = self.start()
            self.end(lease, value, FAILED if value is None else OK)

    def report_all(self, lease, *values):
        """Report the metric at the first epochs; returns the last reply."""
        return [self.report(lease, epoch, value) for epoch, value in enumerate(values, 1)][-1]

    def trial(self, number=0):
        """A running trial."""
        return next(trial for trial in self.running if trial.number == number)

    @property
    def numbers(self):
        return [trial.number for trial in self.finished]


def assert_lease_lost(call, *args):
    with pytest.raises(RefusedError) as caught:
        call(*args)
    assert caught.value.kind == LEASE_LOST


def finished(number, value=0.5, **fields):
    return Trial(number, {"x": number}, **({"status": OK, "value": value, "ended": 10.0 * (number + 1)} | fields))


# Assigning trials


def test_the_result_of_a_trial_is_kept_with_its_times():
    bench = Bench(max_evals=1)
    bench.clock.advance(5)
    _, lease = bench.start("host/1")
    bench.clock.advance(3)
    assert not bench.is_over
    bench.end(lease, 0.25, best_epoch=2, history={"loss": [1.0]})
    (trial,) = bench.finished
    assert (trial.value, trial.status, trial.best_epoch, trial.history) == (0.25, OK, 2, {"loss": [1.0]})
    assert (trial.seconds, trial.ended, trial.worker) == (3, 8, "host/1")
    assert bench.ended == [trial]
    assert bench.running == []
    assert (bench.is_over, bench.reason) == (True, "")
    assert bench.ask(Worker("w")) is None


# Leases


def test_a_worker_without_heartbeats_loses_its_trial_to_the_next_that_asks():
    bench = Bench(max_evals=1)
    _, old = bench.start("a")
    bench.clock.advance(100 * LEASE_SECONDS)
    assert bench.report_all(old, 0.1) == CONTINUE  # no other worker has asked meanwhile
    bench.clock.advance(LEASE_SECONDS - 0.1)
    assert bench.ask(Worker("b")) is None
    bench.clock.advance(0.2)
    number, new = bench.start("b")
    assert number == 0
    assert new != old
    (trial,) = bench.running
    assert (trial.worker, trial.attempts, trial.intermediate_values, trial.params) == ("b", 2, (), {"x": 0})
    assert len(bench.source.suggest_calls) == 1


@pytest.mark.parametrize(
    "heartbeat", [Bench.renew, lambda bench, lease: bench.report(lease, 1, 0.5), Bench.extend_for_upload]
)
def test_a_heartbeat_keeps_the_lease(heartbeat):
    bench = Bench(max_evals=1)
    _, lease = bench.start()
    for _ in range(3):
        bench.clock.advance(LEASE_SECONDS - 1)
        heartbeat(bench, lease)
        assert bench.ask(Worker("other")) is None


def test_an_upload_extends_the_lease_for_each_piece_until_the_next_heartbeat():
    bench = Bench(max_evals=1)
    _, lease = bench.start()
    for _ in range(2):
        bench.extend_for_upload(lease)
        bench.clock.advance(LEASE_SECONDS + UPLOAD_SECONDS - 1)
        assert bench.ask(Worker("other")) is None
        assert bench.is_uploading
    bench.clock.advance(2)
    assert not bench.is_uploading  # its worker is lost
    bench.renew(lease)
    assert not bench.is_uploading
    bench.clock.advance(LEASE_SECONDS)
    assert bench.start("other")[0] == 0


def test_a_slow_suggestion_does_not_expire_leases():
    def slow(number, trials):
        bench.clock.advance(10 * LEASE_SECONDS if number else 0)
        return suggested(number)

    bench = Bench(suggest=slow)
    bench.start("a")
    bench.clock.advance(LEASE_SECONDS - 1)
    assert [bench.start("b")[0] for _ in range(3)] == [1, 2, 3]
    bench.clock.advance(2)
    assert bench.start("b")[0] == 0


def test_calls_with_an_old_lease_are_rejected():
    bench = Bench(max_evals=1)
    _, old = bench.start("a")
    bench.clock.advance()
    _, new = bench.start("b")
    trial = bench.trial()
    for call, *given in (
        (bench.renew,),
        (bench.report, 1, 0.1),
        (bench.extend_for_upload,),
        (bench.release, "it crashed"),
        (bench.finish, replace(trial, value=0.1, status=OK)),
    ):
        assert_lease_lost(call, old, *given)
    assert not bench.is_done(old)
    bench.expire(old)
    assert bench.ask(Worker("c")) is None
    assert bench.running == [trial]
    bench.end(new, 0.7)
    assert [trial.value for trial in bench.ended] == [0.7]


def test_trials_of_a_closed_connection_are_assigned_again_immediately_before_new_ones():
    bench = Bench()
    (_, one), (_, two), (_, three) = (bench.start("a") for _ in range(3))
    for lease in (two, three, 12345):
        bench.expire(lease)
    assert [bench.start("b")[0] for _ in range(3)] == [1, 2, 3]
    assert bench.renew(one) == CONTINUE


def test_after_the_loss_of_all_workers_trials_continue_or_fail_without_attempts_left():
    bench = Bench(max_evals=2)
    for _ in range(ATTEMPTS - 1):
        bench.release(bench.start()[1], "its process was killed by SIGKILL")
    (number, _), (other, _) = bench.start(), bench.start()
    bench.clock.advance(2)
    bench.expire_all()
    (trial,) = bench.finished  # although no worker asks
    assert (trial.number, trial.status, trial.attempts, trial.seconds) == (number, FAILED, ATTEMPTS, 2)
    assert f"lost {ATTEMPTS} times" in trial.error
    assert bench.ended == [trial]
    assert [trial.number for trial in bench.running] == [other]
    assert bench.start()[0] == other


# Several attempts of one task


def test_a_copy_of_a_worker_waits_while_the_worker_has_a_trial():
    """Spark ends the other attempts of a task when one has finished, so the copy must not finish first."""
    bench = Bench(max_evals=1)
    copy = Worker("b", task=3, attempt=1)
    _, lease = bench.start("a", task=3)
    assert bench.ask(copy) is None
    assert bench.should_wait(copy)
    assert not bench.should_wait(Worker("c", task=4, attempt=1))
    assert not bench.should_wait(Worker("a", task=3))  # itself
    bench.stop("enough")
    assert bench.should_wait(copy)
    bench.end(lease, 0.5)
    assert not bench.should_wait(copy)


def test_a_trial_that_loses_too_many_workers_fails():
    bench = Bench(max_evals=2)
    for attempt in range(ATTEMPTS):
        number, lease = bench.start()
        assert (number, bench.running[0].attempts) == (0, attempt + 1)
        bench.release(lease, "its process was killed by SIGKILL")
    assert bench.start()[0] == 1
    (trial,) = bench.ended
    assert (trial.number, trial.status, trial.attempts, trial.value) == (0, FAILED, ATTEMPTS, None)
    assert "killed by SIGKILL" in trial.error


# Intermediate values and pruners


def test_a_repeated_report_counts_once():
    bench = Bench()
    _, lease = bench.start()
    bench.report_all(lease, 0.5, 0.4)
    assert bench.report(lease, 2, 0.4) == CONTINUE
    assert bench.report(lease, 1, 99.0) == CONTINUE
    assert bench.trial().intermediate_values == (0.5, 0.4)
    assert bench.source.reports == [(0, 1, 0.5), *[(0, 2, 0.4)] * 3]


def test_epochs_without_a_report_get_the_previous_value():
    """For example with ``validation_freq``; pruners compare trials epoch by epoch, and one of them may be a rung."""
    bench = Bench(prune=lambda number, epoch, value: epoch == 3)
    _, lease = bench.start()
    assert [bench.report(lease, epoch, epoch / 10) for epoch in (2, 4, 4)] == [CONTINUE, PRUNE, PRUNE]
    assert bench.source.reports[:4] == [(0, 1, 0.2), (0, 2, 0.2), (0, 3, 0.2), (0, 4, 0.4)]
    assert bench.trial().intermediate_values == (0.2, 0.2, 0.2, 0.4)


# The end of a search


def test_the_timeout_ends_running_trials_and_assigns_no_more():
    bench = Bench(timeout=60.0, prune=lambda *report: True)
    bench.clock.advance(1000)  # Spark may have no free slots for the workers yet
    bench.check_limits()
    _, lease = bench.start()
    bench.clock.advance(59)
    assert bench.renew(lease) == CONTINUE
    bench.clock.advance(1)
    assert bench.renew(lease) == bench.report_all(lease, 0.5) == STOP  # which takes precedence over the pruner
    bench.expire(lease)
    assert bench.ask(Worker("w")) is None  # lost trials are not assigned again
    assert "timeout=60" in bench.reason
    assert not bench.is_over
    bench.end(lease, 0.5, STOPPED)
    assert bench.is_over
    assert bench.failure is None


@pytest.mark.parametrize(("sign", "threshold", "value"), [(1.0, 0.3, 0.3), (-1.0, 0.3, 7), (1.0, 0.0, 0.0)])
def test_loss_threshold_ends_the_search(sign, threshold, value):
    bench = Bench(sign=sign, loss_threshold=threshold)
    bench.run(sign, None)
    assert not bench.is_over
    bench.run(value)
    assert bench.is_over
    assert f"loss_threshold={threshold:g}" in bench.reason


def test_max_failures_ends_the_search():
    bench = Bench(max_failures=2)
    bench.run(None, None, 0.5)
    bench.end(bench.start()[1], 0.5, PRUNED)
    assert bench.reason == ""
    bench.run(None)
    assert "max_failures=2" in bench.reason
    assert bench.is_over


def test_a_stop_function_is_called_again_for_earlier_trials():
    """It may keep a count, as hyperopt's no_progress_loss does."""
    seen = []

    def stop(trials):
        seen.append([trial.number for trial in trials])
        return len(seen) == 3

    bench = Bench(early_stop=stop, earlier=[finished(2), finished(0), finished(1, None, status=FAILED)])
    assert seen == [[0], [0, 1, 2]]
    bench.run(None, 0.4)
    assert seen == [[0], [0, 1, 2], [0, 1, 2, 3, 4]]
    assert "early_stop_fn" in bench.reason
    assert bench.failure is None


@pytest.mark.parametrize(
    ("function", "name", "error"),
    [("suggest", "algo=", ZeroDivisionError), ("prune", "pruner=", SystemExit), ("early_stop", "early_stop_fn", SystemExit)],
)
def test_a_function_of_the_user_that_raises_or_exits_ends_the_search_with_its_traceback(function, name, error):
    """They run in threads of the driver, which an exit would end silently."""

    def raising(*given):
        raise error("it broke")

    bench = Bench(**{function: raising})
    assignment = bench.ask(Worker("w"))
    if assignment is not None:
        reply = bench.report_all(assignment.lease, 1.0)
        assert reply == (STOP if function == "prune" else CONTINUE)
        bench.end(assignment.lease, 0.5)
    first, _, rest = str(bench.failure).partition("\n\n")
    assert isinstance(bench.failure, ConfigurationError)
    assert name in first
    assert f"{error.__name__}: it broke" in first
    assert rest.startswith("Traceback")
    assert bench.reason == f"ConfigurationError: {first}"
    assert bench.is_over


@pytest.mark.parametrize(
    ("limits", "value", "epoch"),
    [({"sign": 1.0}, 0.2, 2), ({"sign": -1.0}, 0.5, 1), ({"num_metrics": 2}, None, None)],  # others are not reported
)
def test_trials_that_run_at_the_end_have_their_best_reported_value(limits, value, epoch):
    bench = Bench(**limits)
    (_, one), _ = bench.start(), bench.start()
    bench.report_all(one, 0.5, 0.2, 0.3)
    bench.clock.advance(7)
    bench.stop("enough")
    bench.end_running()
    assert bench.is_over
    assert [(trial.status, trial.value, trial.best_epoch, trial.seconds) for trial in bench.finished] == [
        (STOPPED, value, epoch, 7),
        (STOPPED, None, None, 7),
    ]
    assert bench.ended == []  # a resumed search runs them again
    assert_lease_lost(bench.renew, one)


def test_trials_that_are_stopped_with_the_search_are_not_written():
    bench = Bench()
    (_, one), (_, two), (_, three) = bench.start(), bench.start(), bench.start()
    bench.report_all(one, 0.2)
    bench.stop("enough")
    bench.end(one, 0.5, STOPPED, best_epoch=4)
    bench.end(two, 0.4)
    bench.end(three, 0.3, PRUNED)
    assert [(trial.number, trial.status) for trial in bench.ended] == [(1, OK), (2, PRUNED)]
    stopped = bench.finished[0]
    assert (stopped.value, stopped.best_epoch) == (0.5, 4)  # what its worker reported


# Failing suggestions and saves


def test_a_sparkkeras_error_of_the_suggest_function_is_not_wrapped():
    error = ConfigurationError("there is an object in the space that cannot be sent")

    def suggest(number, trials):
        raise error

    bench = Bench(suggest=suggest)
    assert bench.ask(Worker("w")) is None
    assert bench.failure is error


def test_a_search_without_further_suggestions_ends_after_its_running_trials():
    bench = Bench(suggest=lambda number, trials: suggested(number) if number < 1 else None)
    _, lease = bench.start()
    assert bench.ask(Worker("w")) is None
    assert not bench.is_over
    bench.expire(lease)
    bench.end(bench.start()[1], 0.5)
    assert (bench.is_over, bench.reason) == (True, "")
    assert bench.ask(Worker("w")) is None
    assert len(bench.source.suggest_calls) == 2


def test_trials_are_not_saved_after_a_failure():
    bench = Bench()
    (_, one), (_, two) = bench.start(), bench.start()
    bench.end(one, 0.5)
    bench.fail(OSError("no space left"))
    bench.fail(OSError("a later one"))
    bench.end(two, 0.5)
    assert bench.reason == "OSError: no space left"
    assert str(bench.failure) == "no space left"
    assert [trial.number for trial in bench.ended] == [0]
    assert bench.numbers == [0, 1]


# Saving


def test_a_trial_counts_as_finished_when_it_is_saved():
    bench = Bench(save=lambda trial, model: None, loss_threshold=0.5)
    _, lease = bench.start("a")
    bench.end(lease, 0.5)
    assert (bench.is_saving, bench.numbers, bench.trial().status) == (True, [], RUNNING)
    assert bench.has_value()
    assert_lease_lost(bench.renew, lease)
    bench.expire_all()
    bench.saved(0)
    assert (bench.is_saving, bench.numbers, bench.running) == (False, [0], [])
    assert bench.is_over  # the threshold is reached


def test_a_worker_waits_for_a_new_trial_until_its_last_one_is_saved():
    bench = Bench(save=lambda trial, model: None, max_evals=3)
    one, other = Worker("a", 0), Worker("b", 1)
    bench.end(bench.ask(one).lease, 0.5)
    assert bench.ask(one) is None
    assert bench.should_wait(one)
    assert bench.ask(other).number == 1  # other workers do not wait
    bench.saved(0)
    bench.end(bench.ask(one).lease, 0.5)
    assert bench.ask(one) is None
    assert not bench.should_wait(one)  # it was the last trial of the search
    assert not bench.is_over


# Resuming


def test_a_resumed_search_adds_to_its_duration_and_has_the_whole_timeout():
    bench = Bench(timeout=60.0, earlier=[finished(0, ended=25.0), finished(1, ended=400.0)])
    bench.clock.advance(59)
    assert bench.seconds == 459
    bench.run(0.5)
    assert bench.finished[-1].ended == 459


@pytest.mark.parametrize(
    ("limits", "reason"),
    [({"loss_threshold": 0.5}, "loss_threshold"), ({"max_failures": 0}, "max_failures"), ({"max_evals": 2}, "")],
)
def test_a_finished_search_does_not_resume(limits, reason):
    bench = Bench(earlier=[finished(0), finished(1, None, status=FAILED)], **limits)
    assert bench.is_over
    assert reason in bench.reason
    assert bench.ask(Worker("w")) is None
    assert bench.source.suggest_calls == []


# Many threads


def test_every_trial_ends_exactly_once_whatever_workers_do():
    """Workers finish, crash, stop sending heartbeats, and use old leases, all concurrently."""
    ended, count = Counter(), 150

    def suggest(number, trials):
        time.sleep(0)  # let other threads run in between
        return suggested(number)

    def save(trial, model):
        time.sleep(0)
        ended.update([trial.number])
        bench.saved(trial.number)

    bench = Bench(suggest=suggest, save=save, max_evals=count)
    accepted, errors = [], []

    def finish(assignment):
        with suppress(RefusedError):
            bench.finish(assignment.lease, Trial(assignment.number, assignment.params, OK, 0.5))
            accepted.append(assignment.number)

    def work(seed):
        generator, old = random.Random(seed), []
        try:
            while not bench.is_over:
                assignment = bench.ask(Worker(f"w{seed}"))
                if assignment is None:
                    bench.clock.advance(1)
                    continue
                chance = generator.random()
                with suppress(RefusedError):
                    bench.report(assignment.lease, 1, generator.random())
                    if chance < 0.1:
                        bench.release(assignment.lease, "it crashed")
                    elif chance < 0.2:
                        bench.expire(assignment.lease)
                if chance > 0.3:
                    finish(assignment)
                old.append(assignment)
                finish(old.pop(generator.randrange(len(old))) if len(old) > 3 else assignment)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert not any(thread.is_alive() for thread in threads)
    assert ended == Counter(bench.numbers) == Counter(range(count))
    given_up = {trial.number for trial in bench.finished if trial.status == FAILED}
    assert Counter(accepted) == Counter(set(range(count)) - given_up)
    assert all(trial.attempts == ATTEMPTS for trial in bench.finished if trial.number in given_up)
