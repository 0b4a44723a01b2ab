"""Distributed hyper-parameter search.

::

    from sparkkeras.hyperopt import HyperParamModel, choice, loguniform

    search = HyperParamModel(sc, num_workers=4)
    space = {"units": choice(32, 64), "lr": loguniform(1e-4, 1e-1)}
    best = search.minimize(model=build, data=(x, y), space=space, max_evals=20)

Names are imported on first use, so that workers do not need the hyperopt library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparkkeras.hyperopt.ask_tell import Search
    from sparkkeras.hyperopt.distributions import choice, integer, loguniform, normal, uniform
    from sparkkeras.hyperopt.hypermodel import HyperModel
    from sparkkeras.hyperopt.pruners import ASHAPruner, BracketPruner, HyperbandPruner, MedianPruner, Pruner
    from sparkkeras.hyperopt.reporting import ReportCallback, report
    from sparkkeras.hyperopt.search import HyperParamModel
    from sparkkeras.hyperopt.spark_trials import SparkTrials
    from sparkkeras.hyperopt.trials import Trial

__all__ = [
    "ASHAPruner",
    "BracketPruner",
    "HyperModel",
    "HyperParamModel",
    "HyperbandPruner",
    "MedianPruner",
    "Pruner",
    "ReportCallback",
    "Search",
    "SparkTrials",
    "Trial",
    "choice",
    "integer",
    "loguniform",
    "normal",
    "report",
    "uniform",
]

_MODULES = {
    "ASHAPruner": "pruners",
    "BracketPruner": "pruners",
    "HyperModel": "hypermodel",
    "HyperParamModel": "search",
    "HyperbandPruner": "pruners",
    "MedianPruner": "pruners",
    "Pruner": "pruners",
    "ReportCallback": "reporting",
    "Search": "ask_tell",
    "SparkTrials": "spark_trials",
    "Trial": "trials",
    "choice": "distributions",
    "integer": "distributions",
    "loguniform": "distributions",
    "normal": "distributions",
    "report": "reporting",
    "uniform": "distributions",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"sparkkeras.hyperopt.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*(name for name in globals() if name.startswith("__")), *__all__])
