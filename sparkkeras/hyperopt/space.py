"""The search space: a structure of distributions, which is evaluated for each trial.

A trial gets the structure with a value in place of each distribution. The distributions within an option of a choice are
only met if that option was chosen, so they are searched in no other trial. Each has a label, the name of the parameter in
the Optuna study. Expressions of ``hyperopt.hp`` are converted to the same structure (`sparkkeras.hyperopt.expressions`).
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import re
import reprlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from sparkkeras.errors import ConfigurationError, warn
from sparkkeras.hyperopt.distributions import Choice, Distribution, Integer, LogUniform, Quantile, Uniform
from sparkkeras.hyperopt.trials import Trial
from sparkkeras.hyperopt.values import JSON_TYPES, as_text, encode, option_names

ROOT = "params"
"""The label of a distribution that is the whole space, and so has no key."""

_EDGE = 1e-6
"""How far quantiles stay away from 0 and 1, where normally distributed numbers are infinite."""

_CONSTANTS = (str, int, float, np.generic, type(None))
"""The types of items by which a list looks like a choice."""


@dataclass(frozen=True, eq=False)
class Parameter:
    """A hyper-parameter: a distribution with its label.

    Attributes:
        label: Its unique name.
        distribution: How its values are distributed.
        options: The unique names of the options of a choice; empty for other distributions.
    """

    label: str
    distribution: Distribution
    options: tuple[str, ...] = ()

    @property
    def is_log(self) -> bool:
        """Whether its logarithm is searched."""
        return isinstance(self.distribution, LogUniform) or bool(getattr(self.distribution, "log", False))

    @property
    def categories(self) -> tuple[Any, ...]:
        """What Optuna chooses from for a choice: the options, if all are different plain values, else their names."""
        given = getattr(self.distribution, "options", ())
        is_plain = all(type(option) in (str, int, float, bool, type(None)) and option == option for option in given)
        return given if is_plain and len(set(given)) == len(given) else self.options

    @cached_property
    def searched(self) -> BaseDistribution:
        """The distribution of what Optuna chooses: the value, an option or its name, a number of steps, or a quantile."""
        match self.distribution:
            case Choice(_, None):
                return CategoricalDistribution(self.categories)
            case Integer(low, high, step, log):
                return IntDistribution(low, low + (high - low) // step * step, log, step)
            case LogUniform(low, high):
                return FloatDistribution(low, high, log=True)
            case Uniform(low, high, None):
                return FloatDistribution(low, high)
            case Uniform():  # Optuna rounds the bounds of stepped floats, and then rejects values that it did not round
                return IntDistribution(0, self.distribution.last_step)
        return FloatDistribution(_EDGE, 1 - _EDGE)

    def ask(self, trial: optuna.Trial) -> Any:
        """Have Optuna choose; see `searched`."""
        searched = self.searched
        if isinstance(searched, CategoricalDistribution):
            return trial.suggest_categorical(self.label, searched.choices)
        if isinstance(searched, IntDistribution):
            chosen: Any = trial.suggest_int(self.label, searched.low, searched.high, step=searched.step, log=searched.log)
        else:
            assert isinstance(searched, FloatDistribution)
            chosen = trial.suggest_float(self.label, searched.low, searched.high, log=searched.log)
        if not searched.low <= chosen <= searched.high:
            raise ConfigurationError(
                f"the value {chosen!r} for {self.label!r}, of a grid or an enqueued trial, is not one of {searched}: of a "
                "normal or quantized number, Optuna gets its quantile, of a range with steps the number of steps."
            )
        return chosen

    @property
    def bounds(self) -> tuple[float, float]:
        """The smallest and the largest of the numbers that Optuna chooses from."""
        assert isinstance(self.searched, (IntDistribution, FloatDistribution))
        return self.searched.low, self.searched.high

    def value(self, chosen: Any) -> Any:
        """The value in a trial for what Optuna has chosen; for a choice the index of the option."""
        match self.distribution:
            case Choice(_, None):
                return self.categories.index(chosen)
            case Choice(_, tuple() as weights):
                return min(bisect.bisect(list(itertools.accumulate(weights)), chosen), len(weights) - 1)
            case Uniform(_, _, step) if step is not None:
                return self.distribution.value(chosen)
            case Quantile():
                return self.distribution.value(chosen)
        return chosen

    def shown(self, chosen: Any) -> Any:
        """The value for display: a number, or the name of an option."""
        value = self.value(chosen)
        return self.options[value] if self.options else value


@dataclass(frozen=True, eq=False)
class Computed:
    """A value that an expression of hyperopt computes from others, for instance ``2 * hp.uniform(label, 0, 1)``."""

    name: str
    inputs: tuple[Any, ...]
    compute: Callable[[Sequence[Any]], Any]


class Space:
    """A search space.

    Args:
        space: A structure, usually a dict, of distributions (`choice`, `uniform`, ...) or of ``hyperopt.hp`` expressions, or
            a single one; ``None`` if trials define their hyper-parameters while they run.

    Attributes:
        is_open: Whether trials define it.
        given: The structure with a `Parameter` in place of each distribution, and expressions of hyperopt as they are.
        tree: The same with all expressions converted.
        parameters: The hyper-parameters by label, those of an open space as soon as a trial has defined them.

    Raises:
        ConfigurationError: ``space`` is not a search space, has no hyper-parameter, or cannot be evaluated.
    """

    def __init__(self, space: Any) -> None:
        self.is_open = space is None
        self.given = labeled(space) if has_distributions(space) else space
        self.tree = self.given
        self.parameters: dict[str, Parameter] = {}
        if self.is_open:
            return
        if "hyperopt.pyll" in sys.modules:  # loaded by whoever made an expression
            from sparkkeras.hyperopt import expressions

            convert = expressions.all_converted if self.given is space else expressions.converted
            self.tree = convert(self.given)
        found = {id(each): each for each in _parameters(self.tree)}.values()
        self.parameters = {each.label: each for each in found}
        if not self.parameters:
            raise ConfigurationError(
                f"space={reprlib.repr(space)} has no hyper-parameter to choose: expected a dict such as "
                '{"units": choice(32, 64), "lr": loguniform(1e-4, 1e-1)}, with distributions from sparkkeras.hyperopt. '
                "Lists and numbers are constants."
            )
        twice = [label for label, count in Counter(each.label for each in found).items() if count > 1]
        if twice:
            raise ConfigurationError(f"space: two hyper-parameters have the name {twice[0]!r}: rename one of them.")
        try:
            sample = evaluate(self.tree, lambda each: 0 if each.options else each.value(each.bounds[0]))
        except Exception as error:
            raise ConfigurationError(f"space={space!r} cannot be sampled ({type(error).__name__}: {error}).") from error
        self.encode(sample)
        for name, values in _constant_lists(space) if self.given is not space else ():
            shown = reprlib.repr(values)
            items = "*items" if "..." in shown else shown[1:-1]
            warn(
                f"space: {name!r} is the list {shown}, which is a constant: every trial gets all of it. To choose one of "
                f"its items, write choice({items}); for a constant, write a tuple, which gives no warning."
            )

    def add(self, label: str, distribution: Distribution) -> Parameter:
        """The parameter that a trial defines in an open space.

        Raises:
            ConfigurationError: It has another distribution than before.
        """
        options = option_names(distribution.options) if isinstance(distribution, Choice) else ()
        made = Parameter(label, distribution, options)
        known = self.parameters.setdefault(label, made)
        same_numbers = isinstance(distribution, Choice) or vars(known.distribution) == vars(distribution)
        if known.searched != made.searched or not same_numbers:
            raise ConfigurationError(
                f"the hyper-parameter {label!r} is defined twice, as {known.distribution} and as {distribution}: rename one."
            )
        return known

    @property
    def digest(self) -> str:
        """A digest of labels, ranges and options, equal in every process; objects are identified by their names."""
        text = re.sub(r" at 0x[0-9a-fA-F]+", "", _described(self.tree))
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def objects(self) -> list[Any]:
        """The user's objects in the space that JSON cannot represent, in a fixed order."""
        return list({id(each): each for each in _leaves(self.tree) if type(each) not in JSON_TYPES}.values())

    def encode(self, params: Any) -> Any:
        """Encode the hyper-parameters of a trial as JSON values, ``None`` of an open space; `decode` is the inverse.

        Raises:
            ConfigurationError: ``params`` holds an object that JSON cannot represent and that is not an option of the space.
        """
        return None if self.is_open else encode(params, self.objects)


def evaluate(node: Any, choose: Callable[[Parameter], Any]) -> Any:
    """Evaluate a structure: put a value in place of each parameter, or the option of a choice whose index it is."""
    if isinstance(node, Parameter):
        value = choose(node)
        return evaluate(node.distribution.options[value], choose) if isinstance(node.distribution, Choice) else value
    if isinstance(node, Computed):
        return node.compute([evaluate(each, choose) for each in node.inputs])
    return _mapped(node, lambda _, item: evaluate(item, choose)) if type(node) in (dict, list, tuple) else node


def has_distributions(space: Any) -> bool:
    """Whether a space, a structure of dicts, lists and tuples, has distributions of sparkkeras."""
    return any(True for _ in _paths(space))


def labeled(space: Any) -> Any:
    """A space with a `Parameter` in place of each distribution.

    The label of a distribution is its path: keys and indices joined by dots, such as ``optimizer.momentum``. An option of a
    choice has the path of the choice. If several distributions share a path, the labels of those within options name the
    option: ``optimizer.lr (sgd)``.

    Raises:
        ConfigurationError: A distribution is in a named tuple.
    """
    shared = Counter(_paths(space))

    def visit(node: Any, path: tuple[str, ...], options: tuple[str, ...]) -> Any:
        if not has_distributions(node):
            return node
        if isinstance(node, tuple) and type(node) is not tuple:
            raise ConfigurationError(
                f"space: {type(node).__name__}(...) has distributions, and trials would get a plain tuple instead: write a "
                "dict or a tuple, and make the object of it in the function that builds the model."
            )
        if not isinstance(node, Distribution):
            return _mapped(node, lambda key, item: visit(item, (*path, key), options))
        name = ".".join(path) or ROOT
        label = f"{name} ({', '.join(options)})" if options and shared[path] > 1 else name
        if not isinstance(node, Choice):
            return Parameter(label, node)
        names = option_names(node.options)
        inner = [visit(option, path, (*options, name)) for option, name in zip(node.options, names, strict=True)]
        return Parameter(label, Choice(tuple(inner)), names)

    return visit(space, (), ())


def _paths(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of each distribution in a space."""
    if isinstance(node, Distribution):
        yield path
        for option in node.options if isinstance(node, Choice) else ():
            yield from _paths(option, path)
    elif isinstance(node, (Mapping, list, tuple)):
        for key, item in node.items() if isinstance(node, Mapping) else enumerate(node):
            yield from _paths(item, (*path, str(key)))


def _mapped(node: Any, function: Callable[[str, Any], Any]) -> Any:
    """Replace the items of a dict, list or tuple by what a function returns for each key or index, and item."""
    if isinstance(node, Mapping):
        return {key: function(str(key), item) for key, item in node.items()}
    items = [function(str(index), item) for index, item in enumerate(node)]
    return tuple(items) if isinstance(node, tuple) else items


def _children(node: Any) -> Sequence[Any]:
    if isinstance(node, Parameter):
        return node.distribution.options if isinstance(node.distribution, Choice) else ()
    if isinstance(node, Computed):
        return node.inputs
    return [*node.keys(), *node.values()] if type(node) is dict else node if type(node) in (list, tuple) else ()


def _parameters(node: Any) -> Iterator[Parameter]:
    """The parameters in a structure, each choice before the ones in its options."""
    if isinstance(node, Parameter):
        yield node
    for child in _children(node):
        yield from _parameters(child)


def _leaves(node: Any) -> Iterator[Any]:
    """The constants in a structure."""
    if not isinstance(node, (Parameter, Computed)) and type(node) not in (dict, list, tuple):
        yield node
    for child in _children(node):
        yield from _leaves(child)


def _described(node: Any) -> str:
    """What identifies a structure. Sets are sorted, since their order differs between processes; see `Space.digest`."""
    inner = ", ".join(map(_described, _children(node)))
    if isinstance(node, Parameter):
        own = node.distribution.weights if isinstance(node.distribution, Choice) else node.distribution
        return f"{node.label}={own}[{inner}]"
    if isinstance(node, Computed) or type(node) in (dict, list, tuple):
        return f"{node.name if isinstance(node, Computed) else type(node).__name__}({inner})"
    if hasattr(node, "get_config") and not isinstance(node, type):  # Keras numbers layer names, so reprs differ
        return f"{type(node).__module__}.{type(node).__qualname__}"
    return repr(sorted(map(repr, node))) if isinstance(node, (set, frozenset)) else repr(node)


def _constant_lists(space: Any, name: str = "") -> Iterator[tuple[str, list[Any]]]:
    """The names of the lists of several numbers, strings and the like in a space, and these lists; not those in options.

    Other libraries choose one item of such a list.
    """
    if isinstance(space, dict):
        for key, item in space.items():
            yield from _constant_lists(item, f"{name}.{key}" if name else str(key))
    elif isinstance(space, list) and len(space) > 1 and all(isinstance(item, _CONSTANTS) for item in space):
        yield name, space


def describe(parameters: Mapping[str, Parameter], trial: Trial) -> str:
    """The hyper-parameters of a trial in one line: ``optimizer=sgd optimizer.momentum=0.9 units=64``."""
    return " ".join(f"{label}={as_text(value, short=True)}" for label, value in shown(parameters, trial).items())


def shown(parameters: Mapping[str, Parameter], trial: Trial) -> dict[str, Any]:
    """The hyper-parameters of a trial by label, for display: numbers, and names of options."""

    def value(label: str, chosen: Any) -> Any:
        parameter = parameters.get(label)
        if parameter is None:  # an earlier search has defined it
            return chosen if isinstance(chosen, str) else trial.params.get(label, chosen)
        is_exact = label in trial.drawn and isinstance(parameter.distribution, Quantile)
        return trial.drawn[label] if is_exact else parameter.shown(chosen)

    known = [label for label in list(parameters) if label in trial.chosen]  # trials may add some meanwhile
    return {label: value(label, trial.chosen[label]) for label in dict.fromkeys([*known, *trial.chosen])}
