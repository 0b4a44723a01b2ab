"""Runs a function in a child process, which ends with it.

TensorFlow keeps the memory of a trained model until the process ends, even if the model is deleted. So a worker that trains
many models forks a child process for each. It forks after the import of the backend, which takes seconds, and before the
backend has run anything, since the backend's threads do not exist in the child. A worker that may have done so starts a new
Python first (`InNewPython`).

Child and worker communicate through a pipe. The worker waits on it and sends heartbeats to the driver meanwhile, so it has
no threads, and forking is safe. A child dies with its worker.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, Pipe
from types import MappingProxyType
from typing import Any, TypeVar

from sparkkeras.data.dataset import Task, TaskContext
from sparkkeras.data.values import DelayedValue
from sparkkeras.errors import WorkerError
from sparkkeras.sources.tasks import task_context
from sparkkeras.spark.connect import FILES, session_files
from sparkkeras.spark.job_errors import TaskFailure
from sparkkeras.worker import device
from sparkkeras.worker.processes import Child, Start, describe_exit, flush, fork, picklable, spawn

T = TypeVar("T")
Answer = Callable[[Any], Any]
Work = Callable[[Answer], T]
"""The function to run; its argument is a function that sends a request to the worker and waits for the reply."""

STOP_SECONDS = 10.0
"""The time that a child has to stop after the request, before the worker kills it."""

_ATTEMPTS = 4
_READ_SECONDS = 0.5


class ChildLostError(Exception):
    """The child died without a result; the message says how."""


class StopWork(BaseException):
    """Raised by a signal handler in the child, at an arbitrary place of its work, when it should stop."""


class ChildStoppedError(Exception):
    """The child was asked to stop, and has no result."""


def run_in_child(
    work: Work[T],
    answer: Answer,
    heartbeat: Callable[[], bool],
    interval: float,
    start: Start = fork,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> T:
    """Run a function in a child process. Its result, its requests and their replies are pickled.

    Args:
        work: The function. An exception that it raises is raised here; it must be picklable.
        answer: Returns the reply to a request of the child.
        heartbeat: Called when the child has sent nothing for ``interval`` seconds; returns whether it may continue. If
            not, `StopWork` is raised in the child, and it has `STOP_SECONDS` to end.
        interval: Seconds between two heartbeats.
        start: Starts the child; `spawn` pickles the function.
        environment: Environment variables of the child.

    Raises:
        ChildLostError: The child was killed or stopped by a signal, or ended its process itself.
        ChildStoppedError: The child was asked to stop, and ended without a result or was killed.
    """
    worker_end, child_end = Pipe()
    with worker_end:
        previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # until a fork has installed its handler
        try:
            with child_end:
                number = child_end.fileno()
                child = Child(start, partial(_main, work, number), environment, number)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
        try:
            result: T = _result(child, worker_end, answer, heartbeat, interval)
            return result
        finally:
            child.close(0)  # including processes that the child started and left running


def _result(child: Child, pipe: Connection, answer: Answer, heartbeat: Callable[[], bool], interval: float) -> Any:
    """Wait for the result of a child; see `run_in_child`."""
    seconds_left = STOP_SECONDS
    while True:
        # A process that outlives the child inherits its end of the pipe, so this may not show its death.
        if not pipe.poll(interval) and child.poll() is None and not child.hangs:
            if not heartbeat():
                os.kill(child.pid, signal.SIGTERM)
                seconds_left -= interval
            if seconds_left <= 0:
                raise ChildStoppedError
            continue
        try:
            if not pipe.poll():
                raise EOFError
            kind, payload = pipe.recv()
        except (EOFError, OSError) as error:
            raise ChildLostError(child.how()) from error
        if kind == "done":
            return payload
        if kind == "raised" and isinstance(payload, StopWork):
            raise ChildStoppedError if seconds_left < STOP_SECONDS else ChildLostError(describe_exit(-signal.SIGTERM))
        if kind == "raised":
            raise payload
        reply = answer(payload)
        with suppress(ConnectionError):  # the child may have died meanwhile, which the next iteration notices
            pipe.send(reply)


def run_inline(work: Work[T], answer: Answer, heartbeat: Callable[[], bool], interval: float) -> T:
    """The in-memory implementation of `run_in_child`: runs in this process, without heartbeats."""
    return work(answer)


def _main(work: Work[Any], number: int) -> int:
    """The main function of the child, given the file descriptor of its end of the pipe."""
    pipe = Connection(number)
    os.set_inheritable(number, False)
    os.register_at_fork(after_in_child=pipe.close)  # else the worker would not notice the end of this process
    stop_signal = _StopSignal()

    def ask(request: Any) -> Any:
        with stop_signal.deferred():
            pipe.send(("asks", request))
            return pipe.recv()

    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        message = ("done", work(ask))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    except BaseException as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        message = ("raised", picklable(error))
    flush()  # before the last message, since the worker waits for nothing after it
    with suppress(ConnectionError):
        try:
            pipe.send(message)
        except ConnectionError:
            raise
        except Exception as error:  # pickling failed
            pipe.send(
                ("raised", TypeError(f"the result of the child process cannot be pickled: {type(error).__name__}: {error}"))
            )
    return 0


class _StopSignal:
    """Raises `StopWork` once when the worker's signal arrives, but not in the middle of a message."""

    def __init__(self) -> None:
        self._deferred = self._requested = self._raised = False
        signal.signal(signal.SIGTERM, self._on_signal)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Defer the signal to the end of this context."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False
        self._raise_if_requested()

    def _on_signal(self, *_: object) -> None:
        self._requested = True
        if not self._deferred:
            self._raise_if_requested()

    def _raise_if_requested(self) -> None:
        if self._requested and not self._raised:
            self._raised = True
            raise StopWork


@dataclass(frozen=True)
class InNewPython:
    """Runs a task without rows in a new Python, and yields its results, or a `TaskFailure`.

    With Spark Connect, all queries of a session share the Python workers, which may have used the backend. The task of a
    search forks, so it needs a process that has not.

    Attributes:
        task: The task, which is unpickled there: its classes may import Keras.
        cores: The CPU cores of a task.
        environment: Environment variables of the process: the backend of the client.
    """

    task: DelayedValue[Task[Any]]
    cores: int
    environment: Mapping[str, str]

    def __call__(self, partition: int, values: Iterable[Any]) -> Iterator[Any]:
        """Run the task of a partition. What it prints goes to the log of this worker."""
        for _ in values:
            pass
        yield from self._results()

    def _results(self) -> list[Any]:
        work = partial(_run_task, self.task, task_context(cores=self.cores))
        environment = {**self.environment, FILES: session_files()}
        ended: Exception | None = None
        for _ in range(_ATTEMPTS):  # Spark would have to be configured to run the task again
            try:
                return run_in_child(work, lambda _: None, lambda: True, _READ_SECONDS, spawn, environment)
            except (ChildLostError, OSError) as error:
                ended = error
        return [TaskFailure(WorkerError.__name__, f"the Python process of a task was lost {_ATTEMPTS} times: {ended}.", "")]


def _run_task(task: DelayedValue[Task[Any]], context: TaskContext, ask: Answer) -> list[Any]:
    """Run a task in the new Python."""
    try:
        device.prepare(context.cores, context.accelerators, shared_folder=session_files())
        return list(task.value(context, iter(())))
    except BaseException as error:  # also the exit of a user's code
        return [TaskFailure.of(error)]
