"""The importance of hyper-parameters, on functions whose shares of the variance are known."""

import numpy as np
import pytest

from sparkkeras.errors import ConfigurationError, SearchError
from sparkkeras.hyperopt import HyperParamModel, Search, choice, integer, loguniform, uniform
from sparkkeras.hyperopt.importance import MIN_TRIALS, importances
from sparkkeras.hyperopt.space import Space
from sparkkeras.hyperopt.trials import FAILED, OK, Trial
from sparkkeras.hyperopt.workers import LocalWorkers


def searched(space, loss, count, algo="random", seed=1, **arguments):
    search = Search(space, algo=algo, seed=seed, **arguments)
    for _ in range(count):
        trial = search.ask()
        search.tell(trial, loss(trial.params))
    return search


def test_shares_are_those_of_the_variance():
    """Of ``a + 0.5 b`` with uniform a and b, a has 4/5 of the variance."""
    space = {"noise": uniform(0, 1), "b": uniform(0, 1), "a": uniform(0, 1)}
    found = searched(space, lambda params: params["a"] + 0.5 * params["b"], 300).importances()
    assert list(found) == ["a", "b", "noise"]
    assert found["a"] == pytest.approx(0.8, abs=0.08)
    assert found["b"] == pytest.approx(0.2, abs=0.06)
    assert found["noise"] < 0.04


@pytest.mark.parametrize("algo", ["random", "tpe"])
@pytest.mark.parametrize("seed", range(3))
def test_what_matters_comes_first(algo, seed):
    """An optimum inside the range, a logarithm, a choice, whole numbers and noise."""
    space = {
        "noise": uniform(0, 1),
        "lr": loguniform(1e-6, 1),
        "units": integer(8, 512, step=8),
        "option": choice("one", "two"),
    }

    def loss(params):
        option = 0.1 if params["option"] == "two" else 0.0
        return (np.log10(params["lr"]) + 3) ** 2 / 9 + option + 0.01 * params["noise"] + 0.02 * (params["units"] / 512) ** 2

    found = searched(space, loss, 60, algo, seed).importances()
    assert next(iter(found)) == "lr"
    assert found["lr"] > 0.5
    assert found["noise"] < {"random": 0.15, "tpe": 0.45}[algo]  # later trials are better, and alike in what has no effect


def test_a_few_diverged_trials_do_not_outweigh_the_others():
    space = {"x": uniform(0, 1), "y": uniform(0, 1)}
    found = searched(space, lambda params: 1e9 if params["y"] > 0.97 else params["x"], 100).importances()
    assert found["x"] > 0.8
    assert found["y"] < 0.15


def test_hyper_parameters_of_an_option_are_compared_where_they_are_used():
    space = {"kind": choice({"name": "a", "x": uniform(0, 1)}, {"name": "b", "x": uniform(0, 1), "y": uniform(0, 1)})}

    def loss(params):
        kind = params["kind"]
        return 10 + kind["x"] if kind["name"] == "a" else kind["y"]

    found = searched(space, loss, 200).importances()
    assert found["kind"] == pytest.approx(0.75, abs=0.05)
    assert found["kind.x (a)"] == pytest.approx(0.125, abs=0.05)
    assert found["kind.y"] == pytest.approx(0.125, abs=0.05)
    assert found["kind.x (b)"] < 0.02


def test_by_hand():
    """Ranks 0 to 19: the option explains whether a trial is in the lower half."""
    space = Space({"a": choice("one", "two")})
    values = [*range(1, 11), *range(20, 29), 500]
    trials = [Trial(number, {}, OK, value, chosen={"a": number // 10}) for number, value in enumerate(values)]
    assert importances(trials, space.parameters) == {"a": pytest.approx(1 - (165 / 18) / (665 / 19))}
    failed = Trial(20, {}, FAILED, chosen={"a": 0})
    assert importances([*trials, failed], space.parameters) == importances(trials, space.parameters)
    assert importances(trials[:19], space.parameters) == {}
    equal = [Trial(number, {}, OK, 1.0, chosen={"a": number % 2}) for number in range(20)]
    assert importances(equal, space.parameters) == {"a": 0.0}


def test_noise_has_little_importance():
    """With the smallest number of trials, as documented: a mean of 0.04, and one of ten above 0.15."""
    space = Space({"x": uniform(0, 1), "a": choice("one", "two", "three")})
    rng = np.random.default_rng(0)
    found = []
    for _ in range(400):
        trials = [
            Trial(number, {}, OK, rng.random(), chosen={"x": rng.random(), "a": int(rng.integers(3))})
            for number in range(MIN_TRIALS)
        ]
        shares = importances(trials, space.parameters)
        found.append([shares["x"], shares["a"]])
    assert np.mean(found, 0) == pytest.approx(0.04, abs=0.015)
    assert np.quantile(found, 0.9, 0) == pytest.approx(0.15, abs=0.03)


def test_the_direction_does_not_matter():
    space = {"x": uniform(0, 1), "y": uniform(0, 1)}
    smaller = searched(space, lambda params: params["x"], 40).importances()
    larger = searched(space, lambda params: -params["x"], 40, mode="max").importances()
    assert smaller == pytest.approx(larger)


def test_a_search_on_workers_has_importances():
    search = HyperParamModel(LocalWorkers())
    with pytest.raises(SearchError, match="there are no trials yet"):
        search.importances()
    arguments = {"objective": lambda params: params["x"], "space": {"x": uniform(0, 1)}, "seed": 1, "verbose": 0}
    search.minimize(max_evals=19, **arguments)
    with pytest.raises(SearchError, match="importances need at least 20 trials with a value; there are 19"):
        search.importances()
    search.minimize(max_evals=25, **arguments)
    assert search.importances()["x"] > 0.8


def test_the_importance_for_one_of_several_metrics():
    optuna = pytest.importorskip("optuna")
    search = Search(
        {"x": uniform(0, 1), "y": uniform(0, 1)},
        metric=("loss", "size"),
        mode="min",
        algo=optuna.samplers.RandomSampler(seed=1),
    )
    for _ in range(40):
        trial = search.ask()
        search.tell(trial, (trial.params["x"], trial.params["y"]))
    assert list(search.importances()) == list(search.importances("loss")) == ["x", "y"]
    assert list(search.importances("size")) == ["y", "x"]
    with pytest.raises(ConfigurationError, match="metric='sizes' is not known. Known: 'loss', 'size'"):
        search.importances("sizes")
