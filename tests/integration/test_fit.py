"""Synchronous training on Spark: learning, rows, callbacks, and cases in which a worker could silently differ from Keras."""

import csv
import threading

import keras
import numpy as np
import pytest

from sparkkeras import ConfigurationError, DataError, DivergenceError, ModelError, SparkModel, to_simple_rdd
from sparkkeras.parameter.rules import Average
from sparkkeras.spark import cluster, worker_checks
from sparkkeras.worker.device import worker_environment
from tests.models import classifier, regression


@pytest.fixture
def arrays():
    """Features and labels for a linear model."""
    x = np.random.default_rng(0).random((96, 3)).astype(np.float32)
    return x, x.sum(1, keepdims=True)


# Learning


def test_training_learns_digits_with_lines_of_progress_and_a_further_fit_continues(sc, digits, capsys):
    x, y, x_test, y_test = digits
    model = classifier(optimizer=keras.optimizers.Adam(0.005))
    spark_model = SparkModel(model, num_workers=2, frequency=10, seed=1, batch_size=16)
    first = spark_model.fit(to_simple_rdd(sc, x, y), epochs=6)
    output = capsys.readouterr().out
    for words in ("Epoch 6/6", "2 workers", "rows/s", "loss: "):
        assert words in output
    assert spark_model.evaluate(x_test, y_test)[1] >= 0.95
    assert first.epoch == list(range(6))
    capsys.readouterr()
    second = spark_model.fit(x, y, initial_epoch=6, epochs=8, verbose=0)
    assert capsys.readouterr().out == ""
    assert second.epoch == [6, 7]
    assert second.history["loss"][0] < first.history["loss"][0] / 2
    assert int(model.optimizer.iterations) == 8 * 44  # 700 rows per worker


@pytest.mark.core
def test_one_worker_equals_plain_keras(sc, digits):
    x, y, *_ = digits
    weight = np.linspace(0, 2, len(x)).astype(np.float32)
    arguments = {"epochs": 2, "batch_size": 48, "shuffle": False, "verbose": 0}
    plain, model = (classifier(weighted_metrics=["accuracy"]) for _ in range(2))
    expected = plain.fit(x, y, sample_weight=weight, **arguments).history
    rows = to_simple_rdd(sc, x, y, weight, num_slices=1)
    history = SparkModel(model).fit(rows, **arguments).history
    for mine, other in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5)
    assert history == {name: pytest.approx(values, rel=1e-4) for name, values in expected.items()}
    assert int(model.optimizer.iterations) == int(plain.optimizer.iterations)


# Rows


def test_num_workers_distributes_rows_evenly(sc, digits):
    x, y, *_ = digits
    rows = sc.parallelize(list(zip(x[:103], y[:103], strict=True)), 5)
    for workers in (2, 7):
        spark_model = SparkModel(classifier(), num_workers=workers)
        spark_model.fit(rows, verbose=0)
        counts = [report["rows"] for report in spark_model.training_histories]
        assert sum(counts) == 103
        assert len(counts) == workers
        assert max(counts) - min(counts) <= 2


def test_validation_data_and_frequency(sc, digits):
    x, y, x_test, y_test = digits
    spark_model = SparkModel(classifier(), num_workers=2)
    test_rows = sc.parallelize(list(zip(x_test, y_test, strict=True)), 3)
    for held_out in (test_rows, (x_test, y_test, np.ones(len(y_test), np.float32))):
        history = spark_model.fit(x[:400], y[:400], epochs=2, validation_data=held_out, validation_freq=2, verbose=0).history
        assert [len(history[name]) for name in ("loss", "val_loss")] == [2, 1]
        expected = spark_model.model.evaluate(x_test, y_test, verbose=0)
        np.testing.assert_allclose([history["val_loss"][0], history["val_accuracy"][0]], expected, rtol=1e-5)


def test_a_transform_runs_on_batches_in_fit_evaluate_and_predict(sc, digits):
    flat, y = digits[0][:300], digits[1][:300]
    images = (flat * 16).reshape(-1, 8, 8).astype(np.uint8)

    def flatten(x, y):
        assert len(x) <= 50
        assert x.any()  # not so on the driver, which calls it to know the shape of its result
        return x.reshape(len(x), 64) / 16.0, y

    def fitted(x, **arguments):
        spark_model = SparkModel(classifier(), num_workers=2, batch_size=50, seed=1)
        return spark_model, spark_model.fit(to_simple_rdd(sc, x, y), validation_split=0.1, verbose=0, **arguments).history

    spark_model, history = fitted(images, transform=flatten)
    expected = fitted(flat)[1]
    assert history == {name: pytest.approx(values, rel=1e-5) for name, values in expected.items()}
    predicted = spark_model.predict(images, transform=flatten)
    np.testing.assert_allclose(predicted, spark_model.model.predict(flat, verbose=0), rtol=1e-4, atol=1e-5)
    found = spark_model.evaluate(to_simple_rdd(sc, images, y), transform=flatten)
    np.testing.assert_allclose(found, spark_model.model.evaluate(flat, y, verbose=0), rtol=1e-4)


def test_many_partitions_raise_a_warning(sc, arrays):
    with pytest.warns(UserWarning, match="9 partitions"):
        SparkModel(regression()).fit(sc.parallelize(list(zip(*arrays, strict=True)), 9), verbose=0)


def test_dropout_masks_differ_between_workers_epochs_and_fits(sc):
    """With a learning rate of 0 only the masks can change the loss."""
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dropout(0.5, seed=1), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.0), "mse")
    x, y = np.ones((64, 8), np.float32), np.ones((64, 1), np.float32)
    spark_model = SparkModel(model, num_workers=2)
    for epochs in (2, 1):
        spark_model.fit(x, y, epochs=epochs, batch_size=4, verbose=0)
    assert len({report["loss"] for report in spark_model.training_histories}) == 6


# Callbacks


def test_callbacks_of_keras_run_on_the_driver(sc, digits, tmp_path):
    x, y, *_ = digits
    model, weights, tested = classifier(), [], []
    note = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: weights.append(model.get_weights()))

    class Tested(keras.callbacks.Callback):
        def on_test_begin(self, logs=None):
            tested.append("begin")

        def on_test_end(self, logs=None):
            tested.append(sorted(logs))

    # The loss decreases, so that its largest value is that of the first epoch.
    stop = keras.callbacks.EarlyStopping("val_loss", mode="max", patience=2, restore_best_weights=True)
    checkpoint = keras.callbacks.ModelCheckpoint(tmp_path / "best.keras", monitor="val_loss", save_best_only=True)
    files = [keras.callbacks.CSVLogger(tmp_path / "log.csv"), keras.callbacks.TensorBoard(tmp_path / "board"), checkpoint]
    spark_model = SparkModel(model, num_workers=2, seed=1)
    arguments = {"epochs": 9, "validation_split": 0.2, "verbose": 0}
    history = spark_model.fit(x[:400], y[:400], callbacks=[note, Tested(), *files, stop], **arguments)
    assert history.epoch == [0, 1, 2]
    np.testing.assert_equal(model.get_weights(), weights[0])
    loaded = keras.saving.load_model(tmp_path / "best.keras")
    np.testing.assert_equal(loaded.get_weights(), weights[2])
    assert int(loaded.optimizer.iterations) == int(model.optimizer.iterations)
    with (tmp_path / "log.csv").open() as file:
        logged = [float(row["val_loss"]) for row in csv.DictReader(file)]
    np.testing.assert_allclose(logged, history.history["val_loss"])
    for kind in ("train", "validation"):
        assert list((tmp_path / "board" / kind).glob("events*"))
    assert tested == ["begin", ["accuracy", "loss"]] * 3


def test_callbacks_that_cannot_work_on_the_driver_are_reported(arrays):
    class Batches(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise AssertionError("never called")

    begin = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: None)
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.5)
    scheduled = SparkModel(regression(optimizer=keras.optimizers.SGD(schedule)))
    with (
        pytest.warns(UserWarning, match="Batches.on_train_batch_end is never called"),
        pytest.warns(UserWarning, match="LambdaCallback.on_train_batch_begin"),
        pytest.raises(ConfigurationError, match="a learning rate schedule"),
    ):
        scheduled.fit(*arrays, callbacks=[Batches(), begin, keras.callbacks.ReduceLROnPlateau("loss")])


def test_a_model_in_training_can_predict_and_evaluate_but_not_be_fitted(sc, arrays):
    x, y = arrays
    model = regression(metrics=["mae"])
    spark_model = SparkModel(model, num_workers=2, seed=1)
    seen = []

    class Callback(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            with pytest.raises(ModelError, match="from a callback"):
                spark_model.fit(x, y, verbose=0)
            seen.append((logs["val_mae"], spark_model.evaluate(x, y, return_dict=True)["mae"]))
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()

    def elsewhere():
        with pytest.raises(ModelError, match="another thread is training"):
            SparkModel(model).fit(x, y, verbose=0)
        seen.append((model.predict(x, verbose=0), spark_model.predict(x)))

    history = spark_model.fit(x, y, validation_data=(x, y), verbose=0, callbacks=Callback())
    assert len(seen) == 2
    for mine, found in seen:
        np.testing.assert_allclose(mine, found, rtol=1e-5)
    assert list(history.history) == ["loss", "mae", "val_loss", "val_mae"]
    assert len(spark_model.fit(x, y, verbose=0).epoch) == 1


# What would silently differ from Keras


def test_integers_in_the_first_rows_do_not_round_the_rest(sc):
    rows = [[0, 1, 2]] * 20 + [[0.5, 1.7, 2.9]] * 3
    model = regression()
    spark_model = SparkModel(model)
    expected = model.predict(np.array(rows, np.float32), verbose=0)
    np.testing.assert_allclose(spark_model.predict(sc.parallelize(rows, 1)), expected, rtol=1e-5)
    mixed = sc.parallelize([(row, 1 if i < 20 else 0.5) for i, row in enumerate(rows)], 1)
    with pytest.raises(DataError, match="y changes from shape.*Convert it"):
        spark_model.evaluate(mixed)


def test_a_layer_frozen_after_compile_raises_an_error(sc, arrays):
    """After the next compile, the rule restarts with the weights that are trainable now."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    spark_model = SparkModel(model, num_workers=2, rule="slowmo")
    spark_model.fit(*arrays, verbose=0)
    model.layers[0].trainable = False
    with pytest.raises(ModelError, match="frozen, unfrozen or added"):
        spark_model.fit(*arrays, verbose=0)
    frozen = model.layers[0].get_weights()[0]
    model.compile("adam", "mse")
    spark_model.fit(*arrays, verbose=0)
    np.testing.assert_array_equal(model.layers[0].get_weights()[0], frozen)


SCALE = 1.0


def scaled(y_true, y_pred):
    return SCALE * keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)


def test_a_changed_global_of_custom_code_is_sent_again(sc, arrays, monkeypatch):
    model = regression(loss=scaled)
    first = SparkModel(model).evaluate(*arrays)
    monkeypatch.setitem(globals(), "SCALE", 100.0)
    np.testing.assert_allclose(SparkModel(model).evaluate(*arrays), 100 * first, rtol=1e-4)


def test_recompiling_with_fewer_metrics(sc, arrays):
    model = regression(metrics=["mse"])
    spark_model = SparkModel(model, num_workers=2)
    spark_model.fit(*arrays, verbose=0)
    model.compile("sgd", "mae")
    history = spark_model.fit(*arrays, validation_split=0.2, verbose=0)
    assert set(history.history) == {"loss", "val_loss"}
    predicted = model.predict(arrays[0], verbose=0)
    np.testing.assert_allclose(spark_model.evaluate(*arrays), np.abs(predicted - arrays[1]).mean(), rtol=1e-5)


def test_labels_of_another_rank(sc, arrays):
    x, y = arrays
    for labels in (y, y[:, 0], y):
        history = SparkModel(regression(), num_workers=2, seed=1).fit(x, labels, verbose=0)
        assert np.isfinite(history.history["loss"][0])


class Poison(Average):
    """A rule that makes the weights invalid."""

    def apply(self, center, state, update, staleness):
        center[...] = np.nan


def test_an_update_rule_whose_result_is_not_finite_raises_an_error(sc, arrays):
    model = regression()
    before = model.get_weights()
    with pytest.raises(DivergenceError, match="the rule Poison"):
        SparkModel(model, rule=Poison()).fit(*arrays, verbose=0)
    np.testing.assert_equal(model.get_weights(), before)


# The SparkContext


def test_making_a_model_probes_the_workers(sc, monkeypatch):
    monkeypatch.setattr(cluster, "_starting", set())
    monkeypatch.setattr(worker_checks, "equipped", {})
    SparkModel(regression())
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "sparkkeras-start"]
    thread.join(60)
    assert len(worker_checks.equipped[sc]) == 2


def test_concurrent_fits_restore_the_environment(sc, arrays, monkeypatch):
    # Other tests have already added the variables of workers; without them, training uses the same workers as before.
    added = worker_environment(1).keys() | {"SPARKKERAS_WORKER"}
    before = {name: value for name, value in sc.environment.items() if name not in added}
    monkeypatch.setattr(sc, "environment", dict(before))
    failures = []

    def fit():
        try:
            SparkModel(regression(), num_workers=1).fit(*arrays, epochs=2, verbose=0)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=fit) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert sc.environment == before
