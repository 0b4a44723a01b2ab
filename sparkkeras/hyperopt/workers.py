"""The workers of a search: tasks of a SparkContext or of Spark Connect, which connect to this process; for tests, itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from sparkkeras.data.block import Block, concatenate_alike
from sparkkeras.data.dataset import Dataset, DriverAddress, Running, Task
from sparkkeras.data.local_dataset import LocalDataset, LocalRunning
from sparkkeras.data.values import DelayedValue
from sparkkeras.errors import ClusterError, ConfigurationError, DataError, counted
from sparkkeras.hyperopt.data import ReadRows, source_of
from sparkkeras.hyperopt.subprocess_task import InNewPython
from sparkkeras.rpc.transport import Address
from sparkkeras.runner.launchers import check_connection
from sparkkeras.sources.copies import KeptRows, kept
from sparkkeras.sources.frame import ColumnMapping
from sparkkeras.sources.spark_dataset import SparkDataset, SparkResults, over, without_rows
from sparkkeras.sources.tasks import Collect
from sparkkeras.spark.cluster import Cluster
from sparkkeras.spark.connect import AnyCluster, RemoteCluster, check_session
from sparkkeras.spark.connectivity import check_connectivity
from sparkkeras.spark.settings import TaskResources
from sparkkeras.worker import device

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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
    """Runs the workers as tasks on a cluster: what `SparkWorkers` and `ConnectWorkers` have in common."""

    in_child_processes = True
    _cluster: AnyCluster

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


class SparkWorkers(ClusterWorkers):
    """Runs the workers as tasks of one Spark job.

    Args:
        context: The SparkContext; ``None`` uses the active one, or starts one on this machine.
        cores: The CPU cores of each worker; ``None``: those of a task.
        gpus: The GPUs of each worker; ``None``: those of a task.

    Raises:
        ClusterError: The context was stopped, or its workers lack Keras.
        ConfigurationError: Spark cannot give a worker as many cores or GPUs, or allocates executors dynamically.
    """

    def __init__(self, context: Any, cores: int | None = None, gpus: int | None = None) -> None:
        self._cluster: Cluster = Cluster(context, device.forking_environment)
        self._of_task = self._cluster.task_cores
        self._resources: TaskResources | None = None
        if cores is not None or gpus is not None:
            self._resources = self._checked(cores or self._of_task, gpus)
            self._cluster = Cluster(self._cluster.context, device.forking_environment, self._resources)

    def _checked(self, cores: int, gpus: int | None) -> TaskResources:
        cluster, conf = self._cluster, self._cluster.context.getConf()
        if cores < self._of_task:
            raise ConfigurationError(
                f"cores_per_trial={cores}, and each task of this Spark has {self._of_task} (spark.task.cpus): a trial has at"
                " least these."
            )
        if not cluster.is_local:
            if conf.get("spark.dynamicAllocation.enabled", "false") == "true":
                raise ConfigurationError(
                    "cores_per_trial= and gpus_per_trial= with spark.dynamicAllocation.enabled=true: Spark would start "
                    "executors for this search alone. Turn it off, or set spark.task.cpus and "
                    "spark.task.resource.gpu.amount."
                )
            of_task = float(conf.get("spark.task.resource.gpu.amount", "0") or 0)
            resources = TaskResources(cores, gpus or of_task or None)
            resources.slots(cluster.context)
            return resources
        if gpus is not None:
            raise ConfigurationError(
                f"gpus_per_trial={gpus}: Spark assigns GPUs on standalone clusters, YARN and Kubernetes, and not "
                f"with the master {cluster.context.master!r}, where all trials see all GPUs: omit it, and use num_workers=1."
            )
        if cores > (all_cores := cluster.slots * self._of_task):
            raise ConfigurationError(
                f"cores_per_trial={cores}, but the master {cluster.context.master!r} has {counted(all_cores, 'core')}."
            )
        return TaskResources(cores)

    @property
    def free_slots(self) -> int:
        """The number of workers for which there are free task slots."""
        free = self._cluster.free_slots
        if self._resources is None:
            return free
        if self._cluster.is_local:
            return max(1, free * self._of_task // self._resources.cores)
        busy = self._cluster.slots - free
        return max(1, self._resources.slots(self._cluster.context) - busy)

    def dataset(self, count: int) -> Dataset:
        """An empty Spark dataset with ``count`` partitions."""
        return without_rows(self._cluster, count)

    def check_connection(self, count: int, address: Address) -> None:
        """Have the workers connect, if they are on other machines, or the user has set the address."""
        if not self.driver.is_local or address.host != self.driver.host:
            check_connectivity(self.dataset(count), address)

    @contextmanager
    def keep(self, data: Any, named: ColumnMapping, number: int) -> Iterator[KeptRows]:
        """Have Spark keep the rows of an RDD or a DataFrame."""
        with source_of(data, device.forking_environment, named).dataset() as dataset:
            assert isinstance(dataset, SparkDataset)
            with kept(dataset, number) as rows:
                yield replace(rows, cluster=self._cluster)


class ConnectWorkers(ClusterWorkers):
    """Runs the workers as tasks of one query, each of which starts a new Python, from which it forks the trials.

    Args:
        session: The Spark Connect session.
        cores: The CPU cores of each worker; must be ``None``.
        gpus: The GPUs of each worker; must be ``None``.

    Raises:
        ClusterError: The session was stopped, or its workers lack Keras.
        ConfigurationError: Cores or GPUs are given.
    """

    def __init__(self, session: SparkSession, cores: int | None = None, gpus: int | None = None) -> None:
        if cores is not None or gpus is not None:
            raise ConfigurationError(
                "cores_per_trial= and gpus_per_trial= need a SparkContext, which Spark Connect does not have: a trial has "
                "the cores and GPUs of a task, spark.task.cpus and spark.task.resource.gpu.amount of the server."
            )
        check_session(session)
        self._cluster: RemoteCluster = RemoteCluster(session, device.forking_environment)

    def dataset(self, count: int) -> Dataset:
        """Tasks without rows, each in a new Python."""
        return InNewPythons(over(self._cluster, (), count))

    def check_connection(self, count: int, address: Address) -> None:
        """Check that tasks can connect to this process."""
        check_connection(over(self._cluster, (), count), address, _WITHOUT_CONNECTION)

    @contextmanager
    def keep(self, data: Any, named: ColumnMapping, number: int) -> Iterator[CollectedRows]:
        """Collect the rows of a DataFrame."""
        with source_of(data, device.forking_environment, named).dataset() as dataset:
            try:
                block = concatenate_alike(dataset.run(Collect()).collect())
            except ClusterError as error:
                if "maxResultSize" not in str(error):
                    raise
                raise ConfigurationError(
                    "with Spark Connect, the rows of a search pass through this process, and these are more than "
                    "spark.driver.maxResultSize of the server allows: search on a sample, raise the limit, or give a "
                    "function that reads the data on the workers."
                ) from error
        if block is None:
            raise DataError("the data has no rows.")
        yield CollectedRows(block)


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
