"""Subclasses of the stages, as in a user's module."""

from pyspark import keyword_only
from pyspark.ml.param import Param, Params, TypeConverters

from sparkkeras.ml import KerasEstimator, KerasTransformer


class ChurnTransformer(KerasTransformer):
    """A transformer with a plain Spark Param and an argument for it."""

    cutoff = Param(Params._dummy(), "cutoff", "a probability", typeConverter=TypeConverters.toFloat)

    @keyword_only
    def __init__(self, *, cutoff=0.5, **params):
        super().__init__(**params)
        self._setDefault(cutoff=0.5)
        self._set(cutoff=cutoff)


class ChurnEstimator(KerasEstimator):
    """An estimator with different defaults."""

    def __init__(self, **params):
        super().__init__(**{"epochs": 3, **params})


class DemandingTransformer(KerasTransformer):
    """A transformer that cannot be created without arguments."""

    def __init__(self, country, **params):
        super().__init__(**params)
        self.country = country
