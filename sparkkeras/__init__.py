"""Train, evaluate and serve Keras models on Spark.

::

    from sparkkeras import SparkModel, to_simple_rdd

    spark_model = SparkModel(model)
    history = spark_model.fit(to_simple_rdd(sc, x_train, y_train), epochs=10)

Names are imported on first use, so that a Spark worker that only reads data does not load Keras.
"""

from __future__ import annotations

import importlib
import logging
import sys
from typing import Any

__version__ = "0.1.0"

# The modules of the public names. Type checkers read __init__.pyi, which has the same names.
_HOMES = {
    "checkpoints.checkpoint": ["Checkpoint"],
    "diagnostics.doctor": ["diagnose"],
    "diagnostics.findings": ["Diagnosis", "Finding"],
    "sources.arrays": ["to_simple_rdd"],
    "sources.conversions": ["from_data_frame", "to_data_frame"],
    "data.labels": ["encode_label"],
    "formats.images": ["image_loader"],
    "formats.sequences": ["PadSequences"],
    "mllib.conversions": [
        "from_labeled_point",
        "from_matrix",
        "from_vector",
        "lp_to_simple_rdd",
        "to_labeled_point",
        "to_matrix",
        "to_vector",
    ],
    "formats.tfrecord_source": ["TFRecordDataSource"],
    "formats.tfrecords": ["load_tfrecords", "save_as_tfrecords"],
    "ensembles.ensemble": ["EnsembleModel", "load_ensemble_model"],
    "errors": [
        "ClusterError",
        "ConfigurationError",
        "CustomObjectError",
        "DataError",
        "DivergenceError",
        "ModelError",
        "DriverConnectionError",
        "SearchError",
        "SparkKerasError",
        "StorageError",
        "TrainingInterruptedError",
        "UnknownArgumentError",
        "WorkerError",
        "WorkerTimeoutError",
    ],
    "ensembles.greedy": ["greedy_ensemble"],
    "loading": ["load_spark_model"],
    "ml.image_featurizer": ["ImageFeaturizer"],
    "mllib.model": ["SparkMLlibModel"],
    "monitor.monitor": ["Monitor"],
    "rpc.options": ["ParameterServerOptions", "ServerOptions"],
    "parameter.rules": [
        "AGN",
        "AsynchronousRule",
        "Average",
        "DCASGD",
        "DiLoCo",
        "Downpour",
        "DynSGD",
        "EAMSGD",
        "EASGD",
        "SlowMo",
        "WorkerUpdate",
        "UpdateRule",
        "ExchangeWindow",
    ],
    "parameter.stats": ["ParameterServerStats"],
    "runner.spark_runner": ["SparkRunner"],
    "ensembles.spark_ensemble": ["SparkEnsemble"],
    "spark_model": ["SparkModel"],
    "sql": ["keras_udf", "register_keras_udf"],
    "tracking.mlflow_callback": ["MLflowCallback"],
    "tracking.worker_tensorboard": ["WorkerTensorBoard"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

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
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    imported = [name for name in globals() if name in _PUBLIC_MODULES or name.startswith("__")]
    return sorted([*imported, *__all__])
