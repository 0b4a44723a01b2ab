"""Adapting a model's preprocessing layers on the cluster, and a fitted pipeline as one Keras model."""

from __future__ import annotations

from typing import Any

import numpy as np
from harness import Effort, Metric, Samples, alternate, benchmark, timed

ROWS, CITIES, USERS = 1_000_000, 1_000, 200_000
CALLS = 20


def _table(rows: int) -> Any:
    import pyarrow as pa

    draw = np.random.default_rng(0)
    columns = {name: draw.random(rows) for name in ("age", "income")}
    columns["city"] = np.char.add("city ", draw.integers(0, CITIES, rows).astype(str))
    columns["user"] = draw.integers(0, USERS, rows)
    return pa.table(columns)


def _layers() -> dict[str, Any]:
    import keras

    return {
        "numbers": keras.layers.Normalization(),
        "city": keras.layers.StringLookup(max_tokens=500),
        "user": keras.layers.IntegerLookup(max_tokens=100_000),
    }


def _model() -> Any:
    import keras

    shapes = {"numbers": ((2,), "float32"), "city": ((1,), "string"), "user": ((1,), "int64")}
    inputs = {name: keras.Input(shape, dtype=dtype, name=name) for name, (shape, dtype) in shapes.items()}
    return keras.Model(inputs, {name: layer(inputs[name]) for name, layer in _layers().items()})


@benchmark(
    Metric("adapt three layers to 1,000,000 rows of a DataFrame, against toPandas and Keras", "ours", "keras"),
    Metric("adapt three layers to 1,000,000 rows of a DataFrame, against Keras on arrays", "ours", "in_memory"),
)
def adapting(effort: Effort) -> Samples:
    """Seconds of `adapt` for a mean and variance of two columns and two vocabularies."""
    from contestants import spark

    from sparkkeras import adapt

    with spark() as session:
        session.conf.set("spark.sql.execution.arrow.pyspark.enabled", True)
        frame = session.createDataFrame(_table(effort.rows(ROWS))).cache()
        frame.count()
        pandas = frame.toPandas()

        def ours() -> None:
            adapt(_model(), frame, features={"numbers": ["age", "income"], "city": "city", "user": "user"})

        def keras(table: Any = None) -> None:
            import tensorflow as tf

            table = frame.toPandas() if table is None else table
            columns = {"numbers": table[["age", "income"]], "city": table[["city"]], "user": table[["user"]]}
            for name, layer in _layers().items():
                values = columns[name].to_numpy(dtype=str if name == "city" else None)
                layer.adapt(tf.data.Dataset.from_tensor_slices(values).batch(4096))

        timed(ours, 4)  # starts all Python workers
        calls = {"ours": ours, "keras": keras, "in_memory": lambda: keras(pandas)}
        return alternate(effort.turns, **{name: lambda call=call: timed(call, 1) for name, call in calls.items()})


@benchmark(
    Metric("predict one row with a fused pipeline, against its transform", "fused", "pipeline"),
    Metric("predict 600,000 rows with it in one process, against transform on two slots", "fused_all", "all"),
)
def fusing(effort: Effort) -> Samples:
    """Seconds of a call: for one row as a server makes it, and for many rows."""
    import keras
    from contestants import spark
    from pyspark.ml import Pipeline
    from pyspark.ml.feature import OneHotEncoder, StandardScaler, StringIndexer, VectorAssembler

    from sparkkeras.ml import KerasEstimator, fuse

    with spark() as session:
        rows = effort.rows(600_000)
        table = _table(rows)
        frame = session.createDataFrame(table).cache()
        network = keras.Sequential([keras.Input((CITIES + 2,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(1)])
        network.compile("adam", "mse")
        stages = [
            VectorAssembler(inputCols=["age", "income"], outputCol="numbers"),
            StandardScaler(inputCol="numbers", outputCol="scaled", withMean=True),
            StringIndexer(inputCol="city", outputCol="index"),
            OneHotEncoder(inputCol="index", outputCol="cities", dropLast=False),
            VectorAssembler(inputCols=["scaled", "cities"], outputCol="features"),
            KerasEstimator(model=network, labelCol="age", epochs=1, batch_size=256, verbose=0),
        ]
        fitted = Pipeline(stages=stages).fit(frame.limit(10_000))
        fused = fuse(fitted)
        cities = keras.ops.convert_to_tensor(table["city"].to_numpy().astype(str).reshape(-1, 1), "string")
        numbers = {name: keras.ops.convert_to_tensor(table[name].to_numpy().reshape(-1, 1)) for name in ("age", "income")}
        columns = {"city": cities, **numbers}
        one, first = frame.limit(1).cache(), {name: values[:1] for name, values in columns.items()}
        calls = {
            "fused": lambda: fused(first),
            "pipeline": lambda: fitted.transform(one).select("prediction").collect(),
            "fused_all": lambda: fused.predict(columns, batch_size=1024, verbose=0),
            "all": lambda: fitted.transform(frame).select("prediction").write.format("noop").mode("overwrite").save(),
        }
        for call in calls.values():
            timed(call, 2)
        times = {name: 1 if "all" in name else CALLS for name in calls}
        return alternate(
            effort.turns, **{name: lambda call=call, n=times[name]: timed(call, n) for name, call in calls.items()}
        )
