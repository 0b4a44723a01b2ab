"""Spark Connect: the tests of tests/connect, in a process of their own.

A process cannot hold a SparkContext and a session of Connect; and what is done behind Connect must do without the former.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SECONDS = 900


@pytest.mark.timeout(SECONDS + 60)
def test_behind_connect():
    pytest.importorskip("grpc", reason="pyspark[connect] is not installed")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYSPARK_GATEWAY")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/connect", "-q", "--tb=short", "-p", "no:cacheprovider"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )
    if done.returncode:
        pytest.fail(f"tests behind Spark Connect failed:\n\n{done.stdout}", pytrace=False)
