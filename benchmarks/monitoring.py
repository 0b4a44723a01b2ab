"""What it costs to watch a training: the monitor with a viewer, a flood of requests, the progress line."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import data
import keras
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

THREADS = ("sparkkeras-monitor", "sparkkeras-spark-activity")
"""How the names of the threads begin that run for a monitor: its server, and what reads Spark's status for it."""

PAGE = """
import http.client, json, sys, time, urllib.parse
address = urllib.parse.urlsplit(sys.argv[1])
connection, number = http.client.HTTPConnection(address.netloc), 0
while True:
    connection.request("GET", f"{address.path}messages?after={number}")
    number = json.load(connection.getresponse())["next"]
    time.sleep(1)
"""
"""Requests new messages once a second over one connection, as the page does in a browser."""

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


@benchmark(Metric("CPU time of the monitor in an epoch of 0.3 s, with one page, against the epoch", "cpu", "epochs", 0.01))
def monitoring_cpu(effort: Effort) -> Samples:
    """What watching takes of the driver's Python, which the durations of epochs vary too much to show."""
    from contestants import spark

    with spark():
        trained = _OnSpark(*data.vectors(effort.rows(ROWS)))
        trained.epochs(effort.warmup)
        costs = [trained.cost(max(4, 4 * effort.epochs)) for _ in range(effort.turns)]
    return {"cpu": [[cpu] for cpu, _ in costs], "epochs": [[epoch] for _, epoch in costs]}


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

    def cost(self, count: int) -> tuple[float, float]:
        """The CPU time that a monitor takes for an epoch, with a page, and the duration of the epoch."""
        monitor = _measured_monitor()
        meter = _Meter(monitor)
        with contextlib.closing(monitor), _running(PAGE, monitor.url):
            self.epochs(count, [monitor, meter])
        (began, used), (ended, used_then) = meter.readings[2], meter.readings[-1]
        epochs = len(meter.readings) - 3
        return (used_then - used) / epochs, (ended - began) / epochs

    def printed(self, count: int) -> Turn:
        """The same with the progress line."""
        with contextlib.redirect_stdout(io.StringIO()):
            return self.epochs(count, verbose=1)


def _measured_monitor() -> Any:
    """A monitor with an attribute ``cpu``: the CPU time of the calls that it gets."""
    from sparkkeras import Monitor

    class Measured(Monitor):
        cpu = 0.0

    def measured(name: str) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> None:
            began = time.thread_time()
            getattr(Monitor, name)(self, *args, **kwargs)
            self.cpu += time.thread_time() - began

        return call

    for name in [name for name in vars(Monitor) if name.startswith("on_")]:
        setattr(Measured, name, measured(name))
    return Measured(verbose=False)


class _Meter(keras.callbacks.Callback):  # type: ignore[misc]
    """At the beginning of each epoch the time, and the CPU time of a measured monitor and of threads that run for it."""

    def __init__(self, monitor: Any) -> None:
        super().__init__()
        self._monitor = monitor
        self.readings: list[tuple[float, float]] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        threads = [each for each in threading.enumerate() if each.name.startswith(THREADS)]
        used = sum(time.clock_gettime(time.pthread_getcpuclockid(each.ident)) for each in threads if each.ident)
        self.readings.append((time.perf_counter(), self._monitor.cpu + used))


@contextlib.contextmanager
def _running(program: str, address: str) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", program, address])
    try:
        yield
    finally:
        process.kill()
        process.wait()
