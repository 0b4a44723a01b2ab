"""The conformance suite of the transports. To add a transport, add its name to ``TRANSPORTS_UNDER_TEST``.

HTTP does not notice a closed connection, and forgets the session that was used least recently instead of limiting them.
"""

import contextlib
import dataclasses
import logging
import random
import socket
import ssl
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import psutil
import pytest

from sparkkeras.errors import ConfigurationError, DriverConnectionError
from sparkkeras.rpc import acceptor
from sparkkeras.rpc.addresses import connect_error
from sparkkeras.rpc.service import Client
from sparkkeras.rpc.transport import (
    Address,
    Endpoint,
    RefusedError,
    Reply,
    TransportError,
    connect,
    make_transport,
)
from sparkkeras.rpc.wire import CHUNK_BYTES, MAX_HEADER_BYTES, TAG_BYTES, Header, Secret, Session, encode_header
from tests.processes import free_port

TRANSPORTS_UNDER_TEST = ["inprocess", "socket", "http"]

OVER_TCP = [name for name in TRANSPORTS_UNDER_TEST if name != "inprocess"]

KB, MB = 1 << 10, 1 << 20

every_transport = pytest.mark.parametrize("name", TRANSPORTS_UNDER_TEST)
over_tcp = pytest.mark.parametrize("name", OVER_TCP)
encrypts = pytest.mark.parametrize("encrypt", [False, True], ids=["authenticated", "encrypted"])


class RecordingHandler:
    """A handler that records its calls."""

    LIMITS = {"echo": 8 * MB, "small": 10, "give": 0, "fail": 100, "refuse": 0, "wait": 0, "unserializable": 100}  # noqa: RUF012

    def __init__(self):
        self._lock = threading.Lock()
        self.calls, self.peers, self.gone = [], [], []
        self.sent = Counter()
        self.busy, self.free = threading.Event(), threading.Event()

    def limit(self, name):
        if name not in self.LIMITS:
            raise RefusedError("unknown", f"there is no call {name!r}.")
        return self.LIMITS[name]

    def closed(self, peer):
        with self._lock:
            self.gone.append(peer)

    def __call__(self, call):
        with self._lock:
            number = len(self.calls)
            self.calls.append((call.name, dict(call.fields), bytes(call.body)))
            self.peers.append(call.peer)
        return getattr(self, f"_{call.name}")(call, lambda: self._count(number))

    def _count(self, number):
        with self._lock:
            self.sent[number] += 1

    def _echo(self, call, sent):
        half = len(call.body) // 2
        return Reply({"echo": call.fields}, (call.body[:half], call.body[half:]), sent)

    def _small(self, call, sent):
        return Reply({}, (), sent)

    def _give(self, call, sent):
        return Reply({"given": call.fields["size"]}, (memoryview(random_bytes(call.fields["size"])),), sent)

    def _fail(self, call, sent):
        raise ZeroDivisionError("‰" * 100_000)  # longer than a header may be

    def _refuse(self, call, sent):
        raise RefusedError("closed today", "Come again tomorrow, “early”.")

    def _wait(self, call, sent):
        self.busy.set()
        assert self.free.wait(250)
        return Reply({}, (memoryview(bytes(MB)),), sent)

    def _unserializable(self, call, sent):
        return Reply({"rate": np.float32(0.5)}, (), sent)


@contextmanager
def serving(name, handler, secret=None, **endpoint):
    """Serve a handler; yields the address."""
    endpoint = {"host": "127.0.0.1", "listen": "127.0.0.1", "timeout": 60.0} | endpoint
    with make_transport(name).serve(handler, Endpoint(**endpoint), secret or Secret.fresh()) as address:
        yield address


@contextmanager
def calling(address):
    caller = connect(address)
    try:
        yield caller
    finally:
        caller.close()


def patient(address):
    """The address for a caller whose timeout is longer than the server's."""
    return dataclasses.replace(address, timeout=30.0)


def random_bytes(size, seed=0):
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8).tobytes()


def echo(caller, fields=None, body=b"", into=None):
    """The body of the reply; the fields are checked."""
    fields = fields or {}
    reply, received = caller.call("echo", fields, (memoryview(body),) if body else (), into)
    assert reply == {"echo": fields}
    return bytes(received)


def eventually(true, seconds=60.0):
    """Wait for a condition that another thread is about to meet; whether it holds."""
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.005)
    return true()


class LastBytes(bytes):
    """The last bytes that a relay forwards before it closes the connection."""


class Relay:
    """A TCP proxy to a server that records, changes and breaks connections; a context manager.

    Args:
        address: The address of the server.
        change: Called with the direction (``"there"`` or ``"back"``), the number of bytes that have travelled in it on this
            connection, and the next bytes. Returns the bytes to forward instead; as `LastBytes`, the connection is closed
            after them.
    """

    def __init__(self, address, change=lambda way, before, data: data):
        self._change, self._target = change, (address.host, address.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = dataclasses.replace(address, host="127.0.0.1", port=self._listener.getsockname()[1])
        self.carried = {"there": bytearray(), "back": bytearray()}
        self._lock = threading.Lock()
        self._ends, self._threads = set(), set()
        self._accepting = threading.Thread(target=self._accept, name="relay", daemon=True)
        self._accepting.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        shut_down(self._listener)
        self._accepting.join()
        with self._lock:
            threads, ends = [*self._threads], [*self._ends]
        for end in ends:
            shut_down(end)
        for thread in threads:
            thread.join()
        self._listener.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                thread = threading.Thread(target=self._serve, args=(near,), name="relay", daemon=True)
                with self._lock:
                    self._ends.add(near)
                    self._threads.add(thread)
                thread.start()

    def _serve(self, near):
        with near, contextlib.suppress(OSError), socket.create_connection(self._target) as far:
            with self._lock:
                self._ends.add(far)
            back = threading.Thread(target=self._carry, args=("back", far, near), name="relay", daemon=True)
            back.start()
            self._carry("there", near, far)
            back.join()
        with self._lock:
            self._ends -= {near, far}
            self._threads.discard(threading.current_thread())

    def _carry(self, way, source, target):
        before = 0
        with contextlib.suppress(OSError):
            while data := source.recv(64 * KB):
                changed = self._change(way, before, data)
                before += len(data)
                self.carried[way] += data
                target.sendall(changed)
                if isinstance(changed, LastBytes):
                    break
        shut_down(source)
        shut_down(target)


def shut_down(connection):
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def raw_response(address, data, finish=True, seconds=60.0):
    """The bytes that an unauthenticated client receives for ``data`` until the server closes the connection."""
    response = b""
    with contextlib.suppress(ConnectionError), socket.create_connection((address.host, address.port), seconds) as client:
        client.sendall(data)
        if finish:
            with contextlib.suppress(OSError):  # the server has closed the connection already
                client.shutdown(socket.SHUT_WR)
        while more := client.recv(64 * KB):
            response += more
    return response


def test_an_unknown_transport_lists_the_known_ones():
    with pytest.raises(ConfigurationError, match="'sockets' .* mean 'socket'"):
        make_transport("sockets")


# Calls and replies


@encrypts
@every_transport
def test_fields_and_bodies_of_any_size_arrive_unchanged(name, encrypt):
    """Also in a buffer of the server that is larger than the body."""
    handler = RecordingHandler()
    fields = {"worker": 3, "rate": 0.1, "ended": None, "missing": True, "logs": {"loss": [1e-30]}, "ä": "‰ \"' \r\n"}
    sizes = [(3 * MB + 5,), (7,), (), (CHUNK_BYTES - 1,), (CHUNK_BYTES + 1, 1), (0, 3, CHUNK_BYTES, 0, 1)]
    with serving(name, handler, encrypt=encrypt) as address, calling(address) as caller:
        for of_parts in sizes:
            parts = [random_bytes(size, size) for size in of_parts]
            reply, received = caller.call("echo", fields, [memoryview(part) for part in parts])
            assert handler.calls[-1] == ("echo", fields, b"".join(parts))
            assert reply == {"echo": fields}
            assert received == b"".join(parts)


@encrypts
@every_transport
def test_a_reply_is_received_into_the_given_buffer_if_that_has_its_length(name, encrypt):
    buffer = bytearray(b"\x55" * MB)
    with serving(name, RecordingHandler(), encrypt=encrypt) as address, calling(address) as caller:
        for size in (MB - 1, MB):
            _, received = caller.call("give", {"size": size}, (), memoryview(buffer))
            assert received == random_bytes(size)
            assert buffer == (received if size == MB else b"\x55" * MB)


# Rejected calls


REFUSED = [
    ("refuse", 0, "closed today", "^Come again tomorrow, “early”.$"),
    ("nothing", 0, "unknown", "^there is no call 'nothing'.$"),
    ("small", 4 * MB, "too large", f"'small' .*10 bytes, received {4 * MB}"),
    ("echo", 8 * MB + 1, "too large", f"'echo' .*{8 * MB} bytes, received {8 * MB + 1}"),
    ("fail", 4, "failed", f"ZeroDivisionError: {'‰' * 100}"),
    ("unserializable", 4, "failed", "float32"),
]


@every_transport
def test_a_call_that_is_refused_or_fails_is_reported_and_keeps_the_connection(name, caplog):
    handler = RecordingHandler()
    with serving(name, handler) as address, calling(address) as caller:
        for call, size, kind, message in REFUSED * 2:
            with pytest.raises(RefusedError, match=message) as caught:
                caller.call(call, {}, (memoryview(bytes(size)),) if size else ())
            assert caught.value.kind == kind
            assert echo(caller, {}, b"still here") == b"still here"
        assert caller.call("small", {}, (memoryview(bytes(10)),))[0] == {}
        caller.call("give", {"size": 3 * MB})
        assert eventually(lambda: len(handler.sent) == 16)
    handled = Counter(called for called, _, _ in handler.calls)
    assert handled == {"echo": 12, "small": 1, "give": 1, "refuse": 2, "fail": 2, "unserializable": 2}
    assert set(handler.sent.values()) == {1}, "each reply is released once"
    assert len(set(handler.peers)) == 1
    assert "Traceback" in caplog.text


@every_transport
def test_the_longest_possible_header_arrives_in_both_directions(name):
    fields = {"text": ""}
    fields["text"] = "x" * (MAX_HEADER_BYTES - TAG_BYTES - len(encode_header(Header("echo", {"echo": fields}, 0))))
    with serving(name, RecordingHandler()) as address, calling(address) as caller:
        assert echo(caller, fields) == b""


# The end of a reply and of a connection


@over_tcp
def test_a_reply_that_the_client_does_not_read_is_released_after_the_timeout(name):
    """The client is connected and does not read."""
    handler, stuck = RecordingHandler(), threading.Event()

    def change(way, before, data):
        if way == "back" and before > MB:
            stuck.wait(120)
        return data

    with serving(name, handler, timeout=0.5) as address, Relay(address, change) as relay, ThreadPoolExecutor(1) as pool:
        with calling(dataclasses.replace(relay.address, timeout=120.0)) as caller:
            waiting = pool.submit(caller.call, "give", {"size": 64 * MB})
            try:
                assert eventually(lambda: handler.sent == {0: 1})
            finally:
                stuck.set()
            with pytest.raises(TransportError):
                waiting.result()


@pytest.mark.parametrize("name", ["inprocess", "socket"])
def test_a_closed_connection_is_noticed_once(name):
    handler = RecordingHandler()
    with serving(name, handler) as address, calling(address) as first, calling(address) as second:
        echo(first)
        echo(second)
        assert handler.gone == []
        first.close()
        assert eventually(lambda: handler.gone)
        echo(first)
        time.sleep(0.05)
        assert handler.gone == [handler.peers[0]]


# Connections that break


@every_transport
def test_a_caller_works_with_the_next_server_at_its_address(name):
    secret, port = Secret.fresh(), free_port()
    first, second = RecordingHandler(), RecordingHandler()
    with serving(name, first, secret, port=port) as address:
        caller = connect(address)
        assert echo(caller) == b""
    with pytest.raises(TransportError, match=rf"{name}://127\.0\.0\.1:{port}: "):
        caller.call("echo", {})
    with serving(name, second, secret, port=port):
        assert echo(caller, {}, b"again") == b"again"
        caller.close()
    assert (len(first.calls), len(second.calls)) == (1, 1)


@over_tcp
def test_a_caller_reconnects_wherever_the_connection_breaks(name):
    """In the handshake, in a request, before the reply and in it."""
    handler = RecordingHandler()
    body = random_bytes(100 * KB)
    cuts = []

    def change(way, before, data):
        cut_way, cut_after = cuts[-1]
        return LastBytes() if way == cut_way and before + len(data) > cut_after else data

    with serving(name, handler) as address, Relay(address, change) as relay, calling(relay.address) as caller:
        for cut in [("there", 0), ("back", 0), ("there", 400), ("there", 50 * KB), ("back", 400), ("back", 50 * KB)]:
            cuts.append(cut)
            caller.close()
            with pytest.raises(TransportError):
                echo(caller, {"cut": cut[1]}, body)
            cuts.append(("none", 0))
            assert echo(caller, {}, body) == body
    assert {call[2] for call in handler.calls} == {body}


def test_a_client_says_what_to_do_without_a_reply():
    address = Address("inprocess", "127.0.0.1", 0, Secret.fresh(), timeout=0.3)
    started = time.monotonic()
    with Client(address, "rank 0", None, {}) as client, pytest.raises(DriverConnectionError) as caught:
        client._call("echo", {})
    assert 0.1 < time.monotonic() - started < 20
    worker = f"this worker ({socket.gethostname()})"
    for words in ("rank 0 received no reply", "inprocess://127.0.0.1:0", "0.3 seconds", worker, "set spark.driver.host"):
        assert words in str(caught.value)


@over_tcp
def test_a_server_that_accepts_and_sends_nothing_times_out(name):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = Address(name, "127.0.0.1", silent.getsockname()[1], Secret.fresh(), timeout=0.4)
        with calling(address) as caller:
            started = time.monotonic()
            with pytest.raises(TransportError):
                caller.call("echo", {}, (memoryview(bytes(4 * MB)),))
            assert 0.3 < time.monotonic() - started < 20


@over_tcp
def test_a_reply_that_takes_too_long_times_out(name):
    handler = RecordingHandler()
    with serving(name, handler) as address, calling(dataclasses.replace(address, timeout=0.4)) as caller:
        started = time.monotonic()
        with pytest.raises(TransportError):
            caller.call("wait", {})
        assert 0.3 < time.monotonic() - started < 20
        caller._address = address
        assert echo(caller) == b""
        handler.free.set()


@over_tcp
def test_the_server_closes_the_connection_of_a_client_that_does_not_finish_a_message(name):
    """The server waits for the timeout of its endpoint, whatever the caller's timeout is."""
    handler = RecordingHandler()

    def change(way, before, data):
        return b"" if way == "there" and before > 500 * KB else data

    with serving(name, handler, timeout=0.5) as address, Relay(address, change) as relay:
        with calling(dataclasses.replace(relay.address, timeout=20.0)) as caller:
            started = time.monotonic()
            with pytest.raises(TransportError):
                echo(caller, {}, random_bytes(4 * MB))
            assert time.monotonic() - started < 15
    assert handler.calls == []


# Unauthenticated clients


@every_transport
def test_a_client_with_another_secret_does_not_reach_the_handler(name):
    handler = RecordingHandler()
    with serving(name, handler) as address:
        with calling(dataclasses.replace(address, secret=Secret.fresh())) as caller:
            for _ in range(3):
                with pytest.raises(TransportError):
                    caller.call("echo", {}, (memoryview(b"body"),))
        assert handler.calls == []
        with calling(address) as caller:
            assert echo(caller) == b""


@over_tcp
def test_errors_and_logs_do_not_show_the_secret(name, caplog):
    secret = Secret(b"0123456789abcdefghijklmnopqrstuv")
    shown = ""
    with caplog.at_level(logging.DEBUG), serving(name, RecordingHandler(), secret, timeout=0.5) as address:
        for wrong in (
            dataclasses.replace(address, secret=Secret(b"0123456789" + bytes(22))),
            dataclasses.replace(address, port=free_port()),
            dataclasses.replace(address, encrypt=True),
        ):
            with calling(wrong) as caller, pytest.raises(TransportError) as caught:
                caller.call("echo", {}, (memoryview(bytes(1000)),))
            shown += f"{caught.value!r} {caught.value.__cause__!r}"
    for trace in ("0123456789", "efghij", secret.key.hex()[:12]):
        assert trace not in shown + caplog.text


def hello_of_tls():
    inward, outward = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(inward, outward, server_hostname="driver")
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return outward.read()


POST = b"POST /echo HTTP/1.1\r\nHost: driver\r\n"

UNAUTHENTICATED_BYTES = {
    "get": b"GET /parameters HTTP/1.1\r\nHost: driver\r\nConnection: close\r\n\r\n",
    "post": POST + b"Content-Length: 10\r\n\r\n0123456789",
    "post of a terabyte": POST + b"Content-Length: 1099511627776\r\n\r\n" + bytes(MB),
    "post in chunks": POST + b"Transfer-Encoding: chunked\r\n\r\nffffffff\r\n" + bytes(KB),
    "header without an end": b"GET / HTTP/1.1\r\n" + b"X-Filler: 0123456789\r\n" * 10_000,
    "tls": hello_of_tls(),
    "noise": random_bytes(MB, 8),
    "magic and a message": b"sparkkeras/1" + random_bytes(32, 10) + (100).to_bytes(4, "big") + bytes(100),
}


@over_tcp
def test_unauthenticated_clients_get_nothing_and_do_no_harm(name):
    """They get an error status of HTTP at most, and no text that an error or a library has written."""
    handler = RecordingHandler()
    with serving(name, handler, timeout=1.0) as address, calling(patient(address)) as caller:
        echo(caller)
        for what, data in UNAUTHENTICATED_BYTES.items():
            response = raw_response(address, data)
            assert len(response) < (KB if name == "http" else 1), what
            assert not response.startswith((b"HTTP/1.1 2", b"HTTP/1.0 2")), what
            assert not any(word in response.lower() for word in (b"traceback", b"python/")), what
            assert echo(caller, {}, b"still here") == b"still here", what
        with calling(patient(address)) as another:
            assert echo(another) == b""
    assert len(handler.calls) == 2 + len(UNAUTHENTICATED_BYTES)


@over_tcp
def test_a_replayed_session_has_no_effect(name):
    """Whether it is still open or has ended; the messages arrive on other connections."""
    handler = RecordingHandler()
    with serving(name, handler, timeout=1.0) as address:
        with Relay(address) as relay, calling(patient(relay.address)) as caller:
            echo(caller)
            start = len(relay.carried["there"])
            echo(caller, {}, random_bytes(5000))
            whole, later = bytes(relay.carried["there"]), bytes(relay.carried["there"][start:])
            for data in (whole, later, later * 3):
                raw_response(address, data)
                assert echo(caller) == b""
        for data in (whole, later, whole[len(whole) // 2 :]):
            raw_response(address, data)
        with calling(patient(address)) as caller:
            assert echo(caller) == b""
    assert len(handler.calls) == 2 + 3 + 1


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


cases = pytest.mark.parametrize("cases", [60, pytest.param(5000, marks=pytest.mark.soak)])


@contextmanager
def leaving_nothing():
    """Check that in the end no more threads and files are left than at the beginning."""
    threads, files = threading.active_count(), psutil.Process().num_fds()
    yield
    assert eventually(lambda: threading.active_count() <= threads)
    assert eventually(lambda: psutil.Process().num_fds() <= files)


@cases
@over_tcp
def test_damaged_bytes_of_an_unauthenticated_client_are_not_handled(name, cases):
    """The client replays an authenticated session with changes."""
    draw, handler = random.Random(2), RecordingHandler()
    with serving(name, handler, timeout=1.0) as address:
        with Relay(address) as relay, calling(patient(relay.address)) as caller:
            for body in (b"", random_bytes(4000), b""):
                echo(caller, {}, body)
            line = bytes(relay.carried["there"])
        with leaving_nothing():
            for case in range(1, cases + 1):
                if case % 3:
                    raw_response(address, mutate(draw, line))
                else:  # a hello that was not used before, made without the secret
                    raw_response(address, mutate(draw, line[:12] + draw.randbytes(16) + line[28:]))
            with calling(patient(address)) as caller:
                assert echo(caller) == b""
    assert len(handler.calls) == 4


@cases
@over_tcp
def test_damaged_bytes_of_an_authenticated_peer_are_not_handled(name, cases):
    """Requests and replies are changed in transit."""
    draw, handler, body = random.Random(3), RecordingHandler(), random_bytes(4000)
    plan = {"way": "there", "at": 2**40}

    def change(way, before, data):
        if way == plan["way"] and before <= plan["at"] < before + len(data):
            return LastBytes(mutate(draw, data))
        return data

    with serving(name, handler, timeout=1.0) as address, Relay(address, change) as relay:
        with calling(patient(relay.address)) as caller:
            echo(caller, {}, body)
        lengths = {way: len(carried) for way, carried in relay.carried.items()}
        failures = 0
        with leaving_nothing():
            for _ in range(cases):
                plan["way"] = draw.choice(["there", "there", "back"])
                plan["at"] = draw.randrange(lengths[plan["way"]])
                with calling(relay.address) as caller:
                    try:
                        assert echo(caller, {}, body) == body
                    except TransportError:
                        failures += 1
            with calling(patient(address)) as caller:
                assert echo(caller, {}, body) == body
    assert failures > cases // 2
    assert all(call == ("echo", {}, body) for call in handler.calls)
    assert len(handler.calls) <= cases + 2


@encrypts
@over_tcp
def test_what_is_readable_in_transit(name, encrypt):
    """Bodies, unless they are encrypted; never a field, and never the secret."""
    secret, body = Secret.fresh(), random_bytes(CHUNK_BYTES + 100)
    with (
        serving(name, RecordingHandler(), secret, encrypt=encrypt) as address,
        Relay(address) as relay,
        calling(relay.address) as caller,
    ):
        echo(caller, {"password": "xyzzy-plugh"}, body)
        with pytest.raises(RefusedError):
            caller.call("refuse", {})
        for way in ("there", "back"):
            carried = bytes(relay.carried[way])
            for start in (0, len(body) // 2 - 8, len(body) - 16):
                assert (body[start : start + 16] in carried) != encrypt
            for word in (b"password", b"xyzzy", b"tomorrow", secret.key[:6], secret.key.hex()[:12].encode()):
                assert word not in carried


def test_the_server_limits_the_number_of_sessions():
    with serving("socket", RecordingHandler(), expected_sessions=1) as address, contextlib.ExitStack() as stack:
        callers = [stack.enter_context(calling(address)) for _ in range(4)]
        for caller in callers:
            echo(caller)
        late = stack.enter_context(calling(address))
        with pytest.raises(TransportError):
            echo(late)
        for caller in callers:
            assert echo(caller) == b""
        callers[0].close()

        def is_answered():
            with contextlib.suppress(TransportError):
                return echo(late) == b""
            return False

        assert eventually(is_answered)


# Ports and addresses


@pytest.mark.parametrize("listen", ["127.0.0.1", "0.0.0.0"])
def test_a_second_server_cannot_listen_on_the_same_port(listen):
    with serving("socket", RecordingHandler(), listen=listen) as address, calling(address) as caller:
        for again in ("127.0.0.1", "0.0.0.0"):
            with pytest.raises(OSError, match="in use"):
                with serving("socket", RecordingHandler(), port=address.port, listen=again):
                    pass
        assert echo(caller) == b""


def has_ipv6():
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no ::1")
@over_tcp
def test_ipv6_addresses_work(name):
    with serving(name, RecordingHandler(), host="::1", listen="::1") as address, calling(address) as caller:
        assert echo(caller, {}, random_bytes(MB)) == random_bytes(MB)
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", address.port), 1).close()


@pytest.mark.parametrize(("host", "reason"), [("127.0.0.1", "Connection refused"), ("h" * 64, "label")])
def test_why_a_connection_fails(host, reason):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert connect_error("127.0.0.1", port) == ""
    assert reason in connect_error(host, port)


# Resources that are left behind


@over_tcp
def test_a_server_leaves_nothing_behind(name):
    """With connected callers, one of them in the middle of a call, and unauthenticated clients."""
    handler = RecordingHandler()
    with leaving_nothing(), ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as stack:
        with serving(name, handler, timeout=20.0) as address:
            callers = [stack.enter_context(calling(address)) for _ in range(2)]
            for caller in callers:
                echo(caller, {}, random_bytes(MB))
            host_and_port = (address.host, address.port)
            for data in (b"", b"sparkkeras/1", b"GET / HTTP/1.1\r\n"):
                stack.enter_context(socket.create_connection(host_and_port, 5)).sendall(data)
            waiting = pool.submit(callers[0].call, "wait", {})
            assert handler.busy.wait(60)
            threading.Timer(0.2, handler.free.set).start()
            started = time.monotonic()
        assert time.monotonic() - started < 15
        with contextlib.suppress(TransportError):  # or the reply came just in time
            waiting.result()
        assert eventually(lambda: handler.sent[len(handler.calls) - 1] == 1)
        assert not [each for each in threading.enumerate() if "sparkkeras" in each.name]
        with pytest.raises(TransportError):
            callers[1].call("echo", {})
        socket.create_server(host_and_port).close()


@over_tcp
def test_the_number_of_simultaneous_calls_is_limited(name, monkeypatch):
    """Further calls wait, and an unauthenticated client is rejected meanwhile."""
    monkeypatch.setattr(acceptor, "MAX_CALLS", 3)
    handler = RecordingHandler()
    served = serving(name, handler)
    with served as address, ThreadPoolExecutor(4) as pool, contextlib.ExitStack() as stack:
        callers = [stack.enter_context(calling(address)) for _ in range(4)]
        waiting = [pool.submit(caller.call, "wait", {}) for caller in callers]
        assert eventually(lambda: len(handler.calls) == 3)
        assert not raw_response(address, UNAUTHENTICATED_BYTES["post"]).startswith(b"HTTP/1.1 200")
        assert len(handler.calls) == 3
        handler.free.set()
        for done in waiting:
            assert done.result()[1] == bytes(MB)


@over_tcp
def test_a_call_that_waited_for_others_for_too_long_begins(name, monkeypatch):
    """Otherwise clients that stall would stop all others, or a long queue would exceed the timeout of clients."""
    monkeypatch.setattr(acceptor, "MAX_CALLS", 1)
    handler = RecordingHandler()
    with serving(name, handler, timeout=0.2) as address, ThreadPoolExecutor(2) as pool:
        with calling(patient(address)) as first, calling(patient(address)) as second:
            waiting = [pool.submit(caller.call, "wait", {}) for caller in (first, second)]
            assert eventually(lambda: len(handler.calls) == 2)
            handler.free.set()
            for done in waiting:
                assert done.result()[1] == bytes(MB)


@pytest.mark.parametrize("idle", [120, pytest.param(600, marks=pytest.mark.soak)])
@over_tcp
def test_calls_are_served_beside_idle_connections(name, idle):
    """Every second idle connection is an authenticated one, every fourth is in the middle of its first message."""
    served = serving(name, RecordingHandler(), expected_sessions=idle)
    with served as address, contextlib.ExitStack() as stack, calling(address) as caller:
        echo(caller, {}, bytes(MB))
        memory, threads = psutil.Process().memory_info().rss, threading.active_count()
        for number in range(idle):
            if number % 2:
                connection = stack.enter_context(socket.create_connection((address.host, address.port), 5))
                if number % 4 == 1:
                    connection.sendall(b"sparkkeras" if name == "socket" else b"POST /hello")
            else:
                echo(stack.enter_context(calling(address)))
        for _ in range(5):
            started = time.monotonic()
            echo(caller, {}, bytes(MB))
            assert time.monotonic() - started < 20
        assert threading.active_count() - threads < idle // 2 + 30  # one for each authenticated connection
        assert psutil.Process().memory_info().rss - memory < 100 * MB


@over_tcp
def test_an_idle_session_stays_open(name):
    with serving(name, RecordingHandler(), timeout=0.2) as address, calling(patient(address)) as caller:
        echo(caller)
        time.sleep(0.5)
        assert echo(caller) == b""


def test_the_bodies_of_two_replies_never_share_a_nonce():
    """The nonce is chosen when the header is sealed, not when the body is requested."""
    session, header, bodies = Session(bytes(32), bytes(32), encrypt=True), Header("", {}, 3), []
    for _ in range(2):
        session.seal(header)
        bodies.append(session.outgoing((memoryview(b"one"),)))
    first, second = (b"".join(map(bytes, body)) for body in bodies)
    assert first != second
