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

Nothing here needs Optuna or the hyperopt library, so that workers need neither.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, MappingView, Set
from dataclasses import dataclass
from fractions import Fraction
from statistics import NormalDist
from typing import Any

import numpy as np

from sparkkeras.arguments import flag, known_arguments
from sparkkeras.errors import ConfigurationError

_ROUNDING = 1e-9
"""The part of a step that counts as a rounding error."""


@dataclass(frozen=True, eq=False)
class Distribution:
    """The distribution of one hyper-parameter, made by `choice`, `integer`, `loguniform`, `normal` or `uniform`."""

    @property
    def label(self) -> str:
        """The name of the function that makes it, for display."""
        return type(self).__name__.lower()


@dataclass(frozen=True, eq=False)
class Choice(Distribution):
    """See `choice`; ``weights`` are the probabilities of the options of ``hp.pchoice``."""

    options: tuple[Any, ...]
    weights: tuple[float, ...] | None = None


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
class Quantile(Distribution):
    """A number that is searched by its quantile, a number in (0, 1): normal and quantized ones.

    Attributes:
        first: The mean, or the smallest value.
        second: The standard deviation, or the largest value.
        normal: Whether the number is normally distributed, else uniformly.
        log: Whether its logarithm is, instead of the value.
        step: The number of which the value is a multiple; 0: any.
    """

    first: float
    second: float
    normal: bool = False
    log: bool = False
    step: float = 0.0

    @property
    def label(self) -> str:
        """See `Distribution`; quantized ones are made of expressions, which have labels of their own."""
        return "normal"

    def value(self, quantile: float) -> float:
        """The value at a quantile."""
        low, high = self.first, self.second
        value = NormalDist(low, high).inv_cdf(quantile) if self.normal else low + (high - low) * quantile
        value = math.exp(value) if self.log else value
        return round(value / self.step) * self.step if self.step else value

    def quantile(self, value: float) -> float:
        """The quantile of a value, the inverse of `value`."""
        value = math.log(max(value, sys.float_info.min)) if self.log else value
        low, high = self.first, self.second
        return NormalDist(low, high).cdf(value) if self.normal else (value - low) / (high - low)


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

    def value(self, index: int) -> float:
        """The value after some steps: 3 steps of 0.1 are 0.3, not 0.30000000000000004."""
        return float(_exact(self.low) + index * self.exact_step)


def to_json(distribution: Distribution) -> dict[str, Any]:
    """A distribution as JSON values, without objects among the options of a choice."""
    return {"kind": type(distribution).__name__, **vars(distribution)}


def from_json(given: dict[str, Any]) -> Distribution:
    """The inverse of `to_json`."""
    kinds: dict[str, Any] = {each.__name__: each for each in (Choice, Integer, LogUniform, Quantile, Uniform)}
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items() if name != "kind"}
    made: Distribution = kinds[given["kind"]](**fields)
    return made


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
def normal(mean: float, stddev: float) -> Quantile:
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
    return Quantile(mean, stddev, normal=True)


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
