"""Tune a regression on the diabetes data set with a custom objective and hyperopt's ``fmin``.

::

    python examples/search_regression.py [--output DIR] [--trials N] [--master local[2]]

The objective cross-validates: the loss of a trial is the mean over three folds. The data (442 patients with ten measurements
each) comes with scikit-learn: nothing is downloaded.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from surroundings import hushed, start_spark

with hushed():
    import hyperopt
    import keras
    import numpy as np
    from hyperopt import hp
    from sklearn.datasets import load_diabetes
    from sklearn.model_selection import KFold

    from sparkkeras.hyperopt import SparkTrials, report

SEED = 7
SPACE = {
    "units": hp.quniform("units", 4, 64, 4),
    "l2": hp.loguniform("l2", np.log(1e-5), np.log(1.0)),
    "rate": hp.loguniform("rate", np.log(1e-3), np.log(1e-1)),
    "epochs": hp.choice("epochs", [15, 30]),
}


@hushed()
def main(arguments: Sequence[str] | None = None) -> None:
    options = command_line(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    x, y = load_diabetes(return_X_y=True)
    order = np.random.default_rng(SEED).permutation(len(x))
    x, y = (x[order] / x.std(axis=0)).astype(np.float32), ((y[order] - y.mean()) / y.std()).astype(np.float32)
    train, test = slice(340), slice(340, None)

    print(f"Starting Spark on {options.master} ...")
    spark = start_spark(options.master)
    trials = SparkTrials(spark_session=spark)
    chosen = hyperopt.fmin(
        cross_validated(x[train], y[train]),
        SPACE,
        algo=hyperopt.tpe.suggest,
        max_evals=options.trials,
        trials=trials,
        rstate=np.random.default_rng(SEED),
    )
    trials.search.plot(options.output / "search_regression.png")

    params = hyperopt.space_eval(SPACE, chosen)
    keras.utils.set_random_seed(SEED)
    model = train_model(params, x[train], y[train])
    baseline = np.var(y[test])
    error = float(np.mean((model.predict(x[test], verbose=0)[:, 0] - y[test]) ** 2))
    print(f"""
Best        {params}
Folds       mean squared error {trials.best_trial["result"]["loss"]:.3f}
Test        mean squared error {error:.3f} on {len(x[test])} test patients; predicting their mean gives {baseline:.3f}
Picture     {options.output / "search_regression.png"}""")
    spark.stop()


def command_line(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Tune a regression with a custom objective.")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", default=Path("artifacts"), help="output directory (default: %(default)s)"
    )
    parser.add_argument("--trials", type=int, metavar="N", default=16, help="number of trials (default: %(default)s)")
    parser.add_argument("--master", default="local[2]", help="Spark master URL (default: %(default)s)")
    return parser.parse_args(arguments)


def cross_validated(x: np.ndarray, y: np.ndarray) -> object:
    def loss(params: dict) -> float:
        errors = []
        for fold, (train, held) in enumerate(KFold(3).split(x), start=1):
            model = train_model(params, x[train], y[train])
            errors.append(float(model.evaluate(x[held], y[held], verbose=0)))
            report(float(np.mean(errors)), fold=fold)
        return float(np.mean(errors))

    return loss


def train_model(params: dict, x: np.ndarray, y: np.ndarray) -> keras.Model:
    penalty = keras.regularizers.L2(params["l2"])
    model = keras.Sequential(
        [
            keras.Input((x.shape[1],)),
            keras.layers.Dense(int(params["units"]), "relu", kernel_regularizer=penalty),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.Adam(params["rate"]), "mse", steps_per_execution=8)
    model.fit(x, y, epochs=params["epochs"], batch_size=32, verbose=0)
    return model


if __name__ == "__main__":
    main()
