"""Failures with Spark Connect: killed workers, missing files, errors and interrupts."""

import shutil
import time

import keras
import pytest

from sparkkeras import ConfigurationError, SparkModel, WorkerError
from sparkkeras.spark import connect
from tests.connect import cases
from tests.connect.conftest import server, stored
from tests.processes import interrupted_when
from tests.rpc.test_transports import eventually

LONG = "a long message " * 4000


def wait():
    time.sleep(120)


class Remove(keras.callbacks.Callback):
    """Removes the files of all workers, after the first epoch."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder
        self.removed = 0

    def on_epoch_end(self, epoch, logs=None):
        for found in [] if epoch else stored(self.folder):
            shutil.rmtree(found)
            self.removed += 1


def fail_with_long_message(x, y=None):
    if len(x) > 1:
        raise LookupError(LONG)
    return x, y


def fitted(spark, **named):
    trained = SparkModel(cases.model(), batch_size=16, seed=7)
    trained.fit(cases.frame(spark), **({"epochs": 2, "verbose": 0} | named))
    return trained


def test_a_killed_worker_is_replaced(spark, classic, tmp_path):
    trained = fitted(spark, worker_callbacks=cases.Once(tmp_path, cases.kill))
    assert (tmp_path / "done").exists()
    classic.check("plain", trained)


@pytest.mark.parametrize("bound", [pytest.param(None, marks=pytest.mark.soak), 0])
def test_missing_files_are_written_again(spark, classic, local_dir, monkeypatch, bound):
    """With results that are sent to the driver, and with results that are merged on the cluster."""
    if bound is not None:
        monkeypatch.setattr(connect.RemoteCluster, "max_result_bytes", 1)
    remove = Remove(local_dir)
    trained = fitted(spark, callbacks=[remove])
    assert remove.removed
    classic.check("plain", trained)
    assert not stored(local_dir)


def test_a_long_error_is_reported_in_full(spark):
    with pytest.raises(WorkerError) as raised:
        fitted(spark, transform=fail_with_long_message)
    assert LONG.strip() in raised.value.worker_traceback


def test_what_spark_connect_lacks_is_rejected(spark):
    trained = SparkModel(cases.model(), "asynchronous")
    for data in ((cases.frame(spark),), cases.arrays()):
        with pytest.raises(ConfigurationError, match='mode="synchronous"'):
            trained.fit(*data, verbose=0)
    with pytest.raises(ConfigurationError, match="pass a DataFrame"):  # in place of an RDD of predictions
        trained.predict(cases.arrays()[0], collect=False)


def test_an_interrupt_cancels_the_job(spark, tmp_path, local_dir):
    with interrupted_when((tmp_path / "done").exists, 60):
        fitted(spark, worker_callbacks=cases.Once(tmp_path, wait))
    assert eventually(lambda: not server().statusTracker().getActiveJobsIds())
    assert not stored(local_dir)
    assert not spark.getTags()
    assert spark.range(3).count() == 3
