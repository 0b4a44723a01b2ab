"""The decisions of pruners, on given losses."""

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkkeras.errors import ConfigurationError, UnknownArgumentError
from sparkkeras.hyperopt.pruners import PRUNERS, ASHAPruner, MedianPruner, Pruner, make_pruner

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


# Both


@pytest.mark.parametrize("pruner", [MedianPruner(1, 1), ASHAPruner(2, 1)])
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
    assert set(PRUNERS) == {"median", "asha"}


def test_a_custom_pruner_is_accepted():
    class Patient:
        def should_prune(self, losses, others):
            return False

    custom = Patient()
    assert isinstance(custom, Pruner)
    assert make_pruner(custom) is custom


@pytest.mark.parametrize("given", ["medain", "", 3, str, object(), lambda losses, others: True, ["median"]])
def test_an_invalid_pruner_is_rejected(given):
    with pytest.raises(ConfigurationError, match="is not known. Give None, a name, or an object.*Known: 'asha', 'median'"):
        make_pruner(given)


def test_a_class_instead_of_an_instance_is_rejected():
    with pytest.raises(ConfigurationError, match=r"MedianPruner'> is a class; expected an instance: MedianPruner\(\)"):
        make_pruner(MedianPruner)


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
