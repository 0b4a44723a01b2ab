"""Rows that are sorted, rows at random places that do not depend on their order, and batches that a function reads."""

import time
import warnings

import keras
import numpy as np
import pytest
from pyspark.sql import functions as F

from sparkkeras import (
    Checkpoint,
    ConfigurationError,
    DataError,
    SparkEnsemble,
    SparkModel,
    WorkerError,
    to_data_frame,
    to_simple_rdd,
)
from tests.models import classifier

GENERATOR = np.random.default_rng(0)
X = GENERATOR.random((600, 8)).astype(np.float32)
Y = np.sort(GENERATOR.integers(0, 4, 600))
X[:, 0] += Y
WARNING = r'rows seem to be sorted\. {}.*shuffle="global"'


def rows(sc, parts, order=slice(None)):
    return sc.parallelize(list(zip(X[order], Y[order], strict=True)), parts)


def fit(data, *labels, model=None, epochs=1, spark_model=(), **arguments):
    spark_model = SparkModel(model or classifier(8, 8, 4), seed=2, **dict(spark_model))
    history = spark_model.fit(data, *labels, epochs=epochs, verbose=0, **arguments).history
    return spark_model.model.get_weights(), history


def test_sorted_rows_give_a_warning_that_names_the_fix(sc, spark):
    with pytest.warns(UserWarning, match=WARNING.format(r"y is (\d) in 100% of partition \1, and in 0%")):
        fit(rows(sc, 4))
    frame = to_data_frame(spark, X, Y).repartitionByRange(2, "label")
    with pytest.warns(UserWarning, match=WARNING.format("'label' is ")):
        fit(frame)
    fit(frame, shuffle=False)
    fit(X, Y)
    fit(to_simple_rdd(sc, X, Y, num_slices=4))
    members = [classifier(8, 8, 4, seed=seed) for seed in range(2)]
    SparkEnsemble(members, sampling="all", seed=1).fit(rows(sc, 2), verbose=0)  # each member gets all rows


def test_rows_sorted_by_a_feature_give_a_warning_that_names_the_column(spark):
    shuffled = to_data_frame(spark, X, GENERATOR.permutation(Y)).repartitionByRange(3, F.col("features")[7])
    frame = shuffled.selectExpr("features[7] AS day", "features[1] AS x", "label")
    with pytest.warns(UserWarning, match=WARNING.format("'day' has the mean .* in partition 0, and .* in partition 2")):
        fit(frame, model=classifier(2, 8, 4), features=["day", "x"])


def test_validation_rows_that_differ_from_the_others_give_a_warning(spark):
    frame = to_data_frame(spark, X, Y).coalesce(1).sortWithinPartitions("label")
    with pytest.warns(UserWarning, match=WARNING.format("'label' is 3 .* of validation_split, .* rows to train on")):
        fit(frame, validation_split=0.2)
    fit(frame)
    fit(frame, validation_split=0.2, shuffle="global")


def test_global_places_do_not_depend_on_the_order_of_the_source(sc, spark):
    settings = {"shuffle": "global", "validation_split": 0.2, "spark_model": {"num_workers": 4}}
    expected, order = fit(rows(sc, 4), **settings), GENERATOR.permutation(600)
    np.testing.assert_equal(fit(rows(sc, 3, order), **settings), expected)
    np.testing.assert_equal(fit(to_data_frame(spark, X[order], Y[order]).repartition(5), **settings), expected)


def test_resuming_with_other_rows_is_an_error(sc, tmp_path):
    settings = {"shuffle": "global", "checkpoint": Checkpoint(str(tmp_path / "run")), "resume": True}
    whole = fit(rows(sc, 2), epochs=2, shuffle="global")
    fit(rows(sc, 2), **settings)
    np.testing.assert_equal(fit(rows(sc, 2, GENERATOR.permutation(600)), epochs=2, **settings), whole)
    changed = rows(sc, 2).map(lambda row: (row[0] + np.float32(1), row[1]))
    with pytest.raises(DataError, match=r"training that is resumed.*checkpoint\(\)"):
        fit(changed, epochs=3, **settings)


def test_balanced_class_weights_are_those_of_the_rows_to_train_on(sc):
    y = (GENERATOR.random(600) < 0.2).astype(np.int64)
    data = sc.parallelize(list(zip(GENERATOR.permutation(X), y, strict=True)), 3)
    trained = np.delete(y, np.r_[150:200, 350:400, 550:600])
    weights = {number: 450 / (2 * count) for number, count in enumerate(np.bincount(trained))}
    expected, balanced, plain = (
        fit(data, validation_split=0.25, model=classifier(8, 4, 2), class_weight=weight)
        for weight in (weights, "balanced", None)
    )
    np.testing.assert_equal(balanced, expected)
    assert plain[1] != expected[1]


def test_malformed_rows_are_reported_with_their_place(sc):
    data = sc.parallelize([([1.0, 2.0], 0), ([1.0, float("nan")], 1)], 1)
    with pytest.raises(DataError, match="row 1 of partition 0"):
        fit(data, model=classifier(2, 4, 4), shuffle="global")


def test_an_rdd_keeps_the_rows_of_the_arrays_that_it_was_made_of(sc):
    x, y = X.copy(), Y.copy()
    rdd = to_simple_rdd(sc, x, y, num_slices=2)
    expected = fit(rdd, shuffle=False)
    of_objects = to_simple_rdd(sc, X.astype(object), Y.astype(object), num_slices=2)
    np.testing.assert_equal(fit(of_objects, shuffle=False), expected)
    model = SparkModel(classifier(8, 8, 4))
    predictions = model.predict(rdd)
    x[:], y[:] = 0, 0
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the rows seem to be sorted")
        np.testing.assert_equal(fit(rdd, shuffle=False), expected)
    np.testing.assert_allclose(model.predict(rdd), predictions, rtol=1e-6)


def test_an_argument_that_does_not_fit_is_an_error_before_a_job(sc):
    with pytest.raises(ConfigurationError, match="shuffle='globally': expected True"):
        fit(X, Y, shuffle="globally")
    with pytest.raises(ConfigurationError, match="balanced.* before the transform"):
        fit(X, Y, class_weight="balanced", transform=lambda x, y: (x, 3 - y))


# Batches that a function reads


@pytest.fixture
def read(digits):
    """Reads every n-th batch of the digits."""
    x, y, *_ = digits

    def make(worker, num_workers):
        for start in range(worker * 50, len(x), num_workers * 50):
            yield x[start : start + 50], y[start : start + 50]

    return make


def test_one_worker_equals_plain_keras(sc, digits, read):
    x, y, *_ = digits
    plain, spark_model = classifier(), SparkModel(classifier(), num_workers=1)
    expected = plain.fit(x, y, epochs=2, batch_size=50, shuffle=False, validation_data=(x, y), verbose=0).history
    history = spark_model.fit(read, epochs=2, validation_data=read, verbose=0).history
    assert history == {name: pytest.approx(values, rel=1e-4) for name, values in expected.items()}
    assert spark_model.evaluate(read) == pytest.approx(plain.evaluate(x, y, verbose=0), rel=1e-4)
    np.testing.assert_allclose(spark_model.predict(read), plain.predict(x, verbose=0), atol=1e-4)


@pytest.mark.core
def test_asynchronous_workers_read_their_own_batches(sc, digits, read):
    x, _, x_test, y_test = digits
    model = classifier(optimizer=keras.optimizers.Adam(0.005))
    spark_model = SparkModel(model, "asynchronous", frequency=5, num_workers=2, parameter_server_mode="socket")
    history = spark_model.fit(read, epochs=4, validation_data=read, verbose=0)
    assert [record["rows"] for record in spark_model.training_histories[-2:]] == [700, 700]
    assert history.history["val_loss"][-1] < history.history["val_loss"][0]
    assert spark_model.evaluate(x_test, y_test)[1] > 0.6
    predictions = SparkModel(model, num_workers=3).predict(read, collect=False)
    assert predictions.getNumPartitions() == 3
    assert predictions.count() == len(x)


def test_rows_to_validate_on_are_opened_once_before_training(sc, digits, read, tmp_path):
    def counted(worker, num_workers):
        (tmp_path / f"{time.time_ns()}").touch()
        yield from read(worker, num_workers)

    spark_model = SparkModel(classifier(), "asynchronous", num_workers=1)
    spark_model.fit(read, epochs=2, validation_data=counted, verbose=0)
    assert len(list(tmp_path.iterdir())) == 3  # and in each epoch


def test_errors_of_the_function_are_reported_before_training(sc):
    def fails(worker, num_workers):
        raise FileNotFoundError(f"/data/part-{worker}")

    model = classifier()
    for function, error, words in [
        (fails, WorkerError, "FileNotFoundError: /data/part-0"),
        (lambda *_: [], DataError, "no rows"),
    ]:
        with pytest.raises(error, match=words):
            SparkModel(model, num_workers=1).fit(function)
    assert int(model.optimizer.iterations) == 0


@pytest.mark.parametrize(
    ("arguments", "frequency", "words"),
    [
        ({"shuffle": "global"}, "epoch", "redistributes stored rows"),
        ({"validation_split": 0.2}, "epoch", "how many rows"),
        ({}, 2, "how many rows"),
    ],
)
def test_what_needs_stored_rows_is_refused_for_a_function(sc, read, arguments, frequency, words):
    with pytest.raises(ConfigurationError, match=words):
        SparkModel(classifier(), frequency=frequency).fit(read, **arguments)
