"""Which members make the best ensemble, and how often each: arrays and scores only.

Caruana, Niculescu-Mizil, Crew, Ksikes: *Ensemble selection from libraries of models*, ICML 2004.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from sparkkeras.weights import Array

Score = Callable[[Array], float]
"""Measures how good the mean of some members' ballots is; less is better, and what is not finite is no good at all."""


def forward_selection(ballots: Sequence[Array], score: Score, size: int, initial: int = 1) -> list[int]:
    """Choose members one after the other, with replacement, each time the one that makes the mean the best.

    The best ``initial`` members come first, in the order of their own scores, for as long as none of them makes the mean
    worse (sorted initialization). Of all stages the best is taken, and of equal ones the last: more members vary less. The
    first stage is the best member alone, so the outcome is never worse than that.

    Args:
        ballots: What each member says; arrays of one shape.
        score: How good a mean of them is.
        size: At most so many are chosen; a member may be among them several times.
        initial: How many of the best ones may begin.

    Returns:
        The members in the order in which they were chosen; empty where no member's own score is finite.
    """
    alone = [_finite(score(ballot)) for ballot in ballots]
    ranked = [member for member in np.argsort(alone, kind="stable").tolist() if alone[member] < np.inf]
    if not ranked:
        return []
    chosen = ranked[:1]
    total = ballots[chosen[0]].astype(np.float64)
    best, best_size = alone[chosen[0]], 1

    def taken(member: int) -> float:
        return _finite(score((total + ballots[member]) / (len(chosen) + 1)))

    for member in ranked[1 : min(initial, size)]:
        found = taken(member)
        if found > best:
            break
        best, best_size = found, best_size + 1
        chosen.append(member)
        total += ballots[member]
    while len(chosen) < size:
        scores = [taken(member) for member in ranked]
        member = ranked[int(np.argmin(scores))]
        chosen.append(member)
        total += ballots[member]
        if min(scores) <= best:
            best, best_size = min(scores), len(chosen)
    return chosen[:best_size]


def _finite(score: float) -> float:
    return float(score) if np.isfinite(score) else float("inf")
