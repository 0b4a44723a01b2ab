"""Files that an earlier version has written are read: one of each format that docs/policy.md promises to read.

``python -m tests.test_stored_files`` writes those that are missing. Never write one again without a new format.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest
from pyspark.sql import SparkSession

from sparkkeras import Checkpoint, EnsembleModel, SparkModel, load_ensemble_model, load_spark_model
from sparkkeras.hyperopt import HyperParamModel, uniform
from sparkkeras.hyperopt.workers import LocalWorkers
from sparkkeras.ml import KerasTransformer
from tests.models import regression

STORED = Path(__file__).with_name("stored")
X = np.arange(12, dtype=np.float32).reshape(4, 3)
WEIGHTS = np.array([[1], [2], [3]], np.float32), np.array([0.5], np.float32)
PREDICTED = X @ WEIGHTS[0] + WEIGHTS[1]
SPACE = {"bias": uniform(0, 1)}


def model(scale=1.0):
    made = regression()
    made.set_weights([scale * each for each in WEIGHTS])
    return made


def objective(params):
    return {"loss": params["bias"], "status": "ok", "model": model()}


@pytest.fixture
def copy(tmp_path):
    """Copies a stored folder, which is written to."""
    return lambda name: str(shutil.copytree(STORED / name, tmp_path / name))


def test_a_model_with_its_settings():
    loaded = load_spark_model(STORED / "model.keras")
    assert (loaded.mode, loaded.frequency, type(loaded.rule).__name__) == ("asynchronous", 5, "DCASGD")
    np.testing.assert_allclose(loaded.model.predict(X, verbose=0), PREDICTED)


def test_an_ensemble():
    loaded = load_ensemble_model(STORED / "ensemble.zip")
    np.testing.assert_allclose(loaded.predict(X, verbose=0), 2 * PREDICTED, rtol=1e-6)


def test_a_stage_of_spark_ml(spark):
    frame = spark.createDataFrame([(row.tolist(),) for row in X], "features array<float>")
    rows = KerasTransformer.load(str(STORED / "stage")).transform(frame).collect()
    np.testing.assert_allclose(np.ravel([row["predicted"] for row in rows]), np.ravel(PREDICTED))


def test_a_checkpoint_from_which_training_continues(sc, copy):
    folder = copy("checkpoints")
    continued = SparkModel.from_checkpoint(folder)
    before = continued.model.get_weights()
    history = continued.fit(X, PREDICTED, epochs=3, checkpoint=Checkpoint(folder), resume=True, verbose=0)
    assert history.epoch == [0, 1, 2]
    assert not np.array_equal(continued.model.get_weights()[0], before[0])


def test_a_search_that_repeats_no_trial(copy):
    def not_again(params):
        raise AssertionError

    search = HyperParamModel(LocalWorkers())
    best = search.minimize(objective=not_again, space=SPACE, max_evals=3, keep_models=1, save_to=copy("search"), verbose=0)
    assert [trial.value for trial in search.trials] == [trial.params["bias"] for trial in search.trials]
    assert len(search.trials) == 3
    np.testing.assert_allclose(best.predict(X, verbose=0), PREDICTED)


def write():
    """Write the files that are missing."""
    SparkSession.builder.master("local[2]").getOrCreate()
    writers = {
        "model.keras": lambda path: SparkModel(model(), mode="asynchronous", rule="dcasgd", frequency=5).save(path),
        "ensemble.zip": lambda path: EnsembleModel([model(), model(3.0)], voting="average").save(path),
        "stage": lambda path: KerasTransformer(model=model(), outputCol="predicted").save(str(path)),
        "checkpoints": lambda path: SparkModel(model(0.9), num_workers=2).fit(
            X, PREDICTED, epochs=2, checkpoint=Checkpoint(path, keep=1), verbose=0
        ),
        "search": lambda path: HyperParamModel(LocalWorkers()).minimize(
            objective=objective, space=SPACE, max_evals=3, seed=1, save_to=path, keep_models=1, verbose=0
        ),
    }
    STORED.mkdir(exist_ok=True)
    for name, made in writers.items():
        if not (STORED / name).exists():
            made(STORED / name)


if __name__ == "__main__":
    write()
