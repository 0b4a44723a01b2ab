"""The search space, and what to try next: the door to the hyperopt library.

What an algorithm chooses is a number for each label; what a trial gets is what the space makes of them.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import hyperopt
import numpy as np
from hyperopt import anneal, base, exceptions, pyll, rand, tpe

from sparkkeras.errors import ConfigurationError, known_names
from sparkkeras.hyperopt.encoding import PLAIN, encode
from sparkkeras.hyperopt.parameters import Parameter, parameters_of
from sparkkeras.hyperopt.trials import FAILED, RUNNING, Trial

Algorithm = Callable[..., Any]
Chosen = dict[str, Any]

ALGORITHMS: dict[str, Algorithm] = {"tpe": tpe.suggest, "random": rand.suggest, "anneal": anneal.suggest}
"""The search algorithms that have a name."""


def make_algorithm(given: object) -> Algorithm:
    """The algorithm of a name, or a suggest function of hyperopt's kind as it is.

    Raises:
        ConfigurationError: It is neither.
    """
    if isinstance(given, str) and given in ALGORITHMS:
        return ALGORITHMS[given]
    if callable(given) and not isinstance(given, type):
        return given
    raise ConfigurationError(
        f"algo={given!r} is not known. Give a name, or a function suggest(new_ids, domain, trials, seed) such as "
        f"hyperopt.tpe.suggest. {known_names(given, ALGORITHMS)}"
    )


class Space:
    """A search space of hyperopt's.

    Args:
        space: An expression of ``hyperopt.hp``, usually a dict of them.

    Raises:
        ConfigurationError: It is none, has nothing to choose, or cannot be sampled.
    """

    def __init__(self, space: Any) -> None:
        try:
            if not any(node.name == "hyperopt_param" for node in pyll.dfs(pyll.as_apply(space))):
                raise ConfigurationError(
                    f"space={space!r} leaves nothing to choose: a list of values is hp.choice(label, values), a range is "
                    "hp.uniform(label, low, high)."
                )
            self._domain = base.Domain(None, space, pass_expr_memo_ctrl=False)
        except ConfigurationError:
            raise
        except exceptions.DuplicateLabel as error:
            raise ConfigurationError(
                f"space: the label {error} is used twice; give each hyper-parameter its own."
            ) from error
        except Exception as error:
            raise ConfigurationError(
                f"space={space!r} cannot be searched ({type(error).__name__}: {error}): expected hyperopt's, such as "
                '{"units": hp.choice("units", [32, 64]), "lr": hp.loguniform("lr", -7, -2)}.'
            ) from error
        self._space = space
        try:
            sample = self.params(self.suggest(rand.suggest, 0, (), 0, 1.0) or {})
        except ConfigurationError:
            raise
        except Exception as error:
            raise ConfigurationError(f"space: it cannot be sampled: {type(error).__name__}: {error}") from error
        self.encode(sample)

    @property
    def labels(self) -> Mapping[str, str]:
        """The hyper-parameters: the kind of each, as hyperopt calls it (``uniform``, ``loguniform``, ``randint``, ...)."""
        return {label: node.name for label, node in self._domain.params.items()}

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """The hyper-parameters as people see them."""
        return parameters_of(self._space)

    @property
    def digest(self) -> str:
        """A digest of labels, ranges and options, the same in another process; objects count by their names."""
        told = re.sub(r" at 0x[0-9a-fA-F]+", "", repr([_told(node) for node in pyll.dfs(self._domain.expr)]))
        return hashlib.sha256(told.encode()).hexdigest()

    def params(self, chosen: Mapping[str, Any]) -> Any:
        """What the space makes of a choice."""
        return hyperopt.space_eval(self._space, dict(chosen))

    def suggest(self, algorithm: Algorithm, number: int, trials: Sequence[Trial], seed: int, sign: float) -> Chosen | None:
        """What to try next; ``None`` where the algorithm has nothing left.

        Args:
            algorithm: A suggest function of hyperopt's.
            number: The number of the new trial.
            trials: All others, finished and running.
            seed: The seed for this suggestion.
            sign: 1 where small values are good, -1 where large ones are.
        """
        docs = algorithm([number], self._domain, history_of(trials, sign, self.labels), seed)
        if not docs:
            return None
        return {label: _plain(values[0]) for label, values in docs[0]["misc"]["vals"].items() if values}

    @cached_property
    def objects(self) -> list[Any]:
        """The person's objects in the space that JSON does not know, in a fixed order."""
        literals = (node.obj for node in pyll.dfs(self._domain.expr) if isinstance(node, pyll.base.Literal))
        found = {id(value): value for value in literals if type(value) not in PLAIN}
        return list(found.values())

    def encode(self, params: Any) -> Any:
        """What the space made of a choice, as JSON knows it; `decode` is the way back.

        Raises:
            ConfigurationError: There is something in it that JSON does not know and that is no option of the space.
        """
        return encode(params, self.objects)


def history_of(trials: Sequence[Trial], sign: float, labels: Iterable[str]) -> base.Trials:
    """Trials as hyperopt keeps them. Running ones have no loss, which its algorithms take for an infinite one."""
    docs, labels = [], list(labels)
    for trial in trials:
        chosen = {label: [trial.chosen[label]] if label in trial.chosen else [] for label in labels}
        idxs = {label: [trial.number] * len(values) for label, values in chosen.items()}
        misc = {"tid": trial.number, "cmd": None, "workdir": None, "idxs": idxs, "vals": chosen}
        (doc,) = base.Trials(refresh=False).new_trial_docs([trial.number], [None], [_result(trial, sign)], [misc])
        doc["state"] = base.JOB_STATE_RUNNING if trial.status == RUNNING else base.JOB_STATE_DONE
        docs.append(doc)
    return base.trials_from_docs(docs, validate=False)


def _result(trial: Trial, sign: float) -> dict[str, Any]:
    if trial.status == RUNNING:
        return {"status": base.STATUS_NEW}
    if trial.status == FAILED or trial.value is None:
        return {**trial.extra, "status": base.STATUS_FAIL}
    return {**trial.extra, "status": base.STATUS_OK, "loss": sign * trial.value}


def _told(node: Any) -> Any:
    """A node of a space without those below it. A set is written in an order that is the same in each process."""
    if not isinstance(node, pyll.base.Literal):
        return node.name, len(node.pos_args), [name for name, _ in node.named_args]
    if hasattr(node.obj, "get_config") and not isinstance(
        node.obj, type
    ):  # a layer or the like, whose repr has a name that is another one each time
        return type(node.obj).__module__, type(node.obj).__qualname__
    return sorted(map(repr, node.obj)) if isinstance(node.obj, (set, frozenset)) else node.obj


def _plain(value: Any) -> Any:
    """NumPy's numbers as Python's."""
    if isinstance(value, np.generic):
        return value.item()
    return value


def is_finite(value: object) -> bool:
    """Whether it is a number that can be compared."""
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool) and math.isfinite(value)
