"""The ``inprocess`` transport: the in-memory implementation, without sockets.

Fields go through JSON and bodies are copied, as on the way to another machine.
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
    TransportError,
    check_size,
    checked_fields,
    handle,
)
from sparkkeras.rpc.wire import Body, Fields, Header, Secret

_served: dict[bytes, Handler] = {}


@contextmanager
def serve(handler: Handler, endpoint: Endpoint, secret: Secret) -> Iterator[Address]:
    """See `Transport.serve`. Callers find the handler by its secret; there is no port."""
    _served[secret.key] = handler
    try:
        yield Address("inprocess", endpoint.host, endpoint.port, secret, endpoint.encrypt, endpoint.timeout)
    finally:
        del _served[secret.key]


class InProcessCaller:
    """The client's end; see `Caller`."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._peer: object | None = None

    def call(self, name: str, fields: Fields, body: Body = (), into: memoryview | None = None) -> tuple[Fields, memoryview]:
        """See `Caller.call`."""
        handler = _served.get(self._address.secret.key)
        if handler is None:
            raise TransportError("no server with this secret runs in this process")
        self._peer = self._peer or object()
        check_size(handler, Header(name, fields, sum(len(part) for part in body)))
        reply = handle(handler, Call(name, _copied(fields), memoryview(bytearray().join(body)), self._peer))
        try:
            received = memoryview(bytearray().join(reply.body))
        finally:
            reply.sent()
        if into is not None and len(into) == len(received):
            into[:] = received
            received = into
        return checked_fields(_copied(reply.fields)), received

    def close(self) -> None:
        """See `Caller.close`."""
        peer, self._peer = self._peer, None
        handler = _served.get(self._address.secret.key)
        if peer is not None and handler is not None:
            handler.closed(peer)


connect = InProcessCaller
"""See `Transport.connect`."""


def _copied(fields: Fields) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(dict(fields)))
    return copy
