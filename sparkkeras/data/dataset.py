"""The dataset protocols: the operations that training strategies use on rows, wherever the rows are stored.

A new kind of data is a `Source` (`sparkkeras.sources.source`); a new kind of cluster implements `Partitions`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from sparkkeras.data.block import Block, BlockSpec
from sparkkeras.data.files import Handle
from sparkkeras.data.labels import LabelRange, union
from sparkkeras.errors import ConfigurationError, DataError

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class TaskContext:
    """The resources and identity of a running task.

    Attributes:
        worker: The index of the partition. A worker keeps the same partition for a whole run.
        attempt: The task attempt ID, unique within a SparkContext.
        cores: The CPU cores that the task may use.
        accelerators: The addresses of the GPUs that Spark assigned to the task.
        startup_seconds: How long this process took to load Keras for the task; about 0 if it was loaded before.
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
        host: The host name or IP address that tasks connect to.
        listen: The host name or IP address that the driver binds to.
        is_local: Whether all tasks run on the driver's machine.
    """

    host: str
    listen: str
    is_local: bool

    def served_at(self, host: str | None, bind: str | None) -> DriverAddress:
        """The address of a server with these settings; see `sparkkeras.rpc.options.ServerOptions`."""
        return replace(self, host=host or self.host, listen=bind or host or self.listen)


class Rows(Protocol):
    """Rows that a task can open."""

    def open(self) -> Block | None:
        """All rows, or ``None`` if there are none."""
        ...

    def blocks(self) -> Iterator[Block]:
        """All rows, block by block."""
        ...


class BlockStream(Protocol):
    """Rows that are read anew in each epoch, block by block; each block is a batch."""

    def blocks(self, epoch: int = 0, seed: int = 0) -> Generator[Block, None, None]:
        """Read the rows of an epoch from the beginning. The same epoch and seed give the same rows. Close it if you stop."""
        ...


class Task(Protocol[R_co]):
    """The function that runs on each partition: a callable frozen dataclass."""

    def __call__(self, context: TaskContext, blocks: Iterator[Block], /) -> Iterator[R_co]:
        """Process the partition's blocks and yield results."""
        ...


class TrainingTask(Protocol[R_co]):
    """A task that trains on each partition: its rows are either one stored block, or a stream."""

    def __call__(self, context: TaskContext, rows: Iterator[Block | BlockStream], /) -> Iterator[R_co]:
        """Train on the partition and yield results."""
        ...


class Shared(Protocol[T_co]):
    """A read-only value that all tasks can access, such as a broadcast or a file."""

    @property
    def value(self) -> T_co:
        """The value. Each access may read it anew, so a task keeps it."""
        ...


class Running(Protocol[R_co]):
    """A call that runs in a background thread of the driver."""

    @property
    def done(self) -> bool:
        """Whether the call has returned or failed."""
        ...

    def result(self) -> R_co:
        """Wait for the call; return its result or raise its error."""
        ...

    def cancel(self) -> None:
        """Ask the call to end early. Does not wait."""
        ...


class FilesMissing(Exception):  # noqa: N818 - a signal between a task and its runner
    """The files of a partition are not on the machine where its task runs. Raised by the first of ``blocks``.

    If the task does not handle it, the driver reruns the task over the partition's source when the other tasks have ended.
    A strategy may instead do that itself with `Results.from_source`.
    """


class Merging(Protocol[R]):
    """Merges results, as a whole or piece by piece: piece i of the merged result depends only on the pieces i."""

    def __call__(self, results: Sequence[R], /) -> R:
        """Merge results in the given order."""
        ...

    def split(self, result: R, max_bytes: int) -> list[R]:
        """Split a result into pieces of about ``max_bytes`` each."""
        ...

    def join(self, pieces: Sequence[R]) -> R:
        """The inverse of `split`."""
        ...


class Results(Protocol[R]):
    """The results of a task over all partitions, in partition order. Lazy: no task runs before one of these is called."""

    def collect(self) -> list[R]:
        """All results."""
        ...

    def of(self, partition: int) -> list[R]:
        """The results of one partition, in a job of its own."""
        ...

    def reduce(self, merging: Merging[R]) -> list[R]:
        """Merge the results on the workers, each of which merges some pieces of all results in partition order.

        Returns:
            The merged result, equal to ``merging(collect())`` to the last bit, and the results that are not in it: those of
            partitions whose files were missing. Empty if there are no results.
        """
        ...

    def from_source(self, partitions: Sequence[int]) -> dict[int, list[R]]:
        """The results of some partitions, whose rows are read again from the source, by partition."""
        ...


class Dataset(Protocol):
    """Rows in partitions."""

    @property
    def max_result_bytes(self) -> int:
        """The limit on the size of all results of one job, in bytes; 0: no limit."""
        ...

    @property
    def driver(self) -> DriverAddress:
        """The network address at which tasks may reach this process.

        Raises:
            ClusterError: It is unknown.
        """
        ...

    def share(self, value: R) -> AbstractContextManager[Shared[R]]:
        """Make a value available to the tasks of this dataset inside the ``with`` block."""
        ...

    def run(self, task: Task[R]) -> Results[R]:
        """Run a task on every partition, lazily."""
        ...

    def stored(self) -> AbstractContextManager[StoredDataset]:
        """Read all rows and store them, so that tasks can read them repeatedly inside the ``with`` block.

        Raises:
            DataError: The rows do not fit the schema of this dataset's reader.
        """
        ...


class StoredDataset(Dataset, Protocol):
    """Rows that can be read repeatedly: each partition is one block, memory-mapped on the machine that trains on it.

    Or a `BlockStream`, if the rows are not stored but read anew in each epoch.
    """

    @property
    def num_partitions(self) -> int:
        """The number of partitions."""
        ...

    @property
    def handles(self) -> tuple[Handle, ...]:
        """The metadata of each partition, in order."""
        ...

    @property
    def slots(self) -> int:
        """The number of tasks that can run at the same time."""
        ...

    @property
    def slots_per_task(self) -> int:
        """How many tasks of the size for which the cluster is configured each task takes the place of."""
        ...

    @property
    def is_driver_here(self) -> bool:
        """Whether this process is the driver of the cluster. With Spark Connect, that is the server."""
        ...

    def without_rows(self, count: int) -> Dataset:
        """A dataset of ``count`` empty partitions on the same cluster, for tasks that need no rows of their own."""
        ...

    def background(self, call: Callable[[], R]) -> Running[R]:
        """Run a call that uses this dataset in a background thread."""
        ...

    def train(self, task: TrainingTask[R]) -> Results[R]:
        """Run a task on every partition, lazily, which receives the partition's rows as one block or stream."""
        ...

    def everywhere(self) -> AbstractContextManager[tuple[Rows, ...]]:
        """Make each partition's rows available to the tasks of other datasets, on any machine, inside the ``with`` block.

        Raises:
            ConfigurationError: The rows are too large.
        """
        ...


def check_driver_here(dataset: StoredDataset, otherwise: str) -> None:
    """Reject a dataset of a client of Spark Connect.

    Raises:
        ConfigurationError: This process is not the driver; the message is ``otherwise``.
    """
    if not dataset.is_driver_here:
        raise ConfigurationError(otherwise)


@dataclass(frozen=True)
class Piece:
    """A piece of a result, with its index; see `Merging.split`."""

    index: int
    value: Any


class Unmerged:
    """The base class of what tasks yield in place of results, which is not merged."""


def joined(merging: Merging[R], found: Sequence[Any]) -> list[R]:
    """The result that the merged pieces among values make up, in a list; empty if there are none."""
    in_order = sorted((item for item in found if isinstance(item, Piece)), key=lambda piece: piece.index)
    return [merging.join([piece.value for piece in in_order])] if in_order else []


def common_spec(handles: Sequence[Handle]) -> BlockSpec | None:
    """The spec that all non-empty partitions share; ``None`` if all are empty.

    Raises:
        DataError: Two partitions have different specs.
    """
    specs = [(handle.partition, handle.spec) for handle in handles if handle.spec is not None]
    for partition, spec in specs:
        first, expected = specs[0]
        if spec != expected:
            raise DataError(
                f"partitions differ: {_description(expected)} in partition {first}, but {_description(spec)} in partition "
                f"{partition}. Every row must have the same shape and dtype."
            )
    return specs[0][1] if specs else None


def all_labels(handles: Sequence[Handle]) -> tuple[LabelRange, ...]:
    """The label ranges over all partitions."""
    return functools.reduce(union, (handle.labels for handle in handles), ())


def _description(spec: BlockSpec) -> str:
    leaves = zip(spec.form.labels, spec.leaves, strict=True)
    return ", ".join(f"{label} has shape {leaf.shape}, {leaf.dtype}" for label, leaf in leaves)
