"""Predicting and evaluating over a dataset: what each task does, and what the driver makes of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from sparkkeras.data.block import Block, BlockSpec
from sparkkeras.data.dataset import Dataset, Shared, TaskContext
from sparkkeras.data.schema import LabelRange, Reader, Schema, union
from sparkkeras.errors import ConfigurationError
from sparkkeras.modeling import metrics
from sparkkeras.modeling.archive import ModelArchive, ModelWeights
from sparkkeras.modeling.metrics import MetricState
from sparkkeras.sources.source import lazy_dataset
from sparkkeras.spark.connect import AnyCluster
from sparkkeras.worker.trainer import BatchOptions, LocalTrainer, together, transformed


@dataclass(frozen=True)
class Evaluated:
    """What an evaluation found.

    Attributes:
        metrics: The state of the metrics over all rows.
        spec: The shapes and dtypes of the rows, as the model saw them.
        labels: The range of each array of labels.
    """

    metrics: MetricState
    spec: BlockSpec
    labels: tuple[LabelRange, ...]


@dataclass(frozen=True)
class EvaluateTask:
    """Evaluates a partition's rows, or the rows in ``spans[worker]`` of its one block. No rows, no result."""

    archive: Shared[ModelArchive]
    state: Shared[ModelWeights]
    options: Shared[BatchOptions]
    spans: tuple[tuple[int, int], ...] | None = None

    def __call__(self, context: TaskContext, blocks: Iterator[Block]) -> Iterator[Evaluated]:
        """Evaluate."""
        if self.spans is not None:
            start, stop = self.spans[context.worker]
            blocks = (block[start:stop] for block in blocks)
        found = LocalTrainer(self.archive.value, context).evaluate(self.state.value, blocks, self.options.value)
        if found is not None:
            yield Evaluated(*found)


@dataclass(frozen=True)
class PredictTask:
    """Yields predictions, some rows at a time, in the structure that the model gives them; with ``rows``, one by one."""

    archive: Shared[ModelArchive]
    state: Shared[ModelWeights]
    options: Shared[BatchOptions]
    schema: Schema
    rows: bool = False

    def __call__(self, context: TaskContext, blocks: Iterator[Block]) -> Iterator[Any]:
        """Predict."""
        trainer = LocalTrainer(self.archive.value, context)
        parts = trainer.predict(self.state.value, blocks, self.options.value, self.schema)
        return (row for part in parts for row in _rows(part)) if self.rows else parts


@dataclass(frozen=True)
class SeenTask:
    """Yields what a partition's first batch looks like to the model, after the transform; or why the transform failed."""

    options: Shared[BatchOptions]

    def __call__(self, context: TaskContext, blocks: Iterator[Block]) -> Iterator[BlockSpec | str]:
        """Look at the first batch."""
        options = self.options.value
        found: list[BlockSpec | str] = []
        for block in blocks:
            if block.rows and not found:
                try:
                    found.append(transformed(block[: options.batch_size], options).spec)
                except Exception as error:
                    found.append(transform_failed(error, f"the first rows of partition {context.worker}"))
        return iter(found)


def seen_on_workers(dataset: Dataset, options: BatchOptions) -> BlockSpec:
    """What rows look like to the model, after the transform, by the first rows of each partition.

    Raises:
        ConfigurationError: The transform failed on some.
    """
    with dataset.share(options) as how:
        found = dataset.run(SeenTask(how)).collect()
    specs = [each for each in found if isinstance(each, BlockSpec)]
    if len(specs) < len(found):
        raise ConfigurationError(next(each for each in found if isinstance(each, str)))
    return specs[0]


def transform_failed(error: Exception, rows: str) -> str:
    """What to say of a transform that failed."""
    reason = f"{type(error).__name__}: {error}".rstrip(".")
    return (
        f"transform failed on {rows}: {reason}. It is called as transform(x, y) with arrays that have the rows on their "
        "first axis, and must return (x, y)."
    )


def evaluate(
    dataset: Dataset,
    archive: Shared[ModelArchive],
    state: Shared[ModelWeights],
    options: BatchOptions,
    spans: tuple[tuple[int, int], ...] | None = None,
) -> Evaluated | None:
    """Evaluate all rows of a dataset; ``None`` where there are none."""
    with dataset.share(options) as how:
        found = dataset.run(EvaluateTask(archive, state, how, spans)).collect()
    if not found:
        return None
    ranges: tuple[LabelRange, ...] = ()
    for part in found:
        ranges = union(ranges, part.labels)
    return Evaluated(metrics.merge(part.metrics for part in found), found[0].spec, ranges)


def lazily(
    data: Any,
    block: Block | None,
    cluster: AnyCluster,
    reader: Reader,
    archive: ModelArchive,
    state: ModelWeights,
    options: BatchOptions,
) -> Any:
    """An RDD with one prediction a row; it computes them when it is asked for, as often as it is asked."""
    dataset = lazy_dataset(data, block, cluster, reader)
    task = PredictTask(cluster.keep(archive), cluster.keep(state), cluster.keep(options), reader.schema, rows=True)
    return dataset.run(task).lazy()


def concatenated(parts: Sequence[Any], model: keras.Model) -> Any:
    """Predictions in parts as what ``keras.Model.predict`` returns for all rows."""
    if parts:
        return together(parts)
    outputs = [tuple(output.shape[1:]) for output in getattr(model, "outputs", None) or ()] or [(0,)]
    empty = [np.empty((0, *(size or 0 for size in shape)), keras.backend.floatx()) for shape in outputs]
    return empty[0] if len(empty) == 1 else empty


def _rows(predicted: Any) -> Iterator[Any]:
    leaves = keras.tree.flatten(predicted)
    for row in range(len(leaves[0])):
        yield keras.tree.pack_sequence_as(predicted, [leaf[row] for leaf in leaves])
