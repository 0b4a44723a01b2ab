"""`KerasTransformer`: the columns that it adds, compared with Keras's predictions."""

import keras
import numpy as np
import pytest
from pyspark.ml.evaluation import BinaryClassificationEvaluator
from pyspark.ml.functions import vector_to_array
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from sparkkeras import ConfigurationError, DataError, ModelError, SparkModel, to_data_frame
from sparkkeras.ml import KerasTransformer
from tests.ml import parts
from tests.models import classifier

pytestmark = pytest.mark.usefixtures("sc")

ROWS = np.random.default_rng(0).normal(size=(10, 4)).astype(np.float32)


@pytest.fixture
def spark(sc):
    return SparkSession(sc)


@pytest.fixture
def frame(spark):
    rows = [(number, row.tolist(), float(row[0]), float(row[1])) for number, row in enumerate(ROWS)]
    return spark.createDataFrame(rows, "id int, features array<float>, a double, b double").repartition(2)


def network(units=1, activation=None, loss=None, name="net"):
    keras.utils.set_random_seed(1)
    layers = [keras.Input((4,), name="x"), keras.layers.Dense(units, activation, name="end")]
    model = keras.Sequential(layers, name=name)
    model.set_weights([3 * weight for weight in model.get_weights()])
    if loss is not None:
        model.compile(loss=loss)
    return model


def two_by_two():
    keras.utils.set_random_seed(2)
    left, right = keras.Input((1,), name="left"), keras.Input((4,), name="right")
    both = keras.layers.Concatenate(name="both")([left, right])
    ends = [
        keras.layers.Dense(1, name="size")(both),
        keras.layers.Dense(3, "softmax", name="kind")(both),
    ]
    model = keras.Model([left, right], ends, name="twofold")
    model.compile(loss=["mse", "sparse_categorical_crossentropy"])
    return model


def found(transformed, *names):
    """The columns as arrays, ordered by id."""
    for name in names:
        if transformed.schema[name].dataType.simpleString() == "vector":
            transformed = transformed.withColumn(name, vector_to_array(name))
    rows = sorted(transformed.select("id", *names).collect())
    columns = [np.array([row[name] for row in rows]) for name in names]
    return columns if len(columns) > 1 else columns[0]


def test_regression_without_a_loss(frame):
    model = network()
    output, prediction = found(KerasTransformer(model=model).transform(frame), "output", "prediction")
    np.testing.assert_allclose(output, model.predict(ROWS, verbose=0)[:, 0], rtol=1e-6)
    np.testing.assert_array_equal(output, prediction)


@pytest.mark.parametrize("from_logits", [False, True])
def test_binary(frame, from_logits):
    loss = keras.losses.BinaryCrossentropy(from_logits=from_logits)
    scorer = KerasTransformer(model=network(1, None if from_logits else "sigmoid", loss))
    scored = scorer.transform(frame).cache()
    assert scored.columns[4:] == ["output", "rawPrediction", "probability", "prediction"]
    output, raw, probability, prediction = found(scored, *scored.columns[4:])
    logits = (ROWS @ scorer.get_model().get_weights()[0])[:, 0]
    p = 1 / (1 + np.exp(-logits))
    np.testing.assert_allclose(output, logits if from_logits else p, rtol=1e-5)
    np.testing.assert_allclose(raw, np.stack([-logits, logits], axis=1), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(probability, np.stack([1 - p, p], axis=1), atol=1e-6)
    np.testing.assert_array_equal(prediction, p > 0.5)
    labelled = scored.selectExpr("*", "double(a > 0) as label")
    expected = BinaryClassificationEvaluator(rawPredictionCol="probability").evaluate(labelled)
    assert BinaryClassificationEvaluator().evaluate(labelled) == pytest.approx(expected)
    stricter = found(scorer.transform(frame, {scorer.thresholds: [0.2, 0.8]}), "prediction")
    np.testing.assert_array_equal(stricter, p > 0.8)
    assert stricter.sum() < prediction.sum()


@pytest.mark.parametrize("from_logits", [False, True])
def test_multiclass(frame, from_logits):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=from_logits)
    model = network(3, None if from_logits else "softmax", loss)
    scorer = KerasTransformer(model=model, outputType="vector")
    scored = scorer.transform(frame)
    output, raw, probability, prediction = found(scored, "output", "rawPrediction", "probability", "prediction")
    expected = model.predict(ROWS, verbose=0)
    np.testing.assert_allclose(output, expected, rtol=1e-5)
    np.testing.assert_allclose(raw, expected if from_logits else np.log(expected), rtol=1e-5, atol=1e-6)
    powers = np.exp(raw)
    np.testing.assert_allclose(probability, powers / powers.sum(axis=1, keepdims=True), atol=1e-6)
    np.testing.assert_array_equal(prediction, expected.argmax(axis=1))
    assert len(set(prediction)) > 1
    weighted = found(scorer.setThresholds([0.9, 0.5, 0.01]).transform(frame), "prediction")
    np.testing.assert_array_equal(weighted, (probability / [0.9, 0.5, 0.01]).argmax(axis=1))
    assert (weighted != prediction).any()
    always = found(scorer.setThresholds([1, 0, 1]).transform(frame), "prediction")
    assert set(always) == {1.0}  # as in Spark: a probability over 0 divided by a threshold of 0 is infinite


@pytest.mark.parametrize("from_logits", [False, True])
def test_multilabel(frame, from_logits):
    model = network(3, None if from_logits else "sigmoid", keras.losses.BinaryCrossentropy(from_logits=from_logits))
    transformed = KerasTransformer(model=model).transform(frame)
    assert transformed.schema == KerasTransformer(model=model).transformSchema(frame.schema)
    expected = model.predict(ROWS, verbose=0).astype(float)
    p = 1 / (1 + np.exp(-expected)) if from_logits else expected
    np.testing.assert_allclose(found(transformed, "probability"), p, atol=1e-6)
    rows = sorted(transformed.select("id", "prediction").collect())
    assert [row.prediction for row in rows] == [[float(n) for n in np.flatnonzero(row > 0.5)] for row in p]


def test_extreme_probabilities_and_logits(frame):
    model = network(1, "sigmoid", "binary_crossentropy")
    model.set_weights([1e4 * weight for weight in model.get_weights()])
    raw, output = found(KerasTransformer(model=model).transform(frame), "rawPrediction", "output")
    assert set(output) == {0.0, 1.0}
    np.testing.assert_allclose(raw[:, 1], np.where(output == 1, 1, -1) * -np.log(np.finfo(float).tiny))
    model = network(3, None, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.set_weights([np.zeros((4, 3)), np.array([2000.0, 0.0, -2000.0])])
    scorer = KerasTransformer(model=model, thresholds=[1, 1, 0])
    probability, prediction = found(scorer.transform(frame), "probability", "prediction")
    np.testing.assert_allclose(probability.sum(axis=1), 1)
    assert set(prediction) == {0.0}  # a class with probability 0 and threshold 0 is not predicted


def test_several_inputs_and_outputs(frame):
    model = two_by_two()
    scorer = KerasTransformer(model=model, featuresCol={"left": "a", "right": "features"}, outputType="vector")
    transformed = scorer.transform(frame)
    schema = scorer.transformSchema(frame.schema)
    assert schema == transformed.schema
    assert [field.metadata for field in schema] == [field.metadata for field in transformed.schema]
    size, kind = model.predict({"left": ROWS[:, :1], "right": ROWS}, verbose=0)
    got = found(transformed, "output_size", "prediction_size", "output_kind", "probability_kind", "prediction_kind")
    for mine, expected in zip(got, [size[:, 0], size[:, 0], kind, kind, kind.argmax(axis=1)], strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-7)
    assert transformed.columns[4:] == [
        "output_size", "prediction_size", "output_kind", "rawPrediction_kind", "probability_kind", "prediction_kind",
    ]  # fmt: skip
    without = dict.fromkeys([scorer.outputCol, scorer.rawPredictionCol, scorer.probabilityCol], "")
    by_name = scorer.copy({**without, scorer.predictionCol: {"kind": "sort"}})
    assert by_name.transform(frame).columns[4:] == ["sort"]


def test_the_model_runs_once_for_all_columns(frame):
    scored = KerasTransformer(model=network(3, "softmax", "categorical_crossentropy")).transform(frame)
    plan = scored.where("prediction > 0")._jdf.queryExecution().executedPlan().toString()
    assert plan.count("ArrowEvalPython") == 1


def test_empty_names_omit_columns(frame):
    scorer = KerasTransformer(
        model=network(1, "sigmoid", "binary_crossentropy"), outputCol="", probabilityCol="", rawPredictionCol=""
    )
    assert scorer.transform(frame).columns == [*frame.columns, "prediction"]
    with pytest.warns(
        UserWarning, match="adds no columns: outputCol, rawPredictionCol, probabilityCol and predictionCol are all"
    ) as warned:
        assert scorer.setPredictionCol("").transform(frame).columns == frame.columns
    assert warned[0].filename == __file__


def test_unused_columns_with_dots_or_duplicate_names_are_allowed(spark, frame):
    odd = frame.withColumnRenamed("a", "a.b").select("*", frame.b)
    assert KerasTransformer(model=network()).transform(odd).select("output").count() == 10


@pytest.mark.parametrize(("units", "task"), [(1, "regression"), (1, "binary"), (3, "multiclass"), (3, "multilabel")])
def test_rows_without_features_and_with_a_nan_output_have_no_prediction(spark, units, task):
    rows = [(0, [1.0, 2.0, 3.0, 4.0]), (1, None), (2, [0.0] * 4)]
    frame = spark.createDataFrame(rows, "id int, features array<double>")
    scorer = KerasTransformer(model=network(units), batch_transform=parts.nan_for_zeros, task=task, handleInvalid="keep")
    whole, empty, undefined = sorted(scorer.transform(frame).collect(), key=lambda row: row.id)
    assert None not in whole
    assert set(empty[2:]) == {None}
    assert np.isnan(undefined.output).all()
    assert undefined.prediction is None or task == "regression"
    with pytest.raises(Exception, match=r"column 'features' has a null.* \(in Spark ML handleInvalid=\"keep\"\)"):
        scorer.setHandleInvalid("error").transform(frame).collect()


def test_columns_that_differ_only_in_case_with_case_sensitive_spark(spark, frame):
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        twins = frame.withColumnRenamed("a", "Features").withColumnRenamed("id", "Prediction")
        scored = KerasTransformer(model=network()).transform(twins)
        assert {"Prediction", "prediction"} < set(scored.columns)
        assert scored.count() == len(ROWS)
        assert SparkModel(network(1, None, "mse")).predict(twins, output_col="FEATURES").count() == len(ROWS)
    finally:
        spark.conf.unset("spark.sql.caseSensitive")


def test_columns_that_differ_only_in_case_are_reported(spark, frame):
    twins = frame.withColumnRenamed("a", "Features")
    with pytest.raises(DataError, match="columns whose names Spark does not distinguish"):
        KerasTransformer(model=network()).transform(twins)
    with pytest.raises(ConfigurationError, match=r"'prediction' already exists as 'Prediction' \(Spark ignores case\)"):
        KerasTransformer(model=network()).transform(frame.withColumnRenamed("a", "Prediction"))


def test_evaluate_returns_the_same_values_as_keras(spark):
    keras.utils.set_random_seed(0)
    model = classifier(4, 5, 3)
    labels, weights = np.arange(10) % 3, np.linspace(0.5, 2, 10)
    frame = to_data_frame(spark, ROWS, labels, sample_weight=weights)
    expected = model.evaluate(ROWS, labels, sample_weight=weights, verbose=0, return_dict=True)
    logs = KerasTransformer(model=model, weightCol="weight").evaluate(frame)
    assert logs == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ModelError, match="is not compiled"):
        KerasTransformer(model=network(3)).evaluate(frame)


def test_errors_are_raised_on_the_driver_before_a_job(spark, frame):
    scorer = KerasTransformer(model=network())
    with pytest.raises(ConfigurationError, match="the output column 'output' already exists"):
        scorer.transform(frame.withColumnRenamed("a", "output"))
    with pytest.raises(ConfigurationError, match="two new columns have the name 'output'"):
        scorer.transform(frame, {scorer.predictionCol: "output"})
    with pytest.raises(DataError, match="no column 'pixels'"):
        KerasTransformer(model=network(), featuresCol="pixels").transform(frame)
    with pytest.raises(ModelError, match="this KerasTransformer has no model"):
        KerasTransformer().transform(frame)

    with pytest.raises(DataError, match="has the type string"):
        KerasTransformer(model=network()).transformSchema(StructType().add("features", "string"))
