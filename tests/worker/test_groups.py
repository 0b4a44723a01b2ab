"""Groups of processes in the short suite: what needs one process, and on JAX and PyTorch a group that trains in step.

With TensorFlow, tests/integration/test_allreduce.py trains; test_collectives.py and test_lockstep.py have all cases.
"""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from types import SimpleNamespace

import keras
import numpy as np
import pytest

from sparkkeras.data.block import from_arrays
from sparkkeras.errors import ClusterError
from sparkkeras.worker import collectives
from sparkkeras.worker.collectives import PeerLostError, tensorflow_group, torch_group
from sparkkeras.worker.collectives.jax_group import JaxGroup
from tests.worker import groups
from tests.worker.test_lockstep import dense, difference, plain, trained

ADDRESSES = [("127.0.0.1", port) for port in range(1, 13)]


@pytest.fixture
def alone():
    with collectives.hold_port("127.0.0.1") as held:
        return collectives.join(0, [held.getsockname()], held)


@pytest.fixture
def held():
    sockets = [collectives.hold_port("127.0.0.1") for _ in range(3)]
    yield sockets
    for each in sockets:
        each.close()


@pytest.mark.core
@pytest.mark.skipif(keras.backend.backend() == "tensorflow", reason="tests/integration/test_allreduce.py")
def test_two_processes_exchange_values_and_train_like_plain_keras(digits):
    blocks = [from_arrays(digits[0][part], digits[1][part].astype(np.int32), None) for part in (slice(20), slice(20, 61))]
    model = dense()
    with groups.group_of(2) as pair:
        for gathered, data in pair.run(groups.gather, [[np.float64(1 / 3)], [np.float64(2 / 3)]]):
            assert (gathered[0], data) == ([1 / 3, 2 / 3], [b"", b"x"])
        replicas = trained(pair, model, blocks)
        assert pair.run(groups.catches_abort) == [keras.backend.backend() != "jax"] * 2
        pair.run(groups.leave)
    assert [(replica.steps, replica.rows) for replica in replicas] == [(3, 20), (6, 41)]
    plain(model, blocks)
    assert difference(replicas, model) < 1e-5


def test_a_group_of_one(alone):
    assert alone.gather(np.arange(3))[0].tolist() == [0, 1, 2]
    assert alone.gather_bytes(b"abc") == [b"abc"]
    alone.leave()


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="errors of TensorFlow")
def test_errors_in_a_group_of_one_are_raised_as_they_are(alone):
    import tensorflow as tf

    with pytest.raises(tf.errors.InvalidArgumentError, match="on purpose"), alone.naming_lost_peers():
        raise tf.errors.InvalidArgumentError(None, None, "on purpose")


def test_processes_meet(held):
    addresses = [each.getsockname() for each in held]
    with ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(JaxGroup(rank, addresses).meet, 20) for rank in range(2)]
        with closing(connected_to(addresses[0], b"GET / HTTP/1.1")), closing(connected_to(addresses[1], b"\0")):
            connected_to(addresses[1], b"").close()
            connected_to(addresses[0], JaxGroup(2, addresses[::-1])._greeting(2)).close()  # of another group
            JaxGroup(2, addresses).meet(20)
        for each in waiting:
            each.result()


def test_a_machine_that_leaves_connections_unanswered_is_named(held):
    """A listener whose backlog is full drops connections, as a firewall does."""
    with socket.socket() as full, ExitStack() as stack:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):
            connection = stack.enter_context(socket.socket())
            connection.setblocking(False)
            connection.connect_ex(full.getsockname())
        began = time.monotonic()
        with pytest.raises(
            ClusterError, match=rf"cannot connect to another one at 127.0.0.1:{full.getsockname()[1]} .timed out"
        ):
            JaxGroup(0, [held[0].getsockname(), full.getsockname()]).meet(60, patience=0.5)
        assert time.monotonic() - began < 10


def connected_to(address, sent):
    while True:
        try:
            connection = socket.create_connection(address)
        except ConnectionError:
            continue
        connection.sendall(sent)
        return connection


def test_processes_that_do_not_connect_are_named(held):
    addresses = [each.getsockname() for each in held]
    held[2].listen()  # rank 2 can be reached, and reaches no other
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(JaxGroup(rank, addresses).meet, 0.3) for rank in range(2)]
        for rank, each in enumerate(waiting):
            with pytest.raises(PeerLostError) as caught:
                each.result()
            message = str(caught.value)
            assert message.startswith(f"the process of rank 2 (127.0.0.1:{addresses[2][1]}) did not join the group of 3")
            assert f"or it and rank {rank} (127.0.0.1:{addresses[rank][1]}) cannot reach each other" in message
            assert "spark.sparkkeras.worker.ports" in message


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="heartbeats of TensorFlow")
def test_only_peers_that_do_not_answer_are_named(monkeypatch):
    """Many silent ones take longer than one may be silent."""
    group, now, silent, aborted = tensorflow_group.TensorFlowGroup(0, ADDRESSES), [0.0], range(2, 10), []

    def answers(rank):
        now[0] += rank in silent
        return rank not in silent

    def wait(seconds):
        now[0] += seconds

    monkeypatch.setattr(tensorflow_group, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(group, "_answers", answers)
    group._left = SimpleNamespace(wait=wait, is_set=lambda: False)
    group._context = SimpleNamespace(abort_collective_ops=lambda code, message: aborted.append(message))
    group._watch()
    assert group._lost == list(silent)
    assert aborted == [group._gone(silent)]


def test_a_collective_on_gpus_is_waited_for_when_it_has_ended():
    """NCCL would abort it."""
    group, left = torch_group.TorchGroup(0, ADDRESSES[:2]), [3]
    group._beats = SimpleNamespace(silent=list)

    def is_completed():
        left[0] -= 1
        return left[0] < 0

    def wait(timeout):
        assert left[0] < 0

    group._wait(SimpleNamespace(is_completed=is_completed, wait=wait), on_gpu=True)
    left[0] = 3
    group._beats = SimpleNamespace(silent=lambda: [1])
    with pytest.raises(PeerLostError, match="rank 1 .127.0.0.1:2. does not answer"):
        group._wait(SimpleNamespace(is_completed=is_completed, wait=wait), on_gpu=True)


@pytest.mark.core
@pytest.mark.skipif(keras.backend.backend() != "torch", reason="two groups in one process")
def test_a_process_that_stops_while_it_joins_is_not_waited_for_forever(held, monkeypatch):
    monkeypatch.setattr(torch_group, "_Beats", lambda *arguments: None)
    addresses = [each.getsockname() for each in held[:2]]
    peer = torch_group.TorchGroup(1, addresses)

    def join_in_part():
        peer.meet(20)
        peer._store(held[1], 20)

    thread = threading.Thread(target=join_in_part)
    thread.start()
    with pytest.raises(PeerLostError, match=r"not all of the 2 processes joined .* within 1 s: .*worker.ports"):
        collectives.join(0, addresses, held[0], timeout=1)
    thread.join()
