"""Which trials there are, who runs them, and when the search is over.

A worker that asks gets a trial with a *lease*, a number that comes with every word about that trial. A trial has one lease
at a time. When its worker is lost (its connection ended, or it gave no sign of life for too long), the next one that asks
gets the same trial under a new lease, and whoever comes with the old one is refused; so each trial counts once. A worker
that was only slow loses nothing as long as nobody asks.

The ledger decides; what it is given does the rest: suggests, writes down, says when it is enough. All that happens under
one lock, and the time that it takes is nobody's silence: leases live on by as much. All methods may be called from any
thread.
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
"""The kind of a refusal: another worker has the trial."""

GO_ON, PRUNE, STOP = "go on", "prune", "stop"
"""What a worker is sent about its trial."""

HANDOVER_SECONDS = 300.0
"""How long a worker that hands a model over may take for each piece, beyond its lease, since it does nothing beside that."""

ATTEMPTS = 3
"""A trial whose worker is lost so many times has failed: it may be the trial that ends them."""


@dataclass(frozen=True)
class Limits:
    """When a search ends, and when a trial does.

    Attributes:
        max_evals: So many trials, those of earlier calls included; ``None`` is no bound.
        sign: 1 where small values are good, -1 where large ones are.
        pruner: Ends hopeless trials.
        timeout: Seconds since a worker first asked.
        loss_threshold: A value that is good enough.
        max_failures: The search ends when more trials than this have failed.
        early_stop: Called with all finished trials after each; says whether that is enough.
        lease_seconds: How long a worker may give no sign of life.
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
class Suggested:
    """What a search algorithm came up with: what it chose, and what the space makes of that."""

    chosen: dict[str, Any]
    params: Any


@dataclass(frozen=True)
class Assignment:
    """A trial that a worker shall run.

    Attributes:
        number: Its number.
        lease: The number of the lease.
        params: The hyper-parameters.
    """

    number: int
    lease: int
    params: Any


@dataclass(frozen=True)
class Worker:
    """Who asks.

    Attributes:
        name: What messages to people say.
        task: The number of its task, the same for all attempts at it.
        attempt: Which attempt.
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
    doubted: bool = False
    hands_over: bool = False
    hopeless: bool = False


@dataclass
class _State:
    finished: dict[int, Trial] = field(default_factory=dict)
    running: dict[int, Trial] = field(default_factory=dict)
    leases: dict[int, _Lease] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)


class TrialLedger:
    """See the module's words.

    Args:
        suggest: Gives what to try next, for a trial's number and all other trials; ``None`` if there is nothing left.
        limits: When to end.
        clock: Seconds that never go back.
        finished: Trials that are done already.
        on_end: Called with each trial that has come to its own end, before anybody hears of that.

    Attributes:
        reason: Why the search ended before its time, in words; empty where it did not.
        failure: What went wrong with the search itself.
    """

    def __init__(
        self,
        suggest: Callable[[int, Sequence[Trial]], Suggested | None],
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
        self._asked: float | None = None
        self._exhausted = False
        self.reason = ""
        self.failure: Exception | None = None
        ended = self.finished
        for count in range(1, len(ended) + 1):  # a report that comes once more makes it what it was
            self._ask_whether_that_is_enough(ended[:count])
        self._look_at_limits()

    @property
    def seconds(self) -> float:
        """How long the search has been going on, in all of its calls."""
        return self._before + self._clock() - self._began

    @property
    def finished(self) -> list[Trial]:
        """The trials that have ended, in the order in which they did."""
        with self._lock:
            return sorted(self._state.finished.values(), key=lambda trial: (trial.ended, trial.number))

    @property
    def running(self) -> list[Trial]:
        """The trials that are out."""
        with self._lock:
            return list(self._state.running.values())

    @property
    def over(self) -> bool:
        """Whether nobody has anything to do any more."""
        with self._lock:
            return not self._state.running and not self._has_more()

    @property
    def hands_over(self) -> bool:
        """Whether a worker is about to hand over what came of its trial."""
        with self._lock:
            now = self._clock()
            held = self._state.leases.values()
            return any(each.hands_over and not each.doubted and each.expires >= now for each in held)

    def ask(self, worker: Worker) -> Assignment | None:
        """The next trial for a worker; ``None`` where there is none for it."""
        with self._lock:
            self._asked = self._clock() if self._asked is None else self._asked
            self._look_at_limits()
            if self.reason:
                return None
            lost = self._lost()
            if lost is not None:
                trial = self._state.running[lost.number]
                if trial.attempts < ATTEMPTS:
                    return self._lend(replace(trial, attempts=trial.attempts + 1, intermediate_values=(), error=""), worker)
                self._give_up(trial, lost.started)
                return self.ask(worker)
            new = self._new() if self._has_more() else None
            return None if new is None else self._lend(new, worker)

    def shall_wait(self, worker: Worker) -> bool:
        """Whether a worker that got no trial is a copy of one that has some, which Spark would end with it."""
        with self._lock:
            held = (held.worker for held in self._state.leases.values() if not held.doubted)
            return any(other.task == worker.task and other.attempt != worker.attempt for other in held)

    def report(self, lease: int, epoch: int, loss: float) -> str:
        """Take the loss of an epoch; whether the trial shall go on.

        Epochs without one count as the one before, and those before the first as that.

        Args:
            lease: The trial's.
            epoch: Which, counted from 1; one that is known already is not taken again.
            loss: The loss.

        Raises:
            RefusedError: Another worker has the trial.
        """
        with self._lock:
            held = self._held(lease)
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
            ends = [number + 1 for number in new] or [
                len(trial.intermediate_values)
            ]  # it sees each epoch, also those without a loss
            try:
                with self._undisturbed():
                    if pruner is not None and any(
                        pruner.should_prune(trial.intermediate_values[:end], others) for end in ends
                    ):
                        held.hopeless = True  # who asks again, since the answer was lost, hears the same
                    return PRUNE if held.hopeless else GO_ON
            except Exception as error:
                self.fail(_failed("the pruner", pruner, error))
                return STOP

    def renew(self, lease: int) -> str:
        """Take a sign of life; whether the trial shall go on.

        Raises:
            RefusedError: Another worker has the trial.
        """
        with self._lock:
            self._held(lease)
            self._look_at_limits()
            return STOP if self.reason else GO_ON

    def hand_over(self, lease: int) -> Trial:
        """The trial of a lease, whose worker hands it over now and gives no other signs of life.

        Raises:
            RefusedError: Another worker has it.
        """
        with self._lock:
            held = self._held(lease)
            held.expires += HANDOVER_SECONDS
            held.hands_over = True
            return self._state.running[held.number]

    def is_done(self, lease: int) -> bool:
        """Whether the trial of this lease has been finished under it: its last word has come twice."""
        with self._lock:
            return lease in self._state.done

    def finish(self, lease: int, trial: Trial) -> None:
        """Take what came of a trial. One that was stopped, though the search goes on, was lost: its machine is to end.

        Raises:
            RefusedError: Another worker has the trial.
        """
        with self._lock:
            held = self._held(lease)
            if trial.status == STOPPED and not self.reason:
                self.lose(lease, "its process was told to end")
                return
            self._state.leases.pop(lease)
            self._state.done.add(lease)
            self._end(trial, held.started)

    def lose(self, lease: int, cause: str) -> None:
        """The process of a trial is gone; its worker is not.

        Raises:
            RefusedError: Another worker has the trial.
        """
        with self._lock:
            held = self._held(lease)
            held.doubted = True
            trial = self._state.running[held.number]
            self._state.running[held.number] = replace(trial, error=cause)

    def doubt(self, leases: Iterable[int]) -> None:
        """The connection over which these leases came has ended."""
        with self._lock:
            for lease in leases:
                if lease in self._state.leases:
                    self._state.leases[lease].doubted = True

    def doubt_all(self) -> None:
        """There are no workers any more; trials that were lost too often have failed."""
        with self._lock:
            self.doubt(list(self._state.leases))
            for lease, held in list(self._state.leases.items()):
                trial = self._state.running[held.number]
                if trial.attempts >= ATTEMPTS:
                    del self._state.leases[lease]
                    self._give_up(trial, held.started)

    def has_value(self) -> bool:
        """Whether a trial of this call has come to a value."""
        with self._lock:
            finished = self._state.finished.values()
            return any(trial.value is not None for trial in finished if trial.number not in self._earlier)

    def end_running(self) -> None:
        """The search is over and there are no workers any more: trials that were out end where they are."""
        with self._lock:
            for lease, held in list(self._state.leases.items()):
                del self._state.leases[lease]
                self._end(replace(self._state.running[held.number], status=STOPPED), held.started)

    def stop(self, reason: str) -> None:
        """Give no more trials out, and have those that run end."""
        with self._lock:
            self.reason = self.reason or reason

    def fail(self, error: Exception) -> None:
        """The search itself cannot go on."""
        with self._lock:
            self.failure = self.failure or error
            self.stop(f"{type(error).__name__}: {error}".partition("\n")[0])

    def look(self) -> None:
        """See whether the time is over."""
        with self._lock:
            self._look_at_limits()

    def _trials(self) -> list[Trial]:
        return [*self._state.finished.values(), *self._state.running.values()]

    def _has_more(self) -> bool:
        most = self._limits.max_evals
        count = len(self._state.finished) + len(self._state.running)
        return not self.reason and not self._exhausted and (most is None or count < most)

    def _new(self) -> Trial | None:
        number = next(self._numbers)
        try:
            with self._undisturbed():
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
    def _undisturbed(self) -> Iterator[None]:
        """What goes on in here may take long, and signs of life are waiting meanwhile."""
        began = self._clock()
        try:
            yield
        finally:
            for held in self._state.leases.values():
                held.expires += self._clock() - began

    def _lend(self, trial: Trial, worker: Worker) -> Assignment:
        lease, now = next(self._leases), self._clock()
        self._state.running[trial.number] = replace(trial, worker=worker.name)
        self._state.leases[lease] = _Lease(trial.number, worker, now + self._limits.lease_seconds, now)
        return Assignment(trial.number, lease, trial.params)

    def _held(self, lease: int) -> _Lease:
        held = self._state.leases.get(lease)
        if held is None:
            raise RefusedError(LEASE_LOST, "another worker has this trial, or it has ended.")
        held.expires, held.doubted, held.hands_over = self._clock() + self._limits.lease_seconds, False, False
        return held

    def _lost(self) -> _Lease | None:
        """The lease of a trial whose worker is lost, which it is from now on; of the one that was given out first."""
        now = self._clock()
        for lease, held in sorted(self._state.leases.items(), key=lambda item: item[1].number):
            if held.doubted or held.expires < now:
                del self._state.leases[lease]
                return held
        return None

    def _give_up(self, trial: Trial, started: float) -> None:
        cause = trial.error or "the process was killed (perhaps for its memory), or its machine went away"
        error = f"its worker was lost {trial.attempts} times, at last since {cause}"
        self._end(replace(trial, status=FAILED, error=error), started)

    def _end(self, trial: Trial, started: float) -> None:
        """Note what came of a trial. One that was stopped has the value of the best epoch that was reported."""
        del self._state.running[trial.number]
        if trial.status == STOPPED and trial.value is None and trial.intermediate_values:
            best = min(trial.intermediate_values)
            trial = replace(trial, value=self._limits.sign * best, best_epoch=trial.intermediate_values.index(best) + 1)
        ended = replace(trial, ended=self.seconds, seconds=self._clock() - started)
        self._state.finished[trial.number] = ended
        try:
            with self._undisturbed():
                if trial.status != STOPPED and self.failure is None:
                    self._on_end(ended)
        except Exception as error:
            self.fail(error)
        self._look_at_limits()
        self._ask_whether_that_is_enough(self.finished)

    def _ask_whether_that_is_enough(self, finished: Sequence[Trial]) -> None:
        """Ask the person's function after a trial that has a value."""
        early_stop = self._limits.early_stop
        if early_stop is None or self.reason or finished[-1].value is None:
            return
        try:
            with self._undisturbed():
                if early_stop(finished):
                    self.stop("early_stop_fn said so")
        except Exception as error:
            self.fail(_failed("early_stop_fn", early_stop, error))

    def _look_at_limits(self) -> None:
        limits, finished = self._limits, list(self._state.finished.values())
        if self.reason:
            return
        best, enough = ranked(finished, limits.sign)[:1], limits.loss_threshold
        failed = sum(trial.status == FAILED for trial in finished)
        since = 0.0 if self._asked is None else self._clock() - self._asked
        if limits.timeout is not None and since >= limits.timeout:
            self.stop(f"timeout={limits.timeout:g} seconds are over")
        elif enough is not None and best and limits.sign * (best[0].value or 0.0) <= limits.sign * enough:
            self.stop(f"a value is as good as loss_threshold={enough:g}")
        elif limits.max_failures is not None and failed > limits.max_failures:
            self.stop(f"more failed trials than max_failures={limits.max_failures}")


def _failed(what: str, given: object, error: Exception) -> ConfigurationError:
    told = "".join(traceback.format_exception(error))
    return ConfigurationError(f"{what} {given!r} failed: {type(error).__name__}: {error}\n\n{told}")
