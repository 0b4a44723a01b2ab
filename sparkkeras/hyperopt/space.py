"""The search space, and what to try next: the door to the hyperopt library.

What an algorithm chooses is a number for each label; what a trial gets is what the space makes of them. That may hold any
object of the person's, and nothing is pickled on the wire, so objects travel beforehand, with the task, and an assignment
names them by their place among these.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import hyperopt
import numpy as np
from hyperopt import anneal, base, exceptions, pyll, rand, tpe

from sparkkeras.errors import ConfigurationError, known_names
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
            self._domain = base.Domain(None, space, pass_expr_memo_ctrl=False)
        except exceptions.DuplicateLabel as error:
            raise ConfigurationError(
                f"space: the label {error} is used twice; give each hyper-parameter its own."
            ) from error
        except Exception as error:
            raise ConfigurationError(
                f"space={space!r} cannot be searched ({type(error).__name__}: {error}): expected hyperopt's, such as "
                '{"units": hp.choice("units", [32, 64]), "lr": hp.loguniform("lr", -7, -2)}.'
            ) from error
        if not self._domain.params:
            raise ConfigurationError(
                f"space={space!r} leaves nothing to choose: a list of values is hp.choice(label, values), a range is "
                "hp.uniform(label, low, high)."
            )
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

    @property
    def digest(self) -> str:
        """A digest of labels, ranges and options, the same in another process; objects count by their names."""
        told = re.sub(r" at 0x[0-9a-fA-F]+", "", str(self._domain.expr))
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
        docs = algorithm([number], self._domain, history_of(trials, sign), seed)
        if not docs:
            return None
        return {label: _plain(values[0]) for label, values in docs[0]["misc"]["vals"].items() if values}

    @cached_property
    def objects(self) -> list[Any]:
        """The person's objects in the space that JSON does not know, in a fixed order."""
        literals = (node.obj for node in pyll.dfs(self._domain.expr) if isinstance(node, pyll.base.Literal))
        found = {id(value): value for value in literals if not isinstance(value, (str, int, float, bool, type(None)))}
        return list(found.values())

    def encode(self, params: Any) -> Any:
        """What the space made of a choice, as JSON knows it; `decode` is the way back.

        Raises:
            ConfigurationError: There is something in it that JSON does not know and that is no option of the space.
        """
        value = _plain(params)
        if value is None or isinstance(value, (str, int, float)):
            return value
        if isinstance(value, Mapping):
            return {"dict": [[self.encode(key), self.encode(member)] for key, member in value.items()]}
        if type(value) in (list, tuple):
            return {type(value).__name__: [self.encode(member) for member in value]}
        for place, known in enumerate(self.objects):
            if known is value:
                return {"object": place}
        raise ConfigurationError(
            f"space: {value!r} ({type(value).__name__}) is computed within the space, and only numbers, texts, lists and "
            "dicts of them can be: compute it in the function that builds the model, or make it an option of hp.choice."
        )


def decode(encoded: Any, objects: Sequence[Any]) -> Any:
    """What `Space.encode` was given, where ``objects`` is `Space.objects`."""
    if not isinstance(encoded, Mapping):
        return encoded
    ((kind, members),) = encoded.items()
    if kind == "dict":
        return {decode(key, objects): decode(member, objects) for key, member in members}
    if kind == "object":
        return objects[members]
    decoded = [decode(member, objects) for member in members]
    return tuple(decoded) if kind == "tuple" else decoded


def history_of(trials: Sequence[Trial], sign: float) -> base.Trials:
    """Trials as hyperopt keeps them. Running ones have no loss, which its algorithms take for an infinite one."""
    docs = []
    for trial in trials:
        misc = {
            "tid": trial.number,
            "cmd": None,
            "workdir": None,
            "idxs": {label: [trial.number] for label in trial.chosen},
            "vals": {label: [value] for label, value in trial.chosen.items()},
        }
        (doc,) = base.Trials(refresh=False).new_trial_docs([trial.number], [None], [_result(trial, sign)], [misc])
        doc["state"] = base.JOB_STATE_RUNNING if trial.status == RUNNING else base.JOB_STATE_DONE
        docs.append(doc)
    labels = {label for doc in docs for label in doc["misc"]["vals"]}
    for doc in docs:
        for side in ("idxs", "vals"):
            doc["misc"][side] = {label: doc["misc"][side].get(label, []) for label in labels}
    return base.trials_from_docs(docs, validate=False)


def _result(trial: Trial, sign: float) -> dict[str, Any]:
    if trial.status == RUNNING:
        return {"status": base.STATUS_NEW}
    if trial.status == FAILED or trial.value is None:
        return {**trial.extra, "status": base.STATUS_FAIL}
    return {**trial.extra, "status": base.STATUS_OK, "loss": sign * trial.value}


def _plain(value: Any) -> Any:
    """NumPy's numbers as Python's."""
    if isinstance(value, np.generic):
        return value.item()
    return value


def is_finite(value: object) -> bool:
    """Whether it is a number that can be compared."""
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool) and math.isfinite(value)
