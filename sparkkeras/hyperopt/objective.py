"""What a trial does, in the process that it has for itself."""

from __future__ import annotations

import inspect
import io
import json
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import keras
import numpy as np

from sparkkeras.data.block import from_arrays
from sparkkeras.data.schema import label_ranges
from sparkkeras.errors import ConfigurationError, DataError, ModelError, known_names
from sparkkeras.hyperopt import reporting
from sparkkeras.hyperopt.reporting import ReportCallback, Reporter, SearchMistakeError, TrialEnd
from sparkkeras.hyperopt.service import Outcome
from sparkkeras.hyperopt.subprocess_task import StopWork
from sparkkeras.hyperopt.trials import FAILED, STOPPED
from sparkkeras.modeling.archive import check_trainable, save_bytes, schema_of
from sparkkeras.modeling.custom_code import ByValue
from sparkkeras.modeling.labels import check_labels
from sparkkeras.training.callbacks import as_callbacks
from sparkkeras.worker import device
from sparkkeras.worker.trainer import batch_hooks

TRACEBACK_LENGTH = 20_000
"""A longer traceback loses its beginning."""

EXTRA_LENGTH = 64 * 1024
"""A longer member of what an objective returns, as JSON, is cut: the driver keeps them all."""

_STATUS_OK, _STATUS_FAIL, _UNFINISHED = "ok", "fail", ("new", "running", "suspended")
"""hyperopt's statuses; its own constants would need hyperopt on the workers."""

Data = Any


class Objective(Protocol):
    """What is done with the hyper-parameters of a trial: a frozen dataclass that is called."""

    def __call__(self, params: Any, data: Data, reporter: Reporter) -> Outcome:
        """Run a trial; what it raises is the trial's failure."""
        ...


@dataclass(frozen=True)
class Fit:
    """Builds a model and fits it.

    Attributes:
        build: Gives a compiled model for hyper-parameters, or ``(model, arguments of fit)``.
        arguments: Arguments of ``fit`` for all trials.
        metric: What is to be optimized, as in the logs of ``fit``.
        has_rows: Whether the driver has rows to build a model by.
    """

    build: ByValue[Callable[[Any], Any]]
    arguments: ByValue[dict[str, Any]]
    metric: str
    has_rows: bool = True

    def __call__(self, params: Any, data: Data, reporter: Reporter) -> Outcome:
        """Train; the outcome has the weights of the best epoch."""
        device.wake()
        model, own = built(self.build.fresh(), params)
        arguments = {**data, **self.arguments.fresh(), **from_params(params), **_checked(own)}
        callbacks = as_callbacks("callbacks", arguments.pop("callbacks", None))
        report = ReportCallback(self.metric, arguments.get("validation_freq", 1))
        if arguments.get("validation_data") is not None and arguments.get("validation_split"):
            raise SearchMistakeError("give one of validation_split and validation_data.")
        if not model.built and not self.has_rows:
            raise SearchMistakeError(
                f"the model {model.name!r} is not built, and where a function reads the data the driver has no rows to "
                "build it by: begin it with keras.Input(shape)."
            )
        if model.built:
            _check_data(model, data)
        steps = int(model.steps_per_execution)
        model.steps_per_execution = device.steps_per_execution(model, steps, any(map(batch_hooks, callbacks)))
        try:
            model.fit(**arguments, callbacks=[*callbacks, report], verbose=0)
        except (StopWork, TrialEnd) as end:
            reporter.end(end)
            return _reported(reporter, weights=report.best_weights)
        if not reporter.history or (report.best_weights is None and reporter.diverged_at is None):
            raise SearchMistakeError(reporting.unknown_metric(self.metric, reporter.history))
        return _reported(reporter, weights=report.best_weights)


@dataclass(frozen=True)
class Call:
    """Calls a function of the person's. The backend starts when that function first uses it, if it does.

    Attributes:
        function: Takes the hyper-parameters and the data; returns a loss, or hyperopt's dict with ``status``, ``loss``, and
            whatever else; ``model`` in it is kept. Anything else is a mistake that ends the search.
        has_data: Whether it takes data, too.
    """

    function: ByValue[Callable[..., Any]]
    has_data: bool

    def __call__(self, params: Any, data: Data, reporter: Reporter) -> Outcome:
        """Call it."""
        returned = self.function.fresh()(*((params, data) if self.has_data else (params,)))
        result = dict(returned) if isinstance(returned, Mapping) else {"loss": returned}
        status, loss, model = result.pop("status", _STATUS_OK), result.pop("loss", None), result.pop("model", None)
        extra = _known_to_json(result)
        if status not in (_STATUS_OK, _STATUS_FAIL):
            raise SearchMistakeError(_unknown_status(status))
        if status == _STATUS_FAIL:
            return Outcome(
                FAILED, history=reporter.history, error=f"the objective returned status 'fail': {extra}", extra=extra
            )
        value = _number(loss)
        if value is None:
            raise SearchMistakeError(_without_loss(returned))
        if not np.isfinite(value):
            return replace(_reported(reporter, FAILED), error=f"the objective returned the loss {value}", extra=extra)
        return Outcome(
            reporter.status,
            value,
            reporter.best_epoch if reporter.best == value else None,
            reporter.history,
            extra=extra,
            model=b"" if model is None else _packed_model(model),
            suffix="keras",
        )


def run_trial(
    objective: Objective, params: Any, data: Data, seed: int, tell: Callable[[int, float], str], sign: float
) -> Outcome:
    """Run a trial; whatever it raises is reported in the outcome."""
    reporter = Reporter(tell, sign)
    reporting.current = reporter
    try:
        keras.utils.set_random_seed(seed)
        return objective(params, data, reporter)
    except (StopWork, TrialEnd) as end:
        reporter.end(end)
        return _reported(reporter)
    except (Exception, SystemExit) as error:
        told = traceback.format_exc()[-TRACEBACK_LENGTH:]
        last = f"{type(error).__name__}: {error}"
        if isinstance(error, SearchMistakeError):
            return Outcome(FAILED, history=reporter.history, error=str(error), is_mistake=True)
        return Outcome(FAILED, history=reporter.history, error=last, traceback=told)
    finally:
        reporting.current = None


def built(build: Callable[[Any], Any], params: Any) -> tuple[keras.Model, dict[str, Any]]:
    """The model for hyper-parameters, and the arguments of ``fit`` that come with it.

    Raises:
        SearchMistakeError: The function gives something else, or a model that is not compiled.
    """
    given = build(params)
    model, arguments = given if isinstance(given, tuple) and len(given) == 2 else (given, {})
    if not isinstance(model, keras.Model) or not isinstance(arguments, Mapping):
        raise SearchMistakeError(
            f"the function that builds models returned {given!r}; expected a compiled keras.Model, or (model, a dict of "
            "arguments of fit)."
        )
    if model.built:
        _check(model)
    elif not model.compiled:
        raise SearchMistakeError(
            f"the function that builds models returned {model.name!r}, which is not compiled: call model.compile(...) in it."
        )
    return model, dict(arguments)


def _check(model: keras.Model) -> None:
    try:
        check_trainable(model)
    except ModelError as error:
        raise SearchMistakeError(f"the function that builds models returned one that cannot be trained: {error}") from error


def _check_data(model: keras.Model, data: Mapping[str, Any]) -> None:
    block = from_arrays(data["x"], data["y"], None, *(schema_of(model).expected_x, schema_of(model).expected_y))
    try:
        schema_of(model).check_features(block.spec, has_transform=False)
        check_labels(model, block.spec, label_ranges(block))
    except DataError as error:
        raise SearchMistakeError(str(error)) from error


def from_params(params: Any) -> dict[str, Any]:
    """The arguments of ``fit`` that may be hyper-parameters."""
    given = params if isinstance(params, Mapping) else {}
    numbers = {name: int(given[name]) for name in ("epochs", "batch_size") if name in given}
    return {**numbers, **({"callbacks": given["callbacks"]} if "callbacks" in given else {})}


def packed_weights(weights: list[np.ndarray[Any, Any]]) -> bytes:
    """Weights as the bytes of a file; those of a type that NumPy does not know (bfloat16) as float32."""
    file = io.BytesIO()
    np.savez(file, *(weight.astype(np.float32) if weight.dtype.kind == "V" else weight for weight in weights))
    return file.getvalue()


def unpacked_weights(data: bytes) -> list[np.ndarray[Any, Any]]:
    """What `packed_weights` was given."""
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        return [arrays[f"arr_{number}"] for number in range(len(arrays.files))]


def _reported(reporter: Reporter, without: str = STOPPED, weights: list[np.ndarray[Any, Any]] | None = None) -> Outcome:
    """The outcome by what was reported; one without any value has the status ``without``, or has diverged."""
    error = ""
    if reporter.diverged_at is not None:
        error = f"the value of epoch {reporter.diverged_at} is not finite: training diverged there"
    if reporter.best is None:
        return Outcome(FAILED if error else without, history=reporter.history, error=error)
    return Outcome(
        reporter.status,
        reporter.best,
        reporter.best_epoch,
        reporter.history,
        error=error,
        model=b"" if weights is None else packed_weights(weights),
        suffix="npz",
    )


def _checked(arguments: dict[str, Any]) -> dict[str, Any]:
    known = set(inspect.signature(keras.Model.fit).parameters) - {"self", "x", "y", "verbose"}
    for name in arguments:
        if name not in known:
            raise SearchMistakeError(
                f"the function that builds models returned {name!r} as an argument of fit. {known_names(name, known)}"
            )
    return arguments


def _unknown_status(status: Any) -> str:
    unfinished = " (which is for trials that have not ended)" * (status in _UNFINISHED)
    return (
        f"the objective returned the status {_shortened(status)}{unfinished}; expected 'ok' (hyperopt.STATUS_OK) beside a "
        "'loss', or 'fail' (hyperopt.STATUS_FAIL)."
    )


def _without_loss(returned: Any) -> str:
    """Why what an objective returned has no loss."""
    expected = "expected a number, or a dict with 'loss' and 'status'."
    if not isinstance(returned, Mapping):
        forgotten = " Has it no return statement?" if returned is None else ""
        return f"the objective returned {_shortened(returned)}; {expected}{forgotten}"
    if "loss" in returned:
        return f"the objective returned {_shortened(returned['loss'])} as its loss; expected a number."
    keys = ", ".join(map(repr, returned)) or "none"
    return (
        f"the objective returned a dict without the key 'loss' (its keys: {keys}); add it, a number, or return the status "
        "'fail' (hyperopt.STATUS_FAIL)."
    )


def _shortened(value: Any) -> str:
    told = repr(value)
    return told if len(told) <= 200 else f"{told[:200]}... ({type(value).__name__})"


def _number(value: Any) -> float | None:
    try:
        return float(value) if not isinstance(value, (str, bytes)) else None
    except (TypeError, ValueError):
        return None


def _known_to_json(result: Mapping[Any, Any]) -> dict[str, Any]:
    """What JSON knows of an objective's result."""
    known = {}
    for key, value in result.items():
        plain = value.item() if isinstance(value, np.generic) else value.tolist() if isinstance(value, np.ndarray) else value
        try:
            told = json.dumps(plain)
        except (TypeError, ValueError):
            told = json.dumps(repr(value))
        if len(told) > EXTRA_LENGTH:
            told = json.dumps(f"{told[:100]}... ({len(told)} characters: too long to be kept)")
        known[str(key)] = json.loads(told)
    return known


def _packed_model(model: Any) -> bytes:
    if not isinstance(model, keras.Model):
        raise ConfigurationError(f"the objective returned {model!r} as its model; expected a keras.Model.")
    return save_bytes(model)
