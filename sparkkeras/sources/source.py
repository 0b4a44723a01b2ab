"""Converts the data that users pass to a `Source`, so that no other module has to distinguish kinds of data."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from sparkkeras.data.block import Block, Form, describe
from sparkkeras.data.columns import RowLoader
from sparkkeras.data.dataset import Dataset
from sparkkeras.data.numeric import remedy
from sparkkeras.data.placement import RowPlacement, even_slices
from sparkkeras.data.reader import Reader
from sparkkeras.data.sparse import SparseRows, with_sparse_rows
from sparkkeras.errors import ConfigurationError, DataError
from sparkkeras.modeling.custom_code import ByValue
from sparkkeras.sources.arrays import ArraysRDD, from_block, send
from sparkkeras.sources.connect_partitions import ConnectPartitions
from sparkkeras.sources.frame import ColumnMapping, Loaders, Selection, is_frame, split_by
from sparkkeras.sources.frame_blocks import FramePartitions
from sparkkeras.sources.global_shuffle import shuffled
from sparkkeras.sources.partitions import RddPartitions
from sparkkeras.sources.reader_dataset import ReaderDataset
from sparkkeras.sources.rows import KeyedRowsToBlocks, RowsToBlocks, from_rows
from sparkkeras.sources.spark_dataset import SparkDataset
from sparkkeras.spark.cluster import Cluster
from sparkkeras.spark.connect import AnyCluster, RemoteCluster, active_remote_session, check_session, cluster_of
from sparkkeras.spark.slots import warn_of_slots
from sparkkeras.weights import Array
from sparkkeras.worker.batch_reader import BatchReader, MakeBatches, epoch_argument
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
    def form(self) -> Form | None:
        """The structure of the rows; ``None`` if it is unknown until they are read."""
        ...

    @property
    def on_cluster(self) -> bool:
        """Whether the data belongs to a SparkContext or session, unlike arrays."""
        ...

    @property
    def in_batches(self) -> bool:
        """Whether the data is batches that are read anew in each epoch: their sizes are kept, their number is unknown."""
        ...

    def dataset(
        self,
        num_workers: int | None = None,
        slices: int | None = None,
        limit: SlotLimit | None = None,
        placement: RowPlacement | None = None,
    ) -> AbstractContextManager[Dataset]:
        """Make a dataset of the rows on the cluster, for as long as the context is open.

        Args:
            num_workers: The number of partitions; the rows are redistributed if the data has another number. ``None``: as
                many partitions as the data has.
            slices: The number of partitions of data that has none, such as arrays, if ``num_workers`` is ``None``. ``None``:
                as many as Spark has slots.
            limit: The limit on the number of partitions; ``None``: not all of them train at the same time.
            placement: How rows to train on are divided among the partitions; ``None``: in their order.
        """
        ...


class SlotLimit(Protocol):
    """Decides how many partitions can train at the same time."""

    def __call__(self, cluster: AnyCluster, num_workers: int | None) -> int:
        """The largest number of partitions.

        Args:
            cluster: The cluster.
            num_workers: The number of workers that the user has set.
        """
        ...


@runtime_checkable
class LazySource(Source, Protocol):
    """Rows of which a lazy RDD can be made."""

    def lazy(self, slices: int | None = None) -> SparkDataset:
        """Make a dataset of the rows that lives until Spark's garbage collector finds it unused.

        Args:
            slices: The number of partitions of data that has none; see `Source.dataset`.
        """
        ...


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


NO_RDD = (
    "collect=False returns an RDD, which Spark Connect does not support: pass a DataFrame instead (to_data_frame); its "
    "predictions are lazy."
)
"""The error message for lazy predictions on Spark Connect."""


def limited(source: Source) -> Source:
    """The source, of whose batches only a limited number is read in each epoch, so that they may have no end."""
    return replace(source, may_be_endless=True) if isinstance(source, BatchSource) else source


def lazy_dataset(source: Source, slices: int | None = None) -> SparkDataset:
    """Make a dataset for lazy predictions; see `LazySource`.

    Raises:
        ConfigurationError: The rows are a DataFrame, or in a Spark Connect session.
    """
    if not isinstance(source, LazySource):
        raise ConfigurationError(NO_RDD)
    return source.lazy(slices)


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
class ArraySource:
    """Arrays in the memory of this process; with an RDD from `to_simple_rdd`, those that it was made from."""

    reader: Reader
    block: Block
    environment: Environment
    rdd: ArraysRDD | None = None
    in_batches = False

    @property
    def form(self) -> Form:
        """The structure of the arrays."""
        return self.block.form

    @property
    def on_cluster(self) -> bool:
        """Whether there is an RDD, which has a SparkContext."""
        return self.rdd is not None

    @contextmanager
    def dataset(
        self,
        num_workers: int | None = None,
        slices: int | None = None,
        limit: SlotLimit | None = None,
        placement: RowPlacement | None = None,
    ) -> Iterator[Dataset]:
        """Divide the arrays into parts of equal size, and send them to the cluster."""
        cluster: AnyCluster
        session = active_remote_session() if self.rdd is None else None
        if session is not None:
            cluster = RemoteCluster(session, self.environment)
            parts = _together(cluster, num_workers, limit) if limit else num_workers or slices
            in_order = placement is None and parts is None
            rows = None if in_order else self._divided(parts or cluster.slots, placement)
            yield SparkDataset(ConnectPartitions.of(cluster, self.block, self.reader, rows))
            return
        cluster = self._cluster()
        parts = num_workers or slices or self._parts(cluster)
        most = limit(cluster, num_workers) if limit else parts
        with from_block(cluster, self.block, self._divided(min(parts, most), placement)) as dataset:
            yield dataset

    def lazy(self, slices: int | None = None) -> SparkDataset:
        """Broadcast the arrays in slices."""
        cluster = self._cluster()
        sent, _ = send(cluster.context, self.block, self._divided(slices or self._parts(cluster), None))
        return SparkDataset(RddPartitions(cluster, sent))

    def _divided(self, parts: int, placement: RowPlacement | None) -> Sequence[slice | Array]:
        parts = max(1, min(parts, self.block.rows))
        even: Sequence[slice | Array] = even_slices(self.block.rows, parts)
        return placement.deal(self.block.rows, parts) if placement else even

    def _cluster(self) -> Cluster:
        return _new_cluster(self.environment) if self.rdd is None else Cluster(self.rdd.context, self.environment)

    def _parts(self, cluster: Cluster) -> int:
        return cluster.slots if self.rdd is None else int(self.rdd.getNumPartitions())


@dataclass(frozen=True)
class RddSource:
    """An RDD of rows, or if it is ``keyed``, of ``(key, x)`` rows to predict: its blocks are pairs of keys and features."""

    reader: Reader
    rdd: RDD[Any]
    environment: Environment
    keyed: bool = False
    block = None
    form = None
    on_cluster = True
    in_batches = False

    @contextmanager
    def dataset(
        self,
        num_workers: int | None = None,
        slices: int | None = None,
        limit: SlotLimit | None = None,
        placement: RowPlacement | None = None,
    ) -> Iterator[Dataset]:
        """Use the partitions of the RDD, or redistribute the rows to ``num_workers`` partitions."""
        cluster = Cluster(self.rdd.context, self.environment)
        most = limit(cluster, num_workers) if limit else None
        if placement is not None and placement.is_global:
            parts = num_workers or self.rdd.getNumPartitions()
            yield shuffled(from_rows(cluster, self.rdd, self._read), min(parts, most or parts), placement.seed)
        else:
            yield SparkDataset(from_rows(cluster, self.rdd, self._read, num_workers, most))

    def lazy(self, slices: int | None = None) -> SparkDataset:
        """Use the partitions of the RDD."""
        return SparkDataset(from_rows(Cluster(self.rdd.context, self.environment), self.rdd, self._read))

    @property
    def _read(self) -> RowsToBlocks | KeyedRowsToBlocks:
        return (KeyedRowsToBlocks if self.keyed else RowsToBlocks)(self.reader)


@dataclass(frozen=True)
class BatchSource:
    """Batches that a user's function reads on the workers; see `sparkkeras.worker.batch_reader.BatchReader`."""

    reader: Reader
    make: ByValue[MakeBatches]
    environment: Environment
    may_be_endless: bool = False
    block = None
    form = None
    on_cluster = True
    in_batches = True

    @contextmanager
    def dataset(
        self,
        num_workers: int | None = None,
        slices: int | None = None,
        limit: SlotLimit | None = None,
        placement: RowPlacement | None = None,
    ) -> Iterator[Dataset]:
        """One partition for each worker, of which there are as many as slots by default."""
        session = active_remote_session()
        cluster = Cluster(None, self.environment) if session is None else RemoteCluster(session, self.environment)
        most = limit(cluster, num_workers) if limit else None
        parts = num_workers or slices or most or cluster.slots
        yield ReaderDataset.of(cluster, self._read(min(parts, most or parts)))

    def lazy(self, slices: int | None = None) -> SparkDataset:
        """One partition for each worker."""
        cluster = _new_cluster(self.environment)
        return ReaderDataset.of(cluster, self._read(slices or cluster.slots))

    def _read(self, num_workers: int) -> BatchReader:
        return BatchReader(self.make, num_workers, self.reader, self.may_be_endless)


@dataclass(frozen=True)
class FrameSource:
    """A DataFrame."""

    selection: Selection
    frame: DataFrame
    environment: Environment
    block = None
    on_cluster = True
    in_batches = False

    @contextmanager
    def dataset(
        self,
        num_workers: int | None = None,
        slices: int | None = None,
        limit: SlotLimit | None = None,
        placement: RowPlacement | None = None,
    ) -> Iterator[Dataset]:
        """Use the partitions of the DataFrame, or redistribute the rows to ``num_workers`` partitions.

        With Spark Connect, which has no RDDs, they are also redistributed if all partitions train together.
        """
        cluster = cluster_of(self.frame.sparkSession, self.environment)
        if isinstance(cluster, RemoteCluster):
            wanted = _together(cluster, num_workers, limit) if limit else num_workers
            if placement is not None and placement.is_global:
                rows = ConnectPartitions(cluster, self._narrowed(None), self.selection)
                yield shuffled(rows, wanted or cluster.slots, placement.seed)
            else:
                yield SparkDataset(ConnectPartitions(cluster, self._narrowed(wanted), self.selection))
            return
        most = limit(cluster, num_workers) if limit else None
        if placement is not None and placement.is_global:
            blocks = FramePartitions(cluster, self._narrowed(None), self.selection)
            parts = num_workers or blocks.num_partitions
            yield shuffled(blocks, min(parts, most or parts), placement.seed)
            return
        narrowed = self._narrowed(num_workers)
        if most:
            narrowed = narrowed.coalesce(most)
        yield SparkDataset(FramePartitions(cluster, narrowed, self.selection))

    @property
    def form(self) -> Form:
        """The structure of the selected columns."""
        return self.selection.form

    @property
    def reader(self) -> Reader:
        """How rows are read and checked."""
        return self.selection.reader

    def _narrowed(self, num_workers: int | None) -> DataFrame:
        """The DataFrame reduced to the selected columns, and distributed evenly to ``num_workers`` partitions.

        Rows arrive at a partition in the order in which executors send them, which differs each time: sorted, they are the
        same when rows are read again, and when training is resumed.
        """
        narrowed = self.selection.narrowed(self.frame)
        if num_workers is None:
            return narrowed
        numbered = narrowed.selectExpr("*", "monotonically_increasing_id() AS row")
        return numbered.repartition(num_workers).sortWithinPartitions("row").drop("row")


def _new_cluster(environment: Environment) -> Cluster:
    """The cluster of the active SparkContext, or of a new one on this machine.

    Raises:
        ConfigurationError: A Spark Connect session is active.
    """
    if active_remote_session() is not None:
        raise ConfigurationError(NO_RDD)
    return Cluster(None, environment)


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
    return FrameSource(selection, frame, environment)


def free_slots(cluster: AnyCluster, num_workers: int | None) -> int:
    """As many partitions as there are free slots: a `SlotLimit`. Warns if these are fewer than ``num_workers``."""
    slots = cluster.free_slots
    warn_of_slots(num_workers, slots)
    return slots


def _together(cluster: RemoteCluster, num_workers: int | None, limit: SlotLimit) -> int:
    """The number of partitions that train at the same time: as many as possible, at most ``num_workers``."""
    slots = limit(cluster, num_workers)
    return min(num_workers or slots, slots)


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
