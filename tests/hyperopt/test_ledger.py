"""Who runs which trial, and when a search is over, on a clock that the test moves."""

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
    GO_ON,
    HANDOVER_SECONDS,
    LEASE_LOST,
    PRUNE,
    STOP,
    Limits,
    Suggested,
    TrialLedger,
    Worker,
)
from sparkkeras.hyperopt.trials import FAILED, OK, PRUNED, RUNNING, STOPPED, Trial
from sparkkeras.rpc.transport import RefusedError

LEASE_SECONDS = 10.0


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now

    def pass_by(self, seconds=LEASE_SECONDS + 0.1):
        self.now += seconds


class Bench:
    """A ledger, its clock, and what it was told to suggest and to note."""

    def __init__(self, *, before=(), suggest=None, on_end=None, **limits):
        self.clock, self.asked, self.ended = Clock(), [], []
        self._own = suggest
        self.ledger = TrialLedger(
            self.suggest,
            Limits(**({"lease_seconds": LEASE_SECONDS} | limits)),
            self.clock,
            before,
            on_end or self.ended.append,
        )

    def suggest(self, number, trials):
        self.asked.append((number, trials))
        return Suggested({"x": number}, {"x": number * 10}) if self._own is None else self._own(number, trials)

    def ask(self, worker="w", task=0, attempt=0):
        """The number and the lease of the next trial."""
        assignment = self.ledger.ask(Worker(worker, task, attempt))
        assert assignment is not None, self.ledger.reason
        return assignment.number, assignment.lease

    def finish(self, lease, value=None, status=OK, **told):
        self.ledger.finish(lease, replace(self.ledger.hand_over(lease), value=value, status=status, **told))

    def run(self, *values):
        """Trials that end one after the other; ``None`` fails."""
        for value in values:
            _, lease = self.ask()
            self.finish(lease, value, FAILED if value is None else OK)

    def report(self, lease, *losses):
        """The losses of the first epochs; what is said at last."""
        return [self.ledger.report(lease, epoch, loss) for epoch, loss in enumerate(losses, 1)][-1]

    def running(self, number=0):
        """A trial that is out."""
        return next(trial for trial in self.ledger.running if trial.number == number)

    @property
    def numbers(self):
        return [trial.number for trial in self.ledger.finished]


def refused(call, *args):
    with pytest.raises(RefusedError) as caught:
        call(*args)
    assert caught.value.kind == LEASE_LOST


def is_told(bench, what, name, error):
    """Whose code has ended the search, and where."""
    failure = bench.ledger.failure
    assert isinstance(failure, ConfigurationError)
    first, _, rest = str(failure).partition("\n\n")
    assert all(part in first for part in (what, name, f"failed: {error}"))
    assert rest.startswith("Traceback")
    assert bench.ledger.reason == f"ConfigurationError: {first}"


def done(number, value=0.5, **told):
    return Trial(number, {"x": number}, **({"status": OK, "value": value, "ended": 10.0 * (number + 1)} | told))


# Giving trials out


def test_trials_are_numbered_as_they_are_suggested():
    bench = Bench(max_evals=3)
    assert [bench.ledger.ask(Worker(f"w{n}")) for n in range(4)][3] is None
    assert [(trial.number, trial.params, trial.chosen, trial.worker) for trial in bench.ledger.running] == [
        (n, {"x": n * 10}, {"x": n}, f"w{n}") for n in range(3)
    ]
    assert all(trial.status == RUNNING and trial.attempts == 1 for trial in bench.ledger.running)


def test_what_is_assigned_is_what_was_suggested():
    assignment = Bench().ledger.ask(Worker("w"))
    assert (assignment.number, assignment.params) == (0, {"x": 0})


def test_a_suggestion_is_made_from_all_other_trials():
    bench = Bench()
    (_, first), (_, second), _ = bench.ask(), bench.ask(), bench.ask()
    bench.finish(second, 0.2)
    bench.finish(first, None, FAILED)
    bench.ask()
    number, trials = bench.asked[-1]
    assert number == 3
    assert [(trial.number, trial.status, trial.value) for trial in trials] == [
        (0, FAILED, None),
        (1, OK, 0.2),
        (2, RUNNING, None),
    ]


def test_what_came_of_a_trial_is_kept_with_its_times():
    bench = Bench()
    bench.clock.pass_by(5)
    _, lease = bench.ask("host/1")
    bench.clock.pass_by(3)
    bench.finish(lease, 0.25, best_epoch=2, history={"loss": [1.0]})
    (trial,) = bench.ledger.finished
    assert (trial.value, trial.status, trial.best_epoch, trial.history) == (0.25, OK, 2, {"loss": [1.0]})
    assert (trial.seconds, trial.ended, trial.worker) == (3, 8, "host/1")
    assert bench.ended == [trial]
    assert bench.ledger.running == []


def test_trials_that_have_ended_come_in_that_order():
    bench = Bench()
    leases = [bench.ask()[1] for _ in range(3)]
    for place in (2, 0, 1):
        bench.clock.pass_by(1)
        bench.finish(leases[place], 0.5)
    assert bench.numbers == [2, 0, 1]


def test_a_search_is_over_when_all_trials_have_ended():
    bench = Bench(max_evals=2)
    (_, one), (_, two) = bench.ask(), bench.ask()
    bench.finish(one, 0.1)
    assert not bench.ledger.over
    bench.finish(two, 0.1)
    assert bench.ledger.over
    assert bench.ledger.reason == ""
    assert bench.ledger.ask(Worker("w")) is None


def test_without_a_bound_there_is_always_another():
    bench = Bench(max_evals=None)
    bench.run(*[0.5] * 30)
    assert not bench.ledger.over


def test_failed_trials_count():
    bench = Bench(max_evals=3)
    bench.run(None, 0.5, None)
    assert bench.ledger.over
    assert bench.ledger.ask(Worker("w")) is None


# Leases


def test_a_worker_that_says_nothing_loses_its_trial_to_the_next_that_asks():
    bench = Bench(max_evals=1)
    _, old = bench.ask("a")
    bench.clock.pass_by(LEASE_SECONDS - 0.1)
    assert bench.ledger.ask(Worker("b")) is None
    bench.clock.pass_by(0.2)
    number, new = bench.ask("b")
    assert number == 0
    assert new != old
    (trial,) = bench.ledger.running
    assert (trial.worker, trial.attempts) == ("b", 2)
    assert len(bench.asked) == 1


@pytest.mark.parametrize("sign_of_life", ["renew", "report", "hand_over"])
def test_a_sign_of_life_keeps_the_lease(sign_of_life):
    bench = Bench(max_evals=1)
    _, lease = bench.ask()
    for _ in range(5):
        bench.clock.pass_by(LEASE_SECONDS - 1)
        getattr(bench.ledger, sign_of_life)(*((lease, 1, 0.5) if sign_of_life == "report" else (lease,)))
        assert bench.ledger.ask(Worker("other")) is None


def test_a_slow_worker_loses_nothing_as_long_as_nobody_asks():
    bench = Bench(max_evals=1)
    _, lease = bench.ask()
    bench.clock.pass_by(100 * LEASE_SECONDS)
    bench.ledger.doubt([lease])
    assert bench.ledger.renew(lease) == GO_ON
    assert bench.ledger.ask(Worker("other")) is None
    bench.finish(lease, 0.5)
    assert bench.numbers == [0]


def test_who_hands_a_model_over_has_longer_for_each_piece():
    bench = Bench(max_evals=1)
    _, lease = bench.ask()
    for _ in range(3):
        assert bench.ledger.hand_over(lease) == bench.running()
        bench.clock.pass_by(LEASE_SECONDS + HANDOVER_SECONDS - 1)
        assert bench.ledger.ask(Worker("other")) is None
    bench.ledger.renew(lease)
    bench.clock.pass_by(LEASE_SECONDS + HANDOVER_SECONDS)
    assert bench.ask("other")[0] == 0
    refused(bench.ledger.hand_over, lease)


def test_a_slow_suggestion_is_nobodys_silence():
    def slow(number, trials):
        bench.clock.pass_by(10 * LEASE_SECONDS if number else 0)
        return Suggested({}, number)

    bench = Bench(suggest=slow)
    _, lease = bench.ask("a")
    bench.clock.pass_by(LEASE_SECONDS - 1)
    assert [bench.ask("b")[0] for _ in range(3)] == [1, 2, 3]
    assert bench.running().worker == "a"
    bench.clock.pass_by(2)
    assert bench.ask("b")[0] == 0
    refused(bench.ledger.renew, lease)


@pytest.mark.parametrize("what", ["on_end", "early_stop"])
def test_what_takes_long_at_the_end_of_a_trial_is_nobodys_silence(what):
    bench = Bench(**{what: lambda told: bench.clock.pass_by(10 * LEASE_SECONDS)})
    (_, slow), (_, quick) = bench.ask("a"), bench.ask("b")
    bench.finish(quick, 0.5)
    assert bench.ask("b")[0] == 2
    assert bench.ledger.renew(slow) == GO_ON


def test_a_suggestion_that_raises_after_long_is_nobodys_silence():
    def slow(number, trials):
        if number:
            bench.clock.pass_by(10 * LEASE_SECONDS)
            raise ZeroDivisionError
        return Suggested({}, number)

    bench = Bench(suggest=slow)
    _, lease = bench.ask("a")
    assert bench.ledger.ask(Worker("b")) is None
    bench.clock.pass_by(LEASE_SECONDS - 1)
    assert bench.ledger._lost() is None
    assert bench.ledger.renew(lease) == STOP


def test_whoever_comes_with_an_old_lease_is_refused():
    bench = Bench(max_evals=1)
    _, old = bench.ask("a")
    bench.clock.pass_by()
    _, new = bench.ask("b")
    trial = bench.running()
    refused(bench.ledger.renew, old)
    refused(bench.ledger.report, old, 1, 0.1)
    refused(bench.ledger.hand_over, old)
    refused(bench.ledger.lose, old, "it crashed")
    refused(bench.ledger.finish, old, replace(trial, value=0.1, status=OK))
    assert not bench.ledger.is_done(old)
    bench.ledger.doubt([old])
    assert bench.ledger.ask(Worker("c")) is None
    assert bench.ledger.running == [trial]
    assert bench.ended == []
    bench.finish(new, 0.7)
    assert [trial.value for trial in bench.ledger.finished] == [0.7]


def test_a_last_word_that_comes_twice_is_known():
    bench = Bench()
    _, lease = bench.ask()
    assert not bench.ledger.is_done(lease)
    trial = replace(bench.running(), value=0.5, status=OK)
    bench.ledger.finish(lease, trial)
    assert bench.ledger.is_done(lease)
    refused(bench.ledger.finish, lease, trial)
    assert len(bench.ended) == 1


def test_leases_that_never_were_are_refused():
    refused(Bench().ledger.renew, 999)
    refused(Bench().ledger.finish, 0, done(0))


def test_a_connection_that_ended_gives_its_trials_back_at_once():
    bench = Bench(max_evals=3)
    (_, one), (_, two), (_, three) = (bench.ask("a") for _ in range(3))
    bench.ledger.doubt([two, three, 12345])
    assert bench.ask("b")[0] == 1
    assert bench.ask("b")[0] == 2
    assert bench.ledger.ask(Worker("b")) is None
    assert bench.ledger.renew(one) == GO_ON


def test_where_there_are_no_workers_any_more_all_trials_are_given_out_again():
    bench = Bench(max_evals=2)
    bench.ask()
    bench.ask()
    bench.ledger.doubt_all()
    assert [bench.ask()[0], bench.ask()[0]] == [0, 1]


def test_where_there_are_no_workers_any_more_trials_that_were_lost_too_often_have_failed():
    bench = Bench(max_evals=2)
    _, spared = bench.ask()
    bench.finish(spared, 0.5)
    for _ in range(ATTEMPTS):
        assert not bench.ledger.over
        assert bench.ask()[0] == 1
        bench.clock.pass_by(2)
        bench.ledger.doubt_all()
    assert bench.ledger.over  # nobody has to ask for that
    trial = bench.ledger.finished[-1]
    assert (trial.number, trial.status, trial.attempts, trial.seconds) == (1, FAILED, ATTEMPTS, 2)
    assert f"lost {ATTEMPTS} times, at last since the process was killed" in trial.error
    assert bench.ended[-1] == trial


def test_where_there_are_no_workers_any_more_only_hopeless_trials_are_given_up():
    bench = Bench(max_evals=2)
    for _ in range(ATTEMPTS - 1):
        bench.ledger.lose(bench.ask()[1], "its process was killed by SIGKILL")
    (number, _), (other, _) = bench.ask(), bench.ask()
    bench.ledger.doubt_all()
    assert bench.numbers == [number]
    assert [trial.number for trial in bench.ledger.running] == [other]
    assert bench.ask()[0] == other


# Copies of workers


def test_a_copy_of_a_worker_waits_as_long_as_that_has_a_trial():
    """Spark ends the slower one of two attempts at a task, so the copy must not be done before."""
    bench = Bench(max_evals=2)
    copy, other = Worker("b", task=3, attempt=1), Worker("c", task=4, attempt=1)
    (_, one), (_, two) = bench.ask("a", task=3), bench.ask("d", task=5)
    assert bench.ledger.ask(copy) is None
    assert bench.ledger.shall_wait(copy)
    assert not bench.ledger.shall_wait(other)
    assert not bench.ledger.shall_wait(Worker("a", task=3))  # itself
    bench.ledger.stop("enough")
    assert bench.ledger.shall_wait(copy)
    bench.finish(one, 0.5)
    assert not bench.ledger.shall_wait(copy)
    bench.finish(two, 0.5)


def test_a_copy_takes_over_what_its_worker_lost():
    bench = Bench(max_evals=1)
    _, old = bench.ask("a", task=3)
    copy = Worker("b", task=3, attempt=1)
    assert bench.ledger.ask(copy) is None
    assert bench.ledger.shall_wait(copy)
    bench.ledger.doubt([old])
    assert not bench.ledger.shall_wait(copy)
    assert bench.ledger.ask(copy).number == 0
    assert bench.ledger.shall_wait(Worker("a", task=3))


def test_lost_trials_come_before_new_ones():
    bench = Bench()
    bench.ask()
    _, lease = bench.ask()
    bench.ledger.doubt([lease])
    assert bench.ask()[0] == 1
    assert bench.ask()[0] == 2


def test_a_trial_begins_anew_with_its_new_lease():
    bench = Bench()
    _, old = bench.ask()
    bench.report(old, 0.1)
    bench.clock.pass_by(4)
    bench.ledger.lose(old, "it crashed")
    _, new = bench.ask()
    assert new != old
    trial = bench.running()
    assert (trial.intermediate_values, trial.error, trial.params) == ((), "", {"x": 0})
    bench.clock.pass_by(2)
    bench.finish(new, 0.5)
    assert bench.ledger.finished[0].seconds == 2


def test_a_trial_that_ends_its_workers_has_failed():
    bench = Bench(max_evals=2)
    for attempt in range(ATTEMPTS):
        number, lease = bench.ask()
        assert (number, bench.ledger.running[0].attempts) == (0, attempt + 1)
        bench.ledger.lose(lease, "its process was killed by SIGKILL")
    assert bench.ask()[0] == 1
    (trial,) = bench.ledger.finished
    assert (trial.number, trial.status, trial.attempts, trial.value) == (0, FAILED, ATTEMPTS, None)
    assert trial.error == f"its worker was lost {ATTEMPTS} times, at last since its process was killed by SIGKILL"
    assert bench.ended == [trial]


def test_a_trial_whose_machine_went_away_says_so():
    bench = Bench(max_evals=1)
    for _ in range(ATTEMPTS):
        bench.ask()
        bench.clock.pass_by()
    assert bench.ledger.ask(Worker("w")) is None
    assert bench.ledger.over
    assert "or its machine went away" in bench.ledger.finished[0].error


def test_a_trial_that_was_given_up_took_as_long_as_its_last_attempt():
    bench = Bench(max_evals=1)
    for _ in range(ATTEMPTS):
        _, lease = bench.ask()
        bench.clock.pass_by(3)
        bench.ledger.lose(lease, "it crashed")
    bench.ledger.ask(Worker("w"))
    assert bench.ledger.finished[0].seconds == 3


def test_given_up_trials_are_failures_to_the_limits():
    bench = Bench(max_failures=0)
    for _ in range(ATTEMPTS):
        bench.ledger.lose(bench.ask()[1], "it crashed")
    assert bench.ledger.ask(Worker("w")) is None
    assert bench.ledger.reason == "more failed trials than max_failures=0"


# Losses and pruners


class Recorder:
    """A pruner that writes down what it is asked."""

    def __init__(self, says=False):
        self.says, self.asked = says, []

    def should_prune(self, losses, others):
        self.asked.append((tuple(losses), sorted(tuple(other) for other in others)))
        if isinstance(self.says, Exception):
            raise self.says
        return self.says


def test_a_pruner_sees_the_losses_of_all_others():
    pruner = Recorder()
    bench = Bench(pruner=pruner)
    (_, finished), (_, pruned), (silent, _), (number, mine) = (bench.ask() for _ in range(4))
    bench.report(finished, 1.0)
    bench.finish(finished, 1.0)
    bench.report(pruned, 2.0, 2.5)
    bench.finish(pruned, 2.0, PRUNED)
    assert bench.report(mine, 3.0, 4.0) == GO_ON
    assert pruner.asked[-2:] == [((3.0,), [(1.0,), (2.0, 2.5)]), ((3.0, 4.0), [(1.0,), (2.0, 2.5)])]
    assert bench.running(number).intermediate_values == (3.0, 4.0)
    assert bench.running(silent).intermediate_values == ()


def test_a_report_that_comes_twice_counts_once():
    pruner = Recorder()
    bench = Bench(pruner=pruner)
    _, lease = bench.ask()
    bench.report(lease, 0.5, 0.4)
    assert bench.ledger.report(lease, 2, 0.4) == GO_ON
    assert bench.ledger.report(lease, 1, 99.0) == GO_ON
    assert bench.running().intermediate_values == (0.5, 0.4)
    assert [losses for losses, _ in pruner.asked] == [(0.5,), *[(0.5, 0.4)] * 3]


def test_a_report_that_comes_twice_has_the_same_answer():
    bench = Bench(pruner=Recorder(says=True))
    _, lease = bench.ask()
    assert bench.ledger.report(lease, 1, 0.5) == bench.ledger.report(lease, 1, 0.5) == PRUNE


def test_epochs_without_a_loss_have_that_of_the_one_before():
    """Of epochs that were validated now and then, say; pruners compare trials epoch by epoch."""
    bench = Bench()
    _, lease = bench.ask()
    bench.ledger.report(lease, 3, 0.5)
    assert bench.running().intermediate_values == (0.5, 0.5, 0.5)
    bench.ledger.report(lease, 4, 0.4)
    bench.ledger.report(lease, 7, 0.3)
    assert bench.running().intermediate_values == (0.5, 0.5, 0.5, 0.4, 0.4, 0.4, 0.3)
    bench.ledger.stop("enough")
    bench.ledger.end_running()
    assert (bench.ledger.finished[0].value, bench.ledger.finished[0].best_epoch) == (0.3, 7)


def test_epochs_that_were_passed_over_are_seen_by_the_pruner():
    """A rung may be among them."""

    class AtThree:
        def should_prune(self, losses, others):
            return len(losses) == 3

    bench = Bench(pruner=AtThree())
    _, lease = bench.ask()
    assert [bench.ledger.report(lease, epoch, 1.0) for epoch in (2, 4, 4)] == [GO_ON, PRUNE, PRUNE]


def test_who_hands_a_model_over_does_so_until_the_next_sign_of_life():
    bench = Bench()
    _, lease = bench.ask()
    assert not bench.ledger.hands_over
    bench.ledger.hand_over(lease)
    assert bench.ledger.hands_over
    bench.ledger.renew(lease)
    assert not bench.ledger.hands_over
    bench.ledger.hand_over(lease)
    bench.ledger.doubt([lease])
    assert not bench.ledger.hands_over
    bench.ledger.hand_over(lease)
    bench.clock.pass_by(LEASE_SECONDS + HANDOVER_SECONDS + 1)
    assert not bench.ledger.hands_over


def test_a_worker_hears_what_the_pruner_decides():
    bench = Bench(pruner=Recorder(says=True))
    assert bench.report(bench.ask()[1], 1.0) == PRUNE
    assert bench.ledger.reason == ""


def test_without_a_pruner_all_go_on():
    bench = Bench()
    assert bench.report(bench.ask()[1], 1e9) == GO_ON


def test_a_pruner_that_raises_ends_the_search():
    bench = Bench(pruner=Recorder(says=ZeroDivisionError("by the pruner")))
    _, lease = bench.ask()
    assert bench.report(lease, 1.0) == STOP
    is_told(bench, "pruner", "Recorder", "ZeroDivisionError: by the pruner")
    assert bench.ledger.ask(Worker("w")) is None


def test_the_end_of_the_search_comes_before_the_pruner():
    bench = Bench(pruner=Recorder(says=True))
    _, lease = bench.ask()
    bench.ledger.stop("enough")
    assert bench.report(lease, 1.0) == STOP


# When it ends


@pytest.mark.parametrize("how", ["ask", "renew", "look"])
def test_after_the_timeout_nothing_is_given_out_and_trials_end(how):
    bench = Bench(timeout=60.0)
    _, lease = bench.ask()
    bench.clock.pass_by(59.9)
    assert bench.ledger.renew(lease) == GO_ON
    bench.clock.pass_by(0.1)
    if how == "ask":
        assert bench.ledger.ask(Worker("w")) is None
    elif how == "renew":
        assert bench.ledger.renew(lease) == STOP
    else:
        bench.ledger.look()
    assert bench.ledger.reason == "timeout=60 seconds are over"
    assert bench.report(lease, 0.5) == STOP
    assert not bench.ledger.over
    bench.finish(lease, 0.5, STOPPED)
    assert bench.ledger.over
    assert bench.ledger.failure is None


def test_the_timeout_begins_when_a_worker_asks():
    bench = Bench(timeout=60.0, lease_seconds=1000.0)
    bench.clock.pass_by(1000)  # Spark may have no place for its workers yet
    bench.ledger.look()
    assert bench.ledger.reason == ""
    _, lease = bench.ask()
    bench.clock.pass_by(59)
    bench.ask()
    assert bench.ledger.renew(lease) == GO_ON
    bench.clock.pass_by(1)
    assert bench.ledger.renew(lease) == STOP


def test_the_timeout_begins_anew_when_a_search_goes_on():
    bench = Bench(timeout=60.0, before=[done(0, ended=1e6)])
    bench.clock.pass_by(59)
    bench.ask()
    assert bench.ledger.seconds == 1e6 + 59


@pytest.mark.parametrize(
    ("sign", "values", "ends"),
    [
        (1.0, [0.5, 0.31], False),
        (1.0, [0.5, 0.3], True),
        (1.0, [0.5, -7.0], True),
        (-1.0, [0.1, 0.29], False),
        (-1.0, [0.1, 0.3], True),
        (-1.0, [0.1, 7.0], True),
        (1.0, [None, None], False),
    ],
)
def test_the_search_ends_with_a_value_that_is_good_enough(sign, values, ends):
    bench = Bench(sign=sign, loss_threshold=0.3)
    bench.run(*values)
    assert bench.ledger.over is ends
    assert bench.ledger.reason == ("a value is as good as loss_threshold=0.3" if ends else "")


def test_a_threshold_of_zero_is_one():
    bench = Bench(loss_threshold=0.0)
    bench.run(0.1)
    assert not bench.ledger.over
    bench.run(0.0)
    assert bench.ledger.over


@pytest.mark.parametrize("most", [0, 2])
def test_the_search_ends_when_too_many_trials_fail(most):
    bench = Bench(max_failures=most)
    bench.run(*[None] * most, 0.5)
    assert bench.ledger.reason == ""
    bench.run(None)
    assert bench.ledger.reason == f"more failed trials than max_failures={most}"
    assert bench.ledger.over


def test_pruned_trials_are_no_failures():
    bench = Bench(max_failures=0)
    bench.finish(bench.ask()[1], 0.5, PRUNED)
    assert bench.ledger.reason == ""


def test_a_stop_function_is_called_after_each_trial_with_a_value_with_all_that_have_ended():
    seen = []

    def stop(trials):
        seen.append([trial.number for trial in trials])
        return len(trials) == 3

    bench = Bench(early_stop=stop)
    bench.ask()
    bench.run(0.5, None, 0.4)
    assert seen == [[1], [1, 2, 3]]
    assert bench.ledger.reason == "early_stop_fn said so"
    assert bench.ledger.failure is None


def test_a_stop_function_hears_of_earlier_trials_as_it_did():
    """It may count, as hyperopt's no_progress_loss does."""
    seen = []

    def stop(trials):
        seen.append([trial.number for trial in trials])
        return len(seen) == 3

    before = [done(2), done(0), done(1, None, status=FAILED)]
    bench = Bench(early_stop=stop, before=before)
    assert seen == [[0], [0, 1, 2]]
    assert bench.ledger.reason == ""
    bench.run(None, 0.4)
    assert seen == [[0], [0, 1, 2], [0, 1, 2, 3, 4]]
    assert bench.ledger.reason == "early_stop_fn said so"


def test_a_search_that_its_stop_function_ended_is_over():
    bench = Bench(early_stop=lambda trials: len(trials) >= 2, before=[done(0), done(1)])
    assert bench.ledger.reason == "early_stop_fn said so"
    assert bench.ledger.over
    assert bench.ledger.ask(Worker("w")) is None


def test_after_the_end_the_stop_function_is_not_asked():
    seen = []
    bench = Bench(early_stop=lambda trials: seen.append(1))
    _, lease = bench.ask()
    bench.ledger.stop("enough")
    bench.finish(lease, 0.5)
    assert seen == []


def test_a_stop_function_that_raises_ends_the_search():
    bench = Bench(early_stop=lambda trials: 1 / 0)
    bench.run(0.5)
    is_told(bench, "early_stop_fn", "<lambda>", "ZeroDivisionError: division by zero")
    assert bench.numbers == [0]


def test_the_first_reason_is_kept():
    bench = Bench()
    bench.ledger.stop("first")
    bench.ledger.stop("second")
    bench.ledger.fail(ValueError("third"))
    bench.ledger.fail(ValueError("fourth"))
    assert bench.ledger.reason == "first"
    assert str(bench.ledger.failure) == "third"


def test_a_search_that_was_stopped_gives_no_lost_trial_out_again():
    bench = Bench()
    _, lease = bench.ask()
    bench.ledger.doubt([lease])
    bench.ledger.stop("enough")
    assert bench.ledger.ask(Worker("w")) is None
    assert not bench.ledger.over


def test_trials_that_were_out_at_the_end_have_what_they_came_to():
    for sign in (1.0, -1.0):
        bench = Bench(sign=sign)
        (_, one), (two, _) = bench.ask(), bench.ask()
        bench.report(one, *(sign * loss for loss in (0.5, 0.2, 0.3)))
        bench.clock.pass_by(7)
        bench.ledger.stop("enough")
        bench.ledger.end_running()
        assert bench.ledger.over
        first, second = bench.ledger.finished
        assert (first.status, first.value, first.best_epoch) == (STOPPED, *((0.2, 2) if sign > 0 else (0.5, 1)))
        assert (second.number, second.status, second.value, second.best_epoch) == (two, STOPPED, None, None)
        assert first.seconds == second.seconds == 7
        assert bench.ended == []  # they are tried again when the search goes on
        refused(bench.ledger.renew, one)


def test_a_stopped_trial_keeps_the_value_that_its_worker_told():
    bench = Bench()
    _, lease = bench.ask()
    bench.report(lease, 0.2)
    bench.ledger.stop("enough")
    bench.finish(lease, 0.9, STOPPED, best_epoch=4)
    assert (bench.ledger.finished[0].value, bench.ledger.finished[0].best_epoch) == (0.9, 4)


@pytest.mark.parametrize("value", [None, 0.5])
def test_a_trial_that_was_stopped_although_the_search_goes_on_is_lost(value):
    """Its machine is to be taken away, say: another worker shall try it."""
    bench = Bench(max_evals=1)
    _, lease = bench.ask("a")
    bench.report(lease, 0.5)
    bench.finish(lease, value, STOPPED)
    assert bench.ledger.finished == bench.ended == []
    assert not bench.ledger.over
    assert bench.ledger.has_value() is False
    _, again = bench.ask("b")
    trial = bench.running()
    assert (trial.attempts, trial.intermediate_values, trial.status, trial.value) == (2, (), RUNNING, None)
    bench.finish(again, 0.25)
    assert [trial.value for trial in bench.ledger.finished] == [0.25]


def test_a_trial_that_is_told_to_end_again_and_again_has_failed():
    bench = Bench(max_evals=1)
    for _ in range(ATTEMPTS):
        bench.finish(bench.ask()[1], None, STOPPED)
    bench.ledger.ask(Worker("w"))
    assert (
        bench.ledger.finished[0].error == f"its worker was lost {ATTEMPTS} times, at last since its process was told to end"
    )


def test_trials_that_were_stopped_with_the_search_are_not_written():
    bench = Bench()
    (_, one), (_, two), (_, three) = bench.ask(), bench.ask(), bench.ask()
    bench.ledger.stop("enough")
    bench.finish(one, 0.5, STOPPED)
    bench.finish(two, 0.4)
    bench.finish(three, 0.3, PRUNED)
    assert [(trial.number, trial.status) for trial in bench.ended] == [(1, OK), (2, PRUNED)]
    assert sorted(bench.numbers) == [0, 1, 2]


@pytest.mark.parametrize(("values", "expected"), [([], False), ([None, None], False), ([None, 0.0], True)])
def test_whether_a_trial_has_come_to_a_value(values, expected):
    bench = Bench()
    bench.run(*values)
    assert bench.ledger.has_value() is expected


# Suggestions that do not come


def test_a_suggest_function_that_raises_ends_the_search():
    bench = Bench(suggest=lambda number, trials: 1 / 0)
    assert bench.ledger.ask(Worker("w")) is None
    is_told(bench, "search algorithm", "suggest", "ZeroDivisionError: division by zero")
    assert bench.ledger.over


def test_words_of_our_own_are_told_as_they_are():
    error = ConfigurationError("there is something in the space that cannot travel")

    def suggest(number, trials):
        raise error

    bench = Bench(suggest=suggest)
    assert bench.ledger.ask(Worker("w")) is None
    assert bench.ledger.failure is error


def test_a_search_whose_algorithm_has_nothing_left_ends_with_what_runs():
    bench = Bench(suggest=lambda number, trials: Suggested({}, {}) if number < 2 else None)
    (_, one), (_, two) = bench.ask(), bench.ask()
    assert bench.ledger.ask(Worker("w")) is None
    assert not bench.ledger.over
    bench.ledger.doubt([two])
    _, again = bench.ask()
    bench.finish(one, 0.5)
    bench.finish(again, 0.5)
    assert bench.ledger.over
    assert bench.ledger.ask(Worker("w")) is None
    assert len(bench.asked) == 3
    assert bench.ledger.reason == ""


def test_a_trial_that_cannot_be_noted_ends_the_search():
    def full(trial):
        raise OSError("no space left")

    bench = Bench(on_end=full)
    bench.run(0.5)
    assert bench.ledger.reason == "OSError: no space left"
    assert bench.numbers == [0]


def test_after_a_failure_nothing_is_noted():
    calls = []

    def full(trial):
        calls.append(trial.number)
        raise OSError("no space left")

    bench = Bench(on_end=full)
    (_, one), (_, two) = bench.ask(), bench.ask()
    bench.finish(one, 0.5)
    bench.finish(two, 0.5)
    assert calls == [0]
    assert bench.numbers == [0, 1]


# Going on


def test_a_search_that_goes_on_gives_no_number_twice():
    bench = Bench(max_evals=6, before=[done(1), done(0), done(4)])
    bench.run(0.1, 0.1, 0.1)
    assert [number for number, _ in bench.asked] == [2, 3, 5]
    assert bench.ledger.over
    assert sorted(bench.numbers) == list(range(6))
    assert len(bench.ended) == 3


def test_a_search_that_goes_on_counts_its_time_on():
    bench = Bench(before=[done(0, ended=25.0), done(1, ended=40.0)])
    bench.clock.pass_by(5)
    assert bench.ledger.seconds == 45
    bench.run(0.5)
    assert bench.ledger.finished[-1].ended == 45


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"loss_threshold": 0.5}, "a value is as good as loss_threshold=0.5"),
        ({"max_failures": 0}, "more failed trials than max_failures=0"),
        ({"max_evals": 2}, ""),
    ],
)
def test_a_search_that_was_over_is_over(limits, reason):
    bench = Bench(before=[done(0), done(1, None, status=FAILED)], **limits)
    assert bench.ledger.over
    assert bench.ledger.reason == reason
    assert bench.ledger.ask(Worker("w")) is None
    assert bench.asked == []


def test_a_search_that_goes_on_sees_earlier_trials():
    pruner = Recorder()
    bench = Bench(before=[done(0, intermediate_values=[0.5, 0.4])], pruner=pruner)
    _, lease = bench.ask()
    bench.report(lease, 0.9)
    assert bench.asked[0][1] == [done(0, intermediate_values=[0.5, 0.4])]
    assert pruner.asked == [((0.9,), [(0.5, 0.4)])]


# Many threads


def test_every_trial_ends_exactly_once_however_workers_behave():
    """Workers finish, crash, fall silent and come back with old leases, all at once."""
    clock, ended, count = Clock(), Counter(), 150

    def suggest(number, trials):
        time.sleep(0)  # others get their turn in the midst of it
        return Suggested({}, number)

    def on_end(trial):
        time.sleep(0)
        ended.update([trial.number])

    ledger = TrialLedger(suggest, Limits(max_evals=count), clock, on_end=on_end)
    accepted, errors = [], []

    def finish(assignment):
        try:
            ledger.finish(assignment.lease, Trial(assignment.number, assignment.params, OK, 0.5))
        except RefusedError:
            return
        accepted.append(assignment.number)

    def work(seed):
        chance, late = random.Random(seed), []
        try:
            while not ledger.over:
                assignment = ledger.ask(Worker(f"w{seed}"))
                if assignment is None:
                    clock.pass_by(1)
                    continue
                fate = chance.random()
                with suppress(RefusedError):
                    ledger.report(assignment.lease, 1, chance.random())
                    if fate < 0.1:
                        ledger.lose(assignment.lease, "it crashed")
                    elif fate < 0.2:
                        ledger.doubt([assignment.lease])
                if fate > 0.3:
                    finish(assignment)
                late.append(assignment)
                finish(late.pop(chance.randrange(len(late))) if len(late) > 3 else assignment)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert not any(thread.is_alive() for thread in threads)
    assert ended == Counter(range(count))
    assert sorted(trial.number for trial in ledger.finished) == list(range(count))
    given_up = {trial.number for trial in ledger.finished if trial.status == FAILED}
    assert Counter(accepted) == Counter(set(range(count)) - given_up)
    assert all(trial.attempts == ATTEMPTS for trial in ledger.finished if trial.status == FAILED)
