"""Values in files: a pickle, followed by the memory of its arrays, which is written and read without another copy."""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from sparkkeras.data.files import writing

R = TypeVar("R")


@dataclass(frozen=True)
class Pickled:
    """A value as bytes, without a copy of its arrays.

    Attributes:
        kind: The value's class.
        parts: The pickle, then the memory of each array.
    """

    kind: str
    parts: tuple[memoryview, ...]

    @classmethod
    def of(cls, value: object, dumps: Callable[..., bytes] = pickle.dumps) -> Pickled:
        """Pickle a value, which must not be changed while the result is in use.

        Args:
            value: The value.
            dumps: `pickle.dumps`, or a function with the same arguments that pickles more.

        Raises:
            PicklingError: It cannot be pickled.
        """
        arrays: list[pickle.PickleBuffer] = []
        try:
            head = dumps(value, 5, buffer_callback=arrays.append)
        except Exception as error:  # any, of the value's own methods
            raise pickle.PicklingError(f"{type(error).__name__}: {error}") from error
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        return cls(kind, (memoryview(head), *(array.raw() for array in arrays)))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The size of each part in bytes."""
        return tuple(part.nbytes for part in self.parts)

    @property
    def nbytes(self) -> int:
        """The size of all parts in bytes."""
        return sum(self.sizes)

    def between(self, start: int, stop: int) -> bytes:
        """The bytes from ``start`` to ``stop`` of the concatenated parts."""
        found = []
        for part in self.parts:
            found.append(part[max(0, start) : max(0, stop)])
            start, stop = start - part.nbytes, stop - part.nbytes
        return b"".join(found)


def read_files(paths: Sequence[Path], sizes: Sequence[int]) -> Any:
    """Read a value from files that contain its parts one after the other.

    Args:
        paths: The files, in order.
        sizes: The size of each part in bytes.

    Raises:
        FileNotFoundError: A file does not exist, or is incomplete.
    """
    parts = [bytearray(size) for size in sizes]
    wanted = [memoryview(part) for part in parts if part]
    for path in paths:
        with path.open("rb") as file:
            while wanted and (count := file.readinto(wanted[0])):
                wanted[0] = wanted[0][count:]
                if not wanted[0]:
                    del wanted[0]
    if wanted:
        raise FileNotFoundError(f"{paths[-1]} and the files before it have fewer than the value's {sum(sizes)} bytes")
    head, *arrays = parts
    return pickle.loads(head, buffers=arrays)


class DelayedValue(Generic[R]):
    """A `Shared` whose value is pickled with the task, but unpickled only when it is used: its classes may import Keras.

    Args:
        value: The value.
    """

    def __init__(self, value: R) -> None:
        self._value = value
        self._payload = b""

    def __getstate__(self) -> bytes:
        return self._payload or pickle.dumps(self._value)

    def __setstate__(self, state: bytes) -> None:
        self._payload = state

    @property
    def value(self) -> R:
        """The value."""
        if self._payload:
            self._value = pickle.loads(self._payload)
            self._payload = b""
        return self._value


@dataclass(frozen=True)
class ValueFile(Generic[R]):
    """A value in a file on a disk that driver and workers share; also a `Shared`.

    Attributes:
        path: The path of the file.
        sizes: The size of each part in bytes.
    """

    path: str
    sizes: tuple[int, ...]

    @classmethod
    def write(cls, pickled: Pickled, folder: Path) -> ValueFile[Any]:
        """Write a value to a new file in a folder.

        Raises:
            StorageError: The file cannot be written.
        """
        path = folder / uuid.uuid4().hex
        with writing(folder), path.open("wb") as file:
            file.writelines(pickled.parts)
        return cls(str(path), pickled.sizes)

    @property
    def value(self) -> R:
        """The value, read anew with each access."""
        found: R = read_files([Path(self.path)], self.sizes)
        return found
