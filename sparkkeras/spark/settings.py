"""What Spark's settings say: of its master, of the ports of workers, of the resources of tasks."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from sparkkeras.errors import ConfigurationError, counted

if TYPE_CHECKING:
    from pyspark import SparkContext


def is_local(master: str) -> bool:
    """Whether tasks run on the machine of the driver, or of the Spark Connect server, and share its files."""
    return master.startswith("local") and not master.startswith("local-cluster")


def uses_connect() -> bool:
    """Whether this process is a client of Spark Connect, and so has no JVM, or only that of a server that it has started."""
    from pyspark.sql import is_remote

    return bool(is_remote())


WORKER_PORTS = "spark.sparkkeras.worker.ports"
"""The setting of Spark that limits the ports on which workers of all-reduce training and of `SparkRunner` listen."""


class Settings(Protocol):
    """The settings of a SparkContext, or of a session of Spark Connect."""

    def get(self, key: str, default: str, /) -> str | None:
        """The value of a setting."""
        ...


def worker_ports(settings: Settings) -> range | None:
    """The ports of `WORKER_PORTS`; ``None``: any free ones.

    Raises:
        ConfigurationError: The setting is not a range of ports.
    """
    value = settings.get(WORKER_PORTS, "")
    if not value:
        return None
    found = re.fullmatch(r"(\d{1,5})-(\d{1,5})", value)
    if not found or not 0 < int(found[1]) <= int(found[2]) < 1 << 16:
        raise ConfigurationError(
            f"{WORKER_PORTS}={value!r}: expected the first and the last of 1 to 65535, such as '36000-36031'."
        )
    return range(int(found[1]), int(found[2]) + 1)


def task_gpus(settings: Settings) -> float:
    """The number of GPUs that Spark assigns to each task without a resource profile."""
    return float(settings.get("spark.task.resource.gpu.amount", "0") or 0)


def task_cores(settings: Settings) -> int:
    """The number of CPU cores of each task without a resource profile."""
    return int(settings.get("spark.task.cpus", "1") or 1)


class WorkerSize(NamedTuple):
    """The CPU cores and GPUs of each worker; ``None``: those of a task, as Spark is configured."""

    cores: int | None = None
    gpus: int | None = None


AS_CONFIGURED = WorkerSize()
"""Those of a task, as Spark is configured."""


@dataclass(frozen=True)
class TaskResources:
    """The resources of each task of a job.

    Attributes:
        cores: CPU cores.
        gpus: GPUs, also a fraction of one; ``None``: none, since a profile replaces what Spark is configured for.
    """

    cores: int
    gpus: float | None = None

    @classmethod
    def of(
        cls, settings: Settings, local_slots: int | None, cores: int | None, gpus: int | None, unit: str
    ) -> TaskResources:
        """Those of a task with so many CPU cores and GPUs; ``None``: as Spark is configured. See `Cluster.with_task`.

        Args:
            settings: The settings of Spark.
            local_slots: The slots of a local master; ``None``: the master is another one.
            cores: The CPU cores.
            gpus: The GPUs.
            unit: See `Cluster.with_task`.

        Raises:
            ConfigurationError: Spark cannot give a task as many, or allocates executors dynamically.
        """
        of_task, master = task_cores(settings), settings.get("spark.master", "") or ""
        cores = of_task if cores is None else cores
        if cores < of_task:
            raise ConfigurationError(
                f"cores_per_{unit}={cores}, and each task of this Spark has {of_task} (spark.task.cpus): a {unit} has at "
                "least these."
            )
        if local_slots is not None:
            if gpus is not None:
                raise ConfigurationError(
                    f"gpus_per_{unit}={gpus}: Spark assigns GPUs on standalone clusters, YARN and Kubernetes, and not with "
                    f"the master {master!r}, where every {unit} sees all GPUs: omit it, and use num_workers=1."
                )
            if cores > (most := local_slots * of_task):
                raise ConfigurationError(f"cores_per_{unit}={cores}, but the master {master!r} has {counted(most, 'core')}.")
            return cls(cores)
        if settings.get("spark.dynamicAllocation.enabled", "false") == "true":
            raise ConfigurationError(
                f"cores_per_{unit}= and gpus_per_{unit}= with spark.dynamicAllocation.enabled=true: Spark would start "
                "executors for this call alone. Turn it off, or set spark.task.cpus and spark.task.resource.gpu.amount."
            )
        return cls(cores, gpus or task_gpus(settings) or None)

    def slots_per_task(self, settings: Settings) -> int:
        """How many tasks without a resource profile each task takes the place of."""
        gpus = task_gpus(settings)
        return math.ceil(max(self.cores / task_cores(settings), (self.gpus or 0) / gpus if gpus else 1))

    def profile(self) -> Any:
        """The resource profile of such tasks."""
        from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

        requests = TaskResourceRequests().cpus(self.cores)
        if self.gpus is not None:
            requests = requests.resource("gpu", self.gpus)
        return ResourceProfileBuilder().require(requests).build

    def slots(self, context: SparkContext) -> int:
        """The number of such tasks that can run at the same time on the executors that are there.

        Raises:
            ConfigurationError: No executor has room for one, or Spark does not support resource profiles here.
        """
        try:
            rdd: Any = context.parallelize((), 1).withResources(self.profile())
            scala: Any = context._jsc.sc()
            slots = int(scala.maxNumConcurrentTasks(rdd._jrdd.rdd().getResourceProfile()))
        except Exception as error:  # Spark compares the profile with its configuration
            reason = getattr(error, "java_exception", error)
            raise ConfigurationError(self._refused(str(getattr(reason, "getMessage", reason.__str__)()))) from error
        if not slots:
            raise ConfigurationError(self._refused("no executor has as many"))
        return slots

    def _refused(self, reason: str) -> str:
        gpus = "" if self.gpus is None else f" and {self.gpus:g} GPU{'s' * (self.gpus != 1)}"
        return (
            f"Spark cannot run tasks with {counted(self.cores, 'CPU core')}{gpus}: {reason.rstrip('.')}. Use fewer, or "
            "larger executors (spark.executor.cores, spark.executor.resource.gpu.amount)."
        )
