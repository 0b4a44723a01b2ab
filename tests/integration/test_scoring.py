"""Prediction and evaluation of RDDs, arrays and sparse matrices; models as functions of columns and of SQL."""

import keras
import numpy as np
import pytest
from pyspark.errors import PythonException
from pyspark.ml.linalg import Vectors
from pyspark.sql import functions as F
from scipy import sparse

from sparkkeras import (
    ConfigurationError,
    DataError,
    EnsembleModel,
    ModelError,
    SparkModel,
    keras_udf,
    register_keras_udf,
    to_simple_rdd,
)
from sparkkeras.spark.job_errors import translated
from tests.integration.faults import jobs_of
from tests.models import classifier, regression


@pytest.fixture(scope="module")
def spark_model():
    return SparkModel(classifier())


def test_predict_keeps_the_order(sc, digits, spark_model):
    x, y, *_ = digits
    expected = keras.ops.convert_to_numpy(spark_model.model(x))
    rows = list(zip(x, y, strict=True))
    for data in (
        x,
        sc.parallelize(rows, 3).cache(),
        to_simple_rdd(sc, x, y),
        sc.parallelize([row.tolist() for row in x], 2).union(sc.parallelize([], 2)),
    ):
        predicted = SparkModel(spark_model.model, num_workers=2).predict(data)
        np.testing.assert_allclose(predicted, expected, rtol=1e-4, atol=1e-6)


def test_predict_starts_one_stage_and_no_shuffle(sc, digits, spark_model):
    rdd = sc.parallelize(list(digits[0]), 3)
    spark_model.predict(rdd)  # the first job of a context probes the cluster
    with jobs_of(sc) as jobs:
        spark_model.predict(rdd)
    (job,) = jobs
    assert len(sc.statusTracker().getJobInfo(job).stageIds) == 1


def test_predict_is_lazy_with_collect_false(sc, digits, spark_model):
    x, *_ = digits
    seen = sc.accumulator(0)

    def count(row):
        seen.add(1)
        return row

    lazy = spark_model.predict(sc.parallelize(list(x[:100]), 4).map(count), collect=False)
    assert seen.value == 0
    classes = lazy.map(np.argmax).collect()
    assert seen.value == 100
    assert classes == spark_model.model.predict(x[:100], verbose=0).argmax(1).tolist()


def test_predict_without_rows(sc, spark_model):
    assert spark_model.predict(np.zeros((0, 64), np.float32)).shape == (0, 10)
    assert spark_model.predict(sc.parallelize([], 3)).shape == (0, 10)


def test_evaluate_equals_keras(sc, digits, capsys):
    _, _, x, y = digits
    metrics = ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(3), keras.metrics.MeanIoU(10, sparse_y_pred=False)]
    model = classifier(metrics=metrics, weighted_metrics=["accuracy"])
    weight = np.linspace(0.1, 2, len(x)).astype(np.float32)
    expected = model.evaluate(x, y, sample_weight=weight, verbose=0)
    rows = sc.parallelize(list(zip(x, y, weight, strict=True)), 3).union(sc.parallelize([], 1))
    np.testing.assert_allclose(SparkModel(model).evaluate(rows), expected, rtol=1e-5)
    named = SparkModel(model).evaluate(x, y, sample_weight=weight, return_dict=True, verbose=1)
    assert named == pytest.approx(model.evaluate(x, y, sample_weight=weight, verbose=0, return_dict=True), rel=1e-5)
    assert "accuracy: " in capsys.readouterr().out


def test_predictions_keep_the_keys_of_their_rows(sc, digits, spark_model):
    x = digits[0][:50]
    expected = spark_model.model.predict(x, verbose=0)
    keys = [{"id": number} if number % 2 else (number, "even") for number in range(50)]
    rows = sc.parallelize(list(zip(keys, x, strict=True)), 3).union(sc.parallelize([], 1))
    pairs = spark_model.predict(rows, keyed=True)
    lazy = spark_model.predict(rows.map(lambda row: (row[0], (row[1], 1))), keyed=True, collect=False)
    assert lazy.getNumPartitions() == rows.getNumPartitions()
    for found in pairs, lazy.collect():
        assert [key for key, _ in found] == keys
        np.testing.assert_allclose([prediction for _, prediction in found], expected, rtol=1e-4, atol=1e-6)
    missing = sc.parallelize([("a", x[0]), ("b", None)], 1)
    (_, one), (key, nothing) = spark_model.predict(missing, keyed=True, on_invalid="allow")
    assert (key, nothing.shape) == ("b", one.shape)
    with pytest.raises(DataError, match="x of row 1 of partition 0"):
        spark_model.predict(missing, keyed=True)
    with pytest.raises(DataError, match=r"row 0 .*expected a pair \(key"):
        spark_model.predict(sc.parallelize(list(x[:2]), 1), keyed=True)


def test_only_rdds_have_keys(spark, digits, spark_model):
    for data, keyed, words in [
        (digits[0], True, r"an array .*zip\("),
        (spark.range(1), True, "DataFrame are a column"),
        (spark.range(1), "id", "keyed='id'"),
    ]:
        with pytest.raises(ConfigurationError, match=words):
            spark_model.predict(data, keyed=keyed)


def test_sparse_matrices_give_the_results_of_dense_arrays(sc, digits, spark_model):
    x, y, *_ = digits
    x, y = x[:200], y[:200]
    matrix = sparse.csc_matrix(x)
    rows = to_simple_rdd(sc, matrix, y, num_slices=3)
    members = EnsembleModel([spark_model.model, spark_model.model])
    expected = spark_model.predict(x)
    for found in (
        spark_model.predict(matrix, transform=lambda x, y: x * 1),
        spark_model.predict(rows),
        spark_model.predict(sc.parallelize([matrix[row] for row in range(200)], 2), collect=False).collect(),
        members.predict(matrix),
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    logs = spark_model.evaluate(x, y)
    assert spark_model.evaluate(matrix, y) == pytest.approx(logs)
    assert spark_model.evaluate(rows) == pytest.approx(logs)
    assert members.evaluate(matrix, y) == pytest.approx(logs, rel=1e-4)


# Models as functions

X = np.random.default_rng(0).random((30, 3)).astype(np.float32)


@pytest.fixture(scope="module")
def model():
    return regression()


@pytest.fixture
def frame(spark):
    """A DataFrame with id, the numbers a, b and c, and these three as an array and as a vector."""
    rows = [(row, *map(float, x), x.tolist(), Vectors.dense(x)) for row, x in enumerate(X)]
    made = spark.createDataFrame(spark.sparkContext.parallelize(rows, 3), ["id", "a", "b", "c", "features", "v"])
    made.createOrReplaceTempView("measurements")
    return made


def values(scored, name="p"):
    return np.array([row[name] for row in scored.orderBy("id").collect()])


def expected(model):
    return model.predict(X, verbose=0).ravel()


def close(mine, other):
    np.testing.assert_allclose(mine, other, rtol=1e-6, atol=1e-6)


def test_a_model_is_a_function_of_columns(model, frame):
    predict = keras_udf(model, batch_size=7)
    for columns in [("features",), (frame.v,), ("a", frame["b"], F.col("c")), (F.array("a", F.col("b") * 1, "c"),)]:
        scored = frame.select("id", predict(*columns).alias("p"))
        assert scored.schema["p"].dataType.simpleString() == "float"
        close(values(scored), expected(model))


def test_one_column_as_a_number_and_as_an_array_in_one_session(frame):
    """In the same processes, with the shape that the model declares in each of them."""
    own = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    predictions, function = SparkModel(own), keras_udf(own)
    wanted = own.predict(X[:, :1], verbose=0)
    for scored in (
        predictions.predict(frame, features="a", output_col="p"),
        predictions.predict(frame, features=["a"], output_col="p"),
        frame.withColumn("p", function("a")),
        frame.withColumn("p", function(F.array("a"))),
    ):
        close(values(scored), wanted.ravel())
    for rows in (X[:, 0], X[:, :1]):
        close(predictions.predict(rows), wanted)


def test_later_changes_to_the_model_do_not_affect_the_function(frame):
    own = regression()
    before, predict = expected(own), keras_udf(own)
    own.set_weights([weight * 0 for weight in own.get_weights()])
    close(values(frame.withColumn("p", predict("features"))), before)


def test_a_model_is_a_function_of_sql(spark, model, frame):
    for _ in range(2):  # a registered function is replaced
        returned = register_keras_udf(spark, "appraise", model)
    close(values(spark.sql("SELECT id, APPRAISE(a, b, c) AS p FROM measurements")), expected(model))
    close(values(frame.withColumn("p", returned("v"))), expected(model))
    middle = float(np.median(expected(model)))
    found = spark.sql(f"SELECT id FROM measurements WHERE appraise(features) > {middle} ORDER BY appraise(v)").collect()
    order = np.argsort(expected(model), kind="stable")
    assert [row.id for row in found] == [row for row in order if expected(model)[row] > middle]
    mean = spark.sql("SELECT avg(appraise(features)) AS p, id % 2 AS id FROM measurements GROUP BY id % 2")
    close(values(mean), [expected(model)[::2].mean(), expected(model)[1::2].mean()])


def test_two_models_in_one_query(spark, model, frame):
    register_keras_udf(spark, "one", model)
    register_keras_udf(spark, "two", regression(seed=5))
    scored = spark.sql("SELECT id, two(features) AS q, one(array(two(features), 0.0, 0.0)) AS p FROM measurements")
    second = expected(regression(seed=5))
    close(values(scored, "q"), second)
    close(values(scored), model.predict(np.stack([second, second * 0, second * 0], axis=1), verbose=0).ravel())


def test_rows_with_nulls_get_null_or_are_rejected(spark, model, frame):
    frame.withColumn("b", F.when(F.col("id") % 3 > 0, F.col("b"))).createOrReplaceTempView("gaps")
    register_keras_udf(spark, "lenient", model)
    register_keras_udf(spark, "strict", model, on_invalid="error")
    found = values(spark.sql("SELECT id, lenient(a, b, c) AS p FROM gaps")).astype(float)
    close(found, np.where(np.arange(len(X)) % 3 > 0, expected(model), np.nan))
    assert tuple(spark.sql("SELECT lenient(1, NULL, 2), lenient(NULL)").first()) == (None, None)
    with pytest.raises(PythonException, match=r"sparkkeras.errors.DataError: argument 2 of strict\(\)") as error:
        spark.sql("SELECT strict(a, b, c) FROM gaps").collect()
    assert "Traceback" not in str(error.value)
    assert isinstance(translated(error.value), DataError)


def test_invalid_arguments_of_functions_are_reported_immediately(spark, model):
    for call, error, words in [
        (lambda: register_keras_udf(spark, "two words", model), ConfigurationError, "letters, digits and underscores"),
        (lambda: register_keras_udf(spark, 3, model), ConfigurationError, "letters, digits and underscores"),
        (lambda: register_keras_udf(spark, "Upper", model), ConfigurationError, "'Upper': Spark has"),
        (lambda: keras_udf(model, on_invalid="drop"), ConfigurationError, "on_invalid"),
        (lambda: keras_udf("model"), ModelError, "expected a keras.Model"),
        (lambda: keras_udf(model)("a", "b", "c", "d"), ConfigurationError, "takes 3 numbers.* received 4"),
    ]:
        with pytest.raises(error, match=words):
            call()
