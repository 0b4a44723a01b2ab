"""The order of rows in an epoch: a pure function of (seed, partition, epoch).

So a retried task sees the same batches, and a task that resumes in the middle of an epoch knows which batches are left.

A partition of up to `SHUFFLE_BYTES` is shuffled as a whole. In larger ones, runs of consecutive rows are shuffled, then the
rows within windows of many runs. Disk access remains mostly sequential, and the memory for the order does not grow with the
partition.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from sparkkeras.data.block import piece_rows
from sparkkeras.weights import Array

SHUFFLE_BYTES = 256 * 1024 * 1024
"""Partitions up to this size are shuffled as a whole; larger ones in windows of this size."""

RUN_BYTES = 1024 * 1024
"""The size of a run of consecutive rows in partitions larger than `SHUFFLE_BYTES`."""


@dataclass
class RowOrder:
    """The order of the first ``rows`` rows of a partition in one epoch.

    Attributes:
        rows: The number of rows to train on.
        row_bytes: The size of one row in bytes, which determines the rows per window.
        batch_size: Rows per batch.
        seed: The seed of the shuffle: the run's seed, the partition and the epoch. ``None``: no shuffle.
        shuffle_bytes: The size up to which all rows are shuffled as a whole, in bytes; default `SHUFFLE_BYTES`.
    """

    rows: int
    row_bytes: int
    batch_size: int
    seed: tuple[int, ...] | None
    shuffle_bytes: int = SHUFFLE_BYTES
    _last: tuple[int, Array] | None = field(default=None, init=False, repr=False)

    @property
    def batches(self) -> int:
        """The number of batches in the epoch; the last one may be smaller."""
        return -(-self.rows // self.batch_size)

    def pieces(self, first_batch: int, last_batch: int, max_bytes: int) -> Iterator[slice | Array]:
        """The row indices of the batches in [first_batch, last_batch), in pieces of whole batches of about ``max_bytes``."""
        start, stop = first_batch * self.batch_size, min(last_batch * self.batch_size, self.rows)
        step = piece_rows(self.row_bytes, max_bytes, self.batch_size)
        window = piece_rows(self.row_bytes, self.shuffle_bytes, self.batch_size)
        for row in range(start, stop, step):
            end = min(row + step, stop)
            if self.seed is None:
                yield slice(row, end)
            elif self.rows <= window:
                yield self._all()[row:end]
            else:
                starts = range(row // window * window, end, window)
                parts = [self._window(base // window, window)[max(0, row - base) : end - base] for base in starts]
                yield np.concatenate(parts)

    def _all(self) -> Array:
        """All row indices, shuffled as a whole."""
        if self._last is None:
            self._last = (0, np.random.default_rng(self.seed).permutation(self.rows))
        return self._last[1]

    def _window(self, number: int, window: int) -> Array:
        """The shuffled row indices of one window. The last window is cached, because consecutive pieces use the same one."""
        if self._last is not None and self._last[0] == number:
            return self._last[1]
        assert self.seed is not None
        run = max(1, min(RUN_BYTES // max(1, self.row_bytes), window // 16))
        runs = np.random.default_rng(self.seed).permutation(-(-self.rows // run))
        # The short run comes last, so that all windows but the last have the same length.
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
