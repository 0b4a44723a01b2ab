"""For those who call ``hyperopt.fmin``: its trials, run by a search of ours."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import hyperopt
import numpy as np

from sparkkeras.arguments import known_arguments, optional_number
from sparkkeras.errors import ConfigurationError
from sparkkeras.hyperopt.journal import Journal
from sparkkeras.hyperopt.pruners import Pruner, make_pruner
from sparkkeras.hyperopt.search import HyperParamModel
from sparkkeras.hyperopt.space import Space, history_of


class SparkTrials(hyperopt.Trials):  # type: ignore[misc]
    """Takes the place of ``hyperopt.SparkTrials`` in ``hyperopt.fmin``: all trials run in one Spark job.

    A trial that raises does not end the search, as if ``fmin`` were given ``catch_eval_exceptions``. ``fmin`` begins anew
    each time, unless ``save_to`` says where to go on.

    Args:
        parallelism: How many trials run at the same time; ``None``: as many as there are free slots.
        timeout: Seconds, where ``fmin`` does not say.
        loss_threshold: A loss that is good enough, where ``fmin`` does not say.
        spark_session: The session; ``None`` takes the active one, or starts one on this machine.
        pruner: As in `HyperParamModel.minimize`, for objectives that `report`.
        max_failures: Likewise.
        save_to: Likewise.
        keep_models: Likewise, for objectives that return their model.
        custom_objects: As of `HyperParamModel`.
        safe_mode: Likewise.

    Attributes:
        search: The `HyperParamModel` that runs the trials, with their histories, a plot, and the models; ``None`` in a copy
            that was pickled.

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
        pruner: str | Pruner | None = None,
        max_failures: int | None = None,
        save_to: str | Path | None = None,
        keep_models: int | str = 10,
        custom_objects: Mapping[str, Any] | None = None,
        safe_mode: bool = True,
    ) -> None:
        super().__init__()
        optional_number("parallelism", parallelism)
        make_pruner(pruner)
        self.search = HyperParamModel(spark_session, parallelism, custom_objects=custom_objects, safe_mode=safe_mode)
        self._given: dict[str, Any] = {
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
        **others: Any,
    ) -> Any:
        """What ``hyperopt.fmin`` calls, with its own arguments; ``others`` of them mean nothing here."""

        def objective(params: Any) -> Any:  # fn may take more arguments, with defaults
            return fn(params)

        if others.get("trials_save_file"):
            raise ConfigurationError("trials_save_file= is for hyperopt's own trials: give SparkTrials(save_to=folder).")
        own = {"timeout": timeout, "loss_threshold": loss_threshold, "early_stop_fn": early_stop_fn}
        try:
            self.search.minimize(
                objective=objective,
                space=space,
                algo=algo,
                max_evals=None if max_evals == sys.maxsize else max_evals,  # what fmin makes of None
                seed=self._seed(rstate),
                verbose=1 if verbose else 0,
                **{**self._given, **{name: value for name, value in own.items() if value is not None}},
            )
        finally:
            self._dynamic_trials = list(history_of(self.search.trials, 1.0, Space(space).labels).trials)
            self.refresh()
        return self.argmin if return_argmin else hyperopt.space_eval(space, self.argmin)

    def __getstate__(self) -> dict[str, Any]:
        """Trials can be pickled; the search stays where it is."""
        return {**self.__dict__, "search": None}

    def _seed(self, rstate: np.random.Generator | None) -> int | None:
        """A seed of the generator that ``fmin`` has, which may be new; where a search goes on, its own."""
        folder = self._given["save_to"]
        goes_on = folder is not None and bool(Journal(str(folder), None, 1.0).settings())
        return None if rstate is None or goes_on else int(rstate.integers(2**31))
