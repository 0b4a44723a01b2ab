"""The workers of a search with Spark Connect: tasks of one query, which connect to this process."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from sparkkeras.data.block import Block, concatenate_alike
from sparkkeras.data.dataset import DriverAddress, Results, Running, Shared, Task
from sparkkeras.errors import ClusterError, ConfigurationError, DataError
from sparkkeras.hyperopt.data import source_of
from sparkkeras.hyperopt.subprocess_task import InNewPython
from sparkkeras.rpc.transport import Address
from sparkkeras.runner.task_hosts import check_connection
from sparkkeras.sources.frame import ColumnMapping
from sparkkeras.sources.spark_dataset import SparkResults, over
from sparkkeras.sources.tasks import Collect
from sparkkeras.spark.connect import RemoteCluster, check_session
from sparkkeras.worker import device

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

R = TypeVar("R")


class ConnectWorkers:
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
        self.in_child_processes = True
        self._cluster = RemoteCluster(session, device.forking_environment)

    @property
    def free_slots(self) -> int:
        """The number of task slots: a client does not see which of them are free."""
        return self._cluster.slots

    @property
    def driver(self) -> DriverAddress:
        """The address of this process in the network of the server."""
        return self._cluster.driver

    def dataset(self, count: int) -> EmptyTasks:
        """Tasks without rows."""
        return EmptyTasks(self._cluster, count)

    def check_connection(self, count: int, address: Address) -> None:
        """Check that tasks can connect to this process."""
        check_connection(over(self._cluster, (), count), address, _WITHOUT_CONNECTION)

    def background(self, call: Callable[[], R]) -> Running[R]:
        """Call a function in a new thread, whose queries can be cancelled."""
        return self._cluster.background(call)

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


@dataclass(frozen=True)
class EmptyTasks:
    """Tasks without rows, each in a new Python."""

    cluster: RemoteCluster
    count: int

    def share(self, value: R) -> AbstractContextManager[Shared[R]]:
        """See `Dataset.share`; large values are files of the session."""
        return self.cluster.share(value)

    def run(self, task: Task[R]) -> Results[R]:
        """See `Dataset.run`."""
        call = InNewPython(pickle.dumps(task), self.cluster.task_cores, self.cluster.carried_environment)
        return SparkResults(over(self.cluster, (), self.count), call)
