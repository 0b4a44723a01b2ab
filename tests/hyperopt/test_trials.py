"""Trials and their ranking."""

import pickle

import pytest

from sparkkeras.hyperopt.trials import Trial, ranked


def valued(*values):
    return [Trial(number, {}, value=value) for number, value in enumerate(values)]


@pytest.mark.parametrize(("sign", "order"), [(1.0, [3, 0, 4, 2]), (-1.0, [2, 0, 4, 3])], ids=["minimize", "maximize"])
def test_the_best_trial_ranks_first_and_ties_keep_their_order(sign, order):
    trials = valued(0.5, None, 0.9, -0.1, 0.5)
    assert [trial.number for trial in ranked(trials, sign)] == order
    assert [trial.number for trial in ranked(trials[::-1], sign)] == order


def test_zero_counts_as_a_value():
    assert [trial.number for trial in ranked(valued(0.0, 1.0, -1.0), 1.0)] == [2, 0, 1]


def test_trials_without_a_value_are_not_ranked():
    assert ranked(valued(None, None), 1.0) == ranked([], -1.0) == []


def test_epochs_counts_reported_epochs():
    assert Trial(0, {}).epochs == 0
    assert Trial(0, {}, intermediate_values=(0.5, 0.4)).epochs == 2


def test_a_trial_can_be_pickled_and_is_immutable():
    trial = Trial(3, {"a": 1}, history={"loss": [0.5]}, extra={"b": "c"})
    assert pickle.loads(pickle.dumps(trial)) == trial
    with pytest.raises(AttributeError):
        trial.value = 0.0
