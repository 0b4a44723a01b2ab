"""The speed of a training, without the time in which workers start, and the time that is left."""

import pytest

from sparkkeras.events import EpochMeasured, EpochProgress, Incident, RowsTrained, Updates
from sparkkeras.progress.pace import Pace


class Bench:
    """A pace on a simulated clock."""

    def __init__(self, epochs=2):
        self.now = 100.0
        self.pace = Pace(epochs, lambda: self.now)
        self.pace.begin_epoch(0)

    def handle(self, seconds, event):
        self.now += seconds
        return self.pace.handle(event)

    @property
    def seen(self):
        pace = self.pace
        return pace.rows, pace.seconds, pace.startup_seconds


def test_rounds_count_without_start_up():
    bench = Bench()
    assert bench.handle(12.0, RowsTrained(100, 0.5, 10.0))
    assert bench.seen == (100, 2.0, 10.0)
    bench.handle(2.0, RowsTrained(100, 1.0))
    assert (bench.seen, bench.pace.rows_per_second, bench.pace.seconds_left) == ((200, 4.0, 10.0), 50.0, 4.0)


def test_the_workers_reports_count_within_a_round():
    bench = Bench()
    assert bench.handle(11.0, EpochProgress(0, 20, 0.1, 1.0, {"loss": 0.5}))
    assert (bench.seen, bench.pace.logs) == ((20, 1.0, 10.0), {"loss": 0.5})
    assert bench.pace.seconds_left_of_epoch == pytest.approx(9.0)
    assert bench.pace.seconds_left == pytest.approx(19.0)
    bench.handle(1.0, EpochProgress(0, 60, 0.3, 2.0))
    assert bench.seen == (60, 2.0, 10.0)
    assert bench.handle(8.0, RowsTrained(200, 1.0, 9.5))
    assert bench.seen == (200, 10.5, 9.5)


def test_old_reports_do_not_count():
    bench = Bench()
    bench.handle(2.0, RowsTrained(100, 0.5))
    assert not bench.handle(0.1, EpochProgress(0, 90, 0.45, 1.0))
    bench.pace.end_epoch()
    bench.pace.begin_epoch(1)
    assert not bench.handle(0.1, EpochProgress(0, 200, 1.0, 1.0))
    assert not bench.handle(0.1, Incident("retry", "again"))
    assert bench.seen[0] == 0


def test_with_a_parameter_server_workers_have_started_when_rows_arrive():
    bench = Bench()
    bench.handle(10.0, RowsTrained(0, 0.0))
    bench.handle(1.0, RowsTrained(10, 0.1))
    assert bench.seen == (10, 0.0, 11.0)
    bench.handle(1.0, RowsTrained(10, 0.2))
    assert bench.seen == (20, 1.0, 11.0)
    updates = Updates(5, 2.0, {}, 0.0, 0)
    assert bench.handle(8.0, EpochMeasured(0, 100, 9.5, 10.5, updates))
    assert bench.seen == (100, 9.5, 10.5)
    bench.pace.end_epoch()
    bench.pace.begin_epoch(1)
    bench.handle(1.0, RowsTrained(10, 0.1))
    assert bench.seen == (10, 1.0, 0.0)


def test_what_is_unknown_has_no_time_left():
    bench = Bench(epochs=None)
    bench.handle(1.0, EpochProgress(0, 20, None, 1.0))
    assert (bench.pace.seconds_left, bench.pace.seconds_left_of_epoch, bench.pace.rows_per_second) == (None, None, 20.0)
    assert Bench().pace.seconds_left is None
