"""Data behind Spark Connect: tasks as jobs over DataFrames, since there are no RDDs.

The rows of a DataFrame are written to the machines that train as elsewhere (`sparkkeras.sources.rdd`), and what Spark keeps
is a small DataFrame of handles. What tasks share travels in their functions, or, where it is larger than those may be, in
files beside the rows (`sparkkeras.sources.connect_values`). Large results are combined on the cluster piece by piece.
"""

from __future__ import annotations

import functools
import itertools
import pickle
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from sparkkeras.data.block import Block
from sparkkeras.data.columns import Leaf, to_column
from sparkkeras.data.dataset import Merging, Piece, Shared, StoredDataset, Task, joined
from sparkkeras.data.files import Handle
from sparkkeras.data.local import LocalShared
from sparkkeras.data.schema import Reader
from sparkkeras.data.sizes import PIECE_BYTES
from sparkkeras.errors import ClusterError
from sparkkeras.sources.arrays import even_slices
from sparkkeras.sources.connect_values import Pickled, StoredShared, remove_files, write_files
from sparkkeras.sources.frame import BatchesToBlocks, Selection
from sparkkeras.sources.rdd import Deferred, Missing, OpenFiles, Pass, Store, Sweep, checked
from sparkkeras.spark.connect import (
    CELL_BYTES,
    INLINE_BYTES,
    RESULT,
    CapturesErrors,
    Failure,
    RemoteCluster,
    pack_cells,
    unpack_cells,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

R = TypeVar("R")


NO_DRIVER = (
    "asynchronous and hogwild training need a driver that executors can dial, and Spark Connect has none: use "
    'mode="synchronous", or run the script on the cluster itself (spark-submit).'
)

NO_COMMON_ROWS = (
    "rows that all workers read go through the driver, and Spark Connect has none: give validation_split= instead of "
    'validation_data=, train an ensemble with sampling="partition", or run the script on the cluster itself (spark-submit).'
)

PLAN_CACHE = "spark.connect.session.planCache.enabled"
"""Off while rows are stored: the server would keep the last plans, and the values of many rounds with them."""

SWEEP_ROWS = 4096
REPAIRS = 3


@dataclass(frozen=True)
class RemoteDataset:
    """The rows of a DataFrame behind Connect.

    Attributes:
        cluster: The session that it lives in.
        frame: The columns that matter.
        read: How they become blocks.
    """

    cluster: RemoteCluster
    frame: DataFrame
    read: BatchesToBlocks

    @classmethod
    def of(cls, cluster: RemoteCluster, block: Block, reader: Reader, num_workers: int | None) -> RemoteDataset:
        """Arrays of this process, sent there; in their order, cut into even slices."""
        import pyarrow as pa

        names = [f"c{number}" for number in range(len(block.arrays))]
        read = BatchesToBlocks(Selection(block.form, tuple(Leaf((name,), fits=False) for name in names)), reader)
        session = cluster.session
        if not block.rows:  # Spark makes no DataFrame of a table without rows
            return cls(cluster, session.range(0), read)
        table = pa.table([to_column(array) for array in block.arrays], names)
        if num_workers is None:
            return cls(cluster, session.createDataFrame(table), read)
        sizes = [part.stop - part.start for part in even_slices(block.rows, min(num_workers, block.rows))]
        table = table.append_column("worker", pa.array(np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)))
        table = table.append_column("row", pa.array(np.arange(block.rows)))
        # A union of slices will not do: Spark makes one partition of frames that have one each.
        frame = session.createDataFrame(table).repartitionById(len(sizes), "worker").sortWithinPartitions("row")
        return cls(cluster, frame.select(*names), read)

    @property
    def max_result_bytes(self) -> int:
        """What the results of one job may have altogether."""
        return self.cluster.max_result_bytes

    def share(self, value: R) -> AbstractContextManager[Shared[R]]:
        """As `Dataset.share`; what is large is a file of the session."""
        return nullcontext(self.cluster.keep(value))

    def run(self, task: Task[R]) -> RemoteResults[R]:
        """As `Dataset.run`, in one pass over the rows."""
        call = Pass(Deferred(task, self.cluster.carried_environment), self.cluster.task_cores)
        return RemoteResults(self.cluster, self.frame, OverBlocks(self.read, CapturesErrors(call)))

    @contextmanager
    def stored(self) -> Iterator[StoredDataset]:
        """As `Dataset.stored`: one job that writes the files. They are removed when the context ends."""
        name = f"sparkkeras-{uuid.uuid4().hex}"
        session = self.cluster.session
        before = session.conf.get(PLAN_CACHE, "true") or "true"
        with suppress(Exception):  # a server may not let everybody set it
            session.conf.set(PLAN_CACHE, "false")
        handles = self.stored_again(name, None).persist()
        found: tuple[Handle, ...] = ()
        try:
            found = tuple(checked(self.cluster.collect(handles)))
            yield StoredRemoteDataset(self, handles, found, name)
        finally:
            with suppress(Exception):  # the server may be gone
                handles.unpersist()  # the first to ask: a server that is gone is waited for once
                # As many tasks as there are slots, since nobody says how many parts there shall be.
                _results(session.range(SWEEP_ROWS), Sweep(name)).collect()
                session.conf.set(PLAN_CACHE, before)

    def stored_again(self, name: str, partitions: Sequence[int] | None) -> DataFrame:
        """The handles of some partitions, or of all; their files are written where they are computed."""
        wanted = None if partitions is None else frozenset(partitions)
        return _results(self.frame, OverBlocks(self.read, CapturesErrors(_Only(Store(name), wanted))))


@dataclass(frozen=True)
class StoredRemoteDataset:
    """Rows that lie in files where they train; see `RemoteDataset`."""

    source: RemoteDataset
    handle_frame: DataFrame
    handles: tuple[Handle, ...]
    name: str

    @property
    def num_partitions(self) -> int:
        """The number of partitions."""
        return len(self.handles)

    @property
    def max_result_bytes(self) -> int:
        """What the results of one job may have altogether."""
        return self.source.max_result_bytes

    @contextmanager
    def share(self, value: R) -> Iterator[Shared[R]]:
        """As `Dataset.share`; what is large lies in files beside the rows until the context ends."""
        pickled = Pickled.of(value)
        if pickled.nbytes <= INLINE_BYTES:
            yield LocalShared(value)
            return
        shared: StoredShared[R] = StoredShared.of(pickled, self.name)
        write_files(shared, self.source.cluster, self.handle_frame)
        yield shared
        with suppress(Exception):  # after an error, and where this fails, they go with the rows
            remove_files(shared, self.source.cluster, self.handle_frame)

    def run(self, task: Task[R]) -> RemoteResults[R]:
        """As `Dataset.run`, over the files."""
        cluster = self.source.cluster
        call = CapturesErrors(OpenFiles(Deferred(task, cluster.carried_environment), cluster.task_cores))
        fields = itertools.chain.from_iterable(each if isinstance(each, tuple) else (each,) for each in vars(task).values())
        shared = [value for value in fields if isinstance(value, StoredShared)]
        repair = functools.partial(self._repaired, call, shared)
        return RemoteResults(cluster, self.handle_frame, OverHandles(call), repair)

    def _repaired(
        self, call: CapturesErrors, shared: Sequence[StoredShared[Any]], partitions: Sequence[int]
    ) -> list[tuple[int, Any]]:
        """Results of partitions whose files were not found where their tasks ran, with their numbers."""
        cluster = self.source.cluster
        results: list[tuple[int, Any]] = []
        for _ in range(REPAIRS):
            again = self.source.stored_again(self.name, partitions).persist()
            try:
                checked(cluster.collect(again))
                for each in shared:
                    write_files(each, cluster, again)
                found = cluster.collect(_results(again, OverHandles(Numbered(call))))
            finally:
                again.unpersist()
            results += [pair for pair in found if not isinstance(pair[1], Missing)]
            partitions = [item.partition for _, item in found if isinstance(item, Missing)]
            if not partitions:
                return results
        raise ClusterError(
            f"the files of the partitions {list(partitions)} were written {REPAIRS} times, and were never where their tasks "
            "ran: executors seem to come and go. Call fit again."
        )

    @contextmanager
    def stored(self) -> Iterator[StoredDataset]:
        """This dataset."""
        yield self


@dataclass(frozen=True)
class RemoteResults(Generic[R]):
    """Results of a job over a DataFrame.

    Attributes:
        cluster: Where it runs.
        source: What it runs over.
        call: Gives the results of a partition of that.
        repair: Gives the numbered results of partitions whose files were missing.
    """

    cluster: RemoteCluster
    source: DataFrame
    call: Callable[[Iterator[pa.RecordBatch]], Iterator[Any]]
    repair: Callable[[Sequence[int]], list[tuple[int, Any]]] | None = None

    def collect(self) -> list[R]:
        """As `Results.collect`."""
        found = self.cluster.collect(_results(self.source, self.call))
        repaired = self.from_source([item.partition for item in found if isinstance(item, Missing)])
        results: list[R] = []
        for item in found:
            if isinstance(item, Missing):
                results += repaired[item.partition]
            else:
                results.append(item)
        return results

    def reduce(self, merging: Merging[R]) -> list[R]:
        """Merge the results on the workers, by one shuffle in which each group has one piece of all results."""
        pieces = self.source.mapInArrow(InPieces(self.call, merging, PIECE_BYTES), "piece int, place bigint, result binary")
        # A lambda: Spark looks at the arguments and hints of a function's own code.
        merged = pieces.groupBy("piece").applyInArrow(lambda table: _merge_piece(merging, table), RESULT)
        found = self.cluster.collect(merged)
        missing = [item.partition for item in found if isinstance(item, Missing)]
        extra = [result for results in self.from_source(missing).values() for result in results]
        return [*joined(merging, [item for item in found if isinstance(item, Piece)]), *extra]

    def from_source(self, partitions: Sequence[int]) -> dict[int, list[R]]:
        """As `Results.from_source`."""
        results: dict[int, list[R]] = {partition: [] for partition in partitions}
        if partitions:
            assert self.repair is not None
            for partition, result in self.repair(partitions):
                results[partition].append(result)
        return results


def _results(frame: DataFrame, call: Callable[[Iterator[pa.RecordBatch]], Iterator[Any]]) -> DataFrame:
    """What a function yields over each partition of a frame, pickled."""
    return frame.mapInArrow(PicklesResults(call, CELL_BYTES), RESULT)


# What runs on the workers


@dataclass(frozen=True)
class OverBlocks:
    """Gives what a function yields over the blocks of a partition."""

    read: BatchesToBlocks
    call: Callable[[int, Iterable[Block]], Iterable[Any]]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[Any]:
        """The results."""
        partition = _partition()
        yield from self.call(partition, self.read(partition, batches))


@dataclass(frozen=True)
class OverHandles:
    """Gives what a function yields over the handles of a partition."""

    call: Callable[[int, Iterable[Handle]], Iterable[Any]]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[Any]:
        """The results."""
        for handle in unpack_cells(cell for batch in batches for cell in batch.column("result").to_pylist()):
            yield from self.call(handle.partition, iter([handle]))


@dataclass(frozen=True)
class PicklesResults:
    """Writes results, pickled, to the rows of a frame."""

    call: Callable[[Iterator[pa.RecordBatch]], Iterator[Any]]
    most: int

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The rows, one batch each."""
        import pyarrow as pa

        for result in self.call(batches):
            for cell in pack_cells(result, self.most):
                yield pa.record_batch([pa.array([cell], pa.binary())], ["result"])


@dataclass(frozen=True)
class Numbered:
    """Pairs results with their partition."""

    call: Callable[[int, Iterable[Any]], Iterable[Any]]

    def __call__(self, partition: int, rows: Iterable[Any]) -> Iterator[Any]:
        """The pairs; what ends a task is passed on."""
        for result in self.call(partition, rows):
            yield result if isinstance(result, Failure) else (partition, result)


@dataclass(frozen=True)
class _Only:
    """Calls a function for some partitions; the rows of others are read past."""

    call: Callable[[int, Iterable[Block]], Iterable[Any]]
    partitions: frozenset[int] | None

    def __call__(self, partition: int, blocks: Iterable[Block]) -> Iterator[Any]:
        if self.partitions is None or partition in self.partitions:
            yield from self.call(partition, blocks)
        else:
            for _ in blocks:
                pass


_WHOLE = -1
"""Stands for what is no piece: that something is missing, or has failed."""


@dataclass(frozen=True)
class InPieces:
    """Cuts results where they are made, and writes the pieces to the rows of a frame.

    ``place`` has them combined in the order of the partitions.
    """

    call: Callable[[Iterator[pa.RecordBatch]], Iterator[Any]]
    merging: Merging[Any]
    most: int

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The rows, one batch each."""
        import pyarrow as pa

        place = pa.array([_partition()])
        for result in self.call(batches):
            whole = isinstance(result, (Missing, Failure))
            pieces = [result] if whole else self.merging.split(result, self.most)
            for number, piece in enumerate(pieces, _WHOLE if whole else 0):
                cell = pa.array([pickle.dumps(piece, 5)], pa.binary())
                yield pa.record_batch([pa.array([number], pa.int32()), place, cell], ["piece", "place", "result"])


def _partition() -> int:
    """The number of the partition that the task in this process is for."""
    from pyspark import TaskContext

    task = TaskContext.get()
    return 0 if task is None else task.partitionId()


def _merge_piece(merging: Merging[Any], table: pa.Table) -> pa.Table:
    """Merge the pieces of one index, in the order of their partitions."""
    import pyarrow as pa

    index = table.column("piece")[0].as_py()
    rows = zip(table.column("place").to_pylist(), table.column("result").to_pylist(), strict=True)
    found = [pickle.loads(packed) for _, packed in sorted(rows, key=lambda row: row[0])]
    results = found if index == _WHOLE else [Piece(index, merging(found))]
    return pa.table([pa.array([pickle.dumps(result, 5) for result in results], pa.binary())], ["result"])
