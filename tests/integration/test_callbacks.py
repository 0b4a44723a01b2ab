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


def test_csv_logger_and_tensorboard(fit, tmp_path):
    log = tmp_path / "log.csv"
    _, history = fit([keras.callbacks.CSVLogger(log), keras.callbacks.TensorBoard(tmp_path / "board")])
    with log.open() as file:
        rows = list(csv.DictReader(file))
    np.testing.assert_allclose([float(row["val_loss"]) for row in rows], history.history["val_loss"])
    assert list((tmp_path / "board" / "train").glob("events*"))
    assert list((tmp_path / "board" / "validation").glob("events*"))


def test_batch_hooks_on_the_driver_raise_a_warning(fit):
    class Batches(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise AssertionError("never called")

    begin = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: None)
    with (
        pytest.warns(UserWarning, match=r"Batches.on_train_batch_end is never called.*worker_callbacks"),
        pytest.warns(UserWarning, match="LambdaCallback.on_train_batch_begin"),
    ):
        fit([Batches(), begin], epochs=1)
