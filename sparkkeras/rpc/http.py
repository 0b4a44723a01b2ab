"""The ``http`` transport: a Flask application on a server of Python's library, and clients with persistent connections.

A session starts with ``POST /hello``. Every other route is the name of a call (``/parameters``, ``/update``, ``/health``,
...). The handshake and the sealed message header travel in the HTTP header ``Authorization``, the body and its
authentication tag in the request's body. The reply's message header is in the HTTP header ``X-Sparkkeras``.

A connection gets a thread when the header of its first request has arrived. An unauthenticated request gets status 403
before a byte of its body is read, and the connection is closed. So silent and unauthenticated clients occupy no thread.

Other WSGI servers do not fit. waitress reads a body before it calls the application, at a fifth of the speed. cheroot
blocks a thread for each silent client, and takes responses only as ``bytes``.
"""

from __future__ import annotations

import base64
import http.client
import io
import logging
import socket
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote
from wsgiref.simple_server import WSGIRequestHandler

from sparkkeras.rpc.acceptor import Capacity, serving
from sparkkeras.rpc.transport import Address, Caller, Endpoint, Handler, reply_body
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

if TYPE_CHECKING:
    from flask import Response

SCHEME = "Sparkkeras"
REPLY_HEADER = "X-Sparkkeras"
_log = logging.getLogger(__name__)


def serve(handler: Handler, endpoint: Endpoint, secret: Secret) -> AbstractContextManager[Address]:
    """See `Transport.serve`."""
    server = _Server(handler, Acceptor(secret, endpoint.encrypt), endpoint)
    return serving("http", endpoint, secret, _header_length, lambda *connection: _Connection(server, *connection))


class HttpCaller(Caller):
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
    """The Flask application, and the sessions, which are not bound to connections."""

    def __init__(self, handler: Handler, acceptor: Acceptor, endpoint: Endpoint) -> None:
        from flask import Flask  # not needed on workers

        self.timeout, self.capacity = endpoint.timeout, Capacity(endpoint.timeout)
        self._handler, self._acceptor, self._max_sessions = handler, acceptor, endpoint.max_sessions
        self._lock = threading.Lock()
        self._peers: OrderedDict[str, _Peer] = OrderedDict()  # by session identity, the least recently used first
        self.application = Flask("sparkkeras", static_folder=None)
        self.application.add_url_rule("/hello", "hello", self._hello, methods=["POST"])
        self.application.add_url_rule("/<name>", "call", self._call, methods=["POST"])
        self.application.register_error_handler(WireError, _forbidden)
        self.application.register_error_handler(OSError, _forbidden)
        self.base_environ = {
            "wsgi.version": (1, 0), "wsgi.url_scheme": "http", "wsgi.errors": sys.stderr, "wsgi.run_once": False,
            "wsgi.multithread": True, "wsgi.multiprocess": False,
            "SERVER_NAME": endpoint.host, "SERVER_PORT": str(endpoint.port), "SCRIPT_NAME": "",
        }  # fmt: skip

    def _hello(self) -> Response:
        from flask import Response

        answer, session = self._acceptor.accept(_authorized()[1])
        with self._lock:
            self._peers[_identity(answer)] = _Peer(session)
            evicted = self._peers.popitem(last=False)[1] if len(self._peers) > self._max_sessions else None
        if evicted is not None:
            self._handler.closed(evicted)
        return Response(answer, mimetype="application/octet-stream")

    def _call(self, name: str) -> Response:
        from flask import Response, request
        from werkzeug.wsgi import ClosingIterator

        identity, sealed = _authorized()
        with self._lock:
            if identity not in self._peers:
                raise WireError("a request is of no known session")
            self._peers.move_to_end(identity)
            peer = self._peers[identity]
        session = peer.session
        with peer.lock:
            call = session.open(sealed)
            if call.name != name or request.headers.get("Content-Length") != _content_length(call.body):
                raise WireError("a message header belongs to another request")
            reply = self.capacity.reply(self._handler, call, session, request.environ["wsgi.input"].readinto, peer)
            size = sum(len(part) for part in reply.body)
            header = base64.b64encode(session.seal(Header("", reply.fields, size))).decode()
            body: Any = session.outgoing(reply.body) if size else ()
        headers = {REPLY_HEADER: header, "Content-Length": _content_length(size)}
        pieces = ClosingIterator(body, [reply.sent])
        return Response(pieces, headers=headers, mimetype="application/octet-stream", direct_passthrough=True)


def _authorized() -> tuple[str, bytes]:
    """The session identity and the sealed bytes in the HTTP header of a request."""
    from flask import request

    scheme, identity, sealed = (request.headers.get("Authorization", "").split(" ", 2) + ["", "", ""])[:3]
    if scheme != SCHEME:
        raise WireError("a request has no authorization")
    return identity, _from_base64(sealed)


def _forbidden(error: Exception) -> Response:
    """The response to a request that is not authenticated, or whose body does not arrive."""
    from flask import Response

    _log.debug("rejected a request: %s", error)
    return Response(status=403)


class _Connection(WSGIRequestHandler):
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

    def do_POST(self) -> None:  # noqa: N802
        """Respond with the application. Called by `handle_one_request`."""
        environ = self.get_environ() | {"wsgi.input": self._stream}  # whose ``readinto`` copies nothing
        with closing(cast(Any, self._server.application(environ, self._start_response))) as response:
            self.end_headers()  # here, so that the response is closed if this fails
            self.wfile.writelines(response)

    def _start_response(self, status: str, headers: Any, exc_info: Any = None) -> Callable[[bytes], Any]:
        code, _, reason = status.partition(" ")
        self.send_response(int(code), reason)
        for name, value in headers:
            self.send_header(name, value)
        if not code.startswith("2"):  # rejected, with its body unread
            self.send_header("Connection", "close")
        return self.wfile.write

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
