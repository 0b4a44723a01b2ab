"""Conversions of LabeledPoints, and `SparkMLlibModel`: training on LabeledPoints, predictions for matrices and vectors."""

import inspect

import keras
import numpy as np
import pytest
from pyspark.ml import linalg as ml
from pyspark.mllib import linalg as mllib
from pyspark.mllib.regression import LabeledPoint

from sparkkeras import (
    ConfigurationError,
    DataError,
    ModelError,
    SparkModel,
    UnknownArgumentError,
    from_labeled_point,
    load_spark_model,
    lp_to_simple_rdd,
    to_labeled_point,
)
from sparkkeras.mllib.conversions import to_matrix, to_vector
from sparkkeras.mllib.model import SparkMLlibModel
from tests.integration.faults import jobs_of
from tests.models import classifier, regression

X = np.arange(12, dtype=np.float64).reshape(4, 3)
Y = np.array([2, 0, 1, 2])


def test_labeled_points_survive_a_round_trip(sc):
    points = to_labeled_point(sc, X, Y[:, None])
    assert points.map(lambda point: point.label).collect() == [2.0, 0.0, 1.0, 2.0]
    one_hot = np.eye(3)[Y]
    of_one_hot = to_labeled_point(sc, X, one_hot, categorical=True)
    for rdd, categorical, labels in (points, False, Y), (of_one_hot, True, one_hot), (points, True, one_hot):
        features, back = from_labeled_point(rdd, categorical=categorical)
        np.testing.assert_array_equal(features, X)
        np.testing.assert_array_equal(back, labels)
        rows = lp_to_simple_rdd(rdd, categorical=categorical).collect()
        np.testing.assert_array_equal([row[0] for row in rows], X)
        np.testing.assert_array_equal([row[1] for row in rows], labels)
    assert from_labeled_point(points, categorical=True, nb_classes=5)[1].shape == (4, 5)
    for y, categorical, words in [(one_hot, False, "one-hot rows"), (Y, True, "expects one-hot"), (Y[:2], False, "y has 2")]:
        with pytest.raises(DataError, match=words):
            to_labeled_point(sc, X, y, categorical=categorical)


def test_labels_from_which_classes_cannot_be_inferred_are_reported(sc):
    for labels, words in ([float("nan")], "largest label is nan"), ([-2.0], "largest label is -2"), ([], "no rows"):
        points = sc.parallelize([LabeledPoint(label, [1.0]) for label in labels], 2)
        for convert in (lp_to_simple_rdd, from_labeled_point):
            with pytest.raises(DataError, match=words):
                convert(points, categorical=True)


def sparse(x, y):
    """LabeledPoints with sparse features."""
    return [
        LabeledPoint(label, mllib.SparseVector(64, np.flatnonzero(row), row[row != 0]))
        for row, label in zip(x, y, strict=True)
    ]


def test_predictions_have_the_form_of_the_data(sc, digits):
    x, y = digits[2][:50], digits[3][:50]
    model = classifier()
    mllib_model = SparkMLlibModel(model, batch_size=8)
    expected = model.predict(x, verbose=0)

    def check(found, kind, expected):
        assert isinstance(found, kind)
        np.testing.assert_allclose(found.toArray(), expected, rtol=1e-4, atol=1e-6)

    for matrix in (mllib.DenseMatrix(50, 64, x.ravel(), True), to_matrix(x).toSparse().asML()):
        check(mllib_model.predict(matrix), mllib.DenseMatrix, expected)
    for vector in (to_vector(x[3]), ml.DenseVector(x[3])):
        check(mllib_model.predict(vector), mllib.DenseVector, expected[3])
    mixed = [*(to_vector(row) for row in x[:25]), *(ml.DenseVector(row) for row in x[25:])]
    for rows in (mixed, sparse(x, y)):
        for found, row in zip(mllib_model.predict(sc.parallelize(rows, 3)).collect(), expected, strict=True):
            check(found, mllib.DenseVector, row)
    assert mllib_model.predict(to_matrix(np.zeros((0, 64)))).toArray().shape == (0, 10)


def test_training_and_evaluation_equal_those_of_a_spark_model_on_pairs(sc, digits):
    x, y = digits[0][:300], digits[1][:300]
    points, pairs = sparse(x, y), list(zip(x, np.eye(10)[y], strict=True))
    settings = {"mode": "synchronous", "frequency": 4, "num_workers": 3, "rule": "slowmo", "seed": 5, "batch_size": 16}
    mine, plain = (kind(classifier(loss="categorical_crossentropy"), **settings) for kind in (SparkMLlibModel, SparkModel))
    assert repr(mine) == repr(plain).replace("SparkModel", "SparkMLlibModel")
    transform, known = {"transform": lambda x, y: (2 * x, y)}, {"categorical": True}
    histories = []
    for model, rows, named in (mine, points, known), (plain, pairs, {}):
        data, held_out = sc.parallelize(rows[60:], 2), sc.parallelize(rows[:60], 1)
        histories.append(model.fit(data, validation_data=held_out, verbose=0, **transform, **named).history)
    assert histories[0] == histories[1]
    assert mine.training_histories is mine.spark_model.training_histories
    np.testing.assert_equal(mine.model.get_weights(), plain.model.get_weights())
    found = mine.evaluate(sc.parallelize(points, 3), nb_classes=10, return_dict=True, **known, **transform)
    assert found == pytest.approx(plain.evaluate(2 * x, np.eye(10)[y], return_dict=True, transform=None), rel=1e-5)


def test_errors_are_raised_before_a_job(sc):
    points = to_labeled_point(sc, X, Y)
    model = SparkMLlibModel(classifier(width=3, classes=3, loss="categorical_crossentropy"))
    one_unit = SparkMLlibModel(regression())
    for call, error, words in [
        (lambda: model.fit(points, nb_classes=3), ConfigurationError, "requires categorical=True"),
        (lambda: model.evaluate(points, nb_classes=3), ConfigurationError, "requires categorical=True"),
        (lambda: model.fit(points, categorical=True, nb_classes=5), ConfigurationError, "nb_classes=5 .* 3 unit"),
        (lambda: one_unit.fit(points, categorical=True), ConfigurationError, "1 unit.*leave categorical out"),
        (lambda: model.fit(X), DataError, "expected an RDD of LabeledPoints"),
        (lambda: model.predict(X), DataError, "expected a Matrix"),
        (lambda: model.predict(to_matrix(X[:, :2])), DataError, r"rows of shape \(3,\).*\(2,\)"),
        (lambda: model.predict(to_vector([1, np.nan, 2])), DataError, "NaN"),
    ]:
        with jobs_of(sc) as jobs, pytest.raises(error, match=words):
            call()
        assert jobs == []


def test_rows_that_are_not_labeled_points_are_reported(sc):
    model = SparkMLlibModel(classifier(width=3, classes=2))
    with pytest.raises(DataError, match="tuple of 2 values; expected a LabeledPoint"):
        model.fit(sc.parallelize([LabeledPoint(0.0, X[0]), (X[1], 1.0)], 1))
    with pytest.raises(Exception, match="DataError: .*expected a Vector or a LabeledPoint"):
        model.predict(sc.parallelize(list(X), 1)).collect()
    with pytest.raises(DataError, match="label 2 .* nb_classes=2"):
        model.fit(to_labeled_point(sc, X, Y), categorical=True)


def test_a_model_whose_outputs_do_not_fit_a_matrix_is_reported():
    x = keras.Input((3,))
    two = keras.Model(x, [keras.layers.Dense(1, name="a")(x), keras.layers.Dense(2, name="b")(x)])
    deep = keras.Model(x, keras.layers.Reshape((2, 2), name="grid")(keras.layers.Dense(4)(x)))
    for model, words in (two, r"'a' .* \(1,\), 'b'"), (deep, r"'grid' .* \(2, 2\)"):
        with pytest.raises(ModelError, match=words):
            SparkMLlibModel(model).predict(to_matrix(X))


UNUSED_ARGUMENTS = {
    "data",
    "y",
    "sample_weight",
    "features",
    "label",
    "loader",
    "validation_col",
    "collect",
    "output_col",
    "keyed",
}
"""Arguments of SparkModel that do not apply to LabeledPoints, matrices and vectors."""


def test_arguments_are_those_of_a_spark_model():
    def arguments(function, without):
        found = inspect.signature(function).parameters.values()
        return {one.name: (one.kind, one.default) for one in found if one.name not in without}

    mine = {"lp_rdd", "categorical", "nb_classes", "data"}
    for name in ("__init__", "fit", "evaluate", "predict", "save"):
        found = arguments(getattr(SparkMLlibModel, name), mine)
        assert found == arguments(getattr(SparkModel, name), UNUSED_ARGUMENTS), name


def test_an_unknown_argument_is_reported():
    model = classifier(width=3)
    with pytest.raises(UnknownArgumentError, match="SparkMLlibModel .* 'workers'"):
        SparkMLlibModel(model, workers=2)
    mllib_model = SparkMLlibModel(model)
    for call in (mllib_model.fit, mllib_model.train):
        with pytest.raises(UnknownArgumentError, match="SparkMLlibModel.fit .* 'nb_clases'.*'nb_classes'"):
            call(None, nb_clases=3)


def test_the_saved_class_is_loaded(tmp_path):
    """Without Spark: local paths do not need it."""
    model = classifier(width=3)
    for kind in (SparkModel, SparkMLlibModel):
        saved = kind(model, frequency=3, num_workers=2, batch_size=5)
        saved.save(tmp_path / "saved.keras")
        plain, loaded = load_spark_model(tmp_path / "saved.keras"), SparkMLlibModel.load(tmp_path / "saved.keras")
        assert (type(plain), repr(plain)) == (kind, repr(saved))
        assert loaded.spark_model.batch_size == 5
        assert loaded.master_network is loaded.model
        np.testing.assert_array_equal(loaded.model.get_weights()[0], model.get_weights()[0])
    model.save(tmp_path / "plain.keras")
    assert type(load_spark_model(tmp_path / "plain.keras")) is SparkModel
