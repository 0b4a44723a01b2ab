"""Predictions of several models for the same labelled rows: of arrays in this process, of other data on the cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from sparkkeras.data.block import Block, Form, Structure, concatenate_alike
from sparkkeras.data.dataset import Shared, StoredDataset, TaskContext, common_spec
from sparkkeras.ensembles import compatibility
from sparkkeras.errors import DataError
from sparkkeras.modeling.archive import ModelArchive
from sparkkeras.modeling.fixed_batch import check_partitions, check_rows
from sparkkeras.modeling.own_methods import check_can_predict
from sparkkeras.modeling.schema import as_built, input_structure, schema_of
from sparkkeras.modeling.state import ModelWeights
from sparkkeras.scoring import inference
from sparkkeras.sources.source import Source
from sparkkeras.weights import Array
from sparkkeras.worker import device
from sparkkeras.worker.batches import BatchOptions, pieces_of, transformed
from sparkkeras.worker.predictor import PredictTask, join_predictions


@contextmanager
def member_predictions(
    models: Sequence[keras.Model], source: Source, options: BatchOptions, custom_objects: Mapping[str, Any]
) -> Iterator[tuple[Block, Iterator[Array]]]:
    """Predict rows with one model after the other.

    Rows that are not in this process are stored on the workers; each model predicts them in a job of its own, and only
    labels, sample weights and predictions are sent to this process.

    Args:
        models: Models with the same inputs and one output. The first one defines how rows are read.
        source: The labelled rows.
        options: Batch size and transform.
        custom_objects: Custom classes and functions by name, where they cannot be found from the models.

    Yields:
        The rows after the transform, without their features; and the predictions of each model, computed as they are taken.

    Raises:
        DataError: There are no rows, or they do not fit the models.
        ConfigurationError: The transform failed; or rows do not make whole batches, for a model with a fixed batch size.
    """
    if source.block is not None:
        if not source.block.rows:
            raise _no_rows()
        schema_of(models[0]).check_features(inference.transformed_spec_on_driver(source.block, options))
        block = transformed(source.block.dense(), options)
        for model in models:
            check_rows(model, block.rows, "validation")
        with device.without_retracing_warnings():
            yield without_features(block), _predicted_here(models, block, options.batch_size)
        return
    for model in models:
        check_can_predict(model)
    with source.dataset() as dataset, dataset.stored() as stored:
        spec = common_spec(stored.handles)
        if spec is None:
            raise _no_rows()
        seen = inference.transformed_spec_of_zeros(spec, options) or inference.transformed_spec_on_workers(stored, options)
        schema_of(models[0]).check_features(seen)
        for model in models:
            check_partitions(model, [handle.rows for handle in stored.handles], "validation")
        with stored.share(options) as how:
            labelled = concatenate_alike(stored.run(LabelsTask(how)).collect())
            if labelled is None:
                raise _no_rows()  # the transform has dropped all
            yield labelled, _predicted_there(models, stored, how, options.batch_size, custom_objects, labelled)


def without_features(block: Block) -> Block:
    """The labels and sample weights of rows."""
    form = block.form
    arrays = [*block.arrays[form.span("y")], *block.arrays[form.span("sample_weight")]]
    return Block(Form(Structure.several(0), form.y, form.weight), tuple(arrays))


@dataclass(frozen=True)
class LabelsTask:
    """Yields the labels and sample weights of a partition's rows, after the transform."""

    options: Shared[BatchOptions]

    def __call__(self, context: TaskContext, blocks: Iterator[Block]) -> Iterator[Block]:
        """Yield them block by block."""
        for block in pieces_of(blocks, self.options.value):
            if block.rows:
                found = without_features(block)
                yield Block(found.form, tuple(np.array(array) for array in found.arrays))  # not the file's memory map


@dataclass(frozen=True)
class MemberInputs:
    """Selects the inputs of a member, which may have other names, and another order, than those of the first member.

    Attributes:
        names: The names of the first member's inputs.
        order: The index of the matching input of the first member for each input of this one.
    """

    names: tuple[str, ...]
    order: tuple[int, ...]

    @classmethod
    def of(cls, model: keras.Model, first: keras.Model) -> MemberInputs:
        """Those of a member."""
        return cls(tuple(spec.name for spec in schema_of(first).inputs), tuple(compatibility.input_order(model, first)))

    def of_rows(self, block: Block) -> Block:
        """The features of rows, whose structure is that of the first member's inputs, as a tuple in the member's order."""
        names, arrays = block.form.x.names, block.arrays[block.form.span("x")]
        if names is not None and set(self.names) <= set(names):
            arrays = tuple(arrays[names.index(name)] for name in self.names)
        x = Structure() if len(arrays) == 1 else Structure.several(len(arrays))
        return Block(Form(x), tuple(arrays[index] for index in self.order))


@dataclass(frozen=True)
class MemberTask:
    """Predicts with a member.

    Attributes:
        predict: Predicts with the member, without a transform.
        options: The transform, whose argument has the structure of the first member's inputs.
        inputs: Selects the member's inputs.
    """

    predict: PredictTask
    options: Shared[BatchOptions]
    inputs: MemberInputs

    def __call__(self, context: TaskContext, blocks: Iterator[Block]) -> Iterator[Any]:
        """Yield the predictions, many rows at a time."""
        return self.predict(context, map(self.inputs.of_rows, pieces_of(blocks, self.options.value)))


def _predicted_here(models: Sequence[keras.Model], block: Block, batch_size: int) -> Iterator[Array]:
    """The predictions of each model for rows in this process."""
    for model in models:
        rows = MemberInputs.of(model, models[0]).of_rows(block).in_structure(input_structure(model))
        yield keras.tree.flatten(compatibility.predicted(model, as_built(model, rows.x), batch_size))[0]


def _predicted_there(
    models: Sequence[keras.Model],
    stored: StoredDataset,
    how: Shared[BatchOptions],
    batch_size: int,
    custom_objects: Mapping[str, Any],
    labelled: Block,
) -> Iterator[Array]:
    """The predictions of each model for stored rows. At the end, check that the labels are still those of their rows."""
    for model in models:
        archive = ModelArchive.pack_to_predict(model, custom_objects)
        of_member = inference.batch_options(model, batch_size, None)
        with (
            stored.share(archive) as shared,
            stored.share(ModelWeights.take(model)) as state,
            stored.share(of_member) as its,
        ):
            predict = PredictTask(shared, state, its, schema_of(model))
            task = MemberTask(predict, how, MemberInputs.of(model, models[0]))
            found = join_predictions(stored.run(task).collect())
        yield keras.tree.flatten(found)[0]
    again = concatenate_alike(stored.run(LabelsTask(how)).collect())
    if again is None or again.spec != labelled.spec or not all(map(np.array_equal, again.arrays, labelled.arrays)):
        raise DataError(
            "the labels of x_val changed while the models predicted: an executor was lost and its rows were read again in "
            "another order, or transform= returns other labels each time. Write x_val to a table once, and pass the table."
        )


def _no_rows() -> DataError:
    return DataError("x_val has no rows; expected at least one.")
