"""`SparkTrials`: runs the trials of ``hyperopt.fmin`` with `HyperParamModel`."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import hyperopt
import numpy as np

from sparkkeras.arguments import known_arguments, optional_integer
from sparkkeras.errors import ConfigurationError
from sparkkeras.hyperopt.algorithms import make_pruner
from sparkkeras.hyperopt.expressions import history_of, value_of
from sparkkeras.hyperopt.journal import Journal
from sparkkeras.hyperopt.search import HyperParamModel
from sparkkeras.hyperopt.space import Space, evaluate


class SparkTrials(hyperopt.Trials):  # type: ignore[misc]
    """Replaces ``hyperopt.SparkTrials`` in ``hyperopt.fmin``: all trials run in one Spark job.

    A trial that raises an error does not end the search, as if ``fmin`` were called with ``catch_eval_exceptions``. Each
    call of ``fmin`` starts a new search, unless ``save_to`` names a folder to resume from.

    Args:
        parallelism: The number of trials that run at the same time; ``None`` uses all free task slots.
        timeout: The time limit in seconds, if ``fmin`` gets none.
        loss_threshold: The loss that ends the search, if ``fmin`` gets none.
        spark_session: The session; ``None`` uses the active one, or starts one on this machine.
        pruner: As in `HyperParamModel.minimize`, for objectives that call `report`.
        max_failures: As in `HyperParamModel.minimize`.
        save_to: As in `HyperParamModel.minimize`.
        keep_models: As in `HyperParamModel.minimize`, for objectives that return their model.
        custom_objects: As in `HyperParamModel`.
        safe_mode: As in `HyperParamModel`.

    Attributes:
        search: The `HyperParamModel` that runs the trials, with their histories, a plot, and the models; ``None`` in a
            pickled copy.

    Example::

        best = hyperopt.fmin(objective, space, algo=hyperopt.tpe.suggest, max_evals=50, trials=SparkTrials(parallelism=4))
    """

    @known_arguments
    def __init__(
        self,
        parallelism: int | None = None,
        timeout: float | None = None,
        loss_threshold: float | None = None,
        spark_session: Any = None,
        *,
        pruner: Any = None,
        max_failures: int | None = None,
        save_to: str | Path | None = None,
        keep_models: int | str = 10,
        custom_objects: Mapping[str, Any] | None = None,
        safe_mode: bool = True,
    ) -> None:
        super().__init__()
        optional_integer("parallelism", parallelism)
        make_pruner(pruner)
        self.search = HyperParamModel(spark_session, parallelism, custom_objects=custom_objects, safe_mode=safe_mode)
        self._minimize_arguments: dict[str, Any] = {
            "timeout": timeout,
            "loss_threshold": loss_threshold,
            "pruner": pruner,
            "max_failures": max_failures,
            "save_to": save_to,
            "keep_models": keep_models,
        }

    def fmin(
        self,
        fn: Callable[[Any], Any],
        space: Any,
        algo: Any,
        max_evals: int | None,
        timeout: float | None = None,
        loss_threshold: float | None = None,
        rstate: np.random.Generator | None = None,
        verbose: bool = True,
        return_argmin: bool = True,
        early_stop_fn: Callable[..., Any] | None = None,
        **ignored: Any,
    ) -> Any:
        """Run the search; ``hyperopt.fmin`` calls this with its arguments, of which ``ignored`` have no effect here."""

        def objective(params: Any) -> Any:  # fn may take more arguments, with defaults
            return fn(params)

        if ignored.get("trials_save_file"):
            raise ConfigurationError(
                "trials_save_file= works only with hyperopt.Trials: use SparkTrials(save_to=folder) instead."
            )
        fmin_limits = {"timeout": timeout, "loss_threshold": loss_threshold, "early_stop_fn": early_stop_fn}
        try:
            self.search.minimize(
                objective=objective,
                space=space,
                algo=_Drawing(algo, rstate) if rstate is not None and callable(algo) else algo,
                seed=self._seed(copy.deepcopy(rstate) if callable(algo) else rstate),
                max_evals=None if max_evals == sys.maxsize else max_evals,  # fmin replaces None by sys.maxsize
                verbose=1 if verbose else 0,
                **{**self._minimize_arguments, **{name: value for name, value in fmin_limits.items() if value is not None}},
            )
        finally:
            searched = Space(space)
            self._dynamic_trials = list(history_of(self.search.trials, 1.0, searched.parameters).trials)
            self.refresh()
        best = self.argmin
        return best if return_argmin else evaluate(searched.tree, lambda each: value_of(each, best[each.label]))

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the trials without the search, which belongs to this process."""
        return {**self.__dict__, "search": None}

    def _seed(self, rstate: np.random.Generator | None) -> int | None:
        """A seed drawn from the generator of ``fmin``; ``None`` for a resumed search, which keeps its seed."""
        folder = self._minimize_arguments["save_to"]
        is_resumed = folder is not None and Journal(str(folder), None).has_study
        return None if rstate is None or is_resumed else int(rstate.integers(2**31))


class _Drawing:
    """A suggest function whose seeds are drawn from the generator of ``fmin``, one for each trial, as ``fmin`` does."""

    def __init__(self, suggest: Callable[..., Any], generator: np.random.Generator) -> None:
        self.__wrapped__, self._generator = suggest, generator
        self._seeds: list[int] = []

    def __call__(self, new_ids: list[int], domain: Any, trials: Any, seed: int) -> Any:
        while len(self._seeds) <= new_ids[0]:
            self._seeds.append(int(self._generator.integers(2**31 - 1)))
        return self.__wrapped__(new_ids, domain, trials, self._seeds[new_ids[0]])
