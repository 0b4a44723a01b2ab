"""The conventions of Spark's classifiers: raw predictions and thresholds."""

import keras
import numpy as np
import pytest
from pyspark.ml.evaluation import BinaryClassificationEvaluator
from pyspark.ml.functions import vector_to_array
from pyspark.sql import SparkSession

from sparkkeras.ml import KerasTransformer

pytestmark = pytest.mark.usefixtures("sc")

ROWS = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)


@pytest.fixture
def frame(sc):
    rows = [(number, row.tolist(), float(row[0] > 0)) for number, row in enumerate(ROWS)]
    return SparkSession(sc).createDataFrame(rows, "id int, features array<float>, label double").repartition(2)


def network(units, activation, loss):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,), name="x"), keras.layers.Dense(units, activation, name="end")], name="net")
    model.compile(loss=loss)
    return model


def found(transformed, *names):
    """The columns as arrays, ordered by id."""
    vectors = [name for name in names if transformed.schema[name].dataType.simpleString() == "vector"]
    rows = sorted(transformed.withColumns({name: vector_to_array(name) for name in vectors}).select("id", *names).collect())
    return [np.array([row[name] for row in rows]) for name in names]


@pytest.mark.parametrize("from_logits", [False, True])
def test_a_binary_evaluator_works_with_default_columns(frame, from_logits):
    model = network(1, None if from_logits else "sigmoid", keras.losses.BinaryCrossentropy(from_logits=from_logits))
    scorer = KerasTransformer(model=model)
    scored = scorer.transform(frame).cache()
    expected = BinaryClassificationEvaluator(rawPredictionCol="probability").evaluate(scored)
    assert BinaryClassificationEvaluator().evaluate(scored) == pytest.approx(expected)
    logits = (ROWS @ model.get_weights()[0])[:, 0]
    raw, prediction = found(scored, "rawPrediction", "prediction")
    np.testing.assert_allclose(raw, np.stack([-logits, logits], axis=1), rtol=1e-4, atol=1e-5)
    assert scored.columns[3:] == ["output", "rawPrediction", "probability", "prediction"]
    (stricter,) = found(scorer.transform(frame, {scorer.thresholds: [0.2, 0.8]}), "prediction")
    np.testing.assert_array_equal(stricter, 1 / (1 + np.exp(-logits)) > 0.8)
    assert stricter.sum() < prediction.sum()


def test_probabilities_of_0_and_1_have_finite_logits(frame):
    model = network(1, "sigmoid", "binary_crossentropy")
    model.set_weights([1e4 * weight for weight in model.get_weights()])
    raw, output = found(KerasTransformer(model=model).transform(frame), "rawPrediction", "output")
    assert set(output) == {0.0, 1.0}
    np.testing.assert_allclose(raw[:, 1], np.where(output == 1, 1, -1) * -np.log(np.finfo(float).tiny))


@pytest.mark.parametrize("from_logits", [False, True])
def test_thresholds_divide_probabilities(frame, from_logits):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=from_logits)
    model = network(3, None if from_logits else "softmax", loss)
    scorer = KerasTransformer(model=model, thresholds=[0.9, 0.2, 0.4])
    raw, probability, prediction = found(scorer.transform(frame), "rawPrediction", "probability", "prediction")
    logits = model.predict(ROWS, verbose=0)
    np.testing.assert_allclose(raw, logits if from_logits else np.log(logits), rtol=1e-5)
    np.testing.assert_array_equal(prediction, (probability / [0.9, 0.2, 0.4]).argmax(axis=1))
    assert (prediction != probability.argmax(axis=1)).any()
    (always,) = found(scorer.setThresholds([1, 0, 1]).transform(frame), "prediction")
    assert set(always) == {1.0}  # as in Spark: a probability over 0 divided by a threshold of 0 is infinite


def test_a_class_with_probability_0_and_threshold_0_is_not_predicted(frame):
    model = network(3, "softmax", "sparse_categorical_crossentropy")
    model.set_weights([np.zeros((4, 3)), np.array([500.0, 0.0, -500.0])])
    scorer = KerasTransformer(model=model, thresholds=[1, 1, 0])
    (prediction,) = found(scorer.transform(frame), "prediction")
    assert set(prediction) == {0.0}
