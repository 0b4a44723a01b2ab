"""Prediction and evaluation on Spark."""

import keras
import numpy as np
import pytest
from scipy import sparse

from sparkkeras import ConfigurationError, DataError, EnsembleModel, SparkModel, to_simple_rdd
from tests.models import classifier


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
    x, *_ = digits
    rdd = sc.parallelize(list(x), 3)
    spark_model.predict(rdd)  # the first job of a context probes the cluster
    sc.setJobGroup("predict", "counting stages")
    try:
        spark_model.predict(rdd)
        tracker = sc.statusTracker()
        stages = [stage for job in tracker.getJobIdsForGroup("predict") for stage in tracker.getJobInfo(job).stageIds]
    finally:
        sc.setLocalProperty("spark.jobGroup.id", None)
    assert len(stages) == 1


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


def test_evaluate_equals_keras_on_one_output(sc):
    generator = np.random.default_rng(1)
    x = generator.random((203, 6)).astype(np.float32)
    y = (x.sum(1) + generator.normal(0, 0.5, 203) > 3).astype(np.float32)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, activation="sigmoid")])
    model.compile("sgd", "binary_crossentropy", metrics=["accuracy", keras.metrics.AUC()])
    rows = sc.parallelize(list(zip(x, y, strict=True)), 4).union(sc.parallelize([], 1))
    np.testing.assert_allclose(SparkModel(model).evaluate(rows), model.evaluate(x, y, verbose=0), rtol=1e-5, atol=1e-6)


def test_evaluate_equals_keras_on_classes(sc, digits, capsys):
    _, _, x, y = digits
    metrics = ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(3), keras.metrics.MeanIoU(10, sparse_y_pred=False)]
    model = classifier(metrics=metrics, weighted_metrics=["accuracy"])
    weight = np.linspace(0.1, 2, len(x)).astype(np.float32)
    expected = model.evaluate(x, y, sample_weight=weight, verbose=0)
    rows = sc.parallelize(list(zip(x, y, weight, strict=True)), 3)
    np.testing.assert_allclose(SparkModel(model).evaluate(rows), expected, rtol=1e-5)
    named = SparkModel(model).evaluate(x, y, sample_weight=weight, return_dict=True, verbose=1)
    assert named == pytest.approx(model.evaluate(x, y, sample_weight=weight, verbose=0, return_dict=True), rel=1e-5)
    assert "accuracy: " in capsys.readouterr().out


def test_predictions_keep_the_keys_of_their_rows(sc, digits, spark_model):
    x, *_ = digits
    expected = spark_model.model.predict(x[:50], verbose=0)
    keys = [{"id": number} if number % 2 else (number, "even") for number in range(50)]
    rows = sc.parallelize(list(zip(keys, x[:50], strict=True)), 3).union(sc.parallelize([], 1))
    pairs = spark_model.predict(rows, keyed=True)
    lazy = spark_model.predict(rows.map(lambda row: (row[0], (row[1], 1))), keyed=True, collect=False)
    assert lazy.getNumPartitions() == rows.getNumPartitions()
    for found in pairs, lazy.collect():
        assert [key for key, _ in found] == keys
        np.testing.assert_allclose([prediction for _, prediction in found], expected, rtol=1e-4, atol=1e-6)
    missing = sc.parallelize([("a", x[0]), ("b", None)], 1)
    (_, one), (key, nothing) = spark_model.predict(missing, keyed=True, on_invalid="allow")
    assert key == "b"
    assert nothing.shape == one.shape
    with pytest.raises(DataError, match="x of row 1 of partition 0 has missing values"):
        spark_model.predict(missing, keyed=True)
    with pytest.raises(DataError, match=r"row 0 of partition 0 is an array .*; with keyed=True, expected a pair \(key, x\)"):
        spark_model.predict(sc.parallelize(list(x[:2]), 1), keyed=True)


def test_only_rdds_have_keys(spark, digits, spark_model):
    with pytest.raises(ConfigurationError, match=r"received an array .*; predictions of arrays are in the order.* zip\("):
        spark_model.predict(digits[0], keyed=True)
    with pytest.raises(ConfigurationError, match="received a Spark DataFrame; predictions of a DataFrame are a column"):
        spark_model.predict(spark.range(1), keyed=True)
    with pytest.raises(ConfigurationError, match="keyed='id': expected True or False"):
        spark_model.predict(spark.range(1), keyed="id")


def test_sparse_matrices_give_the_results_of_dense_arrays(sc, digits, spark_model):
    x, y, *_ = digits
    x, y = x[:200], y[:200]
    matrix = sparse.csc_matrix(x)
    expected = spark_model.predict(x)
    rows = to_simple_rdd(sc, matrix, y, num_slices=3)
    members = EnsembleModel([spark_model.model, spark_model.model])
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
