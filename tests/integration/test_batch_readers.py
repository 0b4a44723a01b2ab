"""Batches that a function reads on the workers, on Spark, through the public interface."""

import time

import keras
import numpy as np
import pytest

from sparkkeras import SparkModel
from sparkkeras.errors import ConfigurationError, DataError
from tests.models import classifier


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
    for mine, other in zip(spark_model.model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5)
    assert set(history) == set(expected)
    assert all(history[name] == pytest.approx(values, rel=1e-4) for name, values in expected.items())
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


def test_what_needs_the_number_of_rows_is_refused(sc, read):
    for arguments, settings in (({"validation_split": 0.2}, {}), ({}, {"frequency": 2})):
        with pytest.raises(ConfigurationError, match="needs to know how many rows there are"):
            SparkModel(classifier(), **settings).fit(read, **arguments)


def test_errors_of_the_function_are_reported_before_training(sc):
    def fails(worker, num_workers):
        raise FileNotFoundError(f"/data/part-{worker}")

    model = classifier()
    with pytest.raises(Exception, match=r"FileNotFoundError: /data/part-0"):
        SparkModel(model, num_workers=1).fit(fails)
    with pytest.raises(DataError, match="has no rows"):
        SparkModel(model, num_workers=1).fit(lambda worker, num_workers: [])
    assert int(model.optimizer.iterations) == 0
