"""Workers forked from a daemon that has imported Keras."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import pyspark
import pytest

from sparkkeras.spark import cluster, worker_checks
from sparkkeras.spark.cluster import Cluster
from sparkkeras.worker import device


def looks(_):
    daemon = os.getppid()
    return (
        "keras" in sys.modules,
        "sparkkeras.spark.daemon" in Path(f"/proc/{daemon}/cmdline").read_text(),
        daemon,
        os.getpid(),
    )


def used(_):
    device.prepare(1)
    before = device.is_uninitialized()
    device.initialize_backend()
    return before, device.is_uninitialized(), os.getpid()


def run(sc, function):
    """The results of a function in two training workers that run at the same time."""

    def together(number):  # pickled by value
        import time

        Path(folder, str(number)).touch()
        while len(os.listdir(folder)) < 2:
            time.sleep(0.01)
        return function(number)

    with tempfile.TemporaryDirectory() as folder, Cluster(sc).training_workers():
        return sc.parallelize(range(2), 2).map(together).collect()


def replace_workers(sc):
    """End all training workers: those of the next `run` are new. A task may have left more than two."""
    started = time.time()
    old = True
    while old:
        with pytest.raises(Exception, match="crashed"):
            run(sc, lambda _: os._exit(1))
        old = min(psutil.Process(each).create_time() for each in run(sc, lambda _: os.getpid())) < started


needs_proc = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


@needs_proc
def test_training_workers_start_with_keras_and_others_do_not(sc, monkeypatch):
    monkeypatch.setitem(sc.environment, "SPARKKERAS_WORKER", "")  # as outside tests; see conftest.py
    assert [each[:2] for each in run(sc, looks)] == [(True, True)] * 2
    assert [each[:2] for each in sc.parallelize(range(2), 2).map(looks).collect()] == [(False, True)] * 2


@needs_proc
def test_a_lost_worker_is_replaced_by_a_fork_of_the_same_daemon(sc):
    def ours(_):  # pickled by value, and imports nothing of this package
        import sys

        return [name for name in sys.modules if name.startswith("sparkkeras.")]

    before = run(sc, looks)
    replace_workers(sc)
    assert run(sc, ours) == [[], []]  # the driver may ship another version
    after = run(sc, looks)
    assert {each[3] for each in before}.isdisjoint(each[3] for each in after)
    assert {each[2] for each in before} == {each[2] for each in after}
    assert all(each[0] for each in after)


@pytest.mark.core
def test_every_fork_can_use_the_backend(sc):
    import keras  # not in the module, which other workers import

    initialized = keras.backend.backend() != "torch"  # on CPUs PyTorch has no state that a fork could not use
    replace_workers(sc)
    assert [each[:2] for each in run(sc, used)] == [(True, not initialized)] * 2
    replace_workers(sc)
    assert [each[:2] for each in run(sc, used)] == [(True, not initialized)] * 2


@pytest.mark.core
@pytest.mark.skipif(os.environ.get("KERAS_BACKEND") != "jax", reason="JAX compiles")
def test_workers_share_what_jax_compiles(sc):
    def shared(_):
        import jax
        from pyspark import SparkFiles

        device.prepare(1, shared_folder=SparkFiles.getRootDirectory())
        jax.block_until_ready(jax.jit(lambda array: array * 2)(np.ones(3)))
        folder = jax.config.jax_compilation_cache_dir
        return folder, sorted(os.listdir(folder or "/nonexistent"))

    first, second = run(sc, shared)
    assert first[0] == second[0]
    assert first[1]
    assert second[1]


def test_a_backend_that_cannot_be_loaded_is_reported_by_the_workers():
    environment = {**os.environ, "SPARKKERAS_WORKER": "1", "KERAS_BACKEND": "nonsense"}
    command = [sys.executable, "-m", "sparkkeras.spark.daemon", "pyspark.worker"]
    daemon = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=120)
    assert len(daemon.stdout) == 4, daemon.stdout  # only the port
    assert daemon.stderr == b""


def test_a_new_context_uses_the_daemon_if_its_workers_can(monkeypatch):
    given = []
    monkeypatch.setattr(pyspark.SparkContext, "_active_spark_context", None)
    monkeypatch.setattr(pyspark.SparkContext, "_jvm", None)  # a running JVM has its own settings
    monkeypatch.setattr(pyspark.SparkContext, "getOrCreate", lambda conf: given.append(conf))
    monkeypatch.delenv("SPARK_CONNECT_MODE_ENABLED", raising=False)

    def module():
        cluster.active_context()
        return given.pop().get("spark.python.daemon.module")

    assert module() == "sparkkeras.spark.daemon"
    monkeypatch.setenv("PYSPARK_PYTHON", "/no/such/python")
    assert module() is None
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    monkeypatch.setattr(worker_checks, "PACKAGE", Path("/another/copy/sparkkeras"))  # which Python cannot import
    assert module() is None
