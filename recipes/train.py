"""Train a Keras model on any cluster: the program of all recipes.

::

    python train.py [--mode synchronous|asynchronous|allreduce] [--workers N] [--epochs N] [--rows N]
                    [--checkpoint URI] [--port N] [--save PATH] [--archive environment.tar.gz]

The session comes from where it runs: the settings of spark-submit, or SPARK_REMOTE for Spark Connect. Rows are generated
on the cluster; replace `rows_to_train` with your table. With --checkpoint, the same command continues a training that was
ended.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import keras
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import udf

from sparkkeras import Checkpoint, SparkModel


def main() -> None:
    options = command_line()
    spark = SparkSession.builder.appName("sparkkeras recipe").getOrCreate()
    if options.archive:
        spark.addArtifacts(f"{options.archive}#environment", archive=True)
        spark.conf.set("spark.sql.execution.pyspark.python", "environment/bin/python3")
    rows = rows_to_train(spark, options.rows, options.workers)

    settings: dict[str, Any] = {"mode": options.mode, "num_workers": options.workers, "batch_size": 64, "seed": 7}
    settings["port"] = options.port
    if options.mode == "asynchronous":
        settings |= {"parameter_server_mode": "socket", "frequency": 10}
    spark_model = SparkModel(build_model(), **settings)
    checkpoints = {"checkpoint": Checkpoint(options.checkpoint), "resume": True} if options.checkpoint else {}
    history = spark_model.fit(
        rows, features="features", label="label", epochs=options.epochs, validation_split=0.1, verbose=2, **checkpoints
    )
    if options.save:
        spark_model.save(options.save)

    for python in pythons_of_workers(spark, options.workers):
        print(f"Worker      {python}")
    print(f"Driver      {sys.executable}")
    print(f"Backend     {keras.backend.backend()}, {options.mode}, {options.workers} workers")
    print(f"Accuracy    {history.history['val_accuracy'][-1]:.1%} of the rows for validation")
    if "DATABRICKS_RUNTIME_VERSION" not in os.environ:  # there the session belongs to the cluster
        spark.stop()


def rows_to_train(spark: SparkSession, count: int, partitions: int) -> DataFrame:
    """Rows of 20 numbers, and whether their sum is positive; the same rows at each call, which resuming needs."""
    numbers = "transform(sequence(1, 20), k -> xxhash64(id, k) % 1000 / 1000D)"
    rows = spark.range(0, count, 1, partitions).selectExpr(f"{numbers} AS features")
    return rows.selectExpr("features", "int(aggregate(features, 0D, (sum, each) -> sum + each) > 0) AS label")


def build_model() -> keras.Model:
    keras.utils.set_random_seed(7)
    model = keras.Sequential(
        [keras.Input((20,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(2, activation="softmax")]
    )
    model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def pythons_of_workers(spark: SparkSession, count: int) -> list[str]:
    """The Python of each worker, to see that it is the one that was packed."""
    executable = udf(lambda _: sys.executable, "string")
    found = spark.range(0, count, 1, count).select(executable("id").alias("python"))
    return sorted({row.python for row in found.collect()})


def command_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a Keras model on a cluster.")
    modes = ["synchronous", "asynchronous", "allreduce"]
    parser.add_argument("--mode", choices=modes, default="synchronous", help="default: %(default)s")
    parser.add_argument(
        "--workers", type=int, metavar="N", default=2, help="Python processes that train (default: %(default)s)"
    )
    parser.add_argument("--epochs", type=int, metavar="N", default=3, help="default: %(default)s")
    parser.add_argument("--rows", type=int, metavar="N", default=20_000, help="default: %(default)s")
    parser.add_argument("--checkpoint", metavar="URI", help="folder for checkpoints: hdfs://, s3a://, gs://, a local path")
    parser.add_argument(
        "--port", type=int, metavar="N", default=0, help="port of the driver for the workers (default: any free one)"
    )
    parser.add_argument("--archive", metavar="FILE", help="with Spark Connect: the Python of the workers, made by pack.sh")
    parser.add_argument("--save", metavar="PATH", help="where to save the model, as .keras")
    return parser.parse_args()


if __name__ == "__main__":
    main()
