"""`KerasEstimator`: a Spark ML Estimator that trains a Keras model."""

# ruff: noqa: N803 - Spark's names
from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from pyspark import keyword_only
from pyspark.ml import Estimator

from sparkkeras.arguments import known_arguments
from sparkkeras.checkpoints.checkpoint import Checkpoint
from sparkkeras.data.column_values import SPARK_ML, worded_for
from sparkkeras.data.partition_stats import ClassWeight
from sparkkeras.data.placement import Shuffle
from sparkkeras.errors import ConfigurationError, DataError, ModelError
from sparkkeras.ml.converters import Names
from sparkkeras.ml.fit_records import own_checkpoints
from sparkkeras.ml.params import TrainingParams
from sparkkeras.ml.persistence import Savable
from sparkkeras.ml.transformer import KerasTransformer, SchemaFrame, check_columns, result_schema
from sparkkeras.modeling import state as model_state
from sparkkeras.modeling.archive import ModelArchive
from sparkkeras.modeling.compilation import check_trainable
from sparkkeras.modeling.state import ModelState
from sparkkeras.parameter.options import ParameterServerOptions
from sparkkeras.parameter.rules import UpdateRule
from sparkkeras.scoring.columns import BATCH_SIZE
from sparkkeras.sources.frame import Columns, Loaders
from sparkkeras.spark_model import SparkModel

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

_pack_lock = threading.Lock()
_fit_lock = threading.Lock()


class KerasEstimator(TrainingParams, Estimator[KerasTransformer], Savable):
    """Trains a copy of a compiled Keras model on a DataFrame; a stage of Spark ML pipelines and hyperparameter searches.

    Each ``fit`` starts from the model's current weights and optimizer state, does not change the model, and returns a
    `KerasTransformer` with the trained copy. Every argument is a param, so it can be searched with a ``ParamGridBuilder``
    (``.addGrid(estimator.learning_rate, [0.1, 0.01])``, ``.addGrid(estimator.model, [small, large])``) and overridden in
    a single fit (``fit(df, {estimator.epochs: 5})``). Concurrent fits, as with ``parallelism=2``, share the cluster in the
    synchronous mode; in the other modes, and with callbacks, they run one at a time.

    Args:
        model: A compiled and built ``keras.Model``.
        featuresCol: The input columns: one column (numbers, arrays or vectors), a list of columns to concatenate, or
            ``{input name: column(s)}``. ``None``: the column ``features``, or the columns named like the model's inputs.
        labelCol: The label columns, in the same forms; a dict maps output names to columns.
        weightCol: The column of sample weights. ``None``: all rows weigh the same.
        validationIndicatorCol: A boolean or numeric column: rows where it is true or not 0 are used for validation, not for
            training. `SparkModel.fit` calls it ``validation_col``.
        outputCol: The new column for the model's output: a name; for several outputs a list, ``{output name: column}``, or a
            prefix for the output names. ``""`` omits it.
        predictionCol: The new column for predictions, in the same forms.
        probabilityCol: The new column for class probabilities, in the same forms.
        rawPredictionCol: The new column for logits or log-probabilities, in the same forms.
        outputType: The type of ``outputCol`` where an output has several units: ``"array"`` or ``"vector"``.
        task: ``"auto"``, ``"regression"``, ``"binary"``, ``"multiclass"``, ``"multilabel"``, or ``{output name: task}``; see
            `KerasTransformer`.
        thresholds: A threshold for each class, or ``{output name: thresholds}``; see `KerasTransformer`. ``None``: the
            class with the largest probability.
        epochs: Train until this epoch, counted from 0; at least 1.
        batch_size: Rows in a batch of one worker.
        learning_rate: The optimizer's learning rate for this fit. ``None``: the compiled one.
        mode: ``"synchronous"``, ``"asynchronous"``, ``"hogwild"`` or ``"allreduce"``; see `SparkModel`.
        frequency: How long a worker trains between two exchanges: ``"epoch"``, ``"batch"``, or a number of batches;
            ``None``: the mode's default.
        rule: The update rule: a name or an `UpdateRule`; ``None``: the mode's default. See `SparkModel`.
        num_workers: The number of workers; ``None``: one for each partition.
        parameter_server_mode: The transport to the parameter server: ``"http"`` or ``"socket"``, which is faster. ``None``:
            ``"http"``.
        port: The parameter server's port; ``None`` or 0: any free port.
        gradient_dtype: The dtype in which the mode ``"allreduce"`` sends gradients: ``"float16"`` or ``"bfloat16"``;
            ``None``: their own.
        max_restarts: How often the mode ``"allreduce"`` continues after a worker has failed; ``None``: 3 times.
        server_options: Further settings of the parameter server.
        seed: The seed of shuffles, dropout masks and other random numbers; ``None``: random.
        callbacks: Keras callbacks that run on the driver after each epoch. They are not saved.
        worker_callbacks: Keras callbacks that run on the workers. They are not saved.
        validation_split: The fraction of rows, in [0, 1), used for validation: the last ones of each partition, or with
            ``shuffle="global"`` random ones.
        validation_data: A DataFrame to validate on, with the columns of the training data. In a pipeline these are the
            columns that the estimator gets from the stages before it; ``validationIndicatorCol`` marks rows of the
            pipeline's data instead. Every fit validates on it, also those of a ``CrossValidator``. It is not saved. Only one
            of ``validation_split``, ``validation_data`` and ``validationIndicatorCol`` can be set.
        validation_freq: Validate every this many epochs.
        validation_batch_size: Rows in a validation batch; ``None``: ``batch_size``.
        shuffle: Whether each worker shuffles its rows before each epoch; ``"global"`` also redistributes the rows at random,
            see `sparkkeras.SparkModel.fit`.
        class_weight: A weight for each class, ``{class index: weight}``, or ``"balanced"``, see `sparkkeras.SparkModel.fit`.
        initial_epoch: The epoch to start at, counted from 0.
        steps_per_epoch: The maximum number of batches of one worker in an epoch; ``None``: all of its rows.
        transform: ``transform(x, y) -> (x, y)``, applied to each batch on the workers. The fitted KerasTransformer applies
            it as ``batch_transform``, with ``y=None``.
        loader: Converts a column into a model input, such as `image_loader`; or ``{input name: loader}``.
        handleInvalid: What to do with rows that hold nulls, NaN or infinite values: ``"error"`` raises, ``"skip"`` drops
            them. The fitted KerasTransformer has the same value; its ``setHandleInvalid("keep")`` keeps such rows and
            predicts null.
        checkpoint: Where and how often to write checkpoints; see `SparkModel.fit`. For a single ``fit``, not for the fits of
            a ``CrossValidator`` or a grid, which raise an error.
        resume: Whether to continue from the newest checkpoint.
        verbose: 0: silent, 1: a progress bar, 2: one line per epoch; ``"auto"``: 1.
        custom_objects: Custom classes and functions by name, where they cannot be found from the model.
        inferenceBatchSize: Rows per batch when the fitted KerasTransformer predicts.

    Raises:
        UnknownArgumentError: An argument is not known.
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
        frequency: str | int | None = None,
        rule: str | UpdateRule | None = None,
        gradient_dtype: str | None = None,
        max_restarts: int | None = None,
        num_workers: int | None = None,
        parameter_server_mode: str | None = None,
        port: int | None = None,
        server_options: ParameterServerOptions | None = None,
        seed: int | None = None,
        callbacks: Sequence[keras.callbacks.Callback] | keras.callbacks.Callback | None = None,
        worker_callbacks: Sequence[keras.callbacks.Callback] | keras.callbacks.Callback | None = None,
        validation_split: float = 0.0,
        validation_data: DataFrame | None = None,
        validation_freq: int = 1,
        validation_batch_size: int | None = None,
        shuffle: Shuffle = True,
        class_weight: ClassWeight | None = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        transform: Callable[[Any, Any], Any] | None = None,
        loader: Loaders | None = None,
        handleInvalid: str = "error",
        checkpoint: Checkpoint | None = None,
        resume: bool = False,
        verbose: str | int = "auto",
        custom_objects: Mapping[str, Any] | None = None,
        inferenceBatchSize: int = BATCH_SIZE,
    ) -> None:
        super().__init__()
        self._begin(KerasEstimator.__init__)

    def transformSchema(self, schema: StructType) -> StructType:  # noqa: N802 - Spark's name
        """Check that a schema can be used for training, and return the schema that the fitted KerasTransformer produces.

        Raises:
            ModelError: There is no model, or it is not compiled or not built.
            DataError: A column is missing, or its type or width does not fit the model.
            ConfigurationError: A new column already exists, or a param does not fit the model.
        """
        return self._result_schema(self._checked_model(), schema)

    def _fit(self, dataset: DataFrame) -> KerasTransformer:
        get = self.getOrDefault
        original = self._checked_model()
        self._result_schema(original, dataset)
        model = self._copy_of(original)
        of_modes = ("parameter_server_mode", "port", "server_options", "gradient_dtype", "max_restarts")
        spark_model = SparkModel(
            model,
            get("mode"),
            get("frequency"),
            get("num_workers"),
            rule=get("rule"),
            **{name: get(name) for name in of_modes if self.isSet(name)},  # earlier versions saved other defaults
            custom_objects=get("custom_objects"),
            batch_size=get("batch_size"),
            seed=get("seed"),
        )
        with self._exclusive_if_needed(), self._own_checkpoints(dataset), worded_for(SPARK_ML):
            history = spark_model.fit(
                dataset,
                epochs=get("epochs"),
                verbose=get("verbose"),
                callbacks=get("callbacks"),
                validation_split=get("validation_split"),
                validation_data=get("validation_data"),
                validation_col=get("validationIndicatorCol"),
                validation_freq=get("validation_freq"),
                validation_batch_size=get("validation_batch_size"),
                shuffle=get("shuffle"),
                class_weight=get("class_weight"),
                sample_weight=get("weightCol"),
                initial_epoch=get("initial_epoch"),
                steps_per_epoch=get("steps_per_epoch"),
                features=get("featuresCol"),
                label=get("labelCol"),
                loader=get("loader"),
                transform=get("transform"),
                on_invalid="drop" if get("handleInvalid") == "skip" else "error",
                worker_callbacks=get("worker_callbacks"),
                checkpoint=get("checkpoint"),
                resume=get("resume"),
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

    @contextmanager
    def _exclusive_if_needed(self) -> Iterator[None]:
        """Run fits one at a time, unless they can safely run concurrently."""
        alone = self.getOrDefault("callbacks") or self.getOrDefault("checkpoint")
        if self.getOrDefault("mode") == "synchronous" and not alone:
            yield
        else:  # these modes hold Spark's task slots until training ends; a callback works on one model at a time
            with _fit_lock:
                yield

    def _own_checkpoints(self, dataset: DataFrame) -> AbstractContextManager[None]:
        checkpoint = self.getOrDefault("checkpoint")
        if checkpoint is None:
            return nullcontext()
        params = {param.name: value for param, value in self.extractParamMap().items()}
        return own_checkpoints(str(checkpoint.path), dataset, params)

    def _fitted(self, model: keras.Model, history: Mapping[str, Sequence[Any]]) -> KerasTransformer:
        fitted = KerasTransformer(model=model, batch_transform=self.getOrDefault("transform"))
        fitted._resetUid(self.uid)  # so that fit(df, params) reaches it too, as with Spark's models
        self._copyValues(fitted)
        fitted.history = {name: [_as_json(value) for value in values] for name, values in history.items()}
        return fitted


def _as_json(value: Any) -> Any:
    """A metric value that JSON can hold: a float, nested lists of floats for an array, or ``None``."""
    return None if value is None else np.asarray(value, dtype=float).tolist()
