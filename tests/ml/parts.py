"""What a person might have in a module of their own: it can be imported again where a saved pipeline is loaded."""

from dataclasses import dataclass

import keras
import numpy as np


class Scale(keras.layers.Layer):
    """A layer of one's own."""

    def __init__(self, factor=2.0, **kwargs):
        super().__init__(**kwargs)
        self.factor = factor

    def call(self, inputs):
        return inputs * self.factor

    def get_config(self):
        return {**super().get_config(), "factor": self.factor}


def squared(y_true, y_pred):
    """A loss of one's own."""
    return keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)


def piped(inputs, command):
    """What a Lambda layer calls, with an argument from its file."""
    return inputs


def halved(x, y):
    """A transform."""
    return x / 2 if y is None else (x / 2, y)


def nan_for_zeros(x, y):
    """A transform of what the model shall not know."""
    return np.where(x == 0, np.nan, x)


def darker(pixels):
    """A preprocessing function."""
    return pixels / 510.0


@dataclass(frozen=True)
class Shifted:
    """A transform with a setting."""

    by: float = 1.0
    where: tuple[int, ...] = (0, 1)

    def __call__(self, x, y):
        x = np.asarray(x) + self.by
        return x if y is None else (x, y)


class Stateful:
    """A transform that is no dataclass."""

    def __call__(self, x, y):
        return x, y
