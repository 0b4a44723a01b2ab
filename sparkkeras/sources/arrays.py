"""Arrays of the driver on their way to the workers."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark import SparkContext
from pyspark.core.rdd import PipelinedRDD

from sparkkeras.arguments import optional_integer
from sparkkeras.data import files
from sparkkeras.data.block import Block, describe, from_arrays
from sparkkeras.data.dataset import Shared, StoredDataset, Task
from sparkkeras.data.files import Handle
from sparkkeras.data.sizes import CHUNK_BYTES
from sparkkeras.errors import ConfigurationError, DataError
from sparkkeras.sources.rdd import Deferred, OpenFiles, RddBlocks, SparkDataset, SparkResults, StoredSparkDataset
from sparkkeras.spark.cluster import Cluster, check_running, quietly

if TYPE_CHECKING:
    from pyspark import RDD, Broadcast

R = TypeVar("R")


def even_slices(rows: int, parts: int) -> list[slice]:
    """``parts`` slices of consecutive rows whose lengths differ by one at most."""
    cuts = [rows * part // parts for part in range(parts + 1)]
    return [slice(start, stop) for start, stop in itertools.pairwise(cuts)]


@contextmanager
def from_block(cluster: Cluster, block: Block, parts: int) -> Iterator[SparkDataset]:
    """Arrays of the driver, dealt out in consecutive slices until the context ends.

    Where the workers share the driver's disk, the arrays are written there once and mapped by the workers. Elsewhere each
    slice is broadcast in pieces, and an executor fetches those of its own slices only.
    """
    slices = [block[part] for part in even_slices(block.rows, parts)]
    if not cluster.is_local:
        blocks, broadcasts = send(cluster.context, slices)
        try:
            yield SparkDataset(cluster, RddBlocks(blocks))
        finally:
            for broadcast in broadcasts:
                quietly(broadcast.destroy)
        return
    folder = Path(tempfile.mkdtemp(prefix="sparkkeras-", dir=cluster.context._temp_dir))  # type: ignore[attr-defined]
    try:
        with ThreadPoolExecutor(max_workers=min(parts, os.cpu_count() or 1)) as writers:
            handles = list(writers.map(lambda number: files.write([slices[number]], number, folder), range(parts)))
        rdd = cluster.context.parallelize(handles, parts)
        yield ArraysOnDisk(cluster, RddBlocks(rdd.mapPartitions(_open_all)), rdd, tuple(handles), folder.name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _open_all(handles: Iterable[Handle]) -> Iterator[Block]:
    return (block for handle in handles if (block := handle.open()) is not None)


@dataclass(frozen=True)
class ArraysOnDisk(SparkDataset):
    """Arrays that the driver wrote to a disk that its workers share: they are stored already."""

    handle_rdd: RDD[Any]
    handles: tuple[Handle, ...]
    name: str

    def run(self, task: Task[R]) -> SparkResults[R]:
        """As `Dataset.run`, over the files."""
        return SparkResults(self.cluster, RddBlocks(self.handle_rdd), OpenFiles(Deferred(task), self.cluster.task_cores))

    @contextmanager
    def stored(self) -> Iterator[StoredDataset]:
        """This dataset."""
        yield StoredSparkDataset(self.cluster, self.blocks, self.handle_rdd, self.handles, self.name)


def send(context: SparkContext, slices: Sequence[Block]) -> tuple[RDD[Block], list[Broadcast[Block]]]:
    """An RDD with one partition for each slice, and the broadcasts that it lives on."""
    broadcasts: list[Broadcast[Block]] = []
    rdds = []
    for part in slices:
        pieces = [context.broadcast(piece) for piece in part.pieces(CHUNK_BYTES)]
        broadcasts += pieces
        rdds.append(context.parallelize([0], 1).mapPartitions(_Pieces(tuple(pieces))))
    return context.union(rdds), broadcasts


@dataclass(frozen=True)
class _Pieces:
    """Yield the blocks that were broadcast."""

    pieces: tuple[Shared[Block], ...]

    def __call__(self, rows: Iterable[Any]) -> Iterator[Block]:
        for _ in rows:
            pass
        for piece in self.pieces:
            yield piece.value


def rows_of(block: Block) -> Iterator[tuple[Any, ...]]:
    """The rows of a block as ``(x, y)`` or ``(x, y, sample_weight)``."""
    for row in range(block.rows):
        leaves = [array[row] for array in block.arrays]
        yield tuple(structure.build(leaves[block.form.span(side)]) for side, structure in block.form.sides)


class ArraysRDD(PipelinedRDD):  # type: ignore[type-arg]
    """An ordinary RDD of rows that remembers the arrays that it was made of, so that ``fit`` need not pass rows."""

    def __init__(self, context: SparkContext, block: Block, parts: int, x: Any, y: Any, sample_weight: Any) -> None:
        blocks, _ = send(context, [block[part] for part in even_slices(block.rows, parts)])
        super().__init__(blocks, _all_rows)
        self.x, self.y, self.sample_weight = x, y, sample_weight


def _all_rows(_: int, blocks: Iterable[Block]) -> Iterator[tuple[Any, ...]]:
    return (row for block in blocks for row in rows_of(block))


def to_simple_rdd(sc: SparkContext, x: Any, y: Any = None, sample_weight: Any = None, num_slices: int | None = None) -> Any:
    """An RDD of ``(x, y)`` rows, or ``(x, y, sample_weight)`` rows, from arrays.

    It is an ordinary RDD to map or filter; given to ``SparkModel`` as it is, the arrays go to the workers whole.

    Args:
        sc: The SparkContext, or a SparkSession.
        x: Features with the samples on the first axis: an array, or a tuple or dict of arrays for several inputs.
        y: Labels, likewise.
        sample_weight: A weight for each sample, shape (samples,), or ``None``.
        num_slices: How many partitions; ``None`` takes ``sc.defaultParallelism``.

    Returns:
        An RDD with as many rows as the arrays.

    Raises:
        DataError: The arrays differ in length or are empty, or there are no labels.
        ConfigurationError: The first argument is no SparkContext.
        ClusterError: The SparkContext was stopped.

    Example::

        rdd = to_simple_rdd(spark.sparkContext, x_train, y_train)
        SparkModel(model).fit(rdd, epochs=5)
    """
    num_slices = optional_integer("num_slices", num_slices)
    sc = getattr(sc, "sparkContext", sc)
    if not isinstance(sc, SparkContext):
        raise ConfigurationError(
            f"sc is {describe(sc)}; the SparkContext comes first: to_simple_rdd(sc, x, y). SparkModel takes arrays as they "
            "are, too: fit(x, y)."
        )
    check_running(sc)
    if y is None:
        raise DataError("labels are missing: to_simple_rdd(sc, x, y). To predict, SparkModel takes arrays of features.")
    block = from_arrays(x, y, sample_weight)
    lengths = {
        label: len(array) if array.ndim else None for label, array in zip(block.form.labels, block.arrays, strict=True)
    }
    if None in lengths.values() or len(set(lengths.values())) > 1:
        raise DataError(f"arrays must have the same number of rows, received {lengths}.")
    if block.rows == 0:
        raise DataError("the arrays have no rows.")
    return ArraysRDD(sc, block, num_slices or sc.defaultParallelism, x, y, sample_weight)
