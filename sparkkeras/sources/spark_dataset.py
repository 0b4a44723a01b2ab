"""Datasets on a cluster: tasks run over the partitions of rows, read from their source or stored in files on the workers."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from sparkkeras.data.dataset import (
    Dataset,
    DriverAddress,
    Merging,
    Rows,
    Running,
    Shared,
    StoredDataset,
    Task,
    TrainingTask,
    joined,
)
from sparkkeras.data.files import Handle
from sparkkeras.errors import ConfigurationError
from sparkkeras.sources.connect_partitions import ConnectPartitions, value_of
from sparkkeras.sources.partitions import ClassicPartitions, Partitions, RddPartitions, StoredPartitions
from sparkkeras.sources.tasks import (
    Call,
    Collect,
    Deferred,
    Missing,
    Open,
    OpenFiles,
    Pass,
    SharedRows,
    by_partition,
    repaired,
)
from sparkkeras.spark.connect import AnyCluster, RemoteCluster

if TYPE_CHECKING:
    from pyspark import RDD

R = TypeVar("R")


@dataclass(frozen=True)
class SparkDataset:
    """Rows on a cluster.

    Attributes:
        partitions: The rows, as blocks.
        repeats_rows: Whether the rows must be the same when they are read again; see `OpenFiles`.
    """

    partitions: Partitions
    repeats_rows: bool = field(default=False, kw_only=True)

    @property
    def cluster(self) -> AnyCluster:
        """The cluster of the rows."""
        return self.partitions.cluster

    @property
    def max_result_bytes(self) -> int:
        """The maximum total size of the results of a job, in bytes; 0: unlimited."""
        return self.cluster.max_result_bytes

    @property
    def slots(self) -> int:
        """The number of tasks that can run at the same time."""
        return self.cluster.slots

    @property
    def slots_per_task(self) -> int:
        """See `StoredDataset.slots_per_task`."""
        return self.cluster.slots_per_task

    @property
    def driver(self) -> DriverAddress:
        """See `Dataset.driver`."""
        return self.cluster.driver

    @property
    def is_driver_here(self) -> bool:
        """See `StoredDataset.is_driver_here`."""
        return self.cluster.is_driver_here

    def background(self, call: Callable[[], R]) -> Running[R]:
        """Run a call that uses this dataset in a background thread; see `StoredDataset.background`."""
        return self.cluster.background(call)

    def share(self, value: R) -> AbstractContextManager[Shared[R]]:
        """See `Dataset.share`."""
        return self.partitions.share(value)

    def run(self, task: Task[R]) -> SparkResults[R]:
        """Run a task in one pass over the source; see `Dataset.run`."""
        return SparkResults(self.partitions, Pass(self._deferred(task), self.cluster.task_cores))

    @contextmanager
    def stored(self) -> Iterator[StoredDataset]:
        """Write the rows to files on the workers, in one job; they are removed when the context ends."""
        with self.cluster.in_rounds(), self.partitions.stored(f"sparkkeras-{uuid.uuid4().hex}") as stored:
            yield StoredSparkDataset(stored, repeats_rows=self.repeats_rows)

    def without_rows(self, count: int) -> Dataset:
        """See `StoredDataset.without_rows`."""
        return without_rows(self.cluster, count)

    def _deferred(self, task: Callable[..., Iterator[R]]) -> Deferred[R]:
        return Deferred(task, self.cluster.carried_environment, self.cluster.backend)


def over(cluster: AnyCluster, values: Sequence[Any], count: int) -> RddPartitions | ConnectPartitions:
    """``count`` partitions, each with one of ``values``; without values, all are empty."""
    if isinstance(cluster, RemoteCluster):
        numbers = cluster.session.range(0, count, 1, count)
        return ConnectPartitions(cluster, numbers, functools.partial(value_of, values))
    return RddPartitions(cluster, cluster.context.parallelize(values, count))


def without_rows(cluster: AnyCluster, count: int) -> SparkDataset:
    """A dataset of ``count`` empty partitions, for tasks that do not receive their work as rows."""
    return SparkDataset(over(cluster, (), count))


@dataclass(frozen=True)
class StoredSparkDataset(SparkDataset):
    """Rows in files on the workers; see `SparkDataset`."""

    partitions: StoredPartitions

    @property
    def num_partitions(self) -> int:
        """The number of partitions."""
        return len(self.handles)

    @property
    def handles(self) -> tuple[Handle, ...]:
        """The metadata of each partition, in order."""
        return self.partitions.handles

    @contextmanager
    def everywhere(self) -> Iterator[tuple[Rows, ...]]:
        """See `StoredDataset.everywhere`: the files if the workers share a disk, else values that all tasks can access.

        For the latter, the rows are collected in this process once.
        """
        if self.cluster.is_local:
            yield self.handles
            return
        size, most = sum(handle.nbytes for handle in self.handles), self.max_result_bytes
        if most and size > most:
            raise ConfigurationError(
                f"{size / 1e9:.3g} GB of rows have to pass through the driver: validation_data of workers that hold their "
                "slots, the training data of ensembles, or that of all-reduce training if Spark runs its workers where the "
                f"rows are not. {self.cluster.result_limit}: pass a sample of the data, or use validation_split= or "
                'sampling="partition", whose rows stay on their workers.'
            )
        found = iter(self.run(Collect()).collect())
        with ExitStack() as stack:
            yield tuple(
                SharedRows(stack.enter_context(self.cluster.share(next(found)))) if handle.rows else handle
                for handle in self.handles
            )

    def repair(self) -> None:
        """Write lost files again."""
        self.run(Open()).collect()

    def run(self, task: Task[R]) -> SparkResults[R]:
        """Run a task over the files; see `Dataset.run`."""
        checksums = tuple(handle.checksum for handle in self.handles) if self.repeats_rows else ()
        call = OpenFiles(self._deferred(task), self.cluster.task_cores, checksums)
        return SparkResults(self.partitions, call, lambda missing: self.partitions.run_again(call, missing))

    def train(self, task: TrainingTask[R]) -> SparkResults[R]:
        """Run a task over the files; see `StoredDataset.train`."""
        return self.run(task)

    @contextmanager
    def stored(self) -> Iterator[StoredDataset]:
        """This dataset."""
        yield self


@dataclass(frozen=True)
class SparkResults(Generic[R]):
    """Results of a task over partitions.

    Attributes:
        partitions: The partitions to run over.
        call: Yields the results of a partition.
        again: Returns pairs of partition and result for partitions with missing files.
    """

    partitions: Partitions
    call: Call
    again: Callable[[Sequence[int]], list[tuple[int, Any]]] | None = None

    def collect(self) -> list[R]:
        """Run one job, and another for partitions whose tasks did not find their files; see `Results.collect`."""
        return repaired(self.partitions.run(self.call), self.from_source)

    def of(self, partition: int) -> list[R]:
        """Run one job, and another if its task did not find its files; see `Results.of`."""
        return repaired(self.partitions.run(self.call, [partition]), self.from_source)

    def reduce(self, merging: Merging[R]) -> list[R]:
        """Merge the results on the workers; see `Results.reduce`."""
        found = self.partitions.reduce(self.call, merging)
        return [*joined(merging, found), *repaired([item for item in found if isinstance(item, Missing)], self.from_source)]

    def lazy(self) -> RDD[R]:
        """An RDD of the results; see `ClassicPartitions.lazy`."""
        assert isinstance(self.partitions, ClassicPartitions)
        return self.partitions.lazy(self.call)

    def from_source(self, partitions: Sequence[int]) -> dict[int, list[R]]:
        """Run one job over the source, which also writes the missing files; see `Results.from_source`."""
        assert self.again is not None, "only tasks over stored rows find no files"
        return by_partition(self.again(sorted(partitions)), partitions)
