"""Models that several threads use: one call at a time trains a model, and its state is read and written as a whole."""

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
"""The ids of the models and trainable variables that are being trained, and the thread that trains them."""


def locks_state(function: Callable[P, R]) -> Callable[P, R]:
    """Call a function that reads or writes the weights, optimizer variables or metrics of a model while no other one does.

    So a thread that predicts or evaluates while another trains gets the state of one finished round, not parts of two, and
    neither resets the metrics of the other. Such a function waits neither for Spark nor for a callback.
    """

    @functools.wraps(function)
    def locked(*args: P.args, **kwargs: P.kwargs) -> R:
        with _state:
            return function(*args, **kwargs)

    return locked


@contextmanager
def training(models: Sequence[Any]) -> Iterator[None]:
    """Train Keras models that no other call of ``fit`` trains meanwhile, also not through a model that shares layers.

    A second call is refused and does not wait: the first one may be waiting for it, in a callback for instance.

    Args:
        models: The models.

    Raises:
        ModelError: A model, or a variable that it trains, is being trained already.
    """
    mine = threading.get_ident()
    claimed = {id(part): model for model in models for part in (model, *model.trainable_variables)}
    with _registry:
        for key, model in claimed.items():
            if key in _training:
                raise ModelError(_refusal(model, _training[key] == mine))
        _training.update(dict.fromkeys(claimed, mine))
    try:
        yield
    finally:
        with _registry:
            for key in claimed:
                del _training[key]


def _refusal(model: Any, is_nested: bool) -> str:
    if is_nested:
        return (
            f"fit was called from a callback of a fit that is training the same model {model.name!r}: the outer call would "
            "overwrite what the inner one trains. Call fit when the outer one has returned, or train a copy "
            "(keras.models.clone_model). predict and evaluate of the callback's own model, self.model, may be called there."
        )
    return (
        f"another thread is training the model {model.name!r}, or one that shares layers with it, and each of the two calls "
        "of fit would overwrite what the other trains. Call them one after the other, or give each a model of its own "
        "(keras.models.clone_model), as KerasEstimator does. predict and evaluate may be called meanwhile."
    )
