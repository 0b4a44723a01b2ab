"""What is known of a trial."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

RUNNING, OK, PRUNED, STOPPED, FAILED = "running", "ok", "pruned", "stopped", "failed"
"""What may have become of a trial; see `Trial.status`."""


@dataclass(frozen=True)
class Trial:
    """One choice of hyper-parameters, and what came of it.

    Attributes:
        number: Its number; trials are numbered from 0 in the order in which they were suggested.
        params: The hyper-parameters, as the space has them.
        status: ``"running"``; ``"ok"``; ``"pruned"``: ended by the pruner; ``"stopped"``: ended with the search;
            ``"failed"``: it raised, it diverged before its first good epoch, or its process was lost again and again.
        value: The metric at the best epoch, or what the objective returned; ``None`` where there is none. A trial that was
            pruned or stopped has the value of the best epoch that it came to.
        best_epoch: That epoch, counted from 1; ``None`` where nothing was reported by epochs, or where an objective returned
            a loss that is not the best that it had reported.
        history: The figures of each epoch, as in ``keras.callbacks.History.history``, a list for one with
            several values; of an objective, what it reported.
        worker: Where it ran: the machine, and the number of the worker.
        seconds: How long it took.
        ended: When it ended, in seconds since the search began, pauses between resumed searches left out.
        attempts: How often it was given out; more than once where a worker was lost.
        error: What went wrong, in one line.
        traceback: The traceback of a trial that raised.
        extra: What else an objective returned that JSON knows.
        chosen: What the search algorithm chose for each label of the space; of ``hp.choice`` the number of the option.
        intermediate_values: The metric at each epoch, turned so that smaller is better; what pruners see.
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
        """The epochs that were reported."""
        return max([len(self.intermediate_values), *map(len, self.history.values())])


def ranked(trials: Sequence[Trial], sign: float) -> list[Trial]:
    """The trials that have a value, the best first; of equal ones the earlier.

    Args:
        trials: Any trials.
        sign: 1 where small values are good, -1 where large ones are.
    """
    return sorted(
        (trial for trial in trials if trial.value is not None), key=lambda trial: (sign * (trial.value or 0.0), trial.number)
    )
