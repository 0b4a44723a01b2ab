"""Draw the chart of the documentation's first page from the stored results: ``python benchmarks/overview.py``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
PICTURE = HERE.parent / "docs" / "images" / "benchmarks.svg"

BARS = {
    "plain Keras on the same two cores": [
        ("epoch of 60,000 rows, TensorFlow", "backends", "MLP epoch begin -> end, 60,000 rows, against Keras as compiled"),
        (
            "the same, Keras with 32 steps per execution",
            "backends",
            "MLP epoch begin -> end, 60,000 rows, against Keras at equal steps",
        ),
        (
            "epoch of 60,000 rows, PyTorch",
            "backends",
            "PyTorch: MLP epoch begin -> end, 60,000 rows, against Keras as compiled",
        ),
        ("epoch of 60,000 rows, JAX", "backends", "JAX: MLP epoch begin -> end, 60,000 rows, against Keras as compiled"),
        ("epoch of 8,000 rows, JAX", "backends", "JAX: MLP epoch begin -> end, 8,000 rows, against Keras as compiled"),
        (
            "asynchronous epoch of 60,000 rows, frequency=10",
            "asynchronous",
            "asynchronous epoch, frequency 10, 60,000 rows, socket, against Keras",
        ),
        (
            "all-reduce epoch of a CNN",
            "all_reduce_cnn",
            "CNN epoch begin -> end, all-reduce, two workers, against Keras on the same cores",
        ),
        ("predict, 60,000 rows", "inference", "predict call -> array, 60,000 rows, batch 1024, against Keras"),
        (
            "transform of a DataFrame, 600,000 x 10",
            "frames",
            "transform -> all rows, 600,000 x 10 columns, against keras.predict of arrays",
        ),
    ],
    "other libraries on Spark, same two cores": [
        ("Elephas: epoch of 8,000 rows", "elephas", "MLP epoch begin -> end, 8,000 rows, against Elephas (end -> end)"),
        ("Elephas: predict, 2,000 rows", "elephas", "predict call -> array, 2,000 rows, against Elephas"),
        (
            "TorchDistributor: call with 300 steps",
            "runner",
            "SparkRunner call -> result of DDP, 300 steps, against TorchDistributor",
        ),
        (
            "spark-tensorflow-distributor: call with 300 steps",
            "runner_mirrored",
            "SparkRunner call -> result of MultiWorkerMirroredStrategy, 300 steps, against spark-tensorflow-distributor",
        ),
        (
            "hyperopt's SparkTrials: 24 short trials",
            "searches",
            "search call -> best, 24 short trials, against hyperopt.SparkTrials",
        ),
    ],
}
"""What is shown: by what it is compared with, the label, the folder of the results and the metric."""


@dataclass(frozen=True)
class Bar:
    """A ratio of times: below 1, sparkkeras takes less time."""

    label: str
    value: float
    low: float
    high: float

    @property
    def text(self) -> str:
        """The ratio with two digits."""
        return f"{self.value:.2f}"


def bars() -> dict[str, list[Bar]]:
    """The bars of each part of the chart, read from the results."""
    return {title: [_bar(*each) for each in chosen] for title, chosen in BARS.items()}


def draw(path: Path) -> None:
    """Draw the chart."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "sparkkeras", "font.family": "sans-serif", "font.size": 11}
    from matplotlib import pyplot as plt

    found = bars()
    sizes = [len(part) for part in found.values()]
    figure, parts = plt.subplots(
        len(found), figsize=(9, 6.6), layout="constrained", sharex=True, height_ratios=[size + 0.8 for size in sizes]
    )
    for axes, (title, part) in zip(parts, found.items(), strict=True):
        for row, bar in enumerate(part):
            axes.barh(row, bar.value, color="#3f51b5" if bar.value <= 1 else "#e8590c", height=0.62)
            axes.plot([bar.low, bar.high], [row, row], color="#222222", linewidth=1.2)
            axes.text(
                max(bar.value, bar.high) + 0.02,
                row,
                bar.text,
                va="center",
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
            )
        axes.axvline(1, color="#222222", linewidth=1.2)
        axes.set(
            yticks=range(len(part)), yticklabels=[bar.label for bar in part], ylim=(len(part) - 0.4, -0.6), xlim=(0, 1.6)
        )
        axes.set_title(f"Against {title}", loc="left", fontsize=11, weight="bold")
        axes.spines[["top", "right"]].set_visible(False)
    parts[-1].set_xlabel("time, sparkkeras / other: shorter is better; thin line: range over the turns", loc="right")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _bar(label: str, folder: str, metric: str) -> Bar:
    stored = json.loads((HERE / "results" / folder / "latest.json").read_text())
    (result,) = (each for each in stored["results"] if each["metric"] == metric)
    return Bar(label, result["value"], *result["range"])


if __name__ == "__main__":
    draw(PICTURE)
