"""`KerasTransformer`: a Spark ML Model that adds a Keras model's predictions to a DataFrame."""

# ruff: noqa: N815 - Spark's names
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Unpack, cast

import keras
from pyspark.ml import Model
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructField, StructType

from sparkkeras.arguments import known_arguments, listing
from sparkkeras.data.block import describe
from sparkkeras.data.invalid_rows import InvalidPolicy
from sparkkeras.data.reader import Reader
from sparkkeras.errors import ConfigurationError, DataError, ModelError, warn
from sparkkeras.ml import converters
from sparkkeras.ml.outputs import columns_of
from sparkkeras.ml.params import KerasParams, TransformerArguments
from sparkkeras.ml.persistence import Savable
from sparkkeras.modeling.compilation import check_built
from sparkkeras.modeling.schema import schema_of
from sparkkeras.scoring.backends import other_backend
from sparkkeras.scoring.columns import Scorer, with_predictions
from sparkkeras.sources.column_names import is_case_sensitive
from sparkkeras.sources.frame import ColumnMapping, Selection, is_frame
from sparkkeras.spark_model import SparkModel


class KerasTransformer(KerasParams, Model, Savable, declares=TransformerArguments):
    """Adds a Keras model's predictions to a DataFrame. `KerasEstimator.fit` returns one; any built model can make one.

    For each output of the model it adds up to four columns. ``outputCol`` holds the model's output: a double for one unit,
    else an array<float>, or a vector with ``outputType="vector"``. The other columns depend on the task:

    ============  ==============================================  ==============================
    task          predictionCol                                   probabilityCol
    ============  ==============================================  ==============================
    regression    the value, a double (one unit only)             none
    binary        1.0 if the probability p is over 0.5, else 0.0  ``[1 - p, p]``
    multiclass    the class index of the largest output (double)  one probability for each class
    multilabel    an array of the label indices over 0.5          one probability for each label
    ============  ==============================================  ==============================

    ``task="auto"`` infers the task from the loss that the output was compiled with: (sparse) categorical cross-entropy is
    multiclass; binary cross-entropy is binary with one unit and multilabel with several. With any other loss, a custom loss
    or none, an output of one unit is regression and other outputs get only ``outputCol``. If the loss has
    ``from_logits=True``, softmax or sigmoid is applied to the output; otherwise outputs are treated as probabilities.

    ``rawPredictionCol`` is added for classification tasks. It is a vector computed from the same output: ``[-z, z]`` with
    the logit z for binary, one logit for each label for multilabel, and for multiclass the logits if the loss has
    ``from_logits=True``, else the logarithms of the probabilities. Spark's evaluators find it by its default name.

    Columns are computed lazily. ``handleInvalid`` controls rows with invalid values. Where the model's output is NaN, the
    prediction of a class or of labels is null.

    Args:
        model: A built model, compiled or not.
        **given: See `TransformerArguments`.

    Attributes:
        history: The training logs: for each metric a list with one value per epoch (a list of values for metrics that
            have several). Empty if no `KerasEstimator` trained the model.

    Raises:
        UnknownArgumentError: An argument is not known.
        ConfigurationError: An argument is out of range.

    Example::

        scorer = KerasTransformer(model=keras.saving.load_model("churn.keras"), featuresCol=["age", "income"])
        scorer.transform(df).select("prediction", "probability")
    """

    @known_arguments
    @listing(TransformerArguments)
    def __init__(self, *, model: keras.Model | None = None, **given: Unpack[TransformerArguments]) -> None:
        super().__init__()
        # Not a param: a search over models passes its param map, with the untrained model, to `transform` as well.
        self._model = None if model is None else converters.keras_model("model", model)
        self.history: dict[str, list[Any]] = {}
        self._begin(given)

    def get_model(self) -> keras.Model:
        """Return the Keras model.

        Raises:
            ModelError: There is no model, or it is not built.
        """
        if self._model is None:
            raise ModelError(
                "this KerasTransformer has no model: pass one, KerasTransformer(model=...), or use the result of "
                "KerasEstimator.fit."
            )
        check_built(self._model)
        return self._model

    def transformSchema(self, schema: StructType) -> StructType:  # noqa: N802 - Spark's name
        """Check that `transform` accepts a schema, and return the schema of its result.

        Raises:
            ModelError: There is no model, or it is not built.
            DataError: A column is missing, or its type or width does not fit the model.
            ConfigurationError: A new column already exists, or a param does not fit the model.
        """
        return result_schema(self, self.get_model(), SchemaFrame.of(schema))

    def evaluate(self, dataset: DataFrame) -> dict[str, float]:
        """Compute the compiled loss and metrics over all rows.

        Args:
            dataset: Rows with the columns of ``featuresCol`` and ``labelCol``, and of ``weightCol`` if it is set.

        Returns:
            The values by name, ``{"loss": ..., ...}``.

        Raises:
            ModelError: There is no model, or it is not compiled.
            DataError: The data is empty, or does not fit the model or its loss.
        """
        check_frame(dataset)
        get = self.getOrDefault
        spark_model = SparkModel(self.get_model(), custom_objects=get("custom_objects"))
        logs: dict[str, float] = spark_model.evaluate(
            dataset,
            batch_size=get("inferenceBatchSize"),
            features=get("featuresCol"),
            label=get("labelCol"),
            sample_weight=get("weightCol"),
            loader=get("loader"),
            transform=get("batch_transform"),
            on_invalid="error" if get("handleInvalid") == "error" else "drop",
            return_dict=True,
            backend=get("backend"),
        )
        return logs

    def _saved_model(self) -> keras.Model | None:
        return self._model

    def _loaded_model(self, model: keras.Model) -> None:
        self._model = model

    def __repr__(self) -> str:
        """With the class, as in Spark's models, whose uid is that of the estimator that fitted them."""
        name = type(self).__name__
        return self.uid if self.uid.startswith(f"{name}_") else f"{name}: uid={self.uid}"

    def _saved_notes(self) -> dict[str, Any]:
        return {"history": self.history}

    def _loaded_notes(self, notes: dict[str, Any]) -> None:
        self.history = notes["history"]

    def _transform(self, dataset: DataFrame) -> DataFrame:
        model, get = self.get_model(), self.getOrDefault
        selection = check_columns(self, model, SchemaFrame.of(dataset), labelled=False)
        new_fields(self, model, dataset)
        columns = columns_of(self, model)
        if not any(True for column in columns for _ in column.fields()):
            warn(f"{self!r} adds no columns: outputCol, rawPredictionCol, probabilityCol and predictionCol are all empty.")
            return dataset
        scored_as = [f"{self.uid}_{number}" for number in range(len(columns))]
        scorer = Scorer.of(
            model,
            batch_size=get("inferenceBatchSize"),
            transform=get("batch_transform"),
            custom_objects=get("custom_objects"),
            backend=other_backend(get("backend")),
        )
        scored = with_predictions(dataset, scorer, selection, scored_as)
        made = [
            expression
            for name, column in zip(scored_as, columns, strict=True)
            for expression in column.expressions(scored[name])
        ]
        return scored.select("*", *made).drop(*scored_as)


_INVALID_POLICIES: dict[str, InvalidPolicy] = {"error": "error", "skip": "drop", "keep": "null"}
"""The ``on_invalid`` of predictions for each ``handleInvalid``."""


def result_schema(params: KerasParams, model: keras.Model, frame: DataFrame, *, labelled: bool = False) -> StructType:
    """Check the input columns and return the schema with the new columns.

    Args:
        params: The params of an estimator or a transformer.
        model: Its model.
        frame: The input; see `SchemaFrame`.
        labelled: Whether the columns of labels and weights are required too.

    Raises:
        DataError: A column is missing, or its type or width does not fit the model.
        ConfigurationError: A new column already exists, or a param does not fit the model.
    """
    check_columns(params, model, frame, labelled=labelled)
    return StructType([*frame.schema.fields, *new_fields(params, model, frame)])


def new_fields(params: KerasParams, model: keras.Model, frame: DataFrame) -> list[StructField]:
    """The new columns; see `result_schema`.

    Raises:
        ConfigurationError: A new column already exists.
    """
    fields = [field for column in columns_of(params, model) for field in column.fields()]
    compared = str if is_case_sensitive(frame.sparkSession) else str.lower
    known = {compared(name): name for name in frame.schema.names}
    new: set[str] = set()
    for field in fields:
        name = compared(field.name)
        if name in new:
            raise ConfigurationError(
                f"two new columns have the name {field.name!r}: set {', '.join(params._new_columns)} to different names, or "
                "omit one with ''."
            )
        new.add(name)
        if name in known:
            spelled = "" if known[name] == field.name else f" as {known[name]!r} (Spark ignores case)"
            raise ConfigurationError(
                f"the output column {field.name!r} already exists{spelled}: choose another name "
                f"({', '.join(params._new_columns)}), or drop({known[name]!r}) first."
            )
    return fields


def check_columns(params: KerasParams, model: keras.Model, frame: DataFrame, *, labelled: bool) -> Selection:
    """Select the input columns, and check them; see `result_schema`.

    Raises:
        DataError: A column is missing, or its type or width does not fit the model.
        ConfigurationError: A param for columns does not fit the model.
    """
    get = params.getOrDefault
    transform = get("transform") if labelled else get("batch_transform")
    named = ColumnMapping(get("featuresCol"), get("labelCol"), get("weightCol"), get("loader"), fits=transform is None)
    reader = Reader(schema_of(model).before(transform), labelled, _INVALID_POLICIES[get("handleInvalid")])
    return named.select(frame, reader)


@dataclass(frozen=True)
class SchemaFrame:
    """A stand-in for a DataFrame where only its schema is needed."""

    schema: StructType
    sparkSession: SparkSession | None = None  # named as in DataFrame

    @classmethod
    def of(cls, data: DataFrame | StructType) -> DataFrame:
        """The schema of a DataFrame; or a schema alone, with Spark's default case sensitivity.

        Raises:
            DataError: The argument is neither.
        """
        if isinstance(data, StructType):
            return cast("DataFrame", cls(data))
        check_frame(data)
        return cast("DataFrame", cls(data.schema, data.sparkSession))


def check_frame(data: Any) -> None:
    """Check that an argument is a Spark DataFrame.

    Raises:
        DataError: It is not.
    """
    if not is_frame(data):
        raise DataError(
            f"dataset is {describe(data)}; Spark ML expects a Spark DataFrame. Create one from arrays with "
            "sparkkeras.to_data_frame(spark, x, y), or from a pandas DataFrame with spark.createDataFrame(table), from a "
            "pandas-on-Spark DataFrame with table.to_spark(). SparkModel accepts arrays directly."
        )
