"""What runs on the workers: one key after the other. The rows of a partition are sorted by key, so a worker needs no index.

All keys of a worker share the model that it has loaded and traced: only its variables are set for each.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkkeras.data.block import Block, concatenate_alike
from sparkkeras.data.dataset import Shared, TaskContext
from sparkkeras.errors import DataError, DivergenceError, SparkKerasError, counted
from sparkkeras.modeling import state as model_state
from sparkkeras.modeling.state import ModelState, ModelWeights
from sparkkeras.scoring.columns import ScoreTask
from sparkkeras.sources.frame import Selection
from sparkkeras.weights import Array, Flat, Layout, is_floating
from sparkkeras.worker.batches import BatchOptions, FitOptions
from sparkkeras.worker.predictor import Predictor
from sparkkeras.worker.trainer import HeldOut, LocalTrainer

if TYPE_CHECKING:
    import pyarrow as pa

    from sparkkeras.modeling.archive import ModelArchive


@dataclass(frozen=True)
class KeyRows:
    """The rows of a key, as Arrow columns.

    Attributes:
        key: The columns of the key, with one row.
        identity: The hash of the key.
        parts: Its rows, in their order, as lists of the other columns.
    """

    key: list[pa.Array]
    identity: int
    parts: list[list[pa.Array]]

    @property
    def count(self) -> int:
        """The number of rows."""
        return sum(len(part[0]) for part in self.parts)


def by_key(batches: Iterator[pa.RecordBatch], keys: int) -> Iterator[KeyRows]:
    """Group the sorted rows of a partition: ``keys`` columns of the key, the hash of the key, and the other columns."""
    rows: KeyRows | None = None
    for batch in batches:
        for part in segments(batch.column(keys)):
            columns = [column.slice(part.start, part.stop - part.start) for column in batch.columns]
            identity = columns[keys][0].as_py()
            if rows is None or rows.identity != identity:
                if rows is not None:
                    yield rows
                rows = KeyRows([column.slice(0, 1) for column in columns[:keys]], identity, [])
            rows.parts.append(columns[keys + 1 :])
    if rows is not None:
        yield rows


def segments(identities: pa.Array) -> Iterator[slice]:
    """The runs of rows with the same hash of their key."""
    bounds = [0, *(np.flatnonzero(np.diff(identities.to_numpy())) + 1).tolist(), len(identities)]
    return (slice(start, stop) for start, stop in pairwise(bounds) if stop > start)


def dump_weights(flat: Flat) -> bytes:
    """Weights as a cell of the table of models."""
    return b"".join([flat.vector.tobytes(), *(each.tobytes() for each in flat.integer_variables)])


def load_weights(cell: bytes, layout: Layout) -> Flat:
    """The weights of a cell that `dump_weights` made.

    Raises:
        DataError: The cell is of a model with other variables.
    """
    vector_dtype = np.dtype("float64" if "float64" in layout.dtypes else "float32")
    dtypes, sizes = list(map(np.dtype, layout.dtypes)), [math.prod(shape) for shape in layout.shapes]
    values = sum(size for dtype, size in zip(dtypes, sizes, strict=True) if is_floating(dtype))
    kinds: list[tuple[np.dtype[Any], int, tuple[int, ...]]] = [(vector_dtype, values, (values,))]
    kinds += [each for each in zip(dtypes, sizes, layout.shapes, strict=True) if not is_floating(each[0])]
    expected = sum(dtype.itemsize * size for dtype, size, _ in kinds)
    if expected != len(cell):
        raise DataError(
            f"the table of models has weights of {len(cell)} bytes, and those of this model have {expected}: it is of a "
            "model with other variables."
        )
    arrays, start = [], 0
    for dtype, size, shape in kinds:
        arrays.append(np.frombuffer(cell, dtype, size, start).reshape(shape))
        start += dtype.itemsize * size
    return Flat(arrays[0], tuple(arrays[1:]))


@dataclass(frozen=True)
class Result:
    """What became of a key.

    Attributes:
        rows: Its rows.
        epochs: The epochs that its model has trained.
        logs: The loss and the metrics, at the end.
        error: Why there is no model; empty if there is one.
        weights: The weights, as a cell of the table.
    """

    rows: int
    epochs: int = 0
    logs: dict[str, float] | None = None
    error: str | None = None
    weights: bytes | None = None


@dataclass(frozen=True)
class PerKey:
    """What the tasks of this module have in common.

    Attributes:
        archive: The model.
        read: Converts the columns of features and labels to blocks.
        keys: The number of columns of the key.
    """

    archive: Shared[ModelArchive]
    read: Selection
    keys: int

    def block(self, parts: Sequence[Sequence[pa.Array]]) -> Block:
        """The rows of a key."""
        read: list[Block] = []
        first = 0
        for part in parts:
            read += (block for block, _ in self.read.blocks(part, "this key, in its order", first))
            first += len(part[0])
        block = concatenate_alike(read)
        if block is None or not block.rows:
            raise DataError("all rows of this key were dropped, since they have nulls, NaN or infinite values.")
        return block.dense()


def guarded(rows: int, call: Callable[[], Result]) -> Result:
    """The result of a call. An error is that of its key only, but for those of the machine."""
    try:
        return call()
    except (MemoryError, OSError):
        raise
    except Exception as error:
        if isinstance(error, SparkKerasError):
            return Result(rows, error=str(error))
        *_, frame = traceback.extract_tb(error.__traceback__)
        return Result(rows, error=f"{type(error).__name__}: {error} ({frame.filename}, line {frame.lineno})")


@dataclass(frozen=True)
class Plan:
    """How long the model of each key trains, and what it validates on; see `KeyedModel.fit`."""

    epochs: int
    validation_split: float
    validation_freq: int
    validation_batch_size: int | None


@dataclass(frozen=True)
class TrainKeys(PerKey):
    """Trains the model of each key from the same state.

    Attributes:
        state: The state that each model starts from.
        options: How batches are made, the seed, and callbacks.
        plan: How long to train, and what to validate on.
    """

    state: Shared[ModelState]
    options: Shared[FitOptions]
    plan: Plan

    def __call__(self, context: TaskContext, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the results: the key, its digest, rows, epochs, loss, validation loss, logs, error and weights."""
        import pyarrow as pa

        trainer = LocalTrainer(self.archive.value, context)
        for rows in by_key(batches, self.keys):
            digest = rows.parts[0][0].slice(0, 1)
            parts = [columns[1:] for columns in rows.parts]
            found = guarded(rows.count, partial(self._trained, trainer, rows, parts))
            logs = found.logs or {}
            yield pa.record_batch(
                [
                    *rows.key,
                    pa.array([found.rows], pa.int64()),
                    pa.array([found.epochs], pa.int32()),
                    *_losses(logs),
                    _map_of(logs),
                    pa.array([found.error], pa.string()),
                    digest if found.error is None else pa.nulls(1, pa.string()),
                    pa.array([found.weights], pa.binary()),
                ],
                [f"c{number}" for number in range(self.keys + 8)],
            )

    def _trained(self, trainer: LocalTrainer, rows: KeyRows, parts: Sequence[Sequence[pa.Array]]) -> Result:
        block, options, plan = self.block(parts), self.options.value, self.plan
        split = int(block.rows * (1 - plan.validation_split)) if plan.validation_split else block.rows
        if not split or (plan.validation_split and split == block.rows):
            raise DataError(
                f"{counted(block.rows, 'row')} cannot be divided by validation_split={plan.validation_split}: each key "
                "needs rows to train and to validate on."
            )
        held_out = None
        if split < block.rows:
            size = plan.validation_batch_size or options.batch_size
            held_out = HeldOut(block[split:], replace(options, batch_size=size))
        seed = rows.identity % 2**63
        model, epochs, found = trainer.fit_alone(
            self.state.value, block[:split], plan.epochs, options, seed, held_out, plan.validation_freq
        )
        logs, weights = scalars(found), model_state.take_weights(model)
        if not (np.isfinite(logs.get("loss", 0.0)) and np.isfinite(weights.vector.sum(dtype=np.float64))):
            raise DivergenceError(
                f"the loss became {logs.get('loss')} within {counted(epochs, 'epoch')}. Lower the learning rate, clip the "
                "gradients (clipnorm), or scale the features."
            )
        return Result(block.rows, epochs, logs, None, dump_weights(weights))


def scalars(logs: Mapping[str, Any]) -> dict[str, float]:
    """The logs that are numbers; a metric such as ``F1Score`` may have a number for each class."""
    arrays = {name: np.asarray(value) for name, value in logs.items()}
    return {name: float(value) for name, value in arrays.items() if not value.ndim and value.dtype != object}


def _losses(logs: dict[str, float]) -> list[pa.Array]:
    import pyarrow as pa

    return [pa.array([logs.get(name)], pa.float64()) for name in ("loss", "val_loss")]


def _map_of(logs: dict[str, float]) -> pa.Array:
    import pyarrow as pa

    return pa.array([list(logs.items())], pa.map_(pa.string(), pa.float64()))


@dataclass(frozen=True)
class EvaluateKeys(PerKey):
    """Evaluates the model of each key on its rows.

    The first row of a key has its weights, in the first column after the key.

    Attributes:
        state: The values of variables outside the model.
        layout: The variables of the model.
        options: How batches are made.
        default: The weights for keys without a model; ``None``: none.
    """

    state: Shared[ModelWeights]
    layout: Layout
    options: Shared[BatchOptions]
    default: Shared[Flat] | None

    def __call__(self, context: TaskContext, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the key, its rows, loss, logs and error."""
        import pyarrow as pa

        trainer = LocalTrainer(self.archive.value, context)
        for rows in by_key(batches, self.keys):
            first, *others = rows.parts
            cell = first[0][0].as_py()
            if cell is not None:
                first = [column.slice(1) for column in first]
            parts = [columns[1:] for columns in (first, *others) if len(columns[0])]
            count = sum(len(columns[0]) for columns in parts)
            if not count:
                continue
            found = guarded(count, partial(self._evaluated, trainer, cell, parts))
            logs = found.logs or {}
            yield pa.record_batch(
                [
                    *rows.key,
                    pa.array([found.rows], pa.int64()),
                    _losses(logs)[0],
                    _map_of(logs),
                    pa.array([found.error], pa.string()),
                ],
                [f"c{number}" for number in range(self.keys + 4)],
            )

    def _evaluated(self, trainer: LocalTrainer, cell: bytes | None, parts: Sequence[Sequence[pa.Array]]) -> Result:
        weights = _weights_of(cell, self.layout, self.default)
        if weights is None:
            raise DataError("this key has no model.")
        block = self.block(parts)
        state = replace(self.state.value, weights=weights)
        found = trainer.evaluate(state, iter((block,)), self.options.value, alone=True)
        assert found is not None, "there are rows"
        report, _, _ = found
        return Result(report.rows, 0, scalars(report.logs))


def _weights_of(cell: bytes | None, layout: Layout, default: Shared[Flat] | None) -> Flat | None:
    if cell is not None:
        return load_weights(cell, layout)
    return None if default is None else default.value


@dataclass(frozen=True)
class ScoreKeys(ScoreTask):
    """Predicts rows that are sorted by key, each with the weights of its key.

    Its columns are the hash of the key, weights, and the inputs of the model. The first row of a key with a model has the
    weights and no inputs; its prediction is null.

    Attributes:
        layout: The variables of the model.
        default: The weights for keys without a model; ``None``: their predictions are null.
    """

    layout: Layout
    default: Shared[Flat] | None

    def __call__(self, context: TaskContext, batches: Iterator[Any]) -> Iterator[pa.Array]:
        """Yield the column of predictions, in parts."""
        import pyarrow as pa

        predict: Callable[[Sequence[pa.Array]], Iterator[pa.Array]] | None = None
        cell: bytes | None = None
        last: int | None = None
        for identities, weights, *inputs in batches:
            found: list[pa.Array] = []
            for part in segments(identities):
                start, identity = part.start, identities[part.start].as_py()
                if identity != last:
                    cell, last, predict = weights[start].as_py(), identity, None
                    if cell is not None:
                        found.append(self._column(None, np.zeros(1, bool)))
                        start += 1
                if start < part.stop:
                    if predict is None:
                        predict = partial(self._predicted, self._predictor(cell, context), context)
                    found += predict([column.slice(start, part.stop - start) for column in inputs])
            yield pa.concat_arrays(found)

    def _predictor(self, cell: bytes | None, context: TaskContext) -> Predictor | None:
        weights = _weights_of(cell, self.layout, self.default)
        if weights is None:
            return None
        schema, state = self.read.reader.schema, replace(self.state.value, weights=weights)
        return Predictor(self.archive.value, state, self.options.value, schema, context)

    def _predicted(self, predictor: Predictor | None, context: TaskContext, rows: Sequence[pa.Array]) -> Iterator[pa.Array]:
        if predictor is None:
            yield self._column(None, np.zeros(len(rows[0]), bool))
            return
        for block, good in self.read.blocks(rows, f"partition {context.worker}", 0):
            valid: Array = np.ones(block.rows, bool) if good is None else good
            chosen = block if good is None else block[np.flatnonzero(good)]
            yield self._column(predictor.predict(chosen) if chosen.rows else None, valid)
