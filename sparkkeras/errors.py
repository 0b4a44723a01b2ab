"""The exceptions that sparkkeras raises.

::

    SparkKerasError
    ├── ConfigurationError (ValueError)          an argument is out of range, or does not fit another
    │   └── UnknownArgumentError (TypeError)     an argument that nobody takes
    ├── ModelError (ValueError)                  the model cannot be trained, shipped or loaded
    │   └── CustomObjectError                    its custom code would load as something else, or not at all
    ├── DataError (ValueError)                   rows that are missing, ragged, not finite, or do not fit the model
    ├── DivergenceError (ArithmeticError)        training left the finite numbers
    ├── ClusterError (RuntimeError)              Spark is stopped, or its workers lack something
    │   ├── DriverConnectionError                workers cannot reach a server on the driver, or it rejects their calls
    │   └── WorkerError                          a worker failed; carries its own traceback
    ├── SearchError (RuntimeError)               a search for hyper-parameters that found nothing
    └── StorageError (OSError)                   a path that cannot be written or read

Every message says what came, what was expected, and what to do about it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SparkKerasError(Exception):
    """The root of all errors that sparkkeras raises on purpose."""


class ConfigurationError(SparkKerasError, ValueError):
    """An argument is out of range, unknown, or does not fit another one."""


class UnknownArgumentError(ConfigurationError, TypeError):
    """An argument that the called function does not take."""


class ModelError(SparkKerasError, ValueError):
    """The model cannot be trained, shipped to workers, or loaded."""


class CustomObjectError(ModelError):
    """Custom code of a model that would be lost, or load as something else."""


class DataError(SparkKerasError, ValueError):
    """Data that is empty, ragged, not finite, or does not fit the model."""


class DivergenceError(SparkKerasError, ArithmeticError):
    """Training produced a weight or a loss that is not finite."""


class ClusterError(SparkKerasError, RuntimeError):
    """Spark is not running, or its workers cannot do what is asked of them."""


class DriverConnectionError(ClusterError):
    """Workers cannot reach the server on the driver (parameter server or search), or it rejects their calls."""


class WorkerError(ClusterError):
    """A task failed on a worker.

    Attributes:
        worker_traceback: The Python traceback of the worker, or an empty string where Spark has none.
    """

    def __init__(self, message: str, worker_traceback: str = "") -> None:
        super().__init__(message)
        self.worker_traceback = worker_traceback


class SearchError(SparkKerasError, RuntimeError):
    """A search for hyper-parameters in which no trial succeeded, or too many failed."""


class StorageError(SparkKerasError, OSError):
    """A path that cannot be written or read."""


def known_names(given: object, known: Iterable[object]) -> str:
    """The end of an error message about an unknown name or value: what is known, and what was perhaps meant."""
    names = sorted(known, key=str)
    return f"Known: {', '.join(repr(name) for name in names)}.{nearest_name(given, names)}"


def nearest_name(given: object, known: Iterable[object]) -> str:
    """What was perhaps meant by an unknown name, as the end of an error message; empty where nothing comes near."""
    names = {str(name): name for name in sorted(known, key=str)}
    same = [name for name in names if name.lower() == str(given).lower()]
    longer = [name for name in names if len(str(given)) >= _SHORTEST and name.startswith(str(given))]
    close = same or (longer if len(longer) == 1 else []) or difflib.get_close_matches(str(given), names, n=1)
    return f" Did you mean {names[close[0]]!r}?" if close else ""


_SHORTEST = 3
"""From how many letters on the beginning of a name stands for it."""
