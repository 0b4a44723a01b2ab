"""The hyper-parameters of a space as people see them: a name, and a short text for each value.

An algorithm chooses a number for each label; a trial gets a structure that the space makes of these. `Parameter` maps the
one to the other, so that progress lines, tables and plots show the same names and values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
from hyperopt import pyll

VALUE_LENGTH = 24
"""Longer texts of values lose their middle in progress lines and tables."""


@dataclass(frozen=True)
class Parameter:
    """A hyper-parameter of a space.

    Attributes:
        label: Its label in the space.
        name: Where its value is in what a trial gets: the keys and indices on the way, joined by dots. Where several labels
            share that place (options of a choice have the same key, or are expressions themselves), the label follows in
            parentheses.
        kind: Its distribution, as hyperopt calls it (``uniform``, ``loguniform``, ``randint``, ...).
        options: The names of the options of a choice, in the order of the space, all different; empty for other kinds.
        expression: What the space makes of it.
    """

    label: str
    name: str
    kind: str
    options: tuple[str, ...] = ()
    expression: Any = field(default=None, repr=False, compare=False)

    def is_used(self, chosen: Mapping[str, Any]) -> bool:
        """Whether a trial has this hyper-parameter: those of options that were not chosen are left out."""
        return self.label in chosen

    def value(self, chosen: Mapping[str, Any]) -> Any:
        """The value in a trial; of a choice the index of the option."""
        given = chosen[self.label]
        return given if self.options or self.expression is None else _evaluated(self.expression, {self.label: given})

    def text(self, chosen: Mapping[str, Any]) -> str:
        """The value in a trial as text; of a choice the name of the option."""
        value = self.value(chosen)
        return self.options[int(value)] if self.options else as_text(value)


def described(parameters: Sequence[Parameter], chosen: Mapping[str, Any]) -> str:
    """The hyper-parameters of a trial in one line: ``optimizer=sgd optimizer.momentum=0.9 units=64``."""
    used = (parameter for parameter in parameters if parameter.is_used(chosen))
    return " ".join(f"{parameter.name}={shortened(parameter.text(chosen), VALUE_LENGTH)}" for parameter in used)


def parameters_of(space: Any) -> tuple[Parameter, ...]:
    """The hyper-parameters of a space, a choice before those of its options.

    Args:
        space: An expression of ``hyperopt.hp``, or a structure of these.
    """
    places: dict[str, _Place] = {}
    for place in _places(pyll.as_apply(space), ()):
        places.setdefault(place.label, place)
    shared = Counter(place.name for place in places.values() if not place.is_option)
    return tuple(
        Parameter(
            place.label,
            f"{place.name} ({place.label})" if place.is_option or shared[place.name] > 1 else place.name,
            place.kind,
            _option_names(place.options),
            place.expression,
        )
        for place in places.values()
    )


def as_text(value: Any) -> str:
    """A value as text, in one line."""
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, str):
        return " ".join(value.split()) or repr(value)
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e6 else number(value)
    if value is None or isinstance(value, int):
        return str(value)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}={as_text(member)}' for key, member in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(as_text, value))})"
    return str(getattr(value, "__name__", None) or type(value).__name__)


def number(value: float, digits: int = 4) -> str:
    """A number in few characters: ``1e-5``, ``0.003``, ``200``."""
    mantissa, _, power = f"{value:.{digits}g}".partition("e")
    return f"{mantissa}e{int(power)}" if power else mantissa


def shortened(text: str, length: int) -> str:
    """A text of at most ``length`` characters: a longer one loses its middle, since long names differ at their ends."""
    head = length // 2
    return text if len(text) <= length else f"{text[:head]}…{text[len(text) - (length - head - 1) :]}"


def distinct(texts: Sequence[str], length: int | None = None) -> tuple[str, ...]:
    """The texts, shortened, all different: those that would be equal keep what differs, or get their index."""
    short = list(texts) if length is None else [_difference(text, _alike(text, texts, length), length) for text in texts]
    count = Counter(short)
    return tuple(f"{text} #{place}" if count[text] > 1 else text for place, text in enumerate(short))


def _alike(text: str, texts: Sequence[str], length: int) -> set[str]:
    return {other for other in texts if shortened(other, length) == shortened(text, length)}


def _difference(text: str, alike: set[str], length: int) -> str:
    """A text, shortened to what distinguishes it from others."""
    if len(alike) == 1:
        return shortened(text, length)
    head = _common(alike)
    tail = min(_common({other[::-1] for other in alike}), min(map(len, alike)) - head)
    return shortened(f"…{text[head : len(text) - tail]}…", length)


def _common(texts: set[str]) -> int:
    """How many characters all of them begin with."""
    first, last = min(texts), max(texts)
    return next((place for place, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), len(first))


@dataclass(frozen=True)
class _Place:
    """Where a label stands in a space; ``is_option``: in the place of a choice, as one of its options."""

    label: str
    path: tuple[str, ...]
    kind: str
    expression: Any
    options: Sequence[Any] = ()
    is_option: bool = False

    @property
    def name(self) -> str:
        return ".".join(self.path) or self.label


def _places(node: Any, path: tuple[str, ...], is_option: bool = False) -> Iterator[_Place]:
    labels = _labels(node)
    if node.name == "switch" and node.pos_args[0].name == "hyperopt_param":
        index, *options = node.pos_args
        yield _Place(_label(index), path, _kind(index), index, options, is_option)
        for option in options:
            yield from _places(option, path, is_option=True)
    elif node.name in ("dict", "pos_args"):
        for key, child in _members(node):
            yield from _places(child, (*path, key))
    elif len(labels) == 1:  # a distribution, perhaps within arithmetic: the trial gets the result of that
        ((label, drawn),) = labels.items()
        yield _Place(label, path, _kind(drawn), node, (), is_option)
    elif labels:
        for child in node.inputs():
            yield from _places(child, path, is_option)


def _members(node: Any) -> list[tuple[str, Any]]:
    """The members of a dict or a list, with their keys."""
    if node.name == "pos_args":
        return [(str(place), child) for place, child in enumerate(node.pos_args)]
    if node.named_args or not node.pos_args:
        return [(key, child) for key, child in node.named_args]
    return [(str(pair.pos_args[0].obj), pair.pos_args[1]) for pair in node.pos_args[0].pos_args]  # keys that are not texts


def _evaluated(node: Any, chosen: Mapping[str, Any]) -> Any:
    """What an expression is; ``hyperopt.space_eval`` fails for those without inputs."""
    return pyll.rec_eval(node, memo={drawn: chosen[label] for label, drawn in _labels(node).items()})


def _labels(node: Any) -> dict[str, Any]:
    return {_label(each): each for each in pyll.dfs(node) if each.name == "hyperopt_param"}


def _label(drawn: Any) -> str:
    return str(drawn.arg["label"].obj)


def _kind(drawn: Any) -> str:
    return str(drawn.arg["obj"].name)


def _option_names(options: Sequence[Any]) -> tuple[str, ...]:
    """A name for each option of a choice. A dict is called by its first text, or by all of its constants where needed."""
    short = [_option_name(option, texts_only=True) for option in options]
    if len(set(short)) == len(short):
        return tuple(short)
    return distinct([_option_name(option) for option in options])


def _option_name(option: Any, texts_only: bool = False) -> str:
    labels = _labels(option)
    if option.name == "dict":
        members = _members(option)
        fixed = {key: _evaluated(child, {}) for key, child in members if not _labels(child)}
        texts = [value for value in fixed.values() if isinstance(value, str)]
        if texts and texts_only:
            return as_text(texts[0])
        return as_text(fixed) if fixed else f"{{{', '.join(key for key, _ in members)}}}"
    if not labels:
        return as_text(_evaluated(option, {}))
    if option.name == "pos_args":
        return f"({', '.join(_option_name(child, texts_only) for _, child in _members(option))})"
    return _label(option.pos_args[0]) if option.name == "switch" else "/".join(labels)
