"""The progress of a search on standard output."""

import sys
from dataclasses import replace

import pytest

from sparkkeras.hyperopt.ledger import Limits, Suggestion, TrialLedger, Worker
from sparkkeras.hyperopt.parameters import Parameter
from sparkkeras.hyperopt.progress import TABLE_ROWS, SearchProgress, table
from sparkkeras.hyperopt.trials import FAILED, OK, PRUNED, STOPPED, Trial
from sparkkeras.progress import status_line
from sparkkeras.progress.status_line import format_duration

CLEAR = "\r\033[K"
LR, OPTIMIZER = Parameter("lr", "lr", "uniform"), Parameter("o", "fit.optimizer", "randint", ("adam", "sgd"))


class Bench:
    """A search on a simulated clock, with its progress output."""

    def __init__(self, verbose=1, *, max_evals=10, sign=1.0, earlier=(), workers=2, others=()):
        self.now = 0.0
        self.ledger = TrialLedger(
            lambda number, trials: Suggestion({"lr": 0.001 * (number + 1)}, {}),
            Limits(max_evals),
            lambda: self.now,
            earlier,
            save=lambda trial, model: self.ledger.saved(trial.number),
        )
        self.progress = SearchProgress(verbose, self.ledger, {"val_loss": sign, **dict(others)}, max_evals, workers, [LR])

    def end(self, value=None, status=OK, seconds=2.0, **fields):
        """Run a trial that takes two seconds, and update the progress."""
        lease = self.ledger.ask(Worker("w")).lease
        self.now += seconds
        self.ledger.finish(lease, replace(self.ledger.extend_for_upload(lease), value=value, status=status, **fields))
        self.progress.tick()


@pytest.fixture
def terminal(capsys, monkeypatch):
    """Make standard output look like a terminal, on which every update is shown."""
    monkeypatch.setattr(status_line, "UPDATE_SECONDS", 0.0)
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda stream: True)


def lines(capsys):
    return capsys.readouterr().out.splitlines()


# Without a terminal


def test_verbose_0_writes_nothing(capsys):
    bench = Bench(0)
    bench.progress.begin()
    bench.end(0.5)
    bench.end(None, FAILED, error="it raised")
    bench.progress.end()
    assert capsys.readouterr() == ("", "")


def test_without_a_terminal_there_is_a_line_for_each_new_best_trial(capsys):
    bench = Bench(1)
    for value in (0.5, 0.7, 0.4, 0.4, 0.45, 0.123456):
        bench.end(value)
    assert lines(capsys) == [
        "trial 0 val_loss 0.5 lr=0.001 (2.0s)",
        "trial 2 val_loss 0.4 lr=0.003 (2.0s)",
        "trial 5 val_loss 0.1235 lr=0.006 (2.0s)",
    ]


def test_maximizing_reports_new_maxima(capsys):
    bench = Bench(1, sign=-1.0)
    for value in (0.5, 0.7, 0.4):
        bench.end(value)
    assert [line.split()[1] for line in lines(capsys)] == ["0", "1"]


def test_the_first_failure_is_reported_with_the_first_line_of_its_error(capsys):
    bench = Bench(1)
    bench.end(None, FAILED, error="ValueError: too large\nsecond line")
    bench.end(None, FAILED, error="ValueError: too small")
    assert lines(capsys) == ["trial 0 failed lr=0.001 (2.0s): ValueError: too large"]


def test_verbose_2_writes_a_line_for_each_trial(capsys):
    bench = Bench(2)
    bench.end(0.5)
    bench.end(0.75, PRUNED, seconds=75)
    bench.end(None, FAILED, error="it raised")
    lease = bench.ledger.ask(Worker("w")).lease
    bench.now += 2
    bench.ledger.stop("enough")
    bench.ledger.finish(lease, replace(bench.ledger.extend_for_upload(lease), status=STOPPED))
    bench.progress.tick()
    bench.progress.tick()
    assert lines(capsys) == [
        "trial 0 val_loss 0.5 lr=0.001 (2.0s)",
        "trial 1 pruned val_loss 0.75 lr=0.002 (1m 15s)",
        "trial 2 failed lr=0.003 (2.0s): it raised",
        "trial 3 stopped lr=0.004 (2.0s)",
    ]


def test_trials_that_end_between_two_ticks_are_reported_once(capsys):
    bench = Bench(1)
    leases = [bench.ledger.ask(Worker("w")).lease for _ in range(3)]
    for lease, value in zip(leases, (0.5, 0.9, 0.1), strict=True):
        bench.now += 1
        bench.ledger.finish(lease, replace(bench.ledger.extend_for_upload(lease), value=value, status=OK))
    bench.progress.tick()
    bench.progress.tick()
    assert [line.split()[1] for line in lines(capsys)] == ["0", "2"]


@pytest.mark.parametrize("verbose", [1, 2])
def test_the_first_line_reports_the_workers(capsys, verbose):
    Bench(verbose).progress.begin()
    Bench(verbose, workers=1).progress.begin()
    assert lines(capsys) == [
        "Loading Keras, then searching on 2 workers.",
        "Loading Keras, then searching on 1 worker.",
    ]


def test_a_resumed_search_does_not_report_earlier_trials_again(capsys):
    earlier = [Trial(number, {}, OK, 0.1 * (number + 1), ended=60.0 * (number + 1)) for number in range(3)]
    bench = Bench(2, earlier=earlier)
    bench.progress.begin()
    bench.progress.tick()
    bench.end(0.05)
    assert lines(capsys) == [
        "Loading Keras, then searching on 2 workers, resuming after 3 trials.",
        "trial 3 val_loss 0.05 lr=0.004 (2.0s)",
    ]


# On a terminal


def test_on_a_terminal_one_line_is_updated(capsys, terminal):
    bench = Bench(1)
    bench.end(0.5)
    bench.end(0.4)
    out = capsys.readouterr().out
    assert out.count(CLEAR) == 1
    assert "\n" not in out
    assert out.endswith(f"{CLEAR}2/10 trials - best val_loss 0.4 (trial 1) - 4.0s, about 8.0s left")


def test_on_a_terminal_a_failure_has_a_line_above_the_progress_line(capsys, terminal):
    bench = Bench(1)
    bench.end(None, FAILED, error="it raised")
    assert capsys.readouterr().out == (
        "trial 0 failed lr=0.001 (2.0s): it raised\n1/10 trials - 1 failed - 2.0s, about 9.0s left"
    )


def test_on_a_terminal_verbose_2_writes_no_control_characters(capsys, terminal):
    bench = Bench(2)
    bench.end(0.5)
    bench.progress.end()
    assert CLEAR not in capsys.readouterr().out


# The summary


def test_the_summary_counts():
    bench = Bench(max_evals=None)
    for value, status in ((0.5, OK), (0.3, PRUNED), (None, FAILED)):
        bench.end(value, status)
    leases = [bench.ledger.ask(Worker("w")).lease for _ in range(3)]
    bench.now += 4
    bench.ledger.stop("enough")
    for lease, value in zip(leases[:2], (None, 0.25), strict=True):
        bench.ledger.finish(lease, replace(bench.ledger.extend_for_upload(lease), value=value, status=STOPPED))
    assert (
        bench.progress.summary()
        == "5 trials - 1 running - 1 pruned - 2 stopped - 1 failed - best val_loss 0.25 (trial 4) - 10.0s"
    )


def test_before_the_first_trial_there_is_no_estimate_of_the_time_left():
    assert Bench().progress.summary() == "0/10 trials - 0.0s"


def test_the_time_left_is_estimated_from_the_trials_of_this_call():
    earlier = [Trial(number, {}, OK, 0.5, ended=1000.0 * (number + 1)) for number in range(4)]
    bench = Bench(earlier=earlier)
    assert "left" not in bench.progress.summary()
    bench.end(0.5)
    bench.end(0.5)
    assert (
        bench.progress.summary() == "6/10 trials - best val_loss 0.5 (trial 0) - 1h 06m with earlier calls, about 4.0s left"
    )


def test_a_resumed_search_without_trials_to_run_says_so(capsys):
    bench = Bench(earlier=[Trial(0, {}, OK, 0.5, ended=1.0)], max_evals=1)
    bench.progress.begin()
    assert lines(capsys) == ["All trials of this search have ended already. A larger max_evals= or timeout= continues it."]


def test_an_interrupted_search_ends_with_its_summary(capsys):
    bench = Bench()
    bench.end(0.5)
    bench.ledger.stop("it was interrupted")
    bench.progress.interrupted()
    assert lines(capsys)[-1] == "Interrupted: 1/10 trials - best val_loss 0.5 (trial 0) - 2.0s."


def test_a_finished_search_reports_no_time_left():
    bench = Bench(max_evals=1)
    bench.end(0.5)
    assert "left" not in bench.progress.summary()
    stopped = Bench()
    stopped.end(0.5)
    stopped.ledger.stop("enough")
    assert "left" not in stopped.progress.summary()


# The end


def test_the_output_ends_with_a_table_of_the_best_trials(capsys):
    bench = Bench(1, max_evals=12)
    for number in range(12):
        bench.end(1 / (number + 1), best_epoch=2, intermediate_values=(0.5, 0.4, 0.3))
    capsys.readouterr()
    bench.progress.end()
    output = lines(capsys)
    assert output[0] == "12/12 trials - best val_loss 0.08333 (trial 11) - 24.0s."
    assert [line.split()[0] for line in output[1:]] == ["trial", *(str(11 - place) for place in range(TABLE_ROWS))]


def test_the_end_reports_remaining_trials_and_the_reason(capsys):
    bench = Bench(1)
    lease = bench.ledger.ask(Worker("w")).lease
    bench.ledger.finish(lease, replace(bench.ledger.extend_for_upload(lease), value=0.5, status=OK))
    bench.ledger.stop("a reason")
    bench.progress.end()
    output = lines(capsys)
    assert output[0].startswith("trial 0 val_loss 0.5")
    assert output[1].endswith("0.0s. The search ended early: a reason.")


def test_without_a_value_there_is_no_table(capsys):
    bench = Bench(2)
    bench.end(None, FAILED, error="it raised")
    capsys.readouterr()
    bench.progress.end()
    assert lines(capsys) == ["1/10 trials - 1 failed - 2.0s, about 9.0s left."]


def test_the_table_has_columns():
    trials = [
        Trial(
            3,
            {},
            OK,
            0.123456,
            best_epoch=2,
            intermediate_values=(1.0, 0.5, 0.6),
            seconds=3.25,
            chosen={"lr": 0.00123456, "o": 1},
        ),
        Trial(12, {}, STOPPED, 7.0, seconds=65, chosen={"lr": 0.1, "o": 0}),
        Trial(4, {}, FAILED, chosen={"lr": 0.1}),
    ]
    assert table(trials, ["val_loss"], [LR, OPTIMIZER]).splitlines() == [
        "trial  val_loss  status   best/epochs  time    parameters",
        "3      0.1235    ok       2/3          3.2s    lr=0.001235 fit.optimizer=sgd",
        "12     7         stopped               1m 05s  lr=0.1 fit.optimizer=adam",
        "4                failed                0.0s    lr=0.1",
    ]


# Durations


@pytest.mark.parametrize(
    ("seconds", "output"),
    [
        (0, "0.0s"),
        (3.24, "3.2s"),
        (59.94, "59.9s"),
        (59.96, "1m 00s"),
        (60, "1m 00s"),
        (245.4, "4m 05s"),
        (3599.4, "59m 59s"),
        (3599.6, "1h 00m"),
        (7800, "2h 10m"),
        (360_000, "100h 00m"),
    ],
)
def test_durations_as_text(seconds, output):
    assert format_duration(seconds) == output


def test_several_metrics(capsys):
    bench = Bench(others={"size": -1.0})
    for values in ((0.5, 10.0), (0.75, 5.0), (0.25, 2.0)):
        bench.end(values[0], values=values)
    bench.end(None, FAILED, error="it raised")
    written = lines(capsys)
    assert written[0] == "trial 0 val_loss 0.5 size 10 lr=0.001 (2.0s)"
    assert [line.split()[1] for line in written if line.startswith("trial")] == ["0", "2", "3"]  # 1 is dominated
    bench.progress.end()
    summary, front, *rows = lines(capsys)
    assert summary.startswith("4/10 trials - 1 failed - best val_loss 0.25 (trial 2) - best size 10 (trial 0) - ")
    assert front == "Pareto front: 2 trials that no other one dominates."
    assert [row.split()[:3] for row in rows] == [["trial", "val_loss", "size"], ["2", "0.25", "2"], ["0", "0.5", "10"]]


def test_a_large_pareto_front_is_shown_at_even_distances(capsys):
    bench = Bench(max_evals=None, others={"size": 1.0})
    for number in range(28):
        bench.end(float(number), values=(float(number), -float(number)))
    lines(capsys)
    bench.progress.end()
    _, front, *rows = lines(capsys)
    assert [row.split()[0] for row in rows] == ["trial", *map(str, range(0, 28, 3))]
    assert front == "Pareto front: 28 trials that no other one dominates; 10 of them:"
