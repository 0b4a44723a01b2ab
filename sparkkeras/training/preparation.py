"""Preparation of a run: its arguments are checked, sources are made of its data, and the rows are stored.

`check_fit` raises all errors that can be found before Spark runs; `rows_stored` stores the rows and checks those too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import keras

from sparkkeras.data.block import BlockSpec, describe
from sparkkeras.data.dataset import StoredDataset, all_labels, common_spec
from sparkkeras.data.labels import LabelRange, label_ranges
from sparkkeras.data.partition_stats import CountClasses, balanced_weights
from sparkkeras.data.placement import RowPlacement, TrainValidationSplit
from sparkkeras.data.reader import Reader
from sparkkeras.errors import ConfigurationError, warn
from sparkkeras.events import PhaseStarted
from sparkkeras.modeling.archive import ModelArchive
from sparkkeras.modeling.compilation import check_not_synchronized, needs_labels
from sparkkeras.modeling.fixed_batch import check_batch_size, check_partitions, warn_of_shuffle
from sparkkeras.modeling.labels import check_class_weight, check_label_structure
from sparkkeras.modeling.outside import dump_callbacks
from sparkkeras.modeling.own_methods import check_can_train
from sparkkeras.modeling.schema import input_structure, schema_of
from sparkkeras.scoring import inference
from sparkkeras.sources.frame import ColumnMapping
from sparkkeras.sources.source import (
    SlotLimit,
    Source,
    as_sources,
    check_row_count,
    limited,
    split_by_column,
)
from sparkkeras.spark.live_progress import live_progress
from sparkkeras.training.callbacks import check_callbacks, check_monitors
from sparkkeras.training.run import Run
from sparkkeras.training.validation import Validation
from sparkkeras.worker import device
from sparkkeras.worker.batches import BatchOptions, FitOptions


def check_fit(run: Run, data: Any, y: Any, batch_size: int, seed: int) -> None:
    """Check the arguments of a run together, and the data as far as possible before Spark reads it.

    Args:
        run: The run, whose arguments have been checked one by one. The first model defines how rows are read.
        data: The rows to train on.
        y: The labels, if ``data`` is arrays.
        batch_size: The number of rows in a batch, where the arguments have none.
        seed: The seed of row orders and dropout masks.

    Raises:
        ConfigurationError: An argument does not fit another one.
        DataError: The data does not fit the models or their losses.
        ModelError: A layer synchronizes statistics between replicas.
    """
    models, given = run.models, run.given
    for each in models:
        check_not_synchronized(each)
    model, transform = run.model, given["transform"]
    if run.initial_epoch >= run.epochs:
        warn(
            f"nothing is trained: initial_epoch={run.initial_epoch} is not less than epochs={run.epochs}, the epoch to end "
            "at."
        )
    _check_validation(given)
    check_callbacks(given["callbacks"], model)
    run.options = FitOptions(
        batch_size=given["batch_size"] or batch_size,
        transform=inference.transform_by_value(transform),
        input_structure=input_structure(model),
        shuffle=given["shuffle"],
        seed=seed,
        class_weight=given["class_weight"],
    )
    for each in models:
        check_can_train(each, run.validates)
        device.check_supported(each)
        warn_of_shuffle(each, given["shuffle"])
    reader = Reader(schema_of(model).before(transform), True, given["on_invalid"], labels_optional=not needs_labels(models))
    columns = ColumnMapping(given["features"], given["label"], loader=given["loader"], fits=transform is None)
    source, held_out = as_sources(data, y, given["sample_weight"], given["validation_data"], reader, columns)
    if run.steps_per_epoch is not None:
        source = limited(source)
    if given["shuffle"] == "global" and source.in_batches:
        raise ConfigurationError(
            'shuffle="global" redistributes stored rows, but data is a function, whose batches are read anew in each epoch: '
            "leave shuffle out, and have the function read rows of all kinds."
        )
    if given["class_weight"] == "balanced":
        check_row_count(source, 'class_weight="balanced"', "pass the weights, {class index: weight}.")
        if transform is not None:
            raise ConfigurationError(
                'class_weight="balanced" counts the labels before the transform, which may change them: pass the weights, '
                "{class index: weight}."
            )
    if given["validation_split"]:
        check_row_count(source, "validation_split", "pass a second function as validation_data=.")
    if given["validation_col"] is not None:
        source, held_out = split_by_column(source, given["validation_col"])
    run.source, run.held_out = source, held_out
    run.validation_options = BatchOptions(
        given["validation_batch_size"] or run.options.batch_size,
        run.options.transform,
        run.options.input_structure,
        in_batches=held_out is not None and held_out.in_batches,
    )
    _check_batch_size(models, source, "batch_size", run.options.batch_size)
    if run.validates:
        validated = source if held_out is None else held_out
        _check_batch_size(models, validated, "validation_batch_size", run.validation_options.batch_size)
    _check_source(models, source, run.options)
    if held_out is not None:
        _check_source(models, held_out, run.validation_options)


@contextmanager
def rows_stored(
    run: Run, num_workers: int | None = None, slices: int | None = None, limit: SlotLimit | None = None
) -> Iterator[None]:
    """Pack the models of a checked run, store its rows on the workers until the end of the context, and check them.

    Args:
        run: The run.
        num_workers: The number of partitions of the rows to train on; ``None``: as many as the data has.
        slices: The number of partitions of arrays, also to validate on, where ``num_workers`` does not apply; ``None``: as
            many as there are slots.
        limit: The limit on the number of partitions to train on; ``None``: not all of them train at the same time.

    Raises:
        DataError: The data is empty, malformed, or does not fit a model or its loss.
        ConfigurationError: The transform fails, or a callback monitors a metric that is not reported.
        CustomObjectError: A model, or the callbacks on the workers, cannot be sent.
        ModelError: See `ModelArchive.pack`.
    """
    models, given, events = run.models, run.given, run.events
    apart = run.mode == "independent"  # workers validate, and train on rows of several partitions
    events.emit(PhaseStarted(f"Packing the model{'s' if len(models) > 1 else ''}"))
    run.archives = [ModelArchive.pack(model, run.custom_objects) for model in models]
    monitors = given["callbacks"], given["worker_callbacks"], run.validates, run.validates and apart
    check_monitors(models, run.custom_objects, *monitors)
    on_workers = dump_callbacks(given["worker_callbacks"], models) if given["worker_callbacks"] else None
    with ExitStack() as stack:
        events.emit(PhaseStarted("Starting workers, and storing rows on them"))
        placement = RowPlacement(given["shuffle"], run.options.seed, given["validation_split"])
        training = run.source.dataset(num_workers, slices, limit, placement, run.worker_size)
        rows = run.dataset = stack.enter_context(stack.enter_context(training).stored())
        _check_stored(models, run.source, rows, run.options)
        check_monitors(models, run.custom_objects, *monitors)  # now the metrics of every model have names
        split = run.split = TrainValidationSplit.split([handle.rows for handle in rows.handles], given["validation_split"])
        if run.options.class_weight == "balanced":
            weights = balanced_weights(rows.run(CountClasses(split.train)).collect())
            for model in models:
                check_class_weight(model, weights)
            run.options = replace(run.options, class_weight=weights)
        held_out_rows: Sequence[int | None] = split.validate
        if given["validation_split"]:
            run.validation = Validation(rows, run.validation_options, given["validation_freq"], split.validation_spans)
        elif run.held_out is not None:
            events.emit(PhaseStarted("Storing rows to validate on"))
            others = run.held_out.dataset(slices=slices, size=run.worker_size)
            held_out = stack.enter_context(stack.enter_context(others).stored())
            _check_stored(models, run.held_out, held_out, run.validation_options)
            run.validation = Validation(held_out, run.validation_options, given["validation_freq"])
            held_out_rows = [handle.rows for handle in held_out.handles]
        if not apart:
            check_partitions(run.model, split.train, "training", run.steps_per_epoch)
            check_partitions(run.model, held_out_rows, "validation")
        reporting = None if apart else rows  # members are in different epochs
        progress = stack.enter_context(live_progress(events, reporting, run.server.options, len(split.train)))
        run.options = replace(run.options, callbacks=on_workers, progress=progress)
        yield


def _check_validation(given: Mapping[str, Any]) -> None:
    """Check the arguments that say which rows to validate on.

    Raises:
        ConfigurationError: More than one of them is set.
    """
    shown = {
        f"validation_split={given['validation_split']!r}": bool(given["validation_split"]),
        f"validation_data ({describe(given['validation_data'])})": given["validation_data"] is not None,
        f"validation_col={given['validation_col']!r}": given["validation_col"] is not None,
    }
    found = [each for each, is_given in shown.items() if is_given]
    if len(found) > 1:
        raise ConfigurationError(
            "pass only one of validation_split, validation_data and validation_col (in Spark ML validationIndicatorCol); "
            f"received {' and '.join(found)}."
        )


def _check_batch_size(models: Sequence[keras.Model], source: Source, argument: str, batch_size: int) -> None:
    """Check the size of batches that are made of rows. Batches that a function of the user reads keep their sizes.

    Raises:
        ConfigurationError: Batches do not have the size that a model requires.
    """
    if not source.in_batches:
        for model in models:
            check_batch_size(model, argument, batch_size)


def _check_source(models: Sequence[keras.Model], source: Source, options: BatchOptions) -> None:
    """Check labelled rows against the models and their losses, as far as they are known before Spark reads them.

    Raises:
        DataError: There are no rows, or they do not fit a model or its loss.
        ConfigurationError: The transform fails, or class weights do not fit the data.
    """
    if source.form is not None and options.transform is None:
        check_label_structure(models[0], source.form.y)
    if source.block is None:
        return
    if not source.block.rows:
        raise inference.no_rows(_purpose(options))
    seen = inference.transformed_spec_on_driver(source.block, options)
    _check(models, source.block.spec, seen, label_ranges(source.block), options)


def _check_stored(models: Sequence[keras.Model], source: Source, stored: StoredDataset, options: BatchOptions) -> None:
    """Check stored rows like `_check_source`, unless they were arrays and have been checked already."""
    if source.block is not None:
        return
    spec = common_spec(stored.handles)
    if spec is None:
        raise inference.no_rows(_purpose(options))
    seen = inference.transformed_spec_of_zeros(spec, options) or inference.transformed_spec_on_workers(stored, options)
    _check(models, spec, seen, all_labels(stored.handles), options)


def _check(
    models: Sequence[keras.Model],
    spec: BlockSpec,
    seen: BlockSpec,
    ranges: Sequence[LabelRange],
    options: BatchOptions,
) -> None:
    for model in models:
        if isinstance(options, FitOptions) and options.class_weight is not None:
            if spec.form.weight is not None:
                raise ConfigurationError(
                    "class_weight and sample weights cannot be combined: multiply the sample weights by the class weights."
                )
            if spec.form.y is not None and spec.form.y.count > 1:
                raise ConfigurationError(
                    "class_weight is not supported for models with several outputs: use sample weights."
                )
            if options.class_weight != "balanced":
                check_class_weight(model, options.class_weight)
        inference.check_data(model, spec, seen, ranges, options)


def _purpose(options: BatchOptions) -> str:
    return "data" if isinstance(options, FitOptions) else "data to evaluate or validate on"
