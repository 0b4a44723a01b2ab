"""Where the ranks of all-reduce training run, and how they get their rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from sparkkeras.data.dataset import StoredDataset
from sparkkeras.data.values import DelayedValue
from sparkkeras.errors import ClusterError, ConfigurationError, counted
from sparkkeras.runner.data import rows_of_ranks
from sparkkeras.runner.groups import Ranks
from sparkkeras.runner.launchers import TaskLauncher
from sparkkeras.runner.rank import DelayedWork, RankWork
from sparkkeras.runner.requirements import registered_slots
from sparkkeras.sources.reader_dataset import ReaderDataset
from sparkkeras.sources.spark_dataset import StoredSparkDataset
from sparkkeras.spark.connect import AnyCluster
from sparkkeras.spark.slots import check_free_slots, held_slots

SLOTS_SECONDS = 30.0
"""How long a cluster has to replace lost executors, before training continues with fewer workers for the rest of it."""


def all_slots(cluster: AnyCluster, num_workers: int | None) -> int:
    """As many partitions as Spark has slots, free or not: a `SlotLimit`. The workers start when all their slots are free.

    Raises:
        ConfigurationError: There are fewer slots than ``num_workers``.
    """
    held = -(-held_slots() // cluster.slots_per_task)
    slots = registered_slots(cluster, (num_workers or 1) + held)
    check_free_slots(slots * cluster.slots_per_task, cluster.slots_per_task)
    slots -= held
    if num_workers is not None and num_workers > slots:
        besides = " besides those of the fit around this callback" if held else ""
        raise ConfigurationError(
            f"num_workers={num_workers}, but Spark has {counted(slots, 'slot')}{besides}, and with mode='allreduce' all "
            f"workers train at the same time. Use num_workers={slots} or less, or give Spark more cores (for instance the "
            f"master local[{num_workers + held}]) or a smaller spark.task.cpus."
        )
    return slots


@dataclass(frozen=True)
class RankHosts:
    """Where the ranks that train on a dataset run.

    On a SparkContext, workers fork them, and with fewer slots than partitions they have several of these. With Spark
    Connect, whose workers other queries use as well, they are new processes, one for each partition, where its rows are.
    """

    cluster: AnyCluster
    dataset: StoredSparkDataset | ReaderDataset

    @classmethod
    def of(cls, dataset: StoredDataset) -> RankHosts:
        """Those on the cluster of a dataset."""
        assert isinstance(dataset, (StoredSparkDataset, ReaderDataset))
        return cls(dataset.cluster.forking(), dataset)

    def size(self) -> int:
        """The number of ranks that can run now.

        Raises:
            ClusterError: With Spark Connect, there are fewer slots than partitions.
        """
        cluster, count = self.cluster, self.dataset.num_partitions
        slots = registered_slots(cluster, count, SLOTS_SECONDS)
        if cluster.is_driver_here:
            return max(1, min(count, slots))
        if slots < count:
            raise ClusterError(
                f"the rows are in {counted(count, 'partition')} of the workers, but Spark has only {counted(slots, 'slot')} "
                "left, and with Spark Connect each partition needs one: call fit again."
            )
        if not cluster.is_local:  # else what is written beside the rows may miss a new executor
            cluster.await_slots(count)
        return count

    @contextmanager
    def ranks(self, work: RankWork, size: int, moves_rows: bool) -> Iterator[Ranks]:
        """The ranks, with their rows of the dataset. Lost files are written again where rows are not sent to other workers.

        Args:
            work: What each rank does.
            size: Their number.
            moves_rows: Whether they have not found their rows.
        """
        dataset, cluster, forks = self.dataset, self.cluster, self.cluster.is_driver_here
        if isinstance(dataset, StoredSparkDataset) and (moves_rows if cluster.is_local else not forks):
            dataset.repair()
        with (
            cluster.share(DelayedWork(DelayedValue(work))) if not forks else nullcontext(DelayedValue(work)) as shared,
            rows_of_ranks(dataset, size, in_place=not moves_rows) as parts,
        ):
            yield Ranks(TaskLauncher(cluster, forks, _WITHOUT_CONNECTION), shared, parts)


_WITHOUT_CONNECTION = (
    "workers that train in step connect to the client: run it on a machine that they reach, or on the cluster itself "
    '(spark-submit), or use mode="synchronous", which needs no connection.'
)
"""What to do if the workers cannot connect to this process, for the message."""
