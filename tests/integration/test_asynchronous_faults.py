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
from sparkkeras.training import parameter_server
from tests.integration.faults import (
    BATCHES,
    EPOCHS,
    HELD_OUT,
    ROWS,
    AtPoint,
    Kill,
    KillExecutor,
    KillInValidation,
    KillWithoutFiles,
    WaitForMark,
    Witness,
    arrays,
    attempt_number,
    await_mark,
    await_slots,
    check,
    claim,
    executor_of_this_worker,
    rdd,
    report,
    spark_model,
    worker_number,
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


def delays(witness, worker, folder):
    """The seconds from a fault to the next attempt's lease, and to its first push."""
    struck = float((Path(folder) / f"fault-{worker}").read_text() or "nan") - time.time() + time.monotonic()
    second = witness.leases(worker)[-1]
    pushes = [call.at for call in witness.calls if call.name == "update" and call.lease == second.lease]
    return {"lease": round(second.at - struck, 1), "push": round(min(pushes, default=float("nan")) - struck, 1)}


# --- Workers and executors -------------------------------------------------------------------------------------------

LAST = EPOCHS - 1

PAIRS = [
    # between a push and the next, in the first epoch; right after a push, before the last batch
    pytest.param("socket", 1, ("batch_end", 0, 3), ("batch_begin", LAST, BATCHES - 1), id="socket-1"),
    # in a later epoch; after the last batch, before the push that ends the run's last epoch
    pytest.param("http", 5, ("batch_end", 1, 6), ("epoch_end", LAST), id="http-5", marks=pytest.mark.soak),
    # a whole epoch is lost; everything is pushed
    pytest.param(
        "socket", "epoch", ("batch_end", 1, BATCHES - 1), ("train_end",), id="socket-epoch", marks=pytest.mark.soak
    ),
]
LONG = [
    pytest.param(
        transport,
        frequency,
        point,
        ("epoch_begin", number % EPOCHS),
        id=f"{transport}-{frequency}-{'-'.join(map(str, point))}",
        marks=pytest.mark.soak,
    )
    for transport in ("socket", "http")
    for frequency in (1, 5, "epoch")
    for number, point in enumerate(
        [
            *(
                (hook, epoch, batch)
                for hook in ("batch_begin", "batch_end")
                for epoch in (0, LAST)
                for batch in (0, 4, 5, 14)
            ),
            ("epoch_begin", 0),
            ("epoch_end", 0),
            ("train_end",),
        ]
    )
]


@pytest.mark.cluster
@pytest.mark.parametrize(("transport", "frequency", "one", "other"), [*PAIRS, *LONG])
def test_killed_workers_are_replaced(sc, tmp_path, witness, transport, frequency, one, other):
    """Each of the two workers is killed once, at different points."""
    lease_seconds = PATIENT if transport == "socket" else 6.0
    trained = spark_model(transport, frequency, lease_seconds=lease_seconds)
    kill = Kill(tmp_path, {0: one, 1: other})
    history = trained.fit(rdd(sc, *arrays()), epochs=EPOCHS, verbose=0, worker_callbacks=[kill])
    for worker in range(2):
        assert (tmp_path / f"fault-{worker}").exists()
        assert_taken_over(witness, worker, transport, lease_seconds)
        report(transport, frequency, worker, delays(witness, worker, tmp_path))
    check(trained, history)
    assert int(trained.model.optimizer.iterations) == EPOCHS * BATCHES


@pytest.mark.filterwarnings("ignore:the rows seem to be sorted")  # those to validate on are marked
@pytest.mark.cluster
@pytest.mark.parametrize(
    ("transport", "split"),
    [
        ("socket", True),
        pytest.param("http", True, marks=pytest.mark.soak),
        pytest.param("http", False, marks=pytest.mark.soak),
    ],
    ids=["socket-split", "http-split", "http-data"],
)
@pytest.mark.parametrize("batch", [pytest.param(0, marks=pytest.mark.soak), 4, pytest.param(8, marks=pytest.mark.soak)])
def test_a_worker_killed_during_validation_is_replaced(sc, tmp_path, witness, transport, split, batch):
    kill = KillInValidation(str(tmp_path), 0, batch)  # 3 batches of each epoch, 4 with validation_data
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


@pytest.mark.soak  # test_recovery.py has a killed executor, the next test the loss of its rows
@pytest.mark.cluster
@pytest.mark.parametrize(
    ("transport", "point"),
    [
        ("socket", ("batch_end", 1, 3)),
        ("http", ("batch_end", 0, 3)),
        ("socket", ("epoch_end", LAST)),
        ("http", ("train_end",)),
    ],
)
def test_a_killed_executor_is_replaced(sc, tmp_path, witness, transport, point):
    """Its rows are lost too: Spark computes them again on another executor."""
    trained = spark_model(transport, 5, lease_seconds=PATIENT if transport == "socket" else 6.0)
    kill = KillExecutor(tmp_path, {0: point})
    history = trained.fit(rdd(sc, *arrays()), epochs=EPOCHS, verbose=0, worker_callbacks=[kill])
    assert (tmp_path / "fault-0").exists()
    report("executor", delays(witness, 0, tmp_path))
    check(trained, history)


@pytest.mark.cluster
@pytest.mark.parametrize("transport", ["socket", pytest.param("http", marks=pytest.mark.soak)])
def test_missing_files_of_a_restarted_worker_are_read_again(sc, tmp_path, witness, monkeypatch, transport):
    """The partition is read again immediately, while the other worker continues training."""
    lease_seconds = PATIENT if transport == "socket" else 6.0
    repairs = []
    from_source = spark_dataset.SparkResults.from_source

    def noted(results, partitions):
        if partitions:
            repairs.append((list(partitions), (tmp_path / "repaired").exists()))
            (tmp_path / "repaired").touch()
        return from_source(results, partitions)

    monkeypatch.setattr(spark_dataset.SparkResults, "from_source", noted)
    trained = spark_model(transport, 5, lease_seconds=lease_seconds)
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
        self.mark, self.at = mark, 0.0

    def on_epoch_end(self, epoch, logs=None):
        from sparkkeras.rpc.acceptor import _ConnectionAcceptor

        acceptors = [each for each in gc.get_objects() if isinstance(each, _ConnectionAcceptor)]
        (server,) = [each for each in acceptors if each._listener.fileno() != -1]
        server._listener.close()
        for connection in server._threads.values():
            with contextlib.suppress(OSError):  # it has ended already
                connection.shutdown(socket.SHUT_RDWR)
        self.at = time.monotonic()
        self.mark.touch()


class Hang(CutOff):
    """From the end of the first epoch on, keeps the server from answering until ``witness.hold`` is set."""

    def __init__(self, mark, witness):
        super().__init__(mark)
        self.witness = witness

    def on_epoch_end(self, epoch, logs=None):
        self.witness.hold = threading.Event()
        self.at = time.monotonic()
        self.mark.touch()


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("transport", "fault"),
    [("socket", "gone"), *(pytest.param(transport, "hangs", marks=pytest.mark.soak) for transport in ("http", "socket"))],
    ids=["socket-gone", "http-hangs", "socket-hangs"],
)
def test_a_server_that_does_not_respond_is_reported(sc, tmp_path, witness, monkeypatch, transport, fault):
    """Workers give up, the driver raises an error, nothing remains, and the next fit works."""
    port, mark = free_port(), tmp_path / "mark"
    timeout = 3.0
    trained = spark_model(transport, 5, port=port, timeout=timeout)
    data = rdd(sc, *arrays())
    trained.fit(data, verbose=0)  # the workers have loaded Keras and traced the model
    end = CutOff(mark) if fault == "gone" else Hang(mark, witness)
    failed = []
    ending = parameter_server._ServedTraining._end

    def noted(training):
        failed.append(time.monotonic())
        if witness.hold is not None:
            witness.hold.set()  # a server finishes pending calls before it stops
            witness.hold = None
        ending(training)

    monkeypatch.setattr(parameter_server._ServedTraining, "_end", noted)
    with pytest.raises(DriverConnectionError, match=r"received no reply from the driver at .* for 3 seconds"):
        trained.fit(data, epochs=4, verbose=0, callbacks=[end], worker_callbacks=[WaitForMark(1, mark)])
    report(transport, fault, f"{failed[0] - end.at:.1f} s for two attempts, {time.monotonic() - failed[0]:.1f} s to tidy up")
    assert failed[0] - end.at < 2 * (timeout + 5) + 120  # each task has two attempts, the second in a new process
    assert_nothing_is_left(sc, port)
    trained.training_histories.clear()
    check(trained, trained.fit(data, verbose=0), epochs=1)


class Slow(keras.callbacks.Callback):
    """Creates a marker file and sleeps in the second epoch."""

    def __init__(self, folder):
        super().__init__()
        self.folder = str(folder)

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            claim(self.folder, f"slow-{worker_number()}", str(os.getpid()))
            time.sleep(240)


@pytest.mark.cluster
def test_an_interrupted_driver_cancels_the_job(sc, tmp_path, witness):
    port = free_port()
    trained = spark_model("socket", 5, port=port)
    data = rdd(sc, *arrays())
    kept = []
    keep = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: kept.append(trained.model.get_weights()))

    def interrupt():
        for worker in range(2):
            await_mark(tmp_path / f"slow-{worker}", 120)
        while not kept:
            time.sleep(0.01)
        time.sleep(0.5)  # the driver has run its callbacks, and waits
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        trained.fit(data, epochs=EPOCHS, verbose=0, callbacks=[keep], worker_callbacks=[Slow(tmp_path)])
    interrupted = time.monotonic()
    thread.join()
    assert_nothing_is_left(sc, port)
    report(f"idle {time.monotonic() - interrupted:.1f} s after the interrupt")
    assert time.monotonic() - interrupted < 120  # Slow sleeps for much longer
    assert len(kept) == 1
    for mine, last in zip(trained.model.get_weights(), kept[0], strict=True):
        assert (mine == last).all()
    trained.training_histories.clear()
    check(trained, trained.fit(data, epochs=EPOCHS, verbose=0))


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
    started = time.monotonic()
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
            "seconds": time.monotonic() - started,
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
@pytest.mark.parametrize("transport", ["socket", "http"])
def test_updates_of_an_executor_that_hung_are_rejected(standalone, tmp_path, transport):
    """Spark gives it up, another executor trains its partition, and the server rejects its calls after it continues."""
    found = standalone.run(hung, IMPATIENT, folder=str(tmp_path), transport=transport, executor=True)
    report(found)
    assert found["silence"] >= 2.0 - 1.0
    assert found["rejected_requests"].get("lease lost", 0) >= 1
    assert {status for _, status in found["late"]} == {"lease lost"}
    assert found["iterations"] == 4 * BATCHES


@pytest.mark.soak
@pytest.mark.parametrize("transport", ["socket", "http"])
def test_an_executor_that_recovers_during_the_next_fit_does_not_affect_it(standalone, tmp_path, transport):
    found = standalone.run(hung_into_the_next, IMPATIENT, folder=str(tmp_path), transport=transport, port=free_port())
    report(found)
    assert [len(attempts) for attempts in found["leases"]] == [1, 1]
    assert found["rejected_requests"] == {}


@pytest.mark.soak
@pytest.mark.parametrize("transport", ["socket", "http"])
def test_a_speculative_copy_takes_over_from_a_worker_that_hangs(standalone, tmp_path, transport):
    """With speculation, Spark's time-outs do not matter: the copy gets the lease when it expires."""
    found = standalone.run(hung, SPECULATION, folder=str(tmp_path), transport=transport, executor=False)
    report(found)
    assert found["silence"] >= 2.0 - 1.0
    assert {status for _, status in found["late"]} == {"lease lost"}


class Dawdle(keras.callbacks.Callback):
    """Worker 0 waits until a copy of its task has requested the lease, and is slow."""

    def __init__(self, folder, mark):
        super().__init__()
        self.folder, self.mark = str(folder), str(mark)

    def on_train_begin(self, logs=None):
        claim(self.folder, f"trained-{worker_number()}-{attempt_number()}")

    def on_train_batch_end(self, batch, logs=None):
        if worker_number() == 0:
            if batch == 6:  # after the first exchange, which the other worker waits for
                await_mark(self.mark, 120)
            time.sleep(0.02)


class MarkCopy(threading.Thread):
    """Creates a marker file when a second attempt has requested the lease of worker 0."""

    def __init__(self, witness, mark):
        super().__init__(daemon=True)
        self.witness, self.mark = witness, Path(mark)

    def run(self):
        while len({call.attempt for call in self.witness.calls if call.name == "lease" and call.worker == 0}) < 2:
            time.sleep(0.02)
        self.mark.touch()


def speculated(sc, folder, transport):
    """The driver: a speculative copy of a slow worker's task requests its lease."""
    trained = spark_model(transport, 5, lease_seconds=10.0)
    started = time.monotonic()
    with Witness() as witness:
        MarkCopy(witness, Path(folder) / "copied").start()
        dawdle = Dawdle(folder, Path(folder) / "copied")
        history = trained.fit(rdd(sc, *arrays()), epochs=EPOCHS, verbose=0, worker_callbacks=[dawdle])
        check(trained, history)
        copy = witness.leases(0)[0].attempt
        return {
            "seconds": time.monotonic() - started,
            "trained": sorted(path.name for path in Path(folder).glob("trained-0-*")),
            "copy": sorted({call.status for call in witness.calls if call.worker == 0 and call.attempt not in (copy, None)}),
            "rejected_requests": trained.parameter_server_stats.rejected_requests,
            "iterations": int(trained.model.optimizer.iterations),
        }


@pytest.mark.soak
@pytest.mark.parametrize("transport", ["socket", "http"])
def test_a_speculative_copy_of_a_running_task_does_not_train(standalone, tmp_path, transport):
    found = standalone.run(speculated, SPECULATION, folder=str(tmp_path), transport=transport)
    report(found)
    assert len(found["trained"]) == 1
    assert "wait" in found["copy"]
    assert "granted" not in found["copy"]
    assert found["rejected_requests"] == {}
    assert found["iterations"] == EPOCHS * BATCHES
