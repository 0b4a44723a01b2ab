"""Forward selection of ensemble members with replacement, on arrays and scores only.

Caruana, Niculescu-Mizil, Crew, Ksikes: *Ensemble selection from libraries of models*, ICML 2004.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from sparkkeras.weights import Array

Score = Callable[[Array], float]
"""Scores the mean of some members' ballots; lower is better, and a value that is not finite is the worst."""


def forward_selection(ballots: Sequence[Array], score: Score, size: int, initial: int = 1) -> list[int]:
    """Select members one by one, with replacement, each time the member that gives the best mean.

    The selection starts with up to ``initial`` members in the order of their individual scores, as long as none of them
    makes the mean worse (sorted initialization). The result is the best prefix of the selection, and of equally good ones
    the longest, since more members reduce the variance. The first prefix is the best single member, so the result is never
    worse than that.

    Args:
        ballots: The prediction or vote of each member; arrays of one shape.
        score: Scores a mean of ballots; lower is better.
        size: The maximum number of selections; a member can be selected several times.
        initial: The maximum number of members of the sorted initialization.

    Returns:
        The indices of the members in the order of selection; empty if no member's individual score is finite.
    """
    alone = [_finite(score(ballot)) for ballot in ballots]
    ranked = [member for member in np.argsort(alone, kind="stable").tolist() if alone[member] < np.inf]
    if not ranked:
        return []
    chosen = ranked[:1]
    total = ballots[chosen[0]].astype(np.float64)
    best, best_size = alone[chosen[0]], 1

    def score_with(member: int) -> float:
        return _finite(score((total + ballots[member]) / (len(chosen) + 1)))

    for member in ranked[1 : min(initial, size)]:
        found = score_with(member)
        if found > best:
            break
        best, best_size = found, best_size + 1
        chosen.append(member)
        total += ballots[member]
    while len(chosen) < size:
        scores = [score_with(member) for member in ranked]
        member = ranked[int(np.argmin(scores))]
        chosen.append(member)
        total += ballots[member]
        if min(scores) <= best:
            best, best_size = min(scores), len(chosen)
    return chosen[:best_size]


def _finite(score: float) -> float:
    return float(score) if np.isfinite(score) else float("inf")
