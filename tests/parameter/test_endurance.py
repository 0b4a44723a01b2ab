"""The parameter server under load, over breaking connections, damaged bytes and idle connections."""

import contextlib
import logging
import multiprocessing
import random
import resource
import socket
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import psutil
import pytest

from sparkkeras.parameter.exchange import ExchangePoint, PartitionPlan
from sparkkeras.parameter.ledger import Ledger
from sparkkeras.parameter.rules import Downpour
from sparkkeras.parameter.service import ArraySpecs, ParameterClient, ParameterService, PayloadFormat
from sparkkeras.parameter.store import Store
from sparkkeras.rpc.socket import _header, _length
from sparkkeras.rpc.transport import Endpoint, TransportError, make_transport, read_body
from sparkkeras.rpc.wire import HELLO_BYTES, MAX_HEADER_BYTES, Acceptor, Handshake, Header, Secret, Session, WireError
from sparkkeras.weights import Flat
from tests.rpc.test_transports import MB, LastBytes, Relay, calling, encrypts, eventually, over_tcp, patient, raw_response

FLOATS = MB // 4

_log = logging.getLogger(__name__)


class Server:
    """A parameter server whose weights are zeros, to which updates add integers."""

    def __init__(self, size, workers, pushes):
        weights = Flat(np.zeros(size, np.float32))
        self.payload_format = PayloadFormat(size, "float32", ArraySpecs(()), ArraySpecs(()))
        self.store = Store(weights, size, Downpour(), {}, workers)
        self.ledger = Ledger(
            self.store,
            {worker: PartitionPlan(pushes) for worker in range(workers)},
            range(1),
            num_concurrent=workers,
            validates=lambda epoch: False,
            max_staleness=None,
            lease_seconds=60.0,
            warmup_timeout=0.0,
            on_epoch=lambda epoch: None,
            clock=time.monotonic,
        )
        self.service = ParameterService(self.ledger, self.payload_format)

    @contextmanager
    def at(self, name, **endpoint):
        endpoint = {"host": "127.0.0.1", "listen": "127.0.0.1", "timeout": 30.0, "expected_sessions": 16} | endpoint
        with make_transport(name).serve(self.service, Endpoint(**endpoint), Secret.fresh()) as address:
            yield address

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
    payload_format = PayloadFormat(size, "float32", ArraySpecs(()), ArraySpecs(()))
    with ParameterClient(address, payload_format, worker, 100 + worker) as client:
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


def read_weights(address, size, stop):
    """Pull until ``stop`` is set; the number of different versions."""
    seen = []
    payload_format = PayloadFormat(size, "float32", ArraySpecs(()), ArraySpecs(()))
    with ParameterClient(address, payload_format, 0, 99) as client:
        while not stop.is_set():
            pulled = client.pull()
            vector = pulled.weights.vector
            assert vector.min() == vector.max(), "torn"
            assert not seen or pulled.version >= seen[-1]
            seen.append(pulled.version)
    return len(set(seen))


def spawned(workers):
    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))


@pytest.fixture(scope="module")
def three():
    """Processes for the tests of all transports, since each takes seconds to start."""
    with spawned(3) as processes:
        yield processes


def check_load(name, processes, workers, pushes, size, encrypt=False, readers=0):
    server, stop = Server(size, workers, pushes), threading.Event()
    with server.at(name, expected_sessions=workers, encrypt=encrypt) as address, ThreadPoolExecutor(8) as threads:
        reading = [threads.submit(read_weights, address, size, stop) for _ in range(readers)]
        started = time.monotonic()
        try:
            training = [processes.submit(train, address, size, worker, pushes) for worker in range(workers)]
            expected = sum(done.result() for done in training)
        finally:
            stop.set()
        seconds = time.monotonic() - started
        assert all(done.result() > 1 for done in reading)
    stats = server.service.stats(name)
    assert server.value == expected < 2**24
    assert (server.store.version, stats.pushes, stats.duplicates, stats.rejected_requests) == (
        workers * pushes,
        workers * pushes,
        0,
        {},
    )
    assert stats.steps == dict.fromkeys(range(workers), pushes)
    assert stats.received_bytes == 4 * size * workers * pushes
    assert sum(stats.staleness.values()) == workers * pushes
    _log.info(
        "%s: %d x %d of %.0f MB in %.1f s, %.0f MB/s there, %.0f MB/s back",
        name, workers, pushes, 4 * size / MB, seconds, stats.received_bytes / MB / seconds, stats.sent_bytes / MB / seconds,
    )  # fmt: skip


@over_tcp
def test_updates_of_many_processes_are_applied_once_each(name, three):
    check_load(name, three, 3, 10, 2 * FLOATS, readers=1)


@encrypts
@pytest.mark.soak
@over_tcp
def test_8_processes_push_10_mb_a_hundred_times(name, encrypt):
    with spawned(8) as processes:
        check_load(name, processes, 8, 100, 10 * FLOATS, encrypt)


@pytest.mark.soak
@over_tcp
def test_32_processes_push_1_mb_two_hundred_times_beside_readers(name):
    with spawned(32) as processes:
        check_load(name, processes, 32, 200, FLOATS, readers=4)


@pytest.mark.parametrize("pushes", [30, pytest.param(300, marks=pytest.mark.soak)])
@over_tcp
def test_updates_are_applied_once_over_connections_that_keep_breaking(name, pushes):
    """Requests and replies are lost, whole or in part: an update whose reply was lost is sent again."""
    workers, size = 3, 50_000
    server, draw = Server(size, workers, pushes), random.Random(0)

    def change(way, before, data):
        rate = 0.2 if way == "back" and len(data) < 1000 else 0.1  # replies to pushes are short
        return LastBytes(data[: draw.randrange(len(data))]) if draw.random() < rate else data

    with server.at(name, timeout=30.0) as address, Relay(address, change) as relay, ThreadPoolExecutor(workers) as threads:
        training = [threads.submit(train, relay.address, size, worker, pushes) for worker in range(workers)]
        assert sum(done.result() for done in training) == server.value
    stats = server.service.stats(name)
    assert (stats.pushes, stats.rejected_requests) == (workers * pushes, {})
    assert stats.duplicates > 0  # otherwise no reply was lost, and the test shows little
    _log.info("%s: %d pushes, %d duplicates", name, stats.pushes, stats.duplicates)


# Damaged bytes

LENGTHS = [0, 1, 15, 16, 17, 255, MAX_HEADER_BYTES - 1, MAX_HEADER_BYTES, MAX_HEADER_BYTES + 1, 2**31 - 1, 2**31, 2**32 - 1]


def mutate(draw, data):
    """The bytes with a few bits flipped, pieces removed, inserted or repeated, and numbers written over possible lengths."""
    changed = bytearray(data)
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(changed) + 1)
        until = min(len(changed), at + draw.choice([1, 4, 16, 44, 200, 5000]))
        match draw.randrange(7):
            case 0:
                changed[at:until] = bytes(byte ^ 1 << draw.randrange(8) for byte in changed[at : at + 1])
            case 1:
                del changed[at:until]
            case 2:
                changed[at:at] = draw.randbytes(until - at)
            case 3:
                changed[at:at] = changed[at:until]
            case 4:
                changed[at : at + 4] = draw.choice(LENGTHS).to_bytes(4, "big")
            case 5:
                del changed[at:]
            case 6:
                digits = [place for place, byte in enumerate(changed[:5000]) if byte in b"0123456789"]
                place = draw.choice(digits or [0])
                changed[place : place + 1] = draw.choice([b"0", b"1", b"9", b"-", b"99999999"])
    return bytes(changed)


def message_bytes(session, messages):
    """The bytes of messages."""
    line = b""
    for header, body in messages:
        sealed = session.seal(header)
        line += len(sealed).to_bytes(4, "big") + sealed
        if header.body:
            line += b"".join(bytes(chunk) for chunk in session.outgoing([memoryview(body)]))
    return line


def parse(data, secret, session):
    """The messages in the bytes of a connection, up to the first invalid one."""
    ours, theirs = socket.socketpair()
    messages = []
    with ours, theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        ours.settimeout(5)
        with contextlib.suppress(WireError, ConnectionError):
            hello = bytearray(HELLO_BYTES)
            if ours.recv_into(hello, HELLO_BYTES, socket.MSG_WAITALL) < HELLO_BYTES:
                return messages
            Acceptor(secret, False).accept(bytes(hello))
            while True:
                header = _header(ours, session, _length(ours))
                if header.body > 10_000:
                    break
                body = memoryview(bytearray(header.body))
                read_body(ours.recv_into, session, body)
                messages.append((header, bytes(body)))
    return messages


@pytest.mark.parametrize("cases", [1000, pytest.param(100_000, marks=pytest.mark.soak)])
@encrypts
def test_damaged_bytes_yield_a_prefix_of_the_messages_or_nothing(encrypt, cases):
    draw, secret = random.Random(1), Secret(bytes(range(32)))
    there, back = draw.randbytes(32), draw.randbytes(32)
    sent = [(Header("lease", {"worker": 3, "attempt": 7}, 0), b"")]
    for sequence, size in enumerate([1, 3000, 0, 500]):
        sent.append((Header("update", {"worker": 3, "sequence": sequence, "ended": None}, size), draw.randbytes(size)))
    line = message_bytes(Session(there, back, encrypt), sent)
    line = Handshake(secret, encrypt).hello() + line
    assert parse(line, secret, Session(back, there, encrypt)) == sent
    lengths = []
    for _ in range(cases):
        got = parse(mutate(draw, line), secret, Session(back, there, encrypt))
        assert got == sent[: len(got)]
        lengths.append(len(got))
    assert set(lengths) == set(range(len(sent) + 1))  # the damage hit every message


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
        version, started = server.store.version, time.monotonic()
        for case in range(1, cases + 1):
            if case % 3:
                raw_response(address, mutate(draw, line))
            else:  # a hello that was not used before, made without the secret
                raw_response(address, mutate(draw, line[:12] + draw.randbytes(16) + line[28:]))
            assert server.store.version == version
            if case % 50 == 0:
                check()
                version = server.store.version
        _log.info("%s: %d clients in %.1f s", name, cases, time.monotonic() - started)
        assert len(threads_later(threads)) <= threads + 1
        assert psutil.Process().num_fds() <= files + 2


def threads_later(count, seconds=5):
    deadline = time.monotonic() + seconds
    while threading.active_count() > count and time.monotonic() < deadline:
        time.sleep(0.01)
    return threading.enumerate()


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
        failures, started = 0, time.monotonic()
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
        _log.info("%s: %d damaged sessions in %.1f s, %d failed", name, cases, time.monotonic() - started, failures)


# Idle and slow connections


@contextmanager
def open_file_limit(files):
    """Let this process open ``files`` more files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = psutil.Process().num_fds() + files + 100
    if hard != resource.RLIM_INFINITY and hard < needed:
        pytest.skip(f"needs {needed} open files, and {hard} are allowed")
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Drip:
    """Clients that send the bytes of a session at one byte every 0.2 seconds, and reconnect when the server closes."""

    def __init__(self, address, data, count):
        self._address, self._data = (address.host, address.port), data
        self._connections = {self._connected(): 0 for _ in range(count)}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="drip", daemon=True)
        self.reconnects = 0

    def _connected(self):
        connection = socket.create_connection(self._address, 5)
        connection.setblocking(False)
        return connection

    def _run(self):
        while not self._stop.wait(0.2):
            for connection, sent in [*self._connections.items()]:
                try:
                    connection.send(self._data[sent : sent + 1] or b"\0")
                    with contextlib.suppress(BlockingIOError):
                        if not connection.recv(100):
                            raise ConnectionResetError
                    self._connections[connection] += 1
                except OSError:
                    del self._connections[connection]
                    connection.close()
                    self._connections[self._connected()] = 0
                    self.reconnects += 1

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()
        for connection in self._connections:
            connection.close()


@pytest.mark.parametrize(("idle", "slow", "seconds"), [(100, 20, 1), pytest.param(500, 100, 15, marks=pytest.mark.soak)])
@over_tcp
def test_workers_are_served_beside_idle_and_slow_connections(name, idle, slow, seconds):
    """Every second idle connection is an authenticated one."""
    server = Server(FLOATS, 1, 1000)
    with (
        open_file_limit(2 * (idle + slow) + 50),
        server.at(name, expected_sessions=idle) as address,
        contextlib.ExitStack() as stack,
    ):
        with Relay(address) as relay, calling(relay.address) as caller:
            caller.call("health", {})
            data = bytes(relay.carried["there"])
        client = stack.enter_context(ParameterClient(address, server.payload_format, 0, 1))
        client.lease()
        pushes = 0

        def exchange():
            nonlocal pushes
            pushes += 1
            started = time.monotonic()
            push(client, FLOATS, 1, client.pull().version, pushes)
            return time.monotonic() - started

        exchange()
        process = psutil.Process()
        memory, threads = process.memory_info().rss, threading.active_count()
        for number in range(idle):
            if number % 2:
                connection = socket.create_connection((address.host, address.port), 5)
                stack.callback(connection.close)
                if number % 4 == 1:
                    connection.sendall(data[:10])
            else:
                caller = stack.enter_context(calling(address))
                caller.call("health", {})
        durations, most_threads, grown = [], 0, 0
        with Drip(address, data, slow) as drip:
            until = time.monotonic() + seconds
            while time.monotonic() < until or not durations:
                time.sleep(0.05)
                durations.append(exchange())
                most_threads = max(most_threads, threading.active_count() - threads)
                grown = max(grown, process.memory_info().rss - memory)
            # The server still accepts a new client.
            started = time.monotonic()
            with calling(address) as another:
                another.call("health", {})
            entered = time.monotonic() - started
        assert server.value == pushes
        _log.info(
            "%s: %d idle, %d slow: slowest exchange %.3f s, entered in %.3f s, %d threads, %.1f MB more, %d reconnects",
            name, idle, slow, max(durations), entered, most_threads, grown / MB, drip.reconnects,
        )  # fmt: skip
        assert max(durations) < 20
        assert entered < 20
        assert grown < 100 * MB
        assert most_threads < idle // 2 + 150


@pytest.mark.soak
@over_tcp
def test_the_connection_of_a_slow_unauthenticated_client_is_closed(name):
    """However steadily it sends."""
    server = Server(10, 1, 10)
    with server.at(name) as address:
        with Relay(address) as relay, calling(relay.address) as caller:
            caller.call("health", {})
            data = bytes(relay.carried["there"])
        started = time.monotonic()
        with socket.create_connection((address.host, address.port), 5) as connection:
            with contextlib.suppress(ConnectionError):
                for byte in data:
                    connection.sendall(bytes([byte]))
                    connection.settimeout(0.2)
                    with contextlib.suppress(TimeoutError):
                        if not connection.recv(100):
                            break
        assert 1 < time.monotonic() - started < 8


@pytest.mark.parametrize("turns", [4, pytest.param(20, marks=pytest.mark.soak)])
@over_tcp
def test_the_server_withstands_a_flood_of_connections(name, turns):
    server = Server(FLOATS, 1, 10)
    with open_file_limit(1000), server.at(name) as address, ParameterClient(address, server.payload_format, 0, 1) as client:
        client.lease()
        threads, files = threading.active_count(), psutil.Process().num_fds()
        most = 0
        for turn in range(turns):
            connections = [socket.create_connection((address.host, address.port), 5) for _ in range(200)]
            most = max(most, len(threads_later(threads + 100, 2)) - threads)
            started = time.monotonic()
            push(client, FLOATS, 1, client.pull().version, turn + 1)
            assert time.monotonic() - started < 20
            for connection in connections:
                connection.close()
        _log.info("%s: %d threads more", name, most)
        assert most < 150
        assert eventually(lambda: threading.active_count() <= threads)
        assert eventually(lambda: psutil.Process().num_fds() <= files)
        assert server.value == turns


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
            time.sleep(0.3)
            push(client, FLOATS, 1, client.pull().version, 2)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for connection in connections:
                connection.close()
        started = time.monotonic()
        with ParameterClient(address, server.payload_format, 0, 1) as another:
            another.lease()
            push(another, FLOATS, 1, another.pull().version, 3)
        assert time.monotonic() - started < 20
    assert server.value == 3
