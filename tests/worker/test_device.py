"""Setup of a process for training."""

import gc
import json
import logging
import os
import pickle
import subprocess
import sys
import weakref
from collections import OrderedDict
from types import SimpleNamespace

import keras
import numpy as np
import pytest

from sparkkeras.data.block import from_arrays
from sparkkeras.modeling import archive as models
from sparkkeras.modeling import garbage_collection
from sparkkeras.worker import device
from tests.models import regression


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="TensorFlow's warnings")
def test_retracing_warnings_are_filtered_if_several_models_are_traced_once(monkeypatch):
    import tensorflow as tf
    from tensorflow.python.eager.polymorphic_function import polymorphic_function

    manager = polymorphic_function._FrequentTracingDetectorManager()  # one that has not warned yet
    monkeypatch.setattr(polymorphic_function, "_frequent_tracing_detector_manager", manager)
    seen, logger = [], tf.get_logger()
    monkeypatch.setattr(logger, "filters", [lambda record: seen.append(record)])
    for _ in range(6):
        keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]).predict_on_batch(np.zeros((1, 3)))
    of_keras, own = len(seen), tf.function(lambda number: number)
    for number in range(6):
        own(number)
    assert 0 < of_keras < len(seen)
    assert [device._concerns_user(record) for record in seen] == [number >= of_keras for number in range(len(seen))]
    assert device._concerns_user(logging.LogRecord("tensorflow", logging.WARNING, "", 0, "%s left", ("one",), None))


@pytest.mark.parametrize(("every", "steps"), [(37, 1), (40, 20), (64, 32)])
def test_steps_per_execution_divides_the_exchange_window(every, steps):
    """The largest divisor of the window, up to 32 here."""
    assert device.steps_per_execution(SimpleNamespace(run_eagerly=False), 32, False, every) == steps


def test_the_models_used_last_are_kept_and_others_collected(monkeypatch):
    garbage_collection.freeze_survivors()  # not a worker: the process belongs to the user
    assert gc.get_freeze_count() == 0
    monkeypatch.setenv("SPARKKERAS_WORKER", "1")
    monkeypatch.setattr(models, "_kept", OrderedDict())
    monkeypatch.setattr(models, "KEPT_MODELS", 1)
    archive = models.ModelArchive.pack(regression())
    try:
        first = weakref.ref(archive.cached())
        assert pickle.loads(pickle.dumps(archive)).cached() is first()
        garbage_collection.freeze_survivors()
        assert gc.get_freeze_count() > 0
        models.ModelArchive.pack(regression(width=4)).cached()
        gc.collect()
        assert first() is None
    finally:
        gc.unfreeze()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_worker_uses_the_dtypes_of_the_driver():
    before = dtypes()
    try:
        set_dtypes("float64", "mixed_bfloat16", "channels_first")
        given = device.worker_environment(1)
    finally:
        set_dtypes(*before)
    assert given["KERAS_BACKEND"] == keras.backend.backend()
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.environ.update(given, SPARKKERAS_WORKER="1")
            device.prepare.cache_clear()
            device.prepare(1)
            os.write(writing, json.dumps(dtypes()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with open(reading) as found:
        assert json.load(found) == ["float64", "mixed_bfloat16", "channels_first"]


def dtypes():
    return [keras.config.floatx(), keras.config.dtype_policy().name, keras.config.image_data_format()]


def set_dtypes(floatx, policy, images):
    keras.config.set_floatx(floatx)
    keras.config.set_dtype_policy(policy)
    keras.config.set_image_data_format(images)


BROKEN = """
import builtins, threading
from sparkkeras.spark import probe
from sparkkeras.worker import device
builtins.begun, builtins.may_end = threading.Event(), threading.Event()
threading.Thread(target=probe._load_keras).start()
begun.wait(60)
threading.Timer(0.3, may_end.set).start()  # when this thread waits for the import
device.prepare(1)
"""


def test_the_error_of_an_import_that_another_thread_has_begun_is_raised(tmp_path):
    package = tmp_path / "keras"
    package.mkdir()
    (package / "__init__.py").write_text("begun.set()\nmay_end.wait(60)\nraise ValueError('a broken installation')\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "SPARKKERAS_WORKER": "1"}
    found = subprocess.run([sys.executable, "-c", BROKEN], env=environment, capture_output=True, text=True, check=False)
    assert found.stderr.rstrip().endswith("ValueError: a broken installation")


FORKED = """
import os, signal
from sparkkeras.worker import device
device.prepare(2)
device.prepare_to_fork(2)
import torch

def work():
    return torch.randn(1000, 1000).square().sum(), torch.get_num_threads()

before = work()[1]
child = os.fork()
if child == 0:
    signal.alarm(60)
    os._exit(10 * before + work()[1])
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.core
@pytest.mark.skipif(keras.backend.backend() != "torch", reason="PyTorch only")
def test_pytorch_works_in_forks_of_a_worker_that_has_used_it():
    environment = {**os.environ, **device.worker_environment(2), "SPARKKERAS_WORKER": "1"}
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == "12\n"  # one thread before, two in the fork


@pytest.mark.core
def test_rows_that_a_backend_may_overwrite_are_copied(tmp_path):
    mapped = np.memmap(tmp_path / "rows", np.float32, "w+", shape=(64, 16))  # at the start of a page
    block = from_arrays(mapped, mapped[::2], None)
    assert not any(np.shares_memory(array, mapped) for array in device.overwritable(block).arrays)


def test_workers_log_as_the_user_has_set_and_not_as_jax(monkeypatch):
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    assert device.worker_environment(1)["TF_CPP_MIN_LOG_LEVEL"] == "3"
    for given, expected in (("1", "3"), ("2", "2")):
        monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", given)
        assert device.worker_environment(1)["TF_CPP_MIN_LOG_LEVEL"] == expected


def test_a_worker_keeps_its_first_gpus(monkeypatch, caplog):
    monkeypatch.setattr(device, "_bound", "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    device._bind("0")
    device._bind("0")
    assert not caplog.records
    device._bind("1")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
    assert "already uses the GPU 0" in caplog.text
