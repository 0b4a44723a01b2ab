"""The inputs and outputs of a model as a `Schema`."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import keras

from sparkkeras.data.schema import InputSpec, Schema
from sparkkeras.data.text import STRING
from sparkkeras.errors import ModelError
from sparkkeras.modeling.state import floatx


def schema_of(model: keras.Model) -> Schema:
    """The inputs and outputs of a model, as far as they are known.

    Raises:
        ModelError: An input takes strings, which Keras's current backend does not support.
    """
    tensors = input_tensors(model)
    names = input_names(model) or [tensor.name for tensor in tensors]
    entries = _entries(model)
    inputs = tuple(
        replace(spec, indices=entries.get(id(tensor)), name=name)
        for spec, tensor, name in zip(_specs(tensors), tensors, names, strict=True)
    )
    text = next((spec.name for spec in inputs if spec.text), None)
    if text is not None and not _has_strings():
        raise ModelError(
            f"the model's input {text!r} takes strings, which models with the backend {keras.backend.backend()!r} cannot: "
            "expected inputs of numbers. Call the layer that takes strings (TextVectorization, StringLookup) in transform= "
            "instead, which runs on the workers, and give the model an input of what it returns."
        )
    outputs = _specs(getattr(model, "outputs", None))
    names = _output_names(model)
    if len(names) == len(outputs):
        outputs = tuple(replace(spec, name=name) for name, spec in zip(names, outputs, strict=True))
    named = isinstance(getattr(graph_of(model), "_outputs_struct", None), dict)
    return Schema(inputs, outputs, floatx(), named)


@functools.cache
def _has_strings() -> bool:
    """Whether Keras's current backend has tensors of strings."""
    try:
        keras.ops.convert_to_tensor("", STRING)
    except Exception:  # backends raise errors of different types
        return False
    return True


def input_tensors(model: keras.Model) -> list[Any]:
    """The inputs in the order in which the model was built with them; empty if unknown. Keras sorts those in a dict."""
    by_name = _inputs_by_name(model)
    return list(getattr(model, "inputs", None) or ()) if by_name is None else list(by_name.values())


def input_names(model: keras.Model) -> tuple[str, ...] | None:
    """The keys of the inputs of a model that was built with a dict of them; ``None`` for other models."""
    by_name = _inputs_by_name(model)
    return None if by_name is None else tuple(by_name)


def pack_inputs(model: keras.Model, inputs: Sequence[Any]) -> Any:
    """Inputs in the order of `input_tensors`, in the structure that the model was built with."""
    names = input_names(model)
    if names is None:
        return keras.tree.pack_sequence_as(graph_of(model)._inputs_struct, inputs)
    return as_built(model, dict(zip(names, inputs, strict=True)))


def as_built(model: keras.Model, x: Any) -> Any:
    """Features as an argument of the model: a dict of them becomes a dict of the type that the model was built with.

    Keras warns of another type, and that of a ``keras.utils.FeatureSpace`` is Keras's own.
    """
    by_name = _inputs_by_name(model)
    return x if by_name is None or not isinstance(x, dict) else type(by_name)(x)


def _inputs_by_name(model: keras.Model) -> dict[str, Any] | None:
    structure = getattr(graph_of(model), "_inputs_struct", None)
    is_flat = isinstance(structure, dict) and all(isinstance(each, keras.KerasTensor) for each in structure.values())
    return structure if is_flat else None


def _output_names(model: keras.Model) -> list[str]:
    """Keras's names of the outputs: the keys of a dict of outputs, else the names of the output layers, with a numeric
    suffix if one layer has several outputs.
    """
    functional = graph_of(model)
    structure = getattr(functional, "_outputs_struct", None)
    if isinstance(structure, dict):
        return sorted(structure)
    given = list(getattr(functional, "output_names", None) or ())
    before = [given[:index].count(name) for index, name in enumerate(given)]
    return [f"{name}_{number}" if number else name for name, number in zip(given, before, strict=True)]


def graph_of(model: keras.Model) -> Any:
    """The functional model that holds the structure of inputs and outputs: a ``Sequential``'s inner one, or the model."""
    return getattr(model, "_functional", None) or model


def _entries(model: keras.Model) -> dict[int, int]:
    """The smallest ``input_dim`` of the ``Embedding`` layers that take a tensor, by the tensor's id."""
    found: dict[int, int] = {}
    for layer in getattr(graph_of(model), "layers", ()):
        if isinstance(layer, keras.layers.Embedding) and type(layer).call is keras.layers.Embedding.call:
            for tensor in (tensor for node in layer._inbound_nodes for tensor in node.input_tensors):
                found[id(tensor)] = min(layer.input_dim, found.get(id(tensor), layer.input_dim))
    return found


def _specs(tensors: Iterable[Any] | None) -> tuple[InputSpec, ...]:
    dtypes = [(tensor, keras.backend.standardize_dtype(tensor.dtype)) for tensor in tensors or ()]
    return tuple(
        InputSpec(str(tensor.name), tuple(tensor.shape[1:]), "float" in dtype, text=dtype == STRING)
        for tensor, dtype in dtypes
    )
