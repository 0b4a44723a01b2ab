"""What every transport keeps to: a new one joins by its name in ``TRANSPORTS_UNDER_TEST``."""

import contextlib
import dataclasses
import gc
import logging
import socket
import ssl
import threading
import time
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import psutil
import pytest

from sparkkeras.errors import ConfigurationError
from sparkkeras.rpc.transport import (
    TRANSPORTS,
    Address,
    Endpoint,
    RefusedError,
    Reply,
    TransportError,
    connect,
    make_transport,
)
from sparkkeras.rpc.wire import CHUNK_BYTES, Head, Secret, Session

TRANSPORTS_UNDER_TEST = ["inprocess", "socket", "http"]

OVER_TCP = [name for name in TRANSPORTS_UNDER_TEST if name != "inprocess"]

NOTICES_A_CLOSED_CONNECTION = {"inprocess", "socket"}

SAYS_NOTHING_TO_STRANGERS = {"socket"}

REFUSES_MORE_THAN_ITS_MEMBERS = {"socket"}

KB, MB = 1 << 10, 1 << 20

every_transport = pytest.mark.parametrize("name", TRANSPORTS_UNDER_TEST)
over_tcp = pytest.mark.parametrize("name", OVER_TCP)
encrypts = pytest.mark.parametrize("encrypt", [False, True], ids=["signed", "encrypted"])


class Desk:
    """A handler that notes what it is asked."""

    LIMITS = {"echo": 8 * MB, "small": 10, "give": 0, "fail": 100, "refuse": 0, "wait": 0, "mumble": 0}  # noqa: RUF012

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
        return Reply({"given": call.fields["size"]}, (memoryview(drawn(call.fields["size"])),), sent)

    def _fail(self, call, sent):
        raise ZeroDivisionError(call.fields.get("words", "seven by nothing") * call.fields.get("times", 1))

    def _refuse(self, call, sent):
        raise RefusedError("closed today", "Come again tomorrow, “early”.")

    def _wait(self, call, sent):
        self.busy.set()
        assert self.free.wait(250)
        return Reply({}, (memoryview(bytes(MB)),), sent)

    def _mumble(self, call, sent):
        return Reply({"rate": np.float32(0.5)}, (), sent)


@contextmanager
def serving(name, handler, secret=None, **where):
    """A server of that transport; its address."""
    where = {"host": "127.0.0.1", "listen": "127.0.0.1", "timeout": 60.0} | where
    with make_transport(name).serve(handler, Endpoint(**where), secret or Secret.fresh()) as address:
        yield address


@contextmanager
def calling(address):
    caller = connect(address)
    try:
        yield caller
    finally:
        caller.close()


def patient(address):
    """The same for a caller that waits longer than the server does."""
    return dataclasses.replace(address, timeout=30.0)


def drawn(size, seed=0):
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8).tobytes()


def echo(caller, fields=None, body=b"", into=None):
    """What came back of a body, after a look at the fields."""
    fields = fields or {}
    told, received = caller.call("echo", fields, (memoryview(body),) if body else (), into)
    assert told == {"echo": fields}
    return bytes(received)


def eventually(true, seconds=60.0):
    """Wait for what another thread is about to do."""
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.005)
    return true()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


class Last(bytes):
    """What a relay still lets through before it cuts the line."""


class Relay:
    """A line to a server on which all that travels can be read, changed and cut; a context manager.

    Args:
        address: Where it leads.
        change: Given ``"there"`` or ``"back"``, how many bytes have gone that way on this connection, and the next ones;
            returns what goes on instead, as `Last` to cut the line behind it.
    """

    def __init__(self, address, change=lambda way, before, data: data):
        self._change, self._to = change, (address.host, address.port)
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
        hang_up(self._listener)
        self._accepting.join()
        with self._lock:
            threads, ends = [*self._threads], [*self._ends]
        for end in ends:
            hang_up(end)
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
        with near, contextlib.suppress(OSError), socket.create_connection(self._to) as far:
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
                if isinstance(changed, Last):
                    break
        hang_up(source)
        hang_up(target)


def hang_up(connection):
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def answer_to(address, data, finish=True, seconds=60.0):
    """What a stranger hears who says ``data``, until the server hangs up."""
    heard = b""
    with contextlib.suppress(ConnectionError), socket.create_connection((address.host, address.port), seconds) as stranger:
        stranger.sendall(data)
        if finish:
            with contextlib.suppress(OSError):  # it has hung up already
                stranger.shutdown(socket.SHUT_WR)
        while more := stranger.recv(64 * KB):
            heard += more
    return heard


def test_every_transport_has_its_file():
    assert set(TRANSPORTS_UNDER_TEST) <= set(TRANSPORTS)


def test_an_unknown_transport_lists_the_known_ones():
    with pytest.raises(ConfigurationError) as caught:
        make_transport("sockets")
    assert "parameter_server_mode='sockets' is not known" in str(caught.value)
    assert "Did you mean 'socket'?" in str(caught.value)


# Calls and answers


@encrypts
@every_transport
def test_fields_and_bodies_come_as_they_were_sent(name, encrypt):
    desk = Desk()
    fields = {"worker": 3, "rate": 0.1, "ended": None, "missing": True, "logs": {"loss": [1e-30]}, "ä": "‰ \"' \r\n"}
    parts = [b"", drawn(3), drawn(CHUNK_BYTES), b"", drawn(1)]
    with serving(name, desk, encrypt=encrypt) as address, calling(address) as caller:
        told, received = caller.call("echo", fields, [memoryview(part) for part in parts])
    assert desk.calls == [("echo", fields, b"".join(parts))]
    assert told == {"echo": fields}
    assert received == b"".join(parts)


@encrypts
@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, MB, 3 * MB + 5])
@every_transport
def test_bodies_of_any_size_there_and_back(name, size, encrypt):
    with serving(name, Desk(), encrypt=encrypt) as address, calling(address) as caller:
        for seed in range(2):
            assert echo(caller, {"seed": seed}, drawn(size, seed)) == drawn(size, seed)


@every_transport
def test_a_small_body_after_a_large_one_is_small(name):
    """The server's buffer is larger than what came last."""
    with serving(name, Desk()) as address, calling(address) as caller:
        for size in (MB, 7, 0, MB + 1, 1):
            assert echo(caller, {}, drawn(size, size)) == drawn(size, size)


@every_transport
def test_an_array_is_sent_from_its_own_memory(name):
    array = np.arange(1000, dtype=np.float32)
    array.flags.writeable = False
    with serving(name, Desk()) as address, calling(address) as caller:
        _, received = caller.call("echo", {}, (array.data.cast("B"),))
    assert np.frombuffer(received, np.float32).tolist() == array.tolist()


@encrypts
@every_transport
def test_an_answer_goes_where_it_is_wanted(name, encrypt):
    array = np.zeros(MB // 4, np.float32)
    with serving(name, Desk(), encrypt=encrypt) as address, calling(address) as caller:
        _, received = caller.call("give", {"size": MB}, (), array.data.cast("B"))
    assert np.shares_memory(np.frombuffer(received, np.uint8), array)
    assert array.tobytes() == drawn(MB)


@pytest.mark.parametrize("size", [0, 1, MB - 1, MB + 1])
@every_transport
def test_an_answer_of_another_length_gets_memory_of_its_own(name, size):
    wanted = bytearray(b"\x55" * MB)
    with serving(name, Desk()) as address, calling(address) as caller:
        _, received = caller.call("give", {"size": size}, (), memoryview(wanted))
    assert received == drawn(size)
    assert set(wanted) == {0x55}


@every_transport
def test_an_answer_without_a_place_may_be_written_to(name):
    with serving(name, Desk()) as address, calling(address) as caller:
        first = caller.call("give", {"size": 100})[1]
        first[:] = bytes(100)
        second = caller.call("give", {"size": 100})[1]
    assert (first, second) == (bytes(100), drawn(100))


@every_transport
def test_a_handler_may_write_to_the_body(name):
    class Doubling(Desk):
        def _echo(self, call, sent):
            values = np.frombuffer(call.body, np.uint8)
            values *= 2
            return Reply({"echo": call.fields}, (call.body,), sent)

    body = bytes(range(100))
    with serving(name, Doubling()) as address, calling(address) as caller:
        assert echo(caller, {}, body) == bytes(2 * value for value in range(100))
    assert body == bytes(range(100))


@every_transport
def test_many_calls_in_turn_have_one_peer(name):
    desk = Desk()
    with serving(name, desk) as address, calling(address) as caller:
        for number in range(300):
            assert echo(caller, {"number": number}, drawn(number, number)) == drawn(number, number)
    assert [fields["number"] for _, fields, _ in desk.calls] == list(range(300))
    assert len(set(desk.peers)) == 1


@every_transport
def test_callers_at_the_same_time_get_their_own_answers(name):
    desk = Desk()

    def call(worker):
        with calling(address) as caller:
            for number in range(25):
                body = drawn(10 * KB * worker + number, 100 * worker + number)
                assert echo(caller, {"worker": worker, "number": number}, body) == body

    with serving(name, desk) as address, ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(call, worker) for worker in range(8)]:
            done.result()
    assert Counter(fields["worker"] for _, fields, _ in desk.calls) == dict.fromkeys(range(8), 25)
    assert len(set(desk.peers)) == 8
    for peer in set(desk.peers):
        assert len({call[1]["worker"] for call, other in zip(desk.calls, desk.peers, strict=True) if other == peer}) == 1


@over_tcp
def test_one_slow_answer_keeps_nobody_else_waiting(name):
    desk = Desk()
    with serving(name, desk) as address, ThreadPoolExecutor(1) as pool, calling(address) as slow, calling(address) as quick:
        waiting = pool.submit(slow.call, "wait", {})
        assert desk.busy.wait(60)
        for _ in range(20):
            assert echo(quick, {}, drawn(KB)) == drawn(KB)
        assert not waiting.done()
        desk.free.set()
        assert waiting.result()[1] == bytes(MB)


@every_transport
def test_a_caller_connects_when_it_is_first_called(name):
    secret = Secret.fresh()
    with calling(Address(name, "127.0.0.1", free_port(), secret, timeout=2.0)) as caller:
        pass
    caller.close()
    desk = Desk()
    with serving(name, desk, secret) as address, calling(address) as caller:
        caller.close()
        assert echo(caller) == b""
        caller.close()
        caller.close()
        assert echo(caller) == b""
    assert len(desk.calls) == 2


@every_transport
def test_the_address_says_what_the_endpoint_says(name):
    secret = Secret.fresh()
    with serving(name, Desk(), secret, host="localhost", encrypt=True, timeout=7.5) as address:
        assert dataclasses.replace(address, port=1) == Address(name, "localhost", 1, secret, True, 7.5)
        with calling(address) as caller:
            assert echo(caller, {}, b"here") == b"here"


# Refusals


@every_transport
def test_a_refusal_comes_with_its_kind_and_words(name):
    with serving(name, Desk()) as address, calling(address) as caller:
        for _ in range(3):
            with pytest.raises(RefusedError, match="^Come again tomorrow, “early”.$") as caught:
                caller.call("refuse", {})
            assert caught.value.kind == "closed today"
            assert echo(caller, {}, b"still here") == b"still here"


@every_transport
def test_an_unknown_call_is_refused(name):
    desk = Desk()
    with serving(name, desk) as address, calling(address) as caller:
        for unknown in ("nothing", "Echo", "_echo", "__call__"):
            with pytest.raises(RefusedError) as caught:
                caller.call(unknown, {})
            assert (caught.value.kind, str(caught.value)) == ("unknown", f"there is no call {unknown!r}.")
            assert echo(caller) == b""
    assert {call[0] for call in desk.calls} == {"echo"}


@every_transport
def test_a_call_by_an_odd_name_reaches_no_handler(name):
    """Some mean something to a transport."""
    desk = Desk()
    with serving(name, desk) as address, calling(address) as caller:
        for odd in ("hello", "", "../echo", "echo/", "echo?", "a b", "%65cho", "ä", "echo\r\nHost: driver", "echo\0"):
            with pytest.raises((RefusedError, TransportError)):
                caller.call(odd, {})
            with contextlib.suppress(TransportError):
                echo(caller)
    assert {call[0] for call in desk.calls} <= {"echo"}


@pytest.mark.parametrize(
    ("call", "size"), [("small", 11), ("give", 1), ("small", 60 * KB), ("small", 4 * MB), ("echo", 8 * MB + 1)]
)
@every_transport
def test_a_body_larger_than_its_limit_is_refused_and_not_read(name, call, size):
    desk = Desk()
    with serving(name, desk) as address, calling(address) as caller:
        for _ in range(5):
            with pytest.raises(RefusedError, match=rf"{call!r} cannot have a body of {size} bytes\.") as caught:
                caller.call(call, {}, (memoryview(bytes(size)),))
            assert caught.value.kind == "too large"
        assert desk.calls == []


@pytest.mark.parametrize("size", [11, 4 * MB])
@every_transport
def test_a_caller_goes_on_after_a_body_that_was_too_large(name, size):
    with serving(name, Desk()) as address, calling(address) as caller:
        for _ in range(5):
            with pytest.raises(RefusedError):
                caller.call("small", {}, (memoryview(bytes(size)),))
            assert echo(caller, {}, b"here") == b"here"


@every_transport
def test_a_body_as_large_as_its_limit_is_taken(name):
    with serving(name, Desk()) as address, calling(address) as caller:
        assert caller.call("small", {}, (memoryview(bytes(10)),))[0] == {}
        assert echo(caller, {}, bytes(8 * MB)) == bytes(8 * MB)


@every_transport
def test_what_goes_wrong_in_a_handler_is_told_and_ends_nothing(name, caplog):
    desk, secret = Desk(), Secret(b"0123456789abcdefghijklmnopqrstuv")
    with caplog.at_level(logging.DEBUG), serving(name, desk, secret) as address, calling(address) as caller:
        for _ in range(3):
            with pytest.raises(RefusedError, match="the call 'fail' failed: ZeroDivisionError: seven by nothing") as caught:
                caller.call("fail", {}, (memoryview(b"body"),))
            assert caught.value.kind == "failed"
            assert echo(caller) == b""
    assert len(set(desk.peers)) == 1
    assert "the call 'fail' failed" in caplog.text
    assert "ZeroDivisionError" in caplog.text
    for trace in ("0123456789", "efghij", secret.key.hex()[:12], "48, 49, 50"):
        assert trace not in caplog.text


@every_transport
def test_the_long_words_of_an_error_arrive(name):
    """As those of a library that prints an array. They are longer than a head may be."""
    with serving(name, Desk()) as address, calling(address) as caller:
        for words in ("seven ", "‰"):
            with pytest.raises(RefusedError, match=f"ZeroDivisionError: {words * 100}"):
                caller.call("fail", {"words": words, "times": 100_000})
        assert echo(caller) == b""


@every_transport
def test_an_answer_that_json_does_not_know_is_a_failure_of_the_call(name):
    desk = Desk()
    with serving(name, desk) as address, calling(address) as caller:
        with pytest.raises(RefusedError, match="float32") as caught:
            caller.call("mumble", {})
        assert caught.value.kind == "failed"
        assert echo(caller) == b""
        assert eventually(lambda: desk.sent == {0: 1, 1: 1})


@every_transport
def test_a_question_that_json_does_not_know_is_not_sent(name):
    desk = Desk()
    with serving(name, desk) as address, calling(address) as caller:
        with pytest.raises(TypeError, match="float32"):
            caller.call("echo", {"rate": np.float32(0.5)})
        assert echo(caller) == b""
    assert len(desk.calls) == 1


# The end of an answer, and of a connection


@every_transport
def test_every_answer_is_let_go_once(name):
    desk = Desk()
    with serving(name, desk) as address, calling(address) as caller:
        for size in (0, 1, 100, MB, 3 * MB):
            caller.call("give", {"size": size})
            caller.call("small", {})
            with pytest.raises(RefusedError):
                caller.call("refuse", {})
        assert eventually(lambda: len(desk.sent) == 10)
    assert set(desk.sent.values()) == {1}


@over_tcp
def test_an_answer_is_let_go_once_if_the_line_is_cut_in_its_middle(name):
    desk = Desk()

    def change(way, before, data):
        return Last() if way == "back" and before > MB else data

    with serving(name, desk) as address, Relay(address, change) as relay, calling(relay.address) as caller:
        for number in range(3):
            with pytest.raises(TransportError):
                caller.call("give", {"size": 32 * MB})
            assert eventually(lambda count=number + 1: len(desk.sent) == count)
    assert desk.sent == {0: 1, 1: 1, 2: 1}


@over_tcp
def test_an_answer_is_let_go_once_if_nobody_waits_for_it_any_more(name):
    desk = Desk()
    with serving(name, desk) as address, ThreadPoolExecutor(1) as pool, calling(address) as caller:
        waiting = pool.submit(caller.call, "wait", {})
        assert desk.busy.wait(60)
        hang_up(getattr(caller._connection, "sock", caller._connection))
        with pytest.raises(TransportError):
            waiting.result()
        desk.free.set()
        assert eventually(lambda: desk.sent == {0: 1})
        assert echo(caller) == b""
    assert desk.sent == {0: 1, 1: 1}


@over_tcp
def test_an_answer_that_nobody_takes_is_let_go_after_the_timeout(name):
    """The reader is there, and does not read."""
    desk, stuck = Desk(), threading.Event()

    def change(way, before, data):
        if way == "back" and before > MB:
            stuck.wait(120)
        return data

    with serving(name, desk, timeout=0.5) as address, Relay(address, change) as relay, ThreadPoolExecutor(1) as pool:
        with calling(dataclasses.replace(relay.address, timeout=120.0)) as caller:
            waiting = pool.submit(caller.call, "give", {"size": 64 * MB})
            try:
                assert eventually(lambda: desk.sent == {0: 1})
            finally:
                stuck.set()
            with pytest.raises(TransportError):
                waiting.result()


@pytest.mark.parametrize("name", [name for name in TRANSPORTS_UNDER_TEST if name in NOTICES_A_CLOSED_CONNECTION])
def test_a_closed_connection_is_noticed_once(name):
    desk = Desk()
    with serving(name, desk) as address, calling(address) as first, calling(address) as second:
        echo(first)
        echo(second)
        assert desk.gone == []
        first.close()
        assert eventually(lambda: desk.gone)
        echo(second)
        echo(first)
        time.sleep(0.05)
        assert desk.gone == [desk.peers[0]]
        assert len(set(desk.peers)) == 3
    if name in OVER_TCP:
        assert Counter(desk.gone) == Counter(set(desk.peers))


@every_transport
def test_a_peer_that_asks_is_not_gone(name):
    """Whether or not a transport notices a closed connection, it does not invent one."""
    desk = Desk()
    with serving(name, desk) as address, calling(address) as caller:
        for _ in range(50):
            echo(caller)
        with pytest.raises(RefusedError):
            caller.call("fail", {})
        assert desk.gone == []


# Lines that break


@every_transport
def test_a_caller_goes_on_with_the_next_server_at_its_address(name):
    secret, port = Secret.fresh(), free_port()
    first, second = Desk(), Desk()
    with serving(name, first, secret, port=port) as address:
        caller = connect(address)
        assert echo(caller) == b""
    with pytest.raises(TransportError):
        caller.call("echo", {})
    with serving(name, second, secret, port=port):
        assert echo(caller, {}, b"again") == b"again"
        caller.close()
    assert (len(first.calls), len(second.calls)) == (1, 1)


@over_tcp
def test_a_caller_connects_anew_after_the_server_hung_up_on_it(name):
    """The first call after that may fail, and the one after it does not."""
    secret, port, desk = Secret.fresh(), free_port(), Desk()
    with serving(name, Desk(), secret, port=port) as address:
        caller = connect(address)
        echo(caller)
    with serving(name, desk, secret, port=port):
        with contextlib.suppress(TransportError):
            echo(caller)
        assert echo(caller, {}, b"again") == b"again"
        caller.close()
    assert 1 <= len(desk.calls) <= 2


@over_tcp
def test_a_caller_connects_anew_after_a_line_that_broke_anywhere(name):
    """In the greeting, in a question, before its answer and in it."""
    desk = Desk()
    body = drawn(100 * KB)
    lines = []

    def change(way, before, data):
        cut_way, cut_after = lines[-1]
        return Last() if way == cut_way and before + len(data) > cut_after else data

    with serving(name, desk) as address, Relay(address, change) as relay, calling(relay.address) as caller:
        for cut in [("there", 0), ("back", 0), ("there", 400), ("there", 50 * KB), ("back", 400), ("back", 50 * KB)]:
            lines.append(cut)
            caller.close()
            with pytest.raises(TransportError):
                echo(caller, {"cut": cut[1]}, body)
            lines.append(("none", 0))
            assert echo(caller, {}, body) == body
    assert {call[2] for call in desk.calls} == {body}


@over_tcp
def test_nobody_at_an_address_is_told_at_once(name):
    with calling(Address(name, "127.0.0.1", free_port(), Secret.fresh(), timeout=20.0)) as caller:
        started = time.monotonic()
        with pytest.raises(TransportError, match=rf"{name}://127\.0\.0\.1:\d+: "):
            caller.call("echo", {})
        assert time.monotonic() - started < 15


def test_no_handler_in_this_process():
    with calling(Address("inprocess", "127.0.0.1", 0, Secret.fresh())) as caller, pytest.raises(TransportError):
        caller.call("echo", {})


@over_tcp
def test_somebody_who_takes_a_connection_and_says_nothing_is_given_up_in_time(name):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = Address(name, "127.0.0.1", silent.getsockname()[1], Secret.fresh(), timeout=0.4)
        with calling(address) as caller:
            started = time.monotonic()
            with pytest.raises(TransportError):
                caller.call("echo", {}, (memoryview(bytes(4 * MB)),))
            assert 0.3 < time.monotonic() - started < 20


@over_tcp
def test_an_answer_that_takes_too_long_is_given_up_in_time(name):
    desk = Desk()
    with serving(name, desk) as address, calling(dataclasses.replace(address, timeout=0.4)) as caller:
        started = time.monotonic()
        with pytest.raises(TransportError):
            caller.call("wait", {})
        assert 0.3 < time.monotonic() - started < 20
        caller._address = address
        assert echo(caller) == b""
        desk.free.set()


@over_tcp
def test_a_server_that_ends_ends_the_calls_that_wait_for_it(name):
    desk = Desk()
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as stack:
        address = stack.enter_context(serving(name, desk, timeout=20.0))
        caller = stack.enter_context(calling(address))
        waiting = pool.submit(caller.call, "wait", {})
        assert desk.busy.wait(60)
        threading.Timer(0.3, desk.free.set).start()
        started = time.monotonic()
        stack.close()
        with contextlib.suppress(TransportError):  # or it was answered just in time
            waiting.result()
        assert time.monotonic() - started < 15
    assert eventually(lambda: desk.sent == {0: 1})


@over_tcp
def test_a_member_that_does_not_finish_is_hung_up_on(name):
    """The server waits for as long as its endpoint says, whatever the caller's own patience is."""
    desk = Desk()

    def change(way, before, data):
        return b"" if way == "there" and before > 500 * KB else data

    with serving(name, desk, timeout=0.5) as address, Relay(address, change) as relay:
        with calling(dataclasses.replace(relay.address, timeout=20.0)) as caller:
            started = time.monotonic()
            with pytest.raises(TransportError):
                echo(caller, {}, drawn(4 * MB))
            assert time.monotonic() - started < 15
    assert desk.calls == []


# Strangers


@every_transport
def test_another_secret_reaches_nobody(name):
    desk = Desk()
    with serving(name, desk) as address:
        with calling(dataclasses.replace(address, secret=Secret.fresh())) as caller:
            for _ in range(3):
                with pytest.raises(TransportError):
                    caller.call("echo", {}, (memoryview(b"body"),))
        assert desk.calls == []
        with calling(address) as caller:
            assert echo(caller) == b""


@over_tcp
def test_no_secret_shows_in_what_is_told_about_a_broken_line(name, caplog):
    secret = Secret(b"0123456789abcdefghijklmnopqrstuv")
    told = ""
    with caplog.at_level(logging.DEBUG), serving(name, Desk(), secret, timeout=0.5) as address:
        for wrong in (
            dataclasses.replace(address, secret=Secret(b"0123456789" + bytes(22))),
            dataclasses.replace(address, port=free_port()),
            dataclasses.replace(address, encrypt=True),
        ):
            with calling(wrong) as caller, pytest.raises(TransportError) as caught:
                caller.call("echo", {}, (memoryview(bytes(1000)),))
            told += f"{caught.value!r} {caught.value.__cause__!r}"
    for trace in ("0123456789", "efghij", secret.key.hex()[:12]):
        assert trace not in told + caplog.text


def hello_of_tls():
    inward, outward = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(inward, outward, server_hostname="driver")
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return outward.read()


STRANGERS = {
    "immediate close": b"",
    "one byte": b"\0",
    "get": b"GET / HTTP/1.1\r\nHost: driver\r\n\r\n",
    "get weights": b"GET /parameters HTTP/1.1\r\nHost: driver\r\nConnection: close\r\n\r\n",
    "debugger": b"GET /console?__debugger__=yes&cmd=resource&f=style.css HTTP/1.1\r\nHost: driver\r\n\r\n",
    "post": b"POST /update HTTP/1.1\r\nHost: driver\r\nContent-Length: 10\r\n\r\n0123456789",
    "post of nothing": b"POST /echo HTTP/1.1\r\nHost: driver\r\nContent-Length: 0\r\n\r\n",
    "post of a terabyte": b"POST /echo HTTP/1.1\r\nHost: driver\r\nContent-Length: 1099511627776\r\n\r\n" + bytes(MB),
    "post in chunks": b"POST /echo HTTP/1.1\r\nHost: driver\r\nTransfer-Encoding: chunked\r\n\r\nffffffff\r\n" + bytes(KB),
    "head without an end": b"GET / HTTP/1.1\r\n" + b"X-Filler: 0123456789\r\n" * 10_000,
    "tls": hello_of_tls(),
    "noise": drawn(2000, 7),
    "more noise": drawn(MB, 8),
    "zeros": bytes(64 * KB),
    "ones": b"\xff" * 64 * KB,
    "magic": b"sparkkeras/1" + drawn(32, 9),
    "magic and a message": b"sparkkeras/1" + drawn(32, 10) + (100).to_bytes(4, "big") + bytes(100),
}


@pytest.mark.parametrize("words", STRANGERS.values(), ids=STRANGERS)
@over_tcp
def test_strangers_get_nothing_and_harm_nothing(name, words):
    desk, secret = Desk(), Secret.fresh()
    with serving(name, desk, secret, timeout=1.0) as address, calling(patient(address)) as member:
        echo(member)
        for _ in range(3):
            heard = answer_to(address, words)
            if name in SAYS_NOTHING_TO_STRANGERS:
                assert heard == b""
            assert not heard.startswith((b"HTTP/1.1 2", b"HTTP/1.0 2"))
            assert len(heard) < KB
            assert not any(word in heard.lower() for word in (b"traceback", b"werkzeug", b"flask", b"console", b"python/"))
            assert echo(member, {}, b"still here") == b"still here"
        with calling(patient(address)) as another:
            assert echo(another) == b""
    assert len(desk.calls) == 5


@over_tcp
def test_a_recorded_conversation_played_again_does_nothing(name):
    desk = Desk()
    with serving(name, desk, timeout=1.0) as address:
        with Relay(address) as relay, calling(patient(relay.address)) as caller:
            for number in range(3):
                echo(caller, {"number": number}, drawn(5000, number))
            recorded = bytes(relay.carried["there"])
            answer_to(address, recorded)  # while the one that it was recorded from goes on
            assert echo(caller) == b""
        answer_to(address, recorded)
        answer_to(address, recorded[len(recorded) // 2 :])
        with calling(patient(address)) as caller:
            assert echo(caller) == b""
    assert [call[1].get("number") for call in desk.calls] == [0, 1, 2, None, None]


@over_tcp
def test_who_listens_cannot_disturb_a_conversation(name):
    """Not even with messages that it has heard, on a connection of its own."""
    desk = Desk()
    with serving(name, desk, timeout=1.0) as address, Relay(address) as relay, calling(patient(relay.address)) as caller:
        echo(caller)
        greeted = len(relay.carried["there"])
        echo(caller, {}, drawn(5000))
        for words in (relay.carried["there"][greeted:], relay.carried["there"], relay.carried["there"][greeted:] * 3):
            answer_to(address, bytes(words))
            assert echo(caller) == b""
    assert len(desk.calls) == 5


@over_tcp
def test_a_recorded_conversation_does_nothing_at_another_server_of_the_run(name):
    desk, secret = Desk(), Secret.fresh()
    with serving(name, Desk(), secret) as address, Relay(address) as relay, calling(relay.address) as caller:
        echo(caller, {}, drawn(5000))
    with serving(name, desk, secret, timeout=1.0) as address:
        answer_to(address, bytes(relay.carried["there"]))
    assert desk.calls == []


@over_tcp
def test_recorded_answers_do_not_pass_for_a_server(name):
    secret, desk = Secret.fresh(), Desk()
    with serving(name, desk, secret) as address, Relay(address) as relay, calling(relay.address) as caller:
        caller.call("give", {"size": 1000})
    recorded = bytes(relay.carried["back"])
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def answer():
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.recv(KB)
                connection.sendall(recorded)
                connection.settimeout(3)
                while connection.recv(KB):
                    pass

        answering = pool.submit(answer)
        where = Address(name, "127.0.0.1", listener.getsockname()[1], secret, timeout=1.0)
        with calling(where) as caller, pytest.raises(TransportError):
            caller.call("give", {"size": 1000})
        answering.result()


@encrypts
@over_tcp
def test_what_can_be_read_on_the_line(name, encrypt):
    """Bodies unless they are encrypted; never a field, and never the secret."""
    secret, body = Secret.fresh(), drawn(CHUNK_BYTES + 100)
    with (
        serving(name, Desk(), secret, encrypt=encrypt) as address,
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


@pytest.mark.parametrize("turns", [25, pytest.param(1000, marks=pytest.mark.soak)])
@encrypts
@over_tcp
def test_a_bit_that_flips_on_the_line_changes_nothing_that_arrives(name, encrypt, turns):
    """Where a bit means nothing, as in a header that nobody reads, the call goes well; otherwise nothing arrives."""
    desk, body = Desk(), drawn(600)
    draw = np.random.default_rng(0)
    with serving(name, desk, encrypt=encrypt) as address:
        with Relay(address) as relay, calling(relay.address) as caller:
            echo(caller, {"one": 1}, body)
        lengths = {way: len(relay.carried[way]) for way in ("there", "back")}
        failures = 0
        for turn in range(turns):
            way = ("there", "back")[turn % 2]
            where, bit = int(draw.integers(lengths[way])), 1 << int(draw.integers(8))

            def change(going, before, data, way=way, where=where, bit=bit):
                if going != way or not before <= where < before + len(data):
                    return data
                changed = bytearray(data)
                changed[where - before] ^= bit
                return bytes(changed)

            with Relay(dataclasses.replace(address, timeout=0.1), change) as relay, calling(relay.address) as caller:
                try:
                    assert echo(caller, {"one": 1}, body) == body
                except TransportError:
                    failures += 1
        with calling(address) as caller:
            assert echo(caller, {"last": 1}) == b""
    assert all(call in [("echo", {"one": 1}, body), ("echo", {"last": 1}, b"")] for call in desk.calls)
    assert failures == turns if name in SAYS_NOTHING_TO_STRANGERS else failures > turns // 2


@pytest.mark.parametrize("name", [name for name in OVER_TCP if name in REFUSES_MORE_THAN_ITS_MEMBERS])
def test_there_are_no_more_conversations_than_four_for_each_member(name):
    with serving(name, Desk(), members=1) as address, contextlib.ExitStack() as stack:
        callers = [stack.enter_context(calling(address)) for _ in range(4)]
        for caller in callers:
            echo(caller)
        late = stack.enter_context(calling(address))
        with pytest.raises(TransportError):
            echo(late)
        for caller in callers:
            assert echo(caller) == b""
        callers[0].close()

        def heard():
            with contextlib.suppress(TransportError):
                return echo(late) == b""
            return False

        assert eventually(heard)


# Ports and addresses


@over_tcp
def test_port_0_is_any_that_is_free(name):
    with serving(name, Desk()) as first, serving(name, Desk()) as second:
        assert first.port > 0
        assert second.port > 0
        assert first.port != second.port


@over_tcp
def test_a_given_port_is_used_and_used_again(name):
    port = free_port()
    for _ in range(3):
        with serving(name, Desk(), port=port) as address, calling(address) as caller:
            assert address.port == port
            assert echo(caller) == b""


@over_tcp
def test_a_port_that_is_taken_is_named(name):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        threads = set(threading.enumerate())
        with pytest.raises(ConfigurationError, match=rf"cannot listen on port {port} of 127\.0\.0\.1: .*in use.*port=0"):
            with serving(name, Desk(), port=port):
                pass
        assert eventually(lambda: set(threading.enumerate()) <= threads)


@pytest.mark.parametrize("listen", ["127.0.0.1", "0.0.0.0", "localhost"])
@over_tcp
def test_a_second_server_does_not_slip_in_behind_the_first(name, listen):
    first, second = Desk(), Desk()
    with serving(name, first, listen=listen) as address, calling(address) as caller:
        for again in ("127.0.0.1", "0.0.0.0"):
            with pytest.raises(ConfigurationError, match=str(address.port)):
                with serving(name, second, port=address.port, listen=again):
                    pass
        assert echo(caller) == b""
        caller.close()
        assert echo(caller) == b""
    assert (len(first.calls), second.calls) == (2, [])


@pytest.mark.parametrize(
    ("listen", "words", "remedy"),
    [
        ("203.0.113.7", "the server on the driver cannot listen on 203.0.113.7: ", "set bind= of server_options"),
        (
            "no-such-machine.invalid",
            "'no-such-machine.invalid' is no name or address",
            "look at host= and bind= of server_options",
        ),
    ],
)
@over_tcp
def test_an_address_that_is_not_this_machines_is_a_wrong_configuration(name, listen, words, remedy):
    with pytest.raises(ConfigurationError) as caught:
        with serving(name, Desk(), listen=listen):
            pass
    assert words in str(caught.value)
    assert remedy in str(caught.value)


def has_ipv6():
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


@pytest.mark.skipif(not has_ipv6(), reason="no ::1 here")
@over_tcp
def test_ipv6(name):
    with serving(name, Desk(), host="::1", listen="::1") as address, calling(address) as caller:
        assert echo(caller, {}, drawn(MB)) == drawn(MB)
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", address.port), 1).close()


@every_transport
def test_two_servers_at_once_do_not_mix(name):
    desks = Desk(), Desk()
    with serving(name, desks[0]) as first, serving(name, desks[1]) as second:
        with calling(first) as one, calling(second) as other:
            for number in range(5):
                echo(one, {"number": number})
                echo(other, {"number": -number})
        mixed = dataclasses.replace(first, secret=second.secret)
        if name in OVER_TCP:
            with calling(mixed) as caller, pytest.raises(TransportError):
                caller.call("echo", {})
    assert [call[1]["number"] for call in desks[0].calls] == [0, 1, 2, 3, 4]
    assert [call[1]["number"] for call in desks[1].calls] == [0, -1, -2, -3, -4]


def test_all_transports_in_turn_at_one_address():
    secret, port = Secret.fresh(), free_port()
    for name in TRANSPORTS_UNDER_TEST * 3:
        desk = Desk()
        with serving(name, desk, secret, port=port) as address, calling(address) as caller:
            assert echo(caller, {}, drawn(KB)) == drawn(KB)
        assert len(desk.calls) == 1


def test_all_transports_at_the_same_time():
    secret = Secret.fresh()
    with contextlib.ExitStack() as stack:
        desks = {name: Desk() for name in TRANSPORTS_UNDER_TEST}
        callers = {}
        for name, desk in desks.items():
            address = stack.enter_context(serving(name, desk, secret))
            callers[name] = stack.enter_context(calling(address))
        for name, caller in callers.items():
            assert echo(caller, {"name": name}) == b""
    assert {name: desk.calls[0][1] for name, desk in desks.items()} == {name: {"name": name} for name in desks}


# What is left


def connections(port):
    """Sockets of this process at a port."""
    here = psutil.Process().net_connections("tcp")
    return [found for found in here if found.laddr.port == port and found.status != psutil.CONN_TIME_WAIT]


@every_transport
def test_an_empty_context_leaves_nothing(name):
    gc.collect()
    threads, files = set(threading.enumerate()), psutil.Process().num_fds()
    for _ in range(20):
        with serving(name, Desk()):
            pass
    assert eventually(lambda: set(threading.enumerate()) <= threads)
    assert eventually(lambda: psutil.Process().num_fds() <= files)


@pytest.mark.filterwarnings("error::ResourceWarning")
@over_tcp
def test_nothing_is_left_of_a_server(name):
    """With members that are connected, one in the middle of a call, and strangers that wait."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # what other tests left behind
        gc.collect()
    threads, files = set(threading.enumerate()), psutil.Process().num_fds()
    desk = Desk()
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as stack:
        with serving(name, desk, port=free_port(), timeout=20.0) as address:
            callers = [stack.enter_context(calling(address)) for _ in range(4)]
            for caller in callers:
                echo(caller, {}, drawn(MB))
            where = (address.host, address.port)
            strangers = [stack.enter_context(socket.create_connection(where, 5)) for _ in range(5)]
            strangers[1].sendall(b"sparkkeras/1")
            strangers[2].sendall(b"GET / HTTP/1.1\r\n")
            strangers[3].sendall(b"\0\0")
            waiting = pool.submit(callers[0].call, "wait", {})
            assert desk.busy.wait(60)
            threading.Timer(0.2, desk.free.set).start()
            started = time.monotonic()
        assert time.monotonic() - started < 15
        with contextlib.suppress(TransportError):
            waiting.result()
        assert eventually(lambda: not [each for each in threading.enumerate() if "sparkkeras" in each.name.lower()])
        assert eventually(lambda: connections(address.port) == [])
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(where, 1)
        for stranger in strangers:
            with contextlib.suppress(ConnectionError):
                assert stranger.recv(1) == b""
        for caller in callers[1:]:
            with pytest.raises(TransportError):
                caller.call("echo", {})
        socket.create_server(where).close()
    assert eventually(lambda: set(threading.enumerate()) <= threads)
    gc.collect()
    assert psutil.Process().num_fds() <= files


@every_transport
def test_nothing_is_left_after_an_error(name):
    threads = set(threading.enumerate())

    def interrupted():
        nonlocal address
        with serving(name, Desk()) as address, calling(address) as caller:
            echo(caller)
            raise KeyboardInterrupt

    address = None
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert eventually(lambda: set(threading.enumerate()) <= threads)
    with calling(address) as caller, pytest.raises(TransportError):
        caller.call("echo", {})


@over_tcp
def test_connections_that_have_ended_leave_nothing_on_a_server_that_goes_on(name):
    desk = Desk()
    with serving(name, desk, timeout=1.0) as address, calling(patient(address)) as caller:
        echo(caller)
        threads, files = len(threading.enumerate()), psutil.Process().num_fds()
        for _ in range(60):
            with calling(patient(address)) as passing:
                echo(passing)
            answer_to(address, b"nobody")
        assert eventually(lambda: len(threading.enumerate()) <= threads)
        assert eventually(lambda: psutil.Process().num_fds() <= files)
        assert echo(caller) == b""


def test_a_conversation_outlives_a_silence_and_keeps_no_more_memory():
    """Over HTTP an idle connection must not end, and one that begins anew must not leave its buffer behind."""
    from sparkkeras.rpc import http

    made = []

    class Noted(http._Application):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

    kept = http._Application
    http._Application = Noted
    try:
        with serving("http", Desk(), timeout=0.5) as address, calling(patient(address)) as caller:
            assert echo(caller, body=b"x" * MB) == b"x" * MB
            for _ in range(2):
                time.sleep(0.8)
                assert echo(caller, body=b"x" * MB) == b"x" * MB
            assert len(made[0]._conversations) == 1
            for _ in range(5):
                assert eventually(lambda: made[0]._buffers)  # given back when the answer is through
                caller.close()
                echo(caller, body=b"x" * MB)
            assert eventually(lambda: len(made[0]._buffers) == 1)
    finally:
        http._Application = kept


def test_bodies_of_two_answers_never_share_a_nonce():
    """The nonce is chosen when the head is sealed, whenever the body is asked for."""
    ours, theirs = (Session(bytes(32), bytes(32), encrypt=False) for _ in range(2))
    head = Head("", {}, 3)
    ours.seal(head)
    first = ours.outgoing((memoryview(b"one"),))
    ours.seal(head)
    second = ours.outgoing((memoryview(b"two"),))
    tags = [b"".join(map(bytes, chunks))[-16:] for chunks in (second, first)]
    theirs.seal(head)
    assert b"".join(map(bytes, theirs.outgoing((memoryview(b"one"),))))[-16:] == tags[1]
    assert tags[0] != tags[1]
