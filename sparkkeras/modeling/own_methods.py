"""What models can do whose class overrides Keras's methods, such as a GAN."""

from __future__ import annotations

import inspect

import keras

from sparkkeras.errors import ModelError


def overrides(model: keras.Model, *methods: str) -> bool:
    """Whether the model's class overrides one of these methods of ``keras.Model``, of which backends may lack some."""
    return any(getattr(type(model), name, None) is not getattr(keras.Model, name, None) for name in methods)


def overrides_loop(model: keras.Model) -> bool:
    """Whether ``fit`` or ``evaluate`` of the model's class do more than Keras's, but for its losses and its ``call``."""
    steps = ("train_step", "test_step", "make_train_function", "make_test_function")
    return overrides(model, "fit", "evaluate", *steps, "compute_metrics", "reset_metrics", "get_metrics_result")


def has_call(model: keras.Model) -> bool:
    """Whether the model can predict: a model with its own ``train_step`` may have no ``call``."""
    return overrides(model, "call")


def check_can_predict(model: keras.Model) -> None:
    """Reject a model with neither ``call`` nor its own ``predict_step``.

    Raises:
        ModelError: The model cannot predict.
    """
    if not overrides(model, "call", "predict_step"):
        attributes = vars(model) | vars(model).get("_modules", {})  # PyTorch keeps layers in a dict of its own
        parts = [name for name, value in attributes.items() if isinstance(value, keras.Model) and not name.startswith("_")]
        one = f" Predict with a part of it, such as SparkModel(model.{parts[-1]}), or" if parts else " To predict,"
        raise ModelError(
            f"the model {model.name!r} has no call, so it cannot predict.{one} implement {type(model).__name__}.call."
        )
    _check_signature(model, "predict_step")


def check_can_evaluate(model: keras.Model) -> None:
    """Reject a model with neither ``call`` nor its own ``test_step``.

    Raises:
        ModelError: The model cannot be evaluated, and so training cannot validate.
    """
    if not overrides(model, "call", "test_step"):
        raise ModelError(
            f"the model {model.name!r} has neither a call nor its own test_step, so it cannot be evaluated: implement "
            f"{type(model).__name__}.test_step, or train without validation."
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
            f"{type(model).__name__}.{name}({taken}) cannot be called as {name}({', '.join(given[1:])}), as Keras does with "
            f"the backend {keras.backend.backend()!r}: a {name} is written for one backend. Implement it for this backend, "
            "or set another one with the environment variable KERAS_BACKEND."
        ) from error
