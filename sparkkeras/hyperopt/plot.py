"""Plots a search: the best value over time, and the value by each hyper-parameter.

`draw_search` makes the figure, `plot_search` the file. Both use matplotlib's object interface, so that the user's backend
and the figures of pyplot stay unchanged.
"""

from __future__ import annotations

import io
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkkeras import arguments
from sparkkeras.errors import ConfigurationError
from sparkkeras.hyperopt.parameters import Parameter, as_text, format_number, make_distinct, shorten
from sparkkeras.hyperopt.progress import format_duration
from sparkkeras.hyperopt.space import is_finite
from sparkkeras.hyperopt.trials import FAILED, OK, PRUNED, STOPPED, Trial, ranked
from sparkkeras.spark import storage

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 150
"""Dots per inch; at a width of 11 inches a figure fits a page and a screen."""

_WIDTH, _TOP, _ROW = 11.0, 3.4, 2.3
_INK, _GREY, _GRID = "#222222", "#6b6b6b", "#e6e6e6"

_STATUS_STYLES = {
    OK: ("o", "#3477b4"),
    PRUNED: ("D", "#e69f00"),
    STOPPED: ("s", "#8c8c8c"),
    FAILED: ("|", "#c8372d"),
}
"""Marker and color of each status; the different markers keep them distinguishable without color."""

_BEST: dict[str, Any] = {
    "marker": "*",
    "markersize": 15,
    "markerfacecolor": "#ffd23f",
    "markeredgecolor": _INK,
    "linestyle": "none",
}

_MAX_COLUMNS = 4
_MAX_JITTERED_VALUES = 12
"""With more distinct values than this, trials of the same value are not spread horizontally."""

_NAME_LENGTH, _SLANTED_LENGTH = 16, 14
"""The lengths above which names of options are abbreviated."""

_FEW_NAMES, _SLANTED_NAMES = 5, 8
"""Tick labels are horizontal if this many, or all, have room; else they are slanted, at most the second number of them."""

_LABEL_CHARACTERS = 38
"""The number of characters of tick labels that fit below the smallest panel, including two spaces between labels."""

_OUTLIER_FACTOR = 10.0
"""Outliers are cut off if the axis would have to be more than this number of times as long to show them."""


def plot_search(
    trials: Sequence[Trial], path: str | Path, *, metric: str, sign: float, parameters: Sequence[Parameter]
) -> None:
    """Plot a search as a PNG file.

    Args:
        trials: The trials; running ones are left out.
        path: The path of the file; it must end in ``.png``.
        metric: The name of the optimized metric.
        sign: 1 if smaller values are better, -1 if larger ones are.
        parameters: The hyper-parameters: ``Space.parameters``.

    Raises:
        ConfigurationError: matplotlib is not installed, or no trial has a value.
        StorageError: The path cannot be written.
    """
    target = arguments.path("path", path)
    if not target.lower().endswith(".png"):
        raise ConfigurationError(f"path={target!r}: the plot is a PNG file, so the path must end in .png.")
    figure = draw_search(trials, metric=metric, sign=sign, parameters=parameters)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=DPI)
    storage.write_bytes(target, picture.getvalue())


def draw_search(trials: Sequence[Trial], *, metric: str, sign: float, parameters: Sequence[Parameter]) -> Figure:
    """The figure of a search: its first axes show the values over time, each further one a hyper-parameter.

    Raises:
        ConfigurationError: matplotlib is not installed, or no trial has a value.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise ConfigurationError(
            "plotting a search needs matplotlib, which is not installed: pip install matplotlib."
        ) from error
    data = _PlotData.of(trials, sign, _short(metric, 30))
    panels = [_Panel.of(each, data) for each in parameters if any(each.is_used(trial.chosen) for trial in data.valued)]
    rows, columns = _grid(len(panels))
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08, hspace=0.03, wspace=0.02)
    figure = Figure(figsize=(_WIDTH, _TOP + rows * _ROW), dpi=DPI, facecolor="white", layout=layout)
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(1 + rows, columns, height_ratios=[_TOP, *[_ROW] * rows])
    over_time = figure.add_subplot(grid[0, :])
    _draw_over_time(over_time, data)
    for index, panel in enumerate(panels):
        row, column = divmod(index, columns)
        axes = figure.add_subplot(grid[1 + row, column], sharey=over_time)
        _draw_parameter(axes, data, panel)
        if column:
            axes.tick_params(left=False, labelleft=False)
        else:
            axes.set_ylabel(_text(_short(data.metric, 20)))
    _draw_title_and_legend(figure, over_time, data)
    return figure


@dataclass(frozen=True)
class _PlotData:
    """The data of a plot.

    Attributes:
        valued: The trials that have a value, in the order in which they ended.
        failed: The failed trials without a value, in the same order.
        best: The best trial.
        bounds: The range of values that the axes show, the best first.
        sign: 1 if smaller values are better, -1 if larger ones are.
        metric: The name of the optimized metric.
        unit: The unit of the time axis: its seconds and its name.
    """

    valued: tuple[Trial, ...]
    failed: tuple[Trial, ...]
    best: Trial
    bounds: tuple[float, float]
    sign: float
    metric: str
    unit: tuple[float, str]

    @classmethod
    def of(cls, trials: Sequence[Trial], sign: float, metric: str) -> _PlotData:
        ended = sorted(
            (trial for trial in trials if trial.status in _STATUS_STYLES), key=lambda trial: (trial.ended, trial.number)
        )
        valued = tuple(trial for trial in ended if trial.value is not None and math.isfinite(trial.value))
        if not valued:
            raise ConfigurationError("there is nothing to plot: no trial has a value yet.")
        failed = tuple(trial for trial in ended if trial.status == FAILED and trial.value is None)
        best, worst = visible_losses([sign * (trial.value or 0.0) for trial in valued])
        seconds = max(trial.ended for trial in (*valued, *failed))
        unit = (1.0, "seconds") if seconds < 180 else (60.0, "minutes") if seconds < 10_800 else (3600.0, "hours")
        return cls(valued, failed, ranked(valued, sign)[0], (sign * best, sign * worst), sign, metric, unit)

    @property
    def cut(self) -> list[Trial]:
        """The trials whose values are outside the axes."""
        return [trial for trial in self.valued if self.is_cut(trial)]

    def is_cut(self, trial: Trial) -> bool:
        """Whether the value of a trial is outside the axes."""
        return self.sign * (trial.value or 0.0) > self.sign * self.bounds[1]

    def height(self, trial: Trial) -> float:
        """The vertical position of a trial; for a value outside the axes, a position at their edge."""
        good, bad = self.bounds
        return bad + 0.06 * (bad - good) if self.is_cut(trial) else trial.value or 0.0

    @property
    def edge(self) -> int:
        """The edge of the axes where the worst values are: 1 is the upper one, 0 the lower one."""
        return 1 if self.sign > 0 else 0

    @property
    def size(self) -> float:
        """The size of a trial's marker in points."""
        count = len(self.valued)
        return 6.5 if count <= 30 else 5.0 if count <= 120 else 3.6


@dataclass(frozen=True)
class _Panel:
    """The horizontal positions of trials by a hyper-parameter.

    Attributes:
        name: The name of the hyper-parameter.
        kind: Its distribution in hyperopt's terms.
        positions: The position of each trial that has it, by the trial's number.
        names: The tick labels by position, if its values are not numbers; else empty.
    """

    name: str
    kind: str
    positions: Mapping[int, float]
    names: Mapping[int, str]

    @classmethod
    def of(cls, parameter: Parameter, data: _PlotData) -> _Panel:
        """Position numbers by value, options in the order of the space, and other values in the order of their names."""
        trials = [trial for trial in (*data.valued, *data.failed) if parameter.is_used(trial.chosen)]
        values = {trial.number: parameter.value(trial.chosen) for trial in trials}
        options = parameter.options
        if not options and not all(map(is_finite, values.values())):
            options = tuple(sorted(set(map(as_text, values.values()))))
            values = {trial: options.index(as_text(value)) for trial, value in values.items()}
        positions = {trial: float(value) for trial, value in values.items()}
        used = sorted({int(position) for position in positions.values()}) if options else []
        return cls(parameter.name, parameter.kind, positions, {position: options[position] for position in used})


def visible_losses(losses: Sequence[float]) -> tuple[float, float]:
    """The smallest loss and the largest one that the axes show: all losses, unless there are extreme outliers.

    Outliers are far away relative to the distance from the best loss to the first quartile, or, if this is zero, to the
    second best loss.
    """
    ordered = np.sort(np.asarray(losses, np.float64))
    best, worst = float(ordered[0]), float(ordered[-1])
    quarter = float(np.quantile(ordered, 0.25, method="higher"))
    above = ordered[ordered > best]
    if not above.size:
        return best, worst
    spread = (quarter if quarter > best else float(above[0])) - best
    largest = float(ordered[ordered <= best + 20 * spread][-1])
    return (best, largest) if worst - best > _OUTLIER_FACTOR * (largest - best) else (best, worst)


def _grid(count: int) -> tuple[int, int]:
    """The rows and columns of a balanced grid for ``count`` panels."""
    rows = math.ceil(count / _MAX_COLUMNS)
    return rows, max(1, math.ceil(count / max(1, rows)))


def _draw_over_time(axes: Axes, data: _PlotData) -> None:
    unit, name = data.unit
    _draw_trials(axes, data, [trial.ended / unit for trial in data.valued], data.valued)
    _draw_failed(axes, data, [trial.ended / unit for trial in data.failed])
    best = np.minimum.accumulate([data.sign * (trial.value or 0.0) for trial in data.valued]) * data.sign
    last = max(trial.ended for trial in (*data.valued, *data.failed))
    times = [*(trial.ended / unit for trial in data.valued), last / unit]
    heights = np.clip([*best, best[-1]], min(data.bounds), max(data.bounds))
    axes.step(times, heights, where="post", color=_INK, linewidth=1.4, zorder=2.5, label="best so far")
    axes.plot([data.best.ended / unit], [data.height(data.best)], **_BEST, zorder=5)
    low, high = min(data.bounds), max(data.bounds)
    margin = 0.12 * (high - low) or 0.05 * abs(high) or 0.5
    axes.set_ylim(low - margin, high + margin)
    axes.set_xlim(0.0, 1.03 * last / unit if last else 1.0)
    axes.set_xlabel(f"{name} since the search began")
    axes.set_ylabel(_text(data.metric))
    _style_axes(axes)


def _draw_parameter(axes: Axes, data: _PlotData, panel: _Panel) -> None:
    """Draw the values by a hyper-parameter; trials that do not have it are left out."""
    valued = [trial for trial in data.valued if trial.number in panel.positions]
    failed = [trial for trial in data.failed if trial.number in panel.positions]
    values = list(panel.positions.values())
    width = _jitter_width(values, panel.kind)

    def x_of(trial: Trial) -> float:
        return panel.positions[trial.number] + width * _jitter(trial.number)

    _draw_trials(axes, data, [x_of(trial) for trial in valued], valued)
    _draw_failed(axes, data, [x_of(trial) for trial in failed])
    if data.best.number in panel.positions:
        axes.plot([x_of(data.best)], [data.height(data.best)], **_BEST, zorder=5)
    if panel.names:
        _label_values(axes, panel.names)
    else:
        _scale(axes, values, panel.kind, width)
    axes.set_xlabel(_text(shorten(panel.name, 32)))
    _style_axes(axes)


def _draw_trials(axes: Axes, data: _PlotData, xs: Sequence[float], trials: Sequence[Trial]) -> None:
    """Draw a marker for each trial by its status, or an arrow if its value is outside the axes."""
    for status, (marker, color) in _STATUS_STYLES.items():
        for is_cut in (False, True):
            chosen = [
                (x, data.height(trial))
                for x, trial in zip(xs, trials, strict=True)
                if trial.status == status and data.is_cut(trial) == is_cut
            ]
            if not chosen:
                continue
            axes.plot(
                *zip(*chosen, strict=True),
                linestyle="none",
                marker=("^" if data.edge else "v") if is_cut else marker,
                markersize=data.size - (marker in "Ds" and not is_cut),
                markerfacecolor=color,
                markeredgecolor="white" if marker != "|" else color,
                markeredgewidth=0.5,
                alpha=0.85,
                zorder=3,
                label=f"{status}, beyond the axis" if is_cut else status,
            )


def _draw_failed(axes: Axes, data: _PlotData, xs: Sequence[float]) -> None:
    """Draw a tick for each failed trial, at the edge where the worst values are."""
    if xs:
        end = 0.955 if data.edge else 0.0
        _, color = _STATUS_STYLES[FAILED]
        axes.vlines(
            xs,
            end,
            end + 0.045,
            colors=color,
            linewidth=1.4,
            transform=axes.get_xaxis_transform(),
            label=FAILED,
            zorder=4,
        )


def _draw_title_and_legend(figure: Figure, over_time: Axes, data: _PlotData) -> None:
    """Draw the title, the legend, and a note about values that are cut off."""
    from matplotlib.lines import Line2D

    best, counts = data.best, Counter(trial.status for trial in (*data.valued, *data.failed))
    count = sum(counts.values())
    figure.suptitle(
        _text(f"Best {data.metric}: {format_number(data.height(best))} (trial {best.number})"),
        x=0.012,
        horizontalalignment="left",
        fontsize=14,
        fontweight="bold",
        color=_INK,
    )
    seconds = max(trial.ended for trial in (*data.valued, *data.failed))
    better = "smaller" if data.sign > 0 else "larger"
    over_time.set_title(
        f"{count} trial{'s' if count != 1 else ''} in {format_duration(seconds)}; {better} is better",
        loc="left",
        fontsize=9.5,
        color=_GREY,
    )
    handles = [
        Line2D(
            [], [], linestyle="none", marker=marker, color=color, markersize=6, markeredgewidth=1.4 if marker == "|" else 0
        )
        for status, (marker, color) in _STATUS_STYLES.items()
        if counts[status]
    ]
    names = [f"{counts[status]} {status}" for status in _STATUS_STYLES if counts[status]]
    handles += [Line2D([], [], color=_INK, linewidth=1.4), Line2D([], [], **{**_BEST, "markersize": 11})]
    over_time.legend(
        handles,
        [*names, "best so far", "best"],
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        borderaxespad=0.2,
        ncols=len(handles),
        frameon=False,
        fontsize=9,
        handletextpad=0.4,
        columnspacing=1.4,
    )
    if data.cut:
        figure.supxlabel(_text(_cut_off_note(data)), x=0.012, horizontalalignment="left", fontsize=8.5, color=_GREY)


def _cut_off_note(data: _PlotData) -> str:
    values = [trial.value or 0.0 for trial in data.cut]
    side, extreme = ("above", max(values)) if data.edge else ("below", min(values))
    arrow = "▲" if data.edge else "▼"
    subject = f"{len(values)} trials have values" if len(values) > 1 else "One trial has a value"
    up_to = "" if len(values) == 1 else "up to " if data.edge else "down to "
    return (
        f"{arrow} {subject} {side} {format_number(data.bounds[1])} ({up_to}{format_number(extreme)}), cut off at the edge."
    )


def _label_values(axes: Axes, names: Mapping[int, str]) -> None:
    """Set tick labels that are names: horizontal if enough of them have room, else slanted; only some of many."""
    low, high = min(names), max(names)
    axes.set_xlim(low - 0.6, high + 0.6)
    named = dict(zip(names, make_distinct(list(names.values()), _NAME_LENGTH), strict=True))
    horizontal = max(1, _LABEL_CHARACTERS // (max(map(len, named.values())) + 2))
    is_slanted = high - low + 1 > horizontal and horizontal < _FEW_NAMES
    if is_slanted:
        named = dict(zip(names, make_distinct(list(names.values()), _SLANTED_LENGTH), strict=True))
    step = math.ceil((high - low + 1) / (_SLANTED_NAMES if is_slanted else horizontal))
    positions = [position for position in names if (position - low) % step == 0]
    slant: dict[str, Any] = {"rotation": 35, "ha": "right", "rotation_mode": "anchor"} if is_slanted else {}
    axes.set_xticks(positions, [_text(named[position]) for position in positions], **slant)


def _scale(axes: Axes, values: Sequence[float], kind: str, width: float) -> None:
    """Set a numeric scale, with few enough ticks for a small panel."""
    from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, MaxNLocator, NullLocator

    low, high = min(values), max(values)
    if "log" in kind and low > 0:
        axes.set_xscale("log")
        room = (high / low) ** 0.06 if high > low else 1.5
        axes.set_xlim(low / room, high * room)
        ticks = _log_ticks(low / room, high * room) if high > low else [low]
        axes.xaxis.set_major_locator(FixedLocator(ticks))
        axes.xaxis.set_major_formatter(FixedFormatter([format_number(tick) for tick in ticks]))
        axes.xaxis.set_minor_locator(NullLocator())
        return
    is_whole = all(value == int(value) for value in values)
    room = 0.06 * (high - low) or (0.6 if is_whole else 0.06 * abs(high) or 0.5)
    axes.set_xlim(low - room - width / 2, high + room + width / 2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_number(value, 10)))
    for count in (5, 4, 3, 2):
        axes.xaxis.set_major_locator(MaxNLocator(count, integer=is_whole, min_n_ticks=1))
        if sum(len(tick.get_text()) + 2 for tick in axes.get_xticklabels()) <= _LABEL_CHARACTERS:
            break


def _log_ticks(low: float, high: float) -> list[float]:
    """A few round numbers between two positive numbers."""
    from matplotlib.ticker import MaxNLocator

    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps, enough in (((1,), 3), ((1, 3), 3), ((1, 2, 5), 3)):
        ticks = [tick for decade in decades for step in steps if low <= (tick := float(f"{step}e{decade}")) <= high]
        if len(ticks) >= enough:
            return ticks[:: math.ceil(len(ticks) / 5)]
    return [float(tick) for tick in MaxNLocator(4).tick_values(low, high) if low <= tick <= high]


def _jitter_width(values: Sequence[float], kind: str) -> float:
    """The width over which trials of equal value are spread; 0 if values are not whole numbers, or are many."""
    unique = sorted(set(values))
    if "log" in kind or len(unique) > _MAX_JITTERED_VALUES or any(value != int(value) for value in unique):
        return 0.0
    gap = min((after - value for value, after in itertools.pairwise(unique)), default=1.0)
    return gap * min(0.5, 0.02 * len(values))


def _jitter(number: int) -> float:
    """A reproducible shift in [-0.5, 0.5] for a trial; the golden ratio spreads consecutive numbers evenly."""
    return (number * 0.6180339887498949) % 1.0 - 0.5


def _style_axes(axes: Axes) -> None:
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8.5, colors=_GREY, length=3, labelcolor=_INK)
    for name, spine in axes.spines.items():
        spine.set_visible(name in ("left", "bottom"))
        spine.set_color("#b5b5b5")
    for text in (axes.xaxis.label, axes.yaxis.label):
        text.set_fontsize(9.5)
        text.set_color(_INK)


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _text(text: str) -> str:
    """Escape dollar signs, which would start a formula."""
    return text.replace("$", r"\$")
