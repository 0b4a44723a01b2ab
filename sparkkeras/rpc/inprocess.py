"""The ``inprocess`` transport: the in-memory implementation, without sockets.

Fields go through JSON and bodies are copied, as on the way to another machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sparkkeras.rpc.transport import Address, Call, Caller, Endpoint, Handler, RefusedError, check_size, error_reply, handle
from sparkkeras.rpc.wire import Body, Fields, Header, Secret, WireError

_served: dict[bytes, Handler] = {}


@contextmanager
def serve(handler: Handler, endpoint: Endpoint, secret: Secret) -> Iterator[Address]:
    """See `Transport.serve`. Callers find the handler by its secret; there is no port."""
    _served[secret.key] = handler
    try:
        yield Address("inprocess", endpoint.host, endpoint.port, secret, endpoint.encrypt, endpoint.timeout)
    finally:
        del _served[secret.key]


class InProcessCaller(Caller):
    """The client's end."""

    def _exchange(self, header: Header, body: Body, into: memoryview | None) -> tuple[Fields, memoryview]:
        handler = _served.get(self._address.secret.key)
        if handler is None:
            raise WireError("no server with this secret runs in this process")
        self._connection = self._connection or _LocalPeer(self._address.secret)
        try:
            check_size(handler, header)
        except RefusedError as error:
            reply = error_reply(error)
        else:
            call = Call(header.name, _copied(header.fields), memoryview(bytearray().join(body)), self._connection)
            reply = handle(handler, call)
        try:
            received = memoryview(bytearray().join(reply.body))
        finally:
            reply.sent()
        if into is not None and len(into) == len(received):
            into[:] = received
            received = into
        return _copied(reply.fields), received


@dataclass(eq=False)
class _LocalPeer:
    """A connection of a client, and the peer of its calls."""

    secret: Secret

    def close(self) -> None:
        handler = _served.get(self.secret.key)
        if handler is not None:
            handler.closed(self)


connect = InProcessCaller
"""See `Transport.connect`."""


def _copied(fields: Fields) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(dict(fields)))
    return copy
