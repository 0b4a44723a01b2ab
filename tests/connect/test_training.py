"""Synchronous training on DataFrames and arrays, with Spark Connect."""

import gc
import uuid
from pathlib import Path

import keras
import numpy as np
import pytest

from sparkkeras import DataError, SparkModel, to_data_frame
from tests.conftest import long
from tests.connect import cases
from tests.connect.conftest import server, stored


@keras.saving.register_keras_serializable("tests.connect")
class Scaled(keras.layers.Layer):
    """A layer of this module, which workers cannot import."""

    def build(self, shape):
        self.scale = self.add_weight(shape=shape[1:], initializer="ones", name="scale")

    def call(self, values):
        return values * self.scale


class Reads:
    """Yields rows unchanged, and creates a file each time that a partition is read."""

    def __init__(self, folder):
        self._folder = str(folder)

    def __call__(self, batches):
        (Path(self._folder) / uuid.uuid4().hex).touch()
        yield from batches


def same(weights, others):
    return len(weights) == len(others) and all(
        np.array_equal(one, other) for one, other in zip(weights, others, strict=True)
    )


# test_large.py and test_faults.py have the same with the others of the quick ones.
ELSEWHERE = {"plain", "two_ended", "validation_frame"}


@pytest.mark.parametrize("name", [name if name in cases.QUICK - ELSEWHERE else long(name) for name in cases.CASES])
def test_training_is_bit_identical_to_a_classic_session(spark, classic, name):
    trained, history = cases.CASES[name].train(spark)
    weights, expected = classic.of(name)
    assert history == expected
    assert same(trained.model.get_weights(), weights)
    assert not same(weights, cases.CASES[name]._model().get_weights())


def test_a_layer_of_the_calling_module_is_shipped(spark):
    model = keras.Sequential(
        [keras.Input((cases.WIDTH,)), Scaled(), keras.layers.Dense(cases.CLASSES, activation="softmax")]
    )
    model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
    trained = SparkModel(model, seed=0)
    trained.fit(cases.frame(spark), verbose=0)
    assert np.abs(model.get_weights()[0] - 1).max() > 0
    x, _ = cases.arrays()
    np.testing.assert_allclose(trained.predict(x), model.predict(x, verbose=0), rtol=1e-5)


def test_the_rows_are_read_once(spark, tmp_path):
    source = cases.frame(spark).select("features", "label")
    source = source.mapInArrow(Reads(tmp_path), source.schema)
    SparkModel(cases.model(), frequency=4).fit(source, epochs=2, validation_split=0.2, verbose=0)
    assert len(list(tmp_path.iterdir())) == 2


def test_no_files_or_rdds_remain(spark, local_dir):
    persisted = set(persistent())
    SparkModel(cases.model()).fit(cases.frame(spark), validation_data=cases.arrays(50), verbose=0)
    with pytest.raises(DataError, match="labels must be"):
        SparkModel(cases.model()).fit(cases.frame(spark).selectExpr("features", "label + 4 AS label"), verbose=0)
    assert not stored(local_dir)
    assert set(persistent()) <= persisted
    assert not spark.getTags()


def persistent():
    """The RDDs that the server persists."""
    gc.collect()
    return [int(number) for number in server()._jsc.getPersistentRDDs()]


def test_partitions_without_rows_do_not_count(spark):
    full = cases.frame(spark)
    history = SparkModel(cases.model()).fit(full.union(full.where("label < 0")), verbose=0)
    assert history.history["loss"][0] > 0


def test_a_data_frame_without_rows_is_rejected(spark):
    empty = cases.frame(spark).where("label < 0")
    with pytest.raises(DataError, match="no rows"):
        SparkModel(cases.model()).fit(empty, verbose=0)
    with pytest.raises(DataError, match="no rows"):
        SparkModel(cases.model()).evaluate(empty)


def test_columns_may_have_the_names_of_internal_columns(spark):
    x, y = cases.arrays()
    named = to_data_frame(spark, {"result": x, "token": y}, None)
    ours, theirs = (SparkModel(cases.model(), seed=2) for _ in range(2))
    ours.fit(named, features="result", label="token", verbose=0)
    theirs.fit(to_data_frame(spark, x, y), verbose=0)
    assert same(ours.model.get_weights(), theirs.model.get_weights())
    scored = ours.predict(named, features="result", output_col="bytes").toArrow()
    assert scored.column_names == ["result", "token", "bytes"]
    assert scored.column("token").to_pylist() == y.tolist()


@pytest.mark.soak
def test_many_partitions_and_small_batches(spark, settings):
    """With more than 64 workers, replicas are merged on the cluster."""
    settings("spark.sql.execution.arrow.maxRecordsPerBatch", "1")
    trained = SparkModel(cases.model(), num_workers=66, batch_size=2)
    history = trained.fit(cases.frame(spark), verbose=0)
    assert len(trained.training_histories) == 66
    assert sum(report["rows"] for report in trained.training_histories) == cases.ROWS
    assert np.isfinite(history.history["loss"]).all()


def test_data_frames_after_an_adaptive_shuffle(spark, settings):
    """The number of partitions is known only after they have been read."""
    settings("spark.sql.adaptive.enabled", "true")
    settings("spark.sql.autoBroadcastJoinThreshold", "-1")
    frame = cases.frame(spark).groupBy("label").agg({"features": "first"}).withColumnRenamed("first(features)", "features")
    trained = SparkModel(cases.model())
    trained.fit(frame, epochs=2, verbose=0)
    assert sum(report["rows"] for report in trained.training_histories) == 2 * cases.CLASSES


@pytest.mark.soak
@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="only TensorFlow has strings")
def test_a_column_of_strings(spark):
    text = np.array(["good film", "bad film", "", "😀 good\0"] * 10, object)
    labels = np.array([1.0, 0.0, 0.0, 1.0] * 10)
    frame = spark.createDataFrame(list(zip(text, labels, strict=True)), "text string, label double")
    model = keras.Sequential([keras.Input((1,), dtype="string", name="text")])
    model.add(keras.layers.TextVectorization(vocabulary=["good", "bad", "😀"], output_sequence_length=2))
    model.add(keras.layers.Embedding(5, 1))
    model.add(keras.layers.Flatten())
    model.add(keras.layers.Dense(1))
    model.compile(keras.optimizers.Adam(0.1), "mse")
    trained = SparkModel(model, batch_size=4, num_workers=2, seed=0)
    history = trained.fit(frame, features="text", epochs=3, verbose=0).history
    assert history["loss"][-1] < 0.7 * history["loss"][0]
    expected = model.evaluate(text, labels, batch_size=4, verbose=0)
    assert trained.evaluate(frame, features="text") == pytest.approx(expected, rel=1e-5)
    found = trained.predict(frame.union(spark.sql("SELECT CAST(NULL AS STRING), 0D")), features="text", on_invalid="null")
    *scores, null = found.toArrow().column("prediction").to_pylist()
    np.testing.assert_allclose(scores, model.predict(text, verbose=0)[:, 0], rtol=1e-4, atol=1e-6)
    assert null is None
