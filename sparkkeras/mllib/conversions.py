"""What MLlib has data in, for those who have it: RDDs of LabeledPoint, matrices and vectors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from sparkkeras.arguments import optional_number, whole_number
from sparkkeras.data.block import describe
from sparkkeras.data.numeric import NotNumbersError, to_numbers
from sparkkeras.errors import DataError
from sparkkeras.spark.cluster import check_running, check_slots
from sparkkeras.weights import Array

if TYPE_CHECKING:
    from pyspark import RDD, SparkContext
    from pyspark.mllib.linalg import DenseMatrix, DenseVector
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
        ClusterError: The SparkContext was stopped.
    """
    from pyspark.mllib.regression import LabeledPoint

    check_running(sc)
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
    check_slots(rdd.context)
    points = rdd.collect()
    if not points:
        raise DataError("the RDD has no rows.")
    features = np.stack([point.features.toArray() for point in points])
    labels = np.array([point.label for point in points])
    if not categorical:
        return features, labels
    classes = nb_classes or _count_classes(labels.max())
    return features, np.stack([encode_label(label, classes) for label in labels])


def lp_to_simple_rdd(lp_rdd: RDD[LabeledPoint], categorical: bool = False, nb_classes: int | None = None) -> RDD[Any]:
    """An RDD of ``(features, label)`` rows from LabeledPoints, lazily.

    Args:
        lp_rdd: The LabeledPoints.
        categorical: Whether labels become one-hot rows.
        nb_classes: How many classes; ``None`` looks for the largest label, which is a Spark job.

    Raises:
        DataError: It is no RDD, or ``nb_classes`` is looked for where there are no class numbers. A row that is no
            LabeledPoint, or a label that is no class number below ``nb_classes``, is reported when the RDD is computed.
    """
    nb_classes = optional_number("nb_classes", nb_classes)
    if not is_rdd(lp_rdd):
        raise DataError(
            f"lp_rdd is {describe(lp_rdd)}; expected an RDD of LabeledPoints: to_labeled_point makes one from arrays. "
            "SparkModel takes arrays and DataFrames as they are."
        )
    if not categorical:
        return lp_rdd.map(_Pair())
    return lp_rdd.map(_Pair(nb_classes or _count_classes(lp_rdd.map(_label).fold(-math.inf, np.maximum))))


def encode_label(label: Any, nb_classes: int) -> Array:
    """A class number as a one-hot row, float32, shape (nb_classes,).

    Args:
        label: A whole number from 0 to ``nb_classes - 1``, also as a float or an array of one value.
        nb_classes: How many classes there are.

    Raises:
        DataError: The label is no such number.
    """
    whole_number("nb_classes", nb_classes)
    try:
        value, missing = to_numbers(label)
    except NotNumbersError as error:
        raise DataError(f"label {label!r} is no class number: expected one whole number.") from error
    if value.size != 1 or missing is not None or not np.isfinite(value).all() or float(value.reshape(-1)[0]) % 1 != 0:
        raise DataError(f"label {label!r} is no class number: expected one whole number.")
    number = int(value.reshape(-1)[0])
    if not 0 <= number < nb_classes:
        raise DataError(
            f"label {number} is out of range: with nb_classes={nb_classes}, labels go from 0 to {nb_classes - 1}."
        )
    row = np.zeros(nb_classes, np.float32)
    row[number] = 1.0
    return row


def to_matrix(array: Any) -> DenseMatrix:
    """A 2-D array as an MLlib matrix of the same shape, with values of its own in float64.

    Args:
        array: Numbers or booleans, shape (rows, columns).

    Raises:
        DataError: It is not 2-D, or holds no numbers.

    Example::

        to_matrix(np.array([[1, 2], [3, 4]]))  # DenseMatrix(2, 2, [1.0, 3.0, 2.0, 4.0], False): column by column
    """
    from pyspark.mllib.linalg import DenseMatrix

    numbers = _numbers("to_matrix", array)
    if numbers.ndim != 2:
        remedy = {
            0: "give np.array([[value]]) for a matrix of one value",
            1: "give array[None, :] for one row, or array[:, None] for one column",
        }.get(numbers.ndim, "flatten its rows with array.reshape(len(array), -1)")
        raise DataError(f"to_matrix expects an array of shape (rows, columns), received shape {numbers.shape}: {remedy}.")
    rows, columns = numbers.shape
    return DenseMatrix(rows, columns, numbers.flatten(order="F"))


def from_matrix(matrix: Any) -> Array:
    """A matrix of MLlib as an array of the same shape, float64, with memory of its own.

    Args:
        matrix: A dense or sparse, perhaps transposed, matrix of ``pyspark.mllib.linalg`` or ``pyspark.ml.linalg``.

    Raises:
        DataError: It is something else.
    """
    if not _is_matrix(matrix):
        raise DataError(f"from_matrix expects a Matrix, received {describe(matrix)}: to_matrix makes one from a 2-D array.")
    return np.array(matrix.toArray(), order="C")  # dense ones hand out their own values


def to_vector(array: Any) -> DenseVector:
    """A 1-D array as an MLlib vector, with values of its own in float64.

    Args:
        array: Numbers or booleans, shape (values,).

    Raises:
        DataError: It is not 1-D, or holds no numbers.
    """
    from pyspark.mllib.linalg import DenseVector

    numbers = _numbers("to_vector", array)
    if numbers.ndim != 1:
        remedy = "give array.reshape(-1), or to_matrix keeps the rows" if numbers.ndim else "give np.array([value])"
        raise DataError(f"to_vector expects an array of shape (values,), received shape {numbers.shape}: {remedy}.")
    return DenseVector(numbers.copy())


def from_vector(vector: Any) -> Array:
    """A vector of MLlib as an array, shape (values,), float64, with memory of its own.

    Args:
        vector: A dense or sparse vector of ``pyspark.mllib.linalg`` or ``pyspark.ml.linalg``.

    Raises:
        DataError: It is something else.
    """
    if not _is_vector(vector):
        raise DataError(f"from_vector expects a Vector, received {describe(vector)}: to_vector makes one from a 1-D array.")
    return np.array(vector.toArray())


def kind_of(data: Any) -> Literal["matrix", "vector", "rdd"]:
    """Which of the things that MLlib predicts for data is.

    Raises:
        DataError: It is none of them.
    """
    if _is_matrix(data):
        return "matrix"
    if _is_vector(data):
        return "vector"
    if is_rdd(data):
        return "rdd"
    raise DataError(
        f"data is {describe(data)}; expected a Matrix with a sample in each row, a Vector with one sample, or an RDD of "
        "Vectors or LabeledPoints. to_matrix and to_vector make the first two from arrays; SparkModel.predict takes arrays."
    )


def features_of(rdd: RDD[Any]) -> RDD[Array]:
    """The features of an RDD of vectors or LabeledPoints as arrays, lazily."""
    return rdd.map(_features)


def as_vectors(rdd: RDD[Array]) -> RDD[DenseVector]:
    """An RDD of 1-D arrays as one of vectors, lazily."""
    return rdd.map(to_vector)


@dataclass(frozen=True)
class _Pair:
    """Turn a LabeledPoint into ``(features, label)``; with ``classes``, the label into a one-hot row."""

    classes: int | None = None

    def __call__(self, point: LabeledPoint) -> tuple[Array, Any]:
        label = _label(point)
        return _features(point), label if self.classes is None else encode_label(label, self.classes)


def _label(point: LabeledPoint) -> float:
    if not hasattr(point, "label"):
        raise DataError(f"a row is {describe(point)}; expected a LabeledPoint. SparkModel takes rows of the form (x, y).")
    return float(point.label)


def _features(row: Any) -> Array:
    vector = getattr(row, "features", row)
    if not hasattr(vector, "toArray"):
        raise DataError(f"a row is {describe(row)}; expected a Vector or a LabeledPoint. SparkModel takes rows of arrays.")
    features: Array = vector.toArray()
    return features


def _count_classes(largest: float) -> int:
    """How many classes there are if the largest label is this one; that of no rows is minus infinity."""
    if not 0 <= largest < math.inf:
        told = "there are no rows" if largest == -math.inf else f"the largest label is {largest:g}"
        raise DataError(f"{told}; expected class numbers from 0 up. Mend the labels, or give nb_classes.")
    return int(largest) + 1


def _numbers(name: str, value: Any) -> Array:
    """A value of any rank in float64."""
    try:
        array, missing = to_numbers(value)
    except NotNumbersError as error:
        where = "" if error.row is None else f"row {error.row} "
        raise DataError(f"{name} expects numbers or booleans, received {describe(value)}: {where}{error}") from error
    if missing is not None:
        raise DataError(f"{name} expects numbers or booleans, received {describe(value)}, which holds None: fill it in.")
    return array.astype(np.float64, copy=False)


def is_rdd(value: Any) -> bool:
    """Whether a value is an RDD."""
    from pyspark import RDD

    return isinstance(value, RDD)


def _is_matrix(value: Any) -> bool:
    from pyspark.ml.linalg import Matrix as MLMatrix
    from pyspark.mllib.linalg import Matrix

    return isinstance(value, (Matrix, MLMatrix))


def _is_vector(value: Any) -> bool:
    from pyspark.ml.linalg import Vector as MLVector
    from pyspark.mllib.linalg import Vector

    return isinstance(value, (Vector, MLVector))
