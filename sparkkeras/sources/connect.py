"""Data on Spark Connect: tasks run as jobs over DataFrames, since Spark Connect has no RDDs.

As on classic Spark (`sparkkeras.sources.spark_dataset`), tasks write the rows of a DataFrame to files on the workers, and
Spark only keeps a small DataFrame of handles. Small shared values are part of the task's function; larger ones are written
to files beside the rows (`sparkkeras.sources.connect_values`). Large results are merged on the cluster piece by piece.
"""

from __future__ import annotations

import functools
import pickle
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from sparkkeras.data.block import PIECE_BYTES, Block
from sparkkeras.data.columns import Leaf, to_column
from sparkkeras.data.dataset import DriverAddress, Merging, Rows, Shared, StoredDataset, Task, TrainingTask, joined
from sparkkeras.data.files import Handle
from sparkkeras.data.local_dataset import LocalShared
from sparkkeras.data.reader import Reader
from sparkkeras.data.values import Pickled
from sparkkeras.errors import ClusterError, ConfigurationError
from sparkkeras.sources.connect_values import StoredShared, remove_files, write_files
from sparkkeras.sources.frame import Selection
from sparkkeras.sources.frame_blocks import BatchesToBlocks, OverPartition, read_results, results_of
from sparkkeras.sources.spark_dataset import ClusterDataset
from sparkkeras.sources.tasks import (
    Collect,
    Deferred,
    KeyByPartition,
    MergePieces,
    Missing,
    Open,
    OpenFiles,
    Pass,
    SharedRows,
    StoreRows,
    Sweep,
    WithoutRows,
    by_partition,
    keyed_pieces,
    repaired,
    task_context,
)
from sparkkeras.spark.connect import (
    INLINE_BYTES,
    RESULT,
    CapturesErrors,
    RemoteCluster,
    active_remote_session,
    disable_plan_cache,
    restore_plan_cache,
)
from sparkkeras.weights import Array

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

    from sparkkeras.sources.frame_blocks import BatchCall

R = TypeVar("R")


NO_DRIVER = (
    "asynchronous and hogwild training need a Spark driver in this process, which Spark Connect does not provide: use "
    'mode="synchronous" or "allreduce", or run the script on the cluster itself (spark-submit).'
)

NO_SHARED_ROWS = (
    "rows that all workers need pass through the driver, which Spark Connect does not provide: use validation_split= "
    'instead of validation_data=, sampling="partition" for an ensemble, or run the script on the cluster itself '
    "(spark-submit)."
)

SWEEP_ROWS = 4096
REPAIRS = 3


def check_driver() -> None:
    """Reject asynchronous training with Spark Connect, before data is read.

    Raises:
        ConfigurationError: This process uses Spark Connect.
    """
    if active_remote_session() is not None:
        raise ConfigurationError(NO_DRIVER)


@dataclass(frozen=True)
class RemoteClusterDataset(ClusterDataset):
    """What all datasets on Spark Connect have in common."""

    cluster: RemoteCluster

    def client_address(self) -> DriverAddress:
        """See `ReachesClient.client_address`."""
        return self.cluster.client_address()

    def share(self, value: R) -> AbstractContextManager[Shared[R]]:
        """See `Dataset.share`; large values are uploaded as files of the session."""
        return nullcontext(self.cluster.keep(value))


@dataclass(frozen=True)
class RemoteDataset(RemoteClusterDataset):
    """The rows of a DataFrame on Spark Connect.

    Attributes:
        cluster: The cluster of its session.
        frame: The selected columns.
        read: Converts their batches to blocks.
        repeats_rows: Whether the rows must be the same when they are read again; see `OpenFiles`.
    """

    frame: DataFrame
    read: Callable[[int, Iterable[pa.RecordBatch]], Iterator[Block]]
    repeats_rows: bool = False

    @classmethod
    def of(
        cls, cluster: RemoteCluster, block: Block, reader: Reader, parts: Sequence[slice | Array] | None
    ) -> RemoteDataset:
        """Send arrays of this process to the cluster.

        Args:
            cluster: The cluster.
            block: The arrays.
            reader: Reads and checks the rows on the workers.
            parts: The rows of each partition, in ascending order; ``None``: Spark divides them.
        """
        import pyarrow as pa

        names = [f"c{number}" for number in range(len(block.arrays))]
        read = BatchesToBlocks(Selection(block.form, tuple(Leaf((name,), fits=False) for name in names)), reader)
        session = cluster.session
        if not block.rows:  # Spark cannot create a DataFrame from a table without rows
            return cls(cluster, session.range(0), read)
        table = pa.table([to_column(array) for array in block.arrays], names)
        if parts is None:
            return cls(cluster, session.createDataFrame(table), read)
        worker = np.empty(block.rows, np.int32)
        for number, rows in enumerate(parts):
            worker[rows] = number
        table = table.append_column("worker", pa.array(worker))
        table = table.append_column("row", pa.array(np.arange(block.rows)))
        # A union of one frame per slice does not work: Spark merges frames of one partition into a single partition.
        frame = session.createDataFrame(table).repartitionById(len(parts), "worker").sortWithinPartitions("row")
        return cls(cluster, frame.select(*names), read)

    def run(self, task: Task[R]) -> RemoteResults[R]:
        """Run a task in one pass over the rows; see `Dataset.run`."""
        call = Pass(Deferred(task, self.cluster.carried_environment), self.cluster.task_cores)
        return RemoteResults(self.cluster, self.frame, OverPartition(self.read, CapturesErrors(call)))

    @contextmanager
    def stored(self) -> Iterator[StoredDataset]:
        """Write the rows to files on the workers, in one job; they are removed when the context ends."""
        name = f"sparkkeras-{uuid.uuid4().hex}"
        session = self.cluster.session
        handles: DataFrame | None = None
        disable_plan_cache(session)
        try:
            handles = self.stored_again(name, None).persist()
            found = tuple(self.cluster.collect(handles))
            yield StoredRemoteDataset(self.cluster, self, handles, found, name)
        finally:
            with suppress(Exception):  # the server may be gone
                if handles is not None:
                    handles.unpersist()  # the first request: if the server is gone, only this one waits for the time-out
                    with suppress(Exception):  # its tasks may fail
                        # Spark creates as many tasks as slots, since no number of partitions is set.
                        session.range(SWEEP_ROWS).mapInArrow(WithoutRows(Sweep(name)), RESULT).collect()
                restore_plan_cache(session)

    def stored_again(self, name: str, partitions: Sequence[int] | None) -> DataFrame:
        """The handles of some partitions, or of all (``None``); computing a handle writes the files of its partition."""
        store = OverPartition(self.read, CapturesErrors(StoreRows(name)))
        return results_of(self.frame, store if partitions is None else _InPartitions(store, frozenset(partitions)))


@dataclass(frozen=True)
class StoredRemoteDataset(RemoteClusterDataset):
    """Rows in files on the workers; see `RemoteDataset`.

    Attributes:
        cluster: The cluster of the rows.
        source: The rows.
        handle_frame: The handles as a DataFrame, whose rows are on the workers that have the files.
        handles: The handles, on the driver.
        name: The name of the files.
        shared: The values that are currently shared through files.
    """

    source: RemoteDataset
    handle_frame: DataFrame
    handles: tuple[Handle, ...]
    name: str
    shared: list[StoredShared[Any]] = field(default_factory=list)

    @property
    def num_partitions(self) -> int:
        """The number of partitions."""
        return len(self.handles)

    @contextmanager
    def share(self, value: R) -> Iterator[Shared[R]]:
        """See `Dataset.share`; large values are written to files beside the rows until the context ends."""
        pickled = Pickled.of(value)
        if pickled.nbytes <= INLINE_BYTES:
            yield LocalShared(value)
            return
        shared: StoredShared[R] = StoredShared.of(pickled, self.name)
        write_files(shared, self.cluster, self.handle_frame)
        self.shared.append(shared)
        try:
            yield shared
        finally:
            self.shared.remove(shared)
        with suppress(Exception):  # if this fails, and after an error, they are removed with the rows
            remove_files(shared, self.cluster, self.handle_frame)

    def run(self, task: Task[R]) -> RemoteResults[R]:
        """Run a task over the files; see `Dataset.run`."""
        cluster = self.cluster
        checksums = tuple(handle.checksum for handle in self.handles) if self.source.repeats_rows else ()
        call = OpenFiles(Deferred(task, cluster.carried_environment), cluster.task_cores, checksums)
        repair = functools.partial(self._repaired, call)
        return RemoteResults(cluster, self.handle_frame, OverPartition(read_results, CapturesErrors(call)), repair)

    def train(self, task: TrainingTask[R]) -> RemoteResults[R]:
        """Run a task over the files; see `StoredDataset.train`."""
        return self.run(task)

    @contextmanager
    def everywhere(self) -> Iterator[tuple[Rows, ...]]:
        """See `StoredDataset.everywhere`: the files if all workers run on one machine, else files of the session.

        For the latter, the rows are collected in this process once.
        """
        cluster = self.cluster
        if cluster.is_local:
            yield self.handles
            return
        size = sum(handle.nbytes for handle in self.handles)
        if size > self.max_result_bytes:
            raise ConfigurationError(
                f"all workers need the {size / 1e6:.0f} MB of validation_data. With Spark Connect, these pass through this "
                f"process, which is limited to {self.max_result_bytes / 1e6:.0f} MB: use validation_split=, whose rows stay "
                "on their workers, or a sample of the data."
            )
        found = iter(self.run(Collect()).collect())
        yield tuple(SharedRows(cluster.keep(next(found))) if handle.rows else handle for handle in self.handles)

    def repair(self) -> None:
        """Write lost files again."""
        self.run(Open()).collect()

    def _repaired(self, call: OpenFiles, partitions: Sequence[int]) -> list[tuple[int, Any]]:
        """Rerun partitions whose tasks did not find their files; returns ``(partition, result)`` pairs."""
        cluster = self.cluster
        results: list[tuple[int, Any]] = []
        for _ in range(REPAIRS):
            again = self.source.stored_again(self.name, partitions).persist()
            try:
                cluster.collect(again)
                for each in self.shared:
                    write_files(each, cluster, again)
                numbered = OverPartition(read_results, CapturesErrors(KeyByPartition(call)))
                found = cluster.collect(results_of(again, numbered))
            finally:
                again.unpersist()
            results += [pair for pair in found if not isinstance(pair[1], Missing)]
            partitions = [item.partition for _, item in found if isinstance(item, Missing)]
            if not partitions:
                return results
        raise ClusterError(
            f"the files of the partitions {list(partitions)} were written {REPAIRS} times, but each time their tasks ran on "
            "other machines. Executors seem to be added and removed frequently: call fit again."
        )

    @contextmanager
    def stored(self) -> Iterator[StoredDataset]:
        """This dataset."""
        yield self


@dataclass(frozen=True)
class RemoteResults(Generic[R]):
    """Results of a job over a DataFrame.

    Attributes:
        cluster: The cluster to run on.
        source: The DataFrame to run over.
        call: Yields the results of a partition of ``source``.
        repair: Returns ``(partition, result)`` pairs for partitions with missing files.
    """

    cluster: RemoteCluster
    source: DataFrame
    call: BatchCall
    repair: Callable[[Sequence[int]], list[tuple[int, Any]]] | None = None

    def collect(self) -> list[R]:
        """See `Results.collect`."""
        found = self.cluster.collect(results_of(self.source, self.call))
        return repaired(found, self.from_source)

    def of(self, partition: int) -> list[R]:
        """See `Results.of`: the tasks of other partitions end at once."""
        call = _InPartitions(self.call, frozenset([partition]))
        return repaired(self.cluster.collect(results_of(self.source, call)), self.from_source)

    def reduce(self, merging: Merging[R]) -> list[R]:
        """Merge the results on the workers, in one shuffle in which each group has one piece of all results."""
        pieces = results_of(self.source, _InPieces(self.call, merging, PIECE_BYTES), "piece")
        # A lambda, since Spark inspects the arguments and type hints of the function.
        merged = pieces.groupBy("piece").applyInArrow(lambda table: _merge_piece(merging, table), RESULT)
        found = self.cluster.collect(merged)
        return [*joined(merging, found), *repaired([item for item in found if isinstance(item, Missing)], self.from_source)]

    def from_source(self, partitions: Sequence[int]) -> dict[int, list[R]]:
        """See `Results.from_source`."""
        assert self.repair is not None
        return by_partition(self.repair(partitions), partitions)


# Functions that run on the workers


@dataclass(frozen=True)
class _InPartitions:
    """Calls a function for some partitions; the rows of others are read and ignored."""

    call: BatchCall
    partitions: frozenset[int]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[Any]:
        if task_context().worker in self.partitions:
            yield from self.call(batches)
        else:
            for _ in batches:
                pass


@dataclass(frozen=True)
class _InPieces:
    """Splits the results of a function; see `keyed_pieces`."""

    call: BatchCall
    merging: Merging[Any]
    max_bytes: int

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[Any]:
        return keyed_pieces(task_context().worker, self.call(batches), self.merging, self.max_bytes)


def _merge_piece(merging: Merging[Any], table: pa.Table) -> pa.Table:
    """Merge the pieces of one index."""
    import pyarrow as pa

    keys = zip(table.column("piece").to_pylist(), strict=True)
    keyed = zip(keys, map(pickle.loads, table.column("result").to_pylist()), strict=True)
    merged = [pickle.dumps(result, 5) for result in MergePieces(merging)(keyed)]
    return pa.table([pa.array(merged, pa.binary())], ["result"])
