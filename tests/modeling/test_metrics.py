"""Building the loss and the metrics of a model."""

import keras
import numpy as np
import pytest

from sparkkeras import DataError
from sparkkeras.data.block import from_arrays
from sparkkeras.modeling import metrics

X, Y = np.ones((4, 3), np.float32), np.ones((4, 1), np.float32)


@pytest.mark.core
def test_data_of_the_same_shapes_is_checked_once_for_each_compile():
    calls = []

    def loss(expected, predicted):
        calls.append(expected)
        return keras.ops.mean(keras.ops.square(expected - predicted), -1)

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", loss, metrics=["mae"])
    rows = from_arrays(X, Y, None)
    metrics.prepare(model, rows)
    checked = len(calls)
    model.evaluate(X, Y, verbose=0)
    evaluated = len(calls)
    metrics.prepare(model, rows)
    assert (checked, len(calls)) == (1, evaluated)
    assert all(not state.any() for state in metrics.take(model))
    with pytest.raises(DataError, match="does not fit the model"):
        metrics.prepare(model, from_arrays(X[:, :2], Y, None))
    model.compile("sgd", loss)
    metrics.prepare(model, rows)
    assert len(calls) > evaluated
