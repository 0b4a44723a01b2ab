"""Keras callbacks on the driver, with metrics over the full dataset."""

import csv

import keras
import numpy as np
import pytest

from sparkkeras import SparkModel
from tests.models import classifier


@pytest.fixture
def fit(sc, digits):
    """Fit a small classifier on two workers; returns the SparkModel and the history."""

    def run(callbacks, model=None, **arguments):
        x, y, *_ = digits
        spark_model = SparkModel(model or classifier(), num_workers=2, seed=1)
        defaults = {"epochs": 4, "verbose": 0, "validation_split": 0.2}
        return spark_model, spark_model.fit(x[:400], y[:400], callbacks=callbacks, **(defaults | arguments))

    return run


def test_early_stopping_restores_the_best_weights(fit):
    seen = []
    note = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(model.get_weights()))
    model = classifier(optimizer=keras.optimizers.Adam(0.3))
    stop = keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True)
    _, history = fit([note, stop], model, epochs=30)
    assert 3 <= len(history.epoch) < 30
    best = int(np.argmin(history.history["val_loss"]))
    for mine, other in zip(model.get_weights(), seen[best], strict=True):
        np.testing.assert_array_equal(mine, other)


def test_model_checkpoint(fit, tmp_path):
    path = tmp_path / "best.keras"
    checkpoint = keras.callbacks.ModelCheckpoint(path, monitor="val_loss", save_best_only=True)
    spark_model, _ = fit(checkpoint)
    loaded = keras.saving.load_model(path)
    assert int(loaded.optimizer.iterations) == int(spark_model.model.optimizer.iterations)
    np.testing.assert_allclose(loaded.get_weights()[0], spark_model.model.get_weights()[0])


def test_learning_rates_reach_the_workers(fit):
    model = classifier(optimizer=keras.optimizers.SGD(0.1))
    weights = []
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.0 if epoch >= 2 else 0.1)
    note = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: weights.append(model.get_weights()[0]))
    _, history = fit([schedule, note], model)
    np.testing.assert_allclose(history.history["learning_rate"], [0.1, 0.1, 0, 0], rtol=1e-6)
    assert not np.array_equal(weights[0], weights[1])
    np.testing.assert_array_equal(weights[1], weights[2])
    np.testing.assert_array_equal(weights[2], weights[3])


@pytest.mark.soak  # another callback that sets learning rates
def test_reduce_on_plateau(fit):
    reduce = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=1e9)
    spark_model, _ = fit(reduce)
    assert float(spark_model.model.optimizer.learning_rate) < 0.001


def test_csv_logger_and_tensorboard(fit, tmp_path):
    log = tmp_path / "log.csv"
    _, history = fit([keras.callbacks.CSVLogger(log), keras.callbacks.TensorBoard(tmp_path / "board")])
    with log.open() as file:
        rows = list(csv.DictReader(file))
    np.testing.assert_allclose([float(row["val_loss"]) for row in rows], history.history["val_loss"])
    assert list((tmp_path / "board" / "train").glob("events*"))
    assert list((tmp_path / "board" / "validation").glob("events*"))


def test_backup_and_restore(fit, tmp_path):
    class Interrupt(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise RuntimeError("interrupted")

    model = classifier()
    with pytest.raises(RuntimeError, match="interrupted"):
        fit([keras.callbacks.BackupAndRestore(tmp_path), Interrupt()], model)
    _, history = fit(keras.callbacks.BackupAndRestore(tmp_path), classifier())
    assert history.epoch == [2, 3]


@pytest.mark.soak  # tests/training has it without Spark
def test_callbacks_are_called_once_per_epoch(fit):
    heard = []

    class Listen(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            heard.append("begin")

        def on_epoch_begin(self, epoch, logs=None):
            heard.append(epoch)
            assert self.model.optimizer is not None
            assert self.params["epochs"] == 2

        def on_epoch_end(self, epoch, logs=None):
            heard.append(sorted(logs))

        def on_train_end(self, logs=None):
            heard.append("end")

    names = ["accuracy", "loss", "val_accuracy", "val_loss"]
    fit(Listen(), epochs=2)
    assert heard == ["begin", 0, names, 1, names, "end"]


def test_batch_hooks_on_the_driver_raise_a_warning(fit):
    class Batches(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise AssertionError("never called")

    with pytest.warns(UserWarning, match=r"Batches.on_train_batch_end is never called.*worker_callbacks"):
        fit(Batches(), epochs=1)
    with pytest.warns(UserWarning, match="LambdaCallback.on_train_batch_begin"):
        fit(keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: None), epochs=1)


def test_a_callback_may_stop_training(fit):
    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = True

    _, history = fit(Stop())
    assert history.epoch == [0]
    assert fit([])[1].epoch == [0, 1, 2, 3]


def test_the_history_covers_the_full_dataset(fit):
    spark_model, history = fit([], epochs=2)
    for epoch in range(2):
        reports = [report for report in spark_model.training_histories if report["epoch"] == epoch]
        assert [report["worker"] for report in reports] == [0, 1]
        rows = [report["rows"] for report in reports]
        mean = np.average([report["loss"] for report in reports], weights=rows)
        np.testing.assert_allclose(history.history["loss"][epoch], mean, rtol=1e-5)
