"""``cores_per_worker`` and ``gpus_per_worker``: fewer workers with a local master, resource profiles on clusters."""

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import keras
import numpy as np
import pytest

from sparkkeras import Checkpoint, ConfigurationError, SparkEnsemble, SparkModel, SparkRunner, to_data_frame, to_simple_rdd
from sparkkeras.hyperopt import HyperParamModel, uniform
from tests.conftest import long
from tests.models import regression
from tests.processes import clean_environment

X = np.random.default_rng(0).random((64, 3)).astype("float32")
Y = X.sum(axis=1)


class Noted(keras.callbacks.Callback):
    """Notes the cores and GPUs of a worker, and when it began and ended, in a file of its own."""

    def __init__(self, folder):
        super().__init__()
        self._folder = folder

    def on_train_begin(self, logs=None):
        self._began = time.time()
        self._steps = 0

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.2 * (not self._steps))
        self._steps += 1

    def on_train_end(self, logs=None):
        size = [os.environ["NPROC"], os.environ.get("CUDA_VISIBLE_DEVICES", "")]
        text = json.dumps({"size": size, "began": self._began, "ended": time.time()})
        (Path(self._folder) / f"{os.getpid()}-{self._began}").write_text(text)


def noted(folder):
    """What the workers have noted; removes it."""
    found = [json.loads(path.read_text()) for path in Path(folder).iterdir()]
    for path in Path(folder).iterdir():
        path.unlink()
    return found


def sizes(folder):
    """The distinct sizes of workers, and their number."""
    found = noted(folder)
    return sorted({tuple(each["size"]) for each in found}), len(found)


def fit(data, folder, mode="synchronous", **settings):
    model = SparkModel(regression(), mode, batch_size=8, **settings)
    model.fit(*(data if isinstance(data, tuple) else (data,)), verbose=0, worker_callbacks=[Noted(folder)])
    return model


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous", long("allreduce")])
def test_a_worker_of_a_local_master_has_all_cores_alone(mode, sc, spark, tmp_path):
    rows = sc.parallelize(list(zip(X, Y, strict=True)), 3)
    for data in [(X, Y), rows, to_data_frame(spark, X, Y).repartition(3)] if mode == "synchronous" else [rows]:
        model = fit(data, tmp_path, mode, cores_per_worker=2)
        assert sizes(tmp_path) == ([("2", "")], 1)
        assert {each["worker"] for each in model.training_histories} == {0}


def test_the_rounds_of_a_fit_and_its_validation_keep_their_size(sc, tmp_path):
    model = SparkModel(regression(), frequency=1, cores_per_worker=2)
    history = model.fit(X, Y, epochs=2, validation_data=(X, Y), verbose=0, worker_callbacks=[Noted(tmp_path)])
    assert len(history.history["val_loss"]) == 2
    assert sizes(tmp_path)[0] == [("2", "")]


def test_more_workers_than_the_cores_of_a_local_master_allow_give_a_warning(sc, tmp_path):
    with pytest.warns(UserWarning, match="num_workers=2, but"):
        fit((X, Y), tmp_path, num_workers=2, cores_per_worker=2)
    assert sizes(tmp_path) == ([("2", "")], 1)


def test_members_of_an_ensemble_take_turns_on_the_cores_of_a_local_master(sc, tmp_path):
    ensemble = SparkEnsemble([regression(seed=seed) for seed in range(3)], voting="average", cores_per_worker=2)
    ensemble.fit(X, Y, verbose=0, worker_callbacks=[Noted(tmp_path)])
    found = sorted(noted(tmp_path), key=lambda each: each["began"])
    assert [each["size"] for each in found] == [["2", ""]] * 3
    assert all(one["ended"] <= other["began"] for one, other in itertools.pairwise(found))


def test_the_size_of_workers_is_saved_and_may_change_when_training_is_resumed(sc, tmp_path):
    given = {"checkpoint": Checkpoint(str(tmp_path / "run")), "verbose": 0}
    SparkModel(regression(), num_workers=1, cores_per_worker=2).fit(X, Y, **given)
    restored = SparkModel.from_checkpoint(tmp_path / "run")
    assert restored.cores_per_worker == 2
    restored.cores_per_worker = None
    assert len(restored.fit(X, Y, epochs=2, resume=True, **given).history["loss"]) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cores_per_worker": 3}, r"cores_per_worker=3, but the master 'local\[2\]' has 2 cores"),
        ({"gpus_per_worker": 1}, r"gpus_per_worker=1: .*the master 'local\[2\]'"),
        ({"cores_per_worker": 0}, "cores_per_worker=0"),
    ],
)
def test_a_size_that_a_local_master_does_not_have_is_an_error(settings, message, sc):
    with pytest.raises(ConfigurationError, match=message):
        SparkModel(regression(), **settings).fit(X, Y, verbose=0)


# With executors of their own, in a program: `python -m tests.integration.test_worker_size KIND FOLDER DISCOVERY`

FOUR_CORES = "local-cluster[2,4,1024]"


@pytest.mark.cluster
def test_a_size_that_no_executor_has_is_an_error(sc):
    with pytest.raises(ConfigurationError, match="2 CPU cores: no executor"):
        SparkModel(regression(), cores_per_worker=2).fit(X, Y, verbose=0)
    with pytest.raises(ConfigurationError, match="no executor has"):
        HyperParamModel(sc, cores_per_trial=2).minimize(objective=abs, space=uniform(0, 1), max_evals=1)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["classic", pytest.param("connect", marks=pytest.mark.connect)])
def test_a_worker_on_a_cluster_has_cores_and_gpus_by_a_resource_profile(kind, tmp_path):
    discovery, notes = tmp_path / "gpus", tmp_path / "notes"
    discovery.write_text("""#!/bin/sh\necho '{"name": "gpu", "addresses": ["0", "1"]}'\n""")
    discovery.chmod(0o755)
    notes.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.test_worker_size", kind, str(notes), str(discovery)],
        cwd=Path(__file__).parent.parent.parent,
        env=clean_environment() | {"PYSPARK_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-5000:]


def main(kind, folder, discovery):
    """Train in all modes on executors of four cores and two GPUs, of which Spark gives a task one each by default."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.remote(FOUR_CORES) if kind == "connect" else SparkSession.builder.master(FOUR_CORES)
    builder = builder.config("spark.ui.enabled", "false").config("spark.driver.host", "127.0.0.1")
    amounts = {"worker.amount": 2, "executor.amount": 2, "task.amount": 1, "worker.discoveryScript": discovery}
    for name, value in amounts.items():
        where, setting = name.split(".")
        builder = builder.config(f"spark.{where}.resource.gpu.{setting}", value)
    spark = builder.getOrCreate()
    frame = spark.createDataFrame(
        [(x.tolist(), float(y)) for x, y in zip(X, Y, strict=True)], "features array<float>, label float"
    )
    frame = frame.repartition(4)
    one_gpu, two_gpus = [("2", "0"), ("2", "1")], [("1", "0,1")]
    for mode in ("synchronous", "allreduce", *(() if kind == "connect" else ("asynchronous",))):
        fit(frame, folder, mode, cores_per_worker=2)
        assert sizes(folder) == (one_gpu, 4), mode
        fit(frame, folder, mode, num_workers=2, gpus_per_worker=2)
        assert sizes(folder) == (two_gpus, 2), mode
    fit((X, Y), folder, cores_per_worker=4)
    found, workers = sizes(folder)
    assert {cores for cores, _ in found} == {"4"}
    assert workers == 2
    if kind == "classic":
        fit(to_simple_rdd(spark.sparkContext, X, Y, num_slices=4).filter(bool), folder, cores_per_worker=2)
        assert sizes(folder) == (one_gpu, 4)
        ensemble = SparkEnsemble([regression(seed=seed) for seed in range(3)], voting="average", cores_per_worker=2)
        ensemble.fit(X, Y, verbose=0, worker_callbacks=[Noted(folder)])
        assert {cores for cores, _ in sizes(folder)[0]} == {"2"}
        with pytest.raises(ConfigurationError, match="5 CPU cores and 1 GPU: no executor"):
            fit((X, Y), folder, cores_per_worker=5)
        ranks = SparkRunner(2, use_gpu=True, gpus_per_worker=2, verbose=0)
        assert ranks.run(os.getenv, "CUDA_VISIBLE_DEVICES") == ["0,1"] * 2
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
