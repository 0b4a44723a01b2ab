"""Workers report their progress within an epoch; the driver adds it up; nothing depends on it."""

from contextlib import contextmanager

import keras
import pytest

from sparkkeras.data.dataset import DriverAddress
from sparkkeras.errors import ConfigurationError
from sparkkeras.events import EpochProgress, Events
from sparkkeras.modeling.custom_code import ByValue
from sparkkeras.rpc.options import ServerOptions
from sparkkeras.spark import live_progress as module
from sparkkeras.spark import progress_service
from sparkkeras.spark.live_progress import LiveProgress, live_progress
from sparkkeras.worker import progress
from sparkkeras.worker.progress import WorkerProgress
from tests.training.jobs import Model, RecordedEvents, fit, partitions

LOOPBACK = DriverAddress("127.0.0.1", "127.0.0.1", is_local=True)


@pytest.fixture
def recorded():
    return RecordedEvents()


class Bench:
    def __init__(self, recorded, rows):
        self.now, self.recorded = 0.0, recorded
        self.live = LiveProgress(Events([recorded]), rows, lambda: self.now)

    def take(self, *report, **logs):
        self.now += 1.0
        self.live.take(WorkerProgress(*report, logs))
        return self.recorded.events[-1]


def test_reports_of_workers_are_added_up(recorded):
    bench = Bench(recorded, [100, 300])
    assert bench.take(0, 0, 50, 1.0, loss=1.0) == EpochProgress(0, 50, 0.125, 1.0, {"loss": 1.0})
    assert bench.take(1, 0, 150, 2.0, loss=0.5, mae=1.0) == EpochProgress(0, 200, 0.5, 2.0, {"loss": 0.625})
    assert bench.take(0, 0, 100, 3.0, loss=0.5).rows == 250


def test_workers_that_are_ahead_have_trained_all_rows_of_the_epoch(recorded):
    bench = Bench(recorded, [100, 300])
    bench.take(0, 3, 10, 1.0, loss=1.0)
    assert bench.take(1, 2, 150, 2.0, loss=0.5) == EpochProgress(2, 250, 0.625, 2.0, {"loss": 0.5})


def test_an_unknown_number_of_rows_has_no_fraction(recorded):
    assert Bench(recorded, [None, 300]).take(0, 0, 50, 1.0).done is None
    assert Bench(recorded, [40]).take(0, 0, 50, 1.0).done == 1.0


def test_events_are_seldom(recorded):
    live = LiveProgress(Events([recorded]), [100], lambda: 5.0)
    for _ in range(10):
        live.take(WorkerProgress(0, 0, 1, 1.0, {}))
    assert len(recorded.events) == 1


class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        import time

        time.sleep(0.05)


@contextmanager
def fast_reports(monkeypatch):
    monkeypatch.setattr(progress, "REPORT_SECONDS", 0.02)
    monkeypatch.setattr(module, "EVENT_SECONDS", 0.0)
    yield


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_a_long_epoch_is_reported_while_it_runs(mode, monkeypatch, recorded):
    def slow_fit(target):
        callbacks = ByValue.dump([Slow()], "callbacks")
        fit(Model(optimizer=keras.optimizers.SGD(0.1)), partitions(40), mode, worker_callbacks=callbacks, progress=target)

    with fast_reports(monkeypatch), live_progress(Events([recorded]), LOOPBACK, ServerOptions(), [40]) as target:
        slow_fit(target)
    rows = [event.rows for event in recorded.of(EpochProgress)]
    assert len(rows) >= 3
    assert rows == sorted(rows)
    assert 0 < rows[0] < rows[-1] <= 40
    assert "loss" in recorded.events[-1].logs


def test_a_driver_that_cannot_be_reached_is_tried_once(monkeypatch, recorded):
    connects = []
    real = progress._caller
    monkeypatch.setattr(progress, "_caller", lambda address: connects.append(real(address)) or connects[-1])
    monkeypatch.setattr(progress, "REPORT_SECONDS", 0.0)
    with live_progress(Events([recorded]), LOOPBACK, ServerOptions(), [8]) as target:
        pass
    for _ in range(2):
        with target.reporter(0, 0) as reporter:
            reporter.update(8, {})
            reporter._thread.join(5)
            assert not reporter._thread.is_alive()
    assert connects[0] is not None
    assert connects[1] is None
    assert not recorded.events


def test_short_epochs_open_no_connection(recorded):
    with live_progress(Events([recorded]), LOOPBACK, ServerOptions(), [8]) as target:
        with target.reporter(0, 0) as reporter:
            for _ in range(10_000):
                reporter.update(8, {})
            assert reporter._thread is None


def test_nobody_listens_without_need_or_where_it_is_impossible(monkeypatch, recorded):
    with live_progress(Events(), LOOPBACK, ServerOptions(), [8]) as target:
        assert target is None
    with live_progress(Events([recorded]), None, ServerOptions(), [8]) as target:
        assert target is None
    elsewhere = DriverAddress("192.0.2.1", "192.0.2.1", is_local=False)
    with live_progress(Events([recorded]), elsewhere, ServerOptions(), [8]) as target:
        assert target is None
    with pytest.raises(ConfigurationError), progress_service.receiving(print, elsewhere, ServerOptions(), 1):
        pass
