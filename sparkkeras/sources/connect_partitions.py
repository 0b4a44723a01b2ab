"""Values in partitions on Spark Connect: functions run as jobs over DataFrames, since Spark Connect has no RDDs.

As on classic Spark (`sparkkeras.sources.partitions`), tasks write the rows of a DataFrame to files on the workers, and
Spark only keeps a small DataFrame of handles. Small shared values are part of the task's function; larger ones are written
to files beside the rows (`sparkkeras.sources.connect_values`). Large results are merged on the cluster piece by piece.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from sparkkeras.data.block import PIECE_BYTES, Block
from sparkkeras.data.columns import Leaf, to_column
from sparkkeras.data.dataset import Merging, Shared
from sparkkeras.data.files import Handle
from sparkkeras.data.local_dataset import LocalShared
from sparkkeras.data.reader import Reader
from sparkkeras.data.values import Pickled
from sparkkeras.errors import ClusterError
from sparkkeras.sources.connect_values import StoredShared, remove_files, write_files
from sparkkeras.sources.frame import Selection
from sparkkeras.sources.frame_blocks import FramePartitions, Read, read_results, results_of
from sparkkeras.sources.partitions import Partitions
from sparkkeras.sources.tasks import (
    Call,
    KeyByPartition,
    KeyedPieces,
    MergePieces,
    Missing,
    OpenFiles,
    StoreRows,
    Sweep,
    WithoutRows,
)
from sparkkeras.spark.connect import INLINE_BYTES, RESULT, AnyCluster, CapturesErrors, RemoteCluster
from sparkkeras.weights import Array

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

R = TypeVar("R")

SWEEP_ROWS = 4096
REPAIRS = 3


@dataclass(frozen=True)
class ConnectPartitions:
    """What is read of the partitions of a DataFrame on Spark Connect.

    Attributes:
        cluster: The cluster of its session.
        frame: The DataFrame.
        read: Reads the Arrow batches of a partition.
    """

    cluster: RemoteCluster
    frame: DataFrame
    read: Read

    @classmethod
    def of(
        cls, cluster: RemoteCluster, block: Block, reader: Reader, parts: Sequence[slice | Array] | None
    ) -> ConnectPartitions:
        """Send arrays of this process to the cluster.

        Args:
            cluster: The cluster.
            block: The arrays.
            reader: Reads and checks the rows on the workers.
            parts: The rows of each partition, in ascending order; ``None``: Spark divides them.
        """
        import pyarrow as pa

        names = [f"c{number}" for number in range(len(block.arrays))]
        read = Selection(reader, block.form, tuple(Leaf((name,), fits=False) for name in names))
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

    @property
    def default_parts(self) -> int:
        """The number of partitions to which rows are moved by default: as many as Spark has slots."""
        return self.cluster.slots

    def run(self, call: Call, partitions: Sequence[int] | None = None) -> list[Any]:
        """See `Partitions.run`: tasks of other partitions end at once."""
        options = self.cluster.task_options
        return self.cluster.collect(results_of(self.frame, self.read, CapturesErrors(call), partitions, **options))

    def reduce(self, call: Call, merging: Merging[Any]) -> list[Any]:
        """See `Partitions.reduce`: each group of the shuffle has one piece of all results."""
        keyed = KeyedPieces(CapturesErrors(call), merging, PIECE_BYTES)
        pieces = results_of(self.frame, self.read, keyed, keys=("piece",), **self.cluster.task_options)
        # A lambda, since Spark inspects the arguments and type hints of the function.
        return self.cluster.collect(pieces.groupBy("piece").applyInArrow(lambda table: _merge_piece(merging, table), RESULT))

    def moved(self, call: Call, parts: int, keys: int) -> ConnectPartitions:
        """See `Partitions.moved`."""
        part, *order = names = tuple(f"key{number}" for number in range(keys))
        frame = results_of(self.frame, self.read, call, keys=names).repartitionById(parts, part)
        return ConnectPartitions(self.cluster, frame.sortWithinPartitions(*order) if order else frame, read_results)

    def run_ranks(self, call: Call, together: bool) -> list[Any]:
        """See `RddPartitions.run_ranks`."""
        return self.cluster.collect(results_of(self.frame, self.read, call, barrier=together, **self.cluster.task_options))

    def share(self, value: R) -> AbstractContextManager[Shared[R]]:
        """See `RemoteCluster.share`."""
        return self.cluster.share(value)

    @contextmanager
    def stored(self, name: str) -> Iterator[StoredConnectPartitions]:
        """See `Partitions.stored`."""
        handles: DataFrame | None = None
        try:
            handles = self.handles_again(name, None).persist()
            found = tuple(self.cluster.collect(handles))
            yield StoredConnectPartitions(self.cluster, handles, read_results, self, found, name)
        finally:
            if handles is not None:
                self._remove(name, handles)

    def _remove(self, name: str, handles: DataFrame) -> None:
        try:
            handles.unpersist()
        except Exception:
            self.cluster.is_lost = True
            return
        with suppress(Exception):  # its tasks may fail
            # Spark creates as many tasks as slots, since no number of partitions is set.
            self.cluster.session.range(SWEEP_ROWS).mapInArrow(WithoutRows(Sweep(name)), RESULT).collect()

    def handles_again(self, name: str, partitions: Sequence[int] | None) -> DataFrame:
        """The handles of some partitions, or of all (``None``); computing a handle writes the files of its partition."""
        return results_of(self.frame, self.read, CapturesErrors(StoreRows(name)), partitions)


@dataclass(frozen=True)
class StoredConnectPartitions(ConnectPartitions):
    """The handles of files on the workers, in a DataFrame whose rows are on the workers that have the files.

    Attributes:
        source: The rows.
        handles: The handles, on the driver.
        name: The name of the files.
        shared: The values that are currently shared through files.
    """

    source: ConnectPartitions
    handles: tuple[Handle, ...]
    name: str
    shared: list[StoredShared[Any]] = field(default_factory=list)

    @contextmanager
    def share(self, value: R) -> Iterator[Shared[R]]:
        """See `Partitions.share`; large values are written to files beside the rows."""
        pickled = Pickled.of(value)
        if pickled.nbytes <= INLINE_BYTES:
            yield LocalShared(value)
            return
        shared: StoredShared[R] = StoredShared.of(pickled, self.name)
        write_files(shared, self.cluster, self.frame)
        self.shared.append(shared)
        try:
            yield shared
        finally:
            self.shared.remove(shared)
        with suppress(Exception):  # if this fails, and after an error, they are removed with the rows
            remove_files(shared, self.cluster, self.frame)

    def run_again(self, call: OpenFiles, partitions: Sequence[int]) -> list[tuple[int, Any]]:
        """See `StoredPartitions.run_again`."""
        cluster = self.cluster
        results: list[tuple[int, Any]] = []
        for _ in range(REPAIRS):
            again = self.source.handles_again(self.name, partitions).persist()
            try:
                cluster.collect(again)
                for each in self.shared:
                    write_files(each, cluster, again)
                found = ConnectPartitions(cluster, again, read_results).run(KeyByPartition(call))
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
    def in_place(self, ranks: int) -> Iterator[StoredConnectPartitions]:
        """See `StoredPartitions.in_place`: these, one for each rank."""
        assert ranks == len(self.handles), "rows do not move to other workers"
        yield self


def of_frame(cluster: AnyCluster, frame: DataFrame, read: Selection) -> Partitions:
    """What is read of the partitions of a DataFrame."""
    if isinstance(cluster, RemoteCluster):
        return ConnectPartitions(cluster, frame, read)
    return FramePartitions(cluster, frame, read)


# Functions that run on the workers


def value_of(values: Sequence[Any], partition: int, batches: Iterable[pa.RecordBatch]) -> Iterator[Any]:
    """The value of a partition, whatever its batches are."""
    for _ in batches:
        pass
    yield from values[partition : partition + 1]


def _merge_piece(merging: Merging[Any], table: pa.Table) -> pa.Table:
    """Merge the pieces of one index."""
    import pyarrow as pa

    keys = zip(table.column("piece").to_pylist(), strict=True)
    keyed = zip(keys, map(pickle.loads, table.column("result").to_pylist()), strict=True)
    merged = [pickle.dumps(result, 5) for result in MergePieces(merging)(keyed)]
    return pa.table([pa.array(merged, pa.binary())], ["result"])
