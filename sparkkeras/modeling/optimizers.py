"""The optimizers of a model: that of ``compile``, and those that a custom ``train_step`` applies itself, as in a GAN.

Keras builds the optimizer of ``compile`` for all trainable weights. For which weights others are, only the ``train_step``
shows, so unbuilt ones are built by one step.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np


def optimizer_of(model: keras.Model) -> Any:
    """The optimizer that the model was compiled with, or ``None``."""
    return getattr(model, "optimizer", None)


def inner_optimizer(model: keras.Model) -> Any:
    """The optimizer that updates the weights: the inner one of a ``LossScaleOptimizer`` (mixed precision)."""
    return _inner(optimizer_of(model))


def has_own_step(model: keras.Model) -> bool:
    """Whether the model's class overrides ``train_step``, which may then use other optimizers than ``model.optimizer``."""
    return type(model).train_step is not keras.Model.train_step


def optimizers_of(model: keras.Model) -> dict[str, Any]:
    """All optimizers that training uses, by where they are: the compiled one, then those in attributes of the model.

    Attributes count if the model has its own ``train_step``: Keras's applies ``model.optimizer`` only. They may hold lists
    and dicts of optimizers. Attributes of nested models count too: a GAN may compile its discriminator by itself.
    """
    compiled = optimizer_of(model)
    found = {} if compiled is None else {"optimizer": compiled}
    if has_own_step(model):
        nested = enumerate(model._flatten_layers(include_self=False))
        owners = [
            ("", model),
            *((f"{layer.name}[{index}].", layer) for index, layer in nested if isinstance(layer, keras.Model)),
        ]
        seen = {id(compiled), id(_inner(compiled))}
        for prefix, owner in owners:
            for name in sorted(vars(owner)):
                if name.startswith("_self_"):  # TensorFlow's lists of tracked objects
                    continue
                for path, optimizer in _optimizers_in(vars(owner)[name], prefix + name):
                    if not {id(optimizer), id(_inner(optimizer))} & seen:
                        seen |= {id(optimizer), id(_inner(optimizer))}
                        found[path] = optimizer
    return found


def _inner(optimizer: Any) -> Any:
    return getattr(optimizer, "inner_optimizer", optimizer)


def _optimizers_in(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, keras.Optimizer):
        yield path, value
    elif isinstance(value, (list, tuple, Mapping)):
        members = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, member in members:
            yield from _optimizers_in(member, f"{path}[{key!r}]")


def unbuilt(model: keras.Model) -> list[str]:
    """Where the optimizers are that are not built yet, other than the compiled one, which is built for all weights."""
    compiled = optimizer_of(model)
    return [path for path, each in optimizers_of(model).items() if each is not compiled and not each.built]


def built_for(model: keras.Model) -> dict[str, list[int]]:
    """The indices in ``model.weights`` of the weights that optimizers other than the compiled one were built for.

    Without optimizers that are not built, or are built for variables that are not weights of the model.
    """
    indices = {id(weight): index for index, weight in enumerate(model.weights)}
    compiled = optimizer_of(model)
    found = {}
    for path, optimizer in optimizers_of(model).items():
        if optimizer is not compiled and optimizer.built:
            trained = [id(variable) for variable in _inner(optimizer)._trainable_variables]
            if indices.keys() >= set(trained):
                found[path] = [indices[variable] for variable in trained]
    return found


def build(model: keras.Model, weights: Mapping[str, list[int]]) -> None:
    """Build optimizers for the weights that `built_for` of another copy of the model returned."""
    mine = optimizers_of(model)
    for path, indices in weights.items():
        if path in mine and not mine[path].built:
            mine[path].build([model.weights[index] for index in indices])


def build_by_step(model: keras.Model, data: tuple[Any, ...]) -> None:
    """Build the optimizers of a custom ``train_step`` by calling it once, and restore all variables afterwards.

    Does nothing if all optimizers are built, or with JAX, where a ``train_step`` gets only the variables of the compiled
    optimizer.

    Args:
        model: The model.
        data: A batch of rows, as ``train_step`` takes them. Their values do not matter.
    """
    names = unbuilt(model)
    if not names or "state" in inspect.signature(keras.Model.train_step).parameters:
        return
    kept = [(variable, _copy(variable)) for variable in model.variables]
    optimizers = optimizers_of(model)
    for name in names:
        _keep_initial_values(optimizers[name], kept)
    compiled = optimizer_of(model)
    if compiled is not None:
        kept += [(variable, _copy(variable)) for variable in compiled.variables]
    try:
        model.train_step(data)
    finally:
        for name in names:
            vars(optimizers[name]).pop("build", None)
        for variable, value in kept:
            variable.assign(value)
        model.reset_metrics()


def _keep_initial_values(optimizer: Any, kept: list[tuple[Any, Any]]) -> None:
    """Have an optimizer add its variables, with their initial values, to ``kept`` when it is built."""
    original = optimizer.build

    def build(variables: Any) -> None:
        original(variables)
        kept.extend((variable, _copy(variable)) for variable in optimizer.variables)

    vars(optimizer)["build"] = build


def _copy(variable: Any) -> Any:
    return np.array(keras.ops.convert_to_numpy(variable))
