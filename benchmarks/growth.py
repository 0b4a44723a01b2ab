"""Benchmarks of growth: what more workers and larger weights cost on the driver, beside the limits of the machine.

Samples are named by their quantity and what it was measured with, for instance ``"round 1000000 32"``: the seconds of rounds
with 1 MB of weights and 32 workers. Each benchmark has a picture.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median
from typing import Any
from unittest import mock

import numpy as np
from harness import Effort, Metric, Samples, benchmark

KB, MB = 10**3, 10**6
WORKERS = (2, 8, 32, 128, 256)
ROUND_BYTES = (20 * KB, MB, 10 * MB, 100 * MB, 500 * MB)
MAX_ROUND_BYTES = 3_300 * MB
"""The largest sum of the workers' weights in a round of the benchmark: a larger one takes minutes on two cores."""

CLIENTS = (1, 10, 100, 1000)
SERVER_BYTES = (20 * KB, MB, 10 * MB)
TRANSPORTS = {"socket": ("-", "o"), "http": (":", "s")}
"""The transports, and how the picture shows them."""

COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#aa3377")


def _size(nbytes: int) -> str:
    return f"{nbytes // MB} MB" if nbytes >= MB else f"{nbytes // KB} KB"


# --- Pictures --------------------------------------------------------------------------------------------------------


def _picture(path: Path, caption: str, panels: Sequence[tuple[str, str]], draw: Callable[[Any], None]) -> None:
    """Draw panels with logarithmic axes, of which the horizontal one is the number of workers.

    Args:
        path: The file to write.
        caption: A line above the picture.
        panels: The title of each panel and the label of its vertical axis.
        draw: Draws into the panels.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(13, 9), layout="constrained")
    for axis, (title, unit) in zip(axes.flat, panels, strict=True):
        axis.set(xscale="log", yscale="log", xlabel="workers", ylabel=unit)
        axis.set_title(title, fontsize=10, loc="left")
        axis.grid(alpha=0.25)
    draw(axes.flat)
    for axis in axes.flat:
        ticks = sorted({float(x) for line in axis.lines if line.get_linestyle() != "--" for x in line.get_xdata()})
        axis.set_xticks(ticks, [f"{tick:,.0f}" for tick in ticks])
        axis.minorticks_off()
    figure.suptitle(caption, fontsize=10, x=0.99, ha="right")
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _curve(axis: Any, samples: Samples, quantity: str, scale: float = 1.0, **style: Any) -> None:
    """Draw the median of each sample of a quantity against the number of workers, which is the last word of its name."""
    found = {int(name.rpartition(" ")[2]): turns for name, turns in samples.items() if name.rpartition(" ")[0] == quantity}
    points = {workers: scale * median(value for turn in turns for value in turn) for workers, turns in found.items()}
    shown = {workers: value for workers, value in sorted(points.items()) if value > 0}
    axis.plot(list(shown), list(shown.values()), **{"marker": "o", "markersize": 4, "linewidth": 1.4} | style)


def _limit(axis: Any, value: float, text: str, color: str = "black") -> None:
    axis.axhline(value, color=color, linestyle="--", linewidth=0.9)
    axis.annotate(text, (1, value), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=7.5, color=color)


# --- Rounds ----------------------------------------------------------------------------------------------------------


def draw_rounds(samples: Samples, path: Path, caption: str) -> None:
    """Draw the results of `rounds`."""

    def draw(axes: Any) -> None:
        for nbytes, color in zip(ROUND_BYTES, COLORS, strict=True):
            _curve(axes[0], samples, f"round {nbytes}", color=color, label=_size(nbytes))
            _curve(axes[0], samples, f"fit {nbytes}", color=color, linestyle=":", marker="")
            _curve(axes[1], samples, f"driver {nbytes}", color=color)
            if nbytes >= MB:
                _curve(axes[2], samples, f"driver {nbytes}", 1e9 / nbytes, color=color)
                _curve(axes[3], samples, f"memory {nbytes}", 1 / nbytes, color=color)
        axes[0].legend(title="weights", fontsize=8)
        add = fmean(samples["limit add"][0])
        _limit(axes[2], 1e9 * add / (100 * MB), "limit: adding two vectors once, on one core")

    panels = [
        ("a round from begin to end on two cores; dotted: Keras's fit in it", "seconds"),
        ("CPU time of the driver's Python process in a round", "seconds"),
        ("the same for each byte of the weights", "nanoseconds per byte"),
        ("the largest growth of the driver's Python process in a round", "bytes per byte of the weights"),
    ]
    _picture(path, caption, panels, draw)


@benchmark(
    *(
        Metric(f"round begin -> end, {workers} workers, {_size(nbytes)}", f"round {nbytes} {workers}", kind="seconds")
        for nbytes, workers in ((20 * KB, 2), (20 * KB, 256), (10 * MB, 2), (10 * MB, 32), (100 * MB, 8))
    ),
    once=True,
    draw=draw_rounds,
)
def rounds(effort: Effort) -> Samples:
    """Synchronous rounds of an embedding that has the wanted size, with two rows for each worker."""
    import keras
    from contestants import spark
    from load import add_seconds

    from sparkkeras import SparkModel

    samples: Samples = {"limit add": [[add_seconds(100 * MB, 1.0)]]}
    with spark() as session:
        jvm = session.sparkContext._gateway.proc.pid
        for nbytes in ROUND_BYTES:
            for workers in WORKERS:
                if workers * nbytes > MAX_ROUND_BYTES // effort.shrink:
                    continue
                keras.backend.clear_session()
                gc.collect()
                model = _embedding(nbytes)
                x, y = np.zeros((2 * workers, 1), np.int32), np.zeros((2 * workers, 1), np.float32)
                parts = _Parts(jvm)
                few = workers * nbytes > 100 * MB or workers > 100
                with parts.measured():
                    spark_model = SparkModel(model, num_workers=workers, batch_size=2, seed=0)
                    spark_model.fit(x, y, epochs=2 if few else 4, verbose=0, callbacks=[parts.callback()])
                fits = [0.0] * len(parts.rounds)
                for history in spark_model.training_histories:
                    fits[history["epoch"]] += history["seconds"] / 2
                for name in parts.rounds[0]:
                    samples[f"{name} {nbytes} {workers}"] = [[each[name] for each in parts.rounds[1:]]]
                samples[f"fit {nbytes} {workers}"] = [fits[1:]]
                print(_size(nbytes), workers, parts.rounds[-1], fits[-1], flush=True)
    return samples


def _embedding(nbytes: int) -> Any:
    """A model with so many bytes of weights, of which a batch changes few, so that its training takes little time."""
    import keras

    width = 64
    model = keras.Sequential([keras.Input((1,), dtype="int32"), keras.layers.Embedding(nbytes // (4 * width), width)])
    model.add(keras.layers.GlobalAveragePooling1D())
    model.add(keras.layers.Dense(1))
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


class _Parts:
    """Measures the parts of rounds on the driver.

    Attributes:
        rounds: For each round the seconds of the whole round (``round``) and of its Spark job (``job``), which the driver
            prepares before and averages afterwards; the CPU seconds of the driver's Python process (``driver``) and of
            Spark's JVM, which in local mode is the executor as well (``jvm``); and the bytes by which the memory of the
            driver's Python process grew, at most (``memory``).
    """

    def __init__(self, jvm: int) -> None:
        self.rounds: list[dict[str, float]] = []
        self._jvm = jvm
        self._job = 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure the rounds of synchronous training in the ``with`` block.

        Values are broadcast and results return through Spark's JVM, as on a cluster, and not through files of this machine.
        """
        from sparkkeras.spark.cluster import Cluster
        from sparkkeras.training import averaging

        timed = mock.patch.object(averaging, "gathered", self._timed(averaging.gathered))
        with timed, mock.patch.object(Cluster, "is_local", False):
            yield

    def callback(self) -> Any:
        """A callback that measures rounds: here, an epoch has one."""
        import keras

        parts = self

        class Rounds(keras.callbacks.Callback):  # type: ignore[misc]
            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                parts.begin()

            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                parts.end()

        return Rounds()

    def begin(self) -> None:
        """Begin a round."""
        from load import Usage

        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # resets the largest size
        self._job = 0.0
        self._before = Usage.of_this_process(), _cpu_seconds(self._jvm), time.perf_counter()

    def end(self) -> None:
        """End it."""
        from load import Usage

        before, jvm, started = self._before
        after = Usage.of_this_process()
        self.rounds.append(
            {
                "round": time.perf_counter() - started,
                "driver": after.cpu_seconds - before.cpu_seconds,
                "jvm": _cpu_seconds(self._jvm) - jvm,
                "memory": after.peak_bytes - before.bytes,
                "job": self._job,
            }
        )

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            started = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                self._job += time.perf_counter() - started

        return timed


def _cpu_seconds(pid: int) -> float:
    """The CPU time of a process and of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


# --- The parameter server --------------------------------------------------------------------------------------------


def draw_server(samples: Samples, path: Path, caption: str) -> None:
    """Draw the results of `growth_server`."""

    def draw(axes: Any) -> None:
        for nbytes, color in zip(SERVER_BYTES, COLORS, strict=False):
            for transport, (linestyle, marker) in TRANSPORTS.items():
                style = {"color": color, "linestyle": linestyle, "marker": marker}
                run = f"{transport} {nbytes}"
                _curve(axes[0], samples, f"{run} rate", label=f"{_size(nbytes)}, {transport}", **style)
                _curve(axes[1], samples, f"{run} capacity", **style)
                _curve(axes[2], samples, f"{run} push median", 1e3, **style)
                _curve(axes[2], samples, f"{run} push p99", 1e3, **style | {"linewidth": 0.5})
                _curve(axes[3], samples, f"{run} memory", 1e-6, **style)
            plain, add, authenticate, cpu = (
                fmean(samples[f"limit {name} {nbytes}"][0]) for name in ("loopback", "add", "authenticate", "loopback_cpu")
            )
            _limit(axes[0], 1 / plain, f"limit: plain sockets, {_size(nbytes)}", color)
            _limit(axes[1], 1 / (cpu + authenticate + add), f"limit: sockets, AES-GCM, one add, {_size(nbytes)}", color)
        axes[3].legend(*axes[0].get_legend_handles_labels(), fontsize=8)

    panels = [
        ("exchanges (a pull and a push) a second; server and workers share two cores", "per second"),
        ("exchanges for each CPU second of the server: its own capacity on one core", "per CPU second"),
        ("latency of a push: median, and (thin) 99th percentile", "milliseconds"),
        ("largest growth of the server's process", "MB"),
    ]
    _picture(path, caption, panels, draw)


@benchmark(
    *(
        Metric(f"parameter server, {transport}: push of {_size(nbytes)}, {clients:,} workers, median", name, kind="seconds")
        for transport in TRANSPORTS
        for nbytes in (20 * KB, MB)
        for clients in (10, 1000)
        for name in [f"{transport} {nbytes} push median {clients}"]
    ),
    once=True,
    draw=draw_server,
)
def growth_server(effort: Effort) -> Samples:
    """Up to 1,000 simulated workers that pull and push without a pause, and the limits of the machine."""
    from load import limits, load

    seconds = 3.0 / effort.shrink
    samples: Samples = {}
    for nbytes in SERVER_BYTES:
        for name, value in vars(limits(nbytes, seconds)).items():
            samples[f"limit {name} {nbytes}"] = [[value]]
        for transport in TRANSPORTS:
            for clients in CLIENTS:
                cycle = 2e-9 * nbytes * clients  # seconds of an exchange of each worker, at 1 GB/s
                found = load(transport, nbytes, clients, max(seconds, 1.5 * cycle / effort.shrink))
                values = {
                    "rate": len(found.pushes) / found.seconds,
                    "capacity": len(found.pushes) / found.cpu_seconds,
                    "cpu share": found.cpu_seconds / found.seconds,
                    "memory": found.busy_bytes,
                    "idle memory": found.idle_bytes,
                    "connect": found.connect_seconds,
                    "failed": found.num_failed,
                }
                for call, calls in (("pull", found.pulls), ("push", found.pushes)):
                    values[f"{call} median"], values[f"{call} p99"] = np.quantile(calls or [0.0], [0.5, 0.99]).tolist()
                for name, value in values.items():
                    samples[f"{transport} {nbytes} {name} {clients}"] = [[float(value)]]
                print(transport, _size(nbytes), clients, values, flush=True)
    return samples
