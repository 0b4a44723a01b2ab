"""`Trial`: the state and the result of one trial of a search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

RUNNING, OK, PRUNED, STOPPED, FAILED = "running", "ok", "pruned", "stopped", "failed"
"""The statuses of a trial; see `Trial.status`."""


@dataclass(frozen=True)
class Trial:
    """One set of hyper-parameters, and the result of training with it.

    Attributes:
        number: The number of the trial, from 0, in the order of the suggestions.
        params: The hyper-parameters, in the structure of the space.
        status: ``"running"``; ``"ok"``; ``"pruned"``: ended by the pruner; ``"stopped"``: ended with the search;
            ``"failed"``: it raised an error, diverged in its first epoch, or repeatedly lost its process.
        value: The metric at the best epoch, or the loss that the objective returned; ``None`` without one. A pruned or
            stopped trial has the value of its best epoch so far.
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
        chosen: The value that the search algorithm chose for each label of the space; for a choice the index of the option.
        intermediate_values: The metric at each epoch. An epoch without one has that of the epoch before.
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
    intermediate_values: Sequence[float] = field(default=(), repr=False)

    @property
    def epochs(self) -> int:
        """The number of reported epochs."""
        return max([len(self.intermediate_values), *map(len, self.history.values())])


def ranked(trials: Sequence[Trial], sign: float) -> list[Trial]:
    """The trials that have a value, the best first; ties are in the order of their numbers.

    Args:
        trials: Any trials.
        sign: 1 if smaller values are better, -1 if larger ones are.
    """
    return sorted(
        (trial for trial in trials if trial.value is not None), key=lambda trial: (sign * (trial.value or 0.0), trial.number)
    )
