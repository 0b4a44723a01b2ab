"""The state of a model: its weights and the variables of its optimizers as flat vectors, learning rate and iterations.

Variables outside the model, which its custom code refers to, travel with those of its optimizers (see `outside`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from sparkkeras.modeling import backends
from sparkkeras.modeling.locks import locks_state
from sparkkeras.modeling.optimizers import (
    has_several,
    inner_of,
    inner_optimizer,
    iterations,
    optimizer_of,
    optimizers_of,
    set_iterations,
    trained,
)
from sparkkeras.modeling.own_methods import has_call
from sparkkeras.weights import Array, Flat, Layout


@dataclass(frozen=True)
class ModelState:
    """A snapshot of a model's weights and optimizer variables; these are followed by the variables outside the model."""

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
        return cls(take_weights(model), take_optimizer(model))

    @locks_state
    def put(self, model: keras.Model) -> None:
        """Copy the state into a model with the same variable shapes and dtypes."""
        put_weights(self.weights, model)
        _put(self.optimizer, _with_outside(model))


@dataclass(frozen=True)
class ModelWeights:
    """A snapshot of a model's weights without the optimizer, for prediction.

    Attributes:
        weights: The weights.
        outside: The values of variables outside the model, by name; those that are missing, or unknown to a model, stay.
    """

    weights: Flat
    outside: Mapping[str, Array] = field(default_factory=dict)

    @classmethod
    @locks_state
    def take(cls, model: keras.Model) -> ModelWeights:
        """Copy the weights from a model."""
        return cls(take_weights(model), {name: np.array(backends.read(each)) for name, each in outside(model).items()})

    def put(self, model: keras.Model) -> None:
        """Copy the weights into a model with the same variable shapes and dtypes."""
        put_weights(self.weights, model)
        for name, variable in outside(model).items():
            if name in self.outside:
                backends.assign(variable, self.outside[name])


def floatx() -> str:
    """Keras's ``floatx``, or float32 if NumPy does not support it (bfloat16)."""
    name = str(keras.backend.floatx())
    return name if name in {"float16", "float32", "float64"} else "float32"


def weight_variables(model: keras.Model) -> list[Any]:
    """The weights: those that training changes first (see `trained`), then the others."""
    weights, flags = model.weights, trained(model)
    return [weight for first in (True, False) for weight, flag in zip(weights, flags, strict=True) if flag == first]


def statistics_variables(model: keras.Model) -> list[Any]:
    """The weights that training changes without gradients, if at all; they come last in the weight vector."""
    return weight_variables(model)[sum(trained(model)) :]


def trainable_size(model: keras.Model) -> int:
    """The number of values that training changes, which come first in the weight vector."""
    changed = weight_variables(model)[: sum(trained(model))]
    return sum(int(np.prod(weight.shape, dtype=np.int64)) for weight in changed)


def optimizer_variables(model: keras.Model) -> list[Any]:
    """All variables of all optimizers, with iterations and learning rates. Builds the compiled one if it is the only one."""
    optimizer = optimizer_of(model)
    if optimizer is not None and not optimizer.built and not has_several(model):
        optimizer.build(model.trainable_variables)
    return [variable for each in optimizers_of(model).values() for variable in each.variables]


_OUTSIDE = "_sparkkeras_outside"


def outside(model: keras.Model) -> dict[str, Any]:
    """The variables outside a model that its custom code refers to and that a callback may change, by name.

    A loss may use a ``keras.Variable`` of its module, of a closure or of its own, for instance as a weight that a callback
    anneals. `ModelArchive` finds them; before a model was packed or unpacked, there are none.
    """
    found: dict[str, Any] = vars(model).get(_OUTSIDE, {})
    return found


def keep_outside(model: keras.Model, variables: Mapping[str, Any]) -> None:
    """Set what `outside` returns, out of sight of Keras, which tracks the attributes of models."""
    vars(model)[_OUTSIDE] = dict(variables)


def _with_outside(model: keras.Model) -> list[Any]:
    return [*optimizer_variables(model), *outside(model).values()]


@locks_state
def take_weights(model: keras.Model) -> Flat:
    """Copy the weights from a model."""
    return _take(weight_variables(model))


@locks_state
def take_optimizer(model: keras.Model) -> Flat:
    """Copy the optimizer variables from a model, and the variables outside it."""
    return _take(_with_outside(model))


@locks_state
def put_weights(weights: Flat, model: keras.Model) -> None:
    """Copy weights into a model with the same variable shapes and dtypes."""
    _put(weights, weight_variables(model))
    backends.forget_compiled(model, weights)


def advanced(
    state: ModelState, model: keras.Model, counts: Sequence[int], settings: Sequence[float] | None = None
) -> ModelState:
    """The state of a worker that takes over after another one. ``model`` is left in this state.

    Args:
        state: Current weights, and the optimizer variables from the start of training.
        model: A model with the same variable shapes and dtypes.
        counts: The `iterations` that the other worker reached, after which schedules continue; empty if it made no step.
            If the optimizer variables are of this moment, they are used as they are.
        settings: The values for `put_settings`, if they were changed since the start.
    """
    state.put(model)
    if counts and tuple(counts) != tuple(iterations(model)):
        set_iterations(model, counts)
        for optimizer in map(inner_of, optimizers_of(model).values()):
            if optimizer.built and getattr(optimizer, "use_ema", False):  # restart averages from the current weights
                averages = optimizer._model_variables_moving_average
                for average, weight in zip(averages, optimizer._trainable_variables, strict=True):
                    average.assign(weight)
    if settings is not None:
        put_settings(settings, model)
    return ModelState.take(model)


def learning_rate(model: keras.Model) -> float:
    """The learning rate of the compiled optimizer at its current iteration; 0 without one."""
    return 0.0 if model.optimizer is None else float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))


def has_settable_rate(model: keras.Model) -> bool:
    """Whether the optimizer's learning rate is a variable that can be set, and not a schedule or a function."""
    return isinstance(getattr(inner_optimizer(model), "_learning_rate", None), keras.Variable)


def settings_variables(model: keras.Model) -> list[Any]:
    """What a callback may set during training besides weights: the learning rate, and the variables outside the model."""
    rate = [inner_optimizer(model)._learning_rate] if has_settable_rate(model) else []
    return [*rate, *outside(model).values()]


@locks_state
def take_settings(model: keras.Model) -> tuple[float, ...]:
    """The values of `settings_variables`."""
    return tuple(float(value) for each in settings_variables(model) for value in np.ravel(backends.read(each)))


@locks_state
def put_settings(values: Sequence[float], model: keras.Model) -> None:
    """Set the values that `take_settings` returned for a model with the same variables, or the first of them."""
    start = 0
    for variable in settings_variables(model):
        if start == len(values):
            return
        current = backends.read(variable)
        given = np.array(values[start : start + current.size]).astype(current.dtype)
        backends.assign(variable, given.reshape(current.shape))
        start += current.size


def is_built(model: keras.Model) -> bool:
    """Whether all weights exist. A model without ``call``, such as a GAN, is built when its layers are."""
    layers = list(model._flatten_layers(include_self=False))
    return bool(model.built or (not has_call(model) and layers and all(layer.built for layer in layers)))


def reseed(model: keras.Model, seed: Sequence[int]) -> None:
    """Reset all generators of a model's random numbers (dropout, augmentation) from ``seed``, and recurrent states to zero.

    Keras keeps the states of stateful recurrent layers until the user resets them; on a worker, they would be left over from
    other rows.
    """
    for layer in model._flatten_layers():
        if getattr(layer, "stateful", False) and hasattr(layer, "reset_state"):
            layer.reset_state()
    for number, state in enumerate(_generators(model)):
        drawn = np.random.SeedSequence([*seed, number]).generate_state(int(np.prod(state.shape)))
        state.assign((drawn & 0x7FFFFFFF).astype(keras.backend.standardize_dtype(state.dtype)).reshape(state.shape))
    backends.seed(int(np.random.SeedSequence(seed).generate_state(1)[0]))


def _generators(model: keras.Model) -> list[Any]:
    return [variable for variable in model.non_trainable_variables if variable.name == "seed_generator_state"]


def take_generators(model: keras.Model) -> list[Array]:
    """Copy the states of the generators of a model's random numbers."""
    return [np.array(backends.read(variable)) for variable in _generators(model)]


def put_generators(states: Sequence[Array], model: keras.Model) -> None:
    """Copy the states of `take_generators` into a model with the same layers."""
    for variable, state in zip(_generators(model), states, strict=True):
        backends.assign(variable, state)


def _take(variables: Sequence[Any]) -> Flat:
    return layout(variables).pack(backends.read_all(variables))


def _put(flat: Flat, variables: Sequence[Any]) -> None:
    backends.assign_all(variables, layout(variables).unpack(flat))


def layout(variables: Sequence[Any]) -> Layout:
    """The shapes and dtypes of variables."""
    shapes = tuple(tuple(int(size) for size in variable.shape) for variable in variables)
    return Layout(shapes, tuple(keras.backend.standardize_dtype(variable.dtype) for variable in variables))
