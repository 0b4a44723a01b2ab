"""What a search has found so far: trials, and models made of what is kept of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from sparkkeras.errors import ConfigurationError, ModelError, SearchError
from sparkkeras.hyperopt.encoding import decode
from sparkkeras.hyperopt.journal import Journal
from sparkkeras.hyperopt.ledger import TrialLedger
from sparkkeras.hyperopt.objective import built, unpacked_weights
from sparkkeras.hyperopt.space import Space
from sparkkeras.hyperopt.trials import FAILED, Trial, ranked
from sparkkeras.modeling.archive import load_bytes, optimizer_variables
from sparkkeras.modeling.custom_code import ByValue


@dataclass(frozen=True)
class Loading:
    """How models that an objective returned are loaded.

    Attributes:
        custom_objects: Custom classes and functions by name.
        safe_mode: Whether Python code in the models is refused.
    """

    custom_objects: Mapping[str, Any]
    safe_mode: bool


@dataclass(frozen=True)
class SearchResults:
    """A search that goes on or has ended.

    Attributes:
        ledger: Its trials.
        journal: The models that are kept.
        space: What was searched.
        metric: What was optimized.
        sign: 1 where small values are good, -1 where large ones are.
        build: Gives a compiled model for hyper-parameters; ``None`` where an objective made the models.
        sample: Features of some rows, to build a model by.
        objects: The person's objects in the space, as they were before the search: each model gets its own.
    """

    ledger: TrialLedger
    journal: Journal
    space: Space
    metric: str
    sign: float
    build: Callable[[Any], Any] | None = None
    sample: Any = None
    objects: ByValue[list[Any]] = field(default_factory=lambda: ByValue.dump([], "space"))

    @property
    def trials(self) -> list[Trial]:
        """What is known of each trial, running ones included, in the order of their numbers."""
        return sorted([*self.ledger.finished, *self.ledger.running], key=lambda trial: trial.number)

    @property
    def ranked(self) -> list[Trial]:
        """The trials that have a value, the best first."""
        return ranked(self.trials, self.sign)

    def models(self, count: int, loading: Loading) -> list[keras.Model]:
        """As `HyperParamModel.best_models`."""
        best = self.ranked[:count]
        kept = [trial for trial in best if self.journal.has_model(trial.number)]
        if len(kept) < len(best) or not best:
            raise ConfigurationError(
                f"nb_models={count}, but {len(kept)} of these models were kept: search with keep_models={count} or "
                'keep_models="all". An objective has to return its model, and a trial that was stopped early may have none.'
            )
        return [self.model_of(trial.number, loading) for trial in kept]

    def model_of(self, number: int, loading: Loading) -> keras.Model:
        """As `HyperParamModel.model_of`."""
        if number not in [trial.number for trial in self.trials]:
            raise ConfigurationError(f"there is no trial {number!r}; they are numbered from 0, see trials.")
        if not self.journal.has_model(number):
            raise ConfigurationError(
                f'the model of trial {number!r} was not kept: search with keep_models="all", or a larger number.'
            )
        name, data = self.journal.model_file(number)
        if self.build is None or name.endswith(".keras"):
            return load_bytes(data, loading.custom_objects, safe_mode=loading.safe_mode)
        trial = next(trial for trial in self.trials if trial.number == number)
        return self._rebuilt(self.build, trial, unpacked_weights(data))

    def check(self, max_failures: int | None) -> None:
        """Refuse a search that has found nothing, or had too many failures.

        Raises:
            SearchError: It has.
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
                f"the search ended before any trial had a value: {self.ledger.reason or 'nothing was suggested'}."
            )

    def _rebuilt(self, build: Callable[[Any], Any], trial: Trial, weights: Sequence[np.ndarray[Any, Any]]) -> keras.Model:
        """The model of a trial, built here once more, with its trained weights."""
        model, _ = built(build, decode(self.space.encode(trial.params), self.objects.fresh()))
        if not model.built and self.sample is not None:
            model(keras.tree.map_structure(lambda array: array[:1], self.sample))
        if not model.built:
            raise ModelError(
                f"the model {model.name!r} of trial {trial.number} is not built, so its weights have no place: begin it "
                "with keras.Input(shape)."
            )
        shapes, found = [weight.shape for weight in weights], [tuple(weight.shape) for weight in model.weights]
        if shapes != found:
            raise ModelError(
                f"trial {trial.number} trained weights of the shapes {shapes}, but the function that builds models gives a "
                f"model with {found} for the same hyper-parameters now: it must depend on these alone."
            )
        model.set_weights(list(weights))
        optimizer_variables(model)  # makes its slots, so that Keras saves and loads it without a warning
        return model
