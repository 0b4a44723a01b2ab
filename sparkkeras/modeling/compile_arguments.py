"""The arguments and attributes of ``compile`` in a form compatible with JSON, in addition to Keras's serialization.

Two references to one object stay references to one object, keys of dicts need not be strings, and losses and metrics keep
the arguments that Keras does not save, such as the ``delta`` of ``Huber``.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from typing import Any

import keras

from sparkkeras.errors import ModelError

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
    members = [{"object": keras.saving.serialize_keras_object(each), **_with_arguments(each)} for each in objects]
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
        if "arguments" in member:
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


def _with_arguments(value: Any) -> Saved:
    arguments = function_arguments(value)
    return {"arguments": arguments} if arguments else {}
