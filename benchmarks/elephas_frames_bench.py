"""Measure Elephas's transformer on the benchmarks' data: print the seconds of passes over a DataFrame as one line of JSON.

Run it in the environment that ``elephas_env.sh`` creates::

    benchmarks/.elephas/bin/python benchmarks/elephas_frames_bench.py --rows 8000
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["PYSPARK_PYTHON"] = sys.executable  # the setting spark.pyspark.python affects only spark-submit

import data
import keras
from elephas.ml_model import ElephasTransformer
from pyspark.ml.linalg import Vectors
from pyspark.sql import SparkSession


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=8000)
    parser.add_argument("--passes", type=int, default=3, help="measured passes, after one that is not measured")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    spark = (
        SparkSession.builder.master(f"local[{arguments.workers}]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    found = {}
    for name, (model, x) in {
        "wide": (data.mlp(), data.vectors(arguments.rows)[0]),
        "narrow": (data.table_mlp(10), data.table(arguments.rows, 10)),
    }.items():
        rows = [(Vectors.dense(row.tolist()), 0.0) for row in x]
        frame = spark.createDataFrame(rows, ["features", "label"]).repartition(arguments.workers).cache()
        frame.count()
        transformer = ElephasTransformer(
            labelCol="label",
            outputCol="prediction",
            keras_model_config=model.to_json(),
            weights=model.get_weights(),
            custom_objects={},
            model_type="classification",
        )
        seconds = []
        for _ in range(1 + arguments.passes):
            started = time.perf_counter()
            transformer.transform(frame).select("prediction").write.format("noop").mode("overwrite").save()
            seconds.append(time.perf_counter() - started)
        found[name] = seconds[1:]
    spark.stop()
    print(json.dumps({"rows": arguments.rows, "keras": keras.__version__, **found}), flush=True)


if __name__ == "__main__":
    main()
