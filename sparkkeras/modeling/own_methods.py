"""What models can do whose class overrides Keras's methods, such as a GAN, and hints for errors in these methods."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras

from sparkkeras.data.block import BlockSpec
from sparkkeras.errors import ModelError, SparkKerasError
from sparkkeras.modeling.optimizers import has_own_step
from sparkkeras.modeling.state import has_call


def check_can_predict(model: keras.Model) -> None:
    """Reject a model with neither ``call`` nor its own ``predict_step``.

    Raises:
        ModelError: The model cannot predict.
    """
    if not has_call(model) and type(model).predict_step is keras.Model.predict_step:
        attributes = vars(model) | vars(model).get("_modules", {})  # PyTorch keeps layers in a dict of its own
        parts = [name for name, value in attributes.items() if isinstance(value, keras.Model) and not name.startswith("_")]
        one = f" Predict with a part of it, such as SparkModel(model.{parts[-1]}), or" if parts else " To predict,"
        raise ModelError(f"the model {model.name!r} has no call, so it cannot predict.{one} implement {_kind(model)}.call.")
    _check_signature(model, "predict_step")


def check_can_evaluate(model: keras.Model) -> None:
    """Reject a model with neither ``call`` nor its own ``test_step``.

    Raises:
        ModelError: The model cannot be evaluated, and so training cannot validate.
    """
    if not has_call(model) and type(model).test_step is keras.Model.test_step:
        raise ModelError(
            f"the model {model.name!r} has neither a call nor its own test_step, so it cannot be evaluated: implement "
            f"{_kind(model)}.test_step, or train without validation."
        )
    _check_signature(model, "test_step")


def check_can_train(model: keras.Model, validates: bool) -> None:
    """Reject a model whose methods cannot be called in training, and with ``validates`` in validation.

    Raises:
        ModelError: A method is missing, or takes other arguments than those that Keras passes.
    """
    _check_signature(model, "train_step")
    if validates:
        check_can_evaluate(model)


def _check_signature(model: keras.Model, name: str) -> None:
    """Reject a method that was written for another backend: with JAX, steps take and return the state of the model."""
    mine, wanted = (inspect.signature(getattr(kind, name)) for kind in (type(model), keras.Model))
    given = [parameter.name for parameter in wanted.parameters.values()]
    try:
        mine.bind(*given)
    except TypeError as error:
        taken = ", ".join(mine.parameters)
        raise ModelError(
            f"{_kind(model)}.{name}({taken}) cannot be called as {name}({', '.join(given[1:])}), as Keras does with the "
            f"backend {keras.backend.backend()!r}: a {name} is written for one backend. Implement it for this backend, or "
            "set another one with the environment variable KERAS_BACKEND."
        ) from error


@contextmanager
def explained_errors(model: keras.Model, spec: BlockSpec) -> Iterator[None]:
    """Raise errors of the model's own ``train_step`` that show a usual mistake as a `ModelError` that names it.

    Args:
        model: The model that trains in the ``with`` block.
        spec: The shapes and dtypes of the rows.
    """
    try:
        yield
    except SparkKerasError:
        raise
    except Exception as error:
        advice = hint(model, spec, error) if has_own_step(model) else ""
        if advice:
            reason = str(error).strip().partition("\n")[0].partition(". ")[0].rstrip(".")
            raise ModelError(
                f"the train_step of the model {model.name!r} failed. {advice} The error: {type(error).__name__}: {reason}."
            ) from error
        raise


def hint(model: keras.Model, spec: BlockSpec, error: Exception) -> str:
    """What an error of a model's own ``train_step`` shows to be wrong; empty if that is unknown."""
    text = f"{type(error).__name__}: {error}"
    if spec.form.y is None and any(words in text for words in _UNPACKING):
        return (
            "The data has no labels, so train_step(data) receives the features alone, and x, y = data fails: pass labels, "
            "or do without them in train_step."
        )
    if any(words in text for words in _NOTHING_RETURNED):
        logs = "a dict of metrics, such as {m.name: m.result() for m in self.metrics}"
        state = ", and the state" if "state" in inspect.signature(keras.Model.train_step).parameters else ""
        return f"{_kind(model)}.train_step must return {logs}{state}."
    return ""


_UNPACKING = (
    "OperatorNotAllowedInGraphError",
    "values to unpack",
    "is not iterable",
    "iterate over",
    "Iterating over",
)
"""Parts of the errors of backends for ``x, y = data``, where ``data`` is a tensor or a tuple of one."""

_NOTHING_RETURNED = (
    "OptionalFromValue",
    "'NoneType' object has no attribute 'items'",
    "cannot unpack non-iterable NoneType",
)
"""Parts of the errors of backends for a ``train_step`` that returns ``None``."""


def _kind(model: Any) -> str:
    return type(model).__name__
