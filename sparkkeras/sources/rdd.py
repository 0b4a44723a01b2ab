"""Data on Spark: how tasks run over an RDD of blocks, or what reads like one.

To train, it is written once to the machines that train (`sparkkeras.data.files`), and
what Spark keeps is a small RDD of handles: when an executor is lost, Spark computes its handles again, which writes the
files again. A task that runs where the files are not (Spark moves tasks when their executor is busy) says so, and the
driver has that partition computed from its source; the task leaves the files behind, so the next one finds them.
"""

from __future__ import annotations

import pickle
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np

from sparkkeras.data import files
from sparkkeras.data.block import Block
from sparkkeras.data.dataset import (
    Dataset,
    DriverAddress,
    FilesMissing,
    Merging,
    Piece,
    Rows,
    Running,
    Shared,
    StoredDataset,
    Task,
    TaskContext,
    joined,
)
from sparkkeras.data.files import Handle
from sparkkeras.data.sizes import PIECE_BYTES
from sparkkeras.errors import ClusterError, ConfigurationError, DataError
from sparkkeras.modeling import garbage
from sparkkeras.spark.cluster import Cluster, quietly
from sparkkeras.worker import device

if TYPE_CHECKING:
    from pyspark import RDD

R = TypeVar("R")
Call = Callable[[int, Iterable[Any]], Iterable[Any]]

SWEEP_SECONDS = 0.1
"""How long a task that removes files waits, so that each executor gets one."""


class Blocks(Protocol):
    """What tasks run over. Every partition has any number of blocks."""

    @property
    def num_partitions(self) -> int:
        """How many partitions there are."""
        ...

    def map(self, cluster: Cluster, call: Call, training: bool) -> RDD[Any]:
        """What ``call`` yields over each partition, which it is given with its number.

        Args:
            cluster: Where it runs.
            call: The function.
            training: Whether it runs in the workers that train; else in the person's.
        """
        ...


@dataclass(frozen=True)
class RddBlocks:
    """An RDD as what tasks run over."""

    rdd: RDD[Any]

    @property
    def num_partitions(self) -> int:
        """How many partitions there are."""
        return self.rdd.getNumPartitions()

    def map(self, cluster: Cluster, call: Call, training: bool) -> RDD[Any]:
        """As `Blocks.map`."""
        if not training:
            return self.rdd.mapPartitionsWithIndex(call)
        with cluster.training_workers():
            mapped: RDD[Any] = self.rdd.mapPartitionsWithIndex(call)
            _ = mapped._jrdd
        return mapped


@dataclass(frozen=True)
class SparkDataset:
    """Rows on Spark.

    Attributes:
        cluster: The cluster that they live on.
        blocks: The rows.
    """

    cluster: Cluster
    blocks: Blocks

    @property
    def num_partitions(self) -> int:
        """How many partitions there are."""
        return self.blocks.num_partitions

    @property
    def max_result_bytes(self) -> int:
        """What the results of one job may have altogether; 0 is no bound."""
        return self.cluster.max_result_bytes

    def share(self, value: R) -> Any:
        """As `Dataset.share`: a broadcast."""
        return self.cluster.share(value)

    def run(self, task: Task[R]) -> SparkResults[R]:
        """As `Dataset.run`, in one pass over the source."""
        return SparkResults(self.cluster, self.blocks, Pass(Deferred(task), self.cluster.task_cores))

    @contextmanager
    def stored(self) -> Iterator[StoredDataset]:
        """As `Dataset.stored`: one job that writes the files. They are removed when the context ends."""
        from pyspark import StorageLevel

        name = f"sparkkeras-{uuid.uuid4().hex}"
        handles = self.blocks.map(self.cluster, Store(name), training=False).persist(StorageLevel.MEMORY_AND_DISK)
        found: tuple[Handle, ...] = ()
        try:
            found = tuple(checked(self.cluster.collect(handles)))
            yield StoredSparkDataset(self.cluster, self.blocks, handles, found, name)
        finally:
            quietly(handles.unpersist)
            quietly(lambda: self._remove(name, found))

    def _remove(self, name: str, found: Sequence[Handle]) -> None:
        for folder in {Path(handle.directory).parent for handle in found if handle.directory}:
            shutil.rmtree(folder, ignore_errors=True)
        if not self.cluster.is_local or not found:
            tasks = self.cluster.slots
            self.cluster.collect(self.cluster.context.parallelize(range(tasks), tasks).mapPartitions(Sweep(name)))


def without_rows(cluster: Cluster, workers: int) -> SparkDataset:
    """A dataset that has a partition for each of so many workers and no rows, for tasks that get their work elsewhere."""
    return SparkDataset(cluster, RddBlocks(cluster.context.parallelize((), workers)))


@dataclass(frozen=True)
class StoredSparkDataset:
    """Rows on Spark that lie in files where they train; see `SparkDataset`."""

    cluster: Cluster
    blocks: Blocks
    handle_rdd: RDD[Any]
    handles: tuple[Handle, ...]
    name: str

    @property
    def num_partitions(self) -> int:
        """How many partitions there are."""
        return len(self.handles)

    @property
    def max_result_bytes(self) -> int:
        """What the results of one job may have altogether; 0 is no bound."""
        return self.cluster.max_result_bytes

    def share(self, value: R) -> Any:
        """As `Dataset.share`: a broadcast."""
        return self.cluster.share(value)

    @property
    def slots(self) -> int:
        """How many tasks can run at the same time."""
        return self.cluster.slots

    @property
    def driver(self) -> DriverAddress:
        """See `DriverDataset.driver`."""
        return self.cluster.driver

    def background(self, call: Callable[[], R]) -> Running[R]:
        """See `DriverDataset.background`."""
        return self.cluster.background(call)

    @contextmanager
    def everywhere(self) -> Iterator[tuple[Rows, ...]]:
        """See `DriverDataset.everywhere`: the files where the workers share the driver's disk, else broadcasts.

        For these the rows come to the driver once.
        """
        if self.cluster.is_local:
            yield self.handles
            return
        size = sum(handle.rows * handle.spec.row_bytes for handle in self.handles if handle.spec is not None)
        if self.max_result_bytes and size > self.max_result_bytes:
            raise ConfigurationError(
                f"{size / 1e9:.1f} GB of rows are for all workers (validation_data in the asynchronous modes and for "
                "ensembles; what members of an ensemble train on), so they go through the driver, which "
                f"spark.driver.maxResultSize limits to {self.max_result_bytes / 1e9:.1f} GB: give validation_split= or "
                'sampling="partition", whose rows are with the workers already, or a sample of the data, or raise the limit.'
            )
        found = self.run(Collect()).collect()
        with ExitStack() as stack:
            filled = iter(found)
            yield tuple(
                BroadcastRows(stack.enter_context(self.share(next(filled)))) if handle.rows else handle
                for handle in self.handles
            )

    def without_rows(self, count: int) -> Dataset:
        """See `DriverDataset.without_rows`."""
        return without_rows(self.cluster, count)

    def run(self, task: Task[R]) -> SparkResults[R]:
        """As `Dataset.run`, over the files."""
        cores = self.cluster.task_cores
        return SparkResults(
            self.cluster,
            RddBlocks(self.handle_rdd),
            OpenFiles(Deferred(task), cores),
            repair=(self.blocks, _StoreAndRun(self.name, Deferred(task), cores)),
        )

    @contextmanager
    def stored(self) -> Iterator[StoredDataset]:
        """This dataset."""
        yield self


@dataclass(frozen=True)
class BroadcastRows:
    """Rows that were broadcast."""

    shared: Shared[Block]

    def open(self) -> Block | None:
        """The rows."""
        return self.shared.value


@dataclass(frozen=True)
class Collect:
    """Yields the rows themselves, in arrays of their own."""

    def __call__(self, context: TaskContext, blocks: Iterator[Block]) -> Iterator[Block]:
        """The blocks."""
        return (Block(block.form, tuple(np.array(array) for array in block.arrays)) for block in blocks)


@dataclass(frozen=True)
class SparkResults(Generic[R]):
    """Results of a task over an RDD; ``repair`` runs a partition whose files were not found from its source."""

    cluster: Cluster
    source: Blocks
    call: Call
    repair: tuple[Blocks, Call] | None = None

    def collect(self) -> list[R]:
        """As `Results.collect`: one job, and one more if files were not where their tasks ran."""
        found = self.cluster.collect(self.source.map(self.cluster, self.call, training=True))
        repaired = self.from_source([item.partition for item in found if isinstance(item, Missing)])
        results: list[R] = []
        for item in found:
            if isinstance(item, Missing):
                results += repaired[item.partition]
            else:
                results.append(item)
        return results

    def reduce(self, merging: Merging[R]) -> list[R]:
        """Merge the results on the workers, by one shuffle in which each task receives some pieces of all results."""
        pieces = self.source.map(self.cluster, _InPieces(self.call, merging), training=True)
        with self.cluster.training_workers():
            merged = pieces.partitionBy(self.cluster.slots, _by_index).mapPartitions(_MergePieces(merging))
            _ = merged._jrdd
        found = self.cluster.collect(merged)
        missing = [item.partition for item in found if isinstance(item, Missing)]
        extra = [result for results in self.from_source(missing).values() for result in results]
        return [*joined(merging, [item for item in found if isinstance(item, Piece)]), *extra]

    def lazy(self) -> RDD[R]:
        """An RDD that computes the results in the workers that train, whatever function is mapped over it."""
        from pyspark import RDD

        rdd = self.source.map(self.cluster, self.call, training=True)
        return RDD(rdd._jrdd, rdd.ctx, rdd._jrdd_deserializer)

    def from_source(self, partitions: Sequence[int]) -> dict[int, list[R]]:
        """As `Results.from_source`: one job, which leaves the files behind where its tasks ran."""
        if not partitions:
            return {}
        if self.repair is None:
            raise ClusterError(
                "the files of the arrays are gone from Spark's temporary folder (spark.local.dir) while they were in use. "
                "Call again, and keep what cleans that folder away from it."
            )
        source, call = self.repair
        keyed = source.map(self.cluster, _Numbered(call), training=True)
        results: dict[int, list[R]] = {partition: [] for partition in partitions}
        for partition, result in self.cluster.collect(keyed, sorted(partitions)):
            results[partition].append(result)
        return results


@dataclass(frozen=True)
class Missing:
    """A task found no files where it ran."""

    partition: int


@dataclass(frozen=True)
class Problem:
    """Rows that are not what was expected, on their way to the driver."""

    message: str


def checked(found: Sequence[Handle | Problem]) -> list[Handle]:
    """The handles; what is wrong with rows is raised."""
    problems = [item for item in found if isinstance(item, Problem)]
    if problems:
        raise DataError(problems[0].message)
    return [item for item in found if isinstance(item, Handle)]


def task_context(partition: int | None = None, cores: int | None = None) -> TaskContext:
    """The Spark task that runs here; Spark says what is not given."""
    from pyspark import TaskContext as SparkTask

    task = SparkTask.get()
    if task is None:
        return TaskContext(partition or 0, cores=cores or 1)
    partition = task.partitionId() if partition is None else partition
    cores = task.cpus() if cores is None else cores
    gpus = task.resources().get("gpu")
    return TaskContext(partition, task.taskAttemptId(), cores, tuple(gpus.addresses) if gpus else ())


class Deferred(Generic[R]):
    """A task on its way: unpickled where it runs, once the process is ready for what it imports.

    Args:
        task: The task.
        environment: Environment variables that the process needs, where Spark does not give it them.
    """

    def __init__(
        self, task: Callable[[TaskContext, Iterator[Any]], Iterator[R]], environment: Mapping[str, str] | None = None
    ) -> None:
        self._task = task
        self._environment = dict(environment or {})
        self._payload = b""

    def __getstate__(self) -> tuple[bytes, dict[str, str]]:
        return pickle.dumps(self._task), self._environment

    def __setstate__(self, state: tuple[bytes, dict[str, str]]) -> None:
        self._payload, self._environment = state

    def __call__(self, context: TaskContext, blocks: Iterator[Any]) -> Iterator[R]:
        """Make this process ready, and run the task."""
        started = time.perf_counter()
        device.prepare(context.cores, context.accelerators, tuple(sorted(self._environment.items())))
        garbage.spare_survivors()
        task: Callable[[TaskContext, Iterator[Any]], Iterator[R]] = pickle.loads(self._payload)
        return task(replace(context, startup_seconds=time.perf_counter() - started), blocks)


@dataclass(frozen=True)
class Pass:
    """Run a task over blocks that stream by."""

    task: Task[Any]
    cores: int

    def __call__(self, partition: int, blocks: Iterable[Block]) -> Iterator[Any]:
        """The task's results; every block is read."""
        stream = iter(blocks)
        yield from self.task(task_context(partition, self.cores), stream)
        for _ in stream:  # a task that leaves rows unread costs Spark the worker process
            pass


@dataclass(frozen=True)
class Store:
    """Write a partition's blocks to files and yield the handle."""

    name: str

    def __call__(self, partition: int, blocks: Iterable[Block]) -> Iterator[Handle | Problem]:
        """The handle, or what is wrong with the rows."""
        stream = iter(blocks)
        try:
            yield files.write(stream, partition, files.home(self.name))
        except DataError as error:
            for _ in stream:
                pass
            yield Problem(str(error))


@dataclass(frozen=True)
class OpenFiles:
    """Run a task over a partition's files."""

    task: Task[Any]
    cores: int

    def __call__(self, partition: int, handles: Iterable[Handle]) -> Iterator[Any]:
        """The task's results, or what is missing."""
        for handle in handles:
            try:
                yield from self.task(task_context(partition, self.cores), _opened(handle))
            except FilesMissing:
                yield Missing(partition)


def _opened(handle: Handle) -> Iterator[Block]:
    try:
        block = handle.open()
    except FileNotFoundError as error:
        raise FilesMissing(str(error)) from error
    if block is not None:
        yield block


@dataclass(frozen=True)
class _StoreAndRun:
    """Write a partition's files here, then run a task over them."""

    name: str
    task: Task[Any]
    cores: int

    def __call__(self, partition: int, blocks: Iterable[Block]) -> Iterator[Any]:
        handle = files.write(blocks, partition, files.home(self.name))
        yield from OpenFiles(self.task, self.cores)(partition, iter([handle]))


@dataclass(frozen=True)
class _Numbered:
    """Pair results with their partition."""

    call: Callable[[int, Iterable[Any]], Iterable[Any]]

    def __call__(self, partition: int, rows: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        return ((partition, result) for result in self.call(partition, rows))


@dataclass(frozen=True)
class _InPieces:
    """Split results into pieces, keyed by their index, with the partition as the order in which they are merged."""

    call: Callable[[int, Iterable[Any]], Iterable[Any]]
    merging: Merging[Any]

    def __call__(self, partition: int, rows: Iterable[Any]) -> Iterator[tuple[int, tuple[int, Any]]]:
        for result in self.call(partition, rows):
            pieces = [result] if isinstance(result, Missing) else self.merging.split(result, PIECE_BYTES)
            yield from ((index, (partition, piece)) for index, piece in enumerate(pieces))


@dataclass(frozen=True)
class _MergePieces:
    """Merge the pieces of each index in the order of their partitions; pass on what is `Missing`."""

    merging: Merging[Any]

    def __call__(self, keyed: Iterable[tuple[int, tuple[int, Any]]]) -> Iterator[Piece | Missing]:
        pieces: dict[int, list[tuple[int, Any]]] = {}
        for index, (partition, piece) in keyed:
            if isinstance(piece, Missing):
                yield piece
            else:
                pieces.setdefault(index, []).append((partition, piece))
        for index, numbered in pieces.items():
            yield Piece(index, self.merging([piece for _, piece in sorted(numbered, key=lambda pair: pair[0])]))


@dataclass(frozen=True)
class Sweep:
    """Remove a dataset's files from this executor."""

    name: str

    def __call__(self, rows: Iterable[Any]) -> Iterator[Any]:
        """Remove them."""
        for _ in rows:
            pass
        time.sleep(SWEEP_SECONDS)
        shutil.rmtree(files.home(self.name), ignore_errors=True)
        return iter(())


def _by_index(index: int) -> int:
    """The partitioner of pieces: Spark takes it modulo the number of partitions."""
    return index
