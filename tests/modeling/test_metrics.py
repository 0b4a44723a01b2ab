"""Building the loss and the metrics of a model."""

import keras
import numpy as np
import pytest

from sparkkeras import DataError
from sparkkeras.data.block import from_arrays
from sparkkeras.modeling import metrics
from tests.models import regression

X, Y = np.ones((4, 3), np.float32), np.ones((4, 1), np.float32)


@pytest.mark.core
def test_data_of_the_same_shapes_is_checked_once_for_each_compile():
    calls = []

    def loss(expected, predicted):
        calls.append(expected)
        return keras.ops.mean(keras.ops.square(expected - predicted), -1)

    model = regression(loss=loss, metrics=["mae"])
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


def test_the_inputs_of_a_feature_space_cause_no_warning():
    """Warnings are errors here. Keras compares the types of dicts, and this one is its own."""
    import tensorflow as tf

    space = keras.utils.FeatureSpace({"width": "float", "height": "float_rescaled"}, output_mode="concat")
    x = {"width": X[:, 0], "height": X[:, 1]}
    space.adapt(tf.data.Dataset.from_tensor_slices(x))
    model = keras.Model(space.get_inputs(), keras.layers.Dense(1)(space.get_encoded_features()))
    model.compile("sgd", "mse", metrics=["mae"])
    metrics.prepare(model, from_arrays(x, Y, None))
    assert set(metrics.log_names(model)) == {"loss", "mae"}
