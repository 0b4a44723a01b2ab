"""What a search is asked for, checked, before anything runs: its limits, and what a trial does."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import keras

from sparkkeras import arguments
from sparkkeras.errors import ConfigurationError
from sparkkeras.hyperopt.ledger import Limits
from sparkkeras.hyperopt.objective import Call, Fit
from sparkkeras.hyperopt.pruners import Pruner, make_pruner
from sparkkeras.hyperopt.space import Space, history_of, is_finite
from sparkkeras.hyperopt.trials import Trial
from sparkkeras.modeling.custom_code import ByValue
from sparkkeras.training.callbacks import as_callbacks

_MINIMIZED = re.compile(r"loss|error|mae|mse|rmse|mape|msle|hinge|crossentropy|divergence|poisson|logcosh|log_cosh|false|kl")
_MAXIMIZED = re.compile(
    r"acc|accuracy|auc|precision|recall|f1|fbeta|iou|io_u|r2|sensitivity|specificity|similarity|correlation|true"
)
"""Words in the names of metrics that are better the smaller, or the larger, they are."""


@dataclass(frozen=True)
class FitOptions:
    """The arguments of a search that say how each trial's model is fitted; an objective does without them."""

    epochs: int = 1
    batch_size: int = 32
    metric: str = "val_loss"
    validation_split: float = 0.0
    validation_data: Any = None
    callbacks: Sequence[keras.callbacks.Callback] | keras.callbacks.Callback | None = None
    class_weight: Mapping[int, float] | None = None

    def fit(self, build: Callable[[Any], Any], data: Any) -> Fit:
        """What a trial does with a function that builds models.

        Args:
            build: Called with hyper-parameters.
            data: What the trials train on, or a function that reads it where they are.

        Raises:
            ConfigurationError: An argument is out of range.
            CustomObjectError: The function, or a callback, cannot travel.
        """
        given = {
            "epochs": arguments.whole_number("epochs", self.epochs),
            "batch_size": arguments.whole_number("batch_size", self.batch_size),
            "callbacks": as_callbacks("callbacks", self.callbacks),
            "class_weight": arguments.class_weight(self.class_weight),
        }
        arguments.fraction("validation_split", self.validation_split)
        if self.validation_split:
            given["validation_split"] = self.validation_split
        if callable(data) and self.validation_data is not None:
            raise ConfigurationError(
                "validation_data beside a function that reads the data: let the function return a dict with it, "
                '{"x": ..., "y": ..., "validation_data": (x, y)}.'
            )
        return Fit(ByValue.dump(build, "model"), ByValue.dump(given, "callbacks"), self.metric, not callable(data))

    def refuse(self) -> None:
        """Refuse any that is given, since there is an objective, which would not hear of it."""
        for option in fields(self):
            given = getattr(self, option.name)
            if given is not option.default and (option.default is None or given != option.default):
                raise ConfigurationError(
                    f"{option.name}= goes with model=; an objective trains as it likes, so say it there."
                )


def call_of(objective: Callable[..., Any], data: Any) -> Call:
    """What a trial does with an objective: calls it with data, too, if there are any, or it does not work without.

    Raises:
        ConfigurationError: It takes neither one argument nor two.
        CustomObjectError: It cannot travel.
    """
    for count in (1, 2) if data is None else (2, 1):
        if _takes(objective, count):
            return Call(ByValue.dump(objective, "objective"), count == 2)
    raise ConfigurationError(f"objective={objective!r}: expected a function of (params, data) or of (params).")


def check_function(name: str, given: Any) -> Callable[..., Any]:
    """The function that a person gave as ``model=`` or ``objective=``.

    Raises:
        ConfigurationError: It is none.
    """
    if isinstance(given, keras.Model):
        raise ConfigurationError(
            f"{name}={given!r} is a model; expected a function that builds one: build(params) -> compiled keras.Model."
        )
    if not callable(given) or isinstance(given, type):
        raise ConfigurationError(f"{name}={given!r}: expected a function.")
    if name == "model" and not _takes(given, 1):
        raise ConfigurationError(f"model={given!r}: expected a function of the hyper-parameters, build(params).")
    function: Callable[..., Any] = given
    return function


def sign_of(metric: str, mode: str) -> float:
    """1 where small values of a metric are good, -1 where large ones are; ``"auto"`` goes by words in its name.

    Raises:
        ConfigurationError: The name does not show the direction, or something is no name and no mode.
    """
    arguments.one_of("mode", mode, ("auto", "min", "max"))
    if not isinstance(metric, str) or not metric:
        raise ConfigurationError(f"metric={metric!r}: expected the name of a figure of fit, such as 'val_loss'.")
    if mode != "auto":
        return 1.0 if mode == "min" else -1.0
    small, large = (_last(each, metric.lower()) for each in (_MINIMIZED, _MAXIMIZED))
    if small == large:
        raise ConfigurationError(
            f'metric={metric!r}: its name does not show whether it should be small or large; give mode="min" or mode="max".'
        )
    return 1.0 if small > large else -1.0  # the name of an output, which may be any word, comes first


def _last(words: re.Pattern[str], name: str) -> int:
    """Where the last of some words in a name ends; -1 where it has none."""
    return max((found.end(1) for found in re.finditer(rf"(?<![^_])({words.pattern})(?![^_\d])", name)), default=-1)


def limits_of(
    space: Space,
    sign: float,
    *,
    max_evals: int | None,
    pruner: str | Pruner | None,
    timeout: float | None,
    loss_threshold: float | None,
    early_stop_fn: Callable[..., Any] | None,
    max_failures: int | None,
    lease_seconds: float,
) -> Limits:
    """When the search ends, from arguments of `HyperParamModel.minimize`.

    Raises:
        ConfigurationError: One is out of range, or the search would never end.
    """
    limits = Limits(
        max_evals=arguments.optional_number("max_evals", max_evals),
        sign=sign,
        pruner=make_pruner(pruner),
        timeout=_positive("timeout", timeout),
        loss_threshold=_finite("loss_threshold", loss_threshold),
        max_failures=arguments.optional_number("max_failures", max_failures, low=0),
        early_stop=_early_stop(early_stop_fn, sign, space),
        lease_seconds=lease_seconds,
    )
    if max_evals is None and timeout is None:
        raise ConfigurationError("give max_evals=, the number of trials, or timeout=, in seconds, or both.")
    return limits


def kept_models(given: object) -> int | None:
    """How many models are kept; ``None`` is all of them.

    Raises:
        ConfigurationError: It is neither a number nor ``"all"``.
    """
    if given == "all":
        return None
    if isinstance(given, str):
        raise ConfigurationError(f'keep_models={given!r}: expected a whole number of at least 0, or "all".')
    return arguments.whole_number("keep_models", given, low=0)


def _positive(name: str, value: float | None) -> float | None:
    if value is not None and (not is_finite(value) or value <= 0):
        raise ConfigurationError(f"{name}={value!r}: expected a positive number of seconds, or None.")
    return value


def _finite(name: str, value: float | None) -> float | None:
    if value is not None and not is_finite(value):
        raise ConfigurationError(f"{name}={value!r}: expected a number, or None.")
    return value


def _early_stop(function: Callable[..., Any] | None, sign: float, space: Space) -> Callable[[Sequence[Trial]], bool] | None:
    """A stop function of hyperopt's kind, which hands its arguments on from call to call."""
    if function is None:
        return None
    if not callable(function):
        raise ConfigurationError(f"early_stop_fn={function!r}: expected a function, or None.")
    handed_on: list[Any] = []

    def stop(trials: Sequence[Trial]) -> bool:
        valued = [trial for trial in trials if trial.value is not None]
        said, handed_on[:] = function(history_of(valued, sign, space.labels), *handed_on) if valued else (False, handed_on)
        return bool(said)

    return stop


def _takes(function: Callable[..., Any], count: int) -> bool:
    """Whether a function can be called with so many arguments; true where that is not known."""
    try:
        inspect.signature(function).bind(*(None,) * count)
    except TypeError:
        return False
    except ValueError:  # it has no signature
        return True
    return True
