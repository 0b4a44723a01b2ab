"""A terminal and a clock for tests of what is printed."""

import io
import sys
from types import SimpleNamespace

from sparkkeras.progress import renderer, status_line


class Terminal(io.StringIO):
    """Standard output of a status line that is a terminal."""

    def isatty(self):
        return True

    @property
    def line(self):
        """What the line that changes shows."""
        return self.getvalue().rpartition("\n")[2].rpartition("\r\033[K")[2]


def write_to(stream, monkeypatch):
    """Have status lines write to a stream, and return it."""
    monkeypatch.setattr(status_line, "sys", SimpleNamespace(stdout=stream, modules=sys.modules))
    return stream


def manual_clock(monkeypatch):
    """Have what is shown read a clock whose time is its attribute ``now``, and return it."""
    clock = SimpleNamespace(now=100.0)
    for module in (renderer, status_line):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock
