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
ELSEWHERE = {"plain", "nested", "validation_frame"}


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


def test_data_frames_after_an_adaptive_shuffle(spark, settings):
    """The number of partitions is known only after they have been read."""
    settings("spark.sql.adaptive.enabled", "true")
    settings("spark.sql.autoBroadcastJoinThreshold", "-1")
    frame = cases.frame(spark).groupBy("label").agg({"features": "first"}).withColumnRenamed("first(features)", "features")
    trained = SparkModel(cases.model())
    trained.fit(frame, epochs=2, verbose=0)
    assert sum(report["rows"] for report in trained.training_histories) == 2 * cases.CLASSES
