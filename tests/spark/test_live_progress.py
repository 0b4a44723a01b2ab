"""Workers report their progress within an epoch; the driver adds it up; nothing depends on it."""

import sys
from types import SimpleNamespace

import keras
import pytest

from sparkkeras.data.dataset import DriverAddress
from sparkkeras.errors import ClusterError, ConfigurationError
from sparkkeras.events import Events, WorkerProgress
from sparkkeras.modeling.custom_code import ByValue
from sparkkeras.rpc.options import ServerOptions
from sparkkeras.rpc.transport import connect
from sparkkeras.spark.live_progress import live_progress, receiving
from sparkkeras.worker import progress
from tests.training.runs import Model, RecordedEvents, fit, partitions

LOOPBACK = SimpleNamespace(driver=DriverAddress("127.0.0.1", "127.0.0.1", is_local=True))


@pytest.fixture
def recorded():
    return RecordedEvents()


class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        import time

        time.sleep(0.05)


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_a_long_epoch_is_reported_while_it_runs(mode, monkeypatch, recorded):
    monkeypatch.setattr(progress, "REPORT_SECONDS", 0.02)
    callbacks = ByValue.dump([Slow()], "callbacks")
    with live_progress(Events([recorded]), LOOPBACK, ServerOptions()) as target:
        fit(Model(optimizer=keras.optimizers.SGD(0.1)), partitions(40), mode, worker_callbacks=callbacks, progress=target)
    rows = [event.rows for event in recorded.of(WorkerProgress)]
    assert len(rows) >= 3
    assert rows == sorted(rows)
    assert 0 < rows[0] < rows[-1] == 40
    assert "loss" in recorded.events[-1].logs


def test_a_driver_that_cannot_be_reached_is_tried_once(monkeypatch, recorded):
    connects = []
    monkeypatch.setattr("sparkkeras.rpc.transport.connect", lambda address: connects.append(address) or connect(address))
    monkeypatch.setattr(progress, "REPORT_SECONDS", 0.0)
    with live_progress(Events([recorded]), LOOPBACK, ServerOptions()) as target:
        pass
    for _ in range(3):
        with progress.ProgressReporter(target, 0) as reporter:
            reporter.update(8, {})
            reporter._thread.join(5)
            assert not reporter._thread.is_alive()
    assert len(connects) == 1
    assert not recorded.events


def test_a_worker_without_cryptography_sends_nothing(monkeypatch, recorded):
    monkeypatch.setattr(progress, "REPORT_SECONDS", 0.0)
    with (
        live_progress(Events([recorded]), LOOPBACK, ServerOptions()) as target,
        progress.ProgressReporter(target, 0) as reporter,
    ):
        monkeypatch.setitem(sys.modules, "sparkkeras.rpc.transport", None)
        reporter.update(8, {})
        reporter._thread.join(5)
    assert not recorded.events


class Unknown:
    @property
    def driver(self):
        raise ClusterError("it cannot be resolved")


def test_nobody_listens_without_need_or_where_it_is_impossible(recorded):
    elsewhere = DriverAddress("192.0.2.1", "192.0.2.1", is_local=False)
    for events, cluster in (
        (Events(), LOOPBACK),
        (Events([recorded], within_epochs=False), LOOPBACK),
        (Events([recorded]), None),
        (Events([recorded]), Unknown()),
        (Events([recorded]), SimpleNamespace(driver=elsewhere)),
    ):
        with live_progress(events, cluster, ServerOptions()) as target:
            assert target is None
    with pytest.raises(ConfigurationError), receiving(print, elsewhere, ServerOptions(), 1):
        pass
