"""What Spark's settings say: of its master, of the ports of workers, of the resources of tasks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

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


@dataclass(frozen=True)
class TaskResources:
    """The resources of each task of a job.

    Attributes:
        cores: CPU cores.
        gpus: GPUs, also a fraction of one; ``None``: none, since a profile replaces what Spark is configured for.
    """

    cores: int
    gpus: float | None = None

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
