"""Converters for params: each function takes a param's name and a value, and returns the value to store.

Each raises `ConfigurationError` for a value that the param does not accept, with what was received and what was expected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import keras
import numpy as np
from pyspark.sql import DataFrame

from sparkkeras import arguments
from sparkkeras.data.block import by_name, describe
from sparkkeras.errors import ConfigurationError, ModelError
from sparkkeras.sources.column_names import column_names
from sparkkeras.sources.frame import Columns, is_frame

Names = str | list[str] | dict[str, str]
"""The name of a new column: one for all outputs, or one for each output, in their order or by output name."""

TASKS = ("auto", "regression", "binary", "multiclass", "multilabel")
"""The values of the param ``task``."""


def choice(*known: Any) -> Callable[[str, Any], Any]:
    """One of the ``known`` values."""
    return partial(arguments.one_of, known=known)


def text(name: str, value: Any) -> str:
    """A name or path: a non-empty string."""
    if not isinstance(value, str) or not value:
        raise ConfigurationError(f"{name}={value!r}: expected a non-empty string.")
    return value


def positive(name: str, value: Any) -> float:
    """A finite number greater than 0."""
    if not arguments.is_number(value) or not 0 < value < math.inf:
        raise ConfigurationError(f"{name}={value!r}: expected a positive number.")
    return float(value)


def columns(name: str, value: Any) -> Columns:
    """One column, several, or ``{input or output: column(s)}``, perhaps nested."""
    if isinstance(value, Mapping):
        if value and all(isinstance(key, str) for key in value):
            return {key: columns(f"{name}[{key!r}]", each) for key, each in value.items()}
    elif isinstance(value, str):
        return text(name, value)
    return [text(name, each) for each in column_names(name, value)]


def names(name: str, value: Any) -> Names:
    """A name for a new column, a list with one for each output, or ``{output: name}``; an empty name omits the column."""
    found = by_name(value) if isinstance(value, Mapping) else value
    given = found.values() if isinstance(found, dict) else found if isinstance(found, (list, tuple)) else [found]
    if not all(isinstance(each, str) for each in given):
        raise ConfigurationError(
            f"{name} is {describe(value)}; expected a column name, a list with one for each output, or "
            "{output: column}. An empty name omits the column."
        )
    return found if isinstance(found, (dict, str)) else list(found)


def _thresholds(name: str, value: Any) -> list[float]:
    try:
        given = np.asarray(value.toArray() if hasattr(value, "toArray") else value)
    except ValueError:  # ragged
        given = np.empty(())
    numbers = given.ndim == 1 and len(given) > 1 and given.dtype.kind in "iuf" and np.isfinite(given).all()
    if not numbers or (given < 0).any() or (given == 0).sum() > 1:
        raise ConfigurationError(
            f"{name}={value!r}: expected a list with one threshold for each class, all greater than 0; one may be 0."
        )
    return [float(threshold) for threshold in given]


def _for_outputs(check: Callable[[str, Any], Any], name: str, value: Any) -> Any:
    """What a check makes of a value, or of each value in ``{output: value}``."""
    if isinstance(value, Mapping):
        return {output: check(f"{name}[{output!r}]", each) for output, each in by_name(value).items()}
    return check(name, value)


task = partial(_for_outputs, choice(*TASKS))
"""One of `TASKS`, or ``{output: task}``."""

thresholds = partial(_for_outputs, _thresholds)
"""One threshold for each class, or ``{output: thresholds}``: none below 0, and at most one of them 0."""


def keras_model(name: str, value: Any) -> keras.Model:
    """A Keras model. Raises `ModelError` for other values."""
    if not isinstance(value, keras.Model):
        raise ModelError(f"{name} is {describe(value)}; expected a keras.Model.")
    return value


def data_frame(name: str, value: Any) -> DataFrame:
    """A Spark DataFrame."""
    if not is_frame(value):
        raise ConfigurationError(
            f"{name} is {describe(value)}; expected a Spark DataFrame with the columns of the training data. From arrays, "
            "sparkkeras.to_data_frame(spark, x, y) creates one."
        )
    return value
