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
from contextlib import AbstractContextManager
from typing import Any

from sparkkeras.rpc.acceptor import FIRST_SECONDS, Capacity, serving
from sparkkeras.rpc.transport import Address, Caller, Endpoint, Handler, read_exactly, reply_body
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


def serve(handler: Handler, endpoint: Endpoint, secret: Secret) -> AbstractContextManager[Address]:
    """See `Transport.serve`."""
    server = _SocketServer(handler, endpoint, Acceptor(secret, endpoint.encrypt))
    return serving("socket", endpoint, secret, lambda data, before: HELLO_BYTES, server.handle)


class SocketCaller(Caller):
    """The client's end."""

    def _exchange(self, header: Header, body: Body, into: memoryview | None) -> tuple[Fields, memoryview]:
        address = self._address
        if self._session is None:
            self._connection = socket.create_connection((address.host, address.port), address.timeout)
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            handshake = Handshake(address.secret, address.encrypt)
            self._connection.sendall(handshake.hello())
            answer = bytearray(HELLO_BYTES)
            _read_until(self._connection, memoryview(answer), time.monotonic() + address.timeout)
            self._connection.settimeout(address.timeout)
            self._session = handshake.complete(bytes(answer))
        connection, session = self._connection, self._session
        _send(connection, session, header, body)
        reply = _header(connection, session, _length(connection))
        return reply.fields, reply_body(connection.recv_into, session, reply, into)


connect = SocketCaller
"""See `Transport.connect`."""


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
                        size = sum(len(part) for part in reply.body)
                        _send(connection, session, Header("", reply.fields, size), reply.body)
                    finally:
                        reply.sent()
        finally:
            self._handler.closed(peer)


def _send(connection: socket.socket, session: Session, header: Header, body: Body) -> None:
    sealed = session.seal(header)
    connection.sendall(len(sealed).to_bytes(4, "big") + sealed)
    if header.body:
        for chunk in session.outgoing(body):
            connection.sendall(chunk)


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
