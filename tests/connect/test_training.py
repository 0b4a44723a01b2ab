"""Synchronous training on DataFrames and arrays, with Spark Connect."""

import uuid
from pathlib import Path

import keras
import numpy as np
import pytest

from sparkkeras import DataError, KeyedModel, SparkModel, adapt, to_data_frame
from sparkkeras.data.reader import Reader
from sparkkeras.data.schema import Schema
from sparkkeras.sources.source import as_source
from tests.conftest import long
from tests.connect import cases
from tests.connect.conftest import persistent, stored
from tests.models import regression, same
from tests.sources.conformance import PARTS, DatasetConformance, numbered_block


class Reads:
    """Yields rows unchanged, and creates a file each time that a partition is read."""

    def __init__(self, folder):
        self._folder = str(folder)

    def __call__(self, batches):
        (Path(self._folder) / uuid.uuid4().hex).touch()
        yield from batches


# test_large.py, test_faults.py and test_allreduce.py have the same with the others of the quick ones.
ELSEWHERE = {"plain", "nested", "validation_frame", "allreduce"}


@pytest.mark.parametrize("name", [name if name in cases.QUICK - ELSEWHERE else long(name) for name in cases.CASES])
def test_training_is_bit_identical_to_a_classic_session(spark, classic, name):
    classic.check(name, *cases.CASES[name].train(spark))


def test_the_rows_are_read_once(spark, tmp_path):
    source = cases.frame(spark).select("features", "label")
    source = source.mapInArrow(Reads(tmp_path), source.schema)
    SparkModel(cases.model(), frequency=4).fit(source, epochs=2, validation_split=0.2, verbose=0)
    assert len(list(tmp_path.iterdir())) == 2


def test_no_files_or_rdds_remain(spark, local_dir):
    before = persistent()
    SparkModel(cases.model()).fit(cases.frame(spark), validation_data=cases.arrays(50), verbose=0)
    with pytest.raises(DataError, match="labels must be .*from 4 to 7"):
        SparkModel(cases.model()).fit(cases.frame(spark).selectExpr("features", "label + 4 AS label"), verbose=0)
    assert not stored(local_dir)
    assert persistent() <= before
    assert not spark.getTags()


def test_partitions_without_rows_do_not_count_and_data_without_rows_is_rejected(spark):
    full = cases.frame(spark)
    empty = full.where("label < 0")
    assert SparkModel(cases.model()).fit(full.union(empty), verbose=0).history["loss"][0] > 0
    for call in (SparkModel(cases.model()).fit, SparkModel(cases.model()).evaluate):
        with pytest.raises(DataError, match="no rows"):
            call(empty, verbose=0)


def test_columns_may_have_the_names_of_internal_columns(spark):
    x, y = cases.arrays()
    named = to_data_frame(spark, {"result": x, "token": y}, None)
    ours, theirs = (SparkModel(cases.model(), seed=2) for _ in range(2))
    ours.fit(named, features="result", label="token", verbose=0)
    theirs.fit(to_data_frame(spark, x, y), verbose=0)
    assert same(ours, theirs)
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


def remote_frame_repartitioned(spark, block):
    return as_source(to_data_frame(spark, block.x, block.y), Reader(Schema())).dataset(PARTS)


def remote_arrays(spark, block):
    return as_source(block.x, Reader(Schema()), block.y).dataset(PARTS)


@pytest.mark.soak  # training, with missing files and large values, depends on all of it
class TestDatasets(DatasetConformance):
    """The conformance suite of `tests.sources.conformance`."""

    @pytest.fixture(params=[remote_frame_repartitioned, remote_arrays], ids=lambda make: make.__name__)
    def dataset(self, request, spark):
        with request.param(spark, numbered_block()) as dataset:
            yield dataset

    def test_tasks_cannot_reach_the_driver(self, dataset):
        with dataset.stored() as stored:
            assert not stored.is_driver_here


def test_a_model_for_each_key(spark, tmp_path):
    draw = np.random.default_rng(0)
    found = [(key, *draw.random(2).tolist()) for key in range(3) for _ in range(20)]
    frame = spark.createDataFrame(found, "store int, x double, y double").repartition(3)
    keyed = KeyedModel(regression(1), "store", seed=1)
    metrics = keyed.fit(frame, features="x", label="y", epochs=2, verbose=0, save_to=str(tmp_path / "models"))
    found = [(row.store, row.rows, row.error) for row in metrics.orderBy("store").collect()]
    assert found == [(key, 20, None) for key in range(3)]
    kept = KeyedModel(regression(1), "store", seed=1)
    kept.fit(frame, features="x", label="y", epochs=2, verbose=0)
    for key in range(3):
        model = keyed.models[key]
        np.testing.assert_equal(model.get_weights(), kept.models[key].get_weights())
        rows = [row for row in kept.predict(frame).collect() if row.store == key]
        expected = model.predict(np.array([[row.x] for row in rows]), verbose=0)[:, 0]
        np.testing.assert_allclose([row.prediction for row in rows], expected, rtol=1e-5)
    assert keyed.evaluate(frame).where("loss > 0 AND rows = 20").count() == 3


def test_layers_are_adapted(spark):
    frame = cases.frame(spark)
    layer = adapt(keras.layers.Normalization(), frame, features="features")
    np.testing.assert_allclose(np.ravel(layer.mean), cases.arrays()[0].mean(0), rtol=1e-4, atol=1e-5)
    words = spark.range(100).selectExpr("id", "CAST(CAST(sqrt(id) AS int) AS string) AS word").repartition(3)
    lookup, plain = keras.layers.StringLookup(max_tokens=5), keras.layers.StringLookup(max_tokens=5)
    plain.adapt(np.array([[row.word] for row in words.collect()]))
    assert adapt(lookup, words, features="word").get_vocabulary() == plain.get_vocabulary()
