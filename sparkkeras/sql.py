"""A model as a function: in SQL, and as a column expression."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import keras

from sparkkeras import arguments
from sparkkeras.arguments import known_arguments
from sparkkeras.data.schema import OnInvalidToPredict
from sparkkeras.errors import ConfigurationError
from sparkkeras.scoring.columns import BATCH_SIZE, Scorer
from sparkkeras.sources.frame import ArgumentsToBlocks, ColumnFunction, Loaders
from sparkkeras.spark.connect import active_session, check_session, cluster_of
from sparkkeras.worker import device
from sparkkeras.worker.trainer import Transform

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
    on_invalid: OnInvalidToPredict = "allow",
) -> Callable[..., Column]:
    """A model as a function from columns to a column: ``df.select(keras_udf(model)(df.features))``.

    It takes one column for each input of the model. A model with one input takes several columns as well: numbers and flat
    arrays, which are laid side by side. Rows go to the model in batches, through Arrow; each worker process loads it once.

    Args:
        model: A built model, compiled or not. What becomes of it afterwards does not matter to the function.
        batch_size: Rows that the model is called on at a time.
        transform: ``transform(x, None) -> x`` on each batch, on the workers.
        loader: What turns a column into an input, such as `image_loader`, or ``{input name: loader}``.
        custom_objects: Custom classes and functions by name, where they cannot be found in the model.
        on_invalid: ``"allow"`` predicts null for rows with nulls; ``"error"`` refuses these, and NaN and infinite values.

    Returns:
        A function of columns or column names. Its value is a float for an output of shape (batch, 1), a (nested) array of
        floats for other shapes, and a struct of these, by the outputs' names, for several outputs.

    Raises:
        ModelError: The model is not built, or does not say the shape of its outputs.
        ConfigurationError: An argument is out of range; the function raises it for a number of columns that no widths of
            theirs could make right.

    Example::

        classify = keras_udf(model)
        df.select("id", classify("sepal_length", "sepal_width", "petal_length", "petal_width").alias("scores"))
    """
    function, read = _function(None, None, model, batch_size, transform, loader, custom_objects, on_invalid)
    return _Checked(function, read, None)


@dataclass(frozen=True)
class _Checked:
    """A function of columns that refuses a wrong number of them."""

    function: Callable[..., Column]
    read: ArgumentsToBlocks
    session: SparkSession | None

    def __call__(self, *columns: Any) -> Column:
        """The column of its values."""
        wrong = self.read.wrong_count(len(columns))
        if wrong:
            raise ConfigurationError(wrong)
        with cluster_of(self.session or active_session(), device.worker_environment).training_workers():
            return self.function(*columns)


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
    on_invalid: OnInvalidToPredict = "allow",
) -> Callable[..., Column]:
    """A model as a function of SQL: ``SELECT classify(features) FROM measurements``.

    Args:
        spark: The session whose SQL shall know it.
        name: What SQL calls it.
        model: As in `keras_udf`.
        batch_size: As in `keras_udf`.
        transform: As in `keras_udf`.
        loader: As in `keras_udf`.
        custom_objects: As in `keras_udf`.
        on_invalid: As in `keras_udf`.

    Returns:
        The function, which takes columns or their names, as `keras_udf` gives it.

    Raises:
        ConfigurationError: The name is none that SQL takes, or one of Spark's own functions; the returned function raises it
            as that of `keras_udf` does. In SQL, wrong arguments fail the query with an
            exception of Spark's, whose message has the ``DataError``.
        ModelError: As in `keras_udf`.
        ClusterError: The session was stopped.

    Example::

        register_keras_udf(spark, "classify", model)
        spark.sql("SELECT id, classify(features)[1] AS fraud FROM payments")
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise ConfigurationError(f"name={name!r}: expected a name of letters, digits and underscores, such as 'classify'.")
    check_session(spark)
    if _is_built_in(spark, name):
        raise ConfigurationError(
            f"name={name!r}: Spark has a function of this name, and SQL would go on calling that one. Choose another."
        )
    function, read = _function(spark, name, model, batch_size, transform, loader, custom_objects, on_invalid)
    with cluster_of(spark, device.worker_environment).training_workers():
        registered: Callable[..., Column] = spark.udf.register(name, function)
    return _Checked(registered, read, spark)


def _is_built_in(spark: SparkSession, name: str) -> bool:
    return bool(spark.sql(f"SHOW SYSTEM FUNCTIONS LIKE '{name.lower()}'").take(1))


def _function(
    spark: SparkSession | None,
    name: str | None,
    model: keras.Model,
    batch_size: int,
    transform: Transform | None,
    loader: Loaders | None,
    custom_objects: Mapping[str, Any] | None,
    on_invalid: OnInvalidToPredict,
) -> tuple[ColumnFunction, ArgumentsToBlocks]:
    arguments.on_invalid_to_predict(on_invalid)
    scorer = Scorer.of(
        model,
        batch_size=arguments.whole_number("batch_size", batch_size),
        transform=transform,
        custom_objects=custom_objects,
        on_invalid=on_invalid,
    )
    called = f"the function of the model {model.name!r}" if name is None else f"{name}()"
    make = "make it again with" if name is None else "register the function again with"
    read = ArgumentsToBlocks(scorer.reader, loader, transform is None, called, make)
    return scorer.function(cluster_of(spark or active_session(), device.worker_environment), read), read
