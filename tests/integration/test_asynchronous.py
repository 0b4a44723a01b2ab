"""Asynchronous and hogwild training on Spark, through the public interface; test_recovery.py has faults."""

import contextlib
import os
import time
from dataclasses import dataclass

import keras
import numpy as np
import pytest

from sparkkeras import (
    ConfigurationError,
    ParameterServerOptions,
    SparkModel,
    load_spark_model,
)
from tests.conftest import long
from tests.models import classifier, regression


def distributed(model=None, mode="asynchronous", frequency=10, num_workers=2, *, transport="socket", options=(), **settings):
    """A SparkModel that trains through a parameter server."""
    return SparkModel(
        model or classifier(optimizer=keras.optimizers.Adam(0.002)),
        mode,
        frequency,
        num_workers,
        parameter_server_mode=transport,
        server_options=ParameterServerOptions(**({"timeout": 120.0} | dict(options))),
        **({"seed": 1, "batch_size": 16} | settings),
    )


def parts_of(sc, x, y, *sizes):
    """An RDD of consecutive rows in partitions of these sizes."""
    stops = np.cumsum(sizes)
    spans = [slice(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]
    parts = [list(zip(x[span], y[span], strict=True)) for span in spans]
    return sc.parallelize(range(len(sizes)), len(sizes)).flatMap(lambda part: parts[part])


# Smaller steps at the end make training converge in any order of updates, which are summed over both workers.
SETTLING = keras.optimizers.schedules.ExponentialDecay(0.003, 3 * 44, 0.6)


@pytest.mark.parametrize(
    ("frequency", "mode", "transport", "epochs"), [(10, "asynchronous", "socket", 8), long("epoch", "hogwild", "http", 18)]
)
def test_training_learns_digits(sc, digits, frequency, mode, transport, epochs):
    x, y, x_test, y_test = digits
    model = classifier(optimizer=keras.optimizers.Adam(SETTLING))
    spark_model = distributed(model, mode, frequency, None, transport=transport)
    measured = []
    measure = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: measured.append(model.evaluate(x_test, y_test, verbose=0))
    )
    held_out = parts_of(sc, x_test, y_test, 100, 0, 297)
    rows = parts_of(sc, x, y, 700, 0, 700)
    history = spark_model.fit(rows, epochs=epochs, validation_data=held_out, callbacks=[measure], verbose=0)
    assert history.epoch == list(range(epochs))
    assert history.history["val_accuracy"][-1] > 0.92
    found = list(zip(history.history["val_loss"], history.history["val_accuracy"], strict=True))
    np.testing.assert_allclose(found, measured, rtol=1e-4)
    stats = spark_model.parameter_server_stats
    assert stats.transport == transport
    assert list(stats.steps.values()) == [epochs * 44] * 2  # 700 rows per worker
    assert stats.pushes == 2 * epochs * {"epoch": 1, 10: 5}[frequency]
    assert sum(stats.staleness.values()) == stats.pushes
    assert (stats.duplicates, stats.rejected_requests) == (0, {})
    assert int(model.optimizer.iterations) == epochs * 44


@dataclass(frozen=True)
class Half:
    """A custom rule that applies half of every update."""

    share: float = 0.5
    modes = frozenset({"asynchronous", "hogwild"})

    def init(self, center):
        return {"applies": np.zeros(1, np.float32)}

    def exchange(self, local, base, center, window):
        sent = self.share * (local - base)
        return sent, center + sent

    def apply(self, center, state, update, staleness):
        state["applies"] += 1
        assert update.num_workers == 2
        center += update.sent


def test_a_custom_rule_and_its_state_are_saved(sc, digits, tmp_path):
    x, y = digits[0][:320], digits[1][:320]
    spark_model = distributed(mode="hogwild", frequency=5, rule=Half(0.7), options={"encrypt": True})
    losses = spark_model.fit(x, y, epochs=3, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    spark_model.save(tmp_path / "half.keras")
    loaded = load_spark_model(tmp_path / "half.keras", custom_objects={"Half": Half})
    assert loaded.rule == Half(0.7)
    assert loaded.fit(x, y, epochs=1, verbose=0).history["loss"][0] < losses[0]
    assert loaded._rule_state["applies"].tolist() == [2 * 4 * 2]
    assert int(loaded.model.optimizer.iterations) == 4 * 10


# Steps, epochs and staleness


@pytest.mark.parametrize("bound", [None, 0])
def test_no_step_is_lost_and_staleness_is_bounded(sc, digits, bound, tmp_path):
    """The worker of the smaller partition is slow in its second epoch, so that the other would run ahead."""
    x, y, *_ = digits
    mark = str(tmp_path / "far-ahead")

    class Pace(keras.callbacks.Callback):
        seen = 0

        def on_train_batch_end(self, batch, logs=None):
            self.seen += 1
            if self.params["steps"] == 2:  # the smaller partition
                deadline = time.monotonic() + (120 if bound is None else 0.3)
                while self.seen in (3, 4) and not os.path.exists(mark) and time.monotonic() < deadline:
                    time.sleep(0.01)
            elif self.seen == 20:
                open(mark, "w").close()

    spark_model = distributed(frequency=3, options={"max_staleness": bound, "lease_seconds": 120.0})
    rdd = parts_of(sc, x, y, 130, 20)  # nine and two batches
    history = spark_model.fit(rdd, epochs=4, worker_callbacks=[Pace()], verbose=0)
    stats = spark_model.parameter_server_stats
    assert len(history.epoch) == 4
    assert stats.steps == {0: 4 * 9, 1: 4 * 2}
    assert stats.pushes == 4 * 3 + 4 * 1  # windows restart in each epoch
    if bound is None:
        assert stats.max_staleness >= 4  # 20 batches make five exchanges, and one may be pending
    else:
        # While one worker is at its i-th exchange, the other is between its (i - bound)th and its (i + bound + 1)th.
        assert stats.max_staleness <= 2 * bound + 2


def test_max_staleness_0_with_few_or_no_rows(sc, digits):
    x, y, *_ = digits
    spark_model = distributed(frequency=1, options={"max_staleness": 0}, num_workers=None)
    history = spark_model.fit(parts_of(sc, x, y, 0, 40), epochs=2, verbose=0)
    assert np.isfinite(history.history["loss"]).all()
    assert spark_model.parameter_server_stats.steps == {1: 6}
    assert {report["worker"] for report in spark_model.training_histories} == {1}


@pytest.mark.parametrize("num_workers", [None, 5])
def test_partitions_are_coalesced_to_the_number_of_slots(sc, num_workers):
    """All rows are used once per epoch: with zero weights and a learning rate of 0, the loss is the mean of y * y."""
    y = np.arange(120, dtype=np.float32) ** 1.5
    rdd = sc.parallelize([(np.zeros(3, np.float32), value) for value in y], 12)
    model = regression(optimizer=keras.optimizers.SGD(0.0))
    spark_model = distributed(model, frequency=2, num_workers=num_workers, batch_size=7)
    with pytest.warns(UserWarning, match="num_workers=5, but") if num_workers else contextlib.nullcontext():
        history = spark_model.fit(rdd, epochs=2, shuffle=False, verbose=0)
    np.testing.assert_allclose(history.history["loss"], [np.mean(y.astype(float) ** 2)] * 2, rtol=1e-4)
    assert sorted(report["worker"] for report in spark_model.training_histories) == [0, 0, 1, 1]
    assert sum(report["rows"] for report in spark_model.training_histories) == 2 * 120


def test_calls_from_callbacks_that_would_deadlock_are_rejected(sc):
    """Workers that are several epochs ahead wait for the driver, and occupy their slots meanwhile."""
    x = np.random.default_rng(0).random((32, 3)).astype(np.float32)
    y = x.sum(1)
    other = SparkModel(regression())
    calls = [
        lambda: spark_model.predict(x),
        lambda: spark_model.evaluate(sc.parallelize(list(zip(x, y, strict=True)), 2)),
        lambda: other.fit(x, y, verbose=0),
    ]
    rejected, found = [], []

    def call_everything(epoch, logs):
        for call in calls:
            with pytest.raises(ConfigurationError, match=r"self\.model\.predict.*num_workers=1") as raised:
                call()
            rejected.append(raised)

    spark_model = distributed(regression(), batch_size=8)
    spark_model.fit(x, y, verbose=0, callbacks=keras.callbacks.LambdaCallback(on_epoch_end=call_everything))
    assert len(rejected) == len(calls)
    spark_model.num_workers = 1
    predict = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: found.append(spark_model.predict(x)))
    spark_model.fit(x, y, verbose=0, callbacks=predict)
    np.testing.assert_allclose(found[0], spark_model.model(x), rtol=1e-3, atol=1e-5)
