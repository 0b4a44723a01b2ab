"""Runs a function in a forked child process, which ends with it.

TensorFlow keeps the memory of a trained model until the process ends, even if the model is deleted. So a worker that trains
many models forks a child process for each. It forks after the import of the backend, which takes seconds, and before the
backend has run anything, since the backend's threads do not exist in the child.

Child and worker communicate through a pipe. The worker waits on it and sends heartbeats to the driver meanwhile, so it has
no threads, and forking is safe. A child dies with its worker.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import connection, get_context
from typing import Any, TypeVar

from sparkkeras.worker.processes import close_inherited_sockets, describe_exit, die_with_parent

T = TypeVar("T")
Answer = Callable[[Any], Any]
Work = Callable[[Answer], T]
"""The function to run; its argument is a function that sends a request to the worker and waits for the reply."""

STOP_SECONDS = 10.0
"""The time that a child has to stop after the request, before the worker kills it."""


class ChildLostError(Exception):
    """The child died without a result; the message says how."""


class StopWork(BaseException):
    """Raised by a signal handler in the child, at an arbitrary place of its work, when it should stop."""


class ChildStoppedError(Exception):
    """The child was asked to stop, and has no result."""


def run_in_child(work: Work[T], answer: Answer, heartbeat: Callable[[], bool], interval: float) -> T:
    """Run a function in a forked child process. Its result, its requests and their replies are pickled.

    Args:
        work: The function. An exception that it raises is raised here; it must be picklable.
        answer: Returns the reply to a request of the child.
        heartbeat: Called when the child has sent nothing for ``interval`` seconds; returns whether it may continue. If
            not, `StopWork` is raised in the child, and it has `STOP_SECONDS` to end.
        interval: Seconds between two heartbeats.

    Raises:
        ChildLostError: The child was killed, or ended its process itself.
        ChildStoppedError: The child was asked to stop, and ended without a result or was killed.
    """
    context = get_context("fork")
    worker_end, child_end = context.Pipe()
    child = context.Process(target=_main, args=(work, worker_end, child_end, os.getpid()), name="sparkkeras-trial")
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # until the child has installed its handler
    try:
        child.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
    assert child.pid is not None
    child_end.close()
    seconds_left = STOP_SECONDS
    try:
        while True:
            is_silent = not connection.wait([worker_end, child.sentinel], interval)
            # A process that outlives the child inherits its ends of pipe and sentinel, so these may not show its death.
            if is_silent and child.is_alive():
                if not heartbeat():
                    os.kill(child.pid, signal.SIGTERM)
                    seconds_left -= interval
                if seconds_left <= 0:
                    raise ChildStoppedError
                continue
            try:
                if not worker_end.poll():
                    raise EOFError
                kind, payload = worker_end.recv()
            except (EOFError, OSError) as error:
                child.join()
                raise ChildLostError(describe_exit(child.exitcode)) from error
            if kind == "done":
                result: T = payload
                return result
            if kind == "raised" and isinstance(payload, StopWork):
                raise ChildStoppedError if seconds_left < STOP_SECONDS else ChildLostError(describe_exit(-signal.SIGTERM))
            if kind == "raised":
                raise payload
            reply = answer(payload)
            with suppress(ConnectionError):  # the child may have died meanwhile, which the next iteration notices
                worker_end.send(reply)
    finally:
        worker_end.close()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)  # including processes that the child started and left running
        child.kill()
        child.join()
        child.close()


def run_inline(work: Work[T], answer: Answer, heartbeat: Callable[[], bool], interval: float) -> T:
    """The in-memory implementation of `run_in_child`: runs in this process, without heartbeats."""
    return work(answer)


def _main(work: Work[Any], worker_end: connection.Connection, pipe: connection.Connection, parent: int) -> None:
    """The main function of the child."""
    worker_end.close()
    os.setpgid(0, 0)
    die_with_parent(parent)
    close_inherited_sockets(pipe.fileno())
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
        message = ("raised", _picklable(error))
    for stream in (sys.stdout, sys.stderr):  # before the last message, since the worker waits for nothing after it
        with suppress(Exception):
            stream.flush()
    with suppress(ConnectionError):
        try:
            pipe.send(message)
        except ConnectionError:
            raise
        except Exception as error:  # pickling failed
            pipe.send(
                ("raised", TypeError(f"the result of the child process cannot be pickled: {type(error).__name__}: {error}"))
            )
    os._exit(0)  # without waiting for threads that the user's code left running


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


def _picklable(error: BaseException) -> BaseException:
    """The error, or a TypeError that describes it if it cannot be pickled and unpickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception as why:
        return TypeError(
            f"the child process raised an error that cannot be pickled ({why}): {type(error).__name__}: {error}"
        )
    return error
