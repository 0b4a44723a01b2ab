"""The rows of the ranks: what a user passes as data, in one part for each rank."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from sparkkeras.data import files
from sparkkeras.data.block import Block, concatenate_alike
from sparkkeras.data.dataset import DriverDataset, Rows
from sparkkeras.data.files import Handle
from sparkkeras.data.reader import Reader
from sparkkeras.data.schema import Schema
from sparkkeras.errors import ConfigurationError, DataError, counted
from sparkkeras.sources.arrays import even_slices
from sparkkeras.sources.connect import StoredRemoteDataset
from sparkkeras.sources.frame import Columns, is_frame
from sparkkeras.sources.source import NamedColumns, Source, as_source, is_batch_function, is_rdd
from sparkkeras.sources.spark_dataset import StoredSparkDataset
from sparkkeras.sources.tasks import Collect
from sparkkeras.worker.device import forking_environment


@dataclass(frozen=True)
class Parts:
    """The rows of the ranks.

    Attributes:
        rows: Those of each rank, which its worker can open; ``None``: the partitions of ``handles`` have them.
        counts: Their numbers.
        handles: An RDD (with Spark Connect, a DataFrame) of the handle of each rank, which Spark runs where the files are;
            ``None``: any worker can open the rows.
    """

    rows: tuple[Rows, ...] | None
    counts: tuple[int, ...]
    handles: Any = None

    @classmethod
    def of(cls, rows: tuple[Rows, ...], counts: tuple[int, ...], ranks: int) -> Parts:
        """Parts for a number of ranks, some of which may get none.

        Raises:
            DataError: There are no rows.
        """
        if not sum(counts):
            raise DataError("data has no rows.")
        missing = ranks - len(counts)
        return cls((*rows, *(Handle(len(rows), "", 0, None),) * missing), (*counts, *(0,) * missing))


def source_of(data: Any, features: Columns | None, label: Columns | None) -> Source:
    """The source of what a user passes as data; see `SparkRunner.run`.

    Raises:
        DataError: It is of another type, or its rows are malformed.
        ConfigurationError: Columns are named, and it is no DataFrame.
    """
    columns = NamedColumns(features, label, fits=False)
    source = partial(as_source, columns=columns, environment=forking_environment)
    if is_batch_function(data):
        raise ConfigurationError(
            "data is a function; SparkRunner takes a DataFrame, an RDD or arrays. Read batches in the function that "
            "runs, with context().rank and context().world_size."
        )
    if is_frame(data):
        return source(data, Reader(Schema(), label is not None, has_on_invalid=False))
    if is_rdd(data):
        return source(data, Reader(Schema(), has_on_invalid=False, labels_optional=True))
    x, y = data if isinstance(data, tuple) and len(data) == 2 else (data, None)
    return source(x, Reader(Schema(), y is not None, has_on_invalid=False), y)


@contextmanager
def stored_on_workers(source: Source, ranks: int, everywhere: bool) -> Iterator[Parts]:
    """Store the rows on the workers, until the context ends.

    Args:
        source: The rows.
        ranks: The number of ranks.
        everywhere: Whether all workers must be able to open all rows, which pass through the driver for that. Otherwise, and
            with Spark Connect, they stay on the workers that have read them.

    Raises:
        DataError: The rows are malformed, or there are none.
        ConfigurationError: They are too large to be sent to the workers.
    """
    with source.dataset(ranks) as dataset, dataset.stored() as stored:
        if isinstance(stored, StoredRemoteDataset):
            yield _on_connect(stored, ranks)
            return
        assert isinstance(stored, DriverDataset)
        if isinstance(stored, StoredSparkDataset) and not everywhere and _stay_on_workers(stored, source, ranks):
            with stored.in_place(ranks) as handles:
                counts = tuple(handle.rows or 0 for handle in stored.handles)
                yield replace(Parts.of((), counts, ranks), rows=None, handles=handles)
            return
        with stored.everywhere() as rows:
            yield Parts.of(rows, tuple(handle.rows or 0 for handle in stored.handles), ranks)


def _stay_on_workers(stored: StoredSparkDataset, source: Source, ranks: int) -> bool:
    """Whether each rank runs where its rows are. There are fewer partitions than ranks if there are fewer rows."""
    return source.on_cluster and not stored.cluster.is_local and stored.num_partitions == ranks


def _on_connect(stored: StoredRemoteDataset, ranks: int) -> Parts:
    counts = tuple(handle.rows or 0 for handle in stored.handles)
    if len(counts) < ranks:
        raise DataError(f"num_workers={ranks}, but data has {counted(sum(counts), 'row')}; each rank needs one.")
    return replace(Parts.of((), counts, ranks), rows=None, handles=stored.handle_frame)


@contextmanager
def stored_on_driver(source: Source, ranks: int) -> Iterator[Parts]:
    """Store the rows in files on this machine, until the context ends.

    Raises:
        DataError: The rows are malformed, or there are none.
    """
    block = source.block or _collected(source)
    folder = Path(tempfile.mkdtemp(prefix="sparkkeras-"))
    try:
        handles = [
            files.write(block[part].dense_pieces(block.nbytes), rank, folder)
            for rank, part in enumerate(even_slices(block.rows, ranks))
        ]
        yield Parts.of(tuple(handles), tuple(handle.rows or 0 for handle in handles), ranks)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _collected(source: Source) -> Block:
    with source.dataset() as dataset:
        block = concatenate_alike(dataset.run(Collect()).collect())
    if block is None:
        raise DataError("data has no rows.")
    return block
