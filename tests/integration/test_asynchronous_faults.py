"""Asynchronous training with failures of workers, executors, files, the server and the driver: each step counts once."""

import contextlib
import gc
import os
import signal
import socket
import threading
import time
from pathlib import Path

import keras
import pytest

from sparkkeras import DriverConnectionError
from sparkkeras.sources import spark_dataset
from tests.conftest import long
from tests.integration.faults import (
    BATCHES,
    EPOCHS,
    HELD_OUT,
    ROWS,
    AtPoint,
    Kill,
    KillInValidation,
    KillWithoutFiles,
    WaitForMark,
    Witness,
    arrays,
    await_mark,
    await_slots,
    check,
    executor_of_this_worker,
    rdd,
    spark_model,
)
from tests.integration.standalone import Standalone
from tests.processes import free_port

PATIENT = 120.0
"""Lease seconds that are longer than any test waits."""


@pytest.fixture
def witness():
    with Witness() as witness:
        yield witness


def assert_taken_over(witness, worker, transport, lease_seconds):
    """Check when the second attempt got the lease: at once if the closed connection shows the failure, else at expiry."""
    first, second = witness.leases(worker)
    assert first.attempt != second.attempt
    asked = witness.asked(worker, second.attempt)
    if transport == "socket":
        assert [call.status for call in asked] == ["granted"]
    else:
        assert witness.silence(worker) >= lease_seconds - 1.0
        assert {call.status for call in asked[:-1]} <= {"wait"}


# --- Workers and executors -------------------------------------------------------------------------------------------

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
def test_killed_workers_are_replaced(sc, tmp_path, witness, transport, frequency, one, other):
    """Each of the two workers is killed once, at different points."""
    lease_seconds = PATIENT if transport == "socket" else 6.0
    trained = spark_model(transport, frequency, lease_seconds=lease_seconds)
    kill = Kill(tmp_path, {0: one, 1: other})
    history = trained.fit(rdd(sc, *arrays()), epochs=EPOCHS, verbose=0, worker_callbacks=[kill])
    for worker in range(2):
        assert (tmp_path / f"fault-{worker}").exists()
        assert_taken_over(witness, worker, transport, lease_seconds)
    check(trained, history)
    assert int(trained.model.optimizer.iterations) == EPOCHS * BATCHES


@pytest.mark.filterwarnings("ignore:the rows seem to be sorted")  # those to validate on are marked
@pytest.mark.cluster
@pytest.mark.parametrize(("transport", "split"), [("socket", True), long("http", False)])
def test_a_worker_killed_during_validation_is_replaced(sc, tmp_path, witness, transport, split):
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
    assert len(witness.leases(0)) == 2
    steps = dict.fromkeys(range(2), EPOCHS * (12 if split else BATCHES))
    check(trained, history, steps=steps, rows=192 if split else ROWS, validated=48 if split else 64)


@pytest.mark.cluster
def test_missing_files_of_a_restarted_worker_are_read_again(sc, tmp_path, witness, monkeypatch):
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
    assert len(witness.leases(0)) == 3  # killed; without files; with files
    assert sum(call.name == "release" for call in witness.calls) == 1
    check(trained, history)


# --- The driver ------------------------------------------------------------------------------------------------------


def executors_files(_):
    home = Path(os.environ["SPARK_LOCAL_DIRS"].split(",")[0])
    return [str(path) for path in home.glob("sparkkeras-*")]


def assert_nothing_is_left(sc, port):

    def threads():
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("sparkkeras")]

    deadline = time.monotonic() + 90
    while (sc.statusTracker().getActiveStageIds() or threads()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not sc.statusTracker().getActiveStageIds()
    assert sc.parallelize(range(4), 4).flatMap(executors_files).collect() == []
    assert sc._jsc.getPersistentRDDs().size() == 0
    assert threads() == []
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 1).close()


class CutOff(keras.callbacks.Callback):
    """Closes the server's socket and all connections at the end of the first epoch."""

    def __init__(self, mark):
        super().__init__()
        self.mark = mark

    def on_epoch_end(self, epoch, logs=None):
        from sparkkeras.rpc.acceptor import _ConnectionAcceptor

        acceptors = [each for each in gc.get_objects() if isinstance(each, _ConnectionAcceptor)]
        (server,) = [each for each in acceptors if each._listener.fileno() != -1]
        server._listener.close()
        for connection in server._threads.values():
            with contextlib.suppress(OSError):  # it has ended already
                connection.shutdown(socket.SHUT_RDWR)
        self.mark.touch()


@pytest.mark.cluster
def test_a_server_that_does_not_respond_is_reported(sc, tmp_path):
    """Workers give up, the driver raises an error, nothing remains, and the next fit works."""
    port, mark = free_port(), tmp_path / "mark"
    trained = spark_model("socket", 5, port=port, timeout=3.0)
    data = rdd(sc, *arrays())
    trained.fit(data, verbose=0)  # the workers have loaded Keras and traced the model
    with pytest.raises(DriverConnectionError, match=r"received no reply from the driver at .* for 3 seconds"):
        trained.fit(data, epochs=4, verbose=0, callbacks=[CutOff(mark)], worker_callbacks=[WaitForMark(1, mark)])
    assert_nothing_is_left(sc, port)
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
        self.folder, self.epoch, self.until = folder, epoch, until

    def on_epoch_end(self, epoch, logs=None):
        if epoch == self.epoch:
            continue_stopped(self.folder)
            await_mark(Path(self.folder) / "continued")
            deadline = time.monotonic() + 60
            while not self.until() and time.monotonic() < deadline:
                time.sleep(0.05)


def continue_stopped(folder):
    (Path(folder) / "continue").touch()
    for pid in reversed((Path(folder) / "stopped").read_text().split()):
        try:
            os.kill(int(pid), signal.SIGCONT)
        except ProcessLookupError:  # the standalone worker has killed the executor
            continue


def is_gone(pid):
    import psutil

    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


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
            "late": sorted({(call.name, call.status) for call in late if call.name != "release"}),
            "rejected_requests": trained.parameter_server_stats.rejected_requests,
            "iterations": int(trained.model.optimizer.iterations),
        }


def hung_into_the_next(sc, folder, transport, port):
    """The driver: an executor hangs in one fit, and continues during the next, which uses the same port."""
    trained = spark_model(transport, 5, port=port, lease_seconds=2.0, timeout=5.0)
    data = rdd(sc, *arrays())
    check(
        trained,
        trained.fit(data, epochs=3, verbose=0, worker_callbacks=[Stop(folder, {0: ("batch_end", 0, 3)}, True)]),
    )
    pid = int((Path(folder) / "stopped").read_text().split()[-1])
    trained.training_histories.clear()
    await_slots(sc)
    with Witness() as witness:
        history = trained.fit(data, epochs=3, verbose=0, callbacks=[Continue(folder, 0, lambda: is_gone(pid))])
        check(trained, history)
        return {
            "leases": [[call.attempt for call in witness.leases(worker)] for worker in range(2)],
            "rejected_requests": trained.parameter_server_stats.rejected_requests,
        }


IMPATIENT = {
    "spark.network.timeout": "12s",
    "spark.network.timeoutInterval": "2s",
    "spark.executor.heartbeatInterval": "1s",
}

SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.quantile": "0.1",
    "spark.speculation.multiplier": "1.1",
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
    assert {status for _, status in found["late"]} == {"lease lost"}
    assert found["rejected_requests"].get("lease lost", 0) >= 1
    assert found["iterations"] == 4 * BATCHES


@pytest.mark.soak
def test_an_executor_that_recovers_during_the_next_fit_does_not_affect_it(standalone, tmp_path):
    found = standalone.run(hung_into_the_next, IMPATIENT, folder=str(tmp_path), transport="socket", port=free_port())
    assert [len(attempts) for attempts in found["leases"]] == [1, 1]
    assert found["rejected_requests"] == {}
