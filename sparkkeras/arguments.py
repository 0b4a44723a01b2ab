"""Argument validation: the driver checks arguments before it starts a Spark job."""

from __future__ import annotations

import functools
import inspect
import numbers
import os
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Literal, ParamSpec, TypeVar, cast, get_type_hints

import numpy as np

from sparkkeras.errors import ConfigurationError, UnknownArgumentError, counted, known_names
from sparkkeras.events import EventListener

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class AsInFit(Enum):
    """The type of `AS_IN_FIT`, the default of arguments of ``evaluate`` and ``predict``: what the last ``fit`` used."""

    AS_IN_FIT = "as in fit"

    def __repr__(self) -> str:
        return self.name


AS_IN_FIT: Final = AsInFit.AS_IN_FIT
"""The value that the last ``fit`` used for data of the same kind. Unlike it, ``None`` always means the same."""


Check = Callable[[str, Any], Any]
"""Receives the name of an argument and its value, and returns the value in the form in which it is used.

It raises `ConfigurationError` with what was received and what was expected.
"""


@dataclass(frozen=True)
class Argument:
    """What an annotation of a `TypedDict` says of the argument with this name, which several functions take.

    Attributes:
        default: Its default.
        check: Checks its value.
        doc: Its description.
        is_setting: Whether resumed training must have the same value, and those who follow training show it.
    """

    default: Any
    check: Check
    doc: str
    is_setting: bool = False

    @property
    def text(self) -> str:
        """The description in one line."""
        return " ".join(self.doc.split())


def declared(kind: type) -> dict[str, Argument]:
    """The arguments that a `TypedDict` declares, by name."""
    return {name: hint.__metadata__[0] for name, hint in get_type_hints(kind, include_extras=True).items()}


def taking(kind: type) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Have a function with ``**given: Unpack[kind]`` receive all arguments that a `TypedDict` declares, checked.

    They take the place of ``**given`` in its signature and in its docstring.
    """
    known = declared(kind)

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def called(*args: P.args, **given: P.kwargs) -> R:
            checked = {name: each.check(name, given.get(name, each.default)) for name, each in known.items()}
            return function(*args, **cast(Any, {**given, **checked}))

        return listing(kind)(called)

    return decorate


def listing(kind: type) -> Callable[[T], T]:
    """Have the signature and the docstring of a function list what a `TypedDict` declares, in the place of ``**given``."""
    known, hints, keyword = declared(kind), get_type_hints(kind), inspect.Parameter.KEYWORD_ONLY
    added = [inspect.Parameter(name, keyword, default=each.default, annotation=hints[name]) for name, each in known.items()]

    def decorate(function: T) -> T:
        signature = inspect.signature(cast(Any, function))
        own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        cast(Any, function).__signature__ = signature.replace(parameters=[*own, *added])
        return documented(kind)(function)

    return decorate


def documented(kind: type) -> Callable[[T], T]:
    """Have the docstring of a function or a class describe, in the line ``**given:``, what a `TypedDict` declares."""
    known = declared(kind)

    def decorate(documents: T) -> T:
        if documents.__doc__:
            documents.__doc__ = GIVEN.sub(lambda found: described(known, found[1]), documents.__doc__)
        return documents

    return decorate


GIVEN = re.compile(r"^( *)\*\*given: .*$", re.MULTILINE)
"""The line of a docstring that stands for the declared arguments."""


def described(known: Mapping[str, Argument], indent: str) -> str:
    """The lines of a docstring that describe arguments."""
    lines = (f"{name}: {each.text}" for name, each in known.items())
    return "\n".join(textwrap.fill(line, 125, initial_indent=indent, subsequent_indent=f"{indent}    ") for line in lines)


def known_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Raise `UnknownArgumentError` for arguments that ``function`` does not take; the message lists those that it takes."""
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
                    f"{called} takes no argument {name!r}. {_where_it_belongs(name, known, owner(args), called)}"
                    f"{known_names(renamed, known)}"
                )
        given = len(args) - bound
        if given > len(in_order):
            order = f" ({', '.join(in_order)})" if in_order else ""
            raise UnknownArgumentError(
                f"{called} takes {counted(len(in_order), 'argument') if in_order else 'no arguments'} by position{order}, "
                f"received {given}{': name the others' if len(known) > len(in_order) else ''}. {known_names('', known)}"
            )
        return function(*args, **kwargs)

    return checked


def known_fields(kind: type[R]) -> type[R]:
    """Apply `known_arguments` to the constructor of a dataclass."""
    kind.__init__ = known_arguments(kind.__init__)  # type: ignore[method-assign]
    return kind


_SERVER_OPTIONS = ("host", "bind", "encrypt", "lease_seconds", "timeout")
_ASYNCHRONOUS_OPTIONS = ("max_staleness", "warmup_timeout")
_COMPILE = ("loss", "loss_weights", "metrics", "optimizer", "optimizer_config", "worker_optimizer")
_HADOOP = ("to_hadoop", "from_hadoop")
_LABELS = ("categorical", "nb_classes")


def _where_it_belongs(name: str, known: Sequence[str], owner: type | None, called: str) -> str:
    """A sentence that says where an unknown argument belongs; empty if it is not an argument of sparkkeras at all.

    Args:
        name: The unknown argument.
        known: The arguments that the function takes.
        owner: The class that the method or constructor belongs to; ``None`` for a plain function.
        called: The name of the function in messages.
    """
    is_constructor = owner is not None and called == owner.__name__
    of_owner: Sequence[str] = () if owner is None or is_constructor else tuple(inspect.signature(owner).parameters)
    owned_by = "" if owner is None else f" of {owner.__name__}"
    if name in of_owner:
        return f"It is an argument{owned_by}. "
    fit = getattr(owner, "fit", None) if is_constructor else None
    if fit is not None and name in inspect.signature(fit).parameters:
        return f"It is an argument of {called}.fit. "
    for takes, whose in ((known, ""), (of_owner, owned_by)):
        if "server_options" in takes and (name in _SERVER_OPTIONS or (name in _ASYNCHRONOUS_OPTIONS and "rule" in takes)):
            kind = "ParameterServerOptions" if "rule" in takes else "ServerOptions"
            return f"It belongs in server_options={kind}(...){whose}. "
    if name in _COMPILE and (not {"epochs", "return_dict"}.isdisjoint(known) or (is_constructor and hasattr(owner, "fit"))):
        return "It belongs in model.compile(...). "
    if name == "monitor" and "callbacks" in known:
        return "A Monitor is a callback: pass it as callbacks=[monitor]. "
    if name == "callbacks" and "monitor" in known and "worker_callbacks" in known:
        return "Members run their callbacks on the workers, as worker_callbacks=; pass a Monitor as monitor=. "
    if name in _HADOOP and "path" in known:
        return 'Pass a URI as the path instead, such as "hdfs:///models/digits.keras". '
    if name in _LABELS and not {"y", "label", "labelCol"}.isdisjoint(known):
        return (
            "The model's loss determines the format of labels: class indices for sparse_categorical_crossentropy, one-hot "
            "rows for categorical_crossentropy. "
        )
    return ""


_RENAMED = {
    "communication_window": ("frequency",),
    "keras_model_config": ("model",),
    "labeled_points": ("lp_rdd",),
    "master_port": ("port",),
    "mllib_data": ("data",),
    "np": ("num_workers",),
    "num_proc": ("num_workers",),
    "num_processes": ("num_workers",),
    "num_slots": ("num_workers",),
    "rdd": ("data", "lp_rdd"),
    "x": ("data",),
    "x_test": ("data",),
    "y_test": ("y",),
}
"""Argument names of Keras and other libraries, and their names here, where `difflib` would not find the match."""


# Checks of values


def anything(_: str, value: Any) -> Any:
    """Any value: it is checked with the data."""
    return value


def is_integer(value: Any) -> bool:
    """Whether a value is a whole number, of Python or NumPy."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether a value is a real number, of Python or NumPy."""
    return is_integer(value) or isinstance(value, (float, np.floating))


def integer(name: str, value: Any, low: int = 1, otherwise: str = "") -> int:
    """An integer of at least ``low``; ``otherwise`` is what else is accepted, for the message."""
    if not is_integer(value) or value < low:
        expected = "a positive whole number" if low == 1 else f"a whole number of at least {low}"
        raise ConfigurationError(f"{name}={value!r}: expected {expected}{otherwise}.")
    return int(value)


def optional_integer(name: str, value: Any, low: int = 1) -> int | None:
    """An integer of at least ``low``, or ``None``."""
    return None if value is None else integer(name, value, low, " or None")


def optional(check: Callable[[str, Any], R]) -> Callable[[str, Any], R | None]:
    """Accept ``None`` in addition to what ``check`` accepts."""
    return functools.partial(_optional, check)


def _optional(check: Callable[[str, Any], R], name: str, value: Any) -> R | None:
    return None if value is None else check(name, value)


def path(name: str, value: Any) -> str:
    """A non-empty path (str or os.PathLike), as a str."""
    if not isinstance(value, (str, os.PathLike)) or not str(value):
        raise ConfigurationError(f"{name}={value!r}: expected a path (str or os.PathLike).")
    return str(value)


def class_weight(name: str, value: Any) -> dict[int, float] | None:
    """``{class index: weight}``, or ``None``. Class indices may be floats, as in a column of labels."""
    if value is None:
        return None
    expected = "expected a dict from class indices (0, 1, ...) to finite weights of at least 0, or None."
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"{name}={value!r}: {expected}")
    for key, weight in value.items():
        is_weight = isinstance(weight, (int, float, np.number)) and np.isfinite(weight) and weight >= 0
        if not is_number(key) or key < 0 or key % 1 != 0 or not is_weight:
            convert = " Convert the keys with int()." if isinstance(key, str) and key.isdecimal() else ""
            raise ConfigurationError(f"{name}={dict(value)!r}, of which {key!r}: {weight!r} is invalid: {expected}{convert}")
    return {int(key): float(weight) for key, weight in value.items()}


def class_weight_or_balanced(name: str, value: Any) -> dict[int, float] | Literal["balanced"] | None:
    """``{class index: weight}``, ``"balanced"``, or ``None``."""
    if isinstance(value, str):
        if value != "balanced":
            raise ConfigurationError(f'{name}={value!r}: expected "balanced", or a dict from class indices to weights.')
        return "balanced"
    return class_weight(name, value)


def shuffle(name: str, value: Any) -> bool | Literal["global"]:
    """``True``, ``False`` or ``"global"``."""
    if isinstance(value, str) and value == "global":
        return "global"
    if isinstance(value, (bool, int, np.bool_)) and value in (0, 1):
        return bool(value)
    raise ConfigurationError(f'{name}={value!r}: expected True, False or "global".')


def custom_objects(name: str, value: Any) -> dict[str, Any]:
    """A dict of classes, functions and other objects by name; empty for ``None``."""
    if value is None:
        return {}
    expected = "expected a dict from names to classes, functions or objects, such as {'MyLayer': MyLayer}, or None."
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"{name}={value!r}: {expected}")
    for key, member in value.items():
        if not is_custom_object(key, member):
            raise ConfigurationError(f"{name} has {key!r}: {member!r}; {expected}")
    return dict(value)


def is_custom_object(name: Any, value: Any) -> bool:
    """Whether a name and a value can be an entry of ``custom_objects``: any object but numbers, strings and containers."""
    return isinstance(name, str) and not isinstance(value, _PLAIN)


_PLAIN = (str, bytes, numbers.Number, np.bool_, type(None), list, tuple, dict, set, frozenset)


def port(name: str, value: Any) -> int:
    """A port number; 0 selects any free port."""
    if not is_integer(value) or not 0 <= value <= 65535:
        raise ConfigurationError(f"{name}={value!r}: expected a number from 0 to 65535; 0 selects any free port.")
    return int(value)


def instance(name: str, value: Any, kind: type[R]) -> R | None:
    """An instance of ``kind``, or ``None``."""
    if value is not None and not isinstance(value, kind):
        raise ConfigurationError(f"{name}={value!r}: expected sparkkeras.{kind.__name__}(...) or None.")
    return value


def flag(name: str, value: Any) -> bool:
    """True or False, also as 1 or 0."""
    if not isinstance(value, (bool, np.bool_, int)) or value not in (0, 1):
        raise ConfigurationError(f"{name}={value!r}: expected True or False.")
    return bool(value)


def listeners(name: str, value: Any) -> list[EventListener]:
    """One or several objects with a method ``on_event``, or ``None``, as a list."""
    given = list(value) if isinstance(value, (list, tuple)) else [] if value is None else [value]
    for each in given:
        if not isinstance(each, EventListener) or isinstance(each, type):
            raise ConfigurationError(
                f"{name}={each!r}: expected a Monitor, or another object with a method on_event(event), or a list of them."
            )
    return given


def fraction(name: str, value: Any) -> float:
    """A number in [0, 1)."""
    if not is_number(value) or not 0 <= value < 1:
        raise ConfigurationError(f"{name}={value!r}: expected a number in [0, 1).")
    return float(value)


def one_of(name: str, value: Any, known: tuple[Any, ...]) -> Any:
    """One of the ``known`` values."""
    if value not in known:
        raise ConfigurationError(f"{name}={value!r} is not known. {known_names(value, known)}")
    return value


def gradient_dtype(name: str, value: Any, known: tuple[str, ...]) -> Any:
    """The name of one of the ``known`` dtypes, which may be one of NumPy, TensorFlow, JAX or PyTorch too; or ``None``."""
    if value is None:
        return None
    dtype = getattr(value, "name", getattr(value, "__name__", str(value).removeprefix("torch.")))  # as Keras reads it
    if dtype == "float32":
        raise ConfigurationError(
            f"{name}={dtype!r}: leave it out, or set it to None, to send gradients in their own dtype, which usually is "
            f"float32. Known: {', '.join(map(repr, known))}."
        )
    return one_of(name, dtype, known)


def on_invalid_to_predict(name: str, value: Any) -> Any:
    """A policy for NaN and nulls with which every row gets one prediction."""
    if value == "drop":
        raise ConfigurationError(
            f'{name}="drop": every row gets one prediction, so none can be dropped. Use {name}="null", which '
            "predicts null for such rows of a DataFrame, or drop these rows first (df.dropna(subset=[...]))."
        )
    return one_of(name, value, ("error", "allow", "null"))


def function(name: str, value: Any) -> Any:
    """A function or another callable object, but not a class; or ``None``."""
    if value is not None and (not callable(value) or isinstance(value, type)):
        raise ConfigurationError(f"{name}={value!r}: expected a function of (x, y) that returns (x, y), or None.")
    return value


def frequency(name: str, value: Any) -> str | int:
    """``"epoch"`` or a positive number of batches; ``"batch"`` is 1."""
    if value == "epoch":
        return "epoch"
    if value == "batch":
        return 1
    if not is_integer(value) or value < 1:
        raise ConfigurationError(
            f'{name}={value!r}: expected "epoch", "batch", or a positive whole number of batches between exchanges.'
        )
    return int(value)
