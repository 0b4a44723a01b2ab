"""Plots of searches: Optuna draws the charts, so the tests look at the picture as a whole and at what must not change."""

import sys

import matplotlib
import pytest
from hyperopt import hp
from matplotlib import image, pyplot

from sparkkeras.errors import ConfigurationError, SearchError, StorageError
from sparkkeras.hyperopt import Search, choice, loguniform, normal, plot, uniform
from sparkkeras.hyperopt.plot import _shown
from tests.hyperopt.test_study import run

SPACE = {
    "lr": loguniform(1e-5, 1e-1),
    "dropout": uniform(0, 0.5, step=0.1),
    "mean": normal(3, 1),
    "optimizer": choice({"kind": "sgd", "momentum": uniform(0.5, 1)}, {"kind": "adam"}),
    "a name that is too long for an axis": choice(*range(12)),
}
LINE = {"dropout": uniform(0, 0.5, step=0.1)}
CHART = 400
"""The smallest height of a chart in pixels."""


def search_of(space=SPACE, count=12, value=lambda params: params["dropout"], **arguments):
    return run(Search(space, seed=1, **arguments), count, value)


def picture(search, folder):
    search.plot(folder / "search.png")
    return image.imread(folder / "search.png")


@pytest.mark.parametrize(
    ("search", "charts"),
    [
        (search_of, 5),  # history, importances, parallel coordinates, two rows of hyper-parameters
        (
            lambda: search_of(
                {"x": hp.qlognormal("x", 0, 1, 1), "y": hp.pchoice("y", [(0.1, 1), (0.9, 2)])}, 4, lambda _: 1.0
            ),
            2,
        ),
        (lambda: search_of(LINE, 4, lambda params: (params["dropout"], 1.0), metric=("loss", "size"), mode="min"), 4),
        (lambda: search_of(LINE, 4, lambda params: (params["dropout"],) * 4, metric=("a", "b", "c", "d"), mode="max"), 3),
    ],
    ids=["values", "hyperopt", "two metrics", "four metrics"],
)
@pytest.mark.filterwarnings("error")
def test_a_picture_has_all_charts(search, charts, tmp_path, caplog):
    pixels = picture(search(), tmp_path)
    is_ink = (pixels[..., :3] < 1).any(axis=2)
    assert charts * CHART <= len(pixels) < (charts + 0.9) * CHART * 1.3
    assert is_ink[:, : pixels.shape[1] // 10].any()
    assert is_ink[:, -pixels.shape[1] // 10 :].any()
    assert not caplog.records


def test_charts_show_values_of_the_space_and_short_names():
    search = search_of()
    drawn = _shown(search.study, search._results.space.parameters)
    for trial, mine in zip(drawn.trials, search.trials, strict=True):
        assert trial.values == list(mine.values)
        assert trial.params["dropout"] == mine.params["dropout"]
        assert trial.params["mean"] == pytest.approx(mine.params["mean"])
        assert trial.params["optimizer"] == mine.params["optimizer"]["kind"]
        assert "a name that is too long for an axis" not in trial.params
    assert any("a name that …for an axis" in trial.params for trial in drawn.trials)


def test_figures_style_and_backend_of_the_user_do_not_change(tmp_path, monkeypatch):
    pyplot.switch_backend("svg")  # stands for one with windows
    seen, draw = set(), plot._picture
    monkeypatch.setattr(plot, "_picture", lambda axes: seen.add(matplotlib.get_backend()) or draw(axes))
    with matplotlib.rc_context({"interactive": True, "axes.facecolor": "red"}):
        mine, before = pyplot.figure(7), dict(matplotlib.rcParams)
        picture(search_of(LINE, 1), tmp_path)
        assert seen == {"agg"}
        assert dict(matplotlib.rcParams) == before
        assert pyplot.get_fignums() == [7]
        assert pyplot.gcf() is mine
        pyplot.close(mine)
    pyplot.switch_backend("agg")


def test_what_cannot_be_plotted_or_written(tmp_path, monkeypatch):
    with pytest.raises(SearchError, match="with a value"):
        search_of(LINE, 0).plot(tmp_path / "search.png")
    search = search_of(LINE, 1)
    with pytest.raises(ConfigurationError, match=r"ends in \.png"):
        search.plot(tmp_path / "search.pdf")
    with pytest.raises(StorageError, match="missing.*cannot be written"):
        search.plot(tmp_path / "missing" / "search.png")
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigurationError, match="pip install matplotlib"):
        search.plot(tmp_path / "search.png")
    assert list(tmp_path.iterdir()) == []
