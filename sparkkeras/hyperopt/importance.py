"""The importance of hyper-parameters: how much of the differences between trials each of them explains alone.

The importance of a hyper-parameter is the share of the variance of the trials' ranks that groups of its values explain:
the options of a choice, or up to six ranges of a number with about the same number of trials each. The share is
``epsilon^2``, the correlation ratio without the part that groups of random values would explain::

    epsilon^2 = 1 - (SSE / (n - k)) / (SST / (n - 1))

with ``n`` trials in ``k`` groups, the sum of squares ``SSE`` within the groups and ``SST`` in total (Kelley, 1935, "An
unbiased correlation ratio measure"). It estimates the first-order Sobol index; negative estimates count as 0. Ranks instead
of values keep a few diverged trials from outweighing all others.

A hyper-parameter of an option is compared within the trials that have it, and its importance is scaled by their share of the
variance. Interactions count for no hyper-parameter, so the sum may be less than 1. It may also be more, since an algorithm
such as TPE chooses values that are correlated.

fANOVA would count interactions, but needs a random forest. PED-ANOVA needs more trials: with 40 random ones, noise got half
the importance of a hyper-parameter that explains 30 % of the variance.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sparkkeras.hyperopt.parameters import Parameter
from sparkkeras.hyperopt.space import is_finite
from sparkkeras.hyperopt.trials import Trial
from sparkkeras.weights import Array

MIN_TRIALS = 20
"""The number of trials with a value below which importances would be chance. Of 20 trials, noise has a mean importance of
0.04, and in one case of ten more than 0.15."""

_TRIALS_PER_RANGE, _MIN_RANGES, _MAX_RANGES = 8, 3, 6


def importances(trials: Sequence[Trial], parameters: Sequence[Parameter], metric: int = 0) -> dict[str, float]:
    """The importance of each hyper-parameter by its display name, the largest first; empty with too few trials.

    Args:
        trials: The trials; those without a value are left out.
        parameters: The hyper-parameters: ``Space.parameters``.
        metric: The index of the metric.
    """
    valued = [trial for trial in trials if trial.value is not None]
    if len(valued) < MIN_TRIALS:
        return {}
    ranks = _ranks([trial.values[metric] for trial in valued])
    total = _squares(ranks)
    found = {}
    for parameter in parameters:
        is_used = [parameter.is_used(trial.chosen) for trial in valued]
        own = ranks[is_used]
        groups = _groups(parameter, [trial for trial, used in zip(valued, is_used, strict=True) if used])
        found[parameter.name] = _explained_share(own, groups) * _squares(own) / total if total else 0.0
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _groups(parameter: Parameter, trials: Sequence[Trial]) -> Array:
    """The group of each trial, as a number."""
    values = [parameter.value(trial.chosen) for trial in trials]
    if parameter.options or not all(map(is_finite, values)):
        texts = [parameter.text(trial.chosen) for trial in trials]
        return np.unique(texts, return_inverse=True)[1]
    ranges = int(np.clip(len(values) // _TRIALS_PER_RANGE, _MIN_RANGES, _MAX_RANGES))
    bounds = np.quantile(values, np.arange(1, ranges) / ranges) if values else []
    return np.searchsorted(bounds, values, side="right")


def _explained_share(ranks: Array, groups: Array) -> float:
    """``epsilon^2`` of ranks in groups."""
    count, total = len(np.unique(groups)), _squares(ranks)
    if count < 2 or len(ranks) <= count or not total:
        return 0.0
    within = sum(_squares(ranks[groups == group]) for group in np.unique(groups))
    return max(0.0, 1 - within / (len(ranks) - count) / (total / (len(ranks) - 1)))


def _ranks(values: Sequence[float]) -> Array:
    """The ranks of values; equal ones have the same, the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    means: Array = np.cumsum(counts) - (counts + 1) / 2
    return means[inverse]


def _squares(values: Array) -> float:
    """The sum of the squared deviations from the mean."""
    return float(((values - values.mean()) ** 2).sum()) if len(values) else 0.0
