"""The protocols of data: what a strategy may ask of rows, wherever they are.

A new source of data is one file beside this one with a `Dataset` in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

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
        attempt: A number that no other attempt at a task has, in one SparkContext.
        cores: The CPU cores that the task may use.
        accelerators: The addresses of the GPUs that Spark gave the task.
        startup_seconds: How long this process took to load Keras for the task; about 0 where it had it already.
    """

    worker: int
    attempt: int = 0
    cores: int = 1
    accelerators: tuple[str, ...] = ()
    startup_seconds: float = 0.0


@dataclass(frozen=True)
class DriverAddress:
    """How tasks reach the driver.

    Attributes:
        host: The name or number that they dial.
        listen: The name or number that the driver listens on.
        is_local: Whether all tasks run on the driver's machine.
    """

    host: str
    listen: str
    is_local: bool


class Rows(Protocol):
    """Rows that a task can open."""

    def open(self) -> Block | None:
        """The rows, or ``None`` where there are none."""
        ...


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


class Running(Protocol[R_co]):
    """Work that goes on in a thread of its own while the driver does something else."""

    @property
    def done(self) -> bool:
        """Whether it is over, well or not."""
        ...

    def result(self) -> R_co:
        """Wait for the end; what came of it, or the error that ended it."""
        ...

    def cancel(self) -> None:
        """Have it end soon."""
        ...


class FilesMissing(Exception):  # noqa: N818 - a signal between a task and what runs it
    """A partition's rows are not where its task runs. It is raised by the first of ``blocks``.

    A task lets it pass, and the driver has the partition read again when all are through; or it sees to that itself
    (`Results.from_source`).
    """


@runtime_checkable
class Merging(Protocol[R]):
    """Makes one result of several, also piece by piece: pieces of the one are made of the same pieces of the others."""

    def __call__(self, results: Sequence[R], /) -> R:
        """One result of several, in the order given."""
        ...

    def split(self, result: R, max_bytes: int) -> list[R]:
        """A result in pieces of about so many bytes."""
        ...

    def join(self, pieces: Sequence[R]) -> R:
        """The result again."""
        ...


class Results(Protocol[R]):
    """What a task yields over all partitions, in their order; nothing has run before one of these is called."""

    def collect(self) -> list[R]:
        """All results."""
        ...

    def reduce(self, combine: Callable[[Sequence[Any]], Any], groups: int) -> list[Any]:
        """The results, combined on workers: those of ``groups`` neighbouring groups of partitions, or fewer.

        A `Merging` may be carried out piece by piece instead, over all partitions.
        """
        ...

    def from_source(self, partitions: Sequence[int]) -> dict[int, list[R]]:
        """The results of some partitions whose rows are read again from where they came from."""
        ...

    def lazy(self) -> Any:
        """The results as the source's own distributed collection (an RDD)."""
        ...


class Dataset(Protocol):
    """Rows in partitions."""

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
    def num_partitions(self) -> int:
        """How many partitions there are."""
        ...

    @property
    def handles(self) -> tuple[Handle, ...]:
        """What is known of each partition, in order."""
        ...

    @property
    def slots(self) -> int:
        """How many tasks can run at the same time."""
        ...

    @property
    def driver(self) -> DriverAddress:
        """How tasks reach this process over the network."""
        ...

    def background(self, call: Callable[[], R]) -> Running[R]:
        """Do something with this dataset in a thread of its own."""
        ...

    def everywhere(self) -> AbstractContextManager[tuple[Rows, ...]]:
        """Each partition's rows in a form that tasks of another dataset can open wherever they run.

        Raises:
            ConfigurationError: They are too large for that.
        """
        ...

    def without_rows(self, count: int) -> Dataset:
        """A dataset of ``count`` partitions that have no rows, for tasks that run where those of this one do."""
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
