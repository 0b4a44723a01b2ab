"""Hyper-parameters that trials define while they run, in the style of KerasTuner and of Optuna."""

import copy

import keras
import numpy as np
import optuna
import pytest

from sparkkeras.errors import ConfigurationError
from sparkkeras.hyperopt import HyperModel, HyperParameters, HyperParamModel, choice, integer, loguniform, uniform
from sparkkeras.hyperopt.distributions import to_json
from sparkkeras.hyperopt.workers import LocalWorkers
from tests.hyperopt.test_study import cut_off


def objective(hp):
    """An objective with a loop, a branch and hyper-parameters of every kind."""
    value = sum(hp.suggest_float(f"x_{number}", -1, 1) ** 2 for number in range(hp.suggest_int("count", 1, 3)))
    if hp.Choice("kind", ["a", 2, None, True]) == "a":
        value += hp.suggest_float("step", 0, 1, step=0.25)
    return value + abs(np.log10(hp.suggest_float("lr", 1e-4, 1, log=True)) + 2) + hp.Int("n", 1, 64, sampling="log") / 64


def minimize(function=objective, max_evals=8, **arguments):
    search = HyperParamModel(LocalWorkers())
    search.minimize(**{"objective": function, "max_evals": max_evals, "seed": 1, "verbose": 0, **arguments})
    search.found = [(trial.number, trial.params, trial.value) for trial in search.trials]
    return search


def test_an_objective_gets_the_values_that_optuna_suggests():
    def values(trial):
        value = sum(trial.suggest_float(f"x_{number}", -1, 1) ** 2 for number in range(trial.suggest_int("count", 1, 3)))
        if trial.suggest_categorical("kind", ["a", "b"]) == "a":
            value += trial.suggest_float("lr", 1e-4, 1, log=True)
        return value + trial.suggest_int("n", 8, 64, step=8)

    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=1))
    study.optimize(values, 20)
    search = minimize(values, 20, algo=optuna.samplers.TPESampler(seed=1))
    assert [trial.params for trial in search.trials] == [trial.params for trial in study.trials]
    assert search.best_value == study.best_value
    assert search.importances() == optuna.importance.get_param_importances(study)


def test_a_search_that_is_cut_off_anywhere_continues_as_if_it_was_not(tmp_path):
    """Its driver died while it wrote any line of the journal about the last trial but one."""
    count = 12
    whole = minimize(max_evals=count, save_to=tmp_path / "whole").found
    assert {type(params["kind"]) for _, params, _ in whole} == {str, int, type(None), bool}
    for folder, line in cut_off(tmp_path / "whole", -2):
        assert minimize(max_evals=count, save_to=folder).found == whole, line
    resumed = minimize(max_evals=count, save_to=tmp_path / "whole")  # there is nothing left to do
    assert resumed.found == whole
    assert resumed.best_params == min(whole, key=lambda trial: trial[2])[1]


def test_values_are_asked_for_once_and_have_the_distributions_of_the_calls():
    asked = []

    def ask(name, distribution):
        asked.append((name, to_json(distribution)))
        return {"c": "y", "b": False}.get(name, 2)

    hp = HyperParameters({"given": 3}, ask)
    assert not hasattr(hp, "name_scope")
    assert hp.Int("given", 1, 9) == 3
    assert (hp.Int("i", 1, 9, step=2), hp.Int("j", 1, 9, sampling="log")) == (2, 2)
    assert (hp.Float("f", 0, 1, step=0.5), hp.Float("h", 1, 2, sampling="log", default=1.5)) == (2.0, 2.0)
    assert (hp.Choice("c", ["x", "y"]), hp.Boolean("b"), hp.Choice("d", np.array([1, 2]))) == ("y", False, 2)
    with hp.conditional_scope("c", ["y"]):
        assert hp.Int("i", 1, 9, step=2) == 2
    assert (hp.Int("same", 4, 4), hp.Float("equal", 0.5, 0.5), hp.Fixed("fixed", "z"), hp.get("same")) == (4, 0.5, "z", 4)
    assert copy.deepcopy(hp).Int("i", 1, 9, step=2) == 2
    expected = {
        "i": integer(1, 9, step=2),
        "j": integer(1, 9, log=True),
        "f": uniform(0, 1, step=0.5),
        "h": loguniform(1, 2),
        "c": choice("x", "y"),
        "b": choice(False, True),
        "d": choice(1, 2),
    }
    assert asked == [(name, to_json(each)) for name, each in expected.items()]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda hp: hp.get("units"), "Define it first"),
        (lambda hp: hp.Int("n", 1, 9, sampling="reverse_log"), "sampling='reverse_log'"),
        (lambda hp: hp.Int("n", 1, 9, 2, "log"), "step=2 .* sampling='log'"),
        (lambda hp: hp.suggest_float("x", 0.1, 1, step=0.1, log=True), "step=0.1 .* log=True"),
        (lambda hp: hp.Choice("c", []), "no options"),
        (lambda hp: hp.Choice("c", [dict, "x"]), "numbers or strings"),
        (lambda hp: hp.Int("n", 1, 9, steps=2), "Did you mean 'step'"),
        (lambda hp: hp.name_scope("a"), "hp.name_scope is not"),
        (lambda hp: hp.Int("n", 9, 1), "low must be smaller"),
        (lambda hp: (hp.Int("a", 1, 5), hp.Float("a", 0.1, 0.2)), "'a' is defined twice"),
    ],
)
def test_what_cannot_be_searched_ends_the_search(function, words):
    search = HyperParamModel(LocalWorkers())
    with pytest.raises(ConfigurationError, match=words):
        search.minimize(objective=function, max_evals=50, verbose=0)
    assert len(search.trials) == 1


def test_a_trial_fails_if_a_hyper_parameter_has_another_range_than_before():
    first, *others = minimize(lambda hp: hp.Int("n", 1, hp.Int("size", 3, 9)), 12, algo="random").trials
    same = [trial for trial in others if trial.params["size"] == first.params["size"]]
    different = [trial for trial in others if trial not in same]
    assert {trial.status for trial in (first, *same)} == {"ok"}
    assert {trial.status for trial in different} == {"failed"}
    assert all("'n' is defined twice" in trial.error for trial in different)
    assert same


def test_a_model_is_rebuilt_with_the_same_hyper_parameters():
    class Tuned:
        def build(self, hp):
            return hp.Int("n", 1, 2)

    assert HyperModel(Tuned())({"n": 2}) == 2
    with pytest.raises(ConfigurationError, match="trial has no 'units'"):
        HyperModel(lambda hp: hp.Int("units", 1, 2))({"x": 0.7})


def test_arguments_are_checked():
    for given in (3, keras.Model, keras.Sequential()):
        with pytest.raises(ConfigurationError, match="function of hp"):
            HyperModel(given)
    for algo in ("anneal", "atpe"):
        with pytest.raises(ConfigurationError, match="give space=|needs lightgbm"):
            minimize(algo=algo)
