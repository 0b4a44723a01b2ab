"""`KerasEstimator`: a Spark ML Estimator that trains a Keras model."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Unpack

import keras
import numpy as np
from pyspark.ml import Estimator
from pyspark.ml.param import Param
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from sparkkeras.arguments import declared, known_arguments, listing
from sparkkeras.checkpoints.store import Checkpoint
from sparkkeras.data.schema import OnInvalid
from sparkkeras.errors import ConfigurationError, DataError, ModelError
from sparkkeras.ml.params import EstimatorArguments, KerasParams
from sparkkeras.ml.persistence import Savable
from sparkkeras.ml.transformer import KerasTransformer, SchemaFrame, check_columns, result_schema
from sparkkeras.modeling import state as model_state
from sparkkeras.modeling.archive import ModelArchive
from sparkkeras.modeling.compilation import check_trainable
from sparkkeras.modeling.state import ModelState
from sparkkeras.preprocessing.adaptation import adapt
from sparkkeras.sources.frame import split_by
from sparkkeras.spark_model import SparkModel
from sparkkeras.training.fit_arguments import ModelArguments, ModelSettings, TrainingArguments

_pack_lock = threading.Lock()
_adapt_lock = threading.Lock()
_fit_lock = threading.Lock()


class KerasEstimator(KerasParams, Estimator[KerasTransformer], Savable, declares=EstimatorArguments):
    """Trains a copy of a compiled Keras model on a DataFrame; a stage of Spark ML pipelines and hyperparameter searches.

    Each ``fit`` starts from the model's current weights and optimizer state, does not change the model, and returns a
    `KerasTransformer` with the trained copy. Every argument is a param, so it can be searched with a ``ParamGridBuilder``
    (``.addGrid(estimator.learning_rate, [0.1, 0.01])``, ``.addGrid(estimator.model, [small, large])``) and overridden in
    a single fit (``fit(df, {estimator.epochs: 5})``). Concurrent fits, as with ``parallelism=2``, share the cluster in the
    synchronous mode; in the other modes, and with callbacks, they run one at a time.
    A ``checkpoint`` is for a single fit: it raises an error in a ``CrossValidator`` or a grid.

    Args:
        **given: See `EstimatorArguments`.

    Raises:
        UnknownArgumentError: An argument is not known.
        ConfigurationError: An argument is out of range.

    Example::

        estimator = KerasEstimator(model=model, labelCol="species", epochs=20)
        pipeline = Pipeline(stages=[VectorAssembler(inputCols=columns, outputCol="features"), estimator])
        predicted = pipeline.fit(train).transform(test)
    """

    _is_copy = False
    _of_search: Checkpoint | None = None
    """The checkpoint that a copy has in common with others, if it may be one that a search has made."""

    @known_arguments
    @listing(EstimatorArguments)
    def __init__(self, **given: Unpack[EstimatorArguments]) -> None:
        super().__init__()
        self._begin(given)

    def transformSchema(self, schema: StructType) -> StructType:  # noqa: N802 - Spark's name
        """Check that a schema can be used for training, and return the schema that the fitted KerasTransformer produces.

        Raises:
            ModelError: There is no model, or it is not compiled or not built.
            DataError: A column is missing, or its type or width does not fit the model.
            ConfigurationError: A new column already exists, or a param does not fit the model.
        """
        return self._result_schema(self._checked_model(), schema)

    def copy(self, extra: Mapping[Param[Any], Any] | None = None) -> KerasEstimator:
        """See `KerasParams.copy`."""
        copied = super().copy(extra)
        if self._is_copy or not extra:  # a search copies the estimator, and this copy for each fit with params
            copied._of_search = copied.getOrDefault("checkpoint")
        copied._is_copy = True
        return copied

    def _fit(self, dataset: DataFrame) -> KerasTransformer:
        get = self.getOrDefault
        if get("checkpoint") is not None and get("checkpoint") is self._of_search:
            raise ConfigurationError(
                f"{get('checkpoint')}: each fit needs its own folder, but the fits of CrossValidator, TrainValidationSplit "
                "and fit(df, [params, ...]) would continue one another: leave checkpoint out there. To fit a copy of an "
                "estimator once, set its checkpoint again: copied.setCheckpoint(Checkpoint(path))."
            )
        original = self._checked_model()
        self._result_schema(original, dataset)
        policy: OnInvalid = "drop" if get("handleInvalid") == "skip" else "error"
        model = self._adapted_copy_of(original, dataset, policy) if get("adapt") else self._copy_of(original)
        spark_model = SparkModel(model, **{name: get(name) for name in declared(ModelSettings)})
        # The other modes hold Spark's task slots until training ends, and a callback works on one model at a time.
        with nullcontext() if get("mode") == "synchronous" and not get("callbacks") else _fit_lock:
            history = spark_model.fit(
                dataset,
                validation_data=get("validation_data"),
                validation_col=get("validationIndicatorCol"),
                sample_weight=get("weightCol"),
                features=get("featuresCol"),
                label=get("labelCol"),
                loader=get("loader"),
                on_invalid=policy,
                **{name: get(name) for name in (*declared(TrainingArguments), *declared(ModelArguments))},
            )
        return self._fitted(model, history.history)

    def _result_schema(self, model: keras.Model, data: DataFrame | StructType) -> StructType:
        """See `transformSchema`; also checks the columns of ``validation_data``."""
        schema = result_schema(self, model, SchemaFrame.of(data), labelled=True)
        held_out = self.getOrDefault("validation_data")
        if held_out is not None:
            try:
                check_columns(self, model, SchemaFrame.of(held_out), labelled=True)
            except (ConfigurationError, DataError) as error:
                raise type(error)(
                    f"validation_data: {error} It needs the columns of the training data. If a pipeline adds them, pass "
                    "validation_data through the fitted stages before this estimator first, or mark rows of the pipeline's "
                    "data to validate on with validationIndicatorCol instead."
                ) from error
        return schema

    def _checked_model(self) -> keras.Model:
        model: keras.Model | None = self.getOrDefault("model")
        if model is None:
            raise ModelError("this KerasEstimator has no model: pass a compiled one, KerasEstimator(model=...).")
        check_trainable(model)
        return model

    def _adapted_copy_of(self, original: keras.Model, dataset: DataFrame, policy: OnInvalid) -> keras.Model:
        """A copy of the model, after its preprocessing layers were adapted to the rows to train on."""
        get = self.getOrDefault
        if get("transform") is not None:
            raise ConfigurationError(
                "adapt=True learns from the columns, and transform= changes what the model gets of them: adapt the model "
                "yourself (sparkkeras.adapt), or leave transform out."
            )
        held_out = get("validationIndicatorCol")
        rows = dataset if held_out is None else split_by(dataset, held_out)[0]
        given = {"features": get("featuresCol"), "loader": get("loader"), "custom_objects": get("custom_objects")}
        with _adapt_lock:  # a model whose layers have no vocabulary cannot be copied first
            adapt(original, rows, on_invalid=policy, verbose=0, **given)
            return self._copy_of(original)

    def _copy_of(self, original: keras.Model) -> keras.Model:
        """A copy of the model with its weights and optimizer variables, and the learning rate of this fit."""
        with _pack_lock:
            model = ModelArchive.pack(original, self.getOrDefault("custom_objects")).unpack_to_train()
            ModelState.take(original).put(model)  # an archive may have older ones
        rate = self.getOrDefault("learning_rate")
        if rate is not None:
            if not model_state.has_settable_rate(model):
                raise ConfigurationError(
                    f"learning_rate={rate!r} cannot be set: the model's optimizer uses a learning rate schedule. Compile "
                    "the model with a number as the learning rate, or leave learning_rate out."
                )
            model.optimizer.learning_rate = rate
        return model

    def _fitted(self, model: keras.Model, history: Mapping[str, Sequence[Any]]) -> KerasTransformer:
        fitted = KerasTransformer(model=model, batch_transform=self.getOrDefault("transform"))
        fitted._resetUid(self.uid)  # so that fit(df, params) reaches it too, as with Spark's models
        self._copyValues(fitted)
        fitted.history = {name: [_as_json(value) for value in values] for name, values in history.items()}
        return fitted


def _as_json(value: Any) -> Any:
    """A metric value that JSON can hold: a float, nested lists of floats for an array, or ``None``."""
    return None if value is None else np.asarray(value, dtype=float).tolist()
