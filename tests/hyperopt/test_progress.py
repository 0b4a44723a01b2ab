"""The progress of a search on standard output."""

import functools

import pytest

from sparkkeras.events import Events, PhaseStarted, RunEnded, RunStarted
from sparkkeras.hyperopt.distributions import choice, uniform
from sparkkeras.hyperopt.progress import SearchProgress, TrialEvents, table
from sparkkeras.hyperopt.space import Space
from sparkkeras.hyperopt.trials import FAILED, OK, PRUNED, STOPPED, Trial
from sparkkeras.progress import status_line
from sparkkeras.progress.status_line import format_duration
from tests.hyperopt.test_ledger import Bench as LedgerBench
from tests.terminals import Terminal, manual_clock, write_to

SPACE = Space({"lr": uniform(0, 1)})


def suggested(number, trials):
    return Trial(number, {}, chosen={"lr": 0.001 * (number + 1)})


class Bench:
    """A search on a simulated clock, with its progress output."""

    def __init__(self, clock, verbose=1, *, max_evals=10, earlier=(), others=()):
        self.clock, metrics = clock, {"val_loss": 1.0, **dict(others)}
        self.ledger = LedgerBench(clock=clock, suggest=suggested, earlier=earlier, max_evals=max_evals)
        self.progress = SearchProgress(verbose, metrics, SPACE.parameters)
        self.events = Events([self.progress])
        self.trials = TrialEvents(self.events, self.ledger, SPACE.parameters)
        self.events.emit(RunStarted("search", "build", max_trials=max_evals))
        self.trials.begin(2)

    def tick(self):
        self.trials.tick()
        self.progress.refresh()

    def end(self, value=None, status=OK, seconds=2.0, **fields):
        """Run a trial that takes two seconds, and update the progress."""
        _, lease = self.ledger.start()
        self.clock.now += seconds
        self.ledger.end(lease, value, status, **fields)
        self.tick()

    def close(self, error=None):
        self.events.emit(RunEnded(error))


@pytest.fixture
def bench(monkeypatch):
    """Makes a `Bench`."""
    return functools.partial(Bench, manual_clock(monkeypatch))


@pytest.fixture
def terminal(monkeypatch):
    """A terminal on which every update is shown."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(status_line, "UPDATE_SECONDS", 0.0)
    return write_to(Terminal(), monkeypatch)


def lines(capsys):
    return capsys.readouterr().out.splitlines()


def trial_numbers(written):
    """The numbers of the trials that have a line."""
    return [line.split()[1] for line in written if line.startswith("trial ")]


# Without a terminal


def test_without_a_terminal_there_is_a_line_for_each_new_best_trial_and_the_first_failure(capsys, bench):
    search = bench(1)
    search.end(None, FAILED, 1, error="ValueError: too large\nsecond line")
    search.end(None, FAILED, 1, error="ValueError: too small")
    for value in (0.5, 0.7, 0.4, 0.4, 0.45, 0.123456):
        search.end(value, OK, 1)
    search.events.emit(PhaseStarted("The search ended early: a reason"))
    search.close()
    first, *others, _, _, _, _, _, _ = lines(capsys)
    assert first == "Loading Keras, then searching on 2 workers."
    assert others == [
        "trial 0 failed lr=0.001 (1.0s): ValueError: too large",
        "trial 2 val_loss 0.5 lr=0.003 (1.0s)",
        "trial 4 val_loss 0.4 lr=0.005 (1.0s)",
        "trial 7 val_loss 0.1235 lr=0.008 (1.0s)",
        "The search ended early: a reason.",
        "8/10 trials - 2 failed - best val_loss 0.1235 (trial 7) - 8.0s.",
    ]


def test_an_interrupted_search_ends_with_its_summary_and_no_table(capsys, bench):
    search = bench()
    search.end(0.5)
    search.close(KeyboardInterrupt())
    assert lines(capsys)[-1] == "Interrupted: 1/10 trials - best val_loss 0.5 (trial 0) - 2.0s."


def test_without_a_value_a_search_ends_with_its_summary(capsys, bench):
    search = bench()
    search.end(None, FAILED, error="it raised")
    search.close()
    assert lines(capsys)[-1] == "1/10 trials - 1 failed - 2.0s."


def test_verbose_2_writes_a_line_for_each_trial(capsys, bench):
    search = bench(2)
    search.end(0.5)
    search.end(0.75, PRUNED, seconds=75)
    _, lease = search.ledger.start()
    search.clock.now += 2
    search.ledger.stop("enough")
    search.ledger.end(lease, status=STOPPED)
    search.tick()
    search.tick()
    assert lines(capsys)[1:] == [
        "trial 0 val_loss 0.5 lr=0.001 (2.0s)",
        "trial 1 pruned val_loss 0.75 lr=0.002 (1m 15s)",
        "trial 2 stopped lr=0.003 (2.0s)",
    ]


def test_a_resumed_search_does_not_report_earlier_trials_again(capsys, bench):
    search = bench(2, earlier=[Trial(number, {}, OK, 0.5, ended=60.0) for number in range(3)])
    search.end(0.05)
    first, *_, last = lines(capsys)
    assert first == "Resuming after 3 trials."
    assert trial_numbers([last]) == ["3"]


def test_a_resumed_search_without_trials_to_run_says_so_and_shows_the_best_ones(capsys, bench):
    bench(earlier=[Trial(0, {}, OK, 0.5, ended=1.0, chosen={"lr": 0.1})], max_evals=1).close()
    first, summary, _, best = lines(capsys)
    assert "have ended already" in first
    assert summary == "1/1 trials - best val_loss 0.5 (trial 0) - 0.0s."
    assert best.split()[:2] == ["0", "0.5"]


# On a terminal


def test_on_a_terminal_one_line_is_updated(terminal, bench):
    """It estimates the time left from the trials of this call."""
    search = bench(1, max_evals=3, earlier=[Trial(0, {}, OK, 0.5, ended=1000.0)])
    search.end(0.4)
    assert terminal.line == "2/3 trials - best val_loss 0.4 (trial 1) - 2.0s, about 2.0s left"
    search.end(0.5)
    assert terminal.line == "3/3 trials - best val_loss 0.4 (trial 1) - 4.0s"


def test_the_summary_counts(terminal, bench):
    search = bench(max_evals=None)
    for value, status in ((0.5, OK), (0.3, PRUNED), (None, FAILED)):
        search.end(value, status)
    leases = [search.ledger.start()[1] for _ in range(3)]
    search.clock.now += 4
    search.ledger.stop("enough")
    for lease, value in zip(leases[:2], (None, 0.25), strict=True):
        search.ledger.end(lease, value, STOPPED)
    search.tick()
    expected = "5 trials - 1 running - 1 pruned - 2 stopped - 1 failed - best val_loss 0.25 (trial 4) - 10.0s"
    assert terminal.line == expected


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
            chosen={"lr": 0.00123456, "fit.optimizer": "sgd"},
        ),
        Trial(12, {}, STOPPED, 7.0, seconds=65, chosen={"lr": 0.1, "fit.optimizer": "adam"}),
    ]
    space = Space({"lr": uniform(0, 1), "fit": {"optimizer": choice("adam", "sgd")}})
    assert table(trials, ["val_loss"], space.parameters).splitlines() == [
        "trial  val_loss  status   best/epochs  time    parameters",
        "3      0.1235    ok       2/3          3.2s    lr=0.001235 fit.optimizer=sgd",
        "12     7         stopped               1m 05s  lr=0.1 fit.optimizer=adam",
    ]


# Durations


@pytest.mark.parametrize(
    ("seconds", "output"),
    [(59.94, "59.9s"), (59.96, "1m 00s"), (245.4, "4m 05s"), (3599.6, "1h 00m"), (360_000, "100h 00m")],
)
def test_durations_as_text(seconds, output):
    assert format_duration(seconds) == output


def test_several_metrics(capsys, bench):
    search = bench(others={"size": -1.0})
    for values in ((0.5, 10.0), (0.75, 5.0), (0.25, 2.0)):
        search.end(values[0], values=values)
    written = lines(capsys)
    assert written[1] == "trial 0 val_loss 0.5 size 10 lr=0.001 (2.0s)"
    assert trial_numbers(written) == ["0", "2"]  # 1 is dominated
    search.close()
    summary, front, *rows = lines(capsys)
    assert summary.startswith("3/10 trials - best val_loss 0.25 (trial 2) - best size 10 (trial 0) - ")
    assert front.startswith("Pareto front: 2 trials")
    assert [row.split()[:3] for row in rows] == [["trial", "val_loss", "size"], ["2", "0.25", "2"], ["0", "0.5", "10"]]


def test_a_large_pareto_front_is_shown_at_even_distances(capsys, bench):
    search = bench(max_evals=None, others={"size": 1.0})
    for number in range(28):
        search.end(float(number), values=(float(number), -float(number)))
    lines(capsys)
    search.close()
    _, front, *rows = lines(capsys)
    assert [row.split()[0] for row in rows] == ["trial", *map(str, range(0, 28, 3))]
    assert front.endswith("10 of them:")
