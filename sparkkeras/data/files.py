"""Blocks on the local disk of the machine that trains on them.

A partition is written once, in chunks, one file per array and two per array of strings, and then memory-mapped: a training
round opens it in well under a millisecond, whatever its size, and the operating system can evict its pages when memory is
short. Spark caches and sends only a `Handle`.

The files are in the executor's temporary folder, which is removed with the executor.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import uuid
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import DTypeLike

from sparkkeras.data.block import Block, BlockSpec, changed
from sparkkeras.data.labels import LabelRange, label_ranges, union
from sparkkeras.data.partition_stats import PartitionStats
from sparkkeras.data.text import Text, to_text
from sparkkeras.errors import DataError, StorageError
from sparkkeras.weights import Array

_HEAD = bytes(8)
"""The offset of the array in its file. It prevents 16-byte alignment, so that backends copy the array; see
`sparkkeras.worker.device.overwritable`.
"""


@dataclass(frozen=True)
class Handle:
    """A partition on disk.

    Attributes:
        partition: The index of the partition.
        directory: The folder of its files, on the machine that wrote them; empty without files.
        rows: The number of rows; ``None``: unknown, since they are not stored but read anew in each epoch.
        spec: Shapes and dtypes; ``None`` if there are no rows.
        labels: The value range of each array of labels.
        text_bytes: The size of all strings, in bytes.
        checksum: A CRC-32 of the rows in their order; ``None``: unknown.
        stats: Statistics of the rows; ``None`` if there are no rows, or they are not to be compared.
    """

    partition: int
    directory: str = ""
    rows: int | None = 0
    spec: BlockSpec | None = None
    labels: tuple[LabelRange, ...] = ()
    text_bytes: int = 0
    checksum: int | None = None
    stats: PartitionStats | None = None

    @classmethod
    def of_stream(cls, partition: int, first: Block | None) -> Handle:
        """The handle of rows that are read anew in each epoch, by their first batch; ``None`` if there is none."""
        return cls(partition) if first is None else cls(partition, "", None, first.spec, label_ranges(first))

    @property
    def nbytes(self) -> int:
        """The size of all rows in bytes; 0 if they are not stored."""
        return 0 if self.spec is None or self.rows is None else self.rows * self.spec.row_bytes + self.text_bytes

    def open(self) -> Block | None:
        """Memory-map the rows; ``None`` if there are none.

        Looks in ``directory``, then for a copy of the partition in this executor's temporary folder.

        Raises:
            FileNotFoundError: The files are in neither folder.
        """
        if self.spec is None or not self.rows:
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
        assert self.rows is not None
        leaf = self.spec.leaves[index]
        shape = (self.rows, *leaf.shape)
        if leaf.is_text:
            offsets = _mapped(directory / f"{index}.offsets", np.int64, (math.prod(shape) + 1,))
            return Text.from_buffers(offsets, _mapped(directory / f"{index}.text", np.uint8, (int(offsets[-1]),)), shape)
        if leaf.row_bytes == 0:
            return np.empty(shape, leaf.dtype)
        return _mapped(directory / f"{index}.bin", leaf.dtype, shape, len(_HEAD))


def _mapped(path: Path, dtype: DTypeLike, shape: tuple[int, ...], offset: int = 0) -> Array:
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if path.stat().st_size != offset + size:
        raise FileNotFoundError(f"{path} has an unexpected size: the source returned different rows when it was read again")
    if not size:
        return np.empty(shape, dtype)
    return np.memmap(path, dtype=np.dtype(dtype), mode="r", offset=offset, shape=shape)


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


def write(blocks: Iterable[Block], partition: int, folder: Path, with_stats: bool = False) -> Handle:
    """Write a partition's blocks to a new folder in ``folder``, with one block in memory at a time.

    Every attempt writes to a separate hidden folder and renames it when it is complete, so concurrent attempts and readers
    do not interfere.

    Args:
        blocks: The blocks.
        partition: The index of the partition.
        folder: The folder.
        with_stats: Whether to compute the statistics of the rows.

    Raises:
        DataError: The blocks differ in structure, shape or dtype.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"part-{partition}-{uuid.uuid4().hex}"
    with draft_of(target) as draft:
        draft.mkdir()
        handle = _write_arrays(blocks, partition, draft, with_stats)
    return replace(handle, directory=str(target))


def _write_arrays(blocks: Iterable[Block], partition: int, directory: Path, with_stats: bool = False) -> Handle:
    rows = 0
    spec: BlockSpec | None = None
    labels: tuple[LabelRange, ...] = ()
    stats: PartitionStats | None = None
    with ExitStack() as stack:
        files: list[_ArrayFile | _TextFiles] = []
        for block in blocks:
            if block.rows == 0:
                continue
            if spec is None:
                spec = block.spec
                with writing(directory):
                    for index, leaf in enumerate(spec.leaves):
                        kind = _TextFiles if leaf.is_text else _ArrayFile
                        files.append(kind(directory, index, stack))
            elif block.spec != spec:
                raise DataError(f"partition {partition}, from row {rows}: {changed(spec, block.spec)}")
            with writing(directory):
                for file, array in zip(files, block.arrays, strict=True):
                    file.append(array)
            labels = union(labels, label_ranges(block))
            if with_stats:
                found = PartitionStats.of(block)
                stats = found if stats is None else stats.union(found)
            rows += block.rows
        text_bytes = sum(file.end for file in files if isinstance(file, _TextFiles))
        checksum = zlib.crc32(repr([file.checksum for file in files]).encode())
    return Handle(partition, str(directory), rows, spec, labels, text_bytes, checksum, stats)


def checksum_of(block: Block) -> int:
    """A CRC-32 of the rows of a block in memory, in their order; not the one of the same rows on disk."""
    checksums = []
    for leaf, array in zip(block.spec.leaves, block.dense().arrays, strict=True):
        parts = cast(Text, to_text(array)[0]).buffers if leaf.is_text else (array,)
        checksums += [zlib.crc32(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data) for part in parts]
    return zlib.crc32(repr(checksums).encode())


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Raise a `StorageError` if files in Spark's temporary folder cannot be written within this context."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"cannot write to {folder}, in Spark's temporary folder: {error}. If its disk is full, free some space, or have "
            "Spark use another one (spark.local.dir)."
        ) from error


class _NewFile:
    """A file that is written array by array. NumPy's ``tofile`` does not notice if the disk is full at the end."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self._file = stack.enter_context(path.open("wb", buffering=0))  # closing it after an error writes nothing
        self.checksum = 0

    def append(self, array: Array) -> None:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        self.checksum = zlib.crc32(data, self.checksum)
        while data:
            data = data[self._file.write(data) :]


class _ArrayFile(_NewFile):
    """The file of an array of numbers."""

    def __init__(self, directory: Path, index: int, stack: ExitStack) -> None:
        super().__init__(directory / f"{index}.bin", stack)
        self.append(np.frombuffer(_HEAD, np.uint8))


class _TextFiles:
    """The two files of an array of strings: UTF-8, and the offset at which each string ends, after a 0."""

    def __init__(self, directory: Path, index: int, stack: ExitStack) -> None:
        self._text = _NewFile(directory / f"{index}.text", stack)
        self._offsets = _NewFile(directory / f"{index}.offsets", stack)
        self._offsets.append(np.zeros(1, np.int64))
        self.end = 0

    def append(self, array: Array) -> None:
        offsets, data = cast(Text, to_text(array)[0]).buffers
        self._offsets.append(self.end + offsets[1:])
        self._text.append(data)
        self.end += len(data)

    @property
    def checksum(self) -> int:
        return self._offsets.checksum ^ self._text.checksum
