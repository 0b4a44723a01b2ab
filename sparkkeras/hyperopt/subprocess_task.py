"""A piece of work in a process of its own, which ends with it.

TensorFlow keeps the memory of a model that was trained for as long as the process lives, whatever one deletes. So a worker
that trains many forks a child for each, after the backend's import, which takes seconds, and before the backend has run
anything, since its threads would not come along.

Child and worker talk through a pipe. The worker waits in it, and gives signs of life meanwhile, so it has no threads, and
forking is safe. A child dies with its worker.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import connection, get_context
from typing import Any, TypeVar

T = TypeVar("T")
Answer = Callable[[Any], Any]
Work = Callable[[Answer], T]
"""What is to be done; it is given a function that asks the worker, and waits for its answer."""

STOP_SECONDS = 10.0
"""How long a child that shall stop may take to do so."""

_PR_SET_PDEATHSIG = 1


class ChildLostError(Exception):
    """The child died without a word; the message says how."""


class StopWork(BaseException):
    """Raised within a child's work when it shall stop, wherever it is."""


class ChildStoppedError(Exception):
    """The child was ended, since it did not stop by itself."""


def run_in_child(work: Work[T], answer: Answer, beat: Callable[[], bool], every: float) -> T:
    """Do a piece of work in a forked child; what it gives travels by pickle, and so do questions and answers.

    Args:
        work: What to do. What it raises is raised here; it must be able to be pickled.
        answer: Answers what the child asks.
        beat: Called when a child has been silent for a while; says whether it shall go on. In one that shall not,
            `StopWork` is raised, and it has `STOP_SECONDS` to end.
        every: Seconds between two beats.

    Raises:
        ChildLostError: The child was killed, or ended its process itself.
        ChildStoppedError: It had to be ended.
    """
    context = get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=_main, args=(work, ours, theirs, os.getpid()), name="sparkkeras-trial")
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # until the child knows what to do with it
    try:
        child.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
    assert child.pid is not None
    theirs.close()
    patience = STOP_SECONDS
    try:
        while True:
            is_silent = not connection.wait([ours, child.sentinel], every)
            # A process that the child left behind holds its ends of both, so its death does not show there.
            if is_silent and child.is_alive():
                if not beat():
                    os.kill(child.pid, signal.SIGTERM)
                    patience -= every
                if patience <= 0:
                    raise ChildStoppedError
                continue
            try:
                if not ours.poll():
                    raise EOFError
                kind, told = ours.recv()
            except (EOFError, OSError) as error:
                child.join()
                raise ChildLostError(_cause(child.exitcode)) from error
            if kind == "done":
                done: T = told
                return done
            if kind == "raised" and isinstance(told, StopWork):
                raise ChildStoppedError if patience < STOP_SECONDS else ChildLostError(_cause(-signal.SIGTERM))
            if kind == "raised":
                raise told
            said = answer(told)
            with suppress(ConnectionError):  # it may have died meanwhile, which shows next
                ours.send(said)
    finally:
        ours.close()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)  # with what it has begun itself and left running
        child.kill()
        child.join()
        child.close()


def run_here(work: Work[T], answer: Answer, beat: Callable[[], bool], every: float) -> T:
    """The plain twin of `run_in_child`: in this process, which gives no sign of life meanwhile."""
    return work(answer)


def _main(work: Work[Any], theirs_no_more: connection.Connection, pipe: connection.Connection, parent: int) -> None:
    theirs_no_more.close()
    os.setpgid(0, 0)
    _die_with(parent)
    _let_go_of_sockets(pipe.fileno())
    os.register_at_fork(after_in_child=pipe.close)  # else the worker would not see this process's end
    stops = _Stops()

    def ask(question: Any) -> Any:
        with stops.deferred():
            pipe.send(("asks", question))
            return pipe.recv()

    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        message = ("done", work(ask))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    except BaseException as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        message = ("raised", _portable(error))
    for stream in (sys.stdout, sys.stderr):  # before the last word, since the worker waits for nothing behind it
        with suppress(Exception):
            stream.flush()
    with suppress(ConnectionError):
        try:
            pipe.send(message)
        except ConnectionError:
            raise
        except Exception as error:  # it cannot be pickled
            pipe.send(("raised", TypeError(f"what came of it cannot leave its process: {type(error).__name__}: {error}")))
    os._exit(0)  # what the person's code left running is not waited for


class _Stops:
    """Raises `StopWork` when the worker's signal comes, once, and not in the middle of a message."""

    def __init__(self) -> None:
        self._deferred = self._wanted = self._raised = False
        signal.signal(signal.SIGTERM, self._signalled)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Hold the signal back."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False
        self._signalled_if_wanted()

    def _signalled(self, *_: object) -> None:
        self._wanted = True
        if not self._deferred:
            self._signalled_if_wanted()

    def _signalled_if_wanted(self) -> None:
        if self._wanted and not self._raised:
            self._raised = True
            raise StopWork


def _portable(error: BaseException) -> BaseException:
    """The error, or one that says what it was, where it can be pickled and not be read again."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception as why:
        return TypeError(f"what it raised cannot leave its process ({why}): {type(error).__name__}: {error}")
    return error


def _die_with(parent: int) -> None:
    """Have the system end this process when its parent ends, however that comes, where it can (Linux)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _let_go_of_sockets(own: int) -> None:
    """Close the parent's connections, which Spark and the driver would otherwise believe alive after its death."""
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - numbers, not paths
            with suppress(OSError):
                number = int(name)
                if number > 2 and number != own and stat.S_ISSOCK(os.fstat(number).st_mode):
                    os.close(number)


def _cause(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        known = {each.value: each.name for each in signal.Signals}
        name = known.get(-exitcode, f"signal {-exitcode}")
        return f"its process was killed by {name}" + (" (perhaps for its memory)" if name == "SIGKILL" else "")
    return f"its process ended with the exit code {exitcode}"
