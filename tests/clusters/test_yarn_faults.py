"""What fails on a Hadoop cluster, while a driver in client mode trains on it with checkpoints on HDFS."""

import contextlib
import re

import keras
import psutil
import pytest

from sparkkeras import Checkpoint, SparkModel, StorageError, WorkerError
from tests.clusters.conftest import ARCHIVE, BACKEND, RECIPE, SMALL
from tests.integration.faults import await_slots
from tests.models import same
from tests.processes import SHORT_LIVED_JAVA

pytestmark = [pytest.mark.programs, pytest.mark.soak, pytest.mark.filterwarnings("ignore:os.fork")]  # by JAX

FEATURES = ["x0", "x1", "x2", "x3"]


@pytest.fixture(scope="module")
def yarn(hadoop, contexts):
    """A SparkSession of this process on YARN, in client mode, with two executors and the recipe's settings."""
    from pyspark.sql import SparkSession

    contexts.stop()
    recipe = [line.split(maxsplit=1) for line in (RECIPE / "spark-defaults.conf").read_text().splitlines()]
    settings = {words[0]: words[1] for words in recipe if words and words[0].startswith("spark.")} | SMALL
    settings |= {
        "spark.yarn.dist.archives": f"{ARCHIVE}#environment",
        "spark.driver.host": "127.0.0.1",
        "spark.executor.maxNumFailures": "100",  # the tests of this file lose many
        "spark.executorEnv.KERAS_BACKEND": BACKEND,
        "spark.executor.extraJavaOptions": SHORT_LIVED_JAVA,
    }
    variables = {"HADOOP_CONF_DIR": str(hadoop.conf), "PYSPARK_PYTHON": "./environment/bin/python3"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        builder = SparkSession.builder.master("yarn").appName("faults")
        spark = builder.config(map=settings).getOrCreate()
        spark.sparkContext.setLogLevel("ERROR")
        numbers = ", ".join(f"xxhash64(id, {k}) % 1000 / 1000D AS x{k}" for k in range(4))
        rows = spark.sql(f"SELECT {numbers} FROM range(0, 2000, 1, 2)")
        rows.selectExpr("*", "int(x0 + x1 + x2 + x3 > 0) AS label").write.parquet(f"{hadoop.url}/user/me/rows")
        yield spark
        spark.stop()


@pytest.fixture
def rows(yarn, hadoop):
    """Rows on HDFS, when both executors are there."""
    await_slots(yarn.sparkContext)
    return yarn.read.parquet(f"{hadoop.url}/user/me/rows")


@pytest.fixture
def folder(hadoop, request):
    """A folder on HDFS."""
    return f"{hadoop.url}/user/me/{re.sub(r'[^A-Za-z0-9]+', '-', request.node.name)}"


def fit(rows, mode="synchronous", epochs=3, verbose=0, **more):
    """Train, and return the model."""
    keras.utils.set_random_seed(7)
    layers = [keras.Input((4,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(1, "sigmoid")]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.Adam(0.02), "binary_crossentropy", metrics=["accuracy"])
    spark_model = SparkModel(model, mode=mode, num_workers=2, batch_size=32, seed=7)
    spark_model.fit(rows, features=FEATURES, label="label", epochs=epochs, verbose=verbose, **more)
    return spark_model


def at_epoch(number, act):
    """A callback of the driver that calls a function at the end of an epoch, counted from 0."""

    def on_epoch_end(epoch, logs):
        if epoch == number:
            act()

    return keras.callbacks.LambdaCallback(on_epoch_end=on_epoch_end)


def in_worker(folder, act):
    """Callbacks of driver and workers: after the first epoch, the first worker that begins a batch calls a function."""
    armed, done = folder / "armed", folder / "done"

    class Act(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if armed.exists() and not done.exists():
                with contextlib.suppress(FileExistsError):
                    done.touch(exist_ok=False)
                    act()

    return {"callbacks": [at_epoch(0, armed.touch)], "worker_callbacks": [Act()]}


def executors(hadoop, node=None):
    """The Java processes of executors, on one node or all."""
    found = []
    for process in hadoop.containers(node):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name() == "java" and "YarnCoarseGrainedExecutorBackend" in " ".join(process.cmdline()):
                found.append(process)
    return found


def kill_executor():
    """Kill the executor of this worker: the parent of PySpark's daemon."""
    import os
    import signal
    from pathlib import Path

    daemon = Path(f"/proc/{os.getppid()}/stat").read_text()
    os.kill(int(daemon.rpartition(")")[2].split()[1]), signal.SIGKILL)


@pytest.mark.filterwarnings("ignore:training continues")
@pytest.mark.parametrize("mode", ["synchronous", "asynchronous", "allreduce"])
def test_a_container_killed_by_a_signal_is_replaced(rows, tmp_path, mode):
    kill = kill_executor  # by value: the nodes do not have this module
    trained = fit(rows, mode, **in_worker(tmp_path, kill))
    assert (tmp_path / "done").exists()
    assert trained.evaluate(rows, features=FEATURES, label="label", return_dict=True)["accuracy"] > 0.8
    if mode == "synchronous":
        await_slots(rows.sparkSession.sparkContext)
        assert same(trained, fit(rows))


def test_a_container_that_yarn_kills_for_its_memory_names_the_setting(rows):
    def hold(x, y):
        import time

        import numpy

        held = numpy.ones(2 << 30, "uint8")
        time.sleep(5)
        return x, y + held[0] - 1

    with pytest.raises(WorkerError) as raised:
        fit(rows, transform=hold)
    message = str(raised.value)
    assert "spark.executor.memoryOverhead" in message
    assert re.search(r"[\d.]+ GB of [\d.]+ GB physical memory used", message), message


def test_a_lost_node_manager_costs_no_bit(hadoop, rows, folder):
    node = 0 if executors(hadoop, 0) else 1
    try:
        trained = fit(rows, callbacks=[at_epoch(0, lambda: hadoop.lose(node))], checkpoint=Checkpoint(folder))
    finally:
        hadoop.start(f"nodemanager{node}")
    hadoop.wait(lambda: hadoop.nodes() == 2, "the node has not come back")
    assert same(trained, fit(rows))


def test_a_lost_data_node_costs_no_checkpoint(hadoop, rows, folder):
    try:
        trained = fit(rows, callbacks=[at_epoch(0, lambda: hadoop.kill("datanode0"))], checkpoint=Checkpoint(folder))
        assert same(SparkModel.from_checkpoint(folder), trained)
    finally:
        hadoop.start("datanode0")
        hadoop.wait(lambda: hadoop.datanodes() == 2, "the DataNode has not come back")


@contextlib.contextmanager
def safe_mode(hadoop):
    hadoop.client("hdfs.tools.DFSAdmin", "-safemode", "enter")
    try:
        yield
    finally:
        hadoop.client("hdfs.tools.DFSAdmin", "-safemode", "leave")


def test_safe_mode_is_named_before_training(hadoop, rows, folder):
    with safe_mode(hadoop), pytest.raises(StorageError, match="safe mode"):
        fit(rows, checkpoint=Checkpoint(folder))


def test_safe_mode_during_training_keeps_the_model(hadoop, rows, folder):
    with contextlib.ExitStack() as stack:
        enter = at_epoch(1, lambda: stack.enter_context(safe_mode(hadoop)))
        with pytest.warns(UserWarning, match="safe mode"), pytest.raises(StorageError, match="safe mode"):
            fit(rows, epochs=4, callbacks=[enter], checkpoint=Checkpoint(folder))
    fit(rows, epochs=4, checkpoint=Checkpoint(folder), resume=True)


def test_a_full_folder_is_named(hadoop, rows, folder):
    hadoop.fs("-mkdir", "-p", folder)
    hadoop.client("hdfs.tools.DFSAdmin", "-setSpaceQuota", "1k", folder)
    with pytest.warns(UserWarning, match="quota"), pytest.raises(StorageError, match="quota") as raised:
        fit(rows, checkpoint=Checkpoint(folder))
    assert "\tat " not in str(raised.value)


def test_preemption_by_another_queue_costs_no_bit(hadoop, rows, submit):
    """An application takes what its queue is guaranteed; it gets containers of this one, which takes them again later."""
    other = submit.recipe(
        *("--workers", "6"), spark_yarn_queue="urgent", spark_executor_instances="6", spark_yarn_maxAppAttempts="1"
    )
    before = {process.pid for process in executors(hadoop)}

    def preempted():
        return not before <= {process.pid for process in executors(hadoop)}

    wait = at_epoch(0, lambda: hadoop.wait(preempted, "no container was preempted"))
    trained = fit(rows, epochs=3, callbacks=[wait])
    other.succeed()
    await_slots(rows.sparkSession.sparkContext)
    assert same(trained, fit(rows, epochs=3))
