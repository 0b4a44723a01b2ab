"""Train, evaluate and serve Keras models on Spark.

::

    from sparkkeras import SparkModel, to_simple_rdd

    spark_model = SparkModel(model)
    history = spark_model.fit(to_simple_rdd(sc, x_train, y_train), epochs=10)

Names are imported when they are first used, so that a Spark worker that only reads data does not load Keras.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparkkeras.data.arrays import to_simple_rdd
    from sparkkeras.data.mllib import encode_label, from_labeled_point, lp_to_simple_rdd, to_labeled_point
    from sparkkeras.errors import (
        ClusterError,
        ConfigurationError,
        CustomObjectError,
        DataError,
        DivergenceError,
        ModelError,
        SparkKerasError,
        StorageError,
        UnknownArgumentError,
        WorkerError,
    )
    from sparkkeras.parameter.rules import Average, DiLoCo, SlowMo, Update, UpdateRule
    from sparkkeras.spark_model import SparkModel, load_spark_model

__version__ = "0.1.0"

__all__ = [
    "Average",
    "ClusterError",
    "ConfigurationError",
    "CustomObjectError",
    "DataError",
    "DiLoCo",
    "DivergenceError",
    "ModelError",
    "SlowMo",
    "SparkKerasError",
    "SparkModel",
    "StorageError",
    "UnknownArgumentError",
    "Update",
    "UpdateRule",
    "WorkerError",
    "encode_label",
    "from_labeled_point",
    "load_spark_model",
    "lp_to_simple_rdd",
    "to_labeled_point",
    "to_simple_rdd",
]

_HOMES = {
    "sparkkeras.data.arrays": ["to_simple_rdd"],
    "sparkkeras.data.mllib": ["encode_label", "from_labeled_point", "lp_to_simple_rdd", "to_labeled_point"],
    "sparkkeras.parameter.rules": ["Average", "DiLoCo", "SlowMo", "Update", "UpdateRule"],
    "sparkkeras.spark_model": ["SparkModel", "load_spark_model"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

logging.getLogger(__name__).addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF.get(name, "sparkkeras.errors")), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
