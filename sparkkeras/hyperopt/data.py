"""The data of a search: all of it goes to every worker once, and every trial trains on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sparkkeras.data.block import concatenate, describe
from sparkkeras.data.schema import Reader, Schema
from sparkkeras.errors import ClusterError, ConfigurationError, DataError, known_names
from sparkkeras.sources.frame import Named, is_frame
from sparkkeras.sources.rdd import Collect
from sparkkeras.sources.source import Environment, NamedColumns, as_source, is_distributed

SIDES = ("x", "y", "sample_weight", "validation_data")
"""What a dict of data may have: these arguments of ``keras.Model.fit``."""

EXPECTED = (
    "(x, y) or (x, y, sample_weight) of arrays; a dict of these and validation_data; an RDD or a DataFrame; or a function "
    "that returns one of the first two"
)


def collected(data: Any, environment: Environment, named: Named) -> tuple[Any, ...]:
    """The rows of an RDD or a DataFrame as ``(x, y)`` or ``(x, y, sample_weight)``.

    Args:
        data: The rows.
        environment: Gives the environment variables of the workers that read them.
        named: Which columns of a DataFrame they are in.

    Raises:
        DataError: Rows are malformed, or there are none.
        ConfigurationError: They are too many to go through the driver.
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
                "the data of a search goes through the driver to every worker, since every trial trains on all of it, and "
                f"this is more than spark.driver.maxResultSize allows ({dataset.max_result_bytes / 1e9:.1f} GB): search on "
                "a sample, raise the limit, or give a function that reads the data on the workers."
            ) from error
    if not blocks:
        raise DataError("the data has no rows.")
    block = concatenate(blocks)
    return (block.x, block.y) if block.sample_weight is None else (block.x, block.y, block.sample_weight)


def fit_data(given: Any, validation_data: Any = None) -> dict[str, Any]:
    """Data as arguments of ``keras.Model.fit``, checked.

    Args:
        given: ``(x, y)``, ``(x, y, sample_weight)``, or a dict.
        validation_data: Rows to validate on, likewise, where they are not in the dict.

    Raises:
        DataError: It is something else, or the arrays do not go together.
    """
    if isinstance(given, Mapping):
        for name in given:
            if name not in SIDES:
                raise DataError(f"data has the key {name!r}. {known_names(name, SIDES)}")
        if "x" not in given or "y" not in given:
            raise DataError(f"data is a dict with the keys {list(given)}; expected 'x' and 'y' among them.")
        if validation_data is not None and given.get("validation_data") is not None:
            raise DataError("validation_data is in the dict of data and beside it: give one of them.")
        validation_data = validation_data if validation_data is not None else given.get("validation_data")
        given = (given["x"], given["y"], given.get("sample_weight"))
    read = _read("data", given)
    if validation_data is None:
        return dict(zip(SIDES, read, strict=False))
    return {**dict(zip(SIDES, read, strict=False)), "validation_data": _read("validation_data", validation_data)}


def _read(name: str, given: Any) -> tuple[Any, ...]:
    if not isinstance(given, (tuple, list)) or not 2 <= len(given) <= 3:
        raise DataError(f"{name} is {describe(given)}; expected {EXPECTED}.")
    x, y, weight = (*given, None)[:3]
    if y is None:
        raise DataError(f"{name} has no labels; expected {EXPECTED}.")
    block = Reader(Schema(), has_on_invalid=False).read_arrays(*(_plain(side) for side in (x, y, weight)))
    if not block.rows:
        raise DataError(f"{name} has no rows.")
    sides = (block.x, block.y) if block.sample_weight is None else (block.x, block.y, block.sample_weight)
    return tuple(list(side) if isinstance(side, tuple) else side for side in sides)  # fit takes lists of inputs


def _plain(side: Any) -> Any:
    several = isinstance(side, list) and side and all(isinstance(part, np.ndarray) and part.ndim > 1 for part in side)
    return side.to_numpy() if hasattr(side, "to_numpy") else tuple(side) if several else side


def check_is_sendable(data: Any) -> None:
    """Refuse an RDD or a DataFrame within other data, which workers cannot read.

    Raises:
        ConfigurationError: There is one.
    """
    members = data.values() if isinstance(data, Mapping) else data if isinstance(data, (tuple, list)) else ()
    if any(is_distributed(member) for member in members):
        raise ConfigurationError("data holds an RDD or a DataFrame beside other things: give it alone, or collect it first.")
