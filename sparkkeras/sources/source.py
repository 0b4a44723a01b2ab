"""Converts the data that users pass to a `Source`, so that no other module has to distinguish kinds of data."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sparkkeras.data.block import Block, Form, describe
from sparkkeras.data.columns import RowLoader
from sparkkeras.data.dataset import Dataset
from sparkkeras.data.numeric import remedy
from sparkkeras.data.placement import RowPlacement, even_slices
from sparkkeras.data.reader import Reader
from sparkkeras.data.sparse import SparseRows, with_sparse_rows
from sparkkeras.errors import ConfigurationError, DataError
from sparkkeras.modeling.custom_code import ByValue
from sparkkeras.sources.arrays import ArraysRDD, sent
from sparkkeras.sources.connect_partitions import of_frame
from sparkkeras.sources.frame import ColumnMapping, Loaders, Selection, is_frame, split_by
from sparkkeras.sources.global_shuffle import shuffled
from sparkkeras.sources.partitions import Partitions, RddPartitions
from sparkkeras.sources.reader_dataset import ReaderDataset
from sparkkeras.sources.rows import KeyedRowsToBlocks, RowsToBlocks, from_rows
from sparkkeras.sources.spark_dataset import SparkDataset
from sparkkeras.spark.cluster import Cluster
from sparkkeras.spark.connect import AnyCluster, active_cluster, check_session, cluster_of
from sparkkeras.spark.settings import AS_CONFIGURED, WorkerSize
from sparkkeras.spark.slots import warn_of_slots
from sparkkeras.weights import Array
from sparkkeras.worker.batch_reader import BatchReader, MakeBatches, epoch_argument
from sparkkeras.worker.device import Environment, worker_environment

if TYPE_CHECKING:
    from pyspark import RDD
    from pyspark.sql import DataFrame


SlotLimit = Callable[[AnyCluster, int | None], int | None]
"""Returns how many partitions of a cluster can train at the same time, at most, for the number of workers that the user has
set; ``None``: as many as there are."""


@dataclass(frozen=True)
class Division:
    """Into how many partitions rows are divided, and how.

    Attributes:
        num_workers: The number of partitions; ``None``: as many as the data has.
        slices: The number of partitions of data that has none, such as arrays, if ``num_workers`` is ``None``. ``None``: as
            many as Spark has slots.
        most: The largest number of partitions; ``None``: there is no limit.
        placement: How rows to train on are divided among the partitions; ``None``: in their order.
    """

    num_workers: int | None = None
    slices: int | None = None
    most: int | None = None
    placement: RowPlacement | None = None

    def parts(self, default: int) -> int:
        """The number of partitions, if it is ``default`` unless ``num_workers`` is set."""
        parts = self.num_workers or default
        return min(parts, self.most or parts)


class Source(ABC):
    """Data to train, evaluate or predict on; `as_source` creates one from what a user passes.

    Attributes:
        reader: How rows are read and checked.
        environment: Returns the environment variables of a worker, for a number of CPU cores.
        block: The rows, validated, if they are in this process; ``None`` if only workers have them.
        in_batches: Whether the data is batches that are read anew in each epoch: their sizes are kept, their number is
            unknown.
    """

    reader: Reader
    environment: Environment
    block: Block | None
    in_batches = False

    @property
    def form(self) -> Form | None:
        """The structure of the rows; ``None`` if it is unknown until they are read."""
        return None

    @property
    def on_cluster(self) -> bool:
        """Whether the data belongs to a SparkContext or session, unlike arrays."""
        return True

    @contextmanager
    def dataset(
        self,
        num_workers: int | None = None,
        slices: int | None = None,
        limit: SlotLimit | None = None,
        placement: RowPlacement | None = None,
        size: WorkerSize = AS_CONFIGURED,
    ) -> Iterator[Dataset]:
        """Make a dataset of the rows on the cluster, for as long as the context is open.

        Args:
            num_workers: See `Division`; the rows are redistributed if the data has another number of partitions.
            slices: See `Division`.
            limit: The limit on the number of partitions; ``None``: not all of them train at the same time.
            placement: See `Division`.
            size: The CPU cores and GPUs of the tasks.

        Raises:
            ConfigurationError: Spark cannot give tasks this size.
        """
        cluster = self._cluster().with_task(*size, "worker")
        most = limit(cluster, num_workers) if limit else None
        with ExitStack() as stack:
            yield self._rows(cluster, Division(num_workers, slices, most, placement), stack)

    def lazy(self, slices: int | None = None) -> SparkDataset:
        """Make a dataset of the rows for lazy predictions, which lives until Spark's garbage collector finds it unused.

        Args:
            slices: See `Division`.

        Raises:
            ConfigurationError: This process uses Spark Connect.
        """
        cluster = self._cluster()
        if not cluster.is_driver_here:
            raise ConfigurationError(
                "collect=False returns an RDD, which Spark Connect does not support: pass a DataFrame instead "
                "(to_data_frame); its predictions are lazy."
            )
        return self._rows(cluster, Division(slices=slices), None)

    def _cluster(self) -> AnyCluster:
        """The cluster of the data; by default the active one, or a new one on this machine."""
        return active_cluster(self.environment)

    @abstractmethod
    def _rows(self, cluster: AnyCluster, division: Division, stack: ExitStack | None) -> SparkDataset:
        """The dataset.

        Args:
            cluster: The cluster.
            division: Its partitions.
            stack: Releases the dataset in the end; ``None``: it lives for as long as it is used.
        """


def split_by_column(source: Source, column: str) -> tuple[Source, Source]:
    """Split rows into those in which a column is false, 0 or null, and the others, for validation.

    Raises:
        ConfigurationError: The rows have no columns.
        DataError: The column does not exist, or is neither boolean nor numeric.
    """
    if not isinstance(source, FrameSource):
        instead = "validation_data=" if source.in_batches else "validation_data= or validation_split="
        raise ConfigurationError(f"validation_col requires a DataFrame; use {instead} instead.")
    training, validation = split_by(source.frame, column)
    return replace(source, frame=training), replace(source, frame=validation)


def check_row_count(source: Source, argument: str, remedy: str) -> None:
    """Reject an argument that needs the number of rows before they have been read.

    Raises:
        ConfigurationError: The rows are batches that a function reads anew in each epoch.
    """
    if source.in_batches:
        raise ConfigurationError(
            f"{argument} needs to know how many rows there are, but data is a function, whose batches are read anew in each "
            f"epoch: {remedy}"
        )


def limited(source: Source) -> Source:
    """The source, of whose batches only a limited number is read in each epoch, so that they may have no end."""
    return replace(source, may_be_endless=True) if isinstance(source, BatchSource) else source


def as_source(
    data: Any,
    reader: Reader,
    y: Any = None,
    sample_weight: Any = None,
    columns: ColumnMapping | None = None,
    environment: Environment = worker_environment,
) -> Source:
    """Create the source for data that a user passes.

    Args:
        data: A DataFrame, an RDD of rows, arrays, or a function that reads batches on the workers.
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
    columns = columns or ColumnMapping()
    if is_frame(data):
        return _frame_source(data, reader, y, sample_weight, columns, environment)
    reader = _with_loaders(data, reader, columns)
    if isinstance(data, ArraysRDD) and data.is_current:
        _check_no_labels(y, sample_weight)
        return ArraySource(reader, reader.read_arrays(data.x, data.y, data.sample_weight), environment, data)
    if is_rdd(data):
        _check_no_labels(y, sample_weight)
        return RddSource(reader, data, environment)
    if is_batch_function(data):
        _check_signature(data)
        if y is not None or sample_weight is not None:
            raise ConfigurationError("y and sample_weight are only for arrays; the batches of a function contain them.")
        return BatchSource(reader, ByValue.dump(data, "data"), environment)
    if hasattr(data, "to_numpy"):
        if reader.labelled and y is None and not reader.labels_optional:
            raise DataError(f"labels are missing: pass y= with {describe(data)}.{_as_columns(data)}")
        data = data.to_numpy()
    data = with_sparse_rows(data)
    if not isinstance(data, (list, tuple, Mapping, SparseRows)) and not hasattr(data, "__array__"):
        raise DataError(
            f"data is {describe(data)}; expected a Spark DataFrame, an RDD of (x, y) pairs, NumPy arrays (a tuple or a "
            "dict of them where the model has several inputs), or a function make(worker, num_workers) that returns "
            f"batches.{remedy(data)}"
        )
    for name, given, meaning in (("y", y, "labels"), ("sample_weight", sample_weight, "weights")):
        if isinstance(given, str):
            raise ConfigurationError(f"{name}={given!r}: only a DataFrame has named columns; pass an array of {meaning}.")
    labels = y.to_numpy() if hasattr(y, "to_numpy") else with_sparse_rows(y)
    return ArraySource(reader, reader.read_arrays(data, labels, sample_weight), environment)


def as_keyed_source(
    data: Any, reader: Reader, columns: ColumnMapping, environment: Environment = worker_environment
) -> Source:
    """Create the source for an RDD of ``(key, x)`` rows; see `as_source`.

    Raises:
        ConfigurationError: ``data`` is not an RDD, or columns are set.
    """
    if is_rdd(data):
        return RddSource(_with_loaders(data, reader, columns), data, environment, keyed=True)
    reason = "predictions of arrays are in the order of their rows: zip(keys, predictions) joins them"
    if is_frame(data):
        reason = "predictions of a DataFrame are a column next to its other columns, keys included"
    raise ConfigurationError(f"keyed=True requires an RDD of (key, x) rows, received {describe(data)}; {reason}.")


def as_sources(
    data: Any, y: Any, sample_weight: Any, validation_data: Any, reader: Reader, columns: ColumnMapping
) -> tuple[Source, Source | None]:
    """Create the sources of training and validation data.

    ``columns`` applies to both; if only one of them is a DataFrame, to that one, except a loader that also takes rows.

    Args:
        data: The training data; see `as_source`.
        y: Its labels.
        sample_weight: Its weights. For DataFrames, the name of the column of weights in both.
        validation_data: The validation data: ``(x, y)``, ``(x, y, sample_weight)``, a DataFrame, an RDD or a function that
            reads batches; ``None``: none.
        reader: Reads and checks the rows.
        columns: The columns of DataFrames.

    Raises:
        DataError: See `as_source`.
        ConfigurationError: See `as_source`; or ``validation_data`` is something else.
    """
    if validation_data is None:
        return as_source(data, reader, y, sample_weight, columns), None
    rows, labels, weights = _validation_arguments(validation_data)
    in_columns = is_frame(rows)
    if in_columns and is_frame(data):
        weights = sample_weight
    others = ColumnMapping(loader=columns.loader if takes_rows(columns.loader) else None)
    source = as_source(data, reader, y, sample_weight, columns if is_frame(data) or not in_columns else others)
    return source, as_source(rows, reader, labels, weights, columns if in_columns else others)


@dataclass(frozen=True)
class ArraySource(Source):
    """Arrays in the memory of this process; with an RDD from `to_simple_rdd`, those that it was made from."""

    reader: Reader
    block: Block
    environment: Environment
    rdd: ArraysRDD | None = None

    @property
    def form(self) -> Form:
        """The structure of the arrays."""
        return self.block.form

    @property
    def on_cluster(self) -> bool:
        """Whether there is an RDD, which has a SparkContext."""
        return self.rdd is not None

    def _cluster(self) -> AnyCluster:
        return super()._cluster() if self.rdd is None else Cluster(self.rdd.context, self.environment)

    def _rows(self, cluster: AnyCluster, division: Division, stack: ExitStack | None) -> SparkDataset:
        """Divide the arrays into parts of equal size, and send them to the cluster."""
        block, placement = self.block, division.placement
        default = division.slices or (division.most if self.rdd is None else self.rdd.getNumPartitions())
        rows: Sequence[slice | Array] | None = None
        if division.num_workers or default or placement or cluster.is_driver_here:
            parts = max(1, min(division.parts(default or cluster.slots), block.rows))
            rows = placement.deal(block.rows, parts) if placement else even_slices(block.rows, parts)
        return sent(cluster, block, self.reader, rows, stack)


class _Partitioned(Source):
    """Rows that are in partitions on the cluster."""

    block = None

    def _rows(self, cluster: AnyCluster, division: Division, stack: ExitStack | None) -> SparkDataset:
        """Use these partitions, or redistribute the rows."""
        placement = division.placement
        if placement is None or not placement.is_global:
            return SparkDataset(self._partitions(cluster, division))
        rows = self._partitions(cluster, Division())
        return shuffled(rows, division.parts(rows.default_parts), placement.seed)

    @abstractmethod
    def _partitions(self, cluster: AnyCluster, division: Division) -> Partitions:
        """The rows as blocks, in their order."""


@dataclass(frozen=True)
class RddSource(_Partitioned):
    """An RDD of rows, or if it is ``keyed``, of ``(key, x)`` rows to predict: its blocks are pairs of keys and features."""

    reader: Reader
    rdd: RDD[Any]
    environment: Environment
    keyed: bool = False

    def _cluster(self) -> Cluster:
        return Cluster(self.rdd.context, self.environment)

    def _partitions(self, cluster: AnyCluster, division: Division) -> RddPartitions:
        assert isinstance(cluster, Cluster)
        read = (KeyedRowsToBlocks if self.keyed else RowsToBlocks)(self.reader)
        return from_rows(cluster, self.rdd, read, division.num_workers, division.most)


@dataclass(frozen=True)
class BatchSource(Source):
    """Batches that a user's function reads on the workers; see `sparkkeras.worker.batch_reader.BatchReader`."""

    reader: Reader
    make: ByValue[MakeBatches]
    environment: Environment
    may_be_endless: bool = False
    block = None
    in_batches = True

    def _rows(self, cluster: AnyCluster, division: Division, stack: ExitStack | None) -> SparkDataset:
        """One partition for each worker, of which there are as many as slots by default."""
        parts = division.parts(division.slices or division.most or cluster.slots)
        read = BatchReader(self.make, parts, self.reader, self.may_be_endless)
        return ReaderDataset.of(cluster, read)


@dataclass(frozen=True)
class FrameSource(_Partitioned):
    """A DataFrame, and the columns to read of it."""

    reader: Reader
    frame: DataFrame
    selection: Selection
    environment: Environment

    @property
    def form(self) -> Form:
        """The structure of the selected columns."""
        return self.selection.form

    def _cluster(self) -> AnyCluster:
        return cluster_of(self.frame.sparkSession, self.environment)

    def _partitions(self, cluster: AnyCluster, division: Division) -> Partitions:
        """The DataFrame reduced to the selected columns, and distributed evenly to ``num_workers`` partitions.

        With Spark Connect, which has no RDDs, rows are also redistributed if all partitions train together.

        Rows arrive at a partition in the order in which executors send them, which differs each time: sorted, they are the
        same when rows are read again, and when training is resumed.
        """
        narrowed, num_workers, most = self.selection.narrowed(self.frame), division.num_workers, division.most
        if most is not None and not cluster.is_driver_here:
            num_workers = min(num_workers or most, most)
        if num_workers is not None:
            numbered = narrowed.selectExpr("*", "monotonically_increasing_id() AS row")
            narrowed = numbered.repartition(num_workers).sortWithinPartitions("row").drop("row")
        if most is not None and cluster.is_driver_here:
            narrowed = narrowed.coalesce(most)
        return of_frame(cluster, narrowed, self.selection)


def is_batch_function(data: Any) -> bool:
    """Whether data is a function that reads batches on the workers."""
    kinds = {kind.__module__.split(".")[0] for kind in type(data).__mro__}
    return callable(data) and not isinstance(data, type) and not kinds & {"keras", "pyspark", "numpy"}


def is_rdd(data: Any) -> bool:
    """Whether data is an RDD."""
    from pyspark import RDD

    return isinstance(data, RDD)


def is_distributed(data: Any) -> bool:
    """Whether data is an RDD or a DataFrame."""
    return is_frame(data) or is_rdd(data)


def _frame_source(
    frame: Any, reader: Reader, y: Any, sample_weight: Any, columns: ColumnMapping, environment: Environment
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
    check_session(frame.sparkSession)
    selection = replace(columns, sample_weight=sample_weight).select(frame, reader)
    return FrameSource(reader, frame, selection, environment)


def free_slots(cluster: AnyCluster, num_workers: int | None) -> int:
    """As many partitions as there are free slots: a `SlotLimit`. Warns if these are fewer than ``num_workers``."""
    slots = cluster.free_slots
    warn_of_slots(num_workers, slots)
    return slots


def local_slots(cluster: AnyCluster, num_workers: int | None) -> int | None:
    """As many as can run at the same time on a local master, which runs more tasks than its cores allow: a `SlotLimit`."""
    return free_slots(cluster, num_workers) if cluster.is_local else None


def takes_rows(loader: Loaders | None) -> bool:
    """Whether a loader, or all loaders of several inputs, convert the rows of RDDs and arrays."""
    return all(isinstance(each, RowLoader) for each in (loader.values() if isinstance(loader, Mapping) else [loader]))


def _validation_arguments(validation_data: Any) -> tuple[Any, Any, Any]:
    """Validation data as (data, y, sample_weight)."""
    if is_distributed(validation_data) or is_batch_function(validation_data):
        return validation_data, None, None
    if isinstance(validation_data, (tuple, list)) and len(validation_data) in (2, 3):
        x, y, *weight = validation_data
        return x, y, weight[0] if weight else None
    raise ConfigurationError(
        f"validation_data is {describe(validation_data)}; expected (x, y), (x, y, sample_weight), a DataFrame, an RDD, or "
        "a function that returns batches."
    )


def _with_loaders(data: Any, reader: Reader, columns: ColumnMapping) -> Reader:
    """A reader for data that has no columns, with the loaders that are set.

    Raises:
        ConfigurationError: Columns are set, or a loader that only takes columns.
    """
    loaders = columns.loaders(reader.schema)
    for_rows = {name: loader for name, loader in loaders.items() if isinstance(loader, RowLoader)}
    only_columns = columns.loader if len(for_rows) < len(loaders) else None
    for name, given in (("features", columns.features), ("label", columns.label), ("loader", only_columns)):
        if given is not None:
            raise ConfigurationError(f"{name}= requires a Spark DataFrame; the data is {describe(data)}.{_as_columns(data)}")
    return replace(reader, loaders=for_rows)


def _check_no_labels(y: Any, sample_weight: Any) -> None:
    if y is not None or sample_weight is not None:
        hint = f" To set the number of epochs, use epochs={y}." if isinstance(y, int) else ""
        raise ConfigurationError(
            f"y and sample_weight are only for arrays; rows of an RDD contain them: (x, y) or (x, y, sample_weight).{hint}"
        )


def _check_signature(make: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(make)
    except ValueError:  # a builtin
        return
    try:
        signature.bind(0, 1, **epoch_argument(make, 0))
    except TypeError as error:
        raise DataError(
            f"data is {describe(make)}, which cannot be called as make(worker, num_workers) ({error}); expected a function "
            "make(worker, num_workers) or make(worker, num_workers, epoch) that returns the batches of a worker. Bind other "
            "arguments with functools.partial."
        ) from error


def _as_columns(data: Any) -> str:
    """A sentence for messages on how to use the columns of a pandas DataFrame by name; empty for other data."""
    if hasattr(data, "columns") and hasattr(data, "to_numpy"):
        convert = "data.to_spark()" if hasattr(data, "to_spark") else "spark.createDataFrame(data)"
        return f" To use its columns by name, convert it to a Spark DataFrame: {convert}."
    return ""
