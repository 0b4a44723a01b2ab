"""What a process writes to HDFS that is killed again and again: the newest complete state is always readable."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from tests.clusters.conftest import ROOT
from tests.processes import SHORT_LIVED_JAVA

pytestmark = [pytest.mark.programs, pytest.mark.soak]

START = f"""
import sys
import keras
import numpy as np
from pyspark.sql import SparkSession

builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
builder = builder.config("spark.ui.showConsoleProgress", "false")
spark = builder.config("spark.driver.extraJavaOptions", "{SHORT_LIVED_JAVA}").getOrCreate()
folder = sys.argv[1]
"""

CHECKPOINTS = """
from sparkkeras.checkpoints.store import CheckpointStore
from sparkkeras.spark import filesystem

store = CheckpointStore(folder, keep=2)
stored = store.newest()
number = 0 if stored is None else stored.value["number"]
if stored is not None:
    assert (stored.value["array"] == number).all()
    assert filesystem.read_bytes(f"{folder}.bin") in [bytes([(number + k) % 256]) * 1_000_000 for k in range(2)]
while True:
    number += 1
    filesystem.write_bytes(f"{folder}.bin", bytes([number % 256]) * 1_000_000)
    store.write("a program", {"number": number, "array": np.full(1000, number, "float64")})
    print("written", number, flush=True)
"""

SEARCH = """
from sparkkeras.hyperopt import HyperParamModel, choice

def build(params):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(params["units"], "relu"), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model

x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
search = HyperParamModel(spark)
given = {"data": (x, x.sum(1)), "space": {"units": choice(2, 4, 8)}, "epochs": 1, "validation_split": 0.2, "seed": 1}
number = 1
while True:
    search.minimize(build, **given, max_evals=number, save_to=folder, verbose=0)
    assert [trial.status for trial in search.trials] == ["ok"] * len(search.trials), search.trials
    print("written", len(search.trials), flush=True)
    number = len(search.trials) + 1
"""


@pytest.mark.parametrize("program", [CHECKPOINTS, SEARCH], ids=["checkpoints", "search"])
def test_a_killed_writer_continues_from_the_newest(hadoop, submit, tmp_path, program, request):
    rng = random.Random(0)
    folder = f"hdfs:///user/me/writer-{request.node.callspec.id}"
    environment = submit.environment() | {
        "PYTHONPATH": str(ROOT),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    newest = 0
    for _ in range(6):
        log = tmp_path / f"{time.time_ns()}.log"
        written = run_and_kill(
            hadoop,
            [sys.executable, "-W", "error:the checkpoint", "-c", START + program, folder],
            environment,
            log,
            newest,
            rng.uniform(0, 1.5),
        )
        expected = (newest + 1, newest + 2) if program is CHECKPOINTS else (max(newest, 1), newest + 1)
        assert written[0] in expected, (written, newest)
        newest = written[-1]
    assert newest >= 3


def run_and_kill(hadoop, command, environment, log, newest, seconds):
    """Run a writer, kill it some seconds after it has written a new number, and return all that it has written."""

    def written():
        return [int(number) for number in re.findall(r"^written (\d+)$", log.read_text(), re.MULTILINE)]

    with log.open("wb") as file:
        process = subprocess.Popen(
            command, env=environment, stdout=file, stderr=file, stdin=subprocess.DEVNULL, start_new_session=True
        )
    try:
        hadoop.wait(lambda: max(written(), default=0) > newest or process.poll() is not None, "nothing was written")
        assert process.poll() is None, log.read_text()[-4000:]
        time.sleep(seconds)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return written()
