"""Converts the data that users pass to a `Source`, so that no other module has to distinguish kinds of data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from sparkkeras.data.block import Block, describe
from sparkkeras.data.dataset import Dataset
from sparkkeras.data.numeric import remedy
from sparkkeras.data.reader import Reader
from sparkkeras.errors import ConfigurationError, DataError
from sparkkeras.sources.arrays import ArraysRDD, even_slices, from_block, send
from sparkkeras.sources.connect import NO_DRIVER, RemoteDataset
from sparkkeras.sources.frame import BatchesToBlocks, ColumnMapping, Columns, FrameBlocks, Loaders, is_frame, split_by
from sparkkeras.sources.rows import from_rows
from sparkkeras.sources.spark_dataset import RddBlocks, SparkDataset
from sparkkeras.spark.cluster import Cluster
from sparkkeras.spark.connect import AnyCluster, RemoteCluster, active_remote_session, cluster_of, is_remote
from sparkkeras.spark.slots import warn_of_slots
from sparkkeras.worker.device import Environment, worker_environment

if TYPE_CHECKING:
    from pyspark import RDD
    from pyspark.sql import DataFrame


class Source(Protocol):
    """Data to train, evaluate or predict on; `as_source` creates one from what a user passes."""

    @property
    def reader(self) -> Reader:
        """How rows are read and checked."""
        ...

    @property
    def block(self) -> Block | None:
        """The rows, validated, if they are in this process; ``None`` if only workers have them."""
        ...

    @property
    def cluster(self) -> AnyCluster:
        """The cluster of the datasets made from this source."""
        ...

    def dataset(self, num_workers: int | None = None, concurrent: bool = False) -> AbstractContextManager[Dataset]:
        """Make a dataset of the rows on the cluster, for as long as the context is open.

        Args:
            num_workers: The number of partitions; the rows are redistributed if the data has another number. ``None``: as
                many partitions as the data has; for arrays, as many as Spark has slots.
            concurrent: Whether all partitions train at the same time, which limits their number to the free slots.
        """
        ...

    def split_by(self, column: str) -> tuple[Source, Source]:
        """Split the rows into training rows and validation rows: those in which a column is true or not 0."""
        ...

    def lazy(self) -> SparkDataset:
        """Make a dataset of the rows that lives until Spark's garbage collector finds it unused."""
        ...


@dataclass(frozen=True)
class NamedColumns:
    """The columns of a DataFrame and the loaders that a user passes to a method; see `ColumnMapping`."""

    features: Columns | None = None
    label: Columns | None = None
    loader: Loaders | None = None
    fits: bool = True

    def check_unset(self, data: Any) -> None:
        """Check that no columns are set, for data that has no columns.

        Raises:
            ConfigurationError: Columns or a loader are set.
        """
        for name, given in (("features", self.features), ("label", self.label), ("loader", self.loader)):
            if given is not None:
                raise ConfigurationError(
                    f"{name}= requires a Spark DataFrame; the data is {describe(data)}.{_as_columns(data)}"
                )


def as_source(
    data: Any,
    reader: Reader,
    y: Any = None,
    sample_weight: Any = None,
    columns: NamedColumns | None = None,
    environment: Environment = worker_environment,
) -> Source:
    """Create the source for data that a user passes.

    Args:
        data: A DataFrame, an RDD of rows, or arrays.
        reader: Reads and checks the rows.
        y: The labels of arrays.
        sample_weight: The weights of arrays; for a DataFrame the names of their columns.
        columns: The columns of a DataFrame. ``None``: the default names.
        environment: Returns the environment variables of a worker, for a number of CPU cores.

    Raises:
        DataError: ``data`` is of another type; arrays do not fit the model; or a column is missing, or its type or width
            does not fit the model.
        ConfigurationError: Labels, weights or columns cannot be used with this kind of data.
    """
    if is_frame(data):
        return _frame_source(data, reader, y, sample_weight, columns or NamedColumns(), environment)
    if columns is not None:
        columns.check_unset(data)
    if isinstance(data, ArraysRDD):
        _check_no_labels(y, sample_weight)
        return ArraysRddSource(reader, reader.read_arrays(data.x, data.y, data.sample_weight), environment, data)
    if is_rdd(data):
        _check_no_labels(y, sample_weight)
        return RddSource(reader, data, environment)
    if hasattr(data, "to_numpy"):
        if reader.labelled and y is None:
            raise DataError(f"labels are missing: pass y= with {describe(data)}.{_as_columns(data)}")
        data = data.to_numpy()
    if not isinstance(data, (list, tuple, Mapping)) and not hasattr(data, "__array__"):
        raise DataError(
            f"data is {describe(data)}; expected a Spark DataFrame, an RDD of (x, y) pairs, or NumPy arrays (a tuple or a "
            f"dict of them where the model has several inputs).{remedy(data)}"
        )
    labels = y.to_numpy() if hasattr(y, "to_numpy") else y
    return ArraySource(reader, reader.read_arrays(data, labels, sample_weight), environment)


def as_sources(
    data: Any, y: Any, sample_weight: Any, held_out: tuple[Any, Any, Any] | None, reader: Reader, columns: NamedColumns
) -> tuple[Source, Source | None]:
    """Create the sources of training and validation data.

    ``columns`` applies to both; if only one of them is a DataFrame, to that one.

    Args:
        data: The training data; see `as_source`.
        y: Its labels.
        sample_weight: Its weights. For DataFrames, the name of the column of weights in both.
        held_out: The validation data with its labels and weights; ``None``: no validation.
        reader: Reads and checks the rows.
        columns: The columns of DataFrames.

    Raises:
        DataError: See `as_source`.
        ConfigurationError: See `as_source`.
    """
    if held_out is None:
        return as_source(data, reader, y, sample_weight, columns), None
    rows, labels, weights = held_out
    in_columns = is_frame(rows)
    if in_columns and is_frame(data):
        weights = sample_weight
    source = as_source(data, reader, y, sample_weight, columns if is_frame(data) or not in_columns else None)
    return source, as_source(rows, reader, labels, weights, columns if in_columns else None)


@dataclass(frozen=True)
class ArraySource:
    """Arrays in the memory of this process."""

    reader: Reader
    block: Block
    environment: Environment

    @property
    def cluster(self) -> AnyCluster:
        """The cluster of the active Spark Connect session or SparkContext; without one, a new local SparkContext."""
        remote = active_remote_session()
        return Cluster(None, self.environment) if remote is None else RemoteCluster(remote, self.environment)

    @contextmanager
    def dataset(self, num_workers: int | None = None, concurrent: bool = False) -> Iterator[Dataset]:
        """Split the arrays into slices of equal size."""
        cluster = self.cluster
        if isinstance(cluster, RemoteCluster):
            _refuse_concurrent(concurrent)
            yield RemoteDataset.of(cluster, self.block, self.reader, num_workers)
            return
        parts, max_partitions = num_workers or self._parts(cluster), None
        if concurrent:
            max_partitions = cluster.free_slots
            warn_of_slots(num_workers, max_partitions)
        with from_block(cluster, self.block, max(1, min(parts, self.block.rows, max_partitions or parts))) as dataset:
            yield dataset

    def split_by(self, column: str) -> tuple[Source, Source]:
        """Raise `ConfigurationError`: arrays have no columns."""
        return _refuse_split()

    def lazy(self) -> SparkDataset:
        """Broadcast the arrays in slices."""
        cluster = self.cluster
        if isinstance(cluster, RemoteCluster):
            raise ConfigurationError(
                "collect=False returns an RDD, which Spark Connect does not support: pass a DataFrame instead "
                "(to_data_frame); its predictions are lazy."
            )
        parts = max(1, min(cluster.slots, self.block.rows))
        sent, _ = send(cluster.context, [self.block[part] for part in even_slices(self.block.rows, parts)])
        return SparkDataset(cluster, RddBlocks(sent))

    def _parts(self, cluster: Cluster) -> int:
        return cluster.slots


@dataclass(frozen=True)
class ArraysRddSource(ArraySource):
    """An RDD from `to_simple_rdd`, whose arrays are still in this process."""

    rdd: ArraysRDD

    @property
    def cluster(self) -> Cluster:
        """The cluster of the RDD's SparkContext."""
        return Cluster(self.rdd.context, self.environment)

    def _parts(self, cluster: Cluster) -> int:
        return int(self.rdd.getNumPartitions())


@dataclass(frozen=True)
class RddSource:
    """An RDD of rows."""

    reader: Reader
    rdd: RDD[Any]
    environment: Environment
    block: None = field(default=None, init=False)

    @property
    def cluster(self) -> Cluster:
        """The cluster of the RDD's SparkContext."""
        return Cluster(self.rdd.context, self.environment)

    @contextmanager
    def dataset(self, num_workers: int | None = None, concurrent: bool = False) -> Iterator[Dataset]:
        """Use the partitions of the RDD, or redistribute the rows to ``num_workers`` partitions."""
        cluster = self.cluster
        yield from_rows(cluster, self.rdd, self.reader, num_workers, cluster.free_slots if concurrent else None)

    def split_by(self, column: str) -> tuple[Source, Source]:
        """Raise `ConfigurationError`: the rows of an RDD have no columns."""
        return _refuse_split()

    def lazy(self) -> SparkDataset:
        """Use the partitions of the RDD."""
        return from_rows(self.cluster, self.rdd, self.reader, None)


@dataclass(frozen=True)
class FrameSource:
    """A DataFrame."""

    reader: Reader
    frame: DataFrame
    named: ColumnMapping
    environment: Environment
    block: None = field(default=None, init=False)

    @property
    def cluster(self) -> AnyCluster:
        """The cluster of the DataFrame's session."""
        return cluster_of(self.frame.sparkSession, self.environment)

    @contextmanager
    def dataset(self, num_workers: int | None = None, concurrent: bool = False) -> Iterator[Dataset]:
        """Use the partitions of the DataFrame, or redistribute the rows to ``num_workers`` partitions."""
        cluster = self.cluster
        assert isinstance(cluster, Cluster)
        max_partitions = cluster.free_slots if concurrent else None
        narrowed, read = self._narrowed(num_workers)
        if max_partitions is not None:
            warn_of_slots(num_workers, max_partitions)
            narrowed = narrowed.coalesce(max_partitions)
        yield SparkDataset(cluster, FrameBlocks(narrowed, read))

    def split_by(self, column: str) -> tuple[Source, Source]:
        """Split the rows into those in which a column is false, 0 or null, and the others."""
        training, validation = split_by(self.frame, column)
        return replace(self, frame=training), replace(self, frame=validation)

    def lazy(self) -> SparkDataset:
        """Raise `ConfigurationError`: predictions for a DataFrame are columns, which are always lazy."""
        raise ConfigurationError("collect=False is for RDDs and arrays; predictions for a DataFrame are always lazy.")

    def _narrowed(self, num_workers: int | None) -> tuple[DataFrame, BatchesToBlocks]:
        """The DataFrame reduced to the selected columns, and the function that converts its batches to blocks."""
        selection = self.named.select(self.frame, self.reader.schema, self.reader.labelled)
        narrowed = selection.narrowed(self.frame)
        if num_workers is not None:
            narrowed = narrowed.repartition(num_workers)
        return narrowed, BatchesToBlocks(selection, self.reader)


@dataclass(frozen=True)
class RemoteFrameSource(FrameSource):
    """A DataFrame in a Spark Connect session."""

    @contextmanager
    def dataset(self, num_workers: int | None = None, concurrent: bool = False) -> Iterator[Dataset]:
        """Like `FrameSource.dataset`, but without RDDs."""
        _refuse_concurrent(concurrent)
        cluster = self.cluster
        assert isinstance(cluster, RemoteCluster)
        narrowed, read = self._narrowed(num_workers)
        yield RemoteDataset(cluster, narrowed, read)


def is_rdd(data: Any) -> bool:
    """Whether data is an RDD."""
    from pyspark import RDD

    return isinstance(data, RDD)


def is_distributed(data: Any) -> bool:
    """Whether data is an RDD or a DataFrame."""
    return is_frame(data) or is_rdd(data)


def _frame_source(
    frame: Any, reader: Reader, y: Any, sample_weight: Any, columns: NamedColumns, environment: Environment
) -> Source:
    if y is not None:
        raise ConfigurationError('y is only for arrays; for a DataFrame, name the column of labels: label="name".')
    if frame.isStreaming and reader.labelled:
        raise DataError(
            "the DataFrame is a stream; streams can be predicted, but not trained or evaluated on, since they have no end. "
            "Train on its batches (writeStream.foreachBatch), or on a static DataFrame."
        )
    if sample_weight is not None and not isinstance(sample_weight, (str, list, tuple, Mapping)):
        raise ConfigurationError(
            f"sample_weight is {describe(sample_weight)}; for a DataFrame, pass the name of the column of weights."
        )
    named = ColumnMapping(columns.features, columns.label, sample_weight, columns.loader, columns.fits)
    named.select(frame, reader.schema, reader.labelled)
    return (RemoteFrameSource if is_remote(frame.sparkSession) else FrameSource)(reader, frame, named, environment)


def _refuse_concurrent(concurrent: bool) -> None:
    if concurrent:
        raise ConfigurationError(NO_DRIVER)


def _refuse_split() -> tuple[Source, Source]:
    raise ConfigurationError("validation_col requires a DataFrame; use validation_data= or validation_split= instead.")


def _check_no_labels(y: Any, sample_weight: Any) -> None:
    if y is not None or sample_weight is not None:
        hint = f" To set the number of epochs, use epochs={y}." if isinstance(y, int) else ""
        raise ConfigurationError(
            f"y and sample_weight are only for arrays; rows of an RDD contain them: (x, y) or (x, y, sample_weight).{hint}"
        )


def _as_columns(data: Any) -> str:
    """A sentence for messages on how to use the columns of a pandas DataFrame by name; empty for other data."""
    if hasattr(data, "columns") and hasattr(data, "to_numpy"):
        return " To use its columns by name, convert it with spark.createDataFrame(data)."
    return ""
