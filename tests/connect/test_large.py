"""Values too large for a pickled function, and results too large for the driver, with Spark Connect."""

import subprocess
import sys

import keras
import numpy as np
import pytest

import sparkkeras.sources.connect_partitions
import sparkkeras.sources.connect_values
import sparkkeras.spark.connect
from sparkkeras import ClusterError, SparkModel
from sparkkeras.sources.connect_values import write_files
from tests.connect import cases
from tests.connect.conftest import persistent, stored
from tests.processes import clean_environment
from tests.rpc.test_transports import eventually


def test_large_values_give_bit_identical_training(spark, classic, small_bounds, settings):
    settings("spark.sql.execution.arrow.maxRecordsPerBatch", "1")
    classic.check("nested", *cases.CASES["nested"].train(spark))


class Losing:
    """Writes shared values, and removes the files of the first ``times`` writes, as if Spark had moved the tasks to a
    machine without the files.
    """

    def __init__(self, folder, times):
        self._folder, self._times = folder, times
        self.written = {}

    def __call__(self, shared, cluster, handles):
        write_files(shared, cluster, handles)
        self.written[shared.token] = self.written.get(shared.token, 0) + 1
        if self.written[shared.token] <= self._times:
            found = [path for start in shared.starts for path in self._folder.rglob(shared.path(start).name)]
            assert len(found) == len(shared.starts)
            for path in found:
                path.unlink()


@pytest.mark.parametrize(
    "bound",
    [pytest.param(sparkkeras.spark.connect.RESULT_BYTES, marks=pytest.mark.soak), 1],
    ids=["to the driver", "on the cluster"],
)
def test_shared_values_with_missing_files_are_written_again(spark, classic, small_bounds, local_dir, monkeypatch, bound):
    monkeypatch.setattr(sparkkeras.spark.connect.RemoteCluster, "max_result_bytes", bound)
    losing = Losing(local_dir, 1)
    monkeypatch.setattr(sparkkeras.sources.connect_partitions, "write_files", losing)
    classic.check("validation_frame", *cases.CASES["validation_frame"].train(spark))
    # Archive and options; in each epoch a state for training, one for validation, and the validation options.
    assert len(losing.written) == 2 + 2 * 3
    assert min(losing.written.values()) > 1
    assert not values(local_dir)
    assert not stored(local_dir)


@pytest.mark.soak
def test_shared_values_that_are_always_missing_raise_an_error(spark, small_bounds, local_dir, monkeypatch):
    monkeypatch.setattr(sparkkeras.sources.connect_partitions, "write_files", Losing(local_dir, 99))
    with pytest.raises(ClusterError, match="written 3 times"):
        SparkModel(cases.model()).fit(cases.frame(spark), verbose=0)
    assert not values(local_dir)
    assert not stored(local_dir)


def test_shared_values_are_removed_after_use(spark, small_bounds, local_dir):
    seen = []
    look = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: seen.append(values(local_dir)))
    SparkModel(cases.model(), frequency=3).fit(cases.frame(spark), epochs=2, callbacks=[look], verbose=0)
    assert len(seen[0]) == 2  # archive and options, for the whole fit; the states of the rounds have been removed
    assert seen[0] == seen[1]
    assert not values(local_dir)


def values(folder):
    """The values that are stored in files below a folder."""
    return {path.name.rsplit("-", 1)[0] for path in folder.rglob("value-*")}


@pytest.mark.soak
def test_a_killed_executor_is_replaced(classic, tmp_path):
    """In a separate process, since this one has a session already."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.connect.executors", str(tmp_path), str(classic.folder)],
        cwd=cases.ROOT,
        env=clean_environment() | {"SPARK_TESTING": "1"},  # its server uses any free port
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=cases.SECONDS,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.soak
def test_the_server_releases_shared_values(spark, small_bounds):
    before = persistent()
    SparkModel(cases.model(), frequency=2).fit(cases.frame(spark), verbose=0)
    assert eventually(lambda: persistent() <= before)


@pytest.mark.soak
def test_a_model_of_70_mb_with_adam(spark):
    """The state has 210 MB: too large for a pickled function, and for one result from each worker."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(2900, activation="relu") for _ in range(3)]
    model = keras.Sequential([keras.Input((cases.WIDTH,)), *layers, keras.layers.Dense(cases.CLASSES, activation="softmax")])
    model.compile(keras.optimizers.Adam(1e-4), "sparse_categorical_crossentropy", metrics=["accuracy"])
    trained = SparkModel(model, batch_size=60, seed=0)
    history = trained.fit(cases.frame(spark), epochs=3, validation_split=0.2, verbose=0).history
    assert history["loss"][-1] < history["loss"][0]
    x, y = cases.arrays()
    np.testing.assert_allclose(trained.evaluate(x, y), model.evaluate(x, y, verbose=0), rtol=1e-4)
    found = np.array(trained.predict(cases.frame(spark)).toArrow().column("prediction").to_pylist())
    np.testing.assert_allclose(found, model.predict(x, verbose=0), rtol=1e-4, atol=1e-6)
