"""Values in partitions on a cluster: functions run over them in one job, they are moved, merged, and kept in files.

Datasets are written against the protocols here. With a SparkContext, `RddPartitions` implement them, and with Spark Connect
`ConnectPartitions`.

To train on rows, tasks write them to files on the workers once (`sparkkeras.data.files`), and Spark only keeps small
handles. When an executor is lost, Spark recomputes its handles, which writes the files again. Spark may move a task to an
executor without the files, for instance when the first one is busy. The task then returns `Missing`, and the driver runs the
partition from its source instead; that run writes the files, so that later tasks find them.
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from sparkkeras.data.block import PIECE_BYTES
from sparkkeras.data.dataset import Merging, Shared
from sparkkeras.data.files import Handle
from sparkkeras.data.values import ValueFile
from sparkkeras.sources.tasks import (
    Call,
    KeyByPartition,
    KeyedPieces,
    MergePieces,
    OpenFiles,
    PiecesByRank,
    ReportsProblems,
    StoreAndRun,
    StorePieces,
    StoreRows,
    Sweep,
    ThroughFiles,
    WithoutRows,
)
from sparkkeras.spark.cluster import Cluster
from sparkkeras.spark.connect import AnyCluster
from sparkkeras.spark.job_errors import quietly, without_failures

if TYPE_CHECKING:
    from pyspark import RDD

R = TypeVar("R")


class Partitions(Protocol):
    """Values in partitions, such as the blocks of rows."""

    @property
    def cluster(self) -> AnyCluster:
        """The cluster."""
        ...

    @property
    def default_parts(self) -> int:
        """The number of partitions to which rows are moved by default."""
        ...

    def run(self, call: Call, partitions: Sequence[int] | None = None) -> list[Any]:
        """Call a function for each partition, in one job.

        Args:
            call: A function of the partition's index and its values.
            partitions: The partitions for which it is called, in ascending order; ``None``: all.

        Returns:
            What it yields, in the order of the partitions.
        """
        ...

    def reduce(self, call: Call, merging: Merging[Any]) -> list[Any]:
        """Call a function for each partition, and merge the results on the workers.

        Each worker gets some pieces of all results, in one shuffle. Returns a `Piece` for each, and results that are not
        merged.
        """
        ...

    def moved(self, call: Call, parts: int, keys: int) -> Partitions:
        """Move what a function yields to other partitions, lazily.

        Args:
            call: A function of the partition's index and its values; yields pairs of a key and a value. A key is ``keys``
                numbers: the new partition, and what its values are sorted by there.
            parts: The number of new partitions.
            keys: The number of numbers.
        """
        ...

    def share(self, value: R) -> AbstractContextManager[Shared[R]]:
        """Make a value available to functions over these partitions until the context ends."""
        ...

    def stored(self, name: str) -> AbstractContextManager[StoredPartitions]:
        """Write blocks to files on the workers, in one job; they are removed when the context ends.

        Args:
            name: The name of the files.

        Raises:
            DataError: Rows are malformed.
        """
        ...


class StoredPartitions(Partitions, Protocol):
    """The `Handle` of each partition, whose files are on the workers that the functions run on."""

    @property
    def handles(self) -> tuple[Handle, ...]:
        """The handles, on the driver."""
        ...

    def run_again(self, call: OpenFiles, partitions: Sequence[int]) -> list[tuple[int, Any]]:
        """Write the files of some partitions anew where a function then runs over them; pairs of partition and result."""
        ...

    def in_place(self, ranks: int) -> AbstractContextManager[Any]:
        """Partitions with the handles of each rank, over which Spark runs tasks where the files are."""
        ...


@dataclass(frozen=True)
class ClassicPartitions(ABC):
    """Values of which an RDD can be made."""

    cluster: Cluster

    @property
    @abstractmethod
    def default_parts(self) -> int:
        """The number of partitions to which rows are moved by default: as many as they have."""

    @abstractmethod
    def map(self, call: Call, training: bool) -> RDD[Any]:
        """Make an RDD of the values that ``call`` yields for each partition.

        Args:
            call: A function of the partition's index and its values.
            training: Whether to use Python workers with the settings for training; else those of the user's jobs.
        """

    def run(self, call: Call, partitions: Sequence[int] | None = None) -> list[Any]:
        """See `Partitions.run`."""
        call = ReportsProblems(call)
        with ExitStack() as stack:
            if self.cluster.is_local:
                call = ThroughFiles(call, stack.enter_context(self.cluster.shared_folder()))
            found = self.cluster.collect(self.map(call, training=True), partitions)
            return without_failures([item.value if isinstance(item, ValueFile) else item for item in found])

    def reduce(self, call: Call, merging: Merging[Any]) -> list[Any]:
        """See `Partitions.reduce`."""
        pieces = self.map(KeyedPieces(call, merging, PIECE_BYTES), training=True)
        with self.cluster.training_workers():
            merged = pieces.partitionBy(self.cluster.slots, itemgetter(0)).mapPartitions(MergePieces(merging))
            _ = merged._jrdd
        return self.cluster.collect(merged)

    def moved(self, call: Call, parts: int, keys: int) -> RddPartitions:
        """See `Partitions.moved`."""
        keyed = self.map(call, training=False)
        by_key = keyed.partitionBy if keys == 1 else keyed.repartitionAndSortWithinPartitions
        return RddPartitions(self.cluster, by_key(parts, itemgetter(0)).values())

    def share(self, value: R) -> AbstractContextManager[Shared[R]]:
        """See `Cluster.share`."""
        return self.cluster.share(value)

    @contextmanager
    def stored(self, name: str) -> Iterator[StoredRdd]:
        """See `Partitions.stored`."""
        from pyspark import StorageLevel

        handles = self.map(ReportsProblems(StoreRows(name)), training=False).persist(StorageLevel.MEMORY_AND_DISK)
        found: tuple[Handle, ...] = ()
        try:
            found = tuple(self.cluster.collect(handles))
            yield StoredRdd(self.cluster, handles, self, found, name)
        finally:
            quietly(handles.unpersist)
            quietly(lambda: self._remove(name, found))

    def _remove(self, name: str, found: Sequence[Handle]) -> None:
        for folder in {Path(handle.directory).parent for handle in found if handle.directory}:
            shutil.rmtree(folder, ignore_errors=True)
        if not self.cluster.is_local or not found:
            sweep(self.cluster, name)

    def lazy(self, call: Call) -> RDD[Any]:
        """An RDD that computes results in workers with the settings for training, even if users map over it."""
        from pyspark import RDD

        rdd = self.map(call, training=True)
        return RDD(rdd._jrdd, rdd.ctx, rdd._jrdd_deserializer)


@dataclass(frozen=True)
class RddPartitions(ClassicPartitions):
    """The values of an RDD."""

    rdd: RDD[Any]

    @property
    def default_parts(self) -> int:
        """See `ClassicPartitions.default_parts`."""
        return self.rdd.getNumPartitions()

    def map(self, call: Call, training: bool) -> RDD[Any]:
        """See `ClassicPartitions.map`."""
        if not training:
            return self.rdd.mapPartitionsWithIndex(call)
        with self.cluster.training_workers():
            mapped: RDD[Any] = self.cluster.with_resources(self.rdd.mapPartitionsWithIndex(call))
            _ = mapped._jrdd
        return mapped

    def run_ranks(self, call: Call, together: bool) -> list[Any]:
        """Call a function for each partition, in one job.

        Args:
            call: A function of the partition's index and its values.
            together: Whether all tasks start together, in a barrier stage.
        """
        with self.cluster.training_workers():
            rdd = self.rdd.barrier() if together else self.rdd
            mapped = self.cluster.with_resources(rdd.mapPartitionsWithIndex(call))
            _ = mapped._jrdd
        return self.cluster.collect(mapped)


@dataclass(frozen=True)
class StoredRdd(RddPartitions):
    """The handles of files on the workers.

    Attributes:
        source: The rows.
        handles: The handles.
        name: The name of the files.
    """

    source: ClassicPartitions
    handles: tuple[Handle, ...]
    name: str

    def run_again(self, call: OpenFiles, partitions: Sequence[int]) -> list[tuple[int, Any]]:
        """See `StoredPartitions.run_again`."""
        return self.source.run(KeyByPartition(StoreAndRun(self.name, call)), partitions)

    @contextmanager
    def in_place(self, ranks: int) -> Iterator[RddPartitions]:
        """See `StoredPartitions.in_place`; lost files are written again before.

        With fewer ranks than partitions, the workers exchange rows first: partition p goes to rank p modulo the number of
        ranks.

        It lacks the lineage of the rows, since barrier stages reject unions and coalesced data (SPARK-24820). So jobs over
        it fail when an executor is lost afterwards.
        """
        from pyspark import StorageLevel

        if ranks == len(self.handles):
            handles = self.rdd.mapPartitions(iter)
        else:
            pieces = self.map(PiecesByRank(ranks), training=False)
            store = StorePieces(self.name, ranks, self.handles)
            handles = pieces.partitionBy(ranks, int).mapPartitionsWithIndex(store)
        handles.persist(StorageLevel.MEMORY_AND_DISK)
        handles.localCheckpoint()
        try:
            self.cluster.collect(handles)
            yield RddPartitions(self.cluster, handles)
        finally:
            jvm: Any = self.cluster.context._jsc
            quietly(lambda: jvm.sc().unpersistRDD(handles.id(), False))  # RDD.unpersist would warn of the checkpoint


def sweep(cluster: Cluster, name: str) -> None:
    """Remove a dataset's files from all executors."""
    tasks = cluster.slots
    cluster.collect(cluster.context.parallelize(range(tasks), tasks).mapPartitions(WithoutRows(Sweep(name))))
