"""Forward selection on arrays, with results computed by hand."""

import numpy as np
import pytest

from sparkkeras.ensembles.selection import forward_selection


def distance(target):
    return lambda mean: float(np.abs(mean - target).sum())


def numbers(*values):
    return [np.array([value], np.float32) for value in values]


def test_each_step_selects_the_member_that_gives_the_best_mean():
    # The mean of 0, 0 and 3 is 1: the first is selected twice.
    assert sorted(forward_selection(numbers(0, 3), distance(1.0), 3)) == [0, 0, 1]
    # 6 is best alone; then (6 + 3)/2 = 4.5; then (6 + 3 + 6)/3 = 5.
    assert forward_selection(numbers(0, 3, 6), distance(5.0), 3) == [2, 1, 2]


def test_the_selection_starts_with_the_best_members_as_long_as_the_mean_improves():
    scored = []

    def score(mean):
        scored.append(float(mean[0]))
        return abs(scored[-1] - 10.0)

    # Individual errors: 4, 2, 1 and 9. The best two give 10.5; the third gives 11.67, so it and the rest do not start.
    assert forward_selection(numbers(14, 12, 9, 19), score, 3, initial=4) == [2, 1, 2]
    assert scored[:6] == [14.0, 12.0, 9.0, 19.0, 10.5, pytest.approx(35 / 3)]
    assert len(scored) == 4 + 2 + 4


def test_the_best_prefix_is_returned_and_of_equal_ones_the_longest():
    assert forward_selection(numbers(5, 100), distance(5.0), 4) == [0, 0, 0, 0]
    assert forward_selection(numbers(5, 5), distance(5.0), 2, initial=2) == [0, 1]
    # Two give a mean of exactly 2; a third makes it worse, a fourth restores it.
    assert len(forward_selection(numbers(1, 3), distance(2.0), 3)) == 2
    assert len(forward_selection(numbers(1, 3), distance(2.0), 4)) == 4


def test_the_result_is_never_worse_than_the_best_single_member():
    random = np.random.default_rng(0)
    for _ in range(20):
        values = random.normal(size=(6, 5))
        ballots, score = list(values.copy()), distance(random.normal(size=5))
        chosen = forward_selection(ballots, score, 8, initial=3)
        assert 1 <= len(chosen) <= 8
        assert score(np.mean([ballots[member] for member in chosen], axis=0)) <= min(map(score, ballots)) + 1e-12
        assert np.array_equal(ballots, values)


def test_members_without_a_finite_score_are_not_selected():
    assert set(forward_selection(numbers(np.nan, 1, np.inf), distance(1.0), 3, initial=3)) == {1}
    assert forward_selection(numbers(np.nan, 4, 1, 3), distance(2.9), 1, initial=5) == [3]
    assert forward_selection(numbers(np.nan, np.inf), distance(1.0), 3) == []
