"""Text from a DataFrame to predictions through Spark: a column of strings and one of numbers."""

import keras
import numpy as np
import pytest
from pyspark.sql import functions as F

from sparkkeras import SparkModel, from_data_frame, keras_udf, to_data_frame

WORDS = ["good", "bad", "😀"]
Y = np.random.default_rng(0).integers(0, 2, 60)
TEXT = [f"{WORDS[1 - label]} film" + " 😀\0" * (row % 3) for row, label in enumerate(Y)]
SIZE = np.random.default_rng(1).normal(size=60)

pytestmark = pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="only TensorFlow has strings")


def model():
    keras.utils.set_random_seed(0)
    text, size = keras.Input((1,), dtype="string", name="text"), keras.Input((1,), name="size")
    indices = keras.layers.TextVectorization(vocabulary=WORDS, output_sequence_length=4, name="words")(text)
    mean = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(5, 4)(indices))
    outputs = keras.layers.Dense(1, activation="sigmoid", name="good")(keras.layers.concatenate([mean, size]))
    made = keras.Model([text, size], outputs)
    made.compile(keras.optimizers.Adam(0.1), "binary_crossentropy")
    return made


def test_columns_of_text_and_numbers(spark):
    rows = [(text, float(size), int(label)) for text, size, label in zip(TEXT, SIZE, Y, strict=True)]
    frame = spark.createDataFrame(rows, "text string, size double, good int").repartition(2)
    collected, _ = from_data_frame(frame, features="text", label=None)
    assert type(collected) is np.ndarray
    assert sorted(collected) == sorted(TEXT)
    assert from_data_frame(to_data_frame(spark, collected), label=None)[0].tolist() == collected.tolist()
    spark_model = SparkModel(model(), seed=0)
    losses = spark_model.fit(frame, epochs=6, batch_size=8, verbose=0, validation_split=0.2).history["loss"]
    assert losses[-1] < 0.6 * losses[0]
    arrays = np.array(TEXT, object), SIZE
    expected = spark_model.model.predict(arrays, verbose=0).reshape(-1)
    np.testing.assert_allclose(spark_model.predict(arrays).reshape(-1), expected, rtol=1e-5)
    loss = spark_model.model.evaluate(arrays, Y, verbose=0)
    np.testing.assert_allclose(spark_model.evaluate(frame, verbose=0), loss, rtol=1e-5)
    nulls = frame.withColumn("text", F.when(F.col("good") == 1, F.col("text")))
    assert spark_model.predict(nulls, on_invalid="null").where("prediction is null").count() == (Y == 0).sum()
    scores = dict(zip(zip(TEXT, SIZE, strict=True), expected, strict=True))
    for text, size, score in frame.select("text", "size", keras_udf(spark_model.model)("text", "size")).collect():
        np.testing.assert_allclose(score, scores[text, size], rtol=1e-4)
