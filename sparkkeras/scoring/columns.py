"""A model's predictions as a column of a DataFrame, for ``predict``, transformers and SQL functions.

Spark sends the model's input columns to its Python workers, batch by Arrow batch, and adds the predictions to the rows; all
other columns stay in the JVM. A worker process loads the model once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from sparkkeras.data.block import Block, by_name, in_column_name
from sparkkeras.data.dataset import Shared, TaskContext
from sparkkeras.data.invalid_rows import InvalidPolicy
from sparkkeras.data.reader import Reader
from sparkkeras.errors import ConfigurationError
from sparkkeras.modeling.archive import ModelArchive
from sparkkeras.modeling.compilation import check_built
from sparkkeras.modeling.fixed_batch import fixed_batch_size
from sparkkeras.modeling.outputs import Output, names_by_output, outputs_of
from sparkkeras.modeling.own_methods import check_can_predict
from sparkkeras.modeling.schema import schema_of
from sparkkeras.modeling.state import ModelWeights
from sparkkeras.scoring.backends import check_backend, environment_of
from sparkkeras.scoring.column_functions import ArgumentsToBlocks, OverColumns
from sparkkeras.scoring.inference import batch_options
from sparkkeras.sources.column_names import column_named, is_case_sensitive
from sparkkeras.sources.frame import Selection
from sparkkeras.sources.frame_blocks import column_function
from sparkkeras.sources.tasks import Deferred
from sparkkeras.spark.connect import AnyCluster, cluster_of
from sparkkeras.weights import Array
from sparkkeras.worker.batches import BatchOptions, Transform
from sparkkeras.worker.device import Environment
from sparkkeras.worker.predictor import Predictor

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame
    from pyspark.sql._typing import UserDefinedFunctionLike

BATCH_SIZE = 1024
"""The default number of rows in each call of the model."""


@dataclass(frozen=True)
class Scorer:
    """Everything that is needed to make a column of predictions.

    Attributes:
        archive: The model.
        state: Its weights.
        options: Batch size and transform.
        reader: Reads and checks the rows. With ``on_invalid="drop"`` and ``"null"``, the prediction of invalid ones is null.
        outputs: The model's outputs.
        backend: The backend of the workers; ``None``: that of this process.
    """

    archive: ModelArchive
    state: ModelWeights
    options: BatchOptions
    reader: Reader
    outputs: tuple[Output, ...]
    backend: str | None = None

    @property
    def environment(self) -> Environment:
        """Returns the environment variables of the workers."""
        return environment_of(self.backend)

    @classmethod
    def of(
        cls,
        model: keras.Model,
        *,
        batch_size: int = BATCH_SIZE,
        transform: Transform | None = None,
        custom_objects: Mapping[str, Any] | None = None,
        on_invalid: InvalidPolicy = "null",
        backend: str | None = None,
    ) -> Scorer:
        """Create a scorer for a built model, compiled or not. The default batch size is its fixed one, if it has one."""
        check_built(model)
        check_can_predict(model)
        if batch_size == BATCH_SIZE:
            batch_size = fixed_batch_size(model) or batch_size
        options = batch_options(model, batch_size, transform)  # first, since packing takes long
        archive, weights = ModelArchive.pack_to_predict(model, custom_objects), ModelWeights.take(model)
        check_backend(model, archive, weights, backend)
        reader = Reader(schema_of(model).before(transform), False, on_invalid)
        return cls(archive, weights, options, reader, outputs_of(model), backend)

    def function(self, cluster: AnyCluster, read: Selection | ArgumentsToBlocks) -> UserDefinedFunctionLike:
        """Make a function from columns to the column of predictions: a struct if the model has several outputs.

        Args:
            cluster: The cluster that will run it.
            read: Converts the columns to blocks.

        Raises:
            ConfigurationError: Two outputs would be fields of one name.
        """
        if len(self.outputs) > 1:
            _check_fields(self.outputs)
        deferred = Deferred(self.task(cluster, read), cluster.carried_environment, cluster.backend)
        return column_function(OverColumns(deferred), self.type_name)

    def task(self, cluster: AnyCluster, read: Selection | ArgumentsToBlocks) -> ScoreTask:
        """What the workers run."""
        keep = cluster.keep
        return ScoreTask(keep(self.archive), keep(self.state), keep(self.options), read, self.outputs)

    @property
    def type_name(self) -> str:
        """The Spark type of the column."""
        if len(self.outputs) == 1:
            return self.outputs[0].type_name
        return f"struct<{', '.join(f'`{in_column_name(output.name)}`: {output.type_name}' for output in self.outputs)}>"


def _check_fields(outputs: Sequence[Output]) -> None:
    """Check that the outputs are fields that Spark distinguishes, which ignores case in their names."""
    found: dict[str, str] = {}
    for output in outputs:
        other = found.setdefault(in_column_name(output.name).lower(), output.name)
        if other != output.name:
            raise ConfigurationError(
                f"the outputs {other!r} and {output.name!r} would be the fields {in_column_name(other)!r} and "
                f"{in_column_name(output.name)!r} of a struct, which Spark does not distinguish. Rename one of the outputs, "
                "or use SparkModel(model).predict(df, output_col={output: column})."
            )


@dataclass(frozen=True)
class ScoreTask:
    """Predicts Arrow batch by Arrow batch. Invalid rows are not passed to the model; their prediction is null."""

    archive: Shared[ModelArchive]
    state: Shared[ModelWeights]
    options: Shared[BatchOptions]
    read: Selection | ArgumentsToBlocks
    outputs: tuple[Output, ...]

    def __call__(self, context: TaskContext, batches: Iterator[Any]) -> Iterator[pa.Array]:
        """Yield the column of predictions, in parts."""
        schema = self.read.reader.schema
        predictor = Predictor(self.archive.value, self.state.value, self.options.value, schema, context)

        def blocks() -> Iterator[tuple[Array, Block]]:
            first = 0
            for batch in batches:
                columns = batch if isinstance(batch, tuple) else (batch,)
                for block, good in self.read.blocks(columns, f"partition {context.worker}", first):
                    first += block.rows
                    if good is None:
                        yield np.ones(block.rows, bool), block
                    else:
                        yield good, block[np.flatnonzero(good)]

        for good, predicted in predictor.of_each(blocks()):
            yield self._column(predicted, good)

    def _column(self, predictions: Any, good: Array) -> pa.Array:
        """The predictions for the rows of a block that are ``good``, ``None`` if there are none, and null for the others."""
        if predictions is None:
            predicted = [np.zeros((0,) * (1 + output.rank), output.dtype) for output in self.outputs]
        else:
            predicted = keras.tree.flatten(predictions)
        columns = [output.column(_spread(leaf, good), good) for output, leaf in zip(self.outputs, predicted, strict=True)]
        if len(columns) == 1:
            return columns[0]
        import pyarrow as pa

        missing = None if good.all() else pa.array(~good)
        return pa.StructArray.from_arrays(columns, [in_column_name(output.name) for output in self.outputs], mask=missing)


def _spread(predicted: Any, good: Array) -> Array:
    """The predictions of the good rows, each put into its row; the other rows are zeros."""
    values = np.asarray(predicted)
    if good.all():
        return values
    spread = np.zeros((len(good), *values.shape[1:]), values.dtype)
    spread[good] = values
    return spread


def with_predictions(
    frame: DataFrame,
    scorer: Scorer,
    selection: Selection,
    output_col: str | Sequence[str] | Mapping[str, str],
    before: Sequence[Column] = (),
) -> DataFrame:
    """Add a model's predictions to a DataFrame as columns, which Spark computes lazily.

    Args:
        frame: A DataFrame, also a streaming one.
        scorer: The model.
        selection: The columns of its inputs, and their reader. With ``on_invalid="error"``, that raises an error for rows
            with nulls, NaN or infinite values; ``"allow"`` passes them to the model with NaN for nulls; ``"null"`` predicts
            null for them, and ``"drop"`` drops all rows without a prediction.
        output_col: The new column; for several outputs a list of names, or a dict of them by output. With one name for
            several outputs, the columns are called ``{output_col}_{output}``.
        before: Columns that the scorer's task takes before those of the inputs.

    Raises:
        ConfigurationError: An output column already exists, or ``output_col`` names an unknown output.
    """
    names = _column_names(output_col, scorer.outputs, frame.columns, is_case_sensitive(frame.sparkSession))
    cluster = cluster_of(frame.sparkSession, scorer.environment)
    numbered = tuple(replace(output, name=str(number)) for number, output in enumerate(scorer.outputs))
    function = replace(scorer, outputs=numbered).function(cluster, selection)
    # Spark may compute a deterministic column each time a query uses it: in a filter, and again in the result.
    with cluster.training_workers():
        predicted = function.asNondeterministic()(*before, *selection.columns(frame))
    if len(names) == 1:
        scored = frame.withColumn(names[0], predicted)
    else:
        struct_name = f"__{'_'.join(names)}"
        scored = frame.withColumn(struct_name, predicted)
        fields = {
            name: column_named(struct_name).getField(output.name) for name, output in zip(names, numbered, strict=True)
        }
        scored = scored.withColumns(fields).drop(struct_name)
    loaders = [leaf.loader for leaf in selection.leaves if leaf.loader is not None]
    if selection.reader.on_invalid == "drop" or any(loader.on_error == "drop" for loader in loaders):
        return scored.where(column_named(names[0]).isNotNull())
    return scored


def _column_names(
    output_col: Any, outputs: Sequence[Output], existing: Sequence[str], case_sensitive: bool = False
) -> list[str]:
    """The column name of each output; ``case_sensitive``: whether Spark distinguishes upper from lower case."""
    output_names = [output.name for output in outputs]
    given = by_name(output_col) if isinstance(output_col, Mapping) else output_col
    names = names_by_output("output_col", given, output_names)
    missing = [name for name in output_names if isinstance(given, Mapping) and name not in given]
    if missing:
        raise ConfigurationError(
            f"output_col has no column for {', '.join(map(repr, missing))}, of the outputs {output_names}."
        )
    compared = str if case_sensitive else str.lower
    distinct = {compared(name) for name in names if isinstance(name, str) and name}
    if len(names) != len(output_names) or len(distinct) != len(names):
        one_each = ", ".join(f"{name!r}: column" for name in output_names)
        raise ConfigurationError(
            f"output_col={output_col!r}: expected a different name for each of the outputs {output_names}. Pass "
            f"output_col={{{one_each}}}."
        )
    for name in existing:
        if compared(name) in distinct:
            raise ConfigurationError(
                f"output_col={output_col!r}: the column {name!r} already exists in the DataFrame. Choose another name, or "
                f"drop({name!r}) first."
            )
    return names
