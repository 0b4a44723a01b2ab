"""Packing and unpacking of models; errors name the parts that would be lost."""

import functools
import io
import json
import pickle
import threading
import time
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path

import keras
import numpy as np
import pytest

from sparkkeras.data.block import from_arrays
from sparkkeras.data.schema import InputSpec
from sparkkeras.errors import CustomObjectError, ModelError
from sparkkeras.modeling import archive as models
from sparkkeras.modeling import metrics
from sparkkeras.modeling import state as model_state
from sparkkeras.modeling.archive import ModelArchive, copy_of, without_rates
from sparkkeras.modeling.compilation import check_compiled, check_trainable, compile_to_evaluate, serialize
from sparkkeras.modeling.optimizers import iterations, optimizers_of
from sparkkeras.modeling.schema import schema_of
from sparkkeras.modeling.state import ModelState, ModelWeights, reseed
from tests.conftest import long
from tests.models import Distilled

RNG = np.random.default_rng(0)
X = RNG.normal(size=(12, 3)).astype(np.float32)
Y = X.sum(1, keepdims=True)


# Custom code


def tilted(x):
    return keras.ops.maximum(x, 0.1 * x)


def relu(x):
    """Differs from Keras's."""
    return 2 * keras.ops.maximum(x, 0)


def mse(y, prediction):
    """Differs from Keras's: absolute instead of squared."""
    return keras.ops.mean(keras.ops.abs(y - prediction), axis=-1)


def distance(y, prediction):
    return keras.ops.mean(keras.ops.abs(y - prediction), axis=-1)


def weighted_error(factor):
    def error(y, prediction):
        return factor * keras.ops.mean(keras.ops.square(y - prediction), axis=-1)

    return error


@keras.saving.register_keras_serializable(package="tests_of_model")
def bent(x):
    return keras.ops.tanh(x)


class Quartic(keras.losses.Loss):
    def call(self, y, prediction):
        return keras.ops.mean((y - prediction) ** 4, axis=-1)


class Largest(keras.metrics.Metric):
    def __init__(self, name="largest", **options):
        super().__init__(name=name, **options)
        self.value = self.add_weight(name="value", initializer="zeros")

    def update_state(self, y, prediction, sample_weight=None):
        self.value.assign(keras.ops.maximum(keras.ops.convert_to_tensor(self.value), keras.ops.max(y)))

    def result(self):
        return keras.ops.convert_to_tensor(self.value)


class Falling(keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self, start):
        self.start = start

    def __call__(self, step):
        return self.start / (1 + keras.ops.cast(step, "float32"))

    def get_config(self):
        return {"start": self.start}


class Eager(keras.optimizers.SGD):
    """A custom optimizer."""


class Sums(keras.regularizers.Regularizer):
    def __call__(self, x):
        return 0.01 * keras.ops.sum(x)

    def get_config(self):
        return {}


class Scaled(keras.layers.Layer):
    def __init__(self, factor, **options):
        super().__init__(**options)
        self.factor = factor
        self.inner = keras.layers.Dense(2)

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x):
        return self.factor * self.inner(x)

    def get_config(self):
        return {**super().get_config(), "factor": self.factor}


class WithoutConfig(keras.layers.Layer):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def call(self, x):
        return self.factor * x


class Forgetful(keras.layers.Layer):
    """Its configuration lacks the number of units."""

    def __init__(self, units=1, **options):
        super().__init__(**options)
        self.units = units

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], self.units), name="kernel")

    def call(self, x):
        return keras.ops.matmul(x, self.kernel)

    def get_config(self):
        return {"name": self.name}


class Subclassed(keras.Model):
    def __init__(self, units, **options):
        super().__init__(**options)
        self.units = units
        self.first = Scaled(0.5)
        self.last = keras.layers.Dense(units)

    def call(self, x):
        return self.last(self.first(x))

    def get_config(self):
        return {**super().get_config(), "units": self.units}


# Models


def dense(*extra, activation="relu", **compiled):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(4, activation=activation), *extra, keras.layers.Dense(1)]
    )
    model.compile(**({"optimizer": "adam", "loss": "mse", "run_eagerly": True} | compiled))
    return model


def several():
    one, two = keras.Input((3,), name="one"), keras.Input((3,), name="two")
    shared = keras.layers.Dense(2, name="shared")
    joined = keras.layers.Concatenate()([shared(one), shared(two)])
    outputs = {"size": keras.layers.Dense(1, name="size")(joined), "sign": keras.layers.Dense(1, name="sign")(joined)}
    model = keras.Model({"one": one, "two": two}, outputs)
    model.compile(
        optimizer="rmsprop",
        loss={"size": "mse", "sign": distance},
        loss_weights={"size": 1.0, "sign": 0.25},
        metrics={"size": ["mae"], "sign": [Largest()]},
        run_eagerly=True,
    )
    return model


def subclassed():
    model = Subclassed(1)
    model(X)
    model.compile(optimizer="adam", loss="mse", run_eagerly=True)
    return model


def normalized(factor=1.0):
    layer = keras.layers.Normalization()
    layer.adapt(factor * X)
    model = keras.Sequential([keras.Input((3,)), layer, keras.layers.Dense(1)], name="normalized")
    model.compile(optimizer="sgd", loss="mse", run_eagerly=True)
    return model


def frozen():
    model = dense(keras.layers.Dense(4, name="frozen", trainable=False))
    assert len(model.trainable_weights) == 4
    return model


def nested():
    return dense(keras.Sequential([keras.Input((4,)), Scaled(3.0)]))


def recurrent():
    keras.utils.set_random_seed(1)
    layers = [keras.Input((None,)), keras.layers.Embedding(10, 3), keras.layers.LSTM(2), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(optimizer="adam", loss="mse", run_eagerly=True)
    return model


WORDS = [["red"], ["blue"], ["red"], ["none of these"]]


def words(layer):
    inputs = keras.Input((1,), dtype="string")
    model = keras.Model(inputs, keras.layers.Dense(1)(layer(inputs)))
    model.compile(optimizer="sgd", loss="mse", run_eagerly=True)
    return model


def looked_up():
    return words(keras.layers.StringLookup(vocabulary=["blue", "red", "green"], output_mode="one_hot"))


def vectorized():
    layer = keras.layers.TextVectorization(output_mode="multi_hot")
    layer.adapt(["red red", "blue", "green blue"])
    return words(layer)


def own_parts():
    """A model most of whose parts are custom."""
    penalized = keras.layers.Dense(4, bent, kernel_regularizer=Sums())
    return dense(
        *(Scaled(2.0), penalized, keras.layers.Lambda(tilted)),
        activation=tilted,
        optimizer=Eager(Falling(0.5), momentum=0.9),
        loss=weighted_error(3.0),
        metrics=[Largest(), "mae"],
        weighted_metrics=[distance],
    )


TOKENS = RNG.integers(0, 10, (12, 5))
MODELS = {
    "sequential": (dense, X, Y),
    "several inputs and outputs": (several, {"one": X, "two": -X}, {"size": Y, "sign": np.sign(Y)}),
    "subclassed": (subclassed, X, Y),
    "custom parts": (own_parts, X, Y),
    "custom layer": (lambda: dense(Scaled(2.0)), X, Y),
    "nested": (nested, X, Y),
    "activation": (lambda: dense(activation=tilted), X, Y),
    "registered": (lambda: dense(activation=bent), X, Y),
    "loss function": (lambda: dense(loss=weighted_error(3.0)), X, Y),
    "loss class": (lambda: dense(loss=Quartic()), X, Y),
    "metric class": (lambda: dense(metrics=[Largest(), "mae"]), X, Y),
    "metric function": (lambda: dense(metrics=[weighted_error(3.0)], weighted_metrics=["mae"]), X, Y),
    "schedule": (lambda: dense(optimizer=keras.optimizers.SGD(Falling(0.5), momentum=0.9)), X, Y),
    "optimizer": (lambda: dense(optimizer=Eager(0.25)), X, Y),
    "regularizer": (lambda: dense(keras.layers.Dense(4, kernel_regularizer=Sums())), X, Y),
    "frozen layer": (frozen, X, Y),
    "normalization": (normalized, X, Y),
    "batch normalization": (lambda: dense(keras.layers.BatchNormalization()), X, Y),
    "dropout": (lambda: dense(keras.layers.Dropout(0.5, seed=3)), X, Y),
    "recurrent": (recurrent, TOKENS, Y),
    "lambda layer": (lambda: dense(keras.layers.Lambda(lambda x: 2 * x)), X, Y),
    "lambda layer with def": (lambda: dense(keras.layers.Lambda(tilted)), X, Y),
}


WHOLE = {"sequential", "subclassed", "frozen layer", "batch normalization", "recurrent"}
"""Models whose full archive is tested by default; the test of an emptied archive covers the same failures."""


@pytest.mark.parametrize(
    ("build", "x", "y"), [case if name in WHOLE else long(*case) for name, case in MODELS.items()], ids=MODELS
)
def test_a_model_survives_the_round_trip(build, x, y):
    makes_the_round_trip(build(), x, y)


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="no other backend has text in its tensors")
@pytest.mark.parametrize("build", [looked_up, vectorized])
def test_a_text_model_survives_the_round_trip(build):
    makes_the_round_trip(build(), keras.ops.convert_to_tensor(WORDS, dtype="string"), Y[:4])


@pytest.fixture
def emptied(monkeypatch):
    """Also empty small archives, which usually keep their weights."""
    monkeypatch.setattr(models, "FULL_BYTES", 0)
    monkeypatch.setattr(models, "_packed", OrderedDict())


SINGLE = {
    *("custom layer", "activation", "registered", "loss function", "metric class", "metric function", "schedule"),
    *("optimizer", "regularizer", "lambda layer with def"),
}
"""Models with one custom part each; another one has them all."""


@pytest.mark.parametrize(
    ("build", "x", "y"), [long(*case) if name in SINGLE else case for name, case in MODELS.items()], ids=MODELS
)
def test_a_model_in_an_emptied_archive_survives_the_round_trip(emptied, build, x, y):
    makes_the_round_trip(build(), x, y)


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="no other backend has text in its tensors")
@pytest.mark.parametrize("build", [looked_up, vectorized])
def test_a_text_model_in_an_emptied_archive_survives_the_round_trip(emptied, build):
    makes_the_round_trip(build(), keras.ops.convert_to_tensor(WORDS, dtype="string"), Y[:4])


def test_the_archive_of_a_large_model_is_small():
    """The weights and optimizer variables, which are sent separately, have 17 MB."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 10)).astype(np.float32), rng.normal(size=(8, 1)).astype(np.float32)
    layers = [
        keras.layers.Dense(1200, activation="tanh"),
        keras.layers.Dense(1200, activation="tanh"),
        keras.layers.Dense(1),
    ]
    model = keras.Sequential([keras.Input((10,)), *layers])
    model.compile("adam", "mse")
    assert model.count_params() > 1_400_000
    assert len(ModelArchive.pack(model).data) < 50_000
    makes_the_round_trip(model, x, y)


def scaled_and_cut():
    """A model whose first layers have adapted to its rows."""
    scale, cut = keras.layers.Normalization(), keras.layers.Discretization(num_bins=3)
    scale.adapt(5 * X)
    cut.adapt(X[:, 0])
    inputs = keras.Input((3,))
    both = keras.layers.Concatenate()([scale(inputs), cut(inputs)])
    model = keras.Model(inputs, keras.layers.Dense(1)(both))
    model.compile("adam", "mse")
    return model


def test_adapted_state_remains_in_an_emptied_archive(emptied):
    model = scaled_and_cut()
    model.train_on_batch(X, Y)
    loaded = ModelArchive.pack(model).unpack()
    assert not loaded.layers[-1].kernel.numpy().any()
    for mine, theirs in zip(model.layers, loaded.layers, strict=True):
        if hasattr(mine, "adapt"):
            assert np.array_equal(mine(X), theirs(X))
    makes_the_round_trip(model, X, Y)


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="no other backend has text in its tensors")
def test_a_vocabulary_remains_in_an_emptied_archive(emptied):
    words = keras.ops.convert_to_tensor(WORDS, dtype="string")
    for build in (looked_up, vectorized):
        model = build()
        loaded = ModelArchive.pack(model).unpack()
        for mine, theirs in zip(model.layers, loaded.layers, strict=True):
            if hasattr(mine, "adapt"):
                assert mine.get_vocabulary() == theirs.get_vocabulary()
                assert np.array_equal(mine(words), theirs(words))


class Fixed(keras.layers.Layer):
    """Turns its weight into a constant when it is loaded, as Keras's preprocessing layers do."""

    def build(self, shape):
        self.kept = self.add_weight(shape=shape[1:], initializer="ones", trainable=False, name="kept")
        self.constant = np.ones(shape[1:], np.float32)

    def load_own_variables(self, store):
        super().load_own_variables(store)
        self.constant = keras.ops.convert_to_numpy(self.kept)

    def call(self, x):
        return x * self.constant


def test_a_layer_that_loads_its_weights_itself_keeps_them(emptied):
    model = dense(Fixed())
    fixed = model.layers[1]
    fixed.kept.assign([1.0, 2.0, 3.0, 4.0])
    fixed.constant = np.array([1.0, 2.0, 3.0, 4.0], np.float32)
    makes_the_round_trip(model, X, Y)
    fixed.kept.assign([4.0, 3.0, 2.0, 1.0])
    assert np.array_equal(ModelArchive.pack(model).unpack().layers[1].constant, [4.0, 3.0, 2.0, 1.0])


class Table(keras.layers.Layer):
    """Multiplies by a number that is not a variable: it is saved in a file."""

    factor = 2.0

    def call(self, x):
        return x * self.factor

    def save_assets(self, folder):
        (Path(folder) / "factor.txt").write_text(str(self.factor))

    def load_assets(self, folder):
        self.factor = float((Path(folder) / "factor.txt").read_text())


def test_a_changed_asset_of_a_custom_layer_is_packed_again():
    model = dense(Table())
    before = ModelArchive.pack(model)
    assert before is ModelArchive.pack(model)
    model.layers[1].factor = 3.0
    after = ModelArchive.pack(model)
    assert after.unpack().layers[1].factor == 3.0
    assert after.digest != before.digest


def test_emptying_an_archive_does_not_change_the_digest(monkeypatch):
    model = normalized()
    full = ModelArchive.pack(model)
    monkeypatch.setattr(models, "FULL_BYTES", 0)
    monkeypatch.setattr(models, "_packed", OrderedDict())
    assert ModelArchive.pack(model).digest == full.digest
    assert model.get_weights()[-2].any()


def makes_the_round_trip(model, x, y):
    model.train_on_batch(x, y)
    archive = pickle.loads(pickle.dumps(ModelArchive.pack(model)))
    loaded = archive.unpack()
    ModelState.take(model).put(loaded)
    assert loaded is not model
    expected, found = (keras.tree.flatten(one(x)) for one in (model, loaded))
    assert all(np.array_equal(mine, theirs) for mine, theirs in zip(expected, found, strict=True))
    model.reset_metrics()
    expected, found = (one.test_on_batch(x, y, return_dict=True) for one in (model, loaded))
    assert {name: float(value) for name, value in expected.items()} == pytest.approx(found, rel=1e-6)
    # Further training gives equal weights: optimizer, schedule, loss weights and trainable flags were packed.
    for one in (model, loaded):
        reseed(one, (5,))
        one.train_on_batch(x, y)
    mine, theirs = ModelState.take(model), ModelState.take(loaded)
    assert np.allclose(mine.weights.vector, theirs.weights.vector, rtol=1e-5, atol=1e-7)
    assert np.allclose(mine.optimizer.vector, theirs.optimizer.vector, rtol=1e-5, atol=1e-7)
    assert [int(each) for each in mine.optimizer.integer_variables] == [
        int(each) for each in theirs.optimizer.integer_variables
    ]


@pytest.mark.parametrize(
    ("compiled", "name", "expected"),
    [
        ({"steps_per_execution": 7, "run_eagerly": False}, "steps_per_execution", 7),
        ({"run_eagerly": True}, "run_eagerly", True),
        ({"jit_compile": False, "run_eagerly": False}, "jit_compile", False),
    ],
)
def test_compile_arguments_are_packed(compiled, name, expected):
    assert getattr(ModelArchive.pack(dense(**compiled)).unpack(), name) == expected


def test_custom_objects_are_packed():
    archive = ModelArchive.pack(dense(), {"extra": tilted})
    assert set(archive.custom.load()) == {"extra"}
    assert set(ModelArchive.pack(dense(activation=tilted)).custom.load()) == {"tilted"}
    assert ModelArchive.pack(dense()).custom.load() == {}


def test_packing_does_not_change_the_model():
    model = dense(metrics=["mae"])
    before = ModelState.take(model)
    names = [metric.name for metric in model.metrics]
    ModelArchive.pack(model)
    assert np.array_equal(ModelState.take(model).weights.vector, before.weights.vector)
    assert [metric.name for metric in model.metrics] == names
    assert model.run_eagerly


# Errors


def error_of(kind, model):
    with pytest.raises(kind) as caught:
        ModelArchive.pack(model)
    return str(caught.value)


def test_two_closures_with_the_same_name():
    message = error_of(CustomObjectError, dense(loss=weighted_error(2), metrics=[weighted_error(3)]))
    assert message.startswith("two different objects of the model have the name 'error': ")
    assert "loss" in message
    assert "metrics[0]" in message


def test_two_closures_with_the_same_name_as_activations():
    def by(factor):
        def times(x):
            return factor * x

        return times

    message = error_of(CustomObjectError, dense(keras.layers.Dense(2, activation=by(2)), activation=by(3)))
    assert "'times'" in message
    assert "_layers[1].activation and model._layers[2].activation" in message


@pytest.mark.parametrize("argument", ["loss", "metrics"])
def test_a_lambda_in_the_compile_arguments(argument):
    function = lambda y, prediction: keras.ops.mean(y - prediction)  # noqa: E731
    message = error_of(CustomObjectError, dense(**{argument: function if argument == "loss" else [function]}))
    assert message.startswith(f"compiled {argument}")
    assert "is a lambda" in message
    assert "Define it with def" in message


@pytest.mark.parametrize("extra", [(), (keras.layers.Dense(2, activation="relu", name="first"),)])
def test_a_custom_function_with_the_name_of_a_keras_function(extra):
    message = error_of(CustomObjectError, dense(*extra, activation=relu))
    assert f"activation is {__name__}.relu, but a saved copy of the model loads with keras" in message
    assert "Give yours a unique name" in message


@pytest.mark.parametrize(
    "compiled",
    [{"loss": mse, "metrics": ["mse"]}, {"loss": "mse", "metrics": [mse]}, {"loss": mse, "weighted_metrics": ["mse"]}],
    ids=["loss", "metric", "weighted metric"],
)
@pytest.mark.parametrize("trained", [False, True])
def test_a_custom_function_with_the_name_of_a_keras_function_that_is_used_as_a_string(compiled, trained):
    """A copy would use one function for both, with other metrics or even other training."""
    model = dense(**compiled)
    if trained:
        model.fit(X, Y, verbose=0)
    assert "mse" in error_of(CustomObjectError, model)


def test_a_layer_without_a_configuration():
    assert "get_config" in error_of(ModelError, dense(WithoutConfig(2.0)))


def test_a_layer_with_an_incomplete_configuration():
    assert "get_config" in error_of(ModelError, dense(Forgetful(units=3)))


LOCK = threading.Lock()


def locked(x):
    with LOCK:
        return x


def test_code_that_cannot_be_pickled():
    message = error_of(CustomObjectError, dense(keras.layers.Dense(2, activation=tilted), activation=locked))
    assert "pickling locked" in message
    assert "_thread.lock" in message


GLOBAL = 3.0


@pytest.mark.parametrize("functional", [True, False])
@pytest.mark.parametrize("code", [lambda x: x * GLOBAL, lambda x: np.float32(2) * x, lambda x: tilted(x)])
def test_a_lambda_layer_that_uses_globals(functional, code):
    """Keras saves the code of a lambda without its globals: it would fail on the workers."""
    if functional:
        inputs = keras.Input((3,))
        model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Lambda(code)(inputs)))
        model.compile(optimizer="sgd", loss="mse")
    else:
        model = dense(keras.layers.Lambda(code))
    assert "def" in error_of(ModelError, model)


def test_a_lambda_layer_that_uses_a_closure_variable():
    factor = 3.0
    model = dense(keras.layers.Lambda(lambda x: x * factor))
    assert np.array_equal(ModelArchive.pack(model).unpack().predict(X, verbose=0), model.predict(X, verbose=0))


class Softened(keras.layers.Layer):
    """Creates a lambda in its constructor."""

    def __init__(self, **options):
        super().__init__(**options)
        self.function = lambda x: keras.ops.tanh(GLOBAL * x)

    def call(self, x):
        return self.function(x)


class Lowered(Falling):
    def __init__(self, start):
        super().__init__(start)
        self.function = lambda rate: GLOBAL * rate

    def __call__(self, step):
        return self.function(super().__call__(step))


class Cubic(keras.losses.Loss):
    def __init__(self, **options):
        super().__init__(**options)
        self.function = lambda x: keras.ops.abs(x) ** GLOBAL

    def call(self, y, prediction):
        return keras.ops.mean(self.function(y - prediction), axis=-1)


class Negated(Largest):
    def __init__(self, **options):
        super().__init__(**options)
        self.function = lambda x: GLOBAL - x

    def result(self):
        return self.function(super().result())


@pytest.mark.parametrize(
    "build",
    [
        lambda: dense(Softened()),
        lambda: dense(optimizer=keras.optimizers.SGD(Lowered(0.5))),
        lambda: dense(loss=Cubic()),
        lambda: dense(metrics=[Negated()]),
    ],
    ids=["layer", "schedule", "loss", "metric"],
)
def test_a_class_may_create_a_lambda_in_its_constructor(build):
    """The lambda is not saved: the constructor creates it, with everything that it uses."""
    makes_the_round_trip(build(), X, Y)


class Called:
    """A loss that is neither a function nor one of Keras's objects."""

    def __call__(self, y, prediction):
        return keras.ops.mean(keras.ops.square(y - prediction), axis=-1)

    def error(self, y, prediction):
        return self(y, prediction)


@pytest.mark.parametrize("loss", [Called(), functools.partial(mse)], ids=["callable object", "partial"])
def test_a_loss_that_keras_cannot_save(loss):
    assert error_of(ModelError, dense(loss=loss))


@pytest.mark.parametrize("given", [{"loss": Called().error}, {"metrics": [Called().error]}], ids=["loss", "metric"])
def test_a_method_as_loss_or_metric_is_named(given):
    message = error_of(ModelError, dense(**given))
    assert message.startswith("error, a loss, metric or other function of the model, is a method")
    assert "def error(y_true, y_pred)" in message
    assert "Lambda" not in message


def test_an_activation_that_is_a_method():
    assert "__call__, a loss, metric or other function" in error_of(ModelError, dense(activation=Called().__call__))


def test_an_activation_that_is_a_lambda():
    assert "def" in error_of(ModelError, dense(activation=lambda x: 2 * x))


# The digest


def prepared(model):
    metrics.prepare(model, from_arrays(X, Y, None))
    return model


@pytest.mark.parametrize("ready", [True, False], ids=["metrics made", "metrics not made yet"])
@pytest.mark.parametrize("extra", [(), ("normalization",), ("dropout",)], ids=str)
def test_training_does_not_change_the_digest(ready, extra):
    layers = {"normalization": keras.layers.BatchNormalization(), "dropout": keras.layers.Dropout(0.5)}
    model = dense(*[layers[name] for name in extra], metrics=["mae", Largest()])
    if ready:
        prepared(model)
    archive = ModelArchive.pack(model)
    model.fit(X, Y, batch_size=12, epochs=2, verbose=0)
    model.evaluate(X, Y, verbose=0)
    model.predict(X, verbose=0)
    assert ModelArchive.pack(model).digest == archive.digest


def test_packing_again_uses_the_cache(monkeypatch):
    model = prepared(dense())
    archive = ModelArchive.pack(model)
    monkeypatch.setattr(models, "save_bytes", None)
    model.set_weights([weight + 1 for weight in model.get_weights()])
    assert ModelArchive.pack(model) is archive


@pytest.mark.parametrize(
    "compiled",
    [
        {"loss": "mae"},
        {"optimizer": "sgd"},
        {"metrics": ["mae"]},
        {"loss": weighted_error(2.0)},
        {"steps_per_execution": 4, "run_eagerly": False},
    ],
    ids=["loss", "optimizer", "metrics", "own loss", "steps"],
)
def test_compiling_again_changes_the_digest(compiled):
    model = prepared(dense())
    before = ModelArchive.pack(model).digest
    model.compile(**({"optimizer": "adam", "loss": "mse", "run_eagerly": True} | compiled))
    assert ModelArchive.pack(prepared(model)).digest != before


def test_another_learning_rate_does_not_change_the_digest():
    """It is a variable, which is part of the state."""
    model, digests = dense(), set()
    for rate in (0.1, 0.5):
        model.compile(keras.optimizers.Adam(rate, name="adam"), "mse")
        digests.add(ModelArchive.pack(prepared(model)).digest)
    assert len(digests) == 1


def test_other_code_with_the_same_name_changes_the_digest():
    """The two configurations are equal."""
    model = dense()
    found = []
    for factor in (2.0, 3.0):
        optimizer = keras.optimizers.SGD(0.1, name="sgd")
        model.compile(optimizer=optimizer, loss=weighted_error(factor), run_eagerly=True)
        found.append(ModelArchive.pack(model))
    two, three = found
    assert two.digest != three.digest
    ratio = three.cached().evaluate(X, Y, verbose=0) / two.cached().evaluate(X, Y, verbose=0)
    assert ratio == pytest.approx(1.5, rel=1e-5)


def test_adapting_again_changes_the_digest():
    model = normalized()
    before = ModelArchive.pack(model).digest
    model.layers[0].adapt(5 * X)
    after = ModelArchive.pack(model)
    assert after.digest != before
    assert np.allclose(after.unpack().predict(X, verbose=0), model.predict(X, verbose=0), atol=1e-6)


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="no other backend has text in its tensors")
def test_another_vocabulary_changes_the_digest():
    inputs = keras.Input((1,), dtype="string")
    layer = keras.layers.StringLookup(
        vocabulary=["blue", "red"], output_mode="one_hot", max_tokens=5, pad_to_max_tokens=True
    )
    model = keras.Model(inputs, keras.layers.Dense(1)(layer(inputs)))
    model.compile(optimizer="sgd", loss="mse")
    before = ModelArchive.pack(model).digest
    layer.set_vocabulary(["red", "blue"])
    assert ModelArchive.pack(model).digest != before


def test_a_process_caches_the_most_recent_models(monkeypatch):
    monkeypatch.setattr(models, "KEPT_MODELS", 2)
    monkeypatch.setattr(models, "_kept", OrderedDict())
    one, two, three = (ModelArchive.pack(dense(loss=loss)) for loss in ("mse", "mae", "msle"))
    kept = one.cached()
    assert one.cached() is kept
    assert pickle.loads(pickle.dumps(one)).cached() is kept
    assert two.cached() is not kept
    assert one.cached() is kept
    three.cached()
    assert one.cached() is kept  # it was used after the second one
    two.cached()
    three.cached()
    assert one.cached() is not kept


# Models that cannot be trained


def test_a_model_that_can_be_trained():
    check_trainable(dense())


class AddsLoss(keras.layers.Layer):
    def call(self, x):
        self.add_loss(keras.ops.sum(x))
        return x


def test_a_model_without_a_loss():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd")
    with pytest.raises(ModelError, match=r"compiled without a loss, and no layer adds one: call model\.compile\(loss="):
        check_trainable(model)


@pytest.mark.parametrize(
    "layer",
    [
        AddsLoss,
        lambda: keras.layers.Lambda(lambda x: x),
        lambda: keras.layers.ActivityRegularization(0.1),
        lambda: keras.layers.Dense(1, kernel_regularizer="l2"),
        lambda: keras.layers.RNN(keras.layers.SimpleRNNCell(1, bias_regularizer="l2")),
        lambda: keras.Sequential([keras.layers.Dense(1, activity_regularizer="l2")]),
    ],
    ids=["add_loss", "lambda", "activity", "weights", "cell", "nested"],
)
def test_a_model_in_which_a_layer_may_add_a_loss(layer):
    model = keras.Sequential([keras.Input((3, 2)), layer(), keras.layers.Dense(1)])
    model.compile("sgd")
    check_trainable(model)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (None, "None."),
        ("model.keras", "str 'model.keras'. Load a saved model with sparkkeras.load_spark_model('model.keras')"),
        (keras.layers.Dense(1, name="last"), "<Dense name=last, built=False>."),
        (keras.Sequential, "the class Sequential. Create an instance: Sequential(...)."),
        (dense, "the function dense. Call the function that builds the model: dense()."),
    ],
    ids=["none", "path", "layer", "class", "function"],
)
def test_an_object_that_is_not_a_model(given, words):
    with pytest.raises(ModelError) as caught:
        check_trainable(given)
    assert str(caught.value).startswith(f"expected a keras.Model, received {words}")


def test_a_model_that_is_not_compiled():
    with pytest.raises(ModelError, match=r"the model 'plain' is not compiled: call model\.compile"):
        check_trainable(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)], name="plain"))


def test_a_model_that_is_not_built():
    model = keras.Sequential([keras.layers.Dense(1)], name="vague")
    model.compile(optimizer="sgd", loss="mse")
    with pytest.raises(ModelError, match=r"the model 'vague' is not built.*keras\.Input"):
        check_trainable(model)


# State


def test_state_is_taken_and_put():
    model = dense(keras.layers.BatchNormalization())
    model.fit(X, Y, epochs=2, batch_size=4, verbose=0)
    state = pickle.loads(pickle.dumps(ModelState.take(model)))
    weights = model.get_weights()
    variables = [keras.ops.convert_to_numpy(variable) for variable in model.optimizer.variables]
    model.fit(X, Y, epochs=1, batch_size=4, verbose=0)
    assert int(model.optimizer.iterations) == 9
    assert not np.array_equal(model.get_weights()[0], weights[0])
    state.put(model)
    assert int(model.optimizer.iterations) == 6
    assert all(np.array_equal(mine, theirs) for mine, theirs in zip(model.get_weights(), weights, strict=True))
    after = [keras.ops.convert_to_numpy(variable) for variable in model.optimizer.variables]
    assert all(np.array_equal(mine, theirs) for mine, theirs in zip(after, variables, strict=True))


def test_state_is_a_copy():
    model = dense()
    state = ModelState.take(model)
    before = state.weights.vector.copy()
    model.fit(X, Y, verbose=0)
    assert np.array_equal(state.weights.vector, before)


def test_trainable_weights_come_first():
    model = dense(keras.layers.BatchNormalization())
    model.fit(X, Y, verbose=0)
    vector = ModelState.take(model).weights.vector
    size = model_state.trainable_size(model)
    assert size == sum(weight.numpy().size for weight in model.trainable_weights) == 4 * 4 + 4 + 4 + 5
    assert np.array_equal(vector[:size], np.concatenate([weight.numpy().ravel() for weight in model.trainable_weights]))
    assert np.array_equal(vector[size:], np.concatenate([w.numpy().ravel() for w in model.non_trainable_weights]))


def test_state_contains_the_learning_rate_and_its_size():
    model = dense(optimizer=keras.optimizers.SGD(0.5))
    state = ModelState.take(model)
    assert state.optimizer.vector.tolist() == [0.5]
    assert state.nbytes == 4 * (16 + 5) + 4 + state.optimizer.integer_variables[0].nbytes
    assert model_state.learning_rate(model) == 0.5


@pytest.mark.parametrize(
    ("policy", "vector"), [("float64", "float64"), ("bfloat16", "float32"), ("mixed_float16", "float32")]
)
def test_state_of_other_dtypes(policy, vector):
    if policy == "float64" and keras.backend.backend() == "jax":
        pytest.skip("JAX has float64 only if it is enabled")
    keras.config.set_dtype_policy(policy)
    try:
        model = dense()
    finally:
        keras.config.set_dtype_policy("float32")
    state = ModelState.take(model)
    assert state.weights.vector.dtype == vector
    before = model.get_weights()
    model.set_weights([0 * weight for weight in before])
    state.put(model)
    assert all(np.array_equal(mine, theirs) for mine, theirs in zip(model.get_weights(), before, strict=True))
    assert model_state.trainable_size(model) == 21


def test_the_learning_rate_of_a_schedule_is_that_of_the_current_step():
    model = dense(optimizer=keras.optimizers.SGD(Falling(0.5)))
    assert model_state.learning_rate(model) == 0.5
    model.fit(X, Y, batch_size=12, epochs=4, verbose=0)
    assert model_state.learning_rate(model) == pytest.approx(0.1)


# Seeds


def dropping():
    layers = [keras.layers.Dropout(0.5, seed=1), keras.layers.GaussianNoise(1.0, seed=1), keras.layers.Dropout(0.5)]
    model = keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse")
    return model


def seeds(model):
    found = [variable for variable in model.non_trainable_variables if variable.name == "seed_generator_state"]
    return [tuple(keras.ops.convert_to_numpy(variable).tolist()) for variable in found]


def test_seed_generators_are_set_from_the_seed():
    model = dropping()
    reseed(model, (1, 2, 3))
    one = seeds(model)
    assert len(one) == 3
    assert len(set(one)) == 3  # all layers have different masks
    model(X, training=True)
    assert seeds(model) != one
    reseed(model, (1, 2, 3))
    assert seeds(model) == one
    other = dropping()
    reseed(other, (1, 2, 3))
    assert seeds(other) == one
    for different in ((1, 2, 4), (1, 3, 3), (2, 2, 3), (3, 2, 1)):
        reseed(model, different)
        assert not set(seeds(model)) & set(one)


def test_dropout_masks_depend_on_the_seed():
    model = dropping()

    def drawn(seed):
        reseed(model, seed)
        return keras.ops.convert_to_numpy(model(X, training=True)).tolist()

    assert drawn((1, 2)) == drawn((1, 2))
    assert drawn((1, 2)) != drawn((1, 3))


def test_a_model_without_seed_generators_is_unchanged():
    model = dense(keras.layers.BatchNormalization())
    before = model.get_weights()
    reseed(model, (1,))
    assert all(np.array_equal(mine, theirs) for mine, theirs in zip(model.get_weights(), before, strict=True))


# Schema


def test_the_schema_of_a_model():
    schema = schema_of(several())
    assert schema.inputs == (InputSpec("one", (3,), True), InputSpec("two", (3,), True))
    assert {(spec.name, spec.shape) for spec in schema.outputs} == {("size", (1,)), ("sign", (1,))}
    assert schema.floatx == "float32"
    assert schema_of(recurrent()).inputs[0].shape == (None,)
    assert schema_of(subclassed()).inputs == ()


# From bytes


@pytest.mark.parametrize("damage", [b"", b"no archive"])
def test_bytes_that_are_not_a_model_raise_an_error(damage):
    with pytest.raises(ModelError, match="cannot be loaded"):
        models.load_bytes(damage, {}, safe_mode=True)


def test_an_error_names_missing_custom_code(monkeypatch):
    data = models.save_bytes(dense(activation=tilted, optimizer="sgd"))
    monkeypatch.setattr(models.custom_code, "already_loaded", lambda config: {})
    with pytest.raises(CustomObjectError, match=r"the model needs the custom .*tilted.*pass custom_objects"):
        models.load_bytes(data, {}, safe_mode=True)
    assert models.load_bytes(data, {"tilted": tilted}, safe_mode=True).predict(X, verbose=0).shape == (12, 1)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("settable", [False, True])
def test_whether_the_learning_rate_can_be_set(wrapped, settable):
    rate = 0.1 if settable else keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    optimizer = keras.optimizers.SGD(rate)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.LossScaleOptimizer(optimizer) if wrapped else optimizer, "mse")
    assert model_state.has_settable_rate(model) == settable


def test_a_worker_that_takes_over_counts_all_steps_and_restarts_averages():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.1, use_ema=True), "mse")
    begun = ModelState.take(model)
    state = model_state.advanced(begun, model, (7,), [0.025])
    assert iterations(model) == [7]
    assert float(model.optimizer.learning_rate) == pytest.approx(0.025)
    for average, weight in zip(model.optimizer._model_variables_moving_average, model.trainable_variables, strict=True):
        np.testing.assert_array_equal(np.asarray(average), np.asarray(weight))
    np.testing.assert_array_equal(state.weights.vector, begun.weights.vector)


# Packing for prediction


class Adversarial(keras.Model):
    """As in Keras's guide to GANs."""

    def __init__(self, generator, **options):
        super().__init__(**options)
        self.generator = generator

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.loss_fn = loss_fn

    def call(self, x):
        return self.generator(x)

    def get_config(self):
        return {**super().get_config(), "generator": keras.saving.serialize_keras_object(self.generator)}

    @classmethod
    def from_config(cls, config):
        return cls(keras.saving.deserialize_keras_object(config.pop("generator")), **config)


class Stepping(keras.Sequential):
    """Overrides compile without compile_from_config."""

    def compile(self, factor, **options):
        super().compile(**options)
        self.factor = factor


def trained(**compiled):
    model = dense(keras.layers.Dropout(0.5), **compiled)
    model.fit(X, Y, verbose=0)
    return model


def quantized(mode, model):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Layer .* does not have a `quantize` method")
        model.quantize(mode)
    return model


def not_compiled():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, activation=tilted), keras.layers.Dense(1)])


def frozen_after_fit():
    model = trained()
    model.layers[0].trainable = False
    return model


def adversarial():
    model = Adversarial(not_compiled(), name="gan")
    model.compile(keras.optimizers.Adam(), keras.optimizers.SGD(), lambda y, p: p - y)
    model(X)
    return model


PREDICTING = {
    "not compiled": not_compiled,
    "frozen after fit": frozen_after_fit,
    "int8": lambda: quantized("int8", trained()),
    "int8, not compiled": lambda: quantized("int8", not_compiled()),
    "int4": lambda: quantized("int4", trained()),
    "several optimizers": adversarial,
    "lambda as loss": lambda: trained(loss=lambda y, p: keras.ops.mean((y - p) ** 2)),
    "a loss that cannot be saved": lambda: trained(loss=functools.partial(distance)),
}


@pytest.mark.parametrize("full_bytes", [long(models.FULL_BYTES), 0], ids=["whole", "emptied"])
@pytest.mark.parametrize(
    "build", [long(build) if name == "int4" else build for name, build in PREDICTING.items()], ids=PREDICTING
)
def test_a_model_packed_for_prediction_survives_the_round_trip(build, full_bytes, monkeypatch):
    monkeypatch.setattr(models, "FULL_BYTES", full_bytes)
    monkeypatch.setattr(models, "_packed", OrderedDict())
    model = build()
    archive = pickle.loads(pickle.dumps(ModelArchive.pack_to_predict(model)))
    loaded = archive.unpack()
    ModelWeights.take(model).put(loaded)
    assert not loaded.compiled
    expected = keras.ops.convert_to_numpy(model(X))
    assert np.array_equal(keras.ops.convert_to_numpy(loaded(X)), expected)
    assert np.array_equal(keras.ops.convert_to_numpy(models.copy_of(model)(X)), expected)


def test_an_archive_for_prediction_has_no_compile_arguments():
    model = trained(loss=distance, metrics=[Largest()])
    archive = ModelArchive.pack_to_predict(model)
    with zipfile.ZipFile(io.BytesIO(archive.data)) as members:
        assert not json.loads(members.read("config.json"))["compile_config"]
    assert archive.custom.load() == {}
    assert len(archive.data) < len(ModelArchive.pack(model).data)
    unused = dense()
    ModelArchive.pack_to_predict(unused)
    assert not unused.optimizer.built


def test_prediction_after_training_reuses_the_archive(monkeypatch):
    monkeypatch.setattr(models, "_packed", OrderedDict())
    model = trained(metrics=["mae"])
    archive = ModelArchive.pack(model)
    model.fit(X, Y, verbose=0)
    monkeypatch.setattr(models, "save_bytes", None)
    assert ModelArchive.pack_to_predict(model) is archive
    monkeypatch.undo()
    assert ModelArchive.pack_to_predict(quantized("int8", model)).digest != archive.digest


@pytest.mark.parametrize("compiled", [True, False])
def test_run_eagerly_is_kept_in_prediction(compiled):
    model = dense() if compiled else not_compiled()
    model.run_eagerly = True
    assert ModelArchive.pack_to_predict(model).unpack().run_eagerly
    assert not ModelArchive.pack_to_predict(not_compiled()).unpack().run_eagerly


@pytest.mark.parametrize("build", [frozen_after_fit, lambda: quantized("int8", trained())], ids=["frozen", "quantized"])
def test_an_optimizer_that_was_built_for_other_weights(build):
    model = build()
    check_compiled(model)
    assert ModelArchive.pack(model).unpack().evaluate(X, Y, verbose=0) >= 0
    with pytest.raises(
        ModelError, match=r"built for other weights.*frozen, unfrozen or added.*quantized.*Call model\.compile"
    ):
        check_trainable(model)


def test_a_lambda_set_by_an_overridden_compile():
    with pytest.raises(ModelError, match=r"loss_fn of the model 'gan' is a lambda.*Define it with def"):
        ModelArchive.pack(adversarial())


def test_an_overridden_compile_is_restored():
    model = Stepping([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(2.0, optimizer="sgd", loss="mse")
    check_trainable(model)
    loaded = ModelArchive.pack(model).unpack()
    assert loaded.compiled
    assert type(loaded.optimizer) is keras.optimizers.SGD
    assert {name for name, value in vars(model).items() if value == 2.0} <= vars(loaded).keys()


def test_an_optimizer_that_loads_with_other_variables():
    class Forgetful(keras.optimizers.SGD):
        def get_config(self):
            return {**super().get_config(), "momentum": 0.0}

    with pytest.raises(ModelError, match=r"optimizer .* has other variables.*get_config"):
        ModelArchive.pack(dense(optimizer=Forgetful(0.1, momentum=0.9)))


def test_metrics_passed_as_loss_weights():
    model = not_compiled()
    model.compile("sgd", "mse", ["acc"])
    for check in (check_trainable, check_compiled):
        with pytest.raises(ModelError, match=r"third positional argument of compile is loss_weights.*metrics="):
            check(model)


def test_loss_weights_are_numbers():
    model = several()
    model.compile("sgd", "mse", {"size": 1.0, "sign": 0.5})
    check_trainable(model)


# Models that do not load


class Narrow(keras.Model):
    """The constructor takes no **kwargs."""

    def __init__(self, units=3):
        super().__init__()
        self.dense = keras.layers.Dense(units)

    def call(self, x):
        return self.dense(x)


class Unnamed(keras.layers.Layer):
    def __init__(self, units):
        super().__init__()
        self.units = units

    def call(self, x):
        return x

    def get_config(self):
        return {**super().get_config(), "units": self.units}


class Renamed(Unnamed):
    def get_config(self):
        return {"factor": self.units}


class Broken(Unnamed):
    """Its constructor fails on the result of get_config."""

    def __init__(self, units, **options):
        super().__init__(units["first"])

    def get_config(self):
        return {"units": 3}


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (Narrow, r"class Narrow: TypeError: Narrow\S* got an unexpected keyword argument 'trainable'.*\*\*kwargs"),
        (
            lambda: dense(Unnamed(2)),
            r"class Unnamed: TypeError: Unnamed\S* got an unexpected keyword argument 'name'.*\*\*kwargs",
        ),
        (lambda: dense(Renamed(2)), r"class Renamed: TypeError: .*keyword argument 'factor'.*names of the constructor's"),
        (
            lambda: dense(Broken({"first": 2})),
            r"class Broken: TypeError: 'int' object is not subscriptable\. A custom layer",
        ),
    ],
    ids=["model", "layer", "other name", "fails"],
)
def test_the_error_explains_why_a_custom_class_does_not_load(build, reason):
    model = build()
    model.compile("sgd", "mse")
    model(X)
    with pytest.raises(ModelError, match=reason) as caught:
        ModelArchive.pack(model)
    assert "config={" not in str(caught.value)
    assert caught.value.__cause__.__cause__ is caught.value.__cause__.__context__ is None


def test_run_eagerly_and_jit_compile_of_an_uncompiled_model_are_packed(monkeypatch):
    monkeypatch.setattr(models, "_packed", OrderedDict())
    model = not_compiled()
    archive = ModelArchive.pack_to_predict(model)
    with zipfile.ZipFile(io.BytesIO(archive.data)) as data:
        assert "attributes" not in json.loads(data.read("sparkkeras_unsaved.json"))  # workers resolve it for their machine
    chosen = model.jit_compile  # Keras resolves it with the first call, for instance of predict
    assert ModelArchive.pack_to_predict(model) is archive
    model.jit_compile = not chosen
    assert ModelArchive.pack_to_predict(model).unpack().jit_compile is not chosen
    assert model.jit_compile is not chosen


class Narrow(keras.layers.Layer):
    """Creates its weight in its own dtype."""

    def __init__(self, kept="float8_e5m2", **kwargs):
        super().__init__(**kwargs)
        self.kept = kept

    def build(self, input_shape):
        ones = lambda shape, dtype: keras.ops.cast(keras.ops.ones(shape), dtype)  # noqa: E731
        self.scale = self.add_weight(shape=input_shape[1:], initializer=ones, dtype=self.kept, trainable=False)

    def call(self, x):
        return x * keras.ops.cast(self.scale, x.dtype)


@pytest.mark.parametrize("kept", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_weights_that_keras_cannot_save(kept):
    model = keras.Sequential([keras.Input((3,)), Narrow(kept, name="narrow")])
    for pack in (ModelArchive.pack_to_predict, models.copy_of, models.save_bytes):
        with pytest.raises(ModelError, match=rf'/narrow/.*has the dtype {kept}, which .*dtype="bfloat16"'):
            pack(model)


def test_a_model_quantized_to_float8_has_to_be_saved_and_loaded(tmp_path):
    model = quantized("float8", not_compiled())
    with pytest.raises(ModelError, match=r'in another order .* model\.quantize\("float8"\)\. Save the model'):
        ModelArchive.pack_to_predict(model)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras", {"tilted": tilted})
    unpacked = ModelArchive.pack_to_predict(loaded).unpack()
    ModelWeights.take(loaded).put(unpacked)
    assert np.array_equal(unpacked.predict(X, verbose=0), model.predict(X, verbose=0))


@pytest.mark.parametrize(
    ("compiled", "words"),
    [
        ({"metrics": ["acuracy"]}, r"compiled with metrics=\['acuracy'\]: .*Did you mean 'accuracy'\?.*of keras\.metrics"),
        ({"loss": "mean_square_error"}, "compiled with loss='mean_square_error': .*Did you mean 'mean_squared_error'"),
        ({"loss": "foo"}, r"compiled with loss='foo': [^?]* Call model\.compile\(\.\.\.\) again"),
        ({"loss": {"out": "mse"}, "weighted_metrics": {"out": ["hing"]}}, "weighted_metrics=.*Did you mean 'hinge'"),
    ],
)
def test_unknown_names_of_losses_and_metrics_raise_an_error(compiled, words):
    model = not_compiled()
    model.compile(**({"optimizer": "sgd", "loss": "mse"} | compiled))
    for check in (check_trainable, check_compiled):
        with pytest.raises(ModelError, match=words):
            check(model)


def test_known_names_of_losses_and_metrics_are_accepted():
    model = not_compiled()
    known = ["Accuracy", "acc", "mae", keras.metrics.MeanSquaredError(), lambda y, p: p]
    model.compile("sgd", "crossentropy", metrics=known, weighted_metrics=["mse"])
    check_trainable(model)


def test_a_model_with_a_custom_train_step_may_interpret_names_itself():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            return self.dense(x)

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return keras.ops.mean(y_pred)

    model = Own()
    model(np.ones((1, 2)))
    model.compile("sgd", "mine")
    check_trainable(model)


def test_direct_inputs_of_an_embedding_are_indices():
    words, sizes = keras.Input((4,), dtype="int32"), keras.Input((2,))
    shared = keras.layers.Embedding(7, 3)
    outputs = keras.layers.Concatenate()([keras.layers.Flatten()(shared(words)), sizes])
    model = keras.Model([words, sizes], keras.layers.Dense(1)(outputs))
    assert [spec.indices for spec in schema_of(model).inputs] == [7, None]
    later = keras.Input((4,), dtype="int32")
    following = keras.Model(later, keras.layers.Flatten()(shared(later % 7)))
    assert [spec.indices for spec in schema_of(following).inputs] == [None]
    sequential = keras.Sequential([keras.Input((4,)), keras.layers.Embedding(9, 3), keras.layers.Flatten()])
    assert [spec.indices for spec in schema_of(sequential).inputs] == [9]

    class Hashing(keras.layers.Embedding):
        def call(self, inputs):
            return super().call(inputs % self.input_dim)

    hashing = keras.Sequential([keras.Input((4,), dtype="int32"), Hashing(9, 3)])
    assert [spec.indices for spec in schema_of(hashing).inputs] == [None]


class Unloadable(keras.layers.Layer):
    """Can be saved, but not restored from its configuration."""

    def call(self, x):
        return x

    def get_config(self):
        return {**super().get_config(), "saved": True}

    def __init__(self, saved=False, **kwargs):
        super().__init__(**kwargs)
        if saved:
            try:
                raise LookupError("hidden")
            except LookupError:
                raise OverflowError("too much") from None


def call_while_handling(error, call):
    if error is None:
        call()
    try:
        raise error
    except type(error):
        call()


@pytest.mark.parametrize("handled", [None, FileNotFoundError("no model"), zipfile.BadZipFile("other file")], ids=str)
def test_an_exception_handled_by_the_caller_is_not_reported_as_the_cause(handled):
    data = models.save_bytes(keras.Sequential([keras.Input((3,)), Unloadable()]))
    loss = serialize({"loss": Unloadable()})
    for call in (
        lambda: models.load_bytes(data, {"Unloadable": Unloadable}, safe_mode=True),
        lambda: compile_to_evaluate(dense(), loss, {"Unloadable": Unloadable}, safe_mode=True),
    ):
        with pytest.raises(ModelError, match=r"class Unloadable: OverflowError: too much\.") as caught:
            call_while_handling(handled, call)
        assert isinstance(caught.value.__cause__, OverflowError)


class KeepsOptimizer(keras.Model):
    """Also stores the compiled optimizer in another attribute."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = keras.layers.Dense(1)
        self.opt = keras.optimizers.SGD(0.1)

    def call(self, x):
        return self.dense(x)


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_the_compiled_optimizer_in_another_attribute_is_accepted(policy):
    model = KeepsOptimizer(dtype=policy)
    model(X)
    model.compile(model.opt, "mse")
    assert (model.optimizer is model.opt) == (policy == "float32")  # otherwise Keras has wrapped it
    check_trainable(model)
    assert type(ModelArchive.pack(model).unpack().optimizer) is type(model.optimizer)
    model.other = keras.optimizers.SGD()  # Keras's train_step does not use it
    check_trainable(model)
    assert list(optimizers_of(model)) == ["optimizer"]


@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5")
def test_a_model_that_was_saved_as_hdf5_keeps_its_optimizer(tmp_path):
    """Keras removes the optimizer from the compile arguments when it saves HDF5."""
    model = dense(optimizer=keras.optimizers.Adam(0.003))
    model.save(tmp_path / "model.h5")
    loaded = ModelArchive.pack(model).unpack()
    assert type(loaded.optimizer) is keras.optimizers.Adam
    assert float(loaded.optimizer.learning_rate) == pytest.approx(0.003)
    makes_the_round_trip(model, X, Y)


def lora_of_attention():
    inputs = keras.Input((5, 8))
    attention = keras.layers.MultiHeadAttention(2, 4)
    model = keras.Model(inputs, keras.layers.Dense(1)(attention(inputs, inputs)))
    for layer in attention._flatten_layers(include_self=False):
        if hasattr(layer, "enable_lora"):
            layer.enable_lora(2, lora_alpha=3)
    return model


def lora_of(layer, shape, dtype="float32"):
    model = keras.Sequential([keras.Input(shape, dtype=dtype), layer, keras.layers.Dense(1)])
    model.layers[0].enable_lora(2)
    return model


@pytest.mark.parametrize(
    "build",
    [
        lambda: lora_of(keras.layers.Dense(4), (3,)),
        lambda: lora_of(keras.layers.Embedding(9, 4), (3,), "int32"),
        lambda: lora_of(keras.layers.Conv2D(4, 3), (6, 6, 1)),
        lora_of_attention,
    ],
    ids=["dense", "embedding", "convolution", "attention"],
)
def test_low_rank_factors_are_sent_to_workers(build):
    """Keras merges them into the other weights when it saves a layer, and does not save those of nested layers."""
    model = build()
    model.compile("adam", "mse")
    for weight in model.trainable_weights:
        weight.assign(keras.random.normal(weight.shape))
    unpacked = ModelArchive.pack(model).unpack()
    ModelState.take(model).put(unpacked)
    assert [weight.name for weight in unpacked.trainable_weights] == [weight.name for weight in model.trainable_weights]
    shape = (2, *model.inputs[0].shape[1:])
    x = np.ones(shape, keras.backend.standardize_dtype(model.inputs[0].dtype))
    np.testing.assert_array_equal(unpacked.predict(x, verbose=0), model.predict(x, verbose=0))
    unpacked.train_on_batch(x, np.zeros_like(model.predict(x, verbose=0)))
    copy = copy_of(model)
    np.testing.assert_array_equal(copy.predict(x, verbose=0), model.predict(x, verbose=0))


# Teachers in losses


class Doubled(keras.layers.Layer):
    def call(self, x):
        return 2 * x


@pytest.mark.parametrize("is_attribute", [True, False])
def test_a_loss_has_the_current_weights_of_its_teacher(monkeypatch, is_attribute):
    teacher = keras.Sequential([keras.Input((3,)), Doubled(), keras.layers.Dense(1)])

    def distilled(y, predicted):
        return keras.ops.mean(keras.ops.square(predicted - teacher(y)))

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", Distilled(teacher) if is_attribute else distilled)
    archive = ModelArchive.pack(model)
    later = time.time() + 100
    with monkeypatch.context() as patch:
        patch.setattr("time.time", lambda: later)
        assert ModelArchive.pack(model) is archive  # although Keras saves the time with a model
    for changed in (0, 1):
        teacher.set_weights([each + changed for each in teacher.get_weights()])
        loss = ModelArchive.pack(model).unpack().loss
        copy = loss.teacher if is_attribute else loss.__closure__[0].cell_contents
        assert copy is not teacher
        assert all(map(np.array_equal, copy.get_weights(), teacher.get_weights()))
    assert ModelArchive.pack(model).digest != archive.digest


def test_only_the_rates_of_optimizers_are_left_out_of_what_identifies_a_model():
    """A class that compiles with a rate of its own would otherwise train with the one that a worker has kept."""
    optimizer = {"class_name": "SGD", "config": {"learning_rate": 0.1, "momentum": 0.9}}
    found = without_rates({"learning_rate": 0.1, "optimizer": optimizer, "loss": [{"schedule": {"learning_rate": 0.1}}]})
    assert found == {
        "learning_rate": 0.1,
        "optimizer": {"class_name": "SGD", "config": {"momentum": 0.9}},
        "loss": [{"schedule": {"learning_rate": 0.1}}],
    }
