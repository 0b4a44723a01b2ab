"""What Keras does not save of a compiled model: it is saved next to the model, and restored when that loads.

Keras does not save some arguments of losses and metrics, such as the ``delta`` of ``Huber``, and for which weights the
optimizers of a custom ``train_step`` were built. If the class of a model overrides ``compile``, Keras loads it without
compiling it, unless the class also implements ``get_compile_config`` and ``compile_from_config``. For a class that does not,
the attributes with optimizers, losses, metrics, functions and plain values are saved in the form in which Keras saves them,
with the arguments of Keras's own ``compile``.
"""

from __future__ import annotations

import functools
import json
import types
from collections.abc import Iterator, Mapping
from typing import Any

import keras

from sparkkeras.errors import ModelError
from sparkkeras.modeling import optimizers

Saved = dict[str, Any]
"""The compile arguments and optimizers of a model, compatible with JSON."""


def save(model: keras.Model) -> Saved:
    """What `restore` needs to compile and build a loaded copy like this model; empty where Keras does that.

    Raises:
        ModelError: An attribute that ``compile`` sets cannot be saved.
    """
    saved = {"optimizers": weights} if (weights := optimizers.built_for(model)) else {}
    return saved | compile_config(model)


def compile_config(model: keras.Model) -> Saved:
    """The part of `save` that does not depend on training."""
    if not model.compiled:
        return {}
    arguments = {
        where: wrapper._fn_kwargs
        for where, wrapper in _wrappers(model)
        if type(wrapper).from_config(wrapper.get_config())._fn_kwargs != wrapper._fn_kwargs
    }
    saved = {"arguments": arguments} if arguments else {}
    kind = type(model)
    overridden = kind.compile is not keras.Model.compile
    if not overridden or kind.compile_from_config is not keras.Model.compile_from_config:
        return saved
    attributes, others = {}, []
    for name, value in vars(model).items():
        if name.startswith("_") or name in _of_keras() or isinstance(value, keras.layers.Layer):
            continue
        leaves = keras.tree.flatten(value)
        if any(isinstance(leaf, types.FunctionType) and leaf.__name__ == "<lambda>" for leaf in leaves):
            raise ModelError(
                f"{name} of the model {model.name!r} is a lambda, which Keras saves without the variables that it uses. "
                "Define it with def and a unique name."
            )
        serialized = _serialized(value) if all(isinstance(leaf, _kinds()) for leaf in leaves) else None
        if serialized is not None:
            attributes[name] = serialized
        elif value is not None:
            others.append(name)
    return saved | {"compile": model._compile_config.serialize(), "attributes": attributes, "others": others}


def restore(model: keras.Model, saved: Mapping[str, Any], custom_objects: Mapping[str, Any], *, safe_mode: bool) -> None:
    """Compile a loaded model as the saved one was, and build its optimizers for the same weights.

    Raises:
        ModelError: ``compile`` of the saved model set an attribute that could not be saved.
    """
    if "compile" in saved:  # Keras sets model.compiled although it did not compile the model
        missing = [name for name in saved["others"] if not hasattr(model, name)]
        if missing:
            kind = type(model).__name__
            raise ModelError(
                f"the class {kind} of the model {model.name!r} overrides compile, which sets {', '.join(missing)} to a "
                "value that Keras cannot save: optimizers, losses, metrics, functions and numbers are possible. Set it in "
                "__init__, or override get_compile_config (returns the arguments of compile as a dict) and "
                "compile_from_config (calls compile with them)."
            )
        with keras.saving.custom_object_scope(dict(custom_objects)):
            load = functools.partial(
                keras.saving.deserialize_keras_object, custom_objects=dict(custom_objects), safe_mode=safe_mode
            )
            keras.Model.compile(model, **load(saved["compile"]))
            for name, value in saved["attributes"].items():
                if name not in vars(model) or _serialized(vars(model)[name]) != value:
                    setattr(model, name, load(value))
    wrappers = dict(_wrappers(model))
    for where, arguments in saved.get("arguments", {}).items():
        wrappers[where]._fn_kwargs = arguments
    optimizers.build(model, saved.get("optimizers", {}))


def _wrappers(model: keras.Model) -> Iterator[tuple[str, Any]]:
    """The losses and metrics of a model that call a function with arguments, by where they are."""
    compiled = getattr(model, "_compile_config", None)
    given = {} if compiled is None else compiled.config
    places = {name: given.get(name) for name in ("loss", "metrics", "weighted_metrics")}
    for name, value in [*places.items(), *vars(model).items()]:
        if name in places or not (name.startswith("_") or name in _of_keras()):
            for index, leaf in enumerate(keras.tree.flatten(value)):
                if type(getattr(leaf, "_fn_kwargs", None)) is dict and str(type(leaf).__module__).startswith("keras."):
                    yield f"{name}[{index}]", leaf


def _serialized(value: Any) -> Any:
    try:
        return json.loads(json.dumps(keras.saving.serialize_keras_object(_plain(value))))
    except Exception:
        return None  # differs from all that is saved


def _plain(value: Any) -> Any:
    """A value without the containers in which Keras tracks lists and dicts."""
    if isinstance(value, dict):
        return {key: _plain(member) for key, member in value.items()}
    return [_plain(member) for member in value] if isinstance(value, (list, tuple)) else value


@functools.cache
def _of_keras() -> frozenset[str]:
    """The attributes that every compiled model has."""
    plain = keras.Sequential()
    plain.compile()
    return frozenset({*vars(keras.Model()), *vars(plain), "history", "inputs", "outputs", "input_spec"})


def _kinds() -> tuple[type, ...]:
    return (
        keras.Optimizer, keras.Loss, keras.Metric, keras.optimizers.schedules.LearningRateSchedule, types.FunctionType,
        bool, int, float, str, type(None),
    )  # fmt: skip
