"""Nested values with arrays, as values for JSON and the bytes of these arrays one after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from sparkkeras.errors import ConfigurationError
from sparkkeras.weights import Array

_ALIGNMENT = 64
_ARRAY, _SCALAR, _BYTES, _TUPLE, _NUMBERED = "__array__", "__scalar__", "__bytes__", "__tuple__", "__numbered__"
_OBJECT = "__object__"
_TAGS = {_ARRAY, _SCALAR, _BYTES, _TUPLE, _NUMBERED, _OBJECT}
_classes: dict[str, type] = {}


def register(*classes: type) -> None:
    """Have `pack` and `unpack` accept instances of dataclasses, which are stored by the name of the class."""
    _classes.update({each.__name__: each for each in classes})


def pack(value: Any, name: str) -> tuple[Any, list[memoryview]]:
    """Separate the arrays from a nested value.

    Args:
        value: None, booleans, numbers, strings, bytes, NumPy's arrays and scalars, instances of classes that are registered,
            and lists, tuples and dicts of these. Keys of a dict are strings or whole numbers.
        name: The name of the value in messages.

    Returns:
        A value for JSON, and the bytes of the arrays in pieces, which refer to the arrays.

    Raises:
        ConfigurationError: The value contains something else.
    """
    pieces: list[memoryview] = []
    size = 0

    def placed(value: Array | np.generic, place: str) -> list[Any]:
        nonlocal size
        described = [list(value.shape), _dtype_name(value.dtype, place)]
        flat = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        padding = -size % _ALIGNMENT
        pieces.extend((memoryview(bytes(padding)), flat.data))
        size += padding + flat.nbytes
        return [size - flat.nbytes, *described]

    def packed(value: Any, place: str) -> Any:
        if isinstance(value, (np.ndarray, np.generic)):
            return {_ARRAY if isinstance(value, np.ndarray) else _SCALAR: placed(value, place)}
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, bytes):
            return {_BYTES: placed(np.frombuffer(value, np.uint8), place)}
        if isinstance(value, (list, tuple)):
            members = [packed(member, f"{place}[{index}]") for index, member in enumerate(value)]
            return members if isinstance(value, list) else {_TUPLE: members}
        if isinstance(value, Mapping) and value and all(type(key) is int for key in value):
            return {_NUMBERED: [[key, packed(member, f"{place}[{key}]")] for key, member in value.items()]}
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value) and not _TAGS & set(value):
            return {key: packed(member, f"{place}[{key!r}]") for key, member in value.items()}
        if type(value) in _classes.values():
            fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
            return {_OBJECT: [type(value).__name__, packed(fields, place)]}
        raise ConfigurationError(
            f"{place} cannot be stored in a checkpoint: expected None, numbers, strings, bytes, NumPy arrays, and lists, "
            f"tuples and dicts of these, received {value!r}."
        )

    return packed(value, name), pieces


def unpack(value: Any, data: bytearray) -> Any:
    """The inverse of `pack`; arrays are views of ``data``."""
    if isinstance(value, list):
        return [unpack(member, data) for member in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), None) if len(value) == 1 else None
    if tag not in _TAGS:
        return {key: unpack(member, data) for key, member in value.items()}
    content = value[tag]
    if tag == _TUPLE:
        return tuple(unpack(content, data))
    if tag == _NUMBERED:
        return {key: unpack(member, data) for key, member in content}
    if tag == _OBJECT:
        return _classes[content[0]](**unpack(content[1], data))
    array = _read(data, *content)
    return array if tag == _ARRAY else array[()] if tag == _SCALAR else array.tobytes()


def _read(data: bytearray, start: int, shape: list[int], name: str) -> Array:
    dtype, count = np.dtype(name), int(np.prod(shape, dtype=np.int64))
    if not count:
        return np.empty(shape, dtype)
    # Of bytes, since NumPy itself does not define some dtypes, such as bfloat16.
    return np.frombuffer(data, np.uint8, count * dtype.itemsize, start).view(dtype).reshape(shape)


def _dtype_name(dtype: Any, place: str) -> str:
    """The name from which NumPy makes the dtype again.

    Raises:
        ConfigurationError: There is none, as for Python objects.
    """
    for name in (dtype.str, dtype.name):
        try:
            if np.dtype(name) == dtype and not dtype.hasobject:
                return str(name)
        except TypeError:
            continue
    raise ConfigurationError(f"{place} cannot be stored in a checkpoint: arrays of the dtype {dtype} have no file format.")
