"""`HyperModel`: functions ``build(hp)`` in the style of KerasTuner, whose calls define the space."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras

from sparkkeras.arguments import known_arguments
from sparkkeras.errors import ConfigurationError, known_names
from sparkkeras.hyperopt.distributions import Choice, Distribution, Integer, choice, integer, loguniform, uniform


class HyperModel:
    """A function ``build(hp)`` of KerasTuner as a model to search, with its space.

    The space is recorded on the driver: ``build`` is called with the default of each hyper-parameter, then with each other
    option of a choice and with the largest value of each ``hp.Int``, which finds hyper-parameters within branches and loops.
    Every trial has a value for each of them, also for those that its branches do not use.

    Args:
        build: Takes ``hp`` and returns a compiled model; or an object with such a method ``build``, like
            ``keras_tuner.HyperModel``. Of ``hp`` it may use ``Int``, ``Float``, ``Choice``, ``Boolean``, ``Fixed``, ``get``
            and ``conditional_scope``.

    Attributes:
        space: The space: a dict from names to distributions.

    Raises:
        ConfigurationError: ``build`` is not a function, or uses a hyper-parameter in a way that cannot be searched.

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
        self._build: Callable[[HyperParameters], Any] = function
        self.space = _record(function)
        if not self.space:
            raise ConfigurationError(
                f"build={build!r} uses no hyper-parameter: define some with hp.Int, hp.Float, hp.Choice or hp.Boolean."
            )

    def __call__(self, params: Mapping[str, Any]) -> Any:
        """Build the model for the hyper-parameters of a trial."""
        return self._build(HyperParameters(params))


class HyperParameters:
    """The argument ``hp`` of ``build``, with the methods of ``keras_tuner.HyperParameters`` that define and read values.

    Args:
        values: Values by name.
        found: While the space is recorded, what has been found; hyper-parameters without a value then have their default.
    """

    def __init__(self, values: Mapping[str, Any], found: dict[str, Distribution] | None = None) -> None:
        self.values = dict(values)
        self._found = found

    def Int(  # noqa: N802
        self,
        name: str,
        min_value: int,
        max_value: int,
        step: int | None = None,
        sampling: str | None = None,
        default: int | None = None,
        **scope: Any,
    ) -> int:
        """A whole number from ``min_value`` to ``max_value``; if they are equal, it is not searched."""
        if min_value == max_value:
            return int(self.Fixed(name, min_value))
        log = _is_log("Int", name, sampling, step)
        value = self._value(
            name,
            lambda: integer(min_value, max_value, step=1 if step is None else step, log=log),
            min_value if default is None else default,
        )
        return int(value)

    def Float(  # noqa: N802
        self,
        name: str,
        min_value: float,
        max_value: float,
        step: float | None = None,
        sampling: str | None = None,
        default: float | None = None,
        **scope: Any,
    ) -> float:
        """A number from ``min_value`` to ``max_value``; if they are equal, it is not searched."""
        if min_value == max_value:
            return float(self.Fixed(name, min_value))
        log = _is_log("Float", name, sampling, step)
        value = self._value(
            name,
            lambda: loguniform(min_value, max_value) if log else uniform(min_value, max_value, step=step),
            min_value if default is None else default,
        )
        return float(value)

    def Choice(  # noqa: N802
        self, name: str, values: Sequence[Any], ordered: bool | None = None, default: Any = None, **scope: Any
    ) -> Any:
        """One of some values."""
        if not len(values):
            raise ConfigurationError(f"hp.Choice({name!r}): values={values!r} has no value to choose.")
        return self._value(name, lambda: choice(*values), values[0] if default is None else default)

    def Boolean(self, name: str, default: bool = False, **scope: Any) -> bool:  # noqa: N802
        """True or False."""
        return bool(self._value(name, lambda: choice(False, True), default))

    def Fixed(self, name: str, value: Any, **scope: Any) -> Any:  # noqa: N802
        """A value that is not searched."""
        return self.values.setdefault(name, value)

    def get(self, name: str) -> Any:
        """The value of a hyper-parameter that was defined before."""
        if name not in self.values:
            raise ConfigurationError(f"hp.get({name!r}): there is no such hyper-parameter. {known_names(name, self.values)}")
        return self.values[name]

    @contextmanager
    def conditional_scope(self, parent_name: str, parent_values: Any) -> Iterator[None]:
        """Has no effect: trials have a value for each hyper-parameter, in any branch."""
        yield

    def __getattr__(self, name: str) -> Any:
        """Reject the other methods of ``keras_tuner.HyperParameters``."""
        if name.startswith("__"):  # protocols of Python, such as copying
            raise AttributeError(name)
        raise ConfigurationError(f"hp.{name} is not supported. {known_names(name, _METHODS)}")

    def _value(self, name: str, distribution: Callable[[], Distribution], default: Any) -> Any:
        if self._found is not None:
            made = distribution()
            if _described(self._found.setdefault(name, made)) != _described(made):
                raise ConfigurationError(
                    f"hp defines {name!r} twice, as {_described(self._found[name])} and as {_described(made)}: rename one."
                )
            return self.values.setdefault(name, default)
        if name not in self.values:
            raise ConfigurationError(
                f"hp has no {name!r}: build(hp) did not use this hyper-parameter when the space was recorded. Define it "
                f"before the branch that uses it. {known_names(name, self.values)}"
            )
        return self.values[name]


_METHODS = [name for name in vars(HyperParameters) if not name.startswith("_")]


def _record(build: Callable[[HyperParameters], Any]) -> dict[str, Distribution]:
    """Find the hyper-parameters of a function by calling it; see `HyperModel`."""
    space: dict[str, Distribution] = {}
    pending: list[dict[str, Any]] = [{}]
    while pending:
        values = pending.pop()
        found: dict[str, Distribution] = {}
        build(HyperParameters(values, found))
        for name, distribution in found.items():
            if name not in space:
                space[name] = distribution
                pending += [{**values, name: value} for value in _alternatives(distribution)]
    return space


def _described(distribution: Distribution) -> str:
    """A distribution as it is written in a space."""
    values = ", ".join(f"{value!r}" for value in vars(distribution).values())
    return f"{type(distribution).__name__.lower()}({values})"


def _alternatives(distribution: Distribution) -> Sequence[Any]:
    """The values of a hyper-parameter with which a function may use others."""
    match distribution:
        case Choice(options):
            return options
        case Integer(low, high, step):
            return [low + (high - low) // step * step]
    return []


def _is_log(method: str, name: str, sampling: str | None, step: float | None) -> bool:
    if sampling not in (None, "linear", "log"):
        raise ConfigurationError(f"hp: sampling={sampling!r} of {name!r} is not supported: expected 'linear' or 'log'.")
    if sampling == "log" and step is not None:
        raise ConfigurationError(f"hp.{method}({name!r}): step={step!r} cannot be combined with sampling='log'.")
    return sampling == "log"
