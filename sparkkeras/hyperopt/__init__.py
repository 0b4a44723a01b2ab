"""Distributed hyper-parameter search.

::

    from sparkkeras.hyperopt import HyperParamModel, choice, loguniform

    search = HyperParamModel(sc, num_workers=4)
    space = {"units": choice(32, 64), "lr": loguniform(1e-4, 1e-1)}
    best = search.minimize(model=build, data=(x, y), space=space, max_evals=20)

Names are imported on first use, so that workers do not need the hyperopt library.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
from typing import Any

_STUB = ast.parse(pkgutil.get_data(__name__, "__init__.pyi") or "")
_IMPORTS = [each for each in _STUB.body if isinstance(each, ast.ImportFrom)]
_MODULES = {name.name: str(each.module).rpartition(".")[2] for each in _IMPORTS for name in each.names}
"""The modules of the public names, which `__getattr__` imports when they are first used."""

__all__ = sorted(_MODULES)


_OPTUNAS = {
    "Pruner": ("", "BasePruner"),
    "BracketPruner": ("", "BasePruner"),
    "MedianPruner": ("median", "MedianPruner"),
    "ASHAPruner": ("asha", "SuccessiveHalvingPruner"),
    "HyperbandPruner": ("hyperband", "HyperbandPruner"),
}
"""The names of former pruners: for each the name of Optuna's with the settings of a search, and its class."""


def __getattr__(name: str) -> Any:
    if name in _OPTUNAS:
        short, optunas = _OPTUNAS[name]
        instead = f'pruner="{short}", or an object of' if short else "a subclass of"
        raise ImportError(f"{name}: pruners are Optuna's: use {instead} optuna.pruners.{optunas}.")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"sparkkeras.hyperopt.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*(name for name in globals() if name.startswith("__")), *__all__])
