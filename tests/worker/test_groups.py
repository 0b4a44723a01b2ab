"""Groups of processes: their ports, how they meet, and how they notice that a peer is gone.

On JAX and PyTorch, one trains in step; with TensorFlow, tests/integration/test_allreduce.py does. test_lockstep.py has all
cases.
"""

import signal
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
from sparkkeras.modeling.archive import ModelArchive
from sparkkeras.modeling.state import ModelState
from sparkkeras.worker import collectives
from sparkkeras.worker.batches import FitOptions
from sparkkeras.worker.collectives import PeerLostError, hold_port, holding_port, torch_group
from sparkkeras.worker.collectives.jax_group import JaxGroup
from tests.models import regression
from tests.processes import free_port
from tests.worker import groups
from tests.worker.test_lockstep import difference, plain, small, trained


@pytest.fixture
def alone():
    with hold_port("127.0.0.1") as held:
        return collectives.join(0, [held.getsockname()], held)


@pytest.fixture
def held():
    sockets = [hold_port("127.0.0.1") for _ in range(3)]
    yield sockets
    for each in sockets:
        each.close()


@pytest.mark.core
@pytest.mark.skipif(keras.backend.backend() == "tensorflow", reason="tests/integration/test_allreduce.py")
def test_two_processes_train_like_plain_keras(digits):
    blocks = [from_arrays(digits[0][part], digits[1][part].astype(np.int32), None) for part in (slice(20), slice(20, 61))]
    model = small()
    with groups.group_of(2) as pair:
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
        with pytest.raises(ClusterError, match=rf"127.0.0.1:{full.getsockname()[1]} .timed out"):
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
        names = [rf"rank {rank} \(127.0.0.1:{port}\)" for rank, (_, port) in enumerate(addresses)]
        for mine, each in zip(names, waiting, strict=False):
            with pytest.raises(PeerLostError, match=rf"{names[2]} did not join.*{mine} cannot reach.*worker\.ports"):
                each.result()


def test_a_collective_on_gpus_is_waited_for_when_it_has_ended():
    """NCCL would abort it."""
    group, left = torch_group.TorchGroup(0, [("127.0.0.1", 1), ("127.0.0.1", 2)]), [3]
    group._beats = SimpleNamespace(silent=list)

    def is_completed():
        left[0] -= 1
        return left[0] < 0

    def wait(timeout):
        assert left[0] < 0

    group._wait(SimpleNamespace(is_completed=is_completed, wait=wait), on_gpu=True)
    left[0] = 3
    group._beats = SimpleNamespace(silent=lambda: [1])
    with pytest.raises(PeerLostError, match="rank 1 .* not answer"):
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
    with pytest.raises(PeerLostError, match="within 1 s.*worker.ports"):
        collectives.join(0, addresses, held[0], timeout=1)
    thread.join()


@pytest.mark.soak  # starts processes that load the backend
@pytest.mark.parametrize(
    ("sent", "rank"), [(signal.SIGSTOP, 1), (signal.SIGKILL, 1), (signal.SIGSTOP, 0), (signal.SIGKILL, 0)]
)
def test_a_peer_that_is_gone_ends_training_within_seconds(sent, rank, tmp_path):
    model, ended = regression(), tmp_path / "when"
    block = from_arrays(np.ones((64, 3), np.float32), np.ones((64, 1), np.float32), None)
    arguments = (ModelArchive.pack(model), ModelState.take(model), block, FitOptions(2), 1, None)
    callbacks = [(groups.Ends(sent if each == rank else None, ended),) for each in range(2)]
    with groups.group_of(2) as pair:
        pair.start(groups.train, *([value] * 2 for value in arguments), callbacks)
        answer = pair.answer(1 - rank)
        assert time.monotonic() - float(ended.read_text()) < 12
    if keras.backend.backend() == "jax" and isinstance(answer, groups.Ended):
        assert answer.args == (-signal.SIGABRT,)  # JAX's runtime ends the process
    else:
        assert isinstance(answer, PeerLostError), answer
        assert f"rank {rank} (127.0.0.1:" in str(answer) or "another process of the group" in str(answer)


# Ports that no other process gets


def test_a_held_port_is_free_for_those_who_know_it_and_for_no_one_else():
    with hold_port() as held:
        port = held.getsockname()[1]
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):  # of PyTorch, of gRPC
            with socket.socket() as server:
                server.setsockopt(socket.SOL_SOCKET, option, 1)
                server.bind(("127.0.0.1", port))
                server.listen()
                with socket.create_connection(("127.0.0.1", port)):
                    pass
        with hold_port("127.0.0.1", port) as again:  # of the process that joins the group
            assert again.getsockname() == ("127.0.0.1", port)
        with socket.socket() as other:
            other.bind(("", 0))
            assert other.getsockname()[1] != port


def test_processes_share_a_range_of_ports():
    first = free_port()
    ports = range(first, first + 2)
    with holding_port(ports) as one, socket.create_server(("", first + 1)):
        assert one == first
        with pytest.raises(ClusterError, match=rf"{first} to {first + 1} .* all taken"), holding_port(ports):
            pass
    with holding_port(ports) as one, holding_port(ports) as other:
        assert (one, other) == tuple(ports)


@pytest.mark.parametrize("host", ["203.0.113.7", "no-such-host.invalid"])
def test_an_address_of_another_machine_is_an_error(host):
    with pytest.raises(ClusterError, match=rf"{host} .* set SPARK_LOCAL_IP"):
        hold_port(host)
