"""A search as a picture: the best value over time, and the value by each hyper-parameter.

`draw_search` makes the figure, `plot_search` the file. matplotlib is used through its objects alone, so that neither the
person's backend nor the figures of pyplot are touched.
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
from sparkkeras.hyperopt.parameters import Parameter, as_text, distinct, number, shortened
from sparkkeras.hyperopt.progress import duration
from sparkkeras.hyperopt.space import is_finite
from sparkkeras.hyperopt.trials import FAILED, OK, PRUNED, STOPPED, Trial, ranked
from sparkkeras.spark import storage

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 150
"""Dots per inch: at 11 inches a figure fits a page, and a screen."""

_WIDTH, _TOP, _ROW = 11.0, 3.4, 2.3
_INK, _GREY, _GRID = "#222222", "#6b6b6b", "#e6e6e6"

_LOOKS = {
    OK: ("o", "#3477b4"),
    PRUNED: ("D", "#e69f00"),
    STOPPED: ("s", "#8c8c8c"),
    FAILED: ("|", "#c8372d"),
}
"""Marker and colour of each status: people who see no colours can distinguish them, too."""

_BEST: dict[str, Any] = {
    "marker": "*",
    "markersize": 15,
    "markerfacecolor": "#ffd23f",
    "markeredgecolor": _INK,
    "linestyle": "none",
}

_MOST_COLUMNS = 4
_MOST_APART = 12
"""With more values than these, trials of the same value stand on one line."""

_NAME_LENGTH, _SLANTED_LENGTH = 16, 14
"""Longer names of options lose their middle."""

_FEW_NAMES, _SLANTED_NAMES = 5, 8
"""Names stand side by side where there is room for this many, or for all; else at most so many are slanted."""

_LETTERS = 38
"""So many letters stand below the smallest panel without touching each other, two spaces between words included."""

_DWARFED = 10.0
"""Values are cut off where the axis would have to be so many times as long for them."""


def plot_search(
    trials: Sequence[Trial], path: str | Path, *, metric: str, sign: float, parameters: Sequence[Parameter]
) -> None:
    """Draw a search as a PNG.

    Args:
        trials: The trials; those that still run are left out.
        path: Where to.
        metric: What was optimized.
        sign: 1 where small values are good, -1 where large ones are.
        parameters: The hyper-parameters: ``Space.parameters``.

    Raises:
        ConfigurationError: matplotlib is not installed, or no trial has a value.
        StorageError: The path cannot be written.
    """
    target = arguments.path("path", path)
    if not target.lower().endswith(".png"):
        raise ConfigurationError(f"path={target!r}: what is drawn is a PNG, so its name has to end in .png.")
    figure = draw_search(trials, metric=metric, sign=sign, parameters=parameters)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=DPI)
    storage.write_bytes(target, picture.getvalue())


def draw_search(trials: Sequence[Trial], *, metric: str, sign: float, parameters: Sequence[Parameter]) -> Figure:
    """The figure of a search: its first axes are the values over time, the others a hyper-parameter each.

    Raises:
        ConfigurationError: As in `plot_search`.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise ConfigurationError(
            "drawing a search needs matplotlib, which is not installed here: pip install matplotlib."
        ) from error
    shown = _Shown.of(trials, sign, _short(metric, 30))
    panels = [_Panel.of(each, shown) for each in parameters if any(each.is_used(trial.chosen) for trial in shown.valued)]
    rows, columns = _grid(len(panels))
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08, hspace=0.03, wspace=0.02)
    figure = Figure(figsize=(_WIDTH, _TOP + rows * _ROW), dpi=DPI, facecolor="white", layout=layout)
    FigureCanvasAgg(figure)
    places = figure.add_gridspec(1 + rows, columns, height_ratios=[_TOP, *[_ROW] * rows])
    over_time = figure.add_subplot(places[0, :])
    _draw_time(over_time, shown)
    for place, panel in enumerate(panels):
        row, column = divmod(place, columns)
        axes = figure.add_subplot(places[1 + row, column], sharey=over_time)
        _draw_parameter(axes, shown, panel)
        if column:
            axes.tick_params(left=False, labelleft=False)
        else:
            axes.set_ylabel(_text(_short(shown.metric, 20)))
    _draw_words(figure, over_time, shown)
    return figure


@dataclass(frozen=True)
class _Shown:
    """What is drawn.

    Attributes:
        valued: The trials that have a value, in the order in which they ended.
        failed: Those that have none.
        best: The best one.
        bounds: The values that the axes show, the good end first.
        sign: 1 where small values are good, -1 where large ones are.
        metric: What was optimized.
        unit: Seconds of a unit of time, and its name.
    """

    valued: tuple[Trial, ...]
    failed: tuple[Trial, ...]
    best: Trial
    bounds: tuple[float, float]
    sign: float
    metric: str
    unit: tuple[float, str]

    @classmethod
    def of(cls, trials: Sequence[Trial], sign: float, metric: str) -> _Shown:
        ended = sorted((trial for trial in trials if trial.status in _LOOKS), key=lambda trial: (trial.ended, trial.number))
        valued = tuple(trial for trial in ended if trial.value is not None and math.isfinite(trial.value))
        if not valued:
            raise ConfigurationError("there is nothing to draw: no trial has a value yet.")
        failed = tuple(trial for trial in ended if trial.status == FAILED and trial.value is None)
        best, worst = visible_losses([sign * (trial.value or 0.0) for trial in valued])
        seconds = max(trial.ended for trial in (*valued, *failed))
        unit = (1.0, "seconds") if seconds < 180 else (60.0, "minutes") if seconds < 10_800 else (3600.0, "hours")
        return cls(valued, failed, ranked(valued, sign)[0], (sign * best, sign * worst), sign, metric, unit)

    @property
    def cut(self) -> list[Trial]:
        """The trials whose values are beyond the axes."""
        return [trial for trial in self.valued if self.is_cut(trial)]

    def is_cut(self, trial: Trial) -> bool:
        """Whether the value of a trial is beyond the axes."""
        return self.sign * (trial.value or 0.0) > self.sign * self.bounds[1]

    def height(self, trial: Trial) -> float:
        """Where a trial with a value stands: at the edge, behind all others, where that is beyond the axes."""
        good, bad = self.bounds
        return bad + 0.06 * (bad - good) if self.is_cut(trial) else trial.value or 0.0

    @property
    def edge(self) -> int:
        """The end of the axes where bad values are: 1 is the upper one."""
        return 1 if self.sign > 0 else 0

    @property
    def size(self) -> float:
        """How large the marker of a trial is, in points."""
        count = len(self.valued)
        return 6.5 if count <= 30 else 5.0 if count <= 120 else 3.6


@dataclass(frozen=True)
class _Panel:
    """A hyper-parameter, and where its values stand.

    Attributes:
        name: What it is called.
        kind: Its distribution, as hyperopt calls it.
        places: Where each trial that has it stands, by the trial's number.
        names: What stands at which place, where values are no numbers.
    """

    name: str
    kind: str
    places: Mapping[int, float]
    names: Mapping[int, str]

    @classmethod
    def of(cls, parameter: Parameter, shown: _Shown) -> _Panel:
        """The values of a hyper-parameter: numbers as they are, options in the order of the space, other values by name."""
        trials = [trial for trial in (*shown.valued, *shown.failed) if parameter.is_used(trial.chosen)]
        values = {trial.number: parameter.value(trial.chosen) for trial in trials}
        options = parameter.options
        if not options and not all(map(is_finite, values.values())):
            options = tuple(sorted(set(map(as_text, values.values()))))
            values = {trial: options.index(as_text(value)) for trial, value in values.items()}
        places = {trial: float(value) for trial, value in values.items()}
        met = sorted({int(place) for place in places.values()}) if options else []
        return cls(parameter.name, parameter.kind, places, {place: options[place] for place in met})


def visible_losses(losses: Sequence[float]) -> tuple[float, float]:
    """The smallest loss, and the largest one that the axes shall show: all of them, unless a few dwarf the others.

    What most trials came to is measured by the distance from the best one to the first quarter, or, where so many are equal
    to the best, to the first one that is not.
    """
    ordered = np.sort(np.asarray(losses, np.float64))
    best, worst = float(ordered[0]), float(ordered[-1])
    quarter = float(np.quantile(ordered, 0.25, method="higher"))
    above = ordered[ordered > best]
    if not above.size:
        return best, worst
    reach = (quarter if quarter > best else float(above[0])) - best
    seen = float(ordered[ordered <= best + 20 * reach][-1])
    return (best, seen) if worst - best > _DWARFED * (seen - best) else (best, worst)


def _grid(count: int) -> tuple[int, int]:
    """Rows and columns for so many panels, as even as can be."""
    rows = math.ceil(count / _MOST_COLUMNS)
    return rows, max(1, math.ceil(count / max(1, rows)))


def _draw_time(axes: Axes, shown: _Shown) -> None:
    unit, name = shown.unit
    _draw_trials(axes, shown, [trial.ended / unit for trial in shown.valued], shown.valued)
    _draw_failed(axes, shown, [trial.ended / unit for trial in shown.failed])
    best = np.minimum.accumulate([shown.sign * (trial.value or 0.0) for trial in shown.valued]) * shown.sign
    last = max(trial.ended for trial in (*shown.valued, *shown.failed))
    times = [*(trial.ended / unit for trial in shown.valued), last / unit]
    heights = np.clip([*best, best[-1]], min(shown.bounds), max(shown.bounds))
    axes.step(times, heights, where="post", color=_INK, linewidth=1.4, zorder=2.5, label="best so far")
    axes.plot([shown.best.ended / unit], [shown.height(shown.best)], **_BEST, zorder=5)
    low, high = min(shown.bounds), max(shown.bounds)
    margin = 0.12 * (high - low) or 0.05 * abs(high) or 0.5
    axes.set_ylim(low - margin, high + margin)
    axes.set_xlim(0.0, 1.03 * last / unit if last else 1.0)
    axes.set_xlabel(f"{name} since the search began")
    axes.set_ylabel(_text(shown.metric))
    _dress(axes)


def _draw_parameter(axes: Axes, shown: _Shown, panel: _Panel) -> None:
    """A trial in which the hyper-parameter was not used is left out."""
    valued = [trial for trial in shown.valued if trial.number in panel.places]
    failed = [trial for trial in shown.failed if trial.number in panel.places]
    values = list(panel.places.values())
    width = _spread(values, panel.kind)

    def across(trial: Trial) -> float:
        return panel.places[trial.number] + width * _jitter(trial.number)

    _draw_trials(axes, shown, [across(trial) for trial in valued], valued)
    _draw_failed(axes, shown, [across(trial) for trial in failed])
    if shown.best.number in panel.places:
        axes.plot([across(shown.best)], [shown.height(shown.best)], **_BEST, zorder=5)
    if panel.names:
        _name_values(axes, panel.names)
    else:
        _scale(axes, values, panel.kind, width)
    axes.set_xlabel(_text(shortened(panel.name, 32)))
    _dress(axes)


def _draw_trials(axes: Axes, shown: _Shown, across: Sequence[float], trials: Sequence[Trial]) -> None:
    """A marker for each trial, by its status; an arrow where its value is beyond the axes."""
    for status, (marker, colour) in _LOOKS.items():
        for is_cut in (False, True):
            chosen = [
                (x, shown.height(trial))
                for x, trial in zip(across, trials, strict=True)
                if trial.status == status and shown.is_cut(trial) == is_cut
            ]
            if not chosen:
                continue
            axes.plot(
                *zip(*chosen, strict=True),
                linestyle="none",
                marker=("^" if shown.edge else "v") if is_cut else marker,
                markersize=shown.size - (marker in "Ds" and not is_cut),
                markerfacecolor=colour,
                markeredgecolor="white" if marker != "|" else colour,
                markeredgewidth=0.5,
                alpha=0.85,
                zorder=3,
                label=f"{status}, beyond the axis" if is_cut else status,
            )


def _draw_failed(axes: Axes, shown: _Shown, across: Sequence[float]) -> None:
    """A tick for each failed trial, at the edge where bad values are."""
    if across:
        end = 0.955 if shown.edge else 0.0
        _, colour = _LOOKS[FAILED]
        axes.vlines(
            across,
            end,
            end + 0.045,
            colors=colour,
            linewidth=1.4,
            transform=axes.get_xaxis_transform(),
            label=FAILED,
            zorder=4,
        )


def _draw_words(figure: Figure, over_time: Axes, shown: _Shown) -> None:
    """Title, legend, and a note on what is cut off."""
    from matplotlib.lines import Line2D

    best, counts = shown.best, Counter(trial.status for trial in (*shown.valued, *shown.failed))
    count = sum(counts.values())
    figure.suptitle(
        _text(f"Best {shown.metric}: {number(shown.height(best))} (trial {best.number})"),
        x=0.012,
        horizontalalignment="left",
        fontsize=14,
        fontweight="bold",
        color=_INK,
    )
    seconds = max(trial.ended for trial in (*shown.valued, *shown.failed))
    better = "smaller" if shown.sign > 0 else "larger"
    over_time.set_title(
        f"{count} trial{'s' if count != 1 else ''} in {duration(seconds)}; {better} is better",
        loc="left",
        fontsize=9.5,
        color=_GREY,
    )
    handles = [
        Line2D(
            [], [], linestyle="none", marker=marker, color=colour, markersize=6, markeredgewidth=1.4 if marker == "|" else 0
        )
        for status, (marker, colour) in _LOOKS.items()
        if counts[status]
    ]
    names = [f"{counts[status]} {status}" for status in _LOOKS if counts[status]]
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
    if shown.cut:
        figure.supxlabel(_text(_told_cut(shown)), x=0.012, horizontalalignment="left", fontsize=8.5, color=_GREY)


def _told_cut(shown: _Shown) -> str:
    values = [trial.value or 0.0 for trial in shown.cut]
    side, most = ("above", max(values)) if shown.edge else ("below", min(values))
    arrow = "▲" if shown.edge else "▼"
    many = f"{len(values)} trials have values" if len(values) > 1 else "One trial has a value"
    reach = "" if len(values) == 1 else "up to " if shown.edge else "down to "
    return f"{arrow} {many} {side} {number(shown.bounds[1])} ({reach}{number(most)}), cut off at the edge."


def _name_values(axes: Axes, names: Mapping[int, str]) -> None:
    """Names of values below the axis: side by side if most of them have room like that, else slanted; of many, some."""
    low, high = min(names), max(names)
    axes.set_xlim(low - 0.6, high + 0.6)
    named = dict(zip(names, distinct(list(names.values()), _NAME_LENGTH), strict=True))
    beside = max(1, _LETTERS // (max(map(len, named.values())) + 2))
    is_slanted = high - low + 1 > beside and beside < _FEW_NAMES
    if is_slanted:
        named = dict(zip(names, distinct(list(names.values()), _SLANTED_LENGTH), strict=True))
    step = math.ceil((high - low + 1) / (_SLANTED_NAMES if is_slanted else beside))
    places = [place for place in names if (place - low) % step == 0]
    slant: dict[str, Any] = {"rotation": 35, "ha": "right", "rotation_mode": "anchor"} if is_slanted else {}
    axes.set_xticks(places, [_text(named[place]) for place in places], **slant)


def _scale(axes: Axes, values: Sequence[float], kind: str, width: float) -> None:
    """The scale of a number, with few enough ticks for a small panel."""
    from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, MaxNLocator, NullLocator

    low, high = min(values), max(values)
    if "log" in kind and low > 0:
        axes.set_xscale("log")
        room = (high / low) ** 0.06 if high > low else 1.5
        axes.set_xlim(low / room, high * room)
        ticks = _log_ticks(low / room, high * room) if high > low else [low]
        axes.xaxis.set_major_locator(FixedLocator(ticks))
        axes.xaxis.set_major_formatter(FixedFormatter([number(tick) for tick in ticks]))
        axes.xaxis.set_minor_locator(NullLocator())
        return
    is_whole = all(value == int(value) for value in values)
    room = 0.06 * (high - low) or (0.6 if is_whole else 0.06 * abs(high) or 0.5)
    axes.set_xlim(low - room - width / 2, high + room + width / 2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value, 10)))
    for count in (5, 4, 3, 2):
        axes.xaxis.set_major_locator(MaxNLocator(count, integer=is_whole, min_n_ticks=1))
        if sum(len(tick.get_text()) + 2 for tick in axes.get_xticklabels()) <= _LETTERS:
            break


def _log_ticks(low: float, high: float) -> list[float]:
    """A few round numbers between two positive ones."""
    from matplotlib.ticker import MaxNLocator

    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps, enough in (((1,), 3), ((1, 3), 3), ((1, 2, 5), 3)):
        ticks = [tick for decade in decades for step in steps if low <= (tick := float(f"{step}e{decade}")) <= high]
        if len(ticks) >= enough:
            return ticks[:: math.ceil(len(ticks) / 5)]
    return [float(tick) for tick in MaxNLocator(4).tick_values(low, high) if low <= tick <= high]


def _spread(values: Sequence[float], kind: str) -> float:
    """How far trials of one value may be moved apart: not at all where values are not whole, or many."""
    distinct = sorted(set(values))
    if "log" in kind or len(distinct) > _MOST_APART or any(value != int(value) for value in distinct):
        return 0.0
    gap = min((after - value for value, after in itertools.pairwise(distinct)), default=1.0)
    return gap * min(0.5, 0.02 * len(values))


def _jitter(number: int) -> float:
    """A shift in [-0.5, 0.5], the same for a trial every time: the golden ratio spreads neighbours well."""
    return (number * 0.6180339887498949) % 1.0 - 0.5


def _dress(axes: Axes) -> None:
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
    """Words as they are: a dollar sign begins no formula."""
    return text.replace("$", r"\$")
