"""Asynchronous and hogwild training on Spark, through the public interface."""

import contextlib
import csv
import os
import signal
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import keras
import numpy as np
import psutil
import pytest

from sparkkeras import (
    ConfigurationError,
    DivergenceError,
    DriverConnectionError,
    EnsembleModel,
    ParameterServerOptions,
    SparkModel,
    WorkerError,
    load_spark_model,
    to_simple_rdd,
)
from tests.conftest import long
from tests.models import classifier, regression

MODES = ["asynchronous", "hogwild"]
TRANSPORTS = ["socket", pytest.param("http", marks=pytest.mark.soak)]


def digit_model(**compiled):
    return classifier(**({"optimizer": keras.optimizers.Adam(0.002)} | compiled))


def distributed(model, mode="asynchronous", frequency=10, num_workers=2, *, transport="socket", options=None, **settings):
    """A SparkModel that trains through a parameter server."""
    given = ParameterServerOptions(**({"timeout": 120.0} | (options or {})))
    settings = {"seed": 1, "batch_size": 16} | settings
    return SparkModel(model, mode, frequency, num_workers, parameter_server_mode=transport, server_options=given, **settings)


def parts_of(sc, x, y, *sizes):
    """An RDD of consecutive rows in partitions of these sizes."""
    stops = np.cumsum(sizes)
    spans = [slice(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]
    parts = [list(zip(x[span], y[span], strict=True)) for span in spans]
    return sc.parallelize(range(len(sizes)), len(sizes)).flatMap(lambda part: parts[part])


def same(mine, other):
    for one, two in zip(mine, other, strict=True):
        np.testing.assert_array_equal(one, two)


@dataclass
class Notes:
    """Lines that callbacks write, wherever they run; each worker writes to a separate file."""

    folder: Path

    def callback(self, wait=None, stop_at=None, sleep=0.0):
        """A callback that writes its calls, waits for the file ``wait(epoch)`` and stops the first worker at ``stop_at``."""
        folder = str(self.folder)

        class Noting(keras.callbacks.Callback):
            def say(self, *words):
                with open(f"{folder}/{os.getpid()}", "a") as file:
                    file.write(" ".join(map(str, words)) + "\n")

            def on_train_begin(self, logs=None):
                self.say("begin")

            def on_epoch_begin(self, epoch, logs=None):
                while wait is not None and not os.path.exists(f"{wait}-{epoch}"):
                    time.sleep(0.01)

            def on_epoch_end(self, epoch, logs=None):
                self.say(epoch, round(float(self.model.optimizer.learning_rate), 6))
                if epoch == stop_at:
                    try:
                        os.close(os.open(f"{folder}/.stopped", os.O_CREAT | os.O_EXCL))
                        self.model.stop_training = True
                    except FileExistsError:
                        pass

            def on_train_end(self, logs=None):
                self.say("end")

        return Noting()

    def read(self):
        """The lines of each worker."""
        return [path.read_text().splitlines() for path in sorted(self.folder.iterdir()) if path.name != ".stopped"]


@pytest.fixture
def notes(tmp_path):
    folder = tmp_path / "notes"
    folder.mkdir()
    return Notes(folder)


class Weights(keras.callbacks.Callback):
    """Records the weights, and the metrics on rows of the driver, at the end of each epoch."""

    def __init__(self, rows=None):
        super().__init__()
        self.rows, self.weights, self.metrics = rows, [], []

    def on_epoch_end(self, epoch, logs=None):
        self.weights.append(self.model.get_weights())
        if self.rows is not None:
            self.metrics.append(self.model.evaluate(*self.rows, verbose=0))


# Learning


# Smaller steps at the end make training converge in any order of updates, which are summed over both workers.
SETTLING = keras.optimizers.schedules.ExponentialDecay(0.003, 3 * 44, 0.6)


@pytest.mark.parametrize(  # each pair of values occurs
    ("frequency", "mode", "transport"),
    [
        (10, "asynchronous", "socket"),
        long(10, "hogwild", "http"),
        long("epoch", "asynchronous", "http"),
        long("epoch", "hogwild", "socket"),
        long("batch", "asynchronous", "http"),
        long("batch", "hogwild", "socket"),
    ],
)
def test_training_learns_digits(sc, digits, frequency, mode, transport):
    x, y, x_test, y_test = digits
    epochs = {"epoch": 18, 10: 12, "batch": 8}[frequency]
    model = digit_model(optimizer=keras.optimizers.Adam(0.002 if frequency == "batch" else SETTLING))
    spark_model = distributed(model, mode, frequency, transport=transport)
    history = spark_model.fit(to_simple_rdd(sc, x, y), epochs=epochs, verbose=0)
    assert spark_model.evaluate(x_test, y_test)[1] >= 0.95
    assert history.epoch == list(range(epochs))
    stats = spark_model.parameter_server_stats
    assert stats.transport == transport
    assert stats.steps == {0: epochs * 44, 1: epochs * 44}  # 700 rows per worker
    assert stats.pushes == 2 * epochs * {"epoch": 1, 10: 5, "batch": 44}[frequency]
    assert sum(stats.staleness.values()) == stats.pushes
    assert (stats.duplicates, stats.rejected_requests) == (0, {})
    assert int(spark_model.model.optimizer.iterations) == epochs * 44


SGD = keras.optimizers.SGD


@pytest.mark.soak  # tests/training has it without Spark
@pytest.mark.parametrize(
    ("rule", "optimizer", "frequency"),
    [
        ("agn", lambda: keras.optimizers.Adam(0.01), 4),
        ("dynsgd", lambda: keras.optimizers.Adam(0.003), 4),
        ("easgd", lambda: SGD(0.1), 4),
        ("eamsgd", lambda: SGD(0.05, momentum=0.9, nesterov=True), 4),
        ("dcasgd", lambda: SGD(0.1), 4),
    ],
)
def test_every_rule_learns(sc, digits, rule, optimizer, frequency):
    x, y, x_test, y_test = digits
    spark_model = distributed(digit_model(optimizer=optimizer()), frequency=frequency, rule=rule)
    spark_model.fit(x, y, epochs=12, verbose=0)
    assert spark_model.evaluate(x_test, y_test)[1] >= 0.92


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
    options = {"max_staleness": 3, "encrypt": True, "lease_seconds": 20.0, "timeout": 40.0}
    spark_model = distributed(digit_model(), "hogwild", 5, rule=Half(0.7), options=options)
    losses = spark_model.fit(x, y, epochs=3, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    spark_model.save(tmp_path / "half.keras")
    loaded = load_spark_model(tmp_path / "half.keras", custom_objects={"Half": Half})
    assert (loaded.mode, loaded.frequency, loaded.parameter_server_mode) == ("hogwild", 5, "socket")
    assert loaded.rule == Half(0.7)
    assert loaded.server_options == ParameterServerOptions(**options)
    assert loaded._rule_state["applies"].tolist() == [2 * 3 * 2]
    assert loaded.fit(x, y, epochs=2, verbose=0).history["loss"][0] < losses[0]
    assert loaded._rule_state["applies"].tolist() == [2 * 5 * 2]
    assert int(loaded.model.optimizer.iterations) == 5 * 10


# Steps, epochs and staleness


@pytest.mark.soak  # tests/training has it without Spark
@pytest.mark.parametrize(("transport", "encrypt", "frequency"), [("http", True, "epoch"), ("socket", False, 7)])
def test_one_worker_equals_plain_keras(sc, digits, transport, encrypt, frequency):
    x, y, *_ = digits
    weights = {0: 3.0, 7: 0.25}
    models = [digit_model(optimizer=SGD(0.05, momentum=0.9)) for _ in range(2)]
    arguments = {"epochs": 3, "batch_size": 32, "shuffle": False, "class_weight": weights, "verbose": 0}
    expected = models[0].fit(x[:330], y[:330], **arguments)
    spark_model = distributed(models[1], "asynchronous", frequency, 1, transport=transport, options={"encrypt": encrypt})
    history = spark_model.fit(to_simple_rdd(sc, x[:330], y[:330]), **arguments)
    for mine, other in zip(models[1].get_weights(), models[0].get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(history.history["loss"], expected.history["loss"], rtol=1e-4)
    np.testing.assert_allclose(history.history["accuracy"], expected.history["accuracy"], rtol=1e-6)
    assert int(models[1].optimizer.iterations) == 33
    assert spark_model.parameter_server_stats.max_staleness == 0


@pytest.mark.parametrize("bound", [None, 0, pytest.param(2, marks=pytest.mark.soak)])
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

    spark_model = distributed(digit_model(), frequency=3, options={"max_staleness": bound, "lease_seconds": 120.0})
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


@pytest.mark.parametrize(
    "sizes", [(0, 40), *(pytest.param(sizes, marks=pytest.mark.soak) for sizes in [(5, 60), (1, 1)])], ids=str
)
def test_max_staleness_0_with_few_or_no_rows(sc, digits, sizes):
    x, y, *_ = digits
    spark_model = distributed(digit_model(), frequency=1, options={"max_staleness": 0}, num_workers=None)
    history = spark_model.fit(parts_of(sc, x, y, *sizes), epochs=2, verbose=0)
    assert np.isfinite(history.history["loss"]).all()
    steps = {worker: 2 * -(-size // 16) for worker, size in enumerate(sizes) if size}
    assert spark_model.parameter_server_stats.steps == steps
    assert sorted({report["worker"] for report in spark_model.training_histories}) == sorted(steps)


@pytest.mark.parametrize(
    ("num_workers", "expected"),
    [(None, 2), (5, 2), *(pytest.param(*pair, marks=pytest.mark.soak) for pair in [(1, 1), (12, 2)])],
)
def test_partitions_are_coalesced_to_the_number_of_slots(sc, num_workers, expected):
    """All rows are used once per epoch: with zero weights and a learning rate of 0, the loss is the mean of y * y."""
    y = np.arange(120, dtype=np.float32) ** 1.5
    rdd = sc.parallelize([(np.zeros(3, np.float32), value) for value in y], 12)
    spark_model = distributed(regression(optimizer=SGD(0.0)), frequency=2, num_workers=num_workers, batch_size=7)
    few = contextlib.nullcontext()
    if num_workers is not None and num_workers > 2:
        few = pytest.warns(UserWarning, match=f"num_workers={num_workers}, but Spark has 2 free slots.*2 will train")
    with few:
        history = spark_model.fit(rdd, epochs=2, shuffle=False, verbose=0)
    np.testing.assert_allclose(history.history["loss"], [np.mean(y.astype(float) ** 2)] * 2, rtol=1e-4)
    assert sorted(report["worker"] for report in spark_model.training_histories) == sorted(list(range(expected)) * 2)
    assert sum(report["rows"] for report in spark_model.training_histories) == 2 * 120
    assert len(spark_model.parameter_server_stats.steps) == expected


@pytest.mark.soak
def test_steps_per_epoch_and_an_initial_epoch(sc, digits):
    x, y, *_ = digits
    spark_model = distributed(digit_model(), frequency=2)
    history = spark_model.fit(x[:400], y[:400], initial_epoch=3, epochs=5, steps_per_epoch=3, verbose=0)
    assert history.epoch == [3, 4]
    assert spark_model.parameter_server_stats.steps == {0: 6, 1: 6}
    assert spark_model.parameter_server_stats.pushes == 2 * 2 * 2
    assert [(report["epoch"], report["worker"], report["rows"]) for report in spark_model.training_histories] == [
        (epoch, worker, 48) for epoch in (3, 4) for worker in (0, 1)
    ]


def test_further_fits_continue_training_in_any_mode(sc, digits):
    x, y, x_test, y_test = digits
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, decay_steps=10, decay_rate=0.9)
    model = digit_model(optimizer=SGD(schedule, momentum=0.9))
    rdd = to_simple_rdd(sc, x[:640], y[:640])
    losses = []
    turns = [("asynchronous", "http"), ("synchronous", "http"), ("hogwild", "socket")]
    for turn, (mode, transport) in enumerate(turns, 1):
        spark_model = distributed(model, mode, "epoch", transport=transport, batch_size=32, seed=turn)
        losses.append(spark_model.fit(rdd, epochs=1, verbose=0).history["loss"][0])
        assert int(model.optimizer.iterations) == 10 * turn
        np.testing.assert_allclose(float(model.optimizer.learning_rate), 0.1 * 0.9**turn, rtol=1e-5)
        assert (spark_model.parameter_server_stats is None) == (mode == "synchronous")
        np.testing.assert_allclose(
            spark_model.evaluate(x_test, y_test), model.evaluate(x_test, y_test, verbose=0), rtol=1e-4
        )
        np.testing.assert_allclose(spark_model.predict(x_test[:50]), model(x_test[:50]), rtol=1e-3, atol=1e-5)
    assert losses == sorted(losses, reverse=True)


# Metrics and progress


def test_metrics_cover_all_rows_and_validation_uses_the_weights_of_its_epoch(sc, digits):
    x, y, *_ = digits
    rdd = parts_of(sc, x, y, 150, 50)
    held_out = np.r_[120:150, 190:200]
    spark_model = distributed(digit_model(), frequency=3)
    noted = Weights((x[held_out], y[held_out]))
    history = spark_model.fit(rdd, epochs=4, validation_split=0.2, validation_freq=2, callbacks=[noted], verbose=0)
    assert {name: len(values) for name, values in history.history.items()} == {
        "loss": 4, "accuracy": 4, "val_loss": 2, "val_accuracy": 2,
    }  # fmt: skip
    for epoch in range(4):
        reports = [report for report in spark_model.training_histories if report["epoch"] == epoch]
        assert [(report["worker"], report["rows"]) for report in reports] == [(0, 120), (1, 40)]
        for name in ("loss", "accuracy"):
            mean = np.average([report[name] for report in reports], weights=[120, 40])
            np.testing.assert_allclose(history.history[name][epoch], mean, rtol=1e-5)
    found = list(zip(history.history["val_loss"], history.history["val_accuracy"], strict=True))
    np.testing.assert_allclose(found, noted.metrics[1::2], rtol=1e-4)


@pytest.mark.parametrize("kind", ["rdd", pytest.param("arrays", marks=pytest.mark.soak)])
def test_validation_data(sc, digits, kind):
    x, y, x_test, y_test = digits
    held_out = (x_test, y_test) if kind == "arrays" else parts_of(sc, x_test, y_test, 100, 0, 97, 200)
    spark_model = distributed(digit_model(), transport="http")
    noted = Weights((x_test, y_test))
    history = spark_model.fit(x[:300], y[:300], epochs=3, validation_data=held_out, callbacks=[noted], verbose=0)
    found = list(zip(history.history["val_loss"], history.history["val_accuracy"], strict=True))
    np.testing.assert_allclose(found, noted.metrics, rtol=1e-4)


def test_progress_reports_updates(sc, digits, capsys):
    x, y, *_ = digits
    distributed(digit_model()).fit(x[:200], y[:200], epochs=2, verbose=2)
    output = capsys.readouterr().out
    assert "Epoch 2/2" in output
    assert "2 workers" in output
    assert "updates/s" in output
    assert "staleness" in output
    assert "loss: " in output


# Callbacks


@pytest.mark.soak  # tests/training has it without Spark
def test_callbacks_on_the_driver(sc, digits, tmp_path, notes):
    """Workers begin an epoch after the driver, so that they get a learning rate in that epoch or the next."""
    x, y, *_ = digits
    model = digit_model(optimizer=SGD(0.1))

    class Marks(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            (tmp_path / f"mark-{epoch}").touch()

    noted = Weights()
    callbacks = [
        keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=1e9),
        keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.keras"),
        keras.callbacks.CSVLogger(tmp_path / "log.csv"),
        noted,
        Marks(),
    ]
    worker_callbacks = [notes.callback(wait=str(tmp_path / "mark"))]
    spark_model = distributed(model, frequency=4)
    history = spark_model.fit(x[:400], y[:400], epochs=4, callbacks=callbacks, worker_callbacks=worker_callbacks, verbose=0)
    with (tmp_path / "log.csv").open() as file:
        logged = list(csv.DictReader(file))
    np.testing.assert_allclose([float(row["loss"]) for row in logged], history.history["loss"])
    assert len(noted.weights) == 4
    for epoch, weights in enumerate(noted.weights, 1):
        same(keras.saving.load_model(tmp_path / f"{epoch}.keras").get_weights(), weights)
    rates = [0.1, 0.1, 0.05, 0.025, 0.0125]  # the first epoch is the best yet
    np.testing.assert_allclose(history.history["learning_rate"], rates[:4], rtol=1e-5)
    np.testing.assert_allclose(float(model.optimizer.learning_rate), rates[4], rtol=1e-5)
    heard = notes.read()
    assert len(heard) == 2
    for lines in heard:
        assert [lines[0], lines[-1]] == ["begin", "end"]
        found = [line.split() for line in lines[1:-1]]
        assert [int(epoch) for epoch, _ in found] == [0, 1, 2, 3]
        for epoch, rate in enumerate(float(rate) for _, rate in found):
            assert rate in np.round(rates[max(0, epoch - 1) : epoch + 1], 6)


@pytest.mark.soak
def test_early_stopping_restores_the_best_weights(sc, digits):
    x, y, *_ = digits
    model = digit_model(optimizer=keras.optimizers.Adam(0.3))
    noted = Weights()
    stop = keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True)
    history = distributed(model, frequency=3).fit(
        x[:400], y[:400], epochs=200, validation_split=0.2, callbacks=[noted, stop], verbose=0
    )
    assert 3 <= len(history.epoch) < 200
    best = int(np.argmin(history.history["val_loss"]))
    assert len(history.epoch) == best + 3
    same(model.get_weights(), noted.weights[best])


@pytest.mark.soak  # tests/training has it without Spark
def test_a_worker_stopped_by_a_callback_does_not_stop_the_others(sc, digits, notes):
    x, y, *_ = digits
    spark_model = distributed(digit_model(), frequency=3)
    with pytest.warns(UserWarning, match="validation omits the rows of 1 worker that ended"):
        history = spark_model.fit(
            x[:200], y[:200], epochs=5, validation_split=0.2, worker_callbacks=[notes.callback(stop_at=1)], verbose=0
        )
    heard = sorted(([line.split()[0] for line in lines] for lines in notes.read()), key=len)
    assert heard == [["begin", "0", "1", "end"], ["begin", "0", "1", "2", "3", "4", "end"]]
    assert history.epoch == [0, 1, 2, 3, 4]
    gone = {report["worker"] for report in spark_model.training_histories if report["epoch"] == 2} ^ {0, 1}
    assert len(gone) == 1
    assert spark_model.parameter_server_stats.steps == {worker: 10 if worker in gone else 25 for worker in (0, 1)}
    assert len(history.history["val_loss"]) == 5


# Models


@pytest.mark.soak
def test_statistics_of_batch_normalization_are_averaged(sc, digits):
    x, y, *_ = digits

    def normalized():
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [
                keras.Input((64,)),
                keras.layers.BatchNormalization(momentum=0.8, name="normalized"),
                keras.layers.Dropout(0.1),
                keras.layers.Dense(10, activation="softmax"),
            ]
        )
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    plain, model = normalized(), normalized()
    plain.fit(x, y, epochs=3, batch_size=16, verbose=0)
    spark_model = distributed(model, frequency=5)
    history = spark_model.fit(x, y, epochs=3, verbose=0)
    for mine, other in zip(*(each.get_layer("normalized").non_trainable_weights for each in (model, plain)), strict=True):
        np.testing.assert_allclose(mine.numpy(), other.numpy(), atol=0.15)  # the batches differ
        np.testing.assert_allclose(mine.numpy().mean(), other.numpy().mean(), rtol=0.15)
    assert history.history["accuracy"][-1] > 0.6


@keras.saving.register_keras_serializable(package="tests_of_asynchronous")
class Counting(keras.layers.Layer):
    """Counts training batches in an integer weight."""

    def build(self, shape):
        self.calls = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="calls")

    def call(self, x, training=False):
        if training:
            self.calls.assign(self.calls + 1)
        return x


@pytest.mark.soak  # tests/training has the counter without Spark
def test_several_inputs_and_outputs_and_a_counter(sc, digits):
    x, y, *_ = digits
    keras.utils.set_random_seed(0)
    left, right = keras.Input((32,), name="left"), keras.Input((32,), name="right")
    counting = Counting(name="counting")
    joined = counting(keras.layers.Dropout(0.1)(keras.layers.Concatenate()([left, right])))
    outputs = {
        "digit": keras.layers.Dense(10, activation="softmax", name="digit")(joined),
        "odd": keras.layers.Dense(1, activation="sigmoid", name="odd")(joined),
    }
    model = keras.Model({"left": left, "right": right}, outputs)
    model.compile(
        "adam", {"digit": "sparse_categorical_crossentropy", "odd": "binary_crossentropy"}, metrics={"digit": ["accuracy"]}
    )
    inputs = {"left": x[:320, :32], "right": x[:320, 32:]}
    labels = {"digit": y[:320], "odd": y[:320] % 2}
    spark_model = distributed(model, frequency=4)
    history = spark_model.fit(inputs, labels, epochs=6, validation_split=0.1, verbose=0)
    assert {"loss", "digit_loss", "odd_loss", "digit_accuracy", "val_loss", "val_digit_accuracy"} <= set(history.history)
    assert history.history["loss"][-1] < history.history["loss"][0]
    assert int(counting.calls) == 6 * 9  # 144 rows per worker; the largest count, not the sum


@pytest.mark.soak
def test_sample_weights_are_as_in_keras(sc, digits):
    x, y, *_ = digits
    weight = np.linspace(0, 2, 320).astype(np.float32)
    models = [digit_model(optimizer=SGD(0.05), weighted_metrics=["accuracy"]) for _ in range(2)]
    expected = models[0].fit(x[:320], y[:320], sample_weight=weight, batch_size=16, shuffle=False, verbose=0)
    rows = sc.parallelize(list(zip(x[:320], y[:320], weight, strict=True)), 1)
    history = distributed(models[1], num_workers=None).fit(rows, shuffle=False, verbose=0)
    for name in ("loss", "weighted_accuracy"):
        np.testing.assert_allclose(history.history[name], expected.history[name], rtol=1e-4)
    np.testing.assert_allclose(models[1].get_weights()[0], models[0].get_weights()[0], rtol=1e-3, atol=1e-5)


# Failures


def leftovers(sc):
    """Everything that a fit might leave on the driver and on the workers."""
    home = Path(sc.parallelize([0], 1).map(lambda _: os.environ["SPARK_LOCAL_DIRS"].split(",")[0]).first())
    temporary = Path(sc._temp_dir)
    me = psutil.Process()
    return {
        "threads": sorted(t.name for t in threading.enumerate() if t.name.startswith("sparkkeras")),
        "ports": sorted(c.laddr.port for c in me.net_connections("inet") if c.status == psutil.CONN_LISTEN),
        "children": sorted(child.pid for child in me.children()),  # Spark's JVM; the workers are its children
        "files": sorted(str(path) for folder in (home, temporary) for path in folder.glob("sparkkeras-*")),
        "rdds": sc._jsc.getPersistentRDDs().size(),
        "jobs": list(sc.statusTracker().getActiveJobsIds()),
        "tags": sorted(sc.getJobTags()),
    }


@pytest.fixture
def nothing_left(sc):
    """Checks that nothing remains after a test, whether it succeeds or fails."""
    SparkModel(classifier()).predict(np.zeros((1, 64), np.float32))  # starts Spark's accumulator server and other threads
    before = leftovers(sc) | {"jobs": [], "threads": []}
    yield
    deadline = time.monotonic() + 60
    while (after := leftovers(sc)) != before and time.monotonic() < deadline:
        time.sleep(0.1)  # a cancelled job needs some time to end
    assert after == before


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_nothing_remains_and_the_next_fit_works(sc, digits, transport, nothing_left):
    x, y, *_ = digits
    x, y = x[:200], y[:200]

    class Fail(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1:
                raise RuntimeError("kaboom in my callback")

    def explode(x, y):
        if np.asarray(x).any():
            raise RuntimeError("kaboom in my transform")
        return x, y

    spark_model = distributed(digit_model(), frequency=2, transport=transport)
    spark_model.fit(to_simple_rdd(sc, x, y), epochs=2, validation_split=0.1, verbose=0)
    before = spark_model.model.get_weights()
    with pytest.raises(WorkerError, match="kaboom in my transform") as raised:
        spark_model.fit(sc.parallelize(list(zip(x, y, strict=True)), 2), transform=explode, verbose=0)
    assert "in explode" in raised.value.worker_traceback
    same(spark_model.model.get_weights(), before)
    with pytest.raises(WorkerError, match="kaboom in my callback"):
        spark_model.fit(sc.parallelize(list(zip(x, y, strict=True)), 2), epochs=3, worker_callbacks=[Fail()], verbose=0)
    assert np.isfinite(spark_model.fit(x, y, verbose=0, validation_data=(x, y)).history["val_loss"]).all()


def test_an_update_that_is_not_finite_stops_training(sc, nothing_left):
    """One worker's weights overflow; the model keeps its weights, and the next fit works."""
    x = np.random.default_rng(0).random((64, 3)).astype(np.float32)
    y = x.sum(1)
    bad = np.where(np.arange(64)[:, None] >= 40, np.float32(1e18), 1) * x
    model = regression(optimizer=SGD(0.05))
    before = model.get_weights()
    spark_model = distributed(model, frequency=2, batch_size=4, num_workers=None)
    with pytest.raises(DivergenceError, match="diverged in epoch 1 on worker 1: its update is not finite"):
        spark_model.fit(parts_of(sc, bad, y, 40, 24), epochs=3, shuffle=False, verbose=0)
    same(model.get_weights(), before)
    history = spark_model.fit(parts_of(sc, x, y, 40, 24), epochs=3, verbose=0)
    assert history.history["loss"][-1] < history.history["loss"][0]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_interrupt_ends_the_job_and_keeps_the_last_epoch(sc, digits, tmp_path, transport, nothing_left):
    """Ctrl-C during the second epoch."""
    x, y, *_ = digits
    mark = tmp_path / "mark"

    class Slow(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                while not mark.exists():
                    time.sleep(0.05)
                time.sleep(60)

    class Mark(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                mark.touch()

    def interrupt():
        while not mark.exists():
            time.sleep(0.05)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

    spark_model, kept = distributed(digit_model(), frequency=3, transport=transport), Weights()
    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        spark_model.fit(x[:200], y[:200], epochs=3, verbose=0, callbacks=[kept, Mark()], worker_callbacks=[Slow()])
    thread.join()
    assert len(kept.weights) == 1
    same(spark_model.model.get_weights(), kept.weights[0])
    assert spark_model.parameter_server_stats.pushes >= 2
    spark_model.fit(x[:200], y[:200], verbose=0)


@pytest.mark.soak
def test_an_error_in_a_callback_stops_training(sc, digits, nothing_left):
    x, y, *_ = digits

    class Fail(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise RuntimeError("kaboom on the driver")

    with pytest.raises(RuntimeError, match="kaboom on the driver"):
        distributed(digit_model()).fit(x, y, epochs=500, callbacks=[Fail()], verbose=0)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_port_in_use_is_reported(sc, digits, transport, nothing_left):
    x, y, *_ = digits
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"cannot listen on port {port} of 127.0.0.1.*Pass another port="):
            distributed(digit_model(), transport=transport, port=port).fit(x[:32], y[:32], verbose=0)


# Separate executors


@pytest.mark.cluster
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_training_on_separate_executors(sc, digits, transport):
    x, y, x_test, y_test = digits
    held_out = parts_of(sc, x_test, y_test, 100, 0, 297)
    model = digit_model(optimizer=keras.optimizers.Adam(SETTLING))
    options = {"warmup_timeout": 240.0}
    spark_model = distributed(model, "asynchronous", 10, num_workers=None, transport=transport, options=options)
    noted = Weights((x_test, y_test))
    history = spark_model.fit(
        parts_of(sc, x, y, 700, 0, 700), epochs=8, validation_data=held_out, callbacks=[noted], verbose=0
    )
    assert history.history["val_accuracy"][-1] > 0.92
    found = list(zip(history.history["val_loss"], history.history["val_accuracy"], strict=True))
    np.testing.assert_allclose(found, noted.metrics, rtol=1e-4)
    assert sum(spark_model.parameter_server_stats.steps.values()) == 8 * 88
    assert threading.active_count() < 50


@pytest.mark.cluster
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_workers_that_cannot_reach_the_driver_are_reported_before_training(sc, digits, transport, notes):
    x, y, *_ = digits
    options = {"host": "192.0.2.1", "bind": "127.0.0.1", "timeout": 3}
    spark_model = distributed(digit_model(), transport=transport, options=options)
    before = spark_model.model.get_weights()
    words = r"workers cannot connect to the driver at .*192\.0\.2\.1.*Configure an address of the driver"
    with pytest.raises(DriverConnectionError, match=words):
        spark_model.fit(x[:64], y[:64], verbose=0, worker_callbacks=[notes.callback()])
    assert notes.read() == []
    same(spark_model.model.get_weights(), before)


# Calls from callbacks


def test_calls_from_callbacks_that_would_deadlock_are_rejected(sc):
    """Workers that are several epochs ahead wait for the driver, and occupy their slots meanwhile."""
    x = np.random.default_rng(0).random((32, 3)).astype(np.float32)
    y = x.sum(1)
    other, ensemble = SparkModel(regression()), EnsembleModel([regression(), regression()], voting="average")
    calls = [
        lambda: spark_model.predict(x),
        lambda: spark_model.evaluate(sc.parallelize(list(zip(x, y, strict=True)), 2)),
        lambda: ensemble.predict(sc.parallelize(list(x), 2)),
        lambda: other.fit(x, y, verbose=0),
        lambda: distributed(regression(), num_workers=None).fit(x, y, verbose=0),
    ]
    rejected, found = [], []

    def call_everything(epoch, logs):
        if epoch == 0:
            for call in calls:
                with pytest.raises(ConfigurationError, match=r"self\.model\.predict.*num_workers=1") as raised:
                    call()
                rejected.append(raised)

    def predict(epoch, logs):
        predicted = spark_model.predict(sc.parallelize(list(x), 2))
        np.testing.assert_allclose(predicted, spark_model.model(x), rtol=1e-3, atol=1e-5)
        found.append(distributed(regression(), num_workers=1).fit(x, y, verbose=0))

    spark_model = distributed(regression(), batch_size=8)
    spark_model.fit(x, y, epochs=8, verbose=0, callbacks=keras.callbacks.LambdaCallback(on_epoch_end=call_everything))
    assert len(rejected) == len(calls)
    spark_model.num_workers = 1
    spark_model.fit(x, y, epochs=1, verbose=0, callbacks=keras.callbacks.LambdaCallback(on_epoch_end=predict))
    assert found
