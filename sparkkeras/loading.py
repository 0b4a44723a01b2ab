"""`load_spark_model`: a file of a saved model as the class that saved it."""

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
    """Load what `SparkModel.save` or `SparkMLlibModel.save` wrote, any ``.keras`` file, or an HDF5 file (``.h5``).

    Of an HDF5 file of Elephas, the mode, frequency, number of workers, transport and batch size are kept.

    Args:
        path: A path of this machine, or a URI that Spark can read.
        custom_objects: Custom classes and functions of the model, and the class of an own update rule, by name. Those of
            the model that this process has loaded, in ``__main__`` or a module, are found without it (not for HDF5).
        safe_mode: Whether to refuse Python code inside the file (lambdas). Turn it off for files that you trust only.

    Returns:
        A SparkMLlibModel if one was saved, else a SparkModel, with the same mode, frequency, rule, seed and optimizer state.

    Raises:
        StorageError: The path cannot be read.
        ModelError: It holds no model, or code that ``safe_mode`` refuses.
        ConfigurationError: The path is none, or ``custom_objects`` holds something else.
    """
    spark_model, kind = load_saved(path, custom_objects, safe_mode)
    return SparkMLlibModel.of(spark_model) if kind == SparkMLlibModel.__name__ else spark_model
