"""The state of a model: its weights and optimizer variables as flat vectors, its learning rate and iterations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from sparkkeras.modeling.locks import locks_state
from sparkkeras.weights import Flat, Layout


@dataclass(frozen=True)
class ModelState:
    """A snapshot of a model's weights and optimizer variables."""

    weights: Flat
    optimizer: Flat

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return self.weights.nbytes + self.optimizer.nbytes

    @classmethod
    @locks_state
    def take(cls, model: keras.Model) -> ModelState:
        """Copy the state from a model."""
        return cls(take_weights(model), _take(optimizer_variables(model)))

    @locks_state
    def put(self, model: keras.Model) -> None:
        """Copy the state into a model with the same variable shapes and dtypes."""
        put_weights(self.weights, model)
        _put(self.optimizer, optimizer_variables(model))


@dataclass(frozen=True)
class ModelWeights:
    """A snapshot of a model's weights without the optimizer, for prediction."""

    weights: Flat

    @classmethod
    def take(cls, model: keras.Model) -> ModelWeights:
        """Copy the weights from a model."""
        return cls(take_weights(model))

    def put(self, model: keras.Model) -> None:
        """Copy the weights into a model with the same variable shapes and dtypes."""
        put_weights(self.weights, model)


def floatx() -> str:
    """Keras's ``floatx``, or float32 if NumPy does not support it (bfloat16)."""
    name = str(keras.backend.floatx())
    return name if name in {"float16", "float32", "float64"} else "float32"


def weight_variables(model: keras.Model) -> list[Any]:
    """The weights: trainable ones first, then non-trainable ones."""
    return [*model.trainable_weights, *model.non_trainable_weights]


def optimizer_variables(model: keras.Model) -> list[Any]:
    """All variables of the optimizer, with iterations and learning rate. Builds the optimizer if necessary."""
    optimizer = optimizer_of(model)
    if optimizer is None:
        return []
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    return list(optimizer.variables)


def trainable_size(model: keras.Model) -> int:
    """The number of trainable values, which come first in the weight vector."""
    return sum(int(np.prod(weight.shape, dtype=np.int64)) for weight in model.trainable_weights)


@locks_state
def take_weights(model: keras.Model) -> Flat:
    """Copy the weights from a model."""
    return _take(weight_variables(model))


@locks_state
def put_weights(weights: Flat, model: keras.Model) -> None:
    """Copy weights into a model with the same variable shapes and dtypes."""
    _put(weights, weight_variables(model))


def advanced(state: ModelState, model: keras.Model, steps: int, learning_rate: float | None = None) -> ModelState:
    """The state of a worker that takes over after another one. ``model`` is left in this state.

    Args:
        state: Current weights, and the optimizer variables from the start of training.
        model: A model with the same variable shapes and dtypes.
        steps: The steps made since the start; the optimizer's iterations, and so its schedules, continue after them.
        learning_rate: The learning rate, if it was changed since the start.
    """
    state.put(model)
    if steps:
        set_iterations(model, iterations(model) + steps)
        optimizer = inner_optimizer(model)
        if getattr(optimizer, "use_ema", False):  # restart the moving averages from the current weights
            for average, weight in zip(optimizer._model_variables_moving_average, model.trainable_variables, strict=True):
                average.assign(weight)
    if learning_rate is not None and has_settable_rate(model):
        model.optimizer.learning_rate = learning_rate
    return ModelState.take(model)


def iterations(model: keras.Model) -> int:
    """The optimizer's number of iterations; 0 without an optimizer."""
    return 0 if optimizer_of(model) is None else int(keras.ops.convert_to_numpy(inner_optimizer(model)._iterations))


def set_iterations(model: keras.Model, number: int) -> None:
    """Set the optimizer's number of iterations."""
    for optimizer in {id(each): each for each in (model.optimizer, inner_optimizer(model))}.values():
        if optimizer is not None:
            optimizer._iterations.assign(number)


def learning_rate(model: keras.Model) -> float:
    """The optimizer's learning rate at its current iteration; 0 without an optimizer."""
    return 0.0 if model.optimizer is None else float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))


def has_settable_rate(model: keras.Model) -> bool:
    """Whether the optimizer's learning rate is a variable that can be set, and not a schedule or a function."""
    return isinstance(getattr(inner_optimizer(model), "_learning_rate", None), keras.Variable)


def inner_optimizer(model: keras.Model) -> Any:
    """The optimizer that updates the weights: the inner one of a ``LossScaleOptimizer`` (mixed precision)."""
    optimizer = optimizer_of(model)
    return getattr(optimizer, "inner_optimizer", optimizer)


def optimizer_of(model: keras.Model) -> Any:
    """The optimizer that the model was compiled with, or ``None``."""
    return getattr(model, "optimizer", None)


def reseed(model: keras.Model, seed: Sequence[int]) -> None:
    """Reset all seed generators of a model (dropout, augmentation layers) from ``seed``."""
    states = [v for v in model.non_trainable_variables if v.name == "seed_generator_state"]
    for number, state in enumerate(states):
        drawn = np.random.SeedSequence([*seed, number]).generate_state(int(np.prod(state.shape)))
        state.assign((drawn & 0x7FFFFFFF).astype(keras.backend.standardize_dtype(state.dtype)).reshape(state.shape))


def _take(variables: Sequence[Any]) -> Flat:
    return layout(variables).pack([keras.ops.convert_to_numpy(variable) for variable in variables])


def _put(flat: Flat, variables: Sequence[Any]) -> None:
    for variable, value in zip(variables, layout(variables).unpack(flat), strict=True):
        variable.assign(value)


def layout(variables: Sequence[Any]) -> Layout:
    """The shapes and dtypes of variables."""
    shapes = tuple(tuple(int(size) for size in variable.shape) for variable in variables)
    return Layout(shapes, tuple(keras.backend.standardize_dtype(variable.dtype) for variable in variables))
