"""Data in this process, without Spark: the plain twin of every other source."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Generic, TypeVar

from sparkkeras.data.block import Block
from sparkkeras.data.dataset import Shared, StoredDataset, Task, TaskContext
from sparkkeras.data.files import Handle
from sparkkeras.data.schema import label_ranges

R = TypeVar("R")


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

    def lazy(self) -> Iterator[R]:
        """The results as an iterator."""
        return iter(self.collect())


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
                results.append(list(copy(TaskContext(number), iter(() if block is None else (block,)))))
            return results

        return LocalResults(partitions)

    @contextmanager
    def stored(self) -> Iterator[StoredDataset]:
        """This dataset."""
        yield self
