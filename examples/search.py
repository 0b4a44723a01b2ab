"""Search the best digit classifier on Spark, and let the best few vote.

::

    python examples/search.py [--output DIR] [--trials N] [--epochs N] [--members N] [--master local[2]]

Stop it with Ctrl-C, or kill it, and call it again: it goes on where it was. The digits come with scikit-learn: nothing is
downloaded.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from surroundings import hushed, start_spark

with hushed():
    import keras
    import numpy as np
    from hyperopt import hp
    from sklearn.datasets import load_digits

    from sparkkeras import greedy_ensemble
    from sparkkeras.hyperopt import HyperParamModel

SEED = 7
TRAINED, CHOSEN = 1000, 400
SPACE = {
    "layers": hp.choice("layers", [[64], [128], [64, 32]]),
    "activation": hp.choice("activation", ["relu", "tanh"]),
    "dropout": hp.uniform("dropout", 0.0, 0.5),
    "rate": hp.loguniform("rate", np.log(1e-4), np.log(3e-2)),
}


@hushed()
def main() -> None:
    options = command_line()
    options.output.mkdir(parents=True, exist_ok=True)
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(SEED).permutation(len(x))
    x, y = (x[order] / 16).astype(np.float32), y[order]
    train, choose = slice(TRAINED), slice(TRAINED, TRAINED + CHOSEN)
    test = slice(TRAINED + CHOSEN, None)

    print(f"Starting Spark on {options.master} ...")
    spark = start_spark(options.master)
    search = HyperParamModel(spark)
    best = search.minimize(
        model=build_model,
        data=(x[train], y[train]),
        validation_data=(x[choose], y[choose]),
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
    ensemble = greedy_ensemble(models, x[choose], y[choose], metric="loss", size=2 * options.members)
    ensemble.save(str(options.output / "ensemble.zip"))
    epochs = sum(trial.epochs for trial in search.trials)
    most = len(search.trials) * options.epochs
    print(f"""
Search      {len(search.trials)} trials took {epochs} epochs, instead of {most} with all of them to the end
Best        {search.best_params}
Model       {accuracy(best, x[test], y[test]):.1%} of {len(x[test])} unseen digits
Ensemble    {accuracy(ensemble, x[test], y[test]):.1%}, of {len(ensemble.models)} models
Files       {options.output / "search"} to go on from, {options.output / "ensemble.zip"}
Picture     {options.output / "search.png"}""")
    spark.stop()


def command_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Search the best digit classifier, and let the best few vote.")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", default=Path("artifacts"), help="where files go (default: %(default)s)"
    )
    parser.add_argument("--trials", type=int, metavar="N", default=24, help="how many trials (default: %(default)s)")
    parser.add_argument("--epochs", type=int, metavar="N", default=27, help="epochs of a trial (default: %(default)s)")
    parser.add_argument("--members", type=int, metavar="N", default=5, help="how many models vote (default: %(default)s)")
    parser.add_argument("--master", default="local[2]", help="the Spark to search on (default: %(default)s)")
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
