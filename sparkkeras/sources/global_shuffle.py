"""Redistributes rows at random over partitions, to places that only depend on the rows and a seed.

So the places are the same when rows are read again, after an executor was lost or when training is resumed. A first shuffle
sorts all rows by a digest of their bytes, so that equal rows meet, and a second one deals them in this order. So partitions
have about the same number of rows, however often rows repeat, and the last rows of each are those with the highest digests.

The digests are BLAKE2b, with 16 bytes: they exclude collisions, and take 1 microsecond for a small row.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from sparkkeras.data import files
from sparkkeras.data.block import BLOCK_BYTES, CHUNK_BYTES, Block, concatenate_alike, piece_rows
from sparkkeras.data.text import Text, to_text
from sparkkeras.sources.partitions import Partitions
from sparkkeras.sources.rows import in_turn
from sparkkeras.sources.spark_dataset import SparkDataset
from sparkkeras.weights import Array

Key = tuple[int, ...]
"""The index of the partition of some rows, and what they are sorted by there."""

Digests = Array
"""The digest of each row as two numbers, shape (rows, 2), uint64."""


def digests_of(block: Block, seed: int) -> Digests:
    """The BLAKE2b digests of the bytes of each row, of 16 bytes, which differ from seed to seed."""
    rows = block.rows
    fixed: list[Array] = []
    texts: list[tuple[Array, memoryview]] = []
    for array in block.dense().arrays:
        values = array.reshape(rows, -1)
        if array.dtype == object:
            offsets, data = cast(Text, to_text(array)[0]).buffers
            texts.append((offsets[:: max(1, values.shape[1])], data.data))
            values = np.diff(offsets).reshape(rows, -1)
        fixed.append(np.ascontiguousarray(values).view(np.uint8).reshape(rows, -1))
    joined = np.concatenate(fixed, axis=1)
    width, numbers = joined.shape[1], joined.reshape(-1).data
    seeded = hashlib.blake2b(digest_size=16, salt=seed.to_bytes(16, "little"))
    digests = bytearray()
    for row in range(rows):
        digest = seeded.copy()
        digest.update(numbers[row * width : (row + 1) * width])
        for starts, text in texts:
            digest.update(text[starts[row] : starts[row + 1]])
        digests += digest.digest()
    return np.frombuffer(digests, np.dtype("<u8")).reshape(rows, 2).astype(np.uint64)


@dataclass(frozen=True)
class ByDigest:
    """Splits rows into ranges of digests, as many as there are partitions; yields ``((range,), (digests, rows))``."""

    parts: int
    seed: int

    def __call__(self, partition: int, blocks: Iterable[Block]) -> Iterator[tuple[Key, tuple[Digests, Block]]]:
        """Split the rows of a partition, several blocks at a time."""
        for block in _larger(blocks):
            digests = digests_of(block, self.seed)
            ranges = ((digests[:, 0] >> np.uint64(32)) * np.uint64(self.parts)) >> np.uint64(32)
            order = np.argsort(ranges, kind="stable")
            cuts = np.searchsorted(ranges[order], np.arange(1, self.parts))
            size = piece_rows(block.row_bytes, BLOCK_BYTES)
            for number, rows in enumerate(np.split(order, cuts)):
                for start in range(0, len(rows), size):
                    piece = rows[start : start + size]
                    yield (number,), (digests[piece], block[piece])


def _larger(blocks: Iterable[Block]) -> Iterator[Block]:
    """The rows of blocks in blocks of about `CHUNK_BYTES`, so that each range gets many rows of them."""
    held: list[Block] = []
    for block in blocks:
        if block.rows:
            held.append(block)
        if sum(each.nbytes for each in held) >= CHUNK_BYTES:
            yield from files.one_block(concatenate_alike(held))
            held = []
    yield from files.one_block(concatenate_alike(held))


@dataclass(frozen=True)
class DealByDigest:
    """Sorts the rows of a range by their digests, and deals one to each partition in turn.

    Yields ``((partition, range, number), rows)``, so that a partition can sort its rows, in whatever order they arrive.
    """

    parts: int

    def __call__(self, number: int, pieces: Iterable[tuple[Digests, Block]]) -> Iterator[tuple[Key, Block]]:
        """Deal the rows of a range. They are on disk meanwhile, since they may be more than fit into memory."""
        digests: list[Digests] = []

        def rows_of() -> Iterator[Block]:
            for found, piece in pieces:
                digests.append(found)
                yield piece

        with tempfile.TemporaryDirectory(prefix="sparkkeras-", dir=files.home("")) as folder:
            block = files.write(rows_of(), number, Path(folder)).open()
            if block is None:
                return
            found = np.concatenate(digests)
            order = np.lexsort((found[:, 1], found[:, 0]))
            size = piece_rows(block.row_bytes, BLOCK_BYTES)
            for part, turns in enumerate(in_turn(number, self.parts)):
                rows = order[turns]
                for index, start in enumerate(range(0, len(rows), size)):
                    yield (part, number, index), block[rows[start : start + size]]


def shuffled(partitions: Partitions, parts: int, seed: int) -> SparkDataset:
    """Redistribute rows at random to ``parts`` partitions, in an order that only depends on the rows and the seed."""
    ranges = partitions.moved(ByDigest(parts, seed), parts, keys=1)
    return SparkDataset(ranges.moved(DealByDigest(parts), parts, keys=3), repeats_rows=True)
