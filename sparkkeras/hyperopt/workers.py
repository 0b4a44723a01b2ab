"""The workers of a search: tasks of a SparkContext or of Spark Connect, which connect to this process; for tests, itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

from sparkkeras.data.block import Block, concatenate_alike
from sparkkeras.data.dataset import Dataset, DriverAddress, Running, Task
from sparkkeras.data.local_dataset import LocalDataset, LocalRunning
from sparkkeras.data.values import DelayedValue
from sparkkeras.errors import ClusterError, ConfigurationError, DataError
from sparkkeras.hyperopt.data import ReadRows, source_of
from sparkkeras.hyperopt.subprocess_task import InNewPython
from sparkkeras.rpc.transport import Address
from sparkkeras.runner.launchers import check_connection
from sparkkeras.sources.copies import kept
from sparkkeras.sources.frame import ColumnMapping
from sparkkeras.sources.spark_dataset import SparkDataset, SparkResults, over, without_rows
from sparkkeras.sources.tasks import Collect
from sparkkeras.spark.connect import AnyCluster
from sparkkeras.spark.connectivity import CONFIGURE_SERVER
from sparkkeras.worker import device

R = TypeVar("R")


@runtime_checkable
class Workers(Protocol):
    """Runs the workers of a search."""

    @property
    def free_slots(self) -> int:
        """The number of workers that can run at the same time now, at least 1."""
        ...

    @property
    def in_child_processes(self) -> bool:
        """Whether each trial runs in a child process of its worker."""
        ...

    @property
    def driver(self) -> DriverAddress:
        """The address at which workers reach this process."""
        ...

    def dataset(self, count: int) -> Dataset:
        """A dataset without rows, with a partition for each of ``count`` workers."""
        ...

    def check_connection(self, count: int, address: Address) -> None:
        """Check that ``count`` workers can connect to a server in this process.

        Raises:
            DriverConnectionError: Some cannot.
        """
        ...

    def background(self, call: Callable[[], R]) -> Running[R]:
        """Call a function that runs tasks in a new thread."""
        ...

    def keep(self, data: Any, named: ColumnMapping, number: int) -> AbstractContextManager[ReadRows]:
        """Read the rows of an RDD or a DataFrame and keep them; see `sparkkeras.sources.copies.kept`."""
        ...


class ClusterWorkers:
    """Runs the workers as tasks of one job on a cluster.

    If this process is not Spark's driver, each task starts a new Python, from which it forks the trials.

    Args:
        cluster: The cluster, with tasks of the resources of a trial.
    """

    in_child_processes = True

    def __init__(self, cluster: AnyCluster) -> None:
        self._cluster = cluster

    @property
    def free_slots(self) -> int:
        """The number of workers for which there are free task slots; with Spark Connect, also those that are not free."""
        return self._cluster.free_slots

    @property
    def driver(self) -> DriverAddress:
        """The address of this process in the network of the cluster."""
        return self._cluster.driver

    def background(self, call: Callable[[], R]) -> Running[R]:
        """Call a function in a new thread, whose jobs can be cancelled."""
        return self._cluster.background(call)

    def dataset(self, count: int) -> Dataset:
        """Tasks without rows."""
        made = without_rows(self._cluster, count)
        return made if self._cluster.is_driver_here else InNewPythons(made.partitions)

    def check_connection(self, count: int, address: Address) -> None:
        """Have the workers connect, if they are on other machines, or the user has set the address."""
        is_own = address.host == self.driver.host and self.driver.is_local
        if not (is_own and self._cluster.is_driver_here):
            check_connection(over(self._cluster, (), count), address, _WITHOUT_CONNECTION, CONFIGURE_SERVER)

    @contextmanager
    def keep(self, data: Any, named: ColumnMapping, number: int) -> Iterator[ReadRows]:
        """Have Spark keep the rows of an RDD or a DataFrame; with Spark Connect, collect them."""
        with source_of(data, device.forking_environment, named).dataset() as dataset:
            assert isinstance(dataset, SparkDataset)
            if self._cluster.is_driver_here:
                with kept(dataset, number) as rows:
                    yield replace(rows, cluster=cast(Any, self._cluster))
                return
            block = _collected(dataset)
        yield CollectedRows(block)


def _collected(dataset: SparkDataset) -> Block:
    """All rows of a dataset, in this process."""
    try:
        block = concatenate_alike(dataset.run(Collect()).collect())
    except ClusterError as error:
        if "maxResultSize" not in str(error):
            raise
        raise ConfigurationError(
            "with Spark Connect, the rows of a search pass through this process, and these are more than "
            "spark.driver.maxResultSize of the server allows: search on a sample, raise the limit, or give a function that "
            "reads the data on the workers."
        ) from error
    if block is None:
        raise DataError("the data has no rows.")
    return block


_WITHOUT_CONNECTION = (
    "the workers of a search connect to the client: run it on a machine that they reach, or on the cluster itself "
    "(spark-submit), or write a loop of your own here with Search, ask() and tell()."
)
"""What to do if the workers cannot connect to this process, for the message."""


@dataclass(frozen=True)
class CollectedRows:
    """Rows in this process, in the role of `KeptRows`."""

    block: Block

    def is_at_most(self, nbytes: int) -> bool:
        """True, whatever their size: tasks of Spark Connect cannot copy rows from each other."""
        return True

    def collect(self) -> Block:
        """The rows."""
        return self.block


class InNewPythons(SparkDataset):
    """Partitions without rows, whose tasks run in new Pythons."""

    def run(self, task: Task[R]) -> SparkResults[R]:
        """See `Dataset.run`."""
        call = InNewPython(DelayedValue(task), self.cluster.task_cores, self.cluster.carried_environment)
        return SparkResults(self.partitions, call)


@dataclass(frozen=True)
class LocalWorkers:
    """The in-memory implementation: workers run one after the other in a thread of this process.

    `HyperParamModel` accepts it in place of a SparkContext.

    Attributes:
        free_slots: The number of workers.
    """

    free_slots: int = 1

    in_child_processes = False
    """Trials run in this process."""

    driver = LocalDataset.driver
    """The address of this process."""

    def dataset(self, count: int) -> Dataset:
        """An empty local dataset with ``count`` partitions."""
        return LocalDataset((None,) * count)

    def check_connection(self, count: int, address: Address) -> None:
        """Check nothing: the workers are in this process."""

    def background(self, call: Callable[[], R]) -> Running[R]:
        """Call a function in a new thread."""
        return LocalRunning(call)

    def keep(self, data: Any, named: ColumnMapping, number: int) -> AbstractContextManager[ReadRows]:
        """Reject Spark data, which this implementation cannot read.

        Raises:
            ConfigurationError: Always.
        """
        raise ConfigurationError(f"data={data!r} is on Spark, but this search runs without Spark: give arrays.")
