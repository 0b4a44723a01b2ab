"""A description of a model that can be compared with that of another process: architecture and compile arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import keras

from sparkkeras.modeling.archive import model_config, without_rates
from sparkkeras.modeling.optimizers import inner_optimizer, optimizers_of
from sparkkeras.modeling.outside import stable_names
from sparkkeras.modeling.state import has_settable_rate, layout, learning_rate, outside, weight_variables

_IGNORED = ("build_config", "jit_compile", "seed", "shared_object_id")
"""Settings that Keras derives from others, from the machine, or draws at random; workers set all seeds in each round."""


OUTSIDE = "variables outside the model"
"""The key of their names, shapes and dtypes in a `description`, which has it if there are any."""


def description(model: keras.Model) -> dict[str, Any]:
    """What decides how a model trains, besides the values of its variables, as nested values for JSON.

    Names of layers and optimizers are replaced by their positions: Keras numbers them within a process, so they depend on
    how many were created before. Learning rates that are numbers are left out: they are variables. So is custom code.
    """
    config = without_rates(json.loads(json.dumps(model_config(model), default=_shown)))
    for built in ("optimizers", "trained"):  # known when a step has built optimizers
        config["unsaved"].pop(built, None)
    names = _names(model)
    compiled = config.pop("compile_config", None)
    variables = [[name, *each] for name, each in zip(stable_names(model), _shapes(outside(model).values()), strict=True)]
    return {
        "model": _normalized(config, names),
        "weights": _shapes(weight_variables(model)),
        "compile": _normalized(compiled, names),
        **({OUTSIDE: variables} if variables else {}),
    }


def _shown(value: Any) -> str:
    """An object as text, without its address in memory."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _names(model: keras.Model) -> dict[str, str]:
    operations = [*model._flatten_layers(), *getattr(model, "operations", ()), *optimizers_of(model).values()]
    compiled = getattr(model, "optimizer", None)
    operations += [] if compiled is None else [compiled]  # also one that train_step does not use
    names = list(dict.fromkeys(operation.name for operation in operations))
    return {name: f"#{position}" for position, name in enumerate(names)}


def _shapes(variables: Iterable[Any]) -> list[list[Any]]:
    found = layout(list(variables))
    return [[list(shape), dtype] for shape, dtype in zip(found.shapes, found.dtypes, strict=True)]


def _normalized(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {names.get(key, key): _normalized(member, names) for key, member in value.items() if key not in _IGNORED}
    if isinstance(value, list):
        return [_normalized(member, names) for member in value]
    return names.get(value, value) if isinstance(value, str) else value


def describe_model(model: keras.Model) -> dict[str, Any]:
    """The settings of a model by name, for display."""
    described: dict[str, Any] = {"parameters": model.count_params() if model.built else None}
    if model.optimizer is not None:
        described["optimizer"] = type(inner_optimizer(model)).__name__
        described["learning_rate"] = float(f"{learning_rate(model):.6g}") if has_settable_rate(model) else "schedule"
        described["loss"] = _loss_name(getattr(model, "loss", None))
    return described | {"keras": keras.__version__, "backend": keras.backend.backend()}


def _loss_name(value: Any) -> str | None:
    """A loss, or several, as text."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_loss_name(member)}" for name, member in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(str(_loss_name(member)) for member in value)
    return str(getattr(value, "name", None) or getattr(value, "__name__", None) or type(value).__name__)
