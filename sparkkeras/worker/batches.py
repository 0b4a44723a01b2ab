"""Batches of rows: how they are made, and the batches of one epoch, from stored rows or from a stream."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from sparkkeras.data.block import BLOCK_BYTES, Block, BlockSpec, Form, Structure, concatenate_alike
from sparkkeras.data.dataset import BlockStream
from sparkkeras.data.order import RowOrder
from sparkkeras.data.partition_stats import ClassWeight
from sparkkeras.data.placement import Shuffle
from sparkkeras.modeling import state as model_state
from sparkkeras.modeling.custom_code import ByValue
from sparkkeras.worker import device

if TYPE_CHECKING:
    from sparkkeras.rpc.transport import Address

Transform = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class BatchOptions:
    """How batches are made of rows.

    Attributes:
        batch_size: Rows per batch.
        transform: ``transform(x, y) -> (x, y)``, applied to each batch.
        input_structure: The structure of the inputs, for a model that takes a dict or nested inputs; ``None`` for others.
        to_predict: Whether the rows are to be predicted, so that ``transform`` may return ``x`` alone.
        in_batches: Whether the blocks to evaluate or predict are batches already, which keep their sizes.
        across_blocks: Whether a batch may have rows of several blocks: a model with a fixed batch size takes no smaller one.
        progress: The address of the driver for reports of progress; ``None``: there are none.
    """

    batch_size: int
    transform: ByValue[Transform] | None = None
    input_structure: Structure | None = None
    to_predict: bool = False
    in_batches: bool = False
    across_blocks: bool = False
    progress: Address | None = None

    def of(self, block: Block) -> BatchOptions:
        """The options for a block to evaluate or predict."""
        return replace(self, batch_size=block.rows) if self.in_batches else self


@dataclass(frozen=True)
class FitOptions(BatchOptions):
    """How a worker trains.

    Attributes:
        shuffle: Whether to shuffle the rows before each epoch; ``"global"``: they were also placed at random.
        seed: Seeds the shuffle, dropout masks and the global generators of NumPy and Python, with the indices of worker and
            epoch.
        class_weight: The weight of each class index, as in ``keras.Model.fit``; ``"balanced"`` until the rows are stored,
            from which the weights follow.
        callbacks: Keras callbacks that run on the workers.
    """

    shuffle: Shuffle = True
    seed: int = 0
    class_weight: ClassWeight | None = None
    callbacks: ByValue[Sequence[Any]] | None = None


@dataclass(frozen=True)
class BatchRange:
    """Consecutive batches of one epoch: batches [first, last) of a worker's first ``rows`` rows, or of all (``None``)."""

    epoch: int
    rows: int | None
    first: int
    last: int


class EpochBatches(Protocol):
    """Batches to train on: those of an epoch of one worker, or some of them."""

    @property
    def spec(self) -> BlockSpec:
        """The shapes and dtypes of the batches."""
        ...

    @property
    def batch_size(self) -> int | None:
        """The number of rows in a batch; ``None``: each piece is a batch."""
        ...

    @property
    def steps(self) -> int | None:
        """The number of batches; ``None`` if it is unknown until they have been read."""
        ...

    def pieces(self) -> Iterator[Block]:
        """The rows in pieces of whole batches. Called once."""
        ...

    def trained(self, steps: int = sys.maxsize) -> tuple[int, int]:
        """The number of batches and of rows in the first ``steps`` batches; by default, in all that were read."""
        ...

    def is_last(self, steps: int) -> bool:
        """Whether there are no more batches after the first ``steps``."""
        ...


@contextmanager
def batches_of_epoch(
    rows: Block | BlockStream, batch_range: BatchRange, options: FitOptions, worker: int, check: Callable[[Block], Any]
) -> Iterator[EpochBatches | None]:
    """Open the batches to train on; ``None`` if the range contains no rows. A stream is closed at the end of the context.

    Args:
        rows: The rows of the worker.
        batch_range: The epoch and the range of batches.
        options: The training options.
        worker: The index of the worker.
        check: Called with each batch of a stream, which nothing has checked before. It raises an error if the labels do not
            fit the model.
    """
    if isinstance(rows, Block):
        # A nondeterministic source may return fewer rows when a lost partition is read again.
        count = rows.rows if batch_range.rows is None else min(batch_range.rows, rows.rows)
        seed = (options.seed, worker, batch_range.epoch) if options.shuffle else None
        order = RowOrder(count, rows.row_bytes, options.batch_size, seed)
        last = min(batch_range.last, order.batches)
        yield _StoredEpoch(rows, order, batch_range.first, last, options) if last > batch_range.first else None
        return
    with closing(rows.blocks(batch_range.epoch, options.seed)) as blocks:
        batches = islice(blocks, batch_range.first, batch_range.last)
        first = next(batches, None)
        yield None if first is None else _StreamedEpoch(batches, first, options, check)


class _StoredEpoch:
    """Batches of stored rows, in a new order in each epoch if ``shuffle`` is set."""

    def __init__(self, block: Block, order: RowOrder, first_batch: int, last: int, options: FitOptions) -> None:
        self.batch_size = options.batch_size
        self.steps = last - first_batch
        self._first, self._rows = first_batch, order.rows
        pieces = (
            _weighted(device.overwritable(transformed(block[index], options)), options.class_weight)
            for index in order.pieces(first_batch, last, BLOCK_BYTES)
        )
        first = next(pieces)
        self.spec = first.spec
        self._pieces = chain([first], pieces)

    def pieces(self) -> Iterator[Block]:
        return self._pieces

    def trained(self, steps: int = sys.maxsize) -> tuple[int, int]:
        steps = min(steps, self.steps)
        return steps, min((self._first + steps) * self.batch_size, self._rows) - self._first * self.batch_size

    def is_last(self, steps: int) -> bool:
        return steps >= self.steps


class _StreamedEpoch:
    """Batches of a stream, which is read from the beginning; those before the range are read and left out.

    One batch is read ahead, so that the last one is known. JAX reads further ahead; so batches count when they have been
    trained on.
    """

    batch_size = None
    steps = None

    def __init__(self, batches: Iterator[Block], first: Block, options: FitOptions, check: Callable[[Block], Any]) -> None:
        self._batches, self._options, self._check = batches, options, check
        self._sizes: list[int] = []
        self._ended = False
        self._first = self._prepared(first)
        self.spec = self._first.spec

    def pieces(self) -> Iterator[Block]:
        batch: Block | None = self._first
        while batch is not None:
            following = next(self._batches, None)
            self._sizes.append(batch.rows)
            self._ended = following is None
            yield batch
            batch = None if following is None else self._prepared(following)

    def trained(self, steps: int = sys.maxsize) -> tuple[int, int]:
        steps = min(steps, len(self._sizes))
        return steps, sum(self._sizes[:steps])

    def is_last(self, steps: int) -> bool:
        return self._ended and steps >= len(self._sizes)

    def _prepared(self, batch: Block) -> Block:
        made = device.overwritable(transformed(batch, replace(self._options, batch_size=batch.rows)))
        weighted = _weighted(made, self._options.class_weight)
        self._check(weighted)
        return weighted


def pieces_of(blocks: Iterator[Block], options: BatchOptions) -> Iterator[Block]:
    """The rows of blocks in pieces of some batches each, after the transform."""
    if options.across_blocks and not options.in_batches:
        blocks = _in_whole_batches(blocks, options.batch_size)
    for block in blocks:
        of_block = options.of(block)
        for piece in block.pieces(BLOCK_BYTES, of_block.batch_size):
            yield transformed(piece, of_block)


def _in_whole_batches(blocks: Iterator[Block], batch_size: int) -> Iterator[Block]:
    """The rows of blocks in blocks of whole batches; only the last one may have further rows."""
    rest: Block | None = None
    for block in blocks:
        taken = 0
        if rest is not None:
            taken = min(batch_size - rest.rows, block.rows)
            rest = concatenate_alike((rest, block[:taken]))
            if rest is not None and rest.rows == batch_size:
                yield rest
                rest = None
        whole = taken + (block.rows - taken) // batch_size * batch_size
        if whole > taken:
            yield block[taken:whole]
        if whole < block.rows:
            rest = block[whole:]
    if rest is not None:
        yield rest


def transformed(piece: Block, options: BatchOptions) -> Block:
    """Apply the transform, if there is one, to a copy of the rows, and name the inputs of a model that takes a dict."""
    if options.transform is None:
        return piece.in_structure(options.input_structure)
    copy = Block(piece.form, tuple(np.array(array) for array in piece.arrays))  # a transform may work in place
    made = copy.transformed(options.transform.load(), options.batch_size, options.to_predict)
    made = made.with_floats(model_state.floatx())
    return Block(made.form, tuple(np.array(array) for array in made.arrays)).in_structure(options.input_structure)


def _weighted(piece: Block, class_weight: ClassWeight | None) -> Block:
    """The block with sample weights by class. As in Keras, classes that are not in ``class_weight`` have the weight 1."""
    if class_weight is None or piece.form.y is None:
        return piece
    assert not isinstance(class_weight, str)
    labels = piece.arrays[piece.form.span("y")][0]
    classes = labels.argmax(-1) if labels.ndim > 1 and labels.shape[-1] > 1 else np.round(labels.reshape(len(labels)))
    found, places = np.unique(classes, return_inverse=True)
    weights = np.array([class_weight.get(int(number), 1.0) for number in found], model_state.floatx())
    return Block(Form(piece.form.x, piece.form.y, Structure()), (*piece.arrays, weights[places]))
