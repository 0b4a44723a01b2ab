"""The resources of tasks that need others than Spark is configured for (Spark's stage-level scheduling)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparkkeras.errors import ConfigurationError, counted

if TYPE_CHECKING:
    from pyspark import SparkContext


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
