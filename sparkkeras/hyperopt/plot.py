"""Draws a search as one picture: Optuna's charts of its study, one above the other."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.trial import FrozenTrial

from sparkkeras.errors import ConfigurationError, StorageError
from sparkkeras.hyperopt.space import Parameter
from sparkkeras.hyperopt.study import complete, quiet, target
from sparkkeras.hyperopt.trials import Metrics
from sparkkeras.hyperopt.values import as_text
from sparkkeras.weights import Array

_WIDTH, _HEIGHT, _DPI = 14.0, 4.5, 100
"""The size of a chart in inches, and the pixels of an inch."""

_SLICES = 5
"""The number of hyper-parameters in a row."""

_OPTIONS_LENGTH = 24
"""The number of characters of the options of a choice above which they are rotated."""


def plot_study(study: optuna.Study, path: str | Path, metrics: Metrics, parameters: Mapping[str, Parameter]) -> None:
    """Write a PNG: the values over time (of several metrics, the Pareto front), the importances, and the hyper-parameters.

    Args:
        study: The study; at least one trial is complete.
        path: The local path of the file; it must end in ``.png``.
        metrics: The metrics.
        parameters: The hyper-parameters.

    Raises:
        ConfigurationError: The path ends in something else, or matplotlib is not installed.
        StorageError: The file cannot be written.
    """
    if not str(path).endswith(".png"):
        raise ConfigurationError(f"path={str(path)!r}: expected the path of a PNG file, which ends in .png.")
    try:
        import matplotlib.image
        from matplotlib import rc_context
    except ImportError as error:
        raise ConfigurationError("plot needs matplotlib: pip install matplotlib.") from error
    with rc_context({"interactive": False}), quiet(), _without_windows():
        warnings.simplefilter("ignore")  # such as Matplotlib's for values that are equal
        pictures = [_picture(axes) for axes in _charts(study, metrics, parameters)]
    width = max(picture.shape[1] for picture in pictures)
    padded = [np.pad(each, ((0, 0), (0, width - each.shape[1]), (0, 0)), constant_values=255) for each in pictures]
    try:
        matplotlib.image.imsave(path, np.concatenate(padded))
    except OSError as error:
        raise StorageError(f"path={str(path)!r} cannot be written: {error}.") from error


@contextmanager
def _without_windows() -> Iterator[None]:
    """Draw without a display, whatever the backend of the user."""
    import matplotlib as mpl
    from matplotlib import pyplot

    backend = mpl.get_backend()
    pyplot.switch_backend("agg")
    try:
        yield
    finally:
        with suppress(ImportError):  # a backend that needs a display, and has none
            pyplot.switch_backend(backend)


def _charts(study: optuna.Study, metrics: Metrics, parameters: Mapping[str, Parameter]) -> Iterator[Any]:
    """Draw the charts; yields the axes of each."""
    from optuna.visualization import matplotlib as charts

    name, *others = metrics
    importances = target(metrics, 0)
    of_first: dict[str, Any] = {"target_name": name, **({"target": lambda trial: trial.values[0]} if others else {})}
    drawn = _shown(study, parameters)
    labels = sorted({label for trial in drawn.trials for label in trial.params})
    if len(metrics) in (2, 3):  # of more, there is no chart
        yield charts.plot_pareto_front(drawn, target_names=list(metrics))
    yield charts.plot_optimization_history(drawn, **of_first)
    if len({trial.values[0] for trial in complete(study)}) > 1:
        yield charts.plot_param_importances(study, target=importances, target_name=name)
        if len(labels) > 1:
            yield charts.plot_parallel_coordinate(drawn, **of_first)
    for first in range(0, len(labels), _SLICES):
        slices = charts.plot_slice(drawn, params=labels[first : first + _SLICES], **of_first)
        for axes in np.ravel(np.asarray(slices, object)):
            length = sum(len(label.get_text()) for label in axes.get_xticklabels())
            if length > _OPTIONS_LENGTH and axes.get_xscale() != "log":
                axes.tick_params("x", rotation=90)
        yield slices


def _shown(study: optuna.Study, parameters: Mapping[str, Parameter]) -> optuna.Study:
    """A study with the values for display, instead of numbers of steps and quantiles; see `Parameter.searched`."""
    trials = study.get_trials()
    searched = {label: distribution for trial in trials for label, distribution in trial.distributions.items()}
    short = {label: as_text(label, short=True) for label in searched}
    names = short if len(set(short.values())) == len(short) else {label: label for label in searched}
    values: dict[str, list[Any]] = {label: [] for label in searched}
    for trial in trials:
        found = {label: _value(trial, label, parameters.get(label)) for label in trial.params}
        for label, value in found.items():
            values[label].append(value)
        trial.params = {names[label]: value for label, value in found.items()}
    distributions = {
        names[label]: _distribution(values[label], parameters.get(label), distribution)
        for label, distribution in searched.items()
    }
    made = optuna.create_study(directions=study.directions)
    for trial in trials:
        trial.distributions = {name: distributions[name] for name in trial.params}
        made.add_trial(trial)
    return made


def _value(trial: FrozenTrial, label: str, parameter: Parameter | None) -> Any:
    """The value for display: the name of an option, else the attribute of a value that Optuna has not chosen itself."""
    chosen = trial.params[label]
    return parameter.shown(chosen) if parameter and parameter.options else trial.user_attrs.get(label, chosen)


def _distribution(values: list[Any], parameter: Parameter | None, searched: BaseDistribution) -> BaseDistribution:
    """The distribution of the values for display of a hyper-parameter."""
    if isinstance(searched, CategoricalDistribution) or isinstance(values[0], str):
        return CategoricalDistribution(parameter.options if parameter else tuple(dict.fromkeys(values)))
    is_log = parameter.is_log if parameter else getattr(searched, "log", False)
    return FloatDistribution(min(values), max(values), log=is_log and min(values) > 0)


def _picture(axes: Any) -> Array:
    """The pixels of the figure of some axes, which is closed."""
    from matplotlib import image, pyplot

    figure, file = np.ravel(axes)[0].figure, io.BytesIO()
    figure.set_size_inches(_WIDTH, _HEIGHT)
    figure.set_size_inches(_WIDTH * min(1.5, _WIDTH / figure.get_tightbbox().width), _HEIGHT)  # without empty margins
    figure.savefig(file, dpi=_DPI, bbox_inches="tight", pad_inches=0.2)
    pyplot.close(figure)
    file.seek(0)
    return (image.imread(file)[..., :3] * 255).astype(np.uint8)
