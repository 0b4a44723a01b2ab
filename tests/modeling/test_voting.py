"""Votes counted by hand, and the layer that counts them."""

import keras
import numpy as np
import pytest

from sparkkeras.modeling.voting import Vote

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


TIED = [[[0.42, 0.18, 0.4]], [[0.05, 0.5, 0.45]]]
"""Classes 0 and 1 have a vote each; class 2 has the largest mean but no vote."""


@pytest.mark.parametrize(
    ("members", "shares", "expected"),
    [
        ([[[0.0, 1.0]], [[0.51, 0.49]], [[0.51, 0.49]]], None, [[1, 0]]),
        ([[[-5.0, -2.0, -3.0]]], None, [[0, 1, 0]]),
        ([[[0.9, 0.1]], [[0.2, 0.8]], [[0.2, 0.8]]], [0.5, 0.2, 0.3 - 1e-3], [[1, 0]]),
        (TIED, None, [[0, 1, 0]]),
        # 5 + 4 + 5 against 6 + 8, computed as 0.49999997 and 0.5; the mean prefers class 0.
        ([[[0.9, 0.1]]] * 3 + [[[0.4, 0.6]]] * 2, [weight / 28 for weight in (5, 4, 5, 6, 8)], [[1, 0]]),
        ([[[0.7, 0.3]], [[0.3, 0.7]]], None, [[1, 0]]),
    ],
    ids=[
        *("confident minority", "negative outputs", "heavy vote"),
        *("the mean breaks ties", "a tie of rounded weights", "the first class wins a full tie"),
    ],
)
def test_majorities_of_exclusive_classes(members, shares, expected):
    assert vote(members, shares, majority=True).tolist() == expected


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ([[[0.51], [0.5]], [[0.51], [0.5]], [[0.0], [0.5]]], [[1], [0]]),
        ([[[0.6], [0.9]], [[0.1], [0.4]]], [[0], [1]]),
        ([[[0.9, 0.8]], [[0.6, 0.3]], [[0.1, 0.4]]], [[1, 0]]),
    ],
    ids=["single units vote yes above 0.5", "the mean breaks ties", "values are voted on separately"],
)
def test_majorities_of_single_values(members, expected):
    assert vote(members, majority=True, exclusive=False).tolist() == expected


@pytest.mark.parametrize("majority", [False, True])
def test_shape_and_dtype_are_those_of_one_prediction(majority):
    arrays = np.random.default_rng(0).random((3, 4, 5, 5, 3), np.float32)
    found = Vote([1 / 3] * 3, majority)([keras.ops.cast(array, "float16") for array in arrays])
    assert tuple(found.shape) == (4, 5, 5, 3)
    assert keras.backend.standardize_dtype(found.dtype) == "float16"


def test_the_layer_is_restored_from_its_config():
    layer = Vote([0.25, 0.75], True, False, name="scores")
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(layer))
    assert (again.shares, again.majority, again.exclusive, again.name) == ([0.25, 0.75], True, False, "scores")
