"""All-reduce training on Spark: the weights of plain Keras on the union of the batches, also after workers have died."""

import os
import shutil
import signal
import time
from pathlib import Path

import keras
import numpy as np
import psutil
import pytest

from sparkkeras import ConfigurationError, DataError, SparkModel, WorkerError
from sparkkeras.data.placement import even_slices
from sparkkeras.ml import KerasEstimator
from sparkkeras.sources.spark_dataset import StoredSparkDataset
from sparkkeras.spark.cluster import Cluster
from sparkkeras.training import allreduce_hosts
from tests.conftest import settle
from tests.models import classifier
from tests.processes import interrupted_when

BATCH = 16
RATES = (0.01, 0.002)


def children():
    """The processes of the ranks: forks of Spark's Python workers."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            parent = process.parent()
            if parent is not None and parent.parent() is not None and "sparkkeras.spark.daemon" in parent.parent().cmdline():
                found.append(process.pid)
        except psutil.Error:
            pass
    return found


@pytest.fixture(autouse=True)
def nothing_left(sc):
    """Checks that no process of a rank, and no stage, remains."""
    yield
    deadline = time.monotonic() + 10
    while (children() or sc.statusTracker().getActiveStageIds()) and time.monotonic() < deadline:
        settle(sc)
        time.sleep(0.05)
    assert children() == []
    assert sc.statusTracker().getActiveStageIds() == []


def plain(model, parts, weights, rates=RATES):
    """Keras on the unions of the batches of all workers; returns the losses."""
    x, y = parts
    steps = max(-(-len(part) // BATCH) for part in y)
    losses = []
    for rate in rates:
        model.optimizer.learning_rate = rate
        total = 0.0
        for step in range(steps):
            where = slice(step * BATCH, (step + 1) * BATCH)
            batch = [np.concatenate([part[where] for part in side]) for side in (x, y, weights)]
            model.reset_metrics()
            total += model.train_on_batch(*batch[:2], sample_weight=batch[2])[0] * len(batch[1])
        losses.append(float(total / sum(map(len, y))))
    return losses


@pytest.mark.core
def test_two_workers_train_like_keras_on_the_union_of_their_batches(sc, digits, monkeypatch):
    monkeypatch.setattr(Cluster, "free_slots", 1)  # as if another job used a slot at this moment
    x, y, x_test, y_test = digits
    x, y, weights = x[:99], y[:99], np.linspace(0.5, 2, 99).astype(np.float32)
    model, expected = classifier(), classifier()
    histories = even_slices(99, 2)
    losses = plain(expected, [[side[part] for part in histories] for side in (x, y)], [weights[part] for part in histories])
    spark_model = SparkModel(model, mode="allreduce", batch_size=BATCH, num_workers=2)
    history = spark_model.fit(
        x,
        y,
        sample_weight=weights,
        epochs=2,
        shuffle=False,
        verbose=0,
        validation_data=(x_test, y_test),
        callbacks=[keras.callbacks.LearningRateScheduler(lambda epoch, _: RATES[epoch])],
    ).history
    for mine, theirs in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
    assert int(model.optimizer.iterations) == int(expected.optimizer.iterations)
    np.testing.assert_allclose(history["loss"], losses, rtol=1e-4)
    assert history["learning_rate"] == pytest.approx(RATES)
    validated = model.evaluate(x_test, y_test, verbose=0, return_dict=True)
    assert history["val_loss"][1] == pytest.approx(validated["loss"], rel=1e-5)
    assert history["val_accuracy"][1] == pytest.approx(validated["accuracy"], rel=1e-6)
    seen = [(each["epoch"], each["worker"], each["rows"]) for each in spark_model.training_histories]
    sizes = [part.stop - part.start for part in histories]
    assert seen == [(epoch, worker, sizes[worker]) for epoch in (0, 1) for worker in (0, 1)]
    assert spark_model.parameter_server_stats is None


@pytest.mark.core
def test_two_workers_train_an_embedding_like_keras(sc):
    """They look up rows that both use, and rows of their own, some of them twice; tests/worker/test_lockstep.py has more."""
    keras.utils.set_random_seed(3)
    layers = [keras.Input((4,), dtype="int32"), keras.layers.Embedding(30, 2), keras.layers.Flatten(), keras.layers.Dense(1)]
    model, expected = keras.Sequential(layers), keras.models.clone_model(keras.Sequential(layers))
    expected.set_weights(model.get_weights())
    for each in (model, expected):
        each.compile("adam", "mse", metrics=["mae"])
    random = np.random.default_rng(1)
    parts = [random.integers([0, 0, 5 + 10 * rank, 5], [5, 5, 15 + 10 * rank, 30], (20, 4)) for rank in (0, 1)]
    x, y = np.concatenate(parts), random.normal(size=(40, 1)).astype(np.float32)
    SparkModel(model, mode="allreduce", batch_size=BATCH, num_workers=2).fit(x, y, epochs=2, shuffle=False, verbose=0)
    plain(expected, (parts, [y[:20], y[20:]]), [np.ones(20), np.ones(20)], rates=[1e-3, 1e-3])
    for mine, theirs in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


def test_more_workers_than_slots_are_an_error(sc, digits):
    with pytest.raises(ConfigurationError, match="num_workers=7, but Spark has 2 slots, and with mode='allreduce'"):
        SparkModel(classifier(), "allreduce", num_workers=7).fit(digits[0][:99], digits[1][:99])


class Once(keras.callbacks.Callback):
    """Does something in the second epoch on one worker, once."""

    def __init__(self, path, action):
        super().__init__()
        self.path, self.action, self.epoch = path, action, 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if self.epoch == 1 and batch == 1 and os.environ["RANK"] == "1" and not self.path.exists():
            self.path.touch()
            if self.action == "raise":
                raise RuntimeError("on purpose")
            target = os.getppid() if "worker" in self.action else os.getpid()
            os.kill(target, signal.SIGSTOP if "stop" in self.action else signal.SIGKILL)
            time.sleep(60)


def trained(digits, epochs=3, **arguments):
    x, y, *_ = digits
    spark_model = SparkModel(
        classifier(), "allreduce", num_workers=2, batch_size=BATCH, seed=4, **arguments.pop("model", {})
    )
    history = spark_model.fit(x[:99], y[:99], epochs=epochs, **{"verbose": 0} | arguments)
    return spark_model, history


@pytest.fixture(scope="module")
def uninterrupted(contexts, digits):
    contexts.get("local[2]")
    return trained(digits, worker_callbacks=[keras.callbacks.Callback()])[0]


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        ("kill", "rank 1 of 2 on 127.0.0.1 failed: its process was killed by SIGKILL"),
        pytest.param("raise", "rank 1 of 2 on 127.0.0.1 failed: RuntimeError: on purpose", marks=pytest.mark.soak),
        pytest.param("stop", "rank 0 of 2 .* the process of rank 1 .*does not answer", marks=pytest.mark.soak),
        pytest.param("kill the worker", "rank 1 of 2 on 127.0.0.1 failed: its worker died", marks=pytest.mark.soak),
    ],
)
def test_training_continues_from_the_last_epoch_with_the_same_result(digits, uninterrupted, tmp_path, action, reason):
    begun = []
    noted = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, _: begun.append(epoch))
    started = time.monotonic()
    with pytest.warns(
        UserWarning, match=f"continues from the beginning of epoch 2 .restart 1 of at most 3., since {reason}"
    ):
        spark_model, history = trained(digits, worker_callbacks=[Once(tmp_path / "done", action)], callbacks=[noted])
    assert time.monotonic() - started < 40
    assert begun == history.epoch == [0, 1, 2]
    for mine, theirs in zip(spark_model.model.get_weights(), uninterrupted.model.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert len(spark_model.training_histories) == 6


@pytest.mark.soak
def test_an_error_that_stays_has_the_traceback_of_its_worker(sc, digits):
    class Fail(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if os.environ["RANK"] == "1":
                raise RuntimeError("on purpose")

    with pytest.raises(WorkerError, match=r"rank 1 of 2 .* failed: RuntimeError: on purpose") as caught:
        trained(digits, model={"max_restarts": 0}, worker_callbacks=[Fail()])
    assert 'raise RuntimeError("on purpose")' in str(caught.value)


@pytest.mark.soak
def test_an_error_of_a_callback_on_the_driver_is_raised_at_once(sc, digits):
    begun = []

    class Fail(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            begun.append(epoch)
            raise WorkerError("of a job that this callback has started")

    with pytest.raises(WorkerError, match="of a job that this callback has started"):
        trained(digits, callbacks=[Fail()])
    assert begun == [0]


@pytest.mark.soak
def test_the_error_of_the_rank_that_failed_first_is_raised(sc, digits):
    """Also that of rank 0, without which JAX ends the others."""

    class Fail(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if os.environ["RANK"] == "0" and batch == 1:
                raise DataError("on purpose")

    with pytest.raises(DataError, match="on purpose"):
        trained(digits, worker_callbacks=[Fail()])


@pytest.mark.soak
def test_one_worker_cannot_leave_an_epoch_alone(sc, digits):
    class Stop(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.stop_training = os.environ["RANK"] == "1"

    spark_model, history = trained(digits, worker_callbacks=[Stop(), keras.callbacks.TerminateOnNaN()])
    assert history.epoch == [0]
    assert sum(entry["rows"] for entry in spark_model.training_histories) == 99


@pytest.mark.soak
def test_training_continues_with_fewer_workers(sc, digits, tmp_path, monkeypatch, capsys):
    sizes = iter([2, 1])
    monkeypatch.setattr(allreduce_hosts.RankHosts, "size", lambda hosts: next(sizes))
    with pytest.warns(UserWarning, match="restart 1 of at most 3"):
        spark_model, history = trained(
            digits, verbose=2, worker_callbacks=[Once(tmp_path / "done", "kill")], validation_split=0.2, shuffle=False
        )
    shown = [line.partition(" - ")[0] for line in capsys.readouterr().out.splitlines()]
    assert shown[2:5] == ["2 workers", "Epoch 2/3", "Training continues on 1 worker."]
    assert shown[5:] == ["1 worker", "Epoch 3/3", "1 worker"]
    assert history.epoch == [0, 1, 2]
    assert [(entry["worker"], entry["rows"]) for entry in spark_model.training_histories][2:] == [(0, 79)] * 2
    ends = [part.stop for part in even_slices(99, 2)]
    x, y = (np.concatenate([side[end - 10 : end] for end in ends]) for side in digits[:2])
    held_out = spark_model.model.evaluate(x, y, verbose=0, return_dict=True)
    assert history.history["val_loss"][-1] == pytest.approx(held_out["loss"], rel=1e-5)


@pytest.mark.soak
@pytest.mark.cluster
def test_fewer_workers_of_a_cluster_get_the_rows_of_others(sc, digits, monkeypatch):
    monkeypatch.setattr(allreduce_hosts.RankHosts, "size", lambda hosts: 1)
    monkeypatch.setattr(StoredSparkDataset, "everywhere", None)
    x, y, *_ = digits
    data = sc.parallelize(list(zip(x[:99], y[:99], strict=True)), 2)
    model, expected = classifier(), classifier()
    spark_model = SparkModel(model, "allreduce", batch_size=BATCH)
    spark_model.fit(data, epochs=1, shuffle=False, verbose=0, validation_split=0.2)
    assert [(entry["worker"], entry["rows"]) for entry in spark_model.training_histories] == [(0, 79)]
    ends = [part.stop - 10 for part in even_slices(99, 2)]
    rows = [*range(ends[0]), *range(ends[0] + 10, ends[1])]
    expected.fit(x[rows], y[rows], BATCH, shuffle=False, verbose=0)
    for mine, theirs in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


@pytest.mark.soak
def test_lost_files_are_written_again(spark, digits, tmp_path):
    x, y, *_ = digits
    frame = spark.createDataFrame([(x[number].tolist(), int(y[number])) for number in range(99)], ["features", "label"])

    class Remove(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if os.environ["RANK"] == "1" and not (tmp_path / "done").exists():
                (tmp_path / "done").touch()
                folders = Path(os.environ["SPARK_LOCAL_DIRS"].split(",")[0]).rglob("part-1-*")
                for folder in list(folders):
                    shutil.rmtree(folder)
                raise RuntimeError("on purpose")

    with pytest.warns(UserWarning, match="restart 1 of at most 3"):
        history = SparkModel(classifier(), "allreduce", num_workers=2, batch_size=BATCH).fit(
            frame, epochs=2, verbose=0, worker_callbacks=[Remove()]
        )
    assert history.epoch == [0, 1]


@pytest.mark.soak
def test_errors_in_the_data_are_raised_at_once(sc):
    def make(worker, num_workers, epoch):
        labels = np.zeros(8) if epoch == 0 or worker == 0 else np.full(8, 99)
        return iter([(np.zeros((8, 64), np.float32), labels)] * 3)

    with pytest.raises(DataError, match="99"):
        SparkModel(classifier(), "allreduce", num_workers=2).fit(make, epochs=3, verbose=0)


@pytest.mark.soak
def test_readers_with_different_numbers_of_batches(sc, digits):
    x, y, *_ = digits

    def make(worker, num_workers):
        rows = slice(0, 50) if worker == 0 else slice(50, 70)
        return iter([(x[rows][i : i + 10], y[rows][i : i + 10]) for i in range(0, len(x[rows]), 10)])

    model, expected = classifier(), classifier()
    SparkModel(model, "allreduce", num_workers=2).fit(make, epochs=1, verbose=0)
    for step in range(5):
        of_other = {2: slice(50, 60), 4: slice(60, 70)}  # spread over the steps
        parts = [slice(step * 10, step * 10 + 10), of_other.get(step, slice(0))]
        expected.train_on_batch(*(np.concatenate([side[part] for part in parts]) for side in (x, y)))
    for mine, theirs in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


@pytest.mark.soak
def test_a_data_frame_in_a_pipeline_stage(spark, digits):
    x, y, *_ = digits
    rows = [
        (row.tolist(), int(label), number % 5 == 0) for number, (row, label) in enumerate(zip(x[:300], y[:300], strict=True))
    ]
    frame = spark.createDataFrame(rows, ["features", "label", "held_out"]).repartition(3)
    estimator = KerasEstimator(
        model=classifier(optimizer=keras.optimizers.Adam(0.01)),
        mode="allreduce",
        gradient_dtype="float16",
        epochs=8,
        verbose=0,
        validationIndicatorCol="held_out",
    )
    fitted = estimator.fit(frame)
    assert fitted.history["loss"][-1] < 0.5 * fitted.history["loss"][0]
    assert fitted.history["val_accuracy"][-1] > 0.6


@pytest.mark.soak
def test_callbacks_stop_training(sc, digits):
    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = epoch == 1 and os.environ.get("RANK", "1") == "1"

    assert trained(digits, epochs=9, worker_callbacks=[Stop()])[1].epoch == [0, 1]
    assert trained(digits, epochs=9, callbacks=[Stop()])[1].epoch == [0, 1]
    early = keras.callbacks.EarlyStopping("loss", patience=0, min_delta=100, restore_best_weights=True)
    assert trained(digits, epochs=9, callbacks=[early])[1].epoch == [0, 1]


@pytest.mark.soak
def test_an_interrupt_ends_training_within_three_seconds(sc, digits, tmp_path):
    class Slow(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            (tmp_path / "begun").touch()
            time.sleep(0.3)

    with interrupted_when((tmp_path / "begun").exists):
        trained(digits, epochs=50, worker_callbacks=[Slow()])


@pytest.mark.soak
@pytest.mark.cluster
def test_executors_of_a_cluster(sc, digits, tmp_path):
    """A union as source, whose lineage barrier stages reject; then an executor that is killed."""
    x, y, *_ = digits
    rows = list(zip(x[:96], y[:96], strict=True))
    data = sc.union([sc.parallelize(rows[:48], 1), sc.parallelize(rows[48:], 1)])
    model, expected = classifier(), classifier()
    SparkModel(model, "allreduce", batch_size=BATCH).fit(data, epochs=1, shuffle=False, verbose=0)
    for step in range(3):
        parts = [slice(start + step * BATCH, start + (step + 1) * BATCH) for start in (0, 48)]
        expected.train_on_batch(*(np.concatenate([side[part] for part in parts]) for side in (x, y)))
    for mine, theirs in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)

    class KillExecutor(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if os.environ["RANK"] == "1" and not (tmp_path / "done").exists():
                (tmp_path / "done").touch()
                process = psutil.Process()
                while "java" not in process.name():
                    process = process.parent()
                process.kill()
                time.sleep(60)

    spark_model = SparkModel(classifier(), "allreduce", batch_size=BATCH)
    with pytest.warns(UserWarning, match="restart 1 of at most 3"):
        history = spark_model.fit(data, epochs=3, verbose=0, worker_callbacks=[KillExecutor()])
    assert history.epoch == [0, 1, 2]
    assert [entry["rows"] for entry in spark_model.training_histories] == [48] * 6
