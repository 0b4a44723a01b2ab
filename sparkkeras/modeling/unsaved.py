"""What Keras does not save of a model: it is saved next to the model, and restored when that loads.

- Low-rank factors (LoRA) of layers inside other layers, such as those of MultiHeadAttention, and single weights that are
  frozen: Keras saves ``trainable`` of layers only. It merges the factors of a layer into the weights that they adapt.
- What an overridden ``compile`` does, unless the class also implements ``get_compile_config`` and ``compile_from_config``:
  the attributes that hold optimizers, losses, metrics, functions and plain values, and the arguments of Keras's ``compile``.
- Arguments of losses and metrics, such as the ``delta`` of ``Huber``.
- Of optimizers: for which weights several of them were built, and which weights are excluded from weight decay.
- ``run_eagerly`` and ``jit_compile`` of models that are not compiled.
"""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from sparkkeras.errors import ModelError
from sparkkeras.modeling import optimizers
from sparkkeras.modeling.compilation import (
    Saved,
    compiled_with,
    deserialize,
    function_arguments,
    leaves,
    optimizer_fits,
    serialize,
    set_function_arguments,
)
from sparkkeras.modeling.own_methods import overrides


def collect(model: keras.Model) -> Saved:
    """What `restore` needs to make a loaded copy like this model; compatible with JSON.

    Raises:
        ModelError: An attribute that ``compile`` sets cannot be saved.
    """
    saved = {
        "lora": [
            [index, layer.lora_rank, layer.lora_alpha]
            for index, layer in enumerate(model._flatten_layers())
            if getattr(layer, "lora_enabled", False)
        ],
        "trainable": [bool(weight.trainable) for weight in model.weights],
        "trained": list(optimizers.trained(model)),
    }
    if model.compiled:
        saved |= {"compile": _own_compile(model), "optimizers": _optimizers(model)}
        saved["arguments"] = {} if saved["compile"] else {
            where: arguments for where, wrapper in _wrappers(model) if (arguments := function_arguments(wrapper))
        }  # fmt: skip
    else:
        runs = {"run_eagerly": model.run_eagerly or None, "jit_compile": model._jit_compile}
        saved["attributes"] = {name: value for name, value in runs.items() if value is not None}
    return {name: value for name, value in saved.items() if value}


def restore(model: keras.Model, saved: Mapping[str, Any], custom_objects: Mapping[str, Any], *, safe_mode: bool) -> bool:
    """Make a loaded model like the saved one: first what is trained, then ``compile``, then losses and optimizers.

    Returns:
        Whether there are optimizers whose variables Keras has not loaded.

    Raises:
        ModelError: ``compile`` of the saved model set an attribute that could not be saved.
    """
    _restore_training(model, saved.get("lora", ()), saved.get("trainable", ()))
    with keras.saving.custom_object_scope(dict(custom_objects)):
        if "compile" in saved:  # Keras sets model.compiled although it did not compile the model
            _compile(model, saved["compile"], custom_objects, safe_mode=safe_mode)
        wrappers = dict(_wrappers(model))
        for where, arguments in saved.get("arguments", {}).items():
            if where in wrappers:  # otherwise, an error reports the class
                set_function_arguments(wrappers[where], arguments)
        changed = model.compiled and _restore_optimizers(model, saved.get("optimizers", {}))
    for name, value in saved.get("attributes", {}).items():
        setattr(model, name, value)
    flags = saved.get("trained", ())
    if len(model.weights) == len(flags):
        optimizers.keep_trained(model, flags)
    return "compile" in saved or changed


def _restore_training(model: keras.Model, lora: Sequence[Any], trainable: Sequence[bool]) -> None:
    layers: list[Any] = list(model._flatten_layers())
    for index, rank, alpha in lora:
        if index < len(layers) and not getattr(layers[index], "lora_enabled", True):
            layers[index].enable_lora(rank, lora_alpha=alpha)
    if len(model.weights) == len(trainable):  # other models are reported as an error
        for weight, flag in zip(model.weights, trainable, strict=True):
            if weight.trainable != flag:
                weight.trainable = flag


def restart_lora(model: keras.Model) -> None:
    """Give low-rank factors their initial values after loading weights: Keras sets both to zero, so no gradient flows."""
    for layer in model._flatten_layers():
        if getattr(layer, "lora_enabled", False):
            for weight in layer.trainable_weights:
                if weight.name.startswith("lora_") and weight.name.endswith("_a"):
                    weight.assign(keras.initializers.HeUniform()(weight.shape, weight.dtype))


def _own_compile(model: keras.Model) -> Saved:
    """What an overridden ``compile`` did; empty for models that Keras compiles when it loads them."""
    if not overrides(model, "compile") or overrides(model, "compile_from_config"):
        return {}
    attributes, others = {}, []
    for name, value in _own_attributes(model):
        members = list(leaves(value))
        if any(isinstance(leaf, types.FunctionType) and leaf.__name__ == "<lambda>" for leaf in members):
            raise ModelError(
                f"{name} of the model {model.name!r} is a lambda, which Keras saves without the variables that it uses. "
                "Define it with def and a unique name."
            )
        if all(isinstance(leaf, _SERIALIZABLE) for leaf in members) and _serialized(value) is not None:
            attributes[name] = value
        elif value is not None:
            others.append(name)
    return {"values": serialize({"arguments": compiled_with(model), "attributes": attributes}), "others": others}


def _compile(model: keras.Model, saved: Saved, custom_objects: Mapping[str, Any], *, safe_mode: bool) -> None:
    missing = [name for name in saved["others"] if not hasattr(model, name)]
    if missing:
        kind = type(model).__name__
        raise ModelError(
            f"the class {kind} of the model {model.name!r} overrides compile, which sets {', '.join(missing)} to a "
            "value that Keras cannot save: optimizers, losses, metrics, functions and numbers are possible. Set it in "
            "__init__, or override get_compile_config (returns the arguments of compile as a dict) and "
            "compile_from_config (calls compile with them)."
        )
    values = deserialize(saved["values"], custom_objects, safe_mode=safe_mode)
    keras.Model.compile(model, **values["arguments"])
    for name, value in values["attributes"].items():
        shared = any(isinstance(leaf, keras.Optimizer) for leaf in leaves(value))  # perhaps with model.optimizer
        if shared or name not in vars(model) or _serialized(vars(model)[name]) != _serialized(value):
            setattr(model, name, value)


def _optimizers(model: keras.Model) -> Saved:
    """By the path of each optimizer: the weights that it was built for, if there are several, and those without decay."""
    found, several = optimizers.optimizers_of(model), optimizers.has_several(model)
    saved = {}
    for path, optimizer in found.items():
        inner = optimizers.inner_of(optimizer)
        excluded = getattr(inner, "_exclude_from_weight_decay", None) or ()  # the keys of variables, which differ in a copy
        pattern = getattr(inner, "_exclude_from_weight_decay_pattern", None)
        each = {
            "weights": optimizers.built_for(optimizer, model) if several else None,
            "undecayed": [
                index for index, each in enumerate(model.weights) if excluded and inner._var_key(each) in excluded
            ],
            "undecayed_names": pattern and pattern.pattern,
        }
        saved[path] = {name: value for name, value in each.items() if value}
    return saved if several or any(saved.values()) else {}


def _restore_optimizers(model: keras.Model, saved: Mapping[str, Any]) -> bool:
    """Build the optimizers as they were, and return whether one has changed."""
    several = any(path != "optimizer" for path in saved)
    if several:
        optimizers.keep_use(model, "optimizer" in saved)
    compiled = optimizers.optimizer_of(model)
    used = not several or "optimizer" in saved
    indices = saved.get("optimizer", {}).get("weights") if several else None
    changed = False
    if compiled is not None and compiled.built:  # Keras has built it for the weights that its copy trained
        fits = optimizers.built_for(compiled, model) == indices if several else optimizer_fits(model)
        if not (used and fits):
            model.optimizer = type(compiled).from_config(compiled.get_config())
            changed = True
    for path, optimizer in optimizers.optimizers_of(model).items():
        each = saved.get(path, {})
        inner = optimizers.inner_of(optimizer)
        if each.get("undecayed"):
            inner._exclude_from_weight_decay = {inner._var_key(model.weights[index]) for index in each["undecayed"]}
        if each.get("undecayed_names"):
            inner._exclude_from_weight_decay_pattern = re.compile(each["undecayed_names"])
        weights = [model.weights[index] for index in each.get("weights", ())] if several else model.trainable_variables
        if weights and not optimizer.built:
            optimizer.build(weights)
            changed = True
    return changed


def _wrappers(model: keras.Model) -> Iterator[tuple[str, Any]]:
    """The losses and metrics of a model that may call a function with arguments, by where they are."""
    given = compiled_with(model)
    places = {name: given.get(name) for name in ("loss", "metrics", "weighted_metrics")}
    attributes = _own_attributes(model) if overrides(model, "compile") else ()
    for name, value in [*places.items(), *attributes]:
        for index, leaf in enumerate(leaves(value)):
            yield f"{name}[{index}]", leaf


def _own_attributes(model: keras.Model) -> Iterator[tuple[str, Any]]:
    """The attributes that are not Keras's own."""
    for name, value in vars(model).items():
        is_own = name not in _of_keras() and not name.startswith(("_self_", "_sparkkeras_"))
        if is_own and not isinstance(value, keras.layers.Layer):
            yield name, value


def _serialized(value: Any) -> Any:
    try:
        return serialize(value)
    except ModelError:
        raise
    except Exception:
        return None


@functools.cache
def _of_keras() -> frozenset[str]:
    """The attributes of models without code of their own: those that compiling them sets, and those that training adds."""
    inputs = keras.Input((1,))
    plain: list[Any] = [keras.Model(), keras.Sequential([inputs]), keras.Model(inputs, keras.layers.Dense(1)(inputs))]
    for model in plain:
        model.compile()
    in_training = {"history", "stop_evaluating", "stop_predicting", "_eval_epoch_iterator", "_jax_state"}
    return frozenset(in_training.union(*map(vars, plain)))


_SERIALIZABLE = (
    keras.Optimizer, keras.Loss, keras.Metric, keras.optimizers.schedules.LearningRateSchedule, types.FunctionType,
    bool, int, float, str, type(None), np.ndarray, np.generic,
)  # fmt: skip
"""The types of the values that are saved of attributes."""
