"""Plots a search: the best value over time, and the value by each hyper-parameter, with its importance.

`draw_search` makes the figure, `plot_search` the file. Both use matplotlib's object interface, so that the user's backend
and the figures of pyplot stay unchanged.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkkeras import arguments
from sparkkeras.errors import ConfigurationError
from sparkkeras.hyperopt.importance import importances
from sparkkeras.hyperopt.parameters import Parameter, format_number, make_distinct, shorten
from sparkkeras.hyperopt.space import is_finite
from sparkkeras.hyperopt.trials import FAILED, OK, PRUNED, STOPPED, Metrics, Trial, pareto_front, ranked
from sparkkeras.progress.status_line import format_duration
from sparkkeras.spark import filesystem

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.gridspec import GridSpecFromSubplotSpec

DPI = 150
"""Dots per inch; at a width of 11 inches a figure fits a page and a screen."""

_WIDTH, _TOP, _ROW = 11.0, 4.0, 2.4
"""In inches: the width of a figure, and the heights of the upper panel and of a row of others."""

_COLUMNS = 4
_CHARACTERS = 145
"""The number of characters of tick labels that fit side by side in a row of panels."""

_MAX_OPTIONS, _OPTION_LENGTH = 12, 24
"""The number of options of a choice that have a label (of more, every second, third, ...), and the length of a label."""

_MARKERS = {OK: "o", PRUNED: "P", STOPPED: "s"}
"""The markers of trials that have a value; failed trials have none."""

_COLORS = ["#7fcdbb", "#2c7fb8", "#081d58"]
"""The color map of the trials' order."""

_BLACK, _RED, _YELLOW = "#222222", "#c8372d", "#ffd23f"

_STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#b5b5b5",
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.xmargin": 0.07,
    "axes.ymargin": 0.1,
    "figure.constrained_layout.h_pad": 0.08,
    "figure.constrained_layout.w_pad": 0.08,
    "font.size": 9,
    "grid.color": "#e6e6e6",
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
}


def plot_search(trials: Sequence[Trial], path: str | Path, *, metrics: Metrics, parameters: Sequence[Parameter]) -> None:
    """Plot a search as a PNG file.

    Args:
        trials: The trials; running ones are left out.
        path: The path of the file; it must end in ``.png``.
        metrics: The optimized metrics.
        parameters: The hyper-parameters: ``Space.parameters``.

    Raises:
        ConfigurationError: matplotlib is not installed, or no trial has a value.
        StorageError: The path cannot be written.
    """
    target = arguments.path("path", path)
    if not target.lower().endswith(".png"):
        raise ConfigurationError(f"path={target!r}: the plot is a PNG file, so the path must end in .png.")
    figure = draw_search(trials, metrics=metrics, parameters=parameters)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=DPI)
    filesystem.write_bytes(target, picture.getvalue())


def draw_search(trials: Sequence[Trial], *, metrics: Metrics, parameters: Sequence[Parameter]) -> Figure:
    """The figure of a search: its first axes show the values over time, each further one a hyper-parameter.

    With several metrics, the first axes show the first metric by each of the others instead.

    Raises:
        ConfigurationError: matplotlib is not installed, or no trial has a value.
    """
    try:
        import matplotlib.style
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError(
            "plotting a search needs matplotlib, which is not installed: pip install matplotlib."
        ) from error
    shown = _Shown.of(trials, metrics)
    metric, sign = next(iter(metrics.items()))
    used = [each for each in parameters if any(each.is_used(trial.chosen) for trial in shown.valued)]
    rows = math.ceil(len(used) / _COLUMNS)
    columns = math.ceil(len(used) / max(1, rows)) or 1
    heights = np.array([_TOP, *[_ROW] * rows])
    with matplotlib.style.context(["default", _STYLE]):
        figure = Figure(figsize=(_WIDTH, heights.sum()), dpi=DPI, layout="constrained")
        grid = figure.add_gridspec(1 + rows, columns, height_ratios=list(heights))
        importance = importances(shown.valued, used)
        if len(metrics) == 1:
            first = figure.add_subplot(grid[0, :])
            _draw_over_time(first, shown)
        else:
            first = _draw_front(figure, grid[0, :].subgridspec(1, len(metrics) - 1), shown, metrics)
        for index, parameter in enumerate(used):
            row, column = divmod(index, columns)
            axes = figure.add_subplot(grid[1 + row, column], sharey=first)
            axes.tick_params(left=not column, labelleft=not column)
            if importance:
                axes.set_title(f"importance {importance[parameter.name]:.2f}", fontsize=8.5, loc="right")
            heights[1 + row] = max(heights[1 + row], _ROW + _draw_parameter(axes, shown, parameter, columns))
        name, count = shorten(metric, 40), len(shown.valued) + len(shown.failed)
        if len(metrics) == 1:
            title = f"Best {name}: {format_number(shown.best[0].value or 0.0)} (trial {shown.best[0].number}),"
        else:
            title = f"Pareto front: {len(shown.best)} of"
        title += f" {count} trial{'s' if count != 1 else ''} in {format_duration(shown.seconds)}"
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", parse_math=False)
        figure.supylabel(f"{name} ({'smaller' if sign > 0 else 'larger'} is better)", fontsize=9, parse_math=False)
        figure.set_figheight(heights.sum())
    return figure


@dataclass(frozen=True)
class _Shown:
    """The trials of a plot.

    Attributes:
        valued: The trials that have a value, in the order in which they ended.
        failed: The failed trials, in the same order.
        best: The best trial, or those of the Pareto front.
        sign: 1 if smaller values are better, -1 if larger ones are.
        limit: The worst value that the axes show; worse ones are drawn at the edge.
    """

    valued: Sequence[Trial]
    failed: Sequence[Trial]
    best: Sequence[Trial]
    sign: float
    limit: float

    @classmethod
    def of(cls, trials: Sequence[Trial], metrics: Metrics) -> _Shown:
        sign, *others = metrics.values()
        trials = sorted(trials, key=lambda trial: (trial.ended, trial.number))
        ended = [trial for trial in trials if trial.status in _MARKERS]
        valued = [trial for trial in ended if trial.value is not None and math.isfinite(trial.value)]
        if not valued:
            raise ConfigurationError("there is nothing to plot: no trial has a value yet.")
        failed = [trial for trial in trials if trial.status == FAILED]
        limit = sign * visible_loss([sign * (trial.value or 0.0) for trial in valued])
        best = pareto_front(valued, sign, *others) if others else ranked(valued, sign)[:1]
        limit = sign * max(sign * limit, *(sign * (trial.value or 0.0) for trial in best))  # shows the whole front
        return cls(valued, failed, best, sign, limit)

    @property
    def seconds(self) -> float:
        """The time of the last end, in seconds since the search began."""
        return max(trial.ended for trial in (*self.valued, *self.failed))

    def is_cut(self, trial: Trial) -> bool:
        """Whether the value of a trial is worse than the limit of the axes."""
        return self.sign * (trial.value or 0.0) > self.sign * self.limit

    def height(self, trial: Trial) -> float:
        """The vertical position of a trial."""
        return self.limit if self.is_cut(trial) else trial.value or 0.0

    def groups(self) -> list[tuple[str, str, list[Trial]]]:
        """The trials that have a value: the label and the marker of a group, and its trials."""
        groups = []
        for status, marker in _MARKERS.items():
            trials = [trial for trial in self.valued if trial.status == status and not self.is_cut(trial)]
            groups.append((f"{len(trials)} {status}", marker, trials))
        cut = [trial for trial in self.valued if self.is_cut(trial)]
        if cut:
            where, marker, extreme = ("above", "^", max) if self.sign > 0 else ("below", "v", min)
            worst = format_number(extreme(trial.value or 0.0 for trial in cut))
            groups.append((f"{len(cut)} {where} the axis (to {worst})", marker, cut))
        return [group for group in groups if group[2]]

    def draw(self, axes: Axes, places: Mapping[int, float]) -> None:
        """Draw the trials in a panel.

        Args:
            axes: The axes of the panel.
            places: The horizontal position of each trial by its number; trials without one are left out.
        """
        from matplotlib.colors import LinearSegmentedColormap

        size = float(np.clip(2000 / len(self.valued), 14, 40))
        for label, marker, trials in self.groups():
            drawn = [trial for trial in trials if trial.number in places]
            axes.scatter(
                [places[trial.number] for trial in drawn],
                [self.height(trial) for trial in drawn],
                s=size,
                c=[trial.number for trial in drawn],
                marker=marker,
                cmap=LinearSegmentedColormap.from_list("order", _COLORS),
                vmin=0,
                vmax=1 + max(trial.number for trial in self.valued),
                edgecolors="white",
                linewidths=0.4,
                zorder=3,
                label=label,
            )
        failed = [places[trial.number] for trial in self.failed if trial.number in places]
        if failed:
            worst = [1.0 if self.sign > 0 else 0.0] * len(failed)  # the edge where the worst values are
            transform, label = axes.get_xaxis_transform(), f"{len(self.failed)} {FAILED}"
            axes.plot(failed, worst, "x", color=_RED, ms=5, transform=transform, clip_on=False, label=label)
        best = [(places[trial.number], self.height(trial)) for trial in self.best if trial.number in places]
        if best:
            size, label = (14, "best") if len(self.best) == 1 else (10, "Pareto front")
            x, y = zip(*best, strict=True)
            axes.plot(x, y, "*", ms=size, mfc=_YELLOW, mec=_BLACK, clip_on=False, zorder=4, label=label)


def visible_loss(losses: Sequence[float]) -> float:
    """The largest loss that the axes show: the largest one, unless it would compress the others to a line.

    Losses are compared by their distance from the best one; the best quarter of them sets the scale.
    """
    best, quarter, worst = np.quantile(np.asarray(losses, np.float64), [0, 0.25, 1], method="higher")
    if not 0 < 100 * (quarter - best) < worst - best:
        return float(worst)
    return max(loss for loss in losses if loss <= best + 10 * (quarter - best))


def _draw_over_time(axes: Axes, shown: _Shown) -> None:
    """Draw the values, and the best value so far, by the time at which trials ended."""
    seconds = shown.seconds
    unit, name = (1.0, "seconds") if seconds < 180 else (60.0, "minutes") if seconds < 10_800 else (3600.0, "hours")
    shown.draw(axes, {trial.number: trial.ended / unit for trial in (*shown.valued, *shown.failed)})
    best = shown.sign * np.minimum.accumulate([shown.sign * shown.height(trial) for trial in shown.valued])
    times = [*(trial.ended / unit for trial in shown.valued), seconds / unit]
    axes.step(times, [*best, best[-1]], where="post", color=_BLACK, linewidth=1.4, label="best so far")
    axes.set_xlim(left=0)
    axes.set_xlabel(f"{name} since the search began (later trials are darker)")
    _draw_legend(axes, shown)


def _draw_legend(axes: Axes, shown: _Shown) -> None:
    legend = axes.legend(loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.2, ncols=9, frameon=False)
    handles: list[Any] = legend.legend_handles[: len(shown.groups())]
    for handle in handles:
        handle.set(array=None, facecolor=_COLORS[1])


def _draw_front(figure: Figure, grid: GridSpecFromSubplotSpec, shown: _Shown, metrics: Metrics) -> Axes:
    """Draw the first metric by each of the others; returns the first axes."""
    first: Axes | None = None
    for index, (metric, sign) in enumerate(list(metrics.items())[1:]):
        axes = figure.add_subplot(grid[index], sharey=first)
        axes.tick_params(left=first is None, labelleft=first is None)
        first = first or axes
        values = {trial.number: trial.values[index + 1] for trial in shown.valued}
        low, high = min(values.values()), max(values.values())
        if low > 0 and high > 100 * low:
            axes.set_xscale("log")
        shown.draw(axes, values)
        _set_ticks(axes, 8, is_whole=all(value == int(value) for value in values.values()))
        if len(metrics) == 2:  # of more, the front is a surface
            points = sorted((values[trial.number], shown.height(trial)) for trial in shown.best)
            axes.step(*zip(*points, strict=True), where="post" if sign > 0 else "pre", color=_BLACK, linewidth=1.4)
        axes.set_xlabel(f"{shorten(metric, 40)} ({'smaller' if sign > 0 else 'larger'} is better)", parse_math=False)
    assert first is not None
    _draw_legend(first, shown)
    return first


def _draw_parameter(axes: Axes, shown: _Shown, parameter: Parameter, columns: int) -> float:
    """Draw the values by a hyper-parameter; trials that do not have it are left out.

    Options of a choice are in the order of the space, other values that are not numbers in the order of their names.

    Args:
        axes: The axes of the panel.
        shown: The trials.
        parameter: The hyper-parameter.
        columns: The number of panels in a row.

    Returns:
        The additional height of the panel for long tick labels, in inches.
    """
    axes.set_xlabel(shorten(parameter.name, _CHARACTERS // (columns + 1)), parse_math=False)
    trials = [trial for trial in (*shown.valued, *shown.failed) if parameter.is_used(trial.chosen)]
    values = {trial.number: parameter.value(trial.chosen) for trial in trials}
    if not parameter.options and all(map(is_finite, values.values())):
        low, high = min(values.values()), max(values.values())
        if "log" in parameter.kind and low > 0:
            axes.set_xscale("log")
            room = (high / low) ** 0.07 if high > low else 10.0
            axes.set_xlim(low / room, high * room)
        shown.draw(axes, {number: float(value) for number, value in values.items()})
        _set_ticks(axes, 8 - columns, is_whole=all(value == int(value) for value in values.values()))
        return 0.0
    texts = {trial.number: parameter.text(trial.chosen) for trial in trials}
    options = [text for text in parameter.options or sorted(set(texts.values())) if text in texts.values()]
    spread = min(0.5, 0.02 * len(trials))
    shown.draw(axes, {number: options.index(text) + spread * _jitter(number) for number, text in texts.items()})
    step = math.ceil(len(options) / _MAX_OPTIONS)
    labels = make_distinct(options, _OPTION_LENGTH)[::step]
    longest = max(map(len, labels))
    is_vertical = len(labels) * (longest + 1) > _CHARACTERS / columns
    axes.set_xlim(-0.6, len(options) - 0.4)
    axes.set_xticks(range(0, len(options), step), labels, rotation=90 if is_vertical else 0, parse_math=False)
    return 0.07 * longest if is_vertical else 0.0


def _jitter(number: int) -> float:
    """A reproducible shift in [-0.5, 0.5] for a trial; the golden ratio spreads consecutive numbers evenly."""
    return (number * 0.6180339887498949) % 1.0 - 0.5


def _set_ticks(axes: Axes, count: int, *, is_whole: bool) -> None:
    """Set a number of ticks that fits a small panel, with plain numbers as labels."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    low, high = axes.get_xlim()
    if axes.get_xscale() == "log" and high > 10 * low:
        axes.xaxis.set_major_locator(LogLocator(numticks=5) if high > 100 * low else LogLocator(subs=(1, 3)))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(count, steps=[1, 2, 2.5, 5, 10], integer=is_whole))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_number(value, 6)))
    axes.xaxis.set_minor_formatter(NullFormatter())
