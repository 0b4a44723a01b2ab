"""Keras models in Spark ML: estimators, transformers, pipelines.

::

    from sparkkeras.ml import KerasEstimator

    pipeline = Pipeline(stages=[assembler, scaler, KerasEstimator(model=model, epochs=20)])
    predicted = pipeline.fit(train).transform(test)
"""

from sparkkeras.ml.estimator import KerasEstimator
from sparkkeras.ml.fusion import fuse
from sparkkeras.ml.image_featurizer import ImageFeaturizer
from sparkkeras.ml.persistence import GridValue
from sparkkeras.ml.transformer import KerasTransformer

__all__ = ["GridValue", "ImageFeaturizer", "KerasEstimator", "KerasTransformer", "fuse"]
