"""A model as a column of a DataFrame: what ``predict`` adds, what transformers add, and SQL functions.

Spark sends the columns that the model takes to its Python workers, batch by Arrow batch, and puts what comes back beside
the row it came from; all other columns stay in the JVM. A worker process loads the model once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from sparkkeras import arguments
from sparkkeras.data.block import Block
from sparkkeras.data.columns import Leaf
from sparkkeras.data.dataset import Shared, TaskContext
from sparkkeras.data.schema import InvalidPolicy, Reader, Schema
from sparkkeras.errors import ConfigurationError, known_names
from sparkkeras.modeling import archive as models
from sparkkeras.modeling.archive import ModelArchive, ModelWeights
from sparkkeras.modeling.custom_code import ByValue
from sparkkeras.modeling.outputs import Output, outputs_of
from sparkkeras.sources.frame import (
    ArgumentsToBlocks,
    BatchesToBlocks,
    ColumnFunction,
    ColumnMapping,
    Columns,
    Loaders,
    OverColumns,
    column_function,
    is_case_sensitive,
    quoted,
)
from sparkkeras.sources.rdd import Deferred
from sparkkeras.spark.connect import AnyCluster, cluster_of
from sparkkeras.weights import Array
from sparkkeras.worker.predictor import Predictor
from sparkkeras.worker.trainer import BatchOptions, Transform

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

BATCH_SIZE = 1024
"""Rows that the model is called on at a time, where nobody says."""


@dataclass(frozen=True)
class Scorer:
    """Everything that scoring needs to know, on its way to becoming a column.

    Attributes:
        archive: The model.
        state: Its weights.
        options: How rows become batches.
        schema: What the model takes.
        outputs: What it gives.
        on_invalid: ``"error"`` refuses rows with nulls, NaN or infinite values; ``"allow"`` predicts nothing for nulls;
            ``"drop"`` and ``"null"`` predict nothing for any of these.
    """

    archive: ModelArchive
    state: ModelWeights
    options: BatchOptions
    schema: Schema
    outputs: tuple[Output, ...]
    on_invalid: InvalidPolicy

    @classmethod
    def of(
        cls,
        model: keras.Model,
        *,
        batch_size: int = BATCH_SIZE,
        transform: Transform | None = None,
        custom_objects: Mapping[str, Any] | None = None,
        on_invalid: InvalidPolicy = "allow",
    ) -> Scorer:
        """A scorer for a built model, compiled or not."""
        models.check_built(model)
        arguments.function("transform", transform)
        by_value = None if transform is None else ByValue.dump(transform, "transform")
        return cls(
            ModelArchive.pack_to_predict(model, custom_objects),
            ModelWeights.take(model),
            BatchOptions(batch_size, by_value),
            models.schema_of(model),
            outputs_of(model),
            on_invalid,
        )

    @property
    def reader(self) -> Reader:
        """How rows are read."""
        return Reader(self.schema.before(self.options.transform), False, self.on_invalid)

    def function(self, cluster: AnyCluster, read: BatchesToBlocks | ArgumentsToBlocks) -> ColumnFunction:
        """A function from columns to the column of predictions: a struct of all outputs where there are several.

        Args:
            cluster: Where it will run.
            read: How the columns become blocks.
        """
        task = ScoreTask(
            cluster.keep(self.archive), cluster.keep(self.state), cluster.keep(self.options), read, self.outputs
        )
        return column_function(OverColumns(Deferred(task, cluster.carried_environment)), self.type_name)

    @property
    def type_name(self) -> str:
        """The Spark type of the column."""
        if len(self.outputs) == 1:
            return self.outputs[0].type_name
        return f"struct<{', '.join(f'`{output.name}`: {output.type_name}' for output in self.outputs)}>"


@dataclass(frozen=True)
class ScoreTask:
    """Predicts Arrow batch by Arrow batch; invalid rows do not reach the model, and get null."""

    archive: Shared[ModelArchive]
    state: Shared[ModelWeights]
    options: Shared[BatchOptions]
    read: BatchesToBlocks | ArgumentsToBlocks
    outputs: tuple[Output, ...]

    def __call__(self, context: TaskContext, batches: Iterator[Any]) -> Iterator[pa.Array]:
        """Predict."""
        schema = self.read.reader.schema
        predictor = Predictor(self.archive.value, self.state.value, self.options.value, schema, context)
        first = 0
        for batch in batches:
            columns = batch if isinstance(batch, tuple) else (batch,)
            for block, good in self.read.blocks(columns, f"partition {context.worker}", first):
                yield self._column(predictor, block, good)
                first += block.rows

    def _column(self, predictor: Predictor, block: Block, good: Array | None) -> pa.Array:
        """The predictions for a block, with null for the rows that are not ``good`` (``None``: all are)."""
        valid = block if good is None else block[np.flatnonzero(good)]
        good = np.ones(block.rows, bool) if good is None else good
        if valid.rows:
            predicted = keras.tree.flatten(predictor.whole(valid))
        else:
            predicted = [np.zeros((0,) * (1 + output.rank), output.dtype) for output in self.outputs]
        columns = [output.column(_spread(leaf, good), good) for output, leaf in zip(self.outputs, predicted, strict=True)]
        if len(columns) == 1:
            return columns[0]
        import pyarrow as pa

        missing = None if good.all() else pa.array(~good)
        return pa.StructArray.from_arrays(columns, [output.name for output in self.outputs], mask=missing)


def _spread(predicted: Any, good: Array) -> Array:
    """Predictions at the rows that they are of; the others are zeros."""
    values = np.asarray(predicted)
    if good.all():
        return values
    spread = np.zeros((len(good), *values.shape[1:]), values.dtype)
    spread[good] = values
    return spread


def with_predictions(
    frame: DataFrame,
    model: keras.Model,
    *,
    features: Columns | None = None,
    output_col: str | Sequence[str] | Mapping[str, str] = "prediction",
    batch_size: int = BATCH_SIZE,
    transform: Transform | None = None,
    loader: Loaders | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    on_invalid: InvalidPolicy = "allow",
) -> DataFrame:
    """A DataFrame with a model's predictions beside its rows, computed when they are asked for.

    Args:
        frame: The rows, also a stream.
        model: A built model, compiled or not.
        features: The columns of its inputs; see `SparkModel.fit`.
        output_col: The new column; for several outputs a list of names, or a dict of them by output. With one name for
            several outputs, the columns are called ``{output_col}_{output}``.
        batch_size: Rows that the model is called on at a time.
        transform: ``transform(x, None) -> x`` on each batch, on the workers.
        loader: What turns a column into an input, such as `image_loader`.
        custom_objects: Custom classes and functions by name, where they cannot be found in the model.
        on_invalid: ``"error"`` refuses rows with nulls, NaN or infinity; ``"allow"`` predicts null for rows with nulls;
            ``"null"`` predicts null for rows with any of these, and ``"drop"`` leaves out all rows without a prediction.

    Raises:
        DataError: A column is missing, or of a type that does not fit.
        ConfigurationError: An output column is there already, or unknown.
    """
    scorer = Scorer.of(
        model, batch_size=batch_size, transform=transform, custom_objects=custom_objects, on_invalid=on_invalid
    )
    names = _column_names(output_col, scorer.outputs, frame.columns, is_case_sensitive(frame.sparkSession))
    selection = ColumnMapping(features, loader=loader, fits=transform is None).select(frame, scorer.schema, labelled=False)
    cluster = cluster_of(frame.sparkSession)
    function = scorer.function(cluster, BatchesToBlocks(selection, scorer.reader))
    # Spark may compute what is deterministic as often as it is mentioned: in a filter and behind it.
    with cluster.training_workers():
        predicted = function.asNondeterministic()(*selection.columns(frame))
    if len(names) == 1:
        scored = frame.withColumn(names[0], predicted)
    else:
        whole = f"__{'_'.join(names)}"
        scored = frame.withColumn(whole, predicted)
        fields = {
            name: scored[quoted(whole)].getField(output.name) for name, output in zip(names, scorer.outputs, strict=True)
        }
        scored = scored.withColumns(fields).drop(whole)
    return scored.where(scored[quoted(names[0])].isNotNull()) if on_invalid == "drop" or _drops(selection.leaves) else scored


def _drops(leaves: Sequence[Leaf]) -> bool:
    return any(leaf.loader is not None and leaf.loader.on_error == "drop" for leaf in leaves)


def _column_names(given: Any, outputs: Sequence[Output], existing: Sequence[str], tells: bool = False) -> list[str]:
    """The name of each output's column; ``tells``: whether Spark distinguishes upper from lower case."""
    ends = [output.name for output in outputs]
    if isinstance(given, Mapping):
        for name in given:
            if name not in ends:
                raise ConfigurationError(f"output_col: the model has no output {name!r}. {known_names(name, ends)}")
        missing = [name for name in ends if name not in given]
        if missing:
            raise ConfigurationError(f"output_col has no column for the output(s) {missing}.")
        names = [given[name] for name in ends]
    elif isinstance(given, str):
        names = [given] if len(ends) == 1 else [f"{given}_{name}" for name in ends]
    else:
        names = list(given) if isinstance(given, (list, tuple)) else [given]
    told = {name if tells else name.lower() for name in names if isinstance(name, str) and name}
    if len(names) != len(ends) or len(told) != len(names):
        raise ConfigurationError(f"output_col={given!r}: expected {len(ends)} different name(s), for the output(s) {ends}.")
    for name in existing:
        if (name if tells else name.lower()) in told:
            raise ConfigurationError(
                f"output_col={given!r}: the DataFrame has a column {name!r} already. Choose another name, or drop({name!r}) "
                "first."
            )
    return names
