"""Datasets of batches that a user's function reads on the workers. Nothing is stored: each epoch reads them again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from sparkkeras.data.block import Block
from sparkkeras.data.dataset import Rows, StoredDataset, Task, TaskContext, TrainingTask
from sparkkeras.data.files import Handle
from sparkkeras.sources.connect import RemoteClusterDataset, RemoteResults
from sparkkeras.sources.frame_blocks import OverPartition
from sparkkeras.sources.spark_dataset import RddBlocks, SparkDataset, SparkResults, StoredSparkDataset
from sparkkeras.sources.tasks import Deferred, Pass, task_context
from sparkkeras.spark.cluster import Cluster
from sparkkeras.spark.connect import CapturesErrors, disable_plan_cache, restore_plan_cache
from sparkkeras.worker.batch_reader import BatchReader, WorkerBatches

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

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


def _of_worker(read: BatchReader, worker: int, rows: Iterable[pa.RecordBatch]) -> Iterator[WorkerBatches]:
    """The batches of a worker, whatever the rows of its partition are."""
    for _ in rows:
        pass
    yield read.workers[worker]


@dataclass(frozen=True)
class ReaderDataset(SparkDataset):
    """Batches on a cluster whose driver is this process. Its blocks are the `WorkerBatches` of each worker."""

    blocks: RddBlocks
    read: BatchReader

    @classmethod
    def of(cls, cluster: Cluster, read: BatchReader) -> ReaderDataset:
        """The batches of all workers."""
        return cls(cluster, RddBlocks(cluster.context.parallelize(read.workers, read.num_workers)), read)

    def run(self, task: Task[R]) -> SparkResults[R]:
        """Run a task in one pass over the batches; see `Dataset.run`."""
        return SparkResults(self.cluster, self.blocks, ReadBatches(Deferred(task), self.cluster.task_cores))

    @contextmanager
    def stored(self) -> Iterator[StoredDataset]:
        """Read the first batch of each worker; nothing is stored."""
        handles = tuple(self.run(FirstBatch()).collect())
        yield OpenedReaderDataset(self.cluster, self.blocks, self.blocks.rdd, handles, "", self.read)


@dataclass(frozen=True)
class OpenedReaderDataset(StoredSparkDataset):
    """Batches of which the first ones have been read; see `ReaderDataset`."""

    read: BatchReader

    @contextmanager
    def everywhere(self) -> Iterator[tuple[Rows, ...]]:
        """See `StoredDataset.everywhere`: any worker can read any batch."""
        yield self.read.workers

    def run(self, task: Task[R]) -> SparkResults[R]:
        """Run a task over the batches; see `Dataset.run`."""
        return SparkResults(self.cluster, RddBlocks(self.handle_rdd), ReadBatches(Deferred(task), self.cluster.task_cores))

    def train(self, task: TrainingTask[R]) -> SparkResults[R]:
        """Run a task that reads the batches of a partition anew in each epoch; see `StoredDataset.train`."""
        call = Pass(Deferred(task), self.cluster.task_cores)
        return SparkResults(self.cluster, RddBlocks(self.handle_rdd), call)


@dataclass(frozen=True)
class RemoteReaderDataset(RemoteClusterDataset):
    """Batches on Spark Connect."""

    read: BatchReader

    def run(self, task: Task[R]) -> RemoteResults[R]:
        """Run a task in one pass over the batches; see `Dataset.run`."""
        return self._results(ReadBatches(self._deferred(task), self.cluster.task_cores))

    @contextmanager
    def stored(self) -> Iterator[StoredDataset]:
        """Read the first batch of each worker; nothing is stored."""
        disable_plan_cache(self.cluster.session)
        try:
            yield OpenedRemoteReaderDataset(self.cluster, self.read, tuple(self.run(FirstBatch()).collect()))
        finally:
            with suppress(Exception):  # the server may be gone
                restore_plan_cache(self.cluster.session)

    def _deferred(self, task: Callable[[TaskContext, Iterator[Any]], Iterator[R]]) -> Deferred[R]:
        return Deferred(task, self.cluster.carried_environment)

    def _results(self, call: Callable[[int, Iterable[WorkerBatches]], Iterator[Any]]) -> RemoteResults[Any]:
        count = self.read.num_workers
        frame: DataFrame = self.cluster.session.range(0, count, 1, count)
        batches = functools.partial(_of_worker, self.read)
        return RemoteResults(self.cluster, frame, OverPartition(batches, CapturesErrors(call)))


@dataclass(frozen=True)
class OpenedRemoteReaderDataset(RemoteReaderDataset):
    """Batches on Spark Connect of which the first ones have been read; see `RemoteReaderDataset`."""

    handles: tuple[Handle, ...]

    @property
    def num_partitions(self) -> int:
        """The number of partitions."""
        return len(self.handles)

    @contextmanager
    def everywhere(self) -> Iterator[tuple[Rows, ...]]:
        """See `StoredDataset.everywhere`: any worker can read any batch."""
        yield self.read.workers

    def train(self, task: TrainingTask[R]) -> RemoteResults[R]:
        """Run a task that reads the batches of a partition; see `StoredDataset.train`."""
        return self._results(Pass(self._deferred(task), self.cluster.task_cores))
