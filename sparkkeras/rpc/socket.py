"""Calls over TCP: length-framed messages on connections that last.

A message is the length of its sealed head (4 bytes, big-endian), the head, the body, and the body's tag where there is a
body. Bodies are received in place: into the array that the client gave, into one buffer for each connection on the server.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from sparkkeras.rpc.transport import (
    Address,
    Call,
    Endpoint,
    Handler,
    RefusedError,
    Reply,
    TransportError,
    answered,
    check_size,
    checked,
    discard_body,
    fill,
    listener,
    read_body,
    refusal,
)
from sparkkeras.rpc.wire import (
    HEAD_BYTES,
    HELLO_BYTES,
    TAG_BYTES,
    Body,
    Fields,
    Greeting,
    Head,
    Reception,
    Secret,
    Session,
    WireError,
)

HANDSHAKE_SECONDS = 5.0
"""A stranger has this long to prove that it is none."""

STRANGERS = 64
"""So many may try at the same time; one more, and the one that has tried longest has to go."""

ACCEPT_SECONDS = 0.5
"""How often the server looks whether it shall close, where the system does not wake it."""

CLOSE_SECONDS = 5.0
"""How long closing waits for calls that are being answered."""

_log = logging.getLogger(__name__)


class SocketTransport:
    """See the module's words."""

    @contextmanager
    def serve(self, handler: Handler, endpoint: Endpoint, secret: Secret) -> Iterator[Address]:
        """As `Transport.serve`."""
        server = _Server(handler, endpoint, Reception(secret, endpoint.encrypt))
        try:
            yield Address("socket", endpoint.host, server.port, secret, endpoint.encrypt, endpoint.timeout)
        finally:
            server.close()

    def connect(self, address: Address) -> SocketCaller:
        """As `Transport.connect`."""
        return SocketCaller(address)


class SocketCaller:
    """As `Caller`, on one connection."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._connection: socket.socket | None = None
        self._session: Session | None = None

    def call(self, name: str, fields: Fields, body: Body = (), into: memoryview | None = None) -> tuple[Fields, memoryview]:
        """As `Caller.call`."""
        try:
            connection, session = self._connected()
            _send(connection, session, name, fields, body)
            answer, received = _receive(connection, session, into)
        except (OSError, WireError) as error:
            self.close()
            raise TransportError(f"{self._address.told}: {error or type(error).__name__}") from error
        except BaseException:
            self.close()  # half of an answer may be on its way
            raise
        return checked(answer.fields), received

    def close(self) -> None:
        """As `Caller.close`."""
        connection, self._connection, self._session = self._connection, None, None
        if connection is not None:
            connection.close()

    def _connected(self) -> tuple[socket.socket, Session]:
        if self._connection is None or self._session is None:
            address = self._address
            self._connection = socket.create_connection((address.host, address.port), address.timeout)
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            greeting = Greeting(address.secret, address.encrypt)
            self._connection.sendall(greeting.hello())
            answer = bytearray(HELLO_BYTES)
            _fill_until(self._connection, memoryview(answer), time.monotonic() + address.timeout)
            self._connection.settimeout(address.timeout)
            self._session = greeting.welcomed(bytes(answer))
        return self._connection, self._session


class _Server:
    """A thread that accepts connections, and one for each connection."""

    def __init__(self, handler: Handler, endpoint: Endpoint, reception: Reception) -> None:
        self._handler, self._endpoint, self._reception = handler, endpoint, reception
        self._lock = threading.Lock()
        self._strangers: dict[socket.socket, None] = {}  # in the order in which they came
        self._members: set[socket.socket] = set()
        self._threads: set[threading.Thread] = set()
        self._closing = False
        self._listener = listener(endpoint)
        self._listener.settimeout(ACCEPT_SECONDS)
        self.port = int(self._listener.getsockname()[1])
        self._accepting = threading.Thread(target=self._accept, name="sparkkeras-accept", daemon=True)
        self._accepting.start()

    def close(self) -> None:
        """Hang up on everybody and wait until nothing is left."""
        with self._lock:
            self._closing = True
            connections = [*self._strangers, *self._members]
            threads = [*self._threads]
        _hang_up(self._listener)
        self._accepting.join()
        for connection in connections:
            _hang_up(connection)
        self._listener.close()
        for thread in threads:
            thread.join(timeout=CLOSE_SECONDS)  # a call that is being answered may take a moment

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:  # closing the listener does not wake this on every system
                if self._closing:
                    break
                continue
            except OSError as error:
                if self._closing:
                    break
                _log.warning("the parameter server could not take a connection: %s", error)
                time.sleep(0.1)  # out of file descriptors, perhaps for a moment
                continue
            with self._lock:
                if self._closing:
                    connection.close()
                    break
                self._strangers[connection] = None
                if len(self._strangers) > STRANGERS:
                    oldest = next(iter(self._strangers))
                    del self._strangers[oldest]
                    _hang_up(oldest)
                thread = threading.Thread(target=self._serve, args=(connection,), name="sparkkeras-serve", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # there are too many threads
                    _log.warning("the parameter server could not take a connection: %s", error)
                    del self._strangers[connection]
                    connection.close()
                else:
                    # A thread that took itself out of these might still be there when the server is closed.
                    self._threads = {each for each in self._threads if each.is_alive()} | {thread}

    def _serve(self, connection: socket.socket) -> None:
        try:
            session = self._greeted(connection)
            if session is not None:
                self._converse(connection, session)
        except (OSError, WireError) as error:
            if not self._closing:
                _log.debug("a connection to the parameter server ended: %s", error)
        finally:
            with self._lock:
                self._strangers.pop(connection, None)
                self._members.discard(connection)
            connection.close()

    def _greeted(self, connection: socket.socket) -> Session | None:
        """The handshake; a conversation, or ``None`` where there are too many already."""
        hello = bytearray(HELLO_BYTES)
        _fill_until(connection, memoryview(hello), time.monotonic() + HANDSHAKE_SECONDS)
        answer, session = self._reception.welcome(bytes(hello))
        with self._lock:
            self._strangers.pop(connection, None)
            if self._closing or len(self._members) >= 4 * self._endpoint.members:
                return None
            self._members.add(connection)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _keep_alive(connection)
        connection.settimeout(self._endpoint.timeout)
        connection.sendall(answer)
        return session

    def _converse(self, connection: socket.socket, session: Session) -> None:
        peer = object()
        buffer = memoryview(bytearray(0))
        # Who has greeted goes on at once. Later a member may be silent for as long as an epoch takes.
        silence: float | None = HANDSHAKE_SECONDS
        try:
            while True:
                connection.settimeout(silence)
                length = _length(connection)
                silence = None
                connection.settimeout(self._endpoint.timeout)
                head = _head(connection, session, length)
                try:
                    check_size(self._handler, head)
                except RefusedError as error:
                    discard_body(connection.recv_into, head.body)
                    _answer(connection, session, refusal(error))
                    continue
                if head.body > len(buffer):
                    buffer = memoryview(bytearray(head.body))
                body = buffer[: head.body]
                read_body(connection.recv_into, session, body)
                _answer(connection, session, answered(self._handler, Call(head.name, head.fields, body, peer)))
        finally:
            self._handler.closed(peer)


def _answer(connection: socket.socket, session: Session, reply: Reply) -> None:
    try:
        _send(connection, session, "", reply.fields, reply.body)
    finally:
        reply.sent()


def _send(connection: socket.socket, session: Session, name: str, fields: Fields, body: Body) -> None:
    size = sum(len(part) for part in body)
    head = session.seal(Head(name, fields, size))
    connection.sendall(len(head).to_bytes(4, "big") + head)
    if size:
        for chunk in session.outgoing(body):
            connection.sendall(chunk)


def _receive(connection: socket.socket, session: Session, into: memoryview | None) -> tuple[Head, memoryview]:
    head = _head(connection, session, _length(connection))
    body = into if into is not None and len(into) == head.body else memoryview(bytearray(head.body))
    read_body(connection.recv_into, session, body)
    return head, body


def _length(connection: socket.socket) -> int:
    length = bytearray(4)
    fill(connection.recv_into, memoryview(length))
    return int.from_bytes(length, "big")


def _head(connection: socket.socket, session: Session, length: int) -> Head:
    if not TAG_BYTES < length <= HEAD_BYTES:
        raise WireError(f"a head of {length} bytes")
    sealed = bytearray(length)
    fill(connection.recv_into, memoryview(sealed))
    return session.open(sealed)


def _keep_alive(connection: socket.socket) -> None:
    """Have the system find out within a minute or two if the other machine is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6)):
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _fill_until(connection: socket.socket, view: memoryview, deadline: float) -> None:
    """Fill a buffer before a moment of `time.monotonic`, however slowly the bytes drip."""

    def readinto(rest: memoryview) -> int:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        return connection.recv_into(rest)

    fill(readinto, view)


def _hang_up(connection: socket.socket) -> None:
    """End a connection that another thread is waiting on; that thread closes it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


TRANSPORT = SocketTransport()
