"""Saving and loading, with local paths and on file systems that Spark can access."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import keras
import numpy as np
import pytest

from sparkkeras import ConfigurationError, ModelError, SparkModel, StorageError, load_spark_model
from sparkkeras.parameter.rules import DiLoCo
from sparkkeras.spark.filesystem import read_bytes, write_bytes
from tests.models import classifier


@pytest.fixture
def trained(sc, digits):
    x, y, *_ = digits
    spark_model = SparkModel(classifier(), frequency=5, num_workers=2, rule="diloco", batch_size=16, seed=9)
    spark_model.fit(x[:200], y[:200], verbose=0)
    return spark_model


@pytest.mark.parametrize("scheme", [pytest.param("", marks=pytest.mark.core), "file:", "file://"])
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


def test_plain_keras_loads_the_file(trained, tmp_path):
    trained.save(tmp_path / "model.keras")
    model = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(model.get_weights()[0], trained.model.get_weights()[0])
    assert int(model.optimizer.iterations) == int(trained.model.optimizer.iterations)


def test_files_of_plain_keras_are_loaded(tmp_path):
    classifier().save(tmp_path / "plain.keras")
    assert load_spark_model(str(tmp_path / "plain.keras")).frequency == "epoch"


@pytest.mark.parametrize("scheme", ["", "file:"])
def test_overwrite(sc, trained, tmp_path, scheme):
    path = f"{scheme}{tmp_path}/model.keras"
    trained.save(path)
    before = (tmp_path / "model.keras").read_bytes()
    with pytest.raises(StorageError, match="already exists: pass overwrite=True"):
        trained.save(path, overwrite=False)
    assert (tmp_path / "model.keras").read_bytes() == before
    trained.save(path)
    load_spark_model(path)


@pytest.mark.parametrize("scheme", ["", "file:"])
def test_missing_paths_are_reported(sc, trained, tmp_path, scheme):
    with pytest.raises(StorageError, match="cannot read"):
        load_spark_model(f"{scheme}{tmp_path}/none.keras")
    with pytest.raises(ConfigurationError, match=r"must end in \.keras"):
        trained.save(f"{scheme}{tmp_path}/model.h5")


def test_a_missing_folder_and_an_unknown_scheme(sc, trained, tmp_path):
    with pytest.raises(StorageError, match="cannot write"):
        trained.save(str(tmp_path / "no" / "folder.keras"))
    with pytest.raises(StorageError, match="nofs.*Add the client of this file system to Spark"):
        trained.save("nofs://host/model.keras")


def test_damaged_and_untrusted_files(tmp_path):
    (tmp_path / "damaged.keras").write_bytes(b"PK no zip")
    with pytest.raises(ModelError, match="not a .keras archive"):
        load_spark_model(str(tmp_path / "damaged.keras"))
    model = keras.Sequential([keras.Input((3,)), keras.layers.Lambda(lambda x: x * 2.0), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    SparkModel(model).save(str(tmp_path / "lambda.keras"))
    with pytest.raises(ModelError, match="safe_mode=False if you trust the source of the file"):
        load_spark_model(str(tmp_path / "lambda.keras"))
    load_spark_model(str(tmp_path / "lambda.keras"), safe_mode=False)


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


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_kill_leaves_the_old_file_or_the_new_one(tmp_path):
    """A fork of this process, which writes the file repeatedly, is killed."""
    path = str(tmp_path / "model.keras")
    SparkModel(classifier(units=256)).save(path)
    model = read_bytes(path)
    child = os.fork()
    if child == 0:
        try:
            while True:
                write_bytes(path, model)
        finally:
            os._exit(0)
    time.sleep(np.random.default_rng().uniform(0.05, 0.15))  # a random moment
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert len(load_spark_model(path).model.get_weights()) == 4


@pytest.mark.soak
def test_a_kill_while_a_model_is_saved_leaves_the_old_file_or_the_new_one(tmp_path):
    path = tmp_path / "model.keras"
    script = (
        "import sys; from sparkkeras import SparkModel; from tests.models import classifier\n"
        "spark_model = SparkModel(classifier(units=256)); spark_model.save(sys.argv[1]); print('ready', flush=True)\n"
        "while True: spark_model.save(sys.argv[1])\n"
    )
    generator = np.random.default_rng(0)
    for _ in range(20):
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(path)],
            stdout=subprocess.PIPE,
            env={**os.environ, "KERAS_BACKEND": "jax"},
            text=True,
        )
        assert process.stdout.readline() == "ready\n"
        process.stdout.close()
        time.sleep(generator.uniform(0, 0.3))  # a random moment
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert len(load_spark_model(str(path)).model.get_weights()) == 4
