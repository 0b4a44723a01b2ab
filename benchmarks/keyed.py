"""A model for each key, against a pandas function that builds and trains a Keras model for each."""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy as np
from harness import Effort, Metric, Samples, alternate, benchmark, missing_module, timed

KEYS, SEPARATE_KEYS, ROWS, EPOCHS = 1_000, 12, 200, 10
WIDTH = 5


def build() -> Any:
    """A small regression, as for the sales of a store."""
    import keras

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(32, "relu"), keras.layers.Dense(16, "relu"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers])
    model.compile("adam", "mse")
    return model


def separate(table: Any) -> Any:
    """What people write for ``applyInPandas``: a model of its own for each key."""
    model = build()
    x = np.stack(table["features"].to_numpy()).astype("float32")
    history = model.fit(x, table["label"].to_numpy(), epochs=EPOCHS, batch_size=32, verbose=0)
    return table[["key"]].head(1).assign(loss=history.history["loss"][-1])


def _measure(effort: Effort) -> Samples:
    """Seconds for each key, from the call to the metrics of all keys; batches of 32 rows, two slots."""
    from contestants import WORKERS, spark
    from pyspark import cloudpickle

    from sparkkeras import KeyedModel

    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # which workers cannot import
    keys = effort.rows(KEYS)
    draw = np.random.default_rng(0)
    x, y = draw.random((keys * ROWS, WIDTH)), draw.random(keys * ROWS)
    with spark() as session:
        import pyarrow as pa

        columns = {"key": np.arange(keys * ROWS) % keys, "features": list(x), "label": y}
        frame = session.createDataFrame(pa.table({name: pa.array(values) for name, values in columns.items()}))
        frame = frame.repartition(WORKERS).cache()
        few = frame.where(f"key < {SEPARATE_KEYS}").repartition(WORKERS, "key").cache()
        session.conf.set("spark.sql.shuffle.partitions", WORKERS)

        def ours() -> None:
            KeyedModel(build(), "key").fit(frame, features="features", label="label", epochs=EPOCHS, verbose=0)

        def theirs() -> None:
            few.groupBy("key").applyInPandas(separate, "key long, loss double").collect()

        for cached in (frame, few):
            cached.count()
        timed(theirs, 1)  # starts the Python workers
        contestants = {"ours": (ours, keys), "separate": (theirs, SEPARATE_KEYS)}
        timed(ours, 1)
        calls = {
            name: lambda call=call, n=n: [each / n for each in timed(call, 1)] for name, (call, n) in contestants.items()
        }
        return alternate(effort.turns, **calls)


def _keyed_on(name: str, backend: str) -> Any:
    metric = f"a model for each of {KEYS:,} keys of {ROWS} rows, {name}, against applyInPandas that builds a model for each"

    def measure(effort: Effort) -> Samples:
        return _measure(effort)

    measure.__name__ = f"keyed_{backend}"
    missing = functools.partial(missing_module, backend)
    return benchmark(Metric(metric, "ours", "separate", 1 / 20), backend=backend, missing=missing)(measure)


keyed_tensorflow = _keyed_on("TensorFlow", "tensorflow")
keyed_jax = _keyed_on("JAX", "jax")
