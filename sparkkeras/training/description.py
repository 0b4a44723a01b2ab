"""The description of a call of ``fit`` for those who get its events: a page, experiment tracking."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from sparkkeras.events import RunStarted
from sparkkeras.modeling.optimizers import inner_optimizer
from sparkkeras.modeling.state import has_settable_rate, learning_rate
from sparkkeras.training.preparation import FitRequest


def describe_fit(kind: str, model: keras.Model, request: FitRequest, settings: Mapping[str, Any]) -> RunStarted:
    """The event with which a training begins.

    Args:
        kind: See `RunStarted`.
        model: The model, or the first one of several.
        request: The checked call of ``fit``.
        settings: Further settings by name, for display.
    """
    shown = {
        **settings,
        **request.settings,
        "seed": request.options.seed,
        **describe_model(model),
    }
    return RunStarted(
        kind=kind,
        name=model.name,
        settings=shown,
        epochs=request.given["epochs"],
        initial_epoch=request.given["initial_epoch"],
    )


def describe_model(model: keras.Model) -> dict[str, Any]:
    """The settings of a model by name, for display."""
    described: dict[str, Any] = {"parameters": model.count_params() if model.built else None}
    if model.optimizer is not None:
        described["optimizer"] = type(inner_optimizer(model)).__name__
        described["learning_rate"] = float(f"{learning_rate(model):.6g}") if has_settable_rate(model) else "schedule"
        described["loss"] = _name(getattr(model, "loss", None))
    return described | {"keras": keras.__version__, "backend": keras.backend.backend()}


def _name(value: Any) -> str | None:
    """A loss, or several, as text."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_name(member)}" for name, member in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(str(_name(member)) for member in value)
    return str(getattr(value, "name", None) or getattr(value, "__name__", None) or type(value).__name__)
