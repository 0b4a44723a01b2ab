"""What a model is compiled with, and what it must be to predict, to be evaluated, and to be trained.

The arguments and attributes of ``compile`` are saved in a form compatible with JSON, in addition to Keras's serialization:
two references to one object stay references to one object, keys of dicts need not be strings, and losses and metrics keep
the arguments that Keras does not save, such as the ``delta`` of ``Huber``.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras

from sparkkeras.data.block import describe
from sparkkeras.errors import ModelError, nearest_name
from sparkkeras.modeling.archive_errors import load_error
from sparkkeras.modeling.optimizers import has_several, inner_optimizer, optimizers_of, step_is_stateless
from sparkkeras.modeling.own_methods import overrides
from sparkkeras.modeling.state import is_built


def check_built(model: Any) -> None:
    """Reject a model that cannot predict.

    Raises:
        ModelError: It is not a Keras model, or not built.
    """
    if not isinstance(model, keras.Model):
        raise ModelError(f"expected a keras.Model, received {describe(model)}.{_advice(model)}")
    if not is_built(model):
        raise ModelError(
            f"the model {model.name!r} is not built, so it has no weights yet: define it with keras.Input(shape), or call "
            "it once on a batch."
        )


def check_compiled(model: Any) -> None:
    """Reject a model that cannot be evaluated on the workers.

    Raises:
        ModelError: It is not a Keras model, not built, not compiled, or compiled with unknown names.
    """
    check_built(model)
    if not model.compiled:
        raise ModelError(
            f"the model {model.name!r} is not compiled: call model.compile(optimizer=..., loss=...) first. Only predict "
            "works without compiling."
        )
    loss_weights = compiled_with(model).get("loss_weights")
    if any(isinstance(weight, str) for weight in keras.tree.flatten(loss_weights)):
        raise ModelError(
            f"the model {model.name!r} is compiled with loss_weights={loss_weights!r}; expected numbers. The third "
            "positional argument of compile is loss_weights: for metrics, write compile(optimizer, loss, "
            f"metrics={loss_weights!r})."
        )
    _check_names(model)


def _check_names(model: keras.Model) -> None:
    """Reject unknown names of losses and metrics, which Keras would report only with the first batch."""
    if overrides(
        model, "compile", "train_step", "test_step", "compute_loss", "compute_metrics"
    ):  # which may interpret the names
        return
    for argument, module, by_labels in (
        ("loss", keras.losses, ("crossentropy", "ce")),
        ("metrics", keras.metrics, ("accuracy", "acc")),
        ("weighted_metrics", keras.metrics, ("accuracy", "acc")),
    ):
        given = compiled_with(model).get(argument)
        for name in _names_in(given):
            if name.lower() in by_labels:
                continue
            try:
                module.get(name)
            except Exception as error:
                known = [each for each in (*dir(module), *by_labels) if not each.startswith("_")]
                where = module.__name__.rpartition(".")[2]
                raise ModelError(
                    f"the model {model.name!r} is compiled with {argument}={given!r}: {error}.{nearest_name(name, known)} "
                    f"Call model.compile(...) again, with a name, a function or an object of keras.{where}, or a custom "
                    "function or object."
                ) from error


def _names_in(given: Any) -> Iterator[str]:
    """The strings among losses or metrics, which may be nested as ``compile`` accepts them."""
    if isinstance(given, str):
        yield given
    elif isinstance(given, (list, tuple)) or (isinstance(given, Mapping) and "class_name" not in given):
        for each in given.values() if isinstance(given, Mapping) else given:
            yield from _names_in(each)


def special_tokens(config: Mapping[str, Any]) -> int:
    """How many tokens of the vocabulary of a lookup layer, or a ``TextVectorization``, are for padding and unknown ones."""
    masks = config.get("mask_token", "") is not None and config["output_mode"] == "int"
    return int(masks) + int(config.get("num_oov_indices", 1))


def check_adapted(model: keras.Model) -> None:
    """Reject a model with a layer that has no vocabulary: Keras saves such a model, and cannot load it.

    Raises:
        ModelError: There is such a layer.
    """
    kinds = (keras.layers.TextVectorization, keras.layers.StringLookup, keras.layers.IntegerLookup)
    for layer in model._flatten_layers(include_self=False):
        if isinstance(layer, kinds) and layer.vocabulary_size() <= special_tokens(layer.get_config()):
            raise ModelError(
                f"the layer {layer.name!r} of the model {model.name!r} has no vocabulary: call sparkkeras.adapt(model, df), "
                "or the layer's own adapt or set_vocabulary, first (in Spark ML KerasEstimator(adapt=True))."
            )


def check_trainable(model: Any) -> None:
    """Reject a model that cannot be trained.

    Raises:
        ModelError: `check_compiled` rejects it, or it has no weights, no optimizer, an optimizer that was built for other
            weights, several optimizers with JAX, or nothing that could add a loss.
    """
    check_compiled(model)
    if not model.weights:
        raise ModelError(f"the model {model.name!r} has no weights, so there is nothing to train.")
    found = optimizers_of(model)
    if not found:
        raise ModelError(
            f"the model {model.name!r} was compiled without an optimizer, so it cannot be trained: call "
            "model.compile(optimizer=..., loss=...)."
        )
    if has_several(model) and step_is_stateless():
        raise ModelError(
            f"the train_step of the model {model.name!r} may use the optimizers {', '.join(found)}, but with JAX, Keras "
            "passes only the variables of model.optimizer to it. Apply model.optimizer to all weights, and remove other "
            "optimizers from the model, or use TensorFlow or PyTorch (KERAS_BACKEND)."
        )
    if not optimizer_fits(model):
        if not inner_optimizer(model)._trainable_variables:
            raise ModelError(
                f"the optimizer of the model {model.name!r} knows none of the weights, as after "
                "keras.saving.load_model of an HDF5 file (.h5): load it with sparkkeras.load_spark_model, or call "
                "model.compile(...) again."
            )
        raise ModelError(
            f"the optimizer of the model {model.name!r} was built for other weights than those that are trainable now: a "
            "layer was frozen, unfrozen or added, or the model quantized, after compile. Call model.compile(...) again."
        )
    if _certainly_lacks_loss(model):
        raise missing_loss(model)


def check_not_synchronized(model: keras.Model) -> None:
    """Reject a model with trainable layers that synchronize batch statistics, such as ``BatchNormalization``.

    Raises:
        ModelError: There are such layers.
    """
    names = [
        layer.name for layer in model._flatten_layers() if getattr(layer, "synchronized", False) is True and layer.trainable
    ]
    if names:
        raise ModelError(
            f"the model {model.name!r} has layers with synchronized=True ({', '.join(names)}), which compute the statistics "
            "of a batch over all replicas in every step. Workers train their replicas separately, and sparkkeras averages "
            "moving statistics with the weights when workers exchange them: use synchronized=False, or freeze the layers "
            "(trainable=False). Only predict and evaluate work with them."
        )


def missing_loss(model: keras.Model) -> ModelError:
    """The error of a model that has nothing to minimize."""
    return ModelError(
        f"the model {model.name!r} was compiled without a loss, and no layer adds one: call model.compile(loss=...)."
    )


def _certainly_lacks_loss(model: keras.Model) -> bool:
    """Whether a model has no loss, as far as that is known before it is called: custom code in it might add one."""
    layers = model._flatten_layers()
    return (
        model._compile_loss is None
        and not model.losses  # of regularizers of weights, among others
        and not any(
            layer.activity_regularizer is not None
            or isinstance(layer, keras.layers.Lambda)
            or not type(layer).__module__.startswith("keras.")
            for layer in layers
        )
    )


def needs_labels(models: Sequence[keras.Model]) -> bool:
    """Whether Keras's training of one of the models uses labels, for a loss that it was compiled with."""
    return any(
        compiled_with(model).get("loss") is not None and not overrides(model, "train_step", "compute_loss")
        for model in models
    )


def optimizer_fits(model: keras.Model) -> bool:
    """Whether a single optimizer was built for the weights that are trainable now, or is not built yet.

    Several optimizers fit: each may be for any weights.
    """
    optimizer = inner_optimizer(model)
    if optimizer is None or not optimizer.built or has_several(model):
        return True
    return [id(each) for each in optimizer._trainable_variables] == [id(each) for each in model.trainable_variables]


def compiled_with(model: keras.Model) -> dict[str, Any]:
    """The arguments that ``keras.Model.compile`` was called with."""
    compiled = getattr(model, "_compile_config", None)
    return {} if compiled is None else dict(compiled.config)


def _advice(given: object) -> str:
    """A sentence that says how to get a model from something else; empty if that is unknown."""
    if isinstance(getattr(given, "model", None), keras.Model):
        return " Pass its attribute model."
    if isinstance(given, (str, os.PathLike)) and str(given).endswith((".keras", ".h5", ".hdf5")):
        return f" Load a saved model with sparkkeras.load_spark_model({str(given)!r}) or keras.saving.load_model."
    if isinstance(given, types.FunctionType):
        return f" Call the function that builds the model: {given.__name__}()."
    if isinstance(given, type) and issubclass(given, keras.Model):
        return f" Create an instance: {given.__name__}(...)."
    return ""


def compile_arguments(model: keras.Model) -> dict[str, Any] | None:
    """The losses and metrics that a model was compiled with, in serialized form; ``None`` if it is not compiled."""
    given = compiled_with(model)
    return serialize({name: given.get(name) for name in _EVALUATION_ARGUMENTS}) if model.compiled else None


def compile_to_evaluate(
    model: keras.Model, given: Mapping[str, Any] | None, custom_objects: Mapping[str, Any], *, safe_mode: bool
) -> None:
    """Compile a model for evaluation only, with the `compile_arguments` of another model.

    Raises:
        ModelError: Custom code is missing, or ``safe_mode`` is set and there is a Python lambda.
    """
    handled = sys.exception()
    try:
        arguments = {} if given is None else deserialize(given, custom_objects, safe_mode=safe_mode)
    except Exception as error:
        translated = load_error(error, handled)
        raise translated from translated.__cause__
    model.compile("sgd", **arguments)  # Keras cannot load a model that was compiled and saved without an optimizer


_EVALUATION_ARGUMENTS = ("loss", "loss_weights", "metrics", "weighted_metrics")


Saved = dict[str, Any]
"""Saved values, compatible with JSON."""


def serialize(value: Any) -> Saved:
    """A value: objects that Keras can serialize, plain values, and lists, tuples and dicts of them.

    Raises:
        Exception: Keras cannot serialize an object.
    """
    objects: list[Any] = []

    def written(value: Any) -> Any:
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, Mapping):
            return {"dict": [[written(key), written(member)] for key, member in value.items()]}
        if isinstance(value, (list, tuple)):
            return {"tuple" if isinstance(value, tuple) else "list": [written(member) for member in value]}
        index = next((index for index, each in enumerate(objects) if each is value), len(objects))
        if index == len(objects):
            objects.append(value)
        return {"object": index}

    content = written(value)
    members = [
        {"object": keras.saving.serialize_keras_object(each), "arguments": function_arguments(each)} for each in objects
    ]
    saved: Saved = json.loads(json.dumps({"content": content, "objects": members}))
    return saved


def deserialize(saved: Mapping[str, Any], custom_objects: Mapping[str, Any], *, safe_mode: bool) -> Any:
    """The value that `serialize` was called with.

    Raises:
        Exception: Custom code is missing, or ``safe_mode`` is set and there is a Python lambda.
    """
    load = functools.partial(keras.saving.deserialize_keras_object, custom_objects=dict(custom_objects), safe_mode=safe_mode)
    objects = []
    for member in saved["objects"]:
        objects.append(load(member["object"]))
        if member.get("arguments"):
            set_function_arguments(objects[-1], member["arguments"])

    def read(content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        ((kind, members),) = content.items()
        if kind == "object":
            return objects[members]
        if kind == "dict":
            return {read(key): read(member) for key, member in members}
        loaded = [read(member) for member in members]
        return tuple(loaded) if kind == "tuple" else loaded

    return read(saved["content"])


def leaves(value: Any) -> Iterator[Any]:
    """The values in nested lists, tuples and dicts."""
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, (list, tuple)):
        for member in value:
            yield from leaves(member)
    else:
        yield value


def function_arguments(wrapper: Any) -> Saved:
    """The arguments that one of Keras's losses or metrics passes to its function; empty for other objects.

    Raises:
        ModelError: Keras cannot serialize one of them.
    """
    arguments = getattr(wrapper, "_fn_kwargs", None)
    if type(arguments) is not dict or not type(wrapper).__module__.startswith("keras."):
        return {}
    try:
        saved: Saved = json.loads(json.dumps(keras.saving.serialize_keras_object(arguments)))
    except Exception as error:
        raise ModelError(
            f"the arguments {arguments!r} of {type(wrapper).__name__} cannot be saved: {error} Pass numbers, strings, "
            "arrays, functions, or objects with get_config."
        ) from error
    return saved


def set_function_arguments(wrapper: Any, saved: Saved) -> None:
    """Set what `function_arguments` returned for the original."""
    wrapper._fn_kwargs = keras.saving.deserialize_keras_object(saved)
