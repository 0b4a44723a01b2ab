"""The hosts of ranks as tasks of one query of Spark Connect, which connect to the client's process.

The workers are shared with other queries, so they may have used the backend, and cannot fork: ranks are new processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparkkeras.data.dataset import DriverAddress, Running
from sparkkeras.rpc.transport import Address
from sparkkeras.runner.hosts import Host
from sparkkeras.runner.processes import Process, spawn
from sparkkeras.runner.rank import RankMain
from sparkkeras.runner.spark_hosts import ConnectionCheck, TaskHost
from sparkkeras.sources.frame_blocks import PicklesResults
from sparkkeras.sources.tasks import task_context
from sparkkeras.spark.connect import CELL_BYTES, FILES, RESULT, RemoteCluster, session_files, unpack_cells
from sparkkeras.spark.connectivity import Preflight, check_reached
from sparkkeras.spark.settings import TaskResources, worker_ports

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame


@dataclass(frozen=True)
class ConnectTasks:
    """Runs each host in a task of one query of Spark Connect: a `sparkkeras.runner.groups.Hosts`.

    Attributes:
        cluster: The cluster.
        otherwise: What to do if the workers cannot connect to this process, for the message.
        use_gpu: Whether the processes may use the GPUs of their tasks.
        gpus_per_worker: The number of GPUs for each task; ``None``: as Spark is configured.
    """

    cluster: RemoteCluster
    otherwise: str
    use_gpu: bool
    gpus_per_worker: int | None = None

    @property
    def driver(self) -> DriverAddress:
        """See `RemoteCluster.driver`."""
        return self.cluster.driver

    @property
    def ports(self) -> range | None:
        """See `Hosts.ports`."""
        return worker_ports(self.cluster.session.conf)

    def start(self, host: Host, handles: DataFrame | None) -> Running[list[Any]]:
        """See `Hosts.start`.

        Raises:
            DriverConnectionError: The workers cannot connect to this process.
        """
        cluster, gpus = self.cluster, self.gpus_per_worker
        check_connection(cluster, host.world_size, host.driver, self.otherwise)
        ranks = cluster.session.range(0, host.world_size, 1, host.world_size)
        task = RemoteRankTask(host, cluster.task_cores, self.use_gpu, cluster.is_local, cluster.carried_environment)
        query = (ranks if handles is None else handles).mapInArrow(
            PicklesResults(task, CELL_BYTES),
            RESULT,
            barrier=host.together,
            profile=None if gpus is None else TaskResources(cluster.task_cores, gpus).profile(),
        )
        return cluster.background(lambda: cluster.collect(query))


def check_connection(cluster: RemoteCluster, count: int, address: Address, otherwise: str) -> None:
    """Check that tasks can connect to a server in this process.

    Args:
        cluster: The cluster.
        count: The number of tasks that try.
        address: The address of the server.
        otherwise: What to do if they cannot, for the message.

    Raises:
        DriverConnectionError: Some of them cannot.
    """

    def run(check: Preflight) -> list[str]:
        numbers = cluster.session.range(0, count, 1, count)
        return cluster.collect(numbers.mapInArrow(PicklesResults(ConnectionCheck(check), CELL_BYTES), RESULT))

    check_reached(address, run, f"The driver is this process, a client of Spark Connect: {otherwise}")


@dataclass(frozen=True)
class RemoteRankTask(TaskHost):
    """The task of a rank, over a partition of a frame of handles, or of any other frame if the run has no data.

    Attributes:
        environment: Environment variables of the process: the backend of the client.
    """

    environment: Mapping[str, str]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[Any]:
        """Run the rank; yields nothing, since its result goes to the client directly."""
        read = [batch for batch in batches if "result" in batch.schema.names]
        handles = list(unpack_cells(cell for batch in read for cell in batch.column("result").to_pylist()))
        self.run(task_context(cores=self.cores), self._start, tuple(handles))
        return iter(())

    def _start(self, main: RankMain, variables: Mapping[str, str]) -> Process:
        return spawn(main, {**self.environment, FILES: session_files(), **variables})
