"""Datasets of batches that a user's function reads on the workers. Nothing is stored: each epoch reads them again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from sparkkeras.data.block import Block
from sparkkeras.data.dataset import Rows, StoredDataset, Task, TaskContext, TrainingTask
from sparkkeras.data.files import Handle
from sparkkeras.sources.spark_dataset import SparkDataset, SparkResults, over
from sparkkeras.sources.tasks import Pass, task_context
from sparkkeras.spark.connect import AnyCluster
from sparkkeras.worker.batch_reader import BatchReader, WorkerBatches

R = TypeVar("R")


@dataclass(frozen=True)
class FirstBatch:
    """Yields the handle of a partition: the shapes and dtypes of its first batch, and the range of its labels."""

    def __call__(self, context: TaskContext, blocks: Iterator[Block]) -> Iterator[Handle]:
        """Read the first batch."""
        yield Handle.of_stream(context.worker, next(blocks, None))


@dataclass(frozen=True)
class ReadBatches:
    """Run a task over the batches of a partition, each of which is a block. Batches that it leaves are not read."""

    task: Task[Any]
    cores: int

    def __call__(self, partition: int, streams: Iterable[WorkerBatches]) -> Iterator[Any]:
        """Yield the results."""
        for stream in streams:
            with closing(stream.blocks()) as blocks:
                yield from self.task(task_context(partition, self.cores), blocks)


@dataclass(frozen=True)
class ReaderDataset(SparkDataset):
    """Batches on a cluster. The value of each partition is the `WorkerBatches` of its worker.

    Attributes:
        read: Reads the batches.
        handles: Those of the partitions, once the first batches have been read.
    """

    read: BatchReader
    handles: tuple[Handle, ...] = ()

    @classmethod
    def of(cls, cluster: AnyCluster, read: BatchReader) -> ReaderDataset:
        """The batches of all workers."""
        return cls(over(cluster, read.workers, read.num_workers), read)

    def run(self, task: Task[R]) -> SparkResults[R]:
        """Run a task in one pass over the batches; see `Dataset.run`."""
        return SparkResults(self.partitions, ReadBatches(self._deferred(task), self.cluster.task_cores))

    @contextmanager
    def stored(self) -> Iterator[StoredDataset]:
        """Read the first batch of each worker, unless it has been read; nothing is stored."""
        if self.handles:
            yield self
            return
        with self.cluster.in_rounds():
            yield replace(self, handles=tuple(self.run(FirstBatch()).collect()))

    @property
    def num_partitions(self) -> int:
        """The number of partitions."""
        return len(self.handles)

    @contextmanager
    def everywhere(self) -> Iterator[tuple[Rows, ...]]:
        """See `StoredDataset.everywhere`: any worker can read any batch."""
        yield self.read.workers

    def train(self, task: TrainingTask[R]) -> SparkResults[R]:
        """Run a task that reads the batches of a partition anew in each epoch; see `StoredDataset.train`."""
        return SparkResults(self.partitions, Pass(self._deferred(task), self.cluster.task_cores))
