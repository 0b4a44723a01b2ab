"""Distributed hyper-parameter search.

::

    from hyperopt import hp
    from sparkkeras.hyperopt import HyperParamModel

    search = HyperParamModel(sc, num_workers=4)
    best = search.minimize(model=build, data=(x, y), space={"units": hp.choice("units", [32, 64])}, max_evals=20)

Names are imported on first use, so that workers do not need the hyperopt library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparkkeras.hyperopt.pruners import ASHAPruner, MedianPruner, Pruner
    from sparkkeras.hyperopt.reporting import ReportCallback, report
    from sparkkeras.hyperopt.search import HyperParamModel
    from sparkkeras.hyperopt.spark_trials import SparkTrials
    from sparkkeras.hyperopt.trials import Trial

__all__ = [
    "ASHAPruner",
    "HyperParamModel",
    "MedianPruner",
    "Pruner",
    "ReportCallback",
    "SparkTrials",
    "Trial",
    "report",
]

_MODULES = {
    "ASHAPruner": "pruners",
    "HyperParamModel": "search",
    "MedianPruner": "pruners",
    "Pruner": "pruners",
    "ReportCallback": "reporting",
    "SparkTrials": "spark_trials",
    "Trial": "trials",
    "report": "reporting",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"sparkkeras.hyperopt.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
