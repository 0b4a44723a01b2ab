"""What the tests of faults share: data and a model that can be checked to the row, faults at marked points, and a witness.

A fault happens in a worker's callback when it comes to its point, once, guarded by a marker file. So it always lands there,
however slow the machine.
"""

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import keras
import numpy as np

from sparkkeras import SparkModel
from sparkkeras.parameter.options import ParameterServerOptions
from sparkkeras.parameter.service import ParameterService
from sparkkeras.rpc.transport import RefusedError

ROWS, WORKERS, BATCH_SIZE, EPOCHS = 240, 2, 8, 3
BATCHES = ROWS // WORKERS // BATCH_SIZE
HELD_OUT = 9.0
"""The first feature of rows that validate."""


class Rows(keras.metrics.Metric):
    """Counts rows, so that History tells how many it is about."""

    def __init__(self, name="counted", **arguments):
        super().__init__(name=name, **arguments)
        self.count = self.add_variable((), "zeros", name="count")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign_add(keras.ops.cast(keras.ops.shape(y_pred)[0], self.count.dtype))

    def result(self):
        return self.count


def arrays(count=ROWS, held_out=0):
    """Rows that can be learnt; of each worker's, the last ``held_out`` are marked."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(count, 8)).astype(np.float32)
    y = (x[:, 1:] @ generator.normal(size=(7, 4))).argmax(1)
    share = count // WORKERS
    for worker in range(WORKERS if held_out else 0):
        x[(worker + 1) * share - held_out : (worker + 1) * share, 0] = HELD_OUT
    return x, y


def rdd(sc, x, y, parts=WORKERS):
    """The rows on Spark, once it has a slot for every worker: fewer would train on more rows each."""
    await_slots(sc)
    return sc.parallelize(list(zip(x, y, strict=True)), parts)


def await_slots(sc, seconds=180):
    """Wait until lost executors have been replaced."""
    scala = sc._jsc.sc()
    profile = scala.resourceProfileManager().defaultResourceProfile()
    deadline = time.monotonic() + seconds
    while scala.maxNumConcurrentTasks(profile) < WORKERS:
        assert time.monotonic() < deadline, "executors are missing"
        time.sleep(0.05)


def spark_model(transport="socket", frequency=5, mode="asynchronous", rule=None, port=0, **options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((8,), name="x"),
            keras.layers.Dense(16, activation="relu", name="hidden"),
            keras.layers.Dense(4, activation="softmax", name="scores"),
        ],
        name="faults",
    )
    model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", metrics=["accuracy", Rows()])
    return SparkModel(
        model,
        mode,
        frequency,
        parameter_server_mode=transport,
        rule=rule,
        port=port,
        batch_size=BATCH_SIZE,
        seed=7,
        server_options=ParameterServerOptions(**options),
    )


def check(trained, history, *, epochs=EPOCHS, steps=None, rows=ROWS, validated=0):
    """Every step and every row was counted once, and something was learnt."""
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


def tell(*figures):
    """Say how long things took, to those who ask (pytest -s)."""
    sys.stderr.write(f"\n{' '.join(map(str, figures))}\n")


# --- Faults ----------------------------------------------------------------------------------------------------------


def worker_number():
    from pyspark import TaskContext

    context = TaskContext.get()
    return None if context is None else context.partitionId()  # `transform` runs on the driver, too


def attempt_number():
    from pyspark import TaskContext

    return TaskContext.get().taskAttemptId()


def claim(folder, name, text=""):
    """Whether nobody has passed this mark before."""
    try:
        handle = os.open(Path(folder) / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return False
    os.write(handle, text.encode())
    os.close(handle)
    return True


def await_mark(path, seconds=180):
    """Wait for a mark; an assertion fails where it does not come."""
    deadline = time.monotonic() + seconds
    while not Path(path).exists():
        assert time.monotonic() < deadline, f"nobody has made {path}"
        time.sleep(0.01)


class AtPoint(keras.callbacks.Callback):
    """Calls ``fault`` in a worker, once, at its point: a hook's name, and the epoch and the batch where it has them."""

    def __init__(self, folder, points):
        super().__init__()
        self.folder, self.points = str(folder), points
        self.current = None

    def fault(self, worker):
        raise NotImplementedError

    def passing(self, *point):
        worker = worker_number()
        if self.points.get(worker) == point and claim(self.folder, f"fault-{worker}", str(time.time())):
            self.fault(worker)

    def on_epoch_begin(self, epoch, logs=None):
        self.current = epoch
        self.passing("epoch_begin", epoch)

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
    """The daemon that forked this worker, and the executor's JVM above it."""
    import psutil

    daemon = psutil.Process().parent()
    return daemon, daemon.parent()


class Kill(AtPoint):
    """Ends this Python worker."""

    def fault(self, worker):
        kill_this_worker()


class KillExecutor(AtPoint):
    """Ends this worker's executor."""

    def fault(self, worker):
        executor_of_this_worker()[1].kill()
        time.sleep(60)


class KillWithoutFiles(AtPoint):
    """Removes this worker's rows from its executor, and ends the Python worker."""

    def fault(self, worker):
        import shutil

        home = Path(os.environ["SPARK_LOCAL_DIRS"].split(",")[0])
        for path in home.glob(f"sparkkeras-*/part-{worker}-*"):
            shutil.rmtree(path)
        kill_this_worker()


@dataclass
class KillInValidation:
    """A transform that ends one Python worker at a batch of the rows that validate, and leaves all rows as they are."""

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
    """Workers wait at the beginning of an epoch until somebody has made a mark."""

    def __init__(self, epoch, mark):
        super().__init__()
        self.epoch, self.mark = epoch, str(mark)

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.epoch:
            await_mark(self.mark)


# --- The witness -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """A call that the parameter server answered; ``said`` is a lease's status, or the kind of a refusal."""

    at: float
    name: str
    worker: int | None
    lease: int | None
    attempt: int | None
    said: str
    refused: bool


class Witness:
    """Sees all calls that parameter servers in this process answer; a context manager.

    With ``hold`` set to a `threading.Event`, calls wait for it before they are answered.
    """

    def __init__(self):
        self.calls = []
        self.hold = None
        self.services = []

    def __enter__(self):
        answer = ParameterService.__call__

        def witnessed(service, call):
            if service not in self.services:
                self.services.append(service)
            if self.hold is not None:
                self.hold.wait(120)
            said, refused = "", False
            try:
                reply = answer(service, call)
                said = str(reply.fields.get("status", ""))
                return reply
            except RefusedError as error:
                said, refused = error.kind, True
                raise
            finally:
                lease = reply.fields.get("lease") if said == "granted" else call.fields.get("lease")
                told = (call.fields.get("worker"), lease, call.fields.get("attempt"), said, refused)
                self.calls.append(Seen(time.monotonic(), call.name, *told))

        self._patch = mock.patch.object(ParameterService, "__call__", witnessed)
        self._patch.start()
        return self

    def __exit__(self, *_):
        self._patch.stop()

    def leases(self, worker):
        """The leases that a worker's attempts were granted, in their order."""
        return [call for call in self.calls if call.name == "lease" and call.worker == worker and call.said == "granted"]

    def asked(self, worker, attempt):
        """What an attempt was told when it asked for its lease."""
        found = [call for call in self.calls if call.name == "lease" and call.worker == worker]
        return [call for call in found if call.attempt == attempt]

    def silence(self, worker):
        """How long the first lease had been silent when the second was granted."""
        first, second = self.leases(worker)[:2]
        return second.at - max(call.at for call in self.calls if call.lease == first.lease and call.at < second.at)
