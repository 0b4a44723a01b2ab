"""Encoding of values as JSON: functions as ``module:name`` references, dataclasses by their fields. Nothing is pickled.

Files are untrusted input, so only a few kinds of objects may be referenced: see `decode` and `find_code`.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType
from typing import Any, TypeVar

import keras
import numpy as np

from sparkkeras.checkpoints.store import Checkpoint
from sparkkeras.data.columns import Loader
from sparkkeras.errors import CustomObjectError
from sparkkeras.modeling.custom_code import ByValue, is_own, lookup_names, may_be_named
from sparkkeras.parameter.rules import RULES, UpdateRule, rule_config, rule_from_config, rule_name
from sparkkeras.rpc.options import ParameterServerOptions

T = TypeVar("T")

_HOW_TO_REGISTER = (
    "A model's custom code can also be registered with @keras.saving.register_keras_serializable(), or saved and loaded "
    "within keras.saving.custom_object_scope({name: object})."
)


def encode(value: Any, label: str) -> Any:
    """Encode a value for JSON.

    Args:
        value: Numbers, strings, lists, tuples, dicts, functions, and dataclasses of these.
        label: The name of the value in error messages.

    Raises:
        CustomObjectError: A function or class cannot be imported by its name, or `decode` would not accept it.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list):
        return [encode(each, f"{label}[{index}]") for index, each in enumerate(value)]
    if isinstance(value, tuple):
        return {"tuple": [encode(each, f"{label}[{index}]") for index, each in enumerate(value)]}
    if isinstance(value, Mapping):
        return {"items": [[encode(key, label), encode(each, f"{label}[{key!r}]")] for key, each in value.items()]}
    if isinstance(value, UpdateRule) and rule_name(value) in RULES:
        return {"rule": rule_config(value)}
    if isinstance(value, ByValue):
        return {"by value": encode(value.load(), label)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        return {
            "class": _reference_to(_checked_dataclass, type(value), f"{label} (its class)"),
            "fields": {name: encode(each, f"{label}.{name}") for name, each in fields.items()},
        }
    return {"import": _reference_to(_checked_function, value, label)}


def decode(value: Any, imports: bool = True) -> Any:
    """Restore the value that `encode` encoded.

    Only these may be referenced: Python functions of modules outside the standard library; dataclasses that are defined in
    the user's modules (not in an installed package), loaders, update rules, `ParameterServerOptions` and `Checkpoint`.

    Args:
        value: The encoded value.
        imports: Whether to import modules; otherwise only sparkkeras's own ones.

    Raises:
        CustomObjectError: A module is missing, does not define the name, or the object may not be referenced, or it is a
            dataclass that has other fields now.
    """
    restored = partial(decode, imports=imports)
    if isinstance(value, list):
        return list(map(restored, value))
    if not isinstance(value, dict):
        return value
    if "tuple" in value:
        return tuple(map(restored, value["tuple"]))
    if "items" in value:
        return {restored(key): restored(each) for key, each in value["items"]}
    if "rule" in value:
        return rule_from_config(value["rule"], {})
    if "by value" in value:
        return ByValue.dump(restored(value["by value"]), "the saved value")
    if "class" in value:
        kind = _checked_dataclass(find(value["class"], imports), value["class"])
        fields = {name: restored(each) for name, each in value["fields"].items()}
        try:
            return kind(**fields)
        except Exception as error:
            raise CustomObjectError(
                f"{value['class']} cannot be created with the saved fields {sorted(fields)} ({error}): restore its "
                "definition."
            ) from error
    return _checked_function(find(value["import"], imports), value["import"])


def reference_to_code(value: Any, label: str) -> str:
    """The ``module:name`` of a model's custom class or function; see `find_code`.

    Raises:
        CustomObjectError: Another process could not import the object, or `find_code` would not accept it.
    """
    return _reference_to(_checked_code, value, label)


def find_code(location: str) -> Any:
    """Import a model's custom class or function from ``"module:name"``.

    Keras calls custom code with arguments from the file and does not check it. So a file may only refer to subclasses of
    Keras classes (layers, losses and so on) and to functions of the user's modules.

    Raises:
        CustomObjectError: The object does not exist, or may not be referenced.
    """
    return _checked_code(find(location), location)


def reference(value: Any, label: str) -> str:
    """The ``"module:name"`` that a function or class can be imported from.

    Raises:
        CustomObjectError: Another process could not import it: it is defined in a script or notebook or inside a function,
            or it is a lambda or another kind of object.
    """
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module is None or name is None:
        raise CustomObjectError(
            f"{label} is {value!r}, which cannot be saved: only functions, classes and dataclasses can. Replace it by a "
            "function or a frozen dataclass, defined at the top level of a module."
        )
    if module != "__main__" and "<" not in name:
        try:
            if _is_same(find(f"{module}:{name}"), value):
                return f"{module}:{name}"
        except CustomObjectError:
            pass  # reported below
    what = (
        "a lambda" if name.endswith("<lambda>") else "defined inside a function" if "<" in name else f"defined in {module}"
    )
    raise CustomObjectError(
        f"{label} is {name}, which is {what}: it is saved as module and name, and cannot be imported by them. Define it "
        f"at the top level of a module that the loading process can import. {_HOW_TO_REGISTER}"
    )


def find(location: str, imports: bool = True) -> Any:
    """Find a function or class by ``"module:name"``, and import its module; see `decode`.

    Raises:
        CustomObjectError: The module does not exist, is not imported, or does not define the name itself.
    """
    module, _, name = location.partition(":")
    if not imports and module not in sys.modules and module.partition(".")[0] != "sparkkeras":
        raise CustomObjectError(
            f"what was saved refers to {name} of the module {module}, which this process has not imported: import it before "
            "loading."
        )
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise CustomObjectError(
            f"what was saved refers to {name} of the module {module}, which cannot be imported ({error}): install the "
            "module, or add its folder to PYTHONPATH."
        ) from error
    defined = getattr(found, "__module__", None), getattr(found, "__qualname__", None)
    if defined != (module, name):
        raise CustomObjectError(
            f"what was saved refers to {name} of the module {module}, which is not defined there: it is {found!r}. Only "
            "objects that a module defines itself are loaded, not those that it imports."
        )
    return found


def is_registered(value: Any) -> bool:
    """Whether a class or function is registered with Keras, or in the current custom object scope."""
    return any(keras.saving.get_registered_object(name) is value for name in lookup_names(value))


def _is_same(found: Any, value: Any) -> bool:
    """Whether the object found in a module is the value; a copy of a function counts as the same."""
    return found is value or (isinstance(value, FunctionType) and getattr(found, "__code__", None) == value.__code__)


def _reference_to(checked: Callable[[Any, str], Any], value: Any, label: str) -> str:
    location = reference(value, label)
    try:
        checked(find(location), location)
    except CustomObjectError as error:
        raise CustomObjectError(f"{label} could not be loaded again: {error}") from error
    return location


def _checked_function(found: Any, location: str) -> Any:
    """Check a function that will only be called with arrays, such as a transform."""
    if not isinstance(found, FunctionType) or location.partition(":")[0].partition(".")[0] in sys.stdlib_module_names:
        raise CustomObjectError(
            f"{location} is {found!r}; expected a function defined with def in a module outside of Python's standard "
            "library. Define a function that calls it, or use a frozen dataclass."
        )
    return found


def _checked_dataclass(found: T, location: str) -> T:
    if not dataclasses.is_dataclass(found) or not isinstance(found, type):
        raise CustomObjectError(f"{location} was saved as a dataclass, but is not a dataclass now: restore its definition.")
    known = found in (ParameterServerOptions, Checkpoint) or _is_own(location)
    if not (known or _has_members_of(found, Loader) or _has_members_of(found, UpdateRule)):
        raise CustomObjectError(
            f"{location} is a dataclass of an installed package and neither a loader nor an update rule. A saved file may "
            "not create it, since the object might be called. Use a function, or a dataclass defined in your code."
        )
    return found


def _checked_code(found: T, location: str) -> T:
    if may_be_named(found, _is_own(location)):
        return found
    if isinstance(found, type):
        expected = "a subclass of a Keras class such as keras.layers.Layer, not a class of Keras itself"
    else:
        expected = "a function defined with def in your code, not in an installed package"
    raise CustomObjectError(
        f"{location} is {found!r}. Keras calls custom code with arguments from a file, so a file may only name {expected}. "
        f"{_HOW_TO_REGISTER}"
    )


def _is_own(location: str) -> bool:
    return is_own(sys.modules.get(location.partition(":")[0]))


def _has_members_of(kind: type, protocol: type) -> bool:
    fields = {field.name for field in dataclasses.fields(kind)}
    members = [name for name in vars(protocol) if not name.startswith("_") or name == "__call__"]
    return all(name in fields or hasattr(kind, name) for name in members)
