"""Saving and loading, with local paths and on file systems that Spark can access."""

from dataclasses import dataclass

import keras
import numpy as np
import pytest

from sparkkeras import ConfigurationError, ModelError, SparkModel, StorageError, load_spark_model
from sparkkeras.parameter.rules import DiLoCo
from tests.models import classifier


@pytest.fixture
def trained(sc, digits):
    x, y, *_ = digits
    spark_model = SparkModel(classifier(), frequency=5, num_workers=2, rule="diloco", batch_size=16, seed=9)
    spark_model.fit(x[:200], y[:200], verbose=0)
    return spark_model


@pytest.mark.parametrize("scheme", [pytest.param("", marks=pytest.mark.core), "file:"])
def test_a_round_trip(trained, digits, tmp_path, scheme):
    x, y, *_ = digits
    path = f"{scheme}{tmp_path}/model.keras"
    trained.save(path)
    loaded = load_spark_model(path)
    assert [file.name for file in tmp_path.iterdir() if not file.name.endswith(".crc")] == ["model.keras"]
    assert (loaded.mode, loaded.frequency, loaded.num_workers, loaded.batch_size) == ("synchronous", 5, 2, 16)
    assert loaded.rule == DiLoCo()
    np.testing.assert_array_equal(loaded.predict(x[:50]), trained.predict(x[:50]))
    # Optimizer, rule and seed continue from their saved states.
    for spark_model in (trained, loaded):
        spark_model.fit(x[:200], y[:200], verbose=0)
    for mine, other in zip(loaded.model.get_weights(), trained.model.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize("scheme", ["", "file:"])
def test_paths_that_cannot_be_read_or_written_are_reported(sc, tmp_path, scheme):
    spark_model, path = SparkModel(classifier()), f"{scheme}{tmp_path}/model.keras"
    with pytest.raises(StorageError, match="cannot read"):
        load_spark_model(path)
    spark_model.save(path)
    with pytest.raises(StorageError, match="already exists: pass overwrite=True"):
        spark_model.save(path, overwrite=False)
    spark_model.save(path)
    with pytest.raises(StorageError, match="cannot write"):
        spark_model.save(f"{tmp_path}/no/folder.keras")
    with pytest.raises(StorageError, match="nofs.*Add the client of this file system to Spark"):
        spark_model.save("nofs://host/model.keras")
    with pytest.raises(ConfigurationError, match=r"must end in \.keras"):
        spark_model.save(f"{scheme}{tmp_path}/model.h5")


def test_untrusted_files(tmp_path):
    path = str(tmp_path / "lambda.keras")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Lambda(lambda x: x * 2.0), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    SparkModel(model).save(path)
    with pytest.raises(ModelError, match="safe_mode=False if you trust the source of the file"):
        load_spark_model(path)
    load_spark_model(path, safe_mode=False)


@dataclass(frozen=True)
class Mine:
    modes = frozenset({"synchronous"})
    share: float = 0.5

    def init(self, center):
        return {}

    def apply(self, center, state, update, staleness):
        center += self.share * (update.sent - center)


def test_custom_rules_are_saved(tmp_path):
    SparkModel(classifier(), rule=Mine(0.25)).save(str(tmp_path / "own.keras"))
    with pytest.raises(ConfigurationError, match="custom_objects=.'Mine': Mine."):
        load_spark_model(str(tmp_path / "own.keras"))
    assert load_spark_model(str(tmp_path / "own.keras"), custom_objects={"Mine": Mine}).rule == Mine(0.25)
