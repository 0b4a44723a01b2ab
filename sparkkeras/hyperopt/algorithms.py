"""What users choose of Optuna and hyperopt for a search, by name or as objects: algorithms, pruners and storages."""

from __future__ import annotations

import copy
import functools
import importlib.util
import re
from collections.abc import Callable
from typing import Any

from optuna.pruners import (
    BasePruner,
    HyperbandPruner,
    MedianPruner,
    PatientPruner,
    PercentilePruner,
    SuccessiveHalvingPruner,
)
from optuna.samplers import BaseSampler, CmaEsSampler, GPSampler, NSGAIISampler, RandomSampler, TPESampler
from optuna.storages import BaseStorage, RDBStorage

from sparkkeras.errors import ConfigurationError, known_names
from sparkkeras.hyperopt.space import Space
from sparkkeras.hyperopt.study import MakeSampler, SearchStudy, quiet
from sparkkeras.hyperopt.trials import Metrics

SAMPLERS: dict[str, MakeSampler] = {
    "tpe": lambda seed: TPESampler(multivariate=True, group=True, constant_liar=True, seed=seed),
    "random": lambda seed: RandomSampler(seed),
    "cmaes": lambda seed: CmaEsSampler(seed=seed, warn_independent_sampling=False),
    "gp": lambda seed: GPSampler(seed=seed, warn_independent_sampling=False),
    "nsgaii": lambda seed: NSGAIISampler(seed=seed),
}
"""Optuna's samplers by name, with the settings of a search."""

_FUNCTIONS = ("anneal", "atpe")
"""Hyperopt's algorithms by name."""

_PACKAGES = {
    "cmaes": {"cmaes": "cmaes"},
    "gp": {"scipy": "scipy", "torch": "torch"},
    "atpe": {"lightgbm": "lightgbm", "sklearn": "scikit-learn"},
}
"""The modules that algorithms need, and the packages that have them."""

_WARM_UP = {"n_startup_trials": 5, "n_warmup_steps": 2}

PRUNERS: dict[str, Callable[[int | None], BasePruner]] = {
    "median": lambda epochs: MedianPruner(**_WARM_UP),
    "percentile": lambda epochs: PercentilePruner(25.0, **_WARM_UP),
    "asha": lambda epochs: SuccessiveHalvingPruner(min_resource=2, reduction_factor=3),
    "hyperband": lambda epochs: HyperbandPruner(max_resource=epochs or "auto", reduction_factor=3),
    "patient": lambda epochs: PatientPruner(MedianPruner(**_WARM_UP), patience=3),
}
"""Optuna's pruners by name, for the number of epochs of a trial, if it is known. A step is an epoch, counted from 1."""


def make_algorithm(given: object, space: Space, metrics: Metrics) -> tuple[Any, str]:
    """Look up an algorithm by name, or adapt a sampler of Optuna or a suggest function of hyperopt.

    Returns:
        The algorithm of a `SearchStudy`, and its name for display.

    Raises:
        ConfigurationError: It is unknown, needs a package that is not installed, or does not support the space or several
            metrics.
    """
    name, algorithm = _made(given, space, metrics)
    by_name = given if isinstance(given, str) else ""
    needed = _PACKAGES.get(by_name, {}).items()
    missing = [package for module, package in needed if importlib.util.find_spec(module) is None]
    if missing:
        raise ConfigurationError(f"algo={by_name!r} needs {' and '.join(missing)}: pip install {' '.join(missing)}.")
    try:
        if by_name in SAMPLERS or isinstance(algorithm, BaseSampler):
            SearchStudy(space, metrics, copy.deepcopy(algorithm), 0).ask(())
    except ValueError as error:
        raise ConfigurationError(f"algo={name} cannot search this ({error}) Give another sampler, such as 'tpe'.") from error
    except Exception:  # it cannot be copied, or has a fault: its first trial will show the error
        pass
    return algorithm, name


def _made(given: object, space: Space, metrics: Metrics) -> tuple[str, Any]:
    if isinstance(given, str) and given in SAMPLERS:
        return given, SAMPLERS[given]
    if isinstance(given, BaseSampler):
        return type(given).__name__, given
    function: Any = given
    if isinstance(given, str) and given in _FUNCTIONS:
        function = importlib.import_module(f"hyperopt.{given}").suggest
    if callable(function) and not isinstance(function, type):
        from sparkkeras.hyperopt.expressions import Suggester

        name = given if isinstance(given, str) else _name_of(function)
        if len(metrics) > 1:
            raise ConfigurationError(
                f"algo={name!r} searches a single metric, and metric= names {len(metrics)}: use 'tpe', "
                "'nsgaii', 'gp', or another sampler of Optuna."
            )
        return name, Suggester(function, space, next(iter(metrics.values())))
    if isinstance(given, type) and issubclass(given, BaseSampler):
        raise ConfigurationError(f"algo={given.__name__} is a class; expected an object: {given.__name__}().")
    raise ConfigurationError(
        f"algo={given!r} is not known. Give a name; a sampler of Optuna, such as optuna.samplers.QMCSampler(); or a "
        "function suggest(new_ids, domain, trials, seed), such as hyperopt.tpe.suggest. "
        f"{known_names(given, [*SAMPLERS, *_FUNCTIONS])}"
    )


def _name_of(function: Any) -> str:
    """The name of a suggest function, with the settings that the user has given it."""
    settings, function = "", getattr(function, "__wrapped__", function)
    if isinstance(function, functools.partial):
        settings = f"({', '.join(f'{name}={value!r}' for name, value in function.keywords.items())})"
        function = function.func
    module = str(getattr(function, "__module__", "")).rpartition(".")[2]
    name = str(getattr(function, "__name__", repr(function)))
    return f"{module}.{name}{settings}" if name == "suggest" else f"{name}{settings}"


def make_pruner(given: object, epochs: int | None = None) -> BasePruner | None:
    """Look up a pruner by name, or return a given pruner or ``None``.

    Args:
        given: A name, a pruner or ``None``.
        epochs: The number of epochs of a trial that is not pruned; ``None`` if only the trials know it.

    Raises:
        ConfigurationError: ``given`` is neither a known name nor a pruner.
    """
    if given is None or isinstance(given, BasePruner):
        return given
    if isinstance(given, str) and given in PRUNERS:
        with quiet():
            return PRUNERS[given](epochs)
    if isinstance(given, type) and issubclass(given, BasePruner):
        raise ConfigurationError(f"pruner={given.__name__} is a class; expected an object: {given.__name__}().")
    raise ConfigurationError(
        f"pruner={given!r} is not known. Give None, a name, or a pruner of Optuna, such as "
        f"optuna.pruners.MedianPruner(). {known_names(given, PRUNERS)}"
    )


def make_storage(given: object) -> BaseStorage | None:
    """The storage of a user, or the one of a URL.

    Raises:
        ConfigurationError: ``given`` is neither, or cannot be opened.
    """
    if given is None or isinstance(given, BaseStorage):
        return given
    if not isinstance(given, str):
        raise ConfigurationError(f"storage={given!r}: expected a storage of Optuna, or the URL of a database.")
    try:
        return RDBStorage(given)
    except Exception as error:
        shown = re.sub(r"://[^/]*@", "://...@", given)  # without a password
        raise ConfigurationError(
            f"storage={shown!r} cannot be opened ({type(error).__name__}: {error}): expected the URL of a database, such as "
            "'sqlite:///search.db'."
        ) from error
