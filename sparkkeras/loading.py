"""`load_spark_model`: load a saved model as the class that saved it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from sparkkeras.arguments import known_arguments
from sparkkeras.mllib.model import SparkMLlibModel
from sparkkeras.spark_model import SparkModel, load_saved


@known_arguments
def load_spark_model(
    path: str | os.PathLike[str], custom_objects: Mapping[str, Any] | None = None, safe_mode: bool = True
) -> SparkModel | SparkMLlibModel:
    """Load a file that `SparkModel.save` or `SparkMLlibModel.save` wrote, any ``.keras`` file, or an HDF5 file (``.h5``).

    From an HDF5 file of Elephas, the mode, frequency, number of workers, transport and batch size are loaded, too.

    Args:
        path: A local path, or a URI that Spark can read.
        custom_objects: Custom classes and functions of the model, and the class of a custom update rule, by name. Not needed
            for classes and functions of the model that are defined in ``__main__`` or an imported module (except for HDF5).
        safe_mode: Whether to reject Python code inside the file (lambdas). Set it to False only for files that you trust.

    Returns:
        A SparkMLlibModel if one was saved, else a SparkModel, with the same mode, frequency, rule, seed and optimizer state.

    Raises:
        StorageError: The path cannot be read.
        ModelError: The file has no model, or code that ``safe_mode`` rejects.
        ConfigurationError: ``path`` is not a path, or a value in ``custom_objects`` is not an object such as a class.
    """
    spark_model, kind = load_saved(path, custom_objects, safe_mode)
    return SparkMLlibModel.of(spark_model) if kind == SparkMLlibModel.__name__ else spark_model
