"""Training on Spark that is interrupted and resumed from checkpoints, with the bits of an uninterrupted one."""

import os
import re
import signal
import subprocess
import sys
import uuid

import keras
import numpy as np
import pytest

from sparkkeras import Checkpoint, ConfigurationError, SparkModel, StorageError
from sparkkeras.checkpoints.store import CheckpointStore
from sparkkeras.spark import filesystem
from tests.models import classifier
from tests.processes import clean_environment


class Untouched(keras.callbacks.Callback):
    """Must not be called, not even with the model: that alone has TensorBoard write files."""

    def set_model(self, model):
        raise AssertionError


class Interrupt(keras.callbacks.Callback):
    """Interrupts training like Ctrl-C."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise KeyboardInterrupt


def test_resume_the_model_of_the_checkpoint_and_a_new_one(sc, digits, tmp_path):
    x, y, *_ = digits
    x, y = x[:120], y[:120]

    def fit(spark_model, epochs=3, **arguments):
        return spark_model.fit(x, y, epochs=epochs, validation_split=0.1, verbose=0, **arguments)

    def new(seed=3):
        return SparkModel(classifier(), num_workers=2, batch_size=16, seed=seed, rule="slowmo")

    whole = new()
    expected = fit(whole).history
    fit(whole, epochs=1)
    path = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        fit(new(), checkpoint=Checkpoint(path), callbacks=[Interrupt()])
    assert len(CheckpointStore(str(path)).names()) == 2
    resumed = SparkModel.from_checkpoint(path)
    assert fit(resumed, checkpoint=Checkpoint(path), resume=True).history == expected
    again = new(seed=4)  # that of the checkpoint counts
    assert fit(again, checkpoint=Checkpoint(path), resume=True).history == expected
    found = fit(new(), checkpoint=Checkpoint(path), resume=True, callbacks=[Untouched()])  # it has ended: nothing to train
    assert found.history == expected
    for spark_model in (resumed, again):
        fit(spark_model, epochs=1)  # with the seed and the state of the rule that follow
        for one, other in zip(spark_model.model.get_weights(), whole.model.get_weights(), strict=True):
            np.testing.assert_array_equal(one, other)


def test_checkpoints_in_object_stores_need_no_renames(hadoop_uri, tmp_path, monkeypatch):
    monkeypatch.setattr(filesystem, "_OBJECT_STORES", {"viewfs"})
    for name in ("_rename", "move"):
        monkeypatch.setattr(filesystem._Hadoop, name, None)
    store = CheckpointStore(hadoop_uri, keep=2)
    older, newest = [store.write("a test", np.full(100, number)) for number in range(3)][1:]
    assert store.names() == [newest, older]
    assert sorted(each.name for each in (tmp_path / newest).glob("[!.]*")) == ["arrays.bin", "manifest.json"]
    assert store.newest().value[0] == 2


@pytest.mark.parametrize("scheme", ["viewfs", "vendor"])
def test_a_writer_that_is_killed_leaves_no_part_of_a_manifest(sc, hadoop_uri, tmp_path, monkeypatch, scheme):
    path, copy, found = hadoop_uri, filesystem._Hadoop._copy, []
    if scheme == "vendor":  # without the part of Hadoop that renames atomically
        conf, table = sc._jsc.hadoopConfiguration(), uuid.uuid4().hex
        conf.set("fs.vendor.impl", "org.apache.hadoop.fs.viewfs.ViewFileSystemOverloadScheme")
        conf.set(f"fs.viewfs.mounttable.{table}.link./data", tmp_path.as_uri())
        path = f"vendor://{table}/data"

    def look_at_begin(target, source):
        target.files.create(target.target).close()  # what is there if the writer is killed now
        found.append(CheckpointStore(path).newest())
        copy(target, source)

    monkeypatch.setattr(filesystem._Hadoop, "_copy", look_at_begin)
    name = CheckpointStore(path).write("a test", 1)
    assert found == [None, None]
    assert CheckpointStore(path).newest().value == 1
    files = [each.name for each in (tmp_path / name).iterdir() if not each.name.endswith(".crc")]
    assert sorted(files) == ["arrays.bin", "manifest.json"]


def test_refused(sc, digits, tmp_path):
    x, y, *_ = digits
    with pytest.raises(StorageError, match="has no complete checkpoint"):
        SparkModel.from_checkpoint(tmp_path)
    with pytest.raises(ConfigurationError, match="workers do not make rounds together"):
        SparkModel(classifier(), mode="asynchronous").fit(x, y, checkpoint=Checkpoint(tmp_path, 2))
    arguments = {"verbose": 0, "batch_size": 40, "checkpoint": Checkpoint(tmp_path)}
    SparkModel(classifier(), num_workers=1).fit(x[:40], y[:40], resume=True, **arguments)
    before = sorted(os.listdir(tmp_path))
    for model, changed, message in (
        (classifier(), {}, "has 1 checkpoint of an earlier training.*resume=True to continue it, or another path"),
        (classifier(), {"resume": True, "batch_size": 20}, "batch_size: 40 in the checkpoint, 20 now"),
        (classifier(units=9), {"resume": True}, r"model.config.layers\[1\].config.units: 64 in the checkpoint, 9 now"),
        (classifier(optimizer=keras.optimizers.Adam(0.5)), {"resume": True}, "learning_rate: 0.001.* now"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            SparkModel(model, num_workers=1).fit(x[:40], y[:40], **arguments | changed)
    with pytest.raises(ConfigurationError, match="rule.name: .average. in the checkpoint, .slowmo. now"):
        SparkModel(classifier(), num_workers=1, rule="slowmo").fit(x[:40], y[:40], resume=True, **arguments)
    assert sorted(os.listdir(tmp_path)) == before


DRIVER = """
import os, signal, sys, time
import keras, numpy as np
from pyspark import SparkConf, SparkContext
from sparkkeras import Checkpoint, SparkModel
from sparkkeras.checkpoints.background_writer import BackgroundWriter
from tests.models import classifier

path, rounds, mode = sys.argv[1], int(sys.argv[2]), sys.argv[3]
generator = np.random.default_rng(0)
x, y = generator.random((120, 64), np.float32), generator.integers(0, 10, 120)
reached = 0
submit = BackgroundWriter.submit

def killed(self, item):
    global reached
    submit(self, item)
    reached += 1
    if reached == rounds:
        os.kill(os.getpid(), signal.SIGKILL)  # while the thread is writing
    time.sleep(0.3)

BackgroundWriter.submit = killed
context = SparkContext(conf=SparkConf().setMaster("local[2]").set("spark.ui.enabled", "false"))
frequency, every = {"synchronous": (2, 1), "allreduce": (None, 2), "asynchronous": (1, "epoch")}[mode]
model = SparkModel(classifier(), num_workers=2, batch_size=16, seed=3, mode=mode, frequency=frequency)
history = model.fit(x, y, epochs=4, verbose=0, checkpoint=Checkpoint(path, every), resume=True)
trained = [(entry["epoch"], entry["worker"], entry["rows"]) for entry in model.training_histories]
stats = model.parameter_server_stats
print("trained", trained, int(model.model.optimizer.iterations), stats and stats.steps)
print("bits", b"".join(each.tobytes() for each in model.model.get_weights()).hex()[-4000:], history.history)
"""


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["synchronous", "allreduce", "asynchronous"])
def test_a_driver_that_is_killed_again_and_again(tmp_path, mode):
    """kill -9 in the middle of writing; the next process resumes from the newest complete checkpoint.

    The bits of asynchronous training depend on the order of updates, but each of them counts once.
    """

    def run(name, rounds):
        return subprocess.run(
            [sys.executable, "-c", DRIVER, str(tmp_path / name), str(rounds), mode],
            env=clean_environment(),
            capture_output=True,
            text=True,
            timeout=200,
        )

    whole = run("whole", 0)
    assert whole.returncode == 0, whole.stderr[-3000:]
    shown = "trained" if mode == "asynchronous" else "bits"
    expected = re.search(f"^{shown} .*", whole.stdout, re.MULTILINE)[0]
    for _ in range(10):
        ran = run("killed", 2 if mode == "asynchronous" else 3)
        if ran.returncode == 0:
            break
        assert ran.returncode == -signal.SIGKILL, ran.stderr[-3000:]
    assert ran.returncode == 0
    assert expected in ran.stdout
