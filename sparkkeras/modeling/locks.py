"""Locks for models used by several threads: one thread trains a model at a time, and state is read and set atomically."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from sparkkeras.errors import ModelError

P = ParamSpec("P")
R = TypeVar("R")

_state = threading.RLock()
_registry = threading.Lock()
_training: dict[int, int] = {}
"""The thread ID by the ``id()`` of each model and trainable variable that is being trained."""


def locks_state(function: Callable[P, R]) -> Callable[P, R]:
    """Serialize all calls of functions that read or write the weights, optimizer variables or metrics of a model.

    So a thread that predicts or evaluates while another one trains gets the state of one completed round, not parts of two,
    and neither resets the metrics of the other. Such a function must not wait for Spark or for a callback.
    """

    @functools.wraps(function)
    def locked(*args: P.args, **kwargs: P.kwargs) -> R:
        with _state:
            return function(*args, **kwargs)

    return locked


@contextmanager
def training(models: Sequence[Any]) -> Iterator[None]:
    """Mark models as being trained, so that no other call of ``fit`` trains them or models that share layers with them.

    A second call fails instead of waiting, because the first call may be waiting for it, for instance in a callback.

    Args:
        models: The models to train.

    Raises:
        ModelError: A model, or one of its trainable variables, is already being trained.
    """
    mine = threading.get_ident()
    claimed = {id(part): model for model in models for part in (model, *model.trainable_variables)}
    with _registry:
        for key, model in claimed.items():
            if key in _training:
                raise ModelError(_conflict_message(model, _training[key] == mine))
        _training.update(dict.fromkeys(claimed, mine))
    try:
        yield
    finally:
        with _registry:
            for key in claimed:
                del _training[key]


def _conflict_message(model: Any, is_nested: bool) -> str:
    if is_nested:
        return (
            f"fit was called from a callback of a fit that is training the same model {model.name!r}: the outer call would "
            "overwrite the weights that the inner one trains. Call fit after the outer one has returned, or train a copy "
            "(keras.models.clone_model). In a callback, you can call self.model.predict and self.model.evaluate."
        )
    return (
        f"another thread is training the model {model.name!r}, or one that shares layers with it, and each of the two calls "
        "of fit would overwrite the weights of the other. Call them one after the other, or use a copy of the model for "
        "each (keras.models.clone_model), as KerasEstimator does. You can call predict and evaluate during training."
    )
