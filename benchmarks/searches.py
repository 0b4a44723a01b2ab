"""The benchmarks of hyper-parameter search, and their targets."""

from __future__ import annotations

import functools
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness import Effort, Metric, Samples, alternate, benchmark, timed

TRIALS = 24
EPOCHS = 5
UNITS, RATES = (32, 64, 128), (1e-3, 5e-2)
SLEEPERS, SLEEP_SECONDS = 4, 0.5


@functools.cache
def _digits() -> tuple[Any, Any]:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return (x / 16).astype("float32"), y


def _build(params: dict[str, Any]) -> Any:
    import keras

    model = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(params["units"], "relu"), keras.layers.Dense(10, "softmax")]
    )
    model.compile(keras.optimizers.Adam(params["lr"]), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def _space() -> dict[str, Any]:
    from hyperopt import hp

    return {"units": hp.choice("units", [32, 64, 128]), "lr": hp.loguniform("lr", -7, -3)}


@benchmark(
    Metric("search call -> best, 24 short trials, against hyperopt.SparkTrials", "search", "spark_trials", 0.7),
    Metric("fmin with our SparkTrials, the same objective, against hyperopt's", "adapter", "spark_trials"),
    once=True,
)
def search(effort: Effort) -> Samples:
    """24 trials of some seconds on two workers: the same networks on the same rows for the same number of epochs.

    Each contestant first runs a few trials as warm-up: sparkkeras loads Keras once in each worker, while
    ``hyperopt.SparkTrials`` loads it in a new worker process for every trial.
    """
    import hyperopt
    import numpy as np
    from contestants import WORKERS, spark
    from pyspark import cloudpickle

    from sparkkeras.hyperopt import HyperParamModel, SparkTrials

    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # SparkTrials sends functions of modules by name
    x, y = _digits()

    def objective(params: dict[str, Any]) -> float:
        model = _build(params)
        history = model.fit(x, y, epochs=EPOCHS, batch_size=32, validation_split=0.2, verbose=0)
        return float(min(history.history["val_loss"]))

    def fmin(kind: Callable[[], Any], trials: int) -> None:
        hyperopt.fmin(
            objective, _space(), hyperopt.rand.suggest, trials, trials=kind(), rstate=np.random.default_rng(0), verbose=False
        )

    def ours(trials: int) -> None:
        HyperParamModel(session, WORKERS).minimize(
            model=_build,
            data=(x, y),
            space=_space(),
            algo="random",
            max_evals=trials,
            epochs=EPOCHS,
            validation_split=0.2,
            seed=0,
            verbose=0,
        )

    with spark() as session:
        calls: dict[str, Callable[[int], None]] = {
            "spark_trials": functools.partial(fmin, lambda: hyperopt.SparkTrials(WORKERS)),
            "search": ours,
            "adapter": functools.partial(fmin, lambda: SparkTrials(WORKERS)),
        }
        for call in calls.values():
            call(WORKERS)
        trials = max(4, effort.rows(TRIALS))
        samples: Samples = {name: [] for name in calls}
        for _ in range(2):
            for name, call in calls.items():
                samples[name].append(timed(functools.partial(call, trials), 1))
        return samples


@benchmark(
    Metric("search call -> best, the same 24 trials, against Optuna with 2 threads", "search", "threads"),
    Metric("search call -> best, the same 24 trials, against Optuna with 2 processes of joblib", "search", "processes"),
    once=True,
)
def search_joblib(effort: Effort) -> Samples:
    """The same 24 candidates on the same rows for the same number of epochs, by two workers each.

    Each contestant first runs a few trials as warm-up, in which its processes load Keras. Optuna's processes share a
    `JournalStorage`, as its documentation recommends for one machine; joblib gives the next trial to the one that is free.
    """
    import optuna
    from contestants import WORKERS, spark
    from joblib import Parallel, delayed
    from pyspark import cloudpickle

    from sparkkeras.hyperopt import HyperParamModel, Search, choice, loguniform

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space = {"units": choice(*UNITS), "lr": loguniform(*RATES)}
    trials = max(4, effort.rows(TRIALS))
    drawn = Search(space, algo="random", seed=0)
    candidates = [drawn.ask().params for _ in range(trials)]

    def threads(count: int) -> None:
        study = _queued(candidates[:count])
        study.optimize(_optuna_objective, n_trials=count, n_jobs=WORKERS)
        _check([trial.params for trial in study.trials], candidates[:count])

    def processes(count: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            study = _queued(candidates[:count], _journal(folder))
            pool(delayed(_run_next)(folder) for _ in range(count))
            _check([trial.params for trial in study.trials], candidates[:count])

    def ours(count: int) -> None:
        search = HyperParamModel(session, WORKERS)
        search.minimize(
            model=_build,
            data=_digits(),
            space=space,
            algo="random",
            max_evals=count,
            epochs=EPOCHS,
            validation_split=0.2,
            seed=0,
            verbose=0,
        )
        _check([trial.params for trial in search.trials], candidates[:count])

    with spark() as session, Parallel(n_jobs=WORKERS, pre_dispatch=WORKERS, batch_size=1) as pool:
        calls: dict[str, Callable[[int], None]] = {"threads": threads, "processes": processes, "search": ours}
        for call in calls.values():
            call(WORKERS)
        timers = {name: functools.partial(timed, functools.partial(call, trials), 1) for name, call in calls.items()}
        return alternate(effort.turns, **timers)


def _queued(candidates: list[dict[str, Any]], storage: Any = None) -> Any:
    """A study of Optuna whose first trials have these parameters."""
    import optuna

    study = optuna.create_study(study_name="search", storage=storage)
    for params in candidates:
        study.enqueue_trial(params)
    return study


def _journal(folder: str) -> Any:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    return JournalStorage(JournalFileBackend(str(Path(folder, "journal.log"))))


def _run_next(folder: str) -> None:
    """Run the next trial of a study in a process of joblib."""
    import keras
    import optuna
    import tensorflow

    with suppress(RuntimeError):  # set in the first trial of a process: one thread, as in a worker of sparkkeras
        tensorflow.config.threading.set_intra_op_parallelism_threads(1)
        tensorflow.config.threading.set_inter_op_parallelism_threads(1)
    keras.utils.disable_interactive_logging()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    optuna.load_study(study_name="search", storage=_journal(folder)).optimize(_optuna_objective, n_trials=1)


def _optuna_objective(trial: Any) -> float:
    params = {
        "units": trial.suggest_categorical("units", UNITS),
        "lr": trial.suggest_float("lr", *RATES, log=True),
    }
    history = _build(params).fit(*_digits(), epochs=EPOCHS, batch_size=32, validation_split=0.2, verbose=0)
    return float(min(history.history["val_loss"]))


def _check(trained: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Raise an error if a contestant has not trained with the candidates."""
    if sorted(map(str, trained)) != sorted(map(str, expected)):
        raise RuntimeError(f"the trials had the parameters {trained}, expected {expected}")


@benchmark(
    Metric("share of 4 workers' time that is not trials, until the last one is assigned", "idle", None, 0.1, "seconds")
)
def search_idle(effort: Effort) -> Samples:
    """Trials that sleep for 1 to 5 times half a second: measures whether workers wait for the slowest trial."""
    import os

    from hyperopt import hp
    from pyspark.sql import SparkSession

    from sparkkeras.hyperopt import HyperParamModel

    def objective(params: dict[str, Any]) -> dict[str, Any]:
        began = time.time()
        time.sleep(params["units"] * SLEEP_SECONDS)
        return {"loss": params["units"], "status": "ok", "began": began, "ended": time.time()}

    def share() -> float:
        found = HyperParamModel(session, SLEEPERS)
        found.minimize(
            objective=objective,
            space={"units": hp.quniform("units", 0.5, 5.49, 1)},
            algo="random",
            max_evals=effort.rows(80),
            verbose=0,
        )
        spans = [(trial.extra["began"], trial.extra["ended"]) for trial in found.trials]
        first, last = min(begin for begin, _ in spans), max(begin for begin, _ in spans)
        busy = sum(min(end, last) - begin for begin, end in spans)
        return 1 - busy / (SLEEPERS * (last - first))

    os.environ["PYSPARK_PYTHON"] = sys.executable
    session = SparkSession.builder.master(f"local[{SLEEPERS}]").config("spark.ui.enabled", "false").getOrCreate()
    try:
        share()
        return {"idle": [[share()] for _ in range(effort.turns)]}
    finally:
        session.stop()


@benchmark(
    Metric("epochs of a search with ASHA, against all to the end", "asha_epochs", "full_epochs", 0.4),
    Metric("its best loss, against that of the full search", "asha_loss", "full_loss", 1.02),
    once=True,
)
def search_asha(effort: Effort) -> Samples:
    """The same candidates on digits, 27 epochs each, with and without ASHA; one turn per seed."""
    from contestants import WORKERS, spark

    from sparkkeras.hyperopt import HyperParamModel

    x, y = _digits()
    samples: Samples = {name: [] for name in ("asha_epochs", "full_epochs", "asha_loss", "full_loss")}
    with spark() as session:
        for seed in range(max(2, effort.seeds // 2)):
            for name, pruner in (("asha", "asha"), ("full", None)):
                found = HyperParamModel(session, WORKERS)
                found.minimize(
                    model=_build,
                    data=(x, y),
                    space=_space(),
                    algo="random",
                    max_evals=max(4, effort.rows(TRIALS)),
                    epochs=27,
                    validation_split=0.2,
                    pruner=pruner,
                    seed=seed,
                    keep_models=0,
                    verbose=0,
                )
                samples[f"{name}_epochs"].append([float(sum(trial.epochs for trial in found.trials))])
                samples[f"{name}_loss"].append([found.best_value])
    return samples
