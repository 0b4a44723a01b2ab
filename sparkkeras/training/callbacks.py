"""Keras callbacks on the driver: they run on the master model once per epoch, with metrics over the full dataset."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from sparkkeras.errors import ConfigurationError, known_names, warn
from sparkkeras.events import EpochEnded, EpochStarted, EventListener, Events
from sparkkeras.modeling import metrics
from sparkkeras.modeling.optimizers import inner_optimizer
from sparkkeras.modeling.outside import Unchanging
from sparkkeras.modeling.state import has_settable_rate
from sparkkeras.worker.trainer import batch_hooks, overrides

_SAVING = (keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore)

_SETTING_RATES = (keras.callbacks.ReduceLROnPlateau, keras.callbacks.LearningRateScheduler)


def check_callbacks(callbacks: Sequence[keras.callbacks.Callback], model: keras.Model) -> None:
    """Check the callbacks of the driver.

    Raises:
        ConfigurationError: A callback needs batches on the driver, or does not fit the model.
    """
    for callback in callbacks:
        name = type(callback).__name__
        if isinstance(callback, _SAVING) and callback.save_freq != "epoch":
            raise ConfigurationError(
                f"{name}(save_freq={callback.save_freq!r}) counts batches, but batches run on the workers, not on the "
                'driver: use save_freq="epoch".'
            )
        if isinstance(callback, keras.callbacks.TensorBoard) and callback.update_freq != "epoch":
            raise ConfigurationError(
                f"{name}(update_freq={callback.update_freq!r}) logs batches, but batches run on the workers, not on the "
                'driver: use update_freq="epoch".'
            )
        if isinstance(callback, _SETTING_RATES) and model.optimizer is not None and not has_settable_rate(model):
            optimizer = inner_optimizer(model)
            raise ConfigurationError(
                f"{name} sets the learning rate, but the optimizer has a learning rate schedule "
                f"({type(optimizer).__name__} with {type(optimizer._learning_rate).__name__}): compile the model with a "
                "number as the learning rate, or leave the callback out."
            )
        hooks = batch_hooks(callback)
        if hooks and not isinstance(callback, EventListener):  # which gets the progress of workers by events
            warn(
                f"{name}.{hooks[0]} is never called: callbacks run on the driver, once per epoch, and batches run on the "
                "workers. Pass the callback as worker_callbacks= to run it there."
            )


def has_monitor(callback: keras.callbacks.Callback) -> bool:
    """Whether a built-in Keras callback acts on a metric of the logs, its ``monitor``.

    False for subclasses that override how the metric is read, since they may monitor values from elsewhere.
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
    """Check that callbacks monitor metrics that training reports.

    For models whose metric names are not known yet, only check that Keras can infer whether to minimize or maximize them.

    Args:
        models: The models to train.
        custom_objects: Custom classes and functions by name, where they cannot be found from the models.
        callbacks: The callbacks on the driver.
        worker_callbacks: The callbacks on the workers.
        validates: Whether there is validation.
        workers_validate: Whether the callbacks on the workers get validation metrics, as in ensembles; otherwise only those
            on the driver do.

    Raises:
        ConfigurationError: A callback monitors an unknown metric, or one that Keras cannot infer the direction of.
    """
    if not any(map(has_monitor, [*callbacks, *worker_callbacks])):
        return
    for model in models:
        named = metrics.with_names(model, custom_objects)
        names = None if named is None else metrics.log_names(named)
        if named is None or names is None:
            if metrics.has_own_names(model):
                for argument, several in (("callbacks", callbacks), ("worker_callbacks", worker_callbacks)):
                    check_directions(argument, several, model)
            continue
        check_names("callbacks", callbacks, names, validates)
        if workers_validate:
            check_names("worker_callbacks", worker_callbacks, names, validates)
        else:
            elsewhere = "callbacks on a worker see the training metrics of that worker only, so pass it as callbacks="
            check_names("worker_callbacks", worker_callbacks, names, False, elsewhere)
        for argument, several in (("callbacks", callbacks), ("worker_callbacks", worker_callbacks)):
            check_directions(argument, several, named)


def check_directions(argument: str, callbacks: Sequence[keras.callbacks.Callback], model: keras.Model) -> None:
    """Check that Keras can infer whether to minimize or maximize the metrics that callbacks with ``mode="auto"`` monitor.

    Keras itself raises only after the first epoch.

    Args:
        argument: The name of the argument that the callbacks were passed as.
        callbacks: The callbacks.
        model: A model whose metrics have names.

    Raises:
        ConfigurationError: Keras cannot infer the direction of a metric.
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
                f"{argument}: {name}(monitor={monitor!r}, mode={callback.mode!r}): Keras cannot infer whether a larger or a "
                f'smaller {monitor!r} is better. Set mode="max" or mode="min": {name}(monitor={monitor!r}, mode="max").'
            ) from error


def check_names(
    argument: str,
    callbacks: Sequence[keras.callbacks.Callback],
    names: Sequence[str],
    validates: bool,
    without: str = "pass validation_split=, validation_data= or validation_col=",
) -> None:
    """Check that callbacks monitor metrics that training reports. Keras itself notices only after the first epoch.

    Args:
        argument: The name of the argument that the callbacks were passed as.
        callbacks: The callbacks.
        names: The names of the training metrics.
        validates: Whether the logs also contain validation metrics.
        without: The advice for a callback that monitors validation if there is none.

    Raises:
        ConfigurationError: A callback monitors an unknown metric.
    """
    known = [*names, *(f"val_{name}" for name in names if validates)]
    if any(isinstance(callback, _SETTING_RATES) for callback in callbacks):
        known.append("learning_rate")
    for callback in callbacks:
        if has_monitor(callback) and callback.monitor not in known:
            received = f"{argument}: {type(callback).__name__}(monitor={callback.monitor!r})"
            if callback.monitor.removeprefix("val_") in names:
                raise ConfigurationError(
                    f"{received} monitors a validation metric, but there is no validation: {without}, or monitor one of "
                    f"{', '.join(map(repr, sorted(known)))}."
                )
            raise ConfigurationError(
                f"{received} monitors a metric that training does not report. {known_names(callback.monitor, known)}"
            )
        if overrides(callback, "on_epoch_end"):
            return  # it may add to the logs that the following callbacks get


def as_callbacks(name: str, callbacks: object) -> list[keras.callbacks.Callback]:
    """One or several callbacks as a list.

    Raises:
        ConfigurationError: A value is not a callback.
    """
    given = list(callbacks) if isinstance(callbacks, (list, tuple)) else [] if callbacks is None else [callbacks]
    for callback in given:
        if isinstance(callback, type) and issubclass(callback, keras.callbacks.Callback):
            raise ConfigurationError(
                f"{name}: {callback.__name__} is a class; expected an object: {callback.__name__}(...)."
            )
        if not isinstance(callback, keras.callbacks.Callback):
            raise ConfigurationError(f"{name}: expected keras.callbacks.Callback objects, received {callback!r}.")
    return given


class DriverCallbacks:
    """The callbacks of one ``fit``, including a `keras.callbacks.History`.

    Args:
        callbacks: The user's callbacks.
        model: The master model.
        epochs: The epoch at which training ends.
        batches: The number of batches per epoch of the worker with the most batches; ``None`` if it is unknown.
        events: Get the epochs, before the user's callbacks.

    Attributes:
        given: The user's callbacks.
    """

    def __init__(
        self,
        callbacks: Sequence[keras.callbacks.Callback],
        model: keras.Model,
        epochs: int,
        batches: int | None,
        events: Events,
    ) -> None:
        self.given = list(callbacks)
        self._list = keras.callbacks.CallbackList(
            self.given, add_history=True, add_progbar=False, model=model, epochs=epochs, verbose=0, steps=batches
        )
        self._logs: dict[str, Any] = {}
        self._model, self._events = model, events
        self._unchanging: Unchanging | None = None

    @property
    def history(self) -> keras.callbacks.History:
        """The logs that were passed to `on_epoch_end` so far."""
        history: keras.callbacks.History = self._model.history
        return history

    @property
    def restored_epoch(self) -> int | None:
        """The epoch at which a callback (BackupAndRestore) resumes training; set by `on_train_begin`. ``None``: none."""
        epoch: int | None = self._model._initial_epoch
        return epoch

    @property
    def logs(self) -> dict[str, Any]:
        """The logs of the last epoch."""
        return self._logs

    def restore(self, epochs: Sequence[int], history: Mapping[str, Sequence[Any]], logs: Mapping[str, Any]) -> None:
        """Continue the `history` of an earlier process, after `on_train_begin`."""
        self.history.epoch = list(epochs)
        self.history.history = {name: list(values) for name, values in history.items()}
        self._logs = dict(logs)

    def on_train_begin(self) -> None:
        """Call the callbacks at the beginning of training."""
        self._model.stop_training = False
        self._model._initial_epoch = None
        self._list.on_train_begin()

    def on_train_end(self) -> None:
        """Call the callbacks at the end of training."""
        self._list.on_train_end(self._logs)

    def on_epoch_begin(self, epoch: int) -> None:
        """Call the callbacks at the beginning of an epoch; they may set weights, or the learning rate."""
        self._unchanging = self._unchanging or Unchanging(self._model)  # with the values of a checkpoint
        self._events.emit(EpochStarted(epoch))
        self._list.on_epoch_begin(epoch)
        self._unchanging.check()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Call the callbacks at the end of an epoch, with metrics over the full dataset."""
        self._logs = logs
        self._events.emit(EpochEnded(epoch, logs))
        self._list.on_epoch_end(epoch, logs)

    def validated(self, find_logs: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The metrics of validation by their names in the logs, found between callbacks, which may swap the weights."""
        self._list.on_test_begin()
        logs = find_logs()
        self._list.on_test_end(logs)
        return {f"val_{name}": value for name, value in logs.items()}
