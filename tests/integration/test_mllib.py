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
from sparkkeras.mllib.conversions import from_matrix, from_vector, to_matrix, to_vector
from sparkkeras.mllib.model import SparkMLlibModel
from tests.conftest import settle
from tests.models import classifier, regression

X = np.arange(12, dtype=np.float64).reshape(4, 3)
Y = np.array([2, 0, 1, 2])


def test_labeled_points_survive_a_round_trip(sc):
    points = to_labeled_point(sc, X, Y[:, None])
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


def test_lp_to_simple_rdd(sc):
    points = to_labeled_point(sc, X, Y)
    for categorical, labels in (False, Y), (True, np.eye(3)[Y]):
        rows = lp_to_simple_rdd(points, categorical=categorical).collect()
        np.testing.assert_array_equal([row[0] for row in rows], X)
        np.testing.assert_array_equal([row[1] for row in rows], labels)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([LabeledPoint(float("nan"), [1.0])], "the largest label is nan"),
        ([LabeledPoint(-2.0, [1.0])], "the largest label is -2"),
        ([], "no rows"),
    ],
    ids=["NaN", "negative", "empty"],
)
def test_labels_from_which_classes_cannot_be_inferred_are_reported(sc, points, message):
    with pytest.raises(DataError, match=message):
        lp_to_simple_rdd(sc.parallelize(points, 2), categorical=True)
    with pytest.raises(DataError, match=message):
        from_labeled_point(sc.parallelize(points, 2), categorical=True)


def sparse(x, y):
    """LabeledPoints with sparse features."""
    return [
        LabeledPoint(label, mllib.SparseVector(64, np.flatnonzero(row), row[row != 0]))
        for row, label in zip(x, y, strict=True)
    ]


def test_a_classifier_learns_digits(sc, digits):
    x, y, x_test, y_test = digits
    model = classifier(loss="categorical_crossentropy", optimizer=keras.optimizers.Adam(0.005))
    mllib_model = SparkMLlibModel(model, num_workers=2, seed=1)
    points = sc.parallelize(sparse(x_test, y_test), 3)
    arguments = {"categorical": True, "transform": lambda x, y: (2 * x, y), "validation_data": points}
    history = mllib_model.fit(to_labeled_point(sc, x, y), epochs=4, verbose=0, **arguments).history
    assert mllib_model.training_histories is mllib_model.spark_model.training_histories
    accuracy = (from_matrix(mllib_model.predict(to_matrix(2 * x_test), transform=None)).argmax(axis=1) == y_test).mean()
    assert accuracy > 0.85
    expected = model.evaluate(2 * x_test, np.eye(10)[y_test], verbose=0)
    assert [history["val_loss"][-1], history["val_accuracy"][-1]] == pytest.approx(expected, rel=1e-4)
    named = mllib_model.evaluate(points, categorical=True, nb_classes=10, return_dict=True, transform=arguments["transform"])
    assert named == pytest.approx({"loss": expected[0], "accuracy": accuracy}, rel=1e-4)


def test_predictions_have_the_form_of_the_data(sc, digits):
    _, _, x, y = digits
    x, y = x[:50], y[:50]
    model = classifier()
    mllib_model = SparkMLlibModel(model, batch_size=8)
    expected = model.predict(x, verbose=0)
    close = {"rtol": 1e-4, "atol": 1e-6}
    for matrix in (mllib.DenseMatrix(50, 64, x.ravel(), True), to_matrix(x).toSparse().asML()):
        found = mllib_model.predict(matrix)
        assert isinstance(found, mllib.DenseMatrix)
        np.testing.assert_allclose(found.toArray(), expected, **close)
    for vector in (to_vector(x[3]), ml.DenseVector(x[3])):
        found = mllib_model.predict(vector)
        assert isinstance(found, mllib.DenseVector)
        np.testing.assert_allclose(from_vector(found), expected[3], **close)
    mixed = [*(to_vector(row) for row in x[:25]), *(ml.DenseVector(row) for row in x[25:])]
    for rows in (mixed, sparse(x, y)):
        found = mllib_model.predict(sc.parallelize(rows, 3)).collect()
        assert all(isinstance(row, mllib.DenseVector) for row in found)
        np.testing.assert_allclose([row.toArray() for row in found], expected, **close)
    assert mllib_model.predict(to_matrix(np.zeros((0, 64)))).toArray().shape == (0, 10)


def test_training_equals_that_of_a_spark_model(sc, digits):
    x, y, *_ = digits
    x, y = x[:300], y[:300]
    settings = {"mode": "synchronous", "frequency": 4, "num_workers": 3, "rule": "slowmo", "seed": 5, "batch_size": 16}
    mine, plain = SparkMLlibModel(classifier(), **settings), SparkModel(classifier(), **settings)
    mine.fit(sc.parallelize(sparse(x, y), 2), epochs=2, verbose=0)
    plain.fit(sc.parallelize(list(zip(x, y.astype(float), strict=True)), 2), epochs=2, verbose=0)
    for weight, expected in zip(mine.model.get_weights(), plain.model.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, expected)
    assert repr(mine) == repr(plain).replace("SparkModel", "SparkMLlibModel")


def test_errors_are_raised_before_a_job(sc):
    points = to_labeled_point(sc, X, Y)

    def last_job():
        settle(sc)
        return max(sc.statusTracker().getJobIdsForGroup(), default=-1)  # Spark forgets old ones

    before = last_job()
    mllib_model = SparkMLlibModel(classifier(width=3, classes=3, loss="categorical_crossentropy"))
    for call in (mllib_model.fit, mllib_model.evaluate):
        with pytest.raises(ConfigurationError, match="nb_classes=3 requires categorical=True"):
            call(points, nb_classes=3)
    with pytest.raises(ConfigurationError, match="nb_classes=5 do not fit the model 'classifier', whose output has 3 unit"):
        mllib_model.fit(points, categorical=True, nb_classes=5)
    with pytest.raises(ConfigurationError, match=r"whose output has 1 unit.*leave categorical out"):
        SparkMLlibModel(regression()).fit(points, categorical=True)
    with pytest.raises(DataError, match="lp_rdd is an array .* expected an RDD of LabeledPoints"):
        mllib_model.fit(X)
    with pytest.raises(DataError, match="expected a Matrix"):
        mllib_model.predict(X)
    with pytest.raises(DataError, match=r"expects rows of shape \(3,\), received rows of shape \(2,\)"):
        mllib_model.predict(to_matrix(X[:, :2]))
    with pytest.raises(DataError, match="NaN"):
        mllib_model.predict(to_vector([1, np.nan, 2]))
    assert last_job() == before


def test_rows_that_are_not_labeled_points_are_reported(sc):
    mllib_model = SparkMLlibModel(classifier(width=3, classes=3))
    rows = sc.parallelize([LabeledPoint(0.0, X[0]), (X[1], 1.0)], 1)
    with pytest.raises(DataError, match="a row is a tuple of 2 values; expected a LabeledPoint. SparkModel accepts rows"):
        mllib_model.fit(rows)
    with pytest.raises(Exception, match="DataError: a row is an array of shape .* expected a Vector or a LabeledPoint"):
        mllib_model.predict(sc.parallelize(list(X), 1)).collect()
    with pytest.raises(DataError, match="label 2 is out of range: with nb_classes=2"):
        SparkMLlibModel(classifier(width=3, classes=2)).fit(to_labeled_point(sc, X, Y), categorical=True)


def test_a_model_whose_outputs_do_not_fit_a_matrix_is_reported():
    x = keras.Input((3,))
    two = keras.Model(x, [keras.layers.Dense(1, name="a")(x), keras.layers.Dense(2, name="b")(x)])
    deep = keras.Model(x, keras.layers.Reshape((2, 2), name="grid")(keras.layers.Dense(4)(x)))
    for model, message in [(two, r"'a' with rows of shape \(1,\), 'b' with"), (deep, r"'grid' with rows of shape \(2, 2\)")]:
        with pytest.raises(ModelError, match=message):
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


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("__init__", set()),
        ("fit", {"lp_rdd", "categorical", "nb_classes"}),
        ("evaluate", {"lp_rdd", "categorical", "nb_classes"}),
        ("predict", {"data"}),
        ("save", set()),
    ],
)
def test_arguments_are_those_of_a_spark_model(name, extra):
    def arguments(owner, without):
        found = inspect.signature(getattr(owner, name)).parameters.values()
        return {one.name: (one.kind, one.default) for one in found if one.name not in without}

    assert arguments(SparkMLlibModel, extra) == arguments(SparkModel, UNUSED_ARGUMENTS)


def test_an_unknown_argument_is_reported():
    model = classifier(width=3)
    with pytest.raises(UnknownArgumentError, match="SparkMLlibModel takes no argument 'workers'"):
        SparkMLlibModel(model, workers=2)
    mllib_model = SparkMLlibModel(model)
    for call in (mllib_model.fit, mllib_model.train):
        with pytest.raises(UnknownArgumentError, match=r"SparkMLlibModel.fit takes no argument 'nb_clases'.*'nb_classes'\?"):
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
