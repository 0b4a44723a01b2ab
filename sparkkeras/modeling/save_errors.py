"""Advice for models whose classes lack what Keras needs to save and load them."""

from __future__ import annotations

import inspect
import re
from typing import Any

import keras

from sparkkeras.errors import ModelError

_FROM_CONFIG = """
    @classmethod
    def from_config(cls, config):
        return cls(**{name: keras.saving.deserialize_keras_object(value) for name, value in config.items()})
"""


def save_error(model: keras.Model, error: Exception) -> ModelError:
    """Translate an error of Keras on saving a model."""
    subject = f"the model {model.name!r} cannot be saved, which is required to send it to workers: "
    found = re.match(r"\s*Object (\w+) was created by passing\s+non-serializable argument values", str(error))
    layer = next((each for each in model._flatten_layers() if found and type(each).__name__ == found[1]), None)
    if layer is not None:
        return ModelError(subject + _missing_get_config(layer))
    return ModelError(
        f"{subject}{error} Losses and metrics must be functions defined with def (not functools.partial), or Keras objects "
        "with a get_config."
    )


def _missing_get_config(layer: Any) -> str:
    parameters = list(inspect.signature(type(layer).__init__).parameters.values())[1:]
    has_kwargs = any(each.kind is each.VAR_KEYWORD for each in parameters)
    of_keras = ("name", "trainable", "dtype") if has_kwargs else ()  # super().get_config() returns them
    names = [each.name for each in parameters if each.kind is not each.VAR_KEYWORD and each.name not in of_keras]
    items = [*(["**super().get_config()"] if has_kwargs else []), *(f'"{name}": self.{name}' for name in names)]
    return (
        f"the class {type(layer).__name__} has no get_config, and of its arguments ({', '.join(names)}), some are models, "
        "layers or other objects, which Keras does not save by itself. Set each as an attribute, and add to the class:\n\n"
        f"    def get_config(self):\n        return {{{', '.join(items)}}}\n{_FROM_CONFIG}"
    )


def missing_from_config(model: keras.Model) -> str:
    """The advice to add ``from_config`` to a class whose ``get_config`` returns layers; empty if there is none."""
    for layer in model._flatten_layers():
        kind = type(layer)
        if kind.get_config.__module__.startswith("keras.") or not kind.from_config.__module__.startswith("keras."):
            continue
        names = [name for name in layer.get_config() if isinstance(getattr(layer, name, None), keras.layers.Layer)]
        if names:
            return (
                f"the get_config of the class {kind.__name__} returns models or layers ({', '.join(names)}), which "
                f"Keras loads only if the class has a from_config. Add to it:\n{_FROM_CONFIG}"
            )
    return ""
