"""Benchmarks of learning from rows that are not shuffled: what they cost, and from which difference of partitions on.

Samples are accuracies on other rows; each seed is a turn.
"""

from __future__ import annotations

from itertools import product
from statistics import fmean
from typing import Any

import data
import numpy as np
from harness import Effort, Metric, Samples, benchmark

ROWS, TEST_ROWS, TEST_DIGITS, EPOCHS, SEEDS = 8_000, 3_600, 360, 5, 3

MODES: dict[str, tuple[int, dict[str, Any]]] = {
    "synchronous": (10, {}),
    "asynchronous": (2, {"mode": "asynchronous"}),
    "asynchronous, frequency=10": (2, {"mode": "asynchronous", "frequency": 10}),
    "hogwild": (2, {"mode": "hogwild"}),
    "allreduce": (2, {"mode": "allreduce"}),
}
"""The modes: the partitions of the rows, and the arguments of `SparkModel`."""

ORDERS = ("sorted", "global", "shuffled")

PARTITIONS = (2, 10)
SHARES = (0.0, 0.4, 0.6, 0.8, 1.0)
"""The shares of the rows that are sorted, in `partition_differences`; the others are in random partitions."""


def summary(samples: Samples) -> str:
    """The accuracies as a table: a row for each mode, or for each share of sorted rows."""
    names = list(samples)
    columns = list(dict.fromkeys(name.rpartition(": ")[2] for name in names))
    lines = [f"| | {' | '.join(columns)} |", "| --- |" + " --- |" * len(columns)]
    for row in dict.fromkeys(name.rpartition(": ")[0] for name in names):
        cells = (f"{fmean(value for turn in samples[f'{row}: {column}'] for value in turn):.3f}" for column in columns)
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


@benchmark(
    *(
        Metric(
            f"accuracy lost by rows sorted by label, {mode}, {order}",
            f"{mode}: {order}",
            f"{mode}: shuffled",
            kind="points",
            target=3 if order == "global" else None,
        )
        for mode in MODES
        for order in ORDERS[:2]
    ),
    once=True,
    summary=summary,
)
def sorted_rows(effort: Effort) -> Samples:
    """Digits in an RDD: sorted by label, the same with ``shuffle="global"``, and shuffled."""
    from contestants import spark

    train, test = _digits(effort)
    by_label = np.argsort(train[1], kind="stable")
    samples: Samples = {}
    with spark() as session:
        for seed in range(min(effort.seeds, SEEDS)):
            for mode, (parts, settings) in MODES.items():
                for order in ORDERS:
                    rows = train[0], train[1]
                    if order != "shuffled":
                        rows = train[0][by_label], train[1][by_label]
                    rdd = session.sparkContext.parallelize(list(zip(*rows, strict=True)), parts)
                    accuracy = _accuracy(rdd, test, seed, settings, shuffle="global" if order == "global" else True)
                    samples.setdefault(f"{mode}: {order}", []).append([accuracy])
    return samples


@benchmark(
    *(
        Metric(
            f"accuracy lost, {task} in {parts} partitions, rows sorted by {key}",
            f"{task}, {parts}, {key}, {SHARES[-1]}: accuracy",
            f"{task}, {parts}, {key}, {SHARES[0]}: accuracy",
            kind="points",
        )
        for task in ("digits", "table")
        for parts in PARTITIONS
        for key in ("label", "feature")
    ),
    once=True,
    summary=summary,
)
def partition_differences(effort: Effort) -> Samples:
    """Synchronous training where a share of the rows is sorted, by label or by a feature, and the others are shuffled.

    The difference of the partitions is what `sparkkeras.data.partition_stats` computes: its limits are differences from
    which on accuracy is lost.
    """
    from contestants import spark

    tasks = {"digits": _digits(effort), "table": _table(effort)}
    samples: Samples = {}
    with spark() as session:
        for seed in range(min(effort.seeds, SEEDS)):
            for (task, (train, test)), parts, key, share in product(tasks.items(), PARTITIONS, ("label", "feature"), SHARES):
                order = _partly_sorted(train[1] if key == "label" else train[0].sum(1), share, seed)
                rows = train[0][order], train[1][order]
                rdd = session.sparkContext.parallelize(list(zip(*rows, strict=True)), parts)
                row = f"{task}, {parts}, {key}, {share}"
                samples.setdefault(f"{row}: accuracy", []).append([_accuracy(rdd, test, seed, {}, shuffle=True)])
                samples.setdefault(f"{row}: difference", []).append([_difference(rows, parts)])
    return samples


def _digits(effort: Effort) -> tuple[data.Arrays, data.Arrays]:
    """Rows to train and to test on, of different digits."""
    digits = np.random.default_rng(0).permutation(len(data.small_digits()[0]))
    train = data.vectors(effort.rows(ROWS), digits=digits[TEST_DIGITS:])
    return train, data.vectors(effort.rows(TEST_ROWS), digits=digits[:TEST_DIGITS])


def _table(effort: Effort) -> tuple[data.Arrays, data.Arrays]:
    """Rows of 20 columns in two classes, to train and to test on."""
    from sklearn.datasets import make_classification

    rows = effort.rows(ROWS)
    x, y = make_classification(rows + effort.rows(TEST_ROWS), 20, n_informative=10, n_clusters_per_class=4, random_state=1)
    x = x.astype(np.float32)
    return (x[:rows], y[:rows]), (x[rows:], y[rows:])


def _partly_sorted(key: Any, share: float, seed: int) -> Any:
    """The order of rows of which a share is sorted by a key; the others are at random places among them."""
    generator = np.random.default_rng(seed)
    rank = np.argsort(np.lexsort((generator.random(len(key)), key))) / len(key)
    return np.argsort(np.where(generator.random(len(key)) < share, rank, generator.random(len(key))))


def _difference(rows: data.Arrays, parts: int) -> float:
    """The larger difference of partitions: that of the classes, or that of the value whose means differ most."""
    from sparkkeras.data.block import from_arrays
    from sparkkeras.data.partition_stats import PartitionStats, difference_of_classes, differences_of_values
    from sparkkeras.data.placement import even_slices

    stats = [PartitionStats.of(from_arrays(rows[0][each], rows[1][each], None)) for each in even_slices(len(rows[0]), parts)]
    classes = [each.classes[-1] or {} for each in stats]
    values = [each.moments[0] for each in stats if each.moments[0] is not None]
    return max(difference_of_classes(classes), *differences_of_values(values))


def _accuracy(rdd: Any, test: data.Arrays, seed: int, settings: dict[str, Any], shuffle: Any) -> float:
    """The accuracy on test rows after `EPOCHS` epochs."""
    import warnings

    import keras

    from sparkkeras import SparkModel

    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [
            keras.Input(test[0].shape[1:]),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(int(test[1].max()) + 1, activation="softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the rows seem to be sorted
        SparkModel(model, seed=seed, **settings).fit(rdd, epochs=EPOCHS, shuffle=shuffle, verbose=0)
    return float(model.evaluate(*test, verbose=0)[1])
