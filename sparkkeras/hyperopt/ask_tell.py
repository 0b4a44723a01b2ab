"""`Search`: the algorithms of a search, for the user's own loop instead of workers on Spark.

A `Search` is a worker of the ledger, in the process of the user: its leases do not expire, and `tell` saves a trial itself.
Errors of an algorithm, a pruner or the storage are raised in the user's loop, and do not end the search.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler

from sparkkeras import arguments
from sparkkeras.arguments import known_arguments
from sparkkeras.errors import ConfigurationError, SearchError
from sparkkeras.hyperopt.algorithms import make_algorithm, make_pruner
from sparkkeras.hyperopt.arguments import check_single, is_finite, metrics_of
from sparkkeras.hyperopt.journal import Journal
from sparkkeras.hyperopt.ledger import CONTINUE, Limits, TrialLedger, Worker
from sparkkeras.hyperopt.results import SearchResults, SearchView
from sparkkeras.hyperopt.space import Space
from sparkkeras.hyperopt.study import SearchStudy
from sparkkeras.hyperopt.trials import FAILED, OK, PRUNED, Trial


class Search(SearchView):
    """Suggests hyper-parameters to a loop of your own: `ask` for a trial, train, `tell` its value.

    Several trials may be pending at the same time, in any threads: the algorithm takes them into account, as with workers on
    Spark. `HyperParamModel` searches on Spark, and keeps the models.

    Args:
        space: The search space, as in `HyperParamModel.minimize`.
        algo: The search algorithm, as in `HyperParamModel.minimize`.
        metric: The name of the value that ``tell`` records, for the plot, and for ``mode="auto"``. Or a sequence of several.
        mode: ``"min"``, ``"max"``, or ``"auto"``, which infers the direction from the name of the metric; for several
            metrics, one for all or a sequence.
        pruner: Decides on the values given to `report`, as in `HyperParamModel.minimize`.
        seed: The random seed: with the same seed and the same values in the same order, a search has the same trials.
            ``None`` draws one.
        save_to: A folder in which `tell` saves each trial. Another search with the same arguments continues from there; its
            first trials are those that were pending, with their numbers.

    Attributes:
        seed: The seed of the suggestions.

    Raises:
        ConfigurationError: An argument is unknown or out of range, or ``save_to`` holds another search.
        StorageError: ``save_to`` cannot be read or written.

    Example::

        search = Search({"lr": loguniform(1e-4, 1e-1), "units": choice(32, 64)}, seed=1)
        for _ in range(20):
            trial = search.ask()
            search.tell(trial, train(**trial.params))
        best = search.best_params
    """

    @known_arguments
    def __init__(
        self,
        space: Any,
        *,
        algo: str | BaseSampler | Callable[..., Any] = "tpe",
        metric: str | Sequence[str] = "loss",
        mode: Literal["auto", "min", "max"] | Sequence[Literal["auto", "min", "max"]] = "auto",
        pruner: str | BasePruner | None = None,
        seed: int | None = None,
        save_to: str | Path | None = None,
    ) -> None:
        if space is None:
            raise ConfigurationError(
                "space=None: ask() gives all hyper-parameters of a trial at once, so Search needs a space."
            )
        search_space, metrics = Space(space), metrics_of(metric, mode)
        check_single(metrics, pruner=pruner)
        algorithm, _ = make_algorithm(algo, search_space, metrics)
        self._names, (self._sign, *_) = tuple(metrics), metrics.values()
        limits = Limits(sign=self._sign, lease_seconds=float("inf"), num_metrics=len(metrics))
        arguments.optional_integer("seed", seed, low=0)
        folder = None if save_to is None else arguments.path("save_to", save_to)
        self._journal = Journal(folder, None, *metrics.values())  # keeps the models that `minimize` has left there
        with ExitStack() as stack:
            storage = stack.enter_context(self._journal.opened())
            study = SearchStudy(search_space, metrics, algorithm, seed, make_pruner(pruner), storage)
            self.seed = study.seed
            self._ledger = TrialLedger(study, limits, time.monotonic, save=self._save)
            self._journal.add(self._ledger.finished)
            self._open = stack.pop_all()
        self._results = SearchResults(self._ledger, self._journal, search_space, metrics)
        self._lock = threading.RLock()  # of what follows, and for an error to be raised by the call that caused it
        self._leases: dict[int, int] = {}  # of the pending trials, by their numbers
        self._pruned: set[int] = set()
        self._diverged: dict[int, float] = {}  # reports that are not finite
        self._unsaved: dict[int, Trial] = {}  # that the study was told
        self._is_closed = False

    def __repr__(self) -> str:
        return f"Search(metric={self.metric!r}, trials={len(self.trials)}, pending={len(self._leases)})"

    def __enter__(self) -> Search:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the folder of ``save_to`` for another search; `ask`, `report` and `tell` raise an error after that."""
        with self._lock:
            self._ledger.stop("it was closed")
            self._leases.clear()
            self._journal.flush()
            self._open.close()
            self._is_closed = True

    def ask(self) -> Trial:
        """The next trial: its ``number`` and ``params``.

        Raises:
            ConfigurationError: The search algorithm raised an exception; the next call asks it again.
            SearchError: The search algorithm has no more suggestions, or the search was closed.
        """
        with self._lock:
            assignment = self._ledger.ask(Worker("ask"))
            if assignment is None:
                raise self._ledger.take_failure() or SearchError(
                    f"there is no further trial: {self._ledger.reason or 'the search algorithm has no more suggestions'}."
                )
            self._leases[assignment.number] = assignment.lease
            self._journal.flush()  # another search continues it
            return self._running(assignment.number)

    @known_arguments
    def report(self, trial: Trial | int, value: float) -> bool:
        """Report an intermediate value of a pending trial, after each epoch.

        Args:
            trial: The trial, or its number.
            value: The value after the next epoch; with several metrics, that of the first.

        Returns:
            Whether to end the trial, and `tell` it without a value: the pruner decided so, or the value is not finite.

        Raises:
            ConfigurationError: The trial is not pending, the value is not a number, or the pruner raised an exception; the
                value is recorded then, and the trial pending.
        """
        value = _as_number(value)
        with self._lock:
            pending = self._pending(trial)
            if not is_finite(value):
                self._diverged[pending.number] = value
                return True
            epoch = len(pending.intermediate_values) + 1
            reply = self._ledger.report(self._leases[pending.number], epoch, value)
            failure = self._ledger.take_failure()
            if failure is not None:
                raise failure
            if reply != CONTINUE:
                self._pruned.add(pending.number)
            return reply != CONTINUE

    @known_arguments
    def tell(
        self,
        trial: Trial | int,
        value: float | Sequence[float] | None = None,
        *,
        error: str | BaseException | None = None,
    ) -> Trial:
        """Record the result of a pending trial.

        Args:
            trial: The trial, or its number.
            value: Its value; ``None`` is the best one that was reported. NaN and infinity mean that the trial failed. With
                several metrics, a sequence with the value of each.
            error: Why the trial failed, as text or as an exception.

        Returns:
            The trial with its result; the object that `ask` returned does not change.

        Raises:
            ConfigurationError: The trial is not pending, its value is not a number, or it has neither a value nor an error,
                or both.
            StorageError: ``save_to`` cannot be written; the trial is still pending, so that `tell` may be repeated, and the
                result of the first call counts.
        """
        values = () if value is None else self._as_numbers(value)
        if values and error is not None:
            raise ConfigurationError(f"tell received value={value} and error={error!r}: a trial has a value, or it failed.")
        with self._lock:
            ended = self._ended(self._pending(trial), values, error)
            ended = self._unsaved.setdefault(ended.number, ended)
            self._ledger.finish(self._leases[ended.number], ended)
            del self._leases[ended.number], self._unsaved[ended.number]
            return next(each for each in self._ledger.finished if each.number == ended.number)

    def _ended(self, trial: Trial, values: Sequence[float], error: str | BaseException | None) -> Trial:
        """A trial with its result."""
        reported = trial.intermediate_values
        if reported:
            trial = replace(trial, history={self._names[0]: list(reported)})
        best = _best(reported, self._sign)
        if not values and best is not None and len(self._names) == 1:
            values = (best,)
        if not values and trial.number in self._diverged:
            values = (self._diverged[trial.number],)
        if not values and error is None:
            expected = "value" if len(self._names) == 1 else f"({', '.join(self._names)})"
            raise ConfigurationError(
                f"trial {trial.number} has no value: tell(trial, {expected}), or tell(trial, error=message) if it failed."
            )
        if isinstance(error, BaseException):
            trial = replace(trial, traceback="".join(traceback.format_exception(error)))
            error = f"{type(error).__name__}: {error}"
        for value in values if error is None else ():
            if not is_finite(value):
                error = f"its value is {value!r}, not a finite number"
        if error is not None:
            return replace(trial, status=FAILED, error=str(error))
        epoch = reported.index(best) + 1 if best is not None and values[0] == best else None
        status = PRUNED if trial.number in self._pruned else OK
        return replace(trial, status=status, value=values[0], values=values, best_epoch=epoch)

    def _save(self, trial: Trial, _: Any) -> None:
        self._ledger.tell(trial)
        self._journal.flush()
        self._ledger.saved(trial.number)

    def _pending(self, given: Trial | int) -> Trial:
        """A pending trial, as the user gave it: with its reports."""
        number = given.number if isinstance(given, Trial) else given
        is_number = isinstance(number, (int, np.integer)) and not isinstance(number, bool)
        if not is_number or number not in self._leases:
            ended = [each for each in self._ledger.finished if is_number and each.number == number]
            problem = f"has ended (status {ended[0].status!r}, value {ended[0].value})" if ended else "is not pending"
            problem += ", and the search was closed" if self._is_closed else ""
            raise ConfigurationError(
                f"trial={number!r} {problem}: expected a trial that ask() returned, or its number. Pending: "
                f"{sorted(self._leases)}."
            )
        trial = self._running(number)
        if isinstance(given, Trial) and given.chosen != trial.chosen:
            raise ConfigurationError(f"trial {number} is of another search: its params are not those of the pending trial.")
        return trial

    def _running(self, number: int) -> Trial:
        return next(each for each in self._ledger.running if each.number == number)

    def _as_numbers(self, given: Any) -> tuple[float, ...]:
        """The values given to `tell`, one for each metric."""
        if len(self._names) == 1:
            return (_as_number(given),)
        values = tuple(given) if isinstance(given, (list, tuple, np.ndarray)) else ()
        if len(values) != len(self._names):
            raise ConfigurationError(
                f"value={given!r}: expected a sequence of {len(self._names)} numbers ({', '.join(self._names)})."
            )
        return tuple(map(_as_number, values))


def _as_number(value: Any) -> float:
    with suppress(TypeError, ValueError):
        if not isinstance(value, (bool, np.bool_, str)):
            return float(value)
    raise ConfigurationError(f"value={value!r}: expected a number.")


def _best(values: Sequence[float], sign: float) -> float | None:
    return min(values, key=lambda value: sign * value, default=None)
