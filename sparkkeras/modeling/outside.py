"""Variables outside a model: a `keras.Variable` of a module, a closure or a loss, which custom code of the model uses.

Custom code is pickled by value, and such variables with it. Each has a key, by which all pickles of one process refer to the
same variable in a process that loads them: so a callback on a worker changes the variable that the worker's loss uses. Their
values travel with the state of the model, and not with its code, which is the same when only they change.
"""

from __future__ import annotations

import sys
import types
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import keras
import numpy as np

from sparkkeras.errors import ConfigurationError, CustomObjectError
from sparkkeras.modeling.backends import compiles_operations, read
from sparkkeras.modeling.custom_code import ByValue, global_names, is_by_reference, untracked_variables
from sparkkeras.modeling.optimizers import optimizer_of, optimizers_of
from sparkkeras.modeling.state import outside

_KEY = "_sparkkeras_key"

_known: WeakValueDictionary[str, Any] = WeakValueDictionary()
"""The variables of this process that have a key, by key."""


def dump_code(model: keras.Model, code: dict[str, Any], trains: bool) -> tuple[ByValue[dict[str, Any]], dict[str, Any]]:
    """Pickle the custom code of a model.

    Args:
        model: The model, compiled if it ``trains``.
        code: The code.
        trains: Whether to find variables outside the model. For prediction only, those that are known from training count,
            while the pickle has the values of others, since two models may use them with different values.

    Returns:
        The pickle, and the variables outside the model that this code refers to, or that are attributes of the model's
        parts. Their names are keys, ``module:name`` in modules that workers import, or paths of attributes.

    Raises:
        CustomObjectError: It cannot be pickled, or refers to a weight of the model.
    """
    found: dict[str, Any] = {}
    known = outside(model)
    parts = [model, *optimizers_of(model).values(), optimizer_of(model)]
    own = {id(variable) for part in parts if part is not None for variable in part.variables}
    seen: set[int] = set()

    def reduced(value: Any) -> Any:
        found.update(_in_modules(value, seen))
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
    return custom, {name: each for name, each in {**found, **attributes}.items() if trains or name in known}


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
            module, _, attribute = name.partition(":")
            return getattr, (sys.modules[module], attribute)
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
    """Checks that callbacks do not change a variable whose value is compiled into the training step, as with JAX.

    Args:
        model: The model, before its training.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._values = {name: np.array(read(each)) for name, each in compiled(model, outside(model)).items()}

    def check(self) -> None:
        """Check the values.

        Raises:
            ConfigurationError: One has changed.
        """
        for name, variable in outside(self._model).items():
            if name in self._values and not np.array_equal(read(variable), self._values[name]):
                raise ConfigurationError(_compiled_in(f"a callback has changed the variable {variable.path!r}"))


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
    """A variable of a module, which the custom code of the model has imported."""
    module, _, attribute = name.partition(":")
    return getattr(sys.modules[module], attribute)


def _in_modules(value: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """The variables in modules that are not pickled by value, to which such a module, class or function refers."""
    is_code = isinstance(value, (types.ModuleType, types.FunctionType, type))
    if not is_code or id(value) in seen or not is_by_reference(value):
        return
    seen.add(id(value))
    if isinstance(value, types.ModuleType):
        for name, each in vars(value).items():
            if isinstance(each, keras.Variable):
                yield f"{value.__name__}:{name}", each
    elif isinstance(value, type):
        for member in vars(value).values():
            yield from _in_modules(getattr(member, "__func__", member), seen)
    else:
        for name in sorted(global_names(value.__code__)):
            each = value.__globals__.get(name)
            if isinstance(each, keras.Variable):
                yield f"{value.__module__}:{name}", each
            elif getattr(each, "__module__", None) == value.__module__:
                yield from _in_modules(each, seen)
