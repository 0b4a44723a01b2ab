"""Data on Spark: runs tasks over an RDD of blocks, or over a source with the same interface.

For training, tasks write the rows to files on the workers once (`sparkkeras.data.files`), and Spark only keeps a small RDD
of handles. When an executor is lost, Spark recomputes its handles, which writes the files again. Spark may move a task to an
executor without the files, for instance when the first one is busy. The task then returns `Missing`, and the driver runs the
partition from its source instead; that run writes the files, so that later tasks find them.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from sparkkeras.data.dataset import (
    Dataset,
    DriverAddress,
    Merging,
    Rows,
    Running,
    StoredDataset,
    Task,
    TrainingTask,
    joined,
)
from sparkkeras.data.files import Handle
from sparkkeras.data.values import ValueFile
from sparkkeras.errors import ConfigurationError
from sparkkeras.spark.cluster import Cluster
from sparkkeras.spark.connect import AnyCluster
from sparkkeras.spark.job_errors import quietly

if TYPE_CHECKING:
    from pyspark import RDD
from sparkkeras.sources.tasks import (
    Call,
    Collect,
    Deferred,
    KeyByPartition,
    KeyedPieces,
    MergePieces,
    Missing,
    Open,
    OpenFiles,
    Pass,
    PiecesByRank,
    ReportsProblems,
    SharedRows,
    StoreAndRun,
    StorePieces,
    StoreRows,
    Sweep,
    ThroughFiles,
    WithoutRows,
    by_partition,
    repaired,
    without_problems,
)

R = TypeVar("R")


class Blocks(Protocol):
    """Blocks in partitions, over which tasks run. A partition may have any number of blocks."""

    def map(self, cluster: Cluster, call: Call, training: bool) -> RDD[Any]:
        """Make an RDD of the values that ``call`` yields for each partition.

        Args:
            cluster: The cluster to run on.
            call: A function of the partition's index and its blocks.
            training: Whether to use Python workers with the settings for training; else those of the user's jobs.
        """
        ...


@dataclass(frozen=True)
class RddBlocks:
    """The blocks of an RDD."""

    rdd: RDD[Any]

    def map(self, cluster: Cluster, call: Call, training: bool) -> RDD[Any]:
        """See `Blocks.map`."""
        if not training:
            return self.rdd.mapPartitionsWithIndex(call)
        with cluster.training_workers():
            mapped: RDD[Any] = cluster.with_resources(self.rdd.mapPartitionsWithIndex(call))
            _ = mapped._jrdd
        return mapped


@dataclass(frozen=True)
class ClusterDataset:
    """What all datasets on a cluster have in common, whether their rows are stored or not."""

    cluster: AnyCluster

    @property
    def max_result_bytes(self) -> int:
        """The maximum total size of the results of a job, in bytes; 0: unlimited."""
        return self.cluster.max_result_bytes

    @property
    def slots(self) -> int:
        """The number of tasks that can run at the same time."""
        return self.cluster.slots

    def background(self, call: Callable[[], R]) -> Running[R]:
        """Run a call that uses this dataset in a background thread; see `StoredDataset.background`."""
        return self.cluster.background(call)


@dataclass(frozen=True)
class SparkDataset(ClusterDataset):
    """Rows on Spark.

    Attributes:
        cluster: The cluster of the rows.
        blocks: The rows.
        repeats_rows: Whether the rows must be the same when they are read again; see `OpenFiles`.
    """

    cluster: Cluster
    blocks: Blocks
    repeats_rows: bool = field(default=False, kw_only=True)

    @property
    def driver(self) -> DriverAddress:
        """See `ReachesDriver.driver`."""
        return self.cluster.driver

    def share(self, value: R) -> Any:
        """See `Dataset.share` and `Cluster.share`."""
        return self.cluster.share(value)

    def run(self, task: Task[R]) -> SparkResults[R]:
        """Run a task in one pass over the source; see `Dataset.run`."""
        return SparkResults(self.cluster, self.blocks, Pass(Deferred(task), self.cluster.task_cores))

    @contextmanager
    def stored(self) -> Iterator[StoredDataset]:
        """Write the rows to files on the workers, in one job; they are removed when the context ends."""
        from pyspark import StorageLevel

        name = f"sparkkeras-{uuid.uuid4().hex}"
        handles = self.blocks.map(self.cluster, ReportsProblems(StoreRows(name)), training=False)
        handles.persist(StorageLevel.MEMORY_AND_DISK)
        found: tuple[Handle, ...] = ()
        try:
            found = tuple(without_problems(self.cluster.collect(handles)))
            yield StoredSparkDataset(self.cluster, self.blocks, handles, found, name, repeats_rows=self.repeats_rows)
        finally:
            quietly(handles.unpersist)
            quietly(lambda: self._remove(name, found))

    def _remove(self, name: str, found: Sequence[Handle]) -> None:
        for folder in {Path(handle.directory).parent for handle in found if handle.directory}:
            shutil.rmtree(folder, ignore_errors=True)
        if not self.cluster.is_local or not found:
            sweep(self.cluster, name)


def sweep(cluster: Cluster, name: str) -> None:
    """Remove a dataset's files from all executors."""
    tasks = cluster.slots
    cluster.collect(cluster.context.parallelize(range(tasks), tasks).mapPartitions(WithoutRows(Sweep(name))))


def without_rows(cluster: Cluster, workers: int) -> SparkDataset:
    """A dataset of one empty partition for each worker, for tasks that do not receive their work as rows."""
    return SparkDataset(cluster, RddBlocks(cluster.context.parallelize((), workers)))


@dataclass(frozen=True)
class StoredSparkDataset(SparkDataset):
    """Rows on Spark in files on the workers; see `SparkDataset`."""

    handle_rdd: RDD[Any]
    handles: tuple[Handle, ...]
    name: str

    @property
    def num_partitions(self) -> int:
        """The number of partitions."""
        return len(self.handles)

    @contextmanager
    def everywhere(self) -> Iterator[tuple[Rows, ...]]:
        """See `StoredDataset.everywhere`: the files if the workers share the driver's disk, else broadcasts.

        For the broadcasts, the rows are collected on the driver once.
        """
        if self.cluster.is_local:
            yield self.handles
            return
        size = sum(handle.nbytes for handle in self.handles)
        if self.max_result_bytes and size > self.max_result_bytes:
            raise ConfigurationError(
                f"{size / 1e9:.1f} GB of rows have to pass through the driver: validation_data of workers that hold their "
                "slots, the training data of ensembles, or that of all-reduce training if Spark runs its workers where the "
                f"rows are not. spark.driver.maxResultSize is {self.max_result_bytes / 1e9:.1f} GB: raise it, pass a sample "
                'of the data, or use validation_split= or sampling="partition", whose rows stay on their workers.'
            )
        found = self.run(Collect()).collect()
        with ExitStack() as stack:
            filled = iter(found)
            yield tuple(
                SharedRows(stack.enter_context(self.share(next(filled)))) if handle.rows else handle
                for handle in self.handles
            )

    @contextmanager
    def in_place(self, ranks: int) -> Iterator[RDD[Handle]]:
        """An RDD of the handles, whose tasks Spark runs where the files are; lost files are written again before.

        With fewer ranks than partitions, the workers exchange rows first: partition p goes to rank p modulo the number of
        ranks.

        It lacks the lineage of the rows, since barrier stages reject unions and coalesced data (SPARK-24820). So jobs over
        it fail when an executor is lost afterwards.
        """
        from pyspark import StorageLevel

        if ranks == self.num_partitions:
            handles = self.handle_rdd.mapPartitions(iter)
        else:
            pieces = RddBlocks(self.handle_rdd).map(self.cluster, PiecesByRank(ranks), training=False)
            store = StorePieces(self.name, ranks, self.handles)
            handles = pieces.partitionBy(ranks, int).mapPartitionsWithIndex(store)
        handles.persist(StorageLevel.MEMORY_AND_DISK)
        handles.localCheckpoint()
        try:
            self.cluster.collect(handles)
            yield handles
        finally:
            jvm: Any = self.cluster.context._jsc
            quietly(lambda: jvm.sc().unpersistRDD(handles.id(), False))  # RDD.unpersist would warn of the checkpoint

    def repair(self) -> None:
        """Write lost files again."""
        self.run(Open()).collect()

    def without_rows(self, count: int) -> Dataset:
        """See `DriverDataset.without_rows`."""
        return without_rows(self.cluster, count)

    def run(self, task: Task[R]) -> SparkResults[R]:
        """Run a task over the files; see `Dataset.run`."""
        checksums = tuple(handle.checksum for handle in self.handles) if self.repeats_rows else ()
        call = OpenFiles(Deferred(task), self.cluster.task_cores, checksums)
        repair = self.blocks, StoreAndRun(self.name, call)
        return SparkResults(self.cluster, RddBlocks(self.handle_rdd), call, repair)

    def train(self, task: TrainingTask[R]) -> SparkResults[R]:
        """Run a task over the files; see `StoredDataset.train`."""
        return self.run(task)

    @contextmanager
    def stored(self) -> Iterator[StoredDataset]:
        """This dataset."""
        yield self


@dataclass(frozen=True)
class SparkResults(Generic[R]):
    """Results of a task over an RDD; ``repair`` reruns partitions with missing files from their source."""

    cluster: Cluster
    source: Blocks
    call: Call
    repair: tuple[Blocks, Call] | None = None

    def collect(self) -> list[R]:
        """Run one job, and another for partitions whose tasks did not find their files; see `Results.collect`."""
        return self._collect(None)

    def of(self, partition: int) -> list[R]:
        """Run one job, and another if its task did not find its files; see `Results.of`."""
        return self._collect([partition])

    def _collect(self, partitions: Sequence[int] | None) -> list[R]:
        call: Call = ReportsProblems(self.call)
        with ExitStack() as stack:
            if self.cluster.is_local:
                call = ThroughFiles(call, stack.enter_context(self.cluster.shared_folder()))
            rdd = self.source.map(self.cluster, call, training=True)
            found = without_problems(self.cluster.collect(rdd, partitions))
            results = [item.value if isinstance(item, ValueFile) else item for item in found]
        return repaired(results, self.from_source)

    def reduce(self, merging: Merging[R]) -> list[R]:
        """Merge the results on the workers, in one shuffle in which each task receives some pieces of all results."""
        pieces = self.source.map(self.cluster, KeyedPieces(self.call, merging), training=True)
        with self.cluster.training_workers():
            merged = pieces.partitionBy(self.cluster.slots, itemgetter(0)).mapPartitions(MergePieces(merging))
            _ = merged._jrdd
        found = self.cluster.collect(merged)
        return [*joined(merging, found), *repaired([item for item in found if isinstance(item, Missing)], self.from_source)]

    def lazy(self) -> RDD[R]:
        """An RDD that computes the results in workers with the settings for training, even if users map over it."""
        from pyspark import RDD

        rdd = self.source.map(self.cluster, self.call, training=True)
        return RDD(rdd._jrdd, rdd.ctx, rdd._jrdd_deserializer)

    def from_source(self, partitions: Sequence[int]) -> dict[int, list[R]]:
        """Run one job over the source, which also writes the missing files; see `Results.from_source`."""
        assert self.repair is not None, "only tasks over stored rows find no files"
        source, call = self.repair
        keyed = source.map(self.cluster, KeyByPartition(call), training=True)
        return by_partition(self.cluster.collect(keyed, sorted(partitions)), partitions)
