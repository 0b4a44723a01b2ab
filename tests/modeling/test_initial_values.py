"""Copies of a model with JAX skip random initial values, which are replaced by the weights."""

import threading

import keras
import numpy as np
import pytest

from sparkkeras.modeling.archive import ModelArchive
from sparkkeras.modeling.initial_values import without_random_values

pytestmark = [
    pytest.mark.core,
    pytest.mark.skipif(keras.backend.backend() != "jax", reason="the others initialize weights fast"),
]


class Projected(keras.layers.Layer):
    """Features times a constant random matrix, and a random weight."""

    def build(self, shape):
        self.constant = keras.random.normal((shape[-1], 2), seed=3)
        self.weight = self.add_weight(shape=(2,), initializer="random_normal")

    def call(self, inputs):
        return inputs @ self.constant * self.weight


def test_a_copy_is_made_without_random_values_but_with_constants(monkeypatch):
    model = keras.Sequential([keras.Input((3,)), Projected(), keras.layers.Dense(2, dtype="bfloat16")])
    archive = ModelArchive.pack(model)
    monkeypatch.delattr(keras.initializers.RandomNormal, "__call__")
    monkeypatch.delattr(keras.initializers.VarianceScaling, "__call__")
    copy = archive.unpack()
    np.testing.assert_array_equal(copy.layers[0].constant, model.layers[0].constant)
    assert str(copy.layers[1].kernel.dtype) == "bfloat16"


def test_other_threads_get_random_values():
    def kernel():
        layer = keras.layers.Dense(2)
        layer.build((None, 3))
        return np.array(layer.kernel)

    found = []
    with without_random_values():
        thread = threading.Thread(target=lambda: found.append(kernel()))
        thread.start()
        thread.join()
        assert not kernel().any()
    assert found[0].any()
