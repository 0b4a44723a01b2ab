"""Search spaces in plain Python: distributions of hyper-parameters, in dicts whose keys name them.

::

    space = {
        "units": integer(32, 512, log=True),
        "dropout": uniform(0, 0.5),
        "optimizer": choice(
            {"kind": "sgd", "lr": loguniform(1e-3, 1), "momentum": uniform(0.5, 1)},
            {"kind": "adam", "lr": loguniform(1e-5, 1e-2)},
        ),
    }

Nothing here needs the hyperopt library: `expressions` converts these spaces to its expressions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MappingView, Sequence, Set
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

from sparkkeras.arguments import flag, known_arguments
from sparkkeras.errors import ConfigurationError

ROOT = "params"
"""The label of a distribution that is the whole space, and so has no key."""

_CONSTANTS = (str, int, float, np.generic, type(None))
"""The types of items by which a list looks like a choice."""

_ROUNDING = 1e-9
"""The part of a step that counts as a rounding error."""


@dataclass(frozen=True, eq=False)
class Distribution:
    """The distribution of one hyper-parameter, made by `choice`, `integer`, `loguniform`, `normal` or `uniform`."""


@dataclass(frozen=True, eq=False)
class Choice(Distribution):
    """See `choice`."""

    options: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Integer(Distribution):
    """See `integer`."""

    low: int
    high: int
    step: int = 1
    log: bool = False


@dataclass(frozen=True, eq=False)
class LogUniform(Distribution):
    """See `loguniform`."""

    low: float
    high: float


@dataclass(frozen=True, eq=False)
class Normal(Distribution):
    """See `normal`."""

    mean: float
    stddev: float


@dataclass(frozen=True, eq=False)
class Uniform(Distribution):
    """See `uniform`."""

    low: float
    high: float
    step: float | None = None

    @property
    def last_step(self) -> int:
        """The number of steps from ``low`` to the largest value; the last one may miss ``high`` by a rounding error."""
        return math.floor((self.high - self.low) / (self.step or math.inf) + _ROUNDING)

    @property
    def exact_step(self) -> Fraction:
        """The step as it was written: 1/10 for 0.1, and the part of the range that it is except for a rounding error."""
        span, step, last = _exact(self.high) - _exact(self.low), _exact(self.step or 0.0), self.last_step
        return span / last if span < (last + _ROUNDING) * step else step


@dataclass(frozen=True, eq=False)
class Labeled:
    """A distribution in a space, with its unique label, which is also its name for display.

    Attributes:
        label: The label.
        distribution: The distribution.
        strings: The first string of each option of a choice, by which the option is named; ``None`` without one.
    """

    label: str
    distribution: Distribution
    strings: tuple[str | None, ...] = ()


def choice(*options: Any) -> Choice:
    """One of several options: numbers, strings, functions, layers, or dicts and lists with further distributions.

    A distribution within an option is searched only in trials with that option.

    Example::

        {"units": choice(32, 64, 128), "dropout": choice(0.0, uniform(0.1, 0.5))}

    Raises:
        ConfigurationError: There is no option, or the only one is a list, an array or an iterator.
    """
    if not options:
        raise ConfigurationError("choice() has no options: give each as an argument, such as choice(32, 64).")
    if len(options) == 1 and isinstance(options[0], (list, tuple, range, np.ndarray, Set, MappingView, Iterator)):
        raise ConfigurationError(
            f"choice({options[0]!r}) has a single option, which is of type {type(options[0]).__name__}: give each option as "
            "an argument, choice(32, 64), or choice(*options)."
        )
    return Choice(options)


@known_arguments
def integer(low: int, high: int, *, step: int = 1, log: bool = False) -> Integer:
    """A whole number, an ``int``.

    Args:
        low: The smallest value.
        high: The largest value: unlike in ``hp.randint`` and ``numpy``, it is included.
        step: The distance between values: ``integer(32, 128, step=32)`` is 32, 64, 96 or 128.
        log: Whether the logarithm of the value is uniformly distributed instead of the value; ``low`` must be positive.

    Raises:
        ConfigurationError: An argument is not a whole number, or the range is empty.
    """
    for name, value in {"low": low, "high": high, "step": step}.items():
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise ConfigurationError(f"integer: {name}={value!r} is not a whole number; for fractions use uniform().")
    _check_range("integer", low, high)
    _check_step("integer", low, high, step, (high - low) // max(step, 1))
    if flag("log", log):
        _check_positive("integer", low)
        if step != 1:
            raise ConfigurationError(f"integer: step={step} cannot be combined with log=True; omit one of them.")
    return Integer(int(low), int(high), int(step), bool(log))


@known_arguments
def loguniform(low: float, high: float) -> LogUniform:
    """A positive number whose logarithm is uniformly distributed, such as a learning rate.

    Args:
        low: The smallest value itself: unlike in ``hp.loguniform``, not its logarithm.
        high: The largest value itself.

    Raises:
        ConfigurationError: A bound is not a positive finite number, or the range is empty.
    """
    low, high = _number("loguniform", "low", low), _number("loguniform", "high", high)
    _check_range("loguniform", low, high)
    _check_positive("loguniform", low)
    return LogUniform(low, high)


@known_arguments
def normal(mean: float, stddev: float) -> Normal:
    """A normally distributed number, without bounds.

    Args:
        mean: The mean.
        stddev: The standard deviation.

    Raises:
        ConfigurationError: An argument is not a finite number, or ``stddev`` is not positive.
    """
    mean, stddev = _number("normal", "mean", mean), _number("normal", "stddev", stddev)
    if stddev <= 0:
        raise ConfigurationError(f"normal: stddev={stddev!r}: expected a positive number.")
    return Normal(mean, stddev)


@known_arguments
def uniform(low: float, high: float, *, step: float | None = None) -> Uniform:
    """A uniformly distributed number.

    Args:
        low: The smallest value.
        high: The largest value.
        step: The distance between values: ``uniform(0, 0.5, step=0.1)`` is 0, 0.1, ..., or 0.5. ``None`` allows all values.

    Raises:
        ConfigurationError: An argument is not a finite number, or the range is empty.
    """
    low, high = _number("uniform", "low", low), _number("uniform", "high", high)
    _check_range("uniform", low, high)
    distribution = Uniform(low, high, None if step is None else _number("uniform", "step", step))
    if distribution.step is not None:
        _check_step("uniform", low, high, distribution.step, distribution.last_step)
    return distribution


def has_distributions(space: Any) -> bool:
    """Whether a space, a structure of dicts, lists and tuples, has distributions of this module."""
    return any(True for _ in _paths(space))


def labeled(space: Any) -> Any:
    """A space whose distributions are replaced by `Labeled` ones.

    The label of a distribution is its path: keys and indices joined by dots, such as ``optimizer.momentum``. An option of a
    choice has the path of the choice. If several distributions share a path, the labels of those within options name the
    option, by its first string or its index: ``optimizer.lr (sgd)``.

    Raises:
        ConfigurationError: Two distributions have the same label, or one is in a named tuple.
    """
    shared = Counter(_paths(space))
    labels: set[str] = set()

    def visit(node: Any, path: tuple[str, ...], options: tuple[str, ...]) -> Any:
        if not has_distributions(node):
            return node
        if isinstance(node, tuple) and type(node) is not tuple:
            raise ConfigurationError(
                f"space: {type(node).__name__}(...) has distributions, and trials would get a plain tuple instead: write a "
                "dict or a tuple, and make the object of it in the function that builds the model."
            )
        if not isinstance(node, Distribution):
            return map_items(node, lambda key, item: visit(item, (*path, key), options))
        name = ".".join(path) or ROOT
        label = f"{name} ({', '.join(options)})" if options and shared[path] > 1 else name
        if label in labels:
            raise ConfigurationError(f"space: two hyper-parameters have the name {label!r}: rename one of their keys.")
        labels.add(label)
        if not isinstance(node, Choice):
            return Labeled(label, node)
        strings = tuple(map(first_string, node.options))
        names = _option_names(strings)
        inner = [visit(option, path, (*options, name)) for option, name in zip(node.options, names, strict=True)]
        return Labeled(label, replace(node, options=tuple(inner)), strings)

    return visit(space, (), ())


def all_labeled(space: Any) -> Iterator[Labeled]:
    """The `Labeled` distributions in a space, also those in options."""
    if isinstance(space, Labeled):
        yield space
        space = space.distribution.options if isinstance(space.distribution, Choice) else ()
    if isinstance(space, (dict, list, tuple)):
        for item in space.values() if isinstance(space, dict) else space:
            yield from all_labeled(item)


def constant_lists(space: Any, name: str = "") -> Iterator[tuple[str, list[Any]]]:
    """The names of the lists of several numbers, strings and the like in a space, and these lists; not those in options.

    Other libraries choose one item of such a list.
    """
    if isinstance(space, dict):
        for key, item in space.items():
            yield from constant_lists(item, f"{name}.{key}" if name else str(key))
    elif isinstance(space, list) and len(space) > 1 and all(isinstance(item, _CONSTANTS) for item in space):
        yield name, space


def map_items(node: Any, function: Callable[[str, Any], Any]) -> Any:
    """Replace the items of a dict, list or tuple by what a function returns for each key or index, and item."""
    if isinstance(node, Mapping):
        return {key: function(str(key), item) for key, item in node.items()}
    items = [function(str(index), item) for index, item in enumerate(node)]
    return tuple(items) if isinstance(node, tuple) else items


def _paths(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of each distribution in a space."""
    if isinstance(node, Distribution):
        yield path
        for option in node.options if isinstance(node, Choice) else ():
            yield from _paths(option, path)
    elif isinstance(node, (Mapping, list, tuple)):
        for key, item in node.items() if isinstance(node, Mapping) else enumerate(node):
            yield from _paths(item, (*path, str(key)))


def _option_names(strings: Sequence[str | None]) -> list[str]:
    """A unique name for each option: its first string, or its index."""
    indices = [f"#{index}" for index in range(len(strings))]
    count = Counter([*strings, *indices])
    return [text if text and count[text] == 1 else index for text, index in zip(strings, indices, strict=True)]


def first_string(option: Any) -> str | None:
    """The first string in a dict, which names it among the options of a choice; ``None`` without one."""
    values = option.values() if isinstance(option, Mapping) else ()
    return next((value for value in values if isinstance(value, str)), None)


def _number(function: str, name: str, value: Any) -> float:
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):
        raise ConfigurationError(f"{function}: {name}={value!r} is not a finite number.")
    return float(value)


def _exact(value: float) -> Fraction:
    return Fraction(repr(value))


def _check_range(function: str, low: float, high: float) -> None:
    if low >= high:
        raise ConfigurationError(
            f"{function}({low!r}, {high!r}): low must be smaller than high; write a value that is not searched without a "
            "distribution."
        )


def _check_step(function: str, low: float, high: float, step: float, last_step: int) -> None:
    if step <= 0 or last_step < 1:
        raise ConfigurationError(
            f"{function}({low!r}, {high!r}, step={step!r}): expected a positive step of at most high - low = {high - low:g}."
        )


def _check_positive(function: str, low: float) -> None:
    if low <= 0:
        raise ConfigurationError(
            f"{function}: low={low!r} must be positive, since the logarithm of the value is searched. (The bounds are the "
            "values themselves, unlike in hyperopt, where they are logarithms.)"
        )
