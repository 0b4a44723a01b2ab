"""Statistics of the rows of each partition, and how much the partitions differ.

Between two exchanges a worker trains on its own partition. If rows are sorted, by their label or by a date, each worker
learns a part of the problem, and the average of the models may be much worse than a model of all rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sparkkeras.data.block import Block, BlockSpec
from sparkkeras.weights import Array

MAX_CLASSES = 1024
"""Labels that are whole numbers in a range of up to this size are counted as classes."""

SAMPLED_VALUES = 16
"""The number of values of a row, evenly spaced, whose moments are computed for each array."""

SAMPLED_ROWS = 4096
"""The number of rows of a block, evenly spaced, of which the moments are computed."""

RARE = 30
"""Classes with fewer rows are compared as one."""

FEW = 10
"""Moments are compared in partitions that have more rows on average: a few outliers would decide in smaller ones."""

LARGE_OF_LABELS = 0.2
"""From this share of variance on, a difference of labels is large; see `differences`."""

LARGE_OF_FEATURES = 0.5
"""The same for features."""

SIGNIFICANT = 5.5
"""From this number of standard deviations on, a difference is significant."""

_EXACT = 2.0**53
"""Whole numbers up to this size are exact as floating-point numbers."""

Counts = Mapping[int, int]
"""The number of rows of each class."""


@dataclass(frozen=True)
class Moments:
    """The mean and the sum of squared deviations of some values of a row.

    Attributes:
        rows: The number of rows.
        mean: The mean of each value, shape (values,).
        squares: The sum of squared deviations from it.
    """

    rows: int
    mean: Array
    squares: Array

    @classmethod
    def of(cls, array: Array) -> Moments:
        """Of a non-empty array of numbers: of a sample of its rows and of their values."""
        values = array.reshape(len(array), -1)[:: -(-len(array) // SAMPLED_ROWS)]
        sample = values[:, sampled_values(values.shape[1])].astype(np.float64)
        mean = sample.mean(axis=0)
        return cls(len(sample), mean, ((sample - mean) ** 2).sum(axis=0))

    def union(self, other: Moments) -> Moments:
        """Of the rows of both (Chan, Golub and LeVeque 1983, https://doi.org/10.1080/00031305.1983.10483115)."""
        rows = self.rows + other.rows
        change = other.mean - self.mean
        mean = self.mean + change * (other.rows / rows)
        return Moments(rows, mean, self.squares + other.squares + change**2 * (self.rows * other.rows / rows))


def sampled_values(width: int) -> Array:
    """The positions of the values of a row whose moments are computed."""
    return np.unique(np.linspace(0, width - 1, min(width, SAMPLED_VALUES)).astype(int))


@dataclass(frozen=True)
class PartitionStats:
    """Statistics of the rows of a partition.

    Attributes:
        classes: The class counts of each array of labels; ``None`` for labels that are no class indices or one-hot rows.
        moments: The moments of each array of features and labels; ``None`` for strings.
    """

    classes: tuple[Counts | None, ...] = ()
    moments: tuple[Moments | None, ...] = ()

    @classmethod
    def of(cls, block: Block) -> PartitionStats:
        """Of a non-empty block with dense arrays."""
        labels = block.arrays[block.form.span("y")]
        arrays = (*block.arrays[block.form.span("x")], *labels)
        numbers = [array.dtype != object and array.size > 0 for array in arrays]
        moments = (Moments.of(array) if each else None for array, each in zip(arrays, numbers, strict=True))
        return cls(tuple(map(_class_counts, labels)), tuple(moments))

    def union(self, other: PartitionStats) -> PartitionStats:
        """Of the rows of both."""
        classes = [
            None if mine is None or theirs is None else sum_counts((mine, theirs))
            for mine, theirs in zip(self.classes, other.classes, strict=True)
        ]
        moments = [
            None if mine is None or theirs is None else mine.union(theirs)
            for mine, theirs in zip(self.moments, other.moments, strict=True)
        ]
        return PartitionStats(
            tuple(None if each is None or len(each) > MAX_CLASSES else each for each in classes), tuple(moments)
        )


def sum_counts(counts: Sequence[Counts]) -> dict[int, int]:
    """The class counts of the rows of several partitions."""
    total: dict[int, int] = {}
    for each in counts:
        for index, rows in each.items():
            total[index] = total.get(index, 0) + rows
    return dict(sorted(total.items()))


def _class_counts(labels: Array) -> Counts | None:
    """The number of rows of each class, of class indices or one-hot rows; ``None`` for other labels."""
    if labels.dtype == object or not labels.size:
        return None
    rows = labels.reshape(len(labels), -1)
    low, high = float(rows.min()), float(rows.max())
    if not (-_EXACT < low <= high < min(low + MAX_CLASSES, _EXACT)):
        return None
    if rows.dtype.kind not in "iub" and not (rows % 1 == 0).all():
        return None
    if rows.shape[1] == 1:
        counts = np.bincount(rows[:, 0].astype(np.int64) - int(low))
        return {int(low) + int(index): int(counts[index]) for index in np.flatnonzero(counts)}
    if (low, high) != (0, 1) or rows.shape[1] > MAX_CLASSES or not (rows.sum(axis=1, dtype=np.int64) == 1).all():
        return None
    counts = rows.sum(axis=0, dtype=np.int64)
    return {int(index): int(counts[index]) for index in np.flatnonzero(counts)}


@dataclass(frozen=True)
class Difference:
    """A difference between partitions that is significant and large.

    Attributes:
        array: The position of the array among features and labels.
        value: The position of the value in a row of it; ``None`` for a class.
        group: The class; ``None`` for a value.
        low: The partition with the smallest mean, or the smallest share of the class, and that mean or share.
        high: The one with the largest.
    """

    array: int
    value: int | None
    group: int | None
    low: tuple[int, float]
    high: tuple[int, float]


def largest_difference(spec: BlockSpec, stats: Mapping[int, PartitionStats]) -> Difference | None:
    """The largest difference between partitions, of those that are significant and large; labels before features.

    The measure is the share of the variance of a value that lies between partitions, without what chance contributes: omega
    squared for numbers, and Cramer's V squared with the correction of Bergsma (2013, https://doi.org/10.1016/j.jkss.2012.10.002)
    for classes. It is 0 for shuffled rows and 1 if a partition determines the value, however many rows there are. It has to
    be large, since many rows make any difference significant.

    Args:
        spec: The shapes and dtypes of the rows.
        stats: The statistics of each partition with rows, by its number.
    """
    if len(stats) < 2:
        return None
    numbers, each = list(stats), list(stats.values())
    features = len(spec.leaves[spec.form.span("x")])
    found: list[tuple[float, Difference]] = []
    for index in range(len(each[0].classes)):
        counts = [one.classes[index] for one in each]
        if None not in counts:
            found += _of_classes(features + index, numbers, [one for one in counts if one is not None])
    if found:
        return max(found, key=lambda pair: pair[0])[1]
    for index in range(len(each[0].moments)):
        moments = [one.moments[index] for one in each]
        if None not in moments:
            limit = LARGE_OF_FEATURES if index < features else LARGE_OF_LABELS
            width = int(np.prod(spec.leaves[index].shape, dtype=np.int64))
            found += _of_moments(index, sampled_values(width), numbers, [one for one in moments if one is not None], limit)
    return max(found, key=lambda pair: (pair[1].array >= features, pair[0]))[1] if found else None


def _of_classes(array: int, numbers: Sequence[int], counts: Sequence[Counts]) -> list[tuple[float, Difference]]:
    """The class whose shares differ most, with the size of the difference of all classes."""
    total = sum_counts(counts)
    common = [index for index, rows in total.items() if rows >= RARE]
    table = np.array([[each.get(index, 0) for index in common] for each in counts], np.float64).reshape(len(counts), -1)
    sizes = np.array([sum(each.values()) for each in counts], np.float64)
    rest = sizes - table.sum(axis=1)
    if rest.sum() >= RARE:
        table = np.column_stack([table, rest])
    rows, (parts, columns) = table.sum(), table.shape
    if columns < 2:
        return []
    expected = table.sum(axis=1, keepdims=True) * table.sum(axis=0) / rows
    with np.errstate(divide="ignore", invalid="ignore"):
        chi_squared = float(np.nansum((table - expected) ** 2 / expected))
    freedom = (parts - 1) * (columns - 1)
    excess = max(0.0, chi_squared / rows - freedom / (rows - 1))
    least = min(parts - (parts - 1) ** 2 / (rows - 1), columns - (columns - 1) ** 2 / (rows - 1)) - 1
    if least <= 0 or _deviations(chi_squared / freedom, freedom) < SIGNIFICANT or excess / least < LARGE_OF_LABELS:
        return []
    shares = table[:, : len(common)] / np.maximum(sizes, 1)[:, None]
    column = int(np.argmax(np.ptp(shares, axis=0)))
    low, high = int(np.argmin(shares[:, column])), int(np.argmax(shares[:, column]))
    ends = (numbers[low], float(shares[low, column])), (numbers[high], float(shares[high, column]))
    return [(excess / least, Difference(array, None, common[column], *ends))]


def _of_moments(
    array: int, values: Array, numbers: Sequence[int], moments: Sequence[Moments], limit: float
) -> list[tuple[float, Difference]]:
    """The value whose means differ most, with the size of the difference."""
    rows = np.array([each.rows for each in moments], np.float64)[:, None]
    means = np.array([each.mean for each in moments])
    total, parts = float(rows.sum()), len(moments)
    if total / parts <= FEW:
        return []
    between = (rows * (means - (rows * means).sum(axis=0) / total) ** 2).sum(axis=0)
    within = np.sum([each.squares for each in moments], axis=0)
    noise = within / (total - parts)  # the variance within partitions
    with np.errstate(divide="ignore", invalid="ignore"):
        omega_squared = np.nan_to_num((between - (parts - 1) * noise) / (between + within + noise), nan=0.0)
        ratio = np.nan_to_num(between / (parts - 1) / noise, nan=0.0, posinf=1e9)
    position = int(np.argmax(omega_squared))
    if omega_squared[position] < limit or _deviations(float(ratio[position]), parts - 1, total - parts) < SIGNIFICANT:
        return []
    low, high = int(np.argmin(means[:, position])), int(np.argmax(means[:, position]))
    ends = (numbers[low], float(means[low, position])), (numbers[high], float(means[high, position]))
    return [(float(omega_squared[position]), Difference(array, int(values[position]), None, *ends))]


def _deviations(ratio: float, freedom: float, freedom_within: float = np.inf) -> float:
    """How many standard deviations of a normal distribution a value of the F distribution corresponds to.

    With ``freedom_within`` degrees of freedom of the denominator; infinite for chi squared divided by its degrees of freedom
    (Paulson 1942, https://doi.org/10.1214/aoms/1177731608; Wilson and Hilferty 1931).
    """
    one, two, root = 2 / (9 * freedom), 2 / (9 * freedom_within), ratio ** (1 / 3)
    return float(((1 - two) * root - (1 - one)) / np.sqrt(two * root**2 + one))
