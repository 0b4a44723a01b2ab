"""The hosts of ranks as tasks of one Spark job: a barrier stage, whose tasks start together, or independent tasks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparkkeras.data.dataset import DriverAddress, Rows, Running, TaskContext
from sparkkeras.data.files import Handle
from sparkkeras.errors import ClusterError
from sparkkeras.runner.hosts import Host, Start
from sparkkeras.runner.processes import fork, spawn
from sparkkeras.runner.rank import Placement
from sparkkeras.sources.tasks import application_folder, task_context
from sparkkeras.spark.cluster import Cluster
from sparkkeras.spark.connectivity import CONFIGURE_DRIVER, Preflight, check_reached
from sparkkeras.spark.settings import TaskResources, worker_ports
from sparkkeras.worker import device

if TYPE_CHECKING:
    from pyspark import RDD


@dataclass(frozen=True)
class SparkLauncher:
    """Runs each host in a task of one Spark job: a `sparkkeras.runner.groups.Hosts`.

    Attributes:
        cluster: The cluster.
        forks: Whether processes are forks of workers that have imported the backend; otherwise a new Python.
        use_gpu: Whether the processes may use the GPUs of their tasks.
        gpus_per_worker: The number of GPUs for each task; ``None``: as Spark is configured.
    """

    cluster: Cluster
    forks: bool
    use_gpu: bool
    gpus_per_worker: int | None = None

    @property
    def driver(self) -> DriverAddress:
        """See `Cluster.driver`."""
        return self.cluster.driver

    @property
    def ports(self) -> range | None:
        """See `Hosts.ports`."""
        return worker_ports(self.cluster.context.getConf())

    def start(self, host: Host, handles: RDD[Handle] | None) -> Running[Any]:
        """See `Hosts.start`. The tasks fail if a worker cannot connect to this process."""
        cluster = self.cluster
        task = RankTask(host, cluster.task_cores, self.use_gpu, cluster.is_local, self.forks)
        ranks: Any = cluster.context.parallelize((), host.world_size) if handles is None else handles
        with cluster.training_workers():
            mapped = (ranks.barrier() if host.together else ranks).mapPartitionsWithIndex(task)
            if self.gpus_per_worker is not None:
                mapped = mapped.withResources(TaskResources(cluster.task_cores, self.gpus_per_worker).profile())
            _ = mapped._jrdd

        def preflight(check: Preflight) -> list[str]:
            tasks = cluster.context.parallelize((), min(host.world_size, cluster.slots)) if handles is None else handles
            return cluster.collect(tasks.mapPartitions(ConnectionCheck(check)))

        def run() -> list[Any]:
            if not cluster.is_local:
                check_reached(host.driver, preflight, CONFIGURE_DRIVER)
            return cluster.collect(mapped)

        return cluster.background(run)


@dataclass(frozen=True)
class ConnectionCheck:
    """The task that runs a check on a worker."""

    check: Preflight

    def __call__(self, rows: Iterable[Any]) -> Iterator[str]:
        """Run it."""
        for _ in rows:
            pass
        yield from self.check(task_context(), iter(()))


@dataclass(frozen=True)
class TaskHost:
    """The host of a rank in a task of Spark.

    Attributes:
        host: Runs the process of the rank.
        cores: The CPU cores of a task.
        use_gpu: Whether the process may use the GPUs of the task.
        is_local: Whether all tasks run on the same machine.
    """

    host: Host
    cores: int
    use_gpu: bool
    is_local: bool

    def run(self, context: TaskContext, start: Start, parts: tuple[Rows, ...]) -> None:
        """Run the rank of a task; see `Host.run`."""
        rank, gpus = context.worker, context.accelerators if self.use_gpu else ()
        machine = "127.0.0.1" if self.is_local else _machine(rank, self.host.together)
        self.host.run(Placement(rank, context.attempt, machine, context.cores, gpus), start, parts)


@dataclass(frozen=True)
class RankTask(TaskHost):
    """The task of a rank.

    Attributes:
        forks: See `SparkLauncher`.
    """

    forks: bool

    def __call__(self, rank: int, rows: Iterable[Any]) -> Iterator[Any]:
        """Run the rank; yields nothing, since its result goes to the driver directly."""
        parts = tuple(rows)  # read to the end, since Spark cannot reuse the worker otherwise
        context = task_context(rank, self.cores)
        if self.forks:
            device.prepare(context.cores, shared_folder=application_folder())
            device.prepare_to_fork(context.cores)
            if not device.is_uninitialized():
                raise ClusterError("a worker that starts processes has used the Keras backend, so it cannot fork processes.")
        self.run(context, fork if self.forks else spawn, parts)
        return iter(())


def _machine(rank: int, together: bool) -> str:
    """The name of this machine: the one by which Spark's executors reach each other."""
    if together:
        from pyspark import BarrierTaskContext

        return str(BarrierTaskContext.get().getTaskInfos()[rank].address).rpartition(":")[0].strip("[]")
    import socket

    return socket.gethostname()
