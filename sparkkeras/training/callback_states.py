"""The states of callbacks in checkpoints: those of Keras's own, and of callbacks with ``get_state`` and ``set_state``."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import keras

from sparkkeras.checkpoints import values
from sparkkeras.errors import ConfigurationError, warn

_ATTRIBUTES: dict[type, tuple[str, ...]] = {
    keras.callbacks.EarlyStopping: ("wait", "stopped_epoch", "best", "best_weights", "best_epoch"),
    keras.callbacks.ReduceLROnPlateau: ("wait", "best", "cooldown_counter"),
    keras.callbacks.ModelCheckpoint: ("best",),
    keras.callbacks.TensorBoard: ("_global_train_batch", "_global_test_batch", "_previous_epoch_iterations"),
    keras.callbacks.SwapEMAWeights: ("_ema_weights_in_model",),
    keras.callbacks.CSVLogger: ("keys",),
}
"""The attributes in which Keras's callbacks keep what they learn during training."""
if hasattr(keras.callbacks, "OrbaxCheckpoint"):  # not in all versions of Keras
    _ATTRIBUTES[keras.callbacks.OrbaxCheckpoint] = ("best",)

_SIZE = "size"
"""The size of a CSVLogger's file."""


def check(callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Check that callbacks can be resumed.

    Raises:
        ConfigurationError: A callback has only one of ``get_state`` and ``set_state``, or resumes training itself.
    """
    for callback in callbacks:
        name = type(callback).__name__
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise ConfigurationError(f"{name} and checkpoint= both resume training: leave {name} out.")
        if hasattr(callback, "get_state") != hasattr(callback, "set_state"):
            raise ConfigurationError(
                f"{name} has only one of get_state() and set_state(state): with both, its state is in checkpoints; with "
                "none, it begins anew when training is resumed."
            )


def take(callbacks: Sequence[keras.callbacks.Callback]) -> list[dict[str, Any]]:
    """Copy the states of callbacks that have one, as values for a checkpoint.

    Raises:
        ConfigurationError: ``get_state`` returned a value that cannot be stored.
    """
    return [
        {"class": type(callback).__name__, "attributes": _attributes(callback), "own": _own(callback)}
        for callback in callbacks
        if isinstance(callback, tuple(_ATTRIBUTES)) or hasattr(callback, "get_state")
    ]


def put(states: Sequence[Mapping[str, Any]], callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Restore the states of callbacks: of those of the same class, in the same order."""
    for callback, state in _matched(states, callbacks):
        for name, value in state["attributes"].items():
            if name != _SIZE:
                setattr(callback, name, copy.copy(value))
        if hasattr(callback, "set_state"):
            callback.set_state(copy.deepcopy(state["own"]))


def warn_of_missing(states: Sequence[Mapping[str, Any]], callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Warn of states for which there is no callback."""
    missing = Counter(state["class"] for state in states) - Counter(type(callback).__name__ for callback in callbacks)
    if missing:
        warn(
            f"the checkpoint has the state of {', '.join(sorted(missing))}, but callbacks= has no such callback: what it "
            "did before the interruption is not continued."
        )


@contextmanager
def appending(states: Sequence[Mapping[str, Any]], callbacks: Sequence[keras.callbacks.Callback]) -> Iterator[None]:
    """Within this context, CSVLoggers open their files to append to them, behind the last line of the checkpoint."""
    loggers = [
        (callback, callback.append, state["attributes"].get(_SIZE))
        for callback, state in _matched(states, callbacks)
        if isinstance(callback, keras.callbacks.CSVLogger)
    ]
    for logger, _, size in loggers:
        logger.append = True
        path = Path(logger.filename)
        if size is not None and path.is_file() and path.stat().st_size > size:
            with path.open("r+b") as file:
                file.truncate(size)  # epochs that are trained again
    try:
        yield
    finally:
        for logger, append, _ in loggers:
            logger.append = append


def _attributes(callback: keras.callbacks.Callback) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind, names in _ATTRIBUTES.items():
        if isinstance(callback, kind):
            found |= {name: copy.copy(vars(callback)[name]) for name in names if name in vars(callback)}
    if isinstance(callback, keras.callbacks.CSVLogger):
        with suppress(OSError):
            found[_SIZE] = Path(callback.filename).stat().st_size
    if "_previous_epoch_iterations" in found:  # a tensor
        found["_previous_epoch_iterations"] = int(found["_previous_epoch_iterations"])
    return found


def _own(callback: keras.callbacks.Callback) -> Any:
    if not hasattr(callback, "get_state"):
        return None
    state = copy.deepcopy(callback.get_state())
    values.pack(state, f"{type(callback).__name__}.get_state()")  # raises an error now, and not in the thread that writes
    return state


def _matched(
    states: Sequence[Mapping[str, Any]], callbacks: Sequence[keras.callbacks.Callback]
) -> list[tuple[keras.callbacks.Callback, Mapping[str, Any]]]:
    """Pairs of callbacks and their states: the first callback of a class has the first state of this class, and so on."""
    seen: Counter[str] = Counter()
    matched = []
    for callback in callbacks:
        name = type(callback).__name__
        own = [state for state in states if state["class"] == name]
        if seen[name] < len(own):
            matched.append((callback, own[seen[name]]))
        seen[name] += 1
    return matched
