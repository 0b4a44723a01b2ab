"""Prediction, evaluation, SQL functions and arrays as DataFrames, with Spark Connect."""

import numpy as np
import pytest
from scipy import sparse

from sparkkeras import SparkModel, from_data_frame, register_keras_udf, to_data_frame
from tests.connect import cases


@pytest.fixture(scope="module")
def model():
    return cases.model(metrics=["accuracy"])


@pytest.fixture(scope="module")
def expected(model):
    """The predictions of plain Keras."""
    return model.predict(cases.arrays()[0], verbose=0)


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def column(frame, name):
    return np.array(frame.toArrow().column(name).to_pylist())


def test_predictions_for_a_data_frame_keep_its_order(spark, model, expected):
    scored = SparkModel(model).predict(cases.frame(spark), output_col="scores")
    close(column(scored, "scores"), expected)
    close(column(scored, "features"), cases.arrays()[0])
    assert scored.where("scores[0] > 0.3").count() == (expected[:, 0] > 0.3).sum()


def test_predictions_for_arrays_keep_their_order(spark, model, expected):
    x = cases.arrays()[0][:20]
    for given in (x, sparse.csr_matrix(x)):
        close(SparkModel(model, num_workers=3).predict(given), expected[:20])


def test_data_without_rows_gives_no_predictions(spark, model):
    assert SparkModel(model, num_workers=2).predict(cases.arrays()[0][:0]).shape == (0, cases.CLASSES)
    assert SparkModel(model).predict(cases.frame(spark).where("false")).toArrow().num_rows == 0


def test_evaluate_equals_keras(spark, model):
    x, y = cases.arrays()
    wanted = model.evaluate(x, y, verbose=0)
    close(SparkModel(model).evaluate(cases.frame(spark)), wanted)
    close(SparkModel(model, num_workers=3).evaluate(x, y), wanted)
    weights = np.linspace(0.5, 2, len(x)).astype(np.float32)
    wanted = model.evaluate(x, y, sample_weight=weights, verbose=0)
    close(SparkModel(model).evaluate(cases.frame(spark), sample_weight="weight"), wanted)


def test_a_model_is_a_function_of_sql(spark, model, expected):
    function = register_keras_udf(spark, "classify", model)
    cases.frame(spark).createOrReplaceTempView("rows_of_connect")
    found = spark.sql("SELECT classify(features)[1] AS second FROM rows_of_connect")
    close(column(found, "second"), expected[:, 1])
    close(column(cases.frame(spark).select(function("features").alias("found")), "found"), expected)


def test_nested_inputs_and_outputs(spark):
    model, frame, x = cases.nested(), cases.nested_frame(spark), cases.arrays()[0]
    given = {"left": x, "others": {"right": x[:, :1], "top": x[:, 1:2]}}
    wanted = model.predict(given, verbose=0)
    found = SparkModel(model, num_workers=3).predict(given)
    close(found["u"], wanted["u"])
    close(found["v"]["w"], wanted["v"]["w"])
    scored = SparkModel(model).predict(frame)
    close(column(scored, "prediction_u"), wanted["u"][:, 0])
    close(column(scored, "prediction_v_w"), wanted["v"]["w"])
    register_keras_udf(spark, "nest", model)
    frame.createOrReplaceTempView("nested_rows")
    found = spark.sql("SELECT s.v_w FROM (SELECT nest(left, others.top, others.right) AS s FROM nested_rows)")
    close(column(found, "v_w"), wanted["v"]["w"])


def test_rows_with_nulls_get_null_predictions(spark, model, expected):
    frame = cases.frame(spark).selectExpr("CASE WHEN label = 0 THEN NULL ELSE features END AS features", "label")
    found = SparkModel(model).predict(frame, on_invalid="null").toArrow()
    missing = np.array(found.column("label").to_pylist()) == 0
    assert [value is None for value in found.column("prediction").to_pylist()] == missing.tolist()
    close(np.array(found.column("prediction").drop_null().to_pylist()), expected[~missing])


def test_arrays_survive_a_round_trip_through_a_data_frame(spark):
    x, y = cases.arrays()
    features, labels = from_data_frame(to_data_frame(spark, x, np.eye(cases.CLASSES)[y], categorical=True, vectors=True))
    close(features, x)
    assert labels.tolist() == y.tolist()
    _, one_hot = from_data_frame(to_data_frame(spark, x, y), categorical=True)
    assert one_hot.shape == (cases.ROWS, cases.CLASSES)
