"""The inputs and outputs of a model as a `Schema`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import keras

from sparkkeras.data.schema import InputSpec, Schema
from sparkkeras.modeling.state import floatx


def schema_of(model: keras.Model) -> Schema:
    """The inputs and outputs of a model, as far as they are known."""
    tensors = list(getattr(model, "inputs", None) or ())
    entries = _entries(model)
    inputs = tuple(
        replace(spec, indices=entries.get(id(tensor))) for spec, tensor in zip(_specs(tensors), tensors, strict=True)
    )
    outputs = _specs(getattr(model, "outputs", None))
    names = _output_names(model)
    if len(names) == len(outputs):
        outputs = tuple(replace(spec, name=name) for name, spec in zip(names, outputs, strict=True))
    named = isinstance(getattr(graph_of(model), "_outputs_struct", None), dict)
    return Schema(inputs, outputs, floatx(), named)


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
    return tuple(
        InputSpec(str(tensor.name), tuple(tensor.shape[1:]), "float" in keras.backend.standardize_dtype(tensor.dtype))
        for tensor in tensors or ()
    )
