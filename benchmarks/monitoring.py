"""What it costs to watch a training: the monitor with a viewer, a flood of requests, the progress line."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import data
import numpy as np
from checkpoints import Clock
from harness import Effort, Metric, Samples, Turn, alternate, benchmark

ROWS = 48_000
"""So many that an epoch takes about 0.3 seconds on two cores."""

VIEWER = """
import sys, time, urllib.request
while True:
    urllib.request.urlopen(f"{sys.argv[1]}messages?after=0").read()
    time.sleep(1)
"""
"""Requests all messages once a second, as a page that is loaded again and again does."""

FLOOD = """
import sys, threading, urllib.request
def request():
    while True:
        try:
            urllib.request.urlopen(sys.argv[1], timeout=30).read()
        except OSError:
            pass
threads = [threading.Thread(target=request) for _ in range(16)]
for thread in threads: thread.start()
"""


@benchmark(
    Metric("synchronous epoch begin -> next begin of 0.3 s, watched in one page, against without", "watched", "plain", 1.01),
    Metric("the same, under a flood of requests with the token", "flooded", "plain", 1.02),
    Metric("the same, under a flood of requests without it", "attacked", "plain", 1.02),
    Metric("the same, with the progress line", "printed", "plain", 1.01),
)
def monitoring(effort: Effort) -> Samples:
    """Epochs of 0.3 seconds of a small model on two workers."""
    from contestants import spark

    with spark():
        trained = _OnSpark(*data.vectors(effort.rows(ROWS)))
        trained.epochs(2)
        count = max(4, effort.epochs)
        return alternate(
            effort.turns,
            plain=lambda: trained.epochs(count),
            watched=lambda: trained.watched(count, VIEWER, lambda url: url),
            flooded=lambda: trained.watched(count, FLOOD, lambda url: f"{url}messages"),
            attacked=lambda: trained.watched(count, FLOOD, lambda url: f"{url[:-3]}/"),
            printed=lambda: trained.printed(count),
        )


class _OnSpark:
    """Training with two workers."""

    def __init__(self, x: Any, y: Any) -> None:
        from sparkkeras import SparkModel

        self._x, self._y = x, y
        self._spark_model = SparkModel(data.mlp(), num_workers=2, seed=0)

    def epochs(self, count: int, callbacks: list[Any] | None = None, verbose: int = 0) -> Turn:
        """The seconds of so many epochs after the first one."""
        clock = Clock()
        self._spark_model.fit(
            self._x, self._y, epochs=count + 2, batch_size=64, verbose=verbose, callbacks=[clock, *(callbacks or [])]
        )
        return list(np.diff(clock.times)[1:])

    def watched(self, count: int, program: str, address: Any) -> Turn:
        """The same with a monitor, which another process requests."""
        from sparkkeras import Monitor

        monitor = Monitor(verbose=False)
        with contextlib.closing(monitor), _running(program, address(monitor.url)):
            return self.epochs(count, [monitor])

    def printed(self, count: int) -> Turn:
        """The same with the progress line."""
        with contextlib.redirect_stdout(io.StringIO()):
            return self.epochs(count, verbose=1)


@contextlib.contextmanager
def _running(program: str, address: str) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", program, address])
    try:
        yield
    finally:
        process.kill()
        process.wait()
