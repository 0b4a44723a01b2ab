"""What a search optimizes, and how: the same whether workers on Spark run its trials or the user's own loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparkkeras.events import HyperParameter, RunStarted
from sparkkeras.hyperopt.algorithms import Algorithm
from sparkkeras.hyperopt.journal import Journal
from sparkkeras.hyperopt.ledger import Suggestion
from sparkkeras.hyperopt.space import Space
from sparkkeras.hyperopt.trials import Metrics, Trial


@dataclass(frozen=True)
class SearchDefinition:
    """What a search optimizes, and how. A search can resume another one that has the same `settings`.

    Attributes:
        space: The search space.
        algorithm: The search algorithm.
        metrics: The metrics.
        seed: The seed of the search.
    """

    space: Space
    algorithm: Algorithm
    metrics: Metrics
    seed: int

    @property
    def settings(self) -> dict[str, Any]:
        """The settings for the journal, as JSON values."""
        names, modes = list(self.metrics), ["min" if sign > 0 else "max" for sign in self.metrics.values()]
        return {
            "parameters": sorted(self.space.labels),
            "space": self.space.digest,
            "metric": names if len(names) > 1 else names[0],
            "mode": modes if len(names) > 1 else modes[0],
            "seed": self.seed,
        }

    def started(self, name: str, max_trials: int | None, **settings: Any) -> RunStarted:
        """The event with which the search begins; see `RunStarted`, whose metric is the first one."""
        metric, sign = next(iter(self.metrics.items()))
        several = {"metrics": ", ".join(self.metrics)} if len(self.metrics) > 1 else {}
        return RunStarted(
            "search",
            name,
            {**settings, **several, "seed": self.seed},
            metric=metric,
            minimizes=sign > 0,
            max_trials=max_trials,
            parameters=tuple(HyperParameter(each.name, each.options, "log" in each.kind) for each in self.space.parameters),
        )

    def suggest(self, number: int, trials: Sequence[Trial]) -> Suggestion | None:
        """Suggest the next trial, with a random seed derived from the search's seed and the trial's number."""
        seed = int(np.random.SeedSequence([self.seed, number]).generate_state(1)[0])
        chosen = self.algorithm.suggest(number, trials, seed, *self.metrics.values())
        if chosen is None:
            return None
        params = self.space.params(chosen)
        self.space.encode(params)  # raises ConfigurationError for objects that cannot be sent to workers
        return Suggestion(chosen, params)


def choose_seed(given: int | None, journal: Journal) -> int:
    """The given seed, else that of the resumed search, else a new random one."""
    search_seed = int(np.random.default_rng().integers(2**31))
    return int(journal.settings().get("seed", search_seed)) if given is None else int(given)
