"""What a person may give as data, and the dataset that it becomes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from sparkkeras.cluster import Cluster
from sparkkeras.data.arrays import ArraysRDD, even_slices, from_block, send
from sparkkeras.data.block import Block, describe
from sparkkeras.data.dataset import Dataset
from sparkkeras.data.rdd import SparkDataset
from sparkkeras.data.rows import from_rows
from sparkkeras.data.schema import Reader
from sparkkeras.errors import ConfigurationError, DataError


def context_of(data: Any) -> Any:
    """The SparkContext that data lives in; ``None`` for arrays."""
    return data.context if _is_rdd(data) else None


def read_on_driver(data: Any, y: Any, sample_weight: Any, reader: Reader) -> Block | None:
    """Arrays of this process as a checked block; ``None`` for an RDD, whose rows only workers see.

    Raises:
        DataError: It is neither, or the arrays are not what the reader expects.
        ConfigurationError: Labels or weights were given beside an RDD.
    """
    if isinstance(data, ArraysRDD):
        _refuse_beside_rdd(y, sample_weight)
        return reader.read_arrays(data.x, data.y, data.sample_weight)
    if _is_rdd(data):
        _refuse_beside_rdd(y, sample_weight)
        return None
    if hasattr(data, "rdd") and hasattr(data, "schema"):
        raise DataError(
            "data is a Spark DataFrame, which is not taken as it is: give its rows as pairs, for instance "
            "df.rdd.map(lambda row: (row.features.toArray(), row.label))."
        )
    if hasattr(data, "to_numpy"):
        data = data.to_numpy()
    if not isinstance(data, (list, tuple, Mapping)) and not hasattr(data, "__array__"):
        raise DataError(
            f"data is {describe(data)}; expected an RDD of (x, y) pairs, or NumPy arrays (a tuple or a dict of them where "
            "the model has several inputs)."
        )
    return reader.read_arrays(data, y.to_numpy() if hasattr(y, "to_numpy") else y, sample_weight)


@contextmanager
def as_dataset(
    data: Any, block: Block | None, cluster: Cluster, reader: Reader, num_workers: int | None
) -> Iterator[Dataset]:
    """The dataset of an RDD, or of arrays that `read_on_driver` has read.

    Args:
        data: What the person gave.
        block: The arrays, or ``None`` for an RDD.
        cluster: Where it will live.
        reader: How rows are read.
        num_workers: How many partitions there shall be. ``None``: as many as the RDD has, and for arrays as many as there
            are slots.
    """
    if block is None:
        yield from_rows(cluster, data, reader, num_workers)
        return
    parts = num_workers or (data.getNumPartitions() if isinstance(data, ArraysRDD) else cluster.slots)
    with from_block(cluster, block, max(1, min(parts, block.rows))) as dataset:
        yield dataset


def lazy_dataset(data: Any, block: Block | None, cluster: Cluster, reader: Reader) -> SparkDataset:
    """As `as_dataset`, without an end: Spark lets go of it when the person does."""
    if block is None:
        return from_rows(cluster, data, reader, None)
    parts = max(1, min(cluster.slots, block.rows))
    return SparkDataset(cluster, send(cluster.context, [block[part] for part in even_slices(block.rows, parts)])[0])


def _is_rdd(data: Any) -> bool:
    from pyspark import RDD

    return isinstance(data, RDD)


def _refuse_beside_rdd(y: Any, sample_weight: Any) -> None:
    if y is not None or sample_weight is not None:
        raise ConfigurationError(
            "y and sample_weight go with arrays; an RDD has them in its rows: (x, y) or (x, y, sample_weight)."
        )
