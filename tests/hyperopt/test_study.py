"""Searches by ask and tell: samplers and pruners, several metrics, importances, what a resumed search has."""

import importlib.util
import json
import math
import os
import pickle
import shutil
import threading
from contextlib import suppress

import numpy as np
import optuna
import pytest
from hyperopt import rand, tpe
from optuna.storages.journal import JournalFileBackend

import sparkkeras.hyperopt
from sparkkeras.errors import ConfigurationError, SearchError, StorageError, UnknownArgumentError
from sparkkeras.hyperopt import (
    HyperParamModel,
    JournalBackend,
    Search,
    choice,
    integer,
    loguniform,
    normal,
    report,
    uniform,
)
from sparkkeras.hyperopt.algorithms import PRUNERS, SAMPLERS
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
    "activation": choice("relu", None),
    "list": [choice([64, 32], (16,)), "fixed"],
}
LINE = {"x": uniform(0, 2), "n": integer(1, 9)}
TWO = {"metric": ("loss", "size"), "mode": "min"}
INSTALLED = [name for name in SAMPLERS if name != "cmaes" or importlib.util.find_spec("cmaes")]


def loss(params):
    return (params["x"] - 3) ** 2 + abs(math.log10(params["lr"]) + 2)


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


def cut_off(whole, *trials):
    """The folders that a driver leaves when it dies while it writes a line of the journal about these trials.

    Of several lines of one kind in a row, this is the first or the last one.
    """
    lines = (whole / "journal.log").read_bytes().splitlines(keepends=True)
    kinds = [json.loads(line)["op_code"] for line in lines]
    started = [number for number, kind in enumerate(kinds) if kind == 4]
    ends = [*started[1:], len(lines)]
    for cut in (cut for trial in trials for cut in range(started[trial], ends[trial])):
        if kinds[cut - 1 : cut + 2] != [kinds[cut]] * 3:
            folder = whole.with_name(str(cut))
            folder.mkdir()
            (folder / "journal.log").write_bytes(b"".join(lines[:cut]) + lines[cut][:9])
            yield folder, lines[cut]


# Named samplers


@pytest.mark.filterwarnings("error", "ignore:CUDA:UserWarning")
@pytest.mark.parametrize("name", INSTALLED)
def test_suggestions_depend_only_on_the_seed_and_are_silent(name, caplog):
    count = 11  # samplers choose the first ten at random
    optuna.logging.enable_propagation()
    try:
        search = run(Search(SPACE, algo=name, seed=1), count)
    finally:
        optuna.logging.disable_propagation()
    assert caplog.records == []
    assert len({params["x"] for params in params_of(search)}) > 10
    assert params_of(run(Search(SPACE, algo=name, seed=1), count)) == params_of(search)
    assert Search(SPACE, algo=name, seed=2).ask().params != search.trials[0].params


def test_tpe_learns_from_the_trials():
    def best(name):
        return run(Search(SPACE, algo=name, mode="max", seed=1), 60, lambda params: -loss(params)).best_value

    assert best("tpe") > 0.7 * best("random")


@pytest.mark.parametrize(
    ("algo", "count", "metrics"),
    [
        ("tpe", 12, {"metric": ("a", "b"), "mode": ("min", "max")}),
        ("nsgaii", 3, {}),
        ("anneal", 3, {}),
        (tpe.suggest, 22, {}),
    ],
)
def test_a_search_that_is_cut_off_anywhere_continues_as_if_it_was_not(algo, count, metrics, tmp_path):
    """Its driver died while it wrote any line of the journal about the last trial but one."""

    def searched(folder):
        with Search(SPACE, algo=algo, seed=3, save_to=folder, **metrics) as search:
            while sum(trial.status == "ok" for trial in search.trials) < count:
                trial = search.ask()
                value = loss(trial.params)
                search.tell(trial, (value, trial.params["units"]) if metrics else value)
        return [(trial.number, trial.params, trial.chosen, trial.drawn, trial.values) for trial in search.trials]

    expected = searched(tmp_path / "whole")
    for folder, line in cut_off(tmp_path / "whole", -2):
        assert searched(folder) == expected, line


def test_a_search_may_be_resumed_with_another_algorithm(tmp_path):
    """A sampler with a seed does not repeat its suggestions."""
    earlier, sampler = [], optuna.samplers.RandomSampler
    for count, algo in enumerate((sampler(seed=1), "anneal", sampler(seed=1), rand.suggest, "tpe")):
        with Search(SPACE, algo=algo, seed=1, save_to=tmp_path / "search") as search:
            assert [trial for trial in search.trials if trial.status == "ok"] == earlier
            run(search, 4)
            earlier = search.trials
            search.ask()  # is pending when the search ends
            assert len(earlier) == 4 * (count + 1)
    assert len({trial.params["x"] for trial in earlier}) == len(earlier)


# Samplers of Optuna


def test_the_trials_of_a_sampler_are_those_of_optuna():
    """tests/hyperopt/test_hypermodel.py tests this with a single metric."""

    def sampler():
        return optuna.samplers.NSGAIISampler(seed=1, population_size=8)

    study = optuna.create_study(sampler=sampler(), directions=["minimize", "maximize"])
    study.optimize(lambda trial: two_losses({"x": trial.suggest_float("x", 0, 2), "n": trial.suggest_int("n", 1, 9)}), 25)
    own = run(Search(LINE, algo=sampler(), metric=("a", "b"), mode=("min", "max")), 25, two_losses)
    assert params_of(own) == [trial.params for trial in study.trials]
    assert {trial.number for trial in own.pareto_front} == {trial.number for trial in study.best_trials}


def test_a_sampler_sees_pending_and_failed_trials_and_reports():
    seen = []

    class Sampler(optuna.samplers.RandomSampler):
        def before_trial(self, study, trial):
            seen[:] = [(each.state.name, each.value, each.intermediate_values) for each in study.trials[: trial.number]]

    search = Search({"x": uniform(0, 1)}, algo=Sampler(seed=1), metric="accuracy", pruner="asha")
    _, second, third = (search.ask() for _ in range(3))
    search.tell(second, error="it broke")
    search.report(third, 0.25)
    search.tell(third)
    search.ask()
    assert seen == [("RUNNING", None, {}), ("FAIL", None, {}), ("COMPLETE", 0.25, {1: 0.25})]


def test_a_trial_is_suggested_again_if_the_sampler_raises_an_error():
    class Sampler(optuna.samplers.RandomSampler):
        def sample_independent(self, study, trial, param_name, param_distribution):
            if failures and param_name == "n":
                raise RuntimeError(failures.pop())
            return super().sample_independent(study, trial, param_name, param_distribution)

    failures, search = [], Search(LINE, algo=Sampler(seed=1))
    for errors, numbers in ((["it broke"], [0, 1]), (["it broke", "it broke"], [3, 4])):  # at the second, trial 2 failed
        failures += errors
        for _ in errors:
            with pytest.raises(ConfigurationError, match=r"algo=.*it broke"):
                search.ask()
        assert [search.ask().number, search.ask().number] == numbers


def test_a_sampler_that_tries_everything_once_ends_the_search():
    space, pending = {"n": integer(1, 3), "o": choice("one", [2])}, []
    search = Search(space, algo=optuna.samplers.BruteForceSampler(seed=1))
    with suppress(SearchError):
        while len(search.trials) < 99:
            pending.append(search.ask())
            if len(pending) == 4:
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
    for folder, line in cut_off(tmp_path / "whole", 0, -2, -1):
        assert searched(folder) == points, line


# Names and arguments


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"algo": 3}, "algo=3 is not known"),
        ({"algo": optuna.samplers.RandomSampler}, "expected an object"),
        ({"algo": optuna.samplers.GridSampler({"x": [1]})}, "cannot search this"),
        ({"pruner": "Median"}, "Did you mean 'median'"),
        ({"pruner": optuna.pruners.MedianPruner}, "expected an object"),
    ],
    ids=range(5),
)
def test_invalid_algorithms_and_pruners_are_rejected(given, words):
    with pytest.raises(ConfigurationError, match=words):
        Search(SPACE, **given)


def test_algorithms_name_the_packages_that_are_missing(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name, packages in (("cmaes", "cmaes"), ("gp", "scipy torch"), ("atpe", "lightgbm scikit-learn")):
        with pytest.raises(ConfigurationError, match=f"pip install {packages}"):
            Search(SPACE, algo=name)


# Several metrics


def test_telling_several_values():
    search = Search(LINE, algo="random", **TWO)
    assert search.pareto_front == []
    trial, failed, diverged = search.ask(), search.ask(), search.ask()
    assert [search.report(trial, value) for value in (0.5, 0.25)] == [False, False]
    for value, words in ((0.3, "value=0.3"), ((1, 2, 3), "2 numbers"), ((1, "2"), "value='2'"), (None, "no value")):
        with pytest.raises(ConfigurationError, match=words):
            search.tell(trial, value)
    told = search.tell(trial, np.array([0.25, 3.0]))
    assert (told.status, told.value, told.values, told.best_epoch) == ("ok", 0.25, (0.25, 3.0), 2)
    assert search.tell(failed, (0.1, math.nan)).values == ()
    assert search.report(diverged, math.inf)
    assert search.tell(diverged).status == "failed"
    assert [trial.number for trial in search.pareto_front] == [0]


def test_several_metrics_have_no_best_trial():
    search = HyperParamModel(LocalWorkers())
    assert search.minimize(objective=two_losses, space=LINE, max_evals=2, verbose=0, **TWO) is None
    assert search.metric == ("loss", "size")
    for access in (lambda: search.best_params, lambda: search.best_model, search.best_models):
        with pytest.raises(ConfigurationError, match="no best trial.*pareto_front"):
            access()


def test_arguments_that_do_not_suit_several_metrics():
    for given, words in (
        ({"algo": "anneal"}, "algo='anneal'"),
        ({"pruner": "asha"}, "pruner='asha'"),
        ({"mode": "auto"}, "metric='size'"),
        ({"mode": ("min",)}, "one mode for each"),
        ({"metric": ("loss", "loss")}, "twice"),
        ({"metric": ("loss", 3)}, "metric=3"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            Search(LINE, **{**TWO, **given})
    with pytest.raises(ConfigurationError, match="loss_threshold=.* single value"):
        HyperParamModel(LocalWorkers()).minimize(objective=two_losses, space=LINE, max_evals=1, loss_threshold=0.1, **TWO)


# Pruners


def curved(**arguments):
    """A search whose trials have 9 epochs, of which the third is the best."""

    def curve(params):
        for epoch in range(1, 10):
            report(params["x"] + abs(epoch - 3) / 100)
        return params["x"]

    search = HyperParamModel(LocalWorkers())
    space = {"x": uniform(0, 1)}
    search.minimize(objective=curve, space=space, max_evals=40, algo="random", seed=1, verbose=0, **arguments)
    return search


@pytest.fixture(scope="module")
def unpruned():
    return curved()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", PRUNERS)
def test_pruners_end_trials_that_are_worse_than_others(name, unpruned):
    pruned = curved(pruner=name)
    assert pruned.best_value == unpruned.best_value
    assert sum(trial.epochs for trial in pruned.trials) < 0.9 * sum(trial.epochs for trial in unpruned.trials)
    for trial, frozen in zip(pruned.trials, pruned.study.trials, strict=True):
        assert frozen.state.name == ("PRUNED" if trial.status == "pruned" else "COMPLETE")
        assert trial.status == "pruned" or trial.epochs == 9
        assert trial.value == trial.params["x"] + max(0, 3 - trial.epochs) / 100


def test_a_pruner_of_the_user_gets_the_study_and_the_reports():
    class Pruner(optuna.pruners.BasePruner):
        def prune(self, study, trial):
            return study.trials[trial.number].intermediate_values == {1: 1, 2: 2}

    search = Search({"x": uniform(0, 1)}, pruner=Pruner())
    for values, replies in (((1, 3), [False, False]), ((1, 2), [False, True])):
        trial = search.ask()
        assert [search.report(trial, value) for value in values] == replies
        search.tell(trial)
    assert [trial.status for trial in search.trials] == ["ok", "pruned"]


def test_importing_an_earlier_pruner_names_what_replaces_it():
    for name, words in (("ASHAPruner", 'pruner="asha"'), ("Pruner", "a subclass of")):
        with pytest.raises(ImportError, match=words):
            getattr(sparkkeras.hyperopt, name)


# Importances


def test_the_importance_for_one_of_several_metrics():
    space = {"x": uniform(0, 1), "y": uniform(0, 1)}
    search = Search(space, metric=("loss", "accuracy"), mode=("min", "max"), algo="random", seed=1)
    run(search, 40, lambda params: (params["x"], -params["y"]))
    assert list(search.importances()) == list(search.importances("loss")) == ["x", "y"]
    assert list(search.importances("accuracy")) == ["y", "x"]
    with pytest.raises(ConfigurationError, match="metric='sizes'"):
        search.importances("sizes")


@pytest.mark.filterwarnings("error")
def test_importances_need_trials_with_different_values():
    search = Search({"x": uniform(0, 1)}, seed=1)
    with pytest.raises(SearchError, match="different values"):
        run(search, 2, lambda params: 0.5).importances()
    assert run(search, 3, lambda params: params["x"]).importances() == {"x": 1.0}


@pytest.mark.filterwarnings("ignore:The value .* is out of range")
def test_units_of_grids_are_checked():
    grid = optuna.samplers.GridSampler({"scale": [5.0, 6.0]})
    with pytest.raises(ConfigurationError, match="'scale', of a grid"):
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


# Asking and telling


def saved_values(folder):
    """The values in the journal of a search, as Optuna reads them."""
    storage = optuna.storages.JournalStorage(JournalBackend(str(folder)))
    trials = optuna.load_study(study_name="sparkkeras", storage=storage).trials
    return {trial.number: trial.value for trial in trials if trial.state.is_finished()}


def test_a_search_on_workers_has_the_same_trials_and_continues_it(tmp_path):
    def minimized(count, **given):
        search = HyperParamModel(LocalWorkers())
        search.minimize(objective=loss, space=SPACE, max_evals=count, verbose=0, **given)
        return search.trials

    with Search(SPACE, seed=7, save_to=tmp_path / "search") as search:
        run(search, 12)
    assert search.best_value == loss(search.best_params) == min(trial.value for trial in search.trials)
    trials, continued = minimized(12, seed=7), minimized(14, save_to=tmp_path / "search")
    assert [(trial.params, trial.value) for trial in search.trials] == [(trial.params, trial.value) for trial in trials]
    assert (continued[:12], len(continued)) == (search.trials, 14)


def test_threads_may_share_a_search():
    search = Search(SPACE, algo="random", seed=1)
    threads = [threading.Thread(target=run, args=(search, 10)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [trial.number for trial in search.trials] == list(range(40))
    assert all(trial.value == loss(trial.params) for trial in search.trials)


def test_a_failed_trial_has_its_error():
    search = Search(SPACE, seed=1)
    text, exception, nan = (search.ask() for _ in range(3))
    search.tell(text, error="out of memory")
    try:
        raise RuntimeError("it broke")
    except RuntimeError as error:
        told = search.tell(exception.number, error=error)
    assert "test_study.py" in told.traceback
    assert "nan" in search.tell(nan, math.nan).error
    assert [trial.status for trial in search.trials] == ["failed"] * 3
    assert [trial.error for trial in search.trials[:2]] == ["out of memory", "RuntimeError: it broke"]
    with pytest.raises(SearchError, match="see trials"):
        _ = search.best_params


def test_without_a_value_the_best_report_counts():
    search = Search(SPACE, seed=1)
    trial, other, failed = (search.ask() for _ in range(3))
    assert [search.report(trial, value) for value in (0.5, 0.25, math.nan)] == [False, False, True]  # which ends it
    told = search.tell(trial)
    assert (told.status, told.value, told.best_epoch, told.history) == ("ok", 0.25, 2, {"loss": [0.5, 0.25]})
    search.report(other, 0.5)
    assert search.tell(other, 0.125).best_epoch is None
    assert search.report(failed, math.inf)
    told = search.tell(failed)
    assert (told.status, told.value) == ("failed", None)
    assert "inf" in told.error


def test_a_closed_search_takes_no_results():
    search = Search(SPACE)
    trial = search.ask()
    search.ask()
    search.tell(trial, 0.5)
    assert repr(search) == "Search(metric='loss', trials=2, pending=1)"
    search.close()
    with pytest.raises(ConfigurationError, match="search was closed"):
        search.tell(1, 1.0)
    with pytest.raises(SearchError, match="it was closed"):
        search.ask()


def test_a_trial_that_cannot_be_saved_is_saved_by_the_next_call(tmp_path, monkeypatch):
    append = JournalFileBackend.append_logs

    def half(self, logs):
        append(self, logs)
        os.truncate(self._file_path, os.stat(self._file_path).st_size - 9)
        raise OSError("no space left")

    search = Search(SPACE, save_to=tmp_path / "search")
    trial = search.ask()
    monkeypatch.setattr(JournalFileBackend, "append_logs", half)
    with pytest.raises(StorageError, match="journal in .* no space left"):
        search.tell(trial, 0.5)
    assert [each.status for each in search.trials] == ["running"]
    monkeypatch.undo()
    assert search.tell(trial, 0.25).value == search.best_value == 0.5  # the study was told the first value
    assert saved_values(tmp_path / "search") == {0: 0.5}
    with pytest.raises(ConfigurationError, match="has ended"):
        search.tell(trial, 0.25)
    assert search.ask().number == 1


def test_trials_are_saved_after_an_error_of_the_pruner(tmp_path):
    class Pruner(optuna.pruners.BasePruner):
        def prune(self, study, trial):
            if failures:
                raise RuntimeError(failures.pop())
            return False

    failures = ["no idea"]
    with Search(LINE, pruner=Pruner(), seed=1, save_to=tmp_path) as search:
        first, second = search.ask(), search.ask()
        with pytest.raises(ConfigurationError, match="pruner=.*no idea"):
            search.report(first, 0.5)
        assert search.report(second, 0.75) is False
        search.tell(second)
        search.tell(first, 0.5)
        search.tell(search.ask(), 0.25)
    assert saved_values(tmp_path) == {0: 0.5, 1: 0.75, 2: 0.25}


def test_what_tell_and_report_refuse_says_why():
    search, other = Search(SPACE, seed=1), Search(SPACE, seed=2)
    ended, trial = search.ask(), search.ask()
    search.tell(ended, 0.25)
    foreign = [other.ask(), other.ask()][1]
    for call in (search.tell, search.report):
        for given, words in (
            ((trial, "good"), "value='good'"),
            ((trial, True), "value=True"),
            ((foreign, 0.5), "trial 1 is of another"),
            ((True, 0.5), r"Pending: \[1\]"),
            (([], 1.0), "pending: expected"),
            ((ended, 1.0), "has ended"),
        ):
            with pytest.raises(ConfigurationError, match=words):
                call(*given)
    with pytest.raises(ConfigurationError, match="no value"):
        search.tell(trial)
    with pytest.raises(ConfigurationError, match=r"value=3\.0 and error='no'"):
        search.tell(trial, 3.0, error="no")
    search.report(trial, 0.5)  # is still pending
    search.tell(pickle.loads(pickle.dumps(trial)), 0.5)
    search.ask()
    assert search.tell(np.int64(2), 0.125).number == 2


def test_an_algorithm_without_suggestions_ends_the_search():
    with pytest.raises(SearchError, match="no more suggestions"):
        Search(SPACE, algo=lambda new_ids, domain, trials, seed: []).ask()


def test_arguments_are_checked():
    with pytest.raises(UnknownArgumentError, match="'max_evals'"):
        Search(SPACE, max_evals=3)
    with pytest.raises(ConfigurationError, match="needs a space"):
        Search(None)


def test_models_in_a_folder_of_minimize_stay(tmp_path):
    run(Search(LINE, seed=1, save_to=tmp_path), 1, lambda params: 1.0).close()
    model = tmp_path / "models" / "00000.npz"
    model.write_bytes(b"weights")
    run(Search(LINE, seed=1, save_to=tmp_path), 1, lambda params: 0.5).close()
    assert model.exists()


def test_a_folder_of_a_later_version_is_rejected(tmp_path, monkeypatch):
    with monkeypatch.context() as later:
        later.setattr("sparkkeras.hyperopt.study._FORMAT", 2)
        run(Search(SPACE, save_to=tmp_path / "search"), 1).close()
    with pytest.raises(ConfigurationError, match="upgrade"):
        Search(SPACE, save_to=tmp_path / "search")


def test_reading_a_search_that_is_not_there_writes_nothing(tmp_path):
    with pytest.raises(StorageError, match="no search in"):
        JournalBackend(str(tmp_path))
    assert list(tmp_path.iterdir()) == []
