"""The data that users pass, as a `Source`: created once where data enters, so that nothing else asks which kind it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from sparkkeras.data.block import Block, describe
from sparkkeras.data.dataset import Dataset
from sparkkeras.data.numeric import remedy
from sparkkeras.data.schema import Reader
from sparkkeras.errors import ConfigurationError, DataError
from sparkkeras.sources.arrays import ArraysRDD, even_slices, from_block, send
from sparkkeras.sources.connect import NO_DRIVER, RemoteDataset
from sparkkeras.sources.frame import BatchesToBlocks, ColumnMapping, Columns, FrameBlocks, Loaders, is_frame, split_by
from sparkkeras.sources.rdd import RddBlocks, SparkDataset
from sparkkeras.sources.rows import from_rows, warn_of_slots
from sparkkeras.spark.cluster import Cluster
from sparkkeras.spark.connect import AnyCluster, RemoteCluster, active_remote_session, cluster_of, is_remote
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
        """The rows of a source that is in this process, read and checked; ``None`` where only workers see them."""
        ...

    @property
    def cluster(self) -> AnyCluster:
        """The cluster on which the source becomes a dataset."""
        ...

    def dataset(self, num_workers: int | None = None, at_once: bool = False) -> AbstractContextManager[Dataset]:
        """The rows as a dataset on the cluster.

        Args:
            num_workers: The number of partitions, into which rows are dealt out where there are others. ``None``: as many
                as the data has, for arrays as many as Spark has slots.
            at_once: Whether all partitions train at the same time, so that there may be no more of them than free slots.
        """
        ...

    def split_by(self, column: str) -> tuple[Source, Source]:
        """The rows that train, and those in which a column is true or not 0, which validate."""
        ...

    def lazy(self) -> SparkDataset:
        """The rows as a dataset that lives until Spark's garbage collection finds it unused."""
        ...


@dataclass(frozen=True)
class NamedColumns:
    """The columns of a DataFrame that a call names, and how they are loaded; see `ColumnMapping`."""

    features: Columns | None = None
    label: Columns | None = None
    loader: Loaders | None = None
    fits: bool = True

    def refuse_beside(self, data: Any) -> None:
        """Refuse columns that are named for data without any.

        Raises:
            ConfigurationError: Columns or a loader were given.
        """
        for name, given in (("features", self.features), ("label", self.label), ("loader", self.loader)):
            if given is not None:
                raise ConfigurationError(
                    f"{name}= is for the columns of a Spark DataFrame; the data is {describe(data)}.{_as_columns(data)}"
                )


def as_source(
    data: Any,
    reader: Reader,
    y: Any = None,
    sample_weight: Any = None,
    columns: NamedColumns | None = None,
    environment: Environment = worker_environment,
) -> Source:
    """The source of what a user passes.

    Args:
        data: A DataFrame, an RDD of rows, or arrays.
        reader: How rows are read and checked.
        y: The labels of arrays.
        sample_weight: The weights of arrays; for a DataFrame the names of their columns.
        columns: The columns of a DataFrame. ``None``: those of the default names.
        environment: Gives the environment variables of workers that train on so many CPU cores.

    Raises:
        DataError: It is none of these; the arrays are not what the reader expects; or a column is missing, or of a type or
            width that does not fit the model.
        ConfigurationError: Labels, weights or columns were given that do not go with the kind of data.
    """
    if is_frame(data):
        return _frame_source(data, reader, y, sample_weight, columns or NamedColumns(), environment)
    if columns is not None:
        columns.refuse_beside(data)
    if isinstance(data, ArraysRDD):
        _refuse_beside_rdd(y, sample_weight)
        return ArraysRddSource(reader, reader.read_arrays(data.x, data.y, data.sample_weight), environment, data)
    if is_rdd(data):
        _refuse_beside_rdd(y, sample_weight)
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
    """The sources of data to train on and of data to validate on.

    Columns are named for both; where one of the two is a DataFrame and the other is not, they are those of the DataFrame.

    Args:
        data: The data to train on; see `as_source`.
        y: Its labels.
        sample_weight: Its weights. The weights of a DataFrame are in the same column of a DataFrame to validate on.
        held_out: Data, labels and weights to validate on, if there are any.
        reader: How rows are read and checked.
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
    """Arrays of this process."""

    reader: Reader
    block: Block
    environment: Environment

    @property
    def cluster(self) -> AnyCluster:
        """The cluster of the active session of Spark Connect or SparkContext, or a new one on this machine."""
        remote = active_remote_session()
        return Cluster(None, self.environment) if remote is None else RemoteCluster(remote, self.environment)

    @contextmanager
    def dataset(self, num_workers: int | None = None, at_once: bool = False) -> Iterator[Dataset]:
        """The arrays, cut into even parts."""
        cluster = self.cluster
        if isinstance(cluster, RemoteCluster):
            _refuse_at_once(at_once)
            yield RemoteDataset.of(cluster, self.block, self.reader, num_workers)
            return
        parts, most = num_workers or self._parts(cluster), None
        if at_once:
            most = cluster.free_slots
            warn_of_slots(num_workers, most)
        with from_block(cluster, self.block, max(1, min(parts, self.block.rows, most or parts))) as dataset:
            yield dataset

    def split_by(self, column: str) -> tuple[Source, Source]:
        """Refused: arrays have no columns."""
        return _refuse_split()

    def lazy(self) -> SparkDataset:
        """The arrays, broadcast in parts."""
        cluster = self.cluster
        if isinstance(cluster, RemoteCluster):
            raise ConfigurationError(
                "collect=False gives an RDD, and Spark Connect has none: give a DataFrame (to_data_frame); its predictions "
                "are lazy."
            )
        parts = max(1, min(cluster.slots, self.block.rows))
        sent, _ = send(cluster.context, [self.block[part] for part in even_slices(self.block.rows, parts)])
        return SparkDataset(cluster, RddBlocks(sent))

    def _parts(self, cluster: Cluster) -> int:
        return cluster.slots


@dataclass(frozen=True)
class ArraysRddSource(ArraySource):
    """An RDD that `to_simple_rdd` has made of arrays, which are still in this process."""

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
    def dataset(self, num_workers: int | None = None, at_once: bool = False) -> Iterator[Dataset]:
        """The rows, in their partitions or dealt out to ``num_workers``."""
        cluster = self.cluster
        yield from_rows(cluster, self.rdd, self.reader, num_workers, cluster.free_slots if at_once else None)

    def split_by(self, column: str) -> tuple[Source, Source]:
        """Refused: the rows of an RDD have no columns."""
        return _refuse_split()

    def lazy(self) -> SparkDataset:
        """The rows in their partitions."""
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
    def dataset(self, num_workers: int | None = None, at_once: bool = False) -> Iterator[Dataset]:
        """The rows of the selected columns, in their partitions or dealt out to ``num_workers``."""
        cluster = self.cluster
        assert isinstance(cluster, Cluster)
        most = cluster.free_slots if at_once else None
        narrowed, read = self._narrowed(num_workers)
        if most is not None:
            warn_of_slots(num_workers, most)
            narrowed = narrowed.coalesce(most)
        yield SparkDataset(cluster, FrameBlocks(narrowed, read))

    def split_by(self, column: str) -> tuple[Source, Source]:
        """The rows in which a column is false or 0, and the others."""
        training, validation = split_by(self.frame, column)
        return replace(self, frame=training), replace(self, frame=validation)

    def lazy(self) -> SparkDataset:
        """Refused: predictions for a DataFrame are columns, which are lazy anyway."""
        raise ConfigurationError("collect=False is for RDDs and arrays; predictions for a DataFrame are always lazy.")

    def _narrowed(self, num_workers: int | None) -> tuple[DataFrame, BatchesToBlocks]:
        """The columns of the DataFrame that matter, and how they become blocks."""
        selection = self.named.select(self.frame, self.reader.schema, self.reader.labelled)
        narrowed = selection.narrowed(self.frame)
        if num_workers is not None:
            narrowed = narrowed.repartition(num_workers)
        return narrowed, BatchesToBlocks(selection, self.reader)


@dataclass(frozen=True)
class RemoteFrameSource(FrameSource):
    """A DataFrame of Spark Connect."""

    @contextmanager
    def dataset(self, num_workers: int | None = None, at_once: bool = False) -> Iterator[Dataset]:
        """The rows of the selected columns, as in `FrameSource`, without RDDs."""
        _refuse_at_once(at_once)
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
        raise ConfigurationError('y goes with arrays; a DataFrame has its labels in columns: label="name".')
    if frame.isStreaming and reader.labelled:
        raise DataError(
            "the DataFrame is a stream, which has no end to train or evaluate on: train on its batches "
            "(writeStream.foreachBatch), or on a static DataFrame. predict takes streams."
        )
    if sample_weight is not None and not isinstance(sample_weight, (str, list, tuple, Mapping)):
        raise ConfigurationError(
            f"sample_weight is {describe(sample_weight)}; a DataFrame has its weights in a column: give the column's name."
        )
    named = ColumnMapping(columns.features, columns.label, sample_weight, columns.loader, columns.fits)
    named.select(frame, reader.schema, reader.labelled)
    return (RemoteFrameSource if is_remote(frame.sparkSession) else FrameSource)(reader, frame, named, environment)


def _refuse_at_once(at_once: bool) -> None:
    if at_once:
        raise ConfigurationError(NO_DRIVER)


def _refuse_split() -> tuple[Source, Source]:
    raise ConfigurationError("validation_col names a column of a DataFrame; give validation_data= or validation_split=.")


def _refuse_beside_rdd(y: Any, sample_weight: Any) -> None:
    if y is not None or sample_weight is not None:
        number = f" Arguments are named: epochs={y}." if isinstance(y, int) else ""
        raise ConfigurationError(
            f"y and sample_weight go with arrays; an RDD has them in its rows: (x, y) or (x, y, sample_weight).{number}"
        )


def _as_columns(data: Any) -> str:
    """How columns of a pandas DataFrame are used by name, to append to a message; empty for other data."""
    if hasattr(data, "columns") and hasattr(data, "to_numpy"):
        return " To use its columns by name, convert it with spark.createDataFrame(data)."
    return ""
