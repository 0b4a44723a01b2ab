"""Data on Spark: how tasks run over an RDD of blocks.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from sparkkeras import device
from sparkkeras.cluster import Cluster
from sparkkeras.data import files
from sparkkeras.data.block import Block
from sparkkeras.data.dataset import StoredDataset, Task, TaskContext
from sparkkeras.data.files import Handle
from sparkkeras.errors import ClusterError, DataError

if TYPE_CHECKING:
    from pyspark import RDD

R = TypeVar("R")

SWEEP_SECONDS = 0.1
"""How long a task that removes files waits, so that each executor gets one."""


@dataclass(frozen=True)
class SparkDataset:
    """Rows on Spark, as an RDD of blocks.

    Attributes:
        cluster: The cluster that they live on.
        blocks: The blocks; every partition has any number of them.
    """

    cluster: Cluster
    blocks: RDD[Block]

    @property
    def num_partitions(self) -> int:
        """How many partitions there are."""
        return self.blocks.getNumPartitions()

    @property
    def max_result_bytes(self) -> int:
        """What the results of one job may have altogether; 0 is no bound."""
        return self.cluster.max_result_bytes

    def share(self, value: R) -> Any:
        """As `Dataset.share`: a broadcast."""
        return self.cluster.share(value)

    def run(self, task: Task[R]) -> SparkResults[R]:
        """As `Dataset.run`, in one pass over the source."""
        return SparkResults(self.cluster, self.blocks, _Pass(Deferred(task), self.cluster.task_cores))

    @contextmanager
    def stored(self) -> Iterator[StoredDataset]:
        """As `Dataset.stored`: one job that writes the files. They are removed when the context ends."""
        from pyspark import StorageLevel

        name = f"sparkkeras-{uuid.uuid4().hex}"
        handles = self.blocks.mapPartitionsWithIndex(_Store(name)).persist(StorageLevel.MEMORY_AND_DISK)
        found: tuple[Handle, ...] = ()
        try:
            found = tuple(_checked(self.cluster.collect(handles)))
            yield StoredSparkDataset(self.cluster, self.blocks, handles, found, name)
        finally:
            with suppress(Exception):  # Spark may be gone, and its temporary folders with it
                self._remove(name, found)
                handles.unpersist()

    def _remove(self, name: str, found: Sequence[Handle]) -> None:
        for folder in {Path(handle.directory).parent for handle in found if handle.directory}:
            shutil.rmtree(folder, ignore_errors=True)
        if not self.cluster.is_local or not found:
            tasks = self.cluster.slots
            self.cluster.collect(self.cluster.context.parallelize(range(tasks), tasks).mapPartitions(_Sweep(name)))


@dataclass(frozen=True)
class StoredSparkDataset:
    """Rows on Spark that lie in files where they train; see `SparkDataset`."""

    cluster: Cluster
    blocks: RDD[Block]
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

    def run(self, task: Task[R]) -> SparkResults[R]:
        """As `Dataset.run`, over the files."""
        cores = self.cluster.task_cores
        return SparkResults(
            self.cluster,
            self.handle_rdd,
            OpenFiles(Deferred(task), cores),
            repair=(self.blocks, _StoreAndRun(self.name, Deferred(task), cores)),
        )

    @contextmanager
    def stored(self) -> Iterator[StoredDataset]:
        """This dataset."""
        yield self


@dataclass(frozen=True)
class SparkResults(Generic[R]):
    """Results of a task over an RDD; ``repair`` runs a partition whose files were not found from its source."""

    cluster: Cluster
    source: RDD[Any]
    call: Callable[[int, Iterable[Any]], Iterable[Any]]
    repair: tuple[RDD[Any], Callable[[int, Iterable[Any]], Iterable[Any]]] | None = None

    def collect(self) -> list[R]:
        """As `Results.collect`: one job, and one more if files were not where their tasks ran."""
        found = self.cluster.collect(self._on_workers(self.source, self.call))
        repaired = self._repaired([item.partition for item in found if isinstance(item, Missing)])
        results: list[R] = []
        for item in found:
            if isinstance(item, Missing):
                results += repaired[item.partition]
            else:
                results.append(item)
        return results

    def reduce(self, combine: Callable[[Sequence[Any]], Any], groups: int) -> list[Any]:
        """As `Results.reduce`: one shuffle to ``groups`` tasks, each of which combines its results in their order."""
        size = -(-self.source.getNumPartitions() // groups)
        with self.cluster.training_workers():
            keyed = self.source.mapPartitionsWithIndex(_Keyed(self.call, size))
            reduced = keyed.partitionBy(groups, by_key).mapPartitions(_Combine(combine))
            _ = reduced._jrdd
        found = self.cluster.collect(reduced)
        missing = [item.partition for item in found if isinstance(item, Missing)]
        extra = [result for results in self._repaired(missing).values() for result in results]
        done = [item for item in found if not isinstance(item, Missing)]
        return [*done, combine(extra)] if extra else done

    def lazy(self) -> RDD[R]:
        """As `Results.lazy`: an RDD that computes the results in the workers that train, whatever is mapped onto it."""
        from pyspark import RDD

        rdd = self._on_workers(self.source, self.call)
        return RDD(rdd._jrdd, rdd.ctx, rdd._jrdd_deserializer)

    def _on_workers(self, source: RDD[Any], call: Callable[[int, Iterable[Any]], Iterable[Any]]) -> RDD[Any]:
        with self.cluster.training_workers():
            rdd: RDD[Any] = source.mapPartitionsWithIndex(call)
            _ = rdd._jrdd
        return rdd

    def _repaired(self, missing: list[int]) -> dict[int, list[R]]:
        if not missing:
            return {}
        if self.repair is None:
            raise ClusterError(
                "the files of the arrays are gone from Spark's temporary folder (spark.local.dir) while they were in use. "
                "Call again, and keep what cleans that folder away from it."
            )
        source, call = self.repair
        keyed = self._on_workers(source, _Numbered(call))
        results: dict[int, list[R]] = {partition: [] for partition in missing}
        for partition, result in self.cluster.collect(keyed, sorted(missing)):
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


def _checked(found: Sequence[Handle | Problem]) -> list[Handle]:
    problems = [item for item in found if isinstance(item, Problem)]
    if problems:
        raise DataError(problems[0].message)
    return [item for item in found if isinstance(item, Handle)]


def _context(partition: int, cores: int) -> TaskContext:
    from pyspark import TaskContext as SparkTask

    task = SparkTask.get()
    if task is None:
        return TaskContext(partition, cores=cores)
    gpus = task.resources().get("gpu")
    return TaskContext(partition, task.attemptNumber(), cores, tuple(gpus.addresses) if gpus else ())


class Deferred(Generic[R]):
    """A task on its way: unpickled where it runs, once the process is ready for what it imports."""

    def __init__(self, task: Task[R]) -> None:
        self._task = task
        self._payload = b""

    def __getstate__(self) -> bytes:
        return pickle.dumps(self._task)

    def __setstate__(self, payload: bytes) -> None:
        self._payload = payload

    def __call__(self, context: TaskContext, blocks: Iterator[Block]) -> Iterator[R]:
        """Make this process ready, and run the task."""
        device.prepare(context.cores, context.accelerators)
        task: Task[R] = pickle.loads(self._payload)
        return task(context, blocks)


@dataclass(frozen=True)
class _Pass:
    """Run a task over blocks that stream by."""

    task: Task[Any]
    cores: int

    def __call__(self, partition: int, blocks: Iterable[Block]) -> Iterator[Any]:
        stream = iter(blocks)
        yield from self.task(_context(partition, self.cores), stream)
        for _ in stream:  # a task that leaves rows unread costs Spark the worker process
            pass


@dataclass(frozen=True)
class _Store:
    """Write a partition's blocks to files and yield the handle."""

    name: str

    def __call__(self, partition: int, blocks: Iterable[Block]) -> Iterator[Handle | Problem]:
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
                block = handle.open()
            except FileNotFoundError:
                yield Missing(partition)
                continue
            yield from self.task(_context(partition, self.cores), iter(() if block is None else (block,)))


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
class _Keyed:
    """Key results by their group, with the partition to sort them by."""

    call: Callable[[int, Iterable[Any]], Iterable[Any]]
    size: int

    def __call__(self, partition: int, rows: Iterable[Any]) -> Iterator[tuple[int, tuple[int, Any]]]:
        return ((partition // self.size, (partition, result)) for result in self.call(partition, rows))


@dataclass(frozen=True)
class _Combine:
    """Combine the results of a group in the order of their partitions; pass on what is missing."""

    combine: Callable[[Sequence[Any]], Any]

    def __call__(self, keyed: Iterable[tuple[int, tuple[int, Any]]]) -> Iterator[Any]:
        numbered = sorted((value for _, value in keyed), key=lambda pair: pair[0])
        yield from (result for _, result in numbered if isinstance(result, Missing))
        results = [result for _, result in numbered if not isinstance(result, Missing)]
        if results:
            yield self.combine(results)


@dataclass(frozen=True)
class _Sweep:
    """Remove a dataset's files from this executor."""

    name: str

    def __call__(self, rows: Iterable[Any]) -> Iterator[Any]:
        """Remove them."""
        for _ in rows:
            pass
        time.sleep(SWEEP_SECONDS)
        shutil.rmtree(files.home(self.name), ignore_errors=True)
        return iter(())


def by_key(key: int) -> int:
    """A partitioner for keys that are partition numbers."""
    return key
