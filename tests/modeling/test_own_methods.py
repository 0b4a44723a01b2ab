"""Models whose class overrides Keras's methods are checked on the driver."""

import keras
import numpy as np
import pytest

from sparkkeras import SparkModel
from sparkkeras.data.block import from_arrays
from sparkkeras.errors import ModelError
from sparkkeras.modeling import metrics
from sparkkeras.modeling.own_methods import check_can_evaluate, check_can_predict, check_can_train
from sparkkeras.scoring.columns import Scorer
from tests.models import Gan, gan, regression

X = np.ones((8, 3), np.float32)
WITH_STATE = keras.backend.backend() == "jax"
without_jax = pytest.mark.skipif(WITH_STATE, reason="the models are written for the other backends")


class Evaluated(Gan):
    def test_step(self, data):
        return {}


@without_jax
def test_a_model_without_call_predicts_and_evaluates_only_with_its_own_steps():
    model = gan()
    for attempt in (SparkModel(model).predict, lambda _: Scorer.of(model)):
        with pytest.raises(ModelError, match=r"has no call.*such as SparkModel\(model.generator\), or implement Gan.call"):
            attempt(X)
    for attempt in (SparkModel(model).evaluate, lambda x: SparkModel(model).fit(x, validation_split=0.5)):
        with pytest.raises(ModelError, match="neither a call nor its own test_step.*implement Gan.test_step"):
            attempt(X)
    check_can_evaluate(gan(Evaluated))
    for check in (check_can_predict, check_can_evaluate, lambda model: check_can_train(model, True)):
        check(regression())


class ForJax(keras.Sequential):
    def train_step(self, state, data):
        return {}, state


class ForOthers(keras.Sequential):
    def train_step(self, data):
        return {}


def test_a_step_for_another_backend_is_reported():
    kind, words = ForJax, r"ForJax.train_step\(self, state, data\) cannot be called as train_step\(data\)"
    if WITH_STATE:
        kind, words = ForOthers, r"ForOthers.train_step\(self, data\) cannot be called as train_step\(state, data\)"
    with pytest.raises(ModelError, match=words):
        check_can_train(kind([keras.Input((3,)), keras.layers.Dense(1)]), False)


@without_jax
def test_data_of_the_wrong_shape_for_a_gan_is_named():
    with pytest.raises(ModelError, match=r"shape of the data \(x has rows of shape \(2,\), float32\).*or the data if"):
        metrics.prepare(gan(), from_arrays(X[:, :2], None, None))


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="only TensorFlow has strings")
def test_a_layer_without_a_vocabulary_is_named():
    text = keras.Input((1,), dtype="string")
    words = keras.layers.TextVectorization(output_sequence_length=2)(text)
    model = keras.Model(text, keras.layers.Dense(1)(keras.layers.Flatten()(keras.layers.Embedding(4, 2)(words))))
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"has no vocabulary: call its adapt\(...\)"):
        SparkModel(model).fit(np.array([["a"]]), np.zeros((1, 1)))
