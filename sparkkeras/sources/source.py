"""What a person may give as data, and the dataset that it becomes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from sparkkeras.data.block import Block, describe
from sparkkeras.data.dataset import Dataset
from sparkkeras.data.numeric import remedy
from sparkkeras.data.schema import Reader
from sparkkeras.errors import ConfigurationError, DataError
from sparkkeras.sources.arrays import ArraysRDD, even_slices, from_block, send
from sparkkeras.sources.connect import NO_DRIVER, RemoteDataset
from sparkkeras.sources.frame import BatchesToBlocks, FrameBlocks, Named, is_frame
from sparkkeras.sources.rdd import RddBlocks, SparkDataset
from sparkkeras.sources.rows import from_rows, warn_of_slots
from sparkkeras.spark.cluster import Cluster
from sparkkeras.spark.connect import AnyCluster, RemoteCluster, active_remote_session, cluster_of


def where_is(data: Any, environment: Callable[[int], Mapping[str, str]]) -> AnyCluster:
    """The cluster that data lives on; for arrays the active one, or a new one on this machine."""
    if is_frame(data):
        return cluster_of(data.sparkSession, environment)
    remote = None if is_rdd(data) else active_remote_session()
    if remote is not None:
        return RemoteCluster(remote, environment)
    return Cluster(data.context if is_rdd(data) else None, environment)


def read_on_driver(data: Any, y: Any, sample_weight: Any, reader: Reader) -> Block | None:
    """Arrays of this process as a checked block; ``None`` for an RDD or a DataFrame, whose rows only workers see.

    Raises:
        DataError: It is none of these, or the arrays are not what the reader expects.
        ConfigurationError: Labels or weights were given beside an RDD, or arrays of them beside a DataFrame.
    """
    if is_frame(data):
        _check_frame(data, y, reader)
        return None
    if isinstance(data, ArraysRDD):
        _refuse_beside_rdd(y, sample_weight)
        return reader.read_arrays(data.x, data.y, data.sample_weight)
    if is_rdd(data):
        _refuse_beside_rdd(y, sample_weight)
        return None
    if hasattr(data, "to_numpy"):
        data = data.to_numpy()
    if not isinstance(data, (list, tuple, Mapping)) and not hasattr(data, "__array__"):
        raise DataError(
            f"data is {describe(data)}; expected a Spark DataFrame, an RDD of (x, y) pairs, or NumPy arrays (a tuple or a "
            f"dict of them where the model has several inputs).{remedy(data)}"
        )
    return reader.read_arrays(data, y.to_numpy() if hasattr(y, "to_numpy") else y, sample_weight)


@contextmanager
def as_dataset(
    data: Any,
    block: Block | None,
    cluster: AnyCluster,
    reader: Reader,
    num_workers: int | None,
    at_once: bool = False,
    named: Named | None = None,
) -> Iterator[Dataset]:
    """The dataset of an RDD or a DataFrame, or of arrays that `read_on_driver` has read.

    Args:
        data: What the person gave.
        block: The arrays, or ``None`` for an RDD.
        cluster: Where it will live.
        reader: How rows are read.
        num_workers: How many partitions there shall be. ``None``: as many as the RDD has, and for arrays as many as there
            are slots.
        at_once: Whether all partitions are to train at the same time, so that there may be no more of them than free slots.
        named: What the person said of a DataFrame's columns.
    """
    if isinstance(cluster, RemoteCluster):
        if at_once:
            raise ConfigurationError(NO_DRIVER)
        if block is not None:
            yield RemoteDataset.of(cluster, block, reader, num_workers)
        else:
            narrowed, read = _narrowed(data, reader, named or Named(), num_workers)
            yield RemoteDataset(cluster, narrowed, read)
        return
    most = cluster.free_slots if at_once else None
    if is_frame(data):
        yield from_frame(cluster, data, reader, named or Named(), num_workers, most)
        return
    if block is None:
        yield from_rows(cluster, data, reader, num_workers, most)
        return
    parts = num_workers or (data.getNumPartitions() if isinstance(data, ArraysRDD) else cluster.slots)
    if most is not None:
        warn_of_slots(num_workers, most)
    with from_block(cluster, block, max(1, min(parts, block.rows, most or parts))) as dataset:
        yield dataset


def from_frame(
    cluster: Cluster, frame: Any, reader: Reader, named: Named, num_workers: int | None, most: int | None
) -> SparkDataset:
    """The rows of a DataFrame, in its partitions or dealt out to ``num_workers``, but to no more than ``most`` of them."""
    narrowed, read = _narrowed(frame, reader, named, num_workers)
    if most is not None:
        warn_of_slots(num_workers, most)
        narrowed = narrowed.coalesce(most)
    return SparkDataset(cluster, FrameBlocks(narrowed, read))


def _narrowed(frame: Any, reader: Reader, named: Named, num_workers: int | None) -> tuple[Any, BatchesToBlocks]:
    """The columns of a DataFrame that matter, and how they become blocks."""
    selection = named.select(frame, reader.schema, reader.labelled)
    narrowed = selection.narrowed(frame)
    if num_workers is not None:
        narrowed = narrowed.repartition(num_workers)
    return narrowed, BatchesToBlocks(selection, reader)


def lazy_dataset(data: Any, block: Block | None, cluster: AnyCluster, reader: Reader) -> SparkDataset:
    """As `as_dataset`, without an end: Spark lets go of it when the person does."""
    if isinstance(cluster, RemoteCluster):
        raise ConfigurationError(
            "collect=False gives an RDD, and Spark Connect has none: give a DataFrame (to_data_frame); its predictions are "
            "lazy."
        )
    if block is None:
        return from_rows(cluster, data, reader, None)
    parts = max(1, min(cluster.slots, block.rows))
    sent, _ = send(cluster.context, [block[part] for part in even_slices(block.rows, parts)])
    return SparkDataset(cluster, RddBlocks(sent))


def is_rdd(data: Any) -> bool:
    """Whether data is an RDD."""
    from pyspark import RDD

    return isinstance(data, RDD)


def _check_frame(frame: Any, y: Any, reader: Reader) -> None:
    if y is not None:
        raise ConfigurationError('y goes with arrays; a DataFrame has its labels in columns: label="name".')
    if frame.isStreaming and reader.labelled:
        raise DataError(
            "the DataFrame is a stream, which has no end to train or evaluate on: train on its batches "
            "(writeStream.foreachBatch), or on a static DataFrame. predict takes streams."
        )


def _refuse_beside_rdd(y: Any, sample_weight: Any) -> None:
    if y is not None or sample_weight is not None:
        number = f" Arguments are named: epochs={y}." if isinstance(y, int) else ""
        raise ConfigurationError(
            f"y and sample_weight go with arrays; an RDD has them in its rows: (x, y) or (x, y, sample_weight).{number}"
        )
