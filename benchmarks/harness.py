"""Definition of benchmarks: functions that run contestants in turns, and metrics computed from their samples.

In a turn, all contestants run one after the other and each gives a list of samples (mostly seconds), so that disturbances of
the machine affect all of them. A metric is computed for each turn; its value is the median over the turns. For every metric
lower is better, and its target is an upper bound.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median
from typing import Literal

ELEPHAS_PYTHON = Path(__file__).resolve().parent / ".elephas" / "bin" / "python"
"""The Python of the environment that ``elephas_env.sh`` creates."""

Turn = list[float]
Samples = dict[str, list[Turn]]
"""The turns of each contestant, by name."""


@dataclass(frozen=True)
class Effort:
    """The size of a benchmark run.

    Attributes:
        warmup: The number of epochs before the measured ones. Spark's JVM reaches full speed after about 50 small rounds.
        turns: The number of turns.
        epochs: The number of measured epochs (or calls) in a turn.
        seeds: The number of seeds that accuracy is averaged over.
        shrink: The divisor of the number of rows.
    """

    warmup: int
    turns: int
    epochs: int
    seeds: int
    shrink: int = 1

    def rows(self, wanted: int) -> int:
        """``wanted`` rows, divided by `shrink`."""
        return wanted // self.shrink


FULL = Effort(warmup=60, turns=3, epochs=10, seeds=10)
QUICK = Effort(warmup=2, turns=2, epochs=2, seeds=2, shrink=10)


@dataclass(frozen=True)
class Metric:
    """A metric that is computed from samples.

    Attributes:
        name: The label, which includes where the clock starts and ends (``begin -> end``).
        ours: The name of sparkkeras's contestant.
        baseline: The contestant to compare with; ``None`` for an absolute value.
        target: The upper bound; ``None`` if there is none.
        kind: ``"ratio"`` of medians, median ``"seconds"``, or loss of accuracy in percentage ``"points"``.
        unit: The unit of the samples of a ratio.
    """

    name: str
    ours: str
    baseline: str | None = None
    target: float | None = None
    kind: Literal["ratio", "seconds", "points"] = "ratio"
    unit: str = "s"

    def turns(self, samples: Samples) -> list[float]:
        """The value for each turn."""
        ours = samples[self.ours]
        if self.baseline is None:
            return [median(turn) for turn in ours]
        pairs = zip(ours, samples[self.baseline], strict=True)
        if self.kind == "points":
            return [100 * (fmean(theirs) - fmean(mine)) for mine, theirs in pairs]
        return [median(mine) / median(theirs) for mine, theirs in pairs]

    def value(self, samples: Samples) -> float:
        """The value over all turns: the median, or the mean for accuracies."""
        turns = self.turns(samples)
        return fmean(turns) if self.kind == "points" else median(turns)

    def typical(self, samples: Samples, contestant: str) -> float:
        """A contestant's typical sample: the median of seconds, the mean of accuracies."""
        values = [value for turn in samples[contestant] for value in turn]
        return fmean(values) if self.kind == "points" else median(values)


@dataclass(frozen=True)
class Benchmark:
    """A registered benchmark; it runs in a separate process.

    Attributes:
        name: The name for ``--only``.
        run: The function that measures.
        metrics: The metrics to compute from its samples.
        environment: Environment variables of its process.
        once: Whether to run it only once, because repetitions would give the same samples.
        missing: Returns a message if a requirement of the benchmark is missing, else ``None``.
        draw: Draws a picture of its samples, given the file to write and a caption; ``None``: the chart of all has them.
        summary: Returns a summary of its samples in Markdown, which is written to a file of its own.
    """

    name: str
    run: Callable[[Effort], Samples]
    metrics: tuple[Metric, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    once: bool = False
    missing: Callable[[], str | None] = lambda: None
    draw: Callable[[Samples, Path, str], None] | None = None
    summary: Callable[[Samples], str] | None = None


BENCHMARKS: dict[str, Benchmark] = {}


def benchmark(
    *metrics: Metric,
    backend: str = "tensorflow",
    once: bool = False,
    missing: Callable[[], str | None] = lambda: None,
    draw: Callable[[Samples, Path, str], None] | None = None,
    summary: Callable[[Samples], str] | None = None,
) -> Callable[[Callable[[Effort], Samples]], Callable[[Effort], Samples]]:
    """Register a function as a benchmark under its name."""

    def register(run: Callable[[Effort], Samples]) -> Callable[[Effort], Samples]:
        environment = {"KERAS_BACKEND": backend}
        BENCHMARKS[run.__name__] = Benchmark(run.__name__, run, metrics, environment, once, missing, draw, summary)
        return run

    return register


def missing_module(name: str) -> str | None:
    """A message if a module is not installed, for `Benchmark.missing`."""
    return None if find_spec(name) else f"{name} is not installed"


def alternate(turns: int, **contestants: Callable[[], Turn]) -> Samples:
    """Run the contestants alternately, ``turns`` times."""
    samples: Samples = {name: [] for name in contestants}
    for _ in range(turns):
        for name, run in contestants.items():
            samples[name].append(run())
    return samples


def timed(call: Callable[[], object], times: int) -> Turn:
    """The seconds of each of ``times`` calls."""
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return seconds
