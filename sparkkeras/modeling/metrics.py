"""Metric state: taken from a worker's model, merged over workers, and turned into figures on the driver.

A mean of means is not the mean, and an average of AUCs is no AUC. So what travels is the state behind the figures (sums,
counts, confusion matrices), and states are added. Every metric of Keras's own can be merged so. A plain function that
returns one number for a batch is, as in Keras, a mean over batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext, suppress
from typing import Any

import keras
import numpy as np

from sparkkeras.data.block import Block
from sparkkeras.errors import DataError
from sparkkeras.modeling.archive import compile_arguments, compile_to_judge, custom_objects_of, graph_of
from sparkkeras.modeling.locks import locks_state
from sparkkeras.weights import Array

MetricState = tuple[Array, ...]
"""The variables of all metrics of a model, one after the other."""


@locks_state
def prepare(model: keras.Model, sample: Block) -> None:
    """Have the model make the variables of its metrics, which it does when it first sees data.

    Args:
        model: A compiled model.
        sample: Rows of the data's shapes and dtypes; their values do not matter.

    Raises:
        DataError: The loss or a metric cannot take such labels.
    """
    x, y, weight = (_tensors(side) for side in (sample.x, sample.y, sample.sample_weight))
    own_step = type(model).train_step is not keras.Model.train_step
    try:
        prediction = model(x, training=False)
        # An own train_step need not use both.
        with suppress(Exception) if own_step else nullcontext():
            model.compute_loss(x=x, y=y, y_pred=prediction, sample_weight=weight, training=False)
        with suppress(Exception) if own_step else nullcontext():
            model.compute_metrics(x, y, prediction, weight)
    except Exception as error:
        raise DataError(_misfit(sample, error)) from error
    finally:
        model.reset_metrics()


@locks_state
def take(model: keras.Model) -> MetricState:
    """Copy the state of a model's metrics."""
    return tuple(np.array(keras.ops.convert_to_numpy(variable)) for variable in _variables(model))


def merge(states: Iterable[MetricState]) -> MetricState:
    """Add states up, in float64 and in the order given."""
    total: list[Array] | None = None
    for state in states:
        if total is None:
            total = [array.astype(np.float64) for array in state]
        else:
            for mine, other in zip(total, state, strict=True):
                mine += other
    return tuple(total or ())


@locks_state
def results(model: keras.Model, state: MetricState) -> dict[str, Any]:
    """The figures that belong to a state, under the names that the model gives them."""
    variables = _variables(model)
    if len(variables) != len(state):
        raise DataError(
            f"a worker's model has {len(state)} metric variables and the driver's {len(variables)}: a metric makes them "
            "depend on the data. Create a metric's variables in its __init__ or build()."
        )
    for variable, value in zip(variables, state, strict=True):
        variable.assign(value.astype(keras.backend.standardize_dtype(variable.dtype)))
    try:
        return {name: _plain(value) for name, value in _figures(model).items()}
    finally:
        model.reset_metrics()


def log_names(model: keras.Model) -> tuple[str, ...] | None:
    """The names of the metrics that training reports, or ``None`` where they cannot be known yet.

    They cannot where the model has a ``train_step`` or the like of its own, and before loss and metrics are built, which
    is when Keras gives them their names.
    """
    if _reports_itself(model):
        return None
    parts = (model._compile_metrics, model._compile_loss)
    if not all(part is None or part.built for part in parts):
        return None
    with suppress(Exception):  # a metric may have no result before it has seen data
        return tuple(_figures(model))
    return None


def _reports_itself(model: keras.Model) -> bool:
    return any(getattr(type(model), name) is not getattr(keras.Model, name) for name in _REPORTING)


_REPORTING = ("train_step", "test_step", "compute_metrics", "get_metrics_result")


def with_names(model: keras.Model, custom_objects: Mapping[str, Any]) -> keras.Model | None:
    """A model that has the names of a model's loss and metrics; ``None`` where they cannot be known yet.

    It is the model itself where its loss and metrics are built, else another one around the same layers, compiled with
    copies of the loss and metrics: Keras chooses some metrics by the shape of the labels, which only the data shows, so
    those of the model itself are not built for this.

    Args:
        model: A compiled model.
        custom_objects: Its custom classes and functions by name, where they cannot be found in it.
    """
    if log_names(model) is not None:
        return model
    graph = graph_of(model)
    outputs = getattr(graph, "_outputs_struct", None)
    if outputs is None or _reports_itself(model):
        return None
    with suppress(Exception):  # an own loss or metric that needs the data: the names are known once that was seen
        around = keras.Model(graph._inputs_struct, outputs)
        compile_to_judge(around, compile_arguments(model), custom_objects_of(model, custom_objects), safe_mode=False)
        for part in (around._compile_metrics, around._compile_loss):
            if part is not None:
                part.build(outputs, outputs)
        return around
    return None


def in_order(model: keras.Model, logs: Mapping[str, Any]) -> Any:
    """The figures as the list that ``keras.Model.evaluate`` returns, or the one figure where there is only one."""
    return model._flatten_metrics_in_order(dict(logs))


def _variables(model: keras.Model) -> list[Any]:
    return [variable for metric in _live(model) for variable in metric.variables]


def _live(model: keras.Model) -> list[Any]:
    """The metrics of a model, without those of an earlier ``compile`` that Keras keeps where the last one gave none."""
    compiled = getattr(model, "_compile_config", None)
    given = compiled.config if compiled is not None else {"metrics": True}
    stale = None if given.get("metrics") or given.get("weighted_metrics") else model._compile_metrics
    return [metric for metric in model.metrics if stale is None or metric is not stale]


def _figures(model: keras.Model) -> dict[str, Any]:
    live = _live(model)
    if len(live) == len(model.metrics):
        return dict(model.get_metrics_result())
    return {metric.name: metric.result() for metric in live}


def _plain(value: Any) -> Any:
    array = np.asarray(keras.ops.convert_to_numpy(value))
    return float(array) if array.ndim == 0 else array


def _tensors(side: Any) -> Any:
    return None if side is None else keras.tree.map_structure(keras.ops.convert_to_tensor, side)


def _misfit(sample: Block, error: Exception) -> str:
    shapes = ", ".join(
        f"{label} has rows of shape {array.shape[1:]}, {array.dtype}"
        for label, array in zip(sample.form.labels, sample.arrays, strict=True)
    )
    return f"the data does not fit the model, its loss or its metrics: {error}. The data: {shapes}."
