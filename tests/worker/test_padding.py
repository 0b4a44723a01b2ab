"""The padding of workers that read fewer batches than others, without processes."""

import keras
import numpy as np
import pytest

from sparkkeras.data.block import from_arrays
from sparkkeras.data.local_dataset import LocalStream
from sparkkeras.worker import device
from sparkkeras.worker.batches import BatchRange, FitOptions, batches_of_epoch
from sparkkeras.worker.lockstep import STREAM_WINDOW, EpochInStep, Lockstep, spread


def batches(*sizes):
    return [from_arrays(np.ones((size, 2), np.float32), np.ones(size, np.float32), None) for size in sizes]


class Alone:
    """The group of a worker whose only peer gives these values."""

    def __init__(self, *theirs):
        self._theirs = iter(theirs)

    def gather(self, array):
        return [array, np.array(next(self._theirs), array.dtype)]


class Own:
    def __init__(self, blocks):
        self._blocks = blocks

    def pieces(self):
        return iter(self._blocks)


@pytest.mark.parametrize(
    ("own", "theirs", "flags", "padding"),
    [
        ([4, 4, 4], [(5, 6)], [0, 1, 0, 1, 1], 4),  # as the last batch of this worker
        ([4] * STREAM_WINDOW, [(STREAM_WINDOW, 6), (2, 3)], [1] * STREAM_WINDOW + [0, 0], 4),
        ([], [(2, 6)], [0, 0], 6),  # without any, as those of others
    ],
)
def test_padding_of_streams_has_the_size_of_a_batch(own, theirs, flags, padding):
    blocks = batches(*own)
    spec = batches(1)[0].spec
    epoch = EpochInStep(Lockstep(Alone(*theirs)), Own(blocks) if blocks else None, spec, None, None)
    pieces = list(epoch.pieces())
    assert [piece.rows for piece in pieces] == [4 if flag else padding for flag in flags]
    assert [bool(piece.x.any()) for piece in pieces] == list(map(bool, flags))
    assert epoch._flags == flags
    assert all(piece.spec == spec for piece in pieces)


@pytest.mark.core
@pytest.mark.parametrize("own", [0, 3, 7])
def test_padding_is_spread_over_the_steps(own):
    """If it came last, an epoch would end with the rows of one worker, and the model forget those of others."""
    flags = spread(own, 7)
    assert sum(flags) == own
    assert max(sum(flags[:step]) - own * step / 7 for step in range(8)) <= 0
    assert min(sum(flags[:step]) - own * step / 7 for step in range(8)) > -1
    blocks, spec = batches(*[2] * own), batches(1)[0].spec
    with device.feed(spec, 2, iter(blocks)) as fed:
        found = list(device.in_step(fed, spec.zeros(2), flags))
    values = [keras.ops.convert_to_numpy(batch[0]) for batch, _ in found]
    assert [value.shape for value in values] == [(2, 2)] * 7
    assert [bool(value.all()) for value in values] == flags
    assert [bool(keras.ops.convert_to_numpy(flag)[0]) for _, flag in found] == flags


def test_steps_of_a_stream_with_padding_are_not_batches():
    stream, options = LocalStream(batches(4, 3)), FitOptions(4)
    with batches_of_epoch(stream, BatchRange(0, None, 0, 10), options, 0, lambda batch: None) as own:
        epoch = EpochInStep(Lockstep(Alone((7, 4))), own, own.spec, None, None)
        pieces = list(epoch.pieces())
    flags = spread(2, 7)
    assert [bool(piece.x.any()) for piece in pieces] == flags
    assert [epoch.trained(steps)[0] for steps in range(8)] == [sum(flags[:steps]) for steps in range(8)]
    assert [epoch.is_last(steps) for steps in range(8)] == [sum(flags[:steps]) == 2 for steps in range(8)]
    assert epoch.trained() == (2, 7)
