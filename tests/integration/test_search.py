"""Searches on Spark: workers, their processes and their failures; tests/hyperopt/test_search.py has everything else."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from pathlib import Path

import hyperopt
import keras
import numpy as np
import psutil
import pytest
from hyperopt import hp

from sparkkeras import ServerOptions, to_data_frame, to_simple_rdd
from sparkkeras.errors import ClusterError, ConfigurationError, DataError
from sparkkeras.hyperopt import HyperParamModel, SparkTrials, report
from tests.conftest import settle
from tests.processes import interrupted_when

LINE = {"x": hp.uniform("x", -10, 10)}
SPACE = {"units": hp.choice("units", [8, 16, 32]), "lr": hp.loguniform("lr", -7, -3)}


def build(params):
    model = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(params["units"], "relu"), keras.layers.Dense(10, "softmax")]
    )
    model.compile(keras.optimizers.Adam(params["lr"]), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def search_of(sc, num_workers=None, transport="socket", **arguments):
    # Lost workers are noticed by their closed connection; a machine that pauses for seconds must not look lost.
    options = ServerOptions(lease_seconds=100)
    search = HyperParamModel(sc, num_workers, transport=transport, server_options=options)
    search.minimize(**{"space": LINE, "max_evals": 5, "seed": 1, "verbose": 0, **arguments})
    return search


@pytest.mark.core
def test_the_best_model_and_an_ensemble(sc, digits):
    x, y, x_test, y_test = digits
    search = HyperParamModel(sc)
    best = search.minimize(
        model=build, data=(x, y), space=SPACE, max_evals=2, epochs=4, validation_split=0.2, seed=3, verbose=0
    )
    assert search.best_value == min(trial.value for trial in search.trials) == min(search.best_trial.history["val_loss"])
    assert best.evaluate(x[-280:], y[-280:], verbose=0)[0] == pytest.approx(search.best_value, rel=1e-4)
    assert [(trial.number, trial.status, trial.epochs) for trial in search.trials] == [(0, "ok", 4), (1, "ok", 4)]
    assert {trial.worker.split("/")[1] for trial in search.trials} == {"0", "1"}
    assert (search.best_ensemble(2).predict(x_test).argmax(axis=1) == y_test).mean() > 0.8


def test_http_transport(sc):
    assert len(search_of(sc, objective=lambda params: params["x"] ** 2, transport="http", max_evals=2).trials) == 2


# Data


@pytest.fixture
def large(sc, monkeypatch):
    """All data on Spark counts as too large to be sent by the driver. Afterwards Spark keeps no rows of it."""
    monkeypatch.setattr("sparkkeras.hyperopt.data.SENT_BYTES", 0)
    monkeypatch.delattr("sparkkeras.sources.copies.KeptRows.collect")
    before = set(sc._jsc.getPersistentRDDs())
    yield
    assert set(sc._jsc.getPersistentRDDs()) <= before


@pytest.mark.parametrize("kind", ["DataFrame", "RDD"])
def test_an_objective_gets_all_rows_in_their_order_from_one_file_if_there_are_many(sc, spark, digits, request, kind):
    x, y, _, _ = digits
    if kind == "DataFrame":
        given = {"data": to_data_frame(spark, x, y).withColumnRenamed("label", "digit"), "label": "digit"}
    else:
        given = {"data": to_simple_rdd(sc, x, y, num_slices=5)}

    def compared(params, data):
        features, labels = data
        same = np.array_equal(features, x) and np.array_equal(labels, y)
        return {"loss": 0.0, "same": same, "file": getattr(features, "filename", None)}

    assert search_of(sc, objective=compared, max_evals=1, **given).best_trial.extra["same"]
    request.getfixturevalue("large")
    trials = search_of(sc, objective=compared, max_evals=2, **given).trials
    assert [trial.extra["same"] for trial in trials] == [True] * 2
    (file,) = {trial.extra["file"] for trial in trials}
    assert not Path(file).parent.parent.exists()


def test_models_train_on_large_data_batch_by_batch(sc, spark, digits, large):
    x, y, _, _ = digits
    frame = to_data_frame(spark, x[:1000], y[:1000]).withColumnRenamed("label", "digit")
    arguments = {"model": build, "space": SPACE, "max_evals": 1, "epochs": 3, "label": "digit"}
    held_out = x[750:1000], y[750:1000]
    split = search_of(sc, data=frame, validation_split=0.25, **arguments)
    # The names of columns are not those of rows to validate on, which are in an RDD.
    separate = search_of(sc, data=frame, validation_data=to_simple_rdd(sc, *held_out), **arguments)
    for search in (split, separate):
        assert search.best_value == min(search.best_trial.history["val_loss"]) < 2.3
        assert search.best_model.evaluate(*held_out, verbose=0)[0] == pytest.approx(search.best_value, rel=1e-4)


def test_bad_rows_are_found_before_the_search_starts(sc, spark, large):
    frame = spark.createDataFrame([(1.0, 0.0), (float("nan"), 1.0)], "features double, label double")
    with pytest.raises(DataError, match="NaN"):
        search_of(sc, model=build, data=frame)


# Each trial has a separate process, forked from a worker in which the backend has not run.


@pytest.mark.parametrize("cores", [None, 2])
def test_a_trial_has_as_many_threads_as_its_task_has_cores(sc, cores):
    def objective(params):
        import tensorflow as tf

        from sparkkeras.worker import device

        untouched = device.is_uninitialized()
        keras.ops.zeros(3)
        threads = tf.config.threading.get_intra_op_parallelism_threads()
        return {"loss": 0.0, "threads": threads, "env": os.environ["NPROC"], "untouched": untouched}

    search = HyperParamModel(sc, cores_per_trial=cores)
    search.minimize(objective=objective, space=LINE, max_evals=1, verbose=0)
    assert search.best_trial.extra == {"threads": cores or 1, "env": str(cores or 1), "untouched": True}


def test_resources_that_the_master_does_not_have(sc):
    """tests/integration/test_worker_size.py has separate executors."""
    for arguments, words in (
        ({"cores_per_trial": 3}, r"'local\[2\]' has 2 cores"),
        ({"gpus_per_trial": 1}, "gpus_per_trial=1: .* not with the master"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            HyperParamModel(sc, **arguments).minimize(objective=abs, space=hp.uniform("x", 0, 1), max_evals=1)


@pytest.mark.soak
def test_trials_with_gpus_of_their_own(tmp_path):
    discovery = tmp_path / "gpus"
    discovery.write_text("""#!/bin/sh\necho '{"name": "gpu", "addresses": ["0", "1"]}'\n""")
    discovery.chmod(0o755)
    script = """
        import os, sys, time
        from pyspark.sql import SparkSession
        from sparkkeras.hyperopt import HyperParamModel, uniform

        builder = SparkSession.builder.master("local-cluster[2,4,1024]").config("spark.ui.enabled", "false")
        amounts = {"worker.amount": 2, "executor.amount": 2, "task.amount": 1}
        for name, value in {**amounts, "worker.discoveryScript": sys.argv[1]}.items():
            where, setting = name.split(".")
            builder = builder.config(f"spark.{where}.resource.gpu.{setting}", value)
        spark = builder.getOrCreate()

        def objective(params):
            time.sleep(1)
            return {"loss": 0.0, "cores": os.environ["NPROC"], "gpus": os.environ["CUDA_VISIBLE_DEVICES"]}

        for cores, gpus in ((2, 1), (None, 2)):
            search = HyperParamModel(spark, cores_per_trial=cores, gpus_per_trial=gpus)
            search.minimize(objective=objective, space={"x": uniform(0, 1)}, max_evals=8, algo="random", verbose=0)
            print(sorted({(trial.extra["cores"], trial.extra["gpus"]) for trial in search.trials}))
            print(len({trial.worker for trial in search.trials}))
        spark.stop()
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(discovery)]
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.splitlines() == ["[('2', '0'), ('2', '1')]", "4", "[('1', '0,1')]", "2"]


def test_the_data_may_be_read_with_the_backend(sc):
    """Trials cannot be forked from a process in which TensorFlow has run, so data is read in a child process, too."""

    def read():
        return keras.ops.convert_to_numpy(keras.ops.arange(5)) * 2

    def objective(params, data):
        return float(keras.ops.sum(data))

    assert search_of(sc, objective=objective, data=read, max_evals=2).best_value == 20


def test_the_memory_of_a_worker_does_not_grow(sc):
    """The memory that a trial allocates, 40 MB here, is freed with its process."""

    def objective(params):
        keras.leaked = [*getattr(keras, "leaked", []), np.ones(5_000_000)]
        memory = psutil.Process(os.getppid()).memory_info()
        return {"loss": params["x"], "memory": memory.rss - memory.shared, "pid": os.getppid()}

    trials = search_of(sc, objective=objective, num_workers=1, algo="random").trials
    assert len({trial.extra["pid"] for trial in trials}) == 1
    memory = [trial.extra["memory"] for trial in trials]
    assert memory[-1] - memory[2] < 20e6, [round(each / 1e6) for each in memory]


def test_workers_do_not_wait_for_the_slowest_trial(sc, tmp_path):
    """One trial ends only after all others, which run on the other worker meanwhile."""

    def objective(params):
        try:
            (tmp_path / "slow").touch(exist_ok=False)
        except FileExistsError:
            (tmp_path / f"done-{params['x']}").touch()
            return params["x"]
        while len(list(tmp_path.glob("done-*"))) < 4:
            time.sleep(0.05)
        return 100.0

    search = search_of(sc, objective=objective)
    (slow,) = (trial for trial in search.trials if trial.value == 100.0)
    assert [trial.worker for trial in search.trials].count(slow.worker) == 1


# The end of a search


def test_ctrl_c_keeps_the_reported_values(sc, tmp_path):
    """PySpark's handler would cancel the job before trials could report their results."""

    def objective(params):
        report(params["x"])
        if params["x"] > 0:
            (tmp_path / f"begun-{os.getpid()}").touch()
            try:
                time.sleep(60)
            except BaseException:
                (tmp_path / f"ended-{os.getpid()}").touch()
                raise
        return params["x"]

    search = HyperParamModel(sc)
    with interrupted_when(lambda: len(list(tmp_path.glob("begun-*"))) == 2, seconds=20):
        search.minimize(objective=objective, space=LINE, max_evals=99, seed=1, verbose=0)
    assert len(list(tmp_path.glob("ended-*"))) == 2
    assert search.reason == "it was interrupted"
    assert [trial.number for trial in search.trials] == list(range(len(search.trials)))
    assert [trial.status for trial in search.trials].count("stopped") == 2
    assert all(trial.value == trial.params["x"] for trial in search.trials)
    settle(sc)
    assert sc.statusTracker().getActiveJobsIds() == []


def test_a_cancelled_job_is_not_started_again(sc, tmp_path):
    def objective(params):
        (tmp_path / "begun").touch()
        time.sleep(60)

    def cancel():
        while not (tmp_path / "begun").exists():
            time.sleep(0.05)
        sc.cancelAllJobs()

    threading.Thread(target=cancel, daemon=True).start()
    with pytest.raises(ClusterError, match="job was cancelled"):
        search_of(sc, objective=objective)


def test_a_search_leaves_nothing_behind(sc, digits):
    search_of(sc, objective=lambda params: params["x"], max_evals=2)  # starts the Python workers
    before = len(threading.enumerate())
    children = len(psutil.Process().children(recursive=True))
    descriptors = psutil.Process().num_fds()
    data = digits[0][:200], digits[1][:200]
    search = search_of(sc, model=build, data=data, space=SPACE, epochs=1, metric="loss", max_evals=1)
    folder = Path(search._results.journal.folder)
    assert folder.is_dir()
    del search
    gc.collect()
    assert not folder.exists()
    assert len(threading.enumerate()) <= before
    assert len(psutil.Process().children(recursive=True)) <= children
    assert psutil.Process().num_fds() <= descriptors + 3
    settle(sc)
    assert sc.statusTracker().getActiveJobsIds() == []


# Lost processes


@pytest.mark.parametrize("lost", ["trial", "worker"])
def test_a_killed_trial_or_worker_runs_again_and_counts_once(sc, tmp_path, lost):
    """With ``local[2]`` Spark does not retry tasks, so the driver starts another job for a lost worker."""
    mark = tmp_path / "killed"

    def objective(params):
        if params["x"] < 0:
            with contextlib.suppress(FileExistsError):  # only one trial, although two may be here at the same time
                mark.touch(exist_ok=False)
                os.kill(os.getpid() if lost == "trial" else os.getppid(), signal.SIGKILL)
                time.sleep(60)
        return params["x"]

    trials = search_of(sc, objective=objective, max_evals=4).trials
    assert mark.exists()
    assert sorted(trial.number for trial in trials) == list(range(4))
    assert all(trial.status == "ok" for trial in trials)
    attempts = sorted(trial.attempts for trial in trials)
    assert attempts == [1] * 3 + [2] if lost == "trial" else attempts[-1] >= 2


@pytest.mark.soak
@pytest.mark.parametrize("pid", [os.getpid, os.getppid], ids=["of the trial", "of the worker"])
def test_a_trial_that_always_kills_its_process_fails(sc, pid):
    def objective(params):
        if params["x"] < 0:
            os.kill(pid(), signal.SIGKILL)
            time.sleep(60)
        return params["x"]

    search = search_of(sc, objective=objective, max_evals=3, num_workers=1, seed=8)
    failed = [trial for trial in search.trials if trial.params["x"] < 0]
    assert failed
    assert all((trial.status, trial.attempts) == ("failed", 3) for trial in failed)
    assert len(search.trials) == 3


def test_spark_trials(sc):
    def objective(params, more=None):
        assert more is None
        return {"loss": (params["x"] - 3) ** 2, "status": "ok", "note": "here"}

    trials = SparkTrials(parallelism=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        best = hyperopt.fmin(objective, LINE, hyperopt.tpe.suggest, 4, trials=trials, verbose=False)
    assert len(trials.trials) == 4
    assert trials.best_trial["result"] == {"loss": min(trials.losses()), "status": "ok", "note": "here"}
    assert trials.argmin == trials.search.best_params == best
