"""Metric state: copied from a worker's model, merged over workers, and converted to metric values on the driver.

A mean of means is not the overall mean, and an average of AUCs is not an AUC. So workers send the state of the metrics
(sums, counts, confusion matrices), and the driver adds the states. All metrics of Keras can be merged in this way. As in
Keras, the result of a plain function that returns one number per batch is the mean over batches.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any, Protocol

import keras
import numpy as np

from sparkkeras.data.block import Block
from sparkkeras.errors import DataError, ModelError
from sparkkeras.modeling.archive import custom_objects_of
from sparkkeras.modeling.backends import compiles_operations, read
from sparkkeras.modeling.compilation import compile_arguments, compile_to_evaluate, compiled_with, missing_loss
from sparkkeras.modeling.locks import locks_state
from sparkkeras.modeling.optimizers import build_by_step, unbuilt
from sparkkeras.modeling.own_methods import has_call, overrides
from sparkkeras.modeling.schema import as_built, graph_of
from sparkkeras.modeling.state import outside
from sparkkeras.weights import Array

MetricState = tuple[Array, ...]
"""The values of all metric variables of a model, in order."""


@locks_state
def prepare(model: keras.Model, sample: Block) -> None:
    """Build the loss and the metrics of a model, which Keras does only with the first batch, and reset the metrics.

    Data with the shapes and dtypes of the last call is not checked again, until the model is compiled again.

    Args:
        model: A compiled model.
        sample: Rows with the shapes and dtypes of the data; their values do not matter.

    Raises:
        DataError: The model, the loss or a metric does not accept such data.
        ModelError: The model has no loss, or its own ``train_step`` fails.
    """
    loss = getattr(model, "_compile_loss", None)  # a new object after each compile
    if getattr(loss, "_sparkkeras_spec", None) == sample.spec and not unbuilt(model):
        model.reset_metrics()
        return
    inputs = getattr(model, "inputs", None)
    size = (inputs[0].shape[0] if inputs else None) or 1  # Keras fixes the batch size of stateful recurrent layers
    rows = sample[np.zeros(size, np.intp)]
    x, y, weight = (_tensors(side) for side in (as_built(model, rows.x), rows.y, rows.sample_weight))
    own_step = overrides(model, "train_step")
    if unbuilt(model):
        _build_optimizers(model, (x, y, weight), sample)
    if not has_call(model):
        return
    try:
        prediction = _computed(functools.partial(_predicted, model), x)
        # A custom train_step may use neither loss nor metrics, so an error here does not matter.
        with suppress(Exception) if own_step else nullcontext():
            _computed(model.compute_loss, x=x, y=y, y_pred=prediction, sample_weight=weight, training=False)
        with suppress(Exception) if own_step else nullcontext():
            _computed(model.compute_metrics, x, y, prediction, weight)
    except Exception as error:
        if "No loss to compute" in str(error):
            raise missing_loss(model) from error
        raise DataError(_misfit(sample, error)) from error
    finally:
        model.reset_metrics()
    if loss is not None:
        loss._sparkkeras_spec = sample.spec


def _predicted(model: keras.Model, x: Any) -> Any:
    """The prediction of a model; see `masks_loss`."""
    prediction = model(x, training=False)
    if model._compile_loss is not None:
        masks = map(keras.src.backend.get_keras_mask, keras.tree.flatten(prediction))
        model._compile_loss._sparkkeras_mask = any(mask is not None for mask in masks)
    return prediction


def masks_loss(model: keras.Model) -> bool:
    """Whether a prediction of the model had a mask, for its loss, when `prepare` called the model."""
    return getattr(model._compile_loss, "_sparkkeras_mask", False)


def _build_optimizers(model: keras.Model, batch: tuple[Any, ...], sample: Block) -> None:
    names = ", ".join(unbuilt(model))
    try:
        build_by_step(model, keras.utils.pack_x_y_sample_weight(*batch))
    except Exception as error:
        if unbuilt(model):
            reason = f"{type(error).__name__}: {error}".rstrip(".")
            raise ModelError(
                f"the train_step of the model {model.name!r} failed on one row of zeros in the shape of the data "
                f"({_shapes(sample)}), with which it is called once to build its optimizers ({names}): {reason}. "
                "Correct it, or the data if it has the wrong shape. Or build each optimizer in compile, for the weights "
                "that it trains: optimizer.build(layer.trainable_variables)."
            ) from error


@locks_state
def take(model: keras.Model) -> MetricState:
    """Copy the state of a model's metrics."""
    return tuple(np.array(read(variable)) for variable in _variables(model))


def merge(states: Iterable[MetricState]) -> MetricState:
    """Add up states in float64, in the given order."""
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
    """The metric values of a state, by the names that the model reports.

    Raises:
        DataError: The state has another number of variables than the model's metrics.
    """
    variables = _variables(model)
    if len(variables) != len(state):
        raise DataError(
            f"a worker's model has {len(state)} metric variables and the driver's {len(variables)}: a metric creates "
            "variables depending on the data. Create a metric's variables in its __init__ or build()."
        )
    for variable, value in zip(variables, state, strict=True):
        variable.assign(value.astype(keras.backend.standardize_dtype(variable.dtype)))
    try:
        return {name: _plain(value) for name, value in _results(model).items()}
    finally:
        model.reset_metrics()


def updated(model: keras.Model, state: MetricState) -> set[str]:
    """The names of the metric values to which rows contributed: a custom ``train_step`` may not update all metrics."""
    names: set[str] = set()
    start = 0
    for metric in _live(model):
        stop = start + len(_state_of(metric, model))
        if any(array.any() for array in state[start:stop]):
            found = metric.result()
            names.update(found if isinstance(found, Mapping) else [metric.name])
        start = stop
    return names


class HasLogs(Protocol):
    """A worker's report on rows."""

    @property
    def rows(self) -> int:
        """The number of rows."""
        ...

    @property
    def logs(self) -> dict[str, Any]:
        """The values over the rows, by name."""
        ...


class HasMetrics(HasLogs, Protocol):
    """The report of a worker that has the metric state, too."""

    @property
    def metrics(self) -> MetricState:
        """The metric state over the rows."""
        ...


def logs(model: keras.Model, state: MetricState, reports: Sequence[HasLogs]) -> dict[str, Any]:
    """The logs of an epoch or an evaluation, computed from the merged metric state and the logs of the workers.

    A custom ``train_step``, ``test_step`` or ``compute_metrics`` may also return values that are not metrics of the model.
    Keras reports those of the last batch; here the workers' values are averaged, weighted by rows.
    """
    found = results(model, state)
    if set(found) == set(reports[0].logs):
        return found
    merged = updated(model, state) & found.keys()
    return {name: found[name] if name in merged else mean for name, mean in mean_logs(reports).items()}


def merged_logs(model: keras.Model, reports: Sequence[HasMetrics]) -> dict[str, Any]:
    """The logs of workers that send their metric states with their logs."""
    return logs(model, merge(each.metrics for each in reports), reports)


def mean_logs(reports: Sequence[HasLogs]) -> dict[str, Any]:
    """The means of the values that the workers logged, weighted by rows."""
    return {name: _mean([(report.logs[name], report.rows) for report in reports]) for name in reports[0].logs}


def _mean(values: Sequence[tuple[Any, int]]) -> Any:
    """The mean of ``(value, rows)`` pairs: a number, or an array for array values; ``None`` if a worker sent no value."""
    if any(value is None for value, _ in values):
        return None
    mean = sum(np.asarray(value) * rows for value, rows in values) / sum(rows for _, rows in values)
    return float(mean) if np.ndim(mean) == 0 else mean


def log_names(model: keras.Model) -> tuple[str, ...] | None:
    """The names of the metrics in the logs of training, or ``None`` if they are not known yet.

    They are unknown if the model overrides ``train_step`` or a similar method, and before loss and metrics are built,
    because Keras names them then.
    """
    if _reports_itself(model):
        return None
    parts = (model._compile_metrics, model._compile_loss)
    if not all(part is None or part.built for part in parts):
        return None
    with suppress(Exception):  # a metric may have no result before its first update
        return tuple(_results(model))
    return None


def _reports_itself(model: keras.Model) -> bool:
    return overrides(model, "train_step", "test_step", "compute_metrics", "get_metrics_result")


def has_own_names(model: keras.Model) -> bool:
    """Whether the model overrides a method that decides which metrics are in the logs, and its metrics exist already."""
    compiled = model._compile_metrics
    return _reports_itself(model) and (compiled is None or compiled.built)


def with_names(model: keras.Model, custom_objects: Mapping[str, Any]) -> keras.Model | None:
    """A model whose `log_names` are known and equal to those of ``model``; ``None`` if they cannot be known before training.

    Returns the model itself if its loss and metrics are built. Otherwise, returns another model of the same layers, with
    copies of the loss and metrics. The loss and metrics of ``model`` are not built for this, because Keras chooses some
    metrics by the shape of the labels, which is known only from the data.

    Args:
        model: A compiled model.
        custom_objects: Custom classes and functions by name, if they cannot be found in the model.
    """
    if log_names(model) is not None:
        return model
    graph = graph_of(model)
    outputs = getattr(graph, "_outputs_struct", None)
    if outputs is None or _reports_itself(model):
        return None
    with suppress(Exception):  # a custom loss or metric may depend on the data, and then has no name before training
        around = keras.Model(graph._inputs_struct, outputs)
        compile_to_evaluate(around, compile_arguments(model), custom_objects_of(model, custom_objects), safe_mode=False)
        for part in (around._compile_metrics, around._compile_loss):
            if part is not None:
                part.build(outputs, outputs)
        return around
    return None


def _variables(model: keras.Model) -> list[Any]:
    return [variable for metric in _live(model) for variable in _state_of(metric, model)]


def _state_of(metric: Any, model: keras.Model) -> list[Any]:
    """The state of a metric, without variables that it does not reset, such as a weight that a callback sets."""
    kept = set(map(id, outside(model).values()))
    return [variable for variable in metric.variables if id(variable) not in kept]


def _live(model: keras.Model) -> list[Any]:
    """The metrics of a model, without those of an earlier ``compile``, which Keras keeps if the last call passed none."""
    given = compiled_with(model)
    stale = None if given.get("metrics") or given.get("weighted_metrics") else model._compile_metrics
    return [metric for metric in model.metrics if stale is None or metric is not stale]


def _results(model: keras.Model) -> dict[str, Any]:
    live = _live(model)
    if len(live) == len(model.metrics):
        return dict(model.get_metrics_result())
    return {metric.name: metric.result() for metric in live}


def _plain(value: Any) -> Any:
    array = np.asarray(keras.ops.convert_to_numpy(value))
    return float(array) if array.ndim == 0 else array


def _tensors(side: Any) -> Any:
    return None if side is None else keras.tree.map_structure(keras.ops.convert_to_tensor, side)


def _computed(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """The result of a call, or only its shapes and dtypes where it would be compiled operation by operation."""
    if not compiles_operations():
        return function(*arguments, **named)
    arguments, named = keras.tree.map_structure(_symbolic, (arguments, named))
    return keras.src.backend.compute_output_spec(function, *arguments, **named)


def _symbolic(value: Any) -> Any:
    return keras.KerasTensor(value.shape, str(value.dtype)) if hasattr(value, "dtype") else value


def _misfit(sample: Block, error: Exception) -> str:
    reason = _STYLES.sub("", str(error)).partition("\n\nArguments received by")[0].rstrip(". \n")
    if "Table not initialized" in reason:
        return (
            "a TextVectorization, StringLookup or IntegerLookup layer of the model has no vocabulary: call its adapt(...) "
            f"on the training data before fit, or pass vocabulary= ({reason})."
        )
    return f"the data does not fit the model, its loss or its metrics: {reason}. The data: {_shapes(sample)}."


def _shapes(sample: Block) -> str:
    """The shapes and dtypes of rows, for messages."""
    return ", ".join(
        f"{label} has rows of shape {leaf.shape}, {leaf.dtype}"
        for label, leaf in zip(sample.form.labels, sample.spec.leaves, strict=True)
    )


_STYLES = re.compile(r"\x1b\[\d+m")
"""The escape sequences with which Keras prints messages in bold."""
