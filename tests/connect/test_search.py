"""A search behind Spark Connect: trials run in new processes of the server's workers, which connect to this process."""

import os
import signal
import time

import keras
import numpy as np
import pytest

from sparkkeras import to_data_frame
from sparkkeras.data.dataset import DriverAddress
from sparkkeras.errors import DriverConnectionError
from sparkkeras.hyperopt import HyperParamModel, choice, uniform
from sparkkeras.spark import connect, connectivity


def build(params):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(params["units"]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def minimized(**arguments):
    search = HyperParamModel()
    search.minimize(**{"space": {"x": uniform(0, 1)}, "algo": "random", "seed": 1, "verbose": 0, **arguments})
    return search


def test_models_are_fitted_to_the_rows_of_a_data_frame(spark):
    x = np.random.default_rng(0).normal(size=(60, 4)).astype("float32")
    y = x.sum(axis=1)
    search = HyperParamModel(spark)
    best = search.minimize(
        build, to_data_frame(spark, x, y), {"units": choice(2, 4)}, 3, epochs=2, validation_split=0.5, seed=1, verbose=0
    )
    assert best.evaluate(x[30:], y[30:], verbose=0) == pytest.approx(search.best_value, rel=1e-4)
    assert {trial.worker.split("/")[1] for trial in search.trials} <= {"0", "1"}


def test_a_trial_whose_worker_is_killed_runs_again(spark, tmp_path):
    mark, workers = tmp_path / "mark", tmp_path / "workers"
    workers.mkdir()

    def objective(params):
        if not mark.exists():
            mark.touch()
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)
        (workers / str(os.getppid())).touch()
        deadline = time.monotonic() + 120
        while len(list(workers.iterdir())) < 2 and time.monotonic() < deadline:  # the one in place of the lost one starts
            time.sleep(0.1)
        return {"loss": params["x"], "python": os.getppid()}

    search = minimized(objective=objective, max_evals=6)
    assert [trial.status for trial in search.trials] == ["ok"] * 6
    assert max(trial.attempts for trial in search.trials) == 2
    assert os.getpid() not in {trial.extra["python"] for trial in search.trials}
    assert {trial.worker.split("/")[1] for trial in search.trials} == {"0", "1"}


def test_a_trial_has_the_cores_that_it_asks_for(spark):
    def objective(params):
        return {"loss": 0.0, "cores": os.environ["NPROC"]}

    search = HyperParamModel(cores_per_trial=2)
    search.minimize(objective=objective, space=uniform(0, 1), max_evals=2, algo="random", verbose=0)
    assert {(trial.worker.split("/")[1], trial.extra["cores"]) for trial in search.trials} == {("0", "2")}


@pytest.mark.soak
def test_a_search_on_a_uri_is_resumed(spark):
    given = {"objective": lambda params: {"loss": params["x"], "time": time.time()}, "save_to": "memory://searches/first"}
    first = minimized(max_evals=2, **given)
    again = minimized(max_evals=3, **given)
    assert [trial.extra["time"] for trial in again.trials[:2]] == [trial.extra["time"] for trial in first.trials]


def test_workers_that_cannot_connect_end_the_search_before_a_trial(spark, monkeypatch):
    monkeypatch.setattr(connectivity, "PREFLIGHT_SECONDS", 0.5)
    monkeypatch.setattr(connect, "client_address", lambda session: DriverAddress("192.0.2.1", "127.0.0.1", is_local=False))
    with pytest.raises(DriverConnectionError, match="with Search, ask"):
        minimized(objective=abs, max_evals=1)
