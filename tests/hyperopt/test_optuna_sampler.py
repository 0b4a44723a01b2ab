"""Samplers of Optuna as search algorithms."""

import math
from contextlib import suppress

import numpy as np
import pytest
from hyperopt import hp

from sparkkeras.errors import ConfigurationError, SearchError
from sparkkeras.hyperopt import HyperParamModel, Search, choice, integer, loguniform, normal, uniform
from sparkkeras.hyperopt.workers import LocalWorkers

optuna = pytest.importorskip("optuna")

pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")

SPACE = {
    "x": uniform(-10, 10),
    "lr": loguniform(1e-4, 1),
    "units": integer(32, 128, step=32),
    "layers": integer(1, 100, log=True),
    "step": uniform(0, 0.5, step=0.2),
    "kind": choice({"name": "a", "momentum": uniform(0.5, 1)}, {"name": "b", "n": integer(0, 3)}),
    "activation": choice("relu", "tanh", None),
    "list": [choice([64, 32], (16,)), "fixed"],
}


def loss(params):
    return (params["x"] - 3) ** 2 + abs(math.log10(params["lr"]) + 2) + (params["activation"] == "tanh")


def run(search, count, value=loss):
    for _ in range(count):
        trial = search.ask()
        search.tell(trial, value(trial.params))
    return search


def params_of(search):
    return [trial.params for trial in search.trials]


@pytest.mark.parametrize(
    "make",
    [
        lambda: optuna.samplers.TPESampler(seed=1),
        lambda: optuna.samplers.TPESampler(seed=1, multivariate=True, group=True),
        lambda: optuna.samplers.RandomSampler(seed=1),
        lambda: optuna.samplers.QMCSampler(seed=1, warn_independent_sampling=False),
        lambda: optuna.samplers.NSGAIISampler(seed=1, population_size=8),
    ],
)
def test_trials_get_plain_values_of_the_space(make):
    search = run(Search(SPACE, algo=make()), 30)
    for params in params_of(search):
        assert -10 <= params["x"] <= 10
        assert 1e-4 <= params["lr"] <= 1
        assert params["units"] in (32, 64, 96, 128)
        assert type(params["units"]) is type(params["layers"]) is int
        assert 1 <= params["layers"] <= 100
        assert params["step"] in (0, 0.2, 0.4)
        assert set(params["kind"]) == ({"name", "momentum"} if params["kind"]["name"] == "a" else {"name", "n"})
        assert params["activation"] in ("relu", "tanh", None)
        assert params["list"] in ([[64, 32], "fixed"], [(16,), "fixed"])
    assert {params["units"] for params in params_of(search)} == {32, 64, 96, 128}
    assert params_of(run(Search(SPACE, algo=make()), 30)) == params_of(search)  # the sampler has a seed


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_samplers_learn_from_the_trials(sign):
    def best(sampler):
        search = Search(SPACE, algo=sampler, mode="min" if sign > 0 else "max", seed=1)
        return sign * run(search, 60, lambda params: sign * loss(params)).best_value

    assert best(optuna.samplers.TPESampler(seed=0)) < 0.7 * best(optuna.samplers.RandomSampler(seed=0))


def test_a_sampler_that_keeps_its_state_in_the_study():
    pytest.importorskip("cmaes")
    space = {"x": uniform(-10, 10), "y": uniform(-10, 10)}
    search = Search(space, algo=optuna.samplers.CmaEsSampler(seed=1, popsize=6))
    run(search, 90, lambda params: (params["x"] - 3) ** 2 + (params["y"] + 2) ** 2)
    last = [trial.value for trial in search.trials[-12:]]
    assert np.median(last) < 0.5


def test_a_sampler_sees_pending_and_failed_trials_and_reports():
    seen = []

    class Sampler(optuna.samplers.RandomSampler):
        def before_trial(self, study, trial):
            seen.append([(each.state.name, each.value) for each in study.trials[: trial.number]])

    search = Search({"x": uniform(0, 1)}, algo=Sampler(seed=1), metric="accuracy", pruner="asha")
    first, second, third = (search.ask() for _ in range(3))
    search.tell(second, error="it broke")
    search.report(third, 0.25)
    search.tell(third)
    search.ask()
    assert seen[0] == []
    assert seen[2] == [("RUNNING", None)] * 2
    assert seen[3] == [("RUNNING", None), ("FAIL", None), ("COMPLETE", -0.25)]
    search.tell(first, 0.5)
    search.ask()
    assert seen[4][0] == ("COMPLETE", -0.5)


def test_a_grid_ends_the_search_when_it_is_complete():
    space = {"units": integer(32, 96, step=32), "activation": choice("relu", "tanh"), "layers": choice([1], [2])}
    grid = {"units": [32, 96], "activation": ["relu", "tanh"], "layers": [0, 1]}  # indices of options that are lists
    search = HyperParamModel(LocalWorkers())
    sampler = optuna.samplers.GridSampler(grid, seed=1)
    search.minimize(objective=lambda params: params["units"], space=space, max_evals=99, algo=sampler, verbose=0)
    assert len(search.trials) == 8
    assert {(each["units"], each["activation"], each["layers"][0]) for each in params_of(search)} == {
        (units, activation, layers) for units in (32, 96) for activation in ("relu", "tanh") for layers in (1, 2)
    }


def test_a_resumed_search_gives_earlier_trials_to_the_sampler(tmp_path):
    seen = []

    class Sampler(optuna.samplers.RandomSampler):
        def before_trial(self, study, trial):
            seen.append([(each.params, each.value) for each in study.trials if each.state.is_finished()])

    space = {**SPACE, "rate": uniform(0, 0.3, step=0.1)}
    with Search(space, save_to=tmp_path / "search", seed=1) as search:
        run(search, 10)
    assert 0.3 in {trial.params["rate"] for trial in search.trials}
    with Search(space, save_to=tmp_path / "search", algo=Sampler(seed=1)) as search:
        search.ask()
    (trials,) = seen
    for trial, (params, value) in zip(search.trials[:10], trials, strict=True):
        assert value == trial.value
        for name in ("x", "lr", "units", "layers", "activation"):
            assert params[name] == trial.params[name]
        assert params["step"] * 0.2 == pytest.approx(trial.params["step"])
        assert params["rate"] / 10 == trial.params["rate"]
        assert params["kind"] == ["a", "b"].index(trial.params["kind"]["name"])
        assert ("kind.momentum" in params) == (trial.params["kind"]["name"] == "a")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("rate", [uniform(0, 0.3, step=0.1), uniform(0, 0.6, step=0.2), uniform(0, 0.7, step=0.1)])
def test_a_search_with_inexact_steps_can_be_resumed(tmp_path, rate):
    for count in (25, 3):
        with Search({"rate": rate}, algo=optuna.samplers.TPESampler(seed=1), save_to=tmp_path / "search") as search:
            run(search, count, lambda params: -params["rate"])
    assert search.best_value == -rate.high
    assert len(search.trials) == 28


@pytest.mark.parametrize("sampler", [optuna.samplers.TPESampler, optuna.samplers.RandomSampler])
def test_a_resumed_search_does_not_repeat_the_suggestions_of_its_seed(tmp_path, sampler):
    for _ in range(2):
        with Search({"x": uniform(0, 1)}, algo=sampler(seed=1), save_to=tmp_path / "search") as search:
            run(search, 3, lambda params: params["x"])
    assert len({trial.params["x"] for trial in search.trials}) == 6


@pytest.mark.parametrize("num_pending", [1, 2, 4])
def test_pending_trials_and_samplers_that_try_everything(num_pending, tmp_path):
    """A `BruteForceSampler` tries each point once, also in a resumed search; a `GridSampler` repeats some, as documented."""
    space = {"units": integer(32, 96, step=32), "rate": uniform(0, 0.3, step=0.3)}
    grid = {"units": [32, 64, 96], "rate": [0, 1]}  # steps of a uniform

    def tried(make, save_to=None, count=99):
        with Search(space, algo=make(), save_to=save_to) as search:
            pending = []
            with suppress(SearchError):
                for _ in range(count):
                    pending.append(search.ask())
                    if len(pending) == num_pending:
                        search.tell(pending.pop(0), 1.0)
            for trial in pending:
                search.tell(trial, 1.0)
            return sorted(tuple(params.values()) for params in params_of(search))

    def brute_force():
        return optuna.samplers.BruteForceSampler(seed=1)

    def all_of_a_grid():
        return optuna.samplers.GridSampler(grid, seed=1)

    points = [(units, rate) for units in (32, 64, 96) for rate in (0.0, 0.3)]
    assert tried(brute_force) == points
    tried(brute_force, tmp_path / "points", 2)
    assert tried(brute_force, tmp_path / "points") == points
    repeated = tried(all_of_a_grid)
    assert sorted(set(repeated)) == points
    assert (len(repeated) > len(points)) == (num_pending > 1)
    tried(all_of_a_grid, tmp_path / "grid", 2)
    assert len(tried(all_of_a_grid, tmp_path / "grid")) >= 2 + len(points)


def test_optuna_logs_nothing(caplog):
    optuna.logging.enable_propagation()
    try:
        run(Search(SPACE, algo=optuna.samplers.TPESampler(seed=1)), 2)
    finally:
        optuna.logging.disable_propagation()
    assert caplog.records == []


def test_spaces_that_optuna_cannot_search_are_rejected():
    sampler = optuna.samplers.RandomSampler()
    for space in ({"x": hp.uniform("x", 0, 1)}, {"x": hp.uniform("x", 0, 1), "y": uniform(0, 1)}):
        with pytest.raises(ConfigurationError, match=r"algo=RandomSampler\(...\) searches only distributions of sparkkeras"):
            Search(space, algo=sampler)
    with pytest.raises(ConfigurationError, match=r"x: Optuna's samplers have no distribution like Normal.*use uniform"):
        Search({"x": normal(0, 1)}, algo=sampler)
    with pytest.raises(ConfigurationError, match="algo=RandomSampler is a class; expected an object"):
        Search(SPACE, algo=optuna.samplers.RandomSampler)


# Several metrics

LINE = {"x": uniform(0, 2), "n": integer(1, 9)}
TWO = {"metric": ("loss", "size"), "mode": "min"}


def two_losses(params):
    """Any x is on the front, and only the smallest n."""
    return params["x"] ** 2 + params["n"], (params["x"] - 2) ** 2 + params["n"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: optuna.samplers.TPESampler(seed=1),
        lambda: optuna.samplers.TPESampler(seed=1, multivariate=True),
        lambda: optuna.samplers.NSGAIISampler(seed=1, population_size=10),
    ],
)
def test_samplers_find_the_pareto_front_of_several_metrics(make):
    def hypervolume(search):
        front = search.pareto_front
        assert {trial.number for trial in front} == {
            trial.number
            for trial in search.trials
            if not any(
                all(np.less_equal(o.values, trial.values)) and any(np.less(o.values, trial.values)) for o in search.trials
            )
        }
        assert [trial.value for trial in front] == sorted(trial.value for trial in front)
        return optuna._hypervolume.compute_hypervolume(np.array([trial.values for trial in front]), np.array([13.0, 13.0]))

    found = hypervolume(run(Search(LINE, algo=make(), seed=1, **TWO), 60, two_losses))
    assert found > hypervolume(run(Search(LINE, algo=optuna.samplers.RandomSampler(seed=1), **TWO), 60, two_losses))


def test_the_trials_of_several_metrics_are_those_of_optuna():
    own = run(Search(LINE, algo=optuna.samplers.TPESampler(seed=3), metric=("a", "b"), mode=("min", "max")), 40, two_losses)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=3), directions=["minimize", "maximize"])
    study.optimize(lambda trial: two_losses({"x": trial.suggest_float("x", 0, 2), "n": trial.suggest_int("n", 1, 9)}), 40)
    assert [trial.params for trial in study.trials] == params_of(own)
    assert {trial.number for trial in study.best_trials} == {trial.number for trial in own.pareto_front}
    model = HyperParamModel(LocalWorkers())
    sampler = optuna.samplers.TPESampler(seed=3)
    arguments = {"metric": ("a", "b"), "mode": ("min", "max"), "algo": sampler, "max_evals": 40, "verbose": 0}
    assert model.minimize(objective=two_losses, space=LINE, **arguments) is None
    assert [trial.values for trial in model.trials] == [trial.values for trial in own.trials]
    assert model.pareto_front[0].values == own.pareto_front[0].values
    assert model.metric == ("a", "b")


def test_a_search_of_several_metrics_can_be_resumed(tmp_path):
    seen = []

    class Sampler(optuna.samplers.RandomSampler):
        def before_trial(self, study, trial):
            seen.append([each.values for each in study.trials if each.state.is_finished()])

    def search(**arguments):
        given = {"metric": ("loss", "size"), "mode": ("min", "max"), "algo": Sampler(seed=1), **arguments}
        return Search(LINE, save_to=tmp_path / "search", **given)

    with search() as first:
        run(first, 3, two_losses)
        first.tell(first.ask(), error="it broke")
    with search() as again:
        assert [trial.values for trial in again.trials] == [trial.values for trial in first.trials]
        again.ask()
    assert seen[-1] == [[loss, -size] for loss, size in (trial.values for trial in first.trials[:3])] + [None]
    for arguments, difference in (
        ({"metric": "loss", "mode": "min"}, r"its metric differs \(\['loss', 'size'\] in the folder, 'loss' now\)"),
        ({"metric": ("size", "loss")}, "its metric differs"),
        ({"mode": "min"}, r"its mode differs \(\['min', 'max'\] in the folder, \['min', 'min'\] now\)"),
    ):
        with pytest.raises(ConfigurationError, match=f"holds another search: {difference}"):
            search(**arguments)


def test_telling_several_values():
    search = Search(LINE, algo=optuna.samplers.RandomSampler(seed=1), **TWO)
    assert search.pareto_front == []
    trial = search.ask()
    for value, message in (
        (0.3, r"value=0.3: expected a sequence of 2 numbers \(loss, size\)"),
        ((1, 2, 3), "expected a sequence of 2 numbers"),
        ({"loss": 1, "size": 2}, "expected a sequence of 2 numbers"),
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
    sampler = optuna.samplers.RandomSampler(seed=1)
    search.minimize(objective=two_losses, space=LINE, max_evals=2, algo=sampler, verbose=0, **TWO)
    for access in (
        lambda: search.best_trial,
        lambda: search.best_params,
        lambda: search.best_value,
        lambda: search.best_model,
        search.best_models,
        search.best_ensemble,
    ):
        with pytest.raises(ConfigurationError, match=r"\(loss, size\) has no best trial: .* pareto_front, .* model_of\("):
            access()


def test_arguments_that_do_not_suit_several_metrics():
    sampler = optuna.samplers.RandomSampler(seed=1)
    for arguments, message in (
        ({"algo": "tpe"}, "algo='tpe' searches a single metric, and metric= names 2: give a sampler of Optuna"),
        ({"pruner": "asha"}, "pruner='asha' decides by a single value.*Omit pruner="),
        ({"mode": "auto"}, "metric='size': cannot infer.*give mode= a sequence"),
        ({"mode": ("min",)}, "has 2 names, and mode=.* 1 mode: give one mode for each metric"),
        ({"metric": ("loss", "loss")}, "names a metric twice"),
        ({"metric": ("loss", 3)}, "metric=3: expected the name of a metric"),
    ):
        given = {"algo": sampler, **TWO, **arguments}
        with pytest.raises(ConfigurationError, match=message):
            Search(LINE, **given)
        with pytest.raises(ConfigurationError, match=message):
            HyperParamModel(LocalWorkers()).minimize(objective=two_losses, space=LINE, max_evals=1, **given)
    with pytest.raises(ConfigurationError, match=r"metric=\(\): expected the name of a metric"):
        Search(LINE, metric=())
    for name, value in (("loss_threshold", 0.1), ("early_stop_fn", lambda trials: (False, []))):
        with pytest.raises(ConfigurationError, match=f"{name}=.* decides by a single value"):
            HyperParamModel(LocalWorkers()).minimize(
                objective=two_losses, space=LINE, max_evals=1, algo=sampler, **TWO, **{name: value}
            )


def test_samplers_of_a_single_objective_are_rejected():
    pytest.importorskip("cmaes")
    with pytest.raises(ConfigurationError, match=r"algo=CmaEsSampler\(...\) cannot search the 2 metrics.*NSGAIISampler"):
        Search(LINE, algo=optuna.samplers.CmaEsSampler(seed=1), **TWO)
