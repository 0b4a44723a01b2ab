"""Spark Connect: runs the tests of tests/connect in a separate process.

A process cannot have both a SparkContext and a Spark Connect session, and code for Spark Connect must work without the
former. The expected results of a classic session are computed in this process.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.connect import cases

ROOT = Path(__file__).parent.parent.parent
SECONDS = 2400


@pytest.mark.connect
@pytest.mark.cluster  # any classic session gives the same results; this one has been started for other tests
@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("long", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["short", "long"])
def test_spark_connect(request, spark, tmp_path, long):
    pytest.importorskip("grpc", reason="pyspark[connect] is not installed")
    cases.train_all(spark, tmp_path)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYSPARK_GATEWAY")}
    environment[cases.CLASSIC] = str(tmp_path)
    marker = "soak" if long else "not soak"
    options = "-q --tb=short -p no:cacheprovider --timeout=900 --durations=0 --durations-min=0.5"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/connect", *options.split(), "-m", marker],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )
    request.node.add_report_section("call", "connect", done.stdout)
    if done.returncode:
        pytest.fail(f"tests behind Spark Connect failed:\n\n{done.stdout}", pytrace=False)
