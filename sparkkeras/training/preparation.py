"""Preparation of a call of `fit`: it checks the arguments, makes sources of the data, stores the rows and creates the job.

`check_fit` raises all errors that can be found before Spark runs; `prepare_fit` stores the rows and checks those too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import keras

from sparkkeras.arguments import declared
from sparkkeras.data.block import BlockSpec, describe
from sparkkeras.data.dataset import StoredDataset, all_labels, common_spec
from sparkkeras.data.labels import LabelRange, label_ranges
from sparkkeras.data.partition_stats import CountClasses, balanced_weights
from sparkkeras.data.placement import RowPlacement, TrainValidationSplit
from sparkkeras.data.reader import Reader
from sparkkeras.errors import ConfigurationError, warn
from sparkkeras.events import Events, PhaseStarted, RunStarted
from sparkkeras.modeling.archive import ModelArchive
from sparkkeras.modeling.compilation import needs_labels
from sparkkeras.modeling.fixed_batch import check_batch_size, check_partitions, warn_of_shuffle
from sparkkeras.modeling.labels import check_class_weight, check_label_structure
from sparkkeras.modeling.optimizers import inner_optimizer
from sparkkeras.modeling.outside import dump_callbacks
from sparkkeras.modeling.own_methods import check_can_train
from sparkkeras.modeling.schema import input_structure, schema_of
from sparkkeras.modeling.state import has_settable_rate, learning_rate
from sparkkeras.modeling.synchronized import check_not_synchronized
from sparkkeras.scoring import inference
from sparkkeras.sources.source import (
    NamedColumns,
    SlotLimit,
    Source,
    as_sources,
    check_row_count,
    limited,
    split_by_column,
)
from sparkkeras.spark.live_progress import live_progress
from sparkkeras.training.callbacks import check_callbacks, check_monitors
from sparkkeras.training.fit_arguments import FitArguments
from sparkkeras.training.job import Coordination, Job, Validation
from sparkkeras.worker import device
from sparkkeras.worker.batches import BatchOptions, FitOptions


@dataclass(frozen=True)
class FitRequest:
    """A call of `fit`, checked as far as possible without Spark.

    Attributes:
        source: The rows to train on.
        held_out: The rows to validate on, unless they are a part of ``source``.
        placement: How the rows to train on are divided among the workers.
        options: How a worker trains.
        validation_options: How rows to validate on become batches.
        given: The arguments, by name; see `FitArguments`.
    """

    source: Source
    held_out: Source | None
    placement: RowPlacement
    options: FitOptions
    validation_options: BatchOptions
    given: Mapping[str, Any]

    @property
    def validates(self) -> bool:
        """Whether there are rows to validate on."""
        return bool(self.given["validation_split"]) or self.held_out is not None

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments that must be the same to resume, and that are shown, as values for JSON."""
        found = {name: self.given[name] for name, each in declared(FitArguments).items() if each.is_setting}
        weights = found["class_weight"]
        by_text = {str(index): weight for index, weight in weights.items()} if isinstance(weights, Mapping) else weights
        return {"batch_size": self.options.batch_size, **found, "class_weight": by_text}


@dataclass(frozen=True)
class Partitioning:
    """The number of partitions that data is divided into.

    Attributes:
        num_workers: The number for training rows; ``None``: as many as the data has.
        slices: The number for arrays, also validation data, where ``num_workers`` does not apply; ``None``: as many as there
            are slots.
        limit: The limit on the number of partitions to train on; ``None``: not all of them train at the same time.
    """

    num_workers: int | None = None
    slices: int | None = None
    limit: SlotLimit | None = None


def check_fit(
    models: Sequence[keras.Model], data: Any, y: Any, given: Mapping[str, Any], batch_size: int, seed: int
) -> FitRequest:
    """Check the arguments of `SparkModel.fit` together, and the data as far as possible before Spark reads it.

    Args:
        models: The models to train. The first one defines how rows are read.
        data: The rows to train on.
        y: The labels, if ``data`` is arrays.
        given: The other arguments, each of which has been checked.
        batch_size: The number of rows in a batch, where the arguments have none.
        seed: The seed of row orders and dropout masks.

    Raises:
        ConfigurationError: An argument does not fit another one.
        DataError: The data does not fit the models or their losses.
        ModelError: A layer synchronizes statistics between replicas.
    """
    for each in models:
        check_not_synchronized(each)
    model, transform = models[0], given["transform"]
    if given["initial_epoch"] >= given["epochs"]:
        warn(
            f"nothing is trained: initial_epoch={given['initial_epoch']} is not less than epochs={given['epochs']}, the "
            "epoch to end at."
        )
    validates = _check_validation(given)
    check_callbacks(given["callbacks"], model)
    placement = RowPlacement(given["shuffle"], seed, given["validation_split"])
    options = FitOptions(
        batch_size=given["batch_size"] or batch_size,
        transform=inference.transform_by_value(transform),
        input_structure=input_structure(model),
        shuffle=placement.shuffle,
        seed=seed,
        class_weight=given["class_weight"],
    )
    validation_size = given["validation_batch_size"] or options.batch_size
    _check_models(models, options, validates)
    reader = Reader(schema_of(model).before(transform), True, given["on_invalid"], labels_optional=not needs_labels(models))
    columns = NamedColumns(given["features"], given["label"], given["loader"], fits=transform is None)
    source, held_out = as_sources(data, y, given["sample_weight"], given["validation_data"], reader, columns)
    if given["steps_per_epoch"] is not None:
        source = limited(source)
    if placement.is_global and source.in_batches:
        raise ConfigurationError(
            'shuffle="global" redistributes stored rows, but data is a function, whose batches are read anew in each epoch: '
            "leave shuffle out, and have the function read rows of all kinds."
        )
    if options.class_weight == "balanced":
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
    in_batches = held_out is not None and held_out.in_batches
    request = FitRequest(
        source=source,
        held_out=held_out,
        placement=placement,
        options=options,
        validation_options=BatchOptions(validation_size, options.transform, options.input_structure, in_batches=in_batches),
        given=given,
    )
    _check_rows(models, request)
    return request


def packed(models: Sequence[keras.Model], custom_objects: Mapping[str, Any], events: Events) -> list[ModelArchive]:
    """Pack the models of a call of `fit`; the arguments are those of `ModelArchive.pack`. It takes long if they are large.

    Raises:
        CustomObjectError: See `ModelArchive.pack`.
        ModelError: See `ModelArchive.pack`.
    """
    events.emit(PhaseStarted(f"Packing the model{'s' if len(models) > 1 else ''}"))
    return [ModelArchive.pack(model, custom_objects) for model in models]


@contextmanager
def prepare_fit(
    request: FitRequest,
    models: Sequence[keras.Model],
    archives: Sequence[ModelArchive],
    custom_objects: Mapping[str, Any],
    partitioning: Partitioning,
    coordination: Coordination,
    workers_validate: bool = False,
) -> Iterator[tuple[Job, StoredDataset]]:
    """Store the rows of a call of `fit` on the workers, check them, and create the job.

    Args:
        request: The checked call of `fit`.
        models: The models to train; the job refers to the first one.
        archives: The packed models, in the same order.
        custom_objects: Custom classes and functions by name, where they cannot be found from the models.
        partitioning: The number of partitions.
        coordination: How workers combine their weights.
        workers_validate: Whether the callbacks on the workers get validation metrics; otherwise those on the driver do.

    Yields:
        The job and its dataset; the rows are stored until the end of the context.

    Raises:
        DataError: The data is empty, malformed, or does not fit a model or its loss.
        ConfigurationError: The transform fails, or a callback monitors a metric that is not reported.
        CustomObjectError: The callbacks on the workers cannot be sent.
    """
    given = request.given
    monitors = given["callbacks"], given["worker_callbacks"], request.validates, request.validates and workers_validate
    check_monitors(models, custom_objects, *monitors)
    on_workers = dump_callbacks(given["worker_callbacks"], models) if given["worker_callbacks"] else None
    with ExitStack() as stack:
        coordination.events.emit(PhaseStarted("Starting workers, and storing rows on them"))
        training = request.source.dataset(
            partitioning.num_workers, partitioning.slices, partitioning.limit, request.placement
        )
        stored = stack.enter_context(stack.enter_context(training).stored())
        _check_stored(models, request.source, stored, request.options)
        check_monitors(models, custom_objects, *monitors)  # now the metrics of every model have names
        split = TrainValidationSplit.split([handle.rows for handle in stored.handles], given["validation_split"])
        options = request.options
        if options.class_weight == "balanced":
            weights = balanced_weights(stored.run(CountClasses(split.train)).collect())
            for model in models:
                check_class_weight(model, weights)
            options = replace(options, class_weight=weights)
        held_out_rows: Sequence[int | None] = split.validate
        validation = None
        if given["validation_split"]:
            spans = split.validation_spans
            validation = Validation(stored, request.validation_options, given["validation_freq"], spans)
        elif request.held_out is not None:
            coordination.events.emit(PhaseStarted("Storing rows to validate on"))
            held_out = request.held_out.dataset(slices=partitioning.slices)
            rows = stack.enter_context(stack.enter_context(held_out).stored())
            _check_stored(models, request.held_out, rows, request.validation_options)
            validation = Validation(rows, request.validation_options, given["validation_freq"])
            held_out_rows = [handle.rows for handle in rows.handles]
        if not workers_validate:  # the members of ensembles train on rows of several partitions
            check_partitions(models[0], split.train, "training", given["steps_per_epoch"])
            check_partitions(models[0], held_out_rows, "validation")
        # Members of ensembles are in different epochs.
        reporting = None if workers_validate else stored
        progress = stack.enter_context(
            live_progress(coordination.events, reporting, coordination.server.options, len(split.train))
        )
        yield (
            Job(
                model=models[0],
                archive=archives[0],
                epochs=given["epochs"],
                initial_epoch=given["initial_epoch"],
                frequency=coordination.frequency,
                rule=coordination.rule,
                rule_state=coordination.rule_state,
                split=split,
                options=replace(options, callbacks=on_workers, progress=progress),
                steps_per_epoch=given["steps_per_epoch"],
                validation=validation,
                server=coordination.server,
                gradient_dtype=coordination.gradient_dtype,
                max_restarts=coordination.max_restarts,
                histories=coordination.histories,
                recorder=coordination.recorder,
                events=coordination.events,
            ),
            stored,
        )


def _check_validation(given: Mapping[str, Any]) -> bool:
    """Check the arguments that say which rows to validate on; returns whether there are such rows.

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
    return bool(found)


def _check_models(models: Sequence[keras.Model], options: FitOptions, validates: bool) -> None:
    """Check that Keras can train the models in this way.

    Raises:
        ModelError: A method of a model cannot be called, or the backend does not support the model.
    """
    for model in models:
        check_can_train(model, validates)
        device.check_supported(model)
        warn_of_shuffle(model, options.shuffle)


def _check_rows(models: Sequence[keras.Model], request: FitRequest) -> None:
    """Check the rows to train and validate on, and the size of their batches; see `_check_batch_size`, `_check_source`."""
    source, held_out = request.source, request.held_out
    _check_batch_size(models, source, "batch_size", request.options.batch_size)
    if request.validates:
        validated = source if held_out is None else held_out
        _check_batch_size(models, validated, "validation_batch_size", request.validation_options.batch_size)
    _check_source(models, source, request.options)
    if held_out is not None:
        _check_source(models, held_out, request.validation_options)


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


def describe_fit(kind: str, model: keras.Model, request: FitRequest, settings: Mapping[str, Any]) -> RunStarted:
    """The event with which a training begins.

    Args:
        kind: See `RunStarted`.
        model: The model, or the first one of several.
        request: The checked call of ``fit``.
        settings: Further settings by name, for display.
    """
    shown = {
        **settings,
        **request.settings,
        "seed": request.options.seed,
        **describe_model(model),
    }
    return RunStarted(
        kind=kind,
        name=model.name,
        settings=shown,
        epochs=request.given["epochs"],
        initial_epoch=request.given["initial_epoch"],
    )


def describe_model(model: keras.Model) -> dict[str, Any]:
    """The settings of a model by name, for display."""
    described: dict[str, Any] = {"parameters": model.count_params() if model.built else None}
    if model.optimizer is not None:
        described["optimizer"] = type(inner_optimizer(model)).__name__
        described["learning_rate"] = float(f"{learning_rate(model):.6g}") if has_settable_rate(model) else "schedule"
        described["loss"] = _name(getattr(model, "loss", None))
    return described | {"keras": keras.__version__, "backend": keras.backend.backend()}


def _name(value: Any) -> str | None:
    """A loss, or several, as text."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_name(member)}" for name, member in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(str(_name(member)) for member in value)
    return str(getattr(value, "name", None) or getattr(value, "__name__", None) or type(value).__name__)
