"""Spark's task slots: how many there are, how many a running fit holds, and checks of jobs that need more."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sparkkeras.errors import ConfigurationError, counted, warn

if TYPE_CHECKING:
    from pyspark import SparkContext

MANY_PARTITIONS = 4
"""With more partitions per slot than this, rounds spend most of their time starting tasks, unless partitions are large."""

FEW_BATCHES = 50
"""The maximum number of batches between two exchanges in a small partition."""

_waiting = threading.local()
"""``slots``: the number of slots held by jobs that wait for this thread to return from a callback."""


@contextmanager
def holding_slots(slots: int) -> Iterator[None]:
    """Run callbacks for which a Spark job waits and holds its slots, so that jobs started by the callbacks cannot use them.

    Args:
        slots: The number of slots that the job holds. The slots of nested calls add up.
    """
    before = held_slots()
    _waiting.slots = before + slots
    try:
        yield
    finally:
        _waiting.slots = before


def held_slots() -> int:
    """The number of slots that are held until this thread returns from a callback; 0 outside of callbacks."""
    slots: int = getattr(_waiting, "slots", 0)
    return slots


def slots_of(context: SparkContext) -> int:
    """The number of tasks that can currently run at the same time."""
    scala = context._jsc.sc()
    try:
        profile = scala.resourceProfileManager().defaultResourceProfile()
        return max(1, int(scala.maxNumConcurrentTasks(profile)))
    except Exception:  # an internal API of Spark, which may change
        return max(1, context.defaultParallelism)


def check_slots(context: SparkContext, per_task: int = 1) -> None:
    """Reject a job that would deadlock, because another job holds all slots until this thread returns from a callback.

    The tasks of asynchronous training wait for the driver when they are a few epochs ahead of its callbacks, those of
    all-reduce training at the end of every epoch, so a callback that waits for a slot would wait forever.

    Args:
        context: The context of the job.
        per_task: The number of slots that each of its tasks needs.

    Raises:
        ConfigurationError: No slot is available for the job.
    """
    if held_slots():
        check_free_slots(slots_of(context), per_task)


def check_free_slots(slots: int, per_task: int = 1) -> None:
    """Reject a job that would deadlock; see `check_slots`.

    Args:
        slots: The number of slots, free or not.
        per_task: The number of slots that each task needs.

    Raises:
        ConfigurationError: No slot is available for the job.
    """
    if slots >= held_slots() + per_task:
        return
    fewer = {1: "fewer workers than slots, on a cluster with more slots", 2: "num_workers=1"}.get(
        slots, f"num_workers={slots - 1} or fewer"
    )
    raise ConfigurationError(
        f"this call starts a Spark job inside a callback of a fit whose mode holds all slots ({slots}) until its callbacks "
        "return: the two would wait for each other forever. In callbacks, use the Keras model in the driver's "
        "process (self.model.predict(...), self.model.evaluate(...)), or leave a slot free: train with "
        f"{fewer}."
    )


def warn_of_slots(num_workers: int | None, slots: int) -> None:
    """Warn if more workers are requested than can train at the same time."""
    if num_workers is not None and num_workers > slots:
        warn(
            f"num_workers={num_workers}, but Spark has {counted(slots, 'free slot')}, and in this mode all workers train at "
            f"the same time: {slots} will train. Set num_workers={slots} or less."
        )


def warn_of_partitions(workers: int, slots: int, batches: int, batch_size: int) -> None:
    """Suggest to set ``num_workers`` if a round of synchronous training starts many tasks for few batches each.

    Starting a task takes hundredths of a second, however little it trains.

    Args:
        workers: The number of partitions with training rows, where the user has not set ``num_workers``.
        slots: The number of tasks that can run at the same time.
        batches: The number of batches of the largest partition between two exchanges.
        batch_size: Rows in each batch.
    """
    if workers > MANY_PARTITIONS * slots and batches <= FEW_BATCHES:
        warn(
            f"the data has {workers} partitions with training rows, but Spark has only {counted(slots, 'slot')}, and a "
            f"partition trains at most {counted(batches, 'batch')} of {counted(batch_size, 'row')} between two exchanges: "
            f"starting {workers} tasks each time may take longer than the training. Set SparkModel(num_workers={slots}), "
            "which redistributes the rows, or coalesce the data to fewer partitions."
        )
