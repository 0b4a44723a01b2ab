"""The thread that writes checkpoints, so that training does not wait for a file system."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class BackgroundWriter(Generic[T]):
    """Writes items in a thread, one at a time. At most one waits: a newer item replaces it.

    Args:
        write: Writes an item, which must not change any more.
    """

    def __init__(self, write: Callable[[T], None]) -> None:
        self._write = write
        self._changed = threading.Condition()  # of all that follows
        self._thread: threading.Thread | None = None
        self._pending: list[T] = []
        self._failed: list[T] = []
        self._error: Exception | None = None
        self._new_error: Exception | None = None
        self._closing = False

    def submit(self, item: T) -> None:
        """Write an item soon, instead of one that still waits."""
        with self._changed:
            self._pending = [item]
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="sparkkeras-checkpoints", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def new_error(self) -> Exception | None:
        """The error of an item that could not be written since the last call of this method."""
        with self._changed:
            error, self._new_error = self._new_error, None
            return error

    def close(self) -> Exception | None:
        """Wait until all is written, and end the thread.

        Returns:
            The error of the last item if it could not be written, also not in a second attempt.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        for item in self._failed:
            self._attempt(item)
        return self._error

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._pending and not self._closing:
                    self._changed.wait()
                if not self._pending:
                    return
                item, self._pending = self._pending[0], []
            self._attempt(item)

    def _attempt(self, item: T) -> None:
        error = None
        try:
            self._write(item)
        except Exception as caught:
            error = caught
        with self._changed:
            self._error = error
            self._new_error = error or self._new_error
            self._failed = [item] if error else []
