"""Events become messages for the page: in order, in JSON's types, with speed and time left."""

import json
import threading

import numpy as np
import pytest

from sparkkeras import TrainingInterruptedError
from sparkkeras.events import (
    CheckpointWritten,
    EpochMeasured,
    Incident,
    MemberTrained,
    OutputWritten,
    PhaseStarted,
    RankChanged,
    RankReported,
    RowsTrained,
    RunEnded,
    RunResumed,
    RunStarted,
    TrialChanged,
    Updates,
    WorkerEpoch,
    WorkersChanged,
    WorkersReported,
)
from sparkkeras.hyperopt.trials import Trial
from sparkkeras.monitor import messages
from sparkkeras.monitor.messages import Messages, RunReporter, plain


class Bench:
    """A reporter on a simulated clock, and what it has reported."""

    def __init__(self, **run):
        self.now, self.clock_error = 1000.0, 0.0
        self.messages = Messages(lambda: self.now)
        self.begin(RunStarted("fit", "model", **run))

    def begin(self, started):
        self.reporter = RunReporter(self.messages, started, lambda: self.now + self.clock_error, lambda: self.now)

    def handle(self, *events, seconds=0.0):
        for event in events:
            self.now += seconds
            self.reporter.handle(event)

    def epoch(self, number, *events, seconds=2.0, **logs):
        self.reporter.epoch_begins(number)
        self.now += seconds
        self.handle(*events)
        self.reporter.epoch_ends(number, logs)

    def all(self, after=0):
        return json.loads(self.messages.after(after)[1])

    def of(self, kind):
        names = ("type", "run", "time")
        return [{k: v for k, v in each.items() if k not in names} for each in self.all() if each["type"] == kind]


def test_an_epoch_has_its_rows_and_seconds_without_start_up():
    bench = Bench(epochs=2)
    bench.epoch(0, RowsTrained(600, 0.5, 4.0), RowsTrained(400, 1.0, 0.0), seconds=9.0, loss=np.float32(0.5))
    measured = EpochMeasured(1, 800, 1.5, 6.0, Updates(30, 20.0, {0: 20, 2: 10}, 0.67, 2))  # by the parameter server
    bench.epoch(1, RowsTrained(500, 0.6), measured, seconds=9.0)
    assert bench.of("epoch") == [
        {"epoch": 0, "logs": {"loss": 0.5}, "rows": 1000, "seconds": 5.0, "startup_seconds": 4.0},
        {"epoch": 1, "logs": {}, "rows": 800, "seconds": 1.5, "startup_seconds": 6.0},
    ]
    (updates,) = bench.of("updates")
    assert (updates["count"], updates["per_second"], updates["staleness"]) == (30, 20.0, {"0": 20, "2": 10})


def test_a_changed_system_clock_changes_no_duration():
    bench = Bench(epochs=4)
    bench.epoch(0, RowsTrained(100, 1.0, 0.0), seconds=2.0)
    bench.reporter.epoch_begins(1)
    bench.clock_error = -3600.0
    bench.handle(RowsTrained(50, 0.5, 0.0), seconds=1.0)
    (progress,) = bench.of("progress")
    assert (progress["done"], progress["rows_per_second"], progress["seconds_left"]) == (0.5, 50.0, 5.0)
    bench.handle(RowsTrained(50, 1.0, 0.0), seconds=1.0)
    bench.reporter.epoch_ends(1, {})
    bench.handle(RunEnded(), seconds=1.0)
    assert [each["seconds"] for each in bench.of("epoch")] == [2.0, 2.0]
    assert bench.of("end")[0]["seconds"] == 5.0
    assert [each["time"] for each in bench.all()] == [1000.0, 1002.0, 1004.0, 1004.0, 1005.0]
    bench.now += 5.0
    assert bench.messages.age == 5.0
    bench.begin(RunStarted("fit", "second"))
    assert bench.all()[-1]["time"] == 1010.0 - 3600.0  # what the clock shows then


def test_progress_replaces_itself_twice_a_second():
    bench = Bench(epochs=1)
    bench.reporter.epoch_begins(0)
    for step in range(100):
        bench.handle(RowsTrained(1, step / 100, 0.0), seconds=0.1)
    (progress,) = bench.of("progress")
    assert progress["rows"] == 96
    assert 15 <= len(bench.messages) <= 25


def test_who_has_read_some_messages_gets_the_later_ones():
    bench = Bench()
    number, _ = bench.messages.after(0)
    bench.handle(PhaseStarted("Storing rows"), PhaseStarted("Loading Keras"), Incident("retry", "again"))
    following, texts = bench.messages.after(number)
    assert [each["type"] for each in json.loads(texts)] == ["phase", "incident"]
    assert bench.messages.after(following) == (following, "[]")
    assert bench.messages.after(10_000)[1] == "[]"
    assert bench.messages.after(0, 1)[0] == 1
    assert bench.messages.after(1, 1)[0] == 3  # over one that was replaced


def test_old_output_of_a_rank_is_dropped(monkeypatch):
    monkeypatch.setattr(messages, "MAX_OUTPUTS", 3)
    bench = Bench()
    for number in range(5):
        bench.handle(OutputWritten(0, f"{number}\n"), OutputWritten(1, f"{number}\n"))
    assert [each["text"] for each in bench.of("output") if each["rank"] == 1] == ["2\n", "3\n", "4\n"]


def test_threads_that_write_lose_nothing(tmp_path):
    """Keras calls the monitor in one thread, events arrive in others."""
    from sparkkeras import Monitor

    monitor = Monitor(verbose=False)
    monitor.on_event(RunStarted("fit", "model"))

    def incidents():
        for number in range(2000):
            monitor.on_event(PhaseStarted(str(number)))
            monitor.on_event(Incident("retry", str(number)))

    threads = [threading.Thread(target=incidents) for _ in range(3)]
    for thread in threads:
        thread.start()
    for epoch in range(2000):
        monitor.on_epoch_end(epoch, {"loss": 1.0})
    for thread in threads:
        thread.join()
    found = [each["type"] for each in json.loads(monitor._messages.after(0)[1])]
    monitor.close()
    assert (found.count("epoch"), found.count("incident"), found.count("phase")) == (2000, 6000, 1)


def test_every_event_has_its_message():
    bench = Bench()
    trial = Trial(3, {}, "failed", None, None, worker="host", seconds=1.0, error="it raised", traceback="Traceback ...",
                  intermediate_values=(0.5, float("nan")))  # fmt: skip
    bench.handle(
        WorkersChanged(2),
        Incident("retry", "a task failed"),
        RunResumed("Continuing", range(2), [{"loss": 0.3}, {"loss": 0.2, "val_loss": 0.5}]),
        WorkersReported(1, (WorkerEpoch(0, 10, 1.0), WorkerEpoch(1, 12, 3.0))),
        CheckpointWritten("/c/1", 1, 0.5),
        *[TrialChanged(trial, {"lr": 0.1, "act": "relu"})] * 2,
        MemberTrained(1, range(1), [{"loss": 0.5}]),
        RankChanged(0, "started", "host"),
    )
    assert bench.of("count") == [{"workers": 2}]
    assert bench.of("incident") == [{"kind": "retry", "text": "a task failed"}]
    assert bench.of("resumed") == [
        {"text": "Continuing", "epochs": [0, 1], "history": {"loss": [0.3, 0.2], "val_loss": [None, 0.5]}}
    ]
    assert bench.of("workers") == [{"epoch": 1, "worker": [0, 1], "rows": [10, 12], "seconds": [1.0, 3.0]}]
    assert bench.of("checkpoint") == [{"path": "/c/1", "epoch": 1, "seconds": 0.5}]
    (shown,) = bench.of("trial")
    assert (shown["trial"], shown["status"], shown["values"]) == (3, "failed", [0.5, "NaN"])
    assert (shown["params"], shown["traceback"]) == ({"lr": 0.1, "act": "relu"}, "Traceback ...")
    assert bench.of("member") == [{"member": 1, "epochs": [0], "history": {"loss": [0.5]}}]
    assert bench.of("rank") == [{"rank": 0, "state": "started", "host": "host"}]


def test_all_epochs_of_rank_0_and_the_last_one_of_others_are_kept():
    bench = Bench()
    for epoch in range(2):
        for rank in range(3):
            bench.handle(RankReported(rank, epoch, None, {"loss": np.float32(rank + epoch / 4)}))
    reports = bench.of("report")
    assert [(each["rank"], each["epoch"], each["logs"]) for each in reports] == [
        (0, 0, {"loss": 0.0}),
        (0, 1, {"loss": 0.25}),
        (1, 1, {"loss": 1.25}),
        (2, 1, {"loss": 2.25}),
    ]
    assert [each["seconds_left"] for each in reports] == [None] * 4


def test_the_time_left_of_a_function_is_known_from_the_second_report_of_rank_0_on():
    bench = Bench()
    bench.handle(RankChanged(0, "started"))
    bench.handle(RankReported(0, 0, 6, {}), seconds=9.0)
    bench.handle(RankReported(1, 0, 6, {}), seconds=1.0)
    bench.handle(RankReported(0, 2, 6, {}), seconds=3.0)  # two epochs
    bench.handle(RankChanged(0, "started", "another host"), seconds=50.0)
    bench.handle(RankReported(0, 1, 6, {}), seconds=5.0)
    bench.handle(RankReported(0, 5, 6, {}), seconds=8.0)
    assert [each["seconds_left"] for each in bench.of("report") if each["rank"] == 0] == [None, 6.0, None, None]


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (None, "finished", ""),
        (ValueError("bad\nsecond line"), "failed", "ValueError: bad"),
        (KeyboardInterrupt(), "interrupted", ""),
        (TrainingInterruptedError("SIGTERM"), "interrupted", ""),
    ],
)
def test_a_run_ends_with_its_error(error, status, line):
    bench = Bench()
    bench.handle(RunEnded(error), seconds=5.0)
    (end,) = bench.of("end")
    assert (end["status"], end["error"], end["seconds"]) == (status, line, 5.0)
    assert ("bad" in end["traceback"]) == (status == "failed")
    bench.handle(Incident("retry", "too late"), RunEnded())
    assert bench.all()[-1]["type"] == "end"


def test_values_become_jsons():
    nan, inf = float("nan"), float("inf")
    given = {1: np.float32(0.5), "a": np.arange(2), "b": (nan, inf, -inf), "c": np.array(nan), "d": np.int64(3), "e": True}
    assert plain(given) == {"1": 0.5, "a": [0, 1], "b": ["NaN", "Infinity", "-Infinity"], "c": "NaN", "d": 3, "e": True}
    assert plain(ValueError) == str(ValueError)
