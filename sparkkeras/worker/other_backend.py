"""Runs tasks with another Keras backend than the one of this process, in a child process that is kept for the next ones.

A process has one backend. Classic Spark has Python workers for each environment, and so for each backend; with Spark Connect
all queries share the workers. The driver compares what backends predict.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import Any

from sparkkeras.data.dataset import TaskContext
from sparkkeras.data.values import DelayedValue
from sparkkeras.errors import WorkerError
from sparkkeras.worker import device
from sparkkeras.worker.processes import Child, picklable, spawn

_Task = Callable[[TaskContext, Iterator[Any]], Iterator[Any]]


class OtherBackend:
    """A child process with another backend.

    Args:
        environment: Its environment variables besides those of this process, with the backend (``KERAS_BACKEND``).
        shared_folder: See `sparkkeras.worker.device.prepare`.
    """

    def __init__(self, environment: Mapping[str, str], shared_folder: str | None = None) -> None:
        self.environment = dict(environment)
        self._connection, theirs = Pipe()
        with theirs:
            main = _Main(theirs.fileno(), shared_folder)
            self._child = Child(spawn, main, {**self.environment, "SPARKKERAS_WORKER": "1"}, theirs.fileno())

    def run(self, task: DelayedValue[_Task], context: TaskContext, values: Iterator[Any]) -> Iterator[Any]:
        """Run a task, which gets each value when it asks for it, and yield its results.

        Raises:
            WorkerError: The process ended.
            Exception: The task raised it.
        """
        try:
            self._connection.send((task, context))
            while True:
                kind, result = self._connection.recv()
                if kind == _WANTS:
                    self._connection.send(next(((value,) for value in values), None))
                elif kind == _RESULT:
                    yield result
                elif kind == _ERROR:
                    raise result
                else:
                    return
        except (EOFError, OSError) as error:
            raise WorkerError(
                f"the process that scores with the backend {self.environment['KERAS_BACKEND']!r} was lost: "
                f"{self._child.how()}."
            ) from error

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._child.close()


_WANTS, _RESULT, _ERROR, _END = range(4)
"""What the child sends: that it wants a value, a result, an error, or that the task has ended."""

_idle: list[OtherBackend] = []
"""The children of this process that run no task."""


def run_in_child(
    task: DelayedValue[_Task],
    context: TaskContext,
    values: Iterator[Any],
    environment: Mapping[str, str],
    folder: str | None,
) -> Iterator[Any]:
    """Run a task in a child that has this environment, an idle one if there is one; see `OtherBackend`."""
    fitting = [each for each in _idle if each.environment == environment]
    child = fitting[0] if fitting else OtherBackend(environment, folder)
    if fitting:
        _idle.remove(child)
    try:
        yield from child.run(task, context, values)
    except BaseException:  # also the end of a query that needs no more rows, in the middle of the task
        child.close()
        raise
    _idle.append(child)


@dataclass(frozen=True)
class _Main:
    """What the child does: it runs one task after the other, until its parent ends."""

    descriptor: int
    shared_folder: str | None

    def __call__(self) -> int:
        with Connection(self.descriptor) as connection:
            while True:
                try:
                    payload = connection.recv_bytes()
                except EOFError:
                    return 0
                try:
                    task, context = pickle.loads(payload)
                    device.prepare(context.cores, context.accelerators, (), self.shared_folder)
                    for result in task.value(context, _received(connection)):
                        connection.send((_RESULT, result))
                except Exception as error:
                    connection.send((_ERROR, picklable(error)))
                else:
                    connection.send((_END, None))


def _received(connection: Connection) -> Iterator[Any]:
    """The values of a task."""
    while True:
        connection.send((_WANTS, None))
        found = connection.recv()
        if found is None:
            return
        yield found[0]
