"""Checks the arguments of a search before it starts, and makes its limits and the objective of its trials from them."""

from __future__ import annotations

import difflib
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import keras
import numpy as np

from sparkkeras import arguments
from sparkkeras.errors import ConfigurationError, counted
from sparkkeras.hyperopt.ledger import Limits
from sparkkeras.hyperopt.objective import CallObjective, Fit, Objective
from sparkkeras.hyperopt.space import Space
from sparkkeras.hyperopt.trials import Metrics, Trial
from sparkkeras.modeling.custom_code import ByValue
from sparkkeras.training.callbacks import as_callbacks

_MINIMIZED = re.compile(r"loss|error|mae|mse|rmse|mape|msle|hinge|crossentropy|divergence|poisson|logcosh|log_cosh|false|kl")
_MAXIMIZED = re.compile(
    r"acc|accuracy|auc|precision|recall|f1|fbeta|iou|io_u|r2|sensitivity|specificity|similarity|correlation|true"
)
"""Words in the names of metrics to minimize, and of metrics to maximize."""


@dataclass(frozen=True)
class TrialFitArguments:
    """The arguments of a search for fitting each trial's model; they do not apply to an objective."""

    epochs: int = 1
    batch_size: int = 32
    metric: str | Sequence[str] = "val_loss"
    validation_split: float = 0.0
    validation_data: Any = None
    callbacks: Sequence[keras.callbacks.Callback] | keras.callbacks.Callback | None = None
    class_weight: Mapping[int, float] | None = None

    def objective(self, build: Callable[[Any], Any], has_rows: bool) -> Fit:
        """Make the objective of trials that build and fit a model.

        Args:
            build: Called with hyper-parameters; returns a compiled model.
            has_rows: Whether the driver has the rows; else a function reads them on the workers.

        Raises:
            ConfigurationError: An argument is out of range.
            CustomObjectError: The function or a callback cannot be sent to workers.
        """
        given = {
            "model": build,
            "epochs": arguments.integer("epochs", self.epochs),
            "batch_size": arguments.integer("batch_size", self.batch_size),
            "callbacks": as_callbacks("callbacks", self.callbacks),
            "class_weight": arguments.class_weight("class_weight", self.class_weight),
        }
        arguments.fraction("validation_split", self.validation_split)
        if self.validation_split:
            given["validation_split"] = self.validation_split
        if not has_rows and self.validation_data is not None:
            raise ConfigurationError(
                "validation_data cannot be combined with a function that reads the data: let it return a dict, "
                '{"x": ..., "y": ..., "validation_data": (x, y)}.'
            )
        return Fit(ByValue.dump(given, "the model of the search"), names_of(self.metric), has_rows)

    def reject_given(self) -> None:
        """Check that no option was given: they have no effect on an objective.

        Raises:
            ConfigurationError: An option differs from its default.
        """
        for option in fields(self):
            given = getattr(self, option.name)
            if option.name == "metric" and len(names_of(given)) > 1:  # they name what the objective returns
                continue
            if given is not option.default and (option.default is None or given != option.default):
                raise ConfigurationError(
                    f"{option.name}= works only with model=: an objective trains the model itself, so set it there."
                )


def make_objective(
    model: Callable[[Any], Any] | None,
    objective: Callable[..., Any] | None,
    fit_arguments: TrialFitArguments,
    *,
    has_rows: bool,
    has_data: bool,
) -> Objective:
    """Make the objective of trials from the function that the user gave, which builds models or trains one itself.

    Args:
        model: The function that builds models.
        objective: The function that trains a model.
        fit_arguments: The arguments for fitting the models of ``model``.
        has_rows: Whether the driver has the data; else a function reads it on the workers.
        has_data: Whether any data was given.

    Raises:
        ConfigurationError: Both functions were given, or none; or a function or an argument is invalid.
        CustomObjectError: The function or a callback cannot be sent to workers.
    """
    if (model is None) == (objective is None):
        raise ConfigurationError(
            "give exactly one of model= (a function that builds a model) and objective= (a function that trains one)."
        )
    if objective is None:
        return fit_arguments.objective(_check_function("model", model), has_rows)
    fit_arguments.reject_given()
    metrics = names_of(fit_arguments.metric)
    call = _make_call(_check_function("objective", objective), has_data)
    return replace(call, metrics=metrics) if len(metrics) > 1 else call


def _make_call(objective: Callable[..., Any], has_data: bool) -> CallObjective:
    """Make the objective of trials that call a function, with ``(params, data)`` if data is given or required."""
    for count in (2, 1) if has_data else (1, 2):
        if _accepts(objective, count):
            return CallObjective(ByValue.dump(objective, "objective"), count == 2)
    raise ConfigurationError(f"objective={objective!r}: expected a function of (params, data) or of (params).")


def _check_function(name: str, given: Any) -> Callable[..., Any]:
    """Check the function that was given as ``model=`` or ``objective=``."""
    if isinstance(given, keras.Model):
        raise ConfigurationError(
            f"{name}={given!r} is a model; expected a function that builds one, build(params) -> compiled keras.Model."
        )
    if not callable(given) or isinstance(given, type):
        raise ConfigurationError(f"{name}={given!r}: expected a function.")
    if name == "model" and not _accepts(given, 1):
        raise ConfigurationError(f"model={given!r}: expected a function of the hyper-parameters, build(params).")
    function: Callable[..., Any] = given
    return function


def names_of(given: Any) -> tuple[str, ...]:
    """The names in ``metric=`` or ``mode=``: one, or a sequence of several."""
    return tuple(given) if given and isinstance(given, (list, tuple)) else (given,)


def metrics_of(metric: str | Sequence[str], mode: str | Sequence[str]) -> Metrics:
    """The metrics of a search, from ``metric=`` and ``mode=``: a name, or several with one mode or with one for each.

    Raises:
        ConfigurationError: There is no name or one twice, the numbers differ, or see `sign_of`.
    """
    names, modes = names_of(metric), names_of(mode)
    modes = modes * len(names) if isinstance(mode, str) else modes
    if len(modes) != len(names):
        raise ConfigurationError(
            f"metric={metric!r} has {counted(len(names), 'name')}, and mode={mode!r} {counted(len(modes), 'mode')}: "
            'give one mode for each metric, such as metric=("val_loss", "size"), mode=("min", "min"), or one for all.'
        )
    fix = ['give mode= a sequence with "min", "max" or "auto" for each metric'] if len(names) > 1 else []
    found = {name: sign_of(name, each, *fix) for name, each in zip(names, modes, strict=True)}
    if len(found) < len(names):
        raise ConfigurationError(f"metric={metric!r} names a metric twice: give each of them once.")
    return found


def check_single(metrics: Metrics, **given: object) -> None:
    """Check that arguments that decide by a single value are not given for several metrics.

    Raises:
        ConfigurationError: One of them is not ``None``.
    """
    for name, value in given.items():
        if value is not None and len(metrics) > 1:
            raise ConfigurationError(
                f"{name}={value!r} decides by a single value, and metric= names {len(metrics)}: {', '.join(metrics)}. Omit "
                f"{name}=, or give a single metric."
            )


def sign_of(metric: str, mode: str, fix: str = 'give mode="min" or mode="max"') -> float:
    """1 to minimize a metric, -1 to maximize it; ``"auto"`` infers the direction from words in its name.

    Raises:
        ConfigurationError: The direction cannot be inferred, the mode is unknown, or the metric is not a name.
    """
    arguments.one_of("mode", mode, ("auto", "min", "max"))
    if not isinstance(metric, str) or not metric:
        raise ConfigurationError(f"metric={metric!r}: expected the name of a metric in the logs of fit, such as 'val_loss'.")
    if mode != "auto":
        return 1.0 if mode == "min" else -1.0
    minimized, maximized = (_last_match_end(each, metric.lower()) for each in (_MINIMIZED, _MAXIMIZED))
    if minimized == maximized:
        near = difflib.get_close_matches(metric, _COMMON_METRICS, 1, 0.8)
        meant = f". Did you mean {near[0]!r}? Else" if near else ";"
        raise ConfigurationError(
            f"metric={metric!r}: cannot infer from its name whether to minimize or maximize it{meant} {fix}."
        )
    return 1.0 if minimized > maximized else -1.0  # the last word counts: the name of an output, any word, comes first


_COMMON_METRICS = [
    prefix + name for prefix in ("", "val_") for name in ("loss", "accuracy", "auc", "mae", "mse", "f1_score")
]


def _last_match_end(words: re.Pattern[str], name: str) -> int:
    """The index after the last of ``words`` in a name; -1 without one."""
    return max((match.end(1) for match in re.finditer(rf"(?<![^_])({words.pattern})(?![^_\d])", name)), default=-1)


def make_limits(
    space: Space,
    metrics: Metrics,
    *,
    max_evals: int | None,
    pruner: object,
    timeout: float | None,
    loss_threshold: float | None,
    early_stop_fn: Callable[..., Any] | None,
    max_failures: int | None,
    lease_seconds: float,
) -> Limits:
    """Make the limits of a search from the arguments of `HyperParamModel.minimize`.

    Raises:
        ConfigurationError: An argument is out of range, or the search would never end.
    """
    check_single(metrics, pruner=pruner, loss_threshold=loss_threshold, early_stop_fn=early_stop_fn)
    sign = next(iter(metrics.values()))
    limits = Limits(
        max_evals=arguments.optional_integer("max_evals", max_evals),
        sign=sign,
        timeout=_positive("timeout", timeout),
        loss_threshold=_finite("loss_threshold", loss_threshold),
        max_failures=arguments.optional_integer("max_failures", max_failures, low=0),
        early_stop=_early_stop(early_stop_fn, sign, space),
        lease_seconds=lease_seconds,
        num_metrics=len(metrics),
    )
    if max_evals is None and timeout is None:
        raise ConfigurationError(
            "the search would never end: give max_evals= (the number of trials), timeout= (in seconds), or both."
        )
    return limits


def num_kept_models(given: object) -> int | None:
    """The number of models to keep; ``None`` is all.

    Raises:
        ConfigurationError: ``given`` is neither a number of at least 0 nor ``"all"``.
    """
    if given == "all":
        return None
    if isinstance(given, str):
        raise ConfigurationError(f'keep_models={given!r}: expected a whole number of at least 0, or "all".')
    return arguments.integer("keep_models", given, low=0)


def _positive(name: str, value: float | None) -> float | None:
    if value is not None and (not is_finite(value) or value <= 0):
        raise ConfigurationError(f"{name}={value!r}: expected a positive number of seconds, or None.")
    return value


def _finite(name: str, value: float | None) -> float | None:
    if value is not None and not is_finite(value):
        raise ConfigurationError(f"{name}={value!r}: expected a finite number, or None.")
    return value


def _early_stop(function: Callable[..., Any] | None, sign: float, space: Space) -> Callable[[Sequence[Trial]], bool] | None:
    """Adapt a hyperopt stop function, which returns whether to stop and its arguments for the next call."""
    if function is None:
        return None
    if not callable(function):
        raise ConfigurationError(f"early_stop_fn={function!r}: expected a function, or None.")
    next_arguments: list[Any] = []
    from sparkkeras.hyperopt.expressions import history_of

    def stop(trials: Sequence[Trial]) -> bool:
        valued = [trial for trial in trials if trial.value is not None]
        if not valued:
            return False
        should_stop, next_arguments[:] = function(history_of(valued, sign, space.parameters), *next_arguments)
        return bool(should_stop)

    return stop


def _accepts(function: Callable[..., Any], count: int) -> bool:
    """Whether a function can be called with ``count`` arguments; true if its signature is unknown."""
    try:
        inspect.signature(function).bind(*(None,) * count)
    except TypeError:
        return False
    except ValueError:  # no signature, as for some builtins
        return True
    return True


def is_finite(value: object) -> bool:
    """Whether ``value`` is a finite number; booleans do not count as numbers."""
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool) and math.isfinite(value)
