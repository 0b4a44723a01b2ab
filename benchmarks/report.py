"""What becomes of the samples: a table, a JSON file and a chart."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from harness import Benchmark, Figure, Samples

ROOT = Path(__file__).resolve().parent.parent
_PACKAGES = ("keras", "tensorflow", "tensorflow-cpu", "jax", "pyspark", "numpy", "elephas")
_UNITS = {"ratio": "", "seconds": " s", "points": " points"}


@dataclass(frozen=True)
class Result:
    """A figure with its samples, in words."""

    figure: Figure
    samples: Samples

    @property
    def value(self) -> float:
        """The figure's value."""
        return self.figure.value(self.samples)

    @property
    def range(self) -> tuple[float, float]:
        """The least and the most of all turns."""
        turns = self.figure.turns(self.samples)
        return min(turns), max(turns)

    @property
    def verdict(self) -> str:
        """``ok``, ``short``, or nothing where there is no target."""
        if self.figure.target is None:
            return ""
        return "ok" if self.value <= self.figure.target else "short"

    def row(self) -> list[str]:
        """The result as the cells of a table."""
        figure, low_high = self.figure, self.range
        unit = "" if figure.kind == "points" else " s"
        cells = [
            "-" if name is None else f"{figure.typical(self.samples, name):.4f}{unit}"
            for name in (figure.ours, figure.baseline)
        ]
        target = "-" if figure.target is None else f"{figure.target:.2f}{_UNITS[figure.kind]}"
        spread = f"{low_high[0]:.2f} to {low_high[1]:.2f}"
        return [figure.name, *cells, f"{self.value:.2f}{_UNITS[figure.kind]}", spread, target, self.verdict]

    def as_json(self) -> dict[str, Any]:
        """The result for a file; the samples stand elsewhere in it."""
        return {
            "figure": self.figure.name,
            "kind": self.figure.kind,
            "value": self.value,
            "range": self.range,
            "target": self.figure.target,
            "verdict": self.verdict or None,
        }


def results(benchmarks: Sequence[Benchmark], samples: Mapping[str, Samples]) -> list[Result]:
    """The figures of all benchmarks that were measured."""
    return [Result(figure, samples[case.name]) for case in benchmarks if case.name in samples for figure in case.figures]


def table(found: Sequence[Result]) -> str:
    """The results as text."""
    head = ["figure", "sparkkeras", "baseline", "value", "range over turns", "at most", ""]
    rows = [head, *(result.row() for result in found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def machine(environments: Mapping[str, str]) -> dict[str, Any]:
    """Where the figures come from.

    Args:
        environments: The Python of each environment whose versions count, by name.
    """
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _output("git", "-C", str(ROOT), "describe", "--always", "--dirty"),
        "processor": _processor(),
        "cpus": os.cpu_count(),
        "cpus_used": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load_at_start": round(os.getloadavg()[0], 2),
        "system": platform.platform(),
        "python": platform.python_version(),
        "java": _output("java", "-version").split("\n")[0],
        "versions": {name: _versions(python) for name, python in environments.items()},
    }


def save(directory: Path, name: str, content: Mapping[str, Any]) -> Path:
    """Write the JSON file."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def chart(found: Sequence[Result], directory: Path, name: str, caption: str) -> Path | None:
    """Draw each figure as a share of what it may be; ``None`` without matplotlib or without targets."""
    shown = [result for result in found if result.figure.target]
    try:
        import matplotlib as mpl
    except ImportError:
        return None
    if not shown:
        return None
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    shares = [[end / result.figure.target for end in (result.value, *result.range)] for result in shown]  # type: ignore[operator]
    shown_to = max(1.35, min(2.5, 1.25 * max(share for share, _, _ in shares)))
    figure, axes = plt.subplots(figsize=(12, 1.6 + 0.52 * len(shown)), layout="constrained")
    for row, (result, (share, low, high)) in enumerate(zip(shown, shares, strict=True)):
        fill = "#4c9a6a" if result.verdict == "ok" else "#d9822b"
        axes.barh(row, min(max(share, 0), shown_to), color=fill, height=0.6)
        axes.plot([low, high], [row, row], color="#333333", linewidth=1.2, clip_on=True)
        unit = _UNITS[result.figure.kind]
        text = f"{result.value:.2f}{unit} of {result.figure.target:.2f}{unit}"
        inside = share > 0.2 * shown_to
        where, color = (0.01 * shown_to, "white") if inside else (max(share, high, 0) + 0.01 * shown_to, "#222222")
        behind = {"facecolor": fill if inside else "white", "edgecolor": "none", "pad": 1.5}
        axes.text(where, row, text, va="center", color=color, fontsize=9, weight="bold", bbox=behind)
    axes.axvline(1, color="#222222", linewidth=1.5)
    axes.set(
        xlim=(0, shown_to),
        ylim=(len(shown) - 0.4, -0.6),
        yticks=range(len(shown)),
        yticklabels=[result.figure.name for result in shown],
        xlabel="share of what it may be: shorter is better, 1 is the target; thin line: the range over the turns",
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(caption, fontsize=10, loc="right")
    path = directory / f"{name}.png"
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _versions(python: str) -> dict[str, str]:
    if python == sys.executable:
        return {name: metadata.version(name) for name in _PACKAGES if _installed(name)}
    script = (
        "import json, sys; from importlib.metadata import distributions as all; wanted = sys.argv[1:]; "
        "print(json.dumps({d.name: d.version for d in all() if d.name in wanted}))"
    )
    return json.loads(_output(python, "-c", script, *_PACKAGES) or "{}")


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
