"""`HyperParameters`: hyper-parameters that a trial defines while it runs, in the style of KerasTuner and of Optuna."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from sparkkeras.arguments import known_arguments
from sparkkeras.errors import ConfigurationError, known_names
from sparkkeras.hyperopt.distributions import Distribution, choice, integer, loguniform, uniform
from sparkkeras.hyperopt.reporting import SearchDefinitionError
from sparkkeras.hyperopt.values import JSON_TYPES

Ask = Callable[[str, Distribution], Any]
"""Chooses the value of a hyper-parameter, given its name."""


class _UnknownMethodError(SearchDefinitionError, AttributeError):
    """A method of KerasTuner or Optuna is not supported; code may also ask by ``hasattr``."""


class HyperModel:
    """An object with a method ``build(hp)``, like ``keras_tuner.HyperModel``, as the function that builds models.

    A function ``build(hp)`` needs no `HyperModel`.

    Args:
        build: The object, or a function of `HyperParameters`, which returns a compiled model.

    Raises:
        ConfigurationError: ``build`` is neither.

    Example::

        def build(hp):
            model = keras.Sequential([keras.Input((64,))])
            for number in range(hp.Int("layers", 1, 3)):
                model.add(keras.layers.Dense(hp.Int(f"units_{number}", 32, 512, step=32), "relu"))
            ...

        search.minimize(model=HyperModel(build), data=(x, y), max_evals=50, validation_split=0.2)
    """

    @known_arguments
    def __init__(self, build: Any) -> None:
        function = getattr(build, "build", build)
        if not callable(function) or isinstance(build, (type, keras.Model)):
            raise ConfigurationError(f"build={build!r}: expected a function of hp, or an object with a method build(hp).")
        self._build: Callable[[Any], Any] = function

    def __call__(self, hp: Any) -> Any:
        """Build the model of a trial."""
        return self._build(hp if isinstance(hp, HyperParameters) else HyperParameters(hp))


class HyperParameters:
    """The hyper-parameters of a trial, which its function defines by calling these methods; the first call chooses a value.

    It has the methods of ``keras_tuner.HyperParameters`` and of ``optuna.Trial`` that define values. KerasTuner's arguments
    ``default``, ``ordered``, ``parent_name`` and ``parent_values`` have no effect.

    Args:
        values: Values by name.
        ask: Chooses further values; ``None``: there are no more, since the trial has ended.
    """

    def __init__(self, values: Mapping[str, Any], ask: Ask | None = None) -> None:
        self.values = dict(values)
        self._ask = ask
        self._defined: dict[str, Distribution] = {}

    def Int(  # noqa: N802
        self, name: str, min_value: int, max_value: int, step: int | None = None, sampling: str | None = None, **scope: Any
    ) -> int:
        """A whole number from ``min_value`` to ``max_value``."""
        _check_scope("Int", name, scope)
        return self.suggest_int(name, min_value, max_value, step=step or 1, log=_is_log("Int", name, sampling, step))

    def Float(  # noqa: N802
        self,
        name: str,
        min_value: float,
        max_value: float,
        step: float | None = None,
        sampling: str | None = None,
        **scope: Any,
    ) -> float:
        """A number from ``min_value`` to ``max_value``."""
        _check_scope("Float", name, scope)
        return self.suggest_float(name, min_value, max_value, step=step, log=_is_log("Float", name, sampling, step))

    def Choice(self, name: str, values: Sequence[Any], **scope: Any) -> Any:  # noqa: N802
        """One of some numbers or strings."""
        _check_scope("Choice", name, scope)
        return self.suggest_categorical(name, values)

    def Boolean(self, name: str, **scope: Any) -> bool:  # noqa: N802
        """True or False."""
        _check_scope("Boolean", name, scope)
        return bool(self.suggest_categorical(name, (False, True)))

    def Fixed(self, name: str, value: Any, **scope: Any) -> Any:  # noqa: N802
        """A value that is not searched."""
        _check_scope("Fixed", name, scope)
        return self.values.setdefault(name, value)

    def get(self, name: str) -> Any:
        """The value of a hyper-parameter that was defined before."""
        if name not in self.values:
            raise SearchDefinitionError(
                f"hp.get({name!r}): there is no such hyper-parameter. Define it first, such as hp.Float({name!r}, 0, 1), or "
                f"give the search a space=. {known_names(name, self.values)}"
            )
        return self.values[name]

    def __getitem__(self, name: str) -> Any:
        """See `get`."""
        return self.get(name)

    @contextmanager
    def conditional_scope(self, parent_name: str, parent_values: Any) -> Iterator[None]:
        """Has no effect: a hyper-parameter is searched in the trials that define it."""
        yield

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        """A whole number from ``low`` to ``high``; if they are equal, it is not searched."""
        if low == high:
            return int(self.Fixed(name, low))
        return int(self._value(name, lambda: integer(low, high, step=step, log=log)))

    def suggest_float(self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False) -> float:
        """A number from ``low`` to ``high``; if they are equal, it is not searched."""
        if low == high:
            return float(self.Fixed(name, low))
        if log and step is not None:
            raise SearchDefinitionError(f"suggest_float({name!r}): step={step!r} cannot be combined with log=True.")
        return float(self._value(name, lambda: loguniform(low, high) if log else uniform(low, high, step=step)))

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        """One of some numbers or strings."""
        options = [each.item() if isinstance(each, np.generic) else each for each in choices]
        for option in options:
            if type(option) not in JSON_TYPES:
                raise SearchDefinitionError(
                    f"hp.Choice({name!r}): {option!r} of type {type(option).__name__}: expected numbers or strings. Choose "
                    "a name, and use what it stands for."
                )
        return self._value(name, lambda: choice(*options))

    def __getattr__(self, name: str) -> Any:
        """Reject other methods of KerasTuner and Optuna."""
        if name.startswith("__"):  # protocols of Python, such as copying
            raise AttributeError(name)
        raise _UnknownMethodError(f"hp.{name} is not supported. {known_names(name, _METHODS)}")

    def _value(self, name: str, make: Callable[[], Distribution]) -> Any:
        try:
            distribution = make()
        except ConfigurationError as error:
            raise SearchDefinitionError(f"hyper-parameter {name!r}: {error}") from error
        known = self._defined.setdefault(name, distribution)
        if (type(known), vars(known)) != (type(distribution), vars(distribution)):
            raise SearchDefinitionError(
                f"the hyper-parameter {name!r} is defined twice, as {known} and as {distribution}: rename one."
            )
        if name not in self.values:
            if self._ask is None:
                raise SearchDefinitionError(
                    f"the trial has no {name!r}: the function that builds models must define the same hyper-parameters when "
                    f"it is called again. {known_names(name, self.values)}"
                )
            self.values[name] = self._ask(name, distribution)
        return self.values[name]


_SCOPE = ("default", "ordered", "parent_name", "parent_values")
"""The further arguments of KerasTuner, which have no effect: see `HyperParameters.conditional_scope`."""

_METHODS = [name for name in vars(HyperParameters) if not name.startswith("_")]


def _check_scope(method: str, name: str, scope: Mapping[str, Any]) -> None:
    known = {*inspect.signature(getattr(HyperParameters, method)).parameters, *_SCOPE} - {"self", "scope"}
    for unknown in sorted(scope.keys() - known):
        raise SearchDefinitionError(f"hp.{method}({name!r}): the argument {unknown!r}. {known_names(unknown, known)}")


def _is_log(method: str, name: str, sampling: str | None, step: float | None) -> bool:
    if sampling not in (None, "linear", "log"):
        raise SearchDefinitionError(f"hp: sampling={sampling!r} of {name!r} is not supported: expected 'linear' or 'log'.")
    if sampling == "log" and step is not None:
        raise SearchDefinitionError(f"hp.{method}({name!r}): step={step!r} cannot be combined with sampling='log'.")
    return sampling == "log"
