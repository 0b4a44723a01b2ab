"""Curves of the workers, read with TensorBoard's own reader."""

import os
import subprocess
import sys

import numpy as np
import pytest

from sparkkeras import ConfigurationError, StorageError, UnknownArgumentError, WorkerTensorBoard
from sparkkeras import events as happened


def curves(folder):
    """The scalars in a folder: ``{tag: [(step, value)]}``."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder)).Reload()
    return {tag: [(each.step, each.value) for each in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def report(callback, epoch, *logs):
    workers = tuple(happened.WorkerEpoch(worker, 10, 2.0, each) for worker, each in enumerate(logs))
    callback.on_event(happened.WorkersReported(epoch, workers))


def test_each_worker_has_a_folder_with_its_metrics_which_further_training_continues(tmp_path):
    callback = WorkerTensorBoard(tmp_path)
    callback.on_train_begin()
    report(callback, 0, {"loss": 2.0, "confusion": np.eye(2), "none": None}, {"loss": np.float32(4.0)})
    assert curves(tmp_path / "worker-0")["epoch_loss"] == [(0, 2.0)]  # during training
    callback.on_event(happened.RunEnded())
    callback.on_train_begin()
    report(callback, 1, {"loss": 1.0}, {"loss": 3.0})
    callback.on_train_end()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["worker-0", "worker-1"]
    assert curves(tmp_path / "worker-0") == {
        "epoch_loss": [(0, 2.0), (1, 1.0)],
        "epoch_rows_per_second": [(0, 5.0), (1, 5.0)],
    }
    assert curves(tmp_path / "worker-1")["epoch_loss"] == [(0, 4.0), (1, 3.0)]


def test_it_does_not_import_tensorflow():
    code = """
import sys, tempfile
from sparkkeras import WorkerTensorBoard, events
folder = tempfile.mkdtemp()
callback = WorkerTensorBoard(folder)
callback.on_event(events.WorkersReported(0, (events.WorkerEpoch(0, 1, 1.0, {"loss": 1.0}),)))
callback.on_train_end()
print("tensorflow" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ | {"KERAS_BACKEND": "jax"}
    )
    assert done.stdout.strip() == "False"


def test_errors(tmp_path, monkeypatch):
    with pytest.raises(UnknownArgumentError, match="log_dir"):
        WorkerTensorBoard(logdir="logs")
    with pytest.raises(ConfigurationError, match="a local folder"):
        WorkerTensorBoard("hdfs://logs")
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="can be"):
        report(WorkerTensorBoard(tmp_path / "file"), 0, {"loss": 1.0})
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    with pytest.raises(ConfigurationError, match=r"pip install sparkkeras\[tensorboard\]"):
        WorkerTensorBoard()
