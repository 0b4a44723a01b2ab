"""Conversions between NumPy arrays and MLlib's data types: RDDs of LabeledPoint, matrices and vectors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from sparkkeras.arguments import known_arguments, optional_integer
from sparkkeras.data.block import describe
from sparkkeras.data.labels import class_indices, encode_label
from sparkkeras.data.numeric import NotNumbersError, to_numbers
from sparkkeras.errors import DataError, counted
from sparkkeras.sources.source import is_rdd
from sparkkeras.spark.cluster import check_running
from sparkkeras.spark.slots import check_slots
from sparkkeras.weights import Array

if TYPE_CHECKING:
    from pyspark import RDD, SparkContext
    from pyspark.mllib.linalg import DenseMatrix, DenseVector
    from pyspark.mllib.regression import LabeledPoint


@known_arguments
def to_labeled_point(sc: SparkContext, x: Any, y: Any, categorical: bool = False) -> RDD[LabeledPoint]:
    """Create an RDD of LabeledPoints from arrays.

    Args:
        sc: The SparkContext.
        x: Features, shape (samples, ...); each sample is flattened into a dense vector.
        y: Labels, shape (samples,) or (samples, 1); with ``categorical``, one-hot rows of shape (samples, classes).
        categorical: Whether labels are one-hot rows, to be converted to class indices.

    Raises:
        DataError: ``x`` and ``y`` differ in length, or ``y`` has another shape.
        ClusterError: The SparkContext was stopped.
    """
    from pyspark.mllib.regression import LabeledPoint

    check_running(sc)
    features, labels = np.asarray(x), np.asarray(y)
    if len(features) != len(labels):
        raise DataError(f"x has {counted(len(features), 'row')} and y has {len(labels)}; expected the same number of rows.")
    if categorical:
        labels = class_indices(labels)
    elif labels.size != len(labels):
        raise DataError(
            f"labels have shape {labels.shape}; expected (samples,) or (samples, 1), or one-hot rows with categorical=True."
        )
    flat, numbers = features.reshape(len(features), -1), labels.reshape(-1)
    return sc.parallelize([LabeledPoint(float(label), row) for label, row in zip(numbers, flat, strict=True)])


@known_arguments
def from_labeled_point(
    rdd: RDD[LabeledPoint], categorical: bool = False, nb_classes: int | None = None
) -> tuple[Array, Array]:
    """Collect the features and labels of an RDD of LabeledPoints into arrays on the driver.

    Args:
        rdd: The LabeledPoints.
        categorical: Whether to return one-hot labels, shape (samples, classes), instead of labels, shape (samples,).
        nb_classes: The number of classes for one-hot labels; ``None``: the largest label plus one.

    Returns:
        ``(features, labels)``; features have the shape (samples, features).

    Raises:
        DataError: There are no rows, or with ``categorical`` a label is not a class index below ``nb_classes``.
    """
    nb_classes = optional_integer("nb_classes", nb_classes)
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


@known_arguments
def lp_to_simple_rdd(lp_rdd: RDD[LabeledPoint], categorical: bool = False, nb_classes: int | None = None) -> RDD[Any]:
    """Convert an RDD of LabeledPoints to an RDD of ``(features, label)`` rows, lazily.

    Args:
        lp_rdd: The LabeledPoints.
        categorical: Whether to convert labels to one-hot rows.
        nb_classes: The number of classes for one-hot rows; ``None``: the largest label plus one, which takes a Spark job.

    Raises:
        DataError: ``lp_rdd`` is not an RDD, or ``nb_classes`` is ``None`` and cannot be inferred from the labels. Rows that
            are not LabeledPoints and labels that are not class indices below ``nb_classes`` raise when the RDD is computed.
    """
    nb_classes = optional_integer("nb_classes", nb_classes)
    if not is_rdd(lp_rdd):
        raise DataError(
            f"lp_rdd is {describe(lp_rdd)}; expected an RDD of LabeledPoints: to_labeled_point creates one from arrays. "
            "SparkModel accepts arrays and DataFrames directly."
        )
    if not categorical:
        return lp_rdd.map(_Pair())
    return lp_rdd.map(_Pair(nb_classes or _count_classes(lp_rdd.map(_label).fold(-math.inf, np.maximum))))


@known_arguments
def to_matrix(array: Any) -> DenseMatrix:
    """Convert a 2-D array to an MLlib matrix of the same shape; values are copied as float64.

    Args:
        array: Numbers or booleans, shape (rows, columns).

    Raises:
        DataError: The array is not 2-D, or holds values that are not numbers.

    Example::

        to_matrix(np.array([[1, 2], [3, 4]]))  # DenseMatrix(2, 2, [1.0, 3.0, 2.0, 4.0], False): column by column
    """
    from pyspark.mllib.linalg import DenseMatrix

    numbers = _numbers("to_matrix", array)
    if numbers.ndim != 2:
        remedy = {
            0: "use np.array([[value]]) for a matrix of one value",
            1: "use array[None, :] for one row, or array[:, None] for one column",
        }.get(numbers.ndim, "flatten its rows with array.reshape(len(array), -1)")
        raise DataError(f"to_matrix expects an array of shape (rows, columns), received shape {numbers.shape}: {remedy}.")
    rows, columns = numbers.shape
    return DenseMatrix(rows, columns, numbers.flatten(order="F"))


@known_arguments
def from_matrix(matrix: Any) -> Array:
    """Convert a matrix to an array of the same shape, float64; values are copied.

    Args:
        matrix: A dense or sparse matrix, transposed or not, of ``pyspark.mllib.linalg`` or ``pyspark.ml.linalg``.

    Raises:
        DataError: The argument is not a matrix.
    """
    if not _is_matrix(matrix):
        raise DataError(
            f"from_matrix expects a Matrix, received {describe(matrix)}: to_matrix creates one from a 2-D array."
        )
    return np.array(matrix.toArray(), order="C")  # toArray of a dense matrix does not copy


@known_arguments
def to_vector(array: Any) -> DenseVector:
    """Convert a 1-D array to an MLlib vector; values are copied as float64.

    Args:
        array: Numbers or booleans, shape (values,).

    Raises:
        DataError: The array is not 1-D, or holds values that are not numbers.
    """
    from pyspark.mllib.linalg import DenseVector

    numbers = _numbers("to_vector", array)
    if numbers.ndim != 1:
        remedy = "use array.reshape(-1), or to_matrix to keep the rows" if numbers.ndim else "use np.array([value])"
        raise DataError(f"to_vector expects an array of shape (values,), received shape {numbers.shape}: {remedy}.")
    return DenseVector(numbers.copy())


@known_arguments
def from_vector(vector: Any) -> Array:
    """Convert a vector to an array, shape (values,), float64; values are copied.

    Args:
        vector: A dense or sparse vector of ``pyspark.mllib.linalg`` or ``pyspark.ml.linalg``.

    Raises:
        DataError: The argument is not a vector.
    """
    if not _is_vector(vector):
        raise DataError(
            f"from_vector expects a Vector, received {describe(vector)}: to_vector creates one from a 1-D array."
        )
    return np.array(vector.toArray())


def kind_of(data: Any) -> Literal["matrix", "vector", "rdd"]:
    """The kind of data to predict for.

    Raises:
        DataError: The data is neither a matrix nor a vector nor an RDD.
    """
    if _is_matrix(data):
        return "matrix"
    if _is_vector(data):
        return "vector"
    if is_rdd(data):
        return "rdd"
    raise DataError(
        f"data is {describe(data)}; expected a Matrix with a sample in each row, a Vector with one sample, or an RDD of "
        "Vectors or LabeledPoints. to_matrix and to_vector convert arrays; SparkModel.predict accepts arrays directly."
    )


@dataclass(frozen=True)
class _Pair:
    """Converts a LabeledPoint to ``(features, label)``; if ``classes`` is set, the label to a one-hot row."""

    classes: int | None = None

    def __call__(self, point: LabeledPoint) -> tuple[Array, Any]:
        label = _label(point)
        return features_of(point), label if self.classes is None else encode_label(label, self.classes)


def _label(point: LabeledPoint) -> float:
    if not hasattr(point, "label"):
        raise DataError(f"a row is {describe(point)}; expected a LabeledPoint. SparkModel accepts rows of the form (x, y).")
    return float(point.label)


def features_of(row: Any) -> Array:
    """The features of a Vector or a LabeledPoint.

    Raises:
        DataError: It is neither.
    """
    vector = getattr(row, "features", row)
    if not hasattr(vector, "toArray"):
        raise DataError(f"a row is {describe(row)}; expected a Vector or a LabeledPoint. SparkModel accepts rows of arrays.")
    features: Array = vector.toArray()
    return features


def _count_classes(largest: float) -> int:
    """The number of classes, from the largest label; minus infinity means that there are no rows."""
    if not 0 <= largest < math.inf:
        found = "there are no rows" if largest == -math.inf else f"the largest label is {largest:g}"
        raise DataError(f"{found}; expected class indices of 0 or more. Fix the labels, or set nb_classes.")
    return int(largest) + 1


def _numbers(name: str, value: Any) -> Array:
    """An argument of any rank as a float64 array; ``name`` is the function's, for error messages."""
    try:
        array, missing = to_numbers(value)
    except NotNumbersError as error:
        where = "" if error.row is None else f"row {error.row} "
        raise DataError(f"{name} expects numbers or booleans, received {describe(value)}: {where}{error}") from error
    if missing is not None:
        raise DataError(
            f"{name} expects numbers or booleans, received {describe(value)}, which has missing values (None or NA): "
            "replace them."
        )
    return array.astype(np.float64, copy=False)


def _is_matrix(value: Any) -> bool:
    from pyspark.ml.linalg import Matrix as MLMatrix
    from pyspark.mllib.linalg import Matrix

    return isinstance(value, (Matrix, MLMatrix))


def _is_vector(value: Any) -> bool:
    from pyspark.ml.linalg import Vector as MLVector
    from pyspark.mllib.linalg import Vector

    return isinstance(value, (Vector, MLVector))
