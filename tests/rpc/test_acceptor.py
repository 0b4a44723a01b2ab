"""Connections get a thread when their first message has arrived."""

import contextlib
import itertools
import logging
import resource
import socket
import threading
import time

import pytest

from sparkkeras.rpc import acceptor, http
from tests.rpc.test_transports import eventually, shut_down

FIRST = b"0123456789"


@contextlib.contextmanager
def accepting(handle=None, length=lambda data, before: len(FIRST), listener=None):
    """An acceptor that replies to each first message with the same bytes, and echoes what follows; yields its address."""

    def echo(connection, address, first):
        connection.sendall(first)
        while data := connection.recv(100):
            connection.sendall(data)

    listener = listener or socket.create_server(("127.0.0.1", 0))
    with acceptor.accepting(listener, length, handle or echo):
        yield listener.getsockname()


def serving_threads():
    return [thread for thread in threading.enumerate() if thread.name == "sparkkeras-serve"]


def answers(connection, data=FIRST):
    connection.sendall(data)
    return connection.recv(100) == data


def is_closed(connection):
    with contextlib.suppress(ConnectionError):
        return connection.recv(1) == b""
    return True


@pytest.mark.parametrize("lengths", [[19], [1] * 19, [15, 4]], ids=str)
def test_the_first_message_is_received_whole_and_nothing_of_what_follows(lengths):
    """As the headers of an HTTP request, in pieces of any size."""
    received, first, ends = [], b"GET / HTTP/1\r\n\r\n", [0, *itertools.accumulate(lengths)]

    def handle(connection, address, data):
        received.append((data, connection.recv(3, socket.MSG_WAITALL)))

    with accepting(handle, http._header_length) as address, socket.create_connection(address, 10) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start, end in itertools.pairwise(ends):
            client.sendall((first + b"abc")[start:end])
            time.sleep(0.002)
        assert eventually(lambda: received)
    assert received == [(first, b"abc")]


def test_bytes_that_were_searched_before_are_not_searched_again():
    """Otherwise the time for a header that arrives byte by byte grows with the square of its length."""
    assert http._header_length(bytearray(b"\r\n\r\n" + bytes(10)), 14) is None


def test_silent_and_slow_connections_occupy_no_thread_and_are_closed(monkeypatch):
    monkeypatch.setattr(acceptor, "FIRST_SECONDS", 0.3)
    with accepting() as address, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(address, 10)) for _ in range(30)]
        for client in clients[::2]:
            client.sendall(FIRST[:5])
        with socket.create_connection(address, 10) as valid:
            assert answers(valid)
            assert len(serving_threads()) == 1
            assert all(is_closed(client) for client in clients)
            assert answers(valid, b"still here")


def test_a_client_that_sends_slowly_is_closed_however_steadily_it_sends(monkeypatch):
    monkeypatch.setattr(acceptor, "FIRST_SECONDS", 0.3)
    with accepting(length=lambda data, before: None) as address, socket.create_connection(address, 10) as client:
        until = time.monotonic() + 30
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < until:
                client.sendall(b"a")
                time.sleep(0.02)
        assert time.monotonic() < until


def test_a_first_message_that_is_too_long_closes_the_connection(monkeypatch):
    monkeypatch.setattr(acceptor, "MAX_FIRST_BYTES", 1000)
    with accepting(length=lambda data, before: None) as address, socket.create_connection(address, 10) as client:
        client.sendall(bytes(1001))
        assert is_closed(client)


def test_the_number_of_connections_is_limited(monkeypatch, caplog):
    monkeypatch.setattr(acceptor, "MAX_CONNECTIONS", 2)
    with accepting() as address:
        with socket.create_connection(address, 10) as silent, socket.create_connection(address, 10) as valid:
            assert answers(valid)
            with socket.create_connection(address, 10) as late:
                assert is_closed(silent), "the oldest that has sent nothing"
                assert answers(late)
                for _ in range(2):
                    with socket.create_connection(address, 10) as one_more:
                        assert is_closed(one_more), "no other connection is silent"
                assert caplog.text.count("ulimit -n") == 1
                assert answers(valid, b"next")
        assert eventually(lambda: not serving_threads())
        with socket.create_connection(address, 10) as next_one:
            assert answers(next_one)


def test_the_limit_on_open_files_is_raised():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = hard if hard != resource.RLIM_INFINITY else 2 * acceptor.MAX_CONNECTIONS
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1000, most), hard))
    try:
        with accepting():
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(2 * acceptor.MAX_CONNECTIONS, most)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_connections_make_progress_while_others_are_accepted(monkeypatch):
    monkeypatch.setattr(acceptor, "MAX_CONNECTIONS", 10)
    listener = socket.create_server(("127.0.0.1", 0), backlog=100)
    with contextlib.ExitStack() as stack:
        valid, *_ = [stack.enter_context(socket.create_connection(listener.getsockname(), 10)) for _ in range(50)]
        valid.sendall(FIRST)
        with accepting(listener=listener):
            assert valid.recv(100) == FIRST


def test_a_lack_of_threads_closes_the_connection_only(monkeypatch):
    with accepting() as address:
        with monkeypatch.context() as patch, socket.create_connection(address, 10) as unlucky:

            def fail(thread):
                raise RuntimeError("can't start new thread")

            patch.setattr(threading.Thread, "start", fail)
            unlucky.sendall(FIRST)
            assert is_closed(unlucky)
        with socket.create_connection(address, 10) as client:
            assert answers(client)


def test_a_lack_of_open_files_delays_new_connections_only():
    with accepting() as address, contextlib.ExitStack() as stack:
        client, *late = [stack.enter_context(socket.socket()) for _ in range(31)]
        for connection in (client, *late):
            connection.settimeout(10)
        client.connect(address)
        assert answers(client)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with socket.socket() as next_free:
            lowest = next_free.fileno()
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                socket.socket()
            for connection in late:
                connection.connect(address)
            time.sleep(0.3)  # the acceptor tries to accept them
            assert answers(client, b"more")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert answers(late[-1])


def test_stopping_lets_calls_in_progress_reply():
    busy = threading.Event()

    def handle(connection, address, first):
        busy.set()
        assert connection.recv(1) == b""  # the acceptor stops
        connection.sendall(b"reply")

    with socket.socket() as client:
        with accepting(handle) as address:
            client.connect(address)
            client.sendall(FIRST)
            assert busy.wait(10)
        assert client.recv(100) == b"reply"


def test_stopping_does_not_wait_for_a_call_that_never_ends(monkeypatch, caplog):
    monkeypatch.setattr(acceptor, "STOP_SECONDS", 0.05)
    free, busy = threading.Event(), threading.Event()

    def handle(connection, address, first):
        busy.set()
        free.wait(60)

    with caplog.at_level(logging.WARNING), socket.socket() as client:
        with accepting(handle) as address:
            client.connect(address)
            client.sendall(FIRST)
            assert busy.wait(10)
        assert "is still being handled" in caplog.text
        free.set()
        assert eventually(lambda: not serving_threads())
        shut_down(client)
