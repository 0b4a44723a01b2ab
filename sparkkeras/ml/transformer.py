"""`KerasTransformer`: a Keras model as a Model of Spark ML."""

# ruff: noqa: N803, N815 - Spark's names
from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import keras
from pyspark import keyword_only
from pyspark.ml import Model

from sparkkeras.arguments import known_arguments
from sparkkeras.data.block import describe
from sparkkeras.data.schema import InvalidPolicy
from sparkkeras.errors import ConfigurationError, DataError, ModelError
from sparkkeras.ml import values
from sparkkeras.ml.outputs import OutputColumns, columns_of
from sparkkeras.ml.params import InferenceParams, param
from sparkkeras.ml.persistence import Savable
from sparkkeras.ml.values import Names
from sparkkeras.modeling import archive as models
from sparkkeras.scoring.columns import BATCH_SIZE, with_predictions
from sparkkeras.sources.frame import Columns, Loaders, Named, is_frame, tells_case
from sparkkeras.spark_model import SparkModel

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType


class KerasTransformer(InferenceParams, Model, Savable):
    """A Keras model that adds its predictions to a DataFrame: what `KerasEstimator` gives, or made of any model.

    To each output of the model it adds up to four columns. ``outputCol`` has what the model gives: a double for one unit,
    else an array<float>, or a vector with ``outputType="vector"``. What the others are depends on the task:

    ============  ============================================  ==========================================
    task          predictionCol                                 probabilityCol
    ============  ============================================  ==========================================
    regression    the value, a double (one unit only)           none
    binary        0.0 or 1.0: whether the output is over 0.5    ``[1 - p, p]``
    multiclass    the number of the largest output, a double    the outputs
    multilabel    the numbers of the labels over 0.5, an array  the outputs, each label's own probability
    ============  ============================================  ==========================================

    ``task="auto"`` asks the loss that an output was compiled with: (sparse) categorical cross-entropy is multiclass, binary
    cross-entropy is binary with one unit and multilabel with several. With any other loss, an own one, or none, an output of
    one unit is regression, and others get only ``outputCol``. A loss with ``from_logits=True`` has softmax or sigmoid
    applied to its output; without such a loss, outputs are taken for probabilities.

    ``rawPredictionCol`` is a vector that classifiers add, computed from the same output: ``[-z, z]`` with the logit z for
    binary, the logits of the labels for multilabel, and for multiclass the logits of a loss with ``from_logits=True``, else
    the logarithms of the probabilities. Spark's evaluators find it under its default name.

    Columns are added lazily. What becomes of rows with invalid values, ``handleInvalid`` says. Where an output has a NaN,
    there is no class or label: the prediction is null.

    Args:
        model: A built model, compiled or not.
        featuresCol: The columns of its inputs: one column, several (laid side by side), or ``{input name: column(s)}``;
            ``None``: the column ``features``, or columns named as the inputs.
        labelCol: The columns of the labels, likewise by output, for `evaluate`.
        weightCol: The column of the rows' weights, for `evaluate`.
        outputCol: The column of what the model gives. A model with several outputs has one for each: a list, ``{output name:
            column}``, or a name to which the outputs' names are appended (``output_left``, ``output_right``). ``""`` leaves
            it out.
        predictionCol: The column of predictions, likewise.
        probabilityCol: The column of probabilities, likewise.
        rawPredictionCol: The column of logits or logarithms of probabilities, likewise.
        outputType: ``"array"`` or ``"vector"``.
        task: ``"auto"``, ``"regression"``, ``"binary"``, ``"multiclass"``, ``"multilabel"``, or ``{output name: task}``.
        thresholds: A threshold for each class of a binary or multiclass output, all over 0 but for one that may be 0: the
            class with the largest probability / threshold is predicted. A model with several outputs has
            ``{output name: thresholds}``. ``None``: the class with the largest probability.
        inferenceBatchSize: Rows that the model is called on at a time.
        batch_transform: ``batch_transform(x, None) -> x`` on each batch, on the workers; the estimator's ``transform``.
        loader: What turns a column into an input, such as `image_loader`, or ``{input name: loader}``.
        handleInvalid: What to do with rows that hold nulls, NaN or infinite values: ``"error"``, ``"skip"`` to leave them
            out, or ``"keep"`` to predict null. `evaluate` leaves them out with either.
        custom_objects: Custom classes and functions by name, where they cannot be found in the model.

    Attributes:
        history: The figures of the training, a list with a value for each epoch by name (a list of values for metrics that
            have several); empty for a model that no `KerasEstimator` trained.

    Raises:
        UnknownArgumentError: An argument that it does not take.
        ConfigurationError: An argument is out of range.

    Example::

        scorer = KerasTransformer(model=keras.saving.load_model("churn.keras"), featuresCol=["age", "income"])
        scorer.transform(df).select("prediction", "probability")
    """

    batch_transform = param("batch_transform(x, None) -> x on each batch, on the workers", values.optional(values.function))
    handleInvalid = param(
        "what to do with rows that hold nulls, NaN or infinite values: 'error', 'skip' them, or 'keep' them (predict null)",
        values.choice("error", "skip", "keep"),
    )

    @known_arguments
    @keyword_only
    def __init__(
        self,
        *,
        model: keras.Model | None = None,
        featuresCol: Columns | None = "features",
        labelCol: Columns | None = "label",
        weightCol: Columns | None = None,
        outputCol: Names = "output",
        predictionCol: Names = "prediction",
        probabilityCol: Names = "probability",
        rawPredictionCol: Names = "rawPrediction",
        outputType: str = "array",
        task: str | Mapping[str, str] = "auto",
        thresholds: Sequence[float] | Mapping[str, Sequence[float]] | None = None,
        inferenceBatchSize: int = BATCH_SIZE,
        batch_transform: Callable[[Any, Any], Any] | None = None,
        loader: Loaders | None = None,
        handleInvalid: str = "error",
        custom_objects: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        # No param: a search over models hands the untrained one of its param map to `transform` as well.
        self._model = None if model is None else values.network("model", model)
        self.history: dict[str, list[Any]] = {}
        self._begin(KerasTransformer.__init__)

    def get_model(self) -> keras.Model:
        """The Keras model itself.

        Raises:
            ModelError: There is none.
        """
        if self._model is None:
            raise ModelError(
                "this KerasTransformer has no model: KerasTransformer(model=...), or take what KerasEstimator.fit returns."
            )
        models.check_built(self._model)
        return self._model

    def transformSchema(self, schema: StructType) -> StructType:  # noqa: N802 - Spark's name
        """The schema of `transform`'s result.

        Raises:
            ModelError: There is no model, or it is not built.
            DataError: A column is missing, or of a type or width that does not fit the model.
            ConfigurationError: A new column is there already, or what was said does not fit the model.
        """
        return result_schema(self, self.get_model(), Columnar.of(schema))

    def evaluate(self, dataset: DataFrame) -> dict[str, float]:
        """The loss and metrics that the model was compiled with, over all rows.

        Args:
            dataset: Rows with the columns of ``featuresCol`` and ``labelCol``.

        Raises:
            ModelError: There is no model, or it is not compiled.
            DataError: The data is empty, or does not fit the model or its loss.
        """
        check_frame(dataset)
        own = self.getOrDefault
        spark_model = SparkModel(self.get_model(), custom_objects=own("custom_objects"))
        logs: dict[str, float] = spark_model.evaluate(
            dataset,
            batch_size=own("inferenceBatchSize"),
            features=own("featuresCol"),
            label=own("labelCol"),
            sample_weight=own("weightCol"),
            loader=own("loader"),
            transform=own("batch_transform"),
            on_invalid="error" if own("handleInvalid") == "error" else "drop",
            return_dict=True,
        )
        return logs

    def _saved_model(self) -> keras.Model | None:
        return self._model

    def _loaded_model(self, model: keras.Model) -> None:
        self._model = model

    def _saved_notes(self) -> dict[str, Any]:
        return {"history": self.history}

    def _loaded_notes(self, notes: dict[str, Any]) -> None:
        self.history = notes["history"]

    def _transform(self, dataset: DataFrame) -> DataFrame:
        model = self.get_model()
        result_schema(self, model, Columnar.of(dataset))
        columns = output_columns(self, model)
        own = self.getOrDefault
        if not any(True for column in columns for _ in column.fields()):
            warnings.warn(
                f"{self.uid} adds nothing: outputCol, rawPredictionCol, probabilityCol and predictionCol are all left out.",
                stacklevel=3,
            )
            return dataset
        scored_as = [f"{self.uid}_{number}" for number in range(len(columns))]
        scored = with_predictions(
            dataset,
            model,
            features=own("featuresCol"),
            output_col=scored_as,
            batch_size=own("inferenceBatchSize"),
            transform=own("batch_transform"),
            loader=own("loader"),
            custom_objects=own("custom_objects"),
            on_invalid=_ON_NAN[own("handleInvalid")],
        )
        return with_columns(scored, scored_as, columns)


_ON_NAN: dict[str, InvalidPolicy] = {"error": "error", "skip": "drop", "keep": "null"}
"""What handleInvalid means to `with_predictions`."""


def output_columns(params: InferenceParams, model: keras.Model) -> list[OutputColumns]:
    """The columns that a model's outputs become by the params of an estimator or a transformer."""
    return columns_of(
        model,
        task=params.getOrDefault("task"),
        output_type=params.getOrDefault("outputType"),
        output_col=params.getOrDefault("outputCol"),
        raw_prediction=params.getOrDefault("rawPredictionCol"),
        probability=params.getOrDefault("probabilityCol"),
        prediction=params.getOrDefault("predictionCol"),
        thresholds=params.getOrDefault("thresholds"),
    )


def result_schema(params: InferenceParams, model: keras.Model, frame: DataFrame, *, labelled: bool = False) -> StructType:
    """The schema with the new columns, once the columns that it takes are found to be there and to fit.

    Args:
        params: The params of an estimator or a transformer.
        model: Its model.
        frame: The rows that come in; see `Columnar`.
        labelled: Whether they must have labels and weights too.

    Raises:
        DataError: A column is missing, or of a type or width that does not fit the model.
        ConfigurationError: A new column is there already, or what was said does not fit the model.
    """
    own = params.getOrDefault
    transform = own("transform") if labelled else own("batch_transform")
    named = Named(own("featuresCol"), own("labelCol"), own("weightCol"), own("loader"), fits=transform is None)
    named.select(frame, models.schema_of(model), labelled)
    return with_fields(frame, [field for column in output_columns(params, model) for field in column.fields()])


@dataclass(frozen=True)
class Columnar:
    """What stands for a DataFrame where only its columns count."""

    schema: StructType
    sparkSession: SparkSession | None = None  # as a DataFrame's

    @classmethod
    def of(cls, data: DataFrame | StructType) -> DataFrame:
        """The columns of a frame, or those of a schema, as Spark takes them by default.

        Raises:
            DataError: It is neither.
        """
        from pyspark.sql.types import StructType

        if isinstance(data, StructType):
            return cast("DataFrame", cls(data))
        check_frame(data)
        return cast("DataFrame", cls(data.schema, data.sparkSession))


def check_frame(data: Any) -> None:
    """Refuse what is no DataFrame of Spark's.

    Raises:
        DataError: It is something else.
    """
    if not is_frame(data):
        raise DataError(
            f"dataset is {describe(data)}; Spark ML expects a Spark DataFrame. Make one of arrays with "
            "sparkkeras.to_data_frame(spark, x, y), or of a pandas DataFrame with spark.createDataFrame(table); SparkModel "
            "takes arrays."
        )


def with_fields(frame: DataFrame, fields: Sequence[Any]) -> StructType:
    """The schema of a frame with new fields.

    Raises:
        ConfigurationError: A field is there already, perhaps in another case: by default Spark does not distinguish them.
    """
    from pyspark.sql.types import StructType

    tells = tells_case(frame.sparkSession)
    schema = frame.schema
    known = {name if tells else name.lower(): name for name in schema.names}
    new: set[str] = set()
    for field in fields:
        lower = field.name if tells else field.name.lower()
        if lower in new:
            raise ConfigurationError(
                f"two new columns are called {field.name!r}: give outputCol, rawPredictionCol, probabilityCol and "
                "predictionCol different names, or leave one out with ''."
            )
        new.add(lower)
        if lower in known:
            spelled = "" if known[lower] == field.name else f", as {known[lower]!r}, which Spark does not distinguish"
            raise ConfigurationError(
                f"the output column {field.name!r} is there already{spelled}: choose another name (outputCol, "
                f"rawPredictionCol, probabilityCol, predictionCol), or drop({known[lower]!r}) first."
            )
    return StructType([*schema.fields, *fields])


def with_columns(scored: DataFrame, scored_as: Sequence[str], columns: Sequence[OutputColumns]) -> DataFrame:
    """The frame with the outputs' columns instead of those that the model gave."""
    expressions = [
        expression
        for name, column in zip(scored_as, columns, strict=True)
        for expression in column.expressions(scored[name])
    ]
    return scored.select("*", *expressions).drop(*scored_as)
