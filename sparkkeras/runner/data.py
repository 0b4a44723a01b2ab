"""The rows of the ranks: what a user passes as data, in one part for each rank."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sparkkeras.data import files
from sparkkeras.data.block import Block, concatenate_alike, describe
from sparkkeras.data.dataset import StoredDataset, common_spec
from sparkkeras.data.files import Handle
from sparkkeras.data.placement import even_slices
from sparkkeras.data.reader import Reader
from sparkkeras.data.schema import Schema
from sparkkeras.errors import ConfigurationError, DataError, counted
from sparkkeras.runner.hosts import Parts
from sparkkeras.sources.frame import ColumnMapping, Columns, is_frame
from sparkkeras.sources.source import Source, as_source, is_batch_function, is_rdd
from sparkkeras.sources.spark_dataset import StoredSparkDataset
from sparkkeras.sources.tasks import Collect
from sparkkeras.worker.device import forking_environment


def source_of(data: Any, features: Columns | None, label: Columns | None) -> Source:
    """The source of what a user passes as data; see `SparkRunner.run`.

    Raises:
        DataError: It is of another type, or its rows are malformed.
        ConfigurationError: Columns are named, and it is no DataFrame.
    """
    columns = ColumnMapping(features, label, fits=False)
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
    if isinstance(data, tuple) and len(data) != 2:
        arrays = [isinstance(part, np.ndarray) for part in data]
        if not all(arrays) and (any(arrays) or any(part is None or isinstance(part, Mapping) for part in data)):
            raise DataError(
                f"data is {describe(data)} ({', '.join(map(describe, data))}); expected a DataFrame, an RDD of x or (x, y), "
                "an array x, or a pair (x, y) of arrays, dicts or tuples of arrays. Pass weights of rows beside the labels: "
                "(x, (y, sample_weight))."
            )
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
        DataError: The rows are malformed, differ in shape or dtype, or there are none.
        ConfigurationError: They are too large to be sent to the workers.
    """
    with source.dataset(ranks) as dataset, dataset.stored() as stored:
        common_spec(stored.handles)
        counts = _counts(stored.handles, ranks)
        if not stored.is_driver_here and stored.num_partitions < ranks:
            raise DataError(f"num_workers={ranks}, but data has {counted(sum(counts), 'row')}; each rank needs one.")
        # There are fewer partitions than ranks if there are fewer rows.
        in_place = source.on_cluster and stored.num_partitions == ranks and not everywhere
        with rows_of_ranks(stored, ranks, in_place) as parts:
            yield replace(parts, counts=counts)


@contextmanager
def rows_of_ranks(stored: StoredDataset, ranks: int, in_place: bool) -> Iterator[Parts]:
    """Stored rows, divided among ranks.

    Args:
        stored: The rows.
        ranks: The number of ranks. Partition p goes to rank p modulo this number.
        in_place: Whether ranks run where their rows are. Otherwise all can open all rows, unless Spark Connect cannot send
            them; if workers share their files, all can anyway.
    """
    if isinstance(stored, StoredSparkDataset) and not (stored.is_driver_here and (stored.cluster.is_local or not in_place)):
        with stored.partitions.in_place(ranks) as handles:
            yield Parts(handles=handles)
    else:
        with stored.everywhere() as rows:
            yield Parts(tuple(rows[rank::ranks] for rank in range(ranks)))


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
        yield Parts(tuple((handle,) for handle in handles), _counts(handles, ranks))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _counts(handles: Sequence[Handle], ranks: int) -> tuple[int, ...]:
    """The number of rows of each rank; there may be fewer handles than ranks.

    Raises:
        DataError: There are no rows.
    """
    counts = tuple(handle.rows or 0 for handle in handles)
    if not sum(counts):
        raise DataError("data has no rows.")
    return (*counts, *(0,) * (ranks - len(counts)))


def _collected(source: Source) -> Block:
    with source.dataset() as dataset:
        block = concatenate_alike(dataset.run(Collect()).collect())
    if block is None:
        raise DataError("data has no rows.")
    return block
