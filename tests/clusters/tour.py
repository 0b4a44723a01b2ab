"""Most of sparkkeras in one application on YARN: data, models, checkpoints and results are on HDFS.

    spark-submit ... tour.py hdfs:///user/me/tour [PART ...]

Prints a line for each part that worked, and at the end the tracebacks of those that did not.
"""

import sys
import time
import traceback

import keras
import numpy as np
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.feature import StandardScaler, VectorAssembler
from pyspark.sql import SparkSession, functions

from sparkkeras import (
    Checkpoint,
    Monitor,
    SparkEnsemble,
    SparkModel,
    SparkRunner,
    load_ensemble_model,
    load_spark_model,
    load_tfrecords,
    save_as_tfrecords,
)
from sparkkeras.hyperopt import HyperParamModel, choice
from sparkkeras.ml import KerasEstimator
from sparkkeras.spark import filesystem

PARTS = []


def part(function):
    """Register a part of the tour."""
    PARTS.append(function)
    return function


def build(params=None):
    keras.utils.set_random_seed(7)
    units = 16 if not isinstance(params, dict) else params["units"]
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(units, "relu"), keras.layers.Dense(1, "sigmoid")])
    model.compile(keras.optimizers.Adam(0.02), "binary_crossentropy", metrics=["accuracy"])
    return model


def accurate(history):
    accuracy = history.history["accuracy"][-1]
    assert accuracy > 0.85, accuracy
    return f"accuracy {accuracy:.2f}"


class Tour:
    """The folder on HDFS, and rows of four numbers with the sign of their sum, read from Parquet there."""

    def __init__(self, spark, folder):
        self.spark, self.folder = spark, folder
        numbers = [f"xxhash64(id, {k}) % 1000 / 1000D AS x{k}" for k in range(4)]
        rows = spark.range(0, 4000, 1, 2).selectExpr("id", *numbers)
        rows.selectExpr("*", "int(x0 + x1 + x2 + x3 > 0) AS label").write.mode("overwrite").parquet(f"{folder}/rows")
        self.rows = spark.read.parquet(f"{folder}/rows")
        self.features = ["x0", "x1", "x2", "x3"]

    def fit(self, mode="synchronous", epochs=5, given=None, **more):
        settings = {"mode": mode, "num_workers": 2, "batch_size": 32, "seed": 7} | (given or {})
        spark_model = SparkModel(build(), **settings)
        history = spark_model.fit(self.rows, features=self.features, label="label", epochs=epochs, verbose=0, **more)
        return spark_model, history


@part
def synchronous(tour):
    """Train, save, load, predict to Parquet and evaluate; the page of the run is on HDFS."""
    path = f"{tour.folder}/model.keras"
    with Monitor(save_to=f"{tour.folder}/training.html") as monitor:
        spark_model, history = tour.fit(callbacks=[monitor])
    spark_model.save(path, overwrite=True)
    loaded = load_spark_model(path)
    scored = loaded.predict(tour.rows, features=tour.features)
    scored.write.mode("overwrite").parquet(f"{tour.folder}/predictions")
    written = tour.spark.read.parquet(f"{tour.folder}/predictions")
    right = written.where((functions.col("prediction") > 0.5) == (functions.col("label") == 1)).count() / written.count()
    evaluated = loaded.evaluate(tour.rows, features=tour.features, label="label", return_dict=True)
    assert abs(evaluated["accuracy"] - right) < 1e-6, (evaluated, right)
    return accurate(history)


@part
def asynchronous_http(tour):
    given = {"parameter_server_mode": "http", "frequency": 10}
    return accurate(tour.fit("asynchronous", given=given)[1])


@part
def asynchronous_socket(tour):
    given = {"parameter_server_mode": "socket", "frequency": 10}
    return accurate(tour.fit("asynchronous", given=given)[1])


@part
def hogwild(tour):
    given = {"parameter_server_mode": "socket", "frequency": 10}
    return accurate(tour.fit("hogwild", given=given)[1])


@part
def allreduce(tour):
    return accurate(tour.fit("allreduce")[1])


@part
def checkpoints(tour):
    """Resumed training is equal to the bit to training at once."""
    whole, _ = tour.fit(epochs=3)
    checkpoint = Checkpoint(f"{tour.folder}/checkpoints-{time.time_ns()}")
    tour.fit(epochs=2, checkpoint=checkpoint)
    resumed, _ = tour.fit(epochs=3, checkpoint=checkpoint, resume=True)
    pairs = zip(whole.master_network.get_weights(), resumed.master_network.get_weights(), strict=True)
    assert all(np.array_equal(one, other) for one, other in pairs)
    return "same bits"


@part
def tfrecords(tour):
    path = f"{tour.folder}/records-{time.time_ns()}"
    save_as_tfrecords(tour.rows, path)
    records = load_tfrecords(tour.spark, path)
    assert records.count() == tour.rows.count()
    spark_model = SparkModel(build(), num_workers=2, seed=7)
    return accurate(spark_model.fit(records, features=tour.features, label="label", epochs=8, verbose=0))


@part
def binary_files(tour):
    """Files of four numbers each, read by Spark and decoded on the workers."""
    folder = f"{tour.folder}/files"
    numbers = np.random.default_rng(0).normal(size=(20, 4)).astype("float32")
    for index, each in enumerate(numbers):
        filesystem.write_bytes(f"{folder}/{index}.bin", each.tobytes())
    rows = tour.spark.read.format("binaryFile").load(folder)

    def decode(content, label=None):
        x = np.stack([np.frombuffer(each, "float32") for each in content])
        return x if label is None else (x, label)

    predicted = SparkModel(build(), num_workers=2).predict(rows, features="content", transform=decode)
    found = sorted(float(row.prediction) for row in predicted.select("prediction").collect())
    assert np.allclose(found, np.sort(build().predict(numbers, verbose=0)[:, 0]), atol=1e-5)
    return f"{len(numbers)} files"


@part
def pipeline(tour):
    stages = [
        VectorAssembler(inputCols=tour.features, outputCol="assembled"),
        StandardScaler(inputCol="assembled", outputCol="features"),
        KerasEstimator(model=build(), labelCol="label", epochs=5, num_workers=2, seed=7, verbose=0),
    ]
    unfitted = f"{tour.folder}/pipeline"
    Pipeline(stages=stages).write().overwrite().save(unfitted)
    fitted = Pipeline.load(unfitted).fit(tour.rows)
    fitted.write().overwrite().save(f"{tour.folder}/pipeline-model")
    scored = PipelineModel.load(f"{tour.folder}/pipeline-model").transform(tour.rows)
    accuracy = scored.where("prediction = label").count() / scored.count()
    assert accuracy > 0.85, accuracy
    return f"accuracy {accuracy:.2f}"


@part
def search(tour):
    """A search that is continued from its folder."""
    x = np.random.default_rng(0).normal(size=(400, 4)).astype("float32")
    y = (x.sum(axis=1) > 0).astype("float32")
    given = {"model": build, "data": (x, y), "space": {"units": choice(4, 8, 16)}, "epochs": 2, "validation_split": 0.2}
    folder = f"{tour.folder}/search-{time.time_ns()}"
    HyperParamModel(tour.spark).minimize(**given, max_evals=2, save_to=folder, seed=1, verbose=0)
    continued = HyperParamModel(tour.spark)
    best = continued.minimize(**given, max_evals=4, save_to=folder, seed=1, verbose=0)
    assert len(continued.trials) == 4
    assert best.predict(x[:2], verbose=0).shape == (2, 1)
    return f"{len(continued.trials)} trials"


@part
def ensemble(tour):
    ensemble = SparkEnsemble(build, 2, sampling="bootstrap", seed=1)
    ensemble.fit(tour.rows, features=tour.features, label="label", epochs=3, verbose=0)
    path = f"{tour.folder}/ensemble.zip"
    ensemble.save(path, overwrite=True)
    loaded = load_ensemble_model(path)
    assert loaded.predict(np.zeros((2, 4), "float32")).shape == (2, 1)
    return "2 members"


@part
def runner(tour):
    def train():
        from sparkkeras.runner import context

        return float(context().all_reduce(np.array([context().rank + 1.0]))[0])

    results = SparkRunner(num_workers=2, verbose=0).run(train)
    assert results == [3.0, 3.0], results
    return "2 ranks"


def main(folder, names):
    spark = SparkSession.builder.appName("tour").getOrCreate()
    tour, failed = Tour(spark, folder), []
    for each in PARTS:
        if names and each.__name__ not in names:
            continue
        started = time.monotonic()
        try:
            outcome = f"worked: {each.__name__}: {each(tour)} ({time.monotonic() - started:.0f} s)"
        except Exception:
            outcome = f"failed: {each.__name__}\n{traceback.format_exc()}"
            failed.append(each)
        sys.stdout.write(f"{outcome}\n")
        sys.stdout.flush()
    spark.stop()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
