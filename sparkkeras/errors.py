"""The exceptions that sparkkeras raises.

Every message says what was received, what was expected, and how to fix it. docs/troubleshooting.md has a section for each
class, which begins with its docstring.
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
    """The base class; it is not raised itself."""


class ConfigurationError(SparkKerasError, ValueError):
    """An argument is out of range, or does not fit another argument or the cluster."""


class UnknownArgumentError(ConfigurationError, TypeError):
    """The function has no argument of this name."""


class ModelError(SparkKerasError, ValueError):
    """The model cannot be trained, sent to the workers, or loaded."""


class CustomObjectError(ModelError):
    """Custom code of the model would be lost when it is sent to the workers, or load there as something else."""


class DataError(SparkKerasError, ValueError):
    """The rows are missing, of different lengths, not finite, of an unsupported type, or do not fit the model."""


class DivergenceError(SparkKerasError, ArithmeticError):
    """A loss or a weight became NaN or infinite."""


class ClusterError(SparkKerasError, RuntimeError):
    """Spark is stopped, or its workers lack something that they need, such as Keras."""


class DriverConnectionError(ClusterError):
    """Workers cannot reach a server on the driver, or it rejects their calls."""


class WorkerError(ClusterError):
    """A task failed as often as Spark tries it.

    Attributes:
        worker_traceback: The Python traceback of the worker; empty if Spark reports none.
    """

    def __init__(self, message: str, worker_traceback: str = "") -> None:
        super().__init__(message)
        self.worker_traceback = worker_traceback


class WorkerTimeoutError(WorkerError, TimeoutError):
    """The ranks of a `SparkRunner` did not end within ``timeout``, and were terminated."""


class TrainingInterruptedError(SparkKerasError, RuntimeError):
    """The process received a SIGTERM during training with checkpoints; a checkpoint was written."""


class SearchError(SparkKerasError, RuntimeError):
    """In a hyper-parameter search no trial succeeded, or too many failed."""


class StorageError(SparkKerasError, OSError):
    """A path cannot be read or written, or a disk is full."""


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
