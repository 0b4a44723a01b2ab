"""The Optuna study of a search: its trials are those of the search, and its sampler and pruner decide about them.

A trial of the study is running from its suggestion until it is told. What Optuna does not know of a trial (its history, its
worker, how often it was started) is in a user attribute. A trial that was running when the driver died is continued: it
keeps its number and its parameters.
"""

from __future__ import annotations

import dataclasses
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.pruners import BasePruner, NopPruner
from optuna.samplers import BaseSampler, GridSampler, RandomSampler
from optuna.storages import BaseStorage, InMemoryStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from sparkkeras.errors import ConfigurationError
from sparkkeras.hyperopt.distributions import Choice, Distribution
from sparkkeras.hyperopt.space import Parameter, Space, evaluate
from sparkkeras.hyperopt.trials import FAILED, OK, PRUNED, Metrics, Trial

NAME = "sparkkeras"
"""The name of the study, and of its attribute with the settings of the search."""

_TRIAL = "sparkkeras.trial"
"""The name of the attribute with what Optuna does not know of a trial. Other attributes have the labels of parameters."""

_FORMAT = 1
"""The version of what the study has of a search."""

_DRAWN = "sparkkeras.hyperopt"
"""The name of the attribute with what a suggest function of hyperopt has chosen."""

_SEARCH = "sparkkeras.search"
"""The name of the attribute with the search that a trial belongs to, if several share the study."""

_EXHAUSTED = "sparkkeras.exhausted"
"""The name of the attribute of a study whose sampler has suggested everything."""

_OF_OPTUNA = {"number", "params", "chosen", "drawn"}
"""The attributes of a trial that the attribute `_TRIAL` does not have."""

MakeSampler = Callable[[int], BaseSampler]
"""Makes a sampler for a seed."""


class SearchStudy:
    """The study of a search; see the module docstring. Not thread-safe: the ledger calls it under its lock.

    Args:
        space: The space.
        metrics: The metrics.
        algorithm: A sampler, a function that makes one for a seed, or a `Suggester` of hyperopt.
        seed: The seed of the suggestions; ``None``: that of the search to resume, else a new one.
        pruner: Ends unpromising trials early.
        storage: Where the study is; by default in memory.
        search_id: Distinguishes searches of several programs that share a study.

    Attributes:
        study: The study, for Optuna's functions.
        seed: The seed.

    Raises:
        ConfigurationError: The storage has another search.
    """

    def __init__(
        self,
        space: Space,
        metrics: Metrics,
        algorithm: Any,
        seed: int | None = None,
        pruner: BasePruner | None = None,
        storage: BaseStorage | None = None,
        search_id: str = "",
    ) -> None:
        self._space, self._metrics, self._search_id = space, metrics, search_id
        self._suggester = algorithm if hasattr(algorithm, "suggest") else None
        self._storage = storage or InMemoryStorage()
        made = self._made()
        saved = made.user_attrs.get(NAME, {})
        drawn_seed = saved.get("seed", int(np.random.default_rng().integers(2**31)))
        self.seed = int(drawn_seed if seed is None else seed)
        settings = self._settings()
        if search_id and self._suggester:
            raise ConfigurationError(
                "algo= is a suggest function of hyperopt, which cannot share a study with others: omit storage=, or use "
                "a sampler of Optuna, such as 'tpe'."
            )
        if saved and any(each.state.is_finished() or search_id for each in made.get_trials(deepcopy=False)):
            _check_same(saved, settings)
        elif saved != settings:
            if saved:  # there is nothing to resume
                self._storage.delete_study(self._storage.get_study_id_from_name(NAME))
            self._made().set_user_attr(NAME, settings)
        sampler = RandomSampler(self.seed) if self._suggester else algorithm
        sampler = sampler if isinstance(sampler, BaseSampler) else SeededSampler(sampler, self.seed)
        self.study = _Study(NAME, self._storage, sampler, pruner or NopPruner())
        self._asked: dict[int, optuna.Trial] = {}
        self._reported: dict[int, int] = {}

    def _made(self) -> optuna.Study:
        """The study in the storage, which is made if it does not exist."""
        directions = [StudyDirection.MINIMIZE if sign > 0 else StudyDirection.MAXIMIZE for sign in self._metrics.values()]
        with quiet():
            return optuna.create_study(storage=self._storage, study_name=NAME, load_if_exists=True, directions=directions)

    def _settings(self) -> dict[str, Any]:
        """What a search must have in common with one that it resumes, as JSON values."""
        names, modes = list(self._metrics), ["min" if sign > 0 else "max" for sign in self._metrics.values()]
        several = len(names) > 1
        return {
            "format": _FORMAT,
            "parameters": [] if self._space.is_open else sorted(self._space.parameters),
            "space": "" if self._space.is_open else self._space.digest,
            "metric": names if several else names[0],
            "mode": modes if several else modes[0],
            "seed": self.seed,
        }

    def earlier(self) -> list[Trial]:
        """The trials of an earlier search with this storage that have ended; `ask` returns those that were running."""
        found = self.study.get_trials(deepcopy=False)
        if found:
            sampler = self.study.sampler
            sampler.reseed_rng()  # the seed of a user's sampler would give the first trials once more
            is_complete = isinstance(sampler, GridSampler) and sampler.is_exhausted(self.study)
            self.study.is_exhausted = is_complete or _EXHAUSTED in self.study.user_attrs
        return [self._of(each) for each in found if each.state.is_finished()]

    def _continued(self, frozen: FrozenTrial) -> optuna.Trial:
        """A trial that is running in the storage, whose suggestion may be incomplete."""
        self._reported[frozen.number] = frozen.last_step or 0
        study_id = self._storage.get_study_id_from_name(NAME)
        return optuna.Trial(self.study, self._storage.get_trial_id_from_study_id_trial_number(study_id, frozen.number))

    def _is_running(self, frozen: FrozenTrial) -> bool:
        """Whether a trial of this search, not of another one that shares the study, is running in the storage."""
        return frozen.state == TrialState.RUNNING and frozen.user_attrs.get(_SEARCH, "") == self._search_id

    def ask(self, trials: Sequence[Trial]) -> Trial | None:
        """Suggest the next trial; ``None`` if the algorithm has no more.

        Args:
            trials: All other trials, in the order of their numbers.
        """
        found, known = self.study.get_trials(deepcopy=False), {trial.number for trial in trials}
        left = [each for each in found if self._is_running(each) and each.number not in known]
        if left:  # by a driver that has died, or since the last call raised an error
            try:
                return self._opened(self._continued(left[0]))
            except Exception:  # again: it would be so each time
                self.study.tell(left[0].number, state=TrialState.FAIL)
                raise
        if self.study.is_exhausted:
            return None
        if self._suggester is not None and not any(each.state == TrialState.WAITING for each in found):
            drawn = self._suggester.suggest(len(found), trials, self.seed)
            if drawn is None:
                return None
            self.study.enqueue_trial(self._suggester.searched(drawn), {_DRAWN: drawn})
        asked = self.study.ask()
        if self._search_id:
            asked.set_user_attr(_SEARCH, self._search_id)
        return self._opened(asked)

    def _opened(self, asked: optuna.Trial) -> Trial:
        """A trial that is running, with a value for each parameter of the space."""
        drawn = asked.user_attrs.get(_DRAWN, {})
        params = self._params(asked, lambda parameter: self._value(parameter, asked, drawn))
        self._space.encode(params)  # raises ConfigurationError for objects that cannot be sent to workers
        self._asked[asked.number] = asked
        return Trial(asked.number, params, chosen=asked.params, drawn=drawn)

    def _params(self, trial: optuna.Trial | FrozenTrial, choose: Callable[[Parameter], Any]) -> Any:
        """The hyper-parameters of a trial; if it defines them itself, those that it has defined so far."""
        if self._space.is_open:
            return {label: trial.user_attrs.get(label, chosen) for label, chosen in trial.params.items()}
        return evaluate(self._space.tree, choose)

    def _value(self, parameter: Parameter, asked: optuna.Trial, drawn: Mapping[str, Any]) -> Any:
        chosen = parameter.ask(asked)
        value = _from_hyperopt(parameter, drawn) if drawn else parameter.value(chosen)
        shown = parameter.options[value] if parameter.options else value
        if not isinstance(parameter.searched, CategoricalDistribution) and shown != chosen:
            asked.set_user_attr(parameter.label, shown)
        return value

    def suggest(self, number: int, label: str, distribution: Distribution) -> tuple[Any, Trial]:
        """Choose the value of a parameter that a trial defines while it runs; returns it and the trial so far."""
        asked = self._asked[number]
        chosen = self._value(self._space.add(label, distribution), asked, {})
        value = distribution.options[chosen] if isinstance(distribution, Choice) else chosen
        if asked.params[label] != value:
            asked.set_user_attr(label, value)
        return value, self._opened(asked)

    def report(self, number: int, epoch: int, value: float) -> bool:
        """Note the value of a single metric at an epoch, counted from 1; returns whether the pruner ends the trial."""
        if len(self._metrics) > 1:
            return False
        asked = self._asked[number]
        if epoch > self._reported.get(number, 0):  # a trial that was started again reports its first epochs once more
            self._reported[number] = epoch
            asked.report(value, epoch)
        return epoch >= self._reported.get(number, 0) and asked.should_prune()

    def tell(self, trial: Trial) -> None:
        """End a trial with its result, unless it was told before."""
        asked = self._asked.pop(trial.number, None)
        if asked is None:
            return
        kept = {each.name: getattr(trial, each.name) for each in dataclasses.fields(trial) if each.name not in _OF_OPTUNA}
        asked.set_user_attr(_TRIAL, kept)
        has_failed = trial.status == FAILED or not trial.values
        state = TrialState.FAIL if has_failed else TrialState.PRUNED if trial.status == PRUNED else TrialState.COMPLETE
        self.study.tell(asked, list(trial.values) if state == TrialState.COMPLETE else None, state)

    def _of(self, frozen: FrozenTrial) -> Trial:
        """A trial that has ended."""
        kept = dict(frozen.user_attrs.get(_TRIAL, {}))
        if not kept:  # another program has added it to the study, or has ended it
            values = frozen.values or ()
            status = PRUNED if frozen.state == TrialState.PRUNED else OK if values else FAILED
            kept = {"status": status, "value": values[0] if values else None, "values": values}
        drawn, chosen = frozen.user_attrs.get(_DRAWN, {}), frozen.params

        def value(parameter: Parameter) -> Any:
            if drawn:
                return _from_hyperopt(parameter, drawn)
            return parameter.value(chosen[parameter.label])

        try:
            params = self._params(frozen, value)
        except (LookupError, ValueError):  # it lacks parameters, or has others
            params = dict(chosen)
        return Trial(frozen.number, params, chosen=chosen, drawn=drawn, **kept)


def _from_hyperopt(parameter: Parameter, drawn: Mapping[str, Any]) -> Any:
    from sparkkeras.hyperopt.expressions import value_of  # a search that has no trials of hyperopt does not load it

    return value_of(parameter, drawn[parameter.label])


def _check_same(saved: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Check that a search has the settings of the one that it resumes."""
    if saved.get("format", _FORMAT) > _FORMAT:
        raise ConfigurationError(
            "save_to= was written by a later version of sparkkeras: upgrade sparkkeras to resume the search."
        )
    differing = [name for name in settings if saved.get(name) != settings[name]]
    if "parameters" in differing and "space" in differing:  # different labels imply a different space
        differing.remove("space")
    if differing:
        differences = "; ".join(_difference(name, saved, settings) for name in differing)
        raise ConfigurationError(
            f"save_to= or storage= holds another search: {differences}. Resume it with the same arguments, or give another."
        )


def _difference(name: str, saved: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """Describe how a saved setting differs from the given one."""
    if name == "space":
        return "the ranges, options or conditions of its space differ (the labels are the same)"
    if name != "parameters":
        return f"its {name} differs ({saved.get(name)!r} there, {given[name]!r} now)"
    old, new = set(saved.get(name) or ()), set(given[name])
    only = [
        f"only {where}: {', '.join(map(repr, sorted(labels)))}"
        for where, labels in (("there", old - new), ("now", new - old))
        if labels
    ]
    return f"the labels of its space differ ({'; '.join(only)})"


class SeededSampler(BaseSampler):
    """A sampler that is made anew for each value, with a seed that depends on the search, the trial and the parameter.

    So suggestions do not depend on what else was suggested meanwhile, and a resumed search continues as it would have.

    Args:
        make: Makes the sampler for a seed.
        seed: The seed of the search.
    """

    def __init__(self, make: MakeSampler, seed: int) -> None:
        self._make, self._seed = make, seed

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """See `BaseSampler`."""
        return self._of(trial).infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """See `BaseSampler`."""
        sampler = self._of(trial)
        sampler.infer_relative_search_space(study, trial)  # which keeps what it needs to sample
        return sampler.sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """See `BaseSampler`."""
        sampler = self._of(trial, *param_name.encode())
        return sampler.sample_independent(study, trial, param_name, param_distribution)

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """See `BaseSampler`."""
        self._of(trial).before_trial(study, trial)

    def after_trial(
        self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        """See `BaseSampler`."""
        self._of(trial).after_trial(study, trial, state, values)

    def _of(self, trial: FrozenTrial, *more: int) -> BaseSampler:
        with quiet():
            return self._make(seed_of(self._seed, trial.number, *more))


class _Study(optuna.Study):
    """A study that samplers stop when they have suggested everything, although no `optimize` is running."""

    is_exhausted = False

    def stop(self) -> None:
        """End the suggestions, also of a search that continues this one."""
        self.is_exhausted = True
        self.set_user_attr(_EXHAUSTED, True)


def seed_of(*numbers: int) -> int:
    """A seed for the seed of a search and the number of a trial."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def target(metrics: Metrics, index: int) -> Callable[[FrozenTrial], float] | None:
    """What Optuna's functions are to minimize, of several metrics; ``None`` if there is one, whose direction they know."""
    sign = list(metrics.values())[index]
    return None if len(metrics) == 1 else lambda trial: sign * trial.values[index]


def complete(study: optuna.Study) -> list[FrozenTrial]:
    """The complete trials of a study, which Optuna's functions use."""
    return study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])


_quiet = threading.RLock()
"""Of Optuna's logging and the filters of warnings, which are those of the whole process."""


@contextmanager
def quiet() -> Iterator[None]:
    """Keep Optuna from logging that a study is made, and from warning of its experimental features and of `target`."""
    with _quiet, warnings.catch_warnings():
        verbosity = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        warnings.filterwarnings("ignore", ".*to achieve low `target` values")
        warnings.filterwarnings("ignore", ".*may be inaccurate")  # the importance of a parameter of a few trials
        try:
            yield
        finally:
            optuna.logging.set_verbosity(verbosity)
