"""Accepts TCP connections without letting silent clients occupy threads.

An event loop accepts connections and receives the first message of each. A connection gets a thread when that has arrived,
which has to happen within `FIRST_SECONDS`, and keeps it until it ends.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from sparkkeras.rpc.addresses import open_listener
from sparkkeras.rpc.transport import (
    Address,
    Call,
    Endpoint,
    Handler,
    Readinto,
    RefusedError,
    Reply,
    check_size,
    discard_body,
    error_reply,
    handle,
    read_body,
)
from sparkkeras.rpc.wire import Header, Secret, Session

FIRST_SECONDS = 5.0
"""The first message of a connection has to arrive within this time."""

MAX_FIRST_BYTES = 128 * 1024
"""The largest first message."""

MAX_CONNECTIONS = 4096
"""The largest number of connections; at most half of the files that this process may open, a limit that the server raises.

For one more, the server closes the oldest connection whose first message has not arrived, or the new one if there is none.
"""

BACKLOG = 1024
"""The number of connections that the operating system holds until they are accepted."""

STOP_SECONDS = 2.5
"""How long stopping waits for calls in progress; then it closes their connections, and waits once more."""

_log = logging.getLogger(__name__)

Length = Callable[[bytearray, int], int | None]
"""The length of a first message, from the bytes that have arrived; ``None`` if they do not show it yet.

The second argument is the number of bytes that an earlier call had, so that a search need not begin at the first byte again.
"""

Handle = Callable[[socket.socket, Any, bytes], object]
"""Handles a connection until it ends, given the client's address and the first message. May raise `OSError`."""


@contextmanager
def accepting(listener: socket.socket, length: Length, handle: Handle) -> Iterator[None]:
    """Accept connections until the context ends; then no connection is left, and the listening socket is closed."""
    _raise_file_limit()
    loop, acceptor = asyncio.new_event_loop(), _ConnectionAcceptor(listener, length, handle)
    task = loop.create_task(acceptor.accept())
    thread = threading.Thread(target=loop.run_until_complete, args=[task], name="sparkkeras-accept", daemon=True)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
        loop.close()
        acceptor.join()


@contextmanager
def serving(transport: str, endpoint: Endpoint, secret: Secret, length: Length, handle: Handle) -> Iterator[Address]:
    """Accept connections at an endpoint until the context ends; yields the address for clients; see `accepting`."""
    listener = open_listener(endpoint.listen, endpoint.port)
    port = int(listener.getsockname()[1])
    with accepting(listener, length, handle):
        yield Address(transport, endpoint.host, port, secret, endpoint.encrypt, endpoint.timeout)


class _ConnectionAcceptor:
    def __init__(self, listener: socket.socket, length: Length, handle: Handle) -> None:
        self._listener, self._length, self._handle = listener, length, handle
        self._threads: dict[threading.Thread, socket.socket] = {}
        self._warned = False

    async def accept(self) -> None:
        """Accept connections until this is cancelled."""
        loop, waiting = asyncio.get_running_loop(), dict[asyncio.Task[None], None]()  # the oldest first
        self._listener.listen(BACKLOG)
        self._listener.setblocking(False)
        with suppress(asyncio.CancelledError), self._listener:
            while True:
                await asyncio.sleep(0)  # let other tasks run: accepting does not yield while connections are pending
                try:
                    connection, address = self._listener.accept()  # loop.sock_accept loses connections if it is cancelled
                    connection.setblocking(False)
                except BlockingIOError:
                    await _readable(self._listener)
                    continue
                except OSError as error:
                    _log.warning("the server on the driver could not accept a connection: %s", error)
                    await asyncio.sleep(0.1)  # the process is out of file descriptors, perhaps for a moment
                    continue
                # Only finished threads go: one that removed itself could still be running when the server has stopped.
                self._threads = {thread: its for thread, its in self._threads.items() if thread.is_alive()}
                if len(waiting) + len(self._threads) >= _max_connections():
                    if not waiting:
                        connection.close()
                        self._warn_once()
                        continue
                    oldest = next(iter(waiting))
                    oldest.cancel()
                    del waiting[oldest]
                waiting[task := loop.create_task(self._start(connection, address))] = None
                task.add_done_callback(lambda ended: waiting.pop(ended, None))
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    def _warn_once(self) -> None:
        if not self._warned:
            self._warned = True
            _log.warning(
                "the server on the driver closes new connections: it has %d, the most that MAX_CONNECTIONS and half of the "
                "limit on open files (ulimit -n) allow. A worker needs two: raise the limit, or use fewer workers.",
                len(self._threads),
            )

    async def _start(self, connection: socket.socket, address: Any) -> None:
        """Start the thread of a connection when its first message has arrived."""
        try:
            async with asyncio.timeout(FIRST_SECONDS):
                first = await _receive_first(connection, self._length)
            connection.setblocking(True)
            keep_alive(connection)
            arguments = (connection, address, first)
            thread = threading.Thread(target=self._run, args=arguments, name="sparkkeras-serve", daemon=True)
            thread.start()
            self._threads[thread] = connection
        except BaseException as error:
            connection.close()
            if not isinstance(error, OSError | RuntimeError):  # the latter: the process has too many threads
                raise
            _log.debug("a connection to the server on the driver ended: %s", error)

    def _run(self, connection: socket.socket, address: Any, first: bytes) -> None:
        try:
            with connection:
                self._handle(connection, address, first)
        except OSError as error:
            _log.debug("a connection to the server on the driver ended: %s", error)

    def join(self) -> None:
        """Wait for the threads of all connections to end."""
        for how in (socket.SHUT_RD, socket.SHUT_RDWR):  # at first, replies to calls in progress may still be sent
            deadline = time.monotonic() + STOP_SECONDS
            for connection in self._threads.values():
                with suppress(OSError):
                    connection.shutdown(how)
            for thread in self._threads:
                thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            _log.warning("the server on the driver has stopped while a call is still being handled")


def keep_alive(connection: socket.socket) -> None:
    """Have the operating system detect within two minutes that the other machine is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6)):
        if hasattr(socket, name):  # not every system has them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _raise_file_limit() -> None:
    """Let this process open enough files: 1,024 is a common limit, which 256 workers with two connections each exceed."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * MAX_CONNECTIONS if most == resource.RLIM_INFINITY else min(2 * MAX_CONNECTIONS, most)
    if files != resource.RLIM_INFINITY and files < wanted:
        with suppress(OSError, ValueError):  # some systems have a lower limit of their own
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def _max_connections() -> int:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if files == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, files // 2)


async def _receive_first(connection: socket.socket, length: Length) -> bytes:
    """Receive the first message, and nothing of what follows.

    Raises:
        ConnectionError: The connection ends before, or the message is too long.
    """
    first = bytearray()
    total: int | None = None
    while total is None or len(first) < total:
        await _readable(connection)
        before = len(first)
        first += connection.recv(MAX_FIRST_BYTES, socket.MSG_PEEK)
        total = length(first, before)
        end = len(first) if total is None else min(len(first), total)
        first[before:] = connection.recv(end - before)
        if len(first) == before or len(first) > MAX_FIRST_BYTES:
            raise ConnectionError("the connection ended before its first message, or that was too long")
    return bytes(first)


async def _readable(connection: socket.socket) -> None:
    """Wait until a socket has something to read, or a connection to accept."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(connection, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(connection)


MAX_CALLS = 16
"""The number of calls that a server handles at the same time; it receives a call's body and sends the reply meanwhile.

Enough to keep a processor and a network busy. With more of them the server is not faster but slower: its threads compete for
the interpreter, and the bodies and the versions of the weights that replies hold do not fit into the cache, or into memory.
With fewer, a server with two cores on loopback does more (4 calls of 1 or 10 MB: 19 to 27 %). But a call lasts as long as
its client sends and receives: with clients of 1 Gbit/s each, 4 calls at a time did 24 exchanges of 10 MB a second, not 59.
"""


class Capacity:
    """The capacity of a server for calls; see `MAX_CALLS`. Thread-safe.

    Args:
        timeout: Seconds that a client waits for its reply. A call that has waited for half of them begins in any case, so
            that neither a long queue nor clients that stall exceed the timeouts of others.
    """

    def __init__(self, timeout: float) -> None:
        self._slots, self._patience = threading.Semaphore(MAX_CALLS), timeout / 2
        self._lock = threading.Lock()
        self._buffers: list[bytearray] = []

    @contextmanager
    def call(self) -> Iterator[None]:
        """Wait until the server may handle another call, and count it as such until the context ends."""
        admitted = self._slots.acquire(timeout=self._patience)
        try:
            yield
        finally:
            if admitted:
                self._slots.release()

    def reply(self, handler: Handler, header: Header, session: Session, readinto: Readinto, peer: Hashable) -> Reply:
        """Receive the body of a call whose header has been received, and return the handler's reply.

        Raises:
            WireError: It is not the body that was sent, or it ends early.
        """
        try:
            check_size(handler, header)
        except RefusedError as error:
            discard_body(readinto, header.body)
            return error_reply(error)
        buffer = self.borrow(header.body)
        try:
            body = memoryview(buffer)[: header.body]
            read_body(readinto, session, body)
            reply = handle(handler, Call(header.name, header.fields, body, peer))
        except BaseException:
            self.give_back(buffer)
            raise

        def sent() -> None:
            try:
                reply.sent()
            finally:
                self.give_back(buffer)

        return replace(reply, sent=sent)

    def borrow(self, size: int) -> bytearray:
        """A buffer of at least ``size`` bytes. Their number is that of simultaneous calls, not of connections."""
        with self._lock:
            for index, buffer in enumerate(self._buffers):
                if len(buffer) >= size > 0:
                    return self._buffers.pop(index)
            if size and self._buffers:
                self._buffers.pop()  # too small; the new one takes its place
        return bytearray(size)

    def give_back(self, buffer: bytearray) -> None:
        """End the use of a buffer that was borrowed."""
        with self._lock:
            if len(buffer) and len(self._buffers) < MAX_CALLS:
                self._buffers.append(buffer)
