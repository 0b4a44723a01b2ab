"""The interface of transports: how calls travel between the driver and its workers.

A transport knows calls, not parameters: a call is a name, a few fields and one body. Both ends of a transport are in one
file: `inprocess`, `http` or `socket`. To add a transport, add such a file, and its name to `NETWORK_TRANSPORTS`.

Who owns what: the handler gives calls their meaning, and says how large the body of each may be before it is read. The
transport owns connections, buffers and authentication, and passes on only what authenticated peers sent.
"""

from __future__ import annotations

import importlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast

from sparkkeras.arguments import one_of
from sparkkeras.rpc.addresses import host_and_port
from sparkkeras.rpc.options import NETWORK_TRANSPORTS
from sparkkeras.rpc.wire import (
    CHUNK_BYTES,
    TAG_BYTES,
    Body,
    Fields,
    Header,
    Secret,
    Session,
    WireError,
    encode_header,
)

_log = logging.getLogger(__name__)

T = TypeVar("T")

TRANSPORTS = (*NETWORK_TRANSPORTS, "inprocess")
"""The names of all transports; each is a module of this package."""


class TransportError(Exception):
    """A call got no reply: the other side is unreachable, closed the connection, or did not reply in time.

    The call may or may not have been executed. The next call on the same caller opens a new connection.
    """


class RefusedError(Exception):
    """The other side rejected the call.

    Attributes:
        kind: A short name of the reason, for code that handles the error.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Address:
    """What a client needs to connect to a server. It travels to the workers in their task.

    Attributes:
        transport: The name of the transport.
        host: The host name or IP address that workers connect to.
        port: The port.
        secret: The run's secret.
        encrypt: Whether bodies are encrypted.
        timeout: Seconds that each read or write of a call may wait for the other side.
    """

    transport: str
    host: str
    port: int
    secret: Secret = field(repr=False)
    encrypt: bool = False
    timeout: float = 30.0

    @property
    def url(self) -> str:
        """The address as a URL, for messages."""
        return f"{self.transport}://{host_and_port(self.host, self.port)}"


@dataclass(frozen=True)
class Endpoint:
    """Where a server listens, and how workers reach it.

    Attributes:
        host: The host name or IP address that workers connect to.
        listen: The host name or IP address to listen on.
        port: The port; 0 lets the system choose.
        encrypt: Whether bodies are encrypted.
        timeout: Seconds to wait for the rest of a message that an authenticated peer has begun to send.
        expected_sessions: The expected number of simultaneous sessions.
    """

    host: str
    listen: str
    port: int = 0
    encrypt: bool = False
    timeout: float = 30.0
    expected_sessions: int = 16

    @property
    def max_sessions(self) -> int:
        """The largest number of sessions. A client that reconnects may begin one before its last one ends."""
        return 4 * self.expected_sessions


@dataclass(frozen=True)
class Call:
    """A request of an authenticated peer.

    Attributes:
        name: The name of the call.
        fields: Its arguments.
        body: Its body; writable, and valid until the reply is sent.
        peer: The peer; all calls on one connection have the same one.
    """

    name: str
    fields: Fields
    body: memoryview
    peer: Hashable

    def field(self, name: str, convert: Callable[[Any], T]) -> T:
        """An argument, converted to its type.

        Raises:
            RefusedError: It is missing or invalid.
        """
        try:
            return convert(self.fields[name])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            message = f"the field {name!r} of the call {self.name!r} is missing or invalid: {error!r}."
            raise RefusedError("malformed", message) from error


def _no_op() -> None:
    pass


@dataclass(frozen=True)
class Reply:
    """The handler's reply to a call.

    Attributes:
        fields: Names and values that JSON supports.
        body: Buffers to send.
        sent: Called once the buffers are no longer needed, whether sending succeeded or failed.
    """

    fields: Fields
    body: Body = ()
    sent: Callable[[], None] = _no_op


MAX_DISCARDED_BYTES = 1 << 30
"""A rejected body of up to this size is read and discarded, so that its sender receives the reason."""


class Handler(Protocol):
    """Handles calls, from several threads at the same time."""

    def limit(self, name: str) -> int:
        """The largest body of a call, in bytes.

        Raises:
            RefusedError: There is no such call.
        """
        ...

    def __call__(self, call: Call) -> Reply:
        """Handle a call.

        Raises:
            RefusedError: The call is rejected; the client receives the reason.
        """
        ...

    def closed(self, peer: Hashable) -> None:
        """Called when the connection of a peer has closed, by transports that notice it."""
        ...


class Caller(ABC):
    """The client's end of a transport, on one persistent connection; transports fill in `_exchange`.

    It connects at its first call. An error ends the connection, and the next call opens another one. Not thread-safe.

    Args:
        address: The address of the server.
    """

    _errors: tuple[type[Exception], ...] = (OSError, WireError)

    def __init__(self, address: Address) -> None:
        self._address = address
        self._connection: Any = None
        self._session: Session | None = None

    def call(self, name: str, fields: Fields, body: Body = (), into: memoryview | None = None) -> tuple[Fields, memoryview]:
        """Send a request and wait for the reply.

        Args:
            name: The name of the call.
            fields: Its arguments; values that JSON supports.
            body: Buffers to send.
            into: A buffer for the reply's body. It is used if it has exactly the body's length; otherwise new memory is.

        Returns:
            The fields and the body of the reply.

        Raises:
            TransportError: There was no reply.
            RefusedError: The other side rejected the call.
        """
        try:
            reply, received = self._exchange(Header(name, fields, sum(len(part) for part in body)), body, into)
        except self._errors as error:
            self.close()
            raise TransportError(f"{self._address.url}: {error or type(error).__name__}") from error
        except BaseException:
            self.close()  # part of the reply may be in transit
            raise
        if REFUSED_FIELD in reply:
            kind, message = reply[REFUSED_FIELD]
            raise RefusedError(kind, message)
        return reply, received

    def close(self) -> None:
        """Close the connection."""
        connection, self._connection, self._session = self._connection, None, None
        if connection is not None:
            connection.close()

    @abstractmethod
    def _exchange(self, header: Header, body: Body, into: memoryview | None) -> tuple[Fields, memoryview]:
        """Connect if necessary, send a request, and return the fields and the body of the reply; see `call`.

        Raises an error of ``_errors`` if there was no valid reply.
        """


class Transport(Protocol):
    """Serves calls, and connects callers to a server: what the module of a transport has."""

    def serve(self, handler: Handler, endpoint: Endpoint, secret: Secret) -> AbstractContextManager[Address]:
        """Serve a handler until the context ends; then no port, connection or thread is left.

        Raises:
            OSError: The server cannot listen on the endpoint.
        """
        ...

    def connect(self, address: Address) -> Caller:
        """A caller for the server at an address."""
        ...


def make_transport(name: str) -> Transport:
    """The transport with a given name.

    Raises:
        ConfigurationError: There is none with this name.
    """
    one_of("transport", name, TRANSPORTS)
    return cast(Transport, importlib.import_module(f"sparkkeras.rpc.{name}"))


def connect(address: Address) -> Caller:
    """A caller for an address, with the transport that the address names."""
    return make_transport(address.transport).connect(address)


MIN_DELAY, MAX_DELAY = 0.002, 0.1
"""Seconds between two requests of a client that polls or retries: at first, and at most."""


def backoff() -> Iterator[float]:
    """Seconds to wait before each retry: exponential, up to `MAX_DELAY`."""
    delay = MIN_DELAY
    while True:
        yield delay
        delay = min(delay * 1.5, MAX_DELAY)


Readinto = Callable[[memoryview], int]
"""Reads the next bytes into the beginning of a buffer and returns their number; 0 at the end of the stream."""


def read_body(readinto: Readinto, session: Session, body: memoryview) -> None:
    """Receive the body of the last opened header in place, and authenticate it.

    Raises:
        WireError: It is not the body that was sent, or it ends early.
    """
    if not len(body):
        return
    incoming = session.incoming()
    start = 0
    while start < len(body):
        count = readinto(body[start : start + CHUNK_BYTES])
        if not count:
            raise WireError("the other side closed the connection in the middle of a body")
        incoming.take(body[start : start + count])  # while it is still in the processor's cache
        start += count
    tag = bytearray(TAG_BYTES)
    read_exactly(readinto, memoryview(tag))
    incoming.finish(tag)


def reply_body(readinto: Readinto, session: Session, header: Header, into: memoryview | None) -> memoryview:
    """Receive the body of a reply; see `Caller.call`.

    Raises:
        WireError: It is not the body that was sent, or it ends early.
    """
    body = into if into is not None and len(into) == header.body else memoryview(bytearray(header.body))
    read_body(readinto, session, body)
    return body


def discard_body(readinto: Readinto, size: int) -> None:
    """Receive and discard a body and its tag.

    Raises:
        WireError: It is larger than `MAX_DISCARDED_BYTES`, or it ends early.
    """
    if size > MAX_DISCARDED_BYTES:
        raise WireError(f"a rejected body has {size} bytes; at most {MAX_DISCARDED_BYTES} are read to discard it")
    scratch = memoryview(bytearray(min(size + TAG_BYTES, CHUNK_BYTES)))
    left = size + TAG_BYTES if size else 0
    while left:
        count = min(left, len(scratch))
        read_exactly(readinto, scratch[:count])
        left -= count


def read_exactly(readinto: Readinto, view: memoryview) -> None:
    """Fill a buffer.

    Raises:
        WireError: The stream ends before the buffer is full.
    """
    while len(view):
        count = readinto(view)
        if not count:
            raise WireError("the other side closed the connection")
        view = view[count:]


def check_size(handler: Handler, header: Header) -> None:
    """Check the announced length of a body before any of it is stored.

    Raises:
        RefusedError: There is no such call, or the body is too large for it.
    """
    limit = handler.limit(header.name)
    if header.body > limit:
        raise RefusedError(
            "too large", f"the call {header.name!r} takes a body of at most {limit} bytes, received {header.body}."
        )


REFUSED_FIELD = "refused"
"""The field of a reply that holds the kind and the message of a rejection."""

MAX_REASON_LENGTH = 4000
"""Longer messages are cut off, since a reply's fields have to fit into a header."""


def error_reply(error: RefusedError) -> Reply:
    """The reply that reports a rejected call."""
    return Reply({REFUSED_FIELD: [error.kind, str(error)[:MAX_REASON_LENGTH]]})


def handle(handler: Handler, call: Call) -> Reply:
    """The handler's reply. Its errors are reported to the client and leave the connection open."""
    try:
        reply = handler(call)
        try:
            encode_header(Header("", reply.fields, 0))
        except (TypeError, ValueError):
            reply.sent()
            raise
        return reply
    except RefusedError as error:
        return error_reply(error)
    except Exception as error:
        _log.exception("the call %r failed", call.name)
        return error_reply(RefusedError("failed", f"the call {call.name!r} failed: {type(error).__name__}: {error}"))
