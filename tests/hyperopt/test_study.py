"""The study of a search: samplers by name and as objects, resumed searches, several metrics, pruners, importances."""

import importlib.util
import json
import math
import shutil
from contextlib import suppress
from functools import partial

import numpy as np
import optuna
import pytest
from hyperopt import hp, rand, tpe

import sparkkeras.hyperopt
from sparkkeras.errors import ConfigurationError, SearchError
from sparkkeras.hyperopt import HyperParamModel, Search, choice, integer, loguniform, normal, report, uniform
from sparkkeras.hyperopt.algorithms import PRUNERS, SAMPLERS, make_algorithm
from sparkkeras.hyperopt.space import Space
from sparkkeras.hyperopt.workers import LocalWorkers

pytestmark = [
    pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:hyperopt.*", "ignore::UserWarning:hyperopt.*"),
]

SPACE = {
    "x": uniform(-10, 10),
    "lr": loguniform(1e-4, 1),
    "units": integer(32, 128, step=32),
    "layers": integer(1, 100, log=True),
    "step": uniform(0, 0.5, step=0.2),
    "scale": normal(0, 1),
    "kind": choice({"name": "a", "momentum": uniform(0.5, 1)}, {"name": "b", "n": integer(0, 3)}),
    "activation": choice("relu", "tanh", None),
    "list": [choice([64, 32], (16,)), "fixed"],
}
LINE = {"x": uniform(0, 2), "n": integer(1, 9)}
TWO = {"metric": ("loss", "size"), "mode": "min"}
INSTALLED = [name for name in SAMPLERS if name != "cmaes" or importlib.util.find_spec("cmaes")]


def loss(params):
    return (params["x"] - 3) ** 2 + abs(math.log10(params["lr"]) + 2) + (params["activation"] == "tanh")


def two_losses(params):
    """Any x is on the front, and only the smallest n."""
    return params["x"] ** 2 + params["n"], (params["x"] - 2) ** 2 + params["n"]


def run(search, count, value=loss):
    for _ in range(count):
        trial = search.ask()
        search.tell(trial, value(trial.params))
    return search


def params_of(search):
    return [trial.params for trial in search.trials]


def cut_off(whole, since):
    """The folders that a driver leaves when it dies while it writes a line of the journal, since the start of a trial."""
    lines = (whole / "journal.log").read_bytes().splitlines(keepends=True)
    started = [number for number, line in enumerate(lines) if json.loads(line)["op_code"] == 4]
    for cut in range(started[since], len(lines)):
        folder = whole.with_name(str(cut))
        folder.mkdir()
        (folder / "journal.log").write_bytes(b"".join(lines[:cut]) + lines[cut][:9])
        yield folder, lines[cut]


# Named samplers


@pytest.mark.filterwarnings("error", "ignore:CUDA:UserWarning")
@pytest.mark.parametrize("name", INSTALLED)
def test_suggestions_depend_only_on_the_seed_and_are_silent(name, caplog):
    count = 12 if name == "gp" else 25  # it takes a second for each trial after the tenth
    optuna.logging.enable_propagation()
    try:
        search = run(Search(SPACE, algo=name, seed=1), count)
    finally:
        optuna.logging.disable_propagation()
    assert caplog.records == []
    assert len({params["x"] for params in params_of(search)}) > 10
    assert params_of(run(Search(SPACE, algo=name, seed=1), count)) == params_of(search)
    assert run(Search(SPACE, algo=name, seed=2), 1).trials[0].params != search.trials[0].params


def test_tpe_learns_from_the_trials():
    def best(name):
        return run(Search(SPACE, algo=name, mode="max", seed=1), 60, lambda params: -loss(params)).best_value

    assert best("tpe") > 0.7 * best("random")


@pytest.mark.parametrize(
    ("algo", "count", "metrics"),
    [
        ("tpe", 12, {"metric": ("a", "b"), "mode": ("min", "max")}),
        ("nsgaii", 4, {}),
        ("anneal", 5, {}),
        (tpe.suggest, 22, {}),
    ],
)
def test_a_search_that_is_cut_off_anywhere_continues_as_if_it_was_not(algo, count, metrics, tmp_path):
    """Its driver died while it wrote any line of the journal, from the last trial but one."""

    def searched(folder):
        with Search(SPACE, algo=algo, seed=3, save_to=folder, **metrics) as search:
            while sum(trial.status == "ok" for trial in search.trials) < count:
                trial = search.ask()
                value = loss(trial.params)
                search.tell(trial, (value, trial.params["units"]) if metrics else value)
        return [(trial.number, trial.params, trial.chosen, trial.drawn, trial.values) for trial in search.trials]

    expected = searched(tmp_path / "whole")
    for folder, line in cut_off(tmp_path / "whole", since=-2):
        assert searched(folder) == expected, line


def test_a_search_may_be_resumed_with_another_algorithm(tmp_path):
    earlier = []
    for count, algo in enumerate(("tpe", "anneal", optuna.samplers.TPESampler(seed=1), rand.suggest, "random", "tpe")):
        with Search(SPACE, algo=algo, seed=1, save_to=tmp_path / "search") as search:
            assert [trial for trial in search.trials if trial.status == "ok"] == earlier
            run(search, 4)
            earlier = search.trials
            search.ask()  # is pending when the search ends
            assert len(earlier) == 4 * (count + 1)


# Samplers of Optuna


def test_the_trials_of_a_sampler_are_those_of_optuna():
    """tests/hyperopt/test_hypermodel.py tests this with a single metric."""
    study = optuna.create_study(
        sampler=optuna.samplers.NSGAIISampler(seed=1, population_size=8), directions=["minimize", "maximize"]
    )
    study.optimize(lambda trial: two_losses({"x": trial.suggest_float("x", 0, 2), "n": trial.suggest_int("n", 1, 9)}), 25)
    sampler = optuna.samplers.NSGAIISampler(seed=1, population_size=8)
    own = run(Search(LINE, algo=sampler, metric=("a", "b"), mode=("min", "max")), 25, two_losses)
    assert params_of(own) == [trial.params for trial in study.trials]
    assert {trial.number for trial in own.pareto_front} == {trial.number for trial in study.best_trials}


def test_a_sampler_sees_pending_and_failed_trials_and_reports():
    seen = []

    class Sampler(optuna.samplers.RandomSampler):
        def before_trial(self, study, trial):
            seen[:] = [(each.state.name, each.value, each.intermediate_values) for each in study.trials[: trial.number]]

    search = Search({"x": uniform(0, 1)}, algo=Sampler(seed=1), metric="accuracy", pruner="asha")
    first, second, third = (search.ask() for _ in range(3))
    assert seen == [("RUNNING", None, {})] * 2
    search.tell(second, error="it broke")
    search.report(third, 0.25)
    search.tell(third)
    search.ask()
    assert seen == [("RUNNING", None, {}), ("FAIL", None, {}), ("COMPLETE", 0.25, {1: 0.25})]
    search.tell(first, 0.5)
    search.ask()
    assert seen[0] == ("COMPLETE", 0.5, {})


def test_a_trial_is_suggested_again_if_the_sampler_raises_an_error():
    class Sampler(optuna.samplers.RandomSampler):
        fails = False

        def sample_independent(self, study, trial, param_name, param_distribution):
            if self.fails and param_name == "n":
                raise RuntimeError("it broke")
            return super().sample_independent(study, trial, param_name, param_distribution)

    sampler = Sampler(seed=1)
    search = run(Search(LINE, algo=sampler), 2, lambda params: params["x"])
    for errors, numbers in ((1, [2, 3]), (2, [5, 6])):  # the second time, trial 4 counts as failed
        sampler.fails = True
        for _ in range(errors):
            with pytest.raises(ConfigurationError, match=r"the search algorithm \(algo=\) failed: RuntimeError: it broke"):
                search.ask()
        sampler.fails = False
        assert [search.ask().number, search.ask().number] == numbers


def test_a_resumed_search_does_not_repeat_the_suggestions_of_a_sampler_with_a_seed(tmp_path):
    for _ in range(2):
        sampler = optuna.samplers.TPESampler(seed=1)
        with Search({"x": uniform(0, 1)}, algo=sampler, save_to=tmp_path / "search") as search:
            run(search, 3, lambda params: params["x"])
    assert len({trial.params["x"] for trial in search.trials}) == 6


@pytest.mark.filterwarnings("error")
def test_a_search_with_inexact_steps_can_be_resumed(tmp_path):
    rate = uniform(0, 0.7, step=0.1)
    for count in (25, 3):
        with Search({"rate": rate}, algo=optuna.samplers.TPESampler(seed=1), save_to=tmp_path / "search") as search:
            run(search, count, lambda params: -params["rate"])
    assert search.best_value == -rate.high
    assert len(search.trials) == 28


@pytest.mark.parametrize("num_pending", [1, 4])
def test_a_sampler_that_tries_everything_once_ends_the_search(num_pending):
    search, pending = (
        Search({"n": integer(1, 3), "o": choice("one", [2])}, algo=optuna.samplers.BruteForceSampler(seed=1)),
        [],
    )
    with suppress(SearchError):
        while len(search.trials) < 99:
            pending.append(search.ask())
            if len(pending) == num_pending:
                search.tell(pending.pop(0), 1.0)
    tried = sorted((params["n"], str(params["o"])) for params in params_of(search))
    assert tried == [(n, option) for n in (1, 2, 3) for option in ("[2]", "one")]


def test_a_grid_that_is_cut_off_anywhere_is_completed(tmp_path):
    space = {"rate": uniform(0, 0.3, step=0.3), "o": choice("one", [2])}
    points = [(rate, option) for rate in (0.0, 0.3) for option in ("[2]", "one")]

    def searched(folder):
        grid = optuna.samplers.GridSampler({"rate": [0, 1], "o": ["one", "(2)"]}, seed=1)  # steps, and names of options
        with Search(space, algo=grid, save_to=folder) as search, suppress(SearchError):
            run(search, 99, lambda params: params["rate"])
        return sorted((params["rate"], str(params["o"])) for params in params_of(search))

    assert searched(tmp_path / "whole") == points
    for folder, line in cut_off(tmp_path / "whole", since=0):
        assert searched(folder) == points, line


# Names and arguments


def test_algorithms_have_names_for_display():
    def own(new_ids, domain, trials, seed):
        return rand.suggest(new_ids, domain, trials, seed)

    names = {
        "anneal": "anneal",
        tpe.suggest: "tpe.suggest",
        partial(tpe.suggest, n_startup_jobs=5): "tpe.suggest(n_startup_jobs=5)",
        own: "own",
        optuna.samplers.TPESampler(): "TPESampler",
    }
    space = Space({"x": hp.uniform("x", 0, 1)})
    assert {each: make_algorithm(each, space, {"loss": 1.0})[1] for each in names} == names


@pytest.mark.parametrize(
    ("algo", "message"),
    [
        (3, r"is not known.*a sampler of Optuna.*Known: 'anneal', 'atpe', .*'tpe'"),
        ("TPE", "Did you mean 'tpe'"),
        (optuna.samplers.RandomSampler, "algo=RandomSampler is a class; expected an object"),
        (
            optuna.samplers.GridSampler({"x": [1]}),
            "algo=GridSampler cannot search this .*Give another sampler, such as 'tpe'",
        ),
    ],
)
def test_invalid_algorithms_are_rejected(algo, message):
    with pytest.raises(ConfigurationError, match=message):
        Search(SPACE, algo=algo)


def test_algorithms_name_the_packages_that_are_missing(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name, packages in (("cmaes", "cmaes"), ("gp", "scipy torch"), ("atpe", "lightgbm scikit-learn")):
        with pytest.raises(ConfigurationError, match=f"algo='{name}' needs .*: pip install {packages}"):
            Search(SPACE, algo=name)


# Several metrics


def test_a_search_of_several_metrics_is_resumed_with_the_same_ones(tmp_path):
    with Search(LINE, save_to=tmp_path, **TWO) as search:
        run(search, 1, two_losses)
    with pytest.raises(ConfigurationError, match=r"its metric differs \(\['loss', 'size'\] there, \['size', 'loss'\] now\)"):
        Search(LINE, save_to=tmp_path, metric=("size", "loss"), mode="min")


def test_telling_several_values():
    search = Search(LINE, algo="random", **TWO)
    assert search.pareto_front == []
    trial = search.ask()
    for value, message in (
        (0.3, r"value=0.3: expected a sequence of 2 numbers \(loss, size\)"),
        ((1, 2, 3), "expected a sequence of 2 numbers"),
        ((1, "2"), "value='2': expected a number"),
        (None, r"trial 0 has no value: tell\(trial, \(loss, size\)\)"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            search.tell(trial, value)
    assert not search.report(trial, 0.5)
    assert not search.report(trial, 0.25)
    with pytest.raises(ConfigurationError, match="trial 0 has no value"):
        search.tell(trial)
    told = search.tell(trial, np.array([0.25, 3.0]))
    assert (told.status, told.value, told.values, told.best_epoch) == ("ok", 0.25, (0.25, 3.0), 2)
    failed = search.tell(search.ask(), (0.1, math.nan))
    assert (failed.status, failed.error, failed.values) == ("failed", "its value is nan, not a finite number", ())
    diverged = search.ask()
    assert search.report(diverged, math.inf)
    assert search.tell(diverged).status == "failed"
    assert [trial.number for trial in search.pareto_front] == [0]


def test_several_metrics_have_no_best_trial():
    search = HyperParamModel(LocalWorkers())
    assert search.minimize(objective=two_losses, space=LINE, max_evals=2, verbose=0, **TWO) is None
    assert search.metric == ("loss", "size")
    for access in (lambda: search.best_params, lambda: search.best_model, search.best_models):
        with pytest.raises(ConfigurationError, match=r"\(loss, size\) has no best trial: .* pareto_front, .* model_of\("):
            access()


def test_arguments_that_do_not_suit_several_metrics():
    for arguments, message in (
        ({"algo": "anneal"}, "algo='anneal' searches a single metric, and metric= names 2: use 'tpe', 'nsgaii'"),
        ({"algo": tpe.suggest}, "algo='tpe.suggest' searches a single metric"),
        ({"pruner": "asha"}, "pruner='asha' decides by a single value.*Omit pruner="),
        ({"mode": "auto"}, "metric='size': cannot infer.*give mode= a sequence"),
        ({"mode": ("min",)}, "has 2 names, and mode=.* 1 mode: give one mode for each metric"),
        ({"metric": ("loss", "loss")}, "names a metric twice"),
        ({"metric": ("loss", 3)}, "metric=3: expected the name of a metric"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            Search(LINE, **{**TWO, **arguments})
    with pytest.raises(ConfigurationError, match=r"metric=\(\): expected the name of a metric"):
        Search(LINE, metric=())
    for name, value in (("pruner", "asha"), ("loss_threshold", 0.1), ("early_stop_fn", lambda trials: (False, []))):
        with pytest.raises(ConfigurationError, match=f"{name}=.* decides by a single value"):
            HyperParamModel(LocalWorkers()).minimize(objective=two_losses, space=LINE, max_evals=1, **TWO, **{name: value})


# Pruners


def curve(params):
    """An objective of 9 epochs, of which the third is the best."""
    for epoch in range(1, 10):
        report(params["x"] + abs(epoch - 3) / 100)
    return params["x"]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", PRUNERS)
def test_pruners_end_trials_that_are_worse_than_others(name):
    def searched(**arguments):
        search = HyperParamModel(LocalWorkers())
        arguments = {"max_evals": 40, "algo": "random", "seed": 1, "verbose": 0, **arguments}
        search.minimize(objective=curve, space={"x": uniform(0, 1)}, **arguments)
        return search

    pruned, everything = searched(pruner=name), searched()
    assert pruned.best_value == everything.best_value
    assert sum(trial.epochs for trial in pruned.trials) < 0.9 * sum(trial.epochs for trial in everything.trials)
    for trial in pruned.trials:
        assert trial.status == "pruned" or trial.epochs == 9
        assert trial.value == trial.params["x"] + max(0, 3 - trial.epochs) / 100
    assert [trial.state.name for trial in pruned.study.trials] == [
        {"ok": "COMPLETE", "pruned": "PRUNED"}[trial.status] for trial in pruned.trials
    ]


def test_a_pruner_of_the_user_gets_the_study_and_the_reports():
    class Pruner(optuna.pruners.BasePruner):
        def prune(self, study, trial):
            return study.trials[trial.number].intermediate_values == {1: 1, 2: 2, 3: 4}

    search = Search({"x": uniform(0, 1)}, pruner=Pruner())
    for values, replies in (((1, 2, 3, 4), [False] * 4), ((1, 2, 4), [False, False, True])):
        trial = search.ask()
        assert [search.report(trial, value) for value in values] == replies
        search.tell(trial)
    assert [trial.status for trial in search.trials] == ["ok", "pruned"]


@pytest.mark.parametrize(
    ("pruner", "message"),
    [
        (["asha"], "is not known. Give None, a name, or a pruner of Optuna.*Known: 'asha'"),
        ("Median", "Did you mean 'median'"),
        (optuna.pruners.MedianPruner, r"pruner=MedianPruner is a class; expected an object: MedianPruner\(\)"),
    ],
)
def test_invalid_pruners_are_rejected(pruner, message):
    with pytest.raises(ConfigurationError, match=message):
        Search(LINE, pruner=pruner)


def test_importing_an_earlier_pruner_names_what_replaces_it():
    for name, words in (("ASHAPruner", 'use pruner="asha", or'), ("Pruner", "use a subclass of")):
        with pytest.raises(ImportError, match=f"{name}: pruners are Optuna's: {words}"):
            getattr(sparkkeras.hyperopt, name)


# Importances


def test_the_importance_for_one_of_several_metrics():
    space = {"x": uniform(0, 1), "y": uniform(0, 1)}
    search = Search(space, metric=("loss", "accuracy"), mode=("min", "max"), algo="random", seed=1)
    run(search, 40, lambda params: (params["x"], -params["y"]))
    assert list(search.importances()) == list(search.importances("loss")) == ["x", "y"]
    assert list(search.importances("accuracy")) == ["y", "x"]
    with pytest.raises(ConfigurationError, match="metric='sizes' is not known. Known: 'accuracy', 'loss'"):
        search.importances("sizes")


@pytest.mark.filterwarnings("error")
def test_importances_need_trials_with_different_values():
    search = HyperParamModel(LocalWorkers())
    with pytest.raises(SearchError, match="there are no trials yet"):
        search.importances()
    arguments = {"space": {"x": uniform(0, 1)}, "seed": 1, "verbose": 0}
    search.minimize(objective=lambda params: 0.5, max_evals=3, **arguments)
    with pytest.raises(SearchError, match="importances need trials with different values: search further"):
        search.importances()
    search.minimize(objective=lambda params: params["x"], max_evals=3, **arguments)
    assert search.importances() == {"x": 1.0}


@pytest.mark.filterwarnings("ignore:The value .* is out of range")
def test_units_of_grids_are_checked():
    grid = optuna.samplers.GridSampler({"scale": [5.0, 6.0]})
    with pytest.raises(ConfigurationError, match="value .* for 'scale', of a grid.*gets its quantile"):
        Search({"scale": normal(0, 1)}, algo=grid).ask()


def test_trials_that_were_ended_elsewhere_do_not_stop_a_search(tmp_path):
    with Search(LINE, seed=1, save_to=tmp_path) as search:
        search.study.ask()  # without parameters
        search.study.tell(0, state=optuna.trial.TrialState.FAIL)
        search.tell(search.ask(), 0.5)
    with Search(LINE, save_to=tmp_path) as again:
        assert [(trial.number, trial.status) for trial in again.trials] == [(0, "failed"), (1, "ok")]


def test_a_trial_that_was_asked_for_is_in_the_journal_at_once(tmp_path):
    search = Search(LINE, seed=1, save_to=tmp_path / "one")
    asked = search.ask()
    shutil.copytree(tmp_path / "one", tmp_path / "other")  # as it is when the program is killed
    assert Search(LINE, save_to=tmp_path / "other").ask().params == asked.params


def test_errors_of_the_settings_release_the_folder(tmp_path):
    with Search(LINE, seed=1, save_to=tmp_path) as search:
        search.tell(search.ask(), 0.5)
    with pytest.raises(ConfigurationError, match="its seed differs") as caught:
        Search(LINE, seed=2, save_to=tmp_path)
    Search(LINE, seed=1, save_to=tmp_path).close()
    assert caught  # whose traceback keeps what failed
