"""Reports of the samples: a table, a JSON file and a chart."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from harness import Benchmark, Metric, Samples

ROOT = Path(__file__).resolve().parent.parent
_PACKAGES = (
    *("keras", "tensorflow", "tensorflow-cpu", "jax", "torch", "pyspark", "numpy", "elephas"),
    *("hyperopt", "optuna", "joblib", "scikit-learn"),
)
_UNITS = {"ratio": "", "seconds": " s", "points": " points"}


@dataclass(frozen=True)
class Result:
    """A metric with its samples."""

    metric: Metric
    samples: Samples

    @property
    def value(self) -> float:
        """The metric's value."""
        return self.metric.value(self.samples)

    @property
    def range(self) -> tuple[float, float]:
        """The minimum and the maximum over all turns."""
        turns = self.metric.turns(self.samples)
        return min(turns), max(turns)

    @property
    def verdict(self) -> str:
        """``ok`` if the target is met, ``short`` if not, empty if there is none."""
        if self.metric.target is None:
            return ""
        return "ok" if self.value <= self.metric.target else "short"

    def row(self) -> list[str]:
        """The result as the cells of a table."""
        metric = self.metric
        unit = "" if metric.kind == "points" else f" {metric.unit}"
        cells = [
            "-" if name is None else f"{metric.typical(self.samples, name):.4f}{unit}"
            for name in (metric.ours, metric.baseline)
        ]
        target = "-" if metric.target is None else self.text(metric.target)
        spread = " to ".join(self.text(end).removesuffix(_UNITS[metric.kind]) for end in self.range)
        return [metric.name, *cells, self.text(self.value), spread, target, self.verdict]

    def text(self, number: float) -> str:
        """A value of the metric with its unit."""
        digits = 4 if abs(number) < (1 if self.metric.kind == "seconds" else 0.05) else 2
        return f"{number:.{digits}f}{_UNITS[self.metric.kind]}"

    def as_json(self) -> dict[str, Any]:
        """The result for the JSON file, without the samples, which the file has separately."""
        return {
            "metric": self.metric.name,
            "kind": self.metric.kind,
            "value": self.value,
            "range": self.range,
            "target": self.metric.target,
            "verdict": self.verdict or None,
        }


def results(benchmarks: Sequence[Benchmark], samples: Mapping[str, Samples]) -> list[Result]:
    """The results of all benchmarks that have samples."""
    return [Result(metric, samples[case.name]) for case in benchmarks if case.name in samples for metric in case.metrics]


def table(found: Sequence[Result]) -> str:
    """The results as text."""
    head = ["metric", "sparkkeras", "baseline", "value", "range over turns", "at most", ""]
    return aligned([head, *(result.row() for result in found)])


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """A table as text; its first row is the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def machine(environments: Mapping[str, str]) -> dict[str, Any]:
    """The machine and the versions that the results were measured with.

    Args:
        environments: The Python executables of the environments to list package versions of, by name.
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
    text = json.dumps(content, indent=1)
    numbers_on_one_line = re.sub(r'\[[^][{}"]*\]', lambda numbers: " ".join(numbers[0].split()), text)
    path.write_text(numbers_on_one_line + "\n")
    return path


def chart(found: Sequence[Result], directory: Path, name: str, caption: str) -> Path | None:
    """Draw each metric as a share of its target; return ``None`` without matplotlib or without targets."""
    shown = [result for result in found if result.metric.target]
    try:
        import matplotlib as mpl
    except ImportError:
        return None
    if not shown:
        return None
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    shares = [[end / result.metric.target for end in (result.value, *result.range)] for result in shown]  # type: ignore[operator]
    limit = max(1.35, min(2.5, 1.25 * max(share for share, _, _ in shares)))
    figure, axes = plt.subplots(figsize=(12, 1.6 + 0.52 * len(shown)), layout="constrained")
    for row, (result, (share, low, high)) in enumerate(zip(shown, shares, strict=True)):
        fill = "#4c9a6a" if result.verdict == "ok" else "#d9822b"
        axes.barh(row, min(max(share, 0), limit), color=fill, height=0.6)
        axes.plot([low, high], [row, row], color="#333333", linewidth=1.2, clip_on=True)
        text = f"{result.text(result.value)} of {result.text(result.metric.target)}"  # type: ignore[arg-type]
        inside = share > 0.2 * limit
        where, color = (0.01 * limit, "white") if inside else (max(share, high, 0) + 0.01 * limit, "#222222")
        background = {"facecolor": fill if inside else "white", "edgecolor": "none", "pad": 1.5}
        axes.text(where, row, text, va="center", color=color, fontsize=9, weight="bold", bbox=background)
    axes.axvline(1, color="#222222", linewidth=1.5)
    axes.set(
        xlim=(0, limit),
        ylim=(len(shown) - 0.4, -0.6),
        yticks=range(len(shown)),
        yticklabels=[result.metric.name for result in shown],
        xlabel="value / target: shorter is better, 1 is the target; thin line: the range over the turns",
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
