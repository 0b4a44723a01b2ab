"""Which fit of this process the checkpoints of a folder are of, so that fits of a search do not continue one another."""

from __future__ import annotations

import hashlib
import inspect
import json
import types
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import keras

from sparkkeras.checkpoints.store import CheckpointStore
from sparkkeras.errors import ConfigurationError, CustomObjectError, StorageError, TrainingInterruptedError
from sparkkeras.modeling.custom_code import ByValue
from sparkkeras.modeling.description import description
from sparkkeras.sources.frame import is_frame

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_MAY_DIFFER = ("checkpoint", "resume", "epochs", "verbose")

_fits: dict[str, str] = {}  # digests of fits, by the path of their checkpoints


@contextmanager
def own_checkpoints(path: str, dataset: DataFrame, params: Mapping[str, Any]) -> Iterator[None]:
    """Fit with checkpoints of this fit only: the next one of a search must not continue where this one has ended.

    A fit is recorded when it has ended, or failed after it has written a checkpoint. One that was interrupted is not: its
    search ends with it, and what continues it may have models and DataFrames that were created again.

    Args:
        path: The folder of the checkpoints.
        dataset: The data.
        params: The values of all params, by name.

    Raises:
        ConfigurationError: An earlier fit of this process has written them, on other data or with other params.
    """
    newest, fit = _newest(path), _digest(dataset, params)
    if newest is not None and _fits.get(path, fit) != fit:
        raise ConfigurationError(
            f"the checkpoints in {path!r} are of an earlier fit of this process on other data or with other params. In "
            "CrossValidator, TrainValidationSplit and fit(df, [params, ...]), one fit would continue where another has "
            "ended: leave checkpoint out there. Elsewhere, use another path, or continue in a new process."
        )
    try:
        yield
    except (KeyboardInterrupt, TrainingInterruptedError):
        raise
    except Exception:
        if _newest(path) != newest:
            _fits[path] = fit
        raise
    _fits[path] = fit


def _newest(path: str) -> str | None:
    """The name of the newest checkpoint; ``None`` without one."""
    with suppress(StorageError):  # which the fit itself raises
        return next(iter(CheckpointStore(path).names()), None)
    return None


def _digest(dataset: DataFrame, params: Mapping[str, Any]) -> str:
    """What identifies a fit, without a reference to its data and models."""
    compared = {name: _shown(value) for name, value in params.items() if name not in _MAY_DIFFER}
    return hashlib.sha256(json.dumps([_data(dataset), compared], sort_keys=True).encode()).hexdigest()


def _data(frame: DataFrame) -> str:
    """What identifies a DataFrame."""
    try:
        return str(frame.semanticHash())
    except Exception:  # as for a DataFrame of a session that has ended; then it counts as another one
        return uuid.uuid4().hex


def _shown(value: Any) -> Any:
    """A value of a param for JSON; the same for models, callbacks and functions that are created again in the same way."""
    if isinstance(value, keras.Model):
        return description(value)
    if is_frame(value):
        return _data(value)
    if isinstance(value, keras.callbacks.Callback):  # its settings; other attributes change during training
        names = inspect.signature(type(value).__init__).parameters
        settings = {name: _shown(setting) for name, setting in vars(value).items() if name in names}
        if "min_delta" in settings:
            settings["min_delta"] = str(abs(value.min_delta))  # Keras changes its sign
        return [type(value).__qualname__, settings]
    if isinstance(value, Mapping):
        return {str(key): _shown(member) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [_shown(member) for member in value]
    if isinstance(value, types.FunctionType):
        with suppress(CustomObjectError):
            return hashlib.sha256(ByValue.dump(value, "a function").payload).hexdigest()
    return repr(value)
