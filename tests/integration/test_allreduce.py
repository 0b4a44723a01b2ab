"""All-reduce training on Spark: the weights of plain Keras on the union of the batches, also after workers have died."""

import os
import signal
import time
from functools import partial

import keras
import numpy as np
import psutil
import pytest

from sparkkeras import SparkModel, WorkerError
from sparkkeras.data.placement import even_slices
from sparkkeras.spark.cluster import Cluster
from tests.conftest import long, settle
from tests.connect.cases import Once
from tests.models import classifier, same
from tests.processes import interrupted_when

BATCH = 16


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


def lookups():
    """A model of the values of 16 pixels: workers look up rows that both use, and rows of their own, some of them twice."""
    keras.utils.set_random_seed(3)
    embedding = keras.layers.Embedding(16 * 17, 2)
    layers = [keras.Input((16,), dtype="int32"), embedding, keras.layers.Flatten(), keras.layers.Dense(10, "softmax")]
    model = keras.Sequential(layers)
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def plain(model, parts, rates):
    """Keras on the unions of the batches of all workers; returns the losses."""
    steps, rows = max(-(-len(y) // BATCH) for _, y, _ in parts), sum(len(y) for _, y, _ in parts)
    losses = []
    for rate in rates:
        model.optimizer.learning_rate = rate
        total = 0.0
        for step in range(steps):
            where = slice(step * BATCH, (step + 1) * BATCH)
            x, y, weights = (np.concatenate([part[where] for part in side]) for side in zip(*parts, strict=True))
            model.reset_metrics()
            total += model.train_on_batch(x, y, sample_weight=weights)[0] * len(y)
        losses.append(float(total / rows))
    return losses


@pytest.mark.core
def test_two_workers_train_like_keras_on_the_union_of_their_batches(sc, digits, monkeypatch):
    monkeypatch.setattr(Cluster, "free_slots", 1)  # as if another job used a slot at this moment
    x, x_test = ((side[:, 24:40] * 16).astype(np.int32) + 17 * np.arange(16, dtype=np.int32) for side in digits[::2])
    x, y, y_test, weights = x[:99], digits[1][:99], digits[3], np.linspace(0.5, 2, 99).astype(np.float32)
    model, expected = lookups(), lookups()
    slices, rates = even_slices(99, 2), (0.01, 0.002)
    losses = plain(expected, [(x[part], y[part], weights[part]) for part in slices], rates)
    spark_model = SparkModel(model, mode="allreduce", batch_size=BATCH, num_workers=2)
    history = spark_model.fit(
        x,
        y,
        sample_weight=weights,
        epochs=2,
        shuffle=False,
        verbose=0,
        validation_data=(x_test, y_test),
        callbacks=[keras.callbacks.LearningRateScheduler(lambda epoch, _: rates[epoch])],
    ).history
    for mine, theirs in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
    assert int(model.optimizer.iterations) == int(expected.optimizer.iterations)
    np.testing.assert_allclose(history["loss"], losses, rtol=1e-4)
    assert history["learning_rate"] == pytest.approx(rates)
    validated = model.evaluate(x_test, y_test, verbose=0)
    assert [history["val_loss"][1], history["val_accuracy"][1]] == pytest.approx(validated, rel=1e-5)
    seen = [(each["epoch"], each["worker"], each["rows"]) for each in spark_model.training_histories]
    sizes = [part.stop - part.start for part in slices]
    assert seen == [(epoch, worker, sizes[worker]) for epoch in (0, 1) for worker in (0, 1)]
    assert spark_model.parameter_server_stats is None


def signalled(action):
    os.kill(os.getpid(), action)
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
        (signal.SIGKILL, "killed by SIGKILL"),
        long(signal.SIGSTOP, "does not answer"),
    ],
)
def test_training_continues_from_the_last_epoch_with_the_same_result(digits, uninterrupted, tmp_path, action, reason):
    begun = []
    noted = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, _: begun.append(epoch))
    once = Once(tmp_path, partial(signalled, action), epoch=1, rank="1")
    started = time.monotonic()
    with pytest.warns(UserWarning, match=f"beginning of epoch 2 .*{reason}"):
        spark_model, history = trained(digits, worker_callbacks=[once], callbacks=[noted])
    assert time.monotonic() - started < 40
    assert begun == history.epoch == [0, 1, 2]
    assert same(spark_model, uninterrupted)
    assert len(spark_model.training_histories) == 6


@pytest.mark.soak
def test_an_error_that_stays_has_the_traceback_of_its_worker(sc, digits):
    """Also that of rank 0, without which JAX ends the others."""

    class Fail(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if os.environ["RANK"] == "0" and batch == 1:
                raise RuntimeError("on purpose")

    with pytest.raises(WorkerError, match="rank 0 .*RuntimeError: on purpose") as caught:
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
