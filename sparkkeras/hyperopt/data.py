"""The data of a search: every worker receives all of it once, and every trial trains on it.

Only this module distinguishes kinds of data: arrays, data on Spark, and functions that read it on the workers. The driver
sends arrays, and small data on Spark. Larger data on Spark goes from executor to executor; see `sparkkeras.sources.copies`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from sparkkeras.data.block import HELD_BYTES, Block, describe
from sparkkeras.data.labels import LabelRange
from sparkkeras.data.reader import Reader
from sparkkeras.data.schema import Schema
from sparkkeras.errors import ConfigurationError, DataError, known_names
from sparkkeras.hyperopt.rows_on_disk import TRAINING, VALIDATION, arrays_of
from sparkkeras.modeling.custom_code import ByValue
from sparkkeras.sources.copies import KeptRows
from sparkkeras.sources.frame import ColumnMapping, is_frame
from sparkkeras.sources.source import Source, as_source, is_distributed
from sparkkeras.worker.device import Environment

FIT_KEYS = ("x", "y", "sample_weight", VALIDATION)
"""The keys that a dict of data may have, named as the arguments of ``keras.Model.fit``."""

EXPECTED = (
    "(x, y) or (x, y, sample_weight) of arrays; a dict of these and validation_data; an RDD or a DataFrame; or a function "
    "that returns one of the first two"
)

SENT_BYTES = HELD_BYTES
"""Data on Spark of up to this size is collected and sent to the workers, where each trial has it in memory."""


@dataclass(frozen=True)
class SearchData:
    """The data of a search.

    Attributes:
        sent: What the driver sends to the workers: arguments of ``fit``, or the data of an objective.
        kept: Rows that Spark keeps, since they are too large to be sent, by `TRAINING` and `VALIDATION`.
    """

    sent: Any = None
    kept: Mapping[str, KeptRows] = field(default_factory=dict)

    @property
    def sample(self) -> Any:
        """The features of at least one row, as an argument of a model; ``None`` if the driver has none."""
        if TRAINING in self.kept:
            return arrays_of(self.kept[TRAINING].first)[0]
        return self.sent["x"] if isinstance(self.sent, Mapping) else None

    @property
    def labels(self) -> tuple[LabelRange, ...]:
        """The ranges of the labels to train on, if Spark keeps these."""
        return self.kept[TRAINING].labels if TRAINING in self.kept else ()


class ReadRows(Protocol):
    """The rows of an RDD or a DataFrame, once they are read: `KeptRows`, or rows that can only be collected."""

    def is_at_most(self, nbytes: int) -> bool:
        """Whether to collect them, since they have at most this size."""
        ...

    def collect(self) -> Block:
        """All rows, in this process."""
        ...


KeepRows = Callable[[Any, int], AbstractContextManager[ReadRows]]
"""Reads the rows of an RDD or a DataFrame; the number is their position among those that are kept."""


@contextmanager
def prepared(data: Any, keep: KeepRows, to_fit: bool, validation_data: Any = None) -> Iterator[SearchData]:
    """Check the data of a search, and read that on Spark; Spark keeps large rows until the context ends.

    Args:
        data: The data.
        keep: Reads data on Spark.
        to_fit: Whether models are fitted on it; an objective gets the data as it is.
        validation_data: The data to validate models on.

    Raises:
        DataError: The data has another type or no rows, or rows are malformed.
        ConfigurationError: The data of an objective holds an RDD or a DataFrame.
    """
    given = {TRAINING: data, VALIDATION: validation_data}
    if not to_fit:
        check_is_sendable(data)
    elif isinstance(data, Mapping):
        _check_given_once(data, validation_data)
    kept: dict[str, KeptRows] = {}
    with ExitStack() as stack:
        for name, rows in given.items():
            if is_distributed(rows):
                each = stack.enter_context(keep(rows, len(kept)))
                if each.is_at_most(SENT_BYTES):
                    given[name] = arrays_of(each.collect())
                else:
                    assert isinstance(each, KeptRows)
                    kept[name] = each
        yield SearchData(_sent(given, kept, to_fit), kept)


def _sent(given: Mapping[str, Any], kept: Mapping[str, KeptRows], to_fit: bool) -> Any:
    """What the driver sends to the workers besides the rows that Spark keeps."""
    if not to_fit:
        return {} if TRAINING in kept else given[TRAINING]
    validation_data = None if VALIDATION in kept else given[VALIDATION]
    if TRAINING not in kept:
        return fit_data(given[TRAINING], validation_data)
    return {} if validation_data is None else {VALIDATION: _read_arrays(VALIDATION, validation_data)}


def source_of(data: Any, environment: Environment, named: ColumnMapping) -> Source:
    """The rows of an RDD or a DataFrame.

    Args:
        data: The RDD or DataFrame.
        environment: Gives the environment variables of the workers that read the rows.
        named: The columns of a DataFrame that hold features, labels and weights.
    """
    named = named if is_frame(data) else ColumnMapping()
    return as_source(data, Reader(Schema(), has_on_invalid=False), None, named.sample_weight, named, environment)


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
        _check_given_once(given, validation_data)
        validation_data = validation_data if validation_data is not None else given.get("validation_data")
        given = (given["x"], given["y"], given.get("sample_weight"))
    arrays = _read_arrays("data", given)
    if validation_data is None:
        return dict(zip(FIT_KEYS, arrays, strict=False))
    return {**dict(zip(FIT_KEYS, arrays, strict=False)), "validation_data": _read_arrays("validation_data", validation_data)}


def _check_given_once(data: Mapping[str, Any], validation_data: Any) -> None:
    if validation_data is not None and data.get(VALIDATION) is not None:
        raise DataError("validation_data is given both in the dict of data and as an argument: give only one of them.")


def _read_arrays(name: str, given: Any) -> tuple[Any, ...]:
    if not isinstance(given, (tuple, list)) or not 2 <= len(given) <= 3:
        raise DataError(f"{name} is {describe(given)}; expected {EXPECTED}.")
    x, y, weight = (*given, None)[:3]
    if y is None:
        raise DataError(f"{name} has no labels; expected {EXPECTED}.")
    block = Reader(Schema(), has_on_invalid=False).read_arrays(*(_normalize(array) for array in (x, y, weight)))
    if not block.rows:
        raise DataError(f"{name} has no rows.")
    return arrays_of(block)


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
            f"features=, label= and sample_weight= name columns of a Spark DataFrame, but data is {describe(data)}: pass a "
            "Spark DataFrame (for one of pandas spark.createDataFrame(data)), or leave them out."
        )


def reader_of(data: Any) -> ByValue[Callable[[], Any]] | None:
    """The function that reads the data on the workers; ``None`` if the driver sends the data.

    Raises:
        CustomObjectError: The function cannot be sent to workers.
        ConfigurationError: It cannot be called without arguments.
    """
    if not callable(data):
        return None
    _check_signature(data)
    return ByValue.dump(data, "data")


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
