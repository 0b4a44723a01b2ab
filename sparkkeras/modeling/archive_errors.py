"""Errors of saving and loading a model, with the reason and advice in place of Keras's own messages."""

from __future__ import annotations

import inspect
import re
import zipfile
import zlib
from typing import Any

import keras

from sparkkeras.errors import CustomObjectError, ModelError


def load_error(error: Exception, handled: BaseException | None) -> ModelError:
    """Translate an error of Keras on loading a model. Keras wraps errors several times; the innermost one is the cause.

    Args:
        error: The exception that Keras raised.
        handled: The exception that the caller was handling when it called Keras, which is not the cause.
    """
    text = str(error)
    if "Could not locate" in text:
        what = text.split("Could not locate", 1)[1].split(". Make sure", 1)[0].strip()
        return CustomObjectError(
            f"the model needs the custom {what}, which was not found: import the module that defines it first, or pass "
            "custom_objects={name: object}."
        )
    if "unsafe deserialization" in text or "safe_mode" in text:
        return ModelError(
            "the model holds Python code (a lambda in a Lambda layer), which is not loaded in safe mode: "
            "pass safe_mode=False if you trust the source of the file."
        )
    method = re.search(r"to be a dict for method\b.*?'config': '(\w+)'", text, re.DOTALL)
    if method:
        return ModelError(
            f"{method[1]}, a loss, metric or other function of the model, is a method, of which Keras saves only the name, "
            f"not the object with its values. Define it as a function, def {method[1]}(y_true, y_pred), or as a subclass of "
            "keras.losses.Loss or keras.metrics.Metric whose get_config returns the values that it uses."
        )
    origin: BaseException = error
    while (deeper := _raised_from(origin)) is not None and deeper is not handled:
        origin = deeper
    if isinstance(origin, (zipfile.BadZipFile, zlib.error)):
        damaged = ModelError(f"the saved model is damaged ({origin}): copy the file again, or save the model again.")
        damaged.__cause__ = origin
        return damaged
    kinds = re.findall(r"<class '([\w.<>]+)'> could not be deserialized|deserializing class '(\w+)'", text)
    place = f" in the class {''.join(kinds[-1]).rpartition('.')[2]}" if kinds else ""
    reason = " ".join(_innermost(text).split())[:_LONGEST_REASON].rstrip(".")
    translated = ModelError(
        f"the model cannot be loaded from its saved form{place}: {type(origin).__name__}: {reason}. {_load_advice(reason)}"
    )
    translated.__cause__ = origin
    return translated


def _raised_from(error: BaseException) -> BaseException | None:
    """The exception that a traceback shows before this one: its cause or context."""
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


_LONGEST_REASON = 600
"""The maximum length, in characters, of Keras's message inside ours."""


_OF_KERAS = ("name", "trainable", "dtype")
"""The keys that every layer's configuration has."""


def _innermost(text: str) -> str:
    """The reason in a message of Keras, without the configurations that it prints first."""
    reason = re.split(r"(?:Exception encountered|Error encountered during deserialization): ", text)[-1]
    return reason.split("\n\nArguments received by", 1)[0].removeprefix("''").removesuffix("''").strip()


def _load_advice(reason: str) -> str:
    """How to fix a custom class that does not load."""
    unexpected = re.search(r"unexpected keyword argument '(\w+)'", reason)
    if unexpected and unexpected[1] in _OF_KERAS:
        return (
            "Keras calls the constructor with what get_config returns, which includes name, trainable and dtype. Write def "
            "__init__(self, units, **kwargs) with super().__init__(**kwargs), and def get_config(self) that returns "
            '{**super().get_config(), "units": self.units}, with your arguments in place of units.'
        )
    if unexpected or "required positional argument" in reason or "required keyword-only argument" in reason:
        return (
            "Keras calls the constructor with what get_config returns: its keys must be the names of the constructor's "
            'arguments, {**super().get_config(), "units": self.units} for def __init__(self, units, **kwargs).'
        )
    return (
        "A custom layer needs a get_config that returns its constructor's arguments; a Lambda layer's function may only "
        "use its arguments, or must be defined with def."
    )


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
    of_keras = _OF_KERAS if has_kwargs else ()  # super().get_config() returns them
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
