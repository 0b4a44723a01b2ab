"""Where the hosts of ranks run: in tasks of one Spark job, or, without Spark, in threads of the driver.

The job is a barrier stage, whose tasks start together, or has independent tasks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from sparkkeras.data.dataset import DriverAddress, Rows, Running
from sparkkeras.data.local_dataset import LocalDataset, LocalRunning
from sparkkeras.errors import ClusterError, ConfigurationError, counted
from sparkkeras.rpc.transport import Address
from sparkkeras.runner.group import RankGroup
from sparkkeras.runner.hosts import Host
from sparkkeras.runner.rank import Placement
from sparkkeras.sources.connect_partitions import ConnectPartitions
from sparkkeras.sources.partitions import Partitions, RddPartitions
from sparkkeras.sources.spark_dataset import over
from sparkkeras.sources.tasks import Pass, application_folder, task_context
from sparkkeras.spark.connect import FILES, AnyCluster, session_files
from sparkkeras.spark.connectivity import CONFIGURE_DRIVER, check_reached
from sparkkeras.spark.settings import worker_ports
from sparkkeras.worker import device
from sparkkeras.worker.processes import Child, fork, spawn


@dataclass(frozen=True)
class TaskLauncher:
    """Runs each host in a task of one Spark job: a `sparkkeras.runner.groups.Hosts`.

    Attributes:
        cluster: The cluster.
        forks: Whether processes are forks of workers that have imported the backend; otherwise a new Python, as with Spark
            Connect, whose workers are shared with other queries, and so may have used the backend.
        otherwise: What to do if the workers cannot connect to a client of Spark Connect, for the message.
        use_gpu: Whether the processes may use the GPUs of their tasks.
    """

    cluster: AnyCluster
    forks: bool
    otherwise: str
    use_gpu: bool = True

    @property
    def driver(self) -> DriverAddress:
        """How tasks reach this process."""
        return self.cluster.driver

    @property
    def ports(self) -> range | None:
        """See `Hosts.ports`."""
        return worker_ports(self.cluster.settings)

    def start(self, host: Host, handles: RddPartitions | ConnectPartitions | None) -> Running[list[Any]]:
        """See `Hosts.start`. The job ends with an error if a worker cannot connect to this process."""
        cluster, count = self.cluster, host.world_size
        ranks: Any = over(cluster, (), count) if handles is None else replace(handles, cluster=cast(Any, cluster))
        environment = cluster.carried_environment
        task = RankTask(host, cluster.task_cores, self.use_gpu, cluster.is_local, self.forks, environment)

        def run() -> list[Any]:
            if not (cluster.is_local and cluster.is_driver_here):
                tasks = over(cluster, (), min(count, cluster.slots)) if handles is None else ranks
                check_connection(tasks, host.driver, self.otherwise)
            found: list[Any] = ranks.run_ranks(task, host.together)
            return found

        return cluster.background(run)


def check_connection(tasks: Partitions, address: Address, otherwise: str, advice: str = CONFIGURE_DRIVER) -> None:
    """Check that tasks can connect to a server in this process.

    Args:
        tasks: The partitions over which they run.
        address: The address of the server.
        otherwise: What to do if they cannot connect to a client of Spark Connect, for the message.
        advice: What to do if they cannot connect to Spark's driver.

    Raises:
        DriverConnectionError: Some of them cannot.
    """
    client = f"The driver is this process, a client of Spark Connect: {otherwise}"
    advice = advice if tasks.cluster.is_driver_here else client
    check_reached(address, lambda check: tasks.run(Pass(check, tasks.cluster.task_cores)), advice)


@dataclass(frozen=True)
class RankTask:
    """The task of a rank.

    Attributes:
        host: Runs the process of the rank.
        cores: The CPU cores of a task.
        use_gpu: Whether the process may use the GPUs of the task.
        is_local: Whether all tasks run on the same machine.
        forks: See `TaskLauncher`.
        environment: Environment variables of the process, if Spark does not set them.
    """

    host: Host
    cores: int
    use_gpu: bool
    is_local: bool
    forks: bool
    environment: Mapping[str, str]

    def __call__(self, rank: int, values: Iterable[Rows]) -> Iterator[Any]:
        """Run the rank; yields nothing, since its result goes to the driver directly."""
        parts = tuple(values)  # read to the end, since Spark cannot reuse the worker otherwise
        context = task_context(rank, self.cores)
        if self.forks:
            device.prepare(context.cores, shared_folder=application_folder())
            device.prepare_to_fork(context.cores)
            if not device.is_uninitialized():
                raise ClusterError("a worker that starts processes has used the Keras backend, so it cannot fork processes.")
        gpus = context.accelerators if self.use_gpu else ()
        machine = "127.0.0.1" if self.is_local else _machine(rank, self.host.together)
        start = partial(Child, fork if self.forks else spawn)
        placement = Placement(rank, context.attempt, machine, context.cores, gpus)
        self.host.run(placement, start, {**self.environment, FILES: session_files()}, parts)
        return iter(())


def _machine(rank: int, together: bool) -> str:
    """The name of this machine: the one by which Spark's executors reach each other."""
    if together:
        from pyspark import BarrierTaskContext

        return str(BarrierTaskContext.get().getTaskInfos()[rank].address).rpartition(":")[0].strip("[]")
    import socket

    return socket.gethostname()


@dataclass(frozen=True)
class LocalThreads:
    """Runs each host in a thread of the driver: a `sparkkeras.runner.groups.Hosts`.

    Attributes:
        group: The group.
        gpus: The addresses of the GPUs of each rank.
    """

    group: RankGroup
    gpus: tuple[tuple[str, ...], ...]

    driver = LocalDataset.driver
    """The loopback address."""

    ports = None
    """Any free ones."""

    def start(self, host: Host, handles: None) -> Running[None]:
        """See `Hosts.start`."""
        group = self.group
        cores = max(1, (os.cpu_count() or 1) // group.size)
        # If Keras is loaded here, the ranks use the same backend; otherwise they load what they need.
        inherited = device.worker_environment(cores) if "keras" in sys.modules else {}

        def run(rank: int) -> None:
            try:
                host.run(Placement(rank, 0, "127.0.0.1", cores, self.gpus[rank]), partial(Child, spawn), inherited)
            except BaseException:
                group.stop()  # others may wait for this rank
                raise

        def run_all() -> None:
            with ThreadPoolExecutor(group.size, "sparkkeras-rank") as threads:
                for done in [threads.submit(run, rank) for rank in range(group.size)]:
                    done.result()

        return LocalRunning(run_all)


def gpus_of_ranks(ranks: int, each: int | None) -> tuple[tuple[str, ...], ...]:
    """Distribute the GPUs of this machine.

    Args:
        ranks: The number of ranks.
        each: The number of GPUs for each; ``None``: as many as there are for all.

    Raises:
        ConfigurationError: There are too few.
    """
    found = _gpus()
    count = max(1, len(found) // ranks) if each is None else each
    if count * ranks > len(found):
        raise ConfigurationError(
            f"{counted(ranks, 'rank')} with {counted(count, 'GPU')} each need {count * ranks}, but this machine has "
            f"{len(found)}: use fewer ranks or gpus_per_worker, or use_gpu=False."
        )
    return tuple(tuple(found[rank * count : (rank + 1) * count]) for rank in range(ranks))


def _gpus() -> list[str]:
    """The addresses of the GPUs that this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [address for address in visible.split(",") if address not in ("", "-1")]
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        return []
