"""Calls over HTTP: a Flask application behind a production server, and clients whose connections last.

A conversation begins with ``POST /hello``. Every other route is the name of a call (``/parameters``, ``/update``,
``/health``, ...): greeting and sealed head travel in the header ``Authorization``, the body as the request's body with its
tag behind it; the answer's head is in the header ``X-Sparkkeras``. Who cannot greet or seal a head gets 403 without a byte
of its body being read, so it cannot keep a thread waiting either.
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

from sparkkeras.rpc.transport import (
    Address,
    Call,
    Endpoint,
    Handler,
    Readinto,
    RefusedError,
    Reply,
    TransportError,
    answered,
    check_size,
    checked,
    discard_body,
    listener,
    read_body,
    refusal,
)
from sparkkeras.rpc.wire import (
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

if TYPE_CHECKING:
    from flask import Flask, Request, Response

SCHEME = "Sparkkeras"
ANSWER = "X-Sparkkeras"
MOST_THREADS = 64

_log = logging.getLogger(__name__)


class HttpTransport:
    """See the module's words."""

    @contextmanager
    def serve(self, handler: Handler, endpoint: Endpoint, secret: Secret) -> Iterator[Address]:
        """As `Transport.serve`."""
        from sparkkeras.rpc.wsgi import serving  # the server's libraries are not needed on workers

        listener(endpoint).close()  # says it better than cheroot if nobody can listen here
        application = _Application(handler, Reception(secret, endpoint.encrypt), 4 * endpoint.members)
        threads = min(MOST_THREADS, 4 + 2 * endpoint.members)
        context = serving(application.flask(), endpoint.listen, endpoint.port, threads, endpoint.timeout)
        try:
            port = context.__enter__()
        except OSError as error:
            raise endpoint.taken(error) from error
        try:
            yield Address("http", endpoint.host, port, secret, endpoint.encrypt, endpoint.timeout)
        finally:
            context.__exit__(None, None, None)

    def connect(self, address: Address) -> HttpCaller:
        """As `Transport.connect`."""
        return HttpCaller(address)


class HttpCaller:
    """As `Caller`, on one persistent connection."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._connection: http.client.HTTPConnection | None = None
        self._session: tuple[str, Session] | None = None

    def call(self, name: str, fields: Fields, body: Body = (), into: memoryview | None = None) -> tuple[Fields, memoryview]:
        """As `Caller.call`."""
        try:
            connection, identity, session = self._connected()
            size = sum(len(part) for part in body)
            head = session.seal(Head(name, fields, size))
            connection.putrequest("POST", f"/{quote(name, safe='')}", skip_accept_encoding=True)
            connection.putheader("Authorization", _authorization(head, identity))
            connection.putheader("Content-Length", str(size + TAG_BYTES if size else 0))
            connection.endheaders()
            if size:
                for chunk in session.outgoing(body):
                    connection.send(chunk)
            answer, received = _received(connection.getresponse(), session, into)
        except (OSError, WireError, http.client.HTTPException) as error:
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

    def _connected(self) -> tuple[http.client.HTTPConnection, str, Session]:
        address = self._address
        if self._connection is None or self._session is None:
            self._connection = http.client.HTTPConnection(address.host, address.port, timeout=address.timeout)
            greeting = Greeting(address.secret, address.encrypt)
            self._connection.request("POST", "/hello", headers={"Authorization": _authorization(greeting.hello())})
            response = self._connection.getresponse()
            answer = response.read(HELLO_BYTES)
            if response.status != 200:
                raise WireError(f"the server answered {response.status} to a greeting")
            self._session = _identity(answer), greeting.welcomed(answer)
        if self._connection.sock is None:
            self._connection.connect()
        self._connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self._connection, *self._session


def _received(response: http.client.HTTPResponse, session: Session, into: memoryview | None) -> tuple[Head, memoryview]:
    """The answer, its body in place."""
    sealed = response.getheader(ANSWER)
    if response.status != 200 or sealed is None:
        response.read(HELLO_BYTES)
        raise WireError(f"the server answered {response.status} {response.reason}")
    head = session.open(_unwrapped(sealed))
    body = into if into is not None and len(into) == head.body else memoryview(bytearray(head.body))
    read_body(response.readinto, session, body)
    response.read()  # to the end, so that the connection can be used again
    return head, body


class _Conversation:
    """A session on the server, and the peer that it stands for."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.lock = threading.Lock()


class _Application:
    """The server's end. Flask routes requests to it."""

    def __init__(self, handler: Handler, reception: Reception, most: int) -> None:
        self._handler, self._reception, self._most = handler, reception, most
        self._lock = threading.Lock()
        self._conversations: OrderedDict[str, _Conversation] = OrderedDict()
        self._buffers: list[bytearray] = []

    def flask(self) -> Flask:
        """The application."""
        from flask import Flask

        application = Flask("sparkkeras", static_folder=None)
        application.add_url_rule("/hello", "hello", self._hello, methods=["POST"])
        application.add_url_rule("/<name>", "call", self._call, methods=["POST"])
        return application

    def _hello(self) -> Response:
        from flask import Response, request

        try:
            answer, session = self._reception.welcome(_authorized(request)[1])
        except WireError:
            return _stranger()
        with self._lock:
            self._conversations[_identity(answer)] = _Conversation(session)
            gone = self._conversations.popitem(last=False)[1] if len(self._conversations) > self._most else None
        if gone is not None:
            self._handler.closed(gone)
        return Response(answer, mimetype="application/octet-stream")

    def _call(self, name: str) -> Response:
        from flask import request

        try:
            identity, sealed = _authorized(request)
        except WireError:
            return _stranger()
        with self._lock:
            conversation = self._conversations.get(identity)
            if conversation is None:
                return _stranger()
            self._conversations.move_to_end(identity)
        with conversation.lock:
            session = conversation.session
            try:
                head = session.open(sealed)
                if head.name != name or request.content_length != (head.body + TAG_BYTES if head.body else 0):
                    raise WireError("a head that belongs to another request")
                try:
                    check_size(self._handler, head)
                except RefusedError as error:
                    discard_body(_body_of(request), head.body)
                    return _response(session, refusal(error))
                buffer = self._borrow(head.body)
                try:
                    body = memoryview(buffer)[: head.body]
                    read_body(_body_of(request), session, body)
                    reply = answered(self._handler, Call(name, head.fields, body, conversation))
                    return _response(session, reply, lambda: self._give_back(buffer))
                except BaseException:
                    self._give_back(buffer)
                    raise
            except (WireError, OSError) as error:
                _log.debug("a request was refused: %s", error)
                return _stranger()

    def _borrow(self, size: int) -> bytearray:
        """A buffer for a body. As many are kept as there were calls at the same time, whatever connections come and go."""
        with self._lock:
            for place, buffer in enumerate(self._buffers):
                if len(buffer) >= size > 0:
                    return self._buffers.pop(place)
        return bytearray(size)

    def _give_back(self, buffer: bytearray) -> None:
        if len(buffer):
            with self._lock:
                self._buffers.append(buffer)


def _response(session: Session, reply: Reply, sent: Callable[[], None] | None = None) -> Response:
    """An answer; ``sent`` is called when it is through, as the reply's own is."""
    from flask import Response
    from werkzeug.wsgi import ClosingIterator

    size = sum(len(part) for part in reply.body)
    headers = {
        ANSWER: base64.b64encode(session.seal(Head("", reply.fields, size))).decode(),
        "Content-Length": str(size + TAG_BYTES if size else 0),
    }
    body: Any = session.outgoing(reply.body) if size else ()
    pieces = ClosingIterator(body, [reply.sent] if sent is None else [reply.sent, sent])
    return Response(pieces, headers=headers, mimetype="application/octet-stream", direct_passthrough=True)


def _stranger() -> Response:
    from flask import Response

    return Response(status=403)


def _authorization(sealed: bytes, identity: str = "-") -> str:
    """What proves that a request comes from a member; a greeting has no identity yet."""
    return f"{SCHEME} {identity} {base64.b64encode(sealed).decode()}"


def _authorized(request: Request) -> tuple[str, bytes]:
    """The identity and what is sealed, out of a request's header."""
    scheme, identity, sealed = (request.headers.get("Authorization", "").split(" ", 2) + ["", "", ""])[:3]
    if scheme != SCHEME:
        raise WireError("a request without authorization")
    return identity, _unwrapped(sealed)


def _unwrapped(sealed: str) -> bytes:
    """The bytes of what travelled as text."""
    try:
        return base64.b64decode(sealed, validate=True)
    except ValueError:
        raise WireError("a head that is not base64") from None


def _body_of(request: Request) -> Readinto:
    """What reads a request's body from its connection."""
    return lambda view: int(request.environ["wsgi.input"].readinto(view))


def _identity(answer: bytes) -> str:
    """The name of a conversation: the random number in the server's answer to the greeting."""
    return answer[-TAG_BYTES - 16 : -TAG_BYTES].hex()


TRANSPORT = HttpTransport()
