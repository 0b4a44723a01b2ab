"""The ledger of a search: its trials, the workers that run them, and the decision when the search is over.

A worker that asks for a trial gets it with a *lease*, a number that it sends with every call about this trial. A trial has
one lease at a time. When its worker is lost (its connection closed, or its heartbeats stopped), the next worker that asks
gets the same trial under a new lease, and calls with the old lease are rejected; so each trial counts once. A worker that
was only slow keeps its trial as long as no other worker asks.

A trial that ended is first saved, in the background (`saving`), and counts as finished once `TrialLedger.saved` is called:
whatever a search has shown or used as finished is on storage, so a resumed search does not repeat it. Until then the trial
is among the running ones, and its worker waits for its next trial, so that the algorithm and the limits see the result.

The study suggests trials and prunes them; a function of the user may end the search. They are called under one lock, during
which no heartbeat can be received, so the leases are extended by the time that they take. All methods may be called from any
thread.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sparkkeras.errors import ConfigurationError, SparkKerasError, StorageError
from sparkkeras.hyperopt.distributions import Distribution
from sparkkeras.hyperopt.trials import FAILED, STOPPED, Trial, ranked
from sparkkeras.rpc.leases import LEASE_LOST, Lease, Leases
from sparkkeras.rpc.transport import RefusedError

if TYPE_CHECKING:
    import optuna

    from sparkkeras.hyperopt.study import SearchStudy

UNDEFINED = "undefined"
"""The kind of `RefusedError` for a hyper-parameter that cannot be defined."""

CONTINUE, PRUNE, STOP = "continue", "prune", "stop"
"""The replies to a worker's report or heartbeat: continue the trial, prune it, or stop it with the search."""

UPLOAD_SECONDS = 300.0
"""How much longer than its lease a worker may take to upload each piece of a model: it sends no heartbeats meanwhile."""

_ALGORITHM = "the search algorithm (algo=)"

ATTEMPTS = 3
"""A trial fails after losing this number of workers: it may be the cause of their loss."""


@dataclass(frozen=True)
class Limits:
    """The conditions under which a search or a trial ends.

    Attributes:
        max_evals: The total number of trials, including those of earlier calls; ``None`` is unlimited.
        sign: 1 if smaller values are better, -1 if larger ones are; of the first metric.
        num_metrics: The number of metrics; with several, a trial that was stopped has a value only if it reported all.
        timeout: Seconds since a worker first asked for a trial.
        loss_threshold: The search ends with the first value that is at least as good as this.
        max_failures: The search ends when more trials than this have failed.
        early_stop: Called with all finished trials after each trial that has a value; returns whether to end the search.
        lease_seconds: The time without a heartbeat after which a worker counts as lost.
    """

    max_evals: int | None = None
    sign: float = 1.0
    timeout: float | None = None
    loss_threshold: float | None = None
    max_failures: int | None = None
    early_stop: Callable[[Sequence[Trial]], bool] | None = None
    lease_seconds: float = 10.0
    num_metrics: int = 1


@dataclass(frozen=True)
class Assignment:
    """A trial that is assigned to a worker.

    Attributes:
        number: The number of the trial.
        lease: The number of the lease.
        params: The hyper-parameters; ``None`` if the trial defines them itself.
    """

    number: int
    lease: int
    params: Any


@dataclass(frozen=True)
class Worker:
    """The worker that asks for trials.

    Attributes:
        name: The name for messages.
        task: The number of its Spark task, the same for all attempts of the task.
        attempt: The number of the attempt.
    """

    name: str
    task: int = 0
    attempt: int = 0


@dataclass
class _Holder:
    """The holder of a lease: a worker that runs a trial."""

    worker: Worker
    started: float
    is_uploading: bool = False
    pruned: bool = False


class TrialLedger:
    """The trials of a search and their leases. See the module docstring.

    Args:
        study: Suggests trials, and has those of earlier calls.
        limits: The conditions under which the search ends.
        clock: A monotonic clock, in seconds.
        save: Called under the lock with each trial that ended and the model that `finish` got for it; must return at once,
            and have `tell` and `saved` called later. If it raises an error, the trial is still running. Trials that were
            stopped are saved only with a model.

    Attributes:
        reason: Why the search ended early, as a message; empty if it did not.
        failure: The error that ended the search; ``None`` without one.
    """

    def __init__(
        self,
        study: SearchStudy,
        limits: Limits,
        clock: Callable[[], float],
        *,
        save: Callable[[Trial, Any], None],
    ) -> None:
        self._study, self._limits, self._clock, self._save = study, limits, clock, save
        self._lock = threading.RLock()
        self._finished = {trial.number: trial for trial in study.earlier()}
        self._running: dict[int, Trial] = {}
        self._saving: dict[int, tuple[Trial, Worker]] = {}  # the trials that have ended, and the workers that ran them
        self._leases: Leases[int, _Holder] = Leases(limits.lease_seconds, clock)  # of trials
        self._earlier = frozenset(self._finished)
        self._before = max((trial.ended for trial in self._finished.values()), default=0.0)
        self._began = clock()
        self._first_ask: float | None = None
        self._exhausted = False
        self.reason = ""
        self.failure: Exception | None = None
        ended = self.finished
        for count in range(1, len(ended) + 1):  # a stop function may keep state: it sees the earlier trials again
            self._check_early_stop(ended[:count])
        self.check_limits()

    @property
    def study(self) -> optuna.Study:
        """The study of Optuna."""
        return self._study.study

    @property
    def seconds(self) -> float:
        """The duration of the search in seconds, including earlier calls that it resumed."""
        return self._before + self._clock() - self._began

    @property
    def finished(self) -> list[Trial]:
        """The trials that have ended, in the order in which they ended."""
        with self._lock:
            return sorted(self._finished.values(), key=lambda trial: (trial.ended, trial.number))

    @property
    def running(self) -> list[Trial]:
        """The trials that are assigned to workers, or were and are lost, and those that are being saved."""
        with self._lock:
            return list(self._running.values())

    @property
    def is_over(self) -> bool:
        """Whether no trial is running and none will start."""
        with self._lock:
            return not self._running and not self._has_more()

    @property
    def is_uploading(self) -> bool:
        """Whether a worker is uploading the result of its trial."""
        with self._lock:
            return any(run.is_uploading for run in self._active())

    @property
    def is_saving(self) -> bool:
        """Whether a trial that ended is not on storage yet."""
        with self._lock:
            return bool(self._saving)

    def ask(self, worker: Worker) -> Assignment | None:
        """Assign the next trial to a worker; ``None`` if there is none for it."""
        with self._lock:
            self._first_ask = self._clock() if self._first_ask is None else self._first_ask
            self.check_limits()
            if self.reason:
                return None
            lost = self._lost_lease()
            if lost is not None:
                trial = self._running[lost.key]
                if trial.attempts < ATTEMPTS:
                    return self._assign(
                        replace(trial, attempts=trial.attempts + 1, intermediate_values=(), error=""), worker
                    )
                self._fail_lost_trial(lost)
                return self.ask(worker)
            new = self._suggest_trial() if self._has_more() and not self._is_saving_trial_of(worker) else None
            return None if new is None else self._assign(new, worker)

    def should_wait(self, worker: Worker) -> bool:
        """Whether a worker without a trial should wait: its last one is being saved, or another attempt of its task has one.

        Spark ends all other attempts of a task as soon as one has finished, and with it their trials.
        """
        with self._lock:
            if self._has_more() and self._is_saving_trial_of(worker):
                return True
            others = [run.worker for run in self._active()]
            return any(other.task == worker.task and other.attempt != worker.attempt for other in others)

    def report(self, lease: int, epoch: int, value: float) -> str:
        """Record the metric at an epoch; returns whether to continue the trial, prune it or stop it.

        An epoch without a report gets the value of the epoch before; epochs before the first report get the first value.

        Args:
            lease: The lease of the trial.
            epoch: The epoch, counted from 1; a repeated report of an epoch is ignored.
            value: The value of the metric.

        Raises:
            RefusedError: Another worker has the trial.
        """
        with self._lock:
            held = self._renew_lease(lease)
            trial = self._running[held.key]
            new = range(len(trial.intermediate_values), max(epoch, len(trial.intermediate_values)))
            if new:
                known = (trial.intermediate_values or (value,))[-1]
                missing = (known,) * (epoch - 1 - len(trial.intermediate_values))
                trial = replace(trial, intermediate_values=(*trial.intermediate_values, *missing, value))
                self._running[held.key] = trial
            if self.reason:
                return STOP
            ends = [number + 1 for number in new] or [len(trial.intermediate_values)]  # includes epochs without a report
            try:
                with self._leases.paused():
                    pruned = [self._study.report(held.key, end, trial.intermediate_values[end - 1]) for end in ends]
            except (Exception, SystemExit) as error:
                self.fail(_failed("the pruner (pruner=)", error))
                return STOP
            held.holder.pruned |= any(pruned)  # a repeated report, since the reply was lost, gets the same reply
            return PRUNE if held.holder.pruned else CONTINUE

    def suggest(self, lease: int, label: str, distribution: Distribution) -> Any:
        """Choose the value of a hyper-parameter that a trial defines itself.

        Raises:
            RefusedError: Another worker has the trial, or it has defined the hyper-parameter in another way before.
        """
        with self._lock:
            held = self._renew_lease(lease)
            try:
                with self._leases.paused():
                    value, asked = self._study.suggest(held.key, label, distribution)
            except ConfigurationError as error:
                raise RefusedError(UNDEFINED, str(error)) from error
            except (Exception, SystemExit) as error:
                self.fail(_failed(_ALGORITHM, error))
                raise RefusedError(UNDEFINED, f"the search algorithm failed: {error}") from error
            self._running[held.key] = replace(self._running[held.key], params=asked.params, chosen=asked.chosen)
            return value

    def renew(self, lease: int) -> str:
        """Record a heartbeat; returns whether to continue the trial or stop it.

        Raises:
            RefusedError: Another worker has the trial.
        """
        with self._lock:
            self._renew_lease(lease)
            self.check_limits()
            return STOP if self.reason else CONTINUE

    def extend_for_upload(self, lease: int) -> Trial:
        """Extend a lease for an upload, during which its worker sends no heartbeats; returns the trial.

        Raises:
            RefusedError: Another worker has the trial.
        """
        with self._lock:
            held = self._renew_lease(lease)
            held.expires += UPLOAD_SECONDS
            held.holder.is_uploading = True
            return self._running[held.key]

    def is_done(self, lease: int) -> bool:
        """Whether the trial was finished under this lease, so that a repeated `finish` call can be ignored."""
        with self._lock:
            return self._leases.is_finished(lease)

    def finish(self, lease: int, trial: Trial, model: Any = None) -> bool:
        """Record the result of a trial, and save it with its model.

        A trial that was stopped although the search continues counts as lost: its machine is probably being shut down.

        Returns:
            Whether the model will be saved.

        Raises:
            RefusedError: Another worker has the trial.
        """
        with self._lock:
            held = self._renew_lease(lease)
            if trial.status == STOPPED and not self.reason:
                self.release(lease, "its process received a request to stop")
                return False
            is_saved = self._end(trial, held, model)
            self._leases.finish(lease)
            return is_saved

    def tell(self, trial: Trial) -> None:
        """Tell the study the result of a trial, before `saved`.

        Raises:
            SparkKerasError: The storage of the study, or the algorithm, which gets the result too, has failed.
        """
        with self._lock, self._leases.paused():
            try:
                self._study.tell(trial)
            except (Exception, SystemExit) as error:
                raise _failed(_ALGORITHM, error) from error

    def saved(self, number: int) -> None:
        """Count a trial as finished, since it is on storage, or cannot be saved and `fail` was called."""
        with self._lock:
            trial, _ = self._saving.pop(number)
            self._record(trial)

    def release(self, lease: int, cause: str) -> None:
        """Record that the process of a trial ended, although its worker still runs.

        Raises:
            RefusedError: Another worker has the trial.
        """
        with self._lock:
            held = self._renew_lease(lease)
            self._leases.expire(lease)
            self._running[held.key] = replace(self._running[held.key], error=cause)

    def expire(self, lease: int) -> None:
        """Expire a lease whose connection has closed: another worker may take it, unless the holder calls before."""
        with self._lock:
            self._leases.expire(lease)

    def expire_all(self) -> None:
        """Expire all leases, since the workers' job has ended; trials that have lost `ATTEMPTS` workers fail."""
        with self._lock:
            for held in self._leases:
                self._leases.expire(held.number)
            for held in self._leases:
                if self._running[held.key].attempts >= ATTEMPTS:
                    self._fail_lost_trial(held)

    def has_value(self) -> bool:
        """Whether a trial of this call, not of an earlier one, has a value."""
        with self._lock:
            ended = [*self._finished.values(), *(trial for trial, _ in self._saving.values())]
            return any(trial.value is not None for trial in ended if trial.number not in self._earlier)

    def end_running(self) -> None:
        """End the running trials as stopped, after the search and all workers have ended."""
        with self._lock:
            for held in self._leases:
                self._end(replace(self._running[held.key], status=STOPPED), held)

    def stop(self, reason: str) -> None:
        """End the search: assign no more trials, and stop the running ones."""
        with self._lock:
            self.reason = self.reason or reason

    def fail(self, error: Exception) -> None:
        """End the search with an error."""
        with self._lock:
            self.failure = self.failure or error
            self.stop(f"{type(error).__name__}: {error}".partition("\n")[0])

    def take_failure(self) -> Exception | None:
        """The error that ended the search, for a caller that handles it: the search continues."""
        with self._lock:
            failure, self.failure = self.failure, None
            self.reason = self.reason if failure is None else ""
            return failure

    def check_limits(self) -> None:
        """End the search if a limit, such as the timeout, is reached."""
        with self._lock:
            limits, finished = self._limits, list(self._finished.values())
            if self.reason:
                return
            threshold = limits.loss_threshold
            best = ranked(finished, limits.sign)[:1] if threshold is not None else []
            failed = sum(trial.status == FAILED for trial in finished)
            elapsed = 0.0 if self._first_ask is None else self._clock() - self._first_ask
            if limits.timeout is not None and elapsed >= limits.timeout:
                self.stop(f"timeout={limits.timeout:g} seconds have passed")
            elif threshold is not None and best and limits.sign * (best[0].value or 0.0) <= limits.sign * threshold:
                self.stop(f"a value reached loss_threshold={threshold:g}")
            elif limits.max_failures is not None and failed > limits.max_failures:
                self.stop(f"more trials failed than max_failures={limits.max_failures}")

    def _trials(self) -> list[Trial]:
        return [*self._finished.values(), *self._running.values()]

    def _has_more(self) -> bool:
        max_evals = self._limits.max_evals
        count = len(self._finished) + len(self._running)
        return not self.reason and not self._exhausted and (max_evals is None or count < max_evals)

    def _suggest_trial(self) -> Trial | None:
        try:
            with self._leases.paused():
                trial = self._study.ask(sorted(self._trials(), key=lambda trial: trial.number))
        except (Exception, SystemExit) as error:
            self.fail(_failed(_ALGORITHM, error))
            return None
        self._exhausted = trial is None
        return trial

    def _assign(self, trial: Trial, worker: Worker) -> Assignment:
        self._running[trial.number] = replace(trial, worker=worker.name)
        lease = self._leases.grant(trial.number, _Holder(worker, self._clock()))
        return Assignment(trial.number, lease.number, trial.params)

    def _renew_lease(self, lease: int) -> Lease[int, _Holder]:
        held = self._leases.renew(lease)
        if held is None:
            raise RefusedError(LEASE_LOST, "another worker has this trial, or the trial has ended.")
        held.holder.is_uploading = False
        return held

    def _active(self) -> Iterator[_Holder]:
        """The workers that are not lost."""
        return (held.holder for held in self._leases if self._leases.is_held(held.key))

    def _lost_lease(self) -> Lease[int, _Holder] | None:
        """The lease of a trial whose worker is lost, the lowest trial number first."""
        lost = (held for held in self._leases if not self._leases.is_held(held.key))
        return min(lost, key=lambda held: held.key, default=None)

    def _fail_lost_trial(self, held: Lease[int, _Holder]) -> None:
        trial = self._running[held.key]
        cause = trial.error or "the process was killed, or its machine is gone"
        error = f"its worker was lost {trial.attempts} times, the last time because {cause}"
        self._end(replace(trial, status=FAILED, error=error), held)

    def _is_saving_trial_of(self, worker: Worker) -> bool:
        return any(other == worker for _, other in self._saving.values())

    def _end(self, trial: Trial, held: Lease[int, _Holder], model: Any = None) -> bool:
        """End a trial; returns whether it will be saved. A stopped one has the value of its best reported epoch."""
        has_no_value = trial.value is None and self._limits.num_metrics == 1
        if trial.status == STOPPED and has_no_value and trial.intermediate_values:
            best = min(trial.intermediate_values, key=lambda value: self._limits.sign * value)
            trial = replace(trial, value=best, best_epoch=trial.intermediate_values.index(best) + 1)
        ended = replace(trial, ended=self.seconds, seconds=self._clock() - held.holder.started)
        is_saved = self.failure is None and (trial.status != STOPPED or model is not None)
        if is_saved:
            self._saving[trial.number] = ended, held.holder.worker
            try:
                self._save(ended, model)
            except BaseException:
                self._saving.pop(trial.number, None)
                raise
        else:
            self._record(ended)
        self._leases.revoke(held.number)
        return is_saved

    def _record(self, trial: Trial) -> None:
        """Count a trial as finished."""
        del self._running[trial.number]
        self._finished[trial.number] = trial
        self.check_limits()
        self._check_early_stop(self.finished)

    def _check_early_stop(self, finished: Sequence[Trial]) -> None:
        """Call the user's stop function if the last trial has a value."""
        early_stop = self._limits.early_stop
        if early_stop is None or self.reason or finished[-1].value is None:
            return
        try:
            with self._leases.paused():
                if early_stop(finished):
                    self.stop("early_stop_fn requested it")
        except (Exception, SystemExit) as error:
            self.fail(_failed(f"early_stop_fn {early_stop!r}", error))


def _failed(what: str, error: BaseException) -> SparkKerasError:
    from optuna.exceptions import StorageInternalError  # workers, which have the types of this module, may lack Optuna

    if isinstance(error, SparkKerasError):
        return error
    if isinstance(error, StorageInternalError):
        reason = str(error.__cause__ or error).partition("\n")[0]
        return StorageError(f"the study (storage=) cannot be read or written: {reason}")
    lines = "".join(traceback.format_exception(error))
    return ConfigurationError(f"{what} failed: {type(error).__name__}: {error}\n\n{lines}")
