"""Cases in which a worker could silently differ from plain Keras."""

import os
import threading
from pathlib import Path

import keras
import numpy as np
import pytest

from sparkkeras import ConfigurationError, DataError, DivergenceError, ModelError, SparkModel
from sparkkeras.worker.device import worker_environment
from tests.models import classifier, regression


@pytest.fixture
def arrays():
    generator = np.random.default_rng(0)
    x = generator.random((96, 3)).astype(np.float32)
    return x, x.sum(1, keepdims=True)


def test_integers_in_the_first_rows_do_not_round_the_rest(sc):
    rows = [[0, 1, 2]] * 20 + [[0.5, 1.7, 2.9]] * 3
    model = regression()
    spark_model = SparkModel(model)
    expected = model.predict(np.array(rows, np.float32), verbose=0)
    np.testing.assert_allclose(spark_model.predict(sc.parallelize(rows, 1)), expected, rtol=1e-5)
    labelled = sc.parallelize([(row, 1.0) for row in rows], 1)
    values = spark_model.evaluate(labelled)
    np.testing.assert_allclose(values, model.evaluate(np.array(rows, np.float32), np.ones(23), verbose=0), rtol=1e-5)
    mixed = sc.parallelize([(row, 1 if i < 20 else 0.5) for i, row in enumerate(rows)], 1)
    with pytest.raises(DataError, match="y changes from shape .., int64 to shape .., float32.*Convert it"):
        spark_model.evaluate(mixed)


def test_a_layer_frozen_after_compile_raises_an_error(sc, arrays):
    """After the next compile, the rule restarts with the weights that are trainable now."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    spark_model = SparkModel(model, num_workers=2, rule="slowmo")
    spark_model.fit(*arrays, verbose=0)
    model.layers[0].trainable = False
    with pytest.raises(ModelError, match=r"frozen, unfrozen or added.*compile"):
        spark_model.fit(*arrays, verbose=0)
    frozen = model.layers[0].get_weights()[0]
    model.compile("adam", "mse")
    spark_model.fit(*arrays, verbose=0)
    np.testing.assert_array_equal(model.layers[0].get_weights()[0], frozen)


SCALE = 1.0


def scaled(y_true, y_pred):
    return SCALE * keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)


def test_a_changed_global_of_custom_code_is_sent_again(sc, arrays):
    global SCALE
    model = regression(loss=scaled)
    first = SparkModel(model).evaluate(*arrays)
    SCALE = 100.0
    try:
        np.testing.assert_allclose(SparkModel(model).evaluate(*arrays), 100 * first, rtol=1e-4)
    finally:
        SCALE = 1.0


def test_worker_callbacks_are_called_for_every_batch(sc, arrays, tmp_path):
    class Note(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            (tmp_path / str(batch)).write_text(str(os.getpid()))

    spark_model = SparkModel(regression(), num_workers=1)
    spark_model.fit(*arrays, batch_size=8, verbose=0)
    spark_model.fit(*arrays, batch_size=8, verbose=0, worker_callbacks=Note())
    noted = {path.read_text() for path in tmp_path.iterdir()}
    assert len(list(tmp_path.iterdir())) == 12
    assert str(os.getpid()) not in noted


def test_a_callback_cannot_set_the_rate_of_a_schedule(sc, arrays):
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.5)
    scheduled = SparkModel(regression(optimizer=keras.optimizers.SGD(schedule)))
    with pytest.raises(ConfigurationError, match="the optimizer has a learning rate schedule"):
        scheduled.fit(*arrays, callbacks=keras.callbacks.ReduceLROnPlateau("loss"))


def test_invalid_results_of_update_rules_raise_an_error(sc, arrays):
    class Poison:
        modes = frozenset({"synchronous"})

        def init(self, center):
            return {}

        def apply(self, center, state, update, staleness):
            center[...] = np.nan

    class NotInPlace(Poison):
        def apply(self, center, state, update, staleness):
            return update.sent

    model = regression()
    before = model.get_weights()
    with pytest.raises(DivergenceError, match="the rule .*Poison"):
        SparkModel(model, rule=Poison()).fit(*arrays, verbose=0)
    with pytest.raises(ConfigurationError, match="must change center in place"):
        SparkModel(model, rule=NotInPlace()).fit(*arrays, verbose=0)
    for mine, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(mine, other)


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


def test_large_closures_leave_no_files(sc, arrays):
    table = np.zeros(800_000)

    def transform(x, y):
        return x + table[0].astype(np.float32), y

    spark_model = SparkModel(regression(), num_workers=2)
    before = sorted(path.name for path in Path(sc._temp_dir).iterdir())
    spark_model.fit(*arrays, epochs=2, transform=transform, validation_split=0.1, verbose=0)
    spark_model.predict(arrays[0], transform=transform)
    assert sorted(path.name for path in Path(sc._temp_dir).iterdir()) == before


def test_callbacks_get_validation_metrics(sc, arrays):
    events = []

    class RecordEvents(keras.callbacks.Callback):
        def on_test_begin(self, logs=None):
            events.append("begin")

        def on_test_end(self, logs=None):
            events.append(sorted(logs))

    SparkModel(classifier(width=3)).fit(
        arrays[0], np.zeros(96, int), validation_split=0.2, callbacks=RecordEvents(), verbose=0
    )
    assert events == ["begin", ["accuracy", "loss"]]


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
