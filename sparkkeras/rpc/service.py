"""A server's calls by name, and the client that makes them: what the parameter server and a search have in common."""

from __future__ import annotations

import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from typing import Self

from sparkkeras.errors import DriverConnectionError
from sparkkeras.rpc.transport import Address, Call, Caller, RefusedError, Reply, TransportError, backoff, connect
from sparkkeras.rpc.wire import Body, Fields

INCREASE_TIMEOUT = "increase timeout= of server_options"
"""What users of servers with options can do if these are not reached."""


class Service:
    """Handles calls by their names; a `Handler`.

    A connection uses the leases in the ``lease`` fields of its calls and their replies. When it closes, those that no other
    connection uses expire.

    Args:
        calls: For the name of each call, the function that handles it, and the size of its largest body in bytes.
        expire: Called with the number of a lease that expires.
    """

    def __init__(self, calls: Mapping[str, tuple[Callable[[Call], Reply], int]], expire: Callable[[int], None]) -> None:
        self._calls, self._expire = calls, expire
        self._lock = threading.Lock()
        self._leases: defaultdict[Hashable, set[int]] = defaultdict(set)

    def limit(self, name: str) -> int:
        """See `Handler.limit`."""
        if name not in self._calls:
            raise RefusedError("unknown", f"there is no call {name!r}.")
        return self._calls[name][1]

    def __call__(self, call: Call) -> Reply:
        """See `Handler`."""
        if "lease" in call.fields:
            self._remember_lease(call.peer, call.field("lease", int))
        reply = self._calls[call.name][0](call)
        if "lease" in reply.fields:
            self._remember_lease(call.peer, reply.fields["lease"])
        return reply

    def closed(self, peer: Hashable) -> None:
        """See `Handler.closed`."""
        with self._lock:
            leases = self._leases.pop(peer, set())
            elsewhere = set().union(*self._leases.values())
        for lease in leases - elsewhere:
            self._expire(lease)

    def _remember_lease(self, peer: Hashable, lease: int) -> None:
        with self._lock:
            self._leases[peer].add(lease)


class Client:
    """The client's end of a service: retries calls, and raises errors of this library; a context manager.

    Args:
        address: The address of the server.
        name: The name of the client in messages.
        caller: The caller to use; by default one for the address.
        errors: The errors to raise for kinds of `RefusedError`; for all others a `DriverConnectionError`.
        advice: What to do if the address is not reached, for the message.
    """

    def __init__(
        self,
        address: Address,
        name: str,
        caller: Caller | None,
        errors: Mapping[str, type[Exception]],
        advice: str = "set spark.driver.host, and spark.driver.bindAddress if the driver has to listen on another address",
    ) -> None:
        self._address, self._name, self._errors, self._advice = address, name, errors, advice
        self._caller = caller or connect(address)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._caller.close()

    def _call(self, name: str, fields: Fields, body: Body = (), into: memoryview | None = None) -> tuple[Fields, memoryview]:
        """Make an idempotent call, and retry it for the address's timeout if there is no reply.

        Raises:
            DriverConnectionError: There was no reply in that time, or the server rejected the call.
        """
        deadline = time.monotonic() + self._address.timeout
        for delay in backoff():
            try:
                return self._caller.call(name, fields, body, into)
            except TransportError as error:
                if time.monotonic() + delay >= deadline:
                    raise DriverConnectionError(
                        f"{self._name} received no reply from the driver at {self._address.url} for "
                        f"{self._address.timeout:g} seconds ({error}). Check whether the driver still runs, and what failed "
                        f"there; then check the network between this worker ({socket.gethostname()}) and the driver, or "
                        f"{self._advice}."
                    ) from error
                time.sleep(delay)
            except RefusedError as error:
                if error.kind in self._errors:
                    raise self._errors[error.kind](str(error)) from None  # users called no server: it would distract them
                raise DriverConnectionError(str(error)) from error
        raise AssertionError("backoff does not end")

    def _poll(self, name: str, fields: Fields) -> tuple[Fields, memoryview]:
        """Repeat a call until its reply is not to ``wait``; see `_call`."""
        for delay in backoff():
            reply, body = self._call(name, fields)
            if not reply.get("wait"):
                break
            time.sleep(delay)
        return reply, body
