"""Data in this process, without Spark: the plain twin of every other source."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from threading import Thread
from typing import Any, Generic, TypeVar

from sparkkeras.data.block import Block
from sparkkeras.data.dataset import DriverAddress, Rows, Shared, StoredDataset, Task, TaskContext
from sparkkeras.data.files import Handle
from sparkkeras.data.schema import label_ranges

R = TypeVar("R")
_attempts = itertools.count()


@dataclass(frozen=True)
class LocalShared(Generic[R]):
    """A value that is there already."""

    value: R


@dataclass(frozen=True)
class LocalResults(Generic[R]):
    """Results of tasks that run one after the other, here."""

    partitions: Callable[[], list[list[R]]]

    def collect(self) -> list[R]:
        """All results, in the order of the partitions."""
        return [result for results in self.partitions() for result in results]

    def reduce(self, combine: Callable[[Sequence[Any]], Any], groups: int) -> list[Any]:
        """As `Results.reduce`."""
        partitions = self.partitions()
        size = -(-len(partitions) // groups)
        members = [list(chain(*partitions[start : start + size])) for start in range(0, len(partitions), size)]
        return [combine(results) for results in members if results]

    def from_source(self, partitions: Sequence[int]) -> dict[int, list[R]]:
        """As `Results.from_source`."""
        results = self.partitions()
        return {partition: results[partition] for partition in partitions}

    def lazy(self) -> Iterator[R]:
        """The results as an iterator."""
        return iter(self.collect())


class LocalRunning(Generic[R]):
    """A thread, and what came of it."""

    def __init__(self, call: Callable[[], R], thread: type[Thread] = Thread) -> None:
        self._outcome: Future[R] = Future()
        self._call = call
        self._thread = thread(target=self._run, name="sparkkeras-background", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """As `Running.done`."""
        return self._outcome.done()

    def result(self) -> R:
        """As `Running.result`."""
        self._thread.join()
        return self._outcome.result()

    def cancel(self) -> None:
        """Threads cannot be ended; this one ends by itself."""

    def _run(self) -> None:
        try:
            self._outcome.set_result(self._call())
        except BaseException as error:
            self._outcome.set_exception(error)


@dataclass(frozen=True)
class LocalRows:
    """Rows that are there already."""

    block: Block | None

    def open(self) -> Block | None:
        """The rows."""
        return self.block


@dataclass(frozen=True)
class LocalDataset:
    """Blocks in memory, one for each partition. It is a stored dataset from the start.

    Tasks are pickled on their way, as they would be on a cluster.
    """

    blocks: tuple[Block | None, ...]

    @property
    def num_partitions(self) -> int:
        """How many partitions there are."""
        return len(self.blocks)

    @property
    def max_result_bytes(self) -> int:
        """There is no bound."""
        return 0

    @property
    def handles(self) -> tuple[Handle, ...]:
        """What is known of each partition."""
        return tuple(
            Handle(number, "", 0, None)
            if block is None or block.rows == 0
            else Handle(number, "", block.rows, block.spec, label_ranges(block))
            for number, block in enumerate(self.blocks)
        )

    @property
    def slots(self) -> int:
        """Tasks run one after the other."""
        return 1

    @property
    def driver(self) -> DriverAddress:
        """This process."""
        return DriverAddress("127.0.0.1", "127.0.0.1", is_local=True)

    def background(self, call: Callable[[], R]) -> LocalRunning[R]:
        """As `StoredDataset.background`."""
        return LocalRunning(call)

    @contextmanager
    def everywhere(self) -> Iterator[tuple[Rows, ...]]:
        """As `StoredDataset.everywhere`."""
        yield tuple(LocalRows(block) for block in self.blocks)

    def without_rows(self, count: int) -> LocalDataset:
        """As `StoredDataset.without_rows`."""
        return LocalDataset((None,) * count)

    @contextmanager
    def share(self, value: R) -> Iterator[Shared[R]]:
        """The value itself."""
        yield LocalShared(value)

    def run(self, task: Task[R]) -> LocalResults[R]:
        """Results that are computed when asked for."""
        payload = pickle.dumps(task)

        def partitions() -> list[list[R]]:
            results = []
            for number, block in enumerate(self.blocks):
                copy: Task[R] = pickle.loads(payload)
                context = TaskContext(number, next(_attempts))
                results.append(list(copy(context, iter(() if block is None else (block,)))))
            return results

        return LocalResults(partitions)

    @contextmanager
    def stored(self) -> Iterator[StoredDataset]:
        """This dataset."""
        yield self
