"""Pruners: they decide from the intermediate values of trials whether to end a trial early.

Pruners compare losses, of which smaller ones are better: `as_losses` changes the sign of a metric to be maximized.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from sparkkeras.arguments import integer, known_fields
from sparkkeras.errors import ConfigurationError, known_names

IntermediateValues = Sequence[float]


def as_losses(values: IntermediateValues, sign: float) -> IntermediateValues:
    """The losses that pruners compare.

    Args:
        values: The values of the metric.
        sign: 1 if smaller values are better, -1 if larger ones are.
    """
    return values if sign > 0 else tuple(-value for value in values)


@runtime_checkable
class Pruner(Protocol):
    """Decides after each epoch whether to end a trial. The search calls it from one thread at a time."""

    def should_prune(self, losses: IntermediateValues, others: Sequence[IntermediateValues]) -> bool:
        """Whether to end a trial.

        Args:
            losses: The loss of the trial at each epoch so far, at least one, all finite; smaller is better. If the search
                maximizes its metric, this is the metric with its sign changed.
            others: The losses of all other trials that have reported any: running, finished and pruned ones.
        """
        ...


@known_fields
@dataclass(frozen=True)
class MedianPruner:
    """Ends a trial whose best loss so far is worse than the median of the other trials' best losses up to that epoch.

    The median stopping rule of Golovin et al., 2017, "Google Vizier: a service for black-box optimization".

    Args:
        startup_trials: The number of other trials that must have reached an epoch before it ends any trial there.
        grace_epochs: The number of the first epoch, counted from 1, after which a trial may end.

    Raises:
        ConfigurationError: An argument is not a whole number of at least 1.
    """

    startup_trials: int = 5
    grace_epochs: int = 2

    def __post_init__(self) -> None:
        integer("startup_trials", self.startup_trials)
        integer("grace_epochs", self.grace_epochs)

    def should_prune(self, losses: IntermediateValues, others: Sequence[IntermediateValues]) -> bool:
        """Whether the best loss so far is worse than the median of the other trials' best losses."""
        epochs = len(losses)
        reached = [min(other[:epochs]) for other in others if len(other) >= epochs]
        if epochs < self.grace_epochs or len(reached) < self.startup_trials:
            return False
        return min(losses) > statistics.median(reached)


@known_fields
@dataclass(frozen=True)
class ASHAPruner:
    """Asynchronous successive halving: ends a trial that is not among the best at one of a few epochs, the rungs.

    The first rung is at epoch ``grace_epochs``, each further one at ``reduction_factor`` times the epoch of the one before.
    A trial that reaches a rung continues if its best loss so far is among the best ``1 / reduction_factor`` of the trials
    that have reached this rung so far, itself included. Trials do not wait for each other, so the first ones always
    continue.

    Li et al., 2020, "A system for massively parallel hyperparameter tuning", in the variant that stops trials
    instead of pausing them.

    Args:
        reduction_factor: One in this number of trials survives a rung; at least 2.
        grace_epochs: The epoch of the first rung. The loss after a single epoch depends mostly on the learning rate, so the
            default is 2.

    Raises:
        ConfigurationError: An argument is not a whole number, or is too small.
    """

    reduction_factor: int = 3
    grace_epochs: int = 2

    def __post_init__(self) -> None:
        integer("reduction_factor", self.reduction_factor, low=2)
        integer("grace_epochs", self.grace_epochs)

    def should_prune(self, losses: IntermediateValues, others: Sequence[IntermediateValues]) -> bool:
        """Whether the trial is at a rung and not among the best there."""
        epochs = len(losses)
        if not self._is_rung(epochs):
            return False
        best = min(losses)
        reached = sorted([best, *(min(other[:epochs]) for other in others if len(other) >= epochs)])
        return best > reached[max(1, len(reached) // self.reduction_factor) - 1]

    def _is_rung(self, epochs: int) -> bool:
        rung = self.grace_epochs
        while rung < epochs:
            rung *= self.reduction_factor
        return rung == epochs


PRUNERS: dict[str, Callable[[], Pruner]] = {"median": MedianPruner, "asha": ASHAPruner}
"""The pruners by name, with their default settings."""


def make_pruner(given: object) -> Pruner | None:
    """Look up a pruner by name, or return a given pruner or ``None``.

    Raises:
        ConfigurationError: ``given`` is neither a known name nor a pruner.
    """
    if given is None or (isinstance(given, Pruner) and not isinstance(given, type)):
        return given
    if isinstance(given, str) and given in PRUNERS:
        return PRUNERS[given]()
    if isinstance(given, type) and issubclass(given, Pruner):
        raise ConfigurationError(f"pruner={given!r} is a class; expected an instance: {given.__name__}().")
    raise ConfigurationError(
        f"pruner={given!r} is not known. Give None, a name, or an object with a method should_prune(losses, others). "
        f"{known_names(given, PRUNERS)}"
    )
