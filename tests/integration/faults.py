"""Helpers for tests of failures: a model that counts every row, faults, what remains, and a recorder of server calls.

A fault is injected once, by a worker's callback, at a given point; a marker file guards it. So it always happens there,
regardless of the speed of the machine.
"""

import contextlib
import os
import shutil
import signal
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import keras
import numpy as np
import psutil

from sparkkeras import SparkModel
from sparkkeras.parameter.service import ParameterService
from sparkkeras.rpc.options import ParameterServerOptions
from sparkkeras.rpc.transport import RefusedError
from sparkkeras.sources.spark_dataset import SparkResults
from sparkkeras.training.member_checkpoints import MemberCheckpoints
from tests.models import classifier

ROWS, WORKERS, BATCH_SIZE, EPOCHS = 240, 2, 8, 3
BATCHES = ROWS // WORKERS // BATCH_SIZE
HELD_OUT = 9.0
"""The first feature of validation rows."""


class Rows(keras.metrics.Metric):
    """A metric that counts rows, so that the History contains their number."""

    def __init__(self, name="counted", **arguments):
        super().__init__(name=name, **arguments)
        self.count = self.add_variable((), "zeros", name="count")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign_add(keras.ops.cast(keras.ops.shape(y_pred)[0], self.count.dtype))

    def result(self):
        return self.count


def arrays(count=ROWS, held_out=0):
    """Features and labels that a model can learn; the last ``held_out`` rows of each worker are marked for validation."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(count, 8)).astype(np.float32)
    y = (x[:, 1:] @ generator.normal(size=(7, 4))).argmax(1)
    share = count // WORKERS
    for worker in range(WORKERS if held_out else 0):
        x[(worker + 1) * share - held_out : (worker + 1) * share, 0] = HELD_OUT
    return x, y


def rdd(sc, x, y):
    """An RDD of the rows; waits until Spark has a slot for each worker, since fewer workers would have more rows each."""
    await_slots(sc)
    return sc.parallelize(list(zip(x, y, strict=True)), WORKERS)


def await_slots(sc, seconds=180):
    """Wait until lost executors have been replaced."""
    scala = sc._jsc.sc()
    profile = scala.resourceProfileManager().defaultResourceProfile()
    deadline = time.monotonic() + seconds
    while scala.maxNumConcurrentTasks(profile) < WORKERS:
        assert time.monotonic() < deadline, "executors are missing"
        time.sleep(0.05)


def spark_model(transport, frequency, port=0, **options):
    return SparkModel(
        classifier(8, 16, 4, optimizer=keras.optimizers.Adam(0.01), metrics=["accuracy", Rows()]),
        "asynchronous",
        frequency,
        parameter_server_mode=transport,
        port=port,
        batch_size=BATCH_SIZE,
        seed=7,
        server_options=ParameterServerOptions(**options),
    )


def check(trained, history, *, epochs=EPOCHS, steps=None, rows=ROWS, validated=0):
    """Check that every step and every row was counted once, and that the loss decreased."""
    steps = steps or dict.fromkeys(range(WORKERS), epochs * BATCHES)
    stats = trained.parameter_server_stats
    assert stats.steps == steps, stats
    assert history.epoch == list(range(epochs))
    assert history.history["counted"] == [rows] * epochs
    seen = dict.fromkeys(range(epochs), 0)
    for report in trained.training_histories:
        seen[report["epoch"]] += report["rows"]
    assert seen == dict.fromkeys(range(epochs), rows)
    assert len(trained.training_histories) == epochs * len(steps)
    if validated:
        assert history.history["val_counted"] == [validated] * epochs
    assert all(np.isfinite(weight).all() for weight in trained.model.get_weights())
    if epochs > 1:
        assert history.history["loss"][-1] < history.history["loss"][0]


# --- Faults ----------------------------------------------------------------------------------------------------------


def worker_number():
    from pyspark import TaskContext

    context = TaskContext.get()
    return None if context is None else context.partitionId()  # `transform` runs on the driver, too


def claim(folder, name):
    """Create a marker file; return False if it already exists."""
    try:
        (Path(folder) / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def await_mark(path, seconds=180):
    """Wait for a marker file; fails if it is not created in time."""
    deadline = time.monotonic() + seconds
    while not Path(path).exists():
        assert time.monotonic() < deadline, f"{path} was not created"
        time.sleep(0.01)


class AtPoint(keras.callbacks.Callback):
    """Calls ``fault`` in a worker, once, at a point: a hook's name, with the epoch and the batch where they apply."""

    def __init__(self, folder, points):
        super().__init__()
        self.folder, self.points = str(folder), points
        self.current = None

    def fault(self, worker):
        raise NotImplementedError

    def passing(self, *point):
        worker = worker_number()
        if self.points.get(worker) == point and claim(self.folder, f"fault-{worker}"):
            self.fault(worker)

    def on_epoch_begin(self, epoch, logs=None):
        self.current = epoch

    def on_train_batch_begin(self, batch, logs=None):
        self.passing("batch_begin", self.current, batch)

    def on_train_batch_end(self, batch, logs=None):
        self.passing("batch_end", self.current, batch)

    def on_epoch_end(self, epoch, logs=None):
        self.passing("epoch_end", epoch)

    def on_train_end(self, logs=None):
        self.passing("train_end")


def kill_this_worker():
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def executor_of_this_worker():
    """The processes of the daemon that forked this worker, and of the executor's JVM, the daemon's parent."""
    daemon = psutil.Process().parent()
    return daemon, daemon.parent()


class KillWorkers(AtPoint):
    """Kills these Python workers."""

    def fault(self, worker):
        kill_this_worker()


class KillWithoutFiles(AtPoint):
    """Removes this worker's stored rows from its executor, and kills the Python worker."""

    def fault(self, worker):
        home = Path(os.environ["SPARK_LOCAL_DIRS"].split(",")[0])
        for path in home.glob(f"sparkkeras-*/part-{worker}-*"):
            shutil.rmtree(path)
        kill_this_worker()


@dataclass
class KillInValidation:
    """A transform that kills one Python worker at a batch of validation rows, and returns all rows unchanged."""

    folder: str
    worker: int
    batch: int
    seen: int = 0

    def __call__(self, x, y):
        if np.all(x[:, 0] == HELD_OUT) and worker_number() == self.worker:
            if self.seen == self.batch and claim(self.folder, f"fault-{self.worker}"):
                kill_this_worker()
            self.seen += 1
        return x, y


class WaitForMark(keras.callbacks.Callback):
    """Workers wait at the beginning of an epoch for a marker file."""

    def __init__(self, epoch, mark):
        super().__init__()
        self.epoch, self.mark = epoch, str(mark)

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.epoch:
            await_mark(self.mark)


def interrupted_at_the_first_member(monkeypatch):
    """Interrupts the training of ensembles, once, when a first member has its checkpoint.

    Returns:
        The members whose training is started from now on, and those that get a checkpoint.
    """
    started, kept = [], []
    of, keep = SparkResults.of, MemberCheckpoints.keep

    def interrupted(checkpoints, trained):
        keep(checkpoints, trained)
        kept.append(trained.member)
        if len(kept) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(SparkResults, "of", lambda results, member: (started.append(member), of(results, member))[1])
    monkeypatch.setattr(MemberCheckpoints, "keep", interrupted)
    return started, kept


# --- What remains ----------------------------------------------------------------------------------------------------


def folders_of_an_executor(_):
    home = Path(os.environ["SPARK_LOCAL_DIRS"].split(",")[0])
    return [str(path) for path in home.glob("sparkkeras-*")]


def leftovers(sc):
    """Everything that a call might leave on the driver and on the executors."""
    folders = sc.parallelize(range(4), 4).flatMap(folders_of_an_executor).collect()
    sc._jsc.sc().listenerBus().waitUntilEmpty()  # Spark has processed the events of all jobs
    sc._jvm.java.lang.System.gc()  # Spark keeps only weak references to cached RDDs
    driver = psutil.Process()
    return {
        "files": sorted({*folders, *map(str, Path(sc._temp_dir).glob("sparkkeras-*"))}),
        "rdds": sc._jsc.getPersistentRDDs().size(),
        "threads": sorted(each.name for each in threading.enumerate() if each.name.startswith("sparkkeras")),
        "ports": sorted(each.laddr.port for each in driver.net_connections("inet") if each.status == psutil.CONN_LISTEN),
        "children": sorted(each.pid for each in driver.children()),  # Spark's JVM; the workers are its children
        "jobs": [list(sc.statusTracker().getActiveJobsIds()), list(sc.statusTracker().getActiveStageIds())],
        "tags": sorted(sc.getJobTags()),
    }


@contextlib.contextmanager
def jobs_of(sc):
    """The numbers of the jobs that the body starts, in a list that is filled at its end."""
    group, found = uuid.uuid4().hex, []
    sc.setJobGroup(group, "")
    try:
        yield found
    finally:
        found += sc.statusTracker().getJobIdsForGroup(group)
        sc.setLocalProperty("spark.jobGroup.id", None)


@contextlib.contextmanager
def nothing_left(sc, seconds=60):
    """Check that nothing remains, whether the body succeeds or fails; a cancelled job needs some time to end."""
    SparkModel(classifier()).predict(np.zeros((1, 64), np.float32))  # starts Spark's accumulator server and other threads
    before = leftovers(sc) | {"jobs": [[], []], "threads": []}
    yield
    deadline = time.monotonic() + seconds
    while (after := leftovers(sc)) != before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert after == before


# --- Recorded calls --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RecordedCall:
    """A call that the parameter server answered; ``status`` is that of a lease, or the kind of a rejection."""

    at: float
    name: str
    worker: int | None
    lease: int | None
    status: str
    rejected: bool


class Witness:
    """Records all calls that parameter servers in this process answer; a context manager."""

    def __init__(self):
        self.calls = []

    def __enter__(self):
        answer = ParameterService.__call__

        def witnessed(service, call):
            status, rejected = "", False
            try:
                reply = answer(service, call)
                status = str(reply.fields.get("status", ""))
                return reply
            except RefusedError as error:
                status, rejected = error.kind, True
                raise
            finally:
                lease = reply.fields.get("lease") if status == "granted" else call.fields.get("lease")
                worker = call.fields.get("worker")
                self.calls.append(RecordedCall(time.monotonic(), call.name, worker, lease, status, rejected))

        self._patch = mock.patch.object(ParameterService, "__call__", witnessed)
        self._patch.start()
        return self

    def __exit__(self, *_):
        self._patch.stop()

    def leases(self, worker):
        """The leases that were granted to a worker's attempts, in order."""
        return [call for call in self.calls if call.name == "lease" and call.worker == worker and call.status == "granted"]

    def silence(self, worker):
        """The seconds from the last call with the first lease until the second lease was granted."""
        first, second = self.leases(worker)[:2]
        return second.at - max(call.at for call in self.calls if call.lease == first.lease and call.at < second.at)
