"""The padding of workers that read fewer batches than others, without processes."""

from contextlib import contextmanager

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


@contextmanager
def stream_in_step(sizes, *theirs):
    """The epoch of a worker with batches of these sizes, whose peer gives ``theirs``."""
    stream, every = LocalStream(batches(*sizes)), BatchRange(0, None, 0, 10**6)
    with batches_of_epoch(stream, every, FitOptions(4), 0, lambda batch: None) as own:
        yield EpochInStep(Lockstep(Alone(*theirs)), own, batches(1)[0].spec, None, None)


@pytest.mark.parametrize(
    ("own", "theirs", "flags", "padding"),
    [
        ([4, 4, 4], [(5, 6)], [0, 1, 0, 1, 1], 4),  # as the last batch of this worker
        ([4] * STREAM_WINDOW, [(STREAM_WINDOW, 6), (2, 3)], [1] * STREAM_WINDOW + [0, 0], 4),
        ([], [(2, 6)], [0, 0], 6),  # without any, as those of others
    ],
)
def test_padding_of_streams_has_the_size_of_a_batch_and_does_not_count(own, theirs, flags, padding):
    with stream_in_step(own, *theirs) as epoch:
        pieces = list(epoch.pieces())
    assert [piece.rows for piece in pieces] == [4 if flag else padding for flag in flags]
    assert [bool(piece.x.any()) for piece in pieces] == list(map(bool, flags))
    assert all(piece.spec == epoch.spec for piece in pieces)
    before = [sum(flags[:steps]) for steps in range(len(flags) + 1)]
    assert [epoch.trained(steps) for steps in range(len(flags) + 1)] == [(count, 4 * count) for count in before]
    assert [epoch.is_last(steps) for steps in range(len(flags) + 1)] == [count == len(own) for count in before]


@pytest.mark.core
@pytest.mark.parametrize("own", [0, 3, 7])
def test_padding_is_spread_over_the_steps(own):
    """If it came last, an epoch would end with the rows of one worker, and the model forget those of others."""
    flags = spread(own, 7)
    assert sum(flags) == own
    ahead = [sum(flags[:step]) - own * step / 7 for step in range(8)]
    assert max(ahead) <= 0
    assert min(ahead) > -1
    blocks, spec = batches(*[2] * own), batches(1)[0].spec
    with device.feed(spec, 2, iter(blocks)) as fed:
        steps = list(device.in_step(fed, spec.zeros(2), flags))
    found = [(keras.ops.convert_to_numpy(batch[0]), bool(flag[0])) for batch, flag in steps]
    assert [(x.shape, bool(x.all()), flag) for x, flag in found] == [((2, 2), flag, flag) for flag in flags]
