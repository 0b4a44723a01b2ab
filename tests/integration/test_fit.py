"""Synchronous training on Spark, through the public interface."""

from contextlib import nullcontext

import keras
import numpy as np
import pytest

from sparkkeras import SparkModel, to_simple_rdd
from sparkkeras.spark import live_progress
from tests.conftest import long
from tests.models import classifier, regression


@pytest.mark.parametrize("frequency", [long("epoch"), 10, long("batch")])
def test_training_learns_digits(sc, digits, frequency):
    x, y, x_test, y_test = digits
    model = classifier(optimizer=keras.optimizers.Adam(0.005))
    spark_model = SparkModel(model, num_workers=2, frequency=frequency, seed=1)
    epochs = {"epoch": 12, 10: 6, "batch": 1}[frequency]
    history = spark_model.fit(to_simple_rdd(sc, x, y), epochs=epochs, batch_size=16, verbose=0)
    loss, accuracy = spark_model.evaluate(x_test, y_test)
    assert accuracy >= (0.95 if frequency != "batch" else 0.3)
    assert loss < 2.0
    assert len(history.history["loss"]) == epochs
    assert history.epoch == list(range(epochs))


@pytest.mark.core
def test_one_worker_equals_plain_keras(sc, digits):
    x, y, *_ = digits
    plain, spark_model = classifier(), SparkModel(classifier(), num_workers=1)
    expected = plain.fit(x, y, epochs=2, batch_size=48, shuffle=False, verbose=0)
    history = spark_model.fit(x, y, epochs=2, batch_size=48, shuffle=False, verbose=0)
    for mine, other in zip(spark_model.model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(history.history["loss"], expected.history["loss"], rtol=1e-4)
    np.testing.assert_allclose(history.history["accuracy"], expected.history["accuracy"], rtol=1e-6)
    assert int(spark_model.model.optimizer.iterations) == int(plain.optimizer.iterations)


@pytest.mark.soak  # tests/parameter has the rules without Spark
@pytest.mark.parametrize("rule", ["average", "slowmo", "diloco"])
def test_every_rule_learns(sc, digits, rule):
    x, y, x_test, y_test = digits
    spark_model = SparkModel(classifier(), num_workers=2, rule=rule, seed=3)
    spark_model.fit(x, y, epochs=10, batch_size=16, verbose=0)
    assert spark_model.evaluate(x_test, y_test)[1] > 0.85


def test_a_custom_rule(sc, digits):
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Still:
        modes = frozenset({"synchronous"})

        def init(self, center):
            return {}

        def apply(self, center, state, update, staleness):
            assert update.rows == 200
            assert update.num_workers == 2

    x, y, *_ = digits
    model = classifier()
    before = model.get_weights()
    SparkModel(model, num_workers=2, rule=Still()).fit(x[:200], y[:200], verbose=0)
    for mine, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(mine, other)


def test_few_rows_empty_partitions_and_small_batches(sc, digits):
    x, y, *_ = digits
    rows = [(x[i], y[i]) for i in range(3)]
    rdd = sc.parallelize(rows, 3).union(sc.parallelize([], 2))
    spark_model = SparkModel(classifier())
    before = spark_model.model.get_weights()
    history = spark_model.fit(rdd, batch_size=64, epochs=2, verbose=0)
    assert history.history["loss"][1] < history.history["loss"][0]
    assert not np.array_equal(before[0], spark_model.model.get_weights()[0])
    assert sorted({report["worker"] for report in spark_model.training_histories}) == [0, 1, 2]
    assert sum(report["rows"] for report in spark_model.training_histories) == 6


def test_the_mean_is_weighted_by_rows(sc):
    """Two workers with 1 and 3 rows take one step each: the row-weighted mean equals one step on all rows."""
    x = np.array([[1.0], [2.0], [3.0], [4.0]], np.float32)
    y = np.array([1.0, 1.0, 1.0, 1.0], np.float32)
    rdd = sc.parallelize([0, 1], 2).mapPartitionsWithIndex(
        lambda part, _: [(x[i], y[i]) for i in ([0] if part == 0 else [1, 2, 3])]
    )
    model = regression(width=1, optimizer=keras.optimizers.SGD(0.01))
    model.set_weights([np.zeros((1, 1), np.float32), np.zeros(1, np.float32)])
    SparkModel(model).fit(rdd, batch_size=8, verbose=0)
    # One step of SGD on mse from zero weights: w = 2 * lr * mean(x * y), so weighted by rows it is that of all four rows.
    np.testing.assert_allclose(model.get_weights()[0].item(), 2 * 0.01 * (1 + 2 + 3 + 4) / 4, rtol=1e-6)
    np.testing.assert_allclose(model.get_weights()[1].item(), 2 * 0.01, rtol=1e-6)


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


def test_distributing_rows_is_deterministic(sc, digits):
    x, y, *_ = digits
    rows = sc.parallelize(list(zip(x[:200], y[:200], strict=True)), 5)
    weights = []
    for _ in range(2):
        model = classifier()
        SparkModel(model, num_workers=2, seed=1).fit(rows, verbose=0)
        weights.append(model.get_weights()[0])
    np.testing.assert_array_equal(*weights)


def test_arrays_are_split_evenly(sc, digits):
    x, y, *_ = digits
    spark_model = SparkModel(classifier(), num_workers=3)
    spark_model.fit(to_simple_rdd(sc, x[:100], y[:100], num_slices=7), verbose=0)
    assert sorted(report["rows"] for report in spark_model.training_histories) == [33, 33, 34]


@pytest.mark.soak  # tests/training has it without Spark
def test_the_same_seed_gives_the_same_weights(sc, digits):
    x, y, *_ = digits

    def trained(seed):
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dropout(0.3, name="dropout"), keras.layers.Dense(10, activation="softmax", name="scores")]
        model = keras.Sequential([keras.Input((64,), name="pixels"), *layers], name="dropping")
        model.compile(keras.optimizers.Adam(name="adam"), "sparse_categorical_crossentropy")
        SparkModel(model, num_workers=2, seed=seed).fit(x[:300], y[:300], epochs=2, verbose=0)
        return model.get_weights()[0]

    first = trained(5)
    np.testing.assert_array_equal(first, trained(5))
    assert not np.array_equal(first, trained(6))


def test_dropout_masks_differ_between_workers_epochs_and_fits(sc):
    """With a learning rate of 0 only the masks can change the loss."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dropout(0.5, seed=1), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.0), "mse")
    x, y = np.ones((64, 8), np.float32), np.ones((64, 1), np.float32)
    spark_model = SparkModel(model, num_workers=2)
    spark_model.fit(x, y, epochs=2, batch_size=4, verbose=0)
    spark_model.fit(x, y, epochs=1, batch_size=4, verbose=0)
    losses = [report["loss"] for report in spark_model.training_histories]
    assert len(set(losses)) == 6


@pytest.mark.soak
def test_results_do_not_depend_on_the_number_of_steps_in_a_call(sc, digits):
    x, y, *_ = digits
    weights = []
    for steps in (1, 4):
        model = classifier(steps_per_execution=steps)
        SparkModel(model, num_workers=2, seed=2).fit(x[:310], y[:310], epochs=2, batch_size=16, verbose=0)
        assert model.steps_per_execution == steps
        weights.append(model.get_weights()[0])
    np.testing.assert_allclose(weights[0], weights[1], rtol=1e-5, atol=1e-7)


def test_a_further_fit_continues_training(sc, digits):
    x, y, *_ = digits
    spark_model = SparkModel(classifier(), num_workers=2)
    first = spark_model.fit(x, y, epochs=3, verbose=0)
    steps = int(spark_model.model.optimizer.iterations)
    second = spark_model.fit(x, y, epochs=3, verbose=0)
    assert second.history["loss"][0] < first.history["loss"][-1]
    assert int(spark_model.model.optimizer.iterations) == 2 * steps
    assert spark_model.fit(x, y, initial_epoch=3, epochs=5, verbose=0).epoch == [3, 4]


@pytest.mark.soak
def test_two_models_trained_alternately(sc, digits):
    x, y, *_ = digits
    one, two = SparkModel(classifier(seed=1), num_workers=2), SparkModel(classifier(units=16, seed=2), num_workers=2)
    for _ in range(2):
        one.fit(x[:200], y[:200], verbose=0)
        two.fit(x[:200], y[:200], verbose=0)
    for spark_model in (one, two):
        np.testing.assert_allclose(
            spark_model.predict(x[:20]), spark_model.model.predict(x[:20], verbose=0), rtol=1e-4, atol=1e-5
        )


@pytest.mark.soak
def test_class_weight_is_as_in_keras(sc, digits):
    x, y, *_ = digits
    weights = {0: 3.0, 7: 0.25}
    plain, spark_model = classifier(), SparkModel(classifier(), num_workers=1)
    expected = plain.fit(x[:320], y[:320], batch_size=32, shuffle=False, class_weight=weights, verbose=0)
    history = spark_model.fit(x[:320], y[:320], shuffle=False, class_weight=weights, verbose=0)
    np.testing.assert_allclose(history.history["loss"], expected.history["loss"], rtol=1e-4)
    np.testing.assert_allclose(spark_model.model.get_weights()[0], plain.get_weights()[0], rtol=1e-3, atol=1e-5)


def test_sample_weights_are_as_in_keras(sc, digits):
    x, y, *_ = digits
    weight = np.linspace(0, 2, 320).astype(np.float32)
    plain = classifier(weighted_metrics=["accuracy"])
    expected = plain.fit(x[:320], y[:320], sample_weight=weight, batch_size=32, shuffle=False, verbose=0)
    rows = sc.parallelize(list(zip(x[:320], y[:320], weight, strict=True)), 1)
    for data in ((rows,), (to_simple_rdd(sc, x[:320], y[:320], weight, num_slices=1),)):
        spark_model = SparkModel(classifier(weighted_metrics=["accuracy"]))
        history = spark_model.fit(*data, shuffle=False, verbose=0)
        np.testing.assert_allclose(history.history["loss"], expected.history["loss"], rtol=1e-4)
        np.testing.assert_allclose(history.history["weighted_accuracy"], expected.history["weighted_accuracy"], rtol=1e-5)


@pytest.mark.parametrize("workers", [long(1), 3])
def test_validation_split_takes_the_last_rows(sc, digits, workers):
    x, y, *_ = digits
    rows = [(x[i], y[i]) for i in range(101)]
    spark_model = SparkModel(classifier(optimizer=keras.optimizers.SGD(0.0)))
    rdd = sc.parallelize(rows, workers)
    history = spark_model.fit(rdd, validation_split=0.2, epochs=2, verbose=0)
    kept = [report["rows"] for report in spark_model.training_histories if report["epoch"] == 0]
    assert sum(kept) == 80
    last = [row for part, count in zip(rdd.glom().collect(), kept, strict=True) for row in part[count:]]
    assert len(last) == 21
    expected = spark_model.model.evaluate(np.array([r[0] for r in last]), np.array([r[1] for r in last]), verbose=0)
    np.testing.assert_allclose(history.history["val_loss"], [expected[0]] * 2, rtol=1e-5)


def test_validation_data_and_frequency(sc, digits):
    x, y, x_test, y_test = digits
    spark_model = SparkModel(classifier(), num_workers=2)
    test_rows = sc.parallelize(list(zip(x_test, y_test, strict=True)), 3)
    for held_out in ((x_test, y_test), test_rows, (x_test, y_test, np.ones(len(y_test), np.float32))):
        history = spark_model.fit(x, y, epochs=4, validation_data=held_out, validation_freq=2, verbose=0)
        assert len(history.history["loss"]) == 4
        assert len(history.history["val_loss"]) == 2
        expected = spark_model.model.evaluate(x_test, y_test, verbose=0)
        np.testing.assert_allclose(history.history["val_loss"][-1], expected[0], rtol=1e-5)
        np.testing.assert_allclose(history.history["val_accuracy"][-1], expected[1], rtol=1e-6)


def test_steps_per_epoch(sc, digits):
    x, y, *_ = digits
    spark_model = SparkModel(classifier(), num_workers=2)
    spark_model.fit(x[:400], y[:400], steps_per_epoch=3, batch_size=10, verbose=0)
    assert [report["rows"] for report in spark_model.training_histories] == [30, 30]
    assert int(spark_model.model.optimizer.iterations) == 3


def test_transform_runs_on_batches_in_fit_evaluate_and_predict(sc, digits):
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    images = x[:300].reshape(-1, 8, 8).astype(np.uint8)

    def flatten(x, y):
        assert len(x) <= 50
        return x.reshape(len(x), 64) / 16.0, y

    spark_model = SparkModel(classifier(), num_workers=2, batch_size=50, seed=1)
    rdd = to_simple_rdd(sc, images, y[:300])
    history = spark_model.fit(rdd, epochs=10, transform=flatten, validation_split=0.1, verbose=0)
    assert history.history["loss"][-1] < history.history["loss"][0] * 0.9
    flat = images.reshape(-1, 64) / 16.0
    np.testing.assert_allclose(
        spark_model.predict(images, transform=flatten), spark_model.model.predict(flat, verbose=0), rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(
        spark_model.evaluate(rdd, transform=flatten), spark_model.model.evaluate(flat, y[:300], verbose=0), rtol=1e-4
    )


def test_worker_callbacks_run_on_workers(sc, digits, tmp_path):
    x, y, *_ = digits

    class Note(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            import os

            (tmp_path / f"{epoch}-{os.getpid()}").touch()

    SparkModel(classifier(), num_workers=2).fit(x[:64], y[:64], epochs=2, verbose=0, worker_callbacks=[Note()])
    noted = [path.name.split("-") for path in tmp_path.iterdir()]
    import os

    assert {epoch for epoch, _ in noted} == {"0", "1"}
    assert str(os.getpid()) not in {pid for _, pid in noted}


@pytest.mark.soak
def test_learning_rate_schedules_count_one_workers_steps(sc, digits):
    x, y, *_ = digits
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, decay_steps=5, decay_rate=0.5)
    model = classifier(optimizer=keras.optimizers.SGD(schedule))
    SparkModel(model, num_workers=2).fit(x[:320], y[:320], batch_size=32, epochs=2, verbose=0)
    assert int(model.optimizer.iterations) == 10
    np.testing.assert_allclose(float(model.optimizer.learning_rate), 0.1 * 0.5**2, rtol=1e-5)


@pytest.mark.soak
def test_moving_averages_of_weights(sc, digits):
    """use_ema overwrites the weights at the end of a fit; rounds must continue from the raw weights."""
    x, y, *_ = digits
    plain, spark_model = (classifier(optimizer=keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9)) for _ in range(2))
    spark_model = SparkModel(spark_model, num_workers=1)
    plain.fit(x[:320], y[:320], epochs=3, shuffle=False, verbose=0)
    spark_model.fit(x[:320], y[:320], epochs=3, shuffle=False, verbose=0)
    np.testing.assert_allclose(spark_model.model.get_weights()[0], plain.get_weights()[0], rtol=1e-4, atol=1e-6)


def test_verbose_prints_workers_and_rows_per_second(sc, digits, capsys):
    x, y, *_ = digits
    SparkModel(classifier(), num_workers=2).fit(x[:64], y[:64], epochs=2)
    output = capsys.readouterr().out
    assert "Epoch 2/2" in output
    assert "2 workers" in output
    assert "rows/s" in output
    assert "loss: " in output
    SparkModel(classifier(), num_workers=2).fit(x[:64], y[:64], verbose=0)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("verbose", "listens"), [(1, 2), (2, 0), (0, 0)])
def test_the_driver_listens_for_progress_only_if_it_is_shown(sc, digits, monkeypatch, verbose, listens):
    opened = []
    monkeypatch.setattr(live_progress, "receiving", lambda *_: nullcontext(opened.append(1)))
    x, y, *_ = digits
    spark_model = SparkModel(classifier(), num_workers=2)
    spark_model.fit(x[:100], y[:100], verbose=verbose)
    spark_model.evaluate(x[:100], y[:100], verbose=verbose)
    assert len(opened) == listens
