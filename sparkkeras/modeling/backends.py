"""What the handling of models has to know about Keras's backends; `sparkkeras.worker.device` has the rest."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from sparkkeras.weights import Array


def compiles_operations() -> bool:
    """Whether the backend compiles each operation outside of compiled functions, for each shape, which takes long (JAX)."""
    return bool(keras.backend.backend() == "jax")


def read(variable: Any) -> Array:
    """The value of a variable; it may share memory with the variable."""
    resource = _resource(variable)
    if resource is None:
        return np.asarray(keras.ops.convert_to_numpy(variable))
    import tensorflow as tf

    value: Array = tf.raw_ops.ReadVariableOp(resource=resource.handle, dtype=resource.dtype).numpy()
    return value


def assign(variable: Any, value: Array) -> None:
    """Copy an array of the same shape and dtype into a variable."""
    resource = _resource(variable)
    if resource is not None:
        import tensorflow as tf

        tf.raw_ops.AssignVariableOp(resource=resource.handle, value=tf.constant(value))  # the array itself might be shared
    elif keras.backend.backend() == "jax":
        variable.assign(value.copy())  # JAX uses aligned memory without a copy
    else:
        variable.assign(value)


def seed(number: int) -> None:
    """Seed the backend's global generator, if layers without a seed of their own draw from it (dropout on PyTorch)."""
    if keras.backend.backend() == "torch":
        import torch

        torch.manual_seed(number)


def _resource(variable: Any) -> Any:
    """TensorFlow's variable behind a variable of Keras, or ``None``: its operations are five times as fast without Keras."""
    if keras.backend.backend() != "tensorflow":
        return None
    from tensorflow.python.ops.resource_variable_ops import ResourceVariable

    value = getattr(variable, "_value", None)
    return value if type(value) is ResourceVariable else None  # not one of a distribution strategy
