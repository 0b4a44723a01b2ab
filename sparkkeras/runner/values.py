"""Values that travel between the driver and the processes of ranks: pickled by value, arrays without a copy."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

from sparkkeras.data.values import Pickled
from sparkkeras.errors import CustomObjectError
from sparkkeras.modeling.custom_code import culprit


def pack(value: Any, name: str) -> bytes:
    """Pickle a value.

    Args:
        value: The value.
        name: What it is, for messages.

    Raises:
        CustomObjectError: It cannot be pickled; the message names the part that fails.
    """
    from pyspark import cloudpickle

    try:
        return bytes(cloudpickle.dumps(value, 5))
    except Exception as error:
        raise _unpicklable(value, name, f"{type(error).__name__}: {error}") from error


def pack_parts(value: Any, name: str) -> tuple[memoryview, ...]:
    """Pickle a value, as the pickle and then the memory of each array; see `pack`."""
    from pyspark import cloudpickle

    try:
        return Pickled.of(value, cloudpickle.dumps).parts
    except pickle.PicklingError as error:
        raise _unpicklable(value, name, str(error)) from error


def unpack(data: memoryview) -> Any:
    """The inverse of `pack`."""
    return pickle.loads(data)


def unpack_parts(parts: Sequence[memoryview]) -> Any:
    """The inverse of `pack_parts`. The arrays of the value use the memory of the parts."""
    head, *arrays = parts
    return pickle.loads(head, buffers=arrays)


def _unpicklable(value: Any, name: str, reason: str) -> CustomObjectError:
    return CustomObjectError(
        f"{name} cannot be pickled, since pickling {culprit(value, name)} failed: {reason}. Return arrays, numbers and "
        "strings, or write what cannot be pickled to a file and return its path; of a Keras model, return "
        "model.get_weights()."
    )
