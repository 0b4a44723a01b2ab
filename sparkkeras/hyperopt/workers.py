"""The workers of a search: Spark tasks, or, for tests, this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from sparkkeras.data.dataset import Dataset, DriverAddress, Results, Running, Task
from sparkkeras.data.local_dataset import LocalDataset, LocalRunning
from sparkkeras.errors import ConfigurationError
from sparkkeras.hyperopt.data import source_of
from sparkkeras.sources.copies import KeptRows, copied, kept
from sparkkeras.sources.frame import ColumnMapping
from sparkkeras.sources.spark_dataset import SparkDataset, without_rows
from sparkkeras.spark.cluster import Cluster
from sparkkeras.worker import device

R = TypeVar("R")


class RunsTasks(Protocol):
    """A dataset, as far as the workers of a search are concerned."""

    def run(self, task: Task[R]) -> Results[R]:
        """See `Dataset.run`."""
        ...


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

    def background(self, call: Callable[[], R]) -> Running[R]:
        """Call a function that runs tasks in a new thread."""
        ...

    def keep(self, data: Any, named: ColumnMapping, number: int) -> AbstractContextManager[KeptRows]:
        """Read the rows of an RDD or a DataFrame and keep them; see `sparkkeras.sources.copies.kept`."""
        ...

    def copied(self, rows: Sequence[KeptRows], count: int) -> AbstractContextManager[RunsTasks]:
        """A dataset with a partition for each of ``count`` workers, each of which has all rows."""
        ...


class SparkWorkers:
    """Runs the workers as tasks of one Spark job.

    Args:
        context: The SparkContext; ``None`` uses the active one, or starts one on this machine.

    Raises:
        ClusterError: The context was stopped, or its workers lack Keras.
    """

    def __init__(self, context: Any) -> None:
        self._cluster = Cluster(context, device.forking_environment)
        self.in_child_processes = True

    @property
    def free_slots(self) -> int:
        """The number of free task slots."""
        return self._cluster.free_slots

    @property
    def driver(self) -> DriverAddress:
        """The address of the Spark driver."""
        return self._cluster.driver

    def dataset(self, count: int) -> Dataset:
        """An empty Spark dataset with ``count`` partitions."""
        return without_rows(self._cluster, count)

    def background(self, call: Callable[[], R]) -> Running[R]:
        """Call a function in a new thread, whose Spark jobs can be cancelled."""
        return self._cluster.background(call)

    @contextmanager
    def keep(self, data: Any, named: ColumnMapping, number: int) -> Iterator[KeptRows]:
        """Have Spark keep the rows of an RDD or a DataFrame."""
        with source_of(data, device.forking_environment, named).dataset() as dataset:
            assert isinstance(dataset, SparkDataset)
            with kept(dataset, number) as rows:
                yield rows

    def copied(self, rows: Sequence[KeptRows], count: int) -> AbstractContextManager[RunsTasks]:
        """A Spark dataset of ``count`` partitions, each with all rows."""
        return copied(self._cluster, rows, count)


@dataclass(frozen=True)
class LocalWorkers:
    """The in-memory implementation: workers run one after the other in a thread of this process.

    `HyperParamModel` accepts it in place of a SparkContext.

    Attributes:
        free_slots: The number of workers.
    """

    free_slots: int = 1

    @property
    def in_child_processes(self) -> bool:
        """False: trials run in this process."""
        return False

    @property
    def driver(self) -> DriverAddress:
        """The address of this process."""
        return LocalDataset(()).driver

    def dataset(self, count: int) -> Dataset:
        """An empty local dataset with ``count`` partitions."""
        return LocalDataset((None,) * count)

    def background(self, call: Callable[[], R]) -> Running[R]:
        """Call a function in a new thread."""
        return LocalRunning(call)

    def keep(self, data: Any, named: ColumnMapping, number: int) -> AbstractContextManager[KeptRows]:
        """Reject Spark data, which this implementation cannot read.

        Raises:
            ConfigurationError: Always.
        """
        raise ConfigurationError(f"data={data!r} is on Spark, but this search runs without Spark: give arrays.")

    def copied(self, rows: Sequence[KeptRows], count: int) -> AbstractContextManager[RunsTasks]:
        """Not called: there are no `KeptRows` without Spark."""
        raise NotImplementedError
