"""The hyperopt library: its expressions as search spaces, its suggest functions as algorithms, its trials.

A suggest function needs a space of hyperopt's expressions, and chooses numbers in their terms: of a choice the index, of
``integer`` a float that is rounded. They are kept with the trial, so that it gets exactly these, also in a resumed search.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from hyperopt import base, hp, pyll

from sparkkeras.errors import ConfigurationError
from sparkkeras.hyperopt.distributions import Choice, Distribution, Integer, LogUniform, Quantile, Uniform
from sparkkeras.hyperopt.space import Computed, Parameter, Space
from sparkkeras.hyperopt.trials import FAILED, RUNNING, Trial
from sparkkeras.hyperopt.values import JSON_TYPES, option_names

SuggestFunction = Any
"""A suggest function of hyperopt, such as ``hyperopt.tpe.suggest``."""

_HALF = 0.5 - 1e-9
"""Values of this margin beyond a range are rounded into it, and none is rounded beyond it."""


def converted(space: Any) -> Any:
    """A structure in which all expressions of hyperopt are converted.

    Raises:
        ConfigurationError: An expression cannot be searched.
    """
    return _converted(space, {})


def all_converted(space: Any) -> Any:
    """A structure without parameters, converted as hyperopt would: its lists become tuples."""
    try:
        expression = pyll.as_apply(space)
    except Exception as error:
        raise ConfigurationError(f"space={space!r} cannot be searched ({type(error).__name__}: {error}).") from error
    return _converted(expression, {})


def _converted(node: Any, found: dict[int, Parameter]) -> Any:
    """Convert a node; the same hyper-parameter in two places stays the same."""
    if isinstance(node, Parameter):
        if isinstance(node.distribution, Choice):
            options = tuple(_converted(each, found) for each in node.distribution.options)
            return Parameter(node.label, Choice(options), node.options)
        return node
    if type(node) in (dict, list, tuple):
        if isinstance(node, dict):
            return {key: _converted(item, found) for key, item in node.items()}
        return type(node)(_converted(item, found) for item in node)
    if not isinstance(node, pyll.Apply):
        return node
    if isinstance(node, pyll.Literal):
        if isinstance(node.obj, Distribution):
            raise ConfigurationError(
                "space: an expression of hyperopt holds a distribution of sparkkeras, which it cannot search: replace "
                "hp.choice(label, options) by choice(*options)."
            )
        return node.obj
    inner = node.pos_args[0] if node.name in ("float", "switch") and node.pos_args else node
    if inner.name == "hyperopt_param":
        if id(inner) not in found:
            label, numbers = inner.arg["label"].obj, inner.arg["obj"]
            branches = node.pos_args[1:] if node.name == "switch" else ()
            found[id(inner)] = _parameter(label, numbers, [_converted(each, found) for each in branches])
        return found[id(inner)]
    if node.name == "dict":
        return {key: _converted(item, found) for key, item in _items(node)}
    if node.name == "pos_args":
        return tuple(_converted(item, found) for item in node.pos_args)
    inputs = node.inputs()
    return Computed(
        node.name,
        tuple(_converted(each, found) for each in inputs),
        lambda values: pyll.rec_eval(node, memo=dict(zip(inputs, values, strict=True))),
    )


def _items(node: Any) -> list[tuple[Any, Any]]:
    """The items of a dict."""
    if node.named_args or not node.pos_args:
        return list(node.named_args)
    return [(pyll.rec_eval(pair.pos_args[0]), pair.pos_args[1]) for pair in node.pos_args[0].pos_args]  # keys of any type


def _parameter(label: str, node: Any, options: Sequence[Any]) -> Parameter:
    """A hyper-parameter, from the node of its distribution and the options of a choice."""
    numbers = [pyll.rec_eval(each) for each in node.pos_args] + [pyll.rec_eval(each) for _, each in node.named_args]
    kind = node.name
    if kind == "categorical":
        weights = tuple(float(each) for each in numbers[0])
        return Parameter(label, Choice(tuple(options), weights), option_names(options))
    if options:
        return Parameter(label, Choice(tuple(options)), option_names(options))
    match kind, *numbers:
        case "randint", high:
            return Parameter(label, Integer(0, int(high) - 1))
        case "randint", low, high:
            return Parameter(label, Integer(int(low), int(high) - 1))
        case "uniform", low, high:
            return Parameter(label, Uniform(float(low), float(high)))
        case "loguniform", low, high:
            return Parameter(label, LogUniform(math.exp(low), math.exp(high)))
        case str(), first, second, *rest:
            is_log, is_normal = "log" in kind, kind.endswith("normal")
            step = float(rest[0]) if rest else 0.0
            return Parameter(label, Quantile(float(first), float(second), is_normal, is_log, step))
    raise ConfigurationError(f"space: hp.{kind} of {label!r} cannot be searched.")


class Suggester:
    """A suggest function of hyperopt for a space.

    Args:
        function: The function.
        space: The space.
        sign: 1 if smaller values are better, -1 if larger ones are.
    """

    def __init__(self, function: SuggestFunction, space: Space, sign: float) -> None:
        self._function, self._space, self._sign = function, space, sign
        if space.is_open:
            raise ConfigurationError(
                "algo= is a suggest function of hyperopt, which has to know the space before: give space=, or another "
                "algorithm, such as 'tpe'."
            )
        try:
            self._domain = base.Domain(None, _to_expression(space.given), pass_expr_memo_ctrl=False)
        except Exception as error:
            raise ConfigurationError(f"space: hyperopt cannot search it ({type(error).__name__}: {error}).") from error

    def suggest(self, number: int, trials: Sequence[Trial], seed: int) -> dict[str, Any] | None:
        """The values of a trial by label, in hyperopt's terms; ``None`` if there are no more suggestions.

        With one worker, they are those of ``hyperopt.fmin`` with ``rstate=numpy.random.default_rng(seed)``.
        """
        generator = np.random.default_rng(seed)
        drawn = [generator.integers(2**31 - 1) for _ in range(number + 1)]
        history = history_of(trials, self._sign, self._space.parameters)
        docs = self._function([number], self._domain, history, drawn[number])
        if not docs:
            return None
        found = {label: values[0] for label, values in docs[0]["misc"]["vals"].items() if values}
        return {label: value.item() if isinstance(value, np.generic) else value for label, value in found.items()}

    def searched(self, drawn: Mapping[str, Any]) -> dict[str, Any]:
        """What Optuna would have chosen for the values of a trial in hyperopt's terms."""
        return {label: _searched(self._space.parameters[label], value) for label, value in drawn.items()}


def value_of(parameter: Parameter, drawn: Any) -> Any:
    """The value in a trial for one in hyperopt's terms; of a choice the index of the option."""
    match parameter.distribution:
        case Choice():
            return int(drawn)
        case Uniform(_, _, step) as stepped if step is not None:
            return stepped.value(int(drawn))
        case Integer():
            return _searched(parameter, drawn)
    return drawn


def _drawn(parameter: Parameter, chosen: Any) -> Any:
    """What Optuna has chosen, in hyperopt's terms."""
    match parameter.distribution:
        case Integer(low, _, step) if step != 1:
            return (chosen - low) // step
        case Uniform(_, _, step) if step is not None:
            return chosen
    return parameter.value(chosen)


def _searched(parameter: Parameter, drawn: Any) -> Any:
    """What Optuna would have chosen for a value in hyperopt's terms; see `Parameter.searched`."""
    distribution, chosen = parameter.distribution, drawn
    match distribution:
        case Choice(_, None):
            return parameter.categories[int(drawn)]
        case Choice(_, tuple() as weights):
            return sum(weights[: int(drawn)]) + weights[int(drawn)] / 2
        case Integer(low, _, step):
            return int(drawn) if step == 1 else low + step * int(drawn)
        case Uniform(_, _, step) if step is not None:
            return int(drawn)
        case Quantile():
            chosen = distribution.quantile(drawn)
    smallest, largest = parameter.bounds
    return min(max(chosen, smallest), largest)  # rounding errors may miss them


def history_of(trials: Sequence[Trial], sign: float, parameters: Mapping[str, Parameter]) -> base.Trials:
    """Convert trials to ``hyperopt.Trials``. Running ones have no loss; hyperopt's algorithms treat this as infinite."""
    docs = []
    for trial in trials:
        known = {label: chosen for label, chosen in trial.chosen.items() if label in parameters}
        drawn = trial.drawn or {label: _drawn(parameters[label], chosen) for label, chosen in known.items()}
        values = {label: [drawn[label]] if label in drawn else [] for label in parameters}
        idxs = {label: [trial.number] * len(each) for label, each in values.items()}
        misc = {"tid": trial.number, "cmd": None, "workdir": None, "idxs": idxs, "vals": values}
        (doc,) = base.Trials(refresh=False).new_trial_docs([trial.number], [None], [_result(trial, sign)], [misc])
        doc["state"] = base.JOB_STATE_RUNNING if trial.status == RUNNING else base.JOB_STATE_DONE
        docs.append(doc)
    return base.trials_from_docs(docs, validate=False)


def _result(trial: Trial, sign: float) -> dict[str, Any]:
    if trial.status == RUNNING:
        return {"status": base.STATUS_NEW}
    if trial.status == FAILED or trial.value is None:
        return {**trial.extra, "status": base.STATUS_FAIL}
    return {**trial.extra, "status": base.STATUS_OK, "loss": sign * trial.value}


def _to_expression(node: Any) -> Any:
    """The structure of hyperopt's expressions for one with parameters."""
    if isinstance(node, Parameter):
        return _expression(node)
    if type(node) is dict:
        return {key: _to_expression(item) for key, item in node.items()}
    if type(node) in (list, tuple):
        return [_to_expression(item) for item in node]
    return node if isinstance(node, pyll.Apply) or type(node) in JSON_TYPES else pyll.Literal(node)


def _expression(parameter: Parameter) -> Any:
    label = parameter.label
    match parameter.distribution:
        case Choice(options):
            return hp.choice(label, [_to_expression(option) for option in options])
        case Integer(low, high, _, True):
            return hp.qloguniform(label, math.log(low - _HALF), math.log(high + _HALF), 1)
        case Integer(low, high, 1):
            return hp.quniform(label, low - _HALF, high + _HALF, 1)
        case Integer(low, high, step):
            return _index(label, (high - low) // step)
        case LogUniform(low, high):
            return hp.loguniform(label, math.log(low), math.log(high))
        case Quantile(mean, stddev):
            return hp.normal(label, mean, stddev)
        case Uniform(low, high, None):
            return hp.uniform(label, low, high)
        case Uniform() as stepped:
            return _index(label, stepped.last_step)
    raise NotImplementedError(parameter)


def _index(label: str, last: int) -> Any:
    """A whole number from 0 to ``last``, for which TPE knows, unlike for ``hp.randint``, that neighbors are similar."""
    return hp.quniform(label, -_HALF, last + _HALF, 1)
