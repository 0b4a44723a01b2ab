"""Large shared values on Spark Connect: files beside the rows of a stored dataset, on the workers.

Spark Connect has no broadcasts. A value that is too large for the function of a task is sent to the cluster in chunks. Each
chunk is part of the function of a small job over the dataset's handles, whose tasks write it to a file beside the rows. If
Spark runs a later task on a machine without these files, the driver, which keeps the value, has the rows and the chunks
written there.
"""

from __future__ import annotations

import functools
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from sparkkeras.data import files
from sparkkeras.data.block import CHUNK_BYTES
from sparkkeras.data.dataset import FilesMissing
from sparkkeras.data.values import Pickled, read_files
from sparkkeras.sources.tasks import WithoutRows
from sparkkeras.spark.connect import RESULT, RemoteCluster

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

R = TypeVar("R")


@dataclass(frozen=True)
class StoredShared(Generic[R]):
    """A value in files beside the rows of a stored dataset.

    Attributes:
        dataset: The name of the dataset, whose folder contains the files.
        token: The unique name of the value.
        kind: The class of the value; a process caches the latest value of each kind.
        sizes: The sizes of its parts in bytes; see `Pickled`.
        chunk: The size of each file but the last, in bytes.
        pickled: The value itself, which only the driver has.
    """

    dataset: str
    token: str
    kind: str
    sizes: tuple[int, ...]
    chunk: int
    pickled: Pickled | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, pickled: Pickled, dataset: str) -> StoredShared[Any]:
        """Describe a value that is not written to files yet."""
        return cls(dataset, f"value-{uuid.uuid4().hex}", pickled.kind, pickled.sizes, CHUNK_BYTES, pickled)

    def __reduce__(self) -> Any:
        return StoredShared, (self.dataset, self.token, self.kind, self.sizes, self.chunk)

    @property
    def starts(self) -> range:
        """The offset of each file in the value."""
        return range(0, sum(self.sizes), self.chunk)

    def path(self, start: int) -> Path:
        """The path of the file with this offset, on this machine."""
        return files.home(self.dataset) / f"{self.token}-{start}"

    @property
    def value(self) -> R:
        """The value, read once per process.

        Raises:
            FilesMissing: The files are not on this machine.
        """
        if self.token not in _latest.get(self.kind, ()):
            _latest.pop(self.kind, None)  # first, so that both are never in memory at the same time
            try:
                _latest[self.kind] = {self.token: read_files([self.path(start) for start in self.starts], self.sizes)}
            except FileNotFoundError as error:
                raise FilesMissing(str(error)) from error
        found: R = _latest[self.kind][self.token]
        return found

    def write(self, start: int, data: bytes) -> None:
        """Write a file, unless another task has written it on this machine. It is renamed to its path when complete."""
        path = self.path(start)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with files.draft_of(path) as draft:
                draft.write_bytes(data)

    def remove(self) -> None:
        """Remove the value's files from this machine, and the value from this process."""
        for start in self.starts:
            self.path(start).unlink(missing_ok=True)
        _latest.get(self.kind, {}).pop(self.token, None)


_latest: dict[str, dict[str, Any]] = {}
"""A cache of the values that this process has read: the latest of each kind, by its token."""


def write_files(shared: StoredShared[Any], cluster: RemoteCluster, handles: DataFrame) -> None:
    """Write a value to the machines with the partitions of a frame; one job for each file."""
    assert shared.pickled is not None
    for start in shared.starts:
        chunk = shared.pickled.between(start, start + shared.chunk)
        cluster.collect(handles.mapInArrow(WithoutRows(functools.partial(shared.write, start, chunk)), RESULT))


def remove_files(shared: StoredShared[Any], cluster: RemoteCluster, handles: DataFrame) -> None:
    """Remove a value's files from these machines."""
    cluster.collect(handles.mapInArrow(WithoutRows(shared.remove), RESULT))
