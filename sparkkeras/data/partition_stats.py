"""Statistics of the rows of each partition, and how much the partitions differ.

Between two exchanges a worker trains on its own partition. If rows are sorted, by their label or by a date, each worker
learns a part of the problem, and the average of the models may be much worse than a model of all rows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from sparkkeras.data.block import Block, BlockSpec
from sparkkeras.data.text import strings_of
from sparkkeras.errors import DataError
from sparkkeras.weights import Array

if TYPE_CHECKING:
    from sparkkeras.data.dataset import TaskContext

T = TypeVar("T")

MAX_CLASSES = 1024
"""Labels that are whole numbers in a range of up to this size are counted as classes."""

SAMPLED_VALUES = 16
"""The number of values of a row, evenly spaced, whose moments are computed for each array."""

SAMPLED_ROWS = 4096
"""The number of rows of a block, at random, of which the moments are computed."""

LARGEST = 1e100
"""Values from this size on are left out of the moments, like NaN."""

RARE = 30
"""Classes with fewer rows are compared as one."""

FEW = 10
"""Moments are compared in partitions that have more rows on average: a few outliers would decide in smaller ones."""

LARGE_OF_LABELS = 0.25
"""From this size on, a difference of labels is large: it cost 0.5 to 3 percentage points of accuracy when models of 2 and 10
partitions were averaged after each epoch."""

LARGE_OF_FEATURES = 0.5
"""The same for features, whose difference cost up to 2.5 percentage points."""

SIGNIFICANT = 5.5
"""From this number of standard deviations on, a difference is significant."""

_EXACT = 2.0**53
"""Whole numbers up to this size are exact as floating-point numbers."""

Counts = Mapping[Any, int]
"""The number of rows of each class: an index or a string."""


ClassWeight = Mapping[int, float] | Literal["balanced"]
"""The values of ``class_weight=`` in training."""


@dataclass(frozen=True)
class Moments:
    """The means and the sums of squared deviations of some values of a row, and of their inverse hyperbolic sines.

    The latter are like logarithms of large values, so that a few of these do not hide all others.

    Attributes:
        rows: The number of rows with a finite value, for each value and then once more, shape (2 * values,).
        mean: The mean of each value, and then of each inverse hyperbolic sine.
        squares: The sums of squared deviations from these.
    """

    rows: Array
    mean: Array
    squares: Array

    @classmethod
    def of(cls, array: Array) -> Moments:
        """Of a non-empty array of numbers: of a sample of its rows and of their values."""
        values = array.reshape(len(array), -1)
        if len(values) > SAMPLED_ROWS:  # at random, since rows may be periodic
            values = values[np.random.default_rng(0).integers(len(values), size=SAMPLED_ROWS)]
        sample = values[:, sampled_values(values.shape[1])].astype(np.float64)
        sample = np.concatenate([sample, np.arcsinh(sample)], axis=1)
        finite = np.abs(sample) < LARGEST  # not NaN
        sample[~finite] = 0
        rows = finite.sum(axis=0)
        mean = sample.sum(axis=0) / np.maximum(rows, 1)
        return cls(rows, mean, ((sample - mean) ** 2).sum(axis=0, where=finite))

    def union(self, other: Moments) -> Moments:
        """Of the rows of both (Chan, Golub and LeVeque 1983, https://doi.org/10.1080/00031305.1983.10483115)."""
        rows = np.maximum(self.rows + other.rows, 1)
        change = other.mean - self.mean
        mean = self.mean + change * (other.rows / rows)
        squares = self.squares + other.squares + change**2 * (self.rows * other.rows / rows)
        return Moments(self.rows + other.rows, mean, squares)


def sampled_values(width: int) -> Array:
    """The positions of the values of a row whose moments are computed."""
    return np.unique(np.linspace(0, width - 1, min(width, SAMPLED_VALUES)).astype(int))


@dataclass(frozen=True)
class PartitionStats:
    """Statistics of the rows of a partition.

    Attributes:
        classes: The class counts of each array of features and labels; ``None`` for numeric features, and for labels that
            are no classes.
        moments: The moments of each array of features and labels; ``None`` for strings.
    """

    classes: tuple[Counts | None, ...] = ()
    moments: tuple[Moments | None, ...] = ()

    @classmethod
    def of(cls, block: Block) -> PartitionStats:
        """Of a non-empty block with dense arrays."""
        features = block.arrays[block.form.span("x")]
        arrays = (*features, *block.arrays[block.form.span("y")])
        counted = (index >= len(features) or array.dtype == object for index, array in enumerate(arrays))
        classes = (class_counts(array) if each else None for array, each in zip(arrays, counted, strict=True))
        moments = (None if array.dtype == object or not array.size else Moments.of(array) for array in arrays)
        return cls(tuple(classes), tuple(moments))

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


def sum_counts(counts: Sequence[Counts]) -> dict[Any, int]:
    """The class counts of the rows of several partitions."""
    total: Counter[Any] = Counter()
    for each in counts:
        total.update(each)
    return dict(sorted(total.items()))


def class_counts(labels: Array) -> Counts | None:
    """The number of rows of each class, of class indices, one-hot rows or strings; ``None`` for other labels."""
    if not labels.size or (labels.dtype == object and labels.size > len(labels)):
        return None
    if labels.dtype == object:
        found = strings_of(labels).value_counts()
        if len(found) > MAX_CLASSES:
            return None
        return dict(zip(found.field("values").to_pylist(), found.field("counts").to_pylist(), strict=True))
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
class CountClasses:
    """Yields the class counts of the first rows of a partition, or ``None`` if its labels are no classes.

    Attributes:
        rows: The number of rows to count of each partition; ``None``: all.
    """

    rows: tuple[int | None, ...]

    def __call__(self, context: TaskContext, blocks: Iterator[Block]) -> Iterator[Counts | None]:
        """Count them."""
        rows = self.rows[context.worker]
        for block in blocks:
            labels = block[:rows].arrays[block.form.span("y")]
            if rows != 0:
                yield class_counts(labels[0]) if labels and labels[0].dtype != object else None


def balanced_weights(counts: Sequence[Counts | None]) -> dict[int, float]:
    """A weight for each class that is inversely proportional to its rows: ``rows / (classes * rows of the class)``.

    This is what scikit-learn means by ``class_weight="balanced"`` (King and Zeng 2001, https://doi.org/10.1093/pan/9.2.137).

    Args:
        counts: The class counts of each partition with rows; ``None`` if its labels are no classes.

    Raises:
        DataError: The labels are no class indices and no one-hot rows, or there are too many classes.
    """
    found = _if_all(counts)
    if not found:
        raise DataError(
            'class_weight="balanced" counts the rows of each class: expected labels that are class indices or one-hot rows, '
            f"of at most {MAX_CLASSES} classes. Pass the weights instead, {{class index: weight}}."
        )
    total = sum_counts(found)
    rows = sum(total.values())
    return {index: rows / (len(total) * each) for index, each in total.items()}


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
    group: int | str | None
    low: tuple[int, float]
    high: tuple[int, float]


def largest_difference(spec: BlockSpec, stats: Mapping[int, PartitionStats]) -> Difference | None:
    """The largest difference between partitions, of those that are significant and large; labels before features.

    The measure is the share of the variance of a value that lies between partitions, or for classes what corresponds to it,
    without what chance contributes. It is 0 for shuffled rows and about 1 for sorted ones, however many there are. It has to
    be large, since many rows make any difference significant.

    Args:
        spec: The shapes and dtypes of the rows.
        stats: The statistics of each partition with rows, by its number.
    """
    if len(stats) < 2:
        return None
    numbers, each = list(stats), list(stats.values())
    features = len(spec.leaves[spec.form.span("x")])
    found: list[tuple[bool, float, Difference]] = []
    large = [LARGE_OF_FEATURES if index < features else LARGE_OF_LABELS for index in range(len(each[0].classes))]
    for index, enough in enumerate(large):
        counts = _if_all(one.classes[index] for one in each)
        if counts and (size := difference_of_classes(counts)) >= enough:
            table, classes = _common(counts)
            shares = table[:, : len(classes)] / np.maximum(table.sum(axis=1, keepdims=True), 1)
            column = int(np.argmax(np.ptp(shares, axis=0)))
            low, high = _ends(numbers, shares[:, column])
            found.append((index >= features, size, Difference(index, None, classes[column], low, high)))
    for index, (leaf, enough) in enumerate(zip(spec.leaves, large, strict=False)):  # without sample weights
        moments = _if_all(one.moments[index] for one in each)
        if moments:
            sizes = differences_of_values(moments)
            position = int(np.argmax(sizes))
            if sizes[position] >= enough:
                values = sampled_values(math.prod(leaf.shape))
                place = position % len(values)
                low, high = _ends(numbers, np.array([one.mean[place] for one in moments]))
                size = float(sizes[position])
                found.append((index >= features, size, Difference(index, int(values[place]), None, low, high)))
    return max(found, key=lambda one: (one[0], one[2].group is not None, one[1]))[2] if found else None


def _if_all(values: Iterable[T | None]) -> list[T]:
    """The values; none if one is ``None``."""
    found = list(values)
    known = [value for value in found if value is not None]
    return known if len(known) == len(found) else []


def _ends(numbers: Sequence[int], means: Array) -> tuple[tuple[int, float], tuple[int, float]]:
    """The partitions with the smallest and the largest mean, and these."""
    low, high = int(np.argmin(means)), int(np.argmax(means))
    return (numbers[low], float(means[low])), (numbers[high], float(means[high]))


def difference_of_classes(counts: Sequence[Counts]) -> float:
    """How much the classes of partitions differ; 0 if that is not significant.

    The mean square contingency, without what chance contributes to it, divided by that of the same rows sorted by class. (So
    a rare class counts as much as others; Cramer's V has the most that any table may have in the denominator.)

    Args:
        counts: The class counts of each partition.
    """
    table, _ = _common(counts)
    table = table[table.sum(axis=1) > 0]
    rows, (parts, columns) = table.sum(), table.shape
    if columns < 2:
        return 0.0
    sizes, totals = table.sum(axis=1, keepdims=True), table.sum(axis=0)
    expected = sizes * totals / rows
    chi_squared = float(((table - expected) ** 2 / expected).sum())
    freedom = (parts - 1) * (columns - 1)
    if not freedom or _deviations(chi_squared / freedom, freedom) < SIGNIFICANT:
        return 0.0
    part_ends, class_ends = np.cumsum(sizes)[:, None], np.cumsum(totals)
    in_order = np.minimum(part_ends, class_ends) - np.maximum(part_ends - sizes, class_ends - totals)
    chance = freedom * rows / (rows - 1)
    most = ((in_order.clip(0) - expected) ** 2 / expected).sum() - chance
    return float((chi_squared - chance) / most) if most > 0 else 0.0


def _common(counts: Sequence[Counts]) -> tuple[Array, list[int]]:
    """The rows of each partition and class that is not rare, shape (partitions, classes), and these classes.

    If the others have enough rows together, they are a last column.
    """
    total = sum_counts(counts)
    classes = [index for index, rows in total.items() if rows >= RARE]
    table = np.array([[each.get(index, 0) for index in classes] for each in counts], np.float64).reshape(len(counts), -1)
    rest = np.array([sum(each.values()) for each in counts]) - table.sum(axis=1)
    return (np.column_stack([table, rest]) if rest.sum() >= RARE else table), classes


def differences_of_values(moments: Sequence[Moments]) -> Array:
    """How much the means of the `Moments` differ: omega squared; 0 where that is not significant.

    Args:
        moments: The moments of each partition.
    """
    rows = np.array([each.rows for each in moments], np.float64)
    means = np.array([each.mean for each in moments])
    total, parts = rows.sum(axis=0), len(moments)
    with np.errstate(divide="ignore", invalid="ignore"):
        between = (rows * (means - (rows * means).sum(axis=0) / total) ** 2).sum(axis=0)
        within = np.sum([each.squares for each in moments], axis=0)
        noise = within / (total - parts)  # the variance within partitions
        sizes = (between - (parts - 1) * noise) / (between + within + noise)
        ratio = np.minimum(between / (parts - 1) / noise, 1e9)
        significant = _deviations(ratio, parts - 1, total - parts) >= SIGNIFICANT  # no NaN is
    return np.where(significant & (total > FEW * parts), sizes, 0.0)


def _deviations(ratio: Any, freedom: float, freedom_within: float = np.inf) -> Any:
    """How many standard deviations of a normal distribution a value of the F distribution corresponds to.

    With ``freedom_within`` degrees of freedom of the denominator; infinite for chi squared divided by its degrees of freedom
    (Paulson 1942, https://doi.org/10.1214/aoms/1177731608; Wilson and Hilferty 1931).
    """
    one, two, root = 2 / (9 * freedom), 2 / (9 * freedom_within), ratio ** (1 / 3)
    return ((1 - two) * root - (1 - one)) / np.sqrt(two * root**2 + one)
