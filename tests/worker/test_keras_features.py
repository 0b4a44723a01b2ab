"""Features of Keras: training on one worker equals plain Keras up to rounding errors.

A case has one or more features, since much of its time is the tracing of its model. Every feature is also a row of a table
in docs/support.md.
"""

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from sparkkeras.data.block import from_arrays
from sparkkeras.data.dataset import TaskContext
from sparkkeras.data.local_dataset import LocalDataset
from sparkkeras.modeling import metrics
from sparkkeras.modeling.archive import ModelArchive
from sparkkeras.modeling.own_methods import has_call
from sparkkeras.modeling.schema import input_structure, schema_of
from sparkkeras.modeling.state import ModelState, ModelWeights
from sparkkeras.training.persistence import pack, unpack
from sparkkeras.worker.batches import BatchOptions
from sparkkeras.worker.predictor import Predictor
from tests.modeling.test_unsaved import frozen, low_rank
from tests.models import Gan, differentiate, gan
from tests.scripts import ROOT
from tests.training.runs import fit

ROWS, BATCH = 10, 4  # two batches and a short one
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, 3)).astype(np.float32)
Y = X @ np.array([[1.0], [-2.0], [0.5]], np.float32)
IMAGES = RNG.random((ROWS, 6, 6, 2)).astype(np.float32)
SEQUENCES = RNG.normal(size=(ROWS, 5, 3)).astype(np.float32)
TOKENS = RNG.integers(1, 7, (ROWS, 5)).astype(np.int32)
TOKENS[::2, 3:] = 0
CLASSES = RNG.integers(0, 3, ROWS).astype(np.int32)
WEIGHTS = RNG.random(ROWS).astype(np.float32)


@dataclass(frozen=True)
class Case:
    """A compiled model and the data to train it on.

    Attributes:
        name: The features as in the documentation, optionally with a variant: ``feature: variant + feature``.
        build: Makes the compiled model.
        data: Features, labels and sample weights.
        options: Further arguments of ``fit``.
        atol: The largest difference of weights.
        callback: A callback of plain Keras that does what a worker does.
        policy: The global dtype policy.
        backends: The backends that support the feature.
        keras: The first version of Keras with the feature.
        saved: Whether Keras saves which weights are trained, so that the state of a loaded model is the same.
        marks: The marks of the test.
    """

    name: str
    build: Callable[[], Any]
    data: tuple[Any, Any, Any] = (X, Y, None)
    options: dict[str, Any] = field(default_factory=dict)
    atol: float = 2e-6
    callback: Any = None
    policy: str = "float32"
    backends: tuple[str, ...] = ("tensorflow", "jax", "torch")
    keras: str = "3.12"
    saved: bool = True
    marks: tuple[Any, ...] = ()


# Building models


def model(*stack, shape=(3,), out=None, **compiled):
    """A compiled Sequential of ``stack`` and a Dense(1), which XLA does not compile unless a case is about that."""
    made = keras.Sequential([keras.Input(shape), *stack, out or layers.Dense(1)])
    made.compile(**({"optimizer": "sgd", "loss": "mse", "jit_compile": False} | compiled))
    return made


def optimizer(name, **arguments):
    return lambda: model(optimizer=getattr(keras.optimizers, name)(0.02, **arguments), metrics=["mae"])


def masked_steps():
    """A mask reaches attention and a recurrent layer; a layer is called twice."""
    tokens = keras.Input((5,), dtype="int32")
    embedded = layers.Embedding(7, 4, mask_zero=True)(tokens)
    attended = layers.MultiHeadAttention(2, 3)(embedded, embedded, use_causal_mask=True)
    shared = layers.Dense(4, activation="tanh")
    made = keras.Model(tokens, layers.Dense(1)(shared(shared(layers.Bidirectional(layers.LSTM(2))(attended)))))
    made.compile("sgd", "mse", jit_compile=False)
    return made


def two_outputs():
    left, right = keras.Input((3,), name="left"), keras.Input((5, 3), name="right")
    joined = layers.Concatenate()([left, layers.Flatten()(right)])
    amount, kind = layers.Dense(1, name="amount")(joined), layers.Dense(3, activation="softmax", name="kind")(joined)
    made = keras.Model({"left": left, "right": right}, {"amount": amount, "kind": kind})
    made.compile(
        "sgd",
        {"amount": "mse", "kind": "sparse_categorical_crossentropy"},
        loss_weights={"amount": 0.3, "kind": 2.0},
        metrics={"kind": ["accuracy"], "amount": ["mae"]},
    )
    return made


def nested():
    left, right, tokens = keras.Input((3,), name="left"), keras.Input((5, 3)), keras.Input((5,), dtype="int32")
    joined = layers.Concatenate()([left, layers.Flatten()(right), layers.Flatten()(layers.Embedding(7, 2)(tokens))])
    amount, kind, doubled = layers.Dense(1)(joined), layers.Dense(3, activation="softmax")(joined), layers.Dense(1)(joined)
    made = keras.Model([left, {"right": right, "tokens": tokens}], {"others": (kind, doubled), "amount": amount})
    made.compile("sgd", {"amount": "mse", "others": ("sparse_categorical_crossentropy", "mae")})
    return made


def preprocessing():
    normalization = layers.Normalization()
    normalization.adapt(X)
    out, loss = layers.Dense(3, "softmax"), "sparse_categorical_crossentropy"
    return model(normalization, layers.Rescaling(0.5, 1.0), out=out, loss=loss)


def stateful():
    recurrent = [keras.Input(batch_shape=(BATCH, 5, 3)), layers.LSTM(3, stateful=True), layers.Dense(1)]
    made = keras.Sequential(recurrent)
    made.compile("sgd", "mse")
    return made


class ResettingStates(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.model.layers[0].reset_state()


def custom(name):
    return keras.saving.register_keras_serializable("tests_of_features", name)


@custom("cubed")
def cubed(y_true, y_pred):
    return keras.ops.mean(keras.ops.abs(y_true - y_pred) ** 3, axis=-1)


@custom("largest")
def largest(y_true, y_pred):
    return keras.ops.max(keras.ops.abs(y_true - y_pred), axis=-1)


@custom("bent")
def bent(x):
    return keras.ops.tanh(x) * 1.5


@custom("Penalty")
class Penalty(layers.Layer):
    def call(self, x):
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
        return x


@custom("Halving")
class Halving(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return 0.1 / (1.0 + keras.ops.cast(step, "float32"))

    def get_config(self):
        return {}


@custom("Within")
class Within(keras.metrics.Mean):
    """The fraction of predictions within 1 of the label."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(keras.ops.cast(keras.ops.abs(y_true - y_pred) < 1.0, "float32"))


@custom("Subclassed")
class Subclassed(keras.Model):
    def __init__(self, units=4, **options):
        super().__init__(**options)
        self.units = units
        self.hidden, self.out = layers.Dense(units, activation="relu"), layers.Dense(1)

    def call(self, x):
        return self.out(self.hidden(x))

    def get_config(self):
        return {**super().get_config(), "units": self.units}


def subclassed():
    made = OwnSteps()
    made(X)
    made.compile("sgd", "mse", jit_compile=False)
    return made


@custom("OwnSteps")
class OwnSteps(Subclassed):
    """Trains twice on each batch."""

    def train_step(self, *arguments):
        found = super().train_step(*arguments)
        return super().train_step(*((found[1], arguments[1]) if keras.backend.backend() == "jax" else arguments))

    def test_step(self, *arguments):
        return super().test_step(*arguments)


@custom("Adversarial")
class Adversarial(Gan):
    """A GAN that Keras can load compiled.

    It trains the discriminator five times as often as the generator, and freezes it while the generator is trained.
    """

    def get_compile_config(self):
        given = {"d_optimizer": self.d_optimizer, "g_optimizer": self.g_optimizer, "loss_fn": self.loss_function}
        return {name: keras.saving.serialize_keras_object(value) for name, value in given.items()}

    def compile_from_config(self, config):
        self.compile(**{name: keras.saving.deserialize_keras_object(value) for name, value in config.items()})

    def train_step(self, data):
        self.discriminator.trainable = True
        real = data[0] if isinstance(data, (tuple, list)) else data
        weights = self.discriminator.trainable_weights
        for _ in range(4):
            _, gradients = differentiate(lambda: self.d_loss(real), weights)
            self.d_optimizer.apply(gradients, weights)
        return super().train_step(data)

    def g_loss(self, real):
        self.discriminator.trainable = False
        return super().g_loss(real)


def penalized():
    """Regularization, constraints and custom parts in one model; without any of them the weights would differ."""
    sgd = keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 6), clipnorm=0.5, weight_decay=0.1)
    sgd.exclude_from_weight_decay(var_names=["bias"])
    constraint = keras.constraints.MaxNorm(0.5)
    hidden = layers.Dense(
        4, bent, kernel_regularizer="l2", activity_regularizer="l1", kernel_constraint=constraint, name="hidden"
    )
    return model(
        *(hidden, Penalty(), layers.Dropout(0.0), layers.GaussianNoise(0.0)),
        layers.SpectralNormalization(layers.Dense(4)),
        optimizer=sgd,
        loss=cubed,
        metrics=[Within(), largest],
        weighted_metrics=["mae"],
        run_eagerly=True,
    )


"""A case with several optimizers."""

OPTIMIZERS = (
    *("SGD", "RMSprop", "Adam", "AdamW", "Adamax", "Adadelta", "Adagrad", "Nadam", "Ftrl", "Adafactor", "Lion", "Lamb"),
    *("Muon", "ScheduleFreeAdamW"),
)
SINCE = {"Muon": "3.13", "ScheduleFreeAdamW": "3.14"}

CASES = [
    *(
        Case(
            f"Optimizers: {name}",
            optimizer(name),
            keras=SINCE.get(name, "3.12"),
            marks=() if name in ("Adafactor", "ScheduleFreeAdamW") else (pytest.mark.soak,),
        )
        for name in OPTIMIZERS
    ),
    Case(
        "Moving averages of weights (`use_ema`) + Gradient accumulation",
        optimizer("Adam", use_ema=True, ema_momentum=0.9, gradient_accumulation_steps=2),
    ),
    Case(
        "Mixed precision + Loss scaling + Dtype policies + Autoencoders",
        lambda: model(layers.Dense(4), layers.Dense(4, dtype="bfloat16"), out=layers.Dense(3)),
        (X, X, None),
        policy="mixed_float16",
        atol=1e-2,
    ),
    Case(
        "Convolutions + Learning rate schedules + Normalization layers",
        lambda: model(
            *(layers.Conv2D(3, 3), layers.SeparableConv2D(3, 2), layers.DepthwiseConv2D(2)),
            *(layers.MaxPooling2D(), layers.Flatten(), layers.BatchNormalization()),
            shape=(6, 6, 2),
            optimizer=keras.optimizers.SGD(Halving()),
        ),
        (IMAGES, Y, None),
        atol=1e-5,
        marks=(pytest.mark.core,),
    ),
    Case("Attention + Embeddings and masks + Shared layers + Recurrent layers", masked_steps, (TOKENS, Y, None)),
    Case("Low-rank adaptation (LoRA) + Weight decay", low_rank, (X, X, None), saved=False, marks=(pytest.mark.core,)),
    Case(
        "Several inputs and outputs: by name + Loss weights + Metrics per output",
        two_outputs,
        ({"left": X, "right": SEQUENCES}, {"amount": Y, "kind": CLASSES}, None),
    ),
    Case(
        "Several inputs and outputs: nested",
        nested,
        ((X, {"tokens": TOKENS, "right": SEQUENCES}), {"amount": Y, "others": (CLASSES, 2 * Y)}, None),
    ),
    Case(
        "Custom losses + Custom metrics + Custom layers + Custom activations + Regularizers + Constraints + `add_loss` + "
        "Dropout + Gradient clipping + Sample weights + Weighted metrics + `run_eagerly`",
        penalized,
        (X, Y, WEIGHTS),
        atol=1e-5,
    ),
    Case("Preprocessing layers + Class weights", preprocessing, (X, CLASSES, None), {"class_weight": {0: 0.5, 2: 3.0}}),
    Case(
        "Frozen layers (`trainable=False`) + Frozen weights + Losses",
        frozen,
        (X, np.eye(3, dtype=np.float32)[CLASSES], None),
    ),
    Case("Subclassed models + Custom training steps + Custom evaluation steps", subclassed, marks=(pytest.mark.core,)),
    Case(
        "Several optimizers",
        lambda: gan(Adversarial),
        (X, None, None),
        backends=("tensorflow", "torch"),
        marks=(pytest.mark.core,),
    ),
    Case(
        "Stateful recurrent layers",
        stateful,
        (SEQUENCES[:8], Y[:8], None),
        callback=ResettingStates(),
        backends=("tensorflow", "jax"),
        keras="3.14",
    ),
    Case(
        "`jit_compile` + `steps_per_execution`",
        lambda: model(jit_compile=True, steps_per_execution=2),
        backends=("tensorflow", "jax"),
    ),
]


def block(case):
    return from_arrays(*keras.tree.map_structure(lambda array: None if array is None else array.copy(), case.data))


def called(model, x):
    return keras.tree.map_structure(keras.ops.convert_to_numpy, model(x, training=False))


def runs_on(case):
    older = tuple(map(int, keras.__version__.split(".")[:2])) < tuple(map(int, case.keras.split(".")))
    skipped = (pytest.mark.skip(f"Keras {case.keras}"),) if older else ()
    return pytest.param(case, id=case.name, marks=(*case.marks, *skipped))


def equals_plain_keras(case, model, rows, listed):
    """Check that training equals plain Keras, in both modes; return the trained model, saved and loaded."""
    metrics.prepare(model, rows.spec.zeros())
    before = ModelState.take(model)
    found = []
    for mode in ("synchronous", "asynchronous"):
        before.put(model)
        history, _ = fit(SimpleNamespace(model=model), LocalDataset((rows,)), mode, epochs=2, **case.options)
        found.append((ModelState.take(model), history.history))
    before.put(model)
    model.reset_metrics()
    if not has_call(model):
        model.built = True  # with PyTorch, Keras builds other models by calling them
    _, y, weight = case.data
    given = {"sample_weight": weight, "callbacks": case.callback, **case.options}
    plain = model.fit(listed, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, **given).history
    expected = ModelState.take(model)
    assert not np.array_equal(expected.weights.vector, before.weights.vector)
    for state, logs in found:
        np.testing.assert_allclose(state.weights.vector, expected.weights.vector, rtol=0, atol=case.atol)
        np.testing.assert_allclose(state.optimizer.vector, expected.optimizer.vector, rtol=0, atol=10 * case.atol)
        for mine, other in zip(state.optimizer.integer_variables, expected.optimizer.integer_variables, strict=True):
            np.testing.assert_array_equal(mine, other)
        assert logs.keys() == plain.keys()
        for name in plain:
            np.testing.assert_allclose(logs[name], plain[name], rtol=1e-4, atol=10 * case.atol)

    with warnings.catch_warnings():
        if not case.saved:  # the optimizer of the loaded model has the variables for other weights
            warnings.filterwarnings("ignore", message="Skipping variable loading for optimizer")
        loaded, _, _ = unpack(pack(model, {}, {}), {}, True)
    if case.saved:
        state = ModelState.take(loaded)
        np.testing.assert_array_equal(state.weights.vector, expected.weights.vector)
        np.testing.assert_array_equal(state.optimizer.vector, expected.optimizer.vector)
    return loaded


@pytest.fixture
def policy(case):
    keras.config.set_dtype_policy(case.policy)
    yield
    keras.config.set_dtype_policy("float32")


@pytest.mark.parametrize("case", [runs_on(case) for case in CASES if keras.backend.backend() in case.backends])
def test_one_worker_equals_plain_keras(case, policy):
    keras.utils.set_random_seed(1)
    model = case.build()
    rows = block(case)
    x = case.data[0]
    listed = list(x) if isinstance(x, tuple) else x
    loaded = equals_plain_keras(case, model, rows, listed)
    if not has_call(model) or case.build is stateful:  # calls of all rows have another batch size
        return
    predicted = called(model, listed)
    options = BatchOptions(BATCH, input_structure=input_structure(model))
    packed = ModelArchive.pack_to_predict(model), ModelWeights.take(model)
    predictor = Predictor(*packed, options, schema_of(model), TaskContext(0))
    for other in (predictor.predict(rows), called(loaded, listed)):
        for mine, theirs in zip(keras.tree.flatten(other), keras.tree.flatten(predicted), strict=True):
            np.testing.assert_allclose(np.float32(mine), np.float32(theirs), rtol=1e-4, atol=10 * case.atol)


def test_the_documentation_lists_these_features():
    section = (ROOT / "docs" / "support.md").read_text().partition("\n## Keras features\n")[2].partition("\n#")[0]
    rows = re.findall(r"^\| ([^|]+?) +\|", section, re.MULTILINE)
    listed = [row for row in rows if row != "Feature" and not row.startswith("-")]
    features = {feature.partition(": ")[0] for case in CASES for feature in case.name.split(" + ")}
    assert sorted(listed) == sorted(features | {"Quantization"})  # which cannot be trained: tests/modeling/test_archive.py
