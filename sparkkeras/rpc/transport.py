"""How calls travel: what a transport is, and the names of those there are.

A transport knows calls, not parameters: a name, a few fields, one body. Both of its ends are in one file, `inprocess`,
`http` or `socket`, and a new one is a new file and a line in `TRANSPORTS`.

Who owns what: the handler owns the meaning of calls and says how large a body each may have, before it is read. The
transport owns connections, buffers and signatures, and gives the handler only what this run's members sent.
"""

from __future__ import annotations

import importlib
import logging
import socket
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from sparkkeras.errors import ConfigurationError, known_names
from sparkkeras.rpc.wire import (
    CHUNK_BYTES,
    TAG_BYTES,
    Body,
    Fields,
    Head,
    Secret,
    Session,
    WireError,
    encoded,
)

_log = logging.getLogger(__name__)

TRANSPORTS = ("http", "socket", "inprocess")
"""The transports; each is the module of that name beside this one."""


class TransportError(Exception):
    """A call that got no answer: the other side cannot be reached, hung up, or did not answer in time.

    Whether it was carried out is not known. The next call on the same caller connects anew.
    """


class RefusedError(Exception):
    """The other side answered that it will not do it.

    Attributes:
        kind: A short name of the reason, for programs.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Address:
    """Where a server is and what it takes to talk to it. It travels to the workers in their task.

    Attributes:
        transport: Which one.
        host: The name or number that workers dial.
        port: The port.
        secret: The run's.
        encrypt: Whether bodies are encrypted.
        timeout: Seconds that one call waits for the other side, each time that it waits.
    """

    transport: str
    host: str
    port: int
    secret: Secret = field(repr=False)
    encrypt: bool = False
    timeout: float = 30.0

    @property
    def told(self) -> str:
        """The address in words."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.transport}://{host}:{self.port}"


@dataclass(frozen=True)
class Endpoint:
    """Where a server is to be.

    Attributes:
        host: The name or number that workers dial.
        listen: The name or number to listen on.
        port: The port; 0 lets the system choose.
        encrypt: Whether bodies are encrypted.
        timeout: Seconds to wait for the rest of what a member has begun to send.
        members: How many conversations are to be expected at the same time.
    """

    host: str
    listen: str
    port: int = 0
    encrypt: bool = False
    timeout: float = 30.0
    members: int = 16

    def taken(self, error: OSError) -> ConfigurationError:
        """The error that says why nobody can listen here."""
        if isinstance(error, socket.gaierror):
            return ConfigurationError(
                f"{self.listen!r} is no name or address that this machine knows ({error.strerror}): look at "
                "host= and bind= of server_options, spark.driver.host and spark.driver.bindAddress."
            )
        if self.port:
            return ConfigurationError(
                f"the server on the driver cannot listen on port {self.port} of {self.listen}: {error.strerror or error}. "
                "Give another port=, or port=0 for any that is free."
            )
        return ConfigurationError(
            f"the server on the driver cannot listen on {self.listen}: {error.strerror or error}. The address must be "
            "one of this machine: set bind= of server_options, for instance bind='0.0.0.0' where workers reach the driver "
            "by another address than its own."
        )


@dataclass(frozen=True)
class Call:
    """What a member asks.

    Attributes:
        name: Of what.
        fields: With which arguments.
        body: The body, writable, and good until the answer is sent.
        peer: Who asks; calls on one connection have one peer.
    """

    name: str
    fields: Fields
    body: memoryview
    peer: Hashable


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Reply:
    """What the handler answers.

    Attributes:
        fields: Names and values that JSON knows.
        body: Buffers to send.
        sent: Called when the buffers are no longer needed, however that came.
    """

    fields: Fields
    body: Body = ()
    sent: Callable[[], None] = _nothing


DISCARDED_BYTES = 1 << 30
"""A body of a member that is refused is read and thrown away up to this size, so that the member hears why."""


class Handler(Protocol):
    """What answers calls, from several threads at a time."""

    def limit(self, name: str) -> int:
        """The bytes that the body of a call may have.

        Raises:
            RefusedError: There is no such call.
        """
        ...

    def __call__(self, call: Call) -> Reply:
        """Answer.

        Raises:
            RefusedError: Reported to the one that asked.
        """
        ...

    def closed(self, peer: Hashable) -> None:
        """A peer's connection has ended, where a transport notices."""
        ...


class Caller(Protocol):
    """The client's end, for one thread at a time. It connects when it is first called."""

    def call(self, name: str, fields: Fields, body: Body = (), into: memoryview | None = None) -> tuple[Fields, memoryview]:
        """Ask, and wait for the answer.

        Args:
            name: For what.
            fields: Arguments that JSON knows.
            body: Buffers to send.
            into: Where the answer's body goes, if it has that length; otherwise it gets memory of its own.

        Raises:
            TransportError: There was no answer.
            RefusedError: The other side will not do it.
        """
        ...

    def close(self) -> None:
        """Hang up."""
        ...


class Transport(Protocol):
    """A way for calls to travel."""

    def serve(self, handler: Handler, endpoint: Endpoint, secret: Secret) -> AbstractContextManager[Address]:
        """Have a handler answer until the context ends; then no port, connection or thread is left.

        Raises:
            ConfigurationError: The endpoint cannot be listened on.
        """
        ...

    def connect(self, address: Address) -> Caller:
        """A caller."""
        ...


def make_transport(name: str) -> Transport:
    """The transport of a name.

    Raises:
        ConfigurationError: There is none.
    """
    if name not in TRANSPORTS:
        raise ConfigurationError(f"parameter_server_mode={name!r} is not known. {known_names(name, TRANSPORTS)}")
    transport: Transport = importlib.import_module(f"sparkkeras.rpc.{name}").TRANSPORT
    return transport


def connect(address: Address) -> Caller:
    """A caller for an address."""
    return make_transport(address.transport).connect(address)


FIRST_PAUSE, LONGEST_PAUSE = 0.002, 0.1
"""Seconds between two questions of a member that waits."""


def pauses() -> Iterator[float]:
    """Seconds to wait before one asks again; they grow."""
    pause = FIRST_PAUSE
    while True:
        yield pause
        pause = min(pause * 1.5, LONGEST_PAUSE)


def insist(
    caller: Caller, seconds: float, name: str, fields: Fields, body: Body = (), into: memoryview | None = None
) -> tuple[Fields, memoryview]:
    """Make a call that may be repeated without harm, again and again where there is no answer.

    Args:
        caller: How to call.
        seconds: For how long.
        name: As in `Caller.call`.
        fields: Likewise.
        body: Likewise.
        into: Likewise.

    Raises:
        TransportError: There was no answer in that time.
        RefusedError: The other side will not do it.
    """
    deadline = time.monotonic() + seconds
    for pause in pauses():
        try:
            return caller.call(name, fields, body, into)
        except TransportError:
            if time.monotonic() + pause >= deadline:
                raise
            time.sleep(pause)
    raise AssertionError("pauses do not end")


def listener(endpoint: Endpoint) -> socket.socket:
    """A listening socket at an endpoint.

    Raises:
        ConfigurationError: The address is not this machine's, or the port is taken.
    """
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            endpoint.listen, endpoint.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port of a minute ago is free
            listening.bind(where)
            listening.listen(256)
        except BaseException:
            listening.close()
            raise
    except OSError as error:
        raise endpoint.taken(error) from error
    return listening


Readinto = Callable[[memoryview], int]
"""Fills a part of a buffer with what comes next, and says how much; 0 is the end."""


def read_body(readinto: Readinto, session: Session, body: memoryview) -> None:
    """Receive the body that the last opened head announced, in place, and check it.

    Raises:
        WireError: It is not the one that was sent, or ends early.
    """
    if not len(body):
        return
    incoming = session.incoming()
    start = 0
    while start < len(body):
        count = readinto(body[start : start + CHUNK_BYTES])
        if not count:
            raise WireError("the other side hung up in the middle of a body")
        incoming.take(body[start : start + count])  # while it is still in the processor's cache
        start += count
    tag = bytearray(TAG_BYTES)
    fill(readinto, memoryview(tag))
    incoming.finish(tag)


def discard_body(readinto: Readinto, size: int) -> None:
    """Receive a body and its tag for nothing.

    Raises:
        WireError: It is too large even for that, or ends early.
    """
    if size > DISCARDED_BYTES:
        raise WireError(f"a body of {size} bytes")
    scratch = memoryview(bytearray(min(size + TAG_BYTES, CHUNK_BYTES)))
    left = size + TAG_BYTES if size else 0
    while left:
        count = min(left, len(scratch))
        fill(readinto, scratch[:count])
        left -= count


def fill(readinto: Readinto, view: memoryview) -> None:
    """Fill a buffer.

    Raises:
        WireError: There is not that much.
    """
    while len(view):
        count = readinto(view)
        if not count:
            raise WireError("the other side hung up")
        view = view[count:]


def check_size(handler: Handler, head: Head) -> None:
    """See whether a call may have the body that it announces, before a byte of that is kept.

    Raises:
        RefusedError: There is no such call, or the body is too large for it.
    """
    if head.body > handler.limit(head.name):
        raise RefusedError("too large", f"{head.name!r} cannot have a body of {head.body} bytes.")


REFUSAL = "refused"
"""The field of an answer that says why there is none."""

REFUSAL_LENGTH = 4000
"""A longer reason is cut off, since it has to fit into a head."""


def refusal(error: RefusedError) -> Reply:
    """A refusal as an answer."""
    return Reply({REFUSAL: [error.kind, str(error)[:REFUSAL_LENGTH]]})


def checked(fields: Fields) -> Fields:
    """The fields of an answer.

    Raises:
        RefusedError: It is a refusal.
    """
    if REFUSAL in fields:
        kind, message = fields[REFUSAL]
        raise RefusedError(kind, message)
    return fields


def answered(handler: Handler, call: Call) -> Reply:
    """What a handler answers; whatever goes wrong in it is reported to the one that asked, and ends no connection."""
    try:
        reply = handler(call)
        try:
            encoded(Head("", reply.fields, 0))
        except (TypeError, ValueError):
            reply.sent()
            raise
        return reply
    except RefusedError as error:
        return refusal(error)
    except Exception as error:
        _log.exception("the call %r failed", call.name)
        return refusal(RefusedError("failed", f"the call {call.name!r} failed: {type(error).__name__}: {error}"))
