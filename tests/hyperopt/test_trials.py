"""Trials and their ranking."""

import pickle
from dataclasses import replace

import numpy as np
import pytest

from sparkkeras.hyperopt.trials import Trial, pareto_front, ranked


def valued(*values):
    return [Trial(number, {}, value=value) for number, value in enumerate(values)]


@pytest.mark.parametrize(("sign", "order"), [(1.0, [3, 0, 4, 2]), (-1.0, [2, 0, 4, 3])], ids=["minimize", "maximize"])
def test_the_best_trial_ranks_first_and_ties_keep_their_order(sign, order):
    trials = valued(0.0, None, 0.9, -0.1, 0.0)
    assert [trial.number for trial in ranked(trials, sign)] == order
    assert [trial.number for trial in ranked(trials[::-1], sign)] == order
    assert ranked(valued(None), sign) == []


def of_values(*values):
    return [Trial(number, {}, value=each[0], values=each) for number, each in enumerate(values)]


def numbers(trials):
    return [trial.number for trial in trials]


def test_the_pareto_front_has_the_trials_that_no_other_one_dominates():
    trials = of_values((1, 5), (2, 2), (2, 3), (3, 2), (0.5, 9), (5, 1), (2, 2), (6, 6))
    assert numbers(pareto_front(trials, 1.0, 1.0)) == [4, 0, 1, 6, 5]
    assert numbers(ranked(trials, 1.0, 1.0)) == [4, 0, 1, 6, 5, 2, 3, 7]

    assert numbers(pareto_front(trials, 1.0, -1.0)) == [4]
    assert numbers(pareto_front(trials, -1.0, 1.0)) == [7, 5]
    assert pareto_front([Trial(0, {})], 1.0, 1.0) == pareto_front([], 1.0, 1.0) == []


def test_the_pareto_front_of_a_single_metric_has_the_best_trials():
    assert numbers(pareto_front(valued(0.5, None, 0.25, 0.25, 0.75), 1.0)) == [2, 3]
    assert numbers(pareto_front(valued(0.5, None, 0.25, 0.25, 0.75), -1.0)) == [4]


@pytest.mark.parametrize("count", [2, 3])
def test_fronts_are_those_that_remain_when_the_fronts_before_are_removed(count):
    points = np.random.default_rng(count).integers(0, 6, (60, count)).astype(float)
    left, expected = of_values(*map(tuple, points.tolist())), []
    while left:
        front = [
            trial
            for trial in left
            if not any(np.all(np.less_equal(o.values, trial.values)) and o.values != trial.values for o in left)
        ]
        assert pareto_front(left, *[1.0] * count) == sorted(front, key=lambda trial: (trial.value, trial.number))
        expected += sorted(front, key=lambda trial: (trial.value, trial.number))
        left = [trial for trial in left if trial not in front]
    assert ranked(expected[::-1], *[1.0] * count) == expected


def test_values_begin_with_the_value():
    assert (Trial(0, {}).values, Trial(0, {}, value=0.5).values) == ((), (0.5,))
    trial = Trial(0, {}, value=0.5, values=[0.5, 2.0])
    assert trial.values == replace(trial, ended=1.0).values == (0.5, 2.0)
    assert (replace(trial, value=None).values, replace(Trial(0, {}, value=0.5), value=1.0).values) == ((), (1.0,))
    with pytest.raises(ValueError, match=r"value=1.0 is not the first of values=\(0.5, 2.0\)"):
        replace(trial, value=1.0)


def test_a_trial_can_be_pickled_and_is_immutable():
    trial = Trial(3, {"a": 1}, history={"loss": [0.5]}, extra={"b": "c"})
    assert pickle.loads(pickle.dumps(trial)) == trial
    with pytest.raises(AttributeError):
        trial.value = 0.0
