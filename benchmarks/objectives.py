"""What the benchmark `search_regret` minimizes: functions of the literature and small networks, with their search spaces.

The synthetic functions, their domains and their minima are those of S. Surjanovic and D. Bingham, *Virtual Library of
Simulation Experiments: Test Functions and Datasets*, https://www.sfu.ca/~ssurjano/optimization.html, with two exceptions
that their ``source`` describes. The networks are trained on data that ships with scikit-learn.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparkkeras.hyperopt import choice, integer, loguniform, uniform

WORST = 10.0
"""The loss of a network that diverged, and the upper bound of all others: far above that of a constant prediction."""


@dataclass(frozen=True)
class Objective:
    """A function to minimize.

    Attributes:
        space: The search space, of sparkkeras's distributions.
        value: The value for the parameters of a trial; the same parameters always give the same value.
        minimum: The known minimum; ``None``: the best value that any contestant finds in any turn.
        source: Where the function is from.
    """

    space: Mapping[str, Any]
    value: Callable[[dict[str, Any]], float]
    minimum: float | None = None
    source: str = "Surjanovic and Bingham"


def branin(x: np.ndarray) -> float:
    """Two variables; three global minima."""
    a, b = x
    quadratic = b - 5.1 / (4 * math.pi**2) * a**2 + 5 / math.pi * a - 6
    return float(quadratic**2 + 10 * (1 - 1 / (8 * math.pi)) * math.cos(a) + 10)


def hartmann6(x: np.ndarray) -> float:
    """Six variables; six local minima."""
    alpha = np.array([1.0, 1.2, 3.0, 3.2])
    scale = np.array(
        [[10, 3, 17, 3.5, 1.7, 8], [0.05, 10, 17, 0.1, 8, 14], [3, 3.5, 1.7, 10, 17, 8], [17, 8, 0.05, 10, 0.1, 14]]
    )
    center = 1e-4 * np.array(
        [
            [1312, 1696, 5569, 124, 8283, 5886],
            [2329, 4135, 8307, 3736, 1004, 9991],
            [2348, 1451, 3522, 2883, 3047, 6650],
            [4047, 8828, 8732, 5743, 1091, 381],
        ]
    )
    return float(-alpha @ np.exp(-(scale * (x - center) ** 2).sum(axis=1)))


def rosenbrock(x: np.ndarray) -> float:
    """A long, curved, narrow valley: each variable matters only together with its neighbors."""
    return float((100 * (x[1:] - x[:-1] ** 2) ** 2 + (x[:-1] - 1) ** 2).sum())


def ackley(x: np.ndarray) -> float:
    """Many local minima on a nearly flat outer region."""
    return float(-20 * np.exp(-0.2 * np.sqrt((x**2).mean())) - np.exp(np.cos(2 * math.pi * x).mean()) + 20 + math.e)


def levy(x: np.ndarray) -> float:
    """Many local minima."""
    w = 1 + (x - 1) / 4
    middle = ((w[:-1] - 1) ** 2 * (1 + 10 * np.sin(math.pi * w[:-1] + 1) ** 2)).sum()
    return float(np.sin(math.pi * w[0]) ** 2 + middle + (w[-1] - 1) ** 2 * (1 + np.sin(2 * math.pi * w[-1]) ** 2))


def digits_loss(params: dict[str, Any]) -> float:
    """The validation loss of an MLP on scikit-learn's digits after 5 epochs: cross-entropy."""
    from sklearn.metrics import log_loss
    from sklearn.neural_network import MLPClassifier

    optimizer = params["optimizer"]
    model = MLPClassifier(
        hidden_layer_sizes=(params["units"],),
        activation=params["activation"],
        solver=optimizer["kind"],
        learning_rate_init=optimizer["lr"],
        momentum=optimizer.get("momentum", 0.9),  # Adam does not use it
        alpha=params["alpha"],
        batch_size=params["batch_size"],
        max_iter=5,
        random_state=0,
    )
    x, y, x_held_out, y_held_out = _rows("digits")
    return _trained(model, x, y, lambda: log_loss(y_held_out, model.predict_proba(x_held_out)))


def diabetes_loss(params: dict[str, Any]) -> float:
    """The validation loss of an MLP on scikit-learn's diabetes data after 20 epochs: a share of the variance."""
    from sklearn.neural_network import MLPRegressor

    model = MLPRegressor(
        hidden_layer_sizes=(params["units"],) * params["layers"],
        activation=params["activation"],
        learning_rate_init=params["lr"],
        alpha=params["alpha"],
        batch_size=params["batch_size"],
        max_iter=20,
        random_state=0,
    )
    x, y, x_held_out, y_held_out = _rows("diabetes")
    return _trained(model, x, y, lambda: float(((model.predict(x_held_out) - y_held_out) ** 2).mean()))


OBJECTIVES: dict[str, Objective] = {
    "branin": Objective(
        {"x0": uniform(-5, 10), "x1": uniform(0, 15)},
        lambda params: branin(_vector(params)),
        10 / (8 * math.pi),
    ),
    "hartmann6": Objective(
        {f"x{index}": uniform(0, 1) for index in range(6)},
        lambda params: hartmann6(_vector(params)),
        -3.322368011415,
    ),
    "rosenbrock": Objective(
        {f"x{index}": uniform(-5, 10) for index in range(4)},
        lambda params: rosenbrock(_vector(params)),
        0.0,
    ),
    "ackley": Objective(
        {f"x{index}": uniform(-5, 10) for index in range(5)},
        lambda params: ackley(_vector(params)),
        0.0,
        "Surjanovic and Bingham, on [-5, 10] as in Eriksson et al. (2019): TPE's prior is in the middle, the minimum not",
    ),
    "levy_mixed": Objective(
        {
            "x0": uniform(-10, 10),
            "x1": uniform(-10, 10),
            "x2": integer(-10, 10),
            "x3": choice(-9.0, -5.0, -2.0, 1.0, 4.0, 8.0),
            "x4": loguniform(1e-10, 1e10),
        },
        lambda params: levy(_vector(params | {"x4": math.log10(params["x4"])})),
        0.0,
        "Surjanovic and Bingham; here with two numbers, an integer, a choice, and the logarithm of a number",
    ),
    "digits": Objective(
        {
            "units": integer(8, 128, log=True),
            "activation": choice("relu", "tanh", "logistic"),
            "batch_size": choice(32, 64, 128, 256),
            "alpha": loguniform(1e-6, 1),
            "optimizer": choice(
                {"kind": "sgd", "lr": loguniform(1e-3, 1), "momentum": uniform(0, 0.99)},
                {"kind": "adam", "lr": loguniform(1e-4, 1e-1)},
            ),
        },
        digits_loss,
        source="sklearn.datasets.load_digits",
    ),
    "diabetes": Objective(
        {
            "layers": integer(1, 3),
            "units": integer(4, 64, log=True),
            "activation": choice("relu", "tanh", "logistic"),
            "batch_size": integer(16, 128, log=True),
            "lr": loguniform(1e-4, 1e-1),
            "alpha": loguniform(1e-5, 10),
        },
        diabetes_loss,
        source="sklearn.datasets.load_diabetes",
    ),
}
"""The objectives by name."""


def _vector(params: dict[str, Any]) -> np.ndarray:
    return np.array([params[f"x{index}"] for index in range(len(params))])


@functools.cache
def _rows(name: str) -> tuple[np.ndarray, ...]:
    """Features and targets to train on, and those of a third of the rows to validate on."""
    from sklearn import datasets

    x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = x[order], y[order]
    x = x / 16 if name == "digits" else (x - x.mean(0)) / x.std(0)
    y = y if name == "digits" else (y - y.mean()) / y.std()
    count = 2 * len(x) // 3
    return x[:count], y[:count], x[count:], y[count:]


def _trained(model: Any, x: np.ndarray, y: np.ndarray, loss: Callable[[], float]) -> float:
    """Train a network with one thread, as many small products are slower with more; return its loss."""
    from sklearn.exceptions import ConvergenceWarning
    from threadpoolctl import threadpool_limits

    with warnings.catch_warnings(), threadpool_limits(1), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", ConvergenceWarning)  # the number of epochs is fixed
        warnings.simplefilter("ignore", RuntimeWarning)  # overflows of networks that diverge
        try:
            value = float(loss() if model.fit(x, y) else math.nan)
        except ValueError as error:
            if "non-finite" not in str(error) and "NaN" not in str(error):
                raise
            return WORST
    return min(value, WORST) if math.isfinite(value) else WORST
