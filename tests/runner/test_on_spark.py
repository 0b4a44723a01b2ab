"""`SparkRunner` on Spark: tasks that start together, rows of DataFrames and RDDs, workers that die, Ctrl-C."""

# ruff: noqa: T201 - ranks print

import os
import signal
import threading
import time
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from sparkkeras import ConfigurationError, SparkRunner, WorkerError, to_simple_rdd
from sparkkeras.data.dataset import DriverAddress
from sparkkeras.runner import context, groups
from sparkkeras.runner.requirements import check_gpus, check_static_allocation
from sparkkeras.spark.connect import client_address
from tests.conftest import settle
from tests.processes import interrupted_when, lines_of_ranks
from tests.rpc.test_transports import eventually


def is_alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def sc(sc):
    """The SparkContext, in which no run leaves a stage."""
    yield sc
    settle(sc)
    assert eventually(lambda: not sc.statusTracker().getActiveStageIds(), 5)


def test_a_function_runs_in_a_process_of_each_rank(sc, capsys):
    def train(units):
        import keras

        ranks = context()
        print("training", flush=True)
        output = keras.Sequential([keras.Input((2,)), keras.layers.Dense(units)])(np.ones((3, 2), np.float32))
        return os.getpid(), os.getppid(), tuple(output.shape), float(ranks.all_reduce(ranks.rank)), ranks.cores

    found = SparkRunner(2).run(train, units=4)
    assert [(shape, total, cores) for _, _, shape, total, cores in found] == [((3, 4), 1.0, 1)] * 2
    assert len({pid for pids in found for pid in pids[:2]}) == 4
    assert not any(is_alive(pid) for pid, *_ in found)
    assert sorted(lines_of_ranks(capsys)) == ["[0] training", "[1] training"]


@pytest.mark.soak
def test_ranks_that_wait_for_slots_say_so(sc, tmp_path, monkeypatch):
    messages, begun, over = [], tmp_path / "begun", tmp_path / "over"

    def occupy(_):
        begun.touch()
        assert eventually(over.exists)

    def warn(message):
        messages.append(message)
        over.touch()

    monkeypatch.setattr(groups, "WAIT_SECONDS", 0.2)
    monkeypatch.setattr(groups, "warn", warn)
    other = threading.Thread(target=lambda: sc.parallelize([0], 1).foreach(occupy))
    other.start()
    assert eventually(begun.exists)
    assert SparkRunner(2).run(lambda: context().rank) == [0, 1]
    other.join()
    (message,) = messages
    assert "1 of 2 are free" in message


def rows_of_rank():
    """The sizes of batches, the features and the labels."""
    batches = list(context().batches(3))
    features, labels = ([row for batch in batches for row in batch[part].tolist()] for part in (0, 1))
    return [len(batch[0]) for batch in batches], features, labels


def labels_of(found):
    return sorted(label for *_, labels in found for label in labels)


def test_ranks_read_the_rows_of_a_data_frame(spark):
    frame = spark.createDataFrame([(float(row), row * 2.0, row) for row in range(10)], "a double, b double, c int")
    found = SparkRunner(2).run(rows_of_rank, data=frame, features=["a", "b"], label="c")
    assert labels_of(found) == list(range(10))
    assert all(row == [label, 2 * label] for _, *rank in found for row, label in zip(*rank, strict=True))
    assert all(set(sizes[:-1]) <= {3} for sizes, *_ in found)
    (features,) = SparkRunner(1).run(lambda: next(context().batches(10)), data=frame, features=["a", "b"])
    assert features.shape == (10, 2)


def test_independent_ranks_may_be_more_than_slots_and_read_the_rows_of_an_rdd(sc):
    rdd = sc.parallelize([(np.ones(2, np.float32), row) for row in range(7)], 3)
    found = SparkRunner(3, barrier=False).run(rows_of_rank, data=rdd)
    assert len(found) == 3
    assert labels_of(found) == list(range(7))


def test_a_file_runs_in_a_new_python(sc, tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text("import os, sys\nprint(os.environ['RANK'], sys.argv[1:], 'keras' in sys.modules)")
    assert SparkRunner(2).run(script, "--fast") == [None, None]
    assert sorted(lines_of_ranks(capsys)) == [f"[{rank}] {rank} ['--fast'] False" for rank in (0, 1)]


def test_a_killed_worker_ends_the_run_and_its_rank(sc, tmp_path):
    def train(folder):
        (folder / str(os.getpid())).touch()
        if context().rank == 1:
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)

    started = time.monotonic()
    with pytest.raises(WorkerError, match="rank 1 .*worker died"):
        SparkRunner(2).run(train, tmp_path)
    assert time.monotonic() - started < 15
    assert eventually(lambda: not any(is_alive(int(path.name)) for path in tmp_path.iterdir()))


@pytest.mark.soak
def test_a_stopped_worker_ends_the_run_and_its_rank(sc, tmp_path):
    def train(folder):
        (folder / str(os.getpid())).touch()
        (folder / str(os.getppid())).touch()
        if context().rank == 1:
            os.kill(os.getppid(), signal.SIGSTOP)
        time.sleep(60)

    with pytest.raises(WorkerError, match="rank 1 .*1. seconds"):
        SparkRunner(2).run(train, tmp_path)
    started = max(path.stat().st_mtime for path in tmp_path.iterdir())
    assert time.time() - started < 25
    stopped = [int(path.name) for path in tmp_path.iterdir()]
    assert eventually(lambda: sum(map(is_alive, stopped)) <= 1)  # Spark may keep the worker of rank 0 for other tasks


@pytest.mark.soak
def test_results_of_900_mb(sc):
    (found,) = SparkRunner(1).run(lambda: np.full(110_000_000, 7.0))
    assert found.shape == (110_000_000,)
    assert found[-1] == 7


def test_an_interrupt_ends_ranks_and_job_within_three_seconds(sc, tmp_path):
    def train(folder):
        (folder / str(os.getpid())).touch()
        time.sleep(60)

    with interrupted_when(lambda: len(list(tmp_path.iterdir())) == 2):
        SparkRunner(2).run(train, tmp_path)
    assert not any(is_alive(int(path.name)) for path in tmp_path.iterdir())


@pytest.mark.soak
@pytest.mark.cluster
def test_ranks_on_two_executors(sc, spark):
    frame = spark.createDataFrame([(float(row), row) for row in range(10)], "a double, b int")
    found = SparkRunner(2).run(rows_of_rank, data=frame, features="a", label="b")
    assert labels_of(found) == list(range(10))
    found = SparkRunner(2).run(rows_of_rank, data=(np.ones((7, 1)), np.arange(7)))
    assert [labels for *_, labels in found] == [[0, 1, 2], [3, 4, 5, 6]]
    rdd = to_simple_rdd(sc, np.ones((7, 1)), np.arange(7))
    for rows in (rdd, sc.parallelize([(np.ones(1), row) for row in range(7)], 3).coalesce(2)):  # see SPARK-24820
        found = SparkRunner(2).run(rows_of_rank, data=rows)
        assert labels_of(found) == list(range(7))
    found = SparkRunner(2).run(rows_of_rank, data=to_simple_rdd(sc, np.ones((1, 1)), np.arange(1)))
    assert sorted(len(labels) for *_, labels in found) == [0, 1]


def test_too_few_slots_are_an_error_before_a_job(sc):
    with pytest.raises(ConfigurationError, match=r"num_workers=3, .*local\[3\].*local_mode=True"):
        SparkRunner(3).run(print)


# Without Spark


def settings(**values):
    return SimpleNamespace(get=lambda name, default: values.get(name.replace(".", "_"), default))


def test_dynamic_allocation_is_an_error_before_a_job():
    check_static_allocation(settings())
    with pytest.raises(ConfigurationError, match="spark.dynamicAllocation.enabled=true"):
        check_static_allocation(settings(spark_dynamicAllocation_enabled="true"))


def test_gpus_have_to_be_assigned_by_spark():
    check_gpus(settings(spark_task_resource_gpu_amount="1"), 2, None)
    check_gpus(settings(spark_master="local-cluster[2,1,1024]"), 2, 1)
    for master, gpus, message in (
        ("yarn", None, "amount .*, or pass gpus_per_worker="),
        ("local[2]", None, r"SparkRunner\(2, .*local_mode=True"),
        ("local[2]", 1, "gpus_per_worker=1 .*local_mode=True"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            check_gpus(settings(spark_master=master), 2, gpus)


def test_workers_of_a_connect_server_on_this_machine_use_the_loopback():
    session = SimpleNamespace(client=SimpleNamespace(host="localhost"))
    assert client_address(session) == DriverAddress("127.0.0.1", "127.0.0.1", is_local=True)
