"""When a trial is hopeless. Figures of epochs go in, yes or no comes out.

Every figure is a loss here: a metric that is to be maximized comes with its sign turned.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from sparkkeras.arguments import known_fields, whole_number
from sparkkeras.errors import ConfigurationError, known_names

Losses = Sequence[float]


@runtime_checkable
class Pruner(Protocol):
    """Decides after each epoch of a trial whether it shall go on. It is called by one thread at a time."""

    def should_prune(self, losses: Losses, others: Sequence[Losses]) -> bool:
        """Whether to end a trial.

        Args:
            losses: Its loss at each epoch so far, at least one, all finite.
            others: Those of all other trials that have reported any: running, finished and pruned ones.
        """
        ...


@known_fields
@dataclass(frozen=True)
class MedianPruner:
    """Ends a trial whose best loss so far is worse than the median of what the others had reached by that epoch.

    The median stopping rule of Golovin et al., 2017, "Google Vizier: a service for black-box optimization".

    Args:
        startup_trials: So many others must have come as far before any trial is ended.
        grace_epochs: No trial is ended before the end of this epoch.

    Raises:
        ConfigurationError: A number is out of range.
    """

    startup_trials: int = 5
    grace_epochs: int = 2

    def __post_init__(self) -> None:
        whole_number("startup_trials", self.startup_trials)
        whole_number("grace_epochs", self.grace_epochs)

    def should_prune(self, losses: Losses, others: Sequence[Losses]) -> bool:
        """As `Pruner.should_prune`."""
        epochs = len(losses)
        reached = [min(other[:epochs]) for other in others if len(other) >= epochs]
        if epochs < self.grace_epochs or len(reached) < self.startup_trials:
            return False
        return min(losses) > statistics.median(reached)


@known_fields
@dataclass(frozen=True)
class ASHAPruner:
    """Ends a trial that is not among the best at one of a few epochs: asynchronous successive halving.

    There is a rung after ``grace_epochs``, and one whenever ``reduction_factor`` times as many epochs have passed. A trial
    that comes to a rung goes on if its best loss so far is among the best ``1 / reduction_factor`` of those that have come
    there yet, itself included. Nobody waits for others, so the first ones go on whatever they are.

    Li et al., 2020, "A system for massively parallel hyperparameter tuning", in the variant that stops trials
    instead of pausing them.

    Args:
        reduction_factor: What part of the trials survives a rung: one of so many.
        grace_epochs: The epochs before the first rung. What a network has come to after its first epoch shows little but
            its learning rate.

    Raises:
        ConfigurationError: A number is out of range.
    """

    reduction_factor: int = 3
    grace_epochs: int = 2

    def __post_init__(self) -> None:
        whole_number("reduction_factor", self.reduction_factor, low=2)
        whole_number("grace_epochs", self.grace_epochs)

    def should_prune(self, losses: Losses, others: Sequence[Losses]) -> bool:
        """As `Pruner.should_prune`."""
        epochs = len(losses)
        if not self._is_rung(epochs):
            return False
        mine = min(losses)
        reached = sorted([mine, *(min(other[:epochs]) for other in others if len(other) >= epochs)])
        return mine > reached[max(1, len(reached) // self.reduction_factor) - 1]

    def _is_rung(self, epochs: int) -> bool:
        rung = self.grace_epochs
        while rung < epochs:
            rung *= self.reduction_factor
        return rung == epochs


PRUNERS: dict[str, Callable[[], Pruner]] = {"median": MedianPruner, "asha": ASHAPruner}
"""The pruners that have a name."""


def make_pruner(given: object) -> Pruner | None:
    """The pruner of a name, a pruner as it is, or none.

    Raises:
        ConfigurationError: It is neither.
    """
    if given is None or (isinstance(given, Pruner) and not isinstance(given, type)):
        return given
    if isinstance(given, str) and given in PRUNERS:
        return PRUNERS[given]()
    if isinstance(given, type) and issubclass(given, Pruner):
        raise ConfigurationError(f"pruner={given!r} is a class; expected an object: {given.__name__}().")
    raise ConfigurationError(
        f"pruner={given!r} is not known. Give None, a name, or an object with a method should_prune(losses, others). "
        f"{known_names(given, PRUNERS)}"
    )
