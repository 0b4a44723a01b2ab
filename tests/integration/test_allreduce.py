"""All-reduce training on Spark: the weights of plain Keras on the union of the batches, also after workers have died."""

import os
import signal
import time

import keras
import numpy as np
import psutil
import pytest

from sparkkeras import SparkModel, WorkerError
from sparkkeras.data.placement import even_slices
from sparkkeras.spark.cluster import Cluster
from tests.conftest import long, settle
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


class Once(keras.callbacks.Callback):
    """Sends a signal to the process of a rank in the second epoch, once."""

    def __init__(self, path, action):
        super().__init__()
        self.path, self.action, self.epoch = path, action, 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if self.epoch == 1 and batch == 1 and os.environ["RANK"] == "1" and not self.path.exists():
            self.path.touch()
            os.kill(os.getpid(), self.action)
            time.sleep(60)


def trained(digits, epochs=3, max_restarts=3, **arguments):
    x, y, *_ = digits
    spark_model = SparkModel(classifier(), "allreduce", num_workers=2, batch_size=BATCH, seed=4, max_restarts=max_restarts)
    history = spark_model.fit(x[:99], y[:99], epochs=epochs, verbose=0, **arguments)
    return spark_model, history


@pytest.fixture(scope="module")
def uninterrupted(contexts, digits):
    contexts.get("local[2]")
    return trained(digits, worker_callbacks=[keras.callbacks.Callback()])[0]


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        (signal.SIGKILL, "rank 1 of 2 on 127.0.0.1 failed: its process was killed by SIGKILL"),
        long(signal.SIGSTOP, "rank 0 of 2 .* the process of rank 1 .*does not answer"),
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
    """Also that of rank 0, without which JAX ends the others."""

    class Fail(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if os.environ["RANK"] == "0" and batch == 1:
                raise RuntimeError("on purpose")

    with pytest.raises(WorkerError, match=r"rank 0 of 2 .* failed: RuntimeError: on purpose") as caught:
        trained(digits, max_restarts=0, worker_callbacks=[Fail()])
    assert 'raise RuntimeError("on purpose")' in str(caught.value)


@pytest.mark.soak
def test_a_union_whose_lineage_barrier_stages_reject(sc, digits):
    x, y, *_ = digits
    rows = list(zip(x[:96], y[:96], strict=True))
    data = sc.union([sc.parallelize(rows[:48], 1), sc.parallelize(rows[48:], 1)])
    spark_model = SparkModel(classifier(), "allreduce", batch_size=BATCH)
    spark_model.fit(data, epochs=1, verbose=0)
    assert [entry["rows"] for entry in spark_model.training_histories] == [48, 48]


@pytest.mark.soak
def test_an_interrupt_ends_training_within_three_seconds(sc, digits, tmp_path):
    class Slow(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            (tmp_path / "begun").touch()
            time.sleep(0.3)

    with interrupted_when((tmp_path / "begun").exists):
        trained(digits, epochs=50, worker_callbacks=[Slow()])
