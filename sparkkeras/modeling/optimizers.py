"""The optimizers of a model, and the weights that they train: that of ``compile``, and those that a ``train_step`` applies.

Keras builds the optimizer of ``compile`` for all trainable weights. For which weights several optimizers are, as in a GAN,
only the ``train_step`` shows, so unbuilt ones are built by one step.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from sparkkeras.errors import ModelError
from sparkkeras.modeling.backends import read
from sparkkeras.modeling.own_methods import overrides


def optimizer_of(model: keras.Model) -> Any:
    """The optimizer that the model was compiled with, or ``None``."""
    return getattr(model, "optimizer", None)


def inner_optimizer(model: keras.Model) -> Any:
    """The compiled optimizer, or its `inner_of`."""
    return inner_of(optimizer_of(model))


def inner_of(optimizer: Any) -> Any:
    """The optimizer that updates the weights: the inner one of a ``LossScaleOptimizer`` (mixed precision)."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def step_is_stateless() -> bool:
    """Whether ``train_step`` gets variables as arguments, as with JAX; of optimizers, only those of ``model.optimizer``."""
    return "state" in inspect.signature(keras.Model.train_step).parameters


def optimizers_of(model: keras.Model) -> dict[str, Any]:
    """All optimizers that training uses, by where they are: the compiled one, then those in attributes of the model.

    Attributes count if the model has its own ``train_step``: Keras's applies ``model.optimizer`` only. They may hold lists
    and dicts of optimizers. Attributes of nested models count too: a GAN may compile its discriminator by itself. With
    these, the compiled optimizer counts only if it is used: Keras creates one if ``compile`` gets none.
    """
    compiled = optimizer_of(model)
    found: dict[str, Any] = {}
    if overrides(model, "train_step"):
        seen = {id(compiled), id(inner_of(compiled))}
        for path, optimizer in _optimizers_in(model, "", set()):
            ids = {id(optimizer), id(inner_of(optimizer))}
            if not ids & seen:
                seen |= ids
                found[path] = optimizer
    if compiled is not None and (not found or _uses_compiled(model, found.values())):
        found = {"optimizer": compiled, **found}
    return found


def has_several(model: keras.Model) -> bool:
    """Whether training uses other optimizers than the compiled one."""
    return any(path != "optimizer" for path in optimizers_of(model))


def _optimizers_in(value: Any, path: str, visited: set[int]) -> Iterator[tuple[str, Any]]:
    """The optimizers in a layer's attributes, in its layers, and in containers, with their paths; some may occur twice."""
    if isinstance(value, keras.Optimizer):
        yield path, value
    elif isinstance(value, keras.layers.Layer):
        if id(value) in visited:
            return
        visited.add(id(value))
        members = {**vars(value), **vars(value).get("_modules", {})}  # PyTorch keeps layers apart from other attributes
        for name in sorted(members, key=lambda name: (name.startswith("_"), name)):
            # Private layers of Keras depend on what was called. All layers are in _layers, too.
            private = name.startswith("_self_") or (name.startswith("_") and isinstance(members[name], keras.layers.Layer))
            if not private:
                yield from _optimizers_in(members[name], f"{path}.{name}" if path else name, visited)
    elif isinstance(value, (list, tuple, Mapping)):
        for key, member in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _optimizers_in(member, f"{path}[{key!r}]", visited)


def _uses_compiled(model: keras.Model, others: Iterable[Any]) -> bool:
    """Whether training uses the compiled optimizer besides others."""
    kept: bool | None = _kept(model, _USED)
    compiled = optimizer_of(model)
    has_steps = _count(compiled) > 0
    if has_steps and kept is False:
        raise ModelError(
            f"the train_step of the model {model.name!r} uses model.optimizer besides other optimizers, but only they are "
            "built. Build all of them in compile, for the weights that each trains: "
            "optimizer.build(layer.trainable_variables)."
        )
    # With PyTorch, fit of Keras builds it in any case.
    return bool(compiled.built and (has_steps or not any(map(_count, others)))) if kept is None else kept


_USED = "_sparkkeras_uses_compiled"


def keep_use(model: keras.Model, used: bool) -> None:
    """Set whether training uses the compiled optimizer besides others, until the model is compiled again."""
    _keep(model, _USED, used)


def _keep(model: keras.Model, name: str, value: Any) -> None:
    """Keep a value until the model is compiled again, out of sight of Keras, which tracks the attributes of models."""
    vars(model)[name] = (getattr(model, "_compile_config", None), value)


def _kept(model: keras.Model, name: str) -> Any:
    compiled, value = vars(model).get(name, (None, None))
    return value if compiled is getattr(model, "_compile_config", None) else None


def _count(optimizer: Any) -> int:
    return int(read(inner_of(optimizer)._iterations))


def iterations(model: keras.Model) -> list[int]:
    """The number of iterations of each optimizer."""
    return [_count(optimizer) for optimizer in optimizers_of(model).values()]


def set_iterations(model: keras.Model, numbers: Sequence[int]) -> None:
    """Set the number of iterations of each optimizer."""
    for optimizer, number in zip(optimizers_of(model).values(), numbers, strict=True):
        optimizer._iterations.assign(number)
        inner_of(optimizer)._iterations.assign(number)


def trained(model: keras.Model) -> tuple[bool, ...]:
    """Whether training changes each weight, in the order of ``model.weights``: it is trainable, or an optimizer is for it.

    The result stays the same until the model is compiled again, because the weights in vectors are in this order, and a
    ``train_step`` may set ``trainable`` of layers, for instance to freeze the discriminator of a GAN in a part of the step.
    """
    weights = model.weights
    kept: tuple[bool, ...] | None = _kept(model, _TRAINED)
    if kept is None or len(kept) != len(weights):
        found = {id(weight) for weight in model.trainable_weights}
        for optimizer in optimizers_of(model).values():
            if optimizer.built:
                found.update(id(weight) for weight in inner_of(optimizer)._trainable_variables)
        kept = tuple(id(weight) in found for weight in weights)
        keep_trained(model, kept)
    return kept


_TRAINED = "_sparkkeras_trained"


def keep_trained(model: keras.Model, flags: Sequence[bool]) -> None:
    """Set what `trained` returns, until the model is compiled again."""
    _keep(model, _TRAINED, tuple(flags))


def unbuilt(model: keras.Model) -> list[str]:
    """Where the optimizers are that one step must build; a single compiled one is built for all trainable weights."""
    found = optimizers_of(model) if has_several(model) else {}
    return [path for path, optimizer in found.items() if not optimizer.built]


def built_for(optimizer: Any, model: keras.Model) -> list[int] | None:
    """The indices in ``model.weights`` of the weights that an optimizer was built for.

    ``None`` if it is not built, or built for other variables.
    """
    if not optimizer.built:
        return None
    indices = {id(weight): index for index, weight in enumerate(model.weights)}
    found = [id(variable) for variable in inner_of(optimizer)._trainable_variables]
    return [indices[each] for each in found] if indices.keys() >= set(found) else None


def build_by_step(model: keras.Model, data: tuple[Any, ...]) -> None:
    """Build the optimizers of a custom ``train_step`` by calling it once, and restore all variables afterwards.

    Does nothing if all optimizers are built, or with JAX, where a ``train_step`` gets only the variables of the compiled
    optimizer.

    Args:
        model: The model.
        data: A batch of rows, as ``train_step`` takes them. Their values do not matter.
    """
    if not unbuilt(model) or step_is_stateless():
        return
    compiled, optimizers = optimizer_of(model), list(optimizers_of(model).values())
    if compiled is not None and not any(each is compiled for each in optimizers):
        optimizers.append(compiled)  # whether it is used, this step shows
    before = None if compiled is None else _count(compiled)
    variables = [*model.variables, *(variable for each in optimizers for variable in each.variables)]
    kept = [(variable, np.array(read(variable))) for variable in variables]
    frozen_or_not = [(layer, layer._trainable) for layer in model._flatten_layers()]
    flags = [(weight, weight.trainable) for weight in model.weights]
    new = [each for each in optimizers if not each.built]
    for each in new:
        _keep_initial_values(each, kept)
    try:
        model.train_step(data)
    finally:
        if compiled is not None:
            keep_use(model, _count(compiled) != before)
        for each in new:
            vars(each).pop("build", None)
        for variable, value in kept:
            variable.assign(value)
        for layer, trainable in frozen_or_not:
            layer._trainable = trainable  # the property would set that of its layers and weights, too
        for weight, trainable in flags:
            weight.trainable = trainable
        vars(model).pop(_TRAINED, None)
        model.reset_metrics()


def _keep_initial_values(optimizer: Any, kept: list[tuple[Any, Any]]) -> None:
    """Have an optimizer add its variables, with their initial values, to ``kept`` when it is built."""
    original = optimizer.build

    def build(variables: Any) -> None:
        original(variables)
        kept.extend((variable, np.array(read(variable))) for variable in optimizer.variables)

    vars(optimizer)["build"] = build
