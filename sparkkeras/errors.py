"""The exceptions that sparkkeras raises.

::

    SparkKerasError
    ├── ConfigurationError (ValueError)          an argument is out of range or conflicts with another one
    │   └── UnknownArgumentError (TypeError)     the called function does not take this argument
    ├── ModelError (ValueError)                  the model cannot be trained, serialized or loaded
    │   └── CustomObjectError                    custom code of the model would be lost or load as something else
    ├── DataError (ValueError)                   rows are missing, ragged, not finite, or do not fit the model
    ├── DivergenceError (ArithmeticError)        a weight or a loss became NaN or infinite
    ├── ClusterError (RuntimeError)              Spark is stopped, or its workers lack a requirement
    │   ├── DriverConnectionError                workers cannot reach a server on the driver, or it rejects their requests
    │   └── WorkerError                          a task failed on a worker; has the worker's traceback
    │       └── WorkerTimeoutError (TimeoutError)  a run of a function exceeded its timeout
    ├── TrainingInterruptedError (RuntimeError)  the process was asked to end (SIGTERM), and a checkpoint was written
    ├── SearchError (RuntimeError)               a hyper-parameter search found no model
    └── StorageError (OSError)                   a path cannot be read or written

Every message says what was received, what was expected, and how to fix it.
"""

from __future__ import annotations

import difflib
import functools
import sys
import warnings
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, Concatenate, ParamSpec

P = ParamSpec("P")


class SparkKerasError(Exception):
    """The base class of all errors that sparkkeras raises."""


class ConfigurationError(SparkKerasError, ValueError):
    """An argument is out of range, unknown, or conflicts with another one."""


class UnknownArgumentError(ConfigurationError, TypeError):
    """The called function does not take this argument."""


class ModelError(SparkKerasError, ValueError):
    """The model cannot be trained, sent to workers, or loaded."""


class CustomObjectError(ModelError):
    """Custom code of the model would be lost, or load as something else."""


class DataError(SparkKerasError, ValueError):
    """The data is empty, ragged, not finite, or does not fit the model."""


class DivergenceError(SparkKerasError, ArithmeticError):
    """Training produced a weight or a loss that is NaN or infinite."""


class ClusterError(SparkKerasError, RuntimeError):
    """Spark is not running, or its workers lack a requirement, such as a Python module."""


class DriverConnectionError(ClusterError):
    """Workers cannot reach the server on the driver (parameter server or search), or it rejects their requests."""


class WorkerError(ClusterError):
    """A task failed on a worker.

    Attributes:
        worker_traceback: The Python traceback of the worker; empty if Spark reports none.
    """

    def __init__(self, message: str, worker_traceback: str = "") -> None:
        super().__init__(message)
        self.worker_traceback = worker_traceback


class WorkerTimeoutError(WorkerError, TimeoutError):
    """The ranks of a `SparkRunner` did not end within the timeout."""


class TrainingInterruptedError(SparkKerasError, RuntimeError):
    """The process was asked to end (SIGTERM) during training with checkpoints; the message says how to resume."""


class SearchError(SparkKerasError, RuntimeError):
    """In a hyper-parameter search no trial succeeded, or too many failed."""


class StorageError(SparkKerasError, OSError):
    """A path cannot be read or written."""


READER_NOTE = "Raised by the reader of worker "
"""The beginning of the note on exceptions that a user's function raises while it reads batches on a worker."""


def known_names(given: object, known: Iterable[object]) -> str:
    """The end of an error message about an unknown name or value: the known ones, and the closest match if there is one."""
    names = sorted(known, key=str)
    return f"Known: {', '.join(repr(name) for name in names) or 'none'}.{nearest_name(given, names)}"


def nearest_name(given: object, known: Iterable[object]) -> str:
    """The end of an error message that suggests the closest known name; empty if none is close."""
    names = {str(name): name for name in sorted(known, key=str)}
    same = [name for name in names if name.lower() == str(given).lower()]
    longer = [name for name in names if len(str(given)) >= _MIN_PREFIX and name.startswith(str(given))]
    close = same or (longer if len(longer) == 1 else []) or difflib.get_close_matches(str(given), names, n=1)
    return f" Did you mean {names[close[0]]!r}?" if close else ""


def counted(number: int, noun: str) -> str:
    """A number with its noun, in messages: ``1 batch``, ``2 batches``."""
    return f"{number} {noun}{'' if number == 1 else 'es' if noun.endswith(('s', 'tch')) else 's'}"


def warn(message: str) -> None:
    """Issue a UserWarning that points to the user's line: the innermost one outside of this package and of PySpark."""
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_USERS:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def guarded(method: Callable[Concatenate[Any, P], None]) -> Callable[Concatenate[Any, P], None]:
    """Run a method of what watches a run under its ``_lock``; its ``_warn`` gets errors, which must not end the run."""

    @functools.wraps(method)
    def guarded(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> None:
        with self._lock:  # events come from other threads than Keras's calls
            try:
                method(self, *args, **kwargs)
            except Exception as error:
                self._warn(error)

    return guarded


_NOT_THE_USERS = (__package__, "pyspark", "contextlib")
"""The packages whose code calls the functions that warn. With Python 3.12, ``skip_file_prefixes`` could replace them."""


_MIN_PREFIX = 3
"""The number of letters from which a prefix counts as a match."""
