"""Keras callbacks, driven from the driver on the master model: once an epoch, with the figures of the whole data."""

from __future__ import annotations

import copy
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from sparkkeras.errors import ConfigurationError, known_names
from sparkkeras.modeling import metrics
from sparkkeras.modeling.archive import has_settable_rate, inner_optimizer
from sparkkeras.scoring.inference import as_line
from sparkkeras.worker.trainer import batch_hooks, overrides

_SAVING = (keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore)


_SETTING_RATES = (keras.callbacks.ReduceLROnPlateau, keras.callbacks.LearningRateScheduler)


def check_callbacks(callbacks: object, model: keras.Model) -> list[keras.callbacks.Callback]:
    """The callbacks as a list.

    Raises:
        ConfigurationError: One is no callback, would need batches on the driver, or cannot work on this model.
    """
    given = as_callbacks("callbacks", callbacks)
    for callback in given:
        name = type(callback).__name__
        if isinstance(callback, _SAVING) and callback.save_freq != "epoch":
            raise ConfigurationError(
                f"{name}(save_freq={callback.save_freq!r}) counts batches, but batches run on the workers: use "
                'save_freq="epoch".'
            )
        if isinstance(callback, keras.callbacks.TensorBoard) and callback.update_freq != "epoch":
            raise ConfigurationError(
                f"{name}(update_freq={callback.update_freq!r}) writes batches, but batches run on the workers: use "
                'update_freq="epoch".'
            )
        if isinstance(callback, _SETTING_RATES) and model.optimizer is not None and not has_settable_rate(model):
            optimizer = inner_optimizer(model)
            raise ConfigurationError(
                f"{name} sets the learning rate, but the optimizer has a schedule ({type(optimizer).__name__} with "
                f"{type(optimizer._learning_rate).__name__}), which sets it too: give the optimizer a number."
            )
        hooks = batch_hooks(callback)
        if hooks:
            warnings.warn(
                f"{name}.{hooks[0]} is never called: callbacks run on the driver, once an epoch, and batches run on the "
                "workers. Give the callback as worker_callbacks= to run it there.",
                stacklevel=4,
            )
    return given


def has_monitor(callback: keras.callbacks.Callback) -> bool:
    """Whether a callback of Keras's does something when a metric of the logs says so.

    A subclass that takes logs or the metric from elsewhere is left alone.
    """
    if any(hasattr(callback, hook) and overrides(callback, hook) for hook in ("on_epoch_end", "get_monitor_value")):
        return False
    if isinstance(callback, keras.callbacks.ModelCheckpoint):
        return bool(callback.save_best_only)
    return isinstance(callback, (keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau))


def check_monitors(
    models: Sequence[keras.Model],
    custom_objects: Mapping[str, Any],
    callbacks: Sequence[keras.callbacks.Callback],
    worker_callbacks: Sequence[keras.callbacks.Callback],
    validates: bool,
    workers_validate: bool,
) -> None:
    """Refuse callbacks that monitor what training does not report, as far as the metrics' names are known yet.

    Args:
        models: The models that are trained.
        custom_objects: Their custom classes and functions by name, where they cannot be found in them.
        callbacks: The callbacks of the driver.
        worker_callbacks: The callbacks of the workers.
        validates: Whether there is validation.
        workers_validate: Whether the workers' callbacks get its metrics, rather than the driver's.

    Raises:
        ConfigurationError: One monitors another name, or a metric of which Keras does not know whether more is better.
    """
    if not any(map(has_monitor, [*callbacks, *worker_callbacks])):
        return
    for model in models:
        named = metrics.with_names(model, custom_objects)
        names = None if named is None else metrics.log_names(named)
        if named is None or names is None:
            continue
        check_names("callbacks", callbacks, names, validates)
        if workers_validate:
            check_names("worker_callbacks", worker_callbacks, names, validates)
        else:
            elsewhere = "callbacks of a worker see its own training only, so give it as callbacks="
            check_names("worker_callbacks", worker_callbacks, names, False, elsewhere)
        for argument, several in (("callbacks", callbacks), ("worker_callbacks", worker_callbacks)):
            check_directions(argument, several, named)


def check_directions(argument: str, callbacks: Sequence[keras.callbacks.Callback], model: keras.Model) -> None:
    """Refuse callbacks with ``mode="auto"`` on a metric of which Keras does not know whether more is better.

    Keras itself notices when the first epoch is over.

    Args:
        argument: What the callbacks were given as.
        callbacks: The callbacks; each monitors a metric that training reports.
        model: A model whose metrics have names.

    Raises:
        ConfigurationError: Keras does not know what is better.
    """
    for callback in callbacks:
        if not has_monitor(callback) or callback.monitor_op is not None:
            continue
        tried = copy.copy(callback)
        keras.callbacks.Callback.set_model(tried, model)
        try:
            tried._set_monitor_op()
        except ValueError as error:
            name, monitor = type(callback).__name__, callback.monitor
            raise ConfigurationError(
                f"{argument}: {name}(monitor={monitor!r}, mode={callback.mode!r}): Keras does not know whether more or less "
                f'of {monitor!r} is better. Give mode="max" or mode="min": {name}(monitor={monitor!r}, mode="max").'
            ) from error


def check_names(
    argument: str,
    callbacks: Sequence[keras.callbacks.Callback],
    names: Sequence[str],
    validates: bool,
    without: str = "give validation_split=, validation_data= or validation_col=",
) -> None:
    """Refuse callbacks that monitor what training does not report. Keras notices when the first epoch is over.

    Args:
        argument: What the callbacks were given as.
        callbacks: The callbacks.
        names: The metrics of training.
        validates: Whether there are figures of validation beside them.
        without: What to do where there are none.

    Raises:
        ConfigurationError: One monitors another name.
    """
    known = [*names, *(f"val_{name}" for name in names if validates)]
    if any(isinstance(callback, _SETTING_RATES) for callback in callbacks):
        known.append("learning_rate")
    for callback in callbacks:
        if has_monitor(callback) and callback.monitor not in known:
            received = f"{argument}: {type(callback).__name__}(monitor={callback.monitor!r})"
            if callback.monitor.removeprefix("val_") in names:
                raise ConfigurationError(
                    f"{received} monitors validation, and there is none: {without}, or monitor one of "
                    f"{', '.join(map(repr, sorted(known)))}."
                )
            raise ConfigurationError(
                f"{received} monitors a metric that training does not report. {known_names(callback.monitor, known)}"
            )
        if overrides(callback, "on_epoch_end"):
            return  # it may add to the logs that the callbacks behind it get


def as_callbacks(name: str, callbacks: object) -> list[keras.callbacks.Callback]:
    """One callback or several as a list.

    Raises:
        ConfigurationError: One is no callback.
    """
    given = list(callbacks) if isinstance(callbacks, (list, tuple)) else [] if callbacks is None else [callbacks]
    for callback in given:
        if not isinstance(callback, keras.callbacks.Callback):
            raise ConfigurationError(f"{name}: expected keras.callbacks.Callback objects, received {callback!r}.")
    return given


class DriverCallbacks:
    """The callbacks of one ``fit``, with a `keras.callbacks.History` among them.

    Args:
        callbacks: The person's.
        model: The master model.
        epochs: Up to which epoch the run goes.
        batches: The batches in an epoch of the busiest worker.
        progress: What reports how far the run is.
    """

    def __init__(
        self,
        callbacks: Sequence[keras.callbacks.Callback],
        model: keras.Model,
        epochs: int,
        batches: int,
        progress: Progress,
    ) -> None:
        self._progress = progress
        self._list = keras.callbacks.CallbackList(
            [progress, *callbacks], add_history=True, add_progbar=False, model=model, epochs=epochs, verbose=0, steps=batches
        )
        self._logs: dict[str, Any] = {}
        self._model = model

    @property
    def history(self) -> keras.callbacks.History:
        """The logs that `on_epoch_end` was given so far."""
        history: keras.callbacks.History = self._model.history
        return history

    @property
    def restored_epoch(self) -> int | None:
        """The epoch that a callback (BackupAndRestore) wants training to go on at, once training has begun."""
        epoch: int | None = self._model._initial_epoch
        return epoch

    def on_train_begin(self) -> None:
        """Training begins."""
        self._model.stop_training = False
        self._model._initial_epoch = None
        self._list.on_train_begin()

    def on_train_end(self) -> None:
        """Training ends."""
        self._list.on_train_end(self._logs)

    def on_epoch_begin(self, epoch: int) -> None:
        """An epoch begins; callbacks may set the learning rate now."""
        self._list.on_epoch_begin(epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """An epoch has ended, with the figures of the whole data."""
        self._logs = logs
        self._list.on_epoch_end(epoch, logs)

    def on_test_begin(self) -> None:
        """Validation begins; callbacks may exchange the weights now."""
        self._list.on_test_begin()

    def on_test_end(self, logs: dict[str, Any]) -> None:
        """Validation has ended, with its figures."""
        self._list.on_test_end(logs)

    def on_round_end(self, rows: int, done: float, startup: float = 0.0) -> None:
        """Training went on: by ``rows``, up to ``done`` of the epoch; ``startup`` seconds of it were for loading Keras."""
        self._progress.on_round_end(rows, done, startup)

    def on_pace(self, rows: int, seconds: float, told: str, startup: float = 0.0) -> None:
        """An epoch that ends now had so many rows in so many seconds, after ``startup`` seconds in which workers started.

        ``told`` is what else there is to report of it.
        """
        self._progress.on_pace(rows, seconds, told, startup)


class Progress(keras.callbacks.Callback):  # type: ignore[misc]
    """Reports on standard output how far training is.

    Args:
        verbose: 0 says nothing, 1 keeps a line alive within the epoch, 2 writes one line an epoch.
        epochs: Up to which epoch the run goes.
        num_workers: How many workers train.
    """

    _WIDTH = 20
    _TOLD_STARTUP = 0.1

    def __init__(self, verbose: int, epochs: int, num_workers: int) -> None:
        super().__init__()
        self._verbose, self._epochs, self._num_workers = verbose, epochs, num_workers
        self._rows = 0
        self._started = 0.0
        self._seconds: float | None = None
        self._startup = 0.0
        self._told = ""

    def on_train_begin(self, logs: Any = None) -> None:
        """Say what takes a while."""
        if self._verbose:
            self._write(f"Training on {self._workers()}, which load Keras first if they are new.\n")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Announce the epoch."""
        self._rows, self._started, self._startup = 0, time.perf_counter(), 0.0
        self._seconds, self._told = None, ""
        if self._verbose:
            self._write(f"Epoch {epoch + 1}/{self._epochs}\n")

    def on_round_end(self, rows: int, done: float, startup: float = 0.0) -> None:
        """Move the bar. ``startup`` seconds of the time since the last round were for loading Keras."""
        self._rows += rows
        self._startup += startup
        if self._verbose == 1 and done < 1 and sys.stdout.isatty():
            filled = int(done * self._WIDTH)
            self._write(f"\r[{'=' * filled}{'.' * (self._WIDTH - filled)}] {self._pace()}")

    def on_pace(self, rows: int, seconds: float, told: str, startup: float = 0.0) -> None:
        """Take figures of the epoch that ends that are better than the ones counted here; ``seconds`` without start-up."""
        self._rows, self._seconds, self._startup, self._told = rows, seconds, startup, f" - {told}"

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Print the metrics."""
        if not self._verbose:
            return
        start = "\r\033[K" if self._verbose == 1 and sys.stdout.isatty() else ""
        self._write(f"{start}{self._pace()} - {as_line(logs or {})}\n")

    def _pace(self) -> str:
        seconds = time.perf_counter() - self._started - self._startup if self._seconds is None else self._seconds
        startup = f" + {self._startup:.1f}s start-up" if self._startup >= self._TOLD_STARTUP else ""
        return f"{self._workers()} - {seconds:.1f}s{startup} - {self._rows / max(seconds, 1e-9):,.0f} rows/s{self._told}"

    def _workers(self) -> str:
        return f"{self._num_workers} worker{'s' if self._num_workers != 1 else ''}"

    @staticmethod
    def _write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
