"""Rows of an RDD as blocks: gathered, checked, and dealt out evenly where another number of parts is asked for."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparkkeras.data.block import Block, Form, piece_rows
from sparkkeras.data.schema import Reader
from sparkkeras.data.sizes import BLOCK_BYTES
from sparkkeras.sources.rdd import RddBlocks, SparkDataset
from sparkkeras.spark.cluster import Cluster

if TYPE_CHECKING:
    from pyspark import RDD

FIRST_ROWS = 16
"""Rows in the first block, which shows how many bytes a row takes."""

MANY_PARTITIONS = 4
"""With more partitions for each slot than this, rounds are mostly the starting of tasks, unless partitions are large."""

FEW_BATCHES = 50
"""A partition with no more batches than this between two exchanges is small."""


@dataclass(frozen=True)
class RowsToBlocks:
    """Gather rows into checked blocks."""

    reader: Reader

    def __call__(self, partition: int, rows: Iterable[Any]) -> Iterator[Block]:
        """The blocks of a partition."""
        first = 0
        form: Form | None = None
        size = FIRST_ROWS
        chunk: list[Any] = []
        for row in rows:
            chunk.append(row)
            if len(chunk) < size:
                continue
            form = form or self.reader.form_of(chunk[0], partition)
            block = self.reader.read_rows(chunk, form, partition, first)
            first += len(chunk)
            size = piece_rows(max(1, block.spec.row_bytes), BLOCK_BYTES) if first == len(chunk) else size
            chunk = []
            yield block
        if chunk:
            form = form or self.reader.form_of(chunk[0], partition)
            yield self.reader.read_rows(chunk, form, partition, first)


@dataclass(frozen=True)
class RoundRobin:
    """RoundRobin the rows of blocks out to ``parts`` parts, one row to each in turn.

    Yields ((part, partition, number), block), so that a part can put its blocks in order whichever came first.
    """

    parts: int

    def __call__(self, partition: int, blocks: Iterable[Block]) -> Iterator[tuple[tuple[int, int, int], Block]]:
        """RoundRobin a partition out."""
        turn = partition  # so that the odd rows of all partitions do not go to the same part
        for number, block in enumerate(blocks):
            for part in range(self.parts):
                dealt = block[slice((part - turn) % self.parts, None, self.parts)]
                if dealt.rows:
                    yield (part, partition, number), dealt
            turn += block.rows


def from_rows(
    cluster: Cluster, rows: RDD[Any], reader: Reader, num_workers: int | None, most: int | None = None
) -> SparkDataset:
    """Rows of an RDD, in its partitions, or dealt out evenly to ``num_workers`` by one shuffle where it has others.

    If that would be more than ``most``, neighbouring partitions are put together, without a shuffle.
    """
    if most is not None and most < (num_workers or rows.getNumPartitions()):
        warn_of_slots(num_workers, most)
        rows, num_workers = rows.coalesce(most), None
    blocks: RDD[Block] = rows.mapPartitionsWithIndex(RowsToBlocks(reader))
    if num_workers is not None and num_workers != rows.getNumPartitions():
        dealt = blocks.mapPartitionsWithIndex(RoundRobin(num_workers))
        blocks = dealt.repartitionAndSortWithinPartitions(num_workers, _part).values()
    return SparkDataset(cluster, RddBlocks(blocks))


def warn_of_slots(num_workers: int | None, slots: int) -> None:
    """Warn where more workers were asked for than can train at the same time."""
    if num_workers is not None and num_workers > slots:
        warnings.warn(
            f"num_workers={num_workers}, but Spark has {slots} free slots, and asynchronous workers train at the same time: "
            f"{slots} will train.",
            stacklevel=2,
        )


def warn_of_partitions(workers: int, slots: int, batches: int, batch_size: int) -> None:
    """Suggest ``num_workers`` where a round of synchronous training starts many tasks for few batches each.

    A task costs tenths of a second, whatever it trains.

    Args:
        workers: The partitions that train; the person has not said how many.
        slots: How many tasks can run at the same time.
        batches: The batches of the largest partition between two exchanges.
        batch_size: Rows in a batch.
    """
    if workers > MANY_PARTITIONS * slots and batches <= FEW_BATCHES:
        warnings.warn(
            f"the data has {workers} partitions with rows to train on, but Spark has {slots} slots, and a partition trains "
            f"at most {batches} batches of {batch_size} rows between two exchanges: starting {workers} tasks each time "
            f"may take longer than that. Give SparkModel(num_workers={slots}), which deals the rows out to as many, or "
            "fewer partitions (coalesce).",
            stacklevel=2,
        )


def _part(key: tuple[int, int, int]) -> int:
    return key[0]
