"""Which rows a batch holds: a function of (seed, partition, epoch), and of nothing else.

So a task that is run again goes through the same batches, and one that starts in the middle of an epoch knows which are
left.

A partition of up to `SHUFFLE_BYTES` is shuffled as a whole. Above that, rows are read from disk in runs: the runs are
shuffled, then the rows within windows of many runs. The reading stays sequential enough for a disk, and the memory that
an order takes does not grow with the partition.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from sparkkeras.data.block import piece_rows
from sparkkeras.weights import Array

SHUFFLE_BYTES = 256 * 1024 * 1024
"""Partitions up to this size are shuffled as a whole; above it, windows of this size are."""

RUN_BYTES = 1024 * 1024
"""How much is read in one go where a partition is larger than that."""


@dataclass
class RowOrder:
    """The order in which one epoch goes through the first ``rows`` rows of a partition.

    Attributes:
        rows: How many rows there are to train on.
        row_bytes: The bytes of one row, which decide how large a window is.
        batch_size: Rows in a batch.
        seed: Numbers that the shuffle is drawn from: the run's seed, the partition, the epoch. ``None``: no shuffle.
        shuffle_bytes: As `SHUFFLE_BYTES`.
    """

    rows: int
    row_bytes: int
    batch_size: int
    seed: tuple[int, ...] | None
    shuffle_bytes: int = SHUFFLE_BYTES
    _last: tuple[int, Array] | None = field(default=None, init=False, repr=False)

    @property
    def batches(self) -> int:
        """How many batches the epoch has; the last one may be short."""
        return -(-self.rows // self.batch_size)

    def pieces(self, first_batch: int, last_batch: int, max_bytes: int) -> Iterator[slice | Array]:
        """The rows of the batches in [first_batch, last_batch), in pieces of whole batches and about ``max_bytes``."""
        start, stop = first_batch * self.batch_size, min(last_batch * self.batch_size, self.rows)
        step = piece_rows(self.row_bytes, max_bytes, self.batch_size)
        if self.seed is None:
            for row in range(start, stop, step):
                yield slice(row, min(row + step, stop))
            return
        window = piece_rows(self.row_bytes, self.shuffle_bytes, self.batch_size)
        if self.rows <= window:
            order = np.random.default_rng(self.seed).permutation(self.rows)
            for row in range(start, stop, step):
                yield order[row : min(row + step, stop)]
            return
        for row in range(start, stop, step):
            end = min(row + step, stop)
            parts = []
            while row < end:
                cut = min(end, (row // window + 1) * window)
                base = row // window * window
                parts.append(self._window(row // window, window)[row - base : cut - base])
                row = cut
            yield np.concatenate(parts)

    def _window(self, number: int, window: int) -> Array:
        """The rows of one window, shuffled. The last kept, since pieces ask for the same one again and again."""
        if self._last is not None and self._last[0] == number:
            return self._last[1]
        assert self.seed is not None
        run = max(1, min(RUN_BYTES // max(1, self.row_bytes), window // 16))
        runs = np.random.default_rng(self.seed).permutation(-(-self.rows // run))
        # The one short run stands last, so that every window but the last one has the same length.
        short = -(-self.rows // run) - 1
        runs = np.concatenate([runs[runs != short], [short]])
        first, last = number * window, min((number + 1) * window, self.rows)
        rows = np.concatenate(
            [np.arange(runs[i] * run, min((runs[i] + 1) * run, self.rows)) for i in range(first // run, -(-last // run))]
        )
        rows = rows[first - first // run * run :][: last - first]
        shuffled = np.random.default_rng((*self.seed, number)).permutation(rows)
        self._last = (number, shuffled)
        return shuffled
