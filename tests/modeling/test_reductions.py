"""Losses that are not means over rows are rejected for training in step."""

import keras
import pytest

from sparkkeras.errors import ModelError
from sparkkeras.modeling.reductions import check_mean_over_rows
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
