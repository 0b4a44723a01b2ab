"""Labels: their range in a set of rows, and one-hot rows of class indices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sparkkeras.arguments import integer, known_arguments
from sparkkeras.data.block import Block
from sparkkeras.data.numeric import NotNumbersError, to_numbers
from sparkkeras.data.sparse import SparseRows
from sparkkeras.errors import DataError
from sparkkeras.weights import Array


@known_arguments
def encode_label(label: Any, nb_classes: int) -> Array:
    """Convert a class index to a one-hot row, float32, shape (nb_classes,).

    Args:
        label: An integer from 0 to ``nb_classes - 1``; a float with an integral value or an array of one value is accepted.
        nb_classes: The number of classes.

    Raises:
        DataError: The label is not a class index below ``nb_classes``.
    """
    integer("nb_classes", nb_classes)
    try:
        value, missing = to_numbers(label)
    except NotNumbersError as error:
        raise DataError(f"label {label!r} is not a class index; expected one whole number.") from error
    if value.size != 1 or missing is not None or not np.isfinite(value).all() or float(value.reshape(-1)[0]) % 1 != 0:
        raise DataError(f"label {label!r} is not a class index; expected one whole number.")
    number = int(value.reshape(-1)[0])
    if not 0 <= number < nb_classes:
        raise DataError(
            f"label {number} is out of range: with nb_classes={nb_classes}, labels must be from 0 to {nb_classes - 1}."
        )
    row = np.zeros(nb_classes, np.float32)
    row[number] = 1.0
    return row


def class_indices(labels: Array) -> Array:
    """Convert one-hot rows to class indices, shape (samples,).

    Args:
        labels: The one-hot rows, shape (samples, classes).

    Raises:
        DataError: The array has another rank.
    """
    if labels.ndim != 2:
        raise DataError(f"categorical=True expects one-hot labels of shape (samples, classes), received {labels.shape}.")
    indices: Array = labels.argmax(axis=1)
    return indices


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
