"""The ledger of a search: its trials, the workers that run them, and the decision when the search is over.

A worker that asks for a trial gets it with a *lease*, a number that it sends with every call about this trial. A trial has
one lease at a time. When its worker is lost (its connection closed, or its heartbeats stopped), the next worker that asks
gets the same trial under a new lease, and calls with the old lease are rejected; so each trial counts once. A worker that
was only slow keeps its trial as long as no other worker asks.

The ledger only decides; functions that it is given suggest trials, write them and check for an early stop. It calls them
under one lock, during which no heartbeat can be received, so it extends the leases by the time that they take. All methods
may be called from any thread.
"""

from __future__ import annotations

import itertools
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from sparkkeras.errors import ConfigurationError, SparkKerasError
from sparkkeras.hyperopt.pruners import Pruner
from sparkkeras.hyperopt.trials import FAILED, STOPPED, Trial, ranked
from sparkkeras.rpc.transport import RefusedError

LEASE_LOST = "lease lost"
"""The kind of `RefusedError` if another worker has the trial."""

CONTINUE, PRUNE, STOP = "go on", "prune", "stop"
"""The replies to a worker's report or heartbeat: continue the trial, prune it, or stop it with the search."""

UPLOAD_SECONDS = 300.0
"""How much longer than its lease a worker may take to upload each piece of a model: it sends no heartbeats meanwhile."""

ATTEMPTS = 3
"""A trial fails after losing this number of workers: it may be the cause of their loss."""


@dataclass(frozen=True)
class Limits:
    """The conditions under which a search or a trial ends.

    Attributes:
        max_evals: The total number of trials, including those of earlier calls; ``None`` is unlimited.
        sign: 1 if smaller values are better, -1 if larger ones are.
        pruner: Ends unpromising trials early.
        timeout: Seconds since a worker first asked for a trial.
        loss_threshold: The search ends with the first value that is at least as good as this.
        max_failures: The search ends when more trials than this have failed.
        early_stop: Called with all finished trials after each trial that has a value; returns whether to end the search.
        lease_seconds: The time without a heartbeat after which a worker counts as lost.
    """

    max_evals: int | None = None
    sign: float = 1.0
    pruner: Pruner | None = None
    timeout: float | None = None
    loss_threshold: float | None = None
    max_failures: int | None = None
    early_stop: Callable[[Sequence[Trial]], bool] | None = None
    lease_seconds: float = 10.0


@dataclass(frozen=True)
class Suggestion:
    """A suggestion of a search algorithm: the value chosen for each label, and the hyper-parameters made from them."""

    chosen: dict[str, Any]
    params: Any


@dataclass(frozen=True)
class Assignment:
    """A trial that is assigned to a worker.

    Attributes:
        number: The number of the trial.
        lease: The number of the lease.
        params: The hyper-parameters.
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
class _Lease:
    number: int
    worker: Worker
    expires: float
    started: float
    presumed_lost: bool = False
    is_uploading: bool = False
    pruned: bool = False


@dataclass
class _State:
    finished: dict[int, Trial] = field(default_factory=dict)
    running: dict[int, Trial] = field(default_factory=dict)
    leases: dict[int, _Lease] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)


class TrialLedger:
    """The trials of a search and their leases. See the module docstring.

    Args:
        suggest: Returns the next trial, for its number and all other trials; ``None`` if the algorithm has no more.
        limits: The conditions under which the search ends.
        clock: A monotonic clock, in seconds.
        finished: The trials of earlier calls.
        on_end: Called with each trial that ended other than by a stop of the search, before its worker gets a reply.

    Attributes:
        reason: Why the search ended early, as a message; empty if it did not.
        failure: The error that ended the search; ``None`` without one.
    """

    def __init__(
        self,
        suggest: Callable[[int, Sequence[Trial]], Suggestion | None],
        limits: Limits,
        clock: Callable[[], float],
        finished: Iterable[Trial] = (),
        on_end: Callable[[Trial], None] = lambda trial: None,
    ) -> None:
        self._suggest, self._limits, self._clock, self._on_end = suggest, limits, clock, on_end
        self._lock = threading.RLock()
        self._state = _State({trial.number: trial for trial in finished})
        self._earlier = frozenset(self._state.finished)
        self._numbers = (number for number in itertools.count() if number not in self._state.finished)
        self._leases = itertools.count(1)
        self._before = max((trial.ended for trial in self._state.finished.values()), default=0.0)
        self._began = clock()
        self._first_ask: float | None = None
        self._exhausted = False
        self.reason = ""
        self.failure: Exception | None = None
        ended = self.finished
        for count in range(1, len(ended) + 1):  # a stop function may keep state: it sees the earlier trials again
            self._check_early_stop(ended[:count])
        self._check_limits()

    @property
    def seconds(self) -> float:
        """The duration of the search in seconds, including earlier calls that it resumed."""
        return self._before + self._clock() - self._began

    @property
    def finished(self) -> list[Trial]:
        """The trials that have ended, in the order in which they ended."""
        with self._lock:
            return sorted(self._state.finished.values(), key=lambda trial: (trial.ended, trial.number))

    @property
    def running(self) -> list[Trial]:
        """The trials that are assigned to workers, or were and are lost."""
        with self._lock:
            return list(self._state.running.values())

    @property
    def is_over(self) -> bool:
        """Whether no trial is running and none will start."""
        with self._lock:
            return not self._state.running and not self._has_more()

    @property
    def is_uploading(self) -> bool:
        """Whether a worker is uploading the result of its trial."""
        with self._lock:
            now = self._clock()
            leases = self._state.leases.values()
            return any(each.is_uploading and not each.presumed_lost and each.expires >= now for each in leases)

    def ask(self, worker: Worker) -> Assignment | None:
        """Assign the next trial to a worker; ``None`` if there is none for it."""
        with self._lock:
            self._first_ask = self._clock() if self._first_ask is None else self._first_ask
            self._check_limits()
            if self.reason:
                return None
            lost = self._take_lost_lease()
            if lost is not None:
                trial = self._state.running[lost.number]
                if trial.attempts < ATTEMPTS:
                    return self._assign(
                        replace(trial, attempts=trial.attempts + 1, intermediate_values=(), error=""), worker
                    )
                self._fail_lost_trial(trial, lost.started)
                return self.ask(worker)
            new = self._suggest_trial() if self._has_more() else None
            return None if new is None else self._assign(new, worker)

    def should_wait(self, worker: Worker) -> bool:
        """Whether a worker without a trial should wait, since another attempt of the same Spark task still has one.

        Spark ends all other attempts of a task as soon as one has finished.
        """
        with self._lock:
            active = (held.worker for held in self._state.leases.values() if not held.presumed_lost)
            return any(other.task == worker.task and other.attempt != worker.attempt for other in active)

    def report(self, lease: int, epoch: int, loss: float) -> str:
        """Record the loss of an epoch; returns whether to continue the trial, prune it or stop it.

        An epoch without a report gets the loss of the epoch before; epochs before the first report get the first loss.

        Args:
            lease: The lease of the trial.
            epoch: The epoch, counted from 1; a repeated report of an epoch is ignored.
            loss: The loss; smaller is better.

        Raises:
            RefusedError: Another worker has the trial.
        """
        with self._lock:
            held = self._renew_lease(lease)
            trial = self._state.running[held.number]
            others = [
                other.intermediate_values
                for other in self._trials()
                if other.number != trial.number and other.intermediate_values
            ]
            new = range(len(trial.intermediate_values), max(epoch, len(trial.intermediate_values)))
            if new:
                known = (trial.intermediate_values or (loss,))[-1]
                missing = (known,) * (epoch - 1 - len(trial.intermediate_values))
                trial = replace(trial, intermediate_values=(*trial.intermediate_values, *missing, loss))
                self._state.running[held.number] = trial
            if self.reason:
                return STOP
            pruner = self._limits.pruner
            ends = [number + 1 for number in new] or [len(trial.intermediate_values)]  # includes epochs without a report
            try:
                with self._leases_paused():
                    if pruner is not None and any(
                        pruner.should_prune(trial.intermediate_values[:end], others) for end in ends
                    ):
                        held.pruned = True  # a worker that repeats the report, since the reply was lost, gets the same one
                    return PRUNE if held.pruned else CONTINUE
            except Exception as error:
                self.fail(_failed("the pruner", pruner, error))
                return STOP

    def renew(self, lease: int) -> str:
        """Record a heartbeat; returns whether to continue the trial or stop it.

        Raises:
            RefusedError: Another worker has the trial.
        """
        with self._lock:
            self._renew_lease(lease)
            self._check_limits()
            return STOP if self.reason else CONTINUE

    def extend_for_upload(self, lease: int) -> Trial:
        """Extend a lease for an upload, during which its worker sends no heartbeats; returns the trial.

        Raises:
            RefusedError: Another worker has the trial.
        """
        with self._lock:
            held = self._renew_lease(lease)
            held.expires += UPLOAD_SECONDS
            held.is_uploading = True
            return self._state.running[held.number]

    def is_done(self, lease: int) -> bool:
        """Whether the trial was finished under this lease, so that a repeated `finish` call can be ignored."""
        with self._lock:
            return lease in self._state.done

    def finish(self, lease: int, trial: Trial) -> None:
        """Record the result of a trial.

        A trial that was stopped although the search continues counts as lost: its machine is probably being shut down.

        Raises:
            RefusedError: Another worker has the trial.
        """
        with self._lock:
            held = self._renew_lease(lease)
            if trial.status == STOPPED and not self.reason:
                self.lose(lease, "its process received a request to stop")
                return
            self._state.leases.pop(lease)
            self._state.done.add(lease)
            self._end(trial, held.started)

    def lose(self, lease: int, cause: str) -> None:
        """Record that the process of a trial ended, although its worker still runs.

        Raises:
            RefusedError: Another worker has the trial.
        """
        with self._lock:
            held = self._renew_lease(lease)
            held.presumed_lost = True
            trial = self._state.running[held.number]
            self._state.running[held.number] = replace(trial, error=cause)

    def presume_lost(self, leases: Iterable[int]) -> None:
        """Presume the workers of these leases lost, since their connection closed."""
        with self._lock:
            for lease in leases:
                if lease in self._state.leases:
                    self._state.leases[lease].presumed_lost = True

    def presume_all_lost(self) -> None:
        """Presume all workers lost, since their job ended; trials that have lost `ATTEMPTS` workers fail."""
        with self._lock:
            self.presume_lost(list(self._state.leases))
            for lease, held in list(self._state.leases.items()):
                trial = self._state.running[held.number]
                if trial.attempts >= ATTEMPTS:
                    del self._state.leases[lease]
                    self._fail_lost_trial(trial, held.started)

    def has_value(self) -> bool:
        """Whether a trial of this call, not of an earlier one, has a value."""
        with self._lock:
            finished = self._state.finished.values()
            return any(trial.value is not None for trial in finished if trial.number not in self._earlier)

    def end_running(self) -> None:
        """End the running trials as stopped, after the search and all workers have ended."""
        with self._lock:
            for lease, held in list(self._state.leases.items()):
                del self._state.leases[lease]
                self._end(replace(self._state.running[held.number], status=STOPPED), held.started)

    def stop(self, reason: str) -> None:
        """End the search: assign no more trials, and stop the running ones."""
        with self._lock:
            self.reason = self.reason or reason

    def fail(self, error: Exception) -> None:
        """End the search with an error."""
        with self._lock:
            self.failure = self.failure or error
            self.stop(f"{type(error).__name__}: {error}".partition("\n")[0])

    def check_limits(self) -> None:
        """End the search if a limit, such as the timeout, is reached."""
        with self._lock:
            self._check_limits()

    def _trials(self) -> list[Trial]:
        return [*self._state.finished.values(), *self._state.running.values()]

    def _has_more(self) -> bool:
        max_evals = self._limits.max_evals
        count = len(self._state.finished) + len(self._state.running)
        return not self.reason and not self._exhausted and (max_evals is None or count < max_evals)

    def _suggest_trial(self) -> Trial | None:
        number = next(self._numbers)
        try:
            with self._leases_paused():
                suggested = self._suggest(number, sorted(self._trials(), key=lambda trial: trial.number))
        except SparkKerasError as error:
            self.fail(error)
            return None
        except Exception as error:
            self.fail(_failed("the search algorithm", self._suggest, error))
            return None
        if suggested is None:
            self._exhausted = True
            return None
        return Trial(number, suggested.params, chosen=suggested.chosen)

    @contextmanager
    def _leases_paused(self) -> Iterator[None]:
        """Extend all leases by the time spent here, since heartbeats have to wait for the lock."""
        began = self._clock()
        try:
            yield
        finally:
            for held in self._state.leases.values():
                held.expires += self._clock() - began

    def _assign(self, trial: Trial, worker: Worker) -> Assignment:
        lease, now = next(self._leases), self._clock()
        self._state.running[trial.number] = replace(trial, worker=worker.name)
        self._state.leases[lease] = _Lease(trial.number, worker, now + self._limits.lease_seconds, now)
        return Assignment(trial.number, lease, trial.params)

    def _renew_lease(self, lease: int) -> _Lease:
        held = self._state.leases.get(lease)
        if held is None:
            raise RefusedError(LEASE_LOST, "another worker has this trial, or the trial has ended.")
        held.expires, held.presumed_lost, held.is_uploading = self._clock() + self._limits.lease_seconds, False, False
        return held

    def _take_lost_lease(self) -> _Lease | None:
        """Remove and return the lease of a trial whose worker is lost, the lowest trial number first."""
        now = self._clock()
        for lease, held in sorted(self._state.leases.items(), key=lambda item: item[1].number):
            if held.presumed_lost or held.expires < now:
                del self._state.leases[lease]
                return held
        return None

    def _fail_lost_trial(self, trial: Trial, started: float) -> None:
        cause = trial.error or "the process was killed (perhaps out of memory), or its machine is gone"
        error = f"its worker was lost {trial.attempts} times, the last time because {cause}"
        self._end(replace(trial, status=FAILED, error=error), started)

    def _end(self, trial: Trial, started: float) -> None:
        """Record the end of a trial. A stopped one has the value of its best reported epoch."""
        del self._state.running[trial.number]
        if trial.status == STOPPED and trial.value is None and trial.intermediate_values:
            best = min(trial.intermediate_values)
            trial = replace(trial, value=self._limits.sign * best, best_epoch=trial.intermediate_values.index(best) + 1)
        ended = replace(trial, ended=self.seconds, seconds=self._clock() - started)
        self._state.finished[trial.number] = ended
        try:
            with self._leases_paused():
                if trial.status != STOPPED and self.failure is None:
                    self._on_end(ended)
        except Exception as error:
            self.fail(error)
        self._check_limits()
        self._check_early_stop(self.finished)

    def _check_early_stop(self, finished: Sequence[Trial]) -> None:
        """Call the user's stop function if the last trial has a value."""
        early_stop = self._limits.early_stop
        if early_stop is None or self.reason or finished[-1].value is None:
            return
        try:
            with self._leases_paused():
                if early_stop(finished):
                    self.stop("early_stop_fn requested it")
        except Exception as error:
            self.fail(_failed("early_stop_fn", early_stop, error))

    def _check_limits(self) -> None:
        limits, finished = self._limits, list(self._state.finished.values())
        if self.reason:
            return
        best, threshold = ranked(finished, limits.sign)[:1], limits.loss_threshold
        failed = sum(trial.status == FAILED for trial in finished)
        elapsed = 0.0 if self._first_ask is None else self._clock() - self._first_ask
        if limits.timeout is not None and elapsed >= limits.timeout:
            self.stop(f"timeout={limits.timeout:g} seconds have passed")
        elif threshold is not None and best and limits.sign * (best[0].value or 0.0) <= limits.sign * threshold:
            self.stop(f"a value reached loss_threshold={threshold:g}")
        elif limits.max_failures is not None and failed > limits.max_failures:
            self.stop(f"more trials failed than max_failures={limits.max_failures}")


def _failed(what: str, given: object, error: Exception) -> ConfigurationError:
    lines = "".join(traceback.format_exception(error))
    return ConfigurationError(f"{what} {given!r} failed: {type(error).__name__}: {error}\n\n{lines}")
