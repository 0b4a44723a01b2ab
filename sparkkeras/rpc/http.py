"""The ``http`` transport: a Flask application on a WSGI server, and clients with persistent connections.

A session starts with ``POST /hello``. Every other route is the name of a call (``/parameters``, ``/update``, ``/health``,
...). The handshake and the sealed message header travel in the HTTP header ``Authorization``, the body and its
authentication tag in the request's body. The reply's message header is in the HTTP header ``X-Sparkkeras``. An
unauthenticated request gets status 403 before a byte of its body is read, so it cannot block a thread either.
"""

from __future__ import annotations

import base64
import http.client
import logging
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from sparkkeras.rpc.acceptor import Capacity
from sparkkeras.rpc.addresses import open_listener
from sparkkeras.rpc.transport import (
    Address,
    Call,
    Endpoint,
    Handler,
    Readinto,
    RefusedError,
    Reply,
    TransportError,
    check_size,
    checked_fields,
    discard_body,
    error_reply,
    handle,
    read_body,
)
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
    from flask import Flask, Request, Response

SCHEME = "Sparkkeras"
REPLY_HEADER = "X-Sparkkeras"
_log = logging.getLogger(__name__)


class HttpTransport:
    """The transport over HTTP; see the module docstring."""

    @contextmanager
    def serve(self, handler: Handler, endpoint: Endpoint, secret: Secret) -> Iterator[Address]:
        """See `Transport.serve`."""
        from sparkkeras.rpc.wsgi import serving  # the server's libraries are not needed on workers

        application = _Application(handler, Acceptor(secret, endpoint.encrypt), endpoint)
        listener = open_listener(endpoint.listen, endpoint.port)
        port = int(listener.getsockname()[1])
        with serving(application.flask(), listener, endpoint.timeout, application.capacity):
            yield Address("http", endpoint.host, port, secret, endpoint.encrypt, endpoint.timeout)

    def connect(self, address: Address) -> HttpCaller:
        """See `Transport.connect`."""
        return HttpCaller(address)


class HttpCaller:
    """The client's end, on one persistent connection; see `Caller`."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._connection: http.client.HTTPConnection | None = None
        self._session: tuple[str, Session] | None = None

    def call(self, name: str, fields: Fields, body: Body = (), into: memoryview | None = None) -> tuple[Fields, memoryview]:
        """See `Caller.call`."""
        try:
            connection, identity, session = self._connected()
            size = sum(len(part) for part in body)
            header = session.seal(Header(name, fields, size))
            connection.putrequest("POST", f"/{quote(name, safe='')}", skip_accept_encoding=True)
            connection.putheader("Authorization", _authorization(header, identity))
            connection.putheader("Content-Length", str(size + TAG_BYTES if size else 0))
            connection.endheaders()
            if size:
                for chunk in session.outgoing(body):
                    connection.send(chunk)
            reply, received = _received(connection.getresponse(), session, into)
        except (OSError, WireError, http.client.HTTPException) as error:
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

    def _connected(self) -> tuple[http.client.HTTPConnection, str, Session]:
        address = self._address
        if self._connection is None or self._session is None:
            self._connection = http.client.HTTPConnection(address.host, address.port, timeout=address.timeout)
            handshake = Handshake(address.secret, address.encrypt)
            self._connection.request("POST", "/hello", headers={"Authorization": _authorization(handshake.hello())})
            response = self._connection.getresponse()
            answer = response.read(HELLO_BYTES)
            if response.status != 200:
                raise WireError(f"the server rejected the handshake with status {response.status}")
            self._session = _identity(answer), handshake.complete(answer)
        if self._connection.sock is None:
            self._connection.connect()
        self._connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self._connection, *self._session


def _received(response: http.client.HTTPResponse, session: Session, into: memoryview | None) -> tuple[Header, memoryview]:
    """The reply's message header and body; the body is received in place."""
    sealed = response.getheader(REPLY_HEADER)
    if response.status != 200 or sealed is None:
        response.read(HELLO_BYTES)
        raise WireError(f"the server replied with status {response.status} {response.reason}")
    header = session.open(_from_base64(sealed))
    body = into if into is not None and len(into) == header.body else memoryview(bytearray(header.body))
    read_body(response.readinto, session, body)
    response.read()  # to the end, so that the connection can be reused
    return header, body


class _Peer:
    """A session on the server; also the peer of its calls."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.lock = threading.Lock()


class _Application:
    """The server's end, to which Flask routes requests."""

    def __init__(self, handler: Handler, acceptor: Acceptor, endpoint: Endpoint) -> None:
        self._handler, self._acceptor, self._max_sessions = handler, acceptor, endpoint.max_sessions
        self.capacity = Capacity(endpoint.timeout)
        self._lock = threading.Lock()
        self._peers: OrderedDict[str, _Peer] = OrderedDict()  # by session identity, the least recently used first

    def flask(self) -> Flask:
        """The Flask application."""
        from flask import Flask

        application = Flask("sparkkeras", static_folder=None)
        application.add_url_rule("/hello", "hello", self._hello, methods=["POST"])
        application.add_url_rule("/<name>", "call", self._call, methods=["POST"])
        return application

    def _hello(self) -> Response:
        from flask import Response, request

        try:
            answer, session = self._acceptor.accept(_authorized(request)[1])
        except WireError:
            return _forbidden()
        with self._lock:
            self._peers[_identity(answer)] = _Peer(session)
            evicted = self._peers.popitem(last=False)[1] if len(self._peers) > self._max_sessions else None
        if evicted is not None:
            self._handler.closed(evicted)
        return Response(answer, mimetype="application/octet-stream")

    def _call(self, name: str) -> Response:
        from flask import request

        try:
            identity, sealed = _authorized(request)
        except WireError:
            return _forbidden()
        with self._lock:
            peer = self._peers.get(identity)
            if peer is None:
                return _forbidden()
            self._peers.move_to_end(identity)
        with peer.lock:
            session = peer.session
            try:
                header = session.open(sealed)
                if header.name != name or request.content_length != (header.body + TAG_BYTES if header.body else 0):
                    raise WireError("a message header belongs to another request")
                try:
                    check_size(self._handler, header)
                except RefusedError as error:
                    discard_body(_body_reader(request), header.body)
                    return _response(session, error_reply(error))
                buffer = self.capacity.borrow(header.body)
                try:
                    body = memoryview(buffer)[: header.body]
                    read_body(_body_reader(request), session, body)
                    reply = handle(self._handler, Call(name, header.fields, body, peer))
                    return _response(session, reply, lambda: self.capacity.give_back(buffer))
                except BaseException:
                    self.capacity.give_back(buffer)
                    raise
            except (WireError, OSError) as error:
                _log.debug("rejected a request: %s", error)
                return _forbidden()


def _response(session: Session, reply: Reply, sent: Callable[[], None] | None = None) -> Response:
    """A reply as an HTTP response. ``sent`` is called once it has been sent, after the reply's own ``sent``."""
    from flask import Response
    from werkzeug.wsgi import ClosingIterator

    size = sum(len(part) for part in reply.body)
    headers = {
        REPLY_HEADER: base64.b64encode(session.seal(Header("", reply.fields, size))).decode(),
        "Content-Length": str(size + TAG_BYTES if size else 0),
    }
    body: Any = session.outgoing(reply.body) if size else ()
    pieces = ClosingIterator(body, [reply.sent] if sent is None else [reply.sent, sent])
    return Response(pieces, headers=headers, mimetype="application/octet-stream", direct_passthrough=True)


def _forbidden() -> Response:
    """The response to an unauthenticated request."""
    from flask import Response

    return Response(status=403)


def _authorization(sealed: bytes, identity: str = "-") -> str:
    """The value of the HTTP header ``Authorization``. A handshake has no session identity yet."""
    return f"{SCHEME} {identity} {base64.b64encode(sealed).decode()}"


def _authorized(request: Request) -> tuple[str, bytes]:
    """The session identity and the sealed bytes, from a request's HTTP header."""
    scheme, identity, sealed = (request.headers.get("Authorization", "").split(" ", 2) + ["", "", ""])[:3]
    if scheme != SCHEME:
        raise WireError("a request has no authorization")
    return identity, _from_base64(sealed)


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise WireError("a message header is not valid base64") from None


def _body_reader(request: Request) -> Readinto:
    """A function that reads a request's body from its connection."""
    return lambda view: int(request.environ["wsgi.input"].readinto(view))


def _identity(answer: bytes) -> str:
    """The identity of a session: the random number in the server's answer of the handshake."""
    return answer[-TAG_BYTES - 16 : -TAG_BYTES].hex()


TRANSPORT = HttpTransport()
