"""A Spark Connect server, started by this process, and a session on it; see tests/integration/test_connect.py."""

import gc
import os
import warnings
from pathlib import Path

import pytest

import sparkkeras.spark.connect
from sparkkeras.sources import connect_partitions, connect_values, frame_blocks
from tests.connect import cases
from tests.processes import free_port


@pytest.fixture(scope="session")
def local_dir(tmp_path_factory):
    """The folder that contains the workers' temporary folders."""
    return tmp_path_factory.mktemp("local")


@pytest.fixture(scope="session")
def spark(local_dir):
    """A Spark Connect session. The server has two slots, and attempts a task twice."""
    from pyspark.sql import SparkSession
    from pyspark.sql.connect.client import DefaultChannelBuilder

    port = free_port()
    builder = SparkSession.builder.remote("local[2,2]").appName("sparkkeras tests")
    settings = {
        "spark.connect.grpc.binding.port": port,
        "spark.local.dir": local_dir,
        "spark.python.daemon.module": "sparkkeras.spark.daemon",
    }
    for key, value in (cases.SETTINGS | settings).items():
        builder = builder.config(key, str(value))
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setenv("SPARKKERAS_WORKER", "1")  # of the server: all its Python workers start with Keras loaded
        patch.setattr(
            DefaultChannelBuilder, "default_port", staticmethod(lambda: port)
        )  # otherwise 15002, which may be in use
        session = builder.getOrCreate()
    server().setLogLevel("OFF")
    yield session
    session.stop()


@pytest.fixture
def settings(spark):
    """Sets a Spark setting of the session until the test ends."""
    before = {}

    def give(name, value):
        before.setdefault(name, spark.conf.getAll.get(name))
        spark.conf.set(name, value)

    yield give
    for name, value in before.items():
        spark.conf.unset(name) if value is None else spark.conf.set(name, value)


def server():
    """The SparkContext of the server, which runs in this process."""
    from pyspark import SparkContext

    return SparkContext._active_spark_context


def persistent():
    """The RDDs that the server keeps after a garbage collection."""
    gc.collect()
    server()._jvm.System.gc()
    return {int(number) for number in server()._jsc.getPersistentRDDs()}


def stored(local_dir):
    """The folders with stored rows below a folder. Files of the session, and what JAX compiled, are there until it ends."""
    return [path for path in local_dir.rglob("sparkkeras-*") if path.is_dir() and path.name != "sparkkeras-jax"]


@pytest.fixture(scope="session")
def classic():
    """The results of the cases in a classic session."""
    if cases.CLASSIC not in os.environ:
        pytest.skip("tests/integration/test_connect.py starts these tests, after a classic session")
    return cases.Classic(Path(os.environ[cases.CLASSIC]))


@pytest.fixture
def small_bounds(monkeypatch):
    """Small limits, so that values are sent in several files and results are returned in several pieces."""
    for module in (sparkkeras.spark.connect, connect_partitions):
        monkeypatch.setattr(module, "INLINE_BYTES", 0)
    monkeypatch.setattr(connect_values, "CHUNK_BYTES", 3000)
    monkeypatch.setattr(connect_partitions, "PIECE_BYTES", 500)
    monkeypatch.setattr(frame_blocks, "CELL_BYTES", 300)
    monkeypatch.setattr(sparkkeras.spark.connect.RemoteCluster, "max_result_bytes", 1)
