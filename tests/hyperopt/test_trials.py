"""What is known of a trial."""

import pickle

import pytest

from sparkkeras.hyperopt.trials import Trial, ranked


def valued(*values):
    return [Trial(number, {}, value=value) for number, value in enumerate(values)]


@pytest.mark.parametrize(
    ("sign", "order"), [(1.0, [3, 0, 4, 2]), (-1.0, [2, 0, 4, 3])], ids=["small is good", "large is good"]
)
def test_the_best_comes_first_and_of_equal_ones_the_earlier(sign, order):
    trials = valued(0.5, None, 0.9, -0.1, 0.5)
    assert [trial.number for trial in ranked(trials, sign)] == order
    assert [trial.number for trial in ranked(trials[::-1], sign)] == order


def test_zero_is_a_value():
    assert [trial.number for trial in ranked(valued(0.0, 1.0, -1.0), 1.0)] == [2, 0, 1]


def test_without_values_nobody_is_ranked():
    assert ranked(valued(None, None), 1.0) == ranked([], -1.0) == []


def test_epochs_are_those_that_were_reported():
    assert Trial(0, {}).epochs == 0
    assert Trial(0, {}, intermediate_values=(0.5, 0.4)).epochs == 2


def test_a_trial_travels_and_cannot_be_changed():
    trial = Trial(3, {"a": 1}, history={"loss": [0.5]}, extra={"b": "c"})
    assert pickle.loads(pickle.dumps(trial)) == trial
    with pytest.raises(AttributeError):
        trial.value = 0.0
