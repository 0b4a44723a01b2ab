"""The inputs and outputs of a model as a `Schema`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras

from sparkkeras.data.block import Path, Structure
from sparkkeras.data.schema import InputSpec, Schema
from sparkkeras.data.text import STRING
from sparkkeras.errors import ModelError
from sparkkeras.modeling.state import floatx


def schema_of(model: keras.Model) -> Schema:
    """The inputs and outputs of a model, as far as they are known.

    Raises:
        ModelError: An input takes strings, which Keras's current backend does not support, or two inputs or outputs have the
            same name.
    """
    tensors = input_tensors(model)
    structure = input_structure(model)
    _check_names("inputs", "x", structure)
    of_outputs = output_structure(model)
    _check_names("outputs", "y", of_outputs)
    names: Sequence[str] = (structure and structure.names) or [tensor.name for tensor in tensors]
    entries = _entries(model)
    layers = [layer for layer in getattr(graph_of(model), "layers", ()) if isinstance(layer, keras.layers.InputLayer)]
    optional = {id(layer.output) for layer in layers if layer.optional}
    inputs = tuple(
        _spec(tensor, name, indices=entries.get(id(tensor)), optional=id(tensor) in optional)
        for tensor, name in zip(tensors, names, strict=True)
    )
    text = next((spec.name for spec in inputs if spec.text), None)
    if text is not None and not has_strings():
        raise ModelError(
            f"the model's input {text!r} takes strings, which models with the backend {keras.backend.backend()!r} cannot: "
            "expected inputs of numbers. Call the layer that takes strings (TextVectorization, StringLookup) in transform= "
            "instead, which runs on the workers, and give the model an input of what it returns."
        )
    tensors, names = list(getattr(model, "outputs", None) or ()), _output_names(model)
    if len(names) != len(tensors):
        names = [tensor.name for tensor in tensors]
    outputs = tuple(map(_spec, tensors, names))
    return Schema(inputs, outputs, floatx(), structure, of_outputs)


def _check_names(kind: str, side: str, structure: Structure | None) -> None:
    """Check that inputs or outputs have different names, which keys such as ``"a/b"`` need not have."""
    found: dict[str, str] = {}
    for name, label in zip(structure.names or (), structure.labels(side), strict=True) if structure is not None else ():
        other = found.setdefault(name, label)
        if other != label:
            raise ModelError(f"the model's {kind} {other} and {label} have the same name {name!r}: rename one of them.")


@functools.cache
def has_strings() -> bool:
    """Whether Keras's current backend has tensors of strings."""
    try:
        keras.ops.convert_to_tensor("", STRING)
    except Exception:  # backends raise errors of different types
        return False
    return True


def input_tensors(model: keras.Model) -> list[Any]:
    """The inputs in the order in which the model was built with them; empty if unknown. Keras sorts those in a dict."""
    structure = input_structure(model)
    if structure is None:
        return list(getattr(model, "inputs", None) or ())
    return structure.flatten(graph_of(model)._inputs_struct)


def input_structure(model: keras.Model) -> Structure | None:
    """The structure of the inputs of a model that was built with a dict of them, or nested ones; ``None`` for others."""
    return _structure(model, "_inputs_struct", _paths)


def pack_inputs(model: keras.Model, inputs: Sequence[Any]) -> Any:
    """Inputs in the order of `input_tensors`, in the structure that the model was built with."""
    structure = input_structure(model)
    if structure is None:
        return keras.tree.pack_sequence_as(graph_of(model)._inputs_struct, inputs)
    return as_built(model, structure.build(inputs))


def as_built(model: keras.Model, x: Any) -> Any:
    """Features as an argument of the model: a dict of them becomes a dict of the type that the model was built with.

    Keras warns of another type, and that of a ``keras.utils.FeatureSpace`` is Keras's own.
    """
    built = getattr(graph_of(model), "_inputs_struct", None)
    if not isinstance(built, dict) or not isinstance(x, dict):
        return x
    try:
        return type(built)(x)
    except TypeError:  # a defaultdict
        return x


def output_structure(model: keras.Model) -> Structure | None:
    """The structure of the outputs of a model that returns a dict of them, or nested ones, in the order of
    ``model.outputs``; ``None`` for others.
    """
    return _structure(model, "_outputs_struct", lambda value: (path for path, _ in keras.tree.flatten_with_path(value)))


def _structure(model: keras.Model, attribute: str, paths: Callable[[Any], Iterable[Path]]) -> Structure | None:
    value = getattr(graph_of(model), attribute, None)
    found = None if value is None else Structure(tuple(map(tuple, paths(value))))
    return found if found is not None and found.names is not None else None


def _paths(structure: Any) -> Iterator[Path]:
    """The paths of tensors, in the order in which they were given; Keras sorts the keys of dicts."""
    if isinstance(structure, keras.KerasTensor):
        yield ()
        return
    for key, part in structure.items() if isinstance(structure, dict) else enumerate(structure):
        yield from ((key, *path) for path in _paths(part))


def _output_names(model: keras.Model) -> Sequence[str]:
    """The names of the outputs: the keys around them, else Keras's names of their layers, with a numeric suffix if one layer
    has several outputs.
    """
    structure = output_structure(model)
    if structure is not None:
        return structure.names or ()
    given = list(getattr(graph_of(model), "output_names", None) or ())
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


def _spec(tensor: Any, name: str, **more: Any) -> InputSpec:
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    return InputSpec(name, tuple(tensor.shape[1:]), "float" in dtype, text=dtype == STRING, **more)
