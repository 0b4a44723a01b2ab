"""Values of hyper-parameters: encoded as JSON, to send them to workers, and as short texts, for people.

A space may hold arbitrary objects of the user, and the connection carries no pickles. So the objects are sent beforehand,
with the task, and the encoded hyper-parameters refer to them by index.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import Enum
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


VALUE_LENGTH = 24
"""The number of characters above which values are abbreviated in progress lines and tables."""


def as_text(value: Any, short: bool = False) -> str:
    """A value as one line of text; ``short``: without its middle, since long names often differ at their ends."""
    value = value.item() if isinstance(value, np.generic) else value
    if short:
        text, head = as_text(value), VALUE_LENGTH // 2
        return text if len(text) <= VALUE_LENGTH else f"{text[:head]}…{text[len(text) - (VALUE_LENGTH - head - 1) :]}"
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, str):
        return " ".join(value.split()) or repr(value)
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e6 else format_number(value)
    if value is None or isinstance(value, int):
        return str(value)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}={as_text(item)}' for key, item in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(as_text, value))})"
    return str(getattr(value, "label", None) or getattr(value, "__name__", None) or type(value).__name__)


def format_number(value: float, digits: int = 4) -> str:
    """A number as short text: ``1e-5``, ``0.003``, ``200``."""
    mantissa, _, power = f"{value:.{digits}g}".partition("e")
    return f"{mantissa}e{int(power)}" if power else mantissa


def option_names(options: Sequence[Any]) -> tuple[str, ...]:
    """A unique name for each option of a choice: the first string in a dict, else its text, with its index if others
    have the same.
    """
    texts = [as_text(_first_string(option) or option) for option in options]
    if len(set(texts)) < len(texts):
        texts = [as_text(option) for option in options]
    count = Counter(texts)
    return tuple(f"{text} #{index}" if count[text] > 1 else text for index, text in enumerate(texts))


def _first_string(option: Any) -> str | None:
    """The first string in a dict, which names it among the options of a choice; ``None`` without one."""
    values = option.values() if isinstance(option, Mapping) else ()
    return next((value for value in values if isinstance(value, str)), None)
