"""The speed of a training, without the time in which workers start, and the time that is left."""

import pytest

from sparkkeras.events import (
    EpochMeasured,
    EpochRestarted,
    Incident,
    RowsTrained,
    Updates,
    WorkerProgress,
    WorkersChanged,
)
from sparkkeras.progress.pace import Pace, logs_by_epoch


class Bench:
    """A pace on a simulated clock."""

    def __init__(self, *rows, epochs=2):
        self.now = 100.0
        self.pace = Pace(epochs, lambda: self.now)
        self.pace.handle(WorkersChanged(len(rows), rows))
        self.pace.begin_epoch(0)

    def handle(self, seconds, event):
        self.now += seconds
        return self.pace.handle(event)

    def report(self, seconds, worker, rows, trained, epoch=0, **logs):
        return self.handle(seconds, WorkerProgress(worker, epoch, rows, trained, logs))

    def next_epoch(self, epoch):
        self.pace.end_epoch()
        self.pace.begin_epoch(epoch)

    @property
    def seen(self):
        pace = self.pace
        return pace.rows, pace.seconds, pace.startup_seconds


def test_rounds_count_without_start_up_and_the_validation_after_the_last_one():
    bench = Bench(200)
    assert bench.handle(12.0, RowsTrained(100, 0.5, 10.0))
    assert bench.seen == (100, 2.0, 10.0)
    bench.handle(2.0, RowsTrained(100, 1.0, 0.0))
    assert (bench.seen, bench.pace.rows_per_second, bench.pace.seconds_left) == ((200, 4.0, 10.0), 50.0, 4.0)
    bench.now += 10.0
    assert bench.seen == (200, 4.0, 10.0)
    assert not bench.report(0.1, 0, 150, 3.0)


@pytest.mark.parametrize(
    ("event", "rows"),
    [
        (RowsTrained(200, 1.0, 10.0), 200),
        (WorkerProgress(0, 0, 50, 2.0), 50),
        (EpochMeasured(0, 200, 2.0, 10.0, Updates(5, 1.0, {}, 0.0, 0)), 200),
    ],
)
def test_start_up_begins_when_the_pace_is_created(event, rows):
    bench = Bench(200)
    bench.now += 30.0
    bench.pace.begin_epoch(0)
    assert bench.seen == (0, 0.0, 30.0)
    bench.handle(12.0, event)
    assert bench.seen == (rows, 2.0, 40.0)
    bench.next_epoch(1)
    bench.handle(2.0, RowsTrained(200, 1.0, 0.0))
    assert bench.seen == (200, 2.0, 0.0)


def test_the_workers_reports_count_within_a_round():
    bench = Bench(100, 300)
    assert bench.report(11.0, 0, 50, 1.0, loss=1.0)
    assert (bench.seen, bench.pace.done, bench.pace.logs) == ((50, 1.0, 10.0), 0.125, {"loss": 1.0})
    assert bench.pace.seconds_left_of_epoch == pytest.approx(7.0)
    assert bench.pace.seconds_left == pytest.approx(15.0)
    bench.report(1.0, 1, 150, 2.0, loss=0.5, mae=1.0)
    assert (bench.seen, bench.pace.done, bench.pace.logs) == ((200, 2.0, 10.0), 0.5, {"loss": 0.625})
    assert bench.handle(8.0, RowsTrained(400, 1.0, 9.5))
    assert bench.seen == (400, 10.5, 9.5)


def test_more_tasks_than_slots_train_one_after_the_other():
    bench = Bench(*[100] * 8)
    for wave in range(4):
        for worker in (2 * wave, 2 * wave + 1):
            bench.report(0.0 if worker % 2 else 5.0, worker, 100, 5.0)
    assert (bench.seen, bench.pace.done) == ((800, 20.0, 0.0), 1.0)
    bench.handle(0.0, RowsTrained(800, 1.0, 0.5))
    bench.next_epoch(1)
    bench.report(3.0, 0, 50, 1.0)  # the task began later, which is no start-up
    bench.handle(37.0, RowsTrained(800, 1.0, 0.0))
    assert bench.seen == (800, 40.0, 0.0)


def test_old_reports_do_not_count():
    bench = Bench(200)
    bench.handle(2.0, RowsTrained(100, 0.5, 0.0))
    assert not bench.report(0.1, 0, 90, 1.0)
    bench.next_epoch(1)
    assert not bench.report(0.1, 0, 200, 1.0)
    assert not bench.handle(0.1, Incident("retry", "again"))
    assert bench.seen[0] == 0
    bench.pace.end_epoch()
    assert not bench.report(0.1, 0, 50, 1.0, epoch=1)


def test_a_worker_that_is_now_too_fast_to_report_does_not_hold_up_the_others():
    bench = Bench(100, 100)
    bench.report(2.0, 0, 60, 1.1)
    bench.next_epoch(1)
    assert bench.report(3.0, 1, 50, 2.0, epoch=1)
    assert bench.seen[0] == 50


def test_workers_that_are_ahead_have_trained_all_rows_of_the_epoch():
    bench = Bench(100, 300)
    bench.report(2.0, 0, 10, 1.0, epoch=1)
    bench.report(1.0, 1, 150, 2.0)
    assert (bench.pace.rows, bench.pace.done) == (250, 0.625)


def test_rows_of_an_epoch_that_begins_again_count_once():
    bench = Bench(100, 100)
    bench.handle(2.0, RowsTrained(150, 0.75, 0.0))
    bench.handle(1.0, WorkersChanged(1, (200,)))
    bench.handle(0.0, EpochRestarted(0))
    assert bench.report(2.0, 0, 50, 1.0)
    assert (bench.pace.rows, bench.pace.done) == (50, 0.25)
    bench.handle(2.0, RowsTrained(200, 1.0, 0.0))
    assert bench.pace.rows == 200


def test_with_a_parameter_server_workers_have_started_when_rows_arrive():
    bench = Bench(100)
    bench.handle(10.0, RowsTrained(0, 0.0))
    bench.handle(1.0, RowsTrained(10, 0.1))
    assert bench.seen == (10, 0.0, 11.0)
    bench.handle(1.0, RowsTrained(10, 0.2))
    assert bench.seen == (20, 1.0, 11.0)
    updates = Updates(5, 2.0, {}, 0.0, 0)
    assert bench.handle(8.0, EpochMeasured(0, 100, 9.5, 10.5, updates))
    assert bench.seen == (100, 9.5, 10.5)
    bench.next_epoch(1)
    bench.handle(1.0, RowsTrained(10, 0.1))
    assert bench.seen == (10, 1.0, 0.0)


def test_what_is_unknown_has_no_time_left():
    bench = Bench(None, epochs=None)
    bench.report(1.0, 0, 20, 1.0)
    pace = bench.pace
    assert (pace.seconds_left, pace.seconds_left_of_epoch, pace.done, pace.rows_per_second) == (None, None, None, 20.0)
    assert Bench(10).pace.seconds_left is None


@pytest.mark.parametrize(
    ("epochs", "values", "frequency", "expected"),
    [
        (range(4), [1, 2], None, {1: 1, 3: 2}),
        (range(3, 9), [1, 2], 4, {3: 1, 7: 2}),
        (range(3), [1, 2, 3], None, {0: 1, 1: 2, 2: 3}),
        (range(4), [7], 1, {3: 7}),
        (range(0), [], None, {}),
    ],
)
def test_values_of_a_history_belong_to_epochs(epochs, values, frequency, expected):
    logs = logs_by_epoch(epochs, {"loss": list(epochs), "val_loss": values}, frequency)
    assert [each["loss"] for each in logs] == list(epochs)
    assert {each["loss"]: each["val_loss"] for each in logs if "val_loss" in each} == expected
