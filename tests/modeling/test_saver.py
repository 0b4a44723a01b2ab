"""Files of a model with other values: those that Keras would write, and where in them the values are."""

import io
import zipfile

import keras
import numpy as np
import pytest

from sparkkeras.data.block import from_arrays
from sparkkeras.modeling import metrics
from sparkkeras.modeling.archive import ModelArchive, load_bytes
from sparkkeras.modeling.description import description
from sparkkeras.modeling.saver import ModelSaver
from sparkkeras.modeling.state import ModelState
from tests.models import classifier, gan

WEIGHTS = "model.weights.h5"


@keras.saving.register_keras_serializable("tests_of_saver")
class Scale(keras.layers.Layer):
    """Multiplies by weights."""

    def build(self, shape):
        self.factors = self.add_weight(shape=shape[1:], initializer="ones", name="factors")

    def call(self, x):
        return x * self.factors


@keras.saving.register_keras_serializable("tests_of_saver")
class Summed(Scale):
    """A layer that saves something that follows from its weights."""

    def save_own_variables(self, store):
        factors = keras.ops.convert_to_numpy(self.factors)
        store["factors"], store["half"] = factors, factors / 2

    def load_own_variables(self, store):
        assert (np.array(store["half"]) == np.array(store["factors"]) / 2).all()
        self.factors.assign(store["factors"])


@keras.saving.register_keras_serializable("tests_of_saver")
class Reversed(Scale):
    """A layer that saves its weights in another order, which shows only if they differ."""

    def save_own_variables(self, store):
        store["factors"] = keras.ops.convert_to_numpy(self.factors)[::-1]

    def load_own_variables(self, store):
        self.factors.assign(np.array(store["factors"])[::-1])


@keras.saving.register_keras_serializable("tests_of_saver")
class Ordered(Scale):
    """A layer that saves the smaller and the larger of two weights, which shows only if they differ."""

    def build(self, shape):
        super().build(shape)
        self.others = self.add_weight(shape=shape[1:], initializer="ones", name="others")

    def save_own_variables(self, store):
        both = [keras.ops.convert_to_numpy(each) for each in (self.factors, self.others)]
        store["low"], store["high"] = np.minimum(*both), np.maximum(*both)

    def load_own_variables(self, store):
        self.factors.assign(store["low"])
        self.others.assign(store["high"])


@keras.saving.register_keras_serializable("tests_of_saver")
class Bytes(keras.layers.Layer):
    """A layer with an integer variable of eight bits, after many others."""

    def build(self, shape):
        self.table = self.add_weight(shape=(2,), dtype="int8", initializer="ones", trainable=False, name="table")

    def call(self, x):
        return x


@keras.saving.register_keras_serializable("tests_of_saver")
class Bounded(Scale):
    """A layer that does not save values above one."""

    def save_own_variables(self, store):
        assert keras.ops.convert_to_numpy(self.factors).max() <= 1
        super().save_own_variables(store)


@keras.saving.register_keras_serializable("tests_of_saver")
class Flagged(Scale):
    """A layer with flags, variables of a dtype with two values."""

    def build(self, shape):
        super().build(shape)
        self.flags = [
            self.add_weight(shape=(), dtype="bool", initializer="ones", trainable=False, name=f"flag_{number}")
            for number in range(2)
        ]


def of_one(*layers, scaled=False):
    """A model of some layers; with an optimizer that scales the loss, as Keras adds it with mixed precision, if wanted."""
    model = keras.Sequential([keras.Input((3,)), *layers], name="one")
    optimizer = keras.optimizers.Adam()
    model.compile(keras.optimizers.LossScaleOptimizer(optimizer) if scaled else optimizer, "mse")
    return model


def low_rank():
    model = of_one(keras.layers.Dense(4, name="adapted"))
    model.layers[0].enable_lora(2)
    model.compile(keras.optimizers.Adam(), "mse")
    return model


def states(model, count=2):
    """States of a model with other values, all positive, so that they are also valid variances."""
    generator = np.random.default_rng(5)
    taken = [ModelState.take(model) for _ in range(count)]
    for state in taken:
        for flat in (state.weights, state.optimizer):
            flat.vector[:] = generator.uniform(0.1, 1, flat.vector.shape).astype(np.float16)
        for number in state.optimizer.integer_variables:
            number[...] = generator.integers(1, 100)
    return taken


def saved(saver, state):
    file = io.BytesIO()
    return file, saver.save(state, file)


def same(one, other):
    return all(
        getattr(one, name).vector.tobytes() == getattr(other, name).vector.tobytes()
        and [each.tolist() for each in getattr(one, name).integer_variables]
        == [each.tolist() for each in getattr(other, name).integer_variables]
        for name in ("weights", "optimizer")
    )


@pytest.mark.core
@pytest.mark.parametrize(
    "build",
    [
        classifier,
        lambda: of_one(keras.layers.BatchNormalization()),
        lambda: of_one(keras.layers.Dense(3, dtype="mixed_float16"), scaled=True),
    ],
    ids=["dense", "statistics", "scaled losses"],
)
def test_files_are_those_that_keras_would_write(build, tmp_path):
    model = build()
    saver = ModelSaver(ModelArchive.pack(model), model)
    for state in states(model, 3):
        file, spans = saved(saver, state)
        state.put(model)
        model.save_weights(tmp_path / WEIGHTS)
        with zipfile.ZipFile(file) as archive:
            assert archive.testzip() is None
            assert archive.read(WEIGHTS) == (tmp_path / WEIGHTS).read_bytes()
        assert same(ModelState.take(load_bytes(file.getvalue(), {}, safe_mode=True)), state)
        for vector in (state.weights.vector, state.optimizer.vector):
            assert b"".join(file.getvalue()[first:end] for first, end in spans[id(vector)]) == vector.tobytes()


@pytest.mark.parametrize(
    "build",
    [
        lambda: of_one(keras.layers.Dense(4, dtype="float16")),
        lambda: of_one(Summed()),
        lambda: of_one(Flagged()),
        lambda: of_one(keras.layers.Dense(3), Bounded()),
        lambda: of_one(Reversed()),
        lambda: of_one(*(keras.layers.Dense(1) for _ in range(64)), Bytes()),
        pytest.param(gan, marks=pytest.mark.skipif(keras.backend.backend() == "jax", reason="needs two optimizers")),
    ],
    ids=["float16", "derived", "flags", "bounded", "reversed", "many", "two optimizers"],
)
def test_files_of_other_models_have_the_values_as_well(build):
    model = build()
    saver = ModelSaver(ModelArchive.pack(model), model)
    for state in (ModelState.take(model), *states(model)):
        file, spans = saved(saver, state)
        assert same(ModelState.take(load_bytes(file.getvalue(), {}, safe_mode=True)), state)
        assert (id(state.weights.vector) in spans) == (build is gan)


def test_a_layer_that_compares_its_weights_is_saved_by_keras():
    model = of_one(Ordered())
    saver = ModelSaver(ModelArchive.pack(model), model)
    state = states(model, 1)[0]
    state.weights.vector[:] = [2, 0, 0, 1, 1, 1]
    file, spans = saved(saver, state)
    assert not spans
    loaded = load_bytes(file.getvalue(), {}, safe_mode=True)
    assert ModelState.take(loaded).weights.vector.tolist() == [1, 0, 0, 2, 1, 1]


def test_low_rank_factors_are_merged_by_keras():
    model = low_rank()
    saver = ModelSaver(ModelArchive.pack(model), model)
    x = np.ones((2, 3), np.float32)
    for state in states(model):
        file, spans = saved(saver, state)
        assert not spans
        state.put(model)
        loaded = load_bytes(file.getvalue(), {}, safe_mode=True)
        np.testing.assert_allclose(loaded.predict(x, verbose=0), model.predict(x, verbose=0), rtol=1e-5)


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="JAX trains with one optimizer only")
def test_a_saver_of_an_archive_from_before_a_step_built_the_optimizers():
    model = gan()
    archive, before = ModelArchive.pack(model), description(model)
    metrics.prepare(model, from_arrays(np.ones((1, 3)), np.ones(1), None).spec.zeros())
    state = ModelState.take(model)
    file, _ = saved(ModelSaver(archive, model), state)
    loaded = load_bytes(file.getvalue(), {}, safe_mode=True)
    assert same(ModelState.take(loaded), state)
    assert description(loaded) == description(model) == before


def test_an_error_of_the_disk_is_raised_and_forgotten(monkeypatch):
    model = classifier()
    saver, (state, *_) = ModelSaver(ModelArchive.pack(model), model), states(model)
    with monkeypatch.context() as patch:
        patch.setattr("sparkkeras.modeling.saver.tempfile.TemporaryDirectory", raising(OSError("the disk is full")))
        with pytest.raises(OSError, match="the disk is full"):
            saved(saver, state)
    assert id(state.weights.vector) in saved(saver, state)[1]


def raising(error):
    def fail(*args, **options):
        raise error

    return fail
