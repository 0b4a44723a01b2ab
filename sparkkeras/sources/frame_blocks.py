"""The rows of a DataFrame as blocks, converted from its Arrow batches, and tasks that run over these blocks."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark.serializers import BatchedSerializer, CPickleSerializer, Serializer

from sparkkeras.data.block import Block
from sparkkeras.data.reader import Reader
from sparkkeras.sources.frame import Selection
from sparkkeras.spark.cluster import Cluster
from sparkkeras.spark.job_errors import translated
from sparkkeras.weights import Array

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark import RDD
    from pyspark.sql import DataFrame

R = TypeVar("R")


@dataclass(frozen=True)
class BatchesToBlocks:
    """Converts Arrow batches of a selection to validated blocks."""

    selection: Selection
    reader: Reader

    def __call__(self, partition: int, batches: Iterable[pa.RecordBatch]) -> Iterator[Block]:
        """The blocks of a partition."""
        first = 0
        for batch in batches:
            yield from (block for block, _ in self.blocks(batch.columns, f"partition {partition}", first))
            first += batch.num_rows

    def blocks(self, columns: Sequence[pa.Array], where: str, first: int) -> Iterator[tuple[Block, Array | None]]:
        """The rows of one batch; see `Selection.blocks`."""
        return self.selection.blocks(self.reader, columns, where, first)


@dataclass(frozen=True)
class FrameBlocks:
    """The blocks of a DataFrame, over which tasks run as over an RDD; a `sparkkeras.sources.spark_dataset.Blocks`."""

    frame: DataFrame
    read: BatchesToBlocks

    @property
    def num_partitions(self) -> int:
        """The number of partitions."""
        return self.frame.rdd.getNumPartitions()

    def map(self, cluster: Cluster, call: Callable[[int, Iterable[Block]], Iterable[R]], training: bool) -> RDD[R]:
        """See `sparkkeras.sources.spark_dataset.Blocks.map`. Runs the shuffles of the frame's plan immediately."""
        from pyspark import RDD

        with cluster.training_workers() if training else nullcontext():
            results = self.frame.mapInArrow(OverBatches(self.read, call), "result binary")
        try:
            with cluster.cancellable():
                rdd = results.rdd
        except Exception as error:
            raise translated(error) from error
        return RDD(rdd._jrdd, rdd.ctx, _Unpickled())


@dataclass(frozen=True)
class OverBatches:
    """Calls a function for the Arrow batches of a partition, and writes each result as a row of bytes."""

    read: BatchesToBlocks
    call: Callable[[int, Iterable[Block]], Iterable[Any]]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the pickled results, each in its own batch."""
        import pyarrow as pa
        from pyspark import TaskContext

        task = TaskContext.get()
        partition = 0 if task is None else task.partitionId()
        for result in self.call(partition, self.read(partition, batches)):
            yield pa.record_batch([pa.array([pickle.dumps(result, 5)], pa.binary())], ["result"])


class _Unpickled(Serializer):
    """Unpickles the results of `OverBatches` from the rows that Spark passes to Python."""

    def load_stream(self, stream: Any) -> Iterator[Any]:
        rows = BatchedSerializer(CPickleSerializer()).load_stream(stream)
        return (pickle.loads(row[0]) for row in rows)
