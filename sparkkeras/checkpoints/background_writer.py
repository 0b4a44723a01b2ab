"""The thread that writes checkpoints, so that training does not wait for a file system."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class BackgroundWriter(Generic[T]):
    """Writes items in a thread, one at a time. At most one waits: a newer item replaces it.

    Args:
        write: Writes an item, which must not change any more.
    """

    def __init__(self, write: Callable[[T], None]) -> None:
        self._write = write
        self._executor = ThreadPoolExecutor(1, "sparkkeras-checkpoints")
        self._lock = threading.Lock()  # of all that follows
        self._waiting: list[T] = []
        self._failed: list[T] = []
        self._error: Exception | None = None
        self._new_error: Exception | None = None

    def submit(self, item: T) -> None:
        """Write an item soon, instead of one that still waits."""
        with self._lock:
            if not self._waiting:
                self._executor.submit(self._next)
            self._waiting = [item]

    def new_error(self) -> Exception | None:
        """The error of an item that could not be written since the last call of this method."""
        with self._lock:
            error, self._new_error = self._new_error, None
            return error

    def close(self) -> Exception | None:
        """Wait until all is written, and end the thread.

        Returns:
            The error of the last item if it could not be written, also not in a second attempt.
        """
        self._executor.shutdown()
        for item in self._failed:
            self._attempt(item)
        return self._error

    def _next(self) -> None:
        with self._lock:
            item = self._waiting.pop()
        self._attempt(item)

    def _attempt(self, item: T) -> None:
        error = None
        try:
            self._write(item)
        except Exception as caught:
            error = caught
        with self._lock:
            self._error = error
            self._new_error = error or self._new_error
            self._failed = [item] if error else []
