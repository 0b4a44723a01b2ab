"""The data of a search: every worker receives all of it once, and every trial trains on it.

Only this module distinguishes kinds of data: arrays, data on Spark, and functions that read it on the workers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from sparkkeras.data.block import concatenate, describe
from sparkkeras.data.reader import Reader
from sparkkeras.data.schema import Schema
from sparkkeras.errors import ClusterError, ConfigurationError, DataError, known_names
from sparkkeras.modeling.custom_code import ByValue
from sparkkeras.sources.frame import ColumnMapping, is_frame
from sparkkeras.sources.source import NamedColumns, as_source, is_distributed
from sparkkeras.sources.tasks import Collect
from sparkkeras.worker.device import Environment

FIT_KEYS = ("x", "y", "sample_weight", "validation_data")
"""The keys that a dict of data may have, named as the arguments of ``keras.Model.fit``."""

EXPECTED = (
    "(x, y) or (x, y, sample_weight) of arrays; a dict of these and validation_data; an RDD or a DataFrame; or a function "
    "that returns one of the first two"
)


def collected(data: Any, environment: Environment, named: ColumnMapping) -> tuple[Any, ...]:
    """Collect an RDD or a DataFrame as arrays ``(x, y)`` or ``(x, y, sample_weight)``.

    Args:
        data: The RDD or DataFrame.
        environment: Gives the environment variables of the workers that read the rows.
        named: The columns of a DataFrame that hold features, labels and weights.

    Raises:
        DataError: There are no rows, or rows are malformed.
        ConfigurationError: The rows are too large to be collected on the driver.
    """
    columns, weight = (NamedColumns(named.features, named.label), named.sample_weight) if is_frame(data) else (None, None)
    source = as_source(data, Reader(Schema(), has_on_invalid=False), None, weight, columns, environment)
    with source.dataset() as dataset:
        try:
            blocks = dataset.run(Collect()).collect()
        except ClusterError as error:
            if "maxResultSize" not in str(error):
                raise
            raise ConfigurationError(
                "the driver collects the data of a search and sends all of it to every worker. It is more than "
                f"spark.driver.maxResultSize allows ({dataset.max_result_bytes / 1e9:.1f} GB): search on a sample, raise "
                "the limit, or give a function that reads the data on the workers."
            ) from error
    if not blocks:
        raise DataError("the data has no rows.")
    block = concatenate(blocks)
    return (block.x, block.y) if block.sample_weight is None else (block.x, block.y, block.sample_weight)


def fit_data(given: Any, validation_data: Any = None) -> dict[str, Any]:
    """Check data and convert it to arguments of ``keras.Model.fit``.

    Args:
        given: ``(x, y)``, ``(x, y, sample_weight)``, or a dict with the keys `FIT_KEYS`.
        validation_data: ``(x, y)`` or ``(x, y, sample_weight)`` to validate on, if the dict has none.

    Raises:
        DataError: ``given`` has another type, or its arrays have different numbers of rows.
    """
    if isinstance(given, Mapping):
        for name in given:
            if name not in FIT_KEYS:
                raise DataError(f"data has the key {name!r}. {known_names(name, FIT_KEYS)}")
        if "x" not in given or "y" not in given:
            raise DataError(f"data is a dict with the keys {list(given)}; expected 'x' and 'y' among them.")
        if validation_data is not None and given.get("validation_data") is not None:
            raise DataError("validation_data is given both in the dict of data and as an argument: give only one of them.")
        validation_data = validation_data if validation_data is not None else given.get("validation_data")
        given = (given["x"], given["y"], given.get("sample_weight"))
    arrays = _read_arrays("data", given)
    if validation_data is None:
        return dict(zip(FIT_KEYS, arrays, strict=False))
    return {**dict(zip(FIT_KEYS, arrays, strict=False)), "validation_data": _read_arrays("validation_data", validation_data)}


def _read_arrays(name: str, given: Any) -> tuple[Any, ...]:
    if not isinstance(given, (tuple, list)) or not 2 <= len(given) <= 3:
        raise DataError(f"{name} is {describe(given)}; expected {EXPECTED}.")
    x, y, weight = (*given, None)[:3]
    if y is None:
        raise DataError(f"{name} has no labels; expected {EXPECTED}.")
    block = Reader(Schema(), has_on_invalid=False).read_arrays(*(_normalize(array) for array in (x, y, weight)))
    if not block.rows:
        raise DataError(f"{name} has no rows.")
    arrays = (block.x, block.y) if block.sample_weight is None else (block.x, block.y, block.sample_weight)
    return tuple(list(array) if isinstance(array, tuple) else array for array in arrays)  # fit takes lists of inputs


def _normalize(array: Any) -> Any:
    several = isinstance(array, list) and array and all(isinstance(part, np.ndarray) and part.ndim > 1 for part in array)
    return array.to_numpy() if hasattr(array, "to_numpy") else tuple(array) if several else array


def check_columns(data: Any, columns: ColumnMapping) -> None:
    """Check that columns are named only for a DataFrame.

    Raises:
        ConfigurationError: Columns are named, but the data is of another kind.
    """
    if columns != ColumnMapping() and not is_frame(data):
        raise ConfigurationError(
            f"features=, label= and sample_weight= name DataFrame columns, but data is of type {type(data).__name__}: "
            "give a DataFrame, or omit them."
        )


def reader_of(data: Any) -> ByValue[Callable[[], Any]] | None:
    """The function that reads the data on the workers; ``None`` if the driver sends the data.

    Raises:
        CustomObjectError: The function cannot be sent to workers.
        ConfigurationError: It cannot be called without arguments.
    """
    if callable(data):
        _check_signature(data)
    return ByValue.dump(data, "data") if callable(data) else None


def _check_signature(function: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin
        return
    try:
        signature.bind()
    except TypeError as error:
        raise ConfigurationError(
            f"data is {describe(function)}, which cannot be called without arguments ({error}). A search takes arrays, a "
            f"DataFrame, an RDD, or a function without arguments that returns all data: {EXPECTED}. Each trial trains on "
            "all of it, so a function make(worker, num_workers), as for SparkModel.fit, cannot be used."
        ) from error


def local(data: Any, collect: Callable[[Any], Any]) -> Any:
    """Data in this process: an RDD or a DataFrame is collected, other data is returned as it is."""
    return collect(data) if is_distributed(data) else data


def check_is_sendable(data: Any) -> None:
    """Check that data for an objective holds no RDD or DataFrame, which workers cannot read.

    Raises:
        ConfigurationError: A dict, tuple or list holds one.
    """
    items = data.values() if isinstance(data, Mapping) else data if isinstance(data, (tuple, list)) else ()
    if any(is_distributed(item) for item in items):
        raise ConfigurationError(
            f"data is a {type(data).__name__} that holds an RDD or a DataFrame: give the RDD or DataFrame alone, or collect "
            "it first."
        )
