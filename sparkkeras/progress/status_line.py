"""The standard output of all calls that take long: lines that stay, and one below them that changes."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

LOG_SECONDS = 60.0
"""Where no line can change, as in the log of a job, the interval at which what it would show is written as a line."""

FIRST_LOG_SECONDS = 10.0
"""The time until the first of these lines after a line that stays; without such a line, it is written at once."""

UPDATE_SECONDS = 0.1
"""The shortest interval at which a line changes."""


class StatusLine:
    """Lines on standard output, the last of which changes: on a terminal and in a notebook.

    Elsewhere, what it would show is a line at once, or 10 seconds after a line that stays, and then one a minute. Whatever
    begins is a line there.

    Args:
        verbose: 0: silent; 1: with the line that changes; 2: without it.
        wait_seconds: How long the first line waits where no line can change, for what writes lines of its own.

    Attributes:
        changes: Whether there is a line that changes.
    """

    def __init__(self, verbose: int, wait_seconds: float = 0.0) -> None:
        self._verbose = verbose
        self._lock = threading.Lock()
        self.changes = verbose == 1 and _can_change()
        self._shown = ""
        self._next = time.monotonic() + wait_seconds if wait_seconds and not self.changes else 0.0

    def write(self, text: str) -> None:
        """Write a line that stays, in place of the one that changes."""
        if self._verbose:
            with self._lock:
                if not self.changes and not self._next:
                    self._next = time.monotonic() + FIRST_LOG_SECONDS
                self._replace(f"{text}\n")

    def update(self, text: str, begins: bool = False) -> None:
        """Set the line that changes, unless it has changed just now, or in any case if something else ``begins``."""
        if self._verbose != 1:
            return
        with self._lock:
            now = time.monotonic()
            if now < self._next and not begins:
                return
            self._next = now + (UPDATE_SECONDS if self.changes else LOG_SECONDS)
            if sys.stdout.isatty():  # where a line that wraps could not be erased; in notebooks, it can
                text = text[: shutil.get_terminal_size().columns - 1]
            self._replace(text if self.changes else f"{text}\n")

    @contextmanager
    def showing(self, text: str, in_log: bool = True) -> Iterator[None]:
        """Show what begins until the context ends; ``in_log``: also where no line can change."""
        if in_log or self.changes:
            self.update(text, begins=True)
        try:
            yield
        finally:
            self.clear()

    def clear(self) -> None:
        """Remove the line that changes."""
        if self._verbose:
            with self._lock:
                self._replace("")

    def _replace(self, text: str) -> None:
        erase = "\r\033[K" if sys.stdout.isatty() else f"\r{' ' * len(self._shown)}\r"  # notebooks do not know the sequence
        start = erase if self._shown else ""
        self._shown = "" if text.endswith("\n") else text
        if start or text:
            sys.stdout.write(start + text)
            sys.stdout.flush()


def _can_change() -> bool:
    """Whether standard output is a terminal or a notebook."""
    return sys.stdout.isatty() or type(sys.stdout).__module__.partition(".")[0] == "ipykernel"


def format_duration(seconds: float) -> str:
    """A duration as text: ``3.2s``, ``4m 05s``, ``2h 10m``."""
    if round(seconds, 1) < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m {rest:02d}s" if minutes < 60 else f"{minutes // 60}h {minutes % 60:02d}m"


def format_logs(logs: Mapping[str, Any]) -> str:
    """Logs in one line, as Keras prints them."""
    return " - ".join(f"{name}: {_format_value(value)}" for name, value in logs.items())


def _format_value(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e4 or value == 0 else f"{value:.4g}"
