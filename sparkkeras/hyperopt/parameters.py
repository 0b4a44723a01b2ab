"""Display names of hyper-parameters: a name, and a short text for each value.

An algorithm chooses a number for each label of a space; a trial gets the structure that the space makes from these numbers.
`Parameter` maps one to the other, so that progress lines, tables and plots show the same names and values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
from hyperopt import pyll

from sparkkeras.hyperopt.distributions import Labeled, first_string

VALUE_LENGTH = 24
"""The number of characters above which values are abbreviated in progress lines and tables."""


@dataclass(frozen=True)
class Parameter:
    """A hyper-parameter of a space.

    Attributes:
        label: Its label in the space.
        name: The path of its value in a trial's hyper-parameters: keys and indices, joined by dots. If several labels share
            a path (options of a choice have the same key, or are expressions themselves), the label follows in parentheses.
        kind: Its distribution in hyperopt's terms (``uniform``, ``loguniform``, ``randint``, ...).
        options: The unique names of the options of a choice, in the order of the space; empty for other distributions.
        expression: The hyperopt expression that computes its value.
    """

    label: str
    name: str
    kind: str
    options: tuple[str, ...] = ()
    expression: Any = field(default=None, repr=False, compare=False)

    def is_used(self, chosen: Mapping[str, Any]) -> bool:
        """Whether a trial has this hyper-parameter; it lacks those of options that were not chosen."""
        return self.label in chosen

    def value(self, chosen: Mapping[str, Any]) -> Any:
        """The value in a trial; for a choice the index of the option."""
        value = chosen[self.label]
        return value if self.options or self.expression is None else _evaluate(self.expression, {self.label: value})

    def text(self, chosen: Mapping[str, Any]) -> str:
        """The value in a trial as text; for a choice the name of the option."""
        value = self.value(chosen)
        return self.options[int(value)] if self.options else as_text(value)


def describe_params(parameters: Sequence[Parameter], chosen: Mapping[str, Any]) -> str:
    """The hyper-parameters of a trial in one line: ``optimizer=sgd optimizer.momentum=0.9 units=64``."""
    used = (parameter for parameter in parameters if parameter.is_used(chosen))
    return " ".join(f"{parameter.name}={shorten(parameter.text(chosen), VALUE_LENGTH)}" for parameter in used)


def parameters_of(space: Any, labeled: Iterable[Labeled] = ()) -> tuple[Parameter, ...]:
    """The hyper-parameters of a space, each choice before the ones of its options.

    Args:
        space: A ``hyperopt.hp`` expression, or a structure of such expressions.
        labeled: The distributions from which expressions were made: their labels are their names.
    """
    own = {each.label: each for each in labeled}
    first: dict[str, _Occurrence] = {}
    for occurrence in _occurrences(pyll.as_apply(space), ()):
        first.setdefault(occurrence.label, occurrence)
    shared = Counter(each.name for each in first.values() if not each.is_option)

    def name_of(found: _Occurrence) -> str:
        if found.label in own:
            return found.label
        return f"{found.name} ({found.label})" if found.is_option or shared[found.name] > 1 else found.name

    return tuple(
        Parameter(
            each.label,
            name_of(each),
            each.kind,
            _option_names(each.options, own[each.label].strings if each.label in own else ()),
            each.expression,
        )
        for each in first.values()
    )


def as_text(value: Any) -> str:
    """A value as one line of text."""
    value = value.item() if isinstance(value, np.generic) else value
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
    return str(getattr(value, "__name__", None) or type(value).__name__)


def format_number(value: float, digits: int = 4) -> str:
    """A number as short text: ``1e-5``, ``0.003``, ``200``."""
    mantissa, _, power = f"{value:.{digits}g}".partition("e")
    return f"{mantissa}e{int(power)}" if power else mantissa


def shorten(text: str, length: int) -> str:
    """Abbreviate a text to ``length`` characters by removing its middle, since long names often differ at their ends."""
    head = length // 2
    return text if len(text) <= length else f"{text[:head]}…{text[len(text) - (length - head - 1) :]}"


def make_distinct(texts: Sequence[str], length: int | None = None) -> tuple[str, ...]:
    """Abbreviate texts so that all stay different: similar ones keep the part that differs, equal ones get their index."""
    short = list(texts) if length is None else [_difference(text, _alike(text, texts, length), length) for text in texts]
    count = Counter(short)
    return tuple(f"{text} #{index}" if count[text] > 1 else text for index, text in enumerate(short))


def _alike(text: str, texts: Sequence[str], length: int) -> set[str]:
    return {other for other in texts if shorten(other, length) == shorten(text, length)}


def _difference(text: str, alike: set[str], length: int) -> str:
    """Abbreviate a text to the part that differs from the texts with the same abbreviation."""
    if len(alike) == 1:
        return shorten(text, length)
    head = _common_prefix_length(alike)
    tail = min(_common_prefix_length({other[::-1] for other in alike}), min(map(len, alike)) - head)
    return shorten(f"…{text[head : len(text) - tail]}…", length)


def _common_prefix_length(texts: set[str]) -> int:
    """The length of the longest common prefix."""
    first, last = min(texts), max(texts)
    return next((index for index, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), len(first))


@dataclass(frozen=True)
class _Occurrence:
    """An occurrence of a label in a space; ``is_option``: it is an option of a choice, at the same path."""

    label: str
    path: tuple[str, ...]
    kind: str
    expression: Any
    options: Sequence[Any] = ()
    is_option: bool = False

    @property
    def name(self) -> str:
        return ".".join(self.path) or self.label


def _occurrences(node: Any, path: tuple[str, ...], is_option: bool = False) -> Iterator[_Occurrence]:
    labels = _labels(node)
    if node.name == "switch" and node.pos_args[0].name == "hyperopt_param":
        index, *options = node.pos_args
        yield _Occurrence(_label(index), path, _kind(index), index, options, is_option)
        for option in options:
            yield from _occurrences(option, path, is_option=True)
    elif node.name in ("dict", "pos_args"):
        for key, item in _items(node):
            yield from _occurrences(item, (*path, key))
    elif len(labels) == 1:  # a distribution, possibly within arithmetic: the trial gets the computed value
        ((label, hyper_parameter),) = labels.items()
        yield _Occurrence(label, path, _kind(hyper_parameter), node, (), is_option)
    elif labels:
        for operand in node.inputs():
            yield from _occurrences(operand, path, is_option)


def _items(node: Any) -> list[tuple[str, Any]]:
    """The items of a dict or a list, with their keys."""
    if node.name == "pos_args":
        return [(str(index), item) for index, item in enumerate(node.pos_args)]
    if node.named_args or not node.pos_args:
        return [(key, item) for key, item in node.named_args]
    return [(str(pair.pos_args[0].obj), pair.pos_args[1]) for pair in node.pos_args[0].pos_args]  # keys that are not strings


def _evaluate(node: Any, chosen: Mapping[str, Any]) -> Any:
    """Evaluate an expression; unlike ``hyperopt.space_eval``, also one without hyper-parameters."""
    return pyll.rec_eval(node, memo={hyper_parameter: chosen[label] for label, hyper_parameter in _labels(node).items()})


def _labels(node: Any) -> dict[str, Any]:
    """The hyper-parameters of an expression by label."""
    return {_label(each): each for each in pyll.dfs(node) if each.name == "hyperopt_param"}


def _label(hyper_parameter: Any) -> str:
    return str(hyper_parameter.arg["label"].obj)


def _kind(hyper_parameter: Any) -> str:
    return str(hyper_parameter.arg["obj"].name)


def _option_names(options: Sequence[Any], strings: Sequence[str | None]) -> tuple[str, ...]:
    """A name for each option of a choice. A dict is named by its first string, or all its constants if that is ambiguous.

    Args:
        options: The options.
        strings: The first string of each, where they are known: hyperopt sorts the keys of a dict.
    """
    known = strings or [None] * len(options)
    short = [
        _option_name(option, texts_only=True) if text is None else as_text(text)
        for option, text in zip(options, known, strict=True)
    ]
    if len(set(short)) == len(short):
        return tuple(short)
    return make_distinct([_option_name(option) for option in options])


def _option_name(option: Any, texts_only: bool = False) -> str:
    labels = _labels(option)
    if option.name == "dict":
        items = _items(option)
        constants = {key: _evaluate(item, {}) for key, item in items if not _labels(item)}
        text = first_string(constants)
        if text is not None and texts_only:
            return as_text(text)
        return as_text(constants) if constants else f"{{{', '.join(key for key, _ in items)}}}"
    if not labels:
        return as_text(_evaluate(option, {}))
    if option.name == "pos_args":
        return f"({', '.join(_option_name(item, texts_only) for _, item in _items(option))})"
    return _label(option.pos_args[0]) if option.name == "switch" else "/".join(labels)
