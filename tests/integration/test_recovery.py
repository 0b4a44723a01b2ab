"""Recovery from lost files, workers, executors, servers and drivers: each row counts once, and nothing remains."""

import contextlib
import gc
import os
import shutil
import signal
import socket
import threading
import time
import uuid
from pathlib import Path

import keras
import numpy as np
import psutil
import pytest
from pyspark.sql import functions as F

from sparkkeras import (
    Checkpoint,
    DataError,
    DriverConnectionError,
    SparkModel,
    WorkerError,
    to_data_frame,
)
from sparkkeras.checkpoints.store import CheckpointStore
from sparkkeras.rpc.acceptor import _ConnectionAcceptor
from sparkkeras.sources import spark_dataset
from sparkkeras.spark import filesystem
from tests.conftest import long
from tests.integration.faults import (
    BATCHES,
    EPOCHS,
    HELD_OUT,
    ROWS,
    AtPoint,
    KillInValidation,
    KillWithoutFiles,
    KillWorkers,
    WaitForMark,
    Witness,
    arrays,
    await_mark,
    await_slots,
    check,
    executor_of_this_worker,
    folders_of_an_executor,
    nothing_left,
    rdd,
    spark_model,
)
from tests.integration.standalone import SPECULATION, Standalone
from tests.models import classifier
from tests.processes import free_port, interrupted_when

# --- Synchronous training --------------------------------------------------------------------------------------------


def small():
    return classifier(8, 16, 4, run_eagerly=True)


def train(*data, epochs=3, mode="synchronous", **arguments):
    trained = SparkModel(small(), mode, seed=4)
    trained.fit(*data, epochs=epochs, batch_size=16, verbose=0, **arguments)
    return trained.model.get_weights()


def test_missing_files_are_written_again(sc):
    removed = []

    def remove(epoch, logs):
        """As a job that cleans temporary folders might."""
        if epoch == 0:
            removed.extend(folder.rglob("sparkkeras-*/part-0-*"))
            for path in removed:
                shutil.rmtree(path)

    expected = train(rdd(sc, *arrays()))
    folder = Path(sc.parallelize([0], 1).map(lambda _: os.environ["SPARK_LOCAL_DIRS"].split(",")[0]).first())
    remover = keras.callbacks.LambdaCallback(on_epoch_end=remove)
    np.testing.assert_equal(train(rdd(sc, *arrays()), callbacks=[remover]), expected)
    assert len(removed) == 1


class Kill(keras.callbacks.Callback):
    """Kills a worker or its executor, once, at the end of a given batch and epoch."""

    def __init__(self, mark, epoch, batch, executor=False):
        super().__init__()
        self.mark, self.epoch, self.batch, self.executor = mark, epoch, batch, executor
        self.current = None

    def on_epoch_begin(self, epoch, logs=None):
        self.current = epoch

    def on_train_batch_end(self, batch, logs=None):
        if self.current != self.epoch or batch < self.batch:
            return
        try:
            os.close(os.open(self.mark, os.O_CREAT | os.O_EXCL))  # one worker only
        except FileExistsError:
            return
        victim = psutil.Process()
        while self.executor and "java" not in victim.name():
            victim = victim.parent()
        victim.send_signal(signal.SIGKILL)
        time.sleep(60)


class Idle(Kill):
    """Kills nothing, but has the same size as Kill."""

    def on_train_batch_end(self, batch, logs=None):
        pass


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("executor", "epoch", "batch", "shuffle"),
    [
        *(long(executor, epoch, batch, True) for executor in (False, True) for epoch, batch in ((0, 0), (2, 7))),
        (True, 1, 3, "global"),
    ],
)
def test_a_killed_worker_or_executor_changes_no_bit(sc, tmp_path, executor, epoch, batch, shuffle):
    expected = train(rdd(sc, *arrays()), shuffle=shuffle)
    mark = tmp_path / "mark"
    killed = train(rdd(sc, *arrays()), worker_callbacks=[Kill(str(mark), epoch, batch, executor)], shuffle=shuffle)
    assert mark.exists()
    np.testing.assert_equal(killed, expected)


class Fail(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        raise RuntimeError("on purpose")


@pytest.mark.cluster
def test_arrays_reach_separate_executors_on_which_no_files_remain(sc):
    trained = SparkModel(small(), num_workers=2)
    trained.fit(*arrays(), validation_data=arrays(), verbose=0)
    assert sorted(report["rows"] for report in trained.training_histories) == [120, 120]
    with pytest.raises(WorkerError):
        train(rdd(sc, *arrays()), worker_callbacks=[Fail()])
    assert sc.parallelize(range(4), 4).flatMap(folders_of_an_executor).collect() == []


def test_nothing_remains_and_the_next_fit_works(sc, spark):
    """Also of a function so large that Spark sends it in a file; rows that the user caches stay cached."""
    table = np.zeros(800_000)

    def unchanged(x, y):
        return x + table[0].astype(np.float32), y

    def state():
        return len(list(Path(sc._temp_dir).iterdir())), threading.active_count(), dict(sc.environment)

    train(rdd(sc, *arrays()), epochs=1)
    frame = to_data_frame(spark, *arrays())
    with nothing_left(sc):
        before = state()
        train(rdd(sc, *arrays()), validation_split=0.1, epochs=1, transform=unchanged)
        cached = frame.cache()
        train(cached, validation_data=cached, epochs=1)
        assert cached.is_cached
        cached.unpersist(blocking=True)
        with pytest.raises(DataError, match=r"'features' does not fit .* 'pixels'.*\(8,\).*\(3,\)"):
            train(frame.withColumn("features", F.slice("features", 1, 3)))
        with pytest.raises(DataError):
            train(rdd(sc, *arrays()).map(lambda row: (row[0] * np.nan, row[1])))
        for mode in ("synchronous", "asynchronous"):
            with pytest.raises(WorkerError, match="on purpose") as raised:
                train(rdd(sc, *arrays()), mode=mode, worker_callbacks=[Fail()])
            assert "in on_epoch_end" in raised.value.worker_traceback
            train(*arrays(), mode=mode, validation_data=arrays(), epochs=1)
        SparkModel(small()).predict(arrays()[0], transform=unchanged)
        SparkModel(small()).evaluate(*arrays())
    assert state() == before


@pytest.mark.parametrize("settings", [long({}), {"mode": "asynchronous", "parameter_server_mode": "socket"}], ids=str)
def test_an_interrupt_ends_the_job_and_keeps_the_last_round(sc, tmp_path, settings):
    """Ctrl-C during the second epoch."""
    mark = tmp_path / "mark"

    class Slow(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                mark.touch()
                time.sleep(60)

    kept = []
    keep = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: kept.append(trained.model.get_weights()))
    trained = SparkModel(small(), seed=4, **settings)
    data = rdd(sc, *arrays())
    with nothing_left(sc):
        with interrupted_when(lambda: kept and mark.exists(), seconds=45 if settings else 20):
            trained.fit(data, epochs=3, verbose=0, callbacks=[keep], worker_callbacks=[Slow()])
        assert len(kept) == 1
        assert not settings or trained.parameter_server_stats.pushes >= 2
        np.testing.assert_equal(trained.model.get_weights(), kept[0])
        trained.fit(data, verbose=0)


def test_a_partition_larger_than_memory_is_trained_on(sc):
    """240 MB of rows in one partition, and a limit of 160 MB more than an idle worker uses."""
    count, width, allowance = 60_000, 1000, 160 * 1024 * 1024

    def limit():
        import resource

        status = Path("/proc/self/status").read_text().splitlines()
        used = next(int(line.split()[1]) for line in status if line.startswith("VmData")) * 1024
        resource.setrlimit(resource.RLIMIT_DATA, (used + allowance, resource.RLIM_INFINITY))

    def unlimit():
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    def generate(_):
        limit()
        try:
            row = np.arange(width, dtype=np.float32) / width
            for number in range(count):
                yield row * (number % 7), number % 7
        finally:
            unlimit()

    class Limit(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            limit()

        def on_train_end(self, logs=None):
            unlimit()

    trained = SparkModel(classifier(width=width, units=4), seed=1)
    large = sc.parallelize([0], 1).mapPartitions(generate)
    history = trained.fit(large, epochs=2, batch_size=500, verbose=0, worker_callbacks=[Limit()])
    assert history.history["loss"][1] < history.history["loss"][0]
    assert trained.training_histories[0]["rows"] == count


def test_a_source_is_read_once(sc):
    read = sc.accumulator(0)

    def count(row):
        read.add(1)
        return row

    train(rdd(sc, *arrays()).map(count), epochs=2, validation_split=0.1)
    assert read.value == 240


# --- Checkpoints -----------------------------------------------------------------------------------------------------


def test_resume_the_model_of_the_checkpoint_and_a_new_one(sc, tmp_path):
    x, y = arrays(120)

    def fit(spark_model, epochs=2, **arguments):
        return spark_model.fit(x, y, epochs=epochs, validation_split=0.1, verbose=0, **arguments).history

    def new(seed=3):
        return SparkModel(small(), num_workers=2, batch_size=16, seed=seed, rule="slowmo")

    whole = new()
    expected = fit(whole)
    checkpoint = Checkpoint(tmp_path / "run")
    fit(new(), epochs=1, checkpoint=checkpoint)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    resumed, again = SparkModel.from_checkpoint(tmp_path / "run"), new(seed=4)  # the seed of the checkpoint counts
    assert fit(resumed, checkpoint=checkpoint, resume=True) == expected
    assert fit(again, checkpoint=Checkpoint(tmp_path / "copy"), resume=True) == expected
    for continued in (whole, resumed):
        fit(continued, epochs=1)  # with the seed and the state of the rule that follow
    np.testing.assert_equal(resumed.model.get_weights(), whole.model.get_weights())


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


# --- Asynchronous training: each step counts once --------------------------------------------------------------------

PATIENT = 120.0
"""Lease seconds that are longer than any test waits."""
LAST = EPOCHS - 1


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("transport", "frequency", "one", "other"),
    [
        # between a push and the next, in the first epoch; right after a push, before the last batch
        ("socket", 1, ("batch_end", 0, 3), ("batch_begin", LAST, BATCHES - 1)),
        # in a later epoch; after the last batch, before the push that ends the run's last epoch
        long("http", 5, ("batch_end", 1, 6), ("epoch_end", LAST)),
        # a whole epoch is lost; everything is pushed
        long("socket", "epoch", ("batch_end", 1, BATCHES - 1), ("train_end",)),
    ],
)
def test_killed_workers_are_replaced(sc, tmp_path, transport, frequency, one, other):
    """Each of the two workers is killed once, at different points: at once, if the closed connection shows the failure."""
    lease_seconds = PATIENT if transport == "socket" else 6.0
    trained = spark_model(transport, frequency, lease_seconds=lease_seconds)
    kill, started = KillWorkers(tmp_path, {0: one, 1: other}), time.monotonic()
    history = trained.fit(rdd(sc, *arrays()), epochs=EPOCHS, verbose=0, worker_callbacks=[kill])
    assert time.monotonic() - started < PATIENT
    assert {path.name for path in tmp_path.iterdir()} == {"fault-0", "fault-1"}
    check(trained, history)
    assert int(trained.model.optimizer.iterations) == EPOCHS * BATCHES


@pytest.mark.filterwarnings("ignore:the rows seem to be sorted")  # those to validate on are marked
@pytest.mark.cluster
@pytest.mark.parametrize(("transport", "split"), [("socket", True), long("http", False)])
def test_a_worker_killed_during_validation_is_replaced(sc, tmp_path, transport, split):
    kill = KillInValidation(str(tmp_path), 0, 4)  # 3 batches of each epoch, 4 with validation_data
    trained = spark_model(transport, 5, lease_seconds=PATIENT if transport == "socket" else 6.0)
    if split:
        data, how = rdd(sc, *arrays(held_out=24)), {"validation_split": 0.2}
    else:
        x, y = arrays(64)
        x[:, 0] = HELD_OUT
        data, how = rdd(sc, *arrays()), {"validation_data": (x, y)}
    history = trained.fit(data, epochs=EPOCHS, verbose=0, transform=kill, **how)
    assert (tmp_path / "fault-0").exists()
    steps = dict.fromkeys(range(2), EPOCHS * (12 if split else BATCHES))
    check(trained, history, steps=steps, rows=192 if split else ROWS, validated=48 if split else 64)


@pytest.mark.cluster
def test_missing_files_of_a_restarted_worker_are_read_again(sc, tmp_path, monkeypatch):
    """The partition is read again immediately, while the other worker continues training."""
    repairs = []
    from_source = spark_dataset.SparkResults.from_source

    def noted(results, partitions):
        if partitions:
            repairs.append((list(partitions), (tmp_path / "repaired").exists()))
            (tmp_path / "repaired").touch()
        return from_source(results, partitions)

    monkeypatch.setattr(spark_dataset.SparkResults, "from_source", noted)
    trained = spark_model("socket", 5, lease_seconds=PATIENT)
    kill = KillWithoutFiles(tmp_path, {0: ("batch_end", 1, 3)})
    wait = WaitForMark(LAST, tmp_path / "repaired")  # no worker ends its last epoch before the partition is read again
    history = trained.fit(rdd(sc, *arrays()), epochs=EPOCHS, verbose=0, worker_callbacks=[wait, kill])
    assert repairs[0] == ([0], False)
    check(trained, history)


@pytest.mark.cluster
def test_a_server_that_does_not_respond_is_reported(sc, tmp_path):
    """Workers give up, the driver raises an error, nothing remains, and the next fit works."""
    mark = tmp_path / "mark"

    def cut_off(epoch, logs):
        """Close the server's socket and all connections."""
        acceptors = [each for each in gc.get_objects() if isinstance(each, _ConnectionAcceptor)]
        (server,) = [each for each in acceptors if each._listener.fileno() != -1]
        server._listener.close()
        for connection in server._threads.values():
            with contextlib.suppress(OSError):  # it has ended already
                connection.shutdown(socket.SHUT_RDWR)
        mark.touch()

    trained = spark_model("socket", 5, port=free_port(), timeout=3.0)
    data = rdd(sc, *arrays())
    trained.fit(data, verbose=0)  # the workers have loaded Keras and traced the model
    given = {"callbacks": [keras.callbacks.LambdaCallback(on_epoch_end=cut_off)]}
    with nothing_left(sc, 90), pytest.raises(DriverConnectionError, match="no reply from the driver"):
        trained.fit(data, epochs=4, verbose=0, worker_callbacks=[WaitForMark(1, mark)], **given)
    trained.training_histories.clear()
    check(trained, trained.fit(data, verbose=0), epochs=1)


# --- Executors that hang, and speculative copies ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def standalone(contexts, tmp_path_factory):
    """A standalone Spark with two workers; stops this session's context first."""
    contexts.stop()
    with Standalone(tmp_path_factory.mktemp("standalone")) as standalone:
        yield standalone


class Stop(AtPoint):
    """Stops (SIGSTOP) this Python worker, and with ``executor`` its executor too, until `continue_stopped`."""

    def __init__(self, folder, points, executor):
        super().__init__(folder, points)
        self.executor = executor

    def fault(self, worker):
        above = executor_of_this_worker() if self.executor else ()
        pids = [*(process.pid for process in above), os.getpid()]
        draft = Path(self.folder) / "draft"
        draft.write_text(" ".join(map(str, pids)))
        draft.rename(Path(self.folder) / "stopped")
        # Spark kills an executor that it has given up, and the system then wakes its child processes with a SIGHUP.
        previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        for pid in reversed(pids[:-1]):
            os.kill(pid, signal.SIGSTOP)
        while not (Path(self.folder) / "continue").exists():
            os.kill(os.getpid(), signal.SIGSTOP)
        signal.signal(signal.SIGHUP, previous)
        (Path(self.folder) / "continued").touch()


class Continue(keras.callbacks.Callback):
    """Continues the stopped processes at the end of an epoch, and waits until ``until()`` is true."""

    def __init__(self, folder, epoch, until):
        super().__init__()
        self.folder, self.epoch, self.until = Path(folder), epoch, until

    def on_epoch_end(self, epoch, logs=None):
        if epoch != self.epoch:
            return
        (self.folder / "continue").touch()
        for pid in reversed((self.folder / "stopped").read_text().split()):
            with contextlib.suppress(ProcessLookupError):  # the standalone worker has killed the executor
                os.kill(int(pid), signal.SIGCONT)
        await_mark(self.folder / "continued")
        deadline = time.monotonic() + 60
        while not self.until() and time.monotonic() < deadline:
            time.sleep(0.05)


def hung(sc, folder, transport, executor):
    """The driver: a worker or an executor hangs in the first epoch, and continues after the second."""
    trained = spark_model(transport, 5, lease_seconds=2.0)
    with Witness() as witness:

        def rejected():
            return any(call.rejected and call.lease == witness.leases(0)[0].lease for call in witness.calls)

        history = trained.fit(
            rdd(sc, *arrays()),
            epochs=4,
            verbose=0,
            callbacks=[Continue(folder, 1, rejected)],
            worker_callbacks=[Stop(folder, {0: ("batch_end", 0, 3)}, executor)],
        )
        check(trained, history, epochs=4)
        first, second = witness.leases(0)
        late = [call for call in witness.calls if call.lease == first.lease and call.at > second.at]
        return {
            "silence": witness.silence(0),
            "late": sorted({call.status for call in late if call.name != "release"}),
            "rejected_requests": trained.parameter_server_stats.rejected_requests,
            "iterations": int(trained.model.optimizer.iterations),
        }


def hung_into_the_next(sc, folder, transport, port):
    """The driver: an executor hangs in one fit, and continues during the next, which uses the same port."""

    def is_gone():
        return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE

    trained = spark_model(transport, 5, port=port, lease_seconds=2.0, timeout=5.0)
    data = rdd(sc, *arrays())
    stop = Stop(folder, {0: ("batch_end", 0, 3)}, True)
    check(trained, trained.fit(data, epochs=3, verbose=0, worker_callbacks=[stop]))
    pid = int((Path(folder) / "stopped").read_text().split()[-1])
    trained.training_histories.clear()
    await_slots(sc)
    with Witness() as witness:
        history = trained.fit(data, epochs=3, verbose=0, callbacks=[Continue(folder, 0, is_gone)])
        check(trained, history)
        return {
            "leases": [len(witness.leases(worker)) for worker in range(2)],
            "rejected_requests": trained.parameter_server_stats.rejected_requests,
        }


IMPATIENT = {
    "spark.network.timeout": "12s",
    "spark.network.timeoutInterval": "2s",
    "spark.executor.heartbeatInterval": "1s",
}


@pytest.mark.soak
@pytest.mark.parametrize(
    ("settings", "transport", "executor"),
    [(IMPATIENT, "socket", True), (IMPATIENT, "http", True), (SPECULATION, "http", False)],
)
def test_late_updates_of_a_worker_that_hung_are_rejected(standalone, tmp_path, settings, transport, executor):
    """Another worker trains its partition: on another executor when Spark gives up the first, or as a speculative copy."""
    found = standalone.run(hung, settings, folder=str(tmp_path), transport=transport, executor=executor)
    assert found["silence"] >= 2.0 - 1.0
    assert found["late"] == ["lease lost"]
    assert found["rejected_requests"].get("lease lost", 0) >= 1
    assert found["iterations"] == 4 * BATCHES


@pytest.mark.soak
def test_an_executor_that_recovers_during_the_next_fit_does_not_affect_it(standalone, tmp_path):
    found = standalone.run(hung_into_the_next, IMPATIENT, folder=str(tmp_path), transport="socket", port=free_port())
    assert found["leases"] == [1, 1]
    assert found["rejected_requests"] == {}
