"""All rows for every task: Spark keeps them once, and each executor that needs them gets a copy on its disk.

The rows do not pass through the driver, as they would in a broadcast. Spark keeps them in pieces on the disks of its
executors (`KeptRows`). A task of a `CopiedDataset` reads all pieces, those of other executors over the network, and writes
them to files, which it maps into memory. Other tasks of its executor use these files too.
"""

from __future__ import annotations

import fcntl
import pickle
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sparkkeras.data import files
from sparkkeras.data.block import BLOCK_BYTES, Block, concatenate
from sparkkeras.data.dataset import Task, all_labels, common_spec
from sparkkeras.data.files import Handle
from sparkkeras.data.labels import LabelRange, label_ranges, union
from sparkkeras.errors import DataError
from sparkkeras.sources.partitions import ClassicPartitions, RddPartitions, StoredRdd, sweep
from sparkkeras.sources.spark_dataset import SparkDataset, SparkResults
from sparkkeras.sources.tasks import Deferred, ReportsProblems, in_memory, task_context
from sparkkeras.spark.cluster import Cluster
from sparkkeras.spark.job_errors import TaskFailure, quietly

if TYPE_CHECKING:
    from pyspark import RDD

R = TypeVar("R")

Piece = tuple[int, int, Block]
"""Some rows, after the number of their `KeptRows` and of their partition."""


@dataclass(frozen=True)
class KeptRows:
    """Rows that Spark keeps on the disks of its executors.

    Attributes:
        cluster: The cluster, with the resources of the tasks that copy the rows.
        pieces: The rows in pieces, in their order.
        handles: The numbers of rows, shapes and label ranges of the partitions; they refer to no files.
        first: The first row.
    """

    cluster: Cluster
    pieces: RDD[Piece]
    handles: tuple[Handle, ...]
    first: Block

    @property
    def nbytes(self) -> int:
        """The size of all rows in bytes."""
        return sum(handle.nbytes for handle in self.handles)

    @property
    def labels(self) -> tuple[LabelRange, ...]:
        """The range of each array of labels."""
        return all_labels(self.handles)

    def is_at_most(self, nbytes: int) -> bool:
        """Whether the rows have at most this size, and are small enough to be collected."""
        limit = self.cluster.max_result_bytes // 2  # what Spark counts is larger than the rows
        return self.nbytes <= (min(limit, nbytes) if limit else nbytes)

    def collect(self) -> Block:
        """All rows, in this process."""
        return concatenate([block for _, _, block in self.cluster.collect(self.pieces)])


@contextmanager
def kept(dataset: SparkDataset, number: int) -> Iterator[KeptRows]:
    """Read the rows of a dataset in one job, and have Spark keep them until the context ends.

    Args:
        dataset: The rows.
        number: The position that they have among those that are copied together.

    Raises:
        DataError: There are no rows, or they are malformed or differ in shape or dtype.
    """
    from pyspark import StorageLevel

    blocks = dataset.partitions.source if isinstance(dataset.partitions, StoredRdd) else dataset.partitions
    assert isinstance(blocks, ClassicPartitions)
    cluster = blocks.cluster
    pieces = blocks.map(ReportsProblems(_CutPieces(number)), training=False)
    pieces.persist(StorageLevel.DISK_ONLY)
    try:
        described: Any = cluster.collect(pieces.mapPartitionsWithIndex(_describe))
        if not described:
            raise DataError("the data has no rows.")
        handles = tuple(handle for handle, _ in described)
        common_spec(handles)
        yield KeptRows(cluster, pieces, handles, described[0][1])
    finally:
        quietly(pieces.unpersist)


@dataclass(frozen=True)
class CopiedDataset:
    """Partitions of which each has all rows of some `KeptRows`, as one block for each of these, in their order.

    Attributes:
        cluster: The cluster.
        rows: The rows.
        num_partitions: The number of partitions.
        name: The name of the files.
    """

    cluster: Cluster
    rows: tuple[KeptRows, ...]
    num_partitions: int
    name: str

    def run(self, task: Task[R]) -> SparkResults[R]:
        """Run a task on every partition, lazily; see `Dataset.run`."""
        context = self.cluster.context
        everything = context.union([each.pieces for each in self.rows]).coalesce(1)
        blocks = RddPartitions(self.cluster, context.union([everything] * self.num_partitions))
        return SparkResults(blocks, _OnCopy(self.name, Deferred(task), self.cluster.task_cores))


@contextmanager
def copied(rows: Sequence[KeptRows], num_partitions: int) -> Iterator[CopiedDataset]:
    """A dataset of partitions with all rows each. The files are removed when the context ends."""
    cluster = rows[0].cluster
    dataset = CopiedDataset(cluster, tuple(rows), num_partitions, f"sparkkeras-{uuid.uuid4().hex}")
    try:
        yield dataset
    finally:
        quietly(lambda: sweep(cluster, dataset.name))


# Functions that run on the workers


@dataclass(frozen=True)
class _CutPieces:
    """Cuts the blocks of a partition into pieces."""

    number: int

    def __call__(self, partition: int, blocks: Iterable[Block]) -> Iterator[Piece]:
        for block in blocks:
            for piece in block.pieces(BLOCK_BYTES):
                yield self.number, partition, in_memory(piece)


def _describe(partition: int, pieces: Iterable[Piece | TaskFailure]) -> Iterator[tuple[Handle, Block] | TaskFailure]:
    """Yield the handle and the first row of a partition that has rows, or what is wrong with them."""
    rows, text_bytes, first = 0, 0, None
    labels: tuple[LabelRange, ...] = ()
    for piece in pieces:
        if isinstance(piece, TaskFailure):
            yield piece
            return
        block = piece[2]
        first = block[:1] if first is None else first
        rows += block.rows
        text_bytes += block.nbytes - block.rows * block.spec.row_bytes
        labels = union(labels, label_ranges(block))
    if first is not None:
        yield Handle(partition, "", rows, first.spec, labels, text_bytes), in_memory(first)


@dataclass(frozen=True)
class _OnCopy:
    """Runs a task over the files of this executor, which it writes if no other task has.

    Attributes:
        name: The name of the files.
        task: The task.
        cores: The CPU cores of a task.
    """

    name: str
    task: Callable[..., Iterator[Any]]
    cores: int

    def __call__(self, partition: int, pieces: Iterable[Piece]) -> Iterator[Any]:
        """Yield the task's results. The pieces are not read to the end if there are files."""
        blocks = chain.from_iterable(handle.blocks() for handle in _copy(pieces, files.home(self.name)))
        yield from self.task(task_context(partition, self.cores), blocks)


def _copy(pieces: Iterable[Piece], folder: Path) -> Sequence[Handle]:
    """The handle of the files of each `KeptRows`. One task of an executor writes them, and the others wait for it."""
    folder.mkdir(parents=True, exist_ok=True)
    written = folder / "handles"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ends with the process
        if not written.exists():
            handles = _written(pieces, folder)
            with files.draft_of(written) as draft:
                draft.write_bytes(pickle.dumps(handles))
    found: Sequence[Handle] = pickle.loads(written.read_bytes())
    return found


def _written(pieces: Iterable[Piece], folder: Path) -> list[Handle]:
    """Write the rows to one file for each array, in the order of their partitions; Spark yields these in any order."""
    for left_behind in folder.glob("part*"):  # by a task that has failed
        shutil.rmtree(left_behind, ignore_errors=True)
    parts: dict[tuple[int, int], Handle] = {}
    scratch = folder / "parts"
    for key, group in groupby(pieces, itemgetter(0, 1)):
        assert key not in parts, "Spark keeps what a task yields together"
        parts[key] = files.write((block for _, _, block in group), key[1], scratch)
    handles = []
    for number, keys in groupby(sorted(parts), itemgetter(0)):
        handles.append(files.write(chain.from_iterable(_moved(parts[key]) for key in keys), number, folder))
    shutil.rmtree(scratch, ignore_errors=True)
    return handles


def _moved(part: Handle) -> Iterator[Block]:
    """The rows of files, which are removed once they are read, so that there is room for those that they are written to."""
    yield from part.blocks()
    shutil.rmtree(part.directory, ignore_errors=True)
