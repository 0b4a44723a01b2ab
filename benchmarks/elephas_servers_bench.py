"""Measure Elephas's parameter servers and asynchronous training: print the seconds as one line of JSON.

Run it in the environment that ``elephas_env.sh`` creates::

    benchmarks/.elephas/bin/python benchmarks/elephas_servers_bench.py --rows 8000
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["PYSPARK_PYTHON"] = sys.executable  # the setting spark.pyspark.python affects only spark-submit

import data
import keras
import numpy as np
from elephas.parameter.client import BaseParameterClient
from elephas.parameter.server import HttpServer, SocketServer
from elephas.spark_model import SparkModel
from elephas.utils.rdd_utils import to_simple_rdd
from elephas.utils.serialization import model_to_dict
from pyspark.sql import SparkSession

SERVERS = {"http": (HttpServer, {"debug": False}), "socket": (SocketServer, {})}
PORT = 4711


def exchanges(name: str, nbytes: int, count: int) -> dict[str, list[float]]:
    """Return the seconds of pulls and pushes of a model of ``nbytes`` bytes, by a client in another process."""
    side = int((nbytes / 4) ** 0.5)
    model = keras.Sequential([keras.Input((side,)), keras.layers.Dense(side, use_bias=False)])
    model.compile("sgd", "mse")
    kind, options = SERVERS[name]
    server = kind(model_to_dict(model), PORT, "asynchronous", **options)
    server.start()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.apply(client, (name, side, count))
    server.stop()
    return found


def client(name: str, side: int, count: int) -> dict[str, list[float]]:
    """Pull and push alternately, and return the seconds of each."""
    caller = BaseParameterClient.get_client(name, PORT)
    delta = [np.ones((side, side), np.float32)]
    seconds: dict[str, list[float]] = {"pull": [], "push": []}
    for _ in range(count + 2):
        started = time.perf_counter()
        caller.get_parameters()
        pulled = time.perf_counter()
        caller.update_parameters(delta)
        if name == "socket":
            caller.get_parameters()  # a push has no answer: the next pull waits for it
        pushed = time.perf_counter()
        seconds["pull"].append(pulled - started)
        seconds["push"].append(pushed - pulled - (pulled - started if name == "socket" else 0.0))
    return {name: turns[2:] for name, turns in seconds.items()}


def epochs(context: Any, name: str, rows: int, count: int, workers: int) -> float:
    """Return the seconds of an asynchronous epoch: the additional time for ``count`` more epochs, divided by ``count``."""
    seconds = []
    for number in (2, 2 + count):
        keras.utils.set_random_seed(0)
        spark_model = SparkModel(
            data.mlp(), frequency="epoch", mode="asynchronous", parameter_server_mode=name, num_workers=workers, port=PORT
        )
        rdd = to_simple_rdd(context, *data.vectors(rows))
        started = time.perf_counter()
        spark_model.fit(rdd, epochs=number, batch_size=data.BATCH_SIZE, verbose=0)
        seconds.append(time.perf_counter() - started)
    return (seconds[1] - seconds[0]) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes", type=int, default=100_000_000, help="the size of the model that is pulled and pushed")
    parser.add_argument("--count", type=int, default=5, help="pulls and pushes")
    parser.add_argument("--rows", type=int, default=8000, help="rows to train on")
    parser.add_argument("--epochs", type=int, default=10, help="epochs that are measured")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", choices=["servers", "training"], help="measure one thing only")
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    if arguments.only != "training":
        found |= {name: exchanges(name, arguments.bytes, arguments.count) for name in SERVERS}
    if arguments.only != "servers":
        spark = (
            SparkSession.builder.master(f"local[{arguments.workers}]")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .getOrCreate()
        )
        spark.sparkContext.setLogLevel("ERROR")
        for name in SERVERS:
            found[f"{name}_epoch"] = epochs(spark.sparkContext, name, arguments.rows, arguments.epochs, arguments.workers)
        spark.stop()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
