"""The benchmarks: each is a function that measures samples, with the metrics to compute from them.

Functions import Keras, Spark and sparkkeras locally, since each benchmark runs in a separate process with its own backend.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import data
import numpy as np
from harness import ELEPHAS_PYTHON, Effort, Metric, Samples, alternate, benchmark, missing_module, timed

LARGE, SMALL = 60_000, 8_000
PREDICT_BATCH_SIZE = 1024


@benchmark(
    Metric("MLP epoch begin -> end, 60,000 rows, against Keras as compiled", "large", "keras_large", 0.55),
    Metric("MLP epoch begin -> end, 60,000 rows, against Keras at equal steps", "large", "equal_large", 0.8),
    Metric("MLP epoch begin -> end, 8,000 rows, against Keras as compiled", "small", "keras_small", 0.8),
    Metric("MLP epoch begin -> end, 8,000 rows, against Keras at equal steps", "small", "equal_small"),
    Metric("epoch begin -> end less the slowest worker's fit, 60,000 rows", "added_large", None, 0.1, "seconds"),
    Metric("epoch begin -> end less the slowest worker's fit, 8,000 rows", "added_small", None, 0.1, "seconds"),
)
def synchronous(effort: Effort) -> Samples:
    """Epochs of a small model, where overhead dominates: against Keras as compiled and with equal steps_per_execution."""
    from sparkkeras.worker.device import AUTO_STEPS_PER_EXECUTION

    return _epochs(effort, {"keras": 1, "equal": AUTO_STEPS_PER_EXECUTION})


def _epochs_on(name: str, backend: str, large: float, small: float) -> Callable[[Effort], Samples]:
    """Epochs of the same model on another backend, against Keras as compiled."""
    metrics = (
        Metric(f"{name}: MLP epoch begin -> end, 60,000 rows, against Keras as compiled", "large", "keras_large", large),
        Metric(f"{name}: MLP epoch begin -> end, 8,000 rows, against Keras as compiled", "small", "keras_small", small),
        Metric(
            f"{name}: epoch begin -> end less the slowest worker's fit, 8,000 rows", "added_small", None, None, "seconds"
        ),
    )

    def measure(effort: Effort) -> Samples:
        return _epochs(effort, {"keras": 1})

    measure.__name__ = f"synchronous_{backend}"
    return benchmark(*metrics, backend=backend, missing=functools.partial(missing_module, backend))(measure)


synchronous_jax = _epochs_on("JAX", "jax", 0.65, 1.3)
synchronous_torch = _epochs_on("PyTorch", "torch", 0.65, 0.8)


def _epochs(effort: Effort, baselines: dict[str, int]) -> Samples:
    from contestants import OnSpark, PlainKeras, spark

    rows = {"small": effort.rows(SMALL), "large": effort.rows(LARGE)}
    with spark():
        ours = OnSpark(_seeded(data.mlp), *data.vectors(rows["small"]))
        theirs = {name: PlainKeras(_seeded(data.mlp, steps), ours.x, ours.y) for name, steps in baselines.items()}
        for contestant in (ours, *theirs.values()):
            contestant.epochs(effort.warmup)
        samples: Samples = {}
        for size, number in rows.items():
            x, y = data.vectors(number)
            for contestant in (ours, *theirs.values()):
                contestant.x, contestant.y = x, y
                contestant.epochs(1)
            runs = {f"{name}_{size}": theirs[name] for name in baselines}
            runs[size] = ours
            samples |= alternate(
                effort.turns, **{name: lambda run=run: run.epochs(effort.epochs) for name, run in runs.items()}
            )
            samples[f"added_{size}"] = ours.added[-effort.turns :]
    return samples


@benchmark(Metric("CNN epoch begin -> end, 16,000 rows, against Keras on the same cores", "ours", "keras", 1.05))
def cnn(effort: Effort) -> Samples:
    """A model that keeps the cores busy: two workers with one thread each against Keras with two threads."""
    from contestants import OnSpark, PlainKeras, spark

    x, y = data.images(effort.rows(2 * SMALL))
    with spark():
        ours, keras = OnSpark(_seeded(data.cnn), x, y), PlainKeras(_seeded(data.cnn), x, y)
        ours.epochs(1)
        keras.epochs(1)
        epochs = max(1, effort.epochs // 3)
        return alternate(effort.turns, keras=lambda: keras.epochs(epochs), ours=lambda: ours.epochs(epochs))


def _inference_on(prefix: str, name: str, backend: str) -> Callable[[Effort], Samples]:
    """Inference on arrays of the driver, after warm-up, with a backend."""
    metrics = (
        Metric(f"{prefix}predict call -> array, 60,000 rows, batch 1024, against Keras", "predict", "keras_predict", 1.0),
        Metric(f"{prefix}evaluate call -> metrics, 60,000 rows, batch 1024, against Keras", "evaluate", "keras_evaluate"),
    )

    def measure(effort: Effort) -> Samples:
        from contestants import WORKERS, spark

        from sparkkeras import SparkModel

        x, y = data.vectors(effort.rows(LARGE))
        model = _seeded(data.mlp)
        options = {"batch_size": PREDICT_BATCH_SIZE, "verbose": 0}
        with spark():
            spark_model = SparkModel(model, num_workers=WORKERS, batch_size=PREDICT_BATCH_SIZE)
            calls = {
                "keras_predict": lambda: model.predict(x, **options),
                "predict": lambda: spark_model.predict(x),
                "keras_evaluate": lambda: model.evaluate(x, y, **options),
                "evaluate": lambda: spark_model.evaluate(x, y),
            }
            for call in calls.values():
                timed(call, max(1, effort.warmup // 3))
            return alternate(
                effort.turns, **{name: lambda call=call: timed(call, effort.epochs) for name, call in calls.items()}
            )

    measure.__name__ = name
    return benchmark(*metrics, backend=backend, missing=functools.partial(missing_module, backend))(measure)


predict = _inference_on("", "predict", "tensorflow")
predict_jax = _inference_on("JAX: ", "predict_jax", "jax")
predict_torch = _inference_on("PyTorch: ", "predict_torch", "torch")


@benchmark(Metric("Handle.open -> last shuffled piece, 30,000 x 784, against np.copy", "ours", "copy", 2.0))
def handles(effort: Effort) -> Samples:
    """Read a partition's files as the arrays of one shuffled epoch, as a worker does; without Spark."""
    from sparkkeras.data import files
    from sparkkeras.data.block import BLOCK_BYTES, from_arrays
    from sparkkeras.data.order import RowOrder

    x, y = data.vectors(effort.rows(LARGE) // 2)
    epoch = itertools.count()
    with tempfile.TemporaryDirectory() as folder:
        handle = files.write([from_arrays(x, y, None)], 0, Path(folder))

        def gather() -> None:
            block = handle.open()
            assert block is not None
            order = RowOrder(block.rows, block.spec.row_bytes, data.BATCH_SIZE, (0, 0, next(epoch)))
            for index in order.pieces(0, order.batches, BLOCK_BYTES):
                _ = block[index].arrays

        def copy() -> None:
            _ = np.copy(x), np.copy(y)

        for call in (copy, gather):
            timed(call, 3)
        return alternate(effort.turns, copy=lambda: timed(copy, effort.epochs), ours=lambda: timed(gather, effort.epochs))


@benchmark(
    Metric("accuracy lost, digits, equal steps a worker, against Keras", "ours", "keras", 0.5, "points"),
    once=True,
)
def accuracy(effort: Effort) -> Samples:
    """Accuracy on held-out rows. Each of two workers has half the rows, so it trains twice as many epochs."""
    import keras
    from contestants import WORKERS, spark

    from sparkkeras import SparkModel

    epochs = max(2, 20 // effort.shrink)
    x, y = data.small_digits()
    samples: Samples = {"keras": [], "ours": []}
    with spark():
        for seed in range(effort.seeds):
            order = np.random.default_rng(seed).permutation(len(x))
            held_out, train = order[:360], order[360:]
            plain, master = _seeded(data.small_mlp, seed=seed), _seeded(data.small_mlp, seed=seed)
            keras.utils.set_random_seed(seed)
            plain.fit(x[train], y[train], epochs=epochs, batch_size=32, verbose=0)
            spark_model = SparkModel(master, num_workers=WORKERS, batch_size=32, seed=seed)
            spark_model.fit(x[train], y[train], epochs=WORKERS * epochs, verbose=0)
            for name, model in (("keras", plain), ("ours", master)):
                samples[name].append([model.evaluate(x[held_out], y[held_out], verbose=0)[1]])
    return samples


@benchmark(
    Metric("predict 60,000 rows, MLP, OpenVINO, against Keras on TensorFlow", "mlp_openvino", "keras_mlp", 0.4),
    Metric("the same, JAX", "mlp_jax", "keras_mlp"),
    Metric("the same, TensorFlow", "mlp", "keras_mlp"),
    Metric("predict 8,000 x 60 x 8, LSTM, OpenVINO, against TensorFlow on the workers", "lstm_openvino", "lstm", 0.5),
    Metric("the same, JAX", "lstm_jax", "lstm"),
    Metric(
        "predict 1,000 x 64 words, transformer, OpenVINO, against TensorFlow on the workers",
        "transformer_openvino",
        "transformer",
        0.5,
    ),
    Metric("the same, JAX", "transformer_jax", "transformer"),
    Metric("transform 60,000 x array of 784, OpenVINO, against keras.predict on TensorFlow", "wide", "keras_wide", 0.7),
    Metric("transform 600,000 x 10 columns, OpenVINO, against keras.predict on TensorFlow", "narrow", "keras_narrow", 0.7),
    missing=functools.partial(missing_module, "openvino"),
)
def scoring(effort: Effort) -> Samples:
    """Score with other backends than the driver's, TensorFlow; batches of 1024, warm."""
    from contestants import WORKERS, spark

    from sparkkeras import SparkModel
    from sparkkeras.ml import KerasTransformer

    samples: Samples = {}
    calls: dict[str, Callable[[], Any]]
    models = {
        "mlp": (_seeded(data.mlp), data.vectors(effort.rows(LARGE))[0]),
        "lstm": (_seeded(data.lstm), data.series(effort.rows(SMALL))),
        "transformer": (_seeded(data.transformer), data.words(effort.rows(SMALL) // 8)),
    }
    options = {"batch_size": PREDICT_BATCH_SIZE, "verbose": 0}
    with spark() as session:
        for name, (model, x) in models.items():
            spark_model = SparkModel(model, num_workers=WORKERS, batch_size=PREDICT_BATCH_SIZE)
            calls = {
                name: lambda x=x, scorer=spark_model: scorer.predict(x),
                f"{name}_openvino": lambda x=x, scorer=spark_model: scorer.predict(x, backend="openvino"),
                f"{name}_jax": lambda x=x, scorer=spark_model: scorer.predict(x, backend="jax"),
            }
            if name == "mlp":
                calls["keras_mlp"] = lambda x=x, model=model: model.predict(x, **options)
            samples |= _alternately(calls, effort)
        for shape, (model, x, columns) in _frames(effort).items():
            frame = _cached(session, x, columns, WORKERS)
            given = {"featuresCol": columns, "outputCol": "output", "inferenceBatchSize": PREDICT_BATCH_SIZE}
            scorer = KerasTransformer(model=model, backend="openvino", predictionCol="", probabilityCol="", **given)
            calls = {
                f"keras_{shape}": lambda model=model, x=x: model.predict(x, **options),
                shape: lambda frame=frame, scorer=scorer: _exhaust(scorer.transform(frame).select("output")),
            }
            samples |= _alternately(calls, effort)
            frame.unpersist()
    return samples


def _alternately(calls: dict[str, Callable[[], Any]], effort: Effort) -> Samples:
    """The times of calls that take turns, after each has warmed up."""
    for call in calls.values():
        timed(call, max(1, effort.warmup // 6))
    passes = max(1, effort.epochs // 6)
    return alternate(effort.turns, **{name: lambda call=call: timed(call, passes) for name, call in calls.items()})


def _elephas_missing() -> str | None:
    return None if ELEPHAS_PYTHON.exists() else "the environment of Elephas is missing: run benchmarks/elephas_env.sh"


@benchmark(
    Metric("transform -> all rows, 60,000 x array of 784, against keras.predict of arrays", "wide", "keras_wide", 1.2),
    Metric("transform -> all rows, 600,000 x 10 columns, against keras.predict of arrays", "narrow", "keras_narrow", 1.2),
    Metric("transform -> all rows, 20,000 x 500 columns, against keras.predict of arrays", "table", "keras_table", 1.2),
    Metric("DataFrame -> blocks on disk, 60,000 x array of 784", "blocks_wide", None, None, "seconds"),
    Metric("DataFrame -> blocks on disk, 600,000 x 10 columns", "blocks_narrow", None, None, "seconds"),
    Metric("DataFrame -> blocks on disk, 20,000 x 500 columns", "blocks_table", None, None, "seconds"),
    Metric("DataFrame -> its Arrow batches in Python, 60,000 x array of 784", "arrow_wide", None, None, "seconds"),
    Metric("DataFrame -> its Arrow batches in Python, 600,000 x 10 columns", "arrow_narrow", None, None, "seconds"),
    Metric("DataFrame -> its Arrow batches in Python, 20,000 x 500 columns", "arrow_table", None, None, "seconds"),
)
def frames(effort: Effort) -> Samples:
    """Apply a model to a cached DataFrame, and write it to the files that workers train from; batches of 1024, warm."""
    from contestants import WORKERS, spark

    from sparkkeras.ml import KerasTransformer

    samples: Samples = {}
    passes = max(2, effort.epochs // 2)
    with spark() as session:
        for shape, (model, x, columns) in {**_frames(effort), "table": _table(effort.rows(20_000), 500)}.items():
            frame = _cached(session, x, columns, WORKERS)
            scorer = KerasTransformer(
                model=model, featuresCol=columns, outputCol="output", inferenceBatchSize=PREDICT_BATCH_SIZE
            )
            scorer.setPredictionCol("").setProbabilityCol("")
            calls = {
                f"keras_{shape}": lambda model=model, x=x: model.predict(x, batch_size=PREDICT_BATCH_SIZE, verbose=0),
                shape: lambda frame=frame, scorer=scorer: _exhaust(scorer.transform(frame).select("output")),
                f"blocks_{shape}": lambda frame=frame, model=model, columns=columns: _store(frame, model, columns),
                f"arrow_{shape}": lambda frame=frame: _exhaust(frame.mapInArrow(_counting(), "rows long")),
            }
            for call in calls.values():
                timed(call, max(1, effort.warmup // 6))
            samples |= alternate(
                effort.turns, **{name: lambda call=call: timed(call, passes) for name, call in calls.items()}
            )
            frame.unpersist()
    return samples


@benchmark(
    Metric("transform, 8,000 x 784, against Elephas's transformer", "wide", "elephas_wide", 0.1),
    Metric("transform, 8,000 x 10, against Elephas's transformer", "narrow", "elephas_narrow", 0.1),
    missing=_elephas_missing,
)
def elephas_frames(effort: Effort) -> Samples:
    """The transformer of Elephas 7.3.0 on the same rows, as vectors."""
    from contestants import WORKERS, Elephas, spark

    from sparkkeras.ml import KerasTransformer

    rows = effort.rows(SMALL)
    samples: Samples = {}
    for _ in range(-(-effort.turns // 3)):
        for shape, seconds in Elephas().transforms(rows, max(2, effort.epochs // 3)).items():
            samples.setdefault(f"elephas_{shape}", []).append(seconds)
        with spark() as session:
            for shape, (model, x, columns) in _frames(effort).items():
                frame = _cached(session, x[:rows], columns, WORKERS)
                scorer = KerasTransformer(model=model, featuresCol=columns)
                _exhaust(scorer.transform(frame).select("prediction"))
                run = timed(lambda frame=frame, scorer=scorer: _exhaust(scorer.transform(frame).select("prediction")), 5)
                samples.setdefault(shape, []).append(run)
    return samples


def _frames(effort: Effort):
    """Models, their rows as arrays, and the names of the columns in their DataFrames."""
    wide, _ = data.vectors(effort.rows(LARGE))
    return {"wide": (_seeded(data.mlp), wide, "features"), "narrow": _table(effort.rows(10 * LARGE), 10)}


def _table(rows: int, columns: int):
    """A model, the rows of a table as an array, and the names of its columns."""
    return _seeded(data.table_mlp, columns), data.table(rows, columns), [f"x{number}" for number in range(columns)]


def _cached(session, x, columns, partitions: int):
    """Convert arrays to a DataFrame that is cached in Spark's memory."""
    from sparkkeras import to_data_frame

    sides = {"features": x} if columns == "features" else {name: x[:, index] for index, name in enumerate(columns)}
    frame = to_data_frame(session, sides).repartition(partitions).cache()
    frame.count()
    return frame


def _exhaust(frame) -> None:
    """Make Spark compute all rows and discard them."""
    frame.write.format("noop").mode("overwrite").save()


def _counting():
    """Return a function that only counts rows. It is nested so that it is pickled: workers cannot import this file."""

    def count(batches):
        import pyarrow as pa

        yield pa.record_batch([pa.array([sum(batch.num_rows for batch in batches)])], ["rows"])

    return count


def _store(frame, model, columns) -> None:
    """Write the rows to disk, as `fit` does before it trains."""
    from sparkkeras.data.reader import Reader
    from sparkkeras.modeling.schema import schema_of
    from sparkkeras.sources.frame import ColumnMapping
    from sparkkeras.sources.source import as_source

    source = as_source(frame, Reader(schema_of(model), labelled=False), columns=ColumnMapping(columns))
    with source.dataset() as dataset, dataset.stored():
        pass


@benchmark(
    Metric("MLP epoch begin -> end, 8,000 rows, against Elephas (end -> end)", "epoch", "elephas_epoch", 0.1),
    Metric("predict call -> array, 2,000 rows, against Elephas", "predict", "elephas_predict", 0.05),
    missing=_elephas_missing,
)
def elephas(effort: Effort) -> Samples:
    """Elephas 7.3.0, synchronous, with the same data, model and number of workers."""
    from contestants import Elephas, OnSpark, spark

    rows, predict_rows = effort.rows(SMALL), effort.rows(2_000)
    x, _ = data.vectors(predict_rows)
    samples: Samples = {}
    with spark():
        ours = OnSpark(_seeded(data.mlp), *data.vectors(rows))
        ours.epochs(effort.warmup)
        ours.spark_model.predict(x)
        for _ in range(-(-effort.turns // 3)):
            theirs = Elephas().run(
                rows=rows,
                warmup=max(1, effort.warmup // 6),
                epochs=effort.epochs,
                predict_rows=predict_rows,
                predicts=max(1, effort.epochs // 3),
            )
            turn = {
                "elephas_epoch": theirs["epoch"],
                "elephas_predict": theirs["predict"],
                "epoch": ours.epochs(effort.epochs),
                "predict": timed(lambda: ours.spark_model.predict(x), effort.epochs),
            }
            for name, seconds in turn.items():
                samples.setdefault(name, []).append(seconds)
    return samples


@benchmark(
    Metric("SparkRunner call -> result of DDP, 300 steps, against TorchDistributor", "call", "their_call", 1.0),
    Metric("step of DDP under SparkRunner, against TorchDistributor", "step", "their_step", 1.1),
    backend="torch",
    missing=functools.partial(missing_module, "torch"),
)
def runner(effort: Effort) -> Samples:
    """The same training function of PyTorch's DistributedDataParallel, started by SparkRunner and by TorchDistributor."""
    from contestants import WORKERS, spark
    from pyspark.ml.torch.distributor import TorchDistributor

    from sparkkeras import SparkRunner

    train = _ddp()
    with spark():
        theirs = TorchDistributor(num_processes=WORKERS, local_mode=False, use_gpu=False)
        return _runs(effort, lambda steps: SparkRunner(WORKERS).run(train, steps)[0], lambda steps: theirs.run(train, steps))


@benchmark(
    Metric(
        "SparkRunner call -> result of MultiWorkerMirroredStrategy, 300 steps, against spark-tensorflow-distributor",
        "call",
        "their_call",
        1.0,
    ),
    Metric("its step under SparkRunner, against spark-tensorflow-distributor", "step", "their_step", 1.1),
    missing=functools.partial(missing_module, "spark_tensorflow_distributor"),
)
def runner_mirrored(effort: Effort) -> Samples:
    """The same function under MultiWorkerMirroredStrategy, started by SparkRunner and by spark-tensorflow-distributor."""
    from contestants import WORKERS, spark
    from spark_tensorflow_distributor import MirroredStrategyRunner

    from sparkkeras import SparkRunner

    train = _mirrored()

    def with_strategy(steps: int) -> list[float]:
        import tensorflow as tf

        with tf.distribute.MultiWorkerMirroredStrategy().scope():
            return train(steps)

    with spark():
        theirs = MirroredStrategyRunner(num_slots=WORKERS, use_gpu=False)
        return _runs(
            effort,
            lambda steps: SparkRunner(WORKERS).run(with_strategy, steps)[0],
            lambda steps: theirs.run(train, steps=steps),
        )


def _runs(effort: Effort, ours: Callable[[int], list[float]], theirs: Callable[[int], list[float]]) -> Samples:
    """Run a training function, which returns the seconds of its steps, in turns after one call of each."""
    steps = max(20, effort.rows(300))
    calls = {"their_": theirs, "": ours}
    for call in calls.values():
        call(steps)
    samples: Samples = {}
    for _ in range(effort.turns):
        for name, call in calls.items():
            started = time.perf_counter()
            seconds = call(steps)
            _add(samples, name, {"call": [time.perf_counter() - started], "step": seconds})
    return samples


def _ddp() -> Callable[[int], list[float]]:
    """Return a training function. It is nested so that it is pickled: workers cannot import this file."""
    batch_size = data.BATCH_SIZE

    def train(steps: int) -> list[float]:
        """Train an MLP on random rows; return the seconds of each step of this rank, without the first ones."""
        import time

        import torch
        from torch.nn import Linear, ReLU, Sequential
        from torch.nn.parallel import DistributedDataParallel

        torch.distributed.init_process_group("gloo")
        torch.set_num_threads(1)
        network = DistributedDataParallel(Sequential(Linear(784, 128), ReLU(), Linear(128, 128), ReLU(), Linear(128, 10)))
        optimizer, loss_of = torch.optim.Adam(network.parameters()), torch.nn.CrossEntropyLoss()
        x, y = torch.rand(batch_size, 784), torch.randint(10, (batch_size,))
        seconds = []
        for _ in range(steps):
            started = time.perf_counter()
            optimizer.zero_grad()
            loss_of(network(x), y).backward()
            optimizer.step()
            seconds.append(time.perf_counter() - started)
        return seconds[10:]  # the process group stays open, because of https://github.com/pytorch/pytorch/issues/56297

    return train


def _mirrored() -> Callable[[int], list[float]]:
    """Return a training function that is called in the scope of a strategy. It is nested for the same reason."""
    batch_size = data.BATCH_SIZE

    def train(steps: int) -> list[float]:
        """Train an MLP on random rows; return the seconds of each step of this rank, without the first ones."""
        import time

        import tensorflow as tf

        strategy, mean = tf.distribute.get_strategy(), tf.VariableAggregation.MEAN
        layers = [
            [tf.Variable(tf.random.stateless_normal(shape, (0, 0)) / 16, aggregation=mean) for shape in ((n, m), (m,))]
            for n, m in ((784, 128), (128, 128), (128, 10))
        ]
        weights = [weight for layer in layers for weight in layer]
        x = tf.random.uniform((batch_size, 784))
        y = tf.random.uniform((batch_size,), maxval=10, dtype=tf.int32)

        def of_rank() -> None:
            with tf.GradientTape() as tape:
                found = x
                for kernel, bias in layers[:-1]:
                    found = tf.nn.relu(found @ kernel + bias)
                kernel, bias = layers[-1]
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, found @ kernel + bias)
                loss = tf.reduce_mean(losses)
            for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
                weight.assign_sub(0.01 * gradient)

        @tf.function
        def step() -> None:
            strategy.run(of_rank)

        seconds = []
        for _ in range(steps):
            started = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - started)
        return seconds[10:]

    return train


def _all_reduce_on(name: str, backend: str, small: float, large: float) -> Callable[[Effort], Samples]:
    """Steps of all-reduce training with a backend, less the plain steps of the same workers."""
    metrics = (
        Metric(f"{name}: what all-reduce adds to a step, 0.5 MB of weights", "added_small", None, small, "seconds"),
        Metric(f"{name}: what all-reduce adds to a step, 100 MB of weights", "added_large", None, large, "seconds"),
        Metric(f"{name}: all-reduce step, 0.5 MB, against a plain one", "small", "plain_small"),
        Metric(f"{name}: all-reduce step, 100 MB, against a plain one", "large", "plain_large"),
    )

    def measure(effort: Effort) -> Samples:
        from contestants import OnSpark, spark

        samples: Samples = {}
        with spark():
            for size, build, rows, epochs in (
                ("small", data.mlp, effort.rows(8_000), 2),
                ("large", data.large_mlp, effort.rows(384), 1),  # few steps, since each takes long
            ):
                x, y = data.vectors(rows)
                modes = {"plain_": "synchronous", "": "allreduce"}
                runs = {f"{name}{size}": OnSpark(_seeded(build), x, y, mode=mode) for name, mode in modes.items()}
                turns = {name: lambda run=run, epochs=epochs: run.steps(epochs) for name, run in runs.items()}
                found = alternate(2 * effort.turns - 1, **turns)
                pairs = zip(found[size], found[f"plain_{size}"], strict=True)
                samples |= found
                samples[f"added_{size}"] = [[float(np.median(ours) - np.median(theirs))] for ours, theirs in pairs]
        return samples

    measure.__name__ = f"all_reduce_{backend}"
    return benchmark(*metrics, backend=backend, missing=functools.partial(missing_module, backend))(measure)


all_reduce_tensorflow = _all_reduce_on("TensorFlow", "tensorflow", 0.002, 0.3)
all_reduce_jax = _all_reduce_on("JAX", "jax", 0.003, 0.4)
all_reduce_torch = _all_reduce_on("PyTorch", "torch", 0.002, 0.3)


@benchmark(
    Metric("CNN epoch begin -> end, all-reduce, two workers, against Keras on the same cores", "two", "keras", 1.1),
    Metric("CNN epoch begin -> end, all-reduce, one worker of one thread, against Keras with two", "one", "keras"),
    Metric("CNN epoch begin -> end, all-reduce, two workers against one", "two", "one", 0.6),
)
def all_reduce_cnn(effort: Effort) -> Samples:
    """The model of `cnn` on one and on two workers with one thread each, against Keras with two threads."""
    from contestants import OnSpark, PlainKeras, spark

    x, y = data.images(effort.rows(6_000))
    with spark():
        runs = {"keras": PlainKeras(_seeded(data.cnn), x, y)}
        for name, workers in (("one", 1), ("two", 2)):
            runs[name] = OnSpark(_seeded(data.cnn), x, y, mode="allreduce", num_workers=workers)
        return alternate(effort.turns, **{name: lambda run=run: run.epochs(1) for name, run in runs.items()})


LARGE_BYTES, SMALL_BYTES = 100_000_000, 1_000_000


@benchmark(
    Metric("parameter server, socket: 100 MB pull, authenticated", "socket_pull", None, LARGE_BYTES / 2e9, "seconds"),
    Metric("parameter server, socket: 100 MB push, authenticated", "socket_push", None, LARGE_BYTES / 2e9, "seconds"),
    Metric("parameter server, http: 100 MB pull, authenticated", "http_pull", None, LARGE_BYTES / 1.2e9, "seconds"),
    Metric("parameter server, http: 100 MB push, authenticated", "http_push", None, LARGE_BYTES / 1.2e9, "seconds"),
    Metric("parameter server, socket: 100 MB pull, encrypted", "socket_encrypted_pull", None, None, "seconds"),
    Metric("parameter server, socket: 1 MB pull", "socket_small_pull", None, 0.0015, "seconds"),
    Metric("parameter server, http: 1 MB pull", "http_small_pull", None, 0.0015, "seconds"),
)
def parameter_server(effort: Effort) -> Samples:
    """Pulls and pushes of a worker in another process: from the call until it has the weights, or the acknowledgement."""
    from servers import exchanges

    samples: Samples = {}
    for _ in range(effort.turns):
        for transport in ("socket", "http"):
            _add(samples, f"{transport}_", exchanges(transport, LARGE_BYTES // effort.shrink, effort.epochs))
            _add(samples, f"{transport}_small_", exchanges(transport, SMALL_BYTES // effort.shrink, 10 * effort.epochs))
        encrypted = exchanges("socket", LARGE_BYTES // effort.shrink, effort.epochs, encrypt=True)
        _add(samples, "socket_encrypted_", encrypted)
    return samples


def _add(samples: Samples, prefix: str, turns: dict[str, list[float]]) -> None:
    for name, seconds in turns.items():
        samples.setdefault(prefix + name, []).append(seconds)


@benchmark(
    Metric("100 MB pull, socket, against Elephas's socket server", "socket_pull", "elephas_socket_pull"),
    Metric("100 MB push, socket, against Elephas's socket server", "socket_push", "elephas_socket_push"),
    Metric("100 MB pull, http, against Elephas's HTTP server", "http_pull", "elephas_http_pull"),
    Metric("100 MB push, http, against Elephas's HTTP server", "http_push", "elephas_http_push"),
    Metric("asynchronous epoch, 8,000 rows, socket, against Elephas's", "socket_epoch", "elephas_socket_epoch"),
    Metric("asynchronous epoch, 8,000 rows, http, against Elephas's", "http_epoch", "elephas_http_epoch"),
    missing=_elephas_missing,
)
def elephas_servers(effort: Effort) -> Samples:
    """The two servers of Elephas 7.3.0, without authentication, and asynchronous training with one exchange per epoch."""
    from contestants import Elephas, OnSpark, spark
    from servers import exchanges

    rows = effort.rows(SMALL)
    samples: Samples = {}
    theirs = Elephas()
    for _ in range(-(-effort.turns // 3)):
        for transport, turns in theirs.servers(max(2, effort.epochs // 3)).items():
            _add(samples, f"elephas_{transport}_", turns)
            _add(samples, f"{transport}_", exchanges(transport, LARGE_BYTES, effort.epochs))
        for name, seconds in theirs.asynchronous(rows, effort.epochs).items():
            _add(samples, "elephas_", {name: [seconds]})
        with spark():
            for transport in ("socket", "http"):
                ours = OnSpark(_seeded(data.mlp), *data.vectors(rows), mode="asynchronous", parameter_server_mode=transport)
                ours.epochs(1)
                _add(samples, f"{transport}_", {"epoch": ours.epochs(effort.epochs)})
    return samples


@benchmark(
    Metric("asynchronous epoch, frequency 10, 60,000 rows, socket, against Keras", "socket", "keras", 0.6),
    Metric("asynchronous epoch, frequency 10, 60,000 rows, http, against Keras", "http", "keras", 0.6),
    Metric("hogwild epoch, frequency 10, 60,000 rows, socket, against Keras", "hogwild", "keras"),
    Metric("asynchronous epoch, frequency 1, 60,000 rows, socket, against Keras", "every_batch", "keras"),
    Metric("asynchronous epoch, frequency epoch, 60,000 rows, socket, against Keras", "every_epoch", "keras"),
)
def asynchronous(effort: Effort) -> Samples:
    """Epochs with a parameter server, from the end of one epoch on the driver to the end of the next."""
    from contestants import OnSpark, PlainKeras, spark

    x, y = data.vectors(effort.rows(LARGE))
    ways = {
        "socket": {"frequency": 10, "parameter_server_mode": "socket"},
        "http": {"frequency": 10, "parameter_server_mode": "http"},
        "hogwild": {"frequency": 10, "parameter_server_mode": "socket", "mode": "hogwild"},
        "every_batch": {"frequency": 1, "parameter_server_mode": "socket"},
        "every_epoch": {"frequency": "epoch", "parameter_server_mode": "socket"},
    }
    with spark():
        plain = PlainKeras(_seeded(data.mlp), x, y)
        plain.epochs(1)
        runs = {"keras": plain}
        for name, way in ways.items():
            runs[name] = OnSpark(_seeded(data.mlp), x, y, **{"mode": "asynchronous", **way})
            runs[name].epochs(1)
        epochs = max(2, effort.epochs // 2)
        return alternate(effort.turns, **{name: lambda run=run: run.epochs(epochs) for name, run in runs.items()})


def _seeded(build, *arguments, seed: int = 0):
    """Build a model with initial weights determined by ``seed``."""
    import keras

    keras.utils.set_random_seed(seed)
    return build(*arguments)
