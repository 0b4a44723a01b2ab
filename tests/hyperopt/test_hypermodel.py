"""Hyper-parameters that trials define while they run, in the style of KerasTuner and of Optuna."""

import copy
import json

import keras
import numpy as np
import optuna
import pytest

from sparkkeras.errors import ConfigurationError, UnknownArgumentError
from sparkkeras.hyperopt import HyperModel, HyperParameters, HyperParamModel
from sparkkeras.hyperopt.distributions import Choice, Integer, LogUniform, Uniform
from sparkkeras.hyperopt.workers import LocalWorkers


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
    """Its driver died while it wrote any line of the journal, from the last trial but one."""
    count = 12
    whole = minimize(max_evals=count, save_to=tmp_path / "whole").found
    assert {type(params["kind"]) for _, params, _ in whole} == {str, int, type(None), bool}
    assert whole == minimize(max_evals=count).found
    lines = (tmp_path / "whole" / "journal.log").read_bytes().splitlines(keepends=True)
    started = [number for number, line in enumerate(lines) if json.loads(line)["op_code"] == 4]
    for cut in range(started[-2], len(lines)):
        folder = tmp_path / str(cut)
        folder.mkdir()
        (folder / "journal.log").write_bytes(b"".join(lines[:cut]) + lines[cut][:9])
        assert minimize(max_evals=count, save_to=folder).found == whole, lines[cut]
    resumed = minimize(max_evals=count, save_to=tmp_path / "whole")  # there is nothing left to do
    assert resumed.found == whole
    assert resumed.best_params == min(whole, key=lambda trial: trial[2])[1]


def test_values_are_asked_for_once_and_have_the_distributions_of_the_calls():
    asked = []

    def ask(name, distribution):
        asked.append((name, type(distribution), *vars(distribution).values()))
        return {"c": "y", "b": False}.get(name, 2)

    hp = HyperParameters({"given": 3}, ask)
    assert hp.Int("given", 1, 9) == 3
    assert (hp.Int("i", 1, 9, step=2), hp.Int("j", 1, 9, sampling="log")) == (2, 2)
    assert (hp.Float("f", 0, 1, step=0.5), hp.Float("h", 1, 2, sampling="log", default=1.5)) == (2.0, 2.0)
    assert (hp.Choice("c", ["x", "y"]), hp.Boolean("b"), hp.Choice("d", np.array([1, 2]))) == ("y", False, 2)
    with hp.conditional_scope("c", ["y"]):
        assert hp.Int("i", 1, 9, step=2) == 2
    assert (hp.Int("same", 4, 4), hp.Float("equal", 0.5, 0.5), hp.Fixed("fixed", "z"), hp.get("same")) == (4, 0.5, "z", 4)
    assert copy.deepcopy(hp).Int("i", 1, 9, step=2) == 2
    assert asked == [
        ("i", Integer, 1, 9, 2, False),
        ("j", Integer, 1, 9, 1, True),
        ("f", Uniform, 0.0, 1.0, 0.5),
        ("h", LogUniform, 1.0, 2.0),
        ("c", Choice, ("x", "y"), None),
        ("b", Choice, (False, True), None),
        ("d", Choice, (1, 2), None),
    ]


def test_an_object_with_a_method_build_is_accepted():
    class Tuned:
        def build(self, hp):
            return hp.Int("n", 1, 2)

    assert HyperModel(Tuned())(HyperParameters({"n": 2})) == HyperModel(Tuned())({"n": 2}) == 2


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda hp: hp.get("units"), r"hp.get\('units'\): there is no such hyper-parameter. Define it first"),
        (lambda hp: hp.Int("n", 1, 9, sampling="reverse_log"), "sampling='reverse_log' of 'n' is not supported: expected"),
        (lambda hp: hp.Int("n", 1, 9, 2, "log"), r"hp.Int\('n'\): step=2 cannot be combined with sampling='log'"),
        (lambda hp: hp.suggest_float("x", 0.1, 1, step=0.1, log=True), "step=0.1 cannot be combined with log=True"),
        (lambda hp: hp.Choice("c", []), r"choice\(\) has no options"),
        (lambda hp: hp.Choice("c", [dict, "x"]), r"hp.Choice\('c'\): .*class 'dict'.*expected numbers or strings"),
        (lambda hp: hp.Int("n", 1, 9, steps=2), r"hp.Int\('n'\): the argument 'steps'. Known: .* Did you mean 'step'"),
        (lambda hp: hp.name_scope("a"), "hp.name_scope is not supported. Known: 'Boolean', 'Choice', .*'conditional_scope'"),
        (lambda hp: hp.Int("n", 9, 1), r"integer\(9, 1\): low must be smaller than high"),
        (
            lambda hp: (hp.Int("a", 1, 5), hp.Float("a", 0.1, 0.2)),
            "'a' is defined twice, as Integer.* and as Uniform.*rename",
        ),
    ],
)
def test_what_cannot_be_searched_ends_the_search(function, message):
    search = HyperParamModel(LocalWorkers())
    with pytest.raises(ConfigurationError, match=message):
        search.minimize(objective=function, max_evals=50, verbose=0)
    assert len(search.trials) == 1


def test_code_can_ask_whether_a_method_is_supported():
    assert not hasattr(HyperParameters({}), "name_scope")


def test_a_trial_fails_if_a_hyper_parameter_has_another_range_than_before():
    first, *others = minimize(lambda hp: hp.Int("n", 1, hp.Int("size", 3, 9)), 12, algo="random").trials
    same = [trial for trial in others if trial.params["size"] == first.params["size"]]
    different = [trial for trial in others if trial not in same]
    assert {trial.status for trial in (first, *same)} == {"ok"}
    for trial in different:
        assert trial.status == "failed"
        assert "the hyper-parameter 'n' is defined twice, as Integer(low=1, high=" in trial.error
    assert same
    assert different


def test_a_model_is_rebuilt_with_the_same_hyper_parameters():
    with pytest.raises(ConfigurationError, match="the trial has no 'units': .* must define the same hyper-parameters"):
        HyperModel(lambda hp: hp.Int("units", 1, 2))({"x": 0.7})


def test_arguments_are_checked():
    for given in (3, keras.Model, keras.Sequential()):
        with pytest.raises(ConfigurationError, match="expected a function of hp, or an object with a method build"):
            HyperModel(given)
    with pytest.raises(UnknownArgumentError, match="HyperModel takes no argument 'space'"):
        HyperModel(objective, space={})
    for algo in ("anneal", "atpe"):
        with pytest.raises(ConfigurationError, match=r"has to know the space before: give space=|needs lightgbm"):
            minimize(algo=algo)
