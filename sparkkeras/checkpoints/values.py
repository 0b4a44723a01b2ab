"""Nested values with arrays, as values for JSON and a list of arrays, and these arrays in one file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from sparkkeras.errors import ConfigurationError
from sparkkeras.weights import Array

Spans = Mapping[int, Sequence[tuple[int, int]]]
"""The first bytes of the parts of arrays in a file, and those after their last ones, by ``id(array)``."""

_ARRAY, _SCALAR = "__array__", "__scalar__"
_ALIGNMENT = 64


def pack(value: Any, name: str) -> tuple[Any, list[Array]]:
    """Separate the arrays from a nested value.

    Args:
        value: None, booleans, numbers, strings, NumPy's arrays and scalars, and lists, tuples and dicts of these. Keys of
            dicts are strings. Tuples become lists.
        name: The name of the value in messages.

    Returns:
        A value for JSON, in which numbers stand for arrays, and the arrays.

    Raises:
        ConfigurationError: The value contains something else.
    """
    arrays: list[Array] = []

    def packed(value: Any, place: str) -> Any:
        if isinstance(value, (np.ndarray, np.generic)):
            array = np.asarray(value)
            _dtype_name(array.dtype, place)
            arrays.append(array)
            return {_ARRAY if isinstance(value, np.ndarray) else _SCALAR: len(arrays) - 1}
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, (list, tuple)):
            return [packed(member, f"{place}[{index}]") for index, member in enumerate(value)]
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value) and not {_ARRAY, _SCALAR} & set(value):
            return {key: packed(member, f"{place}[{key!r}]") for key, member in value.items()}
        raise ConfigurationError(
            f"{place} cannot be stored in a checkpoint: expected None, numbers, strings, NumPy arrays, and lists and dicts "
            f"with strings as keys of these, received {value!r}."
        )

    return packed(value, name), arrays


def unpack(value: Any, arrays: Sequence[Array]) -> Any:
    """The inverse of `pack`, with lists in place of tuples."""
    if isinstance(value, list):
        return [unpack(member, arrays) for member in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {_ARRAY}:
        return arrays[value[_ARRAY]]
    if set(value) == {_SCALAR}:
        return arrays[value[_SCALAR]][()]
    return {key: unpack(member, arrays) for key, member in value.items()}


def write_arrays(arrays: Sequence[Array], write: Callable[[Any], object], spans: Spans) -> list[dict[str, Any]]:
    """Write the bytes of arrays one after the other; returns what `read_arrays` needs, for JSON.

    Args:
        arrays: The arrays.
        write: Writes bytes.
        spans: Where the bytes of some arrays are in another file: these are not written.
    """
    index: list[dict[str, Any]] = []
    position = 0
    for array in arrays:
        described = {"dtype": _dtype_name(array.dtype, "an array"), "shape": list(array.shape)}
        if id(array) in spans:
            index.append({**described, "spans": [list(span) for span in spans[id(array)]]})
            continue
        padding = -position % _ALIGNMENT
        write(bytes(padding))
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if flat.size:
            write(flat.data)
        position += padding + flat.nbytes
        index.append({**described, "offset": position - flat.nbytes})
    return index


def read_arrays(data: bytearray, other: bytes, index: Sequence[Mapping[str, Any]]) -> list[Array]:
    """The arrays of `write_arrays`: views of what it wrote, or read from the other file."""
    arrays = []
    for entry in index:
        shape, dtype = tuple(entry["shape"]), np.dtype(entry["dtype"])
        count = int(np.prod(shape, dtype=np.int64))
        if not count:
            arrays.append(np.empty(shape, dtype))
            continue
        # Of bytes, since NumPy itself does not define some dtypes, such as bfloat16.
        if "spans" in entry:
            found = np.concatenate([np.frombuffer(other, np.uint8, stop - start, start) for start, stop in entry["spans"]])
        else:
            found = np.frombuffer(data, np.uint8, count * dtype.itemsize, entry["offset"])
        arrays.append(found.view(dtype).reshape(shape))
    return arrays


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
