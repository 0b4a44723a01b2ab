"""Properties of Keras's backends on which the handling of models depends; `sparkkeras.worker.device` has the others."""

from __future__ import annotations

import keras


def compiles_operations() -> bool:
    """Whether the backend compiles each operation outside of compiled functions, for each shape, which takes long (JAX)."""
    return bool(keras.backend.backend() == "jax")


def shares_memory() -> bool:
    """Whether variables may use the memory of the array that is assigned to them (JAX)."""
    return bool(keras.backend.backend() == "jax")
