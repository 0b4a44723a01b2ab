"""`evaluate` and `predict` over a dataset: the tasks, and how the driver combines their results."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import keras
import numpy as np

from sparkkeras import arguments
from sparkkeras.data.block import Block, BlockSpec, describe
from sparkkeras.data.dataset import Dataset, Shared, TaskContext
from sparkkeras.data.labels import LabelRange, label_ranges, union
from sparkkeras.data.reader import Reader
from sparkkeras.data.schema import OnInvalid, OnInvalidToPredict
from sparkkeras.errors import ConfigurationError, DataError, counted
from sparkkeras.events import Events, PhaseStarted, RunStarted, WorkersChanged
from sparkkeras.modeling import metrics
from sparkkeras.modeling.archive import ModelArchive
from sparkkeras.modeling.compilation import check_compiled, needs_labels
from sparkkeras.modeling.custom_code import ByValue
from sparkkeras.modeling.fixed_batch import check_batch_size, fixed_batch_size
from sparkkeras.modeling.labels import check_labels
from sparkkeras.modeling.own_methods import check_can_evaluate, check_can_predict
from sparkkeras.modeling.schema import input_structure, schema_of
from sparkkeras.modeling.state import ModelWeights
from sparkkeras.parameter.exchange import EvaluationReport
from sparkkeras.progress.renderer import Progress
from sparkkeras.progress.status_line import format_logs
from sparkkeras.rpc.options import ServerOptions
from sparkkeras.scoring.backends import check_backend, environment_of
from sparkkeras.sources.frame import ColumnMapping
from sparkkeras.sources.source import Source, as_keyed_source, as_source
from sparkkeras.spark.activity import watching_spark
from sparkkeras.spark.live_progress import live_progress
from sparkkeras.worker.batches import BatchOptions, Transform, transformed
from sparkkeras.worker.predictor import PredictTask, join_predictions, pairs
from sparkkeras.worker.trainer import LocalTrainer

if TYPE_CHECKING:
    from sparkkeras.rpc.transport import Address

Verbose = Literal["auto", 0, 1, 2]


@dataclass(frozen=True)
class EvaluationResult:
    """The result of an evaluation.

    Attributes:
        reports: The reports of the workers.
        spec: The shapes and dtypes of the rows, as the model saw them.
        labels: The range of each array of labels.
    """

    reports: tuple[EvaluationReport, ...]
    spec: BlockSpec
    labels: tuple[LabelRange, ...]

    def logs(self, model: keras.Model) -> dict[str, Any]:
        """The loss and metrics over all rows, by name."""
        return metrics.merged_logs(model, self.reports)


@dataclass(frozen=True)
class EvaluateTask:
    """Evaluates a partition's rows, or the rows in ``spans[worker]`` of its only block. Without rows it yields no result."""

    archive: Shared[ModelArchive]
    state: Shared[ModelWeights]
    options: Shared[BatchOptions]
    spans: tuple[tuple[int, int], ...] | None = None

    def __call__(
        self, context: TaskContext, blocks: Iterator[Block]
    ) -> Iterator[tuple[EvaluationReport, BlockSpec, tuple[LabelRange, ...]]]:
        """Yield the parts of an `EvaluationResult`."""
        if self.spans is not None:
            start, stop = self.spans[context.worker]
            blocks = (block[start:stop] for block in blocks)
        found = LocalTrainer(self.archive.value, context).evaluate(self.state.value, blocks, self.options.value)
        if found is not None:
            yield found


@dataclass(frozen=True)
class TransformedSpecTask:
    """Yields the shapes and dtypes of a partition's first batch after the transform, or the transform's error message."""

    options: Shared[BatchOptions]

    def __call__(self, context: TaskContext, blocks: Iterator[Block]) -> Iterator[BlockSpec | str]:
        """Look at the first batch."""
        block = next((block for block in blocks if block.rows), None)
        if block is not None:
            options = self.options.value.of(block)
            try:
                yield transformed(block[: options.batch_size], options).spec
            except Exception as error:
                yield transform_failed(error, f"the first rows of partition {context.worker}")


def transformed_spec_on_workers(dataset: Dataset, options: BatchOptions) -> BlockSpec:
    """The shapes and dtypes of rows after the transform, determined from the first rows of each partition.

    Raises:
        ConfigurationError: The transform failed in a partition.
    """
    with dataset.share(options) as how:
        found = dataset.run(TransformedSpecTask(how)).collect()
    specs = [each for each in found if isinstance(each, BlockSpec)]
    if len(specs) < len(found):
        raise ConfigurationError(next(each for each in found if isinstance(each, str)))
    return specs[0]


def transform_failed(error: Exception, rows: str) -> str:
    """The error message for a failed transform."""
    reason = f"{type(error).__name__}: {error}".rstrip(".")
    return (
        f"transform failed{_line_outside(error)} on {rows}: {reason}. It is called as transform(x, y) with arrays "
        "that have the rows on their first axis, and must return (x, y)."
    )


def _line_outside(error: Exception) -> str:
    """The first line outside of this package that an error passed through, for a message; empty without one."""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if not frame.f_globals.get("__name__", "").startswith("sparkkeras."):
            return f" in line {line} of {Path(frame.f_code.co_filename).name}"
    return ""


def evaluate(
    dataset: Dataset,
    archive: Shared[ModelArchive],
    state: Shared[ModelWeights],
    options: BatchOptions,
    spans: tuple[tuple[int, int], ...] | None = None,
) -> EvaluationResult | None:
    """Evaluate all rows of a dataset; ``None`` if there are none."""
    with dataset.share(options) as how:
        found = dataset.run(EvaluateTask(archive, state, how, spans)).collect()
    if not found:
        return None
    reports, specs, labels = zip(*found, strict=True)
    return EvaluationResult(reports, specs[0], reduce(union, labels))


def check_evaluate(
    model: keras.Model,
    data: Any,
    y: Any,
    sample_weight: Any,
    columns: ColumnMapping,
    *,
    batch_size: int,
    transform: Transform | None,
    on_invalid: OnInvalid,
    verbose: Verbose,
    backend: str | None = None,
) -> tuple[Source, BatchOptions]:
    """Check the arguments of `SparkModel.evaluate`, and data that is in this process.

    Returns:
        The rows, with the batch size and transform.

    Raises:
        ModelError: The model is not compiled.
        ConfigurationError: An argument is out of range, or does not fit another one.
        DataError: The data does not fit the model or its loss.
    """
    check_compiled(model)
    check_can_evaluate(model)
    arguments.one_of("on_invalid", on_invalid, get_args(OnInvalid))
    arguments.one_of("verbose", verbose, get_args(Verbose))
    reader = Reader(schema_of(model).before(transform), True, on_invalid, labels_optional=not needs_labels([model]))
    source = as_source(data, reader, y, sample_weight, columns, environment_of(backend))
    options = batch_options(model, batch_size, transform, to_predict=False, in_batches=source.in_batches)
    if source.block is not None:
        if not source.block.rows:
            raise no_rows("data to evaluate or validate on")
        check_data(
            model, source.block.spec, transformed_spec_on_driver(source.block, options), label_ranges(source.block), options
        )
    return source, options


def check_predict(
    model: keras.Model,
    data: Any,
    columns: ColumnMapping,
    *,
    batch_size: int,
    transform: Transform | None,
    on_invalid: OnInvalidToPredict,
    keyed: bool = False,
    backend: str | None = None,
) -> tuple[Source, BatchOptions]:
    """Check the arguments of `SparkModel.predict`, and data that is in this process.

    Returns:
        The rows, with the batch size and transform.

    Raises:
        ConfigurationError: An argument is out of range, or does not fit another one.
        DataError: The data does not fit the model.
    """
    check_can_predict(model)
    if on_invalid == "null":
        raise ConfigurationError(
            f'on_invalid="null" predicts null, which only the column of a DataFrame can hold; data is {describe(data)}. '
            'Pass on_invalid="allow", which passes NaN to the model, or drop such rows first.'
        )
    reader = Reader(schema_of(model).before(transform), False, on_invalid)
    made, where = as_keyed_source if keyed else as_source, environment_of(backend)
    source = made(data, reader, columns=columns, environment=where)
    options = batch_options(model, batch_size, transform, in_batches=source.in_batches)
    if source.block is not None:
        schema_of(model).check_features(transformed_spec_on_driver(source.block, options))
    return source, options


def batch_options(
    model: keras.Model, batch_size: int, transform: Transform | None, *, to_predict: bool = True, in_batches: bool = False
) -> BatchOptions:
    """How batches to predict or evaluate are made of rows; see `BatchOptions`.

    Raises:
        ConfigurationError: ``batch_size`` is out of range, or not the one that the model requires, or ``transform`` is not a
            function.
    """
    size = arguments.integer("batch_size", batch_size)
    if not in_batches:
        check_batch_size(model, "batch_size", size)
    stateful = fixed_batch_size(model) is not None
    return BatchOptions(size, transform_by_value(transform), input_structure(model), to_predict, in_batches, stateful)


def transform_by_value(transform: Any) -> ByValue[Transform] | None:
    """A transform in the form in which it is sent to workers; ``None`` if there is none.

    Raises:
        ConfigurationError: ``transform`` is not a function.
    """
    arguments.function("transform", transform)
    return None if transform is None else ByValue.dump(transform, "transform")


def no_rows(purpose: str) -> DataError:
    """The error for data without rows."""
    return DataError(
        f"the {purpose} has no rows: it is empty, a function that reads batches returned none, or on_invalid='drop' (in "
        "Spark ML handleInvalid='skip'), a loader's on_error='drop' or validation_col (in Spark ML validationIndicatorCol; "
        "true in all rows, or in none) removed all of them."
    )


@contextmanager
def dataset_with_progress(
    pack: Callable[[], ModelArchive], source: Source, slices: int | None, text: str, verbose: int | str
) -> Iterator[tuple[ModelArchive, Dataset, Address | None]]:
    """Pack a model and store the rows of a source; if ``verbose`` is set, show the progress of this, and of what follows.

    Args:
        pack: Packs the model.
        source: The rows.
        slices: The number of partitions for arrays; ``None``: the number of slots.
        text: What is done, for instance ``"Predicting"``.
        verbose: ``"auto"``, 0, 1 or 2.

    Yields:
        The packed model, the stored rows, and where workers send their progress; ``None``: nowhere.
    """
    level = 1 if verbose == "auto" else int(verbose)
    events = Events([Progress(level)] if level else [], within_epochs=level == 1)
    with ExitStack() as stack:
        stack.enter_context(events.running(RunStarted("score", text)))
        if events:
            stack.enter_context(watching_spark(events))
        events.emit(PhaseStarted("Packing the model"))
        archive = pack()
        events.emit(PhaseStarted("Starting workers, and storing rows"))
        dataset = stack.enter_context(source.dataset(slices=slices))
        events.emit(PhaseStarted(text))
        events.emit(WorkersChanged(1, (None if source.block is None else source.block.rows,)))
        yield archive, dataset, stack.enter_context(live_progress(events, dataset, ServerOptions()))


def _packed(
    pack: Callable[[keras.Model, Mapping[str, Any] | None], ModelArchive],
    model: keras.Model,
    custom_objects: Mapping[str, Any] | None,
    weights: ModelWeights,
    backend: str | None,
    source: Source,
    options: BatchOptions,
) -> ModelArchive:
    """The packed model, which another backend predicts the same with; see `check_backend`."""
    archive = pack(model, custom_objects)
    rows = None
    if backend is not None and source.block is not None:
        rows = transformed(source.block[: options.batch_size].dense(), options)
    check_backend(model, archive, weights, backend, rows)
    return archive


def evaluate_source(
    model: keras.Model,
    source: Source,
    custom_objects: Mapping[str, Any] | None,
    options: BatchOptions,
    num_workers: int | None = None,
    verbose: Verbose = 0,
    backend: str | None = None,
) -> EvaluationResult | None:
    """Evaluate a model on the cluster, over all rows of a source; ``None`` if there are none.

    Args:
        model: The model, whose current weights are evaluated.
        source: The rows.
        custom_objects: Custom classes and functions by name, if they cannot be found in the model.
        options: Batch size and transform.
        num_workers: The number of partitions for arrays; ``None``: the number of slots.
        verbose: Whether to show the progress.
        backend: The backend of the workers; ``None``: that of this process.
    """
    weights = ModelWeights.take(model)
    pack = partial(_packed, ModelArchive.pack, model, custom_objects, weights, backend, source, options)
    with (
        dataset_with_progress(pack, source, num_workers, "Evaluating", verbose) as (archive, dataset, target),
        dataset.share(archive) as shared,
        dataset.share(weights) as state,
    ):
        return evaluate(dataset, shared, state, replace(options, progress=target))


def predict_source(
    model: keras.Model,
    source: Source,
    custom_objects: Mapping[str, Any] | None,
    options: BatchOptions,
    num_workers: int | None = None,
    keyed: bool = False,
    verbose: Verbose = 0,
    backend: str | None = None,
) -> list[Any]:
    """The predictions of a model for all rows of a source, in parts; see `evaluate_source` for the arguments.

    If ``keyed`` is set, for a source with keys, each part is a pair of a list of keys and their predictions.
    """
    weights = ModelWeights.take(model)
    pack = partial(_packed, ModelArchive.pack_to_predict, model, custom_objects, weights, backend, source, options)
    with (
        dataset_with_progress(pack, source, num_workers, "Predicting", verbose) as (archive, dataset, target),
        dataset.share(archive) as shared,
        dataset.share(weights) as state,
        dataset.share(replace(options, progress=target)) as how,
    ):
        task = PredictTask(shared, state, how, source.reader.schema, keyed=keyed)
        return dataset.run(task).collect()


def lazily(
    model: keras.Model,
    source: Source,
    custom_objects: Mapping[str, Any] | None,
    options: BatchOptions,
    num_workers: int | None = None,
    keyed: bool = False,
    backend: str | None = None,
) -> Any:
    """An RDD with one prediction per row, computed each time it is used; see `predict_source`."""
    weights = ModelWeights.take(model)
    archive = _packed(ModelArchive.pack_to_predict, model, custom_objects, weights, backend, source, options)
    dataset = source.lazy(num_workers)
    cluster = dataset.cluster
    schema = source.reader.schema
    task = PredictTask(cluster.keep(archive), cluster.keep(weights), cluster.keep(options), schema, rows=True, keyed=keyed)
    return dataset.run(task).lazy()


def check_data(
    model: keras.Model, spec: BlockSpec, seen: BlockSpec, ranges: Sequence[LabelRange], options: BatchOptions
) -> None:
    """Check that labelled data fits a model and its loss, and create the variables of the model's metrics.

    Args:
        model: The compiled model.
        spec: The shapes and dtypes of the rows.
        seen: Those after the transform, which the model receives.
        ranges: The range of each array of labels.
        options: Batch size and transform.

    Raises:
        DataError: The data does not fit the model or its loss.
    """
    schema_of(model).check_features(seen)
    if options.transform is None:
        check_labels(model, spec, ranges)
    metrics.prepare(model, seen.zeros())


def transformed_spec_on_driver(block: Block, options: BatchOptions) -> BlockSpec:
    """The shapes and dtypes of rows of this process after the transform, determined from the first batch.

    Raises:
        ConfigurationError: The transform failed.
    """
    first = block[: options.batch_size].dense() if block.rows else block.spec.zeros()
    try:
        return transformed(first, options).spec
    except Exception as error:
        raise ConfigurationError(transform_failed(error, f"the first {counted(first.rows, 'row')}")) from error


def transformed_spec_of_zeros(spec: BlockSpec, options: BatchOptions) -> BlockSpec | None:
    """Like `transformed_spec_on_driver`, but from a row of zeros, for rows that only workers have.

    ``None`` if the transform fails.
    """
    with suppress(Exception):  # the user's function may not expect zeros: the rows on the workers decide
        return transformed(spec.zeros(), options).spec
    return None


def results(model: keras.Model, found: EvaluationResult | None) -> dict[str, Any]:
    """The logs of an evaluation: loss and metrics by name.

    Raises:
        DataError: There were no rows, or the labels do not fit the loss.
    """
    if found is None:
        raise DataError("there are no rows to evaluate: the data is empty.")
    check_data(model, found.spec, found.spec, found.labels, BatchOptions(1))
    return found.logs(model)


def reported(model: keras.Model, logs: dict[str, Any], return_dict: bool, verbose: Verbose) -> Any:
    """The logs of an evaluation in the format of `keras.Model.evaluate`; prints them if ``verbose`` is set."""
    if verbose:
        sys.stdout.write(f"{format_logs(logs)}\n")
    return logs if return_dict else model._flatten_metrics_in_order(logs)


def concatenated(parts: Sequence[Any], model: keras.Model, verbose: Verbose = 0) -> Any:
    """Join predictions to what ``keras.Model.predict`` returns; prints the number of rows if ``verbose`` is set."""
    predictions = join_predictions(parts) if parts else _no_predictions(model)
    if verbose:
        sys.stdout.write(f"{len(keras.tree.flatten(predictions)[0]):,} rows\n")
    return predictions


def in_pairs(parts: Sequence[tuple[Sequence[Any], Any]], verbose: Verbose = 0) -> list[tuple[Any, Any]]:
    """Pairs of a key and its prediction; prints their number if ``verbose`` is set."""
    found = [pair for part in parts for pair in pairs(*part)]
    if verbose:
        sys.stdout.write(f"{len(found):,} rows\n")
    return found


def _no_predictions(model: keras.Model) -> Any:
    outputs = [tuple(output.shape[1:]) for output in getattr(model, "outputs", None) or ()] or [(0,)]
    empty = [np.empty((0, *(size or 0 for size in shape)), keras.backend.floatx()) for shape in outputs]
    return empty[0] if len(empty) == 1 else empty
