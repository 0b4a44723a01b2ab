"""The quality of suggestions: TPE against random search, on a function whose optimum is known."""

import os
import sys

import numpy as np
import pytest

from sparkkeras.hyperopt import Search, choice, integer, loguniform, uniform

SPACE = {
    "momentum": uniform(0, 1),
    "dropout": uniform(0, 1),
    "rate": loguniform(1e-6, 1),
    "units": integer(8, 512, step=8),
    "activation": choice("relu", "tanh"),
}


def loss(params):
    """A quadratic function: 0 at a momentum of 0.9, a dropout of 0.2, a rate of 0.001, 128 units and ReLU."""
    return (
        (params["momentum"] - 0.9) ** 2
        + (params["dropout"] - 0.2) ** 2
        + (np.log10(params["rate"] / 1e-3) / 6) ** 2
        + ((params["units"] - 128) / 384) ** 2
        + (0.05 if params["activation"] == "tanh" else 0.0)
    )


def best_of(algorithm, seed, count):
    search = Search(SPACE, algo=algorithm, seed=seed)
    for _ in range(count):
        trial = search.ask()
        search.tell(trial, loss(trial.params))
    return search.best_value


def compare(seeds, count):
    best_losses = {name: [best_of(name, seed, count) for seed in range(seeds)] for name in ("tpe", "random")}
    for name, values in best_losses.items():
        line = f"{name:>7} after {count} trials, {seeds} seeds: mean {np.mean(values):.3f}, {np.round(values, 2)}"
        sys.stdout.write(line + "\n")
    return best_losses


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_tpe_beats_random_search_clearly_after_many_trials():
    best_losses = compare(seeds=int(os.environ.get("SPARKKERAS_SEEDS", "30")), count=200)
    assert np.mean(best_losses["tpe"]) < 0.4 * np.mean(best_losses["random"])
