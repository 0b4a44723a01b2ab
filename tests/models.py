"""Small models for several tests.

Layers and optimizers have explicit names, so that workers recognize two instances as the same model and reuse its traced
functions: Keras would give the second one of a test another name.
"""

from weakref import WeakValueDictionary

import keras
import numpy as np


class VariablesOfWorker(WeakValueDictionary):
    """What `sparkkeras.modeling.outside` knows on a worker that runs in this process: no variables of the driver."""

    def __init__(self, *of_driver):
        super().__init__()
        self._of_driver = of_driver

    def __setitem__(self, key, value):
        if not any(value is each for each in self._of_driver):
            super().__setitem__(key, value)


def classifier(width=64, units=64, classes=10, seed=0, **compiled):
    """A dense classifier on rows of ``width`` values."""
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [
            keras.Input((width,), name="pixels"),
            keras.layers.Dense(units, activation="relu", name="hidden"),
            keras.layers.Dense(classes, activation="softmax", name="scores"),
        ],
        name="classifier",
    )
    defaults = {"optimizer": "adam", "loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"]}
    model.compile(**_named(defaults | compiled))
    return model


def regression(width=3, seed=0, **compiled):
    """A linear model on rows of ``width`` values, with one output."""
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((width,), name="x"), keras.layers.Dense(1, name="y")], name="regression")
    model.compile(**_named({"optimizer": keras.optimizers.SGD(0.05), "loss": "mse"} | compiled))
    return model


def two_by_two():
    """A model with the inputs left and right, of one and four values, and the outputs size and kind, of one and three."""
    keras.utils.set_random_seed(2)
    left, right = keras.Input((1,), name="left"), keras.Input((4,), name="right")
    both = keras.layers.Concatenate(name="both")([left, right])
    outputs = [keras.layers.Dense(1, name="size")(both), keras.layers.Dense(3, "softmax", name="kind")(both)]
    model = keras.Model([left, right], outputs, name="twofold")
    model.compile(loss=["mse", "sparse_categorical_crossentropy"])
    return model


def same(one, other):
    """Whether two SparkModels have the same weights, to the bit."""
    pairs = zip(one.model.get_weights(), other.model.get_weights(), strict=True)
    return all(np.array_equal(*pair) for pair in pairs)


def _named(compiled):
    """Compile arguments with an optimizer that has the name of its class."""
    optimizer = keras.optimizers.get(compiled["optimizer"])
    optimizer.name = type(optimizer).__name__.lower()
    return compiled | {"optimizer": optimizer}


@keras.saving.register_keras_serializable("tests_of_models")
class Gan(keras.Model):
    """The GAN of Keras's guide, with noise that is a function of the rows."""

    def __init__(self, discriminator, generator, **options):
        super().__init__(**options)
        self.discriminator, self.generator = discriminator, generator

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_function = d_optimizer, g_optimizer, loss_fn
        self.d_tracker, self.g_tracker = keras.metrics.Mean(name="d_loss"), keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        return [self.d_tracker, self.g_tracker]

    def d_loss(self, real):
        fake = self.generator(real[:, :2])
        labels = keras.ops.concatenate([keras.ops.ones_like(fake[:, :1]), keras.ops.zeros_like(real[:, :1])])
        return self.loss_function(labels, self.discriminator(keras.ops.concatenate([fake, real])))

    def g_loss(self, real):
        scores = self.discriminator(self.generator(real[:, :2]))
        return self.loss_function(keras.ops.zeros_like(scores), scores)

    def train_step(self, data):
        real = data[0] if isinstance(data, (tuple, list)) else data
        for loss_of, optimizer, part, tracker in (
            (self.d_loss, self.d_optimizer, self.discriminator, self.d_tracker),
            (self.g_loss, self.g_optimizer, self.generator, self.g_tracker),
        ):
            weights = part.trainable_weights
            loss, gradients = differentiate(lambda: loss_of(real), weights)  # noqa: B023
            optimizer.apply(gradients, weights)
            tracker.update_state(loss)
        return {"d_loss": self.d_tracker.result(), "g_loss": self.g_tracker.result()}

    def get_config(self):
        parts = {"discriminator": self.discriminator, "generator": self.generator}
        return {**super().get_config(), **{name: keras.saving.serialize_keras_object(part) for name, part in parts.items()}}

    @classmethod
    def from_config(cls, config):
        parts = {name: keras.saving.deserialize_keras_object(config.pop(name)) for name in ("discriminator", "generator")}
        return cls(**parts, **config)


def differentiate(function, weights):
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = function()
        return loss, tape.gradient(loss, weights)
    import torch

    loss = function()
    found = torch.autograd.grad(loss, [weight.value for weight in weights])
    return loss.detach(), list(found)


def gan(kind=Gan):
    """A compiled GAN on rows of three values."""
    keras.utils.set_random_seed(1)
    discriminator = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "leaky_relu"), keras.layers.Dense(1)])
    generator = keras.Sequential([keras.Input((2,)), keras.layers.Dense(4, "leaky_relu"), keras.layers.Dense(3)])
    made = kind(discriminator, generator)
    made.compile(
        keras.optimizers.Adam(0.01, beta_1=0.5), keras.optimizers.RMSprop(0.02), keras.losses.BinaryCrossentropy(True)
    )
    return made


class Distilled(keras.losses.Loss):
    """The distance to the predictions of a teacher, which is a part of the loss."""

    def __init__(self, teacher, name="distilled", **others):
        super().__init__(name=name, **others)
        self.teacher = teacher

    def call(self, y, predicted):
        return keras.ops.square(predicted - self.teacher(y))

    def get_config(self):
        return super().get_config() | {"teacher": keras.saving.serialize_keras_object(self.teacher)}

    @classmethod
    def from_config(cls, config):
        return cls(**config | {"teacher": keras.saving.deserialize_keras_object(config["teacher"])})
