"""What users run on Spark, each with a result that shows whether anything was lost or counted twice.

An operation is a function ``(context, probe, **options)`` that runs in the driver process. Its result is compatible with
JSON, and equal for two runs, with or without a fault.
"""

import contextlib
import hashlib
import os
import time
import warnings
from functools import partial
from pathlib import Path
from unittest import mock

import keras
import numpy as np
from hyperopt import hp

from sparkkeras import (
    Checkpoint,
    ParameterServerOptions,
    ServerOptions,
    SparkEnsemble,
    SparkModel,
    SparkRunner,
    StorageError,
    to_data_frame,
)
from sparkkeras.checkpoints.store import CheckpointStore
from sparkkeras.hyperopt import HyperParamModel
from sparkkeras.runner import context as ranks
from tests.integration.faults import Rows, await_slots
from tests.models import classifier

ROWS, BATCH_SIZE, EPOCHS, WORKERS = 480, 16, 3, 2
LEASE_SECONDS = 3.0
SLOW_STORE_SECONDS = 2.0


def arrays():
    generator = np.random.default_rng(0)
    x = generator.random((ROWS, 64), np.float32)
    return x, generator.integers(0, 10, ROWS)


def rows(context, count=0):
    """The rows in two partitions, when Spark has a slot for each; or ``count`` random rows for each partition."""
    await_all_slots(context)
    if count:
        return context.parallelize(range(WORKERS), WORKERS).flatMap(lambda seed: _random_rows(seed, count))
    return context.parallelize(list(zip(*arrays(), strict=True)), WORKERS)


def frame(context, count=0):
    """The same rows as a DataFrame of a Spark Connect session."""
    from pyspark.sql import SparkSession

    await_all_slots(context)
    x, y = arrays() if not count else map(np.array, zip(*_random_rows(0, WORKERS * count), strict=True))
    return to_data_frame(SparkSession.active(), x, y)


def _random_rows(seed, count):
    generator = np.random.default_rng(seed)
    for _ in range(count):
        yield generator.random(64, np.float32), int(generator.integers(10))


def await_all_slots(context):
    if context.getConf().get("spark.dynamicAllocation.enabled", "false") != "true":
        await_slots(context)


def partition():
    """The number of the partition, in a task."""
    from pyspark import TaskContext

    return TaskContext.get().partitionId()


def digest(values):
    joined = hashlib.sha256()
    for value in values:
        joined.update(np.ascontiguousarray(value).tobytes())
    return joined.hexdigest()[:16]


class Steps(keras.callbacks.Callback):
    """Calls a probe at each batch, in a worker."""

    def __init__(self, probe):
        super().__init__()
        self.probe = probe

    def on_train_batch_begin(self, batch, logs=None):
        self.probe(int(os.environ["RANK"]) if "RANK" in os.environ else partition())


class Pause(keras.callbacks.Callback):
    """Waits between epochs, on the driver, and notes how many executors there are then."""

    def __init__(self, context, path, seconds):
        super().__init__()
        self.context, self.path, self.seconds = context, path, seconds

    def on_epoch_end(self, epoch, logs=None):
        time.sleep(self.seconds)
        with self.path.open("a") as file:
            file.write(f"{self.context._jsc.sc().getExecutorMemoryStatus().size() - 1}\n")


def spark_model(mode, **options):
    keras.utils.set_random_seed(0)
    frequency = {"synchronous": "epoch", "allreduce": None}.get(mode, 2)
    if mode in ("asynchronous", "hogwild"):
        options = {"server_options": ParameterServerOptions(lease_seconds=LEASE_SECONDS), **options}
    model = classifier(metrics=["accuracy", Rows()])
    return SparkModel(model, mode, frequency, num_workers=WORKERS, batch_size=BATCH_SIZE, seed=4, **options)


def train(context, probe, mode, epochs=EPOCHS, path=None, pause=0.0, count=0, data=rows, **options):
    """The weights; for modes whose updates have no fixed order, the steps and rows that count."""
    trained = spark_model(mode, **options)
    arguments = {} if path is None else {"checkpoint": Checkpoint(path), "resume": True}
    history = trained.fit(
        data(context, count),
        epochs=epochs,
        verbose=0,
        callbacks=[Pause(context, Path(probe.folder) / "executors", pause)] if pause else [],
        worker_callbacks=[Steps(probe)],
        **arguments,
    )
    found = {"epochs": history.epoch, "rows": history.history["counted"]}
    if trained.parameter_server_stats is None:
        return found | {"weights": digest(trained.model.get_weights())}
    assert all(np.isfinite(weight).all() for weight in trained.model.get_weights())
    counted = {str(worker): count for worker, count in sorted(trained.parameter_server_stats.steps.items())}
    return found | {"steps": counted, "iterations": int(trained.model.optimizer.iterations)}


def search(context, probe, path=None):
    """The parameters and values of all trials."""

    def objective(params, data):
        for _ in range(15):
            probe(round(params["x"] * 1e6))
        return params["x"] ** 2

    await_all_slots(context)
    model = HyperParamModel(context, server_options=ServerOptions(lease_seconds=LEASE_SECONDS), num_workers=WORKERS)
    space = {"x": hp.uniform("x", 1, 2)}
    arguments = {} if path is None else {"save_to": path}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        model.minimize(objective=objective, space=space, max_evals=8, seed=1, algo="random", verbose=0, **arguments)
    return sorted([trial.status, trial.params["x"], trial.value] for trial in model.trials)


def ensemble(context, probe, path=None, count=0):
    """The weights of the members."""
    members = SparkEnsemble(lambda number: classifier(units=16, seed=number), 3, seed=1)
    arguments = {} if path is None else {"checkpoint": Checkpoint(path), "resume": True}
    members.fit(rows(context, count), epochs=2, verbose=0, batch_size=BATCH_SIZE, transform=Transform(probe), **arguments)
    return [digest(model.get_weights()) for model in members.models]


class Transform:
    """Calls a probe for each batch, in a worker."""

    def __init__(self, probe):
        self.probe = probe

    def __call__(self, x, y=None):
        if "SPARK_LOCAL_DIRS" in os.environ:  # the driver calls it too, to know the shape of its result
            self.probe(partition())
        return x if y is None else (x, y)


def predict(context, probe):
    """The predictions."""
    data = rows(context).keys()
    return digest(SparkModel(classifier()).predict(data, batch_size=BATCH_SIZE, transform=Transform(probe)))


def evaluate(context, probe):
    """The metrics."""
    model = SparkModel(classifier(metrics=["accuracy", Rows()]))
    return model.evaluate(rows(context), batch_size=BATCH_SIZE, transform=Transform(probe), return_dict=True)


def run(context, probe, path=None, count=0):
    """The sum that ranks have computed step by step, and rank 0 has saved after each tenth step."""

    def add(saves):
        here = ranks()
        restored = here.restored() if saves else None
        saved = {"step": 0, "total": 0.0} if restored is None else restored.state
        step, total = int(saved["step"]), float(saved["total"])
        while step < 40:
            probe(here.rank)
            total += float(here.all_reduce(float(step)))
            step += 1
            if saves and step % 10 == 0:
                here.save(step, {"step": step, "total": total})
        return total

    data = rows(context, count)
    arguments = {} if path is None else {"checkpoint": Checkpoint(path), "resume": True}
    arguments |= {"data": data} if count else {}
    return SparkRunner(WORKERS).run(add, path is not None, **arguments)


def left_behind(context):
    """Jobs, files of executors and threads that remain."""
    import threading

    deadline = time.monotonic() + 20
    while True:
        found = {
            "stages": list(context.statusTracker().getActiveStageIds()),
            "threads": [each.name for each in threading.enumerate() if each.name.startswith("sparkkeras")],
            "files": context.parallelize(range(4), 4).flatMap(_files).collect(),
        }
        if not any(found.values()) or time.monotonic() > deadline:
            return {name: value for name, value in found.items() if value}
        time.sleep(0.2)


def _files(_):
    home = Path(os.environ["SPARK_LOCAL_DIRS"].split(",")[0])
    return [str(path) for path in home.rglob("sparkkeras-*") if path.is_dir()]


def attempt(context, operation, probe, **options):
    """Run an operation; its result, or its error, with the seconds that it took and what is left behind."""
    started = time.time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            with checkpoint_store(options.pop("store", "works")):
                found = {"result": OPERATIONS[operation](context, probe, **options)}
        except Exception as error:
            found = {"error": type(error).__name__, "message": str(error)[:2000]}
    found |= {"ended": time.time(), "seconds": round(time.time() - started, 1)}
    return found | {"warnings": [str(each.message) for each in caught], "left": left_behind(context)}


@contextlib.contextmanager
def checkpoint_store(kind):
    """The store of checkpoints ``works``, or fails ``always`` or ``once`` (the second write), or is ``slow``."""
    real, count = CheckpointStore.write, 0

    def write(store, *arguments):
        nonlocal count
        count += 1
        if kind == "always" or (kind == "once" and count == 2):
            raise StorageError("the store does not respond.")
        if kind == "slow":
            time.sleep(SLOW_STORE_SECONDS)
        return real(store, *arguments)

    with mock.patch.object(CheckpointStore, "write", write):
        yield


OPERATIONS = {
    **{mode: partial(train, mode=mode) for mode in ("synchronous", "asynchronous", "hogwild", "allreduce")},
    "connect": partial(train, mode="synchronous", data=frame),  # whose context is that of the server
    **{function.__name__: function for function in (search, ensemble, predict, evaluate, run)},
}
