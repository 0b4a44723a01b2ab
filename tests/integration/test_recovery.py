"""Recovery from missing files, killed workers and executors, and interrupts: same result, and nothing remains."""

import os
import shutil
import signal
import threading
import time
from pathlib import Path

import keras
import numpy as np
import pytest

from sparkkeras import DataError, SparkModel, WorkerError
from sparkkeras.training import worker_reports
from tests.conftest import long, settle
from tests.models import classifier
from tests.processes import interrupted_when


@pytest.fixture(scope="module")
def arrays():
    generator = np.random.default_rng(0)
    return generator.random((240, 64)).astype(np.float32), generator.integers(0, 10, 240)


def rows(sc, arrays, parts=2):
    return sc.parallelize(list(zip(*arrays, strict=True)), parts)


def train(data, *, epochs=3, **arguments):
    spark_model = SparkModel(classifier(), seed=4)
    spark_model.fit(*data, epochs=epochs, batch_size=16, verbose=0, **arguments)
    return spark_model.model.get_weights()


def assert_same_bits(mine, other):
    for one, two in zip(mine, other, strict=True):
        np.testing.assert_array_equal(one, two)


def worker_folder(sc):
    return sc.parallelize([0], 1).map(lambda _: os.environ["SPARK_LOCAL_DIRS"].split(",")[0]).first()


def spy_on_names(monkeypatch):
    """Record the names of the folders that datasets store their files in."""
    from sparkkeras.sources import partitions

    names = []
    store = partitions.StoreRows

    def noted(name):
        names.append(name)
        return store(name)

    monkeypatch.setattr(partitions, "StoreRows", noted)
    return names


class RemoveFiles(keras.callbacks.Callback):
    """Removes a partition's files after the first epoch, as a job that cleans temporary folders might."""

    def __init__(self, temporary, names):
        super().__init__()
        self.temporary, self.names, self.removed = temporary, names, []

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 0:
            found = [path for name in self.names for path in Path(self.temporary).rglob(f"{name}/part-0-*")]
            for path in found:
                shutil.rmtree(path)
            self.removed += found


def test_missing_files_are_written_again(sc, arrays, monkeypatch):
    names = spy_on_names(monkeypatch)
    expected = train([rows(sc, arrays)])
    remover = RemoveFiles(worker_folder(sc), names)
    assert_same_bits(train([rows(sc, arrays)], callbacks=[remover]), expected)
    assert len(remover.removed) == 1


def test_replicas_merged_on_the_workers_give_the_same_weights(sc, arrays, monkeypatch):
    expected = train([rows(sc, arrays, 5)])
    monkeypatch.setattr(worker_reports, "MAX_WORKERS", 1)
    assert_same_bits(train([rows(sc, arrays, 5)]), expected)


class Kill(keras.callbacks.Callback):
    """Kills a worker or its executor, once, at the end of a given batch and epoch."""

    def __init__(self, mark, epoch, batch, executor=False):
        super().__init__()
        self.mark, self.epoch, self.batch, self.executor = mark, epoch, batch, executor
        self.current = None

    def on_epoch_begin(self, epoch, logs=None):
        self.current = epoch

    def on_train_batch_end(self, batch, logs=None):
        if self.current != self.epoch or batch < self.batch:
            return
        try:
            os.close(os.open(self.mark, os.O_CREAT | os.O_EXCL))  # one worker only
        except FileExistsError:
            return
        import psutil

        victim = psutil.Process()
        while self.executor and "java" not in victim.name():
            victim = victim.parent()
        victim.send_signal(signal.SIGKILL)
        time.sleep(60)


class Idle(Kill):
    """Kills nothing, but has the same size as Kill."""

    def on_train_batch_end(self, batch, logs=None):
        pass


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("executor", "epoch", "batch", "shuffle"),
    [  # test_frames.py kills a worker, too
        *(long(executor, epoch, batch, True) for executor in (False, True) for epoch, batch in ((0, 0), (1, 7), (2, 7))),
        (True, 1, 3, True),
        (True, 1, 3, "global"),
    ],
)
def test_a_killed_worker_or_executor_changes_no_bit(sc, arrays, tmp_path, executor, epoch, batch, shuffle):
    expected = train([rows(sc, arrays)], shuffle=shuffle)
    mark = tmp_path / "mark"
    killed = train([rows(sc, arrays)], worker_callbacks=[Kill(str(mark), epoch, batch, executor)], shuffle=shuffle)
    assert mark.exists()
    assert_same_bits(killed, expected)


@pytest.mark.cluster
def test_a_source_that_gives_other_rows_after_a_killed_executor_is_an_error(sc, arrays, tmp_path):
    changing = rows(sc, arrays).map(lambda row: (row[0] + np.float32(np.random.default_rng().random()), row[1]))
    with pytest.raises(DataError, match=r"the rows changed when they were read again.*DataFrame\.checkpoint\(\)"):
        train([changing], worker_callbacks=[Kill(str(tmp_path / "mark"), 1, 3, executor=True)], shuffle="global")


@pytest.mark.cluster
def test_arrays_reach_separate_executors_on_which_no_files_remain(sc, arrays):
    def files(_):
        home = Path(os.environ["SPARK_LOCAL_DIRS"].split(",")[0])
        return [str(path) for path in home.glob("sparkkeras-*")]

    spark_model = SparkModel(classifier(), num_workers=2)
    spark_model.fit(*arrays, validation_data=arrays, verbose=0)
    assert sorted(report["rows"] for report in spark_model.training_histories) == [120, 120]
    with pytest.raises(WorkerError):
        train([rows(sc, arrays)], worker_callbacks=[Fail()])
    assert sc.parallelize(range(4), 4).flatMap(files).collect() == []


class Fail(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        raise RuntimeError("on purpose")


def leftovers(sc):
    home = Path(worker_folder(sc))
    temporary = Path(sc._temp_dir)
    settle(sc)
    sc._jvm.java.lang.System.gc()  # Spark keeps only weak references to cached RDDs
    return {
        "files": sorted(str(path) for folder in (home, temporary) for path in folder.glob("sparkkeras-*")),
        "closures": len(list(temporary.iterdir())),
        "rdds": sc._jsc.getPersistentRDDs().size(),
        "threads": threading.active_count(),
        "jobs": list(sc.statusTracker().getActiveJobsIds()),
        "tags": sorted(sc.getJobTags()),
        "environment": dict(sc.environment),
    }


def test_no_files_or_rdds_remain(sc, arrays):
    train([rows(sc, arrays)])
    before = leftovers(sc)
    assert before["files"] == []
    train([rows(sc, arrays)], validation_split=0.1)
    train(arrays, validation_data=arrays)
    for data in ([rows(sc, arrays)], arrays):
        with pytest.raises(WorkerError):
            train(data, worker_callbacks=[Fail()])
    with pytest.raises(DataError):
        train([rows(sc, arrays).map(lambda row: (row[0] * np.nan, row[1]))])
    SparkModel(classifier()).predict(arrays[0])
    SparkModel(classifier()).evaluate(*arrays)
    assert leftovers(sc) == before


def test_an_interrupt_ends_the_job_and_keeps_the_last_round(sc, arrays, tmp_path):
    """Ctrl-C during the second epoch."""
    mark = tmp_path / "mark"

    class Slow(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                mark.touch()
                time.sleep(60)

    kept = []
    keep = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: kept.append(spark_model.model.get_weights()))
    spark_model = SparkModel(classifier(), seed=4)
    data = rows(sc, arrays)
    with interrupted_when(mark.exists, seconds=20):
        spark_model.fit(data, epochs=3, verbose=0, callbacks=[keep], worker_callbacks=[Slow()])
    assert len(kept) == 1
    assert_same_bits(spark_model.model.get_weights(), kept[0])
    deadline = time.monotonic() + 20
    while sc.statusTracker().getActiveJobsIds() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not sc.statusTracker().getActiveJobsIds()
    assert leftovers(sc)["files"] == []
    spark_model.fit(data, verbose=0)


def test_a_partition_larger_than_memory_is_trained_on(sc):
    """240 MB of rows in one partition, and a limit of 160 MB more than an idle worker uses."""
    count, width, allowance = 240_000, 250, 160 * 1024 * 1024

    def limit():
        import resource

        status = Path("/proc/self/status").read_text().splitlines()
        used = next(int(line.split()[1]) for line in status if line.startswith("VmData")) * 1024
        resource.setrlimit(resource.RLIMIT_DATA, (used + allowance, resource.RLIM_INFINITY))

    def unlimit():
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    def generate(_):
        limit()
        try:
            row = np.arange(width, dtype=np.float32) / width
            for number in range(count):
                yield row * (number % 7), number % 7
        finally:
            unlimit()

    class Limit(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            limit()

        def on_train_end(self, logs=None):
            unlimit()

    rdd = sc.parallelize([0], 1).mapPartitions(generate)
    model = classifier(width=width, units=4)
    spark_model = SparkModel(model, seed=1)
    history = spark_model.fit(rdd, epochs=2, batch_size=2000, verbose=0, worker_callbacks=[Limit()])
    assert history.history["loss"][1] < history.history["loss"][0]
    assert spark_model.training_histories[0]["rows"] == count


def test_a_source_is_read_once(sc, arrays):
    read = sc.accumulator(0)

    def count(row):
        read.add(1)
        return row

    SparkModel(classifier()).fit(rows(sc, arrays).map(count), epochs=3, validation_split=0.1, verbose=0)
    assert read.value == 240


def test_a_killed_worker_is_reported_as_such(sc, arrays):
    def kill(x, y=None):
        if os.environ.get("SPARKKERAS_WORKER"):  # the driver calls the transform too
            os.kill(os.getpid(), signal.SIGKILL)
        return x

    with pytest.raises(WorkerError, match=r"a worker process died.* GB of memory are available now.*local\[N,4\]") as raised:
        SparkModel(classifier()).predict(arrays[0], transform=kill)
    assert "collectAndServe" in str(raised.value.__cause__)
