"""Values as JSON: functions as references to their modules, dataclasses by their fields. Nothing is pickled.

What a file may name is narrow, since a file may come from anywhere: see `decode` and `find_code`.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, TypeVar

import keras
import numpy as np

from sparkkeras.data.columns import Loader
from sparkkeras.errors import CustomObjectError
from sparkkeras.modeling.custom_code import ByValue, is_own, lookup_names, may_be_named
from sparkkeras.parameter.options import ParameterServerOptions
from sparkkeras.parameter.rules import RULES, UpdateRule, rule_config, rule_from_config, rule_name

T = TypeVar("T")

_HOW_TO_REGISTER = (
    "Custom code of a model may also be registered: with @keras.saving.register_keras_serializable(), or by saving, and "
    "later loading, within keras.saving.custom_object_scope({name: object})."
)


def encode(value: Any, told: str) -> Any:
    """A value as JSON can hold it.

    Args:
        value: Numbers, texts, lists, tuples, dicts, functions, and dataclasses of these.
        told: What messages call it.

    Raises:
        CustomObjectError: It has something in it that no module has under its name, or that `decode` would not take.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list):
        return [encode(each, f"{told}[{index}]") for index, each in enumerate(value)]
    if isinstance(value, tuple):
        return {"tuple": [encode(each, f"{told}[{index}]") for index, each in enumerate(value)]}
    if isinstance(value, Mapping):
        return {"items": [[encode(key, told), encode(each, f"{told}[{key!r}]")] for key, each in value.items()]}
    if isinstance(value, UpdateRule) and rule_name(value) in RULES:
        return {"rule": rule_config(value)}
    if isinstance(value, ByValue):
        return {"by value": encode(value.load(), told)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        return {
            "class": _reference_to(_checked_dataclass, type(value), f"{told} (its class)"),
            "fields": {name: encode(each, f"{told}.{name}") for name, each in fields.items()},
        }
    return {"import": _reference_to(_checked_function, value, told)}


def decode(value: Any) -> Any:
    """The value that `encode` wrote down.

    Functions are Python functions of modules outside the standard library. Dataclasses are those of the person's own
    modules, loaders, update rules, and sparkkeras's options.

    Raises:
        CustomObjectError: A module that it refers to is missing, has nothing of that name, or something else.
    """
    if isinstance(value, list):
        return [decode(each) for each in value]
    if not isinstance(value, dict):
        return value
    if "tuple" in value:
        return tuple(decode(each) for each in value["tuple"])
    if "items" in value:
        return {decode(key): decode(each) for key, each in value["items"]}
    if "rule" in value:
        return rule_from_config(value["rule"], {})
    if "by value" in value:
        return ByValue.dump(decode(value["by value"]), "what was saved")
    if "class" in value:
        kind = _checked_dataclass(find(value["class"]), value["class"])
        return kind(**{name: decode(each) for name, each in value["fields"].items()})
    return _checked_function(find(value["import"]), value["import"])


def reference_to_code(value: Any, told: str) -> str:
    """Where a model's custom class or function is to be imported from; see `find_code`.

    Raises:
        CustomObjectError: Another process could not import it, or `find_code` would not take it.
    """
    return _reference_to(_checked_code, value, told)


def find_code(place: str) -> Any:
    """The custom class or function of a model at ``"module:name"``.

    Keras calls what it is handed as custom code with whatever the file says, and no longer checks it. So a file may name
    only classes of a kind that Keras knows (layers, losses and the like), and functions of the person's own modules.

    Raises:
        CustomObjectError: It is not there, or something else.
    """
    return _checked_code(find(place), place)


def reference(value: Any, told: str) -> str:
    """Where a function or class is to be imported from, as ``"module:name"``.

    Raises:
        CustomObjectError: It is of no module that another process could import: of a script or notebook, a lambda, made
            inside a function, or an object that is no dataclass.
    """
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module is None or name is None:
        raise CustomObjectError(
            f"{told} is {value!r}, which cannot be saved: only functions, classes and dataclasses can. Make it a function "
            "or a frozen dataclass at the top of a module."
        )
    if module != "__main__" and "<" not in name:
        try:
            if _is_same(find(f"{module}:{name}"), value):
                return f"{module}:{name}"
        except CustomObjectError:
            pass  # reported in words below
    what = "a lambda" if name.endswith("<lambda>") else "made inside a function" if "<" in name else f"of {module}"
    raise CustomObjectError(
        f"{told} is {name}, which is {what}: it is saved as the name of a module to import it from, and cannot be found "
        f"there. Define it at the top of a module that the loading process can import. {_HOW_TO_REGISTER}"
    )


def find(place: str) -> Any:
    """The function or class at ``"module:name"``.

    Raises:
        CustomObjectError: There is no such module, or it has none of this name, or only one that is of another module.
    """
    module, _, name = place.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise CustomObjectError(
            f"what was saved refers to {name} of the module {module}, which is not there ({error}): install the module, or "
            "put its folder on PYTHONPATH."
        ) from error
    own = getattr(found, "__module__", None), getattr(found, "__qualname__", None)
    if own != (module, name):
        raise CustomObjectError(
            f"what was saved refers to {name} of the module {module}, which is not defined there: it is {found!r}. Only "
            "what a module defines itself is loaded."
        )
    return found


def is_registered(value: Any) -> bool:
    """Whether Keras finds a class or function by itself: it is registered, or in the present custom object scope."""
    return any(keras.saving.get_registered_object(name) is value for name in lookup_names(value))


def _is_same(found: Any, value: Any) -> bool:
    """Whether what a module has is this value, or what this copy of a function was made of."""
    return found is value or (isinstance(value, FunctionType) and getattr(found, "__code__", None) == value.__code__)


def _reference_to(checked: Callable[[Any, str], Any], value: Any, told: str) -> str:
    place = reference(value, told)
    try:
        checked(find(place), place)
    except CustomObjectError as error:
        raise CustomObjectError(f"{told} could not be loaded again: {error}") from error
    return place


def _checked_function(found: Any, place: str) -> Any:
    """A function that is called with arrays only."""
    if not isinstance(found, FunctionType) or place.partition(":")[0].partition(".")[0] in sys.stdlib_module_names:
        raise CustomObjectError(
            f"{place} is {found!r}; expected a function that a module outside of Python's own library defines with def. "
            "Make one that calls it, or a frozen dataclass."
        )
    return found


def _checked_dataclass(found: T, place: str) -> T:
    if not dataclasses.is_dataclass(found) or not isinstance(found, type):
        raise CustomObjectError(f"{place} was saved as a dataclass, but is none any more.")
    known = found is ParameterServerOptions or _is_own(place)
    if not (known or _has_members_of(found, Loader) or _has_members_of(found, UpdateRule)):
        raise CustomObjectError(
            f"{place} is a dataclass of an installed package, and neither a loader nor an update rule: a file may not have "
            "it made, since what is made of it might be called. Use a function, or a dataclass in a module of your own."
        )
    return found


def _checked_code(found: T, place: str) -> T:
    if may_be_named(found, _is_own(place)):
        return found
    if isinstance(found, type):
        expected = "a class that extends one of Keras's, such as keras.layers.Layer, and is not Keras's own"
    else:
        expected = "a function, defined with def in a module of your own that is in no installed package"
    raise CustomObjectError(
        f"{place} is {found!r}. Keras calls custom code with whatever a file says, so a file may only name {expected}. "
        f"{_HOW_TO_REGISTER}"
    )


def _is_own(place: str) -> bool:
    return is_own(sys.modules.get(place.partition(":")[0]))


def _has_members_of(kind: type, protocol: type) -> bool:
    fields = {field.name for field in dataclasses.fields(kind)}
    members = [name for name in vars(protocol) if not name.startswith("_") or name == "__call__"]
    return all(name in fields or hasattr(kind, name) for name in members)
