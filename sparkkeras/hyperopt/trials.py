"""`Trial`: the state and the result of one trial of a search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

RUNNING, OK, PRUNED, STOPPED, FAILED = "running", "ok", "pruned", "stopped", "failed"
"""The statuses of a trial; see `Trial.status`."""

Metrics = Mapping[str, float]
"""What a search optimizes, the first metric first: for each name 1 if smaller values are better, -1 if larger ones are."""


@dataclass(frozen=True)
class Trial:
    """One set of hyper-parameters, and the result of training with it.

    Attributes:
        number: The number of the trial, from 0, in the order of the suggestions.
        params: The hyper-parameters, in the structure of the space.
        status: ``"running"``; ``"ok"``; ``"pruned"``: ended by the pruner; ``"stopped"``: ended with the search;
            ``"failed"``: it raised an error, diverged in its first epoch, or repeatedly lost its process.
        value: The metric at the best epoch, or the loss that the objective returned; ``None`` without one. A pruned or
            stopped trial has the value of its best epoch so far. With several metrics, the first one.
        best_epoch: The epoch of ``value``, counted from 1; ``None`` if the objective reported no epochs, or returned a loss
            other than the best one that it reported.
        history: The metrics of each epoch, as in ``keras.callbacks.History.history``, with a list for a metric that has
            several values; for an objective, the values that it reported.
        worker: The host name and the number of the worker that ran the trial.
        seconds: The duration in seconds.
        ended: The time of its end, in seconds since the search began, without the pauses between resumed searches.
        attempts: How often the trial was assigned to a worker; more than once if a worker was lost.
        error: The error message, or a short description of what failed; empty without one.
        traceback: The traceback, if the trial raised an error.
        extra: Further entries of the dict that an objective returned, as JSON values.
        chosen: What the search algorithm chose for each label of the space, as in the Optuna study: for a choice the
            option, or its name if not all options are plain values, for a normal or quantized number its quantile.
        drawn: What a suggest function of hyperopt chose, in its terms: for a choice the index of the option.
        intermediate_values: The metric at each epoch, the first one of several. An epoch without one has that of the epoch
            before.
        values: The values of all metrics that the search optimizes, in their order: ``value`` is the first; empty without.
    """

    number: int
    params: Any
    status: str = RUNNING
    value: float | None = None
    best_epoch: int | None = None
    history: Mapping[str, Sequence[float]] = field(default_factory=dict)
    worker: str = ""
    seconds: float = 0.0
    ended: float = 0.0
    attempts: int = 1
    error: str = ""
    traceback: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    chosen: Mapping[str, Any] = field(default_factory=dict)
    drawn: Mapping[str, Any] = field(default_factory=dict, repr=False)
    intermediate_values: Sequence[float] = field(default=(), repr=False)
    values: Sequence[float] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        """Keep ``values`` consistent with ``value``, which is enough for a single metric. Journals have lists for tuples."""
        given, values = () if self.value is None else (self.value,), tuple(self.values)
        if len(values) > 1 and given and values[:1] != given:
            raise ValueError(f"value={self.value} is not the first of values={values}")
        object.__setattr__(self, "intermediate_values", tuple(self.intermediate_values))
        object.__setattr__(self, "values", values if values[:1] == given else given)

    @property
    def epochs(self) -> int:
        """The number of reported epochs."""
        return max([len(self.intermediate_values), *map(len, self.history.values())])


def ranked(trials: Sequence[Trial], *signs: float) -> list[Trial]:
    """The trials that have a value, the best first; ties are in the order of their numbers.

    With several metrics, those of the Pareto front are first, then those that only these dominate, and so on; within each
    of these fronts, the order is that of the first metric.

    Args:
        trials: Any trials.
        signs: For each metric 1 if smaller values are better, -1 if larger ones are.
    """
    valued = sorted((trial for trial in trials if trial.value is not None), key=lambda trial: trial.number)
    keys = ranking_keys([losses(trial.values, signs) for trial in valued])
    return [trial for _, trial in sorted(zip(keys, valued, strict=True), key=lambda item: item[0])]


def pareto_front(trials: Sequence[Trial], *signs: float) -> list[Trial]:
    """The trials that no other one dominates: none is better in one metric and at least as good in all others.

    They are in the order of `ranked`, whose arguments this has.
    """
    best_first = ranked(trials, *signs)
    fronts = _fronts([losses(trial.values, signs) for trial in best_first])
    return [trial for trial, front in zip(best_first, fronts, strict=True) if front == 0]


def losses(values: Sequence[float], signs: Sequence[float]) -> tuple[float, ...]:
    """The values of a trial with signs such that smaller ones are better."""
    return tuple(sign * value for sign, value in zip(signs, values, strict=True))


def ranking_keys(losses: Sequence[Sequence[float]]) -> list[tuple[int, float]]:
    """The keys by which `ranked` sorts, for the losses of each trial: the index of its front, and its first loss."""
    fronts = _fronts(losses) if losses and len(losses[0]) > 1 else [0] * len(losses)
    return [(front, each[0]) for front, each in zip(fronts, losses, strict=True)]


def _fronts(losses: Sequence[Sequence[float]]) -> list[int]:
    """The index of the front of each trial: one more than the largest of those that dominate it, from 0."""
    points = np.asarray(losses, np.float64)
    fronts = np.zeros(len(points), np.int64)
    for index in np.lexsort(points.T[::-1]) if len(points) else ():  # each comes after those that dominate it
        dominating = (points <= points[index]).all(axis=1) & (points < points[index]).any(axis=1)
        fronts[index] = 1 + fronts[dominating].max(initial=-1)
    return [int(front) for front in fronts]
