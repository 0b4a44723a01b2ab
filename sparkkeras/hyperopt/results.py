"""The results of a search: its trials, and the models of the best ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np
import optuna

from sparkkeras import arguments
from sparkkeras.arguments import known_arguments
from sparkkeras.errors import ConfigurationError, ModelError, SearchError
from sparkkeras.hyperopt.hypermodel import HyperParameters
from sparkkeras.hyperopt.journal import Journal
from sparkkeras.hyperopt.ledger import TrialLedger
from sparkkeras.hyperopt.objective import build_model, unpack_weights
from sparkkeras.hyperopt.space import Space
from sparkkeras.hyperopt.study import complete, quiet, target
from sparkkeras.hyperopt.trials import FAILED, Metrics, Trial, pareto_front, ranked
from sparkkeras.hyperopt.values import decode
from sparkkeras.modeling.custom_code import ByValue
from sparkkeras.modeling.state import optimizer_variables

Load = Callable[[bytes], keras.Model]
"""Loads a model that an objective returned."""


@dataclass(frozen=True)
class SearchResults:
    """The trials and models of a running or finished search.

    Attributes:
        ledger: The trials.
        journal: The models that are kept.
        space: The search space.
        metrics: The metrics.
        build: Returns a compiled model for hyper-parameters; ``None`` if an objective made the models.
        sample: Features of some rows, for building a model whose input shape is unknown.
        objects: The user's objects in the space, as they were before the search: each model gets separate copies.
    """

    ledger: TrialLedger
    journal: Journal
    space: Space
    metrics: Metrics
    build: Callable[[Any], Any] | None = None
    sample: Any = None
    objects: ByValue[list[Any]] = field(default_factory=lambda: ByValue.dump([], "space"))

    @property
    def trials(self) -> list[Trial]:
        """All trials, including running ones, in the order of their numbers."""
        return sorted([*self.ledger.finished, *self.ledger.running], key=lambda trial: trial.number)

    @property
    def ranked(self) -> list[Trial]:
        """The trials that have a value, the best first."""
        return ranked(self.trials, *self.metrics.values())

    @property
    def best(self) -> Trial:
        """The best trial.

        Raises:
            ConfigurationError: There are several metrics.
            SearchError: No trial has a value.
        """
        self._check_single()
        found = self.ranked
        if not found:
            reason = f" ({self.ledger.reason})" if self.ledger.reason else ""
            raise SearchError(
                f"none of the {len(self.trials)} trials has a value{reason}: see trials for errors, and search again."
            )
        return found[0]

    def _check_single(self) -> None:
        if len(self.metrics) > 1:
            raise ConfigurationError(
                f"a search of several metrics ({', '.join(self.metrics)}) has no best trial: choose one of pareto_front, "
                "the trials that no other one dominates. Its params are trial.params, and minimize keeps its model, "
                "model_of(trial.number)."
            )

    def models(self, count: int, load: Load) -> list[keras.Model]:
        """The models of the ``count`` best trials, see `HyperParamModel.best_models`."""
        self._check_single()
        best = self.ranked[:count]
        kept = [trial for trial in best if self.journal.has_model(trial.number)]
        if len(kept) < len(best) or not best:
            raise ConfigurationError(
                f"nb_models={count}, but only {len(kept)} of the models of the {count} best trials are there: search with "
                f"keep_models={count} or "
                'keep_models="all". An objective must return its model to have it kept, and a trial that was stopped early '
                "may have none."
            )
        return [self.model_of(trial.number, load) for trial in kept]

    def model_of(self, number: int, load: Load) -> keras.Model:
        """The trained model of one trial, see `HyperParamModel.model_of`."""
        if number not in [trial.number for trial in self.trials]:
            raise ConfigurationError(f"there is no trial {number!r}: expected the number of one of trials, counted from 0.")
        if not self.journal.has_model(number):
            raise ConfigurationError(
                f'the model of trial {number!r} was not kept: search with keep_models="all" or a larger number.'
            )
        name, data = self.journal.model_file(number)
        if self.build is None or name.endswith(".keras"):
            return load(data)
        trial = next(trial for trial in self.trials if trial.number == number)
        return self._rebuilt(self.build, trial, unpack_weights(data))

    def check(self, max_failures: int | None) -> None:
        """Check that the search has a value and not too many failures.

        Raises:
            SearchError: All trials failed, more than ``max_failures`` failed, or no trial has a value.
        """
        trials = self.trials
        failed = [trial for trial in trials if trial.status == FAILED]
        too_many = max_failures is not None and len(failed) > max_failures
        if failed and (too_many or len(failed) == len(trials)):
            first = failed[0]
            raise SearchError(
                f"{len(failed)} of {len(trials)} trials failed. The first of them, trial {first.number} with "
                f"{first.params!r}: {first.error}" + (f"\n\n{first.traceback}" if first.traceback else "")
            )
        if not self.ranked:
            raise SearchError(
                "the search ended before any trial had a value: "
                f"{self.ledger.reason or 'the search algorithm suggested no trial'}."
            )

    def _rebuilt(self, build: Callable[[Any], Any], trial: Trial, weights: Sequence[np.ndarray[Any, Any]]) -> keras.Model:
        """Build the model of a trial again, and set its trained weights."""
        params = decode(self.space.encode(trial.params), self.objects.fresh())
        params = HyperParameters(trial.params) if params is None else params
        model, _ = build_model(build, params)
        if not model.built and self.sample is not None:
            model(keras.tree.map_structure(lambda array: array[:1], self.sample))
        if not model.built:
            raise ModelError(
                f"the model {model.name!r} of trial {trial.number} is not built, so its trained weights cannot be set: "
                "start the model with keras.Input(shape)."
            )
        trained, rebuilt = [weight.shape for weight in weights], [tuple(weight.shape) for weight in model.weights]
        if trained != rebuilt:
            raise ModelError(
                f"trial {trial.number} trained weights of shapes {trained}, but the function that builds models now returns "
                f"a model with shapes {rebuilt} for the same hyper-parameters: it must depend only on these."
            )
        model.set_weights(list(weights))
        optimizer_variables(model)  # creates them, so that Keras saves and loads the model without a warning
        return model


class SearchView:
    """What users see of the trials of a search, on Spark or in their own loop."""

    _results: SearchResults | None = None

    def _require_results(self) -> SearchResults:
        if self._results is None:
            raise SearchError("there are no trials yet: call minimize first.")
        return self._results

    @property
    def study(self) -> optuna.Study:
        """The study of Optuna, for its functions.

        Raises:
            SearchError: There are no trials yet.
        """
        return self._require_results().ledger.study

    @property
    def trials(self) -> list[Trial]:
        """All trials, including running ones, whose status is ``"running"``, in the order of their numbers."""
        return [] if self._results is None else self._results.trials

    @property
    def reason(self) -> str:
        """Why the search ended early, as a message; empty if it did not."""
        return "" if self._results is None else self._results.ledger.reason

    @property
    def metric(self) -> str | tuple[str, ...]:
        """The name of the metric that the search optimizes; ``"loss"`` for an objective; a tuple of several."""
        metrics = () if self._results is None else tuple(self._results.metrics)
        return metrics if len(metrics) > 1 else "".join(metrics)

    @property
    def best_trial(self) -> Trial:
        """The best trial.

        Raises:
            ConfigurationError: The search has several metrics: see `pareto_front`.
            SearchError: No trial has a value yet.
        """
        return self._require_results().best

    @property
    def pareto_front(self) -> list[Trial]:
        """The trials that no other one dominates, in the order of their first metric, the best first.

        A trial dominates another one if it is better in one metric, and at least as good in all others. With a single
        metric, these are the best trial, and those with the same value. Empty if no trial has a value yet.
        """
        return [] if self._results is None else pareto_front(self._results.trials, *self._results.metrics.values())

    @property
    def best_params(self) -> Any:
        """The hyper-parameters of the best trial."""
        return self.best_trial.params

    @property
    def best_value(self) -> float:
        """The value of the metric in the best trial, at its best epoch."""
        value = self.best_trial.value
        assert value is not None
        return value

    @known_arguments
    def importances(self, metric: str | None = None) -> dict[str, float]:
        """The importance of each hyper-parameter, the largest first; their sum is 1.

        ``optuna.importance.get_param_importances``, which uses PED-ANOVA.

        Args:
            metric: The metric, of several; ``None`` is the first.

        Raises:
            ConfigurationError: The search has no such metric.
            SearchError: There are no trials with different values.
        """
        metrics = self._require_results().metrics
        names = tuple(metrics)
        index = 0 if metric is None else names.index(arguments.one_of("metric", metric, names))
        if len({trial.values[index] for trial in complete(self.study)}) < 2:
            raise SearchError("importances need trials with different values: search further.")
        with quiet():
            return dict(optuna.importance.get_param_importances(self.study, target=target(metrics, index)))

    @known_arguments
    def plot(self, path: str | Path) -> None:
        """Plot the search as a PNG: Optuna's charts of the values, the importances and the hyper-parameters.

        With several metrics, the first of them, and the Pareto front.

        Args:
            path: The local path of the file; it must end in ``.png``.

        Raises:
            ConfigurationError: matplotlib is not installed.
            SearchError: No trial has a value yet.
        """
        from sparkkeras.hyperopt.plot import plot_study

        results = self._require_results()
        if not complete(self.study):
            raise SearchError("a plot needs a trial with a value that was neither pruned nor stopped: search further.")
        plot_study(self.study, path, results.metrics, results.space.parameters)
