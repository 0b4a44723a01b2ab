"""Data in this process, without Spark: the in-memory implementation of the dataset protocols."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread
from typing import Any, Generic, TypeVar

from sparkkeras.data.block import PIECE_BYTES, Block, concatenate_alike
from sparkkeras.data.dataset import (
    DriverAddress,
    Merging,
    Piece,
    Rows,
    Shared,
    StoredDataset,
    Task,
    TaskContext,
    TrainingTask,
    joined,
)
from sparkkeras.data.files import Handle, checksum_of, one_block
from sparkkeras.data.labels import label_ranges

R = TypeVar("R")
_attempts = itertools.count()


@dataclass(frozen=True)
class LocalShared(Generic[R]):
    """A `Shared` that holds its value itself; it is pickled with the task."""

    value: R


@dataclass(frozen=True)
class LocalResults(Generic[R]):
    """Results of tasks that run sequentially in this process."""

    partitions: Callable[[], list[list[R]]]

    def of(self, partition: int) -> list[R]:
        """The results of one partition."""
        return self.partitions()[partition]

    def collect(self) -> list[R]:
        """All results, in the order of the partitions."""
        return [result for results in self.partitions() for result in results]

    def reduce(self, merging: Merging[R]) -> list[R]:
        """Merge the results piece by piece; see `Results.reduce`."""
        results = [merging.split(result, PIECE_BYTES) for result in self.collect()]
        return joined(merging, [Piece(index, merging(pieces)) for index, pieces in enumerate(zip(*results, strict=True))])

    def from_source(self, partitions: Sequence[int]) -> dict[int, list[R]]:
        """The results of some partitions; the blocks in memory are the source."""
        results = self.partitions()
        return {partition: results[partition] for partition in partitions}


class LocalRunning(Generic[R]):
    """A call in a background thread, and its result or error."""

    def __init__(self, call: Callable[[], R], thread: type[Thread] = Thread) -> None:
        self._outcome: Future[R] = Future()
        self._call = call
        self._thread = thread(target=self._run, name="sparkkeras-background", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether the call has returned or failed."""
        return self._outcome.done()

    def result(self) -> R:
        """Wait for the call; return its result or raise its error."""
        self._thread.join()
        return self._outcome.result()

    def cancel(self) -> None:
        """Do nothing: Python threads cannot be stopped, and this one ends when its call returns."""

    def _run(self) -> None:
        try:
            self._outcome.set_result(self._call())
        except BaseException as error:
            self._outcome.set_exception(error)


@dataclass(frozen=True)
class LocalRows:
    """Rows in memory."""

    block: Block | None

    def open(self) -> Block | None:
        """The rows."""
        return self.block

    def blocks(self) -> Iterator[Block]:
        """The rows, as one block."""
        return one_block(self.block)

    to_train = blocks
    """What a task trains on."""

    def handle(self, number: int) -> Handle:
        """The metadata of the partition with this index."""
        if self.block is None or not self.block.rows:
            return Handle(number)
        labels, checksum = label_ranges(self.block), checksum_of(self.block)
        return Handle(number, "", self.block.rows, self.block.spec, labels, checksum=checksum)


@dataclass(frozen=True)
class LocalStream:
    """Batches in memory: a `BlockStream`."""

    batches: tuple[Block, ...]

    def open(self) -> Block | None:
        """All batches as one block, or ``None`` if there are none."""
        return concatenate_alike(self.batches)

    def blocks(self, epoch: int = 0, seed: int = 0) -> Generator[Block, None, None]:
        """The batches, the same in each epoch."""
        yield from self.batches

    def to_train(self) -> Iterator[LocalStream]:
        """What a task trains on: the stream."""
        return iter((self,))

    def handle(self, number: int) -> Handle:
        """The metadata of the partition with this index: the shapes and dtypes of its first batch."""
        return Handle.of_stream(number, next(self.blocks(), None))


@dataclass(frozen=True)
class LocalDataset:
    """Blocks or streams in memory, one per partition: a `StoredDataset`.

    Tasks are pickled and unpickled for every partition, as on a cluster.
    """

    blocks: tuple[Block | LocalStream | None, ...]

    max_result_bytes = 0
    """There is no limit."""

    slots = slots_per_task = 1
    """Tasks run sequentially."""

    is_driver_here = True
    """They run in this process."""

    driver = DriverAddress("127.0.0.1", "127.0.0.1", is_local=True)
    """The loopback address."""

    @property
    def num_partitions(self) -> int:
        """The number of partitions."""
        return len(self.blocks)

    @property
    def handles(self) -> tuple[Handle, ...]:
        """The metadata of each partition, in order."""
        return tuple(part.handle(number) for number, part in enumerate(self._parts))

    def background(self, call: Callable[[], R]) -> LocalRunning[R]:
        """Run a call in a background thread."""
        return LocalRunning(call)

    @contextmanager
    def everywhere(self) -> Iterator[tuple[Rows, ...]]:
        """The rows of each partition, in memory."""
        yield self._parts

    def without_rows(self, count: int) -> LocalDataset:
        """A dataset of ``count`` empty partitions."""
        return LocalDataset((None,) * count)

    @contextmanager
    def share(self, value: R) -> Iterator[Shared[R]]:
        """The value itself."""
        yield LocalShared(value)

    def run(self, task: Task[R]) -> LocalResults[R]:
        """Run a task on every partition, each time that results are requested."""
        return self._results(task, lambda part: part.blocks())

    def train(self, task: TrainingTask[R]) -> LocalResults[R]:
        """Run a task on every partition, which it receives as a block or a stream; see `run`."""
        return self._results(task, lambda part: part.to_train())

    @property
    def _parts(self) -> tuple[LocalRows | LocalStream, ...]:
        return tuple(part if isinstance(part, LocalStream) else LocalRows(part) for part in self.blocks)

    def _results(
        self,
        task: Callable[[TaskContext, Iterator[Any]], Iterator[R]],
        opened: Callable[[LocalRows | LocalStream], Iterator[Any]],
    ) -> LocalResults[R]:
        payload = pickle.dumps(task)

        def partitions() -> list[list[R]]:
            results = []
            for number, part in enumerate(self._parts):
                copy: Callable[[TaskContext, Iterator[Any]], Iterator[R]] = pickle.loads(payload)
                results.append(list(copy(TaskContext(number, next(_attempts)), opened(part))))
            return results

        return LocalResults(partitions)

    @contextmanager
    def stored(self) -> Iterator[StoredDataset]:
        """This dataset."""
        yield self
