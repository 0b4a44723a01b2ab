"""Leases: which client may work on what, such as a partition or a trial, when several may claim it.

A client that stops calling, or whose connection closes, may be dead, or only slow. So a lease that expires is not taken
away: it works until another client asks for the same thing. From then on its number is unknown, and calls that carry it
are rejected, however late they arrive.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

LEASE_LOST = "lease lost"
"""The kind of `RefusedError` for a call whose lease another client has taken over."""

K = TypeVar("K", bound=Hashable)
H = TypeVar("H")


@dataclass
class Lease(Generic[K, H]):
    """A lease.

    Attributes:
        number: Its number, which the holder sends with its calls. No number is used twice.
        key: What is leased.
        holder: Who holds it, and what its owner notes about that.
        expires: When it expires, by the clock of `Leases`.
    """

    number: int
    key: K
    holder: H
    expires: float


class Leases(Generic[K, H]):
    """The leases of a server, at most one for each key.

    Not thread-safe: call it under the lock that guards what is leased.

    Args:
        seconds: How long after it was granted or renewed a lease expires.
        clock: A monotonic clock in seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds, self._clock = seconds, clock
        self._numbers = itertools.count(1)
        self._by_number: dict[int, Lease[K, H]] = {}
        self._by_key: dict[K, Lease[K, H]] = {}
        self._finished: set[int] = set()

    def __iter__(self) -> Iterator[Lease[K, H]]:
        """All leases, also those that have expired."""
        return iter(list(self._by_number.values()))

    def of(self, key: K) -> Lease[K, H] | None:
        """The lease of a key, also if it has expired."""
        return self._by_key.get(key)

    def is_held(self, key: K, grace: float = 0.0) -> bool:
        """Whether a key has a lease that has not expired, or did so less than ``grace`` seconds ago."""
        lease = self._by_key.get(key)
        return lease is not None and lease.expires + grace > self._clock()

    def grant(self, key: K, holder: H) -> Lease[K, H]:
        """Grant a new lease, and revoke the one that the key had."""
        if key in self._by_key:
            self.revoke(self._by_key[key].number)
        lease = Lease(next(self._numbers), key, holder, self._clock() + self._seconds)
        self._by_number[lease.number] = self._by_key[key] = lease
        return lease

    def renew(self, number: int) -> Lease[K, H] | None:
        """Renew a lease, also if it has expired; ``None`` if it was revoked or has finished."""
        lease = self._by_number.get(number)
        if lease is not None:
            lease.expires = self._clock() + self._seconds
        return lease

    def expire(self, number: int) -> None:
        """Expire a lease now, if it was not revoked: another client may take it over, unless the holder renews it before."""
        if number in self._by_number:
            self._by_number[number].expires = self._clock()

    def revoke(self, number: int) -> bool:
        """End a lease; returns whether it had not ended before."""
        lease = self._by_number.pop(number, None)
        if lease is not None:
            del self._by_key[lease.key]
        return lease is not None

    def finish(self, number: int) -> None:
        """End a lease whose work is done."""
        self.revoke(number)
        self._finished.add(number)

    def is_finished(self, number: int) -> bool:
        """Whether a lease has ended by `finish`, so that a client that repeats its last call gets the same reply."""
        return number in self._finished

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Extend all leases by the time spent here, for code that blocks the calls that renew them."""
        began = self._clock()
        try:
            yield
        finally:
            for lease in self._by_number.values():
                lease.expires += self._clock() - began
