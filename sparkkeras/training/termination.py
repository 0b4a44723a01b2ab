"""SIGTERM, with which clusters and clouds announce that they end a process: it interrupts training, as Ctrl-C does."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass
class Termination:
    """Whether the process was asked to end.

    Attributes:
        requested: Whether a SIGTERM has arrived.
        interrupts: Whether it raises KeyboardInterrupt.
        handled: Whether the caller raises an error for it; otherwise the previous handler gets the signal in the end.
    """

    requested: bool = False
    interrupts: bool = True
    handled: bool = False

    def receive(self, number: int, frame: FrameType | None) -> None:
        """The handler of the signal."""
        self.requested = True
        self.check()

    def check(self) -> None:
        """Raise KeyboardInterrupt if a SIGTERM has arrived. Python ignores that of the handler within a finalizer."""
        if self.requested and self.interrupts:
            raise KeyboardInterrupt


@contextmanager
def termination() -> Iterator[Termination]:
    """Handle SIGTERM within this context, if this is the main thread; then restore the previous handler."""
    found = Termination()
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is None:  # a handler in C, which Python cannot restore
        yield found
        return
    previous = signal.signal(signal.SIGTERM, found.receive)
    try:
        yield found
    finally:
        signal.signal(signal.SIGTERM, previous)
        if found.requested and not found.handled:
            signal.raise_signal(signal.SIGTERM)
