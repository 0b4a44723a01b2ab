"""Samplers of Optuna as search algorithms.

The adapter keeps a study of Optuna in memory, in which the sampler finds the trials of the search, since many samplers keep
what they know about a trial in its study. Each suggestion begins with a new trial there, and each trial that has ended since
the last suggestion is told to the study: a failed one as failed, others with the value that they have.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState, create_trial

from sparkkeras.errors import ConfigurationError
from sparkkeras.hyperopt.distributions import Choice, Distribution, Integer, Labeled, LogUniform, Uniform, all_labeled
from sparkkeras.hyperopt.encoding import JSON_TYPES
from sparkkeras.hyperopt.space import Chosen, Space
from sparkkeras.hyperopt.trials import FAILED, RUNNING, Trial, losses


class OptunaAlgorithm:
    """A sampler of Optuna for a space; see the module docstring. Its seed is that of the sampler.

    Args:
        sampler: The sampler.
        space: The space, of sparkkeras's distributions.
        num_metrics: The number of metrics, the objectives of the study.

    Raises:
        ConfigurationError: The space has expressions of hyperopt, or a distribution that Optuna does not have.
    """

    def __init__(self, sampler: optuna.samplers.BaseSampler, space: Space, num_metrics: int = 1) -> None:
        self.name = type(sampler).__name__
        self._space = space.labeled
        labeled = {each.label: each.distribution for each in all_labeled(self._space)}
        if labeled.keys() != space.labels.keys():
            raise ConfigurationError(
                f"algo={self.name}(...) searches only distributions of sparkkeras.hyperopt, and the space has expressions "
                "of hyperopt: replace hp.choice(label, options) by choice(*options), hp.uniform(label, low, high) by "
                "uniform(low, high), and so on."
            )
        self._labeled = labeled
        self._distributions = {label: _to_optuna(label, each) for label, each in labeled.items()}
        self._study = _quiet_study(sampler, num_metrics)
        self._study.stop = self._stop  # samplers that have suggested everything call it; it works within `optimize` only
        self._has_more = True
        self._asked: dict[int, optuna.Trial] = {}
        self._told: set[int] = set()

    def suggest(self, number: int, trials: Sequence[Trial], seed: int, *signs: float) -> Chosen | None:
        """Tell the study which trials have ended, and ask it for another one."""
        if not self._told and not self._asked and trials:  # resumed: its seed would give the first trials once more
            self._study.sampler.reseed_rng()
        for trial in trials:
            if trial.status != RUNNING and trial.number not in self._told:
                self._tell(trial, signs)
        if not self._has_more:
            return None
        asked = self._asked[number] = self._study.ask()
        chosen: Chosen = {}
        self._choose(self._space, asked, chosen)
        return chosen

    def _choose(self, node: Any, asked: optuna.Trial, chosen: Chosen) -> None:
        """Ask for the values of the hyper-parameters in a part of the space."""
        if isinstance(node, Labeled):
            value = _suggested(asked, node.label, self._distributions[node.label])
            chosen[node.label] = _to_chosen(node.distribution, value)
            if isinstance(node.distribution, Choice):
                self._choose(node.distribution.options[chosen[node.label]], asked, chosen)
        elif isinstance(node, (dict, list, tuple)):
            for item in node.values() if isinstance(node, dict) else node:
                self._choose(item, asked, chosen)

    def _tell(self, trial: Trial, signs: Sequence[float]) -> None:
        self._told.add(trial.number)
        has_failed = trial.status == FAILED or trial.value is None
        state = TrialState.FAIL if has_failed else TrialState.COMPLETE
        values = None if has_failed else losses(trial.values, signs)
        if trial.number in self._asked:
            self._study.tell(self._asked.pop(trial.number), values, state)
            return
        params = {label: _to_value(self._labeled[label], chosen) for label, chosen in trial.chosen.items()}
        distributions = {label: self._distributions[label] for label in params}
        self._study.add_trial(create_trial(state=state, values=values, params=params, distributions=distributions))

    def _stop(self) -> None:
        self._has_more = False


def check_several(sampler: optuna.samplers.BaseSampler, space: Space, num_metrics: int) -> None:
    """Check that a sampler supports several objectives: some, such as CMA-ES, raise an error when a copy has to suggest.

    Raises:
        ConfigurationError: It does not.
    """
    try:
        copies = [copy.deepcopy(sampler) for _ in range(2)]
    except TypeError:  # it has a lock, a file, or the like; its first trial will show the error
        return
    try:
        OptunaAlgorithm(copies[0], space).suggest(0, (), 0)
    except ValueError:  # nor a single metric: the search will say why
        return
    try:
        OptunaAlgorithm(copies[1], space, num_metrics).suggest(0, (), 0)
    except ValueError as error:
        raise ConfigurationError(
            f"algo={type(sampler).__name__}(...) cannot search the {num_metrics} metrics of metric= ({error}) Give another "
            "sampler, such as optuna.samplers.TPESampler() or NSGAIISampler()."
        ) from error


def _quiet_study(sampler: optuna.samplers.BaseSampler, num_metrics: int) -> optuna.Study:
    """A study in memory; Optuna would log that there is one."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        return optuna.create_study(sampler=sampler, directions=["minimize"] * num_metrics)
    finally:
        optuna.logging.set_verbosity(verbosity)


def _to_optuna(label: str, distribution: Distribution) -> BaseDistribution:
    match distribution:
        case Choice():
            return CategoricalDistribution(_categories(distribution))
        case Integer(low, high, step, log):
            return IntDistribution(low, low + (high - low) // step * step, log, step)
        case LogUniform(low, high):
            return FloatDistribution(low, high, log=True)
        case Uniform(low, high, None):
            return FloatDistribution(low, high)
        case Uniform():  # Optuna rounds the bounds of stepped floats, and then rejects values that it did not round
            return IntDistribution(0, distribution.last_step)
    raise ConfigurationError(
        f"{label}: Optuna's samplers have no distribution like {distribution!r}: use uniform(low, high) instead."
    )


def _suggested(asked: optuna.Trial, label: str, distribution: BaseDistribution) -> Any:
    if isinstance(distribution, CategoricalDistribution):
        return asked.suggest_categorical(label, distribution.choices)
    suggest = asked.suggest_int if isinstance(distribution, IntDistribution) else asked.suggest_float
    return suggest(label, distribution.low, distribution.high, step=distribution.step, log=distribution.log)


def _categories(choice: Choice) -> tuple[Any, ...]:
    """The values of a choice in Optuna: the options, or their indices if Optuna or JSON cannot distinguish the options."""
    plain = all(type(option) in JSON_TYPES for option in choice.options)
    return choice.options if plain and len(set(choice.options)) == len(choice.options) else tuple(range(len(choice.options)))


def _to_chosen(distribution: Distribution, value: Any) -> Any:
    """The value that hyperopt's expression of a distribution takes, for Optuna's value; `_to_value` is the inverse."""
    match distribution:
        case Choice():
            return _categories(distribution).index(value)
        case Integer(low, _, step) if step != 1:
            return (value - low) // step
    return value


def _to_value(distribution: Distribution, chosen: Any) -> Any:
    match distribution:
        case Choice():
            return _categories(distribution)[int(chosen)]
        case Integer(low, _, step):
            return int(chosen) if step == 1 else low + step * int(chosen)
        case Uniform(_, _, step) if step is not None:
            return int(chosen)
        case Uniform(low, high) | LogUniform(low, high):
            return min(max(chosen, low), high)  # hyperopt may miss a bound by a rounding error
    return chosen
