"""What a trial does in its process: build and fit a model, or call the user's objective."""

from __future__ import annotations

import inspect
import io
import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import keras
import numpy as np

from sparkkeras.data.block import Structure, from_arrays
from sparkkeras.data.labels import label_ranges
from sparkkeras.errors import DataError, ModelError, known_names
from sparkkeras.hyperopt import reporting
from sparkkeras.hyperopt.hypermodel import HyperParameters
from sparkkeras.hyperopt.reporting import ReportCallback, Reporter, SearchDefinitionError, TrialEnd
from sparkkeras.hyperopt.rows_on_disk import TRAINING, VALIDATION, RowsOnDisk
from sparkkeras.hyperopt.service import Outcome
from sparkkeras.hyperopt.subprocess_task import StopWork
from sparkkeras.hyperopt.trials import FAILED, STOPPED
from sparkkeras.modeling.archive import save_bytes
from sparkkeras.modeling.backends import without_tensorflow
from sparkkeras.modeling.compilation import check_trainable
from sparkkeras.modeling.custom_code import ByValue
from sparkkeras.modeling.labels import check_labels
from sparkkeras.modeling.schema import input_structure, schema_of
from sparkkeras.training.callbacks import as_callbacks
from sparkkeras.worker import device
from sparkkeras.worker.trainer import batch_hooks

TRACEBACK_LENGTH = 20_000
"""The number of characters that are kept from the end of a traceback."""

EXTRA_LENGTH = 64 * 1024
"""The limit in characters of each extra entry in an objective's result, as JSON: the driver keeps all of them in memory."""

_STATUS_OK, _STATUS_FAIL, _UNFINISHED = "ok", "fail", ("new", "running", "suspended")
"""hyperopt's statuses, repeated here so that workers do not need hyperopt."""

Data = Any


class Objective(Protocol):
    """Runs a trial with given hyper-parameters. Implementations are frozen dataclasses, which are sent to the workers."""

    def __call__(self, params: Any, data: Data, reporter: Reporter) -> Outcome:
        """Run a trial; an exception means that it failed."""
        ...


@dataclass(frozen=True)
class Fit:
    """Builds a model and fits it.

    Attributes:
        arguments: Arguments of ``fit`` for all trials, and as ``model`` the function that returns a compiled model for
            hyper-parameters, or ``(model, fit_arguments)``. They are one pickle, so that callbacks change the variables
            outside the model that its loss uses.
        metrics: The metrics to optimize, as in the logs of ``fit``.
        has_rows: Whether the driver has rows with which it can build a model whose input shape is unknown.
    """

    arguments: ByValue[dict[str, Any]]
    metrics: Sequence[str]
    has_rows: bool = True

    def __call__(self, params: Any, data: Data, reporter: Reporter) -> Outcome:
        """Train; the outcome has the weights of the best epoch."""
        device.initialize_backend()
        arguments = self.arguments.fresh()
        model, returned = build_model(arguments.pop("model"), params)
        on_disk = data if isinstance(data, RowsOnDisk) else None
        sent: Mapping[str, Any] = data if on_disk is None else on_disk.sent
        arguments = {**sent, **arguments, **fit_arguments_of(params), **_check_fit_arguments(returned)}
        callbacks = as_callbacks("callbacks", arguments.pop("callbacks", None))
        report = ReportCallback(self.metrics, arguments.get("validation_freq", 1))
        has_validation_data = arguments.get(VALIDATION) is not None or (on_disk is not None and VALIDATION in on_disk.blocks)
        if has_validation_data and arguments.get("validation_split"):
            raise SearchDefinitionError("give only one of validation_split and validation_data.")
        if not model.built and not self.has_rows:
            raise SearchDefinitionError(
                f"the model {model.name!r} is not built, and the driver cannot build it, since the data is read on the "
                "workers: start the model with keras.Input(shape)."
            )
        if model.built:
            _check_data(model, data)
            structure = input_structure(model)
            arguments = _in_structure(arguments, structure)
            if on_disk is not None:
                blocks = {name: block.in_structure(structure) for name, block in on_disk.blocks.items()}
                on_disk = replace(on_disk, blocks=blocks)
        if on_disk is not None:
            arguments = on_disk.fit_arguments(arguments)
        steps = int(model.steps_per_execution)
        model.steps_per_execution = device.steps_per_execution(model, steps, any(map(batch_hooks, callbacks)))
        try:
            model.fit(**arguments, callbacks=[*callbacks, report], verbose=0)
        except (StopWork, TrialEnd) as end:
            reporter.end(end)
            return _reported_outcome(reporter, weights=report.best_weights)
        if not reporter.history or (report.best_weights is None and reporter.diverged_at is None):
            missing = [metric for metric in self.metrics if metric not in reporter.history] or self.metrics
            raise SearchDefinitionError(reporting.unknown_metric(missing[0], reporter.history))
        return _reported_outcome(reporter, weights=report.best_weights)


@dataclass(frozen=True)
class CallObjective:
    """Calls the user's objective. The backend starts only when this function uses it.

    Attributes:
        function: Takes the hyper-parameters and the data; returns a loss, or hyperopt's dict with ``loss``, ``status`` and
            further entries, of which ``model`` is kept. Any other result ends the search with an error.
        has_data: Whether the function takes data as its second argument.
        metrics: The names of what it returns: a sequence of losses, if there are several.
    """

    function: ByValue[Callable[..., Any]]
    has_data: bool
    metrics: Sequence[str] = ("loss",)

    def __call__(self, params: Any, data: Data, reporter: Reporter) -> Outcome:
        """Call the function, and convert its result to an outcome."""
        data = data.arrays() if isinstance(data, RowsOnDisk) else data
        returned = self.function.fresh()(*((params, data) if self.has_data else (params,)))
        result = dict(returned) if isinstance(returned, Mapping) else {"loss": returned}
        status, loss, model = result.pop("status", _STATUS_OK), result.pop("loss", None), result.pop("model", None)
        extra = _json_compatible(result)
        if status not in (_STATUS_OK, _STATUS_FAIL):
            raise SearchDefinitionError(_unknown_status_message(status))
        if status == _STATUS_FAIL:
            return Outcome(
                FAILED, history=reporter.history, error=f"the objective returned status 'fail': {extra}", extra=extra
            )
        values = _numbers(loss, len(self.metrics))
        if values is None:
            raise SearchDefinitionError(_missing_loss_message(returned, self.metrics))
        if not np.isfinite(values).all():
            shown = values if len(values) > 1 else values[0]
            return replace(
                _reported_outcome(reporter, FAILED), error=f"the objective returned the loss {shown}", extra=extra
            )
        return Outcome(
            reporter.status,
            values[0],
            reporter.best_epoch if reporter.best == values[0] else None,
            reporter.history,
            extra=extra,
            model=b"" if model is None else _pack_model(model),
            suffix="keras",
            values=values,
        )


def run_trial(
    objective: Objective,
    params: Any,
    data: Data,
    seed: int,
    send: Callable[[int, float], str],
    sign: float,
    num_metrics: int = 1,
) -> Outcome:
    """Run a trial; an error that it raises becomes part of the outcome."""
    reporter = Reporter(send, sign, num_metrics)
    reporting.current = reporter
    try:
        with without_tensorflow():
            keras.utils.set_random_seed(seed)
        return objective(params, data, reporter)
    except (StopWork, TrialEnd) as end:
        reporter.end(end)
        return _reported_outcome(reporter)
    except (Exception, SystemExit) as error:
        if isinstance(error, SearchDefinitionError):
            return Outcome(FAILED, history=reporter.history, error=str(error), is_definition_error=True)
        return Outcome(
            FAILED,
            history=reporter.history,
            error=f"{type(error).__name__}: {error}",
            traceback=traceback.format_exc()[-TRACEBACK_LENGTH:],
        )
    finally:
        reporting.current = None


def build_model(build: Callable[[Any], Any], params: Any) -> tuple[keras.Model, dict[str, Any]]:
    """Call the function that builds models; returns the model and the arguments of ``fit`` that it returned with it.

    Raises:
        SearchDefinitionError: The function returns something else, or a model that is not compiled.
    """
    returned = build(params)
    model, arguments = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    if not isinstance(model, keras.Model) or not isinstance(arguments, Mapping):
        raise SearchDefinitionError(
            f"the function that builds models returned {returned!r}; expected a compiled keras.Model, or a tuple of the "
            "model and a dict of arguments of fit."
        )
    if model.built:
        _check_trainable(model)
    elif not model.compiled:
        raise SearchDefinitionError(
            f"the function that builds models returned {model.name!r}, which is not compiled: call model.compile(...) in it."
        )
    return model, dict(arguments)


def _check_trainable(model: keras.Model) -> None:
    try:
        check_trainable(model)
    except ModelError as error:
        raise SearchDefinitionError(
            f"the function that builds models returned a model that cannot be trained: {error}"
        ) from error


def _check_data(model: keras.Model, data: Mapping[str, Any] | RowsOnDisk) -> None:
    if isinstance(data, RowsOnDisk) and TRAINING in data.blocks:
        spec, labels = data.blocks[TRAINING].spec, data.labels
    else:
        arrays = data.sent if isinstance(data, RowsOnDisk) else data
        block = from_arrays(arrays["x"], arrays["y"], None, *(schema_of(model).expected_x, schema_of(model).expected_y))
        spec, labels = block.spec, label_ranges(block)
    try:
        schema_of(model).check_features(spec, has_transform=False)
        check_labels(model, spec, labels)
    except DataError as error:
        raise SearchDefinitionError(str(error)) from error


def _in_structure(arguments: dict[str, Any], structure: Structure | None) -> dict[str, Any]:
    """The arguments of ``fit`` with features in a dict if the inputs are in one. Keras would sort the keys before it matches
    them with a tuple, which has the order in which the model was built.
    """
    if structure is None:
        return arguments

    def built(x: Any) -> Any:
        named = from_arrays(x, None, None, structure).in_structure(structure).x
        return named if isinstance(named, dict) else x

    made = {**arguments, **({"x": built(arguments["x"])} if "x" in arguments else {})}
    if isinstance(made.get(VALIDATION), tuple):
        made[VALIDATION] = (built(made[VALIDATION][0]), *made[VALIDATION][1:])
    return made


def fit_arguments_of(params: Any) -> dict[str, Any]:
    """The hyper-parameters that are passed to ``fit``: ``epochs``, ``batch_size`` and ``callbacks``."""
    given = params.values if isinstance(params, HyperParameters) else params if isinstance(params, Mapping) else {}
    numbers = {name: _whole(name, given[name]) for name in ("epochs", "batch_size") if name in given}
    return {**numbers, **({"callbacks": given["callbacks"]} if "callbacks" in given else {})}


def _whole(name: str, value: Any) -> int:
    """A hyper-parameter that is a whole number; hyperopt's quantized distributions have floats."""
    if isinstance(value, str) or value != int(value):
        raise SearchDefinitionError(
            f"the hyper-parameter {name!r} is {value!r}, and fit takes whole numbers: use integer(low, high) in the space."
        )
    return int(value)


def pack_weights(weights: list[np.ndarray[Any, Any]]) -> bytes:
    """Weights as the bytes of an ``.npz`` file; types that NumPy lacks (bfloat16) become float32."""
    file = io.BytesIO()
    np.savez(file, *(weight.astype(np.float32) if weight.dtype.kind == "V" else weight for weight in weights))
    return file.getvalue()


def unpack_weights(data: bytes) -> list[np.ndarray[Any, Any]]:
    """The weights from the bytes that `pack_weights` returned."""
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        return [arrays[f"arr_{number}"] for number in range(len(arrays.files))]


def _reported_outcome(
    reporter: Reporter, status_without_value: str = STOPPED, weights: list[np.ndarray[Any, Any]] | None = None
) -> Outcome:
    """The outcome according to the reports; without a finite value it failed if it diverged, else has the given status."""
    error = ""
    if reporter.diverged_at is not None:
        name = reporter.diverged_metric
        where = f"of {name!r} in epoch {reporter.diverged_at}" if name else f"of epoch {reporter.diverged_at}"
        error = f"the value {where} is not finite: {'the trial ended' if name else 'training diverged'} there"
    if not reporter.values:
        return Outcome(FAILED if error else status_without_value, history=reporter.history, error=error)
    return Outcome(
        reporter.status,
        reporter.best,
        reporter.best_epoch,
        reporter.history,
        error=error,
        model=b"" if weights is None else pack_weights(weights),
        suffix="npz",
        values=reporter.values,
    )


def _check_fit_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    known = set(inspect.signature(keras.Model.fit).parameters) - {"self", "x", "y", "verbose"}
    for name in arguments:
        if name not in known:
            raise SearchDefinitionError(
                f"the function that builds models returned {name!r} as an argument of fit. {known_names(name, known)}"
            )
    return arguments


def _unknown_status_message(status: Any) -> str:
    unfinished = " (which means that a trial has not ended)" * (status in _UNFINISHED)
    return (
        f"the objective returned the status {_short_repr(status)}{unfinished}; expected 'ok' (hyperopt.STATUS_OK) with a "
        "'loss', or 'fail' (hyperopt.STATUS_FAIL)."
    )


def _missing_loss_message(returned: Any, metrics: Sequence[str]) -> str:
    """The error message for a result of an objective that has no loss."""
    number = "a number" if len(metrics) == 1 else f"a sequence of {len(metrics)} numbers ({', '.join(metrics)})"
    expected = f"expected {number}, or a dict with 'loss' and 'status'."
    if not isinstance(returned, Mapping):
        forgotten = " Is its return statement missing?" if returned is None else ""
        return f"the objective returned {_short_repr(returned)}; {expected}{forgotten}"
    if "loss" in returned:
        return f"the objective returned {_short_repr(returned['loss'])} as its loss; expected {number}."
    keys = ", ".join(map(repr, returned)) or "none"
    return (
        f"the objective returned a dict without the key 'loss' (its keys: {keys}); add 'loss' with {number}, or return the "
        "status 'fail' (hyperopt.STATUS_FAIL)."
    )


def _short_repr(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}... ({type(value).__name__})"


def _numbers(loss: Any, count: int) -> tuple[float, ...] | None:
    """The loss of an objective, or the losses; ``None`` if it is something else."""
    given = [loss] if count == 1 else list(loss) if isinstance(loss, (list, tuple)) or np.ndim(loss) == 1 else []
    numbers = [number for number in map(_number, given) if number is not None]
    return tuple(numbers) if len(numbers) == len(given) == count else None


def _number(value: Any) -> float | None:
    try:
        return float(value) if not isinstance(value, (str, bytes)) else None
    except (TypeError, ValueError):
        return None


def _json_compatible(result: Mapping[Any, Any]) -> dict[str, Any]:
    """Convert the entries of an objective's result to JSON values; others become their ``repr``."""
    converted = {}
    for key, value in result.items():
        plain = value.item() if isinstance(value, np.generic) else value.tolist() if isinstance(value, np.ndarray) else value
        try:
            text = json.dumps(plain)
        except (TypeError, ValueError):
            text = json.dumps(repr(value))
        if len(text) > EXTRA_LENGTH:
            text = json.dumps(f"{text[:100]}... ({len(text)} characters: too long to be kept)")
        converted[str(key)] = json.loads(text)
    return converted


def _pack_model(model: Any) -> bytes:
    if not isinstance(model, keras.Model):
        raise SearchDefinitionError(f"the objective returned {model!r} as its model; expected a keras.Model.")
    return save_bytes(model)
