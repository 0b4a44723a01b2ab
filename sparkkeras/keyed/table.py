"""The table of models: a row for each key, with its weights and what became of its training.

::

    <key columns>   rows   epochs   loss   val_loss   logs   error   digest   weights   fit   model

``digest`` is that of the rows and settings that a key was trained with; keys that failed have none, so that the next `fit`
trains them again. Files have one further row, without a key: its ``model`` is a ``.keras`` archive with the settings. A
later ``fit`` adds rows, of which the last one of a key counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions, types

from sparkkeras.errors import DataError, StorageError, known_names
from sparkkeras.sources.column_names import column_named
from sparkkeras.spark.job_errors import translated

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from sparkkeras.spark.connect import AnyCluster

DIGEST, WEIGHTS, FIT, MODEL = "digest", "weights", "fit", "model"

_RESULTS = [
    types.StructField("rows", types.LongType()),
    types.StructField("epochs", types.IntegerType()),
    types.StructField("loss", types.DoubleType()),
    types.StructField("val_loss", types.DoubleType()),
    types.StructField("logs", types.MapType(types.StringType(), types.DoubleType())),
    types.StructField("error", types.StringType()),
]
_STATE = [types.StructField(DIGEST, types.StringType()), types.StructField(WEIGHTS, types.BinaryType())]

METRICS = [each.name for each in _RESULTS]
"""The columns that `KeyedModel.metrics` has after those of the key."""

RESERVED = {*METRICS, DIGEST, WEIGHTS, FIT, MODEL}
"""Names that columns of keys cannot have."""

_KEY_TYPES = (
    types.StringType,
    types.IntegralType,
    types.BooleanType,
    types.DecimalType,
    types.DateType,
    types.TimestampType,
    types.TimestampNTZType,
    types.BinaryType,
)


def key_fields(frame: DataFrame, keys: Sequence[str]) -> list[types.StructField]:
    """The columns of a key in a DataFrame.

    Raises:
        DataError: One does not exist, or its type cannot be compared exactly.
    """
    fields = {field.name: field for field in frame.schema.fields}
    for name in keys:
        if name not in fields:
            raise DataError(f"key={name!r}: the DataFrame has no such column. {known_names(name, list(fields))}")
        kind = fields[name].dataType
        if not isinstance(kind, _KEY_TYPES):
            raise DataError(
                f"key={name!r} has the type {kind.simpleString()}; expected strings, whole numbers, dates or booleans. "
                "Cast it, for instance to a string."
            )
    return [types.StructField(name, fields[name].dataType) for name in keys]


def trained_schema(keys: Sequence[types.StructField]) -> types.StructType:
    """The columns that workers return after training."""
    return types.StructType([*keys, *_RESULTS, *_STATE])


def evaluated_schema(keys: Sequence[types.StructField]) -> types.StructType:
    """The columns that workers return after evaluation."""
    return types.StructType([*keys, *(each for each in _RESULTS if each.name in {"rows", "loss", "logs", "error"})])


def numbered(trained: DataFrame, number: int) -> DataFrame:
    """The results of a fit with this number, as rows of the table."""
    return trained.withColumns({FIT: functions.lit(number), MODEL: functions.lit(None).cast("binary")})


def model_row(session: SparkSession, schema: types.StructType, model: bytes, number: int) -> DataFrame:
    """The row of files that holds the model."""
    values = {FIT: number, MODEL: bytearray(model)}
    return session.createDataFrame([tuple(values.get(name) for name in schema.names)], _nullable(schema))


def _nullable(schema: types.StructType) -> types.StructType:
    return types.StructType([types.StructField(each.name, each.dataType) for each in schema.fields])


def latest(table: DataFrame, keys: Sequence[str]) -> DataFrame:
    """The rows of models, the last one of each key, without the columns that only files have."""
    models = table.where(column_named(MODEL).isNull()).drop(MODEL)
    fits = models.select(FIT).distinct().limit(2).collect()
    if len(fits) > 1:
        last = models.groupBy(*map(column_named, keys)).agg(functions.max(FIT).alias(FIT))
        models = models.join(last, [*keys, FIT])
    return models


def read(session: SparkSession, path: str) -> DataFrame | None:
    """The table in a folder; ``None`` if it does not exist or is empty.

    Raises:
        StorageError: It cannot be read, or holds something else.
    """
    try:
        table = session.read.parquet(path)
        columns = table.columns
    except Exception as error:
        if "PATH_NOT_FOUND" in str(error) or "UNABLE_TO_INFER_SCHEMA" in str(error):
            return None
        raise StorageError(f"the table {path!r} cannot be read: {error}") from error
    missing = RESERVED.difference(columns)
    if missing:
        raise StorageError(
            f"{path!r} is not a table of models: it has no column {min(missing)!r}. Pass a folder that KeyedModel.save or "
            "fit(save_to=...) wrote."
        )
    return table


def archive_of(table: DataFrame) -> bytes:
    """The model that a table in files belongs to.

    Raises:
        StorageError: It has none.
    """
    found = table.where(column_named(MODEL).isNotNull()).orderBy(column_named(FIT).desc()).select(MODEL).limit(1).collect()
    if not found:
        raise StorageError("the table has no row with the model: some of its files are missing.")
    return bytes(found[0][0])


def arrow(cluster: AnyCluster, frame: DataFrame) -> pa.Table:
    """The rows of a DataFrame in this process. An interrupt (Ctrl-C) cancels the job."""
    try:
        with cluster.cancellable():
            return frame.toArrow()
    except Exception as error:
        raise translated(error) from error


def run(cluster: AnyCluster, action: Any) -> None:
    """Call a function that starts a job, such as one that writes a table. An interrupt (Ctrl-C) cancels the job."""
    try:
        with cluster.cancellable():
            action()
    except Exception as error:
        raise translated(error) from error
