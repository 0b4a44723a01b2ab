"""Blocks on the local disk of the machine that trains on them.

A partition is written once, one file per array, in chunks, and then memory-mapped: a training round opens it in well under
a millisecond, whatever its size, and the operating system can evict its pages when memory is short. Spark caches and sends
only a `Handle`.

The files are in the executor's temporary folder, which is removed with the executor.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sparkkeras.data.block import Block, BlockSpec, changed
from sparkkeras.data.label_range import LabelRange, label_ranges, union
from sparkkeras.errors import DataError
from sparkkeras.weights import Array

_HEAD = bytes(8)
"""The offset of the array in its file. It prevents 16-byte alignment, so that backends copy the array; see
`sparkkeras.worker.device.overwritable`.
"""


UNKNOWN_ROWS = 2**62
"""The number of rows of a partition whose rows are read anew in each epoch, so that it is unknown."""


@dataclass(frozen=True)
class Handle:
    """A partition on disk.

    Attributes:
        partition: The index of the partition.
        directory: The folder of its files, on the machine that wrote them.
        rows: The number of rows, or `UNKNOWN_ROWS`.
        spec: Shapes and dtypes; ``None`` if there are no rows.
        labels: The value range of each array of labels.
    """

    partition: int
    directory: str
    rows: int
    spec: BlockSpec | None
    labels: tuple[LabelRange, ...] = ()

    def open(self) -> Block | None:
        """Memory-map the rows; ``None`` if there are none.

        Looks in ``directory``, then for a copy of the partition in this executor's temporary folder.

        Raises:
            FileNotFoundError: The files are in neither folder.
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

    def blocks(self) -> Iterator[Block]:
        """The rows, as one block."""
        return one_block(self.open())

    def _map(self, directory: Path, index: int) -> Array:
        assert self.spec is not None
        leaf = self.spec.leaves[index]
        shape = (self.rows, *leaf.shape)
        if leaf.row_bytes == 0:
            return np.empty(shape, leaf.dtype)
        path = directory / f"{index}.bin"
        if path.stat().st_size != len(_HEAD) + self.rows * leaf.row_bytes:
            raise FileNotFoundError(
                f"{path} has an unexpected size: the source returned different rows when it was read again"
            )
        return np.memmap(path, dtype=np.dtype(leaf.dtype), mode="r", offset=len(_HEAD), shape=shape)


def one_block(block: Block | None) -> Iterator[Block]:
    """An iterator of a block; empty for ``None``."""
    return iter(() if block is None else (block,))


def home(dataset: str) -> Path:
    """The local folder for a dataset's files; in a Spark worker, inside the executor's temporary folder."""
    root = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0] or tempfile.gettempdir()
    return Path(root) / dataset


@contextmanager
def draft_of(target: Path, overwrite: bool = True) -> Iterator[Path]:
    """A hidden path next to ``target`` for a file or folder, which becomes the target when the block ends without an error.

    So readers see all of it or nothing. After an error it is removed.

    Args:
        target: The path of the file or folder.
        overwrite: Whether to replace an existing file.

    Raises:
        FileExistsError: The file exists and ``overwrite`` is ``False``.
    """
    draft = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        yield draft
        if overwrite:
            draft.replace(target)
        else:
            os.link(draft, target)  # fails if another process has written it in the meantime
    finally:
        if draft.is_dir():
            shutil.rmtree(draft, ignore_errors=True)
        with suppress(OSError):  # if it could not be created, there is nothing to remove
            draft.unlink(missing_ok=True)


def write(blocks: Iterable[Block], partition: int, folder: Path) -> Handle:
    """Write a partition's blocks to a new folder in ``folder``, with one block in memory at a time.

    Every attempt writes to a separate hidden folder and renames it when it is complete, so concurrent attempts and readers
    do not interfere.

    Raises:
        DataError: The blocks differ in structure, shape or dtype.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"part-{partition}-{uuid.uuid4().hex}"
    with draft_of(target) as draft:
        draft.mkdir()
        rows, spec, labels = _write_arrays(blocks, partition, draft)
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
                raise DataError(f"partition {partition}, from row {rows}: {changed(spec, block.spec)}")
            for file, array in zip(files, block.arrays, strict=True):
                np.ascontiguousarray(array).tofile(file)
            labels = union(labels, label_ranges(block))
            rows += block.rows
    finally:
        for file in files:
            file.close()
    return rows, spec, labels
