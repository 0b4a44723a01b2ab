"""Votes counted by hand, and the layer that counts them."""

import keras
import numpy as np
import pytest

from sparkkeras.modeling.voting import Vote, ballot, decided

pytestmark = pytest.mark.core


def numpy(tensor):
    return np.asarray(keras.ops.convert_to_numpy(tensor))


def vote(predictions, shares=None, **options):
    arrays = [np.array(prediction, np.float32) for prediction in predictions]
    shares = shares or [1 / len(arrays)] * len(arrays)
    return numpy(Vote(shares, **options)([keras.ops.convert_to_tensor(array) for array in arrays]))


def test_soft_votes_are_the_weighted_mean():
    found = vote([[[0.2, 0.8]], [[0.6, 0.4]]], [0.75, 0.25])
    assert found == pytest.approx(np.array([[0.3, 0.7]]))


def test_the_mean_of_equal_predictions_is_exact():
    prediction = np.random.default_rng(0).random((50, 3), np.float32)
    assert np.array_equal(vote([prediction] * 7), prediction)


def test_a_majority_beats_a_confident_minority():
    members = [[[0.0, 1.0, 0.0]], [[0.51, 0.49, 0.0]], [[0.51, 0.49, 0.0]]]
    assert vote(members).argmax() == 1
    assert vote(members, majority=True).tolist() == [[1.0, 0.0, 0.0]]


def test_very_negative_outputs_are_voted_on_like_others():
    assert vote([[[-5.0, -2.0, -3.0]]] * 2, majority=True).tolist() == [[0.0, 1.0, 0.0]]


def test_votes_are_weighted():
    members = [[[0.9, 0.1]], [[0.2, 0.8]], [[0.2, 0.8]]]
    assert vote(members, [0.5, 0.2, 0.3 - 1e-3], majority=True).tolist() == [[1.0, 0.0]]
    assert vote(members, [0.4, 0.3, 0.3], majority=True).tolist() == [[0.0, 1.0]]


def test_the_mean_breaks_ties_only():
    # Classes 0 and 1 have a vote each, of 2; class 2 has the largest mean but no vote.
    members = [[[0.42, 0.18, 0.4]], [[0.05, 0.5, 0.45]]]
    assert vote(members).argmax() == 2
    assert vote(members, majority=True).tolist() == [[0.0, 1.0, 0.0]]


def test_a_tie_of_rounded_weights_is_a_tie():
    # 5 + 4 + 5 against 6 + 8, computed as 0.49999997 and 0.5; the mean prefers class 0.
    members = [[[0.9, 0.1]]] * 3 + [[[0.4, 0.6]]] * 2
    shares = [weight / 28 for weight in (5, 4, 5, 6, 8)]
    assert vote(members, shares, majority=True).tolist() == [[1.0, 0.0]]


def test_a_full_tie_is_won_by_the_first_class():
    assert vote([[[0.7, 0.3]], [[0.3, 0.7]]], majority=True).tolist() == [[1.0, 0.0]]


def test_single_units_vote_yes_above_0_5():
    members = [[[0.51], [0.9], [0.4], [0.5]], [[0.51], [0.4], [0.4], [0.5]], [[0.0], [0.4], [0.9], [0.5]]]
    assert vote(members, majority=True, exclusive=False).tolist() == [[1.0], [0.0], [0.0], [0.0]]
    tied = [[[0.6], [0.9]], [[0.1], [0.4]]]
    assert vote(tied, majority=True, exclusive=False).tolist() == [[0.0], [1.0]]


def test_multilabel_values_are_voted_on_separately():
    members = [[[0.9, 0.8]], [[0.6, 0.7]], [[0.1, 0.9]]]
    assert vote(members, majority=True, exclusive=False).tolist() == [[1.0, 1.0]]


def test_ballots():
    assert numpy(ballot(np.array([[0.2, 0.8], [0.9, 0.1]], np.float32), True)).tolist() == [[0, 1], [1, 0]]
    assert numpy(ballot(np.array([[0.2], [0.6]], np.float32), False)).tolist() == [[0], [1]]
    votes, mean = keras.ops.convert_to_tensor([[0.5, 0.5]]), keras.ops.convert_to_tensor([[0.4, 0.6]])
    assert numpy(decided(votes, mean, True)).tolist() == [[0, 1]]


@pytest.mark.parametrize("shape", [(4, 3), (4, 5, 5, 3)])
def test_shape_and_dtype_are_those_of_one_prediction(shape):
    arrays = np.random.default_rng(0).random((3, *shape), np.float32)
    for dtype in ("float16", "float32"):
        tensors = [keras.ops.cast(array, dtype) for array in arrays]
        for majority in (False, True):
            found = Vote([1 / 3] * 3, majority)(tensors)
            assert tuple(found.shape) == shape
            assert keras.backend.standardize_dtype(found.dtype) == dtype


def test_the_layer_is_restored_from_its_config():
    layer = Vote([0.25, 0.75], True, False, name="scores")
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(layer))
    assert (again.shares, again.majority, again.exclusive, again.name) == ([0.25, 0.75], True, False, "scores")
