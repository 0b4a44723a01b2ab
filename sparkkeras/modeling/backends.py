"""What the handling of models has to know about Keras's backends; `sparkkeras.worker.device` has the rest."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from sparkkeras.weights import Array, Flat


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


def read_all(variables: Sequence[Any]) -> list[Array]:
    """The values of variables, as `read` returns them. JAX copies all from the device at once."""
    if keras.backend.backend() != "jax":
        return [read(variable) for variable in variables]
    import jax

    return list(jax.device_get([variable.value for variable in variables]))


def assign(variable: Any, value: Array) -> None:
    """Copy an array of the same shape and dtype into a variable."""
    assign_all([variable], [value])


def assign_all(variables: Sequence[Any], values: Sequence[Array]) -> None:
    """Copy arrays of the same shapes and dtypes into variables. JAX copies all to the device at once."""
    if keras.backend.backend() == "jax":
        import jax

        values = jax.device_put([value.copy() for value in values])  # it uses aligned memory as it is, even if told not to
    for variable, value in zip(variables, values, strict=True):
        resource = _resource(variable)
        if resource is None:
            variable.assign(value)
        else:
            import tensorflow as tf

            tf.raw_ops.AssignVariableOp(resource=resource.handle, value=tf.constant(value))  # the array might be shared


def forget_compiled(model: Any, weights: Flat) -> None:
    """Have OpenVINO compile a model again if its weights are others: they are constants in what Keras compiles."""
    if keras.backend.backend() != "openvino":
        return
    checksum = weights.checksum
    if _compiled_with.get(model) != checksum:
        model.ov_compiled_model = None
        _compiled_with[model] = checksum


_compiled_with: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""The checksum of the weights that each model was compiled with."""


def seed(number: int) -> None:
    """Seed the backend's global generator, if layers without a seed of their own draw from it (dropout on PyTorch)."""
    if keras.backend.backend() == "torch":
        import torch

        torch.manual_seed(number)


@contextmanager
def without_tensorflow() -> Iterator[None]:
    """Within this context Keras does not import TensorFlow, unless the process has imported it.

    Keras imports it to serialize objects, among which there may be types of TensorFlow, and to seed its generators. Without
    TensorFlow in the process there are no such objects and generators, but the import takes seconds and 300 MB of memory,
    and writes messages to standard error.
    """
    lazy: Any = getattr(sys.modules.get("keras.src.utils.module_utils"), "tensorflow", None)
    state = getattr(lazy, "__dict__", {})  # not getattr of the attribute itself, which would import TensorFlow
    if state.get("_available", False) is not None or lazy.name in sys.modules:  # not None: also if another thread is in here
        yield
        return
    state["_available"] = False
    try:
        yield
    finally:
        state["_available"] = None  # layers such as StringLookup need it, and Keras looks for it then


def _resource(variable: Any) -> Any:
    """TensorFlow's variable behind a variable of Keras, or ``None``: its operations are five times as fast without Keras."""
    if keras.backend.backend() != "tensorflow":
        return None
    from tensorflow.python.ops.resource_variable_ops import ResourceVariable

    value = getattr(variable, "_value", None)
    return value if type(value) is ResourceVariable else None  # not one of a distribution strategy
