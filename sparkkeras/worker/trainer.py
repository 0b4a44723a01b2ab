"""One worker: Keras's own ``fit``, ``evaluate`` and ``predict`` over the rows of one partition. Knows nothing of Spark.

Memory: whatever the size of the partition, a worker holds the model, one shuffle order, and a few pieces of
`PIECE_BYTES`; the rows stay in their files.
"""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import numpy as np

from sparkkeras.data.block import Block, BlockSpec, Form, Structure, changed, concatenate
from sparkkeras.data.dataset import TaskContext
from sparkkeras.data.order import RowOrder
from sparkkeras.data.schema import LabelRange, Schema, label_ranges, union
from sparkkeras.errors import DataError
from sparkkeras.modeling import archive as models
from sparkkeras.modeling import metrics
from sparkkeras.modeling.archive import ModelArchive, ModelState, ModelWeights
from sparkkeras.modeling.custom_code import ByValue
from sparkkeras.modeling.labels import check_labels
from sparkkeras.modeling.metrics import MetricState
from sparkkeras.weights import Flat
from sparkkeras.worker import device

PIECE_BYTES = 4 * 1024 * 1024
"""Rows are copied out of their files in pieces of about this size."""

PREDICTION_BYTES = 64 * 1024 * 1024
"""Predictions leave a worker together once they and their features come to this size: few results, and little memory."""

KEPT_STEPS = 3
"""Of how many other numbers of steps in one call a model keeps what the backend has compiled."""

Transform = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class BatchOptions:
    """How rows become batches.

    Attributes:
        batch_size: Rows in a batch.
        transform: ``transform(x, y) -> (x, y)`` on each batch.
    """

    batch_size: int
    transform: ByValue[Transform] | None = None


@dataclass(frozen=True)
class FitOptions(BatchOptions):
    """How a worker trains.

    Attributes:
        shuffle: Whether each epoch goes through the rows in another order.
        seed: What orders, dropout masks and NumPy's global generator are drawn from, with the worker and the epoch.
        class_weight: As in ``keras.Model.fit``.
        callbacks: Keras callbacks that run here.
    """

    shuffle: bool = True
    seed: int = 0
    class_weight: dict[int, float] | None = None
    callbacks: ByValue[Sequence[Any]] | None = None


@dataclass(frozen=True)
class HeldOut:
    """Rows that ``fit`` validates on at the end of an epoch, as Keras does, and how they become batches."""

    block: Block
    options: BatchOptions


@dataclass(frozen=True)
class BatchRange:
    """Consecutive batches of one epoch: those in [first, last) of a worker's first ``rows`` rows."""

    epoch: int
    rows: int
    first: int
    last: int


@dataclass(frozen=True)
class ExchangePoint:
    """Where a worker stands in an epoch when it exchanges weights with others.

    Attributes:
        batch: The batches of the epoch that are behind.
        steps: The optimizer steps since the last exchange.
        rows: The rows that they saw.
        learning_rate: The optimizer's learning rate.
        metrics: The state of the metrics since this call of ``fit`` began.
        logs: This worker's figures, once the epoch is over.
    """

    batch: int
    steps: int
    rows: int
    learning_rate: float
    metrics: MetricState
    logs: dict[str, Any] | None = None


@dataclass(frozen=True)
class ExchangeResult:
    """How a worker goes on after an exchange: from which weights, at which learning rate, and whether at all."""

    weights: Flat
    learning_rate: float | None = None
    stop: bool = False


class Exchange(Protocol):
    """What couples a worker to others in the middle of ``fit``."""

    @property
    def every(self) -> int | None:
        """How many batches lie between two exchanges; ``None``: there is one at the end of an epoch."""
        ...

    @property
    def stopped(self) -> bool:
        """Whether training is over, so that nobody waits for the rest of this window."""
        ...

    def __call__(self, weights: Flat, point: ExchangePoint) -> ExchangeResult:
        """Exchange the worker's weights."""
        ...


@dataclass(frozen=True)
class Replica:
    """What became of a model in one worker.

    Attributes:
        worker: Which worker.
        rows: The rows that it saw.
        steps: The optimizer steps that it took.
        seconds: How long its ``fit`` took.
        learning_rate: The optimizer's learning rate at the end.
        state: Weights and optimizer variables at the end.
        metrics: The state of the metrics over these rows; nothing where ``fit`` went on to validate.
        logs: The figures of this worker alone.
        stopped: Whether a callback ended training.
    """

    worker: int
    rows: int
    steps: int
    seconds: float
    learning_rate: float
    state: ModelState
    metrics: MetricState
    logs: dict[str, Any]
    stopped: bool = False

    @property
    def is_finite(self) -> bool:
        """Whether all weights and the loss are finite."""
        sums = float(self.state.weights.vector.sum(dtype=np.float64))
        return bool(np.isfinite(sums) and np.isfinite(self.logs.get("loss", 0.0)))


@dataclass(frozen=True)
class LocalTrainer:
    """Trains, evaluates and predicts with a model that the process keeps."""

    archive: ModelArchive
    context: TaskContext

    def fit(
        self,
        state: ModelState,
        block: Block,
        batch_range: BatchRange,
        options: FitOptions,
        *,
        callbacks: Sequence[Any] | None = None,
        exchange: Exchange | None = None,
        held_out: HeldOut | None = None,
    ) -> Replica | None:
        """Train on a range of batches of an epoch from ``state`` on; ``None`` where there are no rows in it.

        Args:
            state: Where to begin.
            block: The partition's rows.
            batch_range: Which of them, in which epoch.
            options: How.
            callbacks: Keras callbacks that live longer than this call, instead of new copies of those in ``options``.
            exchange: What couples this worker to others.
            held_out: Rows to validate on, for figures ``val_...`` in the logs, which callbacks see too.
        """
        order = RowOrder(
            batch_range.rows,
            block.spec.row_bytes,
            options.batch_size,
            (options.seed, self.context.worker, batch_range.epoch) if options.shuffle else None,
        )
        last = min(batch_range.last, order.batches)
        rows = min(last * options.batch_size, batch_range.rows) - batch_range.first * options.batch_size
        if rows <= 0:
            return None

        def pieces() -> Iterator[Block]:
            _seed_globals(seed)
            for index in order.pieces(batch_range.first, last, PIECE_BYTES):
                yield _weighted(device.given_away(transformed(block[index], options)), options.class_weight)

        seed = (options.seed, self.context.worker, batch_range.epoch, batch_range.first)
        started = time.perf_counter()
        spec = next(pieces()).spec
        if callbacks is None:
            callbacks = list(options.callbacks.fresh()) if options.callbacks else []
        model = self._model(spec.zeros())
        _choose_steps(model, any(map(batch_hooks, _members(callbacks))), None if exchange is None else exchange.every)
        state.put(model)
        models.reseed(model, seed)
        _seed_globals(seed)
        end = _end_of_epoch(model)
        coupled = (
            []
            if exchange is None
            else [_exchanging(exchange, batch_range.first, last, batch_range.rows, options.batch_size)]
        )
        before = 0 if model.optimizer is None else int(model.optimizer.iterations)
        with device.feed(spec, options.batch_size, pieces) as batches, self._validating(held_out) as validation_batches:
            history = model.fit(
                batches,
                validation_data=validation_batches,
                initial_epoch=batch_range.epoch,
                epochs=batch_range.epoch + 1,
                callbacks=[*callbacks, *coupled, end],
                steps_per_epoch=last - batch_range.first,
                shuffle=False,
                verbose=0,
            )
        steps = last - batch_range.first
        if model.stop_training and model.optimizer is not None:  # a callback has ended it early
            steps = min(steps, int(model.optimizer.iterations) - before)
        return Replica(
            worker=self.context.worker,
            rows=min(rows, steps * options.batch_size),
            steps=steps,
            seconds=time.perf_counter() - started,
            learning_rate=models.learning_rate(model),
            state=end.state,
            metrics=metrics.take(model) if held_out is None else (),
            logs={name: values[-1] for name, values in history.history.items()},
            stopped=bool(model.stop_training),
        )

    def evaluate(
        self, state: ModelState | ModelWeights, blocks: Iterator[Block], options: BatchOptions
    ) -> tuple[MetricState, BlockSpec, tuple[LabelRange, ...]] | None:
        """The metric state of ``state`` over all rows, their spec and the range of their labels; ``None`` without rows."""
        ranges: tuple[LabelRange, ...] = ()

        def noted(piece: Block) -> Block:
            nonlocal ranges
            found = label_ranges(piece)
            check_labels(self.archive.cached(), piece.spec, found)
            ranges = union(ranges, found)
            return device.given_away(piece)

        pieces = map(noted, self._pieces(blocks, options))
        first = next(pieces, None)
        if first is None:
            return None
        models.schema_of(self.archive.cached()).check_features(first.spec)
        model = self._model(first.spec.zeros())
        state.put(model)
        models.reseed(model, (self.context.worker,))
        with device.feed(first.spec, options.batch_size, lambda: chain([first], pieces)) as batches, _streaming():
            model.evaluate(batches, verbose=0)
        return metrics.take(model), first.spec, ranges

    def predict(
        self, state: ModelState | ModelWeights, blocks: Iterator[Block], options: BatchOptions, schema: Schema
    ) -> Iterator[Any]:
        """What ``keras.Model.predict`` gives for all rows, in order, some rows at a time.

        Batch by batch, as ``predict`` would go through them itself, only that nothing stands between the rows and the model:
        a backend's way of feeding batches takes longer than small models do.
        """
        model: Any = None
        done: list[Any] = []
        size = 0
        for batch in _batches(self._pieces(blocks, options), options.batch_size):
            if model is None:
                schema.check_features(batch.spec)
                model = device.to_predict(self._model(None))
                state.put(model)
                models.reseed(model, (self.context.worker,))
            with _single_steps(model):
                done.append(model.predict_on_batch(device.lent(batch).x))
            size += batch.nbytes + _bytes(done[-1])
            if size >= PREDICTION_BYTES:
                yield together(done)
                done, size = [], 0
        if done:
            yield together(done)

    @contextmanager
    def _validating(self, held_out: HeldOut | None) -> Iterator[Any]:
        if held_out is None:
            yield None
            return
        block, options = held_out.block, held_out.options

        def pieces() -> Iterator[Block]:
            return map(device.given_away, self._pieces(iter((block,)), options))

        with device.feed(next(pieces()).spec, options.batch_size, pieces, held_out=True) as batches, _streaming():
            yield batches

    def _pieces(self, blocks: Iterator[Block], options: BatchOptions) -> Iterator[Block]:
        for block in blocks:
            for piece in block.pieces(PIECE_BYTES, options.batch_size):
                yield transformed(piece, options)

    def _model(self, sample: Block | None) -> Any:
        """The process's model; with its metrics made where ``sample`` says what rows look like."""
        if sample is None:
            return self.archive.cached()
        model = self.archive.cached(repr([array.ndim for array in sample.arrays]))
        if not getattr(model, "_sparkkeras_ready", False):
            model._sparkkeras_steps = int(model.steps_per_execution)
            model._sparkkeras_compiled = {}
            metrics.prepare(model, sample)
            model._sparkkeras_ready = True
            _choose_steps(model)
        return model


def _choose_steps(model: Any, single: bool = False, every: int | None = None) -> None:
    """Set how many steps one call runs to train. Evaluation takes what there is: a change may make the backend trace anew.

    What was compiled for another number of steps is kept: a person may go to and fro between settings.
    """
    steps = device.steps_per_execution(model, model._sparkkeras_steps, single, every)
    if steps != model.steps_per_execution:
        compiled = model._sparkkeras_compiled
        compiled[model.steps_per_execution] = model.train_function, model.test_function
        model.steps_per_execution = steps
        # Without one, Keras makes it when it is called.
        model.train_function, model.test_function = compiled.pop(steps, (None, None))
        while len(compiled) > KEPT_STEPS:
            del compiled[next(iter(compiled))]


def batch_hooks(callback: Any) -> list[str]:
    """The hooks for batches that a callback has of its own."""
    return [hook for hook in _BATCH_HOOKS if overrides(callback, hook)]


_BATCH_HOOKS = (
    "on_batch_begin",
    "on_batch_end",
    "on_train_batch_begin",
    "on_train_batch_end",
    "on_test_batch_begin",
    "on_test_batch_end",
)


def overrides(callback: Any, hook: str) -> bool:
    """Whether a callback has a hook that is not Keras's own."""
    method = vars(callback).get(hook) or getattr(type(callback), hook)
    return not str(method.__module__).startswith("keras.")


def transformed(piece: Block, options: BatchOptions) -> Block:
    """The rows as the model takes them: after the transform, if there is one, which works on a copy."""
    if options.transform is None:
        return piece
    own = Block(piece.form, tuple(np.array(array) for array in piece.arrays))  # a transform may work in place
    made = own.transformed(options.transform.load(), options.batch_size).with_floats(models.floatx())
    return Block(made.form, tuple(np.array(array) for array in made.arrays))


def _weighted(piece: Block, class_weight: dict[int, float] | None) -> Block:
    """The block with sample weights from its classes; those that ``class_weight`` leaves out weigh 1, as in Keras."""
    if class_weight is None or piece.form.y is None:
        return piece
    labels = piece.arrays[piece.form.span("y")][0]
    classes = labels.argmax(-1) if labels.ndim > 1 and labels.shape[-1] > 1 else np.round(labels.reshape(len(labels)))
    found, places = np.unique(classes, return_inverse=True)
    weights = np.array([class_weight.get(int(number), 1.0) for number in found], models.floatx())
    return Block(Form(piece.form.x, piece.form.y, Structure()), (*piece.arrays, weights[places]))


def _seed_globals(seed: Sequence[int]) -> None:
    """Seed the generators that a transform or a callback may draw from. Not the backend's: that makes it trace anew."""
    drawn = int(np.random.SeedSequence(seed).generate_state(1)[0])
    random.seed(drawn)
    np.random.seed(drawn)


def _batches(pieces: Iterator[Block], rows: int) -> Iterator[Block]:
    """Blocks of ``rows`` rows each, the last one perhaps shorter; views where they do not go over the end of a piece."""
    rest: list[Block] = []
    missing = rows
    spec: BlockSpec | None = None
    for piece in pieces:
        spec = spec or piece.spec
        if piece.spec != spec:
            raise DataError(changed(spec, piece.spec))
        start = 0
        while piece.rows - start >= missing:
            yield concatenate([*rest, piece[start : start + missing]])
            start, rest, missing = start + missing, [], rows
        if start < piece.rows:
            rest.append(piece[start:])
            missing -= piece.rows - start
    if rest:
        yield concatenate(rest)


def together(parts: Sequence[Any]) -> Any:
    """Predictions for some rows after others, in the structure that the model gives them, as one."""
    import keras

    if len(parts) == 1:
        return parts[0]
    return keras.tree.map_structure(lambda *arrays: np.concatenate(arrays), *parts)


def _bytes(predicted: Any) -> int:
    import keras

    return sum(int(array.nbytes) for array in keras.tree.flatten(predicted))


@contextmanager
def _streaming() -> Iterator[None]:
    """A stream of unknown length ends when it ends; Keras would call that running out of data."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Your input ran out of data")
        yield


@contextmanager
def _single_steps(model: Any) -> Iterator[None]:
    """Predict batch by batch: Keras unrolls the steps of one call, and traces anew for every number of them."""
    steps, model.steps_per_execution = model.steps_per_execution, 1
    try:
        yield
    finally:
        model.steps_per_execution = steps


def _end_of_epoch(model: Any) -> Any:
    """A callback that takes the state at the end of an epoch, before Keras overwrites weights by their averages."""
    import keras

    class EndOfEpoch(keras.callbacks.Callback):  # type: ignore[misc]
        state: ModelState

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.state = ModelState.take(model)

    return EndOfEpoch()


def _exchanging(exchange: Exchange, first: int, last: int, rows: int, batch_size: int) -> Any:
    """A callback that exchanges weights every so many batches of the epoch, and at its end."""
    import keras

    class Exchanging(keras.callbacks.Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self._done = self._exchanged = first
            self._stopped = False

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            # Not by the number that Keras gives, which is off where the last call of an epoch runs fewer steps.
            self._done = min(self._done + int(self._model.steps_per_execution), last)
            if exchange.stopped:
                self._stopped = self._model.stop_training = True
            elif exchange.every is not None and self._done % exchange.every == 0 and self._done < last:
                self._exchange(None)

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if not self._stopped:
                self._exchange(dict(logs or {}))

        def _exchange(self, logs: dict[str, Any] | None) -> None:
            model = self.model  # asking for it brings JAX's weights back into their variables
            point = ExchangePoint(
                batch=self._done,
                steps=self._done - self._exchanged,
                rows=min(self._done * batch_size, rows) - self._exchanged * batch_size,
                learning_rate=models.learning_rate(model),
                metrics=metrics.take(model),
                logs=logs,
            )
            on = exchange(models.take_weights(model), point)
            self._exchanged = self._done
            models.put_weights(on.weights, model)
            if on.learning_rate is not None:
                model.optimizer.learning_rate = on.learning_rate
            if on.stop:
                self._stopped = model.stop_training = True

    return Exchanging()


def lasting(callbacks: Sequence[Any]) -> list[Any]:
    """Callbacks for several calls of ``fit`` that are one training: ``on_train_begin`` is called in the first one only.

    Who made them calls ``end`` of the one member, if there is one, when all is over.
    """
    import keras

    class Lasting(keras.callbacks.CallbackList):  # type: ignore[misc]
        begun = False
        _logs: Any = None

        def on_train_begin(self, logs: Any = None) -> None:
            if not self.begun:
                self.begun = True
                super().on_train_begin(logs)

        def on_train_end(self, logs: Any = None) -> None:
            self._logs = logs

        def end(self) -> None:
            if self.begun:  # an attempt that finds nothing left to train has not
                super().on_train_end(self._logs)

    return [Lasting(list(callbacks))] if callbacks else []


def _members(callbacks: Sequence[Any]) -> Iterator[Any]:
    for callback in callbacks:
        yield from getattr(callback, "callbacks", (callback,))
