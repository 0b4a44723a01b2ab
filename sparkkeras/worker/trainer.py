"""One worker: Keras's ``fit``, ``evaluate`` and ``predict`` on the rows of one partition. Independent of Spark.

Memory: regardless of the size of the partition, a worker holds the model, one shuffle order, and rows of up to
`EPOCH_BYTES`; the others remain in memory-mapped files.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise
from typing import Any, Literal, Protocol

import keras
import numpy as np

from sparkkeras.data.block import Block, BlockSpec, concatenate_alike
from sparkkeras.data.dataset import BlockStream, TaskContext
from sparkkeras.data.labels import LabelRange, label_ranges, union
from sparkkeras.errors import DataError
from sparkkeras.modeling import metrics
from sparkkeras.modeling import state as model_state
from sparkkeras.modeling.archive import ModelArchive
from sparkkeras.modeling.fixed_batch import check_batch, check_whole_batches
from sparkkeras.modeling.labels import check_labels
from sparkkeras.modeling.metrics import MetricState
from sparkkeras.modeling.optimizers import iterations
from sparkkeras.modeling.outside import Unchanging
from sparkkeras.modeling.own_methods import overrides_loop
from sparkkeras.modeling.schema import schema_of
from sparkkeras.modeling.state import ModelState, ModelWeights
from sparkkeras.parameter.exchange import EvaluationReport, ExchangePoint
from sparkkeras.weights import Flat
from sparkkeras.worker import device
from sparkkeras.worker.batches import (
    BatchOptions,
    BatchRange,
    EpochBatches,
    FitOptions,
    batches_of_epoch,
    pieces_of,
)
from sparkkeras.worker.generators import seed_generators
from sparkkeras.worker.lockstep import Lockstep
from sparkkeras.worker.progress import ProgressReporter

KEPT_STEPS = 3
"""The number of other values of ``steps_per_execution`` for which a model keeps its compiled functions."""


@dataclass(frozen=True)
class HeldOut:
    """Validation rows for the end of each epoch, and how batches are made of them."""

    block: Block
    options: BatchOptions


@dataclass(frozen=True)
class ExchangeResult:
    """The weights with which a worker continues after an exchange, new settings, and whether it must stop.

    The settings are values for `model_state.put_settings`: those that the driver has set since the last exchange.
    """

    weights: Flat
    settings: tuple[float, ...] | None = None
    stop: bool = False


class Exchange(Protocol):
    """Exchanges a worker's weights with a server during ``fit``."""

    @property
    def every(self) -> int | None:
        """The number of batches between two exchanges; ``None``: one exchange at the end of each epoch."""
        ...

    @property
    def stopped(self) -> bool:
        """Whether training has been stopped, so that the worker need not finish this window."""
        ...

    @property
    def keeps_optimizer(self) -> bool:
        """Whether it takes the optimizer variables at the end of an epoch."""
        ...

    def __call__(self, weights: Flat, point: ExchangePoint, optimizer: Flat | None = None) -> ExchangeResult:
        """Exchange the worker's weights; the metric state of ``point`` is that of this call of ``fit``."""
        ...


@dataclass(frozen=True)
class Replica:
    """The result of training a model on one worker.

    Attributes:
        worker: The index of the worker.
        rows: The number of training rows.
        steps: The number of optimizer steps.
        seconds: The duration of ``fit``.
        learning_rate: The optimizer's learning rate at the end.
        state: Weights and optimizer variables at the end.
        metrics: The metric state over the training rows; empty if ``fit`` validated, which resets it.
        logs: The logs of this worker only.
        stopped: Whether a callback stopped training.
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
        """Whether all weights and the loss are finite numbers."""
        sums = float(self.state.weights.vector.sum(dtype=np.float64))
        return bool(np.isfinite(sums) and np.isfinite(self.logs.get("loss", 0.0)))


@dataclass(frozen=True)
class LocalTrainer:
    """Trains, evaluates and predicts with the cached model of the process.

    Attributes:
        archive: The model.
        context: The task that runs this trainer.
    """

    archive: ModelArchive
    context: TaskContext

    def fit(
        self,
        state: ModelState,
        rows: Block | BlockStream,
        batch_range: BatchRange,
        options: FitOptions,
        *,
        callbacks: Sequence[Any] | None = None,
        exchange: Exchange | None = None,
        held_out: HeldOut | None = None,
        lockstep: Lockstep | None = None,
    ) -> Replica | None:
        """Train on a range of batches of one epoch.

        Args:
            state: The initial weights and optimizer variables.
            rows: The rows of the partition.
            batch_range: The epoch and the range of batches.
            options: The training options.
            callbacks: Keras callbacks that outlive this call, instead of new copies of those in ``options``.
            exchange: Exchanges weights during training.
            held_out: Validation rows. Their metrics are in the logs, with the prefix ``val_``, also for callbacks.
            lockstep: Averages gradients with other workers, which call this method at the same time with the same state,
                epoch, options and kinds of callbacks. If a callback of one stops training, all stop at the end of the epoch.

        Returns:
            The trained model, or ``None`` if the range contains no rows. With ``lockstep``, there is always a replica.

        Raises:
            ConfigurationError: A callback has changed a variable that the backend has compiled into the training step.
        """
        seed = (options.seed, self.context.worker, batch_range.epoch, batch_range.first)
        started = time.perf_counter()
        seed_generators(seed)
        with batches_of_epoch(rows, batch_range, options, self.context.worker, self._check_streamed) as epoch:
            in_step = None if lockstep is None else lockstep.epoch(epoch, options.batch_size)
            epoch = in_step or epoch
            if epoch is None:
                return None
            if callbacks is None:
                callbacks = list(options.callbacks.fresh()) if options.callbacks else []
            model = self._model(epoch.spec)
            if epoch.batch_size is not None:
                check_whole_batches(model, epoch.trained()[1])
            hooked = any(map(batch_hooks, _flatten(callbacks)))
            _choose_steps(model, hooked, None if exchange is None else exchange.every)
            state.put(model)
            model_state.reseed(model, seed)
            unchanging = Unchanging(model)
            seed_generators((*seed, 1))  # building the model may have drawn numbers
            # Any callback may stop the epoch on one worker, while the others go on.
            counts = hooked or exchange is not None or (in_step is not None and bool(callbacks))
            end = _end_of_epoch(model, counts, None if in_step is None else partial(in_step.end, model, state))
            coupled = [] if exchange is None else [_exchanging(exchange, batch_range, epoch, started)]
            with (
                ProgressReporter(options.progress, self.context.worker, batch_range.epoch) as reporter,
                device.feed(epoch.spec, epoch.batch_size, epoch.pieces()) as batches,
                self._validating(model, held_out) as validation_batches,
                _streaming(),
                nullcontext(batches) if in_step is None else in_step.training(model, batches) as batches,
            ):
                if options.progress is not None:
                    coupled.append(_reporting(reporter, batch_range, epoch, options.batch_size))
                history = model.fit(
                    batches,
                    validation_data=validation_batches,
                    initial_epoch=batch_range.epoch,
                    epochs=batch_range.epoch + 1,
                    callbacks=[*callbacks, *coupled, end],
                    steps_per_epoch=epoch.steps,
                    shuffle=False,
                    verbose=0,
                )
            unchanging.check()
            # A callback may have stopped the epoch early.
            steps, trained = epoch.trained(end.steps) if end.steps else epoch.trained()
            return Replica(
                worker=self.context.worker,
                rows=trained,
                steps=steps,
                seconds=time.perf_counter() - started,
                learning_rate=model_state.learning_rate(model),
                state=end.state,
                metrics=metrics.take(model) if held_out is None else (),
                logs={name: values[-1] for name, values in history.history.items()},
                stopped=bool(model.stop_training),
            )

    def fit_alone(
        self,
        state: ModelState,
        rows: Block,
        epochs: int,
        options: FitOptions,
        seed: int,
        held_out: HeldOut | None,
        validation_freq: int,
    ) -> tuple[Any, int, dict[str, Any]]:
        """Train for several epochs, apart from other workers, as one call of Keras's ``fit`` does.

        Args:
            state: The initial weights and optimizer variables.
            rows: The rows to train on.
            epochs: The number of epochs.
            options: The training options.
            seed: Seeds row orders and dropout masks together with that of ``options``, in place of the index of the worker.
            held_out: The rows to validate on.
            validation_freq: The number of epochs from one validation to the next.

        Returns:
            The trained model, which is the cached one, the number of epochs, and the logs of the last epoch, and of the last
            one that was validated.

        Raises:
            DataError: Labels do not fit the loss.
            ConfigurationError: A callback has changed a variable that the backend has compiled into the training step.
        """
        self.check([rows], options)
        model = self.prepared(rows, options)
        _choose_steps(model, every=1)  # others would be traced for each number of batches
        seed_generators((options.seed, seed))
        state.put(model)
        model_state.reseed(model, (options.seed, seed))
        validation, size = None, options.batch_size
        if held_out is not None:
            validation, size = (
                concatenate_alike(pieces_of(iter((held_out.block,)), held_out.options)),
                held_out.options.batch_size,
            )
        train, test = (None if options.callbacks else _loop(model, kind) for kind in ("train", "test"))
        if train is not None and test is not None:
            logs: dict[str, Any] = {}
            validated = range(0, epochs + 1, epochs if validation is None else validation_freq)
            for begin, end in pairwise(sorted({*validated, epochs - 1, epochs})):
                logs |= _results(model, train, _pieces_of_epochs(rows, range(begin, end), options, seed), options.batch_size)
                if validation is not None and end in validated:
                    found = _results(model, test, iter((validation,)), size)
                    logs |= {f"val_{name}": value for name, value in found.items()}
            model.optimizer.finalize_variable_values(model.trainable_variables)
            return model, epochs, logs
        unchanging, pieces = Unchanging(model), _pieces_of_epochs(rows, range(epochs), options, seed)
        batches = (batch for piece in pieces for batch in piece.batches(options.batch_size))
        first = next(batches)
        with device.feed(first.spec, None, chain([first], batches)) as fed, _streaming():
            history = model.fit(
                fed,
                epochs=epochs,
                steps_per_epoch=-(-rows.rows // options.batch_size),
                callbacks=list(options.callbacks.fresh()) if options.callbacks else [],
                shuffle=False,
                verbose=0,
                validation_data=None if validation is None else _as_arrays(validation),
                validation_batch_size=size,
                validation_freq=validation_freq,
            )
        unchanging.check()
        return model, len(history.epoch), {name: values[-1] for name, values in history.history.items()}

    def evaluate(
        self, state: ModelState | ModelWeights, blocks: Iterator[Block], options: BatchOptions, alone: bool = False
    ) -> tuple[EvaluationReport, BlockSpec, tuple[LabelRange, ...]] | None:
        """Evaluate a model on all rows.

        Args:
            state: The weights.
            blocks: The rows.
            options: How batches are made.
            alone: Whether there is one block, and nothing to report between two steps.

        Returns:
            The report, the spec of the rows, and the value ranges of their labels; ``None`` if there are no rows.

        Raises:
            DataError: Features or labels do not fit the model.
        """
        ranges: tuple[LabelRange, ...] = ()
        read = 0

        def noted(piece: Block) -> Block:
            nonlocal ranges, read
            read += piece.rows
            (check_batch if options.in_batches else check_whole_batches)(self._unpacked(piece.spec), piece.rows)
            ranges = union(ranges, self._check(piece))
            return device.overwritable(piece)

        pieces = map(noted, pieces_of(blocks, options))
        first = next(pieces, None)
        if first is None:
            return None
        schema_of(self._unpacked(first.spec)).check_features(first.spec)
        model = self._model(first.spec)
        state.put(model)
        model_state.reseed(model, (self.context.worker,))
        size, read_pieces = None if options.in_batches else options.batch_size, chain([first], pieces)
        test = _loop(model, "test") if alone else None
        with _streaming(), ProgressReporter(options.progress, self.context.worker) as reporter:
            if test is not None and size is not None:
                logs = _results(model, test, read_pieces, size)
            else:
                with device.feed(first.spec, size, read_pieces) as batches:
                    counted = [] if options.progress is None else [_reporting_tests(reporter, size, lambda: read)]
                    logs = model.evaluate(batches, verbose=0, callbacks=counted, return_dict=True)
        return EvaluationReport(metrics.take(model), read, logs), first.spec, ranges

    def check(self, blocks: Sequence[Block], options: FitOptions) -> None:
        """Check the labels of rows of which the driver has seen only a part.

        Raises:
            DataError: Labels do not fit the loss.
        """
        if options.transform is None:
            for block in blocks:
                check_labels(self.prepared(blocks[0], options), block.spec, label_ranges(block))

    def prepared(self, rows: Block | BlockStream, options: FitOptions) -> Any:
        """The model of this process, built like that of `fit` on these rows.

        Raises:
            DataError: There are no rows.
        """
        first = BatchRange(0, None, 0, 1)
        with batches_of_epoch(
            rows, first, replace(options, shuffle=False), self.context.worker, self._check_streamed
        ) as epoch:
            if epoch is None:
                raise DataError(
                    f"partition {self.context.worker} has no rows any more: its source returns different rows each time. "
                    "Cache the data, or write it to files first."
                )
            return self._model(epoch.spec)

    def _check(self, piece: Block) -> tuple[LabelRange, ...]:
        """Check that labels fit the loss; returns their ranges."""
        found = label_ranges(piece)
        check_labels(self._unpacked(piece.spec), piece.spec, found)
        return found

    def _check_streamed(self, batch: Block) -> tuple[LabelRange, ...]:
        """Check a batch that a function of the user has read; see `_check`."""
        check_batch(self._unpacked(batch.spec), batch.rows)
        return self._check(batch)

    @contextmanager
    def _validating(self, model: Any, held_out: HeldOut | None) -> Iterator[Any]:
        if held_out is None:
            yield None
            return
        check_whole_batches(model, held_out.block.rows)
        options = held_out.options
        pieces = map(device.overwritable, pieces_of(iter((held_out.block,)), options))
        first = next(pieces)
        with device.feed(first.spec, options.batch_size, chain([first], pieces), held_out=True) as batches:
            yield batches

    def _unpacked(self, spec: BlockSpec) -> Any:
        """The cached model of the process for batches of a spec; its metrics may not be built."""
        return self.archive.cached(*spec.ranks)

    def _model(self, spec: BlockSpec) -> Any:
        """The cached model of the process for batches of a spec, with its metrics built."""
        model = self._unpacked(spec)
        if not getattr(model, "_sparkkeras_ready", False):
            model._sparkkeras_steps = int(model.steps_per_execution)
            model._sparkkeras_compiled = {}
            metrics.prepare(model, spec.zeros())
            model._sparkkeras_ready = True
            _choose_steps(model)
        return model


def _pieces_of_epochs(rows: Block, epochs: Sequence[int], options: FitOptions, seed: int) -> Iterator[Block]:
    """The rows of several epochs, one after the other, in pieces of whole batches, except for the last one of each epoch."""
    for epoch in epochs:
        with batches_of_epoch(rows, BatchRange(epoch, None, 0, sys.maxsize), options, seed, lambda _: None) as found:
            assert found is not None, "there are rows"
            yield from found.pieces()


def _loop(model: Any, kind: Literal["train", "test"]) -> device.Loop | None:
    """See `device.loop`; ``None`` for a model with other methods than Keras's, or with variables outside it."""
    return None if model_state.outside(model) or overrides_loop(model) else device.loop(model, kind)


def _as_arrays(rows: Block) -> tuple[Any, ...]:
    """Features, labels and sample weights, as far as there are any, for Keras to read in each epoch."""
    sides = [side for side in (rows.x, rows.y, rows.sample_weight) if side is not None]
    return tuple(keras.tree.map_structure(np.asarray, side) for side in sides)


def _results(model: Any, run: device.Loop, pieces: Iterator[Block], batch_size: int) -> dict[str, Any]:
    """The loss and the metrics of a loop over rows."""
    model.reset_metrics()
    run(pieces, batch_size)
    found: dict[str, Any] = model.get_metrics_result()
    return {name: np.asarray(value) for name, value in found.items()}


def _choose_steps(model: Any, single: bool = False, every: int | None = None) -> None:
    """Set ``steps_per_execution`` for training. Evaluation uses the current value, because a change may cause retracing.

    The functions compiled for other values are kept, because a user may switch back and forth between settings.
    """
    steps = device.steps_per_execution(model, model._sparkkeras_steps, single, every)
    if steps != model.steps_per_execution:
        compiled = model._sparkkeras_compiled
        compiled[model.steps_per_execution] = model.train_function, model.test_function
        model.steps_per_execution = steps
        # If there is none, Keras creates it in the next call.
        model.train_function, model.test_function = compiled.pop(steps, (None, None))
        while len(compiled) > KEPT_STEPS:
            del compiled[next(iter(compiled))]


def batch_hooks(callback: Any) -> list[str]:
    """The batch hooks that a callback overrides."""
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
    """Whether a callback overrides a hook of ``keras.callbacks.Callback``."""
    method = vars(callback).get(hook) or getattr(type(callback), hook)
    return not str(method.__module__).startswith("keras.")


@contextmanager
def _streaming() -> Iterator[None]:
    """Suppress Keras's warning that the input ran out of data, which is the normal end of a stream of unknown length."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Your input ran out of data")
        yield


def _end_of_epoch(model: Any, counts: bool, together: Callable[[bool], tuple[ModelState, bool]] | None) -> Any:
    """A callback that copies the state at the end of an epoch, before Keras overwrites the weights with moving averages.

    Args:
        model: The model.
        counts: Whether to count steps, for which Keras waits after each batch. It does so anyway if there are other batch
            hooks. Without counting, only Keras's own callbacks can stop an epoch early.
        together: Ends the epoch together with other workers: takes whether this worker wants to stop training, and returns
            the common state, and whether to stop. In the middle of an epoch, no worker can stop.
    """
    import keras

    class EndOfEpoch(keras.callbacks.Callback):  # type: ignore[misc]
        state: ModelState
        steps = 0
        stopped = False

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if together is None:
                self.state = ModelState.take(model)
            else:
                self.state, model.stop_training = together(bool(model.stop_training or self.stopped))

    class Counting(EndOfEpoch):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.steps += int(model.steps_per_execution)
            if together is not None and model.stop_training:
                self.stopped, model.stop_training = True, False

    return Counting() if counts else EndOfEpoch()


def _reporting(reporter: ProgressReporter, batch_range: BatchRange, epoch: EpochBatches, batch_size: int) -> Any:
    """A callback that notes the rows and the metrics so far."""
    import keras

    most = sys.maxsize if batch_range.rows is None else batch_range.rows

    def note(batch: int, logs: Any) -> None:
        done = batch + 1 if epoch.steps is None else epoch.trained(batch + 1)[0]
        reporter.update(min((batch_range.first + done) * batch_size, most), logs)

    # Keras may call it from a thread, and need not wait for the metrics of a batch.
    return keras.callbacks.LambdaCallback(on_train_batch_end=note, async_safe=True)


def _reporting_tests(reporter: ProgressReporter, batch_size: int | None, read: Callable[[], int]) -> Any:
    """A callback that notes the rows evaluated so far; with batches of unknown size those that have been ``read``."""
    import keras

    def note(batch: int, logs: Any) -> None:
        reporter.update(read() if batch_size is None else min(read(), (batch + 1) * batch_size))

    return keras.callbacks.LambdaCallback(on_test_batch_end=note, async_safe=True)  # see above


def _exchanging(exchange: Exchange, batch_range: BatchRange, epoch: EpochBatches, started: float) -> Any:
    """A callback that exchanges weights every ``exchange.every`` batches, and at the end of the epoch."""
    import keras

    class Exchanging(keras.callbacks.Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self._done = self._exchanged = 0
            self._stopped = False

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            # Keras's batch index is wrong if the last call of an epoch runs fewer steps, so count them here.
            self._done, _ = epoch.trained(self._done + int(self._model.steps_per_execution))
            if exchange.stopped:
                self._stopped = self._model.stop_training = True
            elif self._is_due and not epoch.is_last(self._done):
                self._exchange(None)

        @property
        def _is_due(self) -> bool:
            return exchange.every is not None and (batch_range.first + self._done) % exchange.every == 0

        def on_epoch_end(self, number: int, logs: Any = None) -> None:
            if not self._stopped:
                self._exchange(dict(logs or {}))

        def _exchange(self, logs: dict[str, Any] | None) -> None:
            model = self.model  # with JAX, accessing this property copies the weights back into their variables
            rows = epoch.trained(self._done)[1] - epoch.trained(self._exchanged)[1]
            point = ExchangePoint(
                epoch=batch_range.epoch,
                batch=batch_range.first + self._done,
                steps=self._done - self._exchanged,
                rows=rows,
                learning_rate=model_state.learning_rate(model),
                seconds=time.perf_counter() - started,
                metrics=metrics.take(model),
                logs=logs,
                iterations=tuple(iterations(model)),
            )
            optimizer = None if logs is None or not exchange.keeps_optimizer else model_state.take_optimizer(model)
            result = exchange(model_state.take_weights(model), point, optimizer)
            self._exchanged = self._done
            model_state.put_weights(result.weights, model)
            if result.settings is not None:
                model_state.put_settings(result.settings, model)
            if result.stop:
                self._stopped = model.stop_training = True

    return Exchanging()


def lasting(callbacks: Sequence[Any]) -> list[Any]:
    """Wrap callbacks for a training of several calls of ``fit``: ``on_train_begin`` is called only in the first one.

    Where a call is a part of an epoch, the caller sets before it whether the epoch ``begins`` and whether it ``ends`` there.

    Returns:
        A list of one callback, whose ``end`` the caller must call after the last ``fit``; empty without callbacks.
    """
    import keras

    class Lasting(keras.callbacks.CallbackList):  # type: ignore[misc]
        begun = False
        begins = ends = True
        _logs: Any = None

        def on_train_begin(self, logs: Any = None) -> None:
            if not self.begun:
                self.begun = True
                super().on_train_begin(logs)

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if self.begins:
                super().on_epoch_begin(epoch, logs)

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            for callback in self.callbacks if self.ends else ():  # with these logs, since callbacks may add to them
                callback.on_epoch_end(epoch, logs)

        def on_train_end(self, logs: Any = None) -> None:
            self._logs = logs

        def end(self) -> None:
            if self.begun:  # not if a retried task found nothing left to train
                super().on_train_end(self._logs)

    return [Lasting(list(callbacks))] if callbacks else []


def _flatten(callbacks: Sequence[Any]) -> Iterator[Any]:
    for callback in callbacks:
        yield from getattr(callback, "callbacks", (callback,))
