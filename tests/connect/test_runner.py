"""`SparkRunner` behind Spark Connect: ranks are processes on the server's workers, and connect to this process."""

# ruff: noqa: T201 - ranks print

import os
import signal
import socket
import time

import numpy as np
import psutil
import pytest

from sparkkeras import ConfigurationError, DataError, SparkModel, SparkRunner, WorkerError
from sparkkeras.data.dataset import DriverAddress
from sparkkeras.errors import DriverConnectionError
from sparkkeras.runner import context
from sparkkeras.spark import connect
from sparkkeras.spark.settings import WORKER_PORTS
from tests.models import regression
from tests.processes import interrupted_when, lines_of_ranks
from tests.rpc.test_transports import eventually


def is_alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def train(factor):
    """The process of a rank, its place and its rows; reads and prints."""
    ranks = context()
    print("training", flush=True)
    batches = list(ranks.batches(3))
    labels = [value for batch in batches for value in np.ravel(batch[1])]
    total = float(ranks.all_reduce(float(sum(labels)))) * factor
    place = ranks.rank, ranks.world_size, len(ranks.addresses), os.environ["KERAS_BACKEND"]
    return os.getpid(), place, labels, total, batches[0][0].shape[1:]


def test_ranks_read_the_rows_of_a_data_frame_and_exchange_values(spark, capsys):
    frame = spark.createDataFrame([(float(row), row * 2.0, row) for row in range(10)], "a double, b double, c int")
    found = SparkRunner(2).run(train, 2, data=frame, features=["a", "b"], label="c")
    assert [place[:3] for _, place, *_ in found] == [(0, 2, 2), (1, 2, 2)]
    assert sorted(value for _, _, labels, _, _ in found for value in labels) == list(range(10))
    assert [(total, shape) for *_, total, shape in found] == [(90, (2,))] * 2
    assert not any(is_alive(pid) for pid, *_ in found)
    assert sorted(lines_of_ranks(capsys)) == ["[0] training", "[1] training"]


def test_runs_that_cannot_start_are_errors(spark, monkeypatch):
    for runner, data, error, words in (
        (SparkRunner(3), None, ConfigurationError, "num_workers=3, but"),
        (SparkRunner(2, barrier=False), np.ones(4), ConfigurationError, "barrier"),
        (SparkRunner(2), np.ones(1), DataError, "num_workers=2, but"),
    ):
        with pytest.raises(error, match=words):
            runner.run(print, data=data)
    monkeypatch.setattr(connect, "client_address", lambda session: DriverAddress("127.0.0.9", "127.0.0.1", True))
    with pytest.raises(DriverConnectionError, match=r"socket://127\.0\.0\.9:.*local_mode") as caught:
        SparkRunner(2).run(print)
    assert str(caught.value).count(socket.gethostname()) == 1


def test_the_ports_of_workers_are_checked_before_rows_are_read(spark, settings):
    unreadable = spark.range(4).selectExpr("CAST(raise_error('read') AS double) as features", "1.0 as label")
    settings(WORKER_PORTS, "36000")
    for call in (
        lambda: SparkRunner(2).run(print, data=unreadable),
        lambda: SparkModel(regression(), mode="allreduce").fit(unreadable),
    ):
        with pytest.raises(ConfigurationError, match=f"{WORKER_PORTS}='36000'"):
            call()


@pytest.mark.soak
def test_independent_ranks_and_rows_of_arrays(spark):
    assert SparkRunner(3, barrier=False).run(lambda: context().rank) == [0, 1, 2]
    found = SparkRunner(2).run(train, 1, data=(np.ones((7, 1)), np.arange(7)))
    assert [labels for _, _, labels, _, _ in found] == [[0, 1, 2], [3, 4, 5, 6]]


@pytest.mark.soak
def test_an_interrupt_ends_ranks_and_query(spark, tmp_path):
    def work(folder):
        (folder / str(os.getpid())).touch()
        time.sleep(60)

    with interrupted_when(lambda: len(list(tmp_path.iterdir())) == 2):
        SparkRunner(2).run(work, tmp_path)
    assert not any(is_alive(int(path.name)) for path in tmp_path.iterdir())


@pytest.mark.soak
def test_a_killed_worker_ends_the_run_and_its_rank(spark, tmp_path):
    def work(folder):
        (folder / str(os.getpid())).touch()
        if context().rank == 1:
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)

    started = time.monotonic()
    with pytest.raises(WorkerError, match="rank 1 of 2 .* failed: its worker died"):
        SparkRunner(2).run(work, tmp_path)
    assert time.monotonic() - started < 20
    assert eventually(lambda: not any(is_alive(int(path.name)) for path in tmp_path.iterdir()))
