"""Predictions on a worker: block by block, in batches that call the model once each."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from sparkkeras.data.block import HELD_BYTES, Block, BlockSpec, changed
from sparkkeras.data.dataset import Shared, TaskContext
from sparkkeras.data.schema import Schema
from sparkkeras.errors import DataError
from sparkkeras.modeling import state as model_state
from sparkkeras.modeling.archive import ModelArchive
from sparkkeras.modeling.fixed_batch import check_batch, check_whole_batches
from sparkkeras.modeling.state import ModelState, ModelWeights
from sparkkeras.worker import device
from sparkkeras.worker.batches import BatchOptions, pieces_of
from sparkkeras.worker.progress import ProgressReporter

CALL_SECONDS = 0.25
"""Reading batches and calling the model take about so long at most: the user wants to see progress."""

T = TypeVar("T")


class Predictor:
    """Calls a model on blocks of features. The first block loads the model.

    It calls ``predict_on_batch`` for each batch: for small models, the data pipeline of ``keras.Model.predict`` takes
    longer than the model. With JAX, it calls ``predict`` for many batches at once: ``predict_on_batch`` stores the state
    and waits for each batch, for as long as a GPU takes for two.

    Args:
        archive: The model.
        state: Its weights.
        options: How rows become batches.
        schema: The inputs that features must fit.
        context: The task.
    """

    def __init__(
        self,
        archive: ModelArchive,
        state: ModelState | ModelWeights,
        options: BatchOptions,
        schema: Schema,
        context: TaskContext,
    ) -> None:
        self._archive, self._state, self._options, self._schema, self._context = archive, state, options, schema, context
        self._model: Any = None
        self._predicts: Any = None  # the model, or what takes its place
        self._spec: BlockSpec | None = None

    def batches(self, blocks: Iterable[Block]) -> Iterator[Any]:
        """Yield what the model returns for the rows of blocks, in their order: for each batch, or for several at once.

        Raises:
            DataError: Features do not fit the model, or differ in shape from those of earlier blocks.
        """
        rows, at_once = 0, 1
        with ProgressReporter(self._options.progress, self._context.worker) as reporter:
            batches = self._split(blocks)
            started = time.monotonic()
            while ahead := list(islice(batches, at_once)):
                predicted = self._call([padded.x for _, padded in ahead])
                if time.monotonic() - started >= CALL_SECONDS:
                    at_once = max(1, at_once // 2)
                elif device.predicts_ahead():
                    size = _nbytes(predicted) + sum(padded.nbytes for _, padded in ahead)
                    at_once *= 2 if 2 * size <= HELD_BYTES else 1
                real = np.concatenate([np.arange(padded.rows) < batch.rows for batch, padded in ahead])
                yield predicted if real.all() else _mapped(lambda array, real=real: array[real], predicted)
                rows += int(real.sum())
                reporter.update(rows)
                started = time.monotonic()

    def _split(self, blocks: Iterable[Block]) -> Iterator[tuple[Block, Block]]:
        """Each batch, and what the model is called with: the same rows, and perhaps further ones to ignore."""
        for piece in pieces_of(iter(blocks), self._options):
            size = self._options.of(piece).batch_size
            self._prepare(piece.spec)
            (check_batch if self._options.in_batches else check_whole_batches)(self._model, piece.rows)
            for batch in piece.batches(size):
                yield batch, device.call_argument(batch, size)

    def _call(self, inputs: list[Any]) -> Any:
        with _single_steps(self._model):
            if len(inputs) == 1:
                return self._predicts.predict_on_batch(inputs[0])
            return self._model.predict(((x,) for x in inputs), steps=len(inputs), verbose=0)

    def predict(self, block: Block) -> Any:
        """What ``keras.Model.predict`` returns for a block that has rows."""
        return join_predictions(list(self.batches((block,))))

    def of_each(self, blocks: Iterable[tuple[T, Block]]) -> Iterator[tuple[T, Any]]:
        """Yield what ``keras.Model.predict`` returns for each block; ``None`` for a block without rows.

        Where batches may have rows of several blocks, it reads ahead until the last batch of a block is complete.

        Args:
            blocks: The blocks, each with a value that is yielded with its predictions, such as the keys of its rows.
        """
        if not self._options.across_blocks:
            yield from ((value, self.predict(block) if block.rows else None) for value, block in blocks)
            return
        unpredicted = deque[tuple[T, int]]()  # the value and the rows of each block that has been read

        def noted() -> Iterator[Block]:
            for value, block in blocks:
                unpredicted.append((value, block.rows))
                yield block

        held: list[Any] = []
        ready = 0  # the rows of ``held``
        for predicted in self.batches(noted()):
            held.append(predicted)
            ready += len(_leaves(predicted)[0])
            while unpredicted and unpredicted[0][1] <= ready:
                value, rows = unpredicted.popleft()
                joined = join_predictions(held)
                yield value, _mapped(lambda array, rows=rows: array[:rows], joined) if rows else None
                held = [_mapped(lambda array, rows=rows: array[rows:], joined)]
                ready -= rows
        yield from ((value, None) for value, _ in unpredicted)

    def in_parts(self, blocks: Iterable[Block]) -> Iterator[Any]:
        """Yield the predictions for all rows of blocks, in order, joined to arrays of about `HELD_BYTES`."""
        done: list[Any] = []
        size = 0
        for predicted in self.batches(blocks):
            done.append(predicted)
            size += _nbytes(predicted)
            if size >= HELD_BYTES:
                yield join_predictions(done)
                done, size = [], 0
        if done:
            yield join_predictions(done)

    def _prepare(self, spec: BlockSpec) -> None:
        if self._spec is not None and spec != self._spec:
            raise DataError(changed(self._spec, spec))
        if self._model is None:
            self._schema.check_features(spec)
            self._model = self._archive.cached(spec.ranks[0])
            self._state.put(self._model)
            model_state.reseed(self._model, (self._context.worker,))
            self._predicts = device.to_predict(self._model, self._context.cores)
            self._spec = spec


@dataclass(frozen=True)
class PredictTask:
    """Yields predictions in the structure of the model's outputs, many rows at a time, or single rows if ``rows`` is set.

    If ``keyed`` is set, it takes pairs of keys and blocks, and yields predictions as pairs with their keys.
    """

    archive: Shared[ModelArchive]
    state: Shared[ModelWeights]
    options: Shared[BatchOptions]
    schema: Schema
    rows: bool = False
    keyed: bool = False

    def __call__(self, context: TaskContext, blocks: Iterator[Any]) -> Iterator[Any]:
        """Yield the predictions."""
        predictor = Predictor(self.archive.value, self.state.value, self.options.value, self.schema, context)
        if self.keyed:
            with_keys = predictor.of_each(blocks)
            return (pair for part in with_keys for pair in pairs(*part)) if self.rows else with_keys
        parts = predictor.in_parts(blocks)
        return (row for part in parts for row in _rows(part)) if self.rows else parts


def pairs(keys: Sequence[Any], predicted: Any) -> Iterator[tuple[Any, Any]]:
    """Pairs of a key and the prediction of its row."""
    rows = (tuple(row) if isinstance(row, list) else row for row in _rows(predicted))
    return zip(keys, rows, strict=True)


def _rows(predicted: Any) -> Iterator[Any]:
    import keras

    leaves = keras.tree.flatten(predicted)
    for row in range(len(leaves[0])):
        yield keras.tree.pack_sequence_as(predicted, [leaf[row] for leaf in leaves])


def join_predictions(parts: Sequence[Any]) -> Any:
    """Predictions for consecutive rows as one, in the structure of the model's outputs."""
    return parts[0] if len(parts) == 1 else _mapped(lambda *arrays: np.concatenate(arrays), *parts)


def _mapped(function: Any, *structures: Any) -> Any:
    import keras

    return keras.tree.map_structure(function, *structures)


def _nbytes(predicted: Any) -> int:
    return sum(int(array.nbytes) for array in _leaves(predicted))


def _leaves(predicted: Any) -> list[Any]:
    import keras

    return list(keras.tree.flatten(predicted))


@contextmanager
def _single_steps(model: Any) -> Iterator[None]:
    """Predict with one step per execution: Keras unrolls the steps of a call, and retraces for every number of steps."""
    steps, model.steps_per_execution = model.steps_per_execution, 1
    try:
        yield
    finally:
        model.steps_per_execution = steps
