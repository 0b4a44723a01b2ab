"""What ranks require of Spark, checked before a job starts: slots, GPUs, and executors that stay."""

from __future__ import annotations

import time

from sparkkeras.errors import ConfigurationError, counted
from sparkkeras.spark.connect import AnyCluster
from sparkkeras.spark.settings import Settings, is_local, task_gpus

REGISTER_SECONDS = 10.0
"""How long executors have to register, before a barrier stage has too few slots."""


INDEPENDENT_RANKS = "use SparkRunner(num_workers, barrier=False), whose ranks do not know each other."
"""What to do instead of starting all ranks of a `SparkRunner` together, for messages."""


def check_static_allocation(settings: Settings, otherwise: str = INDEPENDENT_RANKS) -> None:
    """Reject ranks that start together if Spark does not support barrier stages.

    Args:
        settings: The settings of Spark.
        otherwise: What to do instead, for the message.

    Raises:
        ConfigurationError: It uses dynamic allocation.
    """
    if str(settings.get("spark.dynamicAllocation.enabled", "false")).lower() == "true":
        raise ConfigurationError(
            "Spark cannot start all ranks together with spark.dynamicAllocation.enabled=true (SPARK-24942): set it to false "
            f"when the session starts, or {otherwise}"
        )


def check_slots(cluster: AnyCluster, settings: Settings, ranks: int) -> None:
    """Reject more ranks than slots, in which they would never start together.

    Args:
        cluster: The cluster.
        settings: Its settings.
        ranks: The number of ranks.

    Raises:
        ConfigurationError: Spark has too few slots.
    """
    if not cluster.is_driver_here and settings.get("spark.default.parallelism", ""):
        return  # which replaces the number of slots where they are counted by a query
    slots = registered_slots(cluster, ranks)
    if slots < ranks:
        raise ConfigurationError(
            f"num_workers={ranks}, but Spark has {counted(slots, 'slot')} (master {settings.get('spark.master', '')!r}), "
            f"and all ranks run at the same time. Use num_workers={slots} or less, give Spark more cores (for instance the "
            f"master local[{ranks}]) or a smaller spark.task.cpus, or run the ranks on the driver's machine: "
            f"SparkRunner({ranks}, local_mode=True)."
        )


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
    here = f"SparkRunner({ranks}, use_gpu=True, local_mode=True), which distributes the GPUs of this machine"
    if gpus_per_worker is not None and is_local(master):
        raise ConfigurationError(
            f"gpus_per_worker={gpus_per_worker} requests GPUs by a resource profile, which Spark supports on standalone "
            f"clusters, YARN and Kubernetes, and not with the master {master!r}: use {here}."
        )
    if gpus_per_worker is None and not task_gpus(settings):
        if is_local(master):
            raise ConfigurationError(f"use_gpu=True, but Spark assigns no GPUs with the master {master!r}: use {here}.")
        raise ConfigurationError(
            "use_gpu=True, but Spark assigns no GPUs to tasks: set spark.task.resource.gpu.amount and "
            "spark.executor.resource.gpu.amount when the session starts, or pass gpus_per_worker=."
        )
