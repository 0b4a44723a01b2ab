"""Layers that synchronize statistics between replicas cannot be trained on separate workers."""

import keras
import numpy as np
import pytest

from sparkkeras import ModelError, SparkEnsemble, SparkModel
from sparkkeras.modeling.compilation import check_not_synchronized


def normalized(synchronized=True, **arguments):
    norm = keras.layers.BatchNormalization(name="norm", **arguments)
    norm.synchronized = synchronized  # the constructor accepts True with TensorFlow only
    inner = keras.Sequential([keras.Input((3,)), norm])
    model = keras.Sequential([keras.Input((3,)), inner, keras.layers.Dense(1, "sigmoid")])
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize(
    "fit", [lambda model: SparkModel(model).fit, lambda model: SparkEnsemble([model, normalized(False)]).fit]
)
def test_fit_rejects_layers_that_synchronize_statistics(fit):
    with pytest.raises(ModelError, match=r"synchronized=True \(norm\).*Workers train their replicas separately.*=False"):
        fit(normalized())(np.ones((4, 3)), np.ones(4))


def test_layers_without_synchronization_and_frozen_layers_can_be_trained():
    check_not_synchronized(normalized(synchronized=False))
    check_not_synchronized(normalized(trainable=False))
