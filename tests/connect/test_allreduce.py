"""All-reduce training behind Spark Connect: ranks are new processes of the server's workers, and connect to this process."""

import os
import shutil
import signal
import time
from pathlib import Path

import keras
import numpy as np
import psutil
import pytest

import sparkkeras.sources.connect_partitions
import sparkkeras.spark.connect
from sparkkeras import ConfigurationError, SparkModel
from tests.connect import cases
from tests.connect.conftest import server, stored
from tests.models import same
from tests.rpc.test_transports import eventually

BATCH = 16


def processes():
    """The processes of ranks: children of the server's workers."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if "sparkkeras.worker.processes" in process.cmdline():
                found.append(process.pid)
        except psutil.Error:
            pass
    return found


@pytest.fixture(autouse=True)
def nothing_left(spark, local_dir):
    """Checks that no process of a rank, no job, no rows and no tags remain."""
    yield
    assert eventually(lambda: not (processes() or server().statusTracker().getActiveJobsIds()), 10)
    assert not stored(local_dir)
    assert not spark.getTags()


def kill_worker():
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)


def remove():
    for folder in list(Path(os.environ["SPARK_LOCAL_DIRS"].split(",")[0]).rglob("part-1-*")):
        shutil.rmtree(folder)
    raise RuntimeError("on purpose")


def fitted(data, *labels, model=None, epochs=3, **arguments):
    spark_model = SparkModel(cases.model(), "allreduce", batch_size=BATCH, seed=4, **(model or {}))
    history = spark_model.fit(*data, *labels, epochs=epochs, verbose=0, **arguments)
    return spark_model, history


def test_training_is_bit_identical_to_a_classic_session(spark, classic):
    classic.check("allreduce", *cases.CASES["allreduce"].train(spark))


@pytest.fixture(scope="module")
def uninterrupted(spark):
    return fitted(cases.arrays(), worker_callbacks=[keras.callbacks.Callback()])[0]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("action", "reason"),
    [(cases.kill, "killed by SIGKILL"), (kill_worker, "its worker died"), (remove, "on purpose")],
)
def test_training_continues_from_the_last_epoch_with_the_same_result(spark, uninterrupted, tmp_path, action, reason):
    begun = []
    noted = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, _: begun.append(epoch))
    once = cases.Once(tmp_path, action, epoch=1, rank="1")
    with pytest.warns(UserWarning, match=f"beginning of epoch 2 .*rank 1.*{reason}"):
        spark_model, history = fitted(cases.arrays(), worker_callbacks=[once], callbacks=[noted])
    assert begun == history.epoch == [0, 1, 2]
    assert same(spark_model, uninterrupted)
    assert len(spark_model.training_histories) == 6


@pytest.mark.soak
@pytest.mark.parametrize(("is_frame", "rows"), [(True, 240), (False, 192)], ids=["frame", "column"])
def test_validation_where_workers_are_far(spark, monkeypatch, is_frame, rows):
    if is_frame:
        for module in (sparkkeras.spark.connect, sparkkeras.sources.connect_partitions):
            monkeypatch.setattr(module, "INLINE_BYTES", 0)
    monkeypatch.setattr(sparkkeras.spark.connect.RemoteCluster, "is_local", False)
    x, y = cases.arrays()
    held_out, weight = np.arange(len(x)) % 5 == 0, np.linspace(0.5, 2, 240).astype(np.float32)
    frame = cases.frame(spark)
    named = {"validation_data": frame.where("held_out")} if is_frame else {"validation_col": "held_out"}
    spark_model, history = fitted((frame,), epochs=2, sample_weight="weight", **named, model={"num_workers": 2})
    assert sum(report["rows"] for report in spark_model.training_histories) == 2 * rows
    expected = spark_model.model.evaluate(x[held_out], y[held_out], sample_weight=weight[held_out], verbose=0)
    assert history.history["val_loss"][-1] == pytest.approx(expected, rel=1e-4)


@pytest.mark.soak
def test_dynamic_allocation_is_an_error_before_data_is_read(spark, monkeypatch):
    get = spark.conf.get
    monkeypatch.setattr(
        type(spark.conf), "get", lambda self, name, *other: "true" if "dynamicAllocation" in name else get(name, *other)
    )
    with pytest.raises(ConfigurationError, match="SPARK-24942"):
        fitted(cases.arrays())
