"""`to_data_frame` and `from_data_frame`: conversion between NumPy arrays and Spark DataFrames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkkeras.arguments import known_arguments, optional_integer
from sparkkeras.data.block import Block, describe
from sparkkeras.data.columns import to_column
from sparkkeras.data.labels import class_indices, encode_label
from sparkkeras.data.numeric import Masked, UnfitValuesError, to_numbers
from sparkkeras.data.reader import Reader
from sparkkeras.data.schema import Schema
from sparkkeras.data.text import Text, holds_text, to_text
from sparkkeras.errors import ConfigurationError, DataError
from sparkkeras.sources.column_names import column_named
from sparkkeras.sources.frame import ColumnMapping, Columns, is_frame
from sparkkeras.spark.cluster import check_running
from sparkkeras.spark.connect import check_session, check_slots_for
from sparkkeras.weights import Array

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import DataFrame, SparkSession


@known_arguments
def to_data_frame(
    spark: SparkSession | SparkContext,
    x: Any,
    y: Any = None,
    *,
    sample_weight: Any = None,
    features: str = "features",
    label: str = "label",
    weight: str = "weight",
    categorical: bool = False,
    vectors: bool = False,
) -> DataFrame:
    """Create a DataFrame from arrays: one row for each sample, in the same order.

    ``None`` and ``pandas.NA`` become nulls, and a row whose values are all missing becomes a single null. NaN stays NaN. A
    vector cannot hold nulls; missing values in vectors become NaN.

    Args:
        spark: A SparkSession (classic or Spark Connect) or a SparkContext.
        x: Features, shape (samples, ...): an array of numbers, booleans or strings, or a dict of arrays, which become one
            column each. Shape (samples,) makes a column of numbers or strings, more axes a column of (nested) arrays.
        y: Labels, in the same forms; ``None``: no labels.
        sample_weight: A weight for each sample, shape (samples,).
        features: The name of the column for features.
        label: The name of the column for labels.
        weight: The name of the column for weights.
        categorical: Whether labels are one-hot rows, to be converted to class indices (doubles, as in Spark ML).
        vectors: Whether features of shape (samples, features) become Spark ML vectors instead of arrays.

    Raises:
        DataError: The arrays differ in length, have no rows, or hold values that are neither numbers nor strings.
        ConfigurationError: Two columns would have the same name.
        ClusterError: The session was stopped.

    Example::

        df = to_data_frame(spark, x_train, y_train)
        SparkModel(model).fit(df, epochs=5)
    """
    import pyarrow as pa

    session = _session(spark)
    labels = None if y is None else class_indices(np.asarray(y)).astype(np.float64) if categorical else y
    arrays: dict[str, Array] = {}
    missing: dict[str, Array | None] = {}
    for name, side in ((features, x), (label, labels), (weight, sample_weight)):
        if side is None:
            continue
        for column, array in side.items() if isinstance(side, Mapping) else [(name, side)]:
            if column in arrays:
                raise ConfigurationError(f"two columns would have the name {column!r}: choose different names.")
            arrays[column], missing[column] = _array(column, array)
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) != 1 or 0 in lengths.values():
        raise DataError(f"arrays must have the same number of rows, and at least one; received {lengths}.")
    names = list(x) if isinstance(x, Mapping) else [features]
    as_vectors = [name for name in names if arrays[name].ndim == 2] if vectors else []
    for name in as_vectors:
        if isinstance(arrays[name], Text):
            raise DataError(f"{name!r} holds strings, of which there are no vectors: leave vectors=True out.")
        gaps = missing.pop(name)
        arrays[name] = arrays[name] if gaps is None else np.where(gaps, np.nan, arrays[name])
    columns = [to_column(array, _not_null(missing.get(name)), missing.get(name)) for name, array in arrays.items()]
    frame = session.createDataFrame(pa.table(columns, list(arrays)))
    return _with_vectors(frame, as_vectors) if as_vectors else frame


@known_arguments
def from_data_frame(
    frame: DataFrame,
    features: Columns = "features",
    label: Columns | None = "label",
    *,
    categorical: bool = False,
    nb_classes: int | None = None,
) -> tuple[Any, Any]:
    """Collect the features and labels of a DataFrame into arrays on the driver; strings become an array of ``str`` objects.

    Args:
        frame: The DataFrame; its rows must fit into the driver's memory.
        features: The feature columns, as in `SparkModel.fit`. A dict of columns gives a dict of arrays.
        label: The label columns; ``None``: no labels.
        categorical: Whether to return one-hot labels, shape (rows, classes), instead of class indices.
        nb_classes: The number of classes for one-hot labels; ``None``: the largest label plus one.

    Returns:
        ``(x, y)``; ``y`` is ``None`` without labels.

    Raises:
        DataError: ``frame`` is no DataFrame, a column is missing, or holds nulls or values that are neither numbers nor
            strings, there are no rows, or with ``categorical`` a label is not a class index.
        ConfigurationError: ``categorical`` is set and there are several label columns.
    """
    nb_classes = optional_integer("nb_classes", nb_classes)
    if not is_frame(frame):
        raise DataError(f"frame is {describe(frame)}; expected a Spark DataFrame: from_data_frame(df).")
    selection = ColumnMapping(features, label).select(frame, Reader(Schema(), label is not None))
    check_slots_for(frame.sparkSession)
    table = selection.narrowed(frame).toArrow().combine_chunks()
    if not table.num_rows:
        raise DataError("the DataFrame has no rows.")
    found = selection.read([column.chunk(0) for column in table.columns])
    for leaf in found:
        if leaf.good is not None:
            raise DataError(f"{leaf.label} has a null in row {int(np.argmin(leaf.good))}: replace nulls, or drop such rows.")
    block = Block(selection.form, tuple(leaf.values for leaf in found))
    x, y = block.x, block.y
    if not categorical or y is None:
        return x, y
    if not isinstance(y, np.ndarray):
        raise ConfigurationError("categorical=True expects a single label column: set label to the name of one column.")
    labels = y.reshape(-1)
    if not np.isfinite(labels).all() or labels.min() < 0:
        raise DataError("categorical=True expects class indices of 0 or more as labels; some are negative or not finite.")
    classes = nb_classes or int(labels.max()) + 1
    return x, np.stack([encode_label(value, classes) for value in labels])


def _session(spark: Any) -> SparkSession:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    if isinstance(spark, SparkContext):
        check_running(spark)
        return SparkSession(spark)
    if not hasattr(spark, "createDataFrame"):
        raise ConfigurationError(f"spark is {describe(spark)}; expected a SparkSession or a SparkContext.")
    session: SparkSession = spark
    check_session(session)
    return session


def _not_null(missing: Array | None) -> Array | None:
    """A mask of the rows that have at least one value; ``None``: all rows."""
    if missing is None:
        return None
    given: Array = ~np.asarray(missing.reshape(len(missing), -1).all(axis=1))
    return given


def _array(name: str, given: Any) -> Masked:
    """The values and a mask of missing ones; see `to_numbers` and `to_text`."""
    try:
        array, missing = to_text(given) if holds_text(given) else to_numbers(given)
    except UnfitValuesError as error:
        where = "" if error.row is None else f"row {error.row} of "
        raise DataError(f"{where}{name!r} {error}") from error
    if array.ndim == 0:
        raise DataError(f"{name!r} is {describe(given)}; expected an array with the rows on the first axis.")
    return array, missing


def _with_vectors(frame: DataFrame, names: Sequence[str]) -> DataFrame:
    from pyspark.ml.functions import array_to_vector

    return frame.withColumns({name: array_to_vector(column_named(name).cast("array<double>")) for name in names})
