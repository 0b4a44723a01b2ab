"""Train, evaluate and serve Keras models on Spark.

::

    from sparkkeras import SparkModel, to_simple_rdd

    spark_model = SparkModel(model)
    history = spark_model.fit(to_simple_rdd(sc, x_train, y_train), epochs=10)

Names are imported on first use, so that a Spark worker that only reads data does not load Keras.
"""

from __future__ import annotations

import ast
import importlib
import logging
import pkgutil
import sys
from typing import Any

__version__ = "0.1.0"

_STUB = ast.parse(pkgutil.get_data(__name__, "__init__.pyi") or "")
_HOME_OF = {name.name: each.module for each in _STUB.body if isinstance(each, ast.ImportFrom) for name in each.names}
"""The modules of the public names, which `__getattr__` imports when they are first used."""

__all__ = sorted(_HOME_OF)

_PUBLIC_MODULES = ("events", "hyperopt", "ml", "runner")

logging.getLogger(__name__).addHandler(logging.NullHandler())


_REPLACEMENTS = {
    "AsynchronousSparkModel": 'SparkModel(model, mode="asynchronous")',
    "ElephasEstimator": "sparkkeras.ml.KerasEstimator",
    "ElephasTransformer": "sparkkeras.ml.KerasTransformer",
    "HyperParamModel": "sparkkeras.hyperopt.HyperParamModel",
    "KerasEstimator": "sparkkeras.ml.KerasEstimator",
    "KerasTransformer": "sparkkeras.ml.KerasTransformer",
    "SparkTrials": "sparkkeras.hyperopt.SparkTrials",
    "df_to_simple_rdd": "SparkModel(model).fit(df, features=..., label=...), which needs no RDD",
    "load_ml_estimator": "sparkkeras.ml.KerasEstimator.load(path)",
    "load_ml_transformer": "sparkkeras.ml.KerasTransformer.load(path)",
}
"""Names in other modules of sparkkeras, and names of Elephas with their replacements."""


def __getattr__(name: str) -> Any:
    if name in _REPLACEMENTS:
        message = f"{__name__} has no {name}: use {_REPLACEMENTS[name]}."
        # `from sparkkeras import name` would replace the message of an AttributeError; hasattr and getattr need that type.
        if sys._getframe(1).f_globals.get("__name__") == "importlib._bootstrap":
            raise ImportError(message, name=__name__)
        raise AttributeError(message)
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    imported = [name for name in globals() if name in _PUBLIC_MODULES or name.startswith("__")]
    return sorted([*imported, *__all__])
