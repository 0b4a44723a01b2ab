"""Draws a search as one picture: Optuna's charts of its study, one above the other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import optuna

from sparkkeras.errors import ConfigurationError
from sparkkeras.hyperopt.study import quiet, target
from sparkkeras.hyperopt.trials import Metrics
from sparkkeras.weights import Array

_WIDTH, _HEIGHT = 12.0, 4.5
"""The size of a chart in inches, at least."""


def plot_study(study: optuna.Study, path: str | Path, metrics: Metrics) -> None:
    """Write a PNG: the values over time (of several metrics, the Pareto front), the importances, and the hyper-parameters.

    Args:
        study: The study; at least one trial has a value.
        path: The local path of the file; it must end in ``.png``.
        metrics: The metrics.

    Raises:
        ConfigurationError: The path ends in something else, or matplotlib is not installed.
    """
    if not str(path).endswith(".png"):
        raise ConfigurationError(f"path={str(path)!r}: expected the path of a PNG file, which ends in .png.")
    try:
        import matplotlib.image
        from matplotlib import interactive, is_interactive, rc_context
    except ImportError as error:
        raise ConfigurationError("plot needs matplotlib: pip install matplotlib.") from error
    was_interactive = is_interactive()
    interactive(False)  # opens no window
    try:
        with rc_context(), quiet():
            pictures = [_picture(axes) for axes in _charts(study, metrics)]
    finally:
        interactive(was_interactive)
    width = max(picture.shape[1] for picture in pictures)
    padded = [np.pad(each, ((0, 0), (0, width - each.shape[1]), (0, 0)), constant_values=255) for each in pictures]
    matplotlib.image.imsave(path, np.concatenate(padded))


def _charts(study: optuna.Study, metrics: Metrics) -> Iterator[Any]:
    """Draw the charts; yields the axes of each."""
    from optuna.visualization import matplotlib as charts

    name, *others = metrics
    of_first: dict[str, Any] = {"target_name": name, **({"target": lambda trial: trial.values[0]} if others else {})}
    if others:
        yield charts.plot_pareto_front(study, target_names=[name, *others])
    yield charts.plot_optimization_history(study, **of_first)
    if len({trial.values[0] for trial in study.trials if trial.values}) > 1:
        yield charts.plot_param_importances(study, target=target(metrics, 0), target_name=name)
        if len({label for trial in study.trials for label in trial.params}) > 1:
            yield charts.plot_parallel_coordinate(study, **of_first)
    yield charts.plot_slice(study, **of_first)


def _picture(axes: Any) -> Array:
    """The pixels of the figure of some axes, which is closed."""
    from matplotlib import pyplot
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = np.ravel(axes)[0].figure
    figure.set_size_inches(max(_WIDTH, figure.get_size_inches()[0]), _HEIGHT)
    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    pyplot.close(figure)
    return np.asarray(canvas.buffer_rgba())[..., :3]
