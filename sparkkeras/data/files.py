"""Blocks on the disk of the machine that trains on them.

A partition is written once, array by array, a chunk at a time, and memory-mapped from then on: a round of training opens
it in well under a millisecond, whatever its size, and the pages belong to the system, which drops them when memory is
short. What Spark keeps and passes around is a `Handle`.

Files lie in the executor's own temporary folder, which goes when the executor goes.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sparkkeras.data.block import Block, BlockSpec, changed
from sparkkeras.data.schema import LabelRange, label_ranges, union
from sparkkeras.errors import DataError
from sparkkeras.weights import Array

_HEAD = bytes(8)
"""Arrays begin this far into their file, where a backend copies them itself; see `sparkkeras.worker.device.given_away`."""


@dataclass(frozen=True)
class Handle:
    """A partition on disk.

    Attributes:
        partition: Its number.
        directory: Where its files are, on the machine that wrote them.
        rows: How many rows it has.
        spec: Shapes and dtypes; ``None`` where there are no rows.
        labels: The range of each array of labels.
    """

    partition: int
    directory: str
    rows: int
    spec: BlockSpec | None
    labels: tuple[LabelRange, ...] = ()

    def open(self) -> Block | None:
        """The rows, memory-mapped, or ``None`` where there are none.

        Raises:
            FileNotFoundError: The files are not on this machine. Those in this executor's own folder count too.
        """
        if self.spec is None or self.rows == 0:
            return None
        here = home(Path(self.directory).parent.name).glob(f"part-{self.partition}-*")
        for directory in (Path(self.directory), *sorted(here)):
            try:
                return Block(self.spec.form, tuple(self._map(directory, i) for i in range(len(self.spec.leaves))))
            except FileNotFoundError:
                continue
        raise FileNotFoundError(self.directory)

    def _map(self, directory: Path, index: int) -> Array:
        assert self.spec is not None
        leaf = self.spec.leaves[index]
        shape = (self.rows, *leaf.shape)
        if leaf.row_bytes == 0:
            return np.empty(shape, leaf.dtype)
        path = directory / f"{index}.bin"
        if path.stat().st_size != len(_HEAD) + self.rows * leaf.row_bytes:
            raise FileNotFoundError(f"{path} has another size: the source gave other rows when it was read again")
        return np.memmap(path, dtype=np.dtype(leaf.dtype), mode="r", offset=len(_HEAD), shape=shape)


def home(dataset: str) -> Path:
    """The folder for a dataset's files on this machine: in the executor's temporary folder if this is a Spark worker."""
    root = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0] or tempfile.gettempdir()
    return Path(root) / dataset


def write(blocks: Iterable[Block], partition: int, folder: Path) -> Handle:
    """Write a partition's blocks below ``folder``, holding one block in memory at a time.

    Every attempt writes to a folder of its own, which gets its name when it is whole, so attempts at the same time, and who
    reads meanwhile, do not get in each other's way.

    Raises:
        DataError: The blocks do not have the same shapes and dtypes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = f"part-{partition}-{uuid.uuid4().hex}"
    target, draft = folder / name, folder / f".{name}"
    draft.mkdir()
    try:
        rows, spec, labels = _write_arrays(blocks, partition, draft)
        draft.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return Handle(partition, str(target), rows, spec, labels)


def _write_arrays(
    blocks: Iterable[Block], partition: int, directory: Path
) -> tuple[int, BlockSpec | None, tuple[LabelRange, ...]]:
    rows = 0
    spec: BlockSpec | None = None
    labels: tuple[LabelRange, ...] = ()
    files = []
    try:
        for block in blocks:
            if block.rows == 0:
                continue
            if spec is None:
                spec = block.spec
                files = [(directory / f"{index}.bin").open("wb") for index in range(len(spec.leaves))]
                for file in files:
                    file.write(_HEAD)
            elif block.spec != spec:
                raise DataError(f"partition {partition}, from row {rows} on: {changed(spec, block.spec)}")
            for file, array in zip(files, block.arrays, strict=True):
                np.ascontiguousarray(array).tofile(file)
            labels = union(labels, label_ranges(block))
            rows += block.rows
    finally:
        for file in files:
            file.close()
    return rows, spec, labels
