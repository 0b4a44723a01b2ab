"""A search on Spark: the task of a worker, and the supervision on the driver.

A search is one Spark job. Each of its tasks is a worker: it loads Keras and the data once, then asks the driver for one
trial after the other until there are no more, and runs each in a child process. Workers do not wait for each other. If the
job ends while trials are unfinished (a worker was lost, and Spark does not retry its task), the driver starts another one.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from sparkkeras.data.block import Block
from sparkkeras.data.dataset import Results, Running, Shared, TaskContext
from sparkkeras.data.labels import LabelRange
from sparkkeras.errors import ClusterError, ConfigurationError, DriverConnectionError, SparkKerasError, WorkerError
from sparkkeras.hyperopt.data import fit_data
from sparkkeras.hyperopt.hypermodel import HyperParameters
from sparkkeras.hyperopt.ledger import CONTINUE, Assignment, TrialLedger, Worker
from sparkkeras.hyperopt.objective import Data, Fit, Objective, run_trial
from sparkkeras.hyperopt.reporting import SearchDefinitionError
from sparkkeras.hyperopt.rows_on_disk import RowsOnDisk
from sparkkeras.hyperopt.service import LeaseLostError, Outcome, SearchClient
from sparkkeras.hyperopt.subprocess_task import ChildLostError, ChildStoppedError, run_in_child, run_inline
from sparkkeras.hyperopt.trials import FAILED, STOPPED, Metrics
from sparkkeras.hyperopt.values import decode
from sparkkeras.modeling.custom_code import ByValue
from sparkkeras.rpc.transport import Address
from sparkkeras.spark.job_errors import interrupts_here
from sparkkeras.worker import device

HEARTBEAT_SECONDS = 1.0
"""The interval of heartbeats, whose replies say whether the worker should continue; reports of a trial replace them."""

TICK_SECONDS = 0.1
"""The interval at which the driver checks whether the job has ended."""

MAX_FAILED_JOBS = 3
"""The search fails after more than this number of consecutive jobs in which no trial ended."""

SHUTDOWN_SECONDS = 15.0
"""The time that running trials have to end when the search is over, before the driver cancels the job."""

IDLE_SECONDS = 3.0
"""The same if no trial is running, for workers that are loading Keras or copying data."""


@dataclass(frozen=True)
class TrialSettings:
    """The settings that all trials of a search share.

    Attributes:
        objective: What a trial does.
        objects: The user's objects in the space.
        metrics: The metrics.
        seed: The seed of the search, from which the seeds of the trials are derived.
        read: Reads the data on the workers; ``None`` if the driver sends it.
        in_child_processes: Whether each trial runs in a separate child process.
        kept: The names of the rows that the task of a worker has, in their order; see `RowsOnDisk`.
        labels: The ranges of the labels of these rows.
    """

    objective: Objective
    objects: ByValue[list[Any]]
    metrics: Metrics
    seed: int
    read: ByValue[Callable[[], Any]] | None = None
    in_child_processes: bool = True
    kept: tuple[str, ...] = ()
    labels: tuple[LabelRange, ...] = ()


@dataclass(frozen=True)
class SearchTask:
    """The task of a worker: runs trials until the driver has no more."""

    settings: Shared[TrialSettings]
    data: Shared[Data]
    address: Address

    def __call__(self, context: TaskContext, blocks: Iterator[Block]) -> Iterator[None]:
        """Run trials until there are no more."""
        settings = self.settings.value
        if settings.in_child_processes and not hasattr(os, "fork"):
            raise ClusterError(
                "a search needs workers that can fork, since each trial runs in a separate process, but this worker cannot "
                f"({sys.platform}): run the executors on Linux or macOS."
            )
        if settings.in_child_processes:
            device.prepare_to_fork(context.cores)
        loaded = _load(settings, self.data, blocks)
        worker = Worker(f"{socket.gethostname()}/{context.worker}", context.worker, context.attempt)
        with SearchClient(self.address, worker) as client:
            while (assignment := client.ask()) is not None:
                with suppress(LeaseLostError):
                    if isinstance(loaded, Outcome):  # not the fault of the hyper-parameters, so do not fail more trials
                        client.finish(assignment.lease, loaded)
                        break
                    _run_assignment(settings, client, assignment, loaded)
        return iter(())


def _load(settings: TrialSettings, shared: Shared[Data], blocks: Iterator[Block]) -> Data | Outcome:
    """The data, or the outcome of all trials if reading it has failed."""
    on_disk = dict(zip(settings.kept, blocks, strict=False))
    for _ in blocks:  # Spark ends a Python worker that leaves rows unread
        pass
    if on_disk:
        return RowsOnDisk(shared.value, on_disk, settings.labels)
    if settings.read is None:
        return shared.value
    read = _ReadData(settings.read, isinstance(settings.objective, Fit))
    run = run_in_child if settings.in_child_processes else run_inline
    try:
        return run(read, lambda _: None, lambda: True, HEARTBEAT_SECONDS)
    except (ChildLostError, TypeError) as error:  # for example too large, or not picklable
        return Outcome(FAILED, error=f"{_READ_FAILED}: {error}", is_definition_error=True)


_READ_FAILED = "the function that reads the data failed"


@dataclass(frozen=True)
class _ReadData:
    """Reads the data with the user's function, which may use the backend, and so runs in a child process."""

    function: ByValue[Callable[[], Any]]
    checks: bool

    def __call__(self, ask: Any) -> Data | Outcome:
        try:
            data = self.function.fresh()()
            return fit_data(data) if self.checks else data
        except (Exception, SystemExit) as error:
            message = f"{_READ_FAILED}: {type(error).__name__}: {error}"
            return Outcome(FAILED, error=message, traceback=traceback.format_exc(), is_definition_error=True)


def _run_assignment(settings: TrialSettings, client: SearchClient, assignment: Assignment, data: Data) -> None:
    """Run a trial and report its result."""
    lease = assignment.lease

    def trial(ask: Callable[[tuple[Any, Any]], Any]) -> Outcome:
        params = decode(assignment.params, settings.objects.fresh())
        if params is None:
            params = HyperParameters({}, lambda label, distribution: _defined(ask((label, distribution))))
        (sign, *_), count = settings.metrics.values(), len(settings.metrics)
        return run_trial(settings.objective, params, data, seed, lambda epoch, value: ask((epoch, value)), sign, count)

    if settings.in_child_processes and not device.is_uninitialized():
        raise ClusterError(
            "an object in the data or the space used the Keras backend in a worker process before its first trial, so the "
            "worker cannot fork processes for trials. Give NumPy arrays, or a function that reads the data."
        )
    seed = (settings.seed * 1_000_003 + assignment.number) % 2**32
    run = run_in_child if settings.in_child_processes else run_inline
    try:
        outcome = run(
            trial,
            lambda request: _answer(client, lease, *request),
            lambda: client.renew(lease) == CONTINUE,
            HEARTBEAT_SECONDS,
        )
    except ChildStoppedError:
        outcome = Outcome(STOPPED)
    except ChildLostError as error:
        client.release(lease, str(error))
        return
    client.finish(lease, outcome)


def _answer(client: SearchClient, lease: int, epoch_or_label: int | str, value: Any) -> Any:
    """Answer a trial that has reported an epoch, or defines a hyper-parameter."""
    if isinstance(epoch_or_label, int):
        return client.report(lease, epoch_or_label, value)
    try:
        return client.suggest(lease, epoch_or_label, value), ""
    except ConfigurationError as error:
        return None, str(error)


def _defined(answer: tuple[Any, str]) -> Any:
    value, error = answer
    if error:
        raise SearchDefinitionError(error)
    return value


@interrupts_here()
def supervise(
    run: Callable[[SearchTask], Results[None]],
    task: SearchTask,
    ledger: TrialLedger,
    start: Callable[[Callable[[], Any]], Running[Any]],
    tick: Callable[[], None],
) -> None:
    """Run workers from the driver until the search is over.

    Args:
        run: Runs the task of each worker; see `Dataset.run`.
        task: The task of the workers.
        ledger: The trials.
        start: Runs a function in a new thread.
        tick: Called every `TICK_SECONDS` and at the end.

    Raises:
        SparkKerasError: The search failed, or Spark has no workers for it.
    """
    failed_jobs = 0
    while not ledger.is_over:
        ended = len(ledger.finished)
        running = start(run(task).collect)
        try:
            error = _wait_for(running, ledger, tick)
        except BaseException:
            ledger.stop("it was interrupted")
            try:
                _watch(running, ledger, lambda: None)
            finally:
                running.cancel()
                ledger.end_running()
            raise
        if error is not None:
            failed_jobs = 0 if len(ledger.finished) > ended else failed_jobs + 1
            if failed_jobs > MAX_FAILED_JOBS or not _is_lost(error):
                ledger.stop(f"{type(error).__name__}: {str(error).splitlines()[0]}")
                ledger.end_running()
                raise error
        if ledger.reason:
            ledger.end_running()
    tick()
    if ledger.failure is not None:
        raise ledger.failure


def _wait_for(running: Running[Any], ledger: TrialLedger, tick: Callable[[], None]) -> SparkKerasError | None:
    """Wait until a job has ended and its trials are saved; returns the error with which it ended before the search."""
    error = None
    _watch(running, ledger, tick)
    try:
        if not ledger.reason and not ledger.is_over:
            running.result()
    except SparkKerasError as raised:
        error = raised
    ledger.expire_all()
    while ledger.is_saving:
        time.sleep(TICK_SECONDS)
        tick()
    return error


def _watch(running: Running[Any], ledger: TrialLedger, tick: Callable[[], None]) -> None:
    """Wait for a job to end; cancel it if it is still running some time after the end of the search.

    The time during which workers upload models does not count.
    """
    seconds_left = SHUTDOWN_SECONDS
    while not running.done:
        time.sleep(TICK_SECONDS)
        ledger.check_limits()
        tick()
        if (ledger.reason or ledger.is_over) and not ledger.is_uploading:
            seconds_left = min(seconds_left, SHUTDOWN_SECONDS if ledger.running else IDLE_SECONDS) - TICK_SECONDS
        if seconds_left <= 0:
            running.cancel()
            with suppress(Exception):
                running.result()


def _is_lost(error: SparkKerasError) -> bool:
    """Whether a job failed because a worker was lost, not because its code raised an error."""
    return isinstance(error, DriverConnectionError) or (isinstance(error, WorkerError) and not error.worker_traceback)
