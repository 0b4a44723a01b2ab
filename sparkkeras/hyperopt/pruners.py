"""Pruners: they decide from the intermediate values of trials whether to end a trial early.

Pruners compare losses, of which smaller ones are better: `as_losses` changes the sign of a metric to be maximized.
"""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, runtime_checkable

from sparkkeras.arguments import integer, known_fields, optional_integer
from sparkkeras.errors import ConfigurationError, known_names

IntermediateValues = Sequence[float]

_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


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


@runtime_checkable
class BracketPruner(Protocol):
    """Divides the trials of a search into brackets, and compares trials only within their bracket."""

    def bracket_of(self, number: int) -> int:
        """The index of the bracket of a trial, which depends only on the trial's number."""
        ...

    def should_prune_in(self, bracket: int, losses: IntermediateValues, others: Sequence[IntermediateValues]) -> bool:
        """Whether to end a trial of a bracket; as `Pruner.should_prune`, but ``others`` are those of the bracket."""
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


@known_fields
@dataclass(frozen=True)
class HyperbandPruner:
    """Hyperband: brackets of successive halving that end trials early, late or never, as a hedge.

    How early losses predict the final ones is not known in advance. With ``R = max_epochs``, ``eta = reduction_factor`` and
    ``s_max = floor(log_eta(R))``, there is a bracket for each ``s`` from ``s_max`` to 0. Its first rung is at epoch
    ``R / eta^s``, rounded down, so the last bracket, ``s = 0``, ends no trial. It gets a share of the trials proportional to
    ``n_s = ceil((s_max + 1) / (s + 1) * eta^s)``, with which every bracket would train about the same number of epochs.

    Li et al., 2018, "Hyperband: a novel bandit-based approach to hyperparameter optimization", Algorithm 1. Within a bracket
    trials do not wait for each other, as with `ASHAPruner` (Li et al., 2020). The number of a trial determines its bracket:
    each bracket gets its share of any number of consecutive trials, and keeps its trials if the search is resumed.

    Args:
        max_epochs: The number of epochs of a trial that is not pruned; at least ``reduction_factor``. ``None`` is ``epochs``
            of `HyperParamModel.minimize`; an objective, a space with ``epochs`` and `Search` require the number.
        reduction_factor: One in this number of trials survives a rung; at least 2.

    Raises:
        ConfigurationError: An argument is not a whole number, or is too small.
    """

    max_epochs: int | None = None
    reduction_factor: int = 3

    def __post_init__(self) -> None:
        factor = integer("reduction_factor", self.reduction_factor, low=2)
        optional_integer("max_epochs", self.max_epochs, low=factor)

    def for_epochs(self, epochs: int | None) -> HyperbandPruner:
        """This pruner for trials of ``epochs`` epochs, ``None`` if only they know.

        Raises:
            ConfigurationError: The number is not known, is not that of this pruner, or is too small for two brackets.
        """
        if self.max_epochs is not None and epochs not in (None, self.max_epochs):
            raise ConfigurationError(
                f"pruner=HyperbandPruner(max_epochs={self.max_epochs}), but epochs={epochs}: omit max_epochs."
            )
        if self.max_epochs is not None:
            return self
        if epochs is None:
            raise ConfigurationError(
                'pruner="hyperband" needs the number of epochs of a trial, which only the trials know: give '
                "HyperbandPruner(max_epochs=...)."
            )
        if epochs < self.reduction_factor:
            raise ConfigurationError(
                f"epochs={epochs}: Hyperband prunes no trial of fewer than reduction_factor={self.reduction_factor} epochs: "
                "omit pruner=, or train longer."
            )
        return replace(self, max_epochs=epochs)

    @cached_property
    def brackets(self) -> tuple[ASHAPruner, ...]:
        """The pruner of each bracket, the one with the earliest rung first."""
        factor, epochs = self.reduction_factor, self.max_epochs or 1
        return tuple(ASHAPruner(factor, epochs // factor**s) for s in range(self._s_max, -1, -1))

    def should_prune_in(self, bracket: int, losses: IntermediateValues, others: Sequence[IntermediateValues]) -> bool:
        """Whether the trial is at a rung of its bracket, not at its last epoch, and not among the best there."""
        return len(losses) < (self.max_epochs or 1) and self.brackets[bracket].should_prune(losses, others)

    def bracket_of(self, number: int) -> int:
        """The index of the bracket of a trial: that of a point in the brackets' shares of [0, 1).

        The multiples of the golden ratio, modulo 1, are a low-discrepancy sequence.
        """
        return bisect.bisect_right(self._bounds, number * _GOLDEN_RATIO % 1.0)

    @property
    def _s_max(self) -> int:
        s = 0
        while self.reduction_factor ** (s + 1) <= (self.max_epochs or 1):
            s += 1
        return s

    @cached_property
    def _bounds(self) -> list[float]:
        """The upper bounds of the shares, without the last one, which is 1."""
        s_max = self._s_max
        sizes = [math.ceil((s_max + 1) / (s + 1) * self.reduction_factor**s) for s in range(s_max, -1, -1)]
        return [bound / sum(sizes) for bound in itertools.accumulate(sizes[:-1])]


AnyPruner = Pruner | BracketPruner


def should_prune(
    pruner: AnyPruner, number: int, losses: IntermediateValues, others: Mapping[int, IntermediateValues]
) -> bool:
    """Whether to end a trial; `Pruner.should_prune` describes the losses.

    Args:
        pruner: The pruner.
        number: The number of the trial.
        losses: Its losses so far.
        others: The losses of all other trials that have reported any, by their numbers.
    """
    if isinstance(pruner, Pruner):
        return pruner.should_prune(losses, list(others.values()))
    bracket = pruner.bracket_of(number)
    peers = [other for each, other in others.items() if pruner.bracket_of(each) == bracket]
    return pruner.should_prune_in(bracket, losses, peers)


PRUNERS: dict[str, Callable[[], AnyPruner]] = {"median": MedianPruner, "asha": ASHAPruner, "hyperband": HyperbandPruner}
"""The pruners by name, with their default settings."""


def make_pruner(given: object, epochs: int | None = None) -> AnyPruner | None:
    """Look up a pruner by name, or return a given pruner or ``None``.

    Args:
        given: A name, a pruner or ``None``.
        epochs: The number of epochs of a trial that is not pruned; ``None`` if it is not known.

    Raises:
        ConfigurationError: ``given`` is neither a known name nor a pruner, or it needs ``epochs``.
    """
    if isinstance(given, str) and given in PRUNERS:
        given = PRUNERS[given]()
    if isinstance(given, HyperbandPruner):
        return given.for_epochs(epochs)
    if given is None or (isinstance(given, (Pruner, BracketPruner)) and not isinstance(given, type)):
        return given
    if isinstance(given, type) and issubclass(given, (Pruner, HyperbandPruner)):
        raise ConfigurationError(f"pruner={given!r} is a class; expected an instance: {given.__name__}().")
    raise ConfigurationError(
        f"pruner={given!r} is not known. Give None, a name, or an object with a method should_prune(losses, others). "
        f"{known_names(given, PRUNERS)}"
    )
