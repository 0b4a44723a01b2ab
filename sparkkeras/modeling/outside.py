"""Variables outside a model: a `keras.Variable` of a module, a closure, an object or a loss, which custom code of it uses.

Custom code is pickled by value, and such variables with it. Each has a key, by which all pickles of one process refer to the
same variable in a process that loads them: so a callback on a worker changes the variable that the worker's loss uses. Their
values travel with the state of the model, and not with its code, which is the same when only they change.
"""

from __future__ import annotations

import re
import sys
import types
import uuid
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from pkgutil import resolve_name
from typing import Any
from weakref import WeakValueDictionary

import keras
import numpy as np

from sparkkeras.errors import ConfigurationError, CustomObjectError
from sparkkeras.modeling.backends import compiles_operations, read
from sparkkeras.modeling.custom_code import ByValue, is_by_reference, other_weights, untracked_variables
from sparkkeras.modeling.optimizers import optimizer_of, optimizers_of
from sparkkeras.modeling.state import outside

_KEY = "_sparkkeras_key"
_PATH = "_sparkkeras_path"
_OTHERS = "_sparkkeras_other_weights"

_known: WeakValueDictionary[str, Any] = WeakValueDictionary()
"""The variables of this process that have a key, by key."""


def dump_code(model: keras.Model, code: dict[str, Any], trains: bool) -> tuple[ByValue[dict[str, Any]], dict[str, Any]]:
    """Pickle the custom code of a model, and note the weights of other models, which `Unchanging` checks, if it ``trains``.

    Args:
        model: The model, compiled if it ``trains``.
        code: The code.
        trains: Whether to find variables outside the model. For prediction only, those that are known from training count,
            while the pickle has the values of others, since two models may use them with different values.

    Returns:
        The pickle, and the variables outside the model that this code refers to, or that are attributes of the model's
        parts. Their names are keys, ``module:path`` in modules that workers import, or paths of attributes. They are sorted
        by their `stable_names`.

    Raises:
        CustomObjectError: It cannot be pickled, or refers to a weight of the model.
    """
    found: dict[str, Any] = {}
    paths: dict[int, str] = {}
    others = {id(each): each for each in (other_weights(model) if trains else ())}
    known = outside(model)
    parts = [model, *optimizers_of(model).values(), optimizer_of(model)]
    own = {id(variable) for part in parts if part is not None for variable in part.variables}
    seen: set[int] = set()

    def reduced(value: Any) -> Any:
        for name, each in _reached(value, seen):
            if name.startswith(":"):
                paths.setdefault(id(each), name[1:])
            elif id(each) not in own:
                found[name] = each
        if isinstance(value, keras.Layer):
            others.update((id(each), each) for each in value.weights if id(each) not in own)
        if not isinstance(value, keras.Variable) or not (trains or vars(value).get(_KEY) in known):
            return NotImplemented
        if id(value) in own:
            raise CustomObjectError(
                f"the custom code of the model {model.name!r} refers to its weight {value.path!r} by a variable of a module "
                "or function, and would get a copy of it on the workers. Refer to the layer by an attribute of the model, "
                "in train_step, compute_loss or call, or add the term with add_loss in the layer."
            )
        found[_key_of(value)] = value
        return _reduced(value)

    custom = ByValue.dump(code, "the model's custom code", reduced)
    named = set(map(id, found.values()))
    attributes = {
        path: each
        for path, each in untracked_variables(model).items()
        if id(each) not in named and vars(each).get(_KEY) not in found
    }
    if trains:
        vars(model)[_OTHERS] = [(each, _checksum(each)) for each in others.values()]
    aliases = {id(found[name]): name for name in sorted(found, reverse=True) if ":" in name}  # of a variable: the first
    found = {name: each for name, each in found.items() if ":" not in name or aliases[id(each)] == name}
    chosen = {name: each for name, each in {**found, **attributes}.items() if trains or name in known}
    numbers: Counter[str] = Counter()
    for name, each in chosen.items() if trains else ():
        if vars(each).get(_KEY) == name:
            path = paths.get(id(each), each.name)
            numbers[path] += 1
            vars(each)[_PATH] = path if numbers[path] == 1 else f"{path} ({numbers[path]})"
    ordered = zip(_stable(chosen), chosen.items(), strict=True)
    return custom, dict(item for _, item in sorted(ordered, key=itemgetter(0)))


def stable_names(model: keras.Model) -> list[str]:
    """The names of the variables outside a model, which are the same in each process: with their names in code, not keys."""
    return _stable(outside(model))


def _stable(variables: Mapping[str, Any]) -> list[str]:
    return [vars(each).get(_PATH, name) if vars(each).get(_KEY) == name else name for name, each in variables.items()]


def dump_callbacks(callbacks: Sequence[Any], models: Iterable[keras.Model]) -> ByValue[Sequence[Any]]:
    """Pickle callbacks for the workers. Variables outside the models stay those that the models use.

    Raises:
        CustomObjectError: They cannot be pickled, or refer to a variable that each model on a worker has itself.
        ConfigurationError: They refer to a variable whose value the backend compiles into the training step.
    """
    used = {id(variable): (name, model) for model in models for name, variable in outside(model).items()}

    def reduced(value: Any) -> Any:
        if not isinstance(value, keras.Variable) or id(value) not in used:
            return NotImplemented
        name, model = used[id(value)]
        if name in compiled(model, outside(model)):
            raise ConfigurationError(_compiled_in(f"worker_callbacks refer to the variable {value.path!r}"))
        if ":" in name:
            return _of_module, (name,)
        if vars(value).get(_KEY) != name:
            raise CustomObjectError(
                f"worker_callbacks refer to the variable {value.path!r}, but the model of each worker has its own: use "
                f"self.{name} in the callback."
            )
        return _reduced(value)

    return ByValue.dump(callbacks, "worker_callbacks", reduced)


def find(model: keras.Model, names: Sequence[str]) -> dict[str, Any]:
    """The variables of this process for an unpacked model, by the names of `dump_code`."""
    attributes = untracked_variables(model)
    return {name: _of_module(name) if ":" in name else _known.get(name, attributes.get(name)) for name in names}


class Unchanging:
    """Checks that callbacks do not change values that training would not see.

    These are variables whose values are compiled into the training step, as with JAX, and the weights of other models to
    which a packed model refers, such as a teacher in its loss.

    Args:
        model: The model, before its training.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._values = {name: np.array(read(each)) for name, each in compiled(model, outside(model)).items()}
        self._others = vars(model).get(_OTHERS, ())

    def check(self) -> None:
        """Check the values.

        Raises:
            ConfigurationError: One has changed.
        """
        for name, variable in outside(self._model).items():
            if name in self._values and not np.array_equal(read(variable), self._values[name]):
                raise ConfigurationError(_compiled_in(f"a callback has changed the variable {variable.path!r}"))
        for weight, checksum in self._others:
            if _checksum(weight) != checksum:
                raise ConfigurationError(
                    f"a callback has changed the weight {weight.path!r} of another model, to which the loss or other "
                    f"custom code of the model {self._model.name!r} refers, but workers have a copy from the beginning of "
                    "fit, which does not change. Train in several calls of fit, and change it between them, or keep the "
                    "values in keras.Variables that the loss uses."
                )


def _checksum(variable: Any) -> int:
    return zlib.crc32(np.asarray(read(variable)).tobytes())


def compiled(model: keras.Model, variables: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the variables outside a model whose values are compiled into its steps; not those of metrics."""
    if not compiles_operations() or model._jit_compile is False or model.run_eagerly:
        return {}
    arguments = set(map(id, model.variables))
    return {name: variable for name, variable in variables.items() if id(variable) not in arguments}


def _compiled_in(what: str) -> str:
    return (
        f"{what} outside of the model, but Keras compiles its first value into the training step with JAX, so that a change "
        "has no effect. Make it a weight of a layer (self.add_weight(trainable=False) in its build) and set that in a "
        "callback, compile the model with jit_compile=False, or use another backend."
    )


def _key_of(variable: Any) -> str:
    key: str = vars(variable).setdefault(_KEY, uuid.uuid4().hex)
    _known[key] = variable
    return key


def _reduced(variable: Any) -> tuple[Any, ...]:
    dtype = keras.backend.standardize_dtype(variable.dtype)
    return _loaded, (_key_of(variable), tuple(variable.shape), dtype, bool(variable.trainable), variable.name)


def _loaded(key: str, shape: tuple[int, ...], dtype: str, trainable: bool, name: str) -> Any:
    """The variable of this process with this key; created if there is none, for a value that follows."""
    variable = _known.get(key)
    if variable is None:
        variable = keras.Variable("zeros", shape, dtype, trainable=trainable, name=name)
        vars(variable)[_KEY] = key
        _known[key] = variable
    return variable


def _of_module(name: str) -> Any:
    """A variable of a module, by the name that `_reached` gave it.

    Raises:
        CustomObjectError: The module has none.
    """
    module, _, path = name.partition(":")
    attribute, *_ = re.split(r"[.\[]", path, maxsplit=1)
    variables: dict[str, Any] = {}
    with suppress(AttributeError):
        variables = _within(resolve_name(f"{module}:{attribute}"), f"{module}:{attribute}")
    if name not in variables:
        raise CustomObjectError(
            f"the custom code of the model uses the variable {path} of the module {module}, which a worker that imports the "
            "module does not find there. Create it when the module is imported."
        )
    return variables[name]


def _reached(value: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """The variables that a module, class or function refers to by names, with ``module:path``.

    It follows modules, classes and functions of the same package, unless they are pickled by value, as they are then reached
    by the pickle. For variables of those, ``module`` is empty.
    """
    if not isinstance(value, (types.ModuleType, types.FunctionType, type)) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, types.FunctionType):
        yield from _reached_by(value, seen)
    elif isinstance(value, type):
        for kind in value.__mro__:
            if kind is value or is_by_reference(kind):
                yield from _within(kind, f"{kind.__module__ if is_by_reference(kind) else ''}:{kind.__qualname__}").items()
            for member in vars(kind).values() if is_by_reference(kind) else ():
                for function in (getattr(member, "__func__", member), getattr(member, "fget", None)):
                    yield from _reached(function, seen)
    elif is_by_reference(value):
        for name, each in vars(value).items():
            if isinstance(each, keras.Variable):
                yield f"{value.__name__}:{name}", each


def _reached_by(function: types.FunctionType, seen: set[int]) -> Iterator[tuple[str, Any]]:
    by_reference, package = is_by_reference(function), (function.__module__ or "").split(".")[0]
    values, used = function.__globals__, _names(function.__code__)
    home = values.get("__name__", "") if by_reference else ""
    places = [(home, name, values[name]) for name in used if name in values]
    places += [("", name, sys.modules[name]) for name in used if name in sys.modules]  # perhaps imported in the function
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    places += [("", name, cell.cell_contents) for name, cell in cells if cell != types.CellType()]
    modules: set[str] = set()
    for module, name, each in places:  # which grows
        if isinstance(each, (types.ModuleType, types.FunctionType, type)):
            if not is_by_reference(each):
                continue
            owner = each.__name__ if isinstance(each, types.ModuleType) else each.__module__
            if by_reference and owner.split(".")[0] != package:
                continue
            if not isinstance(each, types.ModuleType):
                yield from _reached(each, seen)
            elif owner not in modules:
                modules.add(owner)
                places += [(owner, member, vars(each)[member]) for member in used if member in vars(each)]
        elif module.split(".")[0] == package or not by_reference:
            yield from _within(each, f"{module}:{name}").items()


def _names(code: types.CodeType) -> list[str]:
    """The names of globals and attributes that code uses, including those of nested functions."""
    inner = [_names(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    return sorted({*code.co_names}.union(*inner))


def _within(value: Any, path: str) -> dict[str, Any]:
    """The variables of an object, of the members of a list or dict, or of a class itself, by their paths."""
    if not isinstance(value, type):
        return untracked_variables(value, path)
    members = {
        f"{path}.{name}": each
        for name, each in vars(value).items()
        if not isinstance(each, type) or each.__qualname__ == f"{value.__qualname__}.{name}"
    }
    return {name: found for inner, each in members.items() for name, found in _within(each, inner).items()}
