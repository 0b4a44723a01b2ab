"""Converts the rows of an RDD to validated blocks, and redistributes them if another number of partitions is needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from sparkkeras.data.block import BLOCK_BYTES, Block, Form, describe, piece_rows
from sparkkeras.data.reader import Reader
from sparkkeras.errors import DataError
from sparkkeras.sources.partitions import RddPartitions
from sparkkeras.spark.cluster import Cluster

if TYPE_CHECKING:
    from pyspark import RDD

FIRST_ROWS = 16
"""The number of rows in the first block, from which the size of a row is measured."""


@dataclass(frozen=True)
class RowsToBlocks:
    """Collects rows into validated blocks."""

    reader: Reader

    def __call__(self, partition: int, rows: Iterable[Any]) -> Iterator[Block]:
        """The blocks of a partition."""
        remaining, first, size = iter(rows), 0, FIRST_ROWS
        form: Form | None = None
        while chunk := list(islice(remaining, size)):
            form = form or self.reader.form_of(chunk[0], partition)
            block = self.reader.read_rows(chunk, form, partition, first)
            if not first:
                size = piece_rows(block.row_bytes, BLOCK_BYTES)
            first += len(chunk)
            yield block


@dataclass(frozen=True)
class KeyedRowsToBlocks:
    """Collects the features of ``(key, x)`` rows into validated blocks for prediction, which keeps all rows."""

    reader: Reader

    def __call__(self, partition: int, rows: Iterable[Any]) -> Iterator[tuple[list[Any], Block]]:
        """The blocks of a partition, each with the keys of its rows."""
        keys: deque[Any] = deque()

        def features() -> Iterator[Any]:
            for number, row in enumerate(rows):
                if not isinstance(row, (tuple, list)) or len(row) != 2:
                    raise DataError(
                        f"row {number} of partition {partition} is {describe(row)}; with keyed=True, expected a pair "
                        "(key, x), in which x is an array, or a tuple of arrays for several inputs."
                    )
                keys.append(row[0])
                yield row[1]

        for block in RowsToBlocks(self.reader)(partition, features()):
            yield [keys.popleft() for _ in range(block.rows)], block


@dataclass(frozen=True)
class RoundRobin:
    """Distributes the rows of blocks to ``parts`` parts, one row to each in turn.

    Yields ``((part, partition, number), block)``, so that a part can sort its blocks, in whatever order they arrive.
    """

    parts: int

    def __call__(self, partition: int, blocks: Iterable[Block]) -> Iterator[tuple[tuple[int, int, int], Block]]:
        """Distribute a partition."""
        offset = partition  # so that the remaining rows of all partitions do not go to the same parts
        for number, block in enumerate(blocks):
            for part, turns in enumerate(in_turn(offset, self.parts)):
                selected = block[turns]
                if selected.rows:
                    yield (part, partition, number), selected
            offset += block.rows


def in_turn(offset: int, parts: int) -> Iterator[slice]:
    """The rows of each part if each row goes to another part in turn, the first one to part ``offset % parts``."""
    return (slice((part - offset) % parts, None, parts) for part in range(parts))


def from_rows(
    cluster: Cluster,
    rows: RDD[Any],
    read: RowsToBlocks | KeyedRowsToBlocks,
    num_workers: int | None = None,
    max_partitions: int | None = None,
) -> RddPartitions:
    """The blocks of the rows of an RDD.

    They have the partitions of the RDD or, if ``num_workers`` is another number, as many partitions, among which one
    shuffle distributes the rows evenly. More than ``max_partitions`` partitions are coalesced instead, without a shuffle.
    """
    if max_partitions is not None and max_partitions < (num_workers or rows.getNumPartitions()):
        rows, num_workers = rows.coalesce(max_partitions), None
    blocks = RddPartitions(cluster, rows.mapPartitionsWithIndex(read))
    if num_workers is not None and num_workers != rows.getNumPartitions():
        blocks = blocks.moved(RoundRobin(num_workers), num_workers, keys=3)
    return blocks
