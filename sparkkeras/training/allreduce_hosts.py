"""Where the ranks of all-reduce training run, and how they get their rows: on a SparkContext, or with Spark Connect."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol

from sparkkeras.data.dataset import StoredDataset
from sparkkeras.data.values import DelayedValue
from sparkkeras.errors import ClusterError, ConfigurationError, counted
from sparkkeras.runner.groups import Ranks
from sparkkeras.runner.hosts import Parts
from sparkkeras.runner.rank import DelayedWork, RankWork
from sparkkeras.runner.requirements import registered_slots
from sparkkeras.runner.task_hosts import TaskLauncher
from sparkkeras.sources.connect_partitions import StoredConnectPartitions
from sparkkeras.sources.partitions import StoredRdd
from sparkkeras.sources.reader_dataset import OpenedReaderDataset
from sparkkeras.sources.spark_dataset import StoredSparkDataset
from sparkkeras.spark.cluster import Cluster
from sparkkeras.spark.connect import AnyCluster, RemoteCluster
from sparkkeras.spark.slots import check_free_slots, held_slots
from sparkkeras.worker.device import forking_environment

SLOTS_SECONDS = 30.0
"""How long a cluster has to replace lost executors, before training continues with fewer workers for the rest of it."""


def all_slots(cluster: AnyCluster, num_workers: int | None) -> int:
    """As many partitions as Spark has slots, free or not: a `SlotLimit`. The workers start when all their slots are free.

    Raises:
        ConfigurationError: There are fewer slots than ``num_workers``.
    """
    held = held_slots()
    slots = registered_slots(cluster, (num_workers or 1) + held)
    check_free_slots(slots)
    slots -= held
    if num_workers is not None and num_workers > slots:
        besides = " besides those of the fit around this callback" if held else ""
        raise ConfigurationError(
            f"num_workers={num_workers}, but Spark has {counted(slots, 'slot')}{besides}, and with mode='allreduce' all "
            f"workers train at the same time. Use num_workers={slots} or less, or give Spark more cores (for instance the "
            f"master local[{num_workers + held}]) or a smaller spark.task.cpus."
        )
    return slots


class RankHosts(Protocol):
    """Where the ranks that train on a dataset run."""

    def size(self) -> int:
        """The number of ranks that can run now."""
        ...

    def ranks(self, work: RankWork, size: int, moves_rows: bool) -> AbstractContextManager[Ranks]:
        """The ranks, with their rows of the dataset.

        Args:
            work: What each rank does.
            size: Their number.
            moves_rows: Whether they have not found their rows.
        """
        ...


def rank_hosts(dataset: StoredDataset) -> RankHosts:
    """Where the ranks that train on a dataset run."""
    assert isinstance(dataset, (StoredSparkDataset, OpenedReaderDataset))
    if isinstance(dataset.cluster, RemoteCluster):
        return ConnectHosts(dataset.cluster, dataset)
    return SparkHosts(Cluster(dataset.cluster.context, forking_environment), dataset)


@dataclass(frozen=True)
class SparkHosts:
    """Ranks that workers of a SparkContext fork. With fewer slots than partitions, they have several of these."""

    cluster: Cluster
    dataset: StoredSparkDataset | OpenedReaderDataset

    def size(self) -> int:
        """See `RankHosts.size`."""
        count = self.dataset.num_partitions
        return max(1, min(count, registered_slots(self.cluster, count, SLOTS_SECONDS)))

    @contextmanager
    def ranks(self, work: RankWork, size: int, moves_rows: bool) -> Iterator[Ranks]:
        """See `RankHosts.ranks`: the rows are sent to other workers if these do not have them."""
        dataset, cluster = self.dataset, self.cluster
        with ExitStack() as stack:
            if isinstance(dataset.partitions, StoredRdd) and not cluster.is_local and not moves_rows:
                parts = Parts(handles=stack.enter_context(dataset.partitions.in_place(size)))
            else:
                if isinstance(dataset, StoredSparkDataset) and cluster.is_local and moves_rows:
                    dataset.repair()
                rows = stack.enter_context(dataset.everywhere())
                parts = Parts(tuple(rows[rank::size] for rank in range(size)))
            yield Ranks(TaskLauncher(cluster, True, _WITHOUT_CONNECTION), DelayedValue(work), parts)


@dataclass(frozen=True)
class ConnectHosts:
    """Ranks that workers of Spark Connect start as new processes, one for each partition, where its rows are."""

    cluster: RemoteCluster
    dataset: StoredSparkDataset | OpenedReaderDataset

    def size(self) -> int:
        """See `RankHosts.size`.

        Raises:
            ClusterError: There are fewer slots than partitions.
        """
        count = self.dataset.num_partitions
        slots = registered_slots(self.cluster, count, SLOTS_SECONDS)
        if slots < count:
            raise ClusterError(
                f"the rows are in {counted(count, 'partition')} of the workers, but Spark has only {counted(slots, 'slot')} "
                "left, and with Spark Connect each partition needs one: call fit again."
            )
        if not self.cluster.is_local:  # else what is written beside the rows may miss a new executor
            self.cluster.await_slots(count)
        return count

    @contextmanager
    def ranks(self, work: RankWork, size: int, moves_rows: bool) -> Iterator[Ranks]:
        """See `RankHosts.ranks`: lost files are written again."""
        dataset, cluster = self.dataset, self.cluster
        if isinstance(dataset, OpenedReaderDataset):
            parts = Parts(tuple((rows,) for rows in dataset.read.workers))
        else:
            assert isinstance(dataset.partitions, StoredConnectPartitions)
            parts = Parts(handles=dataset.partitions)
            if moves_rows or not cluster.is_local:
                dataset.repair()
        yield Ranks(TaskLauncher(cluster, False, _WITHOUT_CONNECTION), cluster.keep(DelayedWork.of(work)), parts)


_WITHOUT_CONNECTION = (
    "workers that train in step connect to the client: run it on a machine that they reach, or on the cluster itself "
    '(spark-submit), or use mode="synchronous", which needs no connection.'
)
"""What to do if the workers cannot connect to this process, for the message."""
