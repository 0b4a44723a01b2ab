"""Losses that are not means over rows are rejected for training in step."""

import keras
import numpy as np
import pytest

from sparkkeras.data.block import from_arrays
from sparkkeras.errors import ModelError
from sparkkeras.modeling import metrics
from sparkkeras.modeling.reductions import check_mean_over_rows, check_without_mask
from tests.models import classifier

crossentropy = keras.losses.SparseCategoricalCrossentropy


@pytest.mark.parametrize(
    "loss", ["sparse_categorical_crossentropy", crossentropy(), crossentropy(reduction="mean"), lambda y, p: p[:, 0] - y]
)
def test_means_are_accepted(loss):
    check_mean_over_rows(classifier(loss=loss))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (crossentropy(reduction="sum"), "with reduction='sum': it is not a mean over rows"),
        ([crossentropy(reduction=None)], "with reduction=None: it is not a mean"),
        (crossentropy(reduction="mean_with_sample_weight"), "divides by the sum of the sample weights of a batch"),
        ({"scores": crossentropy(ignore_class=0)}, "with ignore_class=0: it divides by the number of labels"),
    ],
)
def test_others_are_rejected(loss, message):
    with pytest.raises(ModelError, match=message):
        check_mean_over_rows(classifier(loss=loss))


def test_masks_are_rejected_where_they_reach_the_loss():
    layers = [keras.Input((5,), dtype="int32"), keras.layers.Embedding(9, 4, mask_zero=True)]
    model = keras.Sequential([*layers, keras.layers.LSTM(3, return_sequences=True), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    with pytest.raises(ModelError, match="with a mask"):
        check_mean_over_rows(model)
    model = keras.Sequential([*layers, keras.layers.LSTM(3), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    check_mean_over_rows(model)


class Tagger(keras.Model):
    """A subclassed model, whose outputs Keras knows only when it is called."""

    def __init__(self, mask_zero):
        super().__init__()
        self.embedding = keras.layers.Embedding(9, 4, mask_zero=mask_zero)
        self.lstm = keras.layers.LSTM(3, return_sequences=True)

    def call(self, x):
        return self.lstm(self.embedding(x))


@pytest.mark.parametrize("mask_zero", [True, False])
def test_masks_of_subclassed_models_are_rejected(mask_zero):
    model = Tagger(mask_zero)
    model(np.zeros((1, 5), np.int32))
    model.compile("sgd", "mse")
    check_mean_over_rows(model)
    metrics.prepare(model, from_arrays(np.zeros((2, 5), np.int32), np.zeros((2, 5, 3), np.float32), None))
    if mask_zero:
        with pytest.raises(ModelError, match=r"an output with a mask.*not masked.*sample weights of 0"):
            check_without_mask(model)
    else:
        check_without_mask(model)
