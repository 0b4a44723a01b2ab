"""Conversion between class indices and one-hot rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparkkeras.arguments import integer, known_arguments
from sparkkeras.data.numeric import NotNumbersError, to_numbers
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
