"""The table of models: a row for each key, with its weights and what became of its training.

::

    <key columns>   rows   epochs   loss   val_loss   logs   error   digest   weights   fit   model

``digest`` is that of the rows and settings that a key was trained with; keys that failed have none, so that the next `fit`
trains them again. ``fit`` is the number of the fit. A later one adds rows, of which the last one of a key counts.

Files have a further row, without a key: its ``model`` is a ``.keras`` archive with the settings, its ``digest`` that of the
architecture, and its ``weights`` are the initial ones. Where there are several, the last one counts, and so do only the rows
of fits from this number on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions, types

from sparkkeras.errors import DataError, StorageError, known_names
from sparkkeras.sources.column_names import column_named
from sparkkeras.spark import filesystem
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

_KEY_TYPES = (types.StringType, types.IntegralType, types.BooleanType, types.DateType)


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
    return trained.withColumns({FIT: functions.lit(number).cast("long"), MODEL: functions.lit(None).cast("binary")})


@dataclass(frozen=True)
class Base:
    """The row of files that holds the model.

    Attributes:
        number: The fit from which on rows belong to it.
        digest: The digest of its architecture.
        weights: The weights that the models of all keys started from, as a cell.
        model: Its ``.keras`` archive.
    """

    number: int
    digest: str
    weights: bytes
    model: bytes

    @classmethod
    def of(cls, table: DataFrame) -> Base:
        """That of a table in files.

        Raises:
            StorageError: It has none.
        """
        rows = table.where(column_named(MODEL).isNotNull()).orderBy(column_named(FIT).desc())
        found = rows.select(FIT, DIGEST, WEIGHTS, MODEL).limit(1).collect()
        if not found:
            raise StorageError("the table has no row with the model: some of its files are missing.")
        row = found[0]
        return cls(row[FIT], row[DIGEST], bytes(row[WEIGHTS]), bytes(row[MODEL]))

    def row(self, session: SparkSession, schema: types.StructType) -> DataFrame:
        """The row, in a table with this schema."""
        values = {
            FIT: self.number,
            DIGEST: self.digest,
            WEIGHTS: bytearray(self.weights),
            MODEL: bytearray(self.model),
        }
        return session.createDataFrame([tuple(values.get(name) for name in schema.names)], as_schema(schema.fields))


def as_schema(fields: Sequence[types.StructField]) -> types.StructType:
    """A schema of these columns, which may be null."""
    return types.StructType([types.StructField(each.name, each.dataType) for each in fields])


def latest(table: DataFrame, keys: Sequence[str], since: int) -> DataFrame:
    """The models of a table in files: the last row of each key, of fits from this number on."""
    models = table.where(column_named(MODEL).isNull() & (column_named(FIT) >= since)).drop(MODEL)
    fits = models.select(FIT).distinct().limit(2).collect()
    if len(fits) > 1:
        last = models.groupBy(*map(column_named, keys)).agg(functions.max(FIT).alias(FIT))
        models = models.join(last, [*keys, FIT])
    return models


def next_number(table: DataFrame) -> int:
    """The number of the next fit of a table in files."""
    return int(table.agg(functions.max(FIT)).collect()[0][0]) + 1


def check_same_keys(keys: Sequence[types.StructField], table: DataFrame, where: str) -> None:
    """Check that a table has the same columns of keys.

    Raises:
        DataError: It has others.
    """
    shown = [
        ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in fields)
        for fields in (keys, [field for field in table.schema.fields if field.name not in RESERVED])
    ]
    if shown[0] != shown[1]:
        raise DataError(
            f"{where} has models by other keys: {shown[1]}, and not {shown[0]}. Cast the column, or use another table."
        )


_PASS = "Pass a new folder, or one that KeyedModel.save or fit(save_to=...) wrote."


def read(session: SparkSession, path: str) -> DataFrame | None:
    """The table in a folder; ``None`` if it does not exist or is empty.

    Raises:
        StorageError: It cannot be read, or holds something else.
    """
    if not filesystem.may_exist(path):
        return None  # Spark would log a traceback
    try:
        table = session.read.parquet(path)
        columns = table.columns
    except Exception as error:
        if "PATH_NOT_FOUND" in str(error) or "UNABLE_TO_INFER_SCHEMA" in str(error):
            return None
        reason = str(error).partition("\n")[0]
        raise StorageError(f"{path!r} is not a table of models, or cannot be read. {_PASS} {reason}") from error
    missing = RESERVED.difference(columns)
    if missing:
        raise StorageError(f"{path!r} is not a table of models: it has no column {min(missing)!r}. {_PASS}")
    return table


def arrow(cluster: AnyCluster, frame: DataFrame) -> pa.Table:
    """The rows of a DataFrame in this process. An interrupt (Ctrl-C) cancels the job."""
    try:
        with cluster.cancellable():
            return frame.toArrow()
    except Exception as error:
        raise translated(error) from error


def run(cluster: AnyCluster, action: Callable[[], Any]) -> None:
    """Call a function that starts a job, such as one that writes a table. An interrupt (Ctrl-C) cancels the job."""
    try:
        with cluster.cancellable():
            action()
    except Exception as error:
        raise translated(error) from error
