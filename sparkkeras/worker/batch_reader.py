"""Batches that a user's function reads on the workers, such as files on HDFS or S3, anew in each epoch."""

from __future__ import annotations

import inspect
import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sparkkeras.data.block import Block, BlockSpec, changed, concatenate_alike, describe
from sparkkeras.data.reader import Reader
from sparkkeras.data.sparse import with_sparse_rows
from sparkkeras.errors import READER_NOTE, DataError, SparkKerasError
from sparkkeras.modeling.custom_code import ByValue
from sparkkeras.worker.generators import with_own_generators

MakeBatches = Callable[..., Any]
"""``make(worker, num_workers)`` or ``make(worker, num_workers, epoch)``; see `BatchReader`."""


@dataclass(frozen=True)
class BatchReader:
    """The batches of all workers.

    Attributes:
        make: Called as ``make(worker, num_workers)`` on a worker, at the beginning of each epoch; if it has a parameter
            ``epoch``, with the number of the epoch, counted from 0 and 0 if it does not train. Returns the batches of this
            worker: a ``tf.data.Dataset``, a ``keras.utils.PyDataset``, or an iterable of ``(x, y)`` or ``(x, y,
            sample_weight)``.
        num_workers: The number of workers.
        reader: Checks the batches, and converts them to blocks.
        may_be_endless: Whether not all batches are read, so that there may be infinitely many.
    """

    make: ByValue[MakeBatches]
    num_workers: int
    reader: Reader
    may_be_endless: bool = False

    @property
    def workers(self) -> tuple[WorkerBatches, ...]:
        """The batches of each worker."""
        return tuple(WorkerBatches(self, worker) for worker in range(self.num_workers))


_ROWS = (
    " x has the shape of a single row: yield batches, with the rows on the first axis, such as those of "
    "dataset.batch(batch_size)."
)


@dataclass(frozen=True)
class WorkerBatches:
    """The batches of one worker: a `BlockStream`, and rows that other tasks can open.

    Attributes:
        read: Reads the batches.
        worker: The index of the worker.
    """

    read: BatchReader
    worker: int

    def blocks(self, epoch: int = 0, seed: int = 0) -> Generator[Block, None, None]:
        """Read the batches of an epoch from the beginning, each as a block.

        ``make`` draws from global generators of its own, seeded by seed, worker and epoch. So a retried task that leaves out
        the first batches reads the same ones, whatever transforms and callbacks draw.

        Raises:
            DataError: ``make`` returned something else than batches, or a batch does not fit the model.
        """
        return with_own_generators(self._read(epoch), (seed, self.worker, epoch))

    def open(self) -> Block | None:
        """Read all batches into memory, as one block; ``None`` if there are none."""
        return concatenate_alike(replace(self, read=replace(self.read, may_be_endless=False)).blocks())

    def _read(self, epoch: int) -> Generator[Block, None, None]:
        reader = self.read.reader
        first: BlockSpec | None = None
        with closing(_made(self.read, self.worker, epoch)) as batches:
            for number, batch in enumerate(batches):
                x, y, sample_weight = _unpacked(batch)
                where = f"batch {number} of the reader of worker {self.worker}"
                try:
                    if reader.labelled and y is None and not reader.labels_optional:
                        raise DataError(
                            f"labels are missing, the batch is {describe(batch)}: yield (x, y) or (x, y, sample_weight)."
                        )
                    block = reader.read_arrays(with_sparse_rows(x), with_sparse_rows(y), sample_weight)
                except DataError as error:
                    raise DataError(f"{where}: {error}{_ROWS if self._is_row(x) else ''}") from error
                first = first or block.spec
                if block.spec != first and not reader.schema.transformed:
                    raise DataError(f"{where}: {changed(first, block.spec)}")
                if block.rows:
                    yield block.dense()

    def _is_row(self, x: Any) -> bool:
        """Whether features have the shape of a single row of the model's input."""
        inputs = self.read.reader.schema.inputs
        return len(inputs) == 1 and hasattr(x, "shape") and tuple(x.shape) == inputs[0].shape


def epoch_argument(make: MakeBatches, epoch: int) -> dict[str, int]:
    """The epoch as an argument of a function that reads batches; empty if it has no parameter ``epoch``."""
    try:
        return {"epoch": epoch} if "epoch" in inspect.signature(make).parameters else {}
    except ValueError:  # a builtin
        return {}


def _made(read: BatchReader, worker: int, epoch: int) -> Generator[Any, None, None]:
    """The batches of a worker. Exceptions of the user's function get a note that says where they were raised."""
    number = 0
    try:
        make = read.make.load()
        made = make(worker, read.num_workers, **epoch_argument(make, epoch))
        if not read.may_be_endless and _is_endless(made):
            raise DataError(
                f"make({worker}, {read.num_workers}) returned a dataset without end: set steps_per_epoch= in fit, or "
                "limit it, for instance with dataset.take(n). Validation, evaluate and predict read all batches."
            )
        with closing(_batches(made)) as batches:
            for number, batch in enumerate(batches, 1):  # noqa: B007 - the next batch, where an exception is raised
                yield batch
    except SparkKerasError:
        raise
    except Exception as error:
        error.add_note(f"{READER_NOTE}{worker}, in batch {number}.")
        raise


def _is_endless(made: Any) -> bool:
    """Whether a dataset is known to have infinitely many batches."""
    import keras

    if hasattr(made, "as_numpy_iterator"):
        return int(made.cardinality()) == -1  # tf.data.INFINITE_CARDINALITY
    return isinstance(made, keras.utils.PyDataset) and made.num_batches is None


def _batches(made: Any) -> Generator[Any, None, None]:
    """The batches of an object that a user's function returned."""
    import keras

    if hasattr(made, "as_numpy_iterator"):  # a tf.data.Dataset
        yield from made.as_numpy_iterator()
    elif isinstance(made, keras.utils.PyDataset):
        yield from _of_py_dataset(made)
    elif _is_iterable_of_batches(made):
        yield from made
    else:
        advice = "Yield arrays batch by batch."
        if hasattr(made, "to_numpy"):
            advice = "Yield pieces of it, as arrays: part[features].to_numpy(), part[label].to_numpy()."
        raise DataError(
            f"make(worker, num_workers) returned {describe(made)}; expected a tf.data.Dataset, a keras.utils.PyDataset, or "
            f"an iterable of batches (x, y), for instance a generator. {advice}"
        )


def _is_iterable_of_batches(made: Any) -> bool:
    """Whether an object may be an iterable of batches. Arrays, tensors and DataFrames iterate over rows or names."""
    import keras

    is_data = isinstance(made, (np.ndarray, Mapping, tuple, str, bytes)) or hasattr(made, "to_numpy")
    return isinstance(made, Iterable) and not is_data and not keras.ops.is_tensor(made)


def _of_py_dataset(dataset: Any) -> Generator[Any, None, None]:
    """The batches of a PyDataset, loaded by as many threads as it has ``workers``, also if it asks for processes."""
    dataset.on_epoch_begin()
    count = dataset.num_batches
    indices = itertools.count() if count is None else iter(range(count))
    if dataset.workers <= 1:
        yield from (dataset[index] for index in indices)
    else:
        with ThreadPoolExecutor(dataset.workers) as pool:
            loading = (pool.submit(dataset.__getitem__, index) for index in indices)
            try:
                pending = deque(itertools.islice(loading, max(dataset.workers, dataset.max_queue_size)))
                while pending:
                    batch = pending.popleft().result()
                    pending.extend(itertools.islice(loading, 1))
                    yield batch
            finally:
                pool.shutdown(cancel_futures=True)
    dataset.on_epoch_end()


def _unpacked(batch: Any) -> tuple[Any, Any, Any]:
    """Features, labels and sample weights, as Keras unpacks a batch."""
    if not isinstance(batch, (tuple, list)):
        return _arrays(batch), None, None
    if not 1 <= len(batch) <= 3:
        raise DataError(f"a batch is {describe(batch)}; expected (x, y) or (x, y, sample_weight).")
    x, y, sample_weight = (*map(_arrays, batch), None, None)[:3]
    return x, y, sample_weight


def _arrays(values: Any) -> Any:
    """Tensors as NumPy arrays, in the same structure."""
    import keras

    convert = keras.ops.convert_to_numpy
    return keras.tree.map_structure(lambda leaf: convert(leaf) if keras.ops.is_tensor(leaf) else leaf, values)
