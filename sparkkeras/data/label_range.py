"""The range of the labels of a set of rows."""

from __future__ import annotations

from dataclasses import dataclass

from sparkkeras.data.block import Block
from sparkkeras.data.sparse import SparseRows
from sparkkeras.weights import Array


@dataclass(frozen=True)
class LabelRange:
    """The range of an array of labels.

    Attributes:
        low: The smallest value.
        high: The largest value.
        all_integers: Whether all values are integers, also if their dtype is a floating-point one.
    """

    low: float
    high: float
    all_integers: bool

    @classmethod
    def of(cls, labels: Array) -> LabelRange:
        """The range of a non-empty array."""
        values = labels.values if isinstance(labels, SparseRows) else labels
        return cls(float(labels.min()), float(labels.max()), values.dtype.kind in "iub" or bool((values % 1 == 0).all()))

    def union(self, other: LabelRange) -> LabelRange:
        """The smallest range that contains both."""
        return LabelRange(min(self.low, other.low), max(self.high, other.high), self.all_integers and other.all_integers)


def label_ranges(block: Block) -> tuple[LabelRange, ...]:
    """The range of each array of labels of a block; empty without labels or rows, or if some labels are strings."""
    labels = block.arrays[block.form.span("y")]
    if any(array.dtype == object or not array.size for array in labels):
        return ()
    return tuple(LabelRange.of(array) for array in labels)


def union(ranges: tuple[LabelRange, ...], others: tuple[LabelRange, ...]) -> tuple[LabelRange, ...]:
    """The label ranges of the union of two sets of rows; an empty tuple stands for no rows."""
    if not ranges or not others:
        return ranges or others
    return tuple(mine.union(other) for mine, other in zip(ranges, others, strict=True))
