"""Whether a checkpoint is of the same work as a call of `fit`, and if not, what differs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from sparkkeras.errors import ConfigurationError, counted

_SHOWN = 4
_ABSENT = "nothing"


def differences(stored: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """What differs between two descriptions, in words.

    Args:
        stored: The description in the checkpoint: nested values for JSON.
        current: That of this call.
    """
    before, now = dict(_leaves("", stored)), dict(_leaves("", json.loads(json.dumps(current))))
    names = [*before, *(name for name in now if name not in before)]
    return [
        f"{name}: {_shown(before.get(name, _ABSENT))} in the checkpoint, {_shown(now.get(name, _ABSENT))} now"
        for name in names
        if before.get(name) != now.get(name)
    ]


def other_work(path: str, name: str, found: list[str]) -> ConfigurationError:
    """The error for a checkpoint of other work, with the differences that were found."""
    more = f"; and {counted(len(found) - _SHOWN, 'difference')} more" if len(found) > _SHOWN else ""
    return ConfigurationError(
        f"the checkpoint {name} in {path!r} was written by a fit with another model, other data or other arguments: "
        f"{'; '.join(found[:_SHOWN])}{more}. Resume with what the checkpoint was written with, or pass another path to "
        "train from the start."
    )


def _shown(text: str) -> str:
    """A value as people write it: a float of 32 bits, such as a learning rate, without the digits that it does not have."""
    try:
        number = json.loads(text)
    except ValueError:
        return text
    return f"{number:.7g}" if isinstance(number, float) else text


def _leaves(place: str, value: Any) -> Iterator[tuple[str, str]]:
    """The values in nested dicts and lists, as text, with where they are."""
    if isinstance(value, Mapping) and value:
        for key, member in value.items():
            yield from _leaves(f"{place}.{key}" if place else key, member)
    elif isinstance(value, list) and value:
        for index, member in enumerate(value):
            yield from _leaves(f"{place}[{index}]", member)
    else:
        yield place, json.dumps(value)
