"""`SparkRunner` on a standalone cluster with two executors, from a driver process; executors that are killed."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from sparkkeras import SparkRunner, WorkerError
from sparkkeras.runner import context
from tests.integration.standalone import Standalone

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def standalone(contexts, tmp_path_factory):
    """A standalone Spark with two workers; stops this session's context first."""
    contexts.stop()
    with Standalone(tmp_path_factory.mktemp("standalone")) as standalone:
        yield standalone


# Functions that run in the driver process


def executor():
    """The executor of a rank."""
    return next(each for each in psutil.Process().parents() if "java" in each.name())


def kill_executor(sc, folder):
    def train(folder):
        (Path(folder) / str(os.getpid())).touch()
        context().barrier()
        if context().rank == 1:
            executor().send_signal(signal.SIGKILL)
        time.sleep(120)

    started = time.monotonic()
    try:
        SparkRunner(2).run(train, folder)
    except WorkerError as error:
        message = str(error)
    seconds = time.monotonic() - started
    time.sleep(10)  # Spark starts a new executor, and must not start ranks there
    return {"message": message, "seconds": seconds, "again": SparkRunner(2).run(lambda: context().rank)}


def test_a_killed_executor_ends_the_run_and_all_ranks(standalone, tmp_path):
    found = standalone.run(kill_executor, {}, folder=str(tmp_path))
    assert "rank 1 of 2" in found["message"]
    assert "its worker died" in found["message"]
    assert found["seconds"] < 30
    assert found["again"] == [0, 1]
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 2  # no rank has run twice
    assert not any(psutil.pid_exists(pid) for pid in pids)
