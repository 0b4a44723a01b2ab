"""Keras imports TensorFlow, where it is installed, for some calls with other backends. These do not need it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


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
