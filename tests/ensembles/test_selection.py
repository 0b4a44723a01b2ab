"""Forward selection on arrays whose outcomes were computed by hand."""

import numpy as np
import pytest

from sparkkeras.ensembles.selection import forward_selection


def distance(target):
    return lambda mean: float(np.abs(mean - target).sum())


def numbers(*values):
    return [np.array([value], np.float32) for value in values]


def test_members_are_chosen_with_replacement():
    # The mean of 0, 0 and 3 is 1: the first is chosen twice.
    assert sorted(forward_selection(numbers(0, 3), distance(1.0), 3)) == [0, 0, 1]


def test_each_step_takes_what_makes_the_mean_best():
    # 6 is best alone; then (6 + 3)/2 = 4.5; then (6 + 3 + 6)/3 = 5.
    assert forward_selection(numbers(0, 3, 6), distance(5.0), 3) == [2, 1, 2]


def test_the_best_begin_in_their_order_as_long_as_none_hurts():
    seen = []

    def score(mean):
        seen.append(float(mean[0]))
        return abs(float(mean[0]) - 10.0)

    # Alone: 1, 2, 4, 9 off. The best two make 10.5, the third makes 11.67 and is not taken, nor is what comes after it.
    assert forward_selection(numbers(14, 12, 9, 19), score, 2, initial=4) == [2, 1]
    assert seen[:4] == [14.0, 12.0, 9.0, 19.0]
    assert seen[4:] == [10.5]
    seen.clear()
    forward_selection(numbers(14, 12, 9, 19), score, 3, initial=4)
    assert seen[4:6] == [10.5, pytest.approx(35 / 3)]
    assert len(seen) == 4 + 2 + 4


def test_the_best_stage_counts_and_of_equal_ones_the_last():
    assert forward_selection(numbers(5, 100), distance(5.0), 4) == [0, 0, 0, 0]
    assert forward_selection(numbers(5, 5), distance(5.0), 2, initial=2) == [0, 1]
    # Two make the mean exactly 2; a third can only spoil it, a fourth mends it.
    assert len(forward_selection(numbers(1, 3), distance(2.0), 3)) == 2
    assert len(forward_selection(numbers(1, 3), distance(2.0), 4)) == 4


def test_never_worse_than_the_best_alone():
    random = np.random.default_rng(0)
    for _ in range(20):
        ballots = list(random.normal(size=(6, 5)))
        score = distance(random.normal(size=5))
        chosen = forward_selection(ballots, score, 8, initial=3)
        assert 1 <= len(chosen) <= 8
        assert score(np.mean([ballots[member] for member in chosen], axis=0)) <= min(map(score, ballots)) + 1e-12


def test_one_is_the_best_one():
    assert forward_selection(numbers(4, 1, 3), distance(2.9), 1, initial=5) == [2]


def test_members_whose_score_is_not_finite_are_left_out():
    assert set(forward_selection(numbers(np.nan, 1, np.inf), distance(1.0), 3, initial=3)) == {1}
    assert forward_selection(numbers(np.nan, np.inf), distance(1.0), 3) == []


def test_the_given_arrays_stay_as_they_are():
    ballots = numbers(0, 3)
    forward_selection(ballots, distance(1.0), 5, initial=2)
    assert [array.tolist() for array in ballots] == [[0.0], [3.0]]
