"""Packing and unpacking of models; errors name the parts that would be lost."""

import functools
import pickle
import time
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path

import keras
import numpy as np
import pytest

from sparkkeras.data.block import from_arrays
from sparkkeras.errors import ConfigurationError, CustomObjectError, ModelError
from sparkkeras.modeling import archive as models
from sparkkeras.modeling import metrics
from sparkkeras.modeling import state as model_state
from sparkkeras.modeling.archive import ModelArchive, copy_of, without_rates
from sparkkeras.modeling.compilation import check_trainable, compile_to_evaluate, serialize
from sparkkeras.modeling.optimizers import iterations
from sparkkeras.modeling.outside import Unchanging
from sparkkeras.modeling.state import ModelState, ModelWeights, reseed
from tests.models import Distilled, regression

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


class Largest(keras.metrics.Mean):
    def update_state(self, y, prediction, sample_weight=None):
        super().update_state(keras.ops.max(y))


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


class Forgetful(keras.layers.Dense):
    """Its configuration lacks the number of units."""

    def __init__(self, units=1, **options):
        super().__init__(units, **options)

    def get_config(self):
        return {"name": self.name}


class Softened(keras.layers.Layer):
    """Creates a lambda in its constructor, also in a copy: the lambda is not saved."""

    def __init__(self, **options):
        super().__init__(**options)
        self.function = lambda x: keras.ops.tanh(GLOBAL * x)

    def call(self, x):
        return self.function(x)


class Cubic(keras.losses.Loss):
    def __init__(self, **options):
        super().__init__(**options)
        self.function = lambda x: keras.ops.abs(x) ** GLOBAL

    def call(self, y, prediction):
        return keras.ops.mean(self.function(y - prediction), axis=-1)


# Models


def dense(*extra, activation="relu", **compiled):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(4, activation=activation), *extra, keras.layers.Dense(1)]
    )
    model.compile(**({"optimizer": "adam", "loss": "mse", "run_eagerly": True} | compiled))
    return model


def own_parts():
    """A model most of whose parts are custom."""
    penalized = keras.layers.Dense(4, bent, kernel_regularizer=Sums())
    nested = keras.Sequential([keras.Input((4,)), Scaled(2.0)])
    return dense(
        *(nested, penalized, keras.layers.Lambda(tilted), Softened()),
        activation=tilted,
        optimizer=Eager(Falling(0.5), momentum=0.9),
        loss=weighted_error(3.0),
        metrics=[Largest(), "mae"],
        weighted_metrics=[distance],
    )


def layers_with_state():
    factor = 2.0
    layers = [
        keras.layers.Dense(4, trainable=False),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.5, seed=3),
        keras.layers.Lambda(lambda x: factor * x),
    ]
    return dense(*layers, loss=Cubic())


def adapted():
    """A model whose first layers have adapted to its rows."""
    scale, cut = keras.layers.Normalization(), keras.layers.Discretization(num_bins=3)
    scale.adapt(5 * X)
    cut.adapt(X[:, 0])
    inputs = keras.Input((3,))
    both = keras.layers.Concatenate()([scale(inputs), cut(inputs)])
    model = keras.Model(inputs, keras.layers.Dense(1)(both))
    model.compile("adam", "mse", run_eagerly=True)
    return model


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


def fixed():
    model = dense(Fixed())
    set_factors(model, [1.0, 2.0, 3.0, 4.0])
    return model


def set_factors(model, factors):
    layer = model.layers[1]
    layer.kept.assign(factors)
    layer.constant = np.array(factors, np.float32)


class Table(keras.layers.Layer):
    """Multiplies by a number that is not a variable: it is saved in a file."""

    factor = 2.0

    def call(self, x):
        return x * self.factor

    def save_assets(self, folder):
        (Path(folder) / "factor.txt").write_text(str(self.factor))

    def load_assets(self, folder):
        self.factor = float((Path(folder) / "factor.txt").read_text())


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


def own_compile():
    model = Stepping([keras.Input((3,)), keras.layers.Dense(1)], name="stepping")
    model.compile(lambda step: step, optimizer="sgd", loss="mse")
    return model


@pytest.fixture
def emptied(monkeypatch):
    """Also empty small archives, which usually keep their weights."""
    monkeypatch.setattr(models, "FULL_BYTES", 0)
    monkeypatch.setattr(models, "_packed", OrderedDict())


@pytest.mark.parametrize("build", [own_parts, layers_with_state, adapted, fixed])
def test_a_model_survives_the_round_trip(emptied, build):
    makes_the_round_trip(build(), X, Y)


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="only TensorFlow has text in its tensors")
def test_a_text_model_survives_the_round_trip_with_its_vocabulary(emptied):
    layer = keras.layers.TextVectorization(output_mode="multi_hot")
    layer.adapt(["red red", "blue", "green blue"])
    inputs = keras.Input((1,), dtype="string")
    model = keras.Model(inputs, keras.layers.Dense(1)(layer(inputs)))
    model.compile(optimizer="sgd", loss="mse", run_eagerly=True)
    words = [["red"], ["blue"], ["red"], ["none of these"]]
    makes_the_round_trip(model, keras.ops.convert_to_tensor(words, dtype="string"), Y[:4])
    before = ModelArchive.pack(model).digest
    layer.set_vocabulary(["green", "blue", "red"])
    assert ModelArchive.pack(model).digest != before


def test_the_archive_of_a_large_model_is_small():
    """The weights and optimizer variables, which are sent separately, have 17 MB."""
    model = dense(keras.layers.Dense(1200), keras.layers.Dense(1200))
    assert model.count_params() > 1_400_000
    assert len(ModelArchive.pack(model).data) < 50_000
    makes_the_round_trip(model, X, Y)


def vectors(model):
    state = ModelState.take(model)
    return [state.weights.vector, state.optimizer.vector]


def through_an_archive(model):
    return pickle.loads(pickle.dumps(ModelArchive.pack(model))).unpack()


def makes_the_round_trip(model, x, y, copied=through_an_archive):
    model.train_on_batch(x, y)
    loaded = copied(model)
    ModelState.take(model).put(loaded)
    expected, found = (keras.tree.flatten(one(x)) for one in (model, loaded))
    assert all(map(np.array_equal, expected, found))
    model.reset_metrics()
    expected, found = (one.test_on_batch(x, y, return_dict=True) for one in (model, loaded))
    assert {name: float(value) for name, value in expected.items()} == pytest.approx(found, rel=1e-6)
    # Further training gives equal weights: optimizer, schedule, loss weights and trainable flags were packed.
    for one in (model, loaded):
        reseed(one, (5,))
        one.train_on_batch(x, y)
    for mine, theirs in zip(vectors(model), vectors(loaded), strict=True):
        assert np.allclose(mine, theirs, rtol=1e-5, atol=1e-7)
    assert iterations(model) == iterations(loaded)


def test_custom_objects_are_packed():
    assert set(ModelArchive.pack(dense(), {"extra": tilted}).custom.load()) == {"extra"}


# Errors


GLOBAL = 3.0


class Called:
    def error(self, y, prediction):
        return keras.ops.mean(keras.ops.square(y - prediction), axis=-1)


class LosesMomentum(keras.optimizers.SGD):
    def get_config(self):
        return {**super().get_config(), "momentum": 0.0}


NOT_COPIED = {
    "two closures": (
        lambda: dense(loss=weighted_error(2), metrics=[weighted_error(3)]),
        CustomObjectError,
        "two different.* 'error'",
    ),
    "name of Keras": (
        lambda: dense(keras.layers.Dense(2, "relu"), activation=relu),
        CustomObjectError,
        "activation is .*relu",
    ),
    # A copy would use one function for both, with other metrics or even other training.
    "name as a string": (lambda: dense(loss=mse, metrics=["mse"]), CustomObjectError, "mse"),
    "name as a string, after fit": (lambda: trained(loss="mse", metrics=[mse]), CustomObjectError, "mse"),
    "lambda as loss": (lambda: dense(loss=lambda y, p: keras.ops.abs(y - p)), ModelError, "Define it with def"),
    # Keras saves the code of a lambda without its globals: it would fail on the workers.
    "lambda with a global": (lambda: dense(keras.layers.Lambda(lambda x: x * GLOBAL)), ModelError, "Define it with def"),
    "lambda set by compile": (own_compile, ModelError, "factor .* 'stepping'.*with def"),
    "no configuration": (lambda: dense(WithoutConfig(2.0)), ModelError, "get_config"),
    "incomplete configuration": (lambda: dense(Forgetful(units=3)), ModelError, "get_config"),
    "method as loss": (lambda: dense(loss=Called().error), ModelError, "is a method"),
    "partial": (lambda: dense(loss=functools.partial(keras.losses.huber, delta=2.0)), ModelError, "Losses and metrics must"),
    "optimizer": (lambda: dense(optimizer=LosesMomentum(0.1, momentum=0.9)), ModelError, "other variables"),
}


@pytest.mark.parametrize(("build", "kind", "words"), NOT_COPIED.values(), ids=NOT_COPIED)
def test_code_that_a_copy_would_not_have_is_an_error(build, kind, words):
    with pytest.raises(kind, match=rf"(?s){words}"):
        ModelArchive.pack(build())


# The digest


@pytest.mark.parametrize("ready", [True, False], ids=["metrics made", "metrics not made yet"])
def test_a_model_that_was_trained_is_not_packed_again(ready):
    model = dense(keras.layers.BatchNormalization(), keras.layers.Dropout(0.5), metrics=["mae", Largest()])
    if ready:
        metrics.prepare(model, from_arrays(X, Y, None))
    archive = ModelArchive.pack(model)
    model.fit(X, Y, batch_size=12, verbose=0)
    model.evaluate(X, Y, verbose=0)
    model.predict(X, verbose=0)
    assert ModelArchive.pack(model) is archive


def test_compiling_again_changes_the_digest():
    """The configurations of the losses are equal."""
    compiled = {"optimizer": "adam", "loss": weighted_error(2.0)}
    model = dense(run_eagerly=False, **compiled)
    before = ModelArchive.pack(model).digest
    for changed in ({"optimizer": "sgd"}, {"metrics": ["mae"]}, {"steps_per_execution": 4}, {"loss": weighted_error(3.0)}):
        model.compile(**compiled | changed)
        assert ModelArchive.pack(model).digest != before, changed


@pytest.mark.parametrize(
    ("build", "change"),
    [
        (adapted, lambda model: model.layers[1].adapt(X)),
        (fixed, lambda model: set_factors(model, [4.0, 3.0, 2.0, 1.0])),
        (lambda: dense(Table()), lambda model: setattr(model.layers[1], "factor", 3.0)),
    ],
    ids=["adapted", "constant", "asset"],
)
def test_changes_of_a_layer_that_are_no_weights_change_the_digest(build, change):
    model = build()
    before = ModelArchive.pack(model)
    assert before is ModelArchive.pack(model)
    change(model)
    after = ModelArchive.pack(model)
    assert after.digest != before.digest
    assert np.allclose(after.unpack()(X), model(X), atol=1e-6)


# Models that cannot be trained


class AddsLoss(keras.layers.Layer):
    def call(self, x):
        self.add_loss(keras.ops.sum(x))
        return x


def not_built():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: regression(loss=None), "without a loss"),
        (not_compiled, "is not compiled"),
        (not_built, "is not built"),
        (lambda: dense(loss_weights=["acc"]), r"write compile.* metrics=\['acc'\]"),
        (lambda: dense(metrics=["acuracy"]), "metrics.* Did you mean 'accuracy'"),
        (lambda: dense(loss={"out": "mean_square_error"}), "loss=.* Did you mean 'mean_squared_error'"),
        (lambda: dense(weighted_metrics={"out": ["foo"]}), "compiled with weighted_metrics="),
        (frozen_after_fit, "built for other weights"),
    ],
)
def test_a_model_that_cannot_be_trained(build, words):
    with pytest.raises(ModelError, match=words):
        check_trainable(build())


def with_layer(layer):
    model = keras.Sequential([keras.Input((3, 2)), layer, keras.layers.Dense(1)])
    model.compile("sgd")
    return model


def own_loss():
    class Own(keras.Sequential):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return keras.ops.mean(y_pred)

    model = Own([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mine")
    return model


@pytest.mark.parametrize(
    "build",
    [
        lambda: with_layer(AddsLoss()),
        lambda: with_layer(keras.layers.Lambda(lambda x: x)),
        lambda: with_layer(keras.layers.RNN(keras.layers.SimpleRNNCell(1, bias_regularizer="l2"))),
        lambda: with_layer(keras.Sequential([keras.layers.Dense(1, activity_regularizer="l2")])),
        lambda: dense(loss="crossentropy", metrics=["Accuracy", "acc", keras.metrics.MeanSquaredError(), lambda y, p: p]),
        lambda: dense(loss_weights={"out": 0.5}),
        own_loss,
    ],
    ids=["add_loss", "lambda", "cell", "nested", "known names", "loss weights", "names for its own compute_loss"],
)
def test_a_model_that_can_be_trained(build):
    check_trainable(build())


# State


def test_trainable_weights_come_first():
    model = dense(keras.layers.BatchNormalization())
    ordered = [weight.numpy().ravel() for weight in (*model.trainable_weights, *model.non_trainable_weights)]
    assert np.array_equal(ModelState.take(model).weights.vector, np.concatenate(ordered))
    assert model_state.trainable_size(model) == 29


def test_a_schedule_cannot_be_set():
    assert not model_state.has_settable_rate(regression(optimizer=keras.optimizers.SGD(Falling(0.5))))
    scaled = regression(optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)))
    assert model_state.has_settable_rate(scaled)


def test_seed_generators_are_set_from_the_seed():
    layers = [keras.layers.Dropout(0.5, seed=1), keras.layers.GaussianNoise(1.0, seed=1), keras.layers.Dropout(0.5)]
    model = keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(1)])

    def seeds(*seed):
        reseed(model, seed)
        return {tuple(keras.ops.convert_to_numpy(each).tolist()) for each in model.non_trainable_variables}

    one = seeds(1, 2, 3)
    assert len(one) == 3  # all layers have different masks
    for different in ((1, 2, 4), (1, 3, 3), (2, 2, 3), (3, 2, 1)):
        assert not seeds(*different) & one
    assert seeds(1, 2, 3) == one


def test_a_worker_that_takes_over_counts_all_steps_and_restarts_averages():
    model = regression(optimizer=keras.optimizers.Adam(0.1, use_ema=True))
    begun = ModelState.take(model)
    model_state.advanced(begun, model, (7,), [0.025])
    assert (iterations(model), model_state.learning_rate(model)) == ([7], pytest.approx(0.025))
    for average, weight in zip(model.optimizer._model_variables_moving_average, model.trainable_variables, strict=True):
        np.testing.assert_array_equal(np.asarray(average), np.asarray(weight))


# Packing for prediction


PREDICTING = {
    "not compiled": not_compiled,
    "frozen after fit": frozen_after_fit,
    "int8": lambda: quantized("int8", trained()),
    "overridden compile": own_compile,
    "lambda as loss": lambda: trained(loss=lambda y, p: keras.ops.mean((y - p) ** 2)),
}


@pytest.mark.parametrize("build", PREDICTING.values(), ids=PREDICTING)
def test_a_model_packed_for_prediction_survives_the_round_trip(build, emptied):
    model = build()
    loaded = pickle.loads(pickle.dumps(ModelArchive.pack_to_predict(model))).unpack()
    ModelWeights.take(model).put(loaded)
    assert not loaded.compiled
    expected = keras.ops.convert_to_numpy(model(X))
    for copy in (loaded, models.copy_of(model)):
        assert np.array_equal(keras.ops.convert_to_numpy(copy(X)), expected)


def test_prediction_after_training_reuses_the_archive():
    model = trained(metrics=["mae"])
    archive = ModelArchive.pack(model)
    model.fit(X, Y, verbose=0)
    assert ModelArchive.pack_to_predict(model) is archive
    assert ModelArchive.pack_to_predict(quantized("int8", model)).digest != archive.digest


# Models that do not load


class Narrow(keras.Model):
    """The constructor takes no **kwargs."""

    def __init__(self, units=3):
        super().__init__()
        self.dense = keras.layers.Dense(units)

    def call(self, x):
        return self.dense(x)


class Renamed(keras.layers.Layer):
    """Its configuration has other names than the constructor."""

    def __init__(self, units):
        super().__init__()

    def call(self, x):
        return x

    def get_config(self):
        return {"factor": 2}


class Broken(Renamed):
    """Its constructor fails on the result of get_config."""

    def __init__(self, units=None, factor=None):
        super().__init__(units)
        if factor:
            try:
                raise LookupError("hidden")
            except LookupError:
                raise OverflowError("too much") from None


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (Narrow, r"class Narrow: TypeError: .*'trainable'.*\*\*kwargs"),
        (lambda: dense(Renamed(2)), "class Renamed: TypeError: .*'factor'.*constructor's"),
        (lambda: dense(Broken()), "class Broken: OverflowError: too much"),
    ],
    ids=["keyword arguments", "other name", "fails"],
)
def test_the_error_explains_why_a_custom_class_does_not_load(build, reason):
    model = build()
    model.compile("sgd", "mse")
    model(X)
    with pytest.raises(ModelError, match=reason) as caught:
        ModelArchive.pack(model)
    assert "config={" not in str(caught.value)
    cause = caught.value.__cause__
    assert cause.__cause__ is None
    assert cause.__suppress_context__ or cause.__context__ is None


def test_run_eagerly_and_jit_compile_are_kept_in_prediction(monkeypatch):
    monkeypatch.setattr(models, "_packed", OrderedDict())
    model = not_compiled()
    archive = ModelArchive.pack_to_predict(model)
    chosen = model.jit_compile  # Keras resolves it with the first call; workers resolve it for their machine
    assert ModelArchive.pack_to_predict(model) is archive
    assert not archive.unpack().run_eagerly
    model.jit_compile = not chosen
    assert ModelArchive.pack_to_predict(model).unpack().jit_compile is not chosen
    assert ModelArchive.pack_to_predict(dense()).unpack().run_eagerly


class Float8(keras.layers.Layer):
    def build(self, shape):
        ones = lambda shape, dtype: keras.ops.cast(keras.ops.ones(shape), dtype)  # noqa: E731
        self.scale = self.add_weight(shape=shape[1:], initializer=ones, dtype="float8_e5m2", trainable=False)

    def call(self, x):
        return x


def test_float8_weights_that_keras_cannot_save():
    model = keras.Sequential([keras.Input((3,)), Float8()])
    with pytest.raises(ModelError, match=r'dtype float8_e5m2.* dtype="bfloat16"'):
        ModelArchive.pack_to_predict(model)


def test_a_model_quantized_to_float8_has_to_be_saved_and_loaded(tmp_path):
    model = quantized("float8", not_compiled())
    with pytest.raises(ModelError, match="another order.* Save"):
        ModelArchive.pack_to_predict(model)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras", {"tilted": tilted})
    unpacked = ModelArchive.pack_to_predict(loaded).unpack()
    ModelWeights.take(loaded).put(unpacked)
    assert np.array_equal(unpacked.predict(X, verbose=0), model.predict(X, verbose=0))


def test_an_exception_handled_by_the_caller_is_not_reported_as_the_cause():
    data, loss = models.save_bytes(keras.Sequential([keras.Input((3,)), Broken()])), serialize({"loss": Broken()})
    custom = {"custom_objects": {"Broken": Broken}, "safe_mode": True}
    for load in (lambda: models.load_bytes(data, **custom), lambda: compile_to_evaluate(dense(), loss, **custom)):
        try:
            raise zipfile.BadZipFile
        except zipfile.BadZipFile:
            with pytest.raises(ModelError, match="OverflowError: too much") as caught:
                load()
        assert isinstance(caught.value.__cause__, OverflowError)


@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5")
def test_a_model_that_was_saved_as_hdf5_keeps_its_optimizer(tmp_path):
    """Keras removes the optimizer from the compile arguments when it saves HDF5."""
    model = dense(optimizer=keras.optimizers.Adam(0.003))
    model.save(tmp_path / "model.h5")
    loaded = ModelArchive.pack(model).unpack()
    assert type(loaded.optimizer) is keras.optimizers.Adam
    assert float(loaded.optimizer.learning_rate) == pytest.approx(0.003)


def test_a_copy_has_low_rank_factors():
    """Keras merges them into the other weights when it saves a layer."""
    model = dense()
    model.layers[0].enable_lora(2)
    for weight in model.trainable_weights:
        weight.assign(keras.random.normal(weight.shape))
    copy = copy_of(model)
    assert [weight.name for weight in copy.trainable_weights] == [weight.name for weight in model.trainable_weights]
    assert np.array_equal(copy(X), model(X))


class Doubled(keras.layers.Layer):
    def call(self, x):
        return 2 * x


@pytest.mark.parametrize("is_attribute", [True, False])
def test_a_loss_has_the_weights_of_its_teacher_from_the_beginning_of_fit(monkeypatch, is_attribute):
    layers = [Doubled(), keras.layers.Dense(1, name="scores"), keras.layers.Dropout(0.5)]
    teacher = keras.Sequential([keras.Input((3,)), *layers])

    def distilled(y, predicted):
        return keras.ops.mean(keras.ops.square(predicted - teacher(y)))

    model = regression(loss=Distilled(teacher) if is_attribute else distilled)
    archive = ModelArchive.pack(model)
    later = time.time() + 100
    with monkeypatch.context() as patch:
        patch.setattr("time.time", lambda: later)
        assert ModelArchive.pack(model) is archive  # although Keras saves the time with a model
    teacher(X, training=True)  # changes the state of random numbers
    model.set_weights([each + 1 for each in model.get_weights()])
    Unchanging(model).check()
    teacher.set_weights([each + 1 for each in teacher.get_weights()])  # perhaps in on_train_begin
    with pytest.raises(ConfigurationError, match="changed .*scores/kernel"):
        Unchanging(model).check()
    changed = ModelArchive.pack(model)
    Unchanging(model).check()
    assert changed.digest != archive.digest
    loss = changed.unpack().loss
    copy = loss.teacher if is_attribute else loss.__closure__[0].cell_contents
    assert copy is not teacher
    assert all(map(np.array_equal, copy.get_weights(), teacher.get_weights()))


def test_only_the_rates_of_optimizers_are_left_out_of_what_identifies_a_model():
    """A class that compiles with a rate of its own would otherwise train with the one that a worker has kept."""
    optimizer = {"class_name": "SGD", "config": {"learning_rate": 0.1, "momentum": 0.9}}
    found = without_rates({"learning_rate": 0.1, "optimizer": optimizer, "loss": [{"schedule": {"learning_rate": 0.1}}]})
    assert found == {
        "learning_rate": 0.1,
        "optimizer": {"class_name": "SGD", "config": {"momentum": 0.9}},
        "loss": [{"schedule": {"learning_rate": 0.1}}],
    }
