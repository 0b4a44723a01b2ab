"""The contestants of the benchmark `search_regret`: sparkkeras, hyperopt and Optuna, with the defaults of each library.

The spaces are written once, in sparkkeras's distributions, and converted here to what a user of hyperopt or Optuna writes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import hyperopt
import numpy as np
import optuna
from hyperopt import hp
from hyperopt.pyll import scope
from objectives import Objective

from sparkkeras.hyperopt import Search
from sparkkeras.hyperopt.distributions import Choice, Integer, LogUniform, Uniform
from sparkkeras.hyperopt.space import Parameter, labeled

Values = list[float]
"""The value of each trial, in the order of the trials."""


def with_search(objective: Objective, seed: int, trials: int, *, algo: str = "tpe", pending: int = 1) -> Values:
    """The values of the trials of sparkkeras's `Search`."""
    search = Search(objective.space, algo=algo, seed=seed)
    return _run(search.ask, lambda trial: objective.value(trial.params), search.tell, trials, pending)


def with_hyperopt(objective: Objective, seed: int, trials: int) -> Values:
    """The values of the trials of ``hyperopt.fmin``, with hyperopt's own distributions."""
    history = hyperopt.Trials()
    hyperopt.fmin(
        objective.value,
        _hyperopt_space(labeled(objective.space)),
        hyperopt.tpe.suggest,
        trials,
        trials=history,
        rstate=np.random.default_rng(seed),
        verbose=False,
        show_progressbar=False,
    )
    return history.losses()


def with_optuna(objective: Objective, seed: int, trials: int, *, pending: int = 1) -> Values:
    """The values of the trials of a study of Optuna with its default sampler."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
    space = labeled(objective.space)

    def ask() -> tuple[Any, Any]:
        trial = study.ask()
        return trial, _suggested(trial, space)  # now, not when its turn comes, when more results are known

    return _run(
        ask, lambda asked: objective.value(asked[1]), lambda asked, value: study.tell(asked[0], value), trials, pending
    )


CONTESTANTS: dict[str, Callable[[Objective, int, int], Values]] = {
    "random search": lambda *task: with_search(*task, algo="random"),
    "sparkkeras": with_search,
    "hyperopt": with_hyperopt,
    "Optuna": with_optuna,
    "sparkkeras, 2 pending": lambda *task: with_search(*task, pending=2),
    "Optuna, 2 pending": lambda *task: with_optuna(*task, pending=2),
}
"""Each runs a number of trials for a seed, with the defaults of its library except for what is named."""


def _run(
    ask: Callable[[], Any], value: Callable[[Any], float], tell: Callable[[Any, float], Any], trials: int, pending: int
) -> Values:
    """Ask for trials and tell their values, as workers do that take equally long: the oldest pending one ends first."""
    waiting = [ask() for _ in range(pending)]
    values: Values = []
    while waiting:
        trial = waiting.pop(0)
        values.append(value(trial))
        tell(trial, values[-1])
        if len(values) + len(waiting) < trials:
            waiting.append(ask())
    return values


def _hyperopt_space(node: Any) -> Any:
    """A space as a user of hyperopt writes it."""
    if not isinstance(node, Parameter):
        return {key: _hyperopt_space(item) for key, item in node.items()} if isinstance(node, dict) else node
    match node.distribution:
        case Choice(options):
            return hp.choice(node.label, [_hyperopt_space(option) for option in options])
        case Integer(low, high, 1, False):
            return hp.uniformint(node.label, low, high)
        case Integer(low, high, 1, True):
            return scope.int(hp.qloguniform(node.label, math.log(low), math.log(high), 1))
        case LogUniform(low, high):
            return hp.loguniform(node.label, math.log(low), math.log(high))
        case Uniform(low, high, None):
            return hp.uniform(node.label, low, high)
    raise NotImplementedError(node)


def _suggested(trial: Any, node: Any) -> Any:
    """The parameters of a trial of Optuna, as a user of Optuna writes them."""
    if not isinstance(node, Parameter):
        return {key: _suggested(trial, item) for key, item in node.items()} if isinstance(node, dict) else node
    match node.distribution:
        case Choice(options) if any(isinstance(option, dict) for option in options):
            return _suggested(trial, options[trial.suggest_categorical(node.label, range(len(options)))])
        case Choice(options):
            return trial.suggest_categorical(node.label, options)
        case Integer(low, high, 1, log):
            return trial.suggest_int(node.label, low, high, log=log)
        case LogUniform(low, high):
            return trial.suggest_float(node.label, low, high, log=True)
        case Uniform(low, high, None):
            return trial.suggest_float(node.label, low, high)
    raise NotImplementedError(node)
