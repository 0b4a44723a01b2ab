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
    from sparkkeras.data.images import image_loader
    from sparkkeras.data.mllib import (
        encode_label,
        from_labeled_point,
        from_matrix,
        from_vector,
        lp_to_simple_rdd,
        to_labeled_point,
        to_matrix,
        to_vector,
    )
    from sparkkeras.data.tables import from_data_frame, to_data_frame
    from sparkkeras.data.tfrecords import load_tfrecords, save_as_tfrecords
    from sparkkeras.ensemble import EnsembleModel, load_ensemble_model
    from sparkkeras.errors import (
        ClusterError,
        ConfigurationError,
        CustomObjectError,
        DataError,
        DivergenceError,
        ModelError,
        ParameterServerError,
        SearchError,
        SparkKerasError,
        StorageError,
        UnknownArgumentError,
        WorkerError,
    )
    from sparkkeras.loading import load_spark_model
    from sparkkeras.ml.image_featurizer import ImageFeaturizer
    from sparkkeras.mllib_model import SparkMLlibModel
    from sparkkeras.parameter.options import ParameterServerOptions
    from sparkkeras.parameter.rules import (
        AGN,
        DCASGD,
        EAMSGD,
        EASGD,
        AsynchronousRule,
        Average,
        DiLoCo,
        Downpour,
        DynSGD,
        SlowMo,
        Update,
        UpdateRule,
        Window,
    )
    from sparkkeras.parameter.service import ParameterServerStats
    from sparkkeras.spark_ensemble import SparkEnsemble
    from sparkkeras.spark_model import SparkModel
    from sparkkeras.sql import keras_udf, register_keras_udf

__version__ = "0.1.0"

__all__ = [
    "AGN",
    "DCASGD",
    "EAMSGD",
    "EASGD",
    "AsynchronousRule",
    "Average",
    "ClusterError",
    "ConfigurationError",
    "CustomObjectError",
    "DataError",
    "DiLoCo",
    "DivergenceError",
    "Downpour",
    "DynSGD",
    "EnsembleModel",
    "ImageFeaturizer",
    "ModelError",
    "ParameterServerError",
    "ParameterServerOptions",
    "ParameterServerStats",
    "SearchError",
    "SlowMo",
    "SparkEnsemble",
    "SparkKerasError",
    "SparkMLlibModel",
    "SparkModel",
    "StorageError",
    "UnknownArgumentError",
    "Update",
    "UpdateRule",
    "Window",
    "WorkerError",
    "encode_label",
    "from_data_frame",
    "from_labeled_point",
    "from_matrix",
    "from_vector",
    "greedy_ensemble",
    "image_loader",
    "keras_udf",
    "load_ensemble_model",
    "load_spark_model",
    "load_tfrecords",
    "lp_to_simple_rdd",
    "register_keras_udf",
    "save_as_tfrecords",
    "to_data_frame",
    "to_labeled_point",
    "to_matrix",
    "to_simple_rdd",
    "to_vector",
]

_HOMES = {
    "sparkkeras.data.arrays": ["to_simple_rdd"],
    "sparkkeras.data.images": ["image_loader"],
    "sparkkeras.data.mllib": [
        "encode_label",
        "from_labeled_point",
        "from_matrix",
        "from_vector",
        "lp_to_simple_rdd",
        "to_labeled_point",
        "to_matrix",
        "to_vector",
    ],
    "sparkkeras.data.tables": ["from_data_frame", "to_data_frame"],
    "sparkkeras.data.tfrecords": ["load_tfrecords", "save_as_tfrecords"],
    "sparkkeras.ensemble": ["EnsembleModel", "load_ensemble_model"],
    "sparkkeras.greedy": ["greedy_ensemble"],
    "sparkkeras.loading": ["load_spark_model"],
    "sparkkeras.ml.image_featurizer": ["ImageFeaturizer"],
    "sparkkeras.mllib_model": ["SparkMLlibModel"],
    "sparkkeras.parameter.options": ["ParameterServerOptions"],
    "sparkkeras.parameter.rules": [
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
        "Update",
        "UpdateRule",
        "Window",
    ],
    "sparkkeras.parameter.service": ["ParameterServerStats"],
    "sparkkeras.spark_ensemble": ["SparkEnsemble"],
    "sparkkeras.spark_model": ["SparkModel"],
    "sparkkeras.sql": ["keras_udf", "register_keras_udf"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

logging.getLogger(__name__).addHandler(logging.NullHandler())


_ELSEWHERE = {
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
"""Names that are elsewhere, or that Elephas has for what is called otherwise here."""


def __getattr__(name: str) -> Any:
    if name in _ELSEWHERE:  # of an AttributeError, `from sparkkeras import name` would not show the message
        raise ImportError(f"{__name__} has no {name}: use {_ELSEWHERE[name]}.", name=__name__)
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF.get(name, "sparkkeras.errors")), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
