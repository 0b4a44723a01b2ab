"""A benchmark of search algorithms: the regret over the number of trials, against hyperopt and Optuna.

Regret is the best value so far minus the minimum of the objective, see `objectives`. A turn is a seed. The samples of an
objective are named by it and the contestant, such as ``"branin: hyperopt"``: the regret after each trial. Those of
``"rank: hyperopt"`` are the mean rank over all objectives after the last trial. Nothing here is timed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from harness import Effort, Metric, Samples, benchmark

TRIALS = 60
CHECKPOINTS = (10, 20, 40, 60)
DIGITS = 4
"""The significant digits of regrets in the samples."""

TITLES = {
    "branin": "Branin (2)",
    "hartmann6": "Hartmann (6)",
    "rosenbrock": "Rosenbrock (4)",
    "ackley": "Ackley (5)",
    "levy_mixed": "Levy, mixed (5)",
    "digits": "MLP on digits (6 or 7)",
    "diabetes": "MLP on diabetes (6)",
}
"""The objectives, with the number of hyper-parameters in parentheses."""

LINES = {
    "random search": ("#888888", "-"),
    "hyperopt": ("#ee6677", "-"),
    "Optuna": ("#228833", "-"),
    "sparkkeras": ("#4477aa", "-"),
    "Optuna, 2 pending": ("#228833", ":"),
    "sparkkeras, 2 pending": ("#4477aa", ":"),
}
"""The lines of the picture: color and style."""


def summary(samples: Samples) -> str:
    """The regrets and ranks as tables in Markdown: the median, and the quartiles in parentheses, over the seeds."""
    trials = len(samples["branin: hyperopt"][0])
    counts = [count for count in CHECKPOINTS if count < trials] + [trials]
    names = [name.removeprefix("branin: ") for name in samples if name.startswith("branin: ")]
    lines = [
        "| contestant | mean rank |",
        "| --- | --- |",
        *(f"| {name} | {_rank(samples, name)} |" for name in names),
        "",
        f"| regret after | {' | '.join(f'{count} trials' for count in counts)} |",
        f"| --- |{' --- |' * len(counts)}",
    ]
    for key, title in TITLES.items():
        lines.append(f"| **{title}** |{' |' * len(counts)}")
        for name in names:
            quartiles = np.quantile(np.array(samples[f"{key}: {name}"]), (0.25, 0.5, 0.75), axis=0)
            cells = ["{1:.3g} ({0:.3g} to {2:.3g})".format(*quartiles[:, count - 1]) for count in counts]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(samples: Samples, path: Path, caption: str) -> None:
    """Draw the regrets over the trials: medians over the seeds, and the quartiles of searches without pending trials."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(2, 4, figsize=(15, 7), layout="constrained")
    for axes, (key, title) in zip(panels.flat, TITLES.items(), strict=False):
        floor = _floor(samples, key)
        for name, (color, style) in LINES.items():
            curves = np.maximum(np.array(samples[f"{key}: {name}"]), floor)
            low, middle, high = np.quantile(curves, (0.25, 0.5, 0.75), axis=0)
            numbers = np.arange(1, len(middle) + 1)
            axes.plot(numbers, middle, color=color, linestyle=style, linewidth=1.6, label=name)
            if style == "-":
                axes.fill_between(numbers, low, high, color=color, alpha=0.13, linewidth=0)
        axes.set(yscale="log", xlim=(1, None))
        axes.set_title(title, fontsize=11)
        axes.grid(alpha=0.25)
    for axes in panels[:, 0]:
        axes.set_ylabel("regret")
    for axes in panels[-1, :3]:
        axes.set_xlabel("trials")
    panels[-1, -1].axis("off")
    panels[-1, -1].legend(*panels[0, 0].get_legend_handles_labels(), loc="center", fontsize=10, frameon=False)
    figure.suptitle(caption, fontsize=10, x=0.99, ha="right")
    figure.savefig(path, dpi=90)
    plt.close(figure)


@benchmark(
    *(
        Metric(
            f"mean rank of regrets after {TRIALS} trials, {ours}, against {theirs}",
            f"rank: {ours}",
            f"rank: {theirs}",
            unit="",
        )
        for ours, theirs in (
            ("sparkkeras", "hyperopt"),
            ("sparkkeras", "Optuna"),
            ("sparkkeras, 2 pending", "Optuna, 2 pending"),
        )
    ),
    once=True,
    draw=draw,
    summary=summary,
)
def search_regret(effort: Effort) -> Samples:
    """The regret of each contestant after each trial."""
    from objectives import OBJECTIVES
    from search_contestants import CONTESTANTS

    trials = max(4, effort.rows(TRIALS))
    samples: Samples = {}
    ranks: list[np.ndarray] = []
    for key in TITLES:
        objective = replace(OBJECTIVES[key], value=_remembered(OBJECTIVES[key].value))
        values = {name: [run(objective, seed, trials) for seed in range(effort.seeds)] for name, run in CONTESTANTS.items()}
        minimum = objective.minimum
        if minimum is None:
            minimum = min(value for turns in values.values() for turn in turns for value in turn)
        regrets = {name: _regrets(turns, minimum) for name, turns in values.items()}
        ranks.append(_ranks([regrets[name][:, -1] for name in CONTESTANTS]))
        for name, curves in regrets.items():
            samples[f"{key}: {name}"] = [[float(f"{value:.{DIGITS}g}") for value in curve] for curve in curves]
    for name, by_seed in zip(CONTESTANTS, np.mean(ranks, axis=0), strict=True):
        samples[f"rank: {name}"] = [[float(rank)] for rank in by_seed]
    return samples


def _remembered(value: Callable[[dict[str, Any]], float]) -> Callable[[dict[str, Any]], float]:
    """Compute the value of the same parameters once: several contestants begin with the same random trials."""
    known: dict[str, float] = {}

    def remembered(params: dict[str, Any]) -> float:
        key = repr(sorted(params.items()))
        if key not in known:
            known[key] = value(params)
        return known[key]

    return remembered


def _regrets(values: Sequence[Sequence[float]], minimum: float) -> np.ndarray:
    """The regret of each seed after each trial."""
    return np.minimum.accumulate(np.array(values), axis=1) - minimum


def _ranks(regrets: Sequence[np.ndarray]) -> np.ndarray:
    """The rank of each contestant for each seed, from 1; equal regrets share the mean of their ranks."""
    from scipy.stats import rankdata

    return np.asarray(rankdata(np.array(regrets), axis=0))


def _rank(samples: Samples, name: str) -> str:
    """The mean rank over the seeds, with its standard error."""
    ranks = np.array(samples[f"rank: {name}"])
    return f"{ranks.mean():.2f} ± {ranks.std(ddof=1) / math.sqrt(len(ranks)):.2f}"


def _floor(samples: Samples, key: str) -> float:
    """The smallest regret to draw on a logarithmic scale: a regret of 0 has no place there."""
    final = np.array([turn[-1] for name in LINES for turn in samples[f"{key}: {name}"]])
    return max(float(final[final > 0].min()) / 2, float(final.max()) * 1e-5)
