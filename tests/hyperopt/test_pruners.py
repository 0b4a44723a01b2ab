"""The decisions of pruners, on given losses."""

import pickle

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkkeras.errors import ConfigurationError, UnknownArgumentError
from sparkkeras.hyperopt import HyperParamModel, Search, SparkTrials, choice, report, uniform
from sparkkeras.hyperopt.pruners import (
    PRUNERS,
    ASHAPruner,
    BracketPruner,
    HyperbandPruner,
    MedianPruner,
    Pruner,
    make_pruner,
    should_prune,
)
from sparkkeras.hyperopt.workers import LocalWorkers


def linear(params):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


LOSSES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=8)


# The median stopping rule


@pytest.mark.parametrize(
    ("losses", "ends"),
    [([0.5, 0.31], True), ([0.5, 0.3], False), ([0.5, 0.29], False), ([0.1, 9.0], False), ([9.0, 9.0], True)],
)
def test_the_best_loss_is_compared_with_the_median_of_the_others(losses, ends):
    others = [[1.0, 0.1], [1.0, 0.2], [0.3, 7.0], [1.0, 0.4], [0.5, 0.5]]
    assert MedianPruner(startup_trials=5, grace_epochs=1).should_prune(losses, others) is ends


def test_only_losses_of_the_others_up_to_that_epoch_count():
    pruner = MedianPruner(startup_trials=1, grace_epochs=1)
    assert not pruner.should_prune([0.5], [[0.9, 0.0, 0.0]])
    assert pruner.should_prune([0.5, 0.5], [[0.9, 0.0, 0.0]])


def test_the_median_of_an_even_number_is_the_mean_of_two():
    pruner = MedianPruner(startup_trials=2, grace_epochs=1)
    assert pruner.should_prune([0.31], [[0.2], [0.4]])
    assert not pruner.should_prune([0.3], [[0.2], [0.4]])


def test_no_trial_is_pruned_before_startup_trials_have_reached_its_epoch():
    others = [[0.1, 0.1]] * 4 + [[0.1]] * 9
    assert not MedianPruner().should_prune([9.0, 9.0], others)
    assert MedianPruner().should_prune([9.0, 9.0], [*others, [0.1, 0.1, 0.1]])


def test_no_trial_is_pruned_within_the_grace_epochs():
    others = [[0.1] * 9] * 9
    ended = [MedianPruner(grace_epochs=4).should_prune([9.0] * epochs, others) for epochs in range(1, 7)]
    assert ended == [False, False, False, True, True, True]


# Asynchronous successive halving


@pytest.mark.parametrize(
    ("factor", "grace", "rungs"), [(2, 1, {1, 2, 4, 8, 16}), (3, 1, {1, 3, 9}), (3, 2, {2, 6, 18}), (4, 5, {5, 20})]
)
def test_trials_are_pruned_only_at_rungs(factor, grace, rungs):
    pruner = ASHAPruner(factor, grace)
    assert {epochs for epochs in range(1, 21) if pruner.should_prune([9.0] * epochs, [[0.1] * 20] * 5)} == rungs


@pytest.mark.parametrize(("others", "survivors"), [(1, 1), (2, 1), (5, 2), (6, 2), (8, 3), (9, 3)])
def test_the_best_fraction_survives_a_rung(others, survivors):
    """Of ``others + 1`` trials at a rung, the best third survives, and at least one."""
    losses = [[float(number)] for number in range(others + 1)]
    survives = [not ASHAPruner(3, 1).should_prune(each, [other for other in losses if other is not each]) for each in losses]
    assert survives == [rank < survivors for rank in range(others + 1)]


def test_the_first_trial_at_a_rung_survives():
    assert not ASHAPruner().should_prune([1e9], [])
    assert not ASHAPruner().should_prune([1e9, 1e9, 1e9], [[0.0], [0.0, 0.0]])


def test_the_best_losses_up_to_the_rung_are_compared():
    pruner = ASHAPruner(2, 2)
    assert not pruner.should_prune([0.2, 9.0], [[0.3, 0.3, 0.0]])
    assert pruner.should_prune([0.2, 9.0], [[0.3, 0.1, 9.0]])


def test_equal_trials_all_survive():
    assert not ASHAPruner(2, 1).should_prune([0.5], [[0.5]] * 9)


# Hyperband


@pytest.mark.parametrize(
    ("epochs", "factor", "first_rungs", "sizes"),
    [
        (81, 3, [1, 3, 9, 27, 81], [81, 34, 15, 8, 5]),  # Table 1 of the paper
        (27, 3, [1, 3, 9, 27], [27, 12, 6, 4]),
        (16, 4, [1, 4, 16], [16, 6, 3]),
        (20, 3, [2, 6, 20], [9, 5, 3]),
        (3, 3, [1, 3], [3, 2]),
    ],
)
def test_brackets_have_the_rungs_and_the_shares_of_the_paper(epochs, factor, first_rungs, sizes):
    pruner = HyperbandPruner(epochs, factor)
    assert [bracket.grace_epochs for bracket in pruner.brackets] == first_rungs
    assert {bracket.reduction_factor for bracket in pruner.brackets} == {factor}
    total = sum(sizes)
    for start in (0, 1000):
        numbers = [pruner.bracket_of(number) for number in range(start, start + total)]
        assert [numbers.count(bracket) for bracket in range(len(sizes))] == pytest.approx(sizes, abs=2)


def test_only_trials_of_the_same_bracket_are_compared():
    pruner = HyperbandPruner(9)
    by_bracket = {index: [n for n in range(60) if pruner.bracket_of(n) == index] for index in range(3)}
    number, *peers = by_bracket[0]
    good, bad = [0.1], [0.9]
    assert should_prune(pruner, number, bad, dict.fromkeys(peers, good))
    assert not should_prune(pruner, number, bad, dict.fromkeys(by_bracket[1] + by_bracket[2], good))
    assert not should_prune(pruner, by_bracket[1][0], bad, dict.fromkeys(by_bracket[1][1:], good))  # its first rung is 3
    assert should_prune(pruner, by_bracket[1][0], bad * 3, dict.fromkeys(by_bracket[1][1:], good * 3))
    assert not should_prune(pruner, by_bracket[2][0], bad * 8, dict.fromkeys(by_bracket[2][1:], good * 8))


def late_bloomer(x, epoch):
    """A synthetic learning curve: with a small ``x`` it falls at once and stays bad, with a large one it falls late, far."""
    return (1 - x) + x * max(0.0, 1.5 - epoch / 6)


def curves(pruner, count=60, epochs=27):
    """The best value of a search on learning curves, and the number of epochs that it has trained."""
    search = Search({"x": uniform(0, 1)}, algo="random", pruner=pruner, seed=3)
    for _ in range(count):
        trial = search.ask()
        for epoch in range(1, epochs + 1):
            if search.report(trial, late_bloomer(trial.params["x"], epoch)):
                break
        search.tell(trial)
    return search.best_value, sum(trial.epochs for trial in search.trials), search


def test_hyperband_finds_what_starts_slowly_with_fewer_epochs():
    everything, all_epochs, _ = curves(None)
    hyperband, epochs, search = curves(HyperbandPruner(27))
    asha, asha_epochs, _ = curves(ASHAPruner(grace_epochs=1))
    assert hyperband < everything + 0.1 < asha  # early losses mislead successive halving
    assert asha_epochs < epochs < 0.5 * all_epochs
    pruner = HyperbandPruner(27)
    for trial in search.trials:
        first_rung = pruner.brackets[pruner.bracket_of(trial.number)].grace_epochs
        assert trial.epochs >= first_rung
        assert trial.status == ("pruned" if trial.epochs < 27 else "ok")


def test_a_search_knows_its_epochs():
    assert make_pruner("hyperband", 27) == HyperbandPruner(27)
    assert make_pruner(HyperbandPruner(reduction_factor=2), 8) == HyperbandPruner(8, 2)
    assert make_pruner(HyperbandPruner(9), 9) == make_pruner(HyperbandPruner(9)) == HyperbandPruner(9)
    with pytest.raises(ConfigurationError, match=r"HyperbandPruner\(max_epochs=100\), but epochs=9: omit max_epochs"):
        make_pruner(HyperbandPruner(100), 9)


def test_the_epochs_of_a_search_may_be_a_hyper_parameter():
    arguments = {"data": (np.zeros((8, 1)), np.zeros(8)), "space": {"epochs": choice(3)}, "max_evals": 1, "verbose": 0}
    search = HyperParamModel(LocalWorkers())
    search.minimize(model=linear, validation_split=0.5, pruner=HyperbandPruner(3), **arguments)
    assert search.best_trial.epochs == 3
    with pytest.raises(ConfigurationError, match="which only the trials know"):
        search.minimize(model=linear, pruner="hyperband", **arguments)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Search({"x": uniform(0, 1)}, pruner="hyperband"),
        lambda: SparkTrials(pruner="hyperband"),
        lambda: HyperParamModel(LocalWorkers()).minimize(
            objective=lambda params: 0.0, space={"x": uniform(0, 1)}, max_evals=1, pruner=HyperbandPruner()
        ),
    ],
)
def test_a_loop_of_the_user_has_to_give_them(make):
    with pytest.raises(ConfigurationError, match=r"needs the number of epochs.*give HyperbandPruner\(max_epochs=\.\.\.\)"):
        make()


def test_too_few_epochs_for_brackets_are_rejected():
    with pytest.raises(ConfigurationError, match="epochs=2: Hyperband prunes no trial of fewer than reduction_factor=3"):
        make_pruner("hyperband", 2)
    with pytest.raises(ConfigurationError, match="max_epochs=2: expected a whole number of at least 3 or None"):
        HyperbandPruner(2)


def test_workers_prune_within_brackets():
    def objective(params):
        for epoch in range(1, 10):
            report(late_bloomer(params["x"], epoch))
        return late_bloomer(params["x"], 9)

    search = HyperParamModel(LocalWorkers())
    pruner = HyperbandPruner(9)
    search.minimize(objective=objective, space={"x": uniform(0, 1)}, max_evals=30, seed=1, verbose=0, pruner=pruner)
    epochs = [{trial.epochs for trial in search.trials if pruner.bracket_of(trial.number) == each} for each in range(3)]
    assert epochs[0] <= {1, 3, 9}
    assert 1 in epochs[0]
    assert epochs[1] <= {3, 9}
    assert epochs[2] == {9}


# All


@pytest.mark.parametrize("pruner", [MedianPruner(1, 1), ASHAPruner(2, 1), HyperbandPruner(27).brackets[0]])
class TestAny:
    @settings(deadline=None)
    @given(LOSSES, st.lists(LOSSES, max_size=8))
    def test_the_best_trial_is_never_pruned(self, pruner, losses, others):
        best = min([*losses, *(min(other) for other in others)])
        assert pruner.should_prune([*losses[:-1], best], others) is False

    @settings(deadline=None)
    @given(LOSSES, st.lists(LOSSES, max_size=8), st.randoms(use_true_random=False))
    def test_the_order_of_the_others_does_not_matter(self, pruner, losses, others, random):
        shuffled = random.sample(others, len(others))
        assert pruner.should_prune(losses, others) is pruner.should_prune(losses, shuffled)

    @settings(deadline=None)
    @given(LOSSES, st.lists(LOSSES, max_size=8), st.floats(0, 10))
    def test_a_better_trial_is_not_pruned_if_a_worse_one_survives(self, pruner, losses, others, better):
        if not pruner.should_prune(losses, others):
            assert not pruner.should_prune([loss - better for loss in losses], others)

    def test_it_can_be_pickled(self, pruner):
        assert pickle.loads(pickle.dumps(pruner)) == pruner


# Names and arguments


def test_pruners_by_name():
    assert make_pruner("median") == MedianPruner(startup_trials=5, grace_epochs=2)
    assert make_pruner("asha") == ASHAPruner(reduction_factor=3, grace_epochs=2)
    assert make_pruner(None) is None
    assert set(PRUNERS) == {"median", "asha", "hyperband"}


def test_a_custom_pruner_is_accepted():
    class Patient:
        def should_prune(self, losses, others):
            return False

    custom = Patient()
    assert isinstance(custom, Pruner)
    assert make_pruner(custom) is custom
    assert isinstance(HyperbandPruner(9), BracketPruner)


@pytest.mark.parametrize("given", ["medain", "", 3, str, object(), lambda losses, others: True, ["median"]])
def test_an_invalid_pruner_is_rejected(given):
    known = "is not known. Give None, a name, or an object.*Known: 'asha', 'hyperband', 'median'"
    with pytest.raises(ConfigurationError, match=known):
        make_pruner(given)


def test_a_class_instead_of_an_instance_is_rejected():
    with pytest.raises(ConfigurationError, match=r"MedianPruner'> is a class; expected an instance: MedianPruner\(\)"):
        make_pruner(MedianPruner)
    with pytest.raises(ConfigurationError, match=r"expected an instance: HyperbandPruner\(\)"):
        make_pruner(HyperbandPruner)


def test_a_similar_name_is_suggested():
    with pytest.raises(ConfigurationError, match="Did you mean 'median'"):
        make_pruner("Median")


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "3", None])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (MedianPruner, "startup_trials"),
        (MedianPruner, "grace_epochs"),
        (ASHAPruner, "reduction_factor"),
        (ASHAPruner, "grace_epochs"),
        (HyperbandPruner, "reduction_factor"),
    ],
)
def test_numbers_out_of_range_are_rejected(kind, name, value):
    with pytest.raises(ConfigurationError, match=f"{name}={value!r}: expected a"):
        kind(**{name: value})


def test_a_reduction_factor_of_one_is_rejected():
    with pytest.raises(ConfigurationError, match="reduction_factor=1: expected a whole number of at least 2"):
        ASHAPruner(reduction_factor=1)


def test_unknown_arguments_are_rejected():
    with pytest.raises(
        UnknownArgumentError, match="MedianPruner takes no argument 'startup'. .*Did you mean 'startup_trials'"
    ):
        MedianPruner(startup=3)
    with pytest.raises(UnknownArgumentError, match="ASHAPruner takes no argument 'grace'"):
        ASHAPruner(grace=3)
