"""Rows by key: dealt to workers by the size of the keys, and sorted so that a worker reads one key after the other."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from pyspark.sql import functions

from sparkkeras.data.dataset import TaskContext
from sparkkeras.errors import DataError, counted
from sparkkeras.keyed.table import DIGEST, WEIGHTS
from sparkkeras.sources.column_names import ColumnFinder, column_named
from sparkkeras.sources.frame import Selection
from sparkkeras.sources.tasks import task_context
from sparkkeras.weights import Array

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructField

IDENTITY = "__sparkkeras_key"
"""The hash of a key, by which workers see where the rows of the next one begin."""

MODEL_WEIGHTS = "__sparkkeras_weights"
"""The weights, in the first row of each key that has a model."""

_PART, _HASH = "part", "hash"


@dataclass(frozen=True)
class OverKeys:
    """Runs a task over the batches of a partition with ``DataFrame.mapInArrow``."""

    task: Callable[[TaskContext, Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield a batch of one row for each key."""
        return self.task(task_context(), batches)


@dataclass(frozen=True)
class TrainingRows:
    """The columns of a DataFrame to train on, under names without special characters.

    Attributes:
        frame: The columns ``k0``, ... of the key, ``o0``, ... to order by, ``c0``, ... of the model, and hashes of key and
            row.
        keys: The names of the columns of the key in it.
        order: Those to order by.
        data: Those of the model.
    """

    frame: DataFrame
    keys: list[str]
    order: list[str]
    data: list[str]

    @classmethod
    def of(cls, frame: DataFrame, keys: Sequence[str], order_by: Sequence[str], selection: Selection) -> TrainingRows:
        """Those of a DataFrame, whose columns have been checked."""
        finder = ColumnFinder(frame)
        named: list[dict[str, Column]] = [
            {f"{letter}{number}": column for number, column in enumerate(columns)}
            for letter, columns in (
                ("k", [column_named(name) for name in keys]),
                ("o", [finder.column(name) for name in order_by]),
                ("c", selection.columns(frame)),
            )
        ]
        narrowed = frame.select(*(column.alias(name) for each in named for name, column in each.items()))
        of_key, of_order, of_data = map(list, named)
        hashed = [column for field in narrowed.schema.fields if field.name not in of_key for column in _to_hash(field)]
        narrowed = narrowed.withColumns({IDENTITY: functions.xxhash64(*of_key), _HASH: functions.xxhash64(*hashed)})
        return cls(narrowed, of_key, of_order, of_data)

    def counted(self, settings: str) -> DataFrame:
        """The number of rows of each key, and a digest of them and of the settings that they are trained with.

        The hashes of the rows are added, so that it does not depend on their order.
        """
        total = functions.sum(functions.col(_HASH).cast("decimal(20, 0)")).cast("string")
        found = self.frame.groupBy(*self.keys).agg(functions.count("*").alias("rows"), total.alias("total"))
        digest = functions.concat_ws(":", functions.lit(settings), "rows", "total")
        return found.select(*self.keys, "rows", digest.alias(DIGEST))

    def dealt(self, chosen: pa.Table, parts: Array, count: int) -> DataFrame:
        """The rows of some keys, in partitions that are sorted by key and, within it, in the order to train in.

        Args:
            chosen: The keys, with their digests.
            parts: The index of the partition of each key.
            count: The number of partitions.

        Returns:
            Rows of the key, its hash, its digest, and the columns of the model.
        """
        import pyarrow as pa

        assigned = chosen.select([*self.keys, DIGEST]).append_column(_PART, pa.array(parts, pa.int32()))
        rows = self.frame.join(self.frame.sparkSession.createDataFrame(assigned), self.keys)
        sorted_rows = rows.repartitionById(count, _PART).sortWithinPartitions(*self.keys, *self.order, _HASH)
        return sorted_rows.select(*self.keys, IDENTITY, DIGEST, *self.data)


def _to_hash(field: StructField) -> list[Column]:
    """A column, and what its hash leaves out: whether it is null, and how many elements an array has."""
    from pyspark.sql.types import ArrayType

    column = functions.col(field.name)
    return [column, column.isNull(), *([functions.size(column)] if isinstance(field.dataType, ArrayType) else [])]


def deal(rows: Array, parts: int) -> Array:
    """The part of each key, so that parts have about the same number of rows: the largest keys first, to the smallest part.

    Graham, "Bounds on Multiprocessing Timing Anomalies" (1969): the largest part has at most 4/3 of the rows that it would
    have at best.
    """
    found = np.zeros(len(rows), np.int32)
    loads = [(0, part) for part in range(parts)]
    for key in np.argsort(-rows, kind="stable").tolist():
        load, part = loads[0]
        found[key] = part
        heapq.heapreplace(loads, (load + int(rows[key]), part))
    return found


def check_keys(found: pa.Table, keys: Sequence[str], names: Sequence[str]) -> None:
    """Check the keys of the rows.

    Raises:
        DataError: Some have no key.
    """
    import pyarrow.compute as pc

    for key, name in zip(keys, names, strict=True):
        missing = pc.is_null(found.column(key))
        if pc.any(missing).as_py():
            rows = pc.sum(found.filter(missing).column("rows")).as_py()
            raise DataError(
                f"key={name!r} is null in {counted(rows, 'row')}: fill in a value, or drop them "
                f"(df.dropna(subset=[{name!r}]))."
            )


def beside_models(frame: DataFrame, keys: Sequence[str], models: DataFrame) -> DataFrame:
    """The rows of a DataFrame sorted by key, after a row for each key that has the weights of its model and nothing else."""
    of_key = [column_named(name) for name in keys]
    identity = functions.xxhash64(*of_key)
    rows = frame.withColumns({IDENTITY: identity, MODEL_WEIGHTS: functions.lit(None).cast("binary")})
    trained = models.where(column_named(WEIGHTS).isNotNull())
    weights = trained.select(*of_key, identity.alias(IDENTITY), column_named(WEIGHTS).alias(MODEL_WEIGHTS))
    together = rows.unionByName(weights, allowMissingColumns=True).repartition(*of_key)
    return together.sortWithinPartitions(*of_key, column_named(MODEL_WEIGHTS).isNull())
