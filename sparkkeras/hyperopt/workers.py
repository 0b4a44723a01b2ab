"""Where the trials of a search run: on Spark, or, for tests, in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from sparkkeras.data.dataset import Dataset, DriverAddress, Running
from sparkkeras.data.local import LocalDataset, LocalRunning
from sparkkeras.errors import ConfigurationError
from sparkkeras.hyperopt import data
from sparkkeras.sources.frame import Named
from sparkkeras.sources.rdd import without_rows
from sparkkeras.spark.cluster import Cluster
from sparkkeras.worker import device

R = TypeVar("R")


@runtime_checkable
class Workers(Protocol):
    """Where the trials of a search run."""

    @property
    def free_slots(self) -> int:
        """How many workers can run at the same time now, at least 1."""
        ...

    @property
    def in_children(self) -> bool:
        """Whether each trial has a process of its own."""
        ...

    @property
    def driver(self) -> DriverAddress:
        """How workers reach this process."""
        ...

    def dataset(self, count: int) -> Dataset:
        """A dataset without rows, with a partition for each of ``count`` workers."""
        ...

    def background(self, call: Callable[[], R]) -> Running[R]:
        """Call something that runs tasks, in a thread of its own."""
        ...

    def collected(self, rows: Any, named: Named) -> tuple[Any, ...]:
        """The rows of an RDD or a DataFrame as arrays; see `sparkkeras.hyperopt.data.collected`."""
        ...


class SparkWorkers:
    """Tasks of one Spark job.

    Args:
        context: The SparkContext; ``None`` takes the active one, or starts one on this machine.

    Raises:
        ClusterError: The context was stopped, or its workers lack Keras.
    """

    def __init__(self, context: Any) -> None:
        self._cluster = Cluster(context, _search_environment)
        self.in_children = True

    @property
    def free_slots(self) -> int:
        """As `Workers.free_slots`."""
        return self._cluster.free_slots

    @property
    def driver(self) -> DriverAddress:
        """As `Workers.driver`."""
        return self._cluster.driver

    def dataset(self, count: int) -> Dataset:
        """As `Workers.dataset`."""
        return without_rows(self._cluster, count)

    def background(self, call: Callable[[], R]) -> Running[R]:
        """As `Workers.background`."""
        return self._cluster.background(call)

    def collected(self, rows: Any, named: Named) -> tuple[Any, ...]:
        """As `Workers.collected`."""
        return data.collected(rows, _search_environment, named)


@dataclass(frozen=True)
class LocalWorkers:
    """The in-memory implementation: a thread of this process, in which workers run one after the other.

    `HyperParamModel` takes it in place of a SparkContext.

    Attributes:
        free_slots: As `Workers.free_slots`.
    """

    free_slots: int = 1

    @property
    def in_children(self) -> bool:
        """Trials run in this process."""
        return False

    @property
    def driver(self) -> DriverAddress:
        """This process."""
        return LocalDataset(()).driver

    def dataset(self, count: int) -> Dataset:
        """As `Workers.dataset`."""
        return LocalDataset((None,) * count)

    def background(self, call: Callable[[], R]) -> Running[R]:
        """As `Workers.background`."""
        return LocalRunning(call)

    def collected(self, rows: Any, named: Named) -> tuple[Any, ...]:
        """There is no Spark whose rows these could be.

        Raises:
            ConfigurationError: Always.
        """
        raise ConfigurationError(f"data={rows!r} lives on Spark, and this search runs in memory: give arrays.")


def _search_environment(cores: int) -> Mapping[str, str]:
    """Workers of a search run nothing on the backend themselves, so they are not those that `SparkModel` trains in."""
    return {**device.worker_environment(cores), "SPARKKERAS_SEARCH": "1"}
