"""Tasks of Spark Connect in processes of their own.

All queries of a session share the Python workers, which may have used the backend. A task that forks, as those of a search,
needs a process that has not.
"""

from __future__ import annotations

import pickle
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkkeras.data.dataset import TaskContext
from sparkkeras.errors import WorkerError
from sparkkeras.runner.processes import spawn
from sparkkeras.sources.tasks import task_context
from sparkkeras.spark.connect import FILES, TaskFailure, session_files
from sparkkeras.worker import device

_READ_SECONDS = 0.5
_ATTEMPTS = 4


@dataclass(frozen=True)
class InNewPython:
    """Runs a task without rows in a new Python, and yields its results, or a `TaskFailure`.

    Attributes:
        payload: The pickled task, which is unpickled there: its classes may import Keras.
        cores: The CPU cores of a task.
        environment: Environment variables of the process: the backend of the client.
    """

    payload: bytes
    cores: int
    environment: Mapping[str, str]

    def __call__(self, partition: int, values: Iterable[Any]) -> Iterator[Any]:
        """Run the task of a partition. What it prints goes to the log of this worker."""
        for _ in values:
            pass
        for _ in range(_ATTEMPTS):  # Spark would have to be configured to run the task again
            try:
                found, ended = self._run()
            except OSError as error:
                found, ended = None, str(error)
            if found is not None:
                yield from found
                return
        yield TaskFailure(WorkerError.__name__, f"the Python process of a task was lost {_ATTEMPTS} times: {ended}.", "")

    def _run(self) -> tuple[list[Any] | None, str]:
        """The results of a new process, ``None`` if it was lost, and how it has ended."""
        with tempfile.TemporaryDirectory(prefix="sparkkeras-") as folder:
            results = Path(folder) / "results"
            main = _Main(self.payload, task_context(cores=self.cores), results)
            process = spawn(main, {**self.environment, FILES: session_files()})
            try:
                while process.poll() is None and not process.hangs:
                    _log(process.read(_READ_SECONDS))
                _log(process.drain())
                ended = process.how()
            finally:
                process.close()
            return (pickle.loads(results.read_bytes()) if results.exists() else None), ended


@dataclass(frozen=True)
class _Main:
    """The main function of the new Python."""

    payload: bytes
    context: TaskContext
    results: Path

    def __call__(self) -> int:
        found: list[Any]
        try:
            device.prepare(self.context.cores, self.context.accelerators, shared_folder=session_files())
            found = list(pickle.loads(self.payload)(self.context, iter(())))
        except Exception as error:
            found = [TaskFailure.of(error)]
        draft = self.results.with_suffix(".draft")
        draft.write_bytes(pickle.dumps(found))
        draft.replace(self.results)
        return 0


def _log(data: bytes) -> None:
    with suppress(Exception):
        sys.stderr.write(data.decode(errors="replace"))
