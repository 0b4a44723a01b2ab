"""What wears a parameter server out: load, lines that break, damaged bytes, and connections that do nothing."""

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

from sparkkeras.parameter.ledger import Ledger, PartitionPlan
from sparkkeras.parameter.rules import Downpour
from sparkkeras.parameter.service import Arrays, Contents, ParameterClient, ParameterService
from sparkkeras.parameter.store import Store
from sparkkeras.rpc.socket import _head, _length
from sparkkeras.rpc.transport import Endpoint, TransportError, make_transport, read_body
from sparkkeras.rpc.wire import HEAD_BYTES, HELLO_BYTES, Greeting, Head, Reception, Secret, Session, WireError
from sparkkeras.weights import Flat
from tests.rpc.test_transports import MB, Last, Relay, answer_to, calling, encrypts, eventually, over_tcp, patient

FLOATS = MB // 4

_log = logging.getLogger(__name__)


class Server:
    """A parameter server of so many zeros, to which integers are added."""

    def __init__(self, size, workers, pushes):
        weights = Flat(np.zeros(size, np.float32))
        self.contents = Contents(size, "float32", Arrays(()), Arrays(()))
        self.store = Store(weights, size, Downpour(), {}, workers)
        self.ledger = Ledger(
            {worker: PartitionPlan(pushes) for worker in range(workers)},
            range(1),
            at_once=workers,
            validates=lambda epoch: False,
            max_staleness=None,
            lease_seconds=60.0,
            warmup_timeout=0.0,
            on_epoch=lambda epoch: None,
            clock=time.monotonic,
        )
        self.service = ParameterService(self.store, self.ledger, self.contents)

    @contextmanager
    def at(self, name, **where):
        where = {"host": "127.0.0.1", "listen": "127.0.0.1", "timeout": 30.0, "members": 16} | where
        with make_transport(name).serve(self.service, Endpoint(**where), Secret.fresh()) as address:
            yield address

    @property
    def state(self):
        """The version, and what all weights are; they are the same, since each update adds the same to all."""
        with self.store.snapshot() as snapshot:
            vector = snapshot.weights.vector
            assert vector.min() == vector.max()
            return snapshot.version, float(vector[0])

    @property
    def value(self):
        return self.state[1]


def push(client, size, value, base, batch, last=False):
    ended = {"logs": {"loss": 0.5}, "seconds": 1.0, "learning_rate": 0.1} if last else None
    sent = np.full(size, value, np.float32)
    told = {"epoch": 0, "batch": batch, "steps": 1, "rows": 32, "learning_rate": 0.1, "ended": ended}
    return client.push([sent], (), (), base=base, **told)


def train(address, size, worker, pushes):
    """A worker's part: pull, look whether what came is of one piece, push. The sum of what it pushed."""
    draw, total, version = random.Random(worker), 0, -1
    contents = Contents(size, "float32", Arrays(()), Arrays(()))
    with ParameterClient(address, contents, worker, 100 + worker) as client:
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


def look_on(address, size, stop):
    """Pull until there is no more to see; how often something new came."""
    seen = []
    contents = Contents(size, "float32", Arrays(()), Arrays(()))
    with ParameterClient(address, contents, 0, 99) as client:
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
    """Processes for all transports, since each takes seconds to begin."""
    with spawned(3) as processes:
        yield processes


def check_load(name, processes, workers, pushes, size, encrypt=False, onlookers=0):
    server, stop = Server(size, workers, pushes), threading.Event()
    with server.at(name, members=workers, encrypt=encrypt) as address, ThreadPoolExecutor(8) as threads:
        watching = [threads.submit(look_on, address, size, stop) for _ in range(onlookers)]
        started = time.monotonic()
        try:
            training = [processes.submit(train, address, size, worker, pushes) for worker in range(workers)]
            expected = sum(done.result() for done in training)
        finally:
            stop.set()
        seconds = time.monotonic() - started
        assert all(done.result() > 1 for done in watching)
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
def test_updates_of_many_processes_count_once_each(name, three):
    check_load(name, three, 3, 10, 2 * FLOATS, onlookers=1)


@encrypts
@pytest.mark.soak
@over_tcp
def test_8_processes_push_10_mb_a_hundred_times(name, encrypt):
    with spawned(8) as processes:
        check_load(name, processes, 8, 100, 10 * FLOATS, encrypt)


@pytest.mark.soak
@over_tcp
def test_32_processes_push_1_mb_two_hundred_times_while_others_look_on(name):
    with spawned(32) as processes:
        check_load(name, processes, 32, 200, FLOATS, onlookers=4)


@pytest.mark.parametrize("pushes", [30, pytest.param(300, marks=pytest.mark.soak)])
@over_tcp
def test_updates_count_once_over_a_line_that_keeps_breaking(name, pushes):
    """Questions and answers are lost, whole or in part: what was applied before its answer was lost is sent again."""
    workers, size = 3, 50_000
    server, draw = Server(size, workers, pushes), random.Random(0)

    def change(way, before, data):
        often = 0.2 if way == "back" and len(data) < 1000 else 0.1  # answers to pushes are short
        return Last(data[: draw.randrange(len(data))]) if draw.random() < often else data

    with server.at(name, timeout=30.0) as address, Relay(address, change) as relay, ThreadPoolExecutor(workers) as threads:
        training = [threads.submit(train, relay.address, size, worker, pushes) for worker in range(workers)]
        assert sum(done.result() for done in training) == server.value
    stats = server.service.stats(name)
    assert (stats.pushes, stats.rejected_requests) == (workers * pushes, {})
    assert stats.duplicates > 0  # otherwise no answer was lost, and this showed little
    _log.info("%s: %d pushes, %d came again", name, stats.pushes, stats.duplicates)


# Damaged bytes

LENGTHS = [0, 1, 15, 16, 17, 255, HEAD_BYTES - 1, HEAD_BYTES, HEAD_BYTES + 1, 2**31 - 1, 2**31, 2**32 - 1]


def mutated(draw, data):
    """Bytes with a few bits flipped, pieces cut, put in or repeated, and numbers put where a length may be."""
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


def recorded(session, messages):
    """What travels of messages."""
    line = b""
    for head, body in messages:
        sealed = session.seal(head)
        line += len(sealed).to_bytes(4, "big") + sealed
        if head.body:
            line += b"".join(bytes(chunk) for chunk in session.outgoing([memoryview(body)]))
    return line


def parsed(data, secret, session):
    """The messages in what comes over a connection, up to the first that is none."""
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
            Reception(secret, False).welcome(bytes(hello))
            while True:
                head = _head(ours, session, _length(ours))
                if head.body > 10_000:
                    break
                body = memoryview(bytearray(head.body))
                read_body(ours.recv_into, session, body)
                messages.append((head, bytes(body)))
    return messages


@pytest.mark.parametrize("cases", [1000, pytest.param(100_000, marks=pytest.mark.soak)])
@encrypts
def test_of_damaged_bytes_comes_a_beginning_of_what_was_sent_or_nothing(encrypt, cases):
    draw, secret = random.Random(1), Secret(bytes(range(32)))
    there, back = draw.randbytes(32), draw.randbytes(32)
    sent = [(Head("lease", {"worker": 3, "attempt": 7}, 0), b"")]
    for sequence, size in enumerate([1, 3000, 0, 500]):
        sent.append((Head("update", {"worker": 3, "sequence": sequence, "ended": None}, size), draw.randbytes(size)))
    line = recorded(Session(there, back, encrypt), sent)
    line = Greeting(secret, encrypt).hello() + line
    assert parsed(line, secret, Session(back, there, encrypt)) == sent
    lengths = []
    for _ in range(cases):
        got = parsed(mutated(draw, line), secret, Session(back, there, encrypt))
        assert got == sent[: len(got)]
        lengths.append(len(got))
    assert set(lengths) == set(range(len(sent) + 1))  # all depths were reached


def direct_push(caller, server):
    """Add one to all weights, as the worker that holds the lease."""
    version = server.store.version
    fields = {"worker": 0, "lease": 1, "sequence": version + 1, "base": version, "epoch": 0}
    fields |= {"batch": 1, "steps": 1, "rows": 32, "learning_rate": 0.1, "ended": None}
    ones = np.ones(server.contents.size, np.float32)
    caller.call("update", fields, (ones.data.cast("B"),))


@contextmanager
def open_to_fuzz(name):
    """A server with a lease, its address, and a check that nothing has happened to it."""
    server = Server(1000, 1, 10)
    with server.at(name, timeout=1.0, members=4) as address, calling(patient(address)) as caller:
        assert caller.call("lease", {"worker": 0, "attempt": 1})[0]["lease"] == 1

        def check():
            time.sleep(0.05)  # what was cut off may still be taken up
            before, value = server.state
            assert value == before
            started = time.monotonic()
            for _ in range(2):
                with contextlib.suppress(TransportError):  # its own connection may be the one that had to go
                    direct_push(caller, server)
                    break
            assert server.state == (before + 1, before + 1)
            assert time.monotonic() - started < 10

        check()
        yield server, address, check


@pytest.mark.parametrize("cases", [150, pytest.param(5000, marks=pytest.mark.soak)])
@over_tcp
def test_damaged_bytes_of_a_stranger_change_nothing(name, cases):
    """It has heard a member talk, and says that again with changes."""
    draw = random.Random(2)
    with open_to_fuzz(name) as (server, address, check):
        with Relay(address) as relay, calling(patient(relay.address)) as caller:
            caller.call("health", {})
            direct_push(caller, server)
            caller.call("parameters", {})
            line = bytes(relay.carried["there"])
        threads, files = threading.active_count(), psutil.Process().num_fds()
        version, started = server.store.version, time.monotonic()
        for case in range(1, cases + 1):
            if case % 3:
                answer_to(address, mutated(draw, line))
            else:  # a greeting of nobody, which is not the one that was here before
                answer_to(address, mutated(draw, line[:12] + draw.randbytes(16) + line[28:]))
            assert server.store.version == version
            if case % 50 == 0:
                check()
                version = server.store.version
        _log.info("%s: %d strangers in %.1f s", name, cases, time.monotonic() - started)
        assert len(threads_later(threads)) <= threads + 1
        assert psutil.Process().num_fds() <= files + 2


def threads_later(count, seconds=5):
    deadline = time.monotonic() + seconds
    while threading.active_count() > count and time.monotonic() < deadline:
        time.sleep(0.01)
    return threading.enumerate()


@pytest.mark.parametrize("cases", [150, pytest.param(5000, marks=pytest.mark.soak)])
@over_tcp
def test_damaged_bytes_of_a_member_are_no_updates(name, cases):
    """Somebody on the line changes what members say and what they are told."""
    draw, plan = random.Random(3), {}

    def change(way, before, data):
        if way == plan["way"] and before <= plan["at"] < before + len(data):
            return Last(mutated(draw, data))
        return data

    with open_to_fuzz(name) as (server, address, check), Relay(address, change) as relay:
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
            assert before <= version <= before + 2  # the one before may have been taken up late
            if case % 50 == 0:
                check()
        assert failures > cases // 2
        _log.info("%s: %d damaged conversations in %.1f s, %d failed", name, cases, time.monotonic() - started, failures)


# Connections that do nothing


@contextmanager
def room_for(files):
    """Let this process have so many more files open."""
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
    """Strangers that say a member's words, one byte every 0.2 seconds, and come again when they are hung up on."""

    def __init__(self, address, words, count):
        self._where, self._words = (address.host, address.port), words
        self._connections = {self._connected(): 0 for _ in range(count)}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="drip", daemon=True)
        self.again = 0

    def _connected(self):
        connection = socket.create_connection(self._where, 5)
        connection.setblocking(False)
        return connection

    def _run(self):
        while not self._stop.wait(0.2):
            for connection, said in [*self._connections.items()]:
                try:
                    connection.send(self._words[said : said + 1] or b"\0")
                    with contextlib.suppress(BlockingIOError):
                        if not connection.recv(100):
                            raise ConnectionResetError
                    self._connections[connection] += 1
                except OSError:
                    del self._connections[connection]
                    connection.close()
                    self._connections[self._connected()] = 0
                    self.again += 1

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
def test_members_are_served_beside_idle_and_slow_connections(name, idle, slow, seconds):
    """Of the idle ones every second is a member that has nothing to say."""
    server = Server(FLOATS, 1, 1000)
    with room_for(2 * (idle + slow) + 50), server.at(name, members=idle) as address, contextlib.ExitStack() as stack:
        with Relay(address) as relay, calling(relay.address) as caller:
            caller.call("health", {})
            words = bytes(relay.carried["there"])
        client = stack.enter_context(ParameterClient(address, server.contents, 0, 1))
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
                    connection.sendall(words[:10])
            else:
                member = stack.enter_context(calling(address))
                member.call("health", {})
        took, most_threads, grown = [], 0, 0
        with Drip(address, words, slow) as drip:
            until = time.monotonic() + seconds
            while time.monotonic() < until or not took:
                time.sleep(0.05)
                took.append(exchange())
                most_threads = max(most_threads, threading.active_count() - threads)
                grown = max(grown, process.memory_info().rss - memory)
            # Somebody new is let in too.
            started = time.monotonic()
            with calling(address) as another:
                another.call("health", {})
            entered = time.monotonic() - started
        assert server.value == pushes
        _log.info(
            "%s: %d idle, %d slow: slowest exchange %.3f s, entered in %.3f s, %d threads, %.1f MB more, %d came again",
            name, idle, slow, max(took), entered, most_threads, grown / MB, drip.again,
        )  # fmt: skip
        assert max(took) < 20
        assert entered < 20
        assert grown < 100 * MB
        assert most_threads < idle // 2 + 150


@pytest.mark.soak
@over_tcp
def test_slow_strangers_are_hung_up_on(name):
    """However steadily they go on talking."""
    server = Server(10, 1, 10)
    with server.at(name) as address:
        with Relay(address) as relay, calling(relay.address) as caller:
            caller.call("health", {})
            words = bytes(relay.carried["there"])
        started = time.monotonic()
        with socket.create_connection((address.host, address.port), 5) as connection:
            with contextlib.suppress(ConnectionError):
                for byte in words:
                    connection.sendall(bytes([byte]))
                    connection.settimeout(0.2)
                    with contextlib.suppress(TimeoutError):
                        if not connection.recv(100):
                            break
        assert 1 < time.monotonic() - started < 8


@pytest.mark.parametrize("turns", [4, pytest.param(20, marks=pytest.mark.soak)])
@over_tcp
def test_a_flood_of_connections_that_come_and_go(name, turns):
    server = Server(FLOATS, 1, 10)
    with room_for(1000), server.at(name) as address, ParameterClient(address, server.contents, 0, 1) as client:
        client.lease()
        threads, files = threading.active_count(), psutil.Process().num_fds()
        most = 0
        for turn in range(turns):
            strangers = [socket.create_connection((address.host, address.port), 5) for _ in range(200)]
            most = max(most, len(threads_later(threads + 100, 2)) - threads)
            started = time.monotonic()
            push(client, FLOATS, 1, client.pull().version, turn + 1)
            assert time.monotonic() - started < 20
            for stranger in strangers:
                stranger.close()
        _log.info("%s: %d threads more", name, most)
        assert most < 150
        assert eventually(lambda: threading.active_count() <= threads)
        assert eventually(lambda: psutil.Process().num_fds() <= files)
        assert server.value == turns


@over_tcp
def test_a_server_that_had_no_files_left_goes_on_when_there_are_some(name):
    server = Server(FLOATS, 1, 10)
    with server.at(name) as address, ParameterClient(address, server.contents, 0, 1) as client:
        client.lease()
        push(client, FLOATS, 1, 0, 1)
        strangers = [socket.socket() for _ in range(30)]
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with socket.socket() as next_free:
            lowest = next_free.fileno()
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                socket.socket()
            for stranger in strangers:
                stranger.settimeout(5)
                stranger.connect((address.host, address.port))
            time.sleep(0.3)
            push(client, FLOATS, 1, client.pull().version, 2)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for stranger in strangers:
                stranger.close()
        started = time.monotonic()
        with ParameterClient(address, server.contents, 0, 1) as another:
            another.lease()
            push(another, FLOATS, 1, another.pull().version, 3)
        assert time.monotonic() - started < 20
    assert server.value == 3
