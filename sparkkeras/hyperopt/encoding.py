"""Encodes hyper-parameters as JSON, to send them to workers.

A space may hold arbitrary objects of the user, and the connection carries no pickles. So the objects are sent beforehand,
with the task, and the encoded hyper-parameters refer to them by index.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sparkkeras.errors import ConfigurationError

JSON_TYPES = (str, int, float, bool, type(None))
"""The types that JSON preserves; it would turn content of an ``IntEnum``, for example, into plain numbers."""


def encode(params: Any, objects: Sequence[Any]) -> Any:
    """Encode hyper-parameters as JSON values; `decode` is the inverse.

    Args:
        params: Numbers, strings, lists, tuples and dicts of them, and objects.
        objects: The objects that ``params`` may hold.

    Raises:
        ConfigurationError: ``params`` holds another object.
    """
    value = params.item() if isinstance(params, np.generic) else params
    if type(value) in JSON_TYPES:
        return value
    if type(value) is dict:
        return {"dict": [[encode(key, objects), encode(item, objects)] for key, item in value.items()]}
    if type(value) in (list, tuple):
        return {type(value).__name__: [encode(item, objects) for item in value]}
    for index, known in enumerate(objects):
        if known is value:
            return {"object": index}
    raise ConfigurationError(
        f"space: {value!r} ({type(value).__name__}) is computed within the space, which works only for numbers, strings, "
        "lists and dicts of them: compute it in the function that builds the model, or make it an option of a choice."
    )


def decode(encoded: Any, objects: Sequence[Any]) -> Any:
    """Restore the hyper-parameters that `encode` encoded, with these objects."""
    if not isinstance(encoded, Mapping):
        return encoded
    ((kind, content),) = encoded.items()
    if kind == "dict":
        return {decode(key, objects): decode(item, objects) for key, item in content}
    if kind == "object":
        return objects[content]
    decoded = [decode(item, objects) for item in content]
    return tuple(decoded) if kind == "tuple" else decoded
