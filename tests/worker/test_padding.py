"""The padding of workers that read fewer batches than others, without processes."""

import numpy as np
import pytest

from sparkkeras.data.block import from_arrays
from sparkkeras.worker.lockstep import STREAM_WINDOW, EpochInStep, Lockstep


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
    ("own", "theirs", "padding"),
    [
        ([4, 4, 4], [(5, 6)], [4, 4]),  # as the last batch of this worker
        ([4] * STREAM_WINDOW, [(STREAM_WINDOW, 6), (2, 3)], [4, 4]),
        ([], [(2, 6)], [6, 6]),  # without any, as those of others
    ],
)
def test_padding_has_the_size_of_a_batch(own, theirs, padding):
    blocks = batches(*own)
    spec = batches(1)[0].spec
    epoch = EpochInStep(Lockstep(Alone(*theirs)), Own(blocks) if blocks else None, spec, None, None)
    pieces = list(epoch.pieces())
    assert [piece.rows for piece in pieces] == own + padding
    assert [bool(piece.x.any()) for piece in pieces] == [True] * len(own) + [False] * len(padding)
    assert all(piece.spec == spec for piece in pieces)
