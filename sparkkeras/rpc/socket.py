"""The ``socket`` transport: length-prefixed messages over persistent TCP connections.

A message is the length of its sealed header (4 bytes, big-endian), the header, the body and, if there is a body, its
authentication tag. Bodies are received in place: on the client into the array that the caller gave, on the server into one
buffer for each connection.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from sparkkeras.rpc.acceptor import keep_alive
from sparkkeras.rpc.transport import (
    Address,
    Call,
    Endpoint,
    Handler,
    RefusedError,
    Reply,
    TransportError,
    check_size,
    checked_fields,
    discard_body,
    error_reply,
    handle,
    open_listener,
    read_body,
    read_exactly,
)
from sparkkeras.rpc.wire import (
    HELLO_BYTES,
    MAX_HEADER_BYTES,
    TAG_BYTES,
    Acceptor,
    Body,
    Fields,
    Handshake,
    Header,
    Secret,
    Session,
    WireError,
)

HANDSHAKE_SECONDS = 5.0
"""An unauthenticated client has this long to complete the handshake."""

MAX_UNAUTHENTICATED = 64
"""The largest number of unauthenticated connections. One more, and the server closes the oldest of them."""

ACCEPT_SECONDS = 0.5
"""How often the server checks whether it is closing, on systems where closing the listener does not wake `accept`."""

CLOSE_SECONDS = 5.0
"""How long closing waits for calls in progress."""

_log = logging.getLogger(__name__)


class SocketTransport:
    """The transport over TCP; see the module docstring."""

    @contextmanager
    def serve(self, handler: Handler, endpoint: Endpoint, secret: Secret) -> Iterator[Address]:
        """See `Transport.serve`."""
        server = _Server(handler, endpoint, Acceptor(secret, endpoint.encrypt))
        try:
            yield Address("socket", endpoint.host, server.port, secret, endpoint.encrypt, endpoint.timeout)
        finally:
            server.close()

    def connect(self, address: Address) -> SocketCaller:
        """See `Transport.connect`."""
        return SocketCaller(address)


class SocketCaller:
    """The client's end, on one connection; see `Caller`."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._connection: socket.socket | None = None
        self._session: Session | None = None

    def call(self, name: str, fields: Fields, body: Body = (), into: memoryview | None = None) -> tuple[Fields, memoryview]:
        """See `Caller.call`."""
        try:
            connection, session = self._connected()
            _send(connection, session, name, fields, body)
            reply, received = _receive(connection, session, into)
        except (OSError, WireError) as error:
            self.close()
            raise TransportError(f"{self._address.url}: {error or type(error).__name__}") from error
        except BaseException:
            self.close()  # part of the reply may be in transit
            raise
        return checked_fields(reply.fields), received

    def close(self) -> None:
        """See `Caller.close`."""
        connection, self._connection, self._session = self._connection, None, None
        if connection is not None:
            connection.close()

    def _connected(self) -> tuple[socket.socket, Session]:
        if self._connection is None or self._session is None:
            address = self._address
            self._connection = socket.create_connection((address.host, address.port), address.timeout)
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            handshake = Handshake(address.secret, address.encrypt)
            self._connection.sendall(handshake.hello())
            answer = bytearray(HELLO_BYTES)
            _read_until(self._connection, memoryview(answer), time.monotonic() + address.timeout)
            self._connection.settimeout(address.timeout)
            self._session = handshake.complete(bytes(answer))
        return self._connection, self._session


class _Server:
    """The server's end: a thread that accepts connections, and one thread for each connection."""

    def __init__(self, handler: Handler, endpoint: Endpoint, acceptor: Acceptor) -> None:
        self._handler, self._endpoint, self._acceptor = handler, endpoint, acceptor
        self._lock = threading.Lock()
        self._unauthenticated: dict[socket.socket, None] = {}  # the oldest first
        self._authenticated: set[socket.socket] = set()  # connections with a session
        self._threads: set[threading.Thread] = set()
        self._closing = False
        self._listener = open_listener(endpoint)
        self._listener.settimeout(ACCEPT_SECONDS)
        self.port = int(self._listener.getsockname()[1])
        self._accepting = threading.Thread(target=self._accept, name="sparkkeras-accept", daemon=True)
        self._accepting.start()

    def close(self) -> None:
        """Close all connections and wait for their threads to end."""
        with self._lock:
            self._closing = True
            connections = [*self._unauthenticated, *self._authenticated]
            threads = [*self._threads]
        _shut_down(self._listener)
        self._accepting.join()
        for connection in connections:
            _shut_down(connection)
        self._listener.close()
        for thread in threads:
            thread.join(timeout=CLOSE_SECONDS)  # a call in progress may take a moment

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:  # closing the listener does not wake `accept` on every system
                if self._closing:
                    break
                continue
            except OSError as error:
                if self._closing:
                    break
                _log.warning("the server on the driver could not accept a connection: %s", error)
                time.sleep(0.1)  # the process is out of file descriptors, perhaps for a moment
                continue
            with self._lock:
                if self._closing:
                    connection.close()
                    break
                self._unauthenticated[connection] = None
                if len(self._unauthenticated) > MAX_UNAUTHENTICATED:
                    oldest = next(iter(self._unauthenticated))
                    del self._unauthenticated[oldest]
                    _shut_down(oldest)
                thread = threading.Thread(target=self._serve, args=(connection,), name="sparkkeras-serve", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # the process has too many threads
                    _log.warning("the server on the driver could not accept a connection: %s", error)
                    del self._unauthenticated[connection]
                    connection.close()
                else:
                    # Only finished threads go: one that removed itself could still be running when the server has closed.
                    self._threads = {each for each in self._threads if each.is_alive()} | {thread}

    def _serve(self, connection: socket.socket) -> None:
        try:
            session = self._handshake(connection)
            if session is not None:
                self._handle_calls(connection, session)
        except (OSError, WireError) as error:
            if not self._closing:
                _log.debug("a connection to the server on the driver ended: %s", error)
        finally:
            with self._lock:
                self._unauthenticated.pop(connection, None)
                self._authenticated.discard(connection)
            connection.close()

    def _handshake(self, connection: socket.socket) -> Session | None:
        """Do the handshake. Returns the session, or ``None`` if there are too many sessions already."""
        hello = bytearray(HELLO_BYTES)
        _read_until(connection, memoryview(hello), time.monotonic() + HANDSHAKE_SECONDS)
        answer, session = self._acceptor.accept(bytes(hello))
        with self._lock:
            self._unauthenticated.pop(connection, None)
            if self._closing or len(self._authenticated) >= 4 * self._endpoint.expected_sessions:
                return None
            self._authenticated.add(connection)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(connection)
        connection.settimeout(self._endpoint.timeout)
        connection.sendall(answer)
        return session

    def _handle_calls(self, connection: socket.socket, session: Session) -> None:
        peer = object()
        buffer = memoryview(bytearray(0))
        # The first call follows the handshake at once. Later a peer may be silent for as long as an epoch takes.
        silence: float | None = HANDSHAKE_SECONDS
        try:
            while True:
                connection.settimeout(silence)
                length = _length(connection)
                silence = None
                connection.settimeout(self._endpoint.timeout)
                header = _header(connection, session, length)
                try:
                    check_size(self._handler, header)
                except RefusedError as error:
                    discard_body(connection.recv_into, header.body)
                    _reply(connection, session, error_reply(error))
                    continue
                if header.body > len(buffer):
                    buffer = memoryview(bytearray(header.body))
                body = buffer[: header.body]
                read_body(connection.recv_into, session, body)
                _reply(connection, session, handle(self._handler, Call(header.name, header.fields, body, peer)))
        finally:
            self._handler.closed(peer)


def _reply(connection: socket.socket, session: Session, reply: Reply) -> None:
    try:
        _send(connection, session, "", reply.fields, reply.body)
    finally:
        reply.sent()


def _send(connection: socket.socket, session: Session, name: str, fields: Fields, body: Body) -> None:
    size = sum(len(part) for part in body)
    header = session.seal(Header(name, fields, size))
    connection.sendall(len(header).to_bytes(4, "big") + header)
    if size:
        for chunk in session.outgoing(body):
            connection.sendall(chunk)


def _receive(connection: socket.socket, session: Session, into: memoryview | None) -> tuple[Header, memoryview]:
    header = _header(connection, session, _length(connection))
    body = into if into is not None and len(into) == header.body else memoryview(bytearray(header.body))
    read_body(connection.recv_into, session, body)
    return header, body


def _length(connection: socket.socket) -> int:
    length = bytearray(4)
    read_exactly(connection.recv_into, memoryview(length))
    return int.from_bytes(length, "big")


def _header(connection: socket.socket, session: Session, length: int) -> Header:
    if not TAG_BYTES < length <= MAX_HEADER_BYTES:
        raise WireError(
            f"a message header has {length} bytes; expected more than {TAG_BYTES} and at most {MAX_HEADER_BYTES}"
        )
    sealed = bytearray(length)
    read_exactly(connection.recv_into, memoryview(sealed))
    return session.open(sealed)


def _read_until(connection: socket.socket, view: memoryview, deadline: float) -> None:
    """Fill a buffer before a deadline of `time.monotonic`, however slowly the bytes arrive."""

    def readinto(rest: memoryview) -> int:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        return connection.recv_into(rest)

    read_exactly(readinto, view)


def _shut_down(connection: socket.socket) -> None:
    """Shut down a connection that another thread waits on; that thread closes it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


TRANSPORT = SocketTransport()
