"""What Keras does not save of a model, in copies that were sent to workers or saved and loaded."""

import keras
import numpy as np
import pytest
from keras import layers

from sparkkeras.errors import ModelError
from sparkkeras.modeling import compilation
from sparkkeras.modeling.archive import ModelArchive
from sparkkeras.modeling.compilation import check_trainable
from sparkkeras.modeling.optimizers import built_for, inner_optimizer, optimizers_of
from sparkkeras.training.persistence import pack, unpack
from tests.modeling.test_archive import makes_the_round_trip
from tests.models import gan

several = pytest.mark.skipif(keras.backend.backend() == "jax", reason="Keras passes one optimizer to a train_step of JAX")


X = np.random.default_rng(0).normal(size=(9, 3)).astype(np.float32)
Y = np.eye(3, dtype=np.float32)[np.arange(9) % 3]


def attention():
    """A model with LoRA in a layer inside a layer, which Keras does not save."""
    rows = keras.Input((3,))
    steps = layers.Dense(4)(layers.Reshape((3, 1))(rows))
    attended = layers.MultiHeadAttention(2, 2)
    made = keras.Model(rows, layers.Dense(3)(layers.Flatten()(attended(steps, steps))))
    attended.query_dense.enable_lora(2)
    return made


def low_rank():
    made = attention()
    made.compile(undecayed(var_names=["bias"]), keras.losses.Huber(delta=0.1), run_eagerly=True)
    return made


def frozen():
    """A layer is frozen, and weights of others; the loss has arguments of NumPy, and the optimizer is wrapped."""
    hidden = [layers.Dense(4), layers.Dense(4), layers.BatchNormalization()]
    made = keras.Sequential([keras.Input((3,)), *hidden, layers.Dense(3)])
    made.layers[0].trainable = made.layers[1].kernel.trainable = made.layers[2].beta.trainable = False
    loss = keras.losses.CategoricalFocalCrossentropy(alpha=np.array([0.2, 0.3, 0.5], np.float32), from_logits=True)
    made.compile(keras.optimizers.LossScaleOptimizer(undecayed(var_list=[made.layers[3].kernel])), loss, run_eagerly=True)
    return made


def undecayed(**excluded):
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(**excluded)
    return optimizer


def through_a_file(model):
    return unpack(pack(model, {}, {}), {}, True)[0]


@pytest.mark.parametrize("build", [low_rank, frozen])
def test_a_copy_trains_with_what_keras_does_not_save(build):
    """tests/worker/test_keras_features.py trains copies for workers."""
    makes_the_round_trip(build(), X, Y, through_a_file)


def weights_of(model):
    return {path: built_for(optimizer, model) for path, optimizer in optimizers_of(model).items()}


def test_arguments_of_losses_that_cannot_be_saved():
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2, "softmax")])
    model.compile("sgd", keras.losses.Huber(delta=object()))
    with pytest.raises(ModelError, match="'delta'.* Huber cannot"):
        ModelArchive.pack(model)


@keras.saving.register_keras_serializable("tests_of_unsaved")
class OwnCompile(keras.Sequential):
    """Sets private and shared attributes in ``compile``, and a dict whose keys are not strings."""

    def compile(self, optimizer, adversarial):
        super().compile(optimizer, adversarial)
        self.chosen, self.steps = optimizer, {0: 1, (1, "a"): 2.5, 3: [optimizer]}
        self._adversarial, self._losses_by_name = adversarial, {"adversarial": adversarial}

    def train_step(self, *arguments):
        return super().train_step(*arguments)


@pytest.fixture(params=["float32", "mixed_float16"])
def policy(request):
    keras.config.set_dtype_policy(request.param)
    yield
    keras.config.set_dtype_policy("float32")


def test_attributes_that_compile_sets(policy):
    model = OwnCompile([keras.Input((3,)), layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), keras.losses.Huber(delta=0.3))
    check_trainable(model)
    model.fit(np.ones((2, 3), np.float32), np.ones((2, 1), np.float32), verbose=0)
    copy = ModelArchive.pack(model).unpack()
    assert list(optimizers_of(model)) == list(optimizers_of(copy)) == ["optimizer"]
    assert copy.chosen is inner_optimizer(copy)
    assert copy.steps[3][0] is copy.chosen
    assert {key: copy.steps[key] for key in (0, (1, "a"))} == {0: 1, (1, "a"): 2.5}
    assert copy._adversarial is copy._losses_by_name["adversarial"] is copy.loss
    assert copy.loss._fn_kwargs == {"delta": 0.3}


def test_a_private_attribute_that_cannot_be_saved():
    class Opaque(OwnCompile):
        def compile(self, *arguments):
            super().compile(*arguments)
            self._table = object()

    model = Opaque([keras.Input((3,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ModelError, match="Opaque .* sets _table"):
        ModelArchive.pack(model)


@several
def test_optimizers_that_were_built_for_other_weights_make_another_archive():
    model = gan()

    def packed(weights):
        optimizers = keras.optimizers.Adam(), keras.optimizers.Adam()
        optimizers[0].build(weights)
        optimizers[1].build(model.generator.trainable_variables)
        model.compile(*optimizers, keras.losses.BinaryCrossentropy(True))
        return ModelArchive.pack(model)

    first = packed(model.discriminator.trainable_variables)
    second = packed(model.discriminator.layers[-1].trainable_variables)
    assert weights_of(first.unpack())["d_optimizer"] == [0, 1, 2, 3]
    assert weights_of(second.unpack())["d_optimizer"] == [2, 3]


def test_several_optimizers_are_rejected_with_jax(monkeypatch):
    monkeypatch.setattr(compilation, "step_is_stateless", lambda: True)
    with pytest.raises(ModelError, match="d_optimizer, g_optimizer, .* JAX"):
        check_trainable(gan())
