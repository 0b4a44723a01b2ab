"""The output of ranks: split into lines and limited by the host, and shown on the driver. No I/O."""

from __future__ import annotations

import codecs
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from sparkkeras.events import RankReported

TAIL_LINES = 100
"""The number of last lines of a rank that its error contains."""

MAX_LINE = 4096
"""Longer lines are shown in pieces of this number of characters."""

BURST_BYTES, BYTES_PER_SECOND = 1 << 20, 100_000
"""A rank may write `BURST_BYTES` at once, and `BYTES_PER_SECOND` all the time. What it writes beyond that is left out."""

WAITING_LINES = 20_000
"""The number of lines that the driver keeps while whoever reads its output does not."""


class Lines:
    """Splits the bytes that a process writes into lines; a progress bar that returns to the line's start also ends one."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    def split(self, data: bytes) -> list[str]:
        """The lines that the data completes."""
        text = self._rest + self._decoder.decode(data)
        *complete, self._rest = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        while len(self._rest) > MAX_LINE:
            complete.append(self._rest[:MAX_LINE])
            self._rest = self._rest[MAX_LINE:]
        return [line[start : start + MAX_LINE] for line in complete for start in range(0, max(1, len(line)), MAX_LINE)]

    def rest(self) -> list[str]:
        """The last line, if it has no end."""
        rest, self._rest = self._rest + self._decoder.decode(b"", True), ""
        return [rest] if rest else []


class OutputLimit:
    """Leaves out lines of a rank that writes too much; see `BURST_BYTES`.

    Args:
        clock: A monotonic clock in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._allowed, self._since = float(BURST_BYTES), clock()
        self._left_out: deque[str] = deque(maxlen=TAIL_LINES)
        self._count = 0

    def apply(self, lines: Iterable[str]) -> list[str]:
        """The lines to show. If lines before them were left out, the first one says how many."""
        now = self._clock()
        self._allowed = min(BURST_BYTES, self._allowed + (now - self._since) * BYTES_PER_SECOND)
        self._since = now
        shown: list[str] = []
        for line in lines:
            if self._allowed <= 0 or (self._count and self._allowed < BYTES_PER_SECOND):  # not one line of many
                self._count += 1
                self._left_out.append(line)
                continue
            shown += self._note()
            self._left_out.clear()
            shown.append(line)
            self._allowed -= len(line) + 1
        return shown

    def last(self) -> list[str]:
        """The last ones of the lines that were left out at the end, which explain an error."""
        kept = list(self._left_out)
        self._count -= len(kept)
        self._left_out.clear()
        return [*self._note(), *kept]

    def _note(self) -> list[str]:
        count, self._count = self._count, 0
        return [f"... {count:,} lines left out (more than {BYTES_PER_SECOND // 1000} KB a second)"] if count else []


class Console:
    """The lines of all ranks on the driver: those to show, and the last ones of each rank. Thread-safe.

    Args:
        size: The number of ranks.
    """

    def __init__(self, size: int) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[tuple[int, str]] = deque(maxlen=WAITING_LINES)
        self._reports: deque[RankReported] = deque(maxlen=WAITING_LINES)
        self._tails = [deque[str](maxlen=TAIL_LINES) for _ in range(size)]

    def add(self, rank: int, lines: Sequence[str]) -> None:
        """Add lines that a rank wrote."""
        with self._lock:
            self._tails[rank].extend(lines)
            self._waiting.extend((rank, line) for line in lines)

    def report(self, report: RankReported) -> None:
        """Add a report of a rank, also as a line."""
        logs = "  ".join(f"{name}: {value:.4g}" for name, value in report.logs.items())
        with self._lock:
            self._waiting.append((report.rank, f"epoch {report.epoch + 1}  {logs}".rstrip()))
            self._reports.append(report)

    def take(self) -> tuple[list[tuple[int, str]], list[RankReported]]:
        """The lines that were not taken before, each after its rank, and the reports."""
        with self._lock:
            lines, reports = list(self._waiting), list(self._reports)
            self._waiting.clear()
            self._reports.clear()
            return lines, reports

    def tail(self, rank: int) -> list[str]:
        """The last lines that a rank wrote."""
        with self._lock:
            return list(self._tails[rank])
