"""LabeledPoints, there and back."""

import numpy as np
import pytest

from sparkkeras import (
    DataError,
    SparkModel,
    encode_label,
    from_labeled_point,
    lp_to_simple_rdd,
    to_labeled_point,
    to_simple_rdd,
)
from tests.models import classifier

X = np.arange(12, dtype=np.float64).reshape(4, 3)
Y = np.array([2, 0, 1, 2])


@pytest.mark.parametrize("labels", [Y, Y[:, None], Y.astype(float)], ids=["(n,)", "(n, 1)", "float"])
def test_round_trip(sc, labels):
    points = to_labeled_point(sc, X, labels)
    assert points.map(lambda point: point.label).collect() == [2.0, 0.0, 1.0, 2.0]
    features, back = from_labeled_point(points)
    np.testing.assert_array_equal(features, X)
    np.testing.assert_array_equal(back, Y)


def test_one_hot_labels(sc):
    one_hot = np.eye(3)[Y]
    points = to_labeled_point(sc, X, one_hot, categorical=True)
    _, back = from_labeled_point(points, categorical=True)
    np.testing.assert_array_equal(back, one_hot)
    _, wide = from_labeled_point(points, categorical=True, nb_classes=5)
    assert wide.shape == (4, 5)
    with pytest.raises(DataError, match=r"one-hot rows with categorical=True"):
        to_labeled_point(sc, X, one_hot)
    with pytest.raises(DataError, match="expects one-hot"):
        to_labeled_point(sc, X, Y, categorical=True)
    with pytest.raises(DataError, match="x has 4 rows and y has 2"):
        to_labeled_point(sc, X, Y[:2])


def test_to_simple_rdd_of_points(sc):
    rows = lp_to_simple_rdd(to_labeled_point(sc, X, Y)).collect()
    np.testing.assert_array_equal([row[0] for row in rows], X)
    assert [row[1] for row in rows] == [2.0, 0.0, 1.0, 2.0]
    rows = lp_to_simple_rdd(to_labeled_point(sc, X, Y), categorical=True).collect()
    np.testing.assert_array_equal([row[1] for row in rows], np.eye(3)[Y])


def test_training_on_points(sc, digits):
    x, y, *_ = digits
    rdd = lp_to_simple_rdd(to_labeled_point(sc, x[:200], y[:200]))
    history = SparkModel(classifier()).fit(rdd, epochs=2, verbose=0)
    assert history.history["loss"][1] < history.history["loss"][0]


def test_encode_label():
    np.testing.assert_array_equal(encode_label(1, 3), [0, 1, 0])
    np.testing.assert_array_equal(encode_label(np.array([2.0]), 3), [0, 0, 1])
    for label, words in [(3, "labels go from 0 to 2"), (-1, "out of range"), (0.5, "whole number"), ([1, 2], "one whole")]:
        with pytest.raises(DataError, match=words):
            encode_label(label, 3)


def test_a_simple_rdd_is_an_ordinary_rdd(sc):
    rdd = to_simple_rdd(sc, X, Y, np.ones(4), num_slices=3)
    assert rdd.getNumPartitions() == 3
    assert rdd.count() == 4
    rows = rdd.filter(lambda row: row[1] == 2).map(lambda row: (row[0] * 2, row[1], row[2])).collect()
    np.testing.assert_array_equal([row[0] for row in rows], X[[0, 3]] * 2)
    named = to_simple_rdd(sc, {"a": X, "b": Y}, Y).first()
    assert named[0].keys() == {"a", "b"}
    assert to_simple_rdd(sc, X, Y).map(lambda row: row[1].item()).sum() == 5
