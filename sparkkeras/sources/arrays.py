"""Sends arrays of the driver to the workers; `to_simple_rdd`."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pyspark import SparkContext
from pyspark.core.rdd import PipelinedRDD

from sparkkeras.arguments import known_arguments, optional_integer
from sparkkeras.data import files
from sparkkeras.data.block import BLOCK_BYTES, CHUNK_BYTES, Block, describe, from_arrays, piece_rows
from sparkkeras.data.dataset import Shared
from sparkkeras.data.files import Handle
from sparkkeras.data.placement import even_slices
from sparkkeras.data.reader import Reader
from sparkkeras.data.sparse import with_sparse_rows
from sparkkeras.data.values import Pickled
from sparkkeras.errors import ClusterError, ConfigurationError, DataError
from sparkkeras.sources.connect_partitions import ConnectPartitions
from sparkkeras.sources.partitions import RddPartitions, StoredRdd
from sparkkeras.sources.spark_dataset import SparkDataset, StoredSparkDataset
from sparkkeras.spark.cluster import Cluster, check_running, start_workers
from sparkkeras.spark.connect import AnyCluster, RemoteCluster
from sparkkeras.spark.job_errors import quietly
from sparkkeras.weights import Array

if TYPE_CHECKING:
    from pyspark import RDD, Broadcast


def sent(
    cluster: AnyCluster, block: Block, reader: Reader, parts: Sequence[slice | Array] | None, stack: ExitStack | None
) -> SparkDataset:
    """Distribute arrays of this process.

    Args:
        cluster: The cluster.
        block: The arrays.
        reader: Reads and checks their rows on the workers of Spark Connect.
        parts: The rows of each partition; with Spark Connect, ``None`` has Spark divide them.
        stack: Releases them in the end; ``None``: they live for as long as they are used.
    """
    if isinstance(cluster, RemoteCluster):
        return SparkDataset(ConnectPartitions.of(cluster, block, reader, parts))
    assert parts is not None, "Spark divides nothing by itself"
    if stack is not None:
        return stack.enter_context(from_block(cluster, block, parts))
    return SparkDataset(RddPartitions(cluster, send(cluster.context, block, parts)[0]))


@contextmanager
def from_block(cluster: Cluster, block: Block, parts: Sequence[slice | Array]) -> Iterator[SparkDataset]:
    """Distribute arrays of the driver, until the context ends.

    If the workers share the driver's disk, the arrays are written to it once, and the workers memory-map them. Otherwise,
    and for sparse arrays, each part is broadcast in pieces, and an executor only fetches those of its parts.

    Args:
        cluster: The cluster.
        block: The arrays.
        parts: The rows of each partition.
    """
    if not cluster.is_local or block.is_sparse:
        blocks, broadcasts = send(cluster.context, block, parts)
        try:
            yield SparkDataset(RddPartitions(cluster, blocks))
        finally:
            for broadcast in broadcasts:
                quietly(broadcast.destroy)
        return
    folder = Path(tempfile.mkdtemp(prefix="sparkkeras-", dir=cluster.context._temp_dir))
    try:
        with ThreadPoolExecutor(max_workers=min(len(parts), os.cpu_count() or 1)) as writers:
            pieces = [_pieces(block, rows, BLOCK_BYTES) for rows in parts]
            handles = list(writers.map(lambda number: files.write(pieces[number], number, folder), range(len(parts))))
        rdd = cluster.context.parallelize(handles, len(parts))
        source = RddPartitions(cluster, rdd.mapPartitions(_open_all))
        yield StoredSparkDataset(StoredRdd(cluster, rdd, source, tuple(handles), folder.name))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _open_all(handles: Iterable[Handle]) -> Iterator[Block]:
    for handle in handles:
        try:
            block = handle.open()
        except FileNotFoundError as error:
            raise ClusterError(
                f"the files of the arrays were removed during their use ({error}). They are in Spark's temporary folder "
                "(spark.local.dir): exclude it from any cleanup, and try again."
            ) from error
        if block is not None:
            yield block


def _pieces(block: Block, rows: slice | Array, max_bytes: int) -> Iterator[Block]:
    """Some rows of a block in pieces of about ``max_bytes``, as they are sent: sparse rows are small."""
    size = piece_rows(-(-block.nbytes // max(1, block.rows)), max_bytes)
    if isinstance(rows, slice):
        yield from block[rows].batches(size)
    else:
        yield from (block[rows[start : start + size]] for start in range(0, len(rows), size))


def send(context: SparkContext, block: Block, parts: Sequence[slice | Array]) -> tuple[RDD[Block], list[Broadcast[Block]]]:
    """An RDD with a partition for the rows of each part of a block, and the broadcasts that it reads.

    A union of RDDs of one partition sends each executor its own parts only, through no memory of the driver's JVM.
    """
    broadcasts: list[Broadcast[Block]] = []
    rdds = []
    for rows in parts:
        pieces = [context.broadcast(piece) for piece in _pieces(block, rows, CHUNK_BYTES)]
        broadcasts += pieces
        rdds.append(context.parallelize([0], 1).mapPartitions(_Pieces(tuple(pieces))))
    return context.union(rdds), broadcasts


@dataclass(frozen=True)
class _Pieces:
    """Yields the blocks of broadcasts, with dense arrays."""

    pieces: tuple[Shared[Block], ...]

    def __call__(self, rows: Iterable[Any]) -> Iterator[Block]:
        for _ in rows:
            pass
        for piece in self.pieces:
            yield from piece.value.dense_pieces(BLOCK_BYTES)


def rows_of(block: Block) -> Iterator[tuple[Any, ...]]:
    """The rows of a block as ``(x, y)`` or ``(x, y, sample_weight)``."""
    for row in range(block.rows):
        leaves = [array[row] for array in block.arrays]
        yield tuple(structure.build(leaves[block.form.span(side)]) for side, structure in block.form.sides)


class ArraysRDD(PipelinedRDD):  # type: ignore[type-arg]
    """An RDD of rows that refers to the arrays that it was made from, so that ``fit`` can send these instead of rows."""

    def __init__(self, context: SparkContext, block: Block, parts: int, x: Any, y: Any, sample_weight: Any) -> None:
        blocks, _ = send(context, block, even_slices(block.rows, parts))
        super().__init__(blocks, _all_rows)
        self.x, self.y, self.sample_weight = x, y, sample_weight
        self._checksum = _checksum(block)

    @property
    def is_current(self) -> bool:
        """Whether the arrays have not changed since; otherwise only the RDD itself has its rows."""
        return _checksum(from_arrays(self.x, self.y, self.sample_weight)) == self._checksum


def _checksum(block: Block) -> int:
    checksum = 0
    for part in Pickled.of(block).parts:
        checksum = zlib.crc32(part, checksum)
    return checksum


def _all_rows(_: int, blocks: Iterable[Block]) -> Iterator[tuple[Any, ...]]:
    return (row for block in blocks for row in rows_of(block))


@known_arguments
def to_simple_rdd(sc: SparkContext, x: Any, y: Any = None, sample_weight: Any = None, num_slices: int | None = None) -> Any:
    """Make an RDD of ``(x, y)`` rows, or ``(x, y, sample_weight)`` rows, from arrays.

    The result is an ordinary RDD. If it is passed to ``SparkModel`` unchanged, the workers receive slices of the arrays,
    which is faster than rows.

    Args:
        sc: The SparkContext, or a SparkSession.
        x: Features with the samples on the first axis: an array or a sparse matrix of SciPy, or a tuple or dict of these for
            several inputs.
        y: Labels, in the same form.
        sample_weight: A weight for each sample, shape (samples,), or ``None``.
        num_slices: The number of partitions; ``None``: ``sc.defaultParallelism``.

    Returns:
        An RDD with one row per sample.

    Raises:
        DataError: The arrays differ in length or are empty, or there are no labels.
        ConfigurationError: The first argument is not a SparkContext or SparkSession, or ``sample_weight`` is a number.
        ClusterError: The SparkContext is stopped.

    Example::

        rdd = to_simple_rdd(spark.sparkContext, x_train, y_train)
        SparkModel(model).fit(rdd, epochs=5)
    """
    num_slices = optional_integer("num_slices", num_slices)
    if sample_weight is not None and np.ndim(sample_weight) == 0:
        raise ConfigurationError(
            f"sample_weight={sample_weight!r}: expected an array with a weight for each sample. For the number of "
            f"partitions, use num_slices={sample_weight!r}."
        )
    sc = getattr(sc, "sparkContext", sc)
    if not isinstance(sc, SparkContext):
        raise ConfigurationError(
            f"sc is {describe(sc)}; expected a SparkContext as the first argument: to_simple_rdd(sc, x, y). SparkModel can "
            "also train on arrays directly: fit(x, y)."
        )
    check_running(sc)
    if "keras" in sys.modules:
        start_workers()
    if y is None:
        raise DataError("labels are missing: to_simple_rdd(sc, x, y). To predict, pass arrays of features to SparkModel.")
    x, y = with_sparse_rows(x), with_sparse_rows(y)
    block = from_arrays(x, y, sample_weight)
    lengths = {
        label: len(array) if array.ndim else None for label, array in zip(block.form.labels, block.arrays, strict=True)
    }
    if None in lengths.values() or len(set(lengths.values())) > 1:
        raise DataError(f"arrays must have the same number of rows, received {lengths}.")
    if block.rows == 0:
        raise DataError("the arrays have no rows.")
    return ArraysRDD(sc, block, num_slices or sc.defaultParallelism, x, y, sample_weight)
