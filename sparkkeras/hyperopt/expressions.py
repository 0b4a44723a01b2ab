"""Converts search spaces in plain Python (`distributions`) to hyperopt's expressions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import hyperopt
from hyperopt import hp, pyll
from hyperopt.pyll import scope

from sparkkeras.hyperopt.distributions import (
    Choice,
    Distribution,
    Integer,
    Labeled,
    LogUniform,
    Normal,
    Uniform,
    map_items,
)
from sparkkeras.hyperopt.encoding import JSON_TYPES

_HALF = 0.5 - 1e-9
"""Values of this margin beyond a range are rounded into it, and none is rounded beyond it."""


def to_expression(space: Any) -> Any:
    """The structure of hyperopt expressions for a space with `Labeled` distributions; expressions in it are kept."""
    if isinstance(space, Labeled):
        return _expression(space.label, space.distribution)
    if type(space) in (dict, list, tuple):
        return map_items(space, lambda _, item: to_expression(item))
    return space if isinstance(space, pyll.Apply) or type(space) in JSON_TYPES else pyll.Literal(space)


def params_of(space: Any, chosen: Mapping[str, Any]) -> Any:
    """The hyper-parameters of a trial for the values chosen for the labels; objects, lists and tuples stay what they are.

    Args:
        space: A space with `Labeled` distributions.
        chosen: The value that the algorithm chose for each label; for a choice the index of the option.
    """
    if isinstance(space, Labeled):
        if isinstance(space.distribution, Choice):
            return params_of(space.distribution.options[int(chosen[space.label])], chosen)
        return hyperopt.space_eval(to_expression(space), chosen)
    if type(space) in (dict, list, tuple):
        return map_items(space, lambda _, item: params_of(item, chosen))
    return hyperopt.space_eval(space, chosen) if isinstance(space, pyll.Apply) else space


def _expression(label: str, distribution: Distribution) -> Any:
    match distribution:
        case Choice(options):
            return hp.choice(label, [to_expression(option) for option in options])
        case Integer(low, high, _, True):
            return scope.int(hp.qloguniform(label, math.log(low - _HALF), math.log(high + _HALF), 1))
        case Integer(low, high, 1):
            return scope.int(hp.quniform(label, low - _HALF, high + _HALF, 1))
        case Integer(low, high, step):
            return low + step * scope.int(_index(label, (high - low) // step))
        case LogUniform(low, high):
            return hp.loguniform(label, math.log(low), math.log(high))
        case Normal(mean, stddev):
            return hp.normal(label, mean, stddev)
        case Uniform(low, high, None):
            return hp.uniform(label, low, high)
        case Uniform(low):  # a quotient of whole numbers: 3 steps of 0.1 are 0.3, not 0.30000000000000004
            first, size = Fraction(repr(low)), distribution.exact_step
            scale = math.lcm(first.denominator, size.denominator)
            return (int(first * scale) + int(size * scale) * scope.int(_index(label, distribution.last_step))) / scale
    raise NotImplementedError(distribution)


def _index(label: str, last: int) -> Any:
    """A whole number from 0 to ``last``, for which TPE knows, unlike for ``hp.randint``, that neighbors are similar."""
    return hp.quniform(label, -_HALF, last + _HALF, 1)
