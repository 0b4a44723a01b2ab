"""Models that cannot be trained, evaluated or used to predict in some way are rejected before a job starts."""

import keras
import numpy as np
import pytest

from sparkkeras import DataError, ModelError, SparkEnsemble, SparkModel
from sparkkeras.data.block import from_arrays
from sparkkeras.modeling import metrics
from sparkkeras.modeling.compilation import check_not_synchronized
from sparkkeras.modeling.own_methods import check_can_evaluate, check_can_predict, check_can_train
from sparkkeras.modeling.reductions import check_mean_over_rows, check_without_mask
from sparkkeras.scoring.columns import Scorer
from tests.models import Gan, classifier, gan, regression

X = np.ones((8, 3), np.float32)

# Layers that synchronize statistics between replicas


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
    with pytest.raises(ModelError, match=r"synchronized=True \(norm\)"):
        fit(normalized())(X, X[:, 0])


def test_layers_without_synchronization_and_frozen_layers_can_be_trained():
    check_not_synchronized(normalized(synchronized=False))
    check_not_synchronized(normalized(trainable=False))


# Losses that are not means over rows, for training in step


crossentropy = keras.losses.SparseCategoricalCrossentropy


@pytest.mark.parametrize("loss", ["mse", crossentropy(), crossentropy(reduction="mean"), lambda y, p: p[:, 0] - y])
def test_means_over_rows_are_accepted(loss):
    check_mean_over_rows(classifier(loss=loss))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (crossentropy(reduction="sum"), "reduction='sum'.* not a mean"),
        ([crossentropy(reduction=None)], "reduction=None.* not a mean"),
        (crossentropy(reduction="mean_with_sample_weight"), "the sum of the sample weights"),
        ({"scores": crossentropy(ignore_class=0)}, "ignore_class=0"),
    ],
)
def test_other_losses_are_rejected_in_step(loss, message):
    with pytest.raises(ModelError, match=message):
        check_mean_over_rows(classifier(loss=loss))


class Tagger(keras.Model):
    """A subclassed model, whose outputs Keras knows only when it is called."""

    def __init__(self, mask_zero):
        super().__init__()
        self.embedding = keras.layers.Embedding(9, 4, mask_zero=mask_zero)
        self.lstm = keras.layers.LSTM(3, return_sequences=True)

    def call(self, x):
        return self.lstm(self.embedding(x))


def masked(return_sequences):
    layers = [keras.layers.Embedding(9, 4, mask_zero=True), keras.layers.LSTM(3, return_sequences=return_sequences)]
    model = keras.Sequential([keras.Input((5,), dtype="int32"), *layers])
    model.compile("sgd", "mse")
    return model


def test_masks_are_rejected_where_they_reach_the_loss():
    with pytest.raises(ModelError, match="with a mask"):
        check_mean_over_rows(masked(return_sequences=True))
    check_mean_over_rows(masked(return_sequences=False))
    rows = from_arrays(np.zeros((2, 5), np.int32), np.zeros((2, 5, 3), np.float32), None)
    tagger, plain = Tagger(mask_zero=True), Tagger(mask_zero=False)
    for model in (tagger, plain):
        model(np.zeros((1, 5), np.int32))
        model.compile("sgd", "mse")
        check_mean_over_rows(model)
        metrics.prepare(model, rows)
    with pytest.raises(ModelError, match="output with a mask"):
        check_without_mask(tagger)
    check_without_mask(plain)


# Classes that override Keras's methods


WITH_STATE = keras.backend.backend() == "jax"
without_jax = pytest.mark.skipif(WITH_STATE, reason="the models are written for the other backends")


class Evaluated(Gan):
    def test_step(self, data):
        return {}


@without_jax
def test_a_model_without_call_predicts_and_evaluates_only_with_its_own_steps():
    model = gan()
    for attempt in (SparkModel(model).predict, lambda _: Scorer.of(model)):
        with pytest.raises(ModelError, match=r"SparkModel\(model.generator\).* implement Gan.call"):
            attempt(X)
    for attempt in (SparkModel(model).evaluate, lambda x: SparkModel(model).fit(x, validation_split=0.5)):
        with pytest.raises(ModelError, match="implement Gan.test_step"):
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
    kind, words = ForJax, r"\(self, state, data\) cannot .* train_step\(data\)"
    if WITH_STATE:
        kind, words = ForOthers, r"\(self, data\) cannot .* train_step\(state, data\)"
    with pytest.raises(ModelError, match=words):
        check_can_train(kind([keras.Input((3,)), keras.layers.Dense(1)]), False)


@without_jax
def test_data_of_the_wrong_shape_for_a_gan_is_named():
    with pytest.raises(ModelError, match=r"x has .* \(2,\), float32"):
        metrics.prepare(gan(), from_arrays(X[:, :2], None, None))


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="only TensorFlow has strings")
def test_a_layer_without_a_vocabulary_is_named():
    text = keras.Input((1,), dtype="string")
    words = keras.layers.TextVectorization(output_sequence_length=2)(text)
    model = keras.Model(text, keras.layers.Dense(1)(keras.layers.Flatten()(keras.layers.Embedding(4, 2)(words))))
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="call its adapt"):
        SparkModel(model).fit(np.array([["a"]]), np.zeros((1, 1)))


# The loss and the metrics, which are built for one row of zeros


@pytest.mark.core
def test_data_of_the_same_shapes_is_checked_once_for_each_compile():
    calls = []

    def loss(expected, predicted):
        calls.append(expected)
        return keras.ops.mean(keras.ops.square(expected - predicted), -1)

    model, rows = regression(loss=loss, metrics=["mae"]), from_arrays(X, X[:, :1], None)
    for _ in range(2):
        metrics.prepare(model, rows)
        assert len(calls) == 1
    assert all(not state.any() for state in metrics.take(model))
    with pytest.raises(DataError, match="not fit the model"):
        metrics.prepare(model, from_arrays(X[:, :2], X[:, :1], None))
    checked = len(calls)
    model.compile("sgd", loss)
    metrics.prepare(model, rows)
    assert len(calls) > checked


def test_the_inputs_of_a_feature_space_cause_no_warning():
    """Warnings are errors here. Keras compares the types of dicts, and this one is its own."""
    import tensorflow as tf

    space = keras.utils.FeatureSpace({"width": "float", "height": "float_rescaled"}, output_mode="concat")
    x = {"width": X[:, 0], "height": X[:, 1]}
    space.adapt(tf.data.Dataset.from_tensor_slices(x))
    model = keras.Model(space.get_inputs(), keras.layers.Dense(1)(space.get_encoded_features()))
    model.compile("sgd", "mse", metrics=["mae"])
    metrics.prepare(model, from_arrays(x, X[:, :1], None))
    assert set(metrics.log_names(model)) == {"loss", "mae"}
