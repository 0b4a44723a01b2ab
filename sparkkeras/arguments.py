"""Arguments, checked before anything starts."""

from __future__ import annotations

import functools
import inspect
import numbers
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import numpy as np

from sparkkeras.errors import ConfigurationError, UnknownArgumentError, known_names

P = ParamSpec("P")
R = TypeVar("R")


def known_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Refuse arguments that ``function`` does not take, and name those that it does."""
    parameters = [each for each in inspect.signature(function).parameters.values() if each.name not in ("self", "cls")]
    known = [each.name for each in parameters]
    in_order = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    called = function.__qualname__.removesuffix(".__init__")
    bound = len(inspect.signature(function).parameters) - len(parameters)

    def owner(args: Sequence[Any]) -> type | None:
        kinds = type(args[0]).__mro__ if bound and args else ()
        return next((kind for kind in kinds if kind.__name__ == called.partition(".")[0]), None)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in known:
                renamed = next((each for each in _RENAMED.get(name, ()) if each in known), name)
                raise UnknownArgumentError(
                    f"{called} takes no argument {name!r}. {_elsewhere(name, known, owner(args), called)}"
                    f"{known_names(renamed, known)}"
                )
        given = len(args) - bound
        if given > len(in_order):
            order = f" ({', '.join(in_order)})" if in_order else ""
            raise UnknownArgumentError(
                f"{called} takes {len(in_order) or 'no'} argument{'s' * (len(in_order) != 1)} by position{order}, received "
                f"{given}: name the others. {known_names('', known)}"
            )
        return function(*args, **kwargs)

    return checked


def known_fields(kind: type[R]) -> type[R]:
    """As `known_arguments`, for the constructor of a dataclass."""
    kind.__init__ = known_arguments(kind.__init__)  # type: ignore[method-assign]
    return kind


_OPTIONS = ("host", "bind", "encrypt", "lease_seconds", "timeout")
_OF_ASYNCHRONOUS_TRAINING = ("max_staleness", "warmup_timeout")
_COMPILED = ("loss", "loss_weights", "metrics", "optimizer", "optimizer_config", "worker_optimizer")
_HADOOP = ("to_hadoop", "from_hadoop")
_LABELS = ("categorical", "nb_classes")


def _elsewhere(name: str, known: Sequence[str], owner: type | None, called: str) -> str:
    """Where an argument that a function does not take belongs; empty where nothing is known of it.

    Args:
        name: The argument.
        known: The arguments that the function takes.
        owner: The class whose method or constructor it is; ``None`` for a plain function.
        called: The function, as messages call it.
    """
    is_constructor = owner is not None and called == owner.__name__
    of_owner: Sequence[str] = () if owner is None or is_constructor else tuple(inspect.signature(owner).parameters)
    owned_by = "" if owner is None else f" of {owner.__name__}"
    if name in of_owner:
        return f"It is an argument{owned_by}. "
    for takes, whose in ((known, ""), (of_owner, owned_by)):
        if "server_options" in takes and (name in _OPTIONS or (name in _OF_ASYNCHRONOUS_TRAINING and "rule" in takes)):
            kind = "ParameterServerOptions" if "rule" in takes else "ServerOptions"
            return f"It belongs in server_options={kind}(...){whose}. "
    if name in _COMPILED and (not {"epochs", "return_dict"}.isdisjoint(known) or (is_constructor and hasattr(owner, "fit"))):
        return "It belongs in model.compile(...). "
    if name in _HADOOP and "path" in known:
        return 'Give a URI as the path instead, such as "hdfs:///models/digits.keras". '
    if name in _LABELS and not {"y", "label", "labelCol"}.isdisjoint(known):
        return (
            "The model's loss says what labels are: class indices with sparse_categorical_crossentropy, else one-hot rows. "
        )
    return ""


_RENAMED = {
    "communication_window": ("frequency",),
    "keras_model_config": ("model",),
    "labeled_points": ("lp_rdd",),
    "master_port": ("port",),
    "mllib_data": ("data",),
    "rdd": ("data", "lp_rdd"),
    "x": ("data",),
    "x_test": ("data",),
    "y_test": ("y",),
}
"""What Keras, Elephas and dist-keras call an argument, and what it is called here, where the spelling does not show it."""


def whole_number(name: str, value: Any, low: int = 1) -> int:
    """The value as an int; refuse what is no whole number of at least ``low``."""
    return _whole_number(name, value, low, "")


def optional_number(name: str, value: Any, low: int = 1) -> int | None:
    """As `whole_number`; ``None`` may stand for no number."""
    return None if value is None else _whole_number(name, value, low, " or None")


def _whole_number(name: str, value: Any, low: int, otherwise: str) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < low:
        told = "a positive whole number" if low == 1 else f"a whole number of at least {low}"
        raise ConfigurationError(f"{name}={value!r}: expected {told}{otherwise}.")
    return int(value)


def path(name: str, value: Any) -> str:
    """The value as a path; refuse what is none."""
    if not isinstance(value, (str, os.PathLike)) or not str(value):
        raise ConfigurationError(f"{name}={value!r}: expected a path.")
    return str(value)


def class_weight(value: Any) -> dict[int, float] | None:
    """The value as the weight of each class; ``None`` stands for none."""
    if value is None:
        return None
    expected = "expected a dict of class numbers from 0 up, each with a weight of 0 or more, or None."
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"class_weight={value!r}: {expected}")
    for key, weight in value.items():
        number = isinstance(weight, (int, float, np.number)) and np.isfinite(weight) and weight >= 0
        if not isinstance(key, (int, np.integer)) or isinstance(key, bool) or key < 0 or not number:
            raise ConfigurationError(f"class_weight={dict(value)!r}: {expected}")
    return {int(key): float(weight) for key, weight in value.items()}


def custom_objects(value: Any) -> dict[str, Any]:
    """The value as a dict of classes, functions and other objects by name; ``None`` stands for an empty one."""
    if value is None:
        return {}
    expected = "expected a dict of classes, functions or objects by name, such as {'MyLayer': MyLayer}, or None."
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"custom_objects={value!r}: {expected}")
    for key, member in value.items():
        if not is_custom_object(key, member):
            raise ConfigurationError(f"custom_objects has {key!r}: {member!r}; {expected}")
    return dict(value)


def is_custom_object(name: Any, value: Any) -> bool:
    """Whether a name and a value may be one of ``custom_objects``: any object, as in Keras, but for plain values."""
    return isinstance(name, str) and not isinstance(value, _PLAIN)


_PLAIN = (str, bytes, numbers.Number, np.bool_, type(None), list, tuple, dict, set, frozenset)


def port(value: Any) -> int:
    """The value as a port; 0 stands for any."""
    number = _whole_number("port", value, 0, "")
    if number > 65535:
        raise ConfigurationError(f"port={value!r}: expected a number from 0 to 65535; 0 takes any that is free.")
    return number


def instance(name: str, value: Any, kind: type[R]) -> R | None:
    """The value, if it is one of ``kind`` or ``None``."""
    if value is not None and not isinstance(value, kind):
        raise ConfigurationError(f"{name}={value!r}: expected sparkkeras.{kind.__name__}(...) or None.")
    return value


def flag(name: str, value: Any) -> bool:
    """The value as a bool; refuse what is neither true nor false."""
    if not isinstance(value, (bool, np.bool_, int)) or value not in (0, 1):
        raise ConfigurationError(f"{name}={value!r}: expected True or False.")
    return bool(value)


def fraction(name: str, value: Any) -> None:
    """Refuse what is no number in [0, 1)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise ConfigurationError(f"{name}={value!r}: expected a number in [0, 1).")


def one_of(name: str, value: Any, known: tuple[Any, ...]) -> None:
    """Refuse what is not among ``known``."""
    if value not in known:
        raise ConfigurationError(f"{name}={value!r} is not known. {known_names(value, known)}")


def on_invalid_to_predict(value: Any) -> None:
    """Refuse what cannot be done about NaN and nulls where each row has its prediction."""
    if value == "drop":
        raise ConfigurationError(
            'on_invalid="drop": every row gets its prediction, so none can be left out. Give on_invalid="allow", which '
            "predicts null for rows with nulls, or leave such rows out before (df.dropna(subset=[...]))."
        )
    one_of("on_invalid", value, ("error", "allow"))


def function(name: str, value: Any) -> None:
    """Refuse what cannot be called; ``None`` stands for no function."""
    if value is not None and (not callable(value) or isinstance(value, type)):
        raise ConfigurationError(f"{name}={value!r}: expected a function of (x, y) that returns (x, y), or None.")


def frequency(value: Any) -> str | int:
    """``"epoch"``, ``"batch"`` (which is 1) or a positive number of batches."""
    if value == "epoch":
        return "epoch"
    if value == "batch":
        return 1
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ConfigurationError(
            f'frequency={value!r}: expected "epoch", "batch", or a positive whole number of batches between exchanges.'
        )
    return int(value)
