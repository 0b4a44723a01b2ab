"""Hyper-parameters as JSON knows them, on their way to workers.

A space may hold any object of the person's, and nothing is pickled on the wire: objects travel beforehand, with the task,
and what is encoded names them by their place among these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sparkkeras.errors import ConfigurationError

PLAIN = (str, int, float, bool, type(None))
"""What JSON gives back as it was; members of an enumeration, say, it makes numbers and texts of."""


def encode(params: Any, objects: Sequence[Any]) -> Any:
    """Hyper-parameters as JSON knows them; `decode` is the way back.

    Args:
        params: Numbers, texts, lists, tuples and dicts of them, and objects.
        objects: The objects that there may be.

    Raises:
        ConfigurationError: There is something else.
    """
    value = params.item() if isinstance(params, np.generic) else params
    if type(value) in PLAIN:
        return value
    if type(value) is dict:
        return {"dict": [[encode(key, objects), encode(member, objects)] for key, member in value.items()]}
    if type(value) in (list, tuple):
        return {type(value).__name__: [encode(member, objects) for member in value]}
    for place, known in enumerate(objects):
        if known is value:
            return {"object": place}
    raise ConfigurationError(
        f"space: {value!r} ({type(value).__name__}) is computed within the space, and only numbers, texts, lists and "
        "dicts of them can be: compute it in the function that builds the model, or make it an option of hp.choice."
    )


def decode(encoded: Any, objects: Sequence[Any]) -> Any:
    """What `encode` was given."""
    if not isinstance(encoded, Mapping):
        return encoded
    ((kind, members),) = encoded.items()
    if kind == "dict":
        return {decode(key, objects): decode(member, objects) for key, member in members}
    if kind == "object":
        return objects[members]
    decoded = [decode(member, objects) for member in members]
    return tuple(decoded) if kind == "tuple" else decoded
