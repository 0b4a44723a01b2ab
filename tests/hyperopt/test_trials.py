"""Trials and their ranking."""

from dataclasses import replace

import numpy as np
import pytest

from sparkkeras.hyperopt.trials import Trial, pareto_front, ranked


@pytest.mark.parametrize(("sign", "order", "front"), [(1.0, [3, 0, 4, 2], [3]), (-1.0, [2, 0, 4, 3], [2])])
def test_the_best_trial_ranks_first_and_ties_keep_their_order(sign, order, front):
    trials = of_values(0.0, None, 0.9, -0.1, 0.0)
    assert numbers(ranked(trials, sign)) == numbers(ranked(trials[::-1], sign)) == order
    assert numbers(pareto_front(trials, sign)) == front
    assert numbers(pareto_front([trials[4], trials[0], trials[1]], sign)) == [0, 4]
    assert ranked(trials[1:2], sign) == pareto_front(trials[1:2], sign) == []


def of_values(*values):
    """Trials with these values of one or several metrics; ``None`` has none."""
    given = [each if isinstance(each, tuple) else (each,) for each in values]
    return [Trial(number, {}, value=each[0], values=() if each[0] is None else each) for number, each in enumerate(given)]


def numbers(trials):
    return [trial.number for trial in trials]


def dominates(one, other, signs):
    mine, others = np.multiply(one.values, signs), np.multiply(other.values, signs)
    return np.all(mine <= others) and np.any(mine < others)


@pytest.mark.parametrize("signs", [(1.0, -1.0), (-1.0, 1.0, 1.0)])
def test_fronts_are_those_that_remain_when_the_fronts_before_are_removed(signs):
    points = np.random.default_rng(2).integers(0, 6, (60, len(signs))).astype(float)
    left, expected = of_values(*map(tuple, points.tolist())), []
    while left:
        front = [trial for trial in left if not any(dominates(other, trial, signs) for other in left)]
        front.sort(key=lambda trial: (signs[0] * trial.value, trial.number))
        assert pareto_front(left, *signs) == front
        expected += front
        left = [trial for trial in left if trial not in front]
    assert ranked(expected[::-1], *signs) == expected


def test_values_begin_with_the_value():
    single, several = Trial(0, {}, value=0.5), Trial(0, {}, value=0.5, values=[0.5, 2.0])
    assert (Trial(0, {}).values, single.values, several.values) == ((), (0.5,), (0.5, 2.0))
    assert (replace(several, ended=1.0).values, replace(several, value=None).values) == ((0.5, 2.0), ())
    assert replace(single, value=1.0).values == (1.0,)
    with pytest.raises(ValueError, match=r"value=1.0 is not"):
        replace(several, value=1.0)
