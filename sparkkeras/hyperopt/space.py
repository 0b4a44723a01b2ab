"""The search space, in terms of the hyperopt library.

An algorithm chooses a number for each label of a space; the space turns these numbers into the hyper-parameters of a trial.
"""

from __future__ import annotations

import hashlib
import math
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import hyperopt
import numpy as np
from hyperopt import base, exceptions, pyll, rand

from sparkkeras.errors import ConfigurationError, warn
from sparkkeras.hyperopt.distributions import Distribution, all_labeled, constant_lists, has_distributions, labeled
from sparkkeras.hyperopt.encoding import JSON_TYPES, encode
from sparkkeras.hyperopt.expressions import params_of, to_expression
from sparkkeras.hyperopt.parameters import Parameter, parameters_of
from sparkkeras.hyperopt.trials import FAILED, RUNNING, Trial

SuggestFunction = Callable[..., Any]
Chosen = dict[str, Any]


class Space:
    """A search space.

    Args:
        space: A structure, usually a dict, of distributions (`choice`, `uniform`, ...) or of ``hyperopt.hp`` expressions, or
            a single one.

    Attributes:
        labeled: The structure with `Labeled` distributions; ``None`` without any.

    Raises:
        ConfigurationError: ``space`` is not a search space, has no hyper-parameter, or cannot be sampled.
    """

    def __init__(self, space: Any) -> None:
        self.labeled = labeled(space) if has_distributions(space) else None
        self._space = space if self.labeled is None else to_expression(self.labeled)
        try:
            nodes = pyll.dfs(pyll.as_apply(self._space))
            if any(isinstance(node, pyll.base.Literal) and isinstance(node.obj, Distribution) for node in nodes):
                raise ConfigurationError(
                    "space: an expression of hyperopt holds a distribution of sparkkeras, which it cannot search: replace "
                    "hp.choice(label, options) by choice(*options)."
                )
            if not any(node.name == "hyperopt_param" for node in nodes):
                raise ConfigurationError(
                    f"space={reprlib.repr(space)} has no hyper-parameter to choose: write options as choice(32, 64), a "
                    "range as uniform(low, high), both from sparkkeras.hyperopt."
                )
            self._domain = base.Domain(None, self._space, pass_expr_memo_ctrl=False)
        except ConfigurationError:
            raise
        except exceptions.DuplicateLabel as error:
            raise ConfigurationError(
                f"space: the label {error} is used twice; give each hyper-parameter a unique label."
            ) from error
        except Exception as error:
            raise ConfigurationError(
                f"space={space!r} cannot be searched ({type(error).__name__}: {error}): expected a dict such as "
                '{"units": choice(32, 64), "lr": loguniform(1e-4, 1e-1)}.'
            ) from error
        try:
            sample = self.params(self.suggest(rand.suggest, 0, (), 0, 1.0) or {})
        except ConfigurationError:
            raise
        except Exception as error:
            raise ConfigurationError(f"space={space!r} cannot be sampled ({type(error).__name__}: {error}).") from error
        self.encode(sample)
        if self.labeled is not None:
            _warn_of_lists(self.labeled)

    @property
    def labels(self) -> Mapping[str, str]:
        """The distribution of each hyper-parameter, by label, in hyperopt's terms (``uniform``, ``randint``, ...)."""
        return {label: node.name for label, node in self._domain.params.items()}

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """The hyper-parameters with their display names."""
        return parameters_of(self._space, all_labeled(self.labeled))

    @property
    def digest(self) -> str:
        """A digest of labels, ranges and options, equal in every process; objects are identified by their names."""
        nodes = re.sub(r" at 0x[0-9a-fA-F]+", "", repr([_node_key(node) for node in pyll.dfs(self._domain.expr)]))
        return hashlib.sha256(nodes.encode()).hexdigest()

    def params(self, chosen: Mapping[str, Any]) -> Any:
        """The hyper-parameters of a trial, in the structure of the space, for the values chosen for the labels."""
        if self.labeled is not None:
            return params_of(self.labeled, chosen)
        return hyperopt.space_eval(self._space, dict(chosen))

    def suggest(
        self, function: SuggestFunction, number: int, trials: Sequence[Trial], seed: int, sign: float
    ) -> Chosen | None:
        """The values of the next trial by label; ``None`` if the algorithm has no more suggestions.

        Args:
            function: A suggest function of hyperopt.
            number: The number of the new trial.
            trials: All other trials, finished and running.
            seed: The seed for this suggestion.
            sign: 1 if smaller values are better, -1 if larger ones are.
        """
        docs = function([number], self._domain, history_of(trials, sign, self.labels), seed)
        if not docs:
            return None
        return {label: _plain(values[0]) for label, values in docs[0]["misc"]["vals"].items() if values}

    @cached_property
    def objects(self) -> list[Any]:
        """The user's objects in the space that JSON cannot represent, in a fixed order."""
        literals = (node.obj for node in pyll.dfs(self._domain.expr) if isinstance(node, pyll.base.Literal))
        by_id = {id(value): value for value in literals if type(value) not in JSON_TYPES}
        return list(by_id.values())

    def encode(self, params: Any) -> Any:
        """Encode the hyper-parameters of a trial as JSON values; `decode` is the inverse.

        Raises:
            ConfigurationError: ``params`` holds an object that JSON cannot represent and that is not an option of the space.
        """
        return encode(params, self.objects)


def _warn_of_lists(space: Any) -> None:
    for name, values in constant_lists(space):
        shown = reprlib.repr(values)
        items = "*items" if "..." in shown else shown[1:-1]
        warn(
            f"space: {name!r} is the list {shown}, which is a constant: every trial gets all of it. To choose one of its "
            f"items, write choice({items}); for a constant, write a tuple, which gives no warning."
        )


def history_of(trials: Sequence[Trial], sign: float, labels: Iterable[str]) -> base.Trials:
    """Convert trials to ``hyperopt.Trials``. Running ones have no loss; hyperopt's algorithms treat this as infinite."""
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


def _node_key(node: Any) -> Any:
    """What identifies a node of a space, without its inputs. Sets are sorted: their order differs between processes."""
    if not isinstance(node, pyll.base.Literal):
        return node.name, len(node.pos_args), [name for name, _ in node.named_args]
    if hasattr(node.obj, "get_config") and not isinstance(node.obj, type):  # Keras numbers layer names, so reprs differ
        return type(node.obj).__module__, type(node.obj).__qualname__
    return sorted(map(repr, node.obj)) if isinstance(node.obj, (set, frozenset)) else node.obj


def _plain(value: Any) -> Any:
    """Convert a NumPy scalar to a Python number."""
    if isinstance(value, np.generic):
        return value.item()
    return value


def is_finite(value: object) -> bool:
    """Whether ``value`` is a finite number; booleans do not count as numbers."""
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool) and math.isfinite(value)
