"""Custom code: finds it in a model, and sends it to workers that cannot import it.

Classes and functions from ``__main__``, a notebook or a local module are pickled by value; those of installed packages by
name. Only pickles that the driver made for its own workers are ever loaded.
"""

from __future__ import annotations

import functools
import inspect
import io
import json
import os
import pickle
import site
import sys
import sysconfig
import threading
import types
import zipfile
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from sparkkeras.errors import CustomObjectError, SparkKerasError

T = TypeVar("T")

_lock = threading.RLock()

_BY_NAME = {"sparkkeras", "pyspark", "keras", "tensorflow", "jax", "torch", "numpy"}


@dataclass(frozen=True)
class ByValue(Generic[T]):
    """An object pickled by value."""

    payload: bytes

    @classmethod
    def dump(cls, value: T, name: str, reduced: Callable[[Any], Any] | None = None) -> ByValue[T]:
        """Pickle an object by value.

        Args:
            value: The object.
            name: The name of the object in messages.
            reduced: How to pickle an object that ``value`` refers to, as for ``pickle.Pickler.reducer_override``;
                ``NotImplemented``: as usual.

        Raises:
            CustomObjectError: It cannot be pickled; the message names the part that fails.
        """
        with _lock, _user_modules_by_value():
            try:
                return cls(_dumps(value, reduced or (lambda each: NotImplemented)))
            except SparkKerasError:
                raise
            except Exception as error:
                raise CustomObjectError(
                    f"{name} cannot be sent to the workers, since pickling {culprit(value, name)} failed: "
                    f"{type(error).__name__}: {error}. Create locks, sessions, connections and open files inside the "
                    "function that uses them."
                ) from error

    def load(self) -> T:
        """Unpickle the object, once per process: every call returns the same object."""
        loaded: T = _load(self.payload)
        return loaded

    def fresh(self) -> T:
        """Unpickle a new object with every call."""
        loaded: T = pickle.loads(self.payload)
        return loaded


def _dumps(value: Any, reduced: Callable[[Any], Any]) -> bytes:
    from pyspark import cloudpickle

    usual: Any = cloudpickle.Pickler

    class Pickler(usual):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            found = reduced(obj)
            if found is NotImplemented and _is_saved_to_pickle(obj):
                found = _reduced_part(obj)
            return super().reducer_override(obj) if found is NotImplemented else found

    with io.BytesIO() as file:
        Pickler(file).dump(value)
        return file.getvalue()


def _is_saved_to_pickle(value: Any) -> bool:
    """Whether Keras pickles an object, such as a model or a loss, as a ``.keras`` archive."""
    keras = sys.modules.get("keras")
    return keras is not None and getattr(type(value), "__reduce__", None) is keras.Loss.__reduce__


def _reduced_part(value: Any) -> tuple[Any, ...]:
    """The archive without the time, so that the pickle of an object is always the same, and the custom code in it."""
    _, (file,) = value.__reduce__()
    with zipfile.ZipFile(file) as dated, zipfile.ZipFile(undated := io.BytesIO(), "w") as target:
        for name in dated.namelist():
            content = dated.read(name)
            if name == "metadata.json":
                content = json.dumps(json.loads(content) | {"date_saved": ""}).encode()
            target.writestr(zipfile.ZipInfo(name), content)
    code = [each for each in code_of(value).values() if not is_builtin(each)]
    return _loaded_part, (undated.getvalue(), {name: each for each in code for name in lookup_names(each)})


def _loaded_part(archive: bytes, objects: dict[str, Any]) -> Any:
    import keras

    with keras.saving.custom_object_scope(objects):
        return keras.Loss._unpickle_model(io.BytesIO(archive))


@functools.lru_cache(maxsize=16)
def _load(payload: bytes) -> Any:
    return pickle.loads(payload)


def culprit(value: Any, name: str) -> str:
    """The name of the element of a dict or list that cannot be pickled, for messages."""
    from pyspark import cloudpickle

    members: Mapping[Any, Any] = {}
    if isinstance(value, Mapping):
        members = value
    elif isinstance(value, (list, tuple)):
        members = {f"{name}[{index}]": member for index, member in enumerate(value)}
    for key, member in members.items():
        try:
            cloudpickle.dumps(member)
        except Exception:
            return f"{key!s} ({member!r})"
    return "it"


@contextmanager
def _user_modules_by_value() -> Iterator[None]:
    from pyspark import cloudpickle

    known = set(cloudpickle.list_registry_pickle_by_value())
    # By their own names: some packages import a module under several, which is registered once.
    named = {module.__name__: module for module in list(sys.modules.values()) if is_own(module)}
    added = [module for name, module in named.items() if name in sys.modules and name not in known]
    for module in added:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in added:
            cloudpickle.unregister_pickle_by_value(module)


def is_own(module: object) -> bool:
    """Whether a module is the user's: a file outside installed packages and the standard library."""
    return isinstance(module, types.ModuleType) and _is_own(module.__name__, getattr(module, "__file__", None))


def is_by_reference(value: Any) -> bool:
    """Whether a module, class or function is pickled as a name, and its package, other than ours, uses Keras."""
    name = value.__name__ if isinstance(value, types.ModuleType) else value.__module__ or ""
    package = _package(name)
    if name not in sys.modules or package in {"__main__", *_BY_NAME} or _is_of_python(name) or is_own(sys.modules[name]):
        return False
    return _uses_keras(package, tuple(each for each in list(sys.modules) if _package(each) == package))


@functools.cache
def _uses_keras(package: str, modules: tuple[str, ...]) -> bool:
    """Whether a module of a package refers to Keras; others, such as pandas, have no variables of Keras."""
    values = [value for module in modules for value in list(vars(sys.modules[module]).values())]
    names = (getattr(value, "__name__" if isinstance(value, types.ModuleType) else "__module__", None) for value in values)
    return any(isinstance(name, str) and _package(name) == "keras" for name in names)


@functools.cache
def _is_own(name: str, file: str | None) -> bool:
    if name == "__main__" or not isinstance(file, str) or _package(name) in _BY_NAME:
        return False
    return not file.startswith(_installed_folders())


@functools.cache
def _installed_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    folders = {paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib") if key in paths}
    folders |= {*site.getsitepackages(), site.getusersitepackages()}
    folders |= {entry for entry in sys.path if entry.endswith((".zip", "site-packages", "dist-packages"))}
    return tuple(sorted(folder.rstrip(os.sep) + os.sep for folder in folders))


# Custom code for loading a model from a file


def may_be_named(value: Any, is_user_code: bool) -> bool:
    """Whether a file may refer to a class or function as custom code of its model.

    Keras calls custom objects with arguments from the file, without the checks of safe mode. So only subclasses of Keras's
    base classes (layers, losses, metrics and so on) and functions of the user's code are allowed.

    Args:
        value: The class or function.
        is_user_code: Whether it belongs to ``__main__``, or to a module outside installed packages.
    """
    if isinstance(value, type):
        import keras

        return issubclass(value, _keras_kinds(keras)) and not is_builtin(value)
    return is_user_code and isinstance(value, types.FunctionType)


def already_loaded(config: Any) -> dict[str, Any]:
    """The custom code that a model's configuration refers to and this process has already imported; imports nothing.

    Args:
        config: The configuration, as decoded JSON.

    Returns:
        Classes and functions by the names under which Keras looks them up, without ambiguous names.
    """
    found: dict[str, dict[int, Any]] = {}
    user_modules = [module for module in list(sys.modules.values()) if is_own(module) or module is sys.modules["__main__"]]
    modules: list[types.ModuleType | None]
    for place in _places(config):
        if place["class_name"] == "function":  # Keras saves no module for functions
            name = key = place["config"]
            modules = [] if _is_keras_name(name) else [*user_modules]
        else:
            name, key = place["class_name"], place["registered_name"]
            modules = [sys.modules.get(place.get("module") or "__main__")]  # Keras saves none for classes of a script
        for module in modules:
            if not isinstance(module, types.ModuleType):
                continue
            value = vars(module).get(name)
            if value is None or isinstance(value, type) is (place["class_name"] == "function"):
                continue
            at_home = (getattr(value, "__module__", None), getattr(value, "__qualname__", None)) == (module.__name__, name)
            if at_home and may_be_named(value, module in user_modules):
                found.setdefault(key, {})[id(value)] = value
    return {key: next(iter(values.values())) for key, values in found.items() if len(values) == 1}


def _is_keras_name(name: str) -> bool:
    """Whether Keras has a function with this name, which takes precedence over custom functions."""
    import keras

    return any(hasattr(module, name) for module in (keras.activations, keras.losses, keras.metrics, keras.initializers))


def _places(config: Any) -> Iterator[dict[str, Any]]:
    """The parts of a configuration that refer to a class or function, custom or of Keras."""
    if isinstance(config, dict):
        names = config.get("class_name"), config.get("registered_name"), config.get("module") or ""
        is_function = config.get("class_name") == "function"
        if all(isinstance(name, str) for name in (*names, config.get("config") if is_function else "")):
            yield config
        if config.get("class_name") == "Lambda":
            return  # Keras calls a Lambda's function while it loads the model, with arguments from the file
        config = list(config.values())
    if isinstance(config, list):
        for member in config:
            yield from _places(member)


# Finding custom code in a model


def code_of(model: Any) -> dict[str, Any]:
    """All classes and functions of a model, including Keras's, by their attribute paths.

    Such paths are ``model.layers[1].activation`` or ``model._compile_loss._user_loss``.
    """
    found = _ModelParts()
    _walk(model, "model", found)
    return found.code


def untracked_variables(value: Any, path: str = "model") -> dict[str, Any]:
    """The variables in attributes of a model's parts that no layer, metric or optimizer tracks, by their attribute paths.

    Such a path is ``model.loss.weight``. Of the variables that custom metrics track, those that they do not reset count.

    Args:
        value: The model, or another object.
        path: Its own path.
    """
    found = _parts_of(value, path)
    kept = {id(variable) for metric in found.metrics for variable in _not_reset(metric)}
    return {
        path: variable
        for path, variable in found.variables.items()
        if id(variable) not in found.tracked or id(variable) in kept
    }


def other_weights(model: Any) -> list[Any]:
    """The weights of layers that parts of a model refer to and that are not its own, such as a teacher in its loss."""
    found = _parts_of(model, "model")
    own = set(map(id, model.variables))
    return [each for key, each in found.weights.items() if key not in own]


def _parts_of(value: Any, path: str) -> _ModelParts:
    """The parts of a model, and what other objects in their attributes hold, such as a helper of a loss."""
    found = _ModelParts()
    _walk(value, path, found)
    for place, other in found.others:  # which grows
        for name, member in list(vars(other).items()):
            _walk(member, f"{place}.{name}", found)
    return found


def _not_reset(metric: Any) -> list[Any]:
    """The variables of a metric that its ``reset_state`` leaves as they are. It is called for a copy of the metric."""
    import keras

    try:
        copy = type(metric).from_config(metric.get_config())
        changed = [np.array(keras.ops.convert_to_numpy(variable)) + 1 for variable in copy.variables]
        for variable, value in zip(copy.variables, changed, strict=True):
            variable.assign(value)
        copy.reset_state()
        kept = [
            np.array_equal(keras.ops.convert_to_numpy(each), old) for each, old in zip(copy.variables, changed, strict=True)
        ]
        return [variable for variable, is_kept in zip(metric.variables, kept, strict=True) if is_kept]
    except Exception:  # the metric cannot be copied, or creates its variables when it is called
        return []


def custom_objects(code: Mapping[str, Any], names: Set[str], bare_names: Set[str] = frozenset()) -> dict[str, Any]:
    """The custom classes and functions that Keras looks up by name when it loads the model.

    Args:
        code: The result of `code_of`.
        names: All strings in the model's configuration.
        bare_names: The losses and metrics that were passed to ``compile`` as strings.

    Raises:
        CustomObjectError: Two different objects have the same name, or Keras would not restore a lambda correctly.
    """
    needed: dict[str, Any] = {}
    places: dict[str, str] = {}
    for path, value in code.items():
        if is_builtin(value):
            continue
        if _is_lambda(value):
            if path.startswith(("model.loss", "model._compile", "model.optimizer")):
                raise CustomObjectError(
                    f"{_description(path)} is a lambda, which Keras saves without the variables that it uses, so it might "
                    "not load correctly. Define it with def and a unique name."
                )
            outside = sorted(inspect.getclosurevars(value).globals)
            if outside:
                raise CustomObjectError(
                    f"{_description(path)} is a lambda that uses {', '.join(outside)} from the enclosing scope, which Keras "
                    "does not save. Define it with def and a unique name."
                )
            continue
        for name in lookup_names(value):
            if name not in names:
                continue
            if name in needed and needed[name] is not value:
                raise CustomObjectError(
                    f"two different objects of the model have the name {name!r}: {_description(places[name])} and "
                    f"{_description(path)}. Keras finds custom code by its name and would load one of them for both. Give "
                    f"each a unique name (for instance, set __name__ of the function {name})."
                )
            if name in bare_names:
                raise CustomObjectError(
                    f"{_description(path)} has the name {name!r}, like one of Keras's, which the model also uses by that "
                    "name: a copy of the model would load one of them for both. Give yours a unique name."
                )
            needed[name] = value
            places.setdefault(name, path)
    return needed


def check_same_code(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Reject a model whose loaded copy consists of other code than the model.

    Args:
        before: The result of `code_of` for the model.
        after: The result of `code_of` for the loaded copy.

    Raises:
        CustomObjectError: The code differs; the message names the place and both objects.
    """
    for path, value in before.items():
        if path not in after or after[path] is value or _is_lambda(value):
            continue
        other = after[path]
        is_function = isinstance(value, types.FunctionType) or isinstance(other, types.FunctionType)
        if is_function or _qualified(value) != _qualified(other):
            raise CustomObjectError(
                f"{_description(path)} is {_qualified(value)}, but a saved copy of the model loads with "
                f"{_qualified(other)} in its place, because both have the same name. Give yours a unique name."
            )


def lookup_names(value: Any) -> list[str]:
    """The names under which Keras looks up a class or function when it loads a model."""
    import keras

    return list(dict.fromkeys([keras.saving.get_registered_name(value), value.__name__]))


def is_builtin(value: Any) -> bool:
    """Whether a class or function belongs to Keras, its backend, or Python."""
    module = getattr(value, "__module__", None) or "builtins"
    return _package(module) in (_BY_NAME - {"sparkkeras"} | {"builtins", "functools", "typing", "collections"})


@dataclass
class _ModelParts:
    """What a model consists of.

    Attributes:
        code: Classes and functions, by their attribute paths.
        variables: Variables, by the first of their attribute paths.
        tracked: The ``id()`` of those that layers, metrics and optimizers track.
        metrics: The metrics of custom classes.
        weights: The weights of layers, by their ``id()``.
        others: Objects that do not belong to Keras, a backend or Python, and their attribute paths.
        seen: The ``id()`` of all objects.
    """

    code: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, Any] = field(default_factory=dict)
    tracked: set[int] = field(default_factory=set)
    metrics: list[Any] = field(default_factory=list)
    weights: dict[int, Any] = field(default_factory=dict)
    others: list[tuple[str, Any]] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)


def _walk(value: Any, path: str, found: _ModelParts) -> None:
    import keras

    if isinstance(value, types.FunctionType):
        found.code[path] = value
        return
    if isinstance(value, functools.partial):
        _walk(value.func, f"{path}.func", found)
        return
    if id(value) in found.seen or isinstance(value, (str, bytes, int, float)):
        return
    found.seen.add(id(value))
    if isinstance(value, Mapping):
        for key, member in list(value.items()):
            _walk(member, f"{path}[{key!r}]", found)
    elif isinstance(value, (list, tuple)):
        for index, member in enumerate(value):
            _walk(member, f"{path}[{index}]", found)
    elif isinstance(value, keras.Variable):
        found.variables[path] = value
    elif isinstance(value, _keras_kinds(keras)):
        found.code[f"{path}.__class__"] = type(value)
        found.tracked.update(map(id, getattr(value, "variables", ())))
        if isinstance(value, keras.layers.Layer):  # which does not track its states, if it is recurrent
            found.tracked.update(map(id, keras.tree.flatten(getattr(value, "states", None))))
            found.weights.update((id(each), each) for each in value.weights)
        if isinstance(value, keras.Metric) and not is_builtin(type(value)):
            found.metrics.append(value)
        is_custom = not is_builtin(type(value))
        for name, member in list(vars(value).items()):
            # A lambda in an attribute of a custom class is created by its constructor, also on the workers.
            if name not in _SKIPPED and not (is_custom and _is_lambda(member)):
                _walk(member, f"{path}.{name}", found)
    elif hasattr(value, "__dict__") and not isinstance(value, (type, types.ModuleType)) and _is_helper(type(value)):
        found.others.append((path, value))


_SKIPPED = {
    "_tracker", "_lock", "_inbound_nodes", "_outbound_nodes", "_nodes", "_nodes_by_depth", "_operations_by_depth",
    "_inputs_struct", "_outputs_struct", "_inputs", "_outputs", "train_function", "test_function", "predict_function",
    "_call_signature", "_distribute_strategy", "_compile_config", "history", "build", "call", "quantize", "_history",
    "_functional", "_sparkkeras_outside", "_sparkkeras_other_weights",
}  # fmt: skip


def _keras_kinds(keras: Any) -> tuple[type, ...]:
    return (
        keras.Operation, keras.Loss, keras.Metric, keras.Optimizer, keras.Regularizer, keras.Initializer,
        keras.optimizers.schedules.LearningRateSchedule, keras.constraints.Constraint, keras.dtype_policies.DTypePolicy,
    )  # fmt: skip


def _is_helper(kind: type) -> bool:
    """Whether the attributes of objects of a class may hold variables."""
    return kind is types.SimpleNamespace or not (is_builtin(kind) or _is_of_python(kind.__module__))


def _package(module: str) -> str:
    return module.partition(".")[0]


def _is_of_python(module: str) -> bool:
    return _package(module) in sys.stdlib_module_names


def _is_lambda(value: Any) -> bool:
    return isinstance(value, types.FunctionType) and value.__name__ == "<lambda>"


def _qualified(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _description(path: str) -> str:
    return (
        path.replace(".__class__", " (its class)")
        .replace("model._compile_", "compiled ")
        .replace("model.loss", "compiled loss")
        .replace("._user_", " ")
    )
