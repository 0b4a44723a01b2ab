"""Prediction, evaluation, SQL functions, arrays as DataFrames and TFRecord files, with Spark Connect."""

import numpy as np
import pytest
from scipy import sparse

from sparkkeras import (
    SparkModel,
    TFRecordDataSource,
    from_data_frame,
    load_tfrecords,
    register_keras_udf,
    save_as_tfrecords,
    to_data_frame,
)
from tests.connect import cases


@pytest.fixture(scope="module")
def model():
    return cases.model(metrics=["accuracy"])


@pytest.fixture(scope="module")
def expected(model):
    """The predictions of plain Keras."""
    return model.predict(cases.arrays()[0], verbose=0)


@pytest.fixture(params=[False, True], ids=["default bounds", "small bounds"])
def bounds(request):
    if request.param:
        request.getfixturevalue("small_bounds")


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def column(frame, name):
    return np.array(frame.toArrow().column(name).to_pylist())


def test_predictions_for_a_data_frame_keep_its_order(spark, bounds, model, expected):
    scored = SparkModel(model).predict(cases.frame(spark), output_col="scores")
    close(column(scored, "scores"), expected)
    close(column(scored, "features"), cases.arrays()[0])
    assert scored.where("scores[0] > 0.3").count() == (expected[:, 0] > 0.3).sum()


def test_predictions_for_arrays_keep_their_order(spark, bounds, model, expected):
    x = cases.arrays()[0][:20]
    for given in (x, sparse.csr_matrix(x)):
        close(SparkModel(model, num_workers=3).predict(given), expected[:20])


def test_data_without_rows_gives_no_predictions(spark, model):
    assert SparkModel(model, num_workers=2).predict(cases.arrays()[0][:0]).shape == (0, cases.CLASSES)
    assert SparkModel(model).predict(cases.frame(spark).where("false")).toArrow().num_rows == 0


def test_another_backend_scores_in_processes_beside_the_workers(spark, model, expected):
    x, y = cases.arrays()
    close(SparkModel(model).predict(x, backend="jax"), expected)
    register_keras_udf(spark, "of_jax", model, backend="jax")
    scored = SparkModel(model).predict(cases.frame(spark), output_col="own").selectExpr("own", "of_jax(features) AS other")
    close(column(scored, "own"), expected)
    close(column(scored, "other"), expected)
    wanted = model.evaluate(x, y, verbose=0)
    assert SparkModel(model).evaluate(x, y, backend="jax") == pytest.approx(wanted, rel=1e-5)


def test_evaluate_equals_keras(spark, small_bounds, model):
    x, y = cases.arrays()
    wanted = model.evaluate(x, y, verbose=0)
    close(SparkModel(model).evaluate(cases.frame(spark)), wanted)
    close(SparkModel(model, num_workers=3).evaluate(x, y), wanted)
    weights = np.linspace(0.5, 2, len(x)).astype(np.float32)
    wanted = model.evaluate(x, y, sample_weight=weights, verbose=0)
    close(SparkModel(model).evaluate(cases.frame(spark), sample_weight="weight"), wanted)


def test_a_model_is_a_function_of_sql(spark, small_bounds, model, expected):
    function = register_keras_udf(spark, "classify", model)
    cases.frame(spark).createOrReplaceTempView("rows_of_connect")
    found = spark.sql("SELECT classify(features)[1] AS second FROM rows_of_connect")
    close(column(found, "second"), expected[:, 1])
    close(column(cases.frame(spark).select(function("features").alias("found")), "found"), expected)


def test_arrays_survive_a_round_trip_through_a_data_frame(spark):
    x, y = cases.arrays()
    features, labels = from_data_frame(to_data_frame(spark, x, np.eye(cases.CLASSES)[y], categorical=True, vectors=True))
    close(features, x)
    assert labels.tolist() == y.tolist()
    _, one_hot = from_data_frame(to_data_frame(spark, x, y), categorical=True)
    assert one_hot.shape == (cases.ROWS, cases.CLASSES)


def test_tfrecords_are_written_and_read(spark, tmp_path):
    path, schema = str(tmp_path / "rows"), "id int, s string, x array<double>"
    frame = spark.createDataFrame([(1, "a", [1.0, 2.0]), (2, None, [])], schema)
    save_as_tfrecords(frame, path, compression="gzip")
    assert sorted(load_tfrecords(spark, path, schema=schema).collect()) == sorted(frame.collect())
    assert [file.name for file in tmp_path.iterdir()] == ["rows"]
    spark.dataSource.register(TFRecordDataSource)
    for mode in "overwrite", "append":
        frame.write.format("tfrecord").mode(mode).option("compression", "gzip").save(path)
    reader = spark.read.format("tfrecord")
    assert reader.load(path).dtypes == load_tfrecords(spark, path).dtypes
    assert reader.load(path).dtypes == [("id", "bigint"), ("s", "string"), ("x", "array<float>")]
    assert sorted(reader.schema(schema).load(path).collect()) == sorted(frame.collect() * 2)
