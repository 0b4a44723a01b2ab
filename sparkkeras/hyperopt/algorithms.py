"""Search algorithms: they choose a value for each label of a space from the trials so far.

Those of hyperopt are its suggest functions. Optuna's samplers are in `optuna_sampler`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hyperopt import anneal, rand, tpe

from sparkkeras.errors import ConfigurationError, known_names
from sparkkeras.hyperopt.space import Chosen, Space, SuggestFunction
from sparkkeras.hyperopt.trials import Trial

GAMMA = 1.0
"""TPE takes the best ``GAMMA * sqrt(n)`` of n trials as good ones.

With hyperopt's default, 0.25, these are 2 of 60, from which it learns little: see the benchmark `search_regret`.
`Watanabe (2023) <https://arxiv.org/abs/2304.11127>`_ compares such settings.
"""

ALGORITHMS: dict[str, SuggestFunction] = {
    "tpe": functools.partial(tpe.suggest, gamma=GAMMA),
    "random": rand.suggest,
    "anneal": anneal.suggest,
}
"""The suggest functions of hyperopt by name."""


OptunaSampler = Any
"""``optuna.samplers.BaseSampler``, where Optuna is installed."""


class Algorithm(Protocol):
    """A search algorithm for one space. The search calls it from one thread at a time."""

    @property
    def name(self) -> str:
        """The name for display."""
        ...

    def suggest(self, number: int, trials: Sequence[Trial], seed: int, *signs: float) -> Chosen | None:
        """Choose the values of the next trial by label; ``None`` if there are no more.

        Args:
            number: The number of the new trial.
            trials: All other trials, finished and running, in the order of their numbers.
            seed: The seed for this suggestion.
            signs: For each metric 1 if smaller values are better, -1 if larger ones are.
        """
        ...


@dataclass(frozen=True)
class HyperoptAlgorithm:
    """A suggest function of hyperopt."""

    function: SuggestFunction
    space: Space

    @property
    def name(self) -> str:
        """The name of the function, with the settings that the user has given it."""
        for name, known in ALGORITHMS.items():
            if known is self.function:
                return name
        function, settings = self.function, ""
        if isinstance(function, functools.partial):
            settings = f"({', '.join(f'{name}={value!r}' for name, value in function.keywords.items())})"
            function = function.func
        module = str(getattr(function, "__module__", "")).rpartition(".")[2]
        name = str(getattr(function, "__name__", repr(function)))
        return f"{module}.{name}{settings}" if name == "suggest" else f"{name}{settings}"

    def suggest(self, number: int, trials: Sequence[Trial], seed: int, *signs: float) -> Chosen | None:
        """Call the function with the trials as hyperopt's, which have a single loss."""
        (sign,) = signs
        return self.space.suggest(self.function, number, trials, seed, sign)


def make_algorithm(given: object, space: Space, num_metrics: int = 1) -> Algorithm:
    """Look up a search algorithm by name, or adapt a suggest function of hyperopt or a sampler of Optuna.

    Raises:
        ConfigurationError: ``given`` is none of these, or cannot search the space or several metrics.
    """
    algorithm = _make_algorithm(given, space, num_metrics)
    if num_metrics > 1 and isinstance(algorithm, HyperoptAlgorithm):
        raise ConfigurationError(
            f"algo={algorithm.name!r} searches a single metric, and metric= names {num_metrics}: give a sampler of Optuna, "
            "such as algo=optuna.samplers.TPESampler(seed=1), which needs pip install 'sparkkeras[optuna]'."
        )
    return algorithm


def _make_algorithm(given: object, space: Space, num_metrics: int) -> Algorithm:
    if isinstance(given, str) and given in ALGORITHMS:
        return HyperoptAlgorithm(ALGORITHMS[given], space)
    samplers: Any = sys.modules.get("optuna.samplers")  # loaded by whoever made a sampler
    if samplers is not None and isinstance(given, samplers.BaseSampler):
        from sparkkeras.hyperopt.optuna_sampler import OptunaAlgorithm, check_several

        if num_metrics > 1:
            check_several(given, space, num_metrics)
        return OptunaAlgorithm(given, space, num_metrics)
    if callable(given) and not isinstance(given, type):
        function: Callable[..., Any] = given
        return HyperoptAlgorithm(function, space)
    if samplers is not None and isinstance(given, type) and issubclass(given, samplers.BaseSampler):
        raise ConfigurationError(f"algo={given.__name__} is a class; expected an object: {given.__name__}().")
    raise ConfigurationError(
        f"algo={given!r} is not known. Give a name; a function suggest(new_ids, domain, trials, seed) such as "
        "hyperopt.tpe.suggest; or a sampler of Optuna, such as optuna.samplers.TPESampler(seed=1), which needs "
        f"pip install 'sparkkeras[optuna]'. {known_names(given, ALGORITHMS)}"
    )
