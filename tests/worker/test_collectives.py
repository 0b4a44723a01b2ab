"""Groups of processes: exchanging values, and noticing that a peer is gone."""

import os
import signal
import time

import keras
import numpy as np
import pytest

from sparkkeras.data.block import from_arrays
from sparkkeras.modeling.archive import ModelArchive
from sparkkeras.modeling.state import ModelState
from sparkkeras.worker.batches import FitOptions
from sparkkeras.worker.collectives import PeerLostError
from tests.models import regression
from tests.worker import groups

pytestmark = pytest.mark.soak  # starts processes that load the backend


def test_values_of_all_ranks():
    with groups.group_of(2) as pair:
        for rank, (gathered, data) in enumerate(pair.run(groups.gather, [values(0), values(1)])):
            for found, zero, one in zip(gathered, values(0), values(1), strict=True):
                assert found[rank].dtype == zero.dtype
                assert np.array_equal(found, [zero, one])
            assert data == [b"", b"x"]
        pair.run(groups.leave)


def values(rank):
    return [np.float64(1 / 3) + rank, np.arange(5, dtype=np.uint8) + rank, np.full((2, 3), rank - 2**40), np.empty((0, 2))]


def start_training(pair, folder):
    """Start a training that does not end; returns the ids of the processes when it is under way."""
    model = regression(optimizer=keras.optimizers.SGD(0.0))
    block = from_arrays(np.ones((2**16, 3), np.float32), np.ones((2**16, 1), np.float32), None)
    arguments = (ModelArchive.pack(model), ModelState.take(model), block, FitOptions(2), 1, None)
    pids = pair.run(groups.pid)
    paths = [folder / str(rank) for rank in range(2)]
    pair.start(groups.train, *([value] * 2 for value in arguments), [(groups.Slow(path),) for path in paths])
    deadline = time.monotonic() + 60
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return pids


@pytest.mark.parametrize(
    ("sent", "rank"), [(signal.SIGSTOP, 1), (signal.SIGKILL, 1), (signal.SIGSTOP, 0), (signal.SIGKILL, 0)]
)
def test_a_peer_that_is_gone_ends_training_within_seconds(sent, rank, tmp_path):
    with groups.group_of(2) as pair:
        pids = start_training(pair, tmp_path)
        os.kill(pids[rank], sent)
        started = time.monotonic()
        (answer,) = pair.answers([1 - rank])
        assert time.monotonic() - started < 12
        if keras.backend.backend() == "jax" and isinstance(answer, groups.Ended):
            assert answer.args == (-signal.SIGABRT,)  # JAX's runtime ends the process
        else:
            assert isinstance(answer, PeerLostError), answer
            assert f"rank {rank} (127.0.0.1:" in str(answer) or "another process of the group" in str(answer)
