"""Which rows each partition gets to train on, and which to validate on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sparkkeras.errors import ConfigurationError, counted
from sparkkeras.weights import Array

Shuffle = bool | Literal["global"]
"""The values of ``shuffle=`` in training."""


SAME_ROWS = (
    'shuffle="global" requires a source that gives the same rows each time that it is read. limit, random functions '
    "without a seed, and files that change do not: write the rows to a table once, and train on the table. "
    "(DataFrame.checkpoint() keeps rows until the program ends, so it does not help to resume.)"
)
"""What a source has to fulfil, for messages."""


@dataclass(frozen=True)
class TrainValidationSplit:
    """How each partition's rows are split: the first ``train`` rows for training, the next ``validate`` for validation.

    ``None`` rows for training are all of an unknown number, see `sparkkeras.data.files.Handle.rows`.
    """

    train: tuple[int | None, ...]
    validate: tuple[int, ...]

    @classmethod
    def split(cls, rows: Sequence[int | None], validation_split: float) -> TrainValidationSplit:
        """Use the last rows of each partition for validation, as Keras does with the last rows of arrays.

        In total ``rows - floor(rows * (1 - validation_split))`` rows are for validation. They are apportioned by the sizes
        of the partitions (largest remainder method); every partition with rows keeps at least one for training.

        Args:
            rows: The number of rows of each partition.
            validation_split: The fraction of rows for validation.

        Raises:
            ConfigurationError: There are too few rows for the split.
        """
        if validation_split == 0.0:
            return cls(tuple(rows), (0,) * len(rows))
        sizes = [each or 0 for each in rows]  # all are known, see `sparkkeras.sources.source.check_row_count`
        total = sum(sizes)
        wanted = total - int(total * (1.0 - validation_split))
        quotas = [wanted * size / max(total, 1) for size in sizes]
        counts = [min(int(quota), max(size - 1, 0)) for quota, size in zip(quotas, sizes, strict=True)]
        by_remainder = sorted(range(len(sizes)), key=lambda i: (counts[i] - quotas[i], i))
        while sum(counts) < wanted:
            before = sum(counts)
            for index in by_remainder:
                if sum(counts) < wanted and counts[index] < sizes[index] - 1:
                    counts[index] += 1
            if sum(counts) == before:
                break  # every partition has only one training row left
        if sum(counts) == 0:
            raise ConfigurationError(
                f"validation_split={validation_split} of {counted(total, 'row')} in {counted(len(sizes), 'partition')} "
                "leaves no rows to validate or none to train on: use more rows, fewer partitions (num_workers=), or "
                "validation_data."
            )
        return cls(tuple(size - count for size, count in zip(sizes, counts, strict=True)), tuple(counts))

    @property
    def workers(self) -> list[int]:
        """The partitions with rows to train on."""
        return [worker for worker, rows in enumerate(self.train) if rows != 0]

    @property
    def validation_spans(self) -> tuple[tuple[int, int], ...]:
        """The validation rows of each partition, as (start, stop)."""
        return tuple((train or 0, (train or 0) + count) for train, count in zip(self.train, self.validate, strict=True))


@dataclass(frozen=True)
class RowPlacement:
    """How rows to train on are divided among partitions.

    Attributes:
        shuffle: ``True``: arrays are dealt to the partitions at random, RDDs and DataFrames keep theirs. ``"global"``: all
            rows are placed at random. ``False``: arrays are divided into slices of consecutive rows.
        seed: Seeds the random order.
        validation_split: The fraction of rows for validation: the last rows of arrays.
    """

    shuffle: Shuffle
    seed: int
    validation_split: float = 0.0

    @property
    def is_global(self) -> bool:
        """Whether all rows are placed at random, wherever they are."""
        return self.shuffle == "global"

    def deal(self, rows: int, parts: int) -> list[Array]:
        """The indices of the rows of arrays that each of ``parts`` partitions of equal size gets, in ascending order.

        So the rows for validation, the last ones of the arrays, are the last ones of each partition as well.
        """
        sizes = [each.stop - each.start for each in even_slices(rows, parts)]
        split = TrainValidationSplit.split(sizes, self.validation_split)
        train = [each or 0 for each in split.train]
        order = np.arange(rows)
        if self.shuffle:
            order[: sum(train)] = np.random.default_rng(self.seed).permutation(sum(train))
        cuts = np.cumsum([*train, *split.validate])[:-1]
        pieces = np.split(order, cuts)
        return [
            np.concatenate([np.sort(mine), held_out]) for mine, held_out in zip(pieces[:parts], pieces[parts:], strict=True)
        ]


def even_slices(rows: int, parts: int) -> list[slice]:
    """``parts`` slices of consecutive rows, whose lengths differ by at most one."""
    cuts = [rows * part // parts for part in range(parts + 1)]
    return [slice(start, stop) for start, stop in itertools.pairwise(cuts)]
