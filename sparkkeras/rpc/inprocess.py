"""Calls within this process, without sockets: the plain twin of the other transports.

Arguments and answers go through JSON and bodies are copied, as they would be on their way to another machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sparkkeras.rpc.transport import (
    Address,
    Call,
    Endpoint,
    Handler,
    RefusedError,
    TransportError,
    answered,
    checked,
)
from sparkkeras.rpc.wire import Body, Fields, Secret

_served: dict[bytes, Handler] = {}


class InProcessTransport:
    """See the module's words."""

    @contextmanager
    def serve(self, handler: Handler, endpoint: Endpoint, secret: Secret) -> Iterator[Address]:
        """As `Transport.serve`. Who has the secret finds the handler; there is no port."""
        _served[secret.key] = handler
        try:
            yield Address("inprocess", endpoint.host, endpoint.port, secret, endpoint.encrypt, endpoint.timeout)
        finally:
            del _served[secret.key]

    def connect(self, address: Address) -> InProcessCaller:
        """As `Transport.connect`."""
        return InProcessCaller(address)


class InProcessCaller:
    """As `Caller`."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._peer: object | None = None

    def call(self, name: str, fields: Fields, body: Body = (), into: memoryview | None = None) -> tuple[Fields, memoryview]:
        """As `Caller.call`."""
        handler = _served.get(self._address.secret.key)
        if handler is None:
            raise TransportError("nobody answers in this process")
        self._peer = self._peer or object()
        size = sum(len(part) for part in body)
        if size > handler.limit(name):
            raise RefusedError("too large", f"{name!r} cannot have a body of {size} bytes.")
        reply = answered(handler, Call(name, _copied(fields), memoryview(bytearray().join(body)), self._peer))
        try:
            received = memoryview(bytearray().join(reply.body))
        finally:
            reply.sent()
        if into is not None and len(into) == len(received):
            into[:] = received
            received = into
        return checked(_copied(reply.fields)), received

    def close(self) -> None:
        """As `Caller.close`."""
        peer, self._peer = self._peer, None
        handler = _served.get(self._address.secret.key)
        if peer is not None and handler is not None:
            handler.closed(peer)


def _copied(fields: Fields) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(dict(fields)))
    return copy


TRANSPORT = InProcessTransport()
