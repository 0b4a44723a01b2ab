"""Values that travel between the driver and the processes of ranks: pickled by value, arrays without a copy."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

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
    return bytes(_dump(value, name, None))


def pack_parts(value: Any, name: str) -> list[memoryview]:
    """Pickle a value, as the pickle and then the memory of each array; see `pack`."""
    arrays: list[pickle.PickleBuffer] = []
    head = _dump(value, name, arrays)
    return [memoryview(head), *(array.raw() for array in arrays)]


def unpack(data: memoryview) -> Any:
    """The inverse of `pack`."""
    return pickle.loads(data)


def unpack_parts(parts: Sequence[memoryview]) -> Any:
    """The inverse of `pack_parts`. The arrays of the value use the memory of the parts."""
    head, *arrays = parts
    return pickle.loads(head, buffers=arrays)


def _dump(value: Any, name: str, arrays: list[pickle.PickleBuffer] | None) -> bytes:
    from pyspark import cloudpickle

    try:
        data: bytes = cloudpickle.dumps(value, 5, None if arrays is None else arrays.append)
    except Exception as error:
        raise CustomObjectError(
            f"{name} cannot be pickled, since pickling {culprit(value, name)} failed: {type(error).__name__}: {error}. "
            "Return arrays, numbers and strings, or write what cannot be pickled to a file and return its path; of a Keras "
            "model, return model.get_weights()."
        ) from error
    return data
