"""Custom code as in a user's module: it can be imported where a saved pipeline is loaded."""

from dataclasses import dataclass

import keras
import numpy as np


class Scale(keras.layers.Layer):
    """A custom layer."""

    def __init__(self, factor=2.0, **kwargs):
        super().__init__(**kwargs)
        self.factor = factor

    def call(self, inputs):
        return inputs * self.factor

    def get_config(self):
        return {**super().get_config(), "factor": self.factor}


def squared(y_true, y_pred):
    """A custom loss."""
    return keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)


def piped(inputs, command):
    """The function of a Lambda layer, with an argument from the saved file."""
    return inputs


def halved(x, y):
    """A batch transform."""
    return x / 2 if y is None else (x / 2, y)


def nan_for_zeros(x, y):
    """A batch transform that makes the model's input NaN."""
    return np.where(x == 0, np.nan, x)


def darker(pixels):
    """A preprocessing function."""
    return pixels / 510.0


@dataclass(frozen=True)
class Shifted:
    """A batch transform with settings."""

    by: float = 1.0
    where: tuple[int, ...] = (0, 1)

    def __call__(self, x, y):
        x = np.asarray(x) + self.by
        return x if y is None else (x, y)


class Stateful:
    """A batch transform that is not a dataclass."""

    def __call__(self, x, y):
        return x, y
