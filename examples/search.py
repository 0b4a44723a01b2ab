"""Tune a digit classifier on Spark, and build an ensemble of the best models.

::

    python examples/search.py [--output DIR] [--trials N] [--epochs N] [--members N] [--master local[2]]

Stop it with Ctrl-C, or kill it, and run it again: the search resumes. The digits come with scikit-learn: nothing is
downloaded.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from surroundings import hushed, start_spark

with hushed():
    import keras
    import numpy as np
    from sklearn.datasets import load_digits

    from sparkkeras import greedy_ensemble
    from sparkkeras.hyperopt import HyperParamModel, choice, loguniform, uniform

SEED = 7
TRAINING, VALIDATION = 1000, 400
SPACE = {
    "layers": choice([64], [128], [64, 32]),
    "activation": choice("relu", "tanh"),
    "dropout": uniform(0.0, 0.5),
    "rate": loguniform(1e-4, 3e-2),
}


@hushed()
def main() -> None:
    options = command_line()
    options.output.mkdir(parents=True, exist_ok=True)
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(SEED).permutation(len(x))
    x, y = (x[order] / 16).astype(np.float32), y[order]
    train, validation = slice(TRAINING), slice(TRAINING, TRAINING + VALIDATION)
    test = slice(TRAINING + VALIDATION, None)

    print(f"Starting Spark on {options.master} ...")
    spark = start_spark(options.master)
    search = HyperParamModel(spark)
    best = search.minimize(
        model=build_model,
        data=(x[train], y[train]),
        validation_data=(x[validation], y[validation]),
        space=SPACE,
        max_evals=options.trials,
        epochs=options.epochs,
        pruner="asha",
        keep_models=options.members,
        save_to=options.output / "search",
        seed=SEED,
    )
    search.plot(options.output / "search.png")

    models = search.best_models(options.members)
    ensemble = greedy_ensemble(models, x[validation], y[validation], metric="loss", size=2 * options.members)
    ensemble.save(str(options.output / "ensemble.zip"))
    epochs = sum(trial.epochs for trial in search.trials)
    most = len(search.trials) * options.epochs
    print(f"""
Search      {len(search.trials)} trials trained {epochs} epochs; without pruning they would have trained {most}
Best        {search.best_params}
Model       {accuracy(best, x[test], y[test]):.1%} of {len(x[test])} unseen digits
Ensemble    {accuracy(ensemble, x[test], y[test]):.1%}, of {len(ensemble.models)} models
Files       {options.output / "search"} to resume the search, {options.output / "ensemble.zip"}
Picture     {options.output / "search.png"}""")
    spark.stop()


def command_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Tune a digit classifier, and build an ensemble of the best models.")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", default=Path("artifacts"), help="output directory (default: %(default)s)"
    )
    parser.add_argument("--trials", type=int, metavar="N", default=24, help="number of trials (default: %(default)s)")
    parser.add_argument(
        "--epochs", type=int, metavar="N", default=27, help="maximum epochs of a trial (default: %(default)s)"
    )
    parser.add_argument(
        "--members",
        type=int,
        metavar="N",
        default=5,
        help="number of candidate models for the ensemble (default: %(default)s)",
    )
    parser.add_argument("--master", default="local[2]", help="Spark master URL (default: %(default)s)")
    return parser.parse_args()


def build_model(params: dict) -> keras.Model:
    model = keras.Sequential([keras.Input((64,))])
    for units in params["layers"]:
        model.add(keras.layers.Dense(units, params["activation"]))
        model.add(keras.layers.Dropout(params["dropout"]))
    model.add(keras.layers.Dense(10, "softmax"))
    model.compile(keras.optimizers.Adam(params["rate"]), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def accuracy(model: object, x: np.ndarray, y: np.ndarray) -> float:
    return float((np.argmax(model.predict(x), axis=1) == y).mean())


if __name__ == "__main__":
    main()
