"""The ``socket`` transport: length-prefixed messages over persistent TCP connections.

A message is the length of its sealed header (4 bytes, big-endian), the header, the body and, if there is a body, its
authentication tag. Bodies are received in place: on the client into the array that the caller gave, on the server into a
buffer that is reused for other calls.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sparkkeras.rpc.acceptor import FIRST_SECONDS, Capacity, accepting
from sparkkeras.rpc.addresses import open_listener
from sparkkeras.rpc.transport import (
    Address,
    Endpoint,
    Handler,
    TransportError,
    checked_fields,
    read_exactly,
    reply_body,
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

_log = logging.getLogger(__name__)


@contextmanager
def serve(handler: Handler, endpoint: Endpoint, secret: Secret) -> Iterator[Address]:
    """See `Transport.serve`."""
    listener = open_listener(endpoint.listen, endpoint.port)
    port = int(listener.getsockname()[1])
    server = _SocketServer(handler, endpoint, Acceptor(secret, endpoint.encrypt))
    with accepting(listener, lambda data, before: HELLO_BYTES, server.handle):
        yield Address("socket", endpoint.host, port, secret, endpoint.encrypt, endpoint.timeout)


def connect(address: Address) -> SocketCaller:
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


class _SocketServer:
    """Handles the connections of clients."""

    def __init__(self, handler: Handler, endpoint: Endpoint, acceptor: Acceptor) -> None:
        self._handler, self._timeout, self._acceptor = handler, endpoint.timeout, acceptor
        self._free_sessions = threading.Semaphore(endpoint.max_sessions)
        self._capacity = Capacity(endpoint.timeout)

    def handle(self, connection: socket.socket, _: Any, hello: bytes) -> None:
        """Handle the calls of a connection, given the client's first message."""
        try:
            answer, session = self._acceptor.accept(hello)
            if not self._free_sessions.acquire(blocking=False):
                return
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.settimeout(self._timeout)
                connection.sendall(answer)
                self._handle_calls(connection, session)
            finally:
                self._free_sessions.release()
        except WireError as error:
            _log.debug("a connection to the server on the driver ended: %s", error)

    def _handle_calls(self, connection: socket.socket, session: Session) -> None:
        peer = object()
        # The first call follows the handshake at once. Later a peer may be silent for as long as an epoch takes.
        silence: float | None = FIRST_SECONDS
        try:
            while True:
                connection.settimeout(silence)
                length = _length(connection)
                silence = None
                connection.settimeout(self._timeout)
                with self._capacity.call():
                    header = _header(connection, session, length)
                    reply = self._capacity.reply(self._handler, header, session, connection.recv_into, peer)
                    try:
                        _send(connection, session, "", reply.fields, reply.body)
                    finally:
                        reply.sent()
        finally:
            self._handler.closed(peer)


def _send(connection: socket.socket, session: Session, name: str, fields: Fields, body: Body) -> None:
    size = sum(len(part) for part in body)
    header = session.seal(Header(name, fields, size))
    connection.sendall(len(header).to_bytes(4, "big") + header)
    if size:
        for chunk in session.outgoing(body):
            connection.sendall(chunk)


def _receive(connection: socket.socket, session: Session, into: memoryview | None) -> tuple[Header, memoryview]:
    header = _header(connection, session, _length(connection))
    return header, reply_body(connection.recv_into, session, header, into)


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
