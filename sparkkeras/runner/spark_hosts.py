"""The hosts of ranks as tasks of one Spark job: a barrier stage, whose tasks start together, or independent tasks."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from sparkkeras.data.dataset import DriverAddress, Running, TaskContext
from sparkkeras.data.files import Handle
from sparkkeras.errors import ClusterError, ConfigurationError, counted
from sparkkeras.runner.hosts import Host
from sparkkeras.runner.processes import fork, spawn
from sparkkeras.runner.rank import Placement
from sparkkeras.sources.tasks import application_folder, task_context
from sparkkeras.spark.cluster import Cluster
from sparkkeras.spark.connect import AnyCluster, RemoteCluster, active_remote_session
from sparkkeras.worker import device

if TYPE_CHECKING:
    from pyspark import RDD

REGISTER_SECONDS = 10.0
"""How long executors have to register, before a barrier stage has too few slots."""


@dataclass(frozen=True)
class SparkTasks:
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

    def start(self, host: Host, handles: RDD[Handle] | None) -> Running[Any]:
        """See `Hosts.start`."""
        cluster = self.cluster
        task = RankTask(host, self.forks, cluster.task_cores, self.use_gpu, cluster.is_local)
        ranks: Any = cluster.context.parallelize((), host.world_size) if handles is None else handles
        with cluster.training_workers():
            mapped = (ranks.barrier() if host.together else ranks).mapPartitionsWithIndex(task)
            if self.gpus_per_worker is not None:
                mapped = mapped.withResources(gpu_profile(cluster.task_cores, self.gpus_per_worker))
            _ = mapped._jrdd
        return cluster.background(lambda: cluster.collect(mapped))


@dataclass(frozen=True)
class RankTask:
    """The task of a rank.

    Attributes:
        host: Runs the process of the rank.
        forks: See `SparkTasks`.
        cores: The CPU cores of a task.
        use_gpu: Whether the process may use the GPUs of the task.
        is_local: Whether all tasks run on the driver's machine.
    """

    host: Host
    forks: bool
    cores: int
    use_gpu: bool
    is_local: bool

    def __call__(self, rank: int, rows: Iterable[Any]) -> Iterator[Any]:
        """Run the rank; yields nothing, since its result goes to the driver directly."""
        parts = tuple(rows)  # read to the end, since Spark cannot reuse the worker otherwise
        context = task_context(rank, self.cores)
        if self.forks:
            device.prepare(context.cores, shared_folder=application_folder())
            device.prepare_to_fork(context.cores)
            if not device.is_uninitialized():
                raise ClusterError("a worker that starts processes has used the Keras backend, so it cannot fork processes.")
        placement = placement_of(context, self.host.together, self.use_gpu, self.is_local)
        self.host.run(placement, fork if self.forks else spawn, parts)
        return iter(())


def placement_of(context: TaskContext, together: bool, use_gpu: bool, is_local: bool) -> Placement:
    """Where the rank of a task runs.

    Args:
        context: The task.
        together: Whether all ranks run at the same time.
        use_gpu: Whether the rank may use the GPUs of the task.
        is_local: Whether all tasks run on the same machine.
    """
    host = "127.0.0.1" if is_local else _machine(context.worker, together)
    return Placement(context.worker, context.attempt, host, context.cores, context.accelerators if use_gpu else ())


def _machine(rank: int, together: bool) -> str:
    """The name of this machine: the one by which Spark's executors reach each other."""
    if together:
        from pyspark import BarrierTaskContext

        return str(BarrierTaskContext.get().getTaskInfos()[rank].address).rpartition(":")[0].strip("[]")
    import socket

    return socket.gethostname()


def gpu_profile(cores: int, gpus: int) -> Any:
    """A resource profile of tasks with this number of CPU cores and GPUs."""
    from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

    requests = TaskResourceRequests().cpus(cores).resource("gpu", gpus)
    return ResourceProfileBuilder().require(requests).build


class Settings(Protocol):
    """The settings of a SparkContext, or of a session of Spark Connect."""

    def get(self, key: str, default: str, /) -> str | None:
        """The value of a setting."""
        ...


def check_barrier(settings: Settings) -> None:
    """Reject a barrier stage of `SparkRunner` if Spark does not support it.

    Raises:
        ConfigurationError: Spark uses dynamic allocation.
    """
    reject_dynamic_allocation(settings.get("spark.dynamicAllocation.enabled", "false"))


def check_slots(cluster: AnyCluster, settings: Settings, ranks: int, gpus_per_worker: int | None) -> None:
    """Reject more ranks than slots, in which they would never start together.

    Args:
        cluster: The cluster.
        settings: Its settings.
        ranks: The number of ranks.
        gpus_per_worker: The number of GPUs for each, which limit the slots further: Spark checks that itself.

    Raises:
        ConfigurationError: Spark has too few slots.
    """
    if gpus_per_worker is not None and _gpus_of_tasks(settings):
        return  # the known slots are those of tasks with this number of GPUs
    if isinstance(cluster, RemoteCluster) and settings.get("spark.default.parallelism", ""):
        return  # which replaces the number of slots where they are counted by a query
    slots = registered_slots(cluster, ranks)
    if slots < ranks:
        raise too_few_slots(ranks, slots, settings.get("spark.master", "") or "")


def check_static_allocation(otherwise: str) -> None:
    """Reject barrier stages if the active SparkContext or session does not support them; see `reject_dynamic_allocation`.

    Raises:
        ConfigurationError: It uses dynamic allocation.
    """
    from pyspark import SparkContext

    session, active = active_remote_session(), SparkContext._active_spark_context
    if session is not None:
        reject_dynamic_allocation(session.conf.get("spark.dynamicAllocation.enabled", "false"), otherwise)
    elif active is not None:
        reject_dynamic_allocation(active.getConf().get("spark.dynamicAllocation.enabled", "false"), otherwise)


def registered_slots(cluster: AnyCluster, wanted: int, seconds: float = REGISTER_SECONDS) -> int:
    """The number of slots, as soon as there are as many as wanted, or after this time, in which executors register."""
    deadline = time.monotonic() + (0 if cluster.is_local else seconds)
    while (slots := cluster.slots) < wanted and time.monotonic() < deadline:
        time.sleep(0.1)
    return slots


def check_gpus(settings: Settings, ranks: int, gpus_per_worker: int | None) -> None:
    """Reject ranks that need GPUs where Spark assigns none.

    Args:
        settings: The settings of Spark.
        ranks: The number of ranks.
        gpus_per_worker: The number of GPUs for each; ``None``: those that Spark assigns to all tasks.

    Raises:
        ConfigurationError: It assigns none to tasks, or does not support resource profiles.
    """
    master = settings.get("spark.master", "") or ""
    is_local = master.startswith("local") and not master.startswith("local-cluster")
    here = f"SparkRunner({ranks}, use_gpu=True, local_mode=True), which distributes the GPUs of this machine"
    if gpus_per_worker is not None and is_local:
        raise ConfigurationError(
            f"gpus_per_worker={gpus_per_worker} requests GPUs by a resource profile, which Spark supports on standalone "
            f"clusters, YARN and Kubernetes, and not with the master {master!r}: use {here}."
        )
    if gpus_per_worker is None and not _gpus_of_tasks(settings):
        if is_local:
            raise ConfigurationError(f"use_gpu=True, but Spark assigns no GPUs with the master {master!r}: use {here}.")
        raise ConfigurationError(
            "use_gpu=True, but Spark assigns no GPUs to tasks: set spark.task.resource.gpu.amount and "
            "spark.executor.resource.gpu.amount when the session starts, or pass gpus_per_worker=."
        )


def _gpus_of_tasks(settings: Settings) -> float:
    """The number of GPUs that Spark assigns to each task without a resource profile."""
    return float(settings.get("spark.task.resource.gpu.amount", "0") or 0)


INDEPENDENT_RANKS = "use SparkRunner(num_workers, barrier=False), whose ranks do not know each other."
"""What to do instead of starting all ranks of a `SparkRunner` together, for messages."""


def reject_dynamic_allocation(enabled: str | None, otherwise: str = INDEPENDENT_RANKS) -> None:
    """Reject the setting ``spark.dynamicAllocation.enabled`` if it is true.

    Args:
        enabled: The setting.
        otherwise: What to do instead, for the message.

    Raises:
        ConfigurationError: It is true.
    """
    if str(enabled).lower() == "true":
        raise ConfigurationError(
            "Spark cannot start all ranks together with spark.dynamicAllocation.enabled=true (SPARK-24942): set it to false "
            f"when the session starts, or {otherwise}"
        )


def too_few_slots(ranks: int, slots: int, master: str) -> ConfigurationError:
    """The error for more ranks than slots."""
    return ConfigurationError(
        f"num_workers={ranks}, but Spark has {counted(slots, 'slot')} (master {master!r}), and all ranks run at "
        f"the same time. Use num_workers={slots} or less, give Spark more cores (for instance the master "
        f"local[{ranks}]) or a smaller spark.task.cpus, or run the ranks on the driver's machine: "
        f"SparkRunner({ranks}, local_mode=True)."
    )
