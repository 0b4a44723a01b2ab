"""Failures with Spark Connect: killed workers, missing files, errors and interrupts."""

import os
import shutil
import signal
import time
from pathlib import Path

import keras
import numpy as np
import pytest

from sparkkeras import ConfigurationError, DataError, SparkModel, WorkerError
from tests.connect import cases
from tests.connect.conftest import server, stored
from tests.processes import interrupted_when

LONG = "a long message " * 4000


class Once(keras.callbacks.Callback):
    """Calls ``act`` once, in one worker, at the end of a batch."""

    def __init__(self, folder):
        super().__init__()
        self.folder = str(folder)

    def on_train_batch_end(self, batch, logs=None):
        try:
            (Path(self.folder) / "done").touch(exist_ok=False)
        except FileExistsError:
            return
        self.act()


class Kill(Once):
    def act(self):
        os.kill(os.getpid(), signal.SIGKILL)


class Sleep(Once):
    def act(self):
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


def as_plain(classic, weights):
    return all(np.array_equal(*pair) for pair in zip(classic.of("plain")[0], weights, strict=True))


def fitted(spark, **named):
    trained = SparkModel(cases.model(), batch_size=16, seed=7)
    trained.fit(cases.frame(spark), **({"epochs": 2, "verbose": 0} | named))
    return trained.model.get_weights()


def test_a_killed_worker_is_replaced(spark, classic, tmp_path):
    weights = fitted(spark, worker_callbacks=Kill(tmp_path))
    assert (tmp_path / "done").exists()
    assert as_plain(classic, weights)


@pytest.mark.parametrize("bound", [pytest.param(None, marks=pytest.mark.soak), 0])
def test_missing_files_are_written_again(spark, classic, local_dir, monkeypatch, bound):
    """With results that are sent to the driver, and with results that are merged on the cluster."""
    import sparkkeras.spark.connect

    if bound is not None:
        monkeypatch.setattr(sparkkeras.spark.connect.RemoteCluster, "max_result_bytes", 1)
    remove = Remove(local_dir)
    weights = fitted(spark, callbacks=[remove])
    assert remove.removed
    assert as_plain(classic, weights)
    assert not stored(local_dir)


def test_a_long_error_is_reported_in_full(spark):
    with pytest.raises(WorkerError) as raised:
        fitted(spark, transform=fail_with_long_message)
    assert LONG.strip() in raised.value.worker_traceback
    x, _ = cases.arrays()
    with pytest.raises(ConfigurationError, match="a long message a long message"):  # the driver calls it on the arrays
        SparkModel(cases.model()).predict(x, transform=fail_with_long_message)


def test_errors_about_rows_keep_their_type_and_message(spark):
    frame = cases.frame(spark).selectExpr("features", "label + 2 AS label")
    for call in (SparkModel(cases.model()).fit, SparkModel(cases.model()).evaluate):
        with pytest.raises(DataError, match="labels must be integers from 0 to 3, but they range from 2 to 5"):
            call(frame)


def test_asynchronous_modes_are_rejected(spark):
    trained = SparkModel(cases.model(), "asynchronous")
    for data in ((cases.frame(spark),), cases.arrays()):
        with pytest.raises(
            ConfigurationError, match=r'which Spark Connect does not provide.*mode="synchronous".*spark-submit'
        ):
            trained.fit(*data, verbose=0)


def test_calls_that_return_rdds_are_rejected(spark):
    with pytest.raises(ConfigurationError, match="which Spark Connect does not support: pass a DataFrame"):
        SparkModel(cases.model()).predict(cases.arrays()[0], collect=False)


def test_an_interrupt_cancels_the_job(spark, tmp_path, local_dir):
    with interrupted_when((tmp_path / "done").exists, 60):
        fitted(spark, worker_callbacks=Sleep(tmp_path))
    deadline = time.monotonic() + 60
    while server().statusTracker().getActiveJobsIds() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not server().statusTracker().getActiveJobsIds()
    assert not stored(local_dir)
    assert not spark.getTags()
    assert spark.range(3).count() == 3
