"""Everything that takes a path, with ``s3a://``, on an S3 server that also fails, delays and refuses requests."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.clusters.hadoop import MissingError
from tests.clusters.s3 import LOST, S3, answer, s3fs
from tests.processes import SHORT_LIVED_JAVA, clean_environment

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1500)]

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def s3():
    try:
        server = S3()
    except MissingError as error:
        pytest.skip(str(error))
    with server:
        yield server


def spark(s3, *command, seconds=1200, variables=None, **settings):
    """Run a program whose Spark has two slots and reads ``s3a://``."""
    chosen = {"spark.driver.extraJavaOptions": SHORT_LIVED_JAVA, "spark.ui.enabled": "false"} | s3.settings() | settings
    given = " ".join(f"--conf '{name}={value}'" for name, value in chosen.items())
    environment = clean_environment() | {"PYSPARK_SUBMIT_ARGS": f"--master local[2] {given} pyspark-shell"}
    environment |= {"PYTHONPATH": str(ROOT)} | s3.environment() | (variables or {})
    command = [sys.executable, *map(str, command)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)


def test_everything_that_takes_a_path(s3):
    done = spark(s3, ROOT / "tests/clusters/tour.py", "s3a://data/tour")
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]


def test_with_spark_connect_fsspec_opens_the_paths(s3):
    variables = {"SPARK_REMOTE": "local[2]", "PYTHONPATH": f"{ROOT}:{s3fs()}"}
    parts = ("synchronous", "checkpoints", "pipeline", "search")
    done = spark(s3, ROOT / "tests/clusters/tour.py", "s3a://data/connect", *parts, variables=variables)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]


@pytest.mark.parametrize("fault", ["busy", "lost", "slow"])
def test_a_server_with_faults_changes_nothing(s3, fault):
    changed = []

    def change(number):
        if fault != "slow" and number % 5:
            return None
        changed.append(number)
        if fault == "slow":
            return time.sleep(0.2)
        return answer("503 Slow Down", "SlowDown") if fault == "busy" else LOST

    s3.fault = change
    try:
        done = spark(s3, ROOT / "tests/clusters/tour.py", f"s3a://data/{fault}", "synchronous", "checkpoints", "search")
    finally:
        s3.fault = lambda number: None
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert len(changed) > 20


def test_functions_on_the_workers_read_objects(s3):
    done = spark(s3, ROOT / "tests/clusters/s3_readers.py", s3.endpoint)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]


def test_expired_credentials_are_named(s3):
    """They expire while a training writes checkpoints: it ends with its weights, and says what failed."""
    program = "\n".join(
        [
            "import sys, keras, numpy as np",
            "from sparkkeras import Checkpoint, SparkModel",
            "model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])",
            "model.compile('sgd', 'mse')",
            "SparkModel(model).fit(np.ones((32, 4)), np.ones(32), epochs=3, checkpoint=Checkpoint(sys.argv[1]))",
        ]
    )
    last = s3.answers + 30
    s3.fault = lambda number: answer("400 Bad Request", "ExpiredToken") if number > last else None
    try:
        done = spark(s3, "-c", program, "s3a://data/expired")
    finally:
        s3.fault = lambda number: None
    assert done.returncode == 1
    error = done.stderr.rpartition("StorageError: ")[2]
    assert "training was completed, and the model has the trained weights" in error
    assert "s3a://data/expired" in error
    assert "ExpiredToken" in error
