"""The parameter server over breaking connections, with damaged bytes and beside idle connections."""

import contextlib
import random
import resource
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import psutil
import pytest

from sparkkeras.parameter.exchange import ExchangePoint
from sparkkeras.parameter.service import ArraySpecs, ParameterClient, ParameterService, PayloadFormat
from sparkkeras.rpc.transport import TransportError
from sparkkeras.rpc.wire import MAX_HEADER_BYTES
from tests.parameter.servers import a_ledger, a_store
from tests.rpc.test_transports import MB, LastBytes, Relay, calling, eventually, over_tcp, patient, raw_response, serving

FLOATS = MB // 4


def payload_format(size):
    return PayloadFormat(size, "float32", ArraySpecs(()), ArraySpecs(()))


class Server:
    """A parameter server whose weights are zeros, to which updates add integers."""

    def __init__(self, size, workers, pushes):
        self.payload_format = payload_format(size)
        self.store = a_store(np.zeros(size, np.float32), num_workers=workers)
        self.service = ParameterService(a_ledger([pushes] * workers, self.store), self.payload_format)

    def at(self, name, timeout=30.0, expected_sessions=16):
        return serving(name, self.service, timeout=timeout, expected_sessions=expected_sessions)

    @property
    def state(self):
        """The version, and the value of all weights: each update adds the same number to all of them."""
        with self.store.snapshot() as snapshot:
            vector = snapshot.weights.vector
            assert vector.min() == vector.max()
            return snapshot.version, float(vector[0])

    @property
    def value(self):
        return self.state[1]


def push(client, size, value, base, batch, last=False):
    point = ExchangePoint(0, batch, 1, 32, 0.1, 1.0, logs={"loss": 0.5} if last else None)
    return client.push([np.full(size, value, np.float32)], (), base, point)[0]


def train(address, size, worker, pushes):
    """Train as a worker: pull, check that the weights are consistent, push. Returns the sum of the pushed values."""
    draw, total, version = random.Random(worker), 0, -1
    with ParameterClient(address, payload_format(size), worker, 100 + worker) as client:
        assert client.lease().sequence == 0
        for batch in range(1, pushes + 1):
            pulled = client.pull()
            vector = pulled.weights.vector
            assert vector.min() == vector.max(), "torn"
            assert pulled.version >= max(version, batch - 1)
            version, value = pulled.version, draw.randint(1, 100)
            push(client, size, value, version, batch, batch == pushes)
            total += value
        client.finish()
    return total


@pytest.mark.parametrize("pushes", [30, pytest.param(300, marks=pytest.mark.soak)])
@over_tcp
def test_updates_are_applied_once_over_connections_that_keep_breaking(name, pushes):
    """Requests and replies are lost, whole or in part: an update whose reply was lost is sent again."""
    workers, size = 3, 50_000
    server, draw = Server(size, workers, pushes), random.Random(0)

    def change(way, before, data):
        rate = 0.2 if way == "back" and len(data) < 1000 else 0.1  # replies to pushes are short
        return LastBytes(data[: draw.randrange(len(data))]) if draw.random() < rate else data

    with server.at(name) as address, Relay(address, change) as relay, ThreadPoolExecutor(workers) as threads:
        training = [threads.submit(train, relay.address, size, worker, pushes) for worker in range(workers)]
        assert sum(done.result() for done in training) == server.value
    stats = server.service.stats(name)
    assert (stats.pushes, stats.rejected_requests) == (workers * pushes, {})
    assert stats.duplicates > 0  # otherwise no reply was lost, and the test shows little


# Damaged bytes

LENGTHS = [0, 1, 15, 16, 17, 255, MAX_HEADER_BYTES - 1, MAX_HEADER_BYTES, MAX_HEADER_BYTES + 1, 2**31 - 1, 2**31, 2**32 - 1]


def mutate(draw, data):
    """The bytes with pieces changed, removed, inserted or repeated, and numbers written over possible lengths."""
    changed = bytearray(data)
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(changed) + 1)
        until = min(len(changed), at + draw.choice([1, 4, 16, 44, 200, 5000]))
        piece = bytes(changed[at:until])
        match draw.randrange(5):
            case 0:
                changed[at:until] = bytes(byte ^ 1 << draw.randrange(8) for byte in piece[:1]) + piece[1:]
            case 1:
                changed[at:until] = draw.choice([b"", piece * 2, draw.randbytes(len(piece)) + piece])
            case 2:
                changed[at : at + 4] = draw.choice(LENGTHS).to_bytes(4, "big")
            case 3:
                del changed[at:]
            case 4:
                digits = [place for place, byte in enumerate(changed[:5000]) if byte in b"0123456789"]
                place = draw.choice(digits or [0])
                changed[place : place + 1] = draw.choice([b"0", b"9", b"-", b"99999999"])
    return bytes(changed)


def direct_push(caller, server):
    """Add one to all weights, as the worker with the lease."""
    version = server.store.version
    point = ExchangePoint(0, 1, 1, 32, 0.1, 1.0)
    fields = {"worker": 0, "lease": 1, "sequence": version + 1, "base": version} | point.pack()
    ones = np.ones(server.payload_format.size, np.float32)
    caller.call("update", fields, (ones.data.cast("B"),))


@contextmanager
def fuzzed_server(name):
    """A server with a granted lease, its address, and a check that it is intact."""
    server = Server(1000, 1, 10)
    with server.at(name, timeout=1.0, expected_sessions=4) as address, calling(patient(address)) as caller:
        assert caller.call("lease", {"worker": 0, "attempt": 1})[0]["lease"] == 1

        def check():
            time.sleep(0.05)  # an update whose connection broke may still be applied
            before, value = server.state
            assert value == before
            started = time.monotonic()
            for _ in range(2):
                with contextlib.suppress(TransportError):  # the server may have closed its connection for a newer one
                    direct_push(caller, server)
                    break
            assert server.state == (before + 1, before + 1)
            assert time.monotonic() - started < 10

        check()
        yield server, address, check


@pytest.mark.parametrize("cases", [150, pytest.param(5000, marks=pytest.mark.soak)])
@over_tcp
def test_damaged_bytes_of_an_unauthenticated_client_change_nothing(name, cases):
    """The client replays an authenticated session with changes."""
    draw = random.Random(2)
    with fuzzed_server(name) as (server, address, check):
        with Relay(address) as relay, calling(patient(relay.address)) as caller:
            caller.call("health", {})
            direct_push(caller, server)
            caller.call("parameters", {})
            line = bytes(relay.carried["there"])
        threads, files = threading.active_count(), psutil.Process().num_fds()
        version = server.store.version
        for case in range(1, cases + 1):
            if case % 3:
                raw_response(address, mutate(draw, line))
            else:  # a hello that was not used before, made without the secret
                raw_response(address, mutate(draw, line[:12] + draw.randbytes(16) + line[28:]))
            assert server.store.version == version
            if case % 50 == 0:
                check()
                version = server.store.version
        assert eventually(lambda: threading.active_count() <= threads + 1)
        assert eventually(lambda: psutil.Process().num_fds() <= files + 2)


@pytest.mark.parametrize("cases", [150, pytest.param(5000, marks=pytest.mark.soak)])
@over_tcp
def test_damaged_bytes_of_an_authenticated_peer_are_not_applied(name, cases):
    """Requests and replies are changed in transit."""
    draw, plan = random.Random(3), {}

    def change(way, before, data):
        if way == plan["way"] and before <= plan["at"] < before + len(data):
            return LastBytes(mutate(draw, data))
        return data

    with fuzzed_server(name) as (server, address, check), Relay(address, change) as relay:
        plan.update(way="there", at=2**40)
        with calling(patient(relay.address)) as caller:
            direct_push(caller, server)
        lengths = {way: len(carried) for way, carried in relay.carried.items()}
        failures = 0
        for case in range(1, cases + 1):
            plan["way"] = draw.choice(["there", "there", "back"])
            plan["at"] = draw.randrange(lengths[plan["way"]])
            before = server.store.version
            with calling(relay.address) as caller:
                try:
                    direct_push(caller, server)
                except TransportError:
                    failures += 1
            version, value = server.state
            assert value == version
            assert before <= version <= before + 2  # the update before may have been applied late
            if case % 50 == 0:
                check()
        assert failures > cases // 2


# Idle and slow connections


@pytest.mark.parametrize("idle", [120, pytest.param(600, marks=pytest.mark.soak)])
@over_tcp
def test_workers_are_served_beside_idle_connections(name, idle):
    """Every second idle connection is an authenticated one, every fourth is in the middle of its first message."""
    server = Server(FLOATS, 1, 100)
    with server.at(name, expected_sessions=idle) as address, contextlib.ExitStack() as stack:
        client = stack.enter_context(ParameterClient(address, server.payload_format, 0, 1))
        client.lease()
        push(client, FLOATS, 1, 0, 1)
        memory, threads = psutil.Process().memory_info().rss, threading.active_count()
        for number in range(idle):
            if number % 2:
                connection = stack.enter_context(socket.create_connection((address.host, address.port), 5))
                if number % 4 == 1:
                    connection.sendall(b"sparkkeras" if name == "socket" else b"POST /hello")
            else:
                stack.enter_context(calling(address)).call("health", {})
        for batch in range(2, 22):
            started = time.monotonic()
            push(client, FLOATS, 1, client.pull().version, batch)
            assert time.monotonic() - started < 20
        assert threading.active_count() - threads < idle // 2 + 30  # one for each authenticated connection
        assert psutil.Process().memory_info().rss - memory < 100 * MB
        assert server.value == 21


@over_tcp
def test_the_server_recovers_from_a_lack_of_open_file_limit(name):
    server = Server(FLOATS, 1, 10)
    with server.at(name) as address, ParameterClient(address, server.payload_format, 0, 1) as client:
        client.lease()
        push(client, FLOATS, 1, 0, 1)
        connections = [socket.socket() for _ in range(30)]
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with socket.socket() as next_free:
            lowest = next_free.fileno()
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                socket.socket()
            for connection in connections:
                connection.settimeout(5)
                connection.connect((address.host, address.port))
            time.sleep(0.3)  # the server tries to accept them
            push(client, FLOATS, 1, client.pull().version, 2)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for connection in connections:
                connection.close()
        with ParameterClient(address, server.payload_format, 0, 1) as another:
            another.lease()
            push(another, FLOATS, 1, another.pull().version, 3)
    assert server.value == 3
