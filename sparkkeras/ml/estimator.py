"""`KerasEstimator`: a Keras model as an Estimator of Spark ML."""

# ruff: noqa: N803 - Spark's names
from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from pyspark import keyword_only
from pyspark.ml import Estimator

from sparkkeras.arguments import known_arguments
from sparkkeras.errors import ConfigurationError, ModelError
from sparkkeras.ml.params import TrainingParams
from sparkkeras.ml.persistence import Savable
from sparkkeras.ml.transformer import Columnar, KerasTransformer, result_schema
from sparkkeras.ml.values import Names
from sparkkeras.modeling import archive as models
from sparkkeras.modeling.archive import ModelArchive, ModelState
from sparkkeras.parameter.options import ParameterServerOptions
from sparkkeras.parameter.rules import UpdateRule
from sparkkeras.scoring.columns import BATCH_SIZE
from sparkkeras.sources.frame import Columns, Loaders
from sparkkeras.spark_model import SparkModel

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

_packing = threading.Lock()
_turns = threading.Lock()


class KerasEstimator(TrainingParams, Estimator[KerasTransformer], Savable):
    """Trains copies of a compiled Keras model on DataFrames, in pipelines and in searches over params.

    Each ``fit`` begins with the model's weights and optimizer as they are, and leaves the model as it was; it returns a
    `KerasTransformer` with the trained copy. All arguments are params: they can stand in a ``ParamGridBuilder``
    (``.addGrid(estimator.learning_rate, [0.1, 0.01])``, ``.addGrid(estimator.model, [small, large])``) and be given to a
    single fit (``fit(df, {estimator.epochs: 5})``). Fits that run at the same time, as with ``parallelism=2``, share the
    cluster in the synchronous mode; in the others, and with callbacks, they take turns.

    Args:
        model: A compiled and built ``keras.Model``.
        featuresCol: The columns that the model takes: one column (numbers, arrays, vectors), several that are laid side by
            side, or ``{input name: column(s)}``; ``None``: the column ``features``, or columns named as the inputs.
        labelCol: The columns of the labels, likewise by output.
        weightCol: The column of the rows' weights.
        validationIndicatorCol: A boolean or numeric column: rows where it is true, or not 0, validate and do not train.
        outputCol: As in `KerasTransformer`, like the other columns that it adds.
        predictionCol: As in `KerasTransformer`.
        probabilityCol: As in `KerasTransformer`.
        rawPredictionCol: As in `KerasTransformer`.
        outputType: As in `KerasTransformer`.
        task: As in `KerasTransformer`.
        thresholds: As in `KerasTransformer`.
        epochs: Train up to this epoch, counted from 0.
        batch_size: Rows in a batch of one worker.
        learning_rate: The optimizer's learning rate; ``None``: as it was compiled.
        mode: As in `SparkModel`, like all that follows up to ``seed``.
        frequency: As in `SparkModel`.
        rule: As in `SparkModel`.
        num_workers: As in `SparkModel`.
        parameter_server_mode: As in `SparkModel`.
        port: As in `SparkModel`.
        server_options: As in `SparkModel`.
        seed: As in `SparkModel`.
        callbacks: Keras callbacks; as in `SparkModel.fit`, like all that follows up to ``verbose``. They are not saved.
        worker_callbacks: As in `SparkModel.fit`. They are not saved.
        validation_split: As in `SparkModel.fit`; not together with ``validationIndicatorCol``.
        validation_freq: As in `SparkModel.fit`.
        validation_batch_size: As in `SparkModel.fit`.
        shuffle: As in `SparkModel.fit`.
        class_weight: As in `SparkModel.fit`.
        initial_epoch: As in `SparkModel.fit`.
        steps_per_epoch: As in `SparkModel.fit`.
        transform: As in `SparkModel.fit`. The KerasTransformer has it as ``batch_transform`` and calls it with ``y=None``.
        loader: As in `SparkModel.fit`.
        handleInvalid: What to do with rows that hold nulls, NaN or infinite values: ``"error"``, or ``"skip"`` them. The
            KerasTransformer does the same; its ``setHandleInvalid("keep")`` keeps such rows and predicts null.
        verbose: As in `SparkModel.fit`.
        custom_objects: Custom classes and functions by name, where they cannot be found in the model.
        inferenceBatchSize: Rows that the KerasTransformer calls the model on at a time.

    Raises:
        UnknownArgumentError: An argument that it does not take.
        ConfigurationError: An argument is out of range.

    Example::

        estimator = KerasEstimator(model=model, labelCol="species", epochs=20)
        pipeline = Pipeline(stages=[VectorAssembler(inputCols=columns, outputCol="features"), estimator])
        predicted = pipeline.fit(train).transform(test)
    """

    @known_arguments
    @keyword_only
    def __init__(
        self,
        *,
        model: keras.Model | None = None,
        featuresCol: Columns | None = "features",
        labelCol: Columns | None = "label",
        weightCol: Columns | None = None,
        validationIndicatorCol: str | None = None,
        outputCol: Names = "output",
        predictionCol: Names = "prediction",
        probabilityCol: Names = "probability",
        rawPredictionCol: Names = "rawPrediction",
        outputType: str = "array",
        task: str | Mapping[str, str] = "auto",
        thresholds: Sequence[float] | Mapping[str, Sequence[float]] | None = None,
        epochs: int = 1,
        batch_size: int = 32,
        learning_rate: float | None = None,
        mode: str = "synchronous",
        frequency: str | int = "epoch",
        rule: str | UpdateRule | None = None,
        num_workers: int | None = None,
        parameter_server_mode: str = "http",
        port: int = 0,
        server_options: ParameterServerOptions | None = None,
        seed: int | None = None,
        callbacks: Sequence[keras.callbacks.Callback] | keras.callbacks.Callback | None = None,
        worker_callbacks: Sequence[keras.callbacks.Callback] | keras.callbacks.Callback | None = None,
        validation_split: float = 0.0,
        validation_freq: int = 1,
        validation_batch_size: int | None = None,
        shuffle: bool = True,
        class_weight: Mapping[int, float] | None = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        transform: Callable[[Any, Any], Any] | None = None,
        loader: Loaders | None = None,
        handleInvalid: str = "error",
        verbose: str | int = "auto",
        custom_objects: Mapping[str, Any] | None = None,
        inferenceBatchSize: int = BATCH_SIZE,
    ) -> None:
        super().__init__()
        self._begin(KerasEstimator.__init__)

    def transformSchema(self, schema: StructType) -> StructType:  # noqa: N802 - Spark's name
        """The schema of what the fitted KerasTransformer gives, once ``schema`` is found to fit for training.

        Raises:
            ModelError: There is no model, or it is not compiled or not built.
            DataError: A column is missing, or of a type or width that does not fit the model.
            ConfigurationError: A new column is there already, or what was said does not fit the model.
        """
        return result_schema(self, self._checked_model(), Columnar.of(schema), labelled=True)

    def _fit(self, dataset: DataFrame) -> KerasTransformer:
        own = self.getOrDefault
        original = self._checked_model()
        result_schema(self, original, Columnar.of(dataset), labelled=True)
        model = self._own_copy(original)
        spark_model = SparkModel(
            model,
            own("mode"),
            own("frequency"),
            own("num_workers"),
            parameter_server_mode=own("parameter_server_mode"),
            port=own("port"),
            rule=own("rule"),
            server_options=own("server_options"),
            custom_objects=own("custom_objects"),
            batch_size=own("batch_size"),
            seed=own("seed"),
        )
        with self._turn():
            history = spark_model.fit(
                dataset,
                epochs=own("epochs"),
                verbose=own("verbose"),
                callbacks=own("callbacks"),
                validation_split=own("validation_split"),
                validation_col=own("validationIndicatorCol"),
                validation_freq=own("validation_freq"),
                validation_batch_size=own("validation_batch_size"),
                shuffle=own("shuffle"),
                class_weight=own("class_weight"),
                sample_weight=own("weightCol"),
                initial_epoch=own("initial_epoch"),
                steps_per_epoch=own("steps_per_epoch"),
                features=own("featuresCol"),
                label=own("labelCol"),
                loader=own("loader"),
                transform=own("transform"),
                on_invalid="drop" if own("handleInvalid") == "skip" else "error",
                worker_callbacks=own("worker_callbacks"),
            )
        return self._fitted(model, history.history)

    def _checked_model(self) -> keras.Model:
        model: keras.Model | None = self.getOrDefault("model")
        if model is None:
            raise ModelError("this KerasEstimator has no model: give it a compiled one, KerasEstimator(model=...).")
        models.check_trainable(model)
        return model

    def _own_copy(self, original: keras.Model) -> keras.Model:
        """A copy of the model with its weights and its optimizer's slots, and the learning rate of this fit."""
        with _packing:
            model = ModelArchive.pack(original, self.getOrDefault("custom_objects")).unpack()
            ModelState.take(original).put(model)  # an archive may have older ones
        rate = self.getOrDefault("learning_rate")
        if rate is not None:
            if not models.has_settable_rate(model):
                raise ConfigurationError(
                    f"learning_rate={rate!r}: the model's optimizer follows a schedule. Compile it with a number as its "
                    "learning rate, or leave the param learning_rate out."
                )
            model.optimizer.learning_rate = rate
        return model

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """One fit at a time where two would be in each other's way."""
        if self.getOrDefault("mode") == "synchronous" and not self.getOrDefault("callbacks"):
            yield
        else:  # slots are held to the end of training; callbacks know one model
            with _turns:
                yield

    def _fitted(self, model: keras.Model, history: Mapping[str, Sequence[Any]]) -> KerasTransformer:
        fitted = KerasTransformer(model=model, batch_transform=self.getOrDefault("transform"))
        fitted._resetUid(self.uid)  # so that a fit's params reach it, as with Spark's own models
        self._copyValues(fitted)
        fitted.history = {name: [_plain(value) for value in values] for name, values in history.items()}
        return fitted


def _plain(value: Any) -> Any:
    """A figure as JSON can hold it: a float, nested lists of them for an array, or ``None``."""
    return None if value is None else np.asarray(value, dtype=float).tolist()
