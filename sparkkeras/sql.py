"""Keras models as functions on columns, for DataFrames and for SQL."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import keras

from sparkkeras import arguments
from sparkkeras.arguments import known_arguments
from sparkkeras.data.schema import OnInvalidToPredict
from sparkkeras.errors import ConfigurationError
from sparkkeras.scoring.backends import Backend, other_backend
from sparkkeras.scoring.column_functions import ArgumentsToBlocks
from sparkkeras.scoring.columns import BATCH_SIZE, Scorer
from sparkkeras.sources.frame import Loaders, check_positions
from sparkkeras.spark.connect import active_session, check_session, cluster_of
from sparkkeras.worker.batches import Transform
from sparkkeras.worker.device import Environment, worker_environment

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession


@known_arguments
def keras_udf(
    model: keras.Model,
    *,
    batch_size: int = BATCH_SIZE,
    transform: Transform | None = None,
    loader: Loaders | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    on_invalid: OnInvalidToPredict = "null",
    backend: Backend | None = None,
) -> Callable[..., Column]:
    """Make a function from columns to a column that applies a model: ``df.select(keras_udf(model)(df.features))``.

    The function takes one column for each input of the model, in their order. For a model with one input it also takes
    several columns of numbers or flat arrays, which are concatenated. Rows are passed in batches, through Arrow; each worker
    process loads the model once.

    Args:
        model: A built model, compiled or not. The function keeps a copy: later changes of the model do not affect it.
        batch_size: The number of rows in each call of the model. For a model with stateful layers, the default is its fixed
            batch size.
        transform: ``transform(x, None) -> x``, which the workers apply to each batch.
        loader: A loader that converts a column into an input, such as `image_loader`, or ``{input name: loader}``.
        custom_objects: Custom classes and functions by name; only needed for those that sparkkeras does not find in the
            model.
        on_invalid: How to handle rows with nulls, NaN or infinite values: ``"null"`` predicts null for them, ``"allow"``
            passes them to the model, with NaN for nulls, and ``"error"`` fails the query.
        backend: The Keras backend that scores, as in `SparkModel.predict`. Functions of one query may have different ones.

    Returns:
        A function of columns or column names. It returns a float for an output of shape (batch, 1), a (nested) array of
        floats for other shapes, and for several outputs a struct with a field for each output.

    Raises:
        ModelError: The model is not built, or the shape of an output is unknown.
        ConfigurationError: An argument is out of range. The returned function raises it if the model cannot take that number
            of columns, or if a column has the name of another input than the one at its position.

    Example::

        classify = keras_udf(model)
        df.select("id", classify("sepal_length", "sepal_width", "petal_length", "petal_width").alias("scores"))
    """
    return _function(None, None, model, batch_size, transform, loader, custom_objects, on_invalid, backend)


@dataclass(frozen=True)
class _CheckedFunction:
    """A function of columns that raises `ConfigurationError` for a number of columns that the model cannot take."""

    function: Callable[..., Column]
    read: ArgumentsToBlocks
    session: SparkSession | None
    environment: Environment = worker_environment

    def __repr__(self) -> str:
        inputs = ", ".join(spec.name for spec in self.read.reader.schema.inputs)
        return f"<{self.read.function} of columns for the inputs ({inputs})>"

    def __call__(self, *columns: Any) -> Column:
        """Return the column of predictions."""
        error = self.read.argument_count_error(len(columns))
        if error:
            raise ConfigurationError(error)
        specs = self.read.reader.schema.inputs
        if len(specs) > 1:
            given = {spec.name: _name_of(column) for spec, column in zip(specs, columns, strict=True)}
            check_positions(f"the arguments of {self.read.function}", "input", given, "them in the order of the inputs")
        with cluster_of(self.session or active_session(), self.environment).training_workers():
            return self.function(*columns)


def _name_of(column: Any) -> str:
    """The name of a column that is passed to a function; of a `Column`, as Spark displays it."""
    return column if isinstance(column, str) else str(column).removeprefix("Column<'").removesuffix("'>")


@known_arguments
def register_keras_udf(
    spark: SparkSession,
    name: str,
    model: keras.Model,
    *,
    batch_size: int = BATCH_SIZE,
    transform: Transform | None = None,
    loader: Loaders | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    on_invalid: OnInvalidToPredict = "null",
    backend: Backend | None = None,
) -> Callable[..., Column]:
    """Register a model as a SQL function: ``SELECT classify(features) FROM measurements``.

    Args:
        spark: The session to register the function in.
        name: The name of the function: letters, digits and underscores.
        model: As in `keras_udf`.
        batch_size: As in `keras_udf`.
        transform: As in `keras_udf`.
        loader: As in `keras_udf`.
        custom_objects: As in `keras_udf`.
        on_invalid: As in `keras_udf`.
        backend: As in `keras_udf`.

    Returns:
        The function for use on columns or column names, as `keras_udf` returns it.

    Raises:
        ConfigurationError: The name is not valid in SQL or is a built-in function of Spark, or as in `keras_udf`. In SQL,
            wrong arguments fail the query with an exception of Spark that contains the ``DataError``.
        ModelError: As in `keras_udf`.
        ClusterError: The session is stopped.

    Example::

        register_keras_udf(spark, "classify", model)
        spark.sql("SELECT id, classify(features)[1] AS fraud FROM payments")
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise ConfigurationError(f"name={name!r}: expected a name of letters, digits and underscores, such as 'classify'.")
    check_session(spark)
    if spark.sql(f"SHOW SYSTEM FUNCTIONS LIKE '{name.lower()}'").take(1):
        raise ConfigurationError(
            f"name={name!r}: Spark has a built-in function of this name, which SQL would call instead. Choose another name."
        )
    made = _function(spark, name, model, batch_size, transform, loader, custom_objects, on_invalid, backend)
    # Deterministic, unlike the column of `with_predictions`: SQL rejects other functions in aggregates and join conditions.
    with cluster_of(spark, made.environment).training_workers():
        return replace(made, function=spark.udf.register(name, made.function))


def _function(
    spark: SparkSession | None,
    name: str | None,
    model: keras.Model,
    batch_size: int,
    transform: Transform | None,
    loader: Loaders | None,
    custom_objects: Mapping[str, Any] | None,
    on_invalid: OnInvalidToPredict,
    backend: str | None,
) -> _CheckedFunction:
    arguments.on_invalid_to_predict("on_invalid", on_invalid)
    scorer = Scorer.of(
        model,
        batch_size=arguments.integer("batch_size", batch_size),
        transform=transform,
        custom_objects=custom_objects,
        on_invalid=on_invalid,
        backend=other_backend(backend),
    )
    function_name = f"the function of the model {model.name!r}" if name is None else f"{name}()"
    read = ArgumentsToBlocks(scorer.reader, loader, transform is None, function_name)
    cluster = cluster_of(spark or active_session(), scorer.environment)
    return _CheckedFunction(scorer.function(cluster, read), read, spark, scorer.environment)
