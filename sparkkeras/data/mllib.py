"""RDDs of MLlib's LabeledPoint, for those who have them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sparkkeras.arguments import optional_number, whole_number
from sparkkeras.errors import DataError
from sparkkeras.weights import Array

if TYPE_CHECKING:
    from pyspark import RDD, SparkContext
    from pyspark.mllib.regression import LabeledPoint


def to_labeled_point(sc: SparkContext, x: Any, y: Any, categorical: bool = False) -> RDD[LabeledPoint]:
    """An RDD of LabeledPoints from arrays.

    Args:
        sc: The SparkContext.
        x: Features, shape (samples, ...); each sample is flattened into a dense vector.
        y: Labels, shape (samples,) or (samples, 1); with ``categorical``, one-hot rows of shape (samples, classes).
        categorical: Whether labels are one-hot rows, to be turned into class numbers.

    Raises:
        DataError: Lengths differ, or labels have another shape.
    """
    from pyspark.mllib.regression import LabeledPoint

    features, labels = np.asarray(x), np.asarray(y)
    if len(features) != len(labels):
        raise DataError(f"x has {len(features)} rows and y has {len(labels)}: they must have the same number.")
    if categorical:
        if labels.ndim != 2:
            raise DataError(f"categorical=True expects one-hot labels of shape (samples, classes), received {labels.shape}.")
        labels = labels.argmax(axis=1)
    elif labels.size != len(labels):
        raise DataError(
            f"labels have shape {labels.shape}; expected (samples,) or (samples, 1), or one-hot rows with categorical=True."
        )
    flat, numbers = features.reshape(len(features), -1), labels.reshape(-1)
    return sc.parallelize([LabeledPoint(float(label), row) for label, row in zip(numbers, flat, strict=True)])


def from_labeled_point(
    rdd: RDD[LabeledPoint], categorical: bool = False, nb_classes: int | None = None
) -> tuple[Array, Array]:
    """The features, shape (samples, features), and labels of an RDD of LabeledPoints, collected.

    Args:
        rdd: The LabeledPoints.
        categorical: Whether to return one-hot labels, shape (samples, classes), instead of numbers, shape (samples,).
        nb_classes: How many classes; ``None`` takes the largest label plus one.

    Raises:
        DataError: There are no rows, or labels are no class numbers below ``nb_classes``.
    """
    nb_classes = optional_number("nb_classes", nb_classes)
    points = rdd.collect()
    if not points:
        raise DataError("the RDD has no rows.")
    features = np.stack([point.features.toArray() for point in points])
    labels = np.array([point.label for point in points])
    if not categorical:
        return features, labels
    classes = nb_classes or int(labels.max()) + 1
    return features, np.stack([encode_label(label, classes) for label in labels])


def lp_to_simple_rdd(lp_rdd: RDD[LabeledPoint], categorical: bool = False, nb_classes: int | None = None) -> RDD[Any]:
    """An RDD of ``(features, label)`` rows from LabeledPoints, lazily.

    Args:
        lp_rdd: The LabeledPoints.
        categorical: Whether labels become one-hot rows.
        nb_classes: How many classes; ``None`` looks for the largest label, which is a Spark job.
    """
    nb_classes = optional_number("nb_classes", nb_classes)
    if not categorical:
        return lp_rdd.map(_pair)
    classes = nb_classes or int(lp_rdd.map(_label).max()) + 1
    return lp_rdd.map(lambda point: (point.features.toArray(), encode_label(point.label, classes)))


def encode_label(label: Any, nb_classes: int) -> Array:
    """A class number as a one-hot row, float32, shape (nb_classes,).

    Args:
        label: A whole number from 0 to ``nb_classes - 1``, also as a float or an array of one value.
        nb_classes: How many classes there are.

    Raises:
        DataError: The label is no such number.
    """
    whole_number("nb_classes", nb_classes)
    value = np.asarray(label)
    if value.size != 1 or not np.isfinite(value).all() or float(value.reshape(-1)[0]) % 1 != 0:
        raise DataError(f"label {label!r} is no class number: expected one whole number.")
    number = int(value.reshape(-1)[0])
    if not 0 <= number < nb_classes:
        raise DataError(
            f"label {number} is out of range: with nb_classes={nb_classes}, labels go from 0 to {nb_classes - 1}."
        )
    row = np.zeros(nb_classes, np.float32)
    row[number] = 1.0
    return row


def _pair(point: LabeledPoint) -> tuple[Array, float]:
    return point.features.toArray(), point.label


def _label(point: LabeledPoint) -> float:
    return float(point.label)
