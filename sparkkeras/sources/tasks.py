"""What runs on the workers: tasks over blocks, writing partitions to files and opening them, and merging results.

The same on RDDs and on Spark Connect.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from sparkkeras.data import files
from sparkkeras.data.block import BLOCK_BYTES, INLINE_BYTES, Block
from sparkkeras.data.dataset import FilesMissing, Merging, Piece, Shared, Task, TaskContext, Unmerged
from sparkkeras.data.files import Handle, one_block
from sparkkeras.data.placement import SAME_ROWS
from sparkkeras.data.text import Text
from sparkkeras.data.values import DelayedValue, Pickled, ValueFile
from sparkkeras.errors import DataError
from sparkkeras.modeling import garbage_collection
from sparkkeras.spark.connect import FILES
from sparkkeras.spark.job_errors import TaskFailure
from sparkkeras.worker import device

R = TypeVar("R")

Call = Callable[[int, Iterable[Any]], Iterable[Any]]
"""A function of the index of a partition and its values, which yields results."""

SWEEP_SECONDS = 0.1
"""How long each task that removes files waits, so that Spark gives every executor one of them."""


@dataclass(frozen=True)
class Collect:
    """Yields the rows themselves, without references to their files."""

    def __call__(self, context: TaskContext, blocks: Iterator[Block]) -> Iterator[Block]:
        """The blocks."""
        return map(in_memory, blocks)


def in_memory(block: Block) -> Block:
    """The rows, without references to their files. Strings are as they are, since pickling copies them."""
    return Block(block.form, tuple(array if isinstance(array, Text) else np.array(array) for array in block.arrays))


@dataclass(frozen=True)
class SharedRows:
    """Rows in a value that tasks can access."""

    shared: Shared[Block]

    def open(self) -> Block | None:
        """The rows."""
        return self.shared.value

    def blocks(self) -> Iterator[Block]:
        """The rows, as one block."""
        return one_block(self.shared.value)


@dataclass(frozen=True)
class Open:
    """Opens the files of a partition, and yields nothing."""

    def __call__(self, context: TaskContext, blocks: Iterator[Block]) -> Iterator[Any]:
        """Open them."""
        next(blocks, None)
        return iter(())


@dataclass(frozen=True)
class Missing(Unmerged):
    """The result of a task that did not find the files of its partition."""

    partition: int


def repaired(found: Sequence[Any], from_source: Callable[[Sequence[int]], Mapping[int, list[Any]]]) -> list[Any]:
    """The results of tasks, with those of partitions without files computed from their source.

    Args:
        found: The results, with a `Missing` for each partition without files.
        from_source: Returns the results of such partitions.
    """
    missing = [item.partition for item in found if isinstance(item, Missing)]
    again = from_source(missing) if missing else {}
    return [result for item in found for result in (again[item.partition] if isinstance(item, Missing) else [item])]


def by_partition(pairs: Iterable[tuple[int, Any]], partitions: Sequence[int]) -> dict[int, list[Any]]:
    """The results in pairs of partition and result, of some partitions."""
    results: dict[int, list[Any]] = {partition: [] for partition in partitions}
    for partition, result in pairs:
        results[partition].append(result)
    return results


@dataclass(frozen=True)
class ReportsProblems:
    """Calls a function on a partition, and yields a `TaskFailure` in place of a DataError.

    Spark would run the task again, log the error each time, and end its Python worker with the models that this has loaded.
    """

    call: Call

    def __call__(self, partition: int, rows: Iterable[Any]) -> Iterator[Any]:
        """Yield the results."""
        stream = iter(rows)
        try:
            yield from self.call(partition, stream)
        except DataError as error:
            for _ in stream:  # Spark cannot reuse the worker process of a task that leaves rows unread
                pass
            yield TaskFailure.of(error)
        except Exception:
            os.environ.pop("SPARK_SIMPLIFIED_TRACEBACK", None)  # which omits causes; Spark ends this process after the error
            raise


@dataclass(frozen=True)
class ThroughFiles:
    """Calls a function on a partition, and yields a `ValueFile` in place of each large result.

    Spark's JVM copies a value several times: a round with 1.4 MB of state took 0.07 s instead of 0.05.

    Attributes:
        call: The function.
        folder: The folder of the files, on a disk that workers and driver share.
    """

    call: Call
    folder: Path

    def __call__(self, partition: int, rows: Iterable[Any]) -> Iterator[Any]:
        """Yield the results."""
        from pyspark import cloudpickle

        for result in self.call(partition, rows):
            pickled = Pickled.of(result, cloudpickle.dumps)  # as Spark does: keys may be of classes of the user's script
            yield result if pickled.nbytes <= INLINE_BYTES else ValueFile.write(pickled, self.folder)


def task_context(partition: int | None = None, cores: int | None = None) -> TaskContext:
    """The context of the current Spark task; Spark supplies the values that are not passed."""
    from pyspark import TaskContext as SparkTask

    task = SparkTask.get()
    if task is None:
        return TaskContext(partition or 0, cores=cores or 1)
    partition = task.partitionId() if partition is None else partition
    cores = task.cpus() if cores is None else cores
    gpus = task.resources().get("gpu")
    return TaskContext(partition, task.taskAttemptId(), cores, tuple(gpus.addresses) if gpus else ())


class Deferred(Generic[R]):
    """A task that is unpickled on the worker after the process is set up, since it may import Keras.

    Args:
        task: The task.
        environment: Environment variables to set in the process, if Spark does not.
        backend: The backend to run it with, in a child process; ``None``: that of this process.
    """

    def __init__(
        self,
        task: Callable[[TaskContext, Iterator[Any]], Iterator[R]],
        environment: Mapping[str, str] | None = None,
        backend: str | None = None,
    ) -> None:
        self._task = DelayedValue(task)
        self._environment = tuple(sorted((environment or {}).items()))
        self._backend = backend

    def __call__(self, context: TaskContext, blocks: Iterator[Any]) -> Iterator[R]:
        """Set up this process, and run the task."""
        if self._backend is not None:
            return self._elsewhere(context, blocks)
        started = time.perf_counter()
        device.prepare(context.cores, context.accelerators, self._environment, application_folder())
        garbage_collection.freeze_survivors()
        task = self._task.value
        return task(replace(context, startup_seconds=time.perf_counter() - started), blocks)

    def _elsewhere(self, context: TaskContext, blocks: Iterator[Any]) -> Iterator[R]:
        """Run the task in a child process."""
        from sparkkeras.worker.other_backend import run_in_child

        folder = application_folder()
        environment = {**dict(self._environment), **({FILES: folder} if folder else {})}
        return run_in_child(self._task, context, blocks, environment, folder)


def application_folder() -> str | None:
    """The folder on this machine that Spark removes when the application ends; ``None`` outside of a task."""
    from pyspark import SparkFiles
    from pyspark import TaskContext as SparkTask

    return None if SparkTask.get() is None else SparkFiles.getRootDirectory()


@dataclass(frozen=True)
class Pass:
    """Run a task over what a partition has: a stream of blocks, or a stream to train on."""

    task: Callable[[TaskContext, Iterator[Any]], Iterator[Any]]
    cores: int

    def __call__(self, partition: int, blocks: Iterable[Any]) -> Iterator[Any]:
        """Yield the task's results; reads all blocks."""
        stream = iter(blocks)
        yield from self.task(task_context(partition, self.cores), stream)
        for _ in stream:  # Spark cannot reuse the worker process of a task that leaves rows unread
            pass


@dataclass(frozen=True)
class StoreRows:
    """Write a partition's blocks to files and yield the handle."""

    name: str

    def __call__(self, partition: int, blocks: Iterable[Block]) -> Iterator[Handle]:
        """Yield the handle."""
        yield files.write(iter(blocks), partition, files.home(self.name), with_stats=True)


@dataclass(frozen=True)
class OpenFiles:
    """Run a task over a partition's files.

    Attributes:
        task: The task.
        cores: The CPU cores of the task.
        checksums: The checksums that the rows of each partition must have, where their places depend on the rows alone:
            Spark writes the files again after it has lost an executor. Empty: rows may be in another order then.
    """

    task: Task[Any]
    cores: int
    checksums: tuple[int | None, ...] = ()

    def __call__(self, partition: int, handles: Iterable[Handle]) -> Iterator[Any]:
        """Yield the task's results, or `Missing`."""
        for handle in handles:
            if self.checksums and handle.checksum != self.checksums[handle.partition]:
                raise DataError(f"the rows changed when they were read again, after an executor was lost. {SAME_ROWS}")
            try:
                yield from self.task(task_context(partition, self.cores), _opened(handle))
            except FilesMissing:
                yield Missing(partition)


def _opened(handle: Handle) -> Iterator[Block]:
    try:
        block = handle.open()
    except FileNotFoundError as error:
        raise FilesMissing(str(error)) from error
    if block is not None:
        yield block


@dataclass(frozen=True)
class StoreAndRun:
    """Write a partition's files on this machine, then run a task over them."""

    name: str
    call: OpenFiles

    def __call__(self, partition: int, blocks: Iterable[Block]) -> Iterator[Any]:
        """The results of the task."""
        handle = files.write(blocks, partition, files.home(self.name))
        yield from self.call(partition, iter([handle]))


@dataclass(frozen=True)
class PiecesByRank:
    """Split the rows of a partition into pieces, keyed by the rank that gets them: the partition modulo the number of ranks.

    Yields nothing if its files are on another machine.
    """

    ranks: int

    def __call__(self, partition: int, handles: Iterable[Handle]) -> Iterator[tuple[int, tuple[int, Block]]]:
        """Yield pairs of a rank, and a partition with some of its rows."""
        for handle in handles:
            with suppress(FileNotFoundError):
                block = handle.open()
                for piece in () if block is None else block.pieces(BLOCK_BYTES):
                    yield partition % self.ranks, (partition, in_memory(piece))


@dataclass(frozen=True)
class StorePieces:
    """Write the pieces that a rank gets to files, and yield the handle of each of its partitions, in order.

    Attributes:
        name: The name of the dataset.
        ranks: The number of ranks.
        handles: The handles of all partitions as they were, which take the place of those without pieces.
    """

    name: str
    ranks: int
    handles: tuple[Handle, ...]

    def __call__(self, rank: int, keyed: Iterable[tuple[int, tuple[int, Block]]]) -> Iterator[Handle]:
        """Yield the handles."""
        found: dict[int, Handle] = {}
        for partition, pieces in groupby((piece for _, piece in keyed), itemgetter(0)):
            assert partition not in found, "Spark keeps what a task yields together"
            found[partition] = files.write((block for _, block in pieces), partition, files.home(self.name))
        for handle in self.handles[rank :: self.ranks]:
            yield found.get(handle.partition, handle)


@dataclass(frozen=True)
class KeyByPartition:
    """Pair results with their partition."""

    call: Call

    def __call__(self, partition: int, rows: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        """The pairs of partition and result."""
        return ((partition, result) for result in self.call(partition, rows))


@dataclass(frozen=True)
class KeyedPieces:
    """Splits the results of a function into pieces of about ``max_bytes``, keyed by their index.

    With each piece is the number of its partition, the order in which pieces are merged.
    """

    call: Call
    merging: Merging[Any]
    max_bytes: int

    def __call__(self, partition: int, rows: Iterable[Any]) -> Iterator[KeyedPiece]:
        """The pieces."""
        for result in self.call(partition, rows):
            pieces = [result] if isinstance(result, Unmerged) else self.merging.split(result, self.max_bytes)
            yield from (((index,), (partition, piece)) for index, piece in enumerate(pieces))


KeyedPiece = tuple[tuple[int], tuple[int, Any]]
"""The index of a piece as a key, and its partition and value."""


@dataclass(frozen=True)
class MergePieces:
    """Merge the pieces of each index in the order of their partitions; pass `Unmerged` results on."""

    merging: Merging[Any]

    def __call__(self, keyed: Iterable[KeyedPiece]) -> Iterator[Piece | Unmerged]:
        """The merged pieces, and what is not merged."""
        pieces: dict[int, list[tuple[int, Any]]] = {}
        for (index,), (partition, piece) in keyed:
            if isinstance(piece, Unmerged):
                yield piece
            else:
                pieces.setdefault(index, []).append((partition, piece))
        for index, numbered in pieces.items():
            yield Piece(index, self.merging([piece for _, piece in sorted(numbered, key=itemgetter(0))]))


@dataclass(frozen=True)
class WithoutRows:
    """Calls a function in a task, and yields nothing. Its rows are read and ignored."""

    call: Callable[[], object]

    def __call__(self, rows: Iterable[Any]) -> Iterator[Any]:
        """Call the function."""
        for _ in rows:
            pass
        self.call()
        return iter(())


@dataclass(frozen=True)
class Sweep:
    """Remove a dataset's files from this executor."""

    name: str

    def __call__(self) -> None:
        """Wait, and remove the files."""
        time.sleep(SWEEP_SECONDS)
        shutil.rmtree(files.home(self.name), ignore_errors=True)
