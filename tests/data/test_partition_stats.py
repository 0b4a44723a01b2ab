"""How much partitions differ, and the class counts that follow from the same statistics."""

from collections import Counter
from functools import reduce

import numpy as np
import pytest

from sparkkeras.data.block import from_arrays
from sparkkeras.data.dataset import TaskContext
from sparkkeras.data.partition_stats import CountClasses, PartitionStats, balanced_weights, largest_difference
from sparkkeras.data.placement import even_slices
from sparkkeras.data.text import to_text
from sparkkeras.errors import DataError
from tests.conftest import long

RNG = np.random.default_rng(0)


def stats(block, parts):
    cuts = enumerate(even_slices(block.rows, parts))
    return {number: PartitionStats.of(block[part]) for number, part in cuts if block[part].rows}


def difference(x, y, parts):
    block = from_arrays(x, y, None)
    return largest_difference(block.spec, stats(block, parts))


def noise(rows):
    return RNG.normal(size=(rows, 3)).astype(np.float32)


LABELS = {
    "classes": lambda: np.sort(RNG.integers(0, 10, 1000)),
    "one-hot rows": lambda: np.eye(10, dtype=np.float32)[np.sort(RNG.integers(0, 10, 1000))],
    "numbers": lambda: np.sort(RNG.normal(size=(1000, 1)), axis=0),
    "strings": lambda: np.sort(RNG.integers(0, 10, 1000)).astype(str).astype(object),
    "text of columns": lambda: to_text(np.sort(RNG.integers(0, 10, 1000)).astype(str))[0],
    "dates": lambda: np.arange(1_700_000_000, 1_700_000_000 + 3600 * 1000, 3600),
}


@pytest.mark.parametrize("kind", LABELS)
def test_rows_sorted_by_their_label_differ(kind):
    for parts in (2, 40):
        found = difference(noise(1000), LABELS[kind](), parts)
        assert found.array == 1
        assert found.low[1] < found.high[1]


def test_a_difference_names_the_class_or_value_and_its_partitions():
    found = difference(noise(1000), np.repeat([0, 1, 2], [500, 300, 200]), 2)
    assert (found.group, found.low, found.high) == (0, (1, 0.0), (0, 1.0))
    x = RNG.normal(size=(1000, 40))
    x[:, 39] = np.arange(1000)
    found = difference(x, RNG.integers(0, 2, 1000), 4)
    assert (found.array, found.value, found.group, found.low, found.high) == (0, 39, None, (0, 124.5), (3, 874.5))
    assert difference(x, np.sort(RNG.integers(0, 5, 1000)), 4).array == 1  # labels come first


def test_rows_sorted_by_a_string_differ():
    x = {"a": noise(1000), "b": np.repeat(np.array(["oslo", "rome"], object), [900, 100])}
    found = difference(x, RNG.integers(0, 2, 1000), 10)
    assert (found.array, found.group, found.low, found.high) == (1, "oslo", (9, 0.0), (0, 1.0))
    rare = np.arange(1000).astype(str).astype(object)
    assert difference({"a": noise(1000), "b": rare}, RNG.integers(0, 2, 1000), 10) is None


def test_small_differences_of_many_rows_and_periodic_rows_are_harmless():
    y = RNG.random(200_000) < np.linspace(0.45, 0.55, 200_000)
    x = np.linspace(0, 1, 200_000)[:, None] + RNG.normal(size=(200_000, 1))
    assert difference(x, y, 4) is None
    hours = (np.arange(4 * 24 * 4096) + 7 * (np.arange(4 * 24 * 4096) >= 2 * 24 * 4096)) % 24
    assert difference(hours[:, None].astype(np.float32), RNG.integers(0, 2, len(hours)), 2) is None


@pytest.mark.parametrize("repetitions", [15, long(2000)])
def test_shuffled_rows_do_not_differ(repetitions):
    """Also with few rows, rare classes, outliers and tiny partitions: at most one of 1,000 data sets."""
    alarms = total = 0
    for _ in range(repetitions):
        for rows, parts in ((24, 2), (60, 2), (300, 2), (300, 10), (200, 40), (2000, 20)):
            features = [
                RNG.lognormal(0, 3, rows),
                RNG.standard_cauchy(rows),
                RNG.random(rows) < 0.01,
                RNG.random(rows) < 2 / rows,
                RNG.pareto(0.5, rows),
            ]
            labels = (
                RNG.integers(0, 2, rows),
                RNG.random(rows) < 0.02,
                np.minimum(RNG.zipf(1.5, rows), 500),
                RNG.integers(0, 1000, rows),
                RNG.normal(size=rows),
                RNG.standard_cauchy(rows),
            )
            for y in labels:
                total += 1
                alarms += difference(np.column_stack(features), y, parts) is not None
    assert alarms <= total // 1000


def test_gaps_and_infinite_values_hide_no_difference():
    x = noise(1000)
    x[:, 0] = np.arange(1000)
    x[RNG.random(x.shape) < 0.2] = np.nan
    x[5], x[6] = np.inf, 1e30
    found = difference(x.astype(np.float64) ** 9, RNG.integers(0, 2, 1000), 4)
    assert (found.array, found.value) == (0, 0)


def test_shuffled_strings_nan_constants_and_missing_labels_do_not_differ():
    x = {"a": np.full((400, 2), np.nan), "b": np.array(["x", "y"] * 200, object), "c": np.ones((400, 1))}
    assert difference(x, np.zeros(400), 2) is None
    assert difference(noise(400), None, 2) is None
    assert difference(noise(400), np.sort(RNG.integers(0, 3, 400)), 1) is None


def test_statistics_of_blocks_are_those_of_all_rows():
    x, y = RNG.normal(1e6, 1, size=(3000, 5)), RNG.integers(-3, 4, 3000)
    merged = reduce(PartitionStats.union, stats(from_arrays(x, y, None), 7).values())
    assert merged.classes == (None, Counter(y.tolist()))
    np.testing.assert_allclose(merged.moments[0].mean[:5], x.mean(axis=0))
    np.testing.assert_allclose(merged.moments[0].squares[:5], ((x - x.mean(axis=0)) ** 2).sum(axis=0), rtol=1e-6)


@pytest.mark.parametrize("labels", [np.array([-(2**63), 2**63 - 1]), np.array([1e300, 1e300]), np.arange(3000)])
def test_labels_that_are_no_classes_are_not_counted(labels):
    assert PartitionStats.of(from_arrays(np.zeros((len(labels), 1)), labels, None)).classes == (None, None)


def test_balanced_weights_are_those_of_scikit_learn():
    from sklearn.utils.class_weight import compute_class_weight

    y = RNG.choice([0, 1, 4], 500, p=[0.7, 0.2, 0.1])
    expected = compute_class_weight("balanced", classes=np.array([0, 1, 4]), y=y)
    for labels in (y, np.eye(5)[y]):
        block = from_arrays(noise(600), np.concatenate([labels, labels[:100]]), None)
        counts = CountClasses((300, None, 0))
        parts = [block[:350], block[300:500], block[500:]]  # the last 50 of the first part, and the third one, do not count
        weights = balanced_weights([n for i, part in enumerate(parts) for n in counts(TaskContext(i), iter([part]))])
        assert list(weights) == [0, 1, 4]
        np.testing.assert_allclose(list(weights.values()), expected)


def test_labels_that_cannot_be_balanced_are_an_error():
    with pytest.raises(DataError, match='^class_weight="balanced"'):
        balanced_weights([{0: 3, 1: 5}, None])
    strings = from_arrays(noise(2), np.array(["a", "b"], object), None)
    assert [*CountClasses((2,))(TaskContext(0), iter([strings]))] == [None]
