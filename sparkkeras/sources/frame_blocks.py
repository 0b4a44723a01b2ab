"""Functions over the Arrow batches of a DataFrame: converted to blocks, as rows of pickled results, or as a column."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.serializers import BatchedSerializer, CPickleSerializer, Serializer

from sparkkeras.sources.frame import Selection
from sparkkeras.sources.partitions import ClassicPartitions
from sparkkeras.sources.tasks import Call, task_context
from sparkkeras.spark.connect import CELL_BYTES, RESULT, pack_cells, unpack_cells
from sparkkeras.spark.job_errors import translated

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark import RDD
    from pyspark.sql import DataFrame
    from pyspark.sql._typing import UserDefinedFunctionLike

Read = Callable[[int, "Iterable[pa.RecordBatch]"], Iterable[Any]]
"""Reads the Arrow batches of the partition with an index."""


@dataclass(frozen=True)
class FramePartitions(ClassicPartitions):
    """The blocks of a DataFrame, over which functions run as over an RDD."""

    frame: DataFrame
    read: Selection

    @property
    def default_parts(self) -> int:
        """See `ClassicPartitions.default_parts`."""
        return self.frame.rdd.getNumPartitions()

    def map(self, call: Call, training: bool) -> RDD[Any]:
        """See `ClassicPartitions.map`. Runs the shuffles of the frame's plan immediately."""
        from pyspark import RDD

        with self.cluster.training_workers() if training else nullcontext():
            results = results_of(self.frame, self.read, call)
        try:
            with self.cluster.cancellable():
                rdd = results.rdd
        except Exception as error:
            raise translated(error) from error
        read: RDD[Any] = RDD(rdd._jrdd, rdd.ctx, _Unpickled())
        return self.cluster.with_resources(read) if training else read


@dataclass(frozen=True)
class OverPartition:
    """Calls a function for what is read of the Arrow batches of a partition, and pickles the results into rows of a frame.

    Attributes:
        read: Reads the batches of a partition.
        call: A function of the partition's index, and what was read.
        partitions: The partitions for which it is called; the batches of others are ignored. ``None``: all.
        keys: The names of columns with numbers before the result: ``call`` yields pairs of these and a result.
        max_bytes: The largest size of a row; larger results are split.
    """

    read: Read
    call: Call
    partitions: Sequence[int] | None = None
    keys: tuple[str, ...] = ()
    max_bytes: int = CELL_BYTES

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the rows, each in its own batch."""
        import pyarrow as pa

        partition = task_context().worker
        chosen = self.partitions is None or partition in self.partitions
        for found in self.call(partition, self.read(partition, batches)) if chosen else ():
            key, result = found if self.keys else ((), found)
            numbers = [pa.array([number], pa.int32()) for number in key]
            for cell in pack_cells(result, self.max_bytes):
                yield pa.record_batch([*numbers, pa.array([cell], pa.binary())], [*self.keys, "result"])
        for _ in batches:  # Spark cannot reuse the worker process of a task that leaves rows unread
            pass


def results_of(
    frame: DataFrame,
    read: Read,
    call: Call,
    partitions: Sequence[int] | None = None,
    keys: tuple[str, ...] = (),
    **how: Any,
) -> DataFrame:
    """A frame of the pickled results of a function, which is called for each partition of a frame; see `OverPartition`.

    With ``keys``, results are not split, so that a shuffle can move them. ``how``: arguments of ``DataFrame.mapInArrow``.
    """
    over = OverPartition(read, call, partitions, keys, sys.maxsize if keys else CELL_BYTES)
    return frame.mapInArrow(over, ", ".join([*(f"{key} int" for key in keys), RESULT]), **how)


def read_results(partition: int, batches: Iterable[pa.RecordBatch]) -> Iterator[Any]:
    """Unpickle the results in the rows of a frame; the inverse of `OverPartition`."""
    return unpack_cells(cell for batch in batches for cell in batch.column("result").to_pylist())


class _Unpickled(Serializer):
    """Unpickles the results of `OverPartition` from the rows that Spark passes to Python."""

    def load_stream(self, stream: Any) -> Iterator[Any]:
        rows = BatchedSerializer(CPickleSerializer()).load_stream(stream)
        return unpack_cells(row[0] for row in rows)


def column_function(call: Callable[[Iterator[Any]], Iterator[pa.Array]], type_name: str) -> UserDefinedFunctionLike:
    """Make a Spark function from columns to a column of the given type.

    Args:
        call: Yields one value per row. It takes the batches of a partition, each an Arrow array or, for several columns, a
            tuple of them. Its ``__name__`` is the function's name in Spark's plans.
        type_name: The type of the column, as DDL.
    """
    from pyspark.sql.functions import arrow_udf  # type: ignore[attr-defined]
    from pyspark.util import PythonEvalType

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="It is preferred to specify type hints")  # an object's cannot be read
        function: UserDefinedFunctionLike = arrow_udf(call, type_name, PythonEvalType.SQL_SCALAR_ARROW_ITER_UDF)
    return function
