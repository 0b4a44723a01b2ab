"""Large values behind Spark Connect: files beside the rows of a stored dataset, on the machines that train.

Connect has no broadcasts. A value that no function may carry goes to the cluster in pieces, each in the function of a small
job over the dataset's handles, whose tasks write it to a file where the rows are. A task that Spark runs elsewhere finds no
files; then the driver, which still has the value, has rows and pieces written there.
"""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from sparkkeras.data import files
from sparkkeras.data.dataset import FilesMissing
from sparkkeras.data.sizes import CHUNK_BYTES
from sparkkeras.spark.connect import RESULT, RemoteCluster

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

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
    def of(cls, value: object) -> Pickled:
        """Pickle a value. It must stay as it is for as long as this is used."""
        arrays: list[pickle.PickleBuffer] = []
        head = pickle.dumps(value, 5, buffer_callback=arrays.append)
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        return cls(kind, (memoryview(head), *(array.raw() for array in arrays)))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The bytes of each part."""
        return tuple(part.nbytes for part in self.parts)

    @property
    def nbytes(self) -> int:
        """The bytes of all parts."""
        return sum(self.sizes)

    def between(self, start: int, stop: int) -> bytes:
        """A stretch of all parts, one after the other."""
        found = []
        for part in self.parts:
            found.append(part[max(0, start) : max(0, stop)])
            start, stop = start - part.nbytes, stop - part.nbytes
        return b"".join(found)


def read_files(paths: Sequence[Path], sizes: Sequence[int]) -> Any:
    """The value whose parts have these sizes, and lie in these files one after the other.

    Raises:
        FileNotFoundError: A file is not there, or not whole.
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
        raise FileNotFoundError(f"{paths[-1]} and those before it have fewer bytes than the {sum(sizes)} of the value")
    head, *arrays = parts
    return pickle.loads(head, buffers=arrays)


@dataclass(frozen=True)
class StoredShared(Generic[R]):
    """A value in files beside the rows of a stored dataset.

    Attributes:
        dataset: The dataset's name, whose folder they are in.
        token: The value's name.
        kind: What it is; a process keeps the latest value of each kind.
        sizes: The bytes of its parts; see `Pickled`.
        stretch: The bytes in each file but the last.
        pickled: The value itself, which only the driver has.
    """

    dataset: str
    token: str
    kind: str
    sizes: tuple[int, ...]
    stretch: int
    pickled: Pickled | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, pickled: Pickled, dataset: str) -> StoredShared[Any]:
        """A value that is not in files yet."""
        return cls(dataset, f"value-{uuid.uuid4().hex}", pickled.kind, pickled.sizes, CHUNK_BYTES, pickled)

    def __reduce__(self) -> Any:
        return StoredShared, (self.dataset, self.token, self.kind, self.sizes, self.stretch)

    @property
    def starts(self) -> range:
        """Where in the value each file begins."""
        return range(0, sum(self.sizes), self.stretch)

    def path(self, start: int) -> Path:
        """The file that begins there, on this machine."""
        return files.home(self.dataset) / f"{self.token}-{start}"

    @property
    def value(self) -> R:
        """The value, read once for each process.

        Raises:
            FilesMissing: It is not on this machine.
        """
        if self.token not in _latest.get(self.kind, ()):
            _latest.pop(self.kind, None)  # first, so that the two are never in memory together
            try:
                _latest[self.kind] = {self.token: read_files([self.path(start) for start in self.starts], self.sizes)}
            except FileNotFoundError as error:
                raise FilesMissing(str(error)) from error
        found: R = _latest[self.kind][self.token]
        return found


_latest: dict[str, dict[str, Any]] = {}
"""The values that this process has read: the latest one of each kind, by its token."""


def write_files(shared: StoredShared[Any], cluster: RemoteCluster, handles: DataFrame) -> None:
    """Write a value to the machines that have the partitions of a frame; one job for each file."""
    assert shared.pickled is not None
    for start in shared.starts:
        stretch = shared.pickled.between(start, start + shared.stretch)
        cluster.collect(handles.mapInArrow(_Write(shared, start, stretch), RESULT))


def remove_files(shared: StoredShared[Any], cluster: RemoteCluster, handles: DataFrame) -> None:
    """Remove it from there."""
    cluster.collect(handles.mapInArrow(_Remove(shared), RESULT))


# What runs on the workers


@dataclass(frozen=True)
class _Write:
    """Writes a file, if no other task has done so on this machine. It gets its name when it is whole."""

    shared: StoredShared[Any]
    start: int
    data: bytes

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            pass
        path = self.shared.path(self.start)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with files.draft_of(path) as draft:
                draft.write_bytes(self.data)
        return iter(())


@dataclass(frozen=True)
class _Remove:
    """Removes a value's files from this machine, and the value from this process."""

    shared: StoredShared[Any]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            pass
        for start in self.shared.starts:
            self.shared.path(start).unlink(missing_ok=True)
        _latest.get(self.shared.kind, {}).pop(self.shared.token, None)
        return iter(())
