"""What a benchmark is: a function in which contestants take turns, and the figures that follow from their samples.

A turn gives some seconds (or whatever is measured) of each contestant, one contestant right after the other, so that
what disturbs the machine disturbs them all. A figure is worked out turn by turn, and its value is the median over the
turns. Every figure is better the smaller it is, and a target is the most that it may be.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Literal

ELEPHAS_PYTHON = Path(__file__).resolve().parent / ".elephas" / "bin" / "python"
"""The environment that ``elephas_env.sh`` makes."""

Turn = list[float]
Samples = dict[str, list[Turn]]
"""The turns of each contestant, by its name."""


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Attributes:
        warmup: Epochs before the measured ones. Spark's JVM needs some 50 small rounds until it is as fast as it gets.
        turns: How often the contestants take turns.
        epochs: The measured epochs (or calls) in a turn.
        seeds: Over how many seeds accuracy is averaged.
        shrink: By how much rows are divided.
    """

    warmup: int
    turns: int
    epochs: int
    seeds: int
    shrink: int = 1

    def rows(self, wanted: int) -> int:
        """``wanted`` rows, or fewer where this is a trial."""
        return wanted // self.shrink


FULL = Effort(warmup=60, turns=3, epochs=10, seeds=10)
QUICK = Effort(warmup=2, turns=2, epochs=2, seeds=2, shrink=10)


@dataclass(frozen=True)
class Figure:
    """A figure that follows from samples.

    Attributes:
        name: What it is; it says where the clock starts and ends (``begin -> end``).
        ours: The contestant that sparkkeras is.
        baseline: The one that it is held against; ``None`` where the figure stands for itself.
        target: The most that it may be; ``None`` where it is for information.
        kind: ``"ratio"`` of median times, median ``"seconds"``, or percentage ``"points"`` of accuracy that are lost.
    """

    name: str
    ours: str
    baseline: str | None = None
    target: float | None = None
    kind: Literal["ratio", "seconds", "points"] = "ratio"

    def turns(self, samples: Samples) -> list[float]:
        """The figure of each turn."""
        ours = samples[self.ours]
        if self.baseline is None:
            return [median(turn) for turn in ours]
        pairs = zip(ours, samples[self.baseline], strict=True)
        if self.kind == "points":
            return [100 * (fmean(theirs) - fmean(mine)) for mine, theirs in pairs]
        return [median(mine) / median(theirs) for mine, theirs in pairs]

    def value(self, samples: Samples) -> float:
        """The figure."""
        turns = self.turns(samples)
        return fmean(turns) if self.kind == "points" else median(turns)

    def typical(self, samples: Samples, contestant: str) -> float:
        """What a contestant's samples are like: the median of seconds, the mean of accuracies."""
        values = [value for turn in samples[contestant] for value in turn]
        return fmean(values) if self.kind == "points" else median(values)


@dataclass(frozen=True)
class Benchmark:
    """A registered benchmark; it runs in a process of its own.

    Attributes:
        name: What ``--only`` calls it.
        run: Measures.
        figures: What follows.
        environment: Environment variables of its process.
        once: Whether repeating it would give the same again.
        missing: Says what is not there to run it; ``None`` if all is.
    """

    name: str
    run: Callable[[Effort], Samples]
    figures: tuple[Figure, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    once: bool = False
    missing: Callable[[], str | None] = lambda: None


BENCHMARKS: dict[str, Benchmark] = {}


def benchmark(
    *figures: Figure,
    backend: str = "tensorflow",
    once: bool = False,
    missing: Callable[[], str | None] = lambda: None,
) -> Callable[[Callable[[Effort], Samples]], Callable[[Effort], Samples]]:
    """Register a function as a benchmark under its name."""

    def register(run: Callable[[Effort], Samples]) -> Callable[[Effort], Samples]:
        environment = {"KERAS_BACKEND": backend}
        BENCHMARKS[run.__name__] = Benchmark(run.__name__, run, figures, environment, once, missing)
        return run

    return register


def alternate(turns: int, **contestants: Callable[[], Turn]) -> Samples:
    """Let the contestants take turns."""
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
