"""A search on Spark: the task that a worker runs, and the driver's half.

There is one Spark job. Each of its tasks is a worker: it loads Keras and the data once, then asks the driver for one trial
after the other until there are no more, and runs each in a child process. Workers never wait for each other. Where the
job ends while trials are out (a worker was lost, and Spark does not try it again), another one takes them up.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from sparkkeras.data.block import Block
from sparkkeras.data.dataset import Dataset, Running, Shared, TaskContext
from sparkkeras.errors import ClusterError, DriverConnectionError, SparkKerasError, WorkerError
from sparkkeras.hyperopt.data import fit_data
from sparkkeras.hyperopt.encoding import decode
from sparkkeras.hyperopt.ledger import GO_ON, Assignment, TrialLedger, Worker
from sparkkeras.hyperopt.objective import Data, Fit, Objective, run_trial
from sparkkeras.hyperopt.service import LeaseLostError, Outcome, SearchClient
from sparkkeras.hyperopt.subprocess_task import ChildLostError, ChildStoppedError, run_here, run_in_child
from sparkkeras.hyperopt.trials import FAILED, STOPPED
from sparkkeras.modeling.custom_code import ByValue
from sparkkeras.rpc.transport import Address
from sparkkeras.worker import device

BEAT_SECONDS = 1.0
"""How often a worker whose trial says nothing gives a sign of life, and hears whether it shall go on."""

TICK_SECONDS = 0.1
"""How often the driver looks whether the job has ended."""

FRUITLESS_JOBS = 3
"""If more jobs in a row than this fail without one trial ending, the search fails, too."""

LEAVE_SECONDS = 15.0
"""How long running trials get to end when the search is over, before the job is cancelled."""


@dataclass(frozen=True)
class Work:
    """What all trials of a search have in common.

    Attributes:
        objective: What a trial does.
        objects: The person's objects in the space.
        sign: 1 where small values are good, -1 where large ones are.
        seed: What the seed of each trial is made from.
        read: Reads the data on the workers; ``None``: it is given.
        in_children: Whether each trial has a process of its own.
    """

    objective: Objective
    objects: ByValue[list[Any]]
    sign: float
    seed: int
    read: ByValue[Callable[[], Any]] | None = None
    in_children: bool = True


@dataclass(frozen=True)
class SearchTask:
    """A worker."""

    work: Shared[Work]
    data: Shared[Data]
    address: Address

    def __call__(self, context: TaskContext, blocks: Iterator[Block]) -> Iterator[None]:
        """Run trials until there are no more."""
        for _ in blocks:
            pass
        work = self.work.value
        if work.in_children and not hasattr(os, "fork"):
            raise ClusterError(
                "a search needs workers that can fork, since each trial has a process of its own, and this one cannot "
                f"({sys.platform}): let executors run on Linux or macOS."
            )
        loaded = _Loaded.of(work, self.data)
        worker = Worker(f"{socket.gethostname()}/{context.worker}", context.worker, context.attempt)
        with SearchClient(self.address, worker) as client:
            while (assignment := client.ask()) is not None:
                with suppress(LeaseLostError):
                    if loaded.error is not None:  # no hyper-parameters are to blame, so no other trial shall suffer
                        client.finish(assignment.lease, loaded.error)
                        break
                    _run(work, client, assignment, loaded.data)
        return iter(())


@dataclass(frozen=True)
class _Loaded:
    """The data, or why there is none."""

    data: Data
    error: Outcome | None = None

    @classmethod
    def of(cls, work: Work, shared: Shared[Data]) -> _Loaded:
        if work.read is None:
            return cls(shared.value)
        read = _Read(work.read, isinstance(work.objective, Fit))
        run = run_in_child if work.in_children else run_here
        try:
            return run(read, lambda _: None, lambda: True, BEAT_SECONDS)
        except (ChildLostError, TypeError) as error:  # it is too large, perhaps, or cannot be pickled
            return cls(None, Outcome(FAILED, error=f"{_UNREAD}: {error}", is_mistake=True))


_UNREAD = "the function that reads the data failed"


@dataclass(frozen=True)
class _Read:
    """Reads the data. In a child, since the person's function may use the backend."""

    function: ByValue[Callable[[], Any]]
    checks: bool

    def __call__(self, ask: Any) -> _Loaded:
        try:
            data = self.function.fresh()()
            return _Loaded(fit_data(data) if self.checks else data)
        except (Exception, SystemExit) as error:
            told = f"{_UNREAD}: {type(error).__name__}: {error}"
            return _Loaded(None, Outcome(FAILED, error=told, traceback=traceback.format_exc(), is_mistake=True))


def _run(work: Work, client: SearchClient, assignment: Assignment, data: Data) -> None:
    """Run a trial and report what came of it."""
    lease = assignment.lease

    def trial(ask: Callable[[tuple[int, float]], str]) -> Outcome:
        params = decode(assignment.params, work.objects.fresh())
        return run_trial(work.objective, params, data, seed, lambda *told: ask(told), work.sign)

    if work.in_children and not device.is_untouched():
        raise ClusterError(
            "the backend of Keras has been used in a worker process of the search before its first trial, by what the data "
            "or the space holds: a trial could not have a process of its own. Give arrays of NumPy, or a function that "
            "reads them."
        )
    seed = (work.seed * 1_000_003 + assignment.number) % 2**32
    run = run_in_child if work.in_children else run_here
    try:
        outcome = run(trial, lambda told: client.report(lease, *told), lambda: client.renew(lease) == GO_ON, BEAT_SECONDS)
    except ChildStoppedError:
        outcome = Outcome(STOPPED)
    except ChildLostError as error:
        client.lose(lease, str(error))
        return
    client.finish(lease, outcome)


@contextmanager
def _interrupts_come_here() -> Iterator[None]:
    """Have Ctrl-C raise here while trials can still end: PySpark's answer to it cancels all jobs first."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not _is_pysparks(handler):
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _is_pysparks(handler: object) -> bool:
    return str(getattr(handler, "__module__", "")).startswith("pyspark.")


@_interrupts_come_here()
def supervise(
    dataset: Dataset,
    task: SearchTask,
    ledger: TrialLedger,
    start: Callable[[Callable[[], Any]], Running[Any]],
    tick: Callable[[], None],
) -> None:
    """The driver's half: have workers run until the search is over.

    Args:
        dataset: One partition for each worker.
        task: What they do.
        ledger: What there is to do.
        start: Does something in a thread of its own.
        tick: Called whenever something has happened, and from time to time.

    Raises:
        SparkKerasError: The search failed, or Spark has no workers for it.
    """
    fruitless = 0
    while not ledger.over:
        ended = len(ledger.finished)
        running = start(dataset.run(task).collect)
        try:
            _watch(running, ledger, tick)
            if not ledger.reason:
                running.result()
            ledger.doubt_all()
        except SparkKerasError as error:
            ledger.doubt_all()
            fruitless = 0 if len(ledger.finished) > ended else fruitless + 1
            if fruitless > FRUITLESS_JOBS or not _is_lost(error):
                ledger.stop(f"{type(error).__name__}: {str(error).splitlines()[0]}")
                ledger.end_running()
                raise
        except BaseException:
            ledger.stop("it was interrupted")
            try:
                _watch(running, ledger, lambda: None)
            finally:
                running.cancel()
                ledger.end_running()
            raise
        if ledger.reason:
            ledger.end_running()
    tick()
    if ledger.failure is not None:
        raise ledger.failure


def _watch(running: Running[Any], ledger: TrialLedger, tick: Callable[[], None]) -> None:
    """Wait for a job to end; one that goes on when there is nothing more to do is cancelled after a while.

    Models that are being handed over have the time that they need.
    """
    patience = LEAVE_SECONDS
    while not running.done:
        time.sleep(TICK_SECONDS)
        ledger.look()
        tick()
        if (ledger.reason or ledger.over) and not ledger.hands_over:
            patience -= TICK_SECONDS
        if patience <= 0:
            running.cancel()
            with suppress(Exception):
                running.result()


def _is_lost(error: SparkKerasError) -> bool:
    """Whether a job failed since a worker went away, and not since its code raised something."""
    return isinstance(error, DriverConnectionError) or (isinstance(error, WorkerError) and not error.worker_traceback)
