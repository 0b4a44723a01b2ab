"""What a function of a user sees in the process of its rank: `context`."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sparkkeras.arguments import integer, optional_integer
from sparkkeras.checkpoints import values
from sparkkeras.data.block import Block, describe
from sparkkeras.errors import ClusterError, ConfigurationError
from sparkkeras.runner.exchanges import ALL_REDUCE, BARRIER, BROADCAST, Kind, named_dtype
from sparkkeras.runner.service import RankClient, check_size, pack
from sparkkeras.weights import Array

if TYPE_CHECKING:
    import keras


class Saved(NamedTuple):
    """What rank 0 has saved in an epoch.

    Attributes:
        epoch: The number of the epoch.
        state: Arrays, numbers and strings by name.
    """

    epoch: int
    state: dict[str, Any]


@dataclass
class RankContext:
    """The rank of this process, the other ranks, and the rows of this rank.

    Attributes:
        rank: The rank, from 0.
        world_size: The number of ranks.
        local_rank: The number of lower ranks on the same machine.
        cores: The number of CPU cores for this process.
        accelerators: The addresses of its GPUs.
        addresses: The address of each rank, ``host:port``, at a port that is reserved for its process; empty with
            ``barrier=False``.
    """

    rank: int
    world_size: int
    local_rank: int
    cores: int
    accelerators: tuple[str, ...]
    addresses: tuple[str, ...]
    _driver: RankClient = field(repr=False)
    _block: Block | None = field(default=None, repr=False)
    _rows: tuple[int, ...] | None = field(default=None, repr=False)
    _exchanges: int = field(default=0, repr=False, init=False)
    _lock: Any = field(default_factory=threading.RLock, repr=False, init=False)

    def batches(self, batch_size: int) -> Iterator[Any]:
        """Read the rows of this rank, each once: ``(x, y)``, or ``x`` if there are no labels.

        Args:
            batch_size: Rows in a batch; the last one may have fewer.

        Raises:
            ConfigurationError: The run has no data.
        """
        size = integer("batch_size", batch_size)
        return (self._batch(number, size) for number in range(self._own_batches(size)))

    def steps(self, batch_size: int) -> int:
        """The number of batches of the rank with the most rows, for loops in which all ranks make the same steps.

        Raises:
            ConfigurationError: The run has no data.
        """
        return -(-max(self._row_counts()) // integer("batch_size", batch_size))

    def dataset(self, batch_size: int) -> keras.utils.PyDataset:
        """The batches of this rank, as a dataset for Keras's ``fit``, ``evaluate`` and ``predict``.

        Raises:
            ConfigurationError: The run has no data.
        """
        import keras

        size = integer("batch_size", batch_size)
        count, batch = self._own_batches(size), self._batch

        class Batches(keras.utils.PyDataset):  # type: ignore[misc]
            def __len__(self) -> int:
                return count

            def __getitem__(self, index: int) -> Any:
                if not 0 <= index < count:
                    raise IndexError(f"there is no batch {index}, only {count}")
                return batch(index, size)

        return Batches()

    def barrier(self) -> None:
        """Wait until all ranks have called this.

        Raises:
            ConfigurationError: The ranks are out of step, or run with ``barrier=False``.
        """
        self._exchange(Kind(BARRIER), memoryview(b""))

    def all_reduce(self, array: Any) -> Array:
        """Sum arrays of the same shape and dtype over all ranks, element by element.

        They pass through the driver: use it for metrics and counts. For gradients, use the collectives of the backend.

        Args:
            array: Numbers: an array of NumPy, or a tensor of any backend, of at most 1 GiB.

        Returns:
            The sum, an array of NumPy; the same to the last bit on all ranks.

        Raises:
            ConfigurationError: The ranks are out of step, or run with ``barrier=False``; or these are not numbers, or
                too large.
        """
        value = _as_numpy("array", array)
        if value.dtype == bool:
            raise ConfigurationError(
                f"all_reduce received {describe(array)}: booleans have no sum. Pass int(value), or array.astype(int), to "
                "count those that are true."
            )
        kind = Kind(ALL_REDUCE, value.dtype.name, value.shape)
        found = self._exchange(kind, np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        return np.frombuffer(found, named_dtype(kind.dtype)).reshape(kind.shape).copy()

    def broadcast(self, value: Any) -> Any:
        """The value of rank 0, of at most 1 GiB when pickled, on all ranks. The values of the others are ignored.

        Raises:
            ConfigurationError: The ranks are out of step, or run with ``barrier=False``; or the value is too large.
            CustomObjectError: The value of rank 0 cannot be pickled.
        """
        packed = memoryview(pack(value, "the value of broadcast")) if self.rank == 0 else memoryview(b"")
        found = pickle.loads(self._exchange(Kind(BROADCAST), packed))
        return value if self.rank == 0 else found

    def report(self, epoch: int, logs: Mapping[str, Any] | None = None, epochs: int | None = None) -> bool:
        """Show metrics on the driver: in its output, and on the page of a `Monitor`, which draws those of rank 0.

        Keras's ``fit`` reports with ``keras.callbacks.LambdaCallback(on_epoch_end=context().report)``.

        Args:
            epoch: The epoch that has ended, counted from 0; shown counted from 1, as Keras does.
            logs: Numbers by name.
            epochs: The number of epochs, from which the driver estimates the time that is left.

        Returns:
            Whether to stop, because the run is about to end.

        Raises:
            ConfigurationError: The logs are not numbers by name, or a number is out of range.
        """
        logs = {} if logs is None else logs
        if not isinstance(logs, Mapping):
            raise ConfigurationError(
                f'report received {describe(logs)} as logs: expected a dict of numbers by name, such as {{"loss": 0.5}}.'
            )
        numbers = {str(name): _number(f"logs[{name!r}]", value) for name, value in logs.items()}
        number, total = integer("epoch", epoch, low=0), optional_integer("epochs", epochs)
        with self._lock:
            return self._driver.report(number, total, numbers)

    def save(self, epoch: int, state: Mapping[str, Any]) -> None:
        """Write a checkpoint of the state of rank 0, in the background on the driver. What other ranks pass is ignored.

        If the next one is saved while one is still being written, those in between may be left out.

        Args:
            epoch: The number of the epoch.
            state: Arrays of NumPy, numbers, strings, bytes, None, and lists, tuples and dicts of these, by name; of at most
                1 GiB.

        Raises:
            ConfigurationError: The run has no checkpoint, or the state has something else or is too large.
        """
        saved = Saved(integer("epoch", epoch, low=0), dict(_checked_state(state)))
        if self.rank == 0:
            values.pack(saved.state, "state")  # names what cannot be stored
            packed = memoryview(pack(saved, "the state"))
            check_size("the state of save()", packed.nbytes, "write it to a file system that all ranks reach")
            with self._lock:
                self._driver.save(packed)

    def restored(self) -> Saved | None:
        """The epoch and the state of the checkpoint from which this run continues, on all ranks.

        Returns:
            What was saved last before the run began. ``None`` if there is no checkpoint, or the run does not resume.
        """
        with self._lock:
            packed = self._driver.restored()
        found: Saved | None = pickle.loads(packed) if len(packed) else None
        return found

    def _exchange(self, kind: Kind, value: memoryview) -> memoryview:
        if not self.addresses:
            raise ConfigurationError(
                f"{kind.name}() needs ranks that run at the same time, and this run has barrier=False: use "
                "SparkRunner(num_workers, barrier=True)."
            )
        instead = "write it to a file system that all ranks reach, and broadcast its path"
        if kind.name == ALL_REDUCE:
            instead = "use the collectives of the backend"
        check_size(f"the value of {kind.name}()", value.nbytes, instead)
        with self._lock:
            self._exchanges += 1
            return self._driver.exchange(self._exchanges, kind, value)

    def _row_counts(self) -> tuple[int, ...]:
        if self._rows is None:
            raise ConfigurationError("this run has no data: pass data= to SparkRunner.run.")
        return self._rows

    def _own_batches(self, size: int) -> int:
        return -(-self._row_counts()[self.rank] // size)

    def _batch(self, number: int, size: int) -> Any:
        assert self._block is not None
        rows = self._block[number * size : (number + 1) * size]
        batch = Block(rows.form, tuple(np.array(array) if type(array) is np.memmap else array for array in rows.arrays))
        sides = [side for side in (batch.x, batch.y, batch.sample_weight) if side is not None]
        return sides[0] if len(sides) == 1 else tuple(sides)


def _checked_state(state: Any) -> Mapping[str, Any]:
    if not isinstance(state, Mapping):
        raise ConfigurationError(
            f'save received {describe(state)} as state: expected a dict by name, such as {{"weights": array}}.'
        )
    return state


def _as_numpy(name: str, value: Any) -> Array:
    """An array or a tensor of any backend as an array of numbers."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        if str(value.dtype) == "torch.bfloat16":  # which NumPy does not define
            return np.asarray(value.float().numpy().astype(named_dtype("bfloat16")))
    array = np.asarray(value)
    if array.dtype.kind in "OSUMm":
        raise ConfigurationError(f"{name}: expected numbers, an array or a tensor, received {describe(value)}.")
    return array


def _number(name: str, value: Any) -> float:
    array = _as_numpy(name, value)
    if array.size != 1 or array.dtype.kind == "c":
        raise ConfigurationError(f"{name}: expected a number, received {describe(value)}.")
    return float(array.reshape(-1)[0])


_context: RankContext | None = None
_process = 0


def enter(made: RankContext) -> None:
    """Make a context that of this process."""
    global _context, _process
    _context, _process = made, os.getpid()


def context() -> RankContext:
    """The context of this rank, in a function or a script that `SparkRunner` runs.

    Raises:
        ClusterError: This process is not that of a rank.

    Example::

        def train():
            ranks = context()
            for x, y in ranks.batches(64):
                ...
    """
    if _context is None or _process != os.getpid():
        where = "in a process that a rank has started" if _context is not None else "outside of SparkRunner.run"
        raise ClusterError(
            f"context() was called {where}: call it in the function or the script that SparkRunner(...).run(...) runs."
        )
    return _context
