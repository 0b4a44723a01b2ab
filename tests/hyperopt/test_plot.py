"""Plots of searches: the positions of what they show, and that any search can be plotted."""

import sys
import warnings
from dataclasses import replace

import numpy as np
import pytest
from hyperopt import hp
from hyperopt.pyll import scope
from matplotlib.backends.backend_agg import FigureCanvasAgg

from sparkkeras.errors import ConfigurationError, StorageError
from sparkkeras.hyperopt import plot
from sparkkeras.hyperopt.parameters import Parameter, make_distinct
from sparkkeras.hyperopt.plot import draw_search, plot_search, visible_loss
from sparkkeras.hyperopt.space import Space
from sparkkeras.hyperopt.trials import FAILED, OK, PRUNED, RUNNING, STOPPED, Trial
from tests.conftest import long

PARAMETERS = (
    Parameter("lr", "lr", "loguniform"),
    Parameter("units", "units", "randint", ("32", "64", "128")),
    Parameter("momentum", "momentum", "uniform"),
)
PNG = b"\x89PNG\r\n\x1a\n"


def trial(number, value, status=OK, *, lr=0.01, units=0, momentum=None, **given):
    chosen = {"lr": lr, "units": units} | ({} if momentum is None else {"momentum": momentum})
    return Trial(number, {}, status, value, ended=10.0 * (number + 1), chosen=chosen, **given)


def example_trials():
    return [
        trial(0, 0.5, lr=0.001, units=1),
        trial(1, 0.7, PRUNED, lr=0.1, units=2, momentum=0.5),
        trial(2, 0.2, lr=0.01, units=1, momentum=0.9),
        trial(3, None, FAILED, lr=0.02, units=0),
        trial(4, 0.3, STOPPED, lr=0.03, units=2),
    ]


def draw(trials, parameters=PARAMETERS, sign=1.0, metric="val_loss", metrics=None):
    figure = draw_search(trials, metrics=metrics or {metric: sign}, parameters=parameters)
    FigureCanvasAgg(figure)
    return figure


def points(axes, status):
    """The markers of a status, or of values beyond the axis (``above``, ``below``)."""
    found = [line.get_xydata() for line in axes.lines if line.get_label().endswith(status)]
    found += [each.get_offsets() for each in axes.collections if status in each.get_label()]
    return sorted((float(x), float(y)) for each in found for x, y in each)


def stars(axes):
    return points(axes, "best")


def ticks(axes):
    left, right = axes.get_xlim()
    return [label.get_text() for label in axes.get_xticklabels() if left <= label.get_position()[0] <= right]


def overlapping(figure):
    """The pairs of texts that overlap after the layout is computed."""
    figure.draw_without_rendering()
    texts = [figure._suptitle, figure._supylabel]
    for axes in figure.axes:
        legend = axes.get_legend()
        texts += [axes.xaxis.label, axes._right_title, *([] if legend is None else legend.get_texts())]
        (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
        texts += [label for label in axes.get_xticklabels() if left <= label.get_position()[0] <= right]
        texts += [label for label in axes.get_yticklabels() if low <= label.get_position()[1] <= high]
    shown = [text for text in texts if text.get_text() and text.get_visible()]
    boxes = [(text.get_text(), text.get_window_extent(figure.canvas.get_renderer())) for text in shown]
    return [
        (one, other)
        for index, (one, box) in enumerate(boxes)
        for other, other_box in boxes[index + 1 :]
        if box.overlaps(other_box)
    ]


# Positions


def test_panels_have_the_importance_of_their_hyper_parameter():
    trials = [trial(number, number / 20, lr=10 ** (-number / 5), units=number % 3) for number in range(20)]
    titles = [axes.get_title(loc="right") for axes in draw(trials).axes]
    assert titles[0] == ""
    assert float(titles[1].removeprefix("importance ")) > 0.8
    assert titles[2] == "importance 0.00"
    assert [axes.get_title(loc="right") for axes in draw(trials[:9]).axes] == ["", "", ""]  # would be chance


def test_values_are_plotted_by_time_and_status():
    figure = draw(example_trials())
    over_time = figure.axes[0]
    assert points(over_time, OK) == [(10.0, 0.5), (30.0, 0.2)]
    assert points(over_time, PRUNED) == [(20.0, 0.7)]
    assert points(over_time, STOPPED) == [(50.0, 0.3)]
    assert over_time.get_xlabel() == "seconds since the search began (later trials are darker)"
    assert over_time.get_xlim()[0] == 0
    (ok,) = [each for each in over_time.collections if each.get_label() == "2 ok"]
    assert list(ok.get_array()) == [0, 2]  # the colors


@pytest.mark.parametrize(("sign", "expected"), [(1.0, [0.5, 0.5, 0.2, 0.2, 0.2]), (-1.0, [0.5, 0.7, 0.7, 0.7, 0.7])])
def test_the_best_so_far_is_a_step_line_to_the_end(sign, expected):
    (line,) = [line for line in draw(example_trials(), sign=sign).axes[0].lines if line.get_label() == "best so far"]
    assert list(line.get_ydata()) == expected
    assert list(line.get_xdata()) == [10, 20, 30, 50, 50]
    assert line.get_drawstyle() == "steps-post"


def test_trials_are_plotted_in_the_order_of_their_ends():
    (line,) = [line for line in draw(example_trials()[::-1]).axes[0].lines if line.get_label() == "best so far"]
    assert list(line.get_xdata()) == [10, 20, 30, 50, 50]


@pytest.mark.parametrize(("factor", "unit", "last"), [(1, "seconds", 50), (60, "minutes", 50), (3600, "hours", 50)])
def test_the_time_axis_has_a_suitable_unit(factor, unit, last):
    axes = draw([replace(each, ended=each.ended * factor) for each in example_trials()]).axes[0]
    assert axes.get_xlabel().startswith(f"{unit} since the search began")
    assert points(axes, STOPPED)[0][0] == last


@pytest.mark.parametrize(("sign", "edge"), [(1.0, 1.0), (-1.0, 0.0)])
def test_failed_trials_are_marked_at_the_edge_of_the_worst_values(sign, edge):
    for axes, place in zip(draw(example_trials(), sign=sign).axes, (40.0, 0.02, 0.0), strict=False):
        assert points(axes, FAILED) == [(pytest.approx(place, abs=0.06), edge)]
        (line,) = [line for line in axes.lines if line.get_label() == "1 failed"]
        assert line.get_transform() == axes.get_xaxis_transform()
        assert axes.get_xlim()[0] <= place <= axes.get_xlim()[1]


@pytest.mark.parametrize(("sign", "best"), [(1.0, example_trials()[2]), (-1.0, example_trials()[1])])
def test_the_best_trial_is_marked_in_all_axes(sign, best):
    over_time, *others = draw(example_trials(), sign=sign).axes
    assert stars(over_time) == [(best.ended, best.value)]
    for axes, parameter in zip(others, PARAMETERS, strict=True):
        ((x, y),) = stars(axes)
        assert x == pytest.approx(best.chosen[parameter.label], abs=0.25)
        assert y == best.value


def test_all_axes_have_the_same_range_of_values():
    figure = draw(example_trials())
    assert len({axes.get_ylim() for axes in figure.axes}) == 1
    low, high = figure.axes[0].get_ylim()
    assert low < 0.2
    assert high > 0.7


def test_each_hyper_parameter_has_axes_with_its_scale():
    figure = draw(example_trials())
    assert [axes.get_xlabel() for axes in figure.axes[1:]] == ["lr", "units", "momentum"]
    assert [axes.get_xscale() for axes in figure.axes[1:]] == ["log", "linear", "linear"]
    assert points(figure.axes[1], OK) == [(0.001, 0.5), (0.01, 0.2)]
    assert ticks(figure.axes[1]) == ["0.001", "0.01", "0.1"]


@pytest.mark.parametrize("kind", ["loguniform", "qloguniform", "lognormal", "qlognormal"])
def test_log_distributions_have_a_log_scale(kind):
    lr = [Parameter("lr", "lr", kind)]
    assert draw(example_trials(), lr).axes[1].get_xscale() == "log"
    assert draw([trial(0, 1.0, lr=0.0), trial(1, 2.0, lr=5.0)], lr).axes[1].get_xscale() == "linear"


def test_a_trial_without_the_hyper_parameter_is_left_out():
    axes = draw(example_trials()).axes[3]
    assert points(axes, OK) == [(0.9, 0.2)]
    assert points(axes, PRUNED) == [(0.5, 0.7)]
    assert points(axes, STOPPED) == []
    assert points(axes, FAILED) == []


def test_a_best_trial_without_the_hyper_parameter_is_marked_only_in_other_axes():
    trials = [*example_trials(), trial(9, 0.1)]
    assert [len(stars(axes)) for axes in draw(trials).axes] == [1, 1, 1, 0]


def test_a_hyper_parameter_that_no_trial_used_has_no_axes():
    assert len(draw([trial(0, 1.0)]).axes) == 3


def test_a_choice_has_the_names_of_its_options_and_its_trials_are_spread():
    axes = draw([trial(number, 1.0 + number, units=number % 2 * 2) for number in range(40)]).axes[2]
    assert ticks(axes) == ["32", "128"]
    assert list(axes.get_xticks()) == [0, 1]
    places = np.array([x for x, _ in points(axes, OK)])
    assert len(set(places)) == 40
    assert np.all(np.minimum(abs(places), abs(places - 1)) <= 0.25)
    again = draw([trial(number, 1.0 + number, units=number % 2 * 2) for number in range(40)]).axes[2]
    assert [x for x, _ in points(again, OK)] == list(places)


def test_a_random_integer_has_numeric_ticks():
    trials = [Trial(n, {}, OK, 1.0 + n, chosen={"seed": n * 50}, ended=1.0 + n) for n in range(20)]
    axes = draw(trials, [Parameter("seed", "seed", "randint")]).axes[1]
    assert points(axes, OK) == [(n * 50.0, 1.0 + n) for n in range(20)]
    assert len(ticks(axes)) <= 7


def chosen(label, *indices):
    return [Trial(n, {}, OK, 1.0 + n, chosen={label: index}, ended=1.0 + n) for n, index in enumerate(indices)]


def test_a_choice_in_a_nested_space_has_the_names_of_its_options_and_its_path():
    axes = draw(chosen("act", 0, 1, 2), [Parameter("act", "layers.0.activation", "randint", ("relu", "None", "True"))]).axes[
        1
    ]
    assert ticks(axes) == ["relu", "None", "True"]
    assert axes.get_xlabel() == "layers.0.activation"


def test_computed_values_are_plotted_at_their_result():
    """For example 2 ** hp.randint: a trial gets the power of two."""
    space = Space({"units": 2 ** hp.randint("power", 4, 8), "kind": scope.getitem(["a", "b"], hp.randint("index", 2))})
    trials = [Trial(n, {}, OK, 1.0 + n, chosen={"power": 4 + n, "index": n % 2}, ended=1.0 + n) for n in range(4)]
    kind, units = draw(trials, space.parameters).axes[1:]
    assert (kind.get_xlabel(), ticks(kind)) == ("kind", ["a", "b"])
    assert units.get_xlabel() == "units"
    assert [x for x, _ in points(units, OK)] == pytest.approx([16, 32, 64, 128], abs=1)


def test_long_names_of_options_are_vertical_and_keep_their_differences():
    names = ("imagenet_resnet50_frozen_backbone", "imagenet_resnet50_tuned_backbone", "x" * 40, "None")
    axes = draw(chosen("w", 0, 1, 2, 3), [Parameter("w", "w", "randint", names)] * 4).axes[1]
    assert ticks(axes) == [*make_distinct(names, 24)]
    assert {label.get_rotation() for label in axes.get_xticklabels()} == {90}
    axes = draw(chosen("w", 0, 1, 2, 3), [Parameter("w", "w", "randint", ("relu", "gelu", "tanh", "None"))] * 4).axes[1]
    assert {label.get_rotation() for label in axes.get_xticklabels()} == {0}


def test_only_some_of_many_options_have_labels():
    sizes = Parameter("a", "a", "randint", tuple(str(16 * n) for n in range(1, 41)))
    assert ticks(draw(chosen("a", *range(40)), [sizes]).axes[1]) == [str(16 * n) for n in range(1, 41, 4)]


def test_title_and_legend_describe_the_plot():
    figure = draw(example_trials())
    assert figure.get_suptitle() == "Best val_loss: 0.2 (trial 2), 5 trials in 50.0s"
    assert figure.get_supylabel() == "val_loss (smaller is better)"
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert labels == ["2 ok", "1 pruned", "1 stopped", "1 failed", "best", "best so far"]
    alone = draw([trial(0, 3.0)], sign=-1.0)
    assert alone.get_suptitle().endswith("1 trial in 10.0s")
    assert alone.get_supylabel() == "val_loss (larger is better)"
    assert [text.get_text() for text in alone.axes[0].get_legend().get_texts()] == ["1 ok", "best", "best so far"]


# Outliers


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([1.0], 1),
        ([2.0, 2.0, 2.0], 2),
        ([0.1, 1e6], 1e6),
        ([0.1, 0.2, 1e6], 0.2),
        ([0.1, 0.2, 0.7], 0.7),
        ([1.0] * 9 + [50.0], 50),
        ([-3.0, -2.5, -2.0, 1e9, 1e12], -2),
        (list(np.linspace(0, 1, 500)), 1),
    ],
)
def test_only_extreme_outliers_are_beyond_the_axis(losses, expected):
    assert visible_loss(losses) == pytest.approx(expected)
    assert visible_loss(losses[::-1]) == pytest.approx(expected)


def test_a_long_tail_is_shown():
    losses = np.random.default_rng(0).exponential(size=500)
    assert visible_loss(losses) == losses.max()


@pytest.mark.parametrize(("sign", "limit", "side"), [(1.0, 0.7, "above"), (-1.0, 0.2, "below")])
def test_outliers_are_drawn_at_the_edge(sign, limit, side):
    figure = draw([*example_trials(), trial(7, sign * 1e6), trial(8, sign * 5e4, PRUNED)], sign=sign)
    low, high = figure.axes[0].get_ylim()
    assert high - low < 1
    for axes in figure.axes[:3]:
        assert [y for _, y in points(axes, side)] == [limit, limit]
        assert [y for _, y in points(axes, PRUNED)] == [0.7]
    label = f"2 {side} the axis (to {'-' if sign < 0 else ''}1e6)"
    assert label in [text.get_text() for text in figure.axes[0].get_legend().get_texts()]


def test_the_line_of_the_best_stays_within_the_axes():
    figure = draw([replace(trial(7, 1e6), ended=1.0), *example_trials()])
    (line,) = [line for line in figure.axes[0].lines if line.get_label() == "best so far"]
    assert list(line.get_ydata()[:2]) == [0.7, 0.5]


# Any search


def many(count, width, seed=0):
    """Trials of every status, and their hyper-parameters."""
    generator = np.random.default_rng(seed)
    kinds = {f"a_rather_long_name_{n}": ("loguniform", "uniform", "randint", "quniform")[n % 4] for n in range(width)}
    trials = []
    for number in range(count):
        drawn = {"loguniform": float(np.exp(generator.normal(-5, 2))), "uniform": float(generator.uniform(1000, 1001))}
        drawn |= {"randint": int(generator.integers(4)), "quniform": 32.0 * generator.integers(1, 9)}
        chosen = {label: drawn[kind] for label, kind in kinds.items()}
        status = str(generator.choice([OK, PRUNED, STOPPED, FAILED]) if number else OK)
        value = None if status == FAILED else float(generator.normal() if number % 9 else 1e5)
        trials.append(Trial(number, {}, status, value, chosen=chosen, ended=number * 7.0))
    options = {"randint": tuple(f"option number {n}" for n in range(4))}
    return trials, [Parameter(label, label, kind, options.get(kind, ())) for label, kind in kinds.items()]


@pytest.mark.parametrize(("count", "width"), [(1, 3), (3, 1), (30, 0), long(30, 20), (300, 5)])
def test_texts_do_not_overlap(count, width):
    trials, parameters = many(count, width)
    figure = draw(trials, parameters, metric="val_sparse_categorical_accuracy", sign=-1.0)
    assert len(figure.axes) == 1 + width
    assert overlapping(figure) == []


def test_a_range_within_a_decade_has_ticks():
    for low, high in ((0.0101, 0.0109), (0.02, 0.09), (3.0, 41.0), (99.0, 101.0), (1e-9, 1e9)):
        figure = draw([trial(n, 1.0, lr=lr) for n, lr in enumerate((low, high, (low * high) ** 0.5))], PARAMETERS[:1] * 4)
        assert 2 <= len(ticks(figure.axes[1])) <= 5, (low, high)
        assert overlapping(figure) == []


@pytest.mark.parametrize(
    "trials",
    [
        [trial(0, 0.0)],
        [replace(trial(0, 1.0), ended=0.0)],
        [trial(0, 1e300), trial(1, -1e300)],
        [trial(0, 1e-300), trial(1, 2e-300)],
        [trial(number, 7.0) for number in range(5)],
        [trial(0, 1.0), trial(1, float("nan")), trial(2, float("inf"), STOPPED)],
        [trial(0, 1.0), trial(1, None, RUNNING), trial(2, None, STOPPED)],
        [Trial(0, None, OK, 1.0)],
        [trial(0, 1.0, PRUNED), *(trial(number, None, FAILED) for number in range(1, 20))],
    ],
    ids=range(9),
)
def test_unusual_searches_are_plotted_without_a_warning(trials):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = draw(trials)
        figure.dpi = 40  # fast to draw, with the same warnings
        figure.canvas.draw()
    assert np.isfinite(figure.axes[0].get_ylim()).all()


def test_names_with_dollar_signs_are_not_formulas():
    dollars = Parameter("x", "$x^$", "randint", ("$a_$", "$"))
    draw(chosen("x", 0, 1), [dollars], metric="$loss^$").draw_without_rendering()


# The file


def test_the_file_is_a_png(tmp_path):
    for path in (tmp_path / "one.png", str(tmp_path / "other.PNG")):
        assert plot_search(example_trials(), path, metrics={"loss": 1.0}, parameters=PARAMETERS) is None
    for path in tmp_path.iterdir():
        data = path.read_bytes()
        assert data.startswith(PNG)
        width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
        assert 1200 < width < 2400
        assert 600 < height < 2400
        assert 20_000 < len(data) < 1_000_000
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("name", ["search.pdf", "search", "png"])
def test_a_path_that_does_not_end_in_png_is_rejected(tmp_path, name):
    with pytest.raises(ConfigurationError, match=f"{name}': the plot is a PNG file, so the path must end in .png"):
        plot_search(example_trials(), tmp_path / name, metrics={"loss": 1.0}, parameters=PARAMETERS)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small(monkeypatch):
    """A low resolution, which is fast to draw."""
    monkeypatch.setattr(plot, "DPI", 30)


@pytest.mark.usefixtures("small")
def test_an_existing_file_is_overwritten(tmp_path):
    path = tmp_path / "search.png"
    path.write_text("old")
    plot_search(example_trials(), path, metrics={"loss": 1.0}, parameters=PARAMETERS)
    assert path.read_bytes().startswith(PNG)


@pytest.mark.usefixtures("small")
def test_a_path_that_cannot_be_written_is_reported(tmp_path):
    with pytest.raises(StorageError, match="cannot write .*nowhere/search.png"):
        plot_search(example_trials(), tmp_path / "nowhere" / "search.png", metrics={"loss": 1.0}, parameters=PARAMETERS)


@pytest.mark.parametrize("trials", [[], [trial(0, None, FAILED)], [trial(0, float("nan"))]], ids=["none", "failed", "nan"])
def test_a_search_without_a_value_cannot_be_plotted(trials, tmp_path):
    with pytest.raises(ConfigurationError, match="no trial has a value yet"):
        plot_search(trials, tmp_path / "search.png", metrics={"loss": 1.0}, parameters=PARAMETERS)
    assert list(tmp_path.iterdir()) == []


def test_missing_matplotlib_is_reported_with_the_pip_command(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigurationError, match="pip install matplotlib"):
        plot_search(example_trials(), tmp_path / "search.png", metrics={"loss": 1.0}, parameters=PARAMETERS)


@pytest.mark.programs
def test_pyplot_is_not_imported(tmp_path):
    import subprocess

    code = (
        "import sys\n"
        "from sparkkeras.hyperopt.plot import plot_search\nfrom sparkkeras.hyperopt.trials import Trial\n"
        f"plot_search([Trial(0, {{}}, 'ok', 1.0)], {str(tmp_path / 'a.png')!r}, metrics={{'loss': 1.0}}, parameters=[])\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


# Several metrics


TWO = {"val_loss": 1.0, "size": 1.0}


def front_example(*further):
    """Trials 0, 2 and 4 are on the front of two metrics."""
    sizes = (10.0, 30.0, 50.0, None, 20.0)
    return [
        each if size is None else replace(each, values=(each.value, size, *further))
        for each, size in zip(example_trials(), sizes, strict=True)
    ]


def test_two_metrics_are_drawn_as_points_with_their_front():
    figure = draw(front_example(), metrics=TWO)
    first, *others = figure.axes
    assert points(first, "ok") == [(10.0, 0.5), (50.0, 0.2)]
    assert points(first, "Pareto front") == [(10.0, 0.5), (20.0, 0.3), (50.0, 0.2)]
    (line,) = [line for line in first.lines if line.get_drawstyle() == "steps-post"]
    assert line.get_xydata().tolist() == [[10.0, 0.5], [20.0, 0.3], [50.0, 0.2]]
    assert first.get_xlabel() == "size (smaller is better)"
    assert figure.get_suptitle().startswith("Pareto front: 3 of 5 trials in ")
    assert len(points(others[0], "Pareto front")) == 3
    maximized = draw(front_example(), metrics={"val_loss": 1.0, "size": -1.0}).axes[0]
    assert [line.get_xydata().tolist() for line in maximized.lines if line.get_drawstyle() == "steps-pre"] == [[[50.0, 0.2]]]
    assert maximized.get_xlabel() == "size (larger is better)"


def test_three_metrics_are_drawn_as_the_first_by_each_of_the_others():
    first, second, *_ = draw(front_example(7.0), metrics={**TWO, "seconds": 1.0}).axes
    assert [axes.get_xlabel() for axes in (first, second)] == ["size (smaller is better)", "seconds (smaller is better)"]
    assert points(second, "Pareto front") == [(7.0, 0.2), (7.0, 0.3), (7.0, 0.5)]
    assert not [line for line in (*first.lines, *second.lines) if line.get_drawstyle().startswith("steps")]


def test_the_whole_front_is_shown_and_sizes_on_a_log_scale():
    trials = [trial(number, 1.0 + 0.01 * number) for number in range(8)]
    trials = [replace(each, values=(each.value, 1000.0 + each.number)) for each in trials]
    trials.append(trial(8, 1e6, values=(1e6, 1.0)))
    first = draw(trials, metrics=TWO).axes[0]
    assert (1.0, 1e6) in points(first, "Pareto front")
    assert first.get_xscale() == "log"
