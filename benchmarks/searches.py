"""The benchmarks of hyper-parameter search, and their targets."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from typing import Any

from harness import Effort, Metric, Samples, benchmark, timed

TRIALS = 24
EPOCHS = 5
SLEEPERS, SLEEP_SECONDS = 4, 0.5


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
