"""The ``http`` transport: a server on `http.server` of Python's library, and clients with persistent connections.

A session starts with ``POST /hello``. Every other path is the name of a call (``/parameters``, ``/update``, ``/health``,
...). The handshake and the sealed message header travel in the HTTP header ``Authorization``, the body and its
authentication tag in the request's body. The reply's message header is in the HTTP header ``X-Sparkkeras``.

A connection gets a thread when the header of its first request has arrived. An unauthenticated request gets status 403
before a byte of its body is read, and the connection is closed. So silent and unauthenticated clients occupy no thread.
"""

from __future__ import annotations

import base64
import http.client
import io
import logging
import socket
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any, cast
from urllib.parse import quote, unquote

from sparkkeras.rpc.acceptor import Capacity, serving
from sparkkeras.rpc.transport import Address, ConnectionCaller, Endpoint, Handler, Reply, reply_body
from sparkkeras.rpc.wire import (
    HELLO_BYTES,
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

SCHEME = "Sparkkeras"
REPLY_HEADER = "X-Sparkkeras"
_log = logging.getLogger(__name__)


def serve(handler: Handler, endpoint: Endpoint, secret: Secret) -> AbstractContextManager[Address]:
    """See `Transport.serve`."""
    server = _Server(handler, Acceptor(secret, endpoint.encrypt), endpoint)
    return serving("http", endpoint, secret, _header_length, lambda *connection: _Connection(server, *connection))


class HttpCaller(ConnectionCaller):
    """The client's end."""

    _errors = (OSError, WireError, http.client.HTTPException)
    _identity = ""

    def _exchange(self, header: Header, body: Body, into: memoryview | None) -> tuple[Fields, memoryview]:
        address = self._address
        if self._session is None:
            self._connection = http.client.HTTPConnection(address.host, address.port, timeout=address.timeout)
            handshake = Handshake(address.secret, address.encrypt)
            self._connection.request("POST", "/hello", headers={"Authorization": _authorization(handshake.hello())})
            response = self._connection.getresponse()
            answer = response.read(HELLO_BYTES)
            if response.status != 200:
                raise WireError(f"the server rejected the handshake with status {response.status}")
            self._identity, self._session = _identity(answer), handshake.complete(answer)
        connection, session = self._connection, self._session
        if connection.sock is None:
            connection.connect()
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.putrequest("POST", f"/{quote(header.name, safe='')}", skip_accept_encoding=True)
        connection.putheader("Authorization", _authorization(session.seal(header), self._identity))
        connection.putheader("Content-Length", _content_length(header.body))
        connection.endheaders()
        if header.body:
            for chunk in session.outgoing(body):
                connection.send(chunk)
        response = connection.getresponse()
        sealed = response.getheader(REPLY_HEADER)
        if response.status != 200 or sealed is None:
            response.read(HELLO_BYTES)
            raise WireError(f"the server replied with status {response.status} {response.reason}")
        reply = session.open(_from_base64(sealed))
        received = reply_body(response.readinto, session, reply, into)
        response.read()  # to the end, so that the connection can be reused
        return reply.fields, received


connect = HttpCaller
"""See `Transport.connect`."""


class _Peer:
    """A session on the server; also the peer of its calls."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.lock = threading.Lock()


class _Server:
    """The sessions of a server, which are not bound to connections."""

    def __init__(self, handler: Handler, acceptor: Acceptor, endpoint: Endpoint) -> None:
        self.handler, self.timeout, self.capacity = handler, endpoint.timeout, Capacity(endpoint.timeout)
        self._acceptor, self._max_sessions = acceptor, endpoint.max_sessions
        self._lock = threading.Lock()
        self._peers: OrderedDict[str, _Peer] = OrderedDict()  # by session identity, the least recently used first

    def accept(self, hello: bytes) -> bytes:
        """The answer to a client's handshake, with which a session begins."""
        answer, session = self._acceptor.accept(hello)
        with self._lock:
            self._peers[_identity(answer)] = _Peer(session)
            evicted = self._peers.popitem(last=False)[1] if len(self._peers) > self._max_sessions else None
        if evicted is not None:
            self.handler.closed(evicted)
        return answer

    def peer(self, identity: str) -> _Peer:
        """The peer of a session."""
        with self._lock:
            if identity not in self._peers:
                raise WireError("a request is of no known session")
            self._peers.move_to_end(identity)
            return self._peers[identity]


_Response = tuple[Reply, Mapping[str, str], Iterable[bytes | memoryview]]
"""A reply, and the headers and the body of its HTTP response."""


class _Connection(BaseHTTPRequestHandler):
    """Handles the requests of a connection, of which the first header has been received already.

    All requests but the first one count as calls: the client of that one may be unauthenticated, and must neither wait for
    others nor let them wait.
    """

    protocol_version = "HTTP/1.1"
    server_version, sys_version = "sparkkeras", ""  # do not disclose the server software
    disable_nagle_algorithm = True

    def __init__(self, server: _Server, connection: socket.socket, address: Any, header: bytes) -> None:
        self._server, self._header = server, header
        super().__init__(connection, address, cast(Any, server))

    def handle(self) -> None:
        """Handle requests until the connection ends. Called when an instance is created."""
        self.connection.settimeout(self._server.timeout)
        self._stream = cast(io.BufferedReader, self.rfile)
        self.rfile = io.BytesIO(self._header)
        self.handle_one_request()
        self.rfile = self._stream
        while not self.close_connection:
            self.connection.settimeout(None)  # an authenticated client may be silent for as long as an epoch takes
            self._stream.peek()
            self.connection.settimeout(self._server.timeout)
            with self._server.capacity.call():
                self.handle_one_request()

    def do_POST(self) -> None:
        """Respond to a request. Called by `handle_one_request`."""
        try:
            scheme, identity, sealed = (self.headers.get("Authorization", "").split(" ", 2) + ["", "", ""])[:3]
            if scheme != SCHEME:
                raise WireError("a request has no authorization")
            is_hello = self.path == "/hello"
            reply, headers, body = self._hello(sealed) if is_hello else self._call(self._server.peer(identity), sealed)
        except (WireError, OSError) as error:
            _log.debug("rejected a request: %s", error)
            self.send_error(HTTPStatus.FORBIDDEN)
            return
        try:
            self.send_response(HTTPStatus.OK)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.writelines(body)
        finally:
            reply.sent()

    def _hello(self, sealed: str) -> _Response:
        return Reply({}), {"Content-Length": str(HELLO_BYTES)}, (self._server.accept(_from_base64(sealed)),)

    def _call(self, peer: _Peer, sealed: str) -> _Response:
        session = peer.session
        with peer.lock:
            call, length = session.open(_from_base64(sealed)), self.headers.get("Content-Length")
            if call.name != unquote(self.path[1:]) or length != _content_length(call.body):
                raise WireError("a message header belongs to another request")
            reply = self._server.capacity.reply(self._server.handler, call, session, self._stream.readinto, peer)
            size = sum(len(part) for part in reply.body)
            header = base64.b64encode(session.seal(Header("", reply.fields, size))).decode()
            body = session.outgoing(reply.body) if size else ()
        return reply, {REPLY_HEADER: header, "Content-Length": _content_length(size)}, body

    def log_message(self, format: str, *args: Any) -> None:
        _log.debug(format, *args)


def _header_length(data: bytearray, before: int) -> int | None:
    end = data.find(b"\r\n\r\n", max(0, before - 3))
    return None if end < 0 else end + 4


def _content_length(size: int) -> str:
    """The length of the HTTP body for a message body, with its tag."""
    return str(size + TAG_BYTES if size else 0)


def _authorization(sealed: bytes, identity: str = "-") -> str:
    """The value of the HTTP header ``Authorization``. A handshake has no session identity yet."""
    return f"{SCHEME} {identity} {base64.b64encode(sealed).decode()}"


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise WireError("a message header is not valid base64") from None


def _identity(answer: bytes) -> str:
    """The identity of a session: the random number in the server's answer of the handshake."""
    return answer[-TAG_BYTES - 16 : -TAG_BYTES].hex()
