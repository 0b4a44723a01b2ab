"""Measure Elephas on the benchmarks' data: print the seconds of its epochs and predictions as one line of JSON.

Run it in the environment that ``elephas_env.sh`` creates::

    benchmarks/.elephas/bin/python benchmarks/elephas_bench.py --rows 8000
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["PYSPARK_PYTHON"] = sys.executable  # the setting spark.pyspark.python affects only spark-submit

import data
import keras
from elephas.spark_model import SparkModel
from elephas.utils.rdd_utils import to_simple_rdd
from pyspark.sql import SparkSession


class Rounds(list[Any]):
    """Replaces Elephas's list of histories: Elephas appends one per worker at the end of a round, which times the rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def append(self, history: Any) -> None:
        """Append the history and record the time."""
        super().append(history)
        self.times.append(time.perf_counter())

    def seconds(self, workers: int) -> list[float]:
        """Return the seconds from the end of each round to the end of the next one."""
        ends = self.times[workers - 1 :: workers]
        return [after - before for before, after in itertools.pairwise(ends)]


def epochs(context: Any, model: Any, rows: int, count: int, workers: int) -> list[float]:
    """Return the seconds of ``count`` synchronous epochs after the first one."""
    spark_model = SparkModel(model, frequency="epoch", mode="synchronous", num_workers=workers)
    spark_model._training_histories = rounds = Rounds()
    spark_model.fit(to_simple_rdd(context, *data.vectors(rows)), epochs=count + 1, batch_size=data.BATCH_SIZE, verbose=0)
    return rounds.seconds(workers)


def predictions(model: Any, rows: int, count: int, workers: int) -> list[float]:
    """Return the seconds of ``count`` calls of ``predict``, from the call until it returns the list."""
    x, _ = data.vectors(rows)
    spark_model = SparkModel(model, num_workers=workers)
    seconds = []
    for _ in range(count):
        started = time.perf_counter()
        spark_model.predict(x)
        seconds.append(time.perf_counter() - started)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=8000, help="rows to train on")
    parser.add_argument("--predict-rows", type=int, default=2000)
    parser.add_argument("--warmup", type=int, default=10, help="epochs before the measured ones")
    parser.add_argument("--epochs", type=int, default=10, help="measured epochs")
    parser.add_argument("--predicts", type=int, default=3, help="measured predictions, after one that is not measured")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    spark = (
        SparkSession.builder.master(f"local[{arguments.workers}]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    keras.utils.set_random_seed(0)
    model = data.mlp()
    trained = epochs(spark.sparkContext, model, arguments.rows, arguments.warmup + arguments.epochs, arguments.workers)
    predicted = predictions(model, arguments.predict_rows, 1 + arguments.predicts, arguments.workers)
    spark.stop()
    found = {"epoch": trained[arguments.warmup :], "predict": predicted[1:]}
    print(json.dumps({"rows": arguments.rows, "predict_rows": arguments.predict_rows, **found}), flush=True)


if __name__ == "__main__":
    main()
