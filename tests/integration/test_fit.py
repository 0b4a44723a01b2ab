"""Synchronous training on Spark, through the public interface."""

import keras
import numpy as np
import pytest

from sparkkeras import SparkModel, to_simple_rdd
from tests.models import classifier


def test_training_learns_digits(sc, digits):
    x, y, x_test, y_test = digits
    spark_model = SparkModel(classifier(optimizer=keras.optimizers.Adam(0.005)), num_workers=2, frequency=10, seed=1)
    history = spark_model.fit(to_simple_rdd(sc, x, y), epochs=6, batch_size=16, verbose=0)
    assert spark_model.evaluate(x_test, y_test)[1] >= 0.95
    assert history.epoch == list(range(6))


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


def test_a_custom_rule(sc, digits):
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


def test_few_rows_and_empty_partitions(sc, digits):
    x, y, *_ = digits
    rdd = sc.parallelize([(x[i], y[i]) for i in range(3)], 3).union(sc.parallelize([], 2))
    spark_model = SparkModel(classifier())
    history = spark_model.fit(rdd, batch_size=64, epochs=2, verbose=0)
    assert history.history["loss"][1] < history.history["loss"][0]
    assert sorted({report["worker"] for report in spark_model.training_histories}) == [0, 1, 2]
    assert sum(report["rows"] for report in spark_model.training_histories) == 6


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


def test_a_further_fit_continues_training(sc, digits):
    x, y, *_ = digits
    spark_model = SparkModel(classifier(), num_workers=2)
    first = spark_model.fit(x, y, epochs=3, verbose=0)
    steps = int(spark_model.model.optimizer.iterations)
    second = spark_model.fit(x, y, epochs=3, verbose=0)
    assert second.history["loss"][0] < first.history["loss"][-1]
    assert int(spark_model.model.optimizer.iterations) == 2 * steps
    assert spark_model.fit(x, y, initial_epoch=3, epochs=5, verbose=0).epoch == [3, 4]


def test_sample_weights_are_as_in_keras(sc, digits):
    x, y, *_ = digits
    weight = np.linspace(0, 2, 320).astype(np.float32)
    plain = classifier(weighted_metrics=["accuracy"])
    expected = plain.fit(x[:320], y[:320], sample_weight=weight, batch_size=32, shuffle=False, verbose=0).history
    rows = sc.parallelize(list(zip(x[:320], y[:320], weight, strict=True)), 1)
    for data in (rows, to_simple_rdd(sc, x[:320], y[:320], weight, num_slices=1)):
        history = SparkModel(classifier(weighted_metrics=["accuracy"])).fit(data, shuffle=False, verbose=0).history
        assert history["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        assert history["weighted_accuracy"] == pytest.approx(expected["weighted_accuracy"], rel=1e-5)


def test_validation_split_takes_the_last_rows(sc, digits):
    x, y, *_ = digits
    rows = [(x[i], y[i]) for i in range(101)]
    spark_model = SparkModel(classifier(optimizer=keras.optimizers.SGD(0.0)))
    rdd = sc.parallelize(rows, 3)
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
    for held_out in ([x_test, y_test], test_rows, (x_test, y_test, np.ones(len(y_test), np.float32))):
        history = spark_model.fit(x[:400], y[:400], epochs=4, validation_data=held_out, validation_freq=2, verbose=0)
        assert len(history.history["loss"]) == 4
        assert len(history.history["val_loss"]) == 2
        expected = spark_model.model.evaluate(x_test, y_test, verbose=0)
        np.testing.assert_allclose(history.history["val_loss"][-1], expected[0], rtol=1e-5)
        np.testing.assert_allclose(history.history["val_accuracy"][-1], expected[1], rtol=1e-6)


def test_transform_runs_on_batches_in_fit_evaluate_and_predict(sc, digits):
    images, y = (digits[0][:300] * 16).reshape(-1, 8, 8).astype(np.uint8), digits[1][:300]

    def flatten(x, y):
        assert len(x) <= 50
        return x.reshape(len(x), 64) / 16.0, y

    spark_model = SparkModel(classifier(), num_workers=2, batch_size=50, seed=1)
    rdd = to_simple_rdd(sc, images, y)
    history = spark_model.fit(rdd, epochs=10, transform=flatten, validation_split=0.1, verbose=0)
    assert history.history["loss"][-1] < history.history["loss"][0] * 0.9
    flat, model = digits[0][:300], spark_model.model
    predicted = spark_model.predict(images, transform=flatten)
    np.testing.assert_allclose(predicted, model.predict(flat, verbose=0), rtol=1e-4, atol=1e-5)
    found = spark_model.evaluate(rdd, transform=flatten)
    np.testing.assert_allclose(found, model.evaluate(flat, y, verbose=0), rtol=1e-4)


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
