"""Initial values of weights, which a copy of a model does not need: it gets its weights afterwards."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from sparkkeras.modeling.backends import compiles_operations


@contextmanager
def without_random_values() -> Iterator[None]:
    """Weights that this thread creates within this context are zero instead of random, if random ones take long.

    JAX compiles Keras's random initializers for each shape, which takes a tenth of a second or more.
    """
    if not compiles_operations():
        yield
        return
    _make_optional()
    _thread.skips = True
    try:
        yield
    finally:
        _thread.skips = False


_thread = threading.local()


@functools.cache
def _make_optional() -> None:
    """Have variables of Keras ask whether this thread needs random initial values."""
    variable: Any = keras.Variable
    initialize = getattr(variable, "_initialize_with_initializer", None)
    if initialize is None:  # a version of Keras without this method
        return
    kinds = keras.initializers
    random = (kinds.RandomNormal, kinds.RandomUniform, kinds.TruncatedNormal, kinds.VarianceScaling, kinds.Orthogonal)

    @functools.wraps(initialize)
    def initialize_if_needed(self: Any, initializer: Any) -> None:
        skips = getattr(_thread, "skips", False) and isinstance(initializer, random)
        initialize(self, _zeros if skips else initializer)

    variable._initialize_with_initializer = initialize_if_needed


def _zeros(shape: Any, dtype: str) -> Any:
    return np.zeros(shape, dtype)
