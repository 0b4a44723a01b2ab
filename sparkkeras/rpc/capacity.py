"""How many calls a server receives and handles at the same time, and the buffers for their bodies."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

MAX_CALLS = 16
"""The number of calls that a server handles at the same time; it receives a call's body and sends the reply meanwhile.

Enough to keep a processor and a network busy. With more of them the server is not faster but slower: its threads compete for
the interpreter, and the bodies and the versions of the weights that replies hold do not fit into the cache, or into memory.
With fewer, a server with two cores on loopback does more (4 calls of 1 or 10 MB: 19 to 27 %). But a call lasts as long as
its client sends and receives: with clients of 1 Gbit/s each, 4 calls at a time did 24 exchanges of 10 MB a second, not 59.
"""


class Capacity:
    """The capacity of a server for calls; see `MAX_CALLS`. Thread-safe.

    Args:
        timeout: Seconds that a client waits for its reply. A call that has waited for half of them begins in any case, so
            that neither a long queue nor clients that stall exceed the timeouts of others.
    """

    def __init__(self, timeout: float) -> None:
        self._slots, self._patience = threading.Semaphore(MAX_CALLS), timeout / 2
        self._lock = threading.Lock()
        self._buffers: list[bytearray] = []

    @contextmanager
    def call(self) -> Iterator[None]:
        """Wait until the server may handle another call, and count it as such until the context ends."""
        admitted = self._slots.acquire(timeout=self._patience)
        try:
            yield
        finally:
            if admitted:
                self._slots.release()

    def borrow(self, size: int) -> bytearray:
        """A buffer of at least ``size`` bytes. Their number is that of simultaneous calls, not of connections."""
        with self._lock:
            for index, buffer in enumerate(self._buffers):
                if len(buffer) >= size > 0:
                    return self._buffers.pop(index)
            if size and self._buffers:
                self._buffers.pop()  # too small; the new one takes its place
        return bytearray(size)

    def give_back(self, buffer: bytearray) -> None:
        """End the use of a buffer that was borrowed."""
        with self._lock:
            if len(buffer) and len(self._buffers) < MAX_CALLS:
                self._buffers.append(buffer)
