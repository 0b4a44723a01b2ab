"""The protocols of data: what a strategy may ask of rows, wherever they are.

A new source of data is one file beside this one with a `Dataset` in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from sparkkeras.data.block import Block, BlockSpec
from sparkkeras.data.files import Handle
from sparkkeras.data.schema import LabelRange, union
from sparkkeras.errors import DataError

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class TaskContext:
    """Where a task runs.

    Attributes:
        worker: The number of the partition; a partition is a worker's share for a whole run.
        attempt: How often the task was tried before.
        cores: The CPU cores that the task may use.
        accelerators: The addresses of the GPUs that Spark gave the task.
    """

    worker: int
    attempt: int = 0
    cores: int = 1
    accelerators: tuple[str, ...] = ()


class Task(Protocol[R_co]):
    """What runs over one partition: a frozen dataclass that is called. It reads ``blocks`` to the end."""

    def __call__(self, context: TaskContext, blocks: Iterator[Block]) -> Iterator[R_co]:
        """Go through the partition's blocks and yield results."""
        ...


class Shared(Protocol[T_co]):
    """A value that all tasks read."""

    @property
    def value(self) -> T_co:
        """The value, fetched once for each process."""
        ...


class Results(Protocol[R]):
    """What a task yields over all partitions, in their order; nothing has run before one of these is called."""

    def collect(self) -> list[R]:
        """All results."""
        ...

    def reduce(self, combine: Callable[[Sequence[Any]], Any], groups: int) -> list[Any]:
        """The results of ``groups`` neighbouring groups of partitions, each combined on a worker."""
        ...

    def lazy(self) -> Any:
        """The results as the source's own distributed collection (an RDD)."""
        ...


class Dataset(Protocol):
    """Rows in partitions."""

    @property
    def num_partitions(self) -> int:
        """How many partitions there are."""
        ...

    @property
    def max_result_bytes(self) -> int:
        """What the results of one job may have altogether; 0 is no bound."""
        ...

    def share(self, value: R) -> AbstractContextManager[Shared[R]]:
        """Make a value available to the tasks of this dataset until the context ends."""
        ...

    def run(self, task: Task[R]) -> Results[R]:
        """The results of a task over every partition."""
        ...

    def stored(self) -> AbstractContextManager[StoredDataset]:
        """The rows where tasks can come back to them again and again, until the context ends.

        Raises:
            DataError: The rows are not what the reader of this dataset expects.
        """
        ...


class StoredDataset(Dataset, Protocol):
    """Rows that were read once: each partition is one block, memory-mapped where it trains."""

    @property
    def handles(self) -> tuple[Handle, ...]:
        """What is known of each partition, in order."""
        ...


def common_spec(handles: Sequence[Handle]) -> BlockSpec | None:
    """The spec that all partitions with rows share; ``None`` where no partition has any.

    Raises:
        DataError: Two partitions differ.
    """
    first: Handle | None = None
    for handle in handles:
        if handle.spec is None:
            continue
        if first is None:
            first = handle
        elif handle.spec != first.spec:
            assert first.spec is not None
            raise DataError(
                f"partitions differ: {_told(first.spec)} in partition {first.partition}, but {_told(handle.spec)} in "
                f"partition {handle.partition}. Every row must have the same shape and type."
            )
    return None if first is None else first.spec


def all_labels(handles: Sequence[Handle]) -> tuple[LabelRange, ...]:
    """The label ranges over all partitions."""
    ranges: tuple[LabelRange, ...] = ()
    for handle in handles:
        ranges = union(ranges, handle.labels)
    return ranges


def _told(spec: BlockSpec) -> str:
    leaves = zip(spec.form.labels, spec.leaves, strict=True)
    return ", ".join(f"{label} has shape {leaf.shape}, {leaf.dtype}" for label, leaf in leaves)
