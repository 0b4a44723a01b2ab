"""Loops that ask for trials and tell their values."""

import math
import pickle
import threading

import numpy as np
import optuna
import pytest
from hyperopt import tpe

from sparkkeras.errors import ConfigurationError, SearchError, StorageError, UnknownArgumentError
from sparkkeras.hyperopt import HyperParamModel, JournalBackend, Search, choice, integer, loguniform, uniform
from sparkkeras.hyperopt.workers import LocalWorkers

SPACE = {"x": uniform(-10, 10), "n": integer(0, 3), "kind": choice({"name": "a"}, {"name": "b", "lr": loguniform(1e-4, 1)})}


def loss(params):
    return (params["x"] - 3) ** 2 + params["n"]


def run(search, count):
    for _ in range(count):
        trial = search.ask()
        search.tell(trial, loss(trial.params))
    return search


def saved_values(folder):
    """The values in the journal of a search, as Optuna reads them."""
    storage = optuna.storages.JournalStorage(JournalBackend(str(folder)))
    trials = optuna.load_study(study_name="sparkkeras", storage=storage).trials
    return {trial.number: trial.value for trial in trials if trial.state.is_finished()}


def params_of(search):
    return [(trial.number, trial.params, trial.value) for trial in search.trials]


def test_it_finds_good_values_with_the_trials_of_a_search_on_workers():
    own = run(Search(SPACE, seed=7), 25)
    assert own.best_value == loss(own.best_params) == min(trial.value for trial in own.trials) < 5
    model = HyperParamModel(LocalWorkers())
    model.minimize(objective=loss, space=SPACE, max_evals=25, seed=7, verbose=0)
    assert params_of(own) == params_of(model)


def test_threads_may_share_a_search():
    search = Search(SPACE, algo="random", seed=1)
    threads = [threading.Thread(target=run, args=(search, 10)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [trial.number for trial in search.trials] == list(range(40))
    assert all(trial.value == loss(trial.params) for trial in search.trials)


class TestResults:
    def test_a_failed_trial_has_its_error(self):
        search = Search(SPACE, seed=1)
        text, exception, nan = (search.ask() for _ in range(3))
        search.tell(text, error="out of memory")
        try:
            raise RuntimeError("it broke")
        except RuntimeError as error:
            search.tell(exception.number, error=error)
        assert search.tell(nan, math.nan).error == "its value is nan, not a finite number"
        assert [trial.status for trial in search.trials] == ["failed"] * 3
        assert search.trials[0].error == "out of memory"
        assert search.trials[1].error == "RuntimeError: it broke"
        assert "test_ask_tell.py" in search.trials[1].traceback
        with pytest.raises(SearchError, match="none of the 3 trials has a value: see trials for errors"):
            _ = search.best_params
        run(search, 25)
        assert search.best_value < 30

    def test_without_a_value_the_best_report_counts(self):
        search = Search(SPACE, seed=1)
        trial = search.ask()
        assert [search.report(trial, value) for value in (0.5, 0.25, 0.75)] == [False, False, False]
        told = search.tell(trial)
        assert (told.status, told.value, told.best_epoch, told.epochs) == ("ok", 0.25, 2, 3)
        assert told.history == {"loss": [0.5, 0.25, 0.75]}
        other = search.ask()
        search.report(other, 0.5)
        assert search.tell(other, 0.125).best_epoch is None

    def test_a_report_that_is_not_finite_ends_the_trial(self):
        search = Search(SPACE, seed=1)
        one, other = search.ask(), search.ask()
        assert not search.report(one, 2.0)
        assert search.report(one, math.nan)
        assert search.tell(one).value == 2.0
        assert search.report(other, math.inf)
        told = search.tell(other)
        assert (told.status, told.value, told.error) == ("failed", None, "its value is inf, not a finite number")


class TestFolder:
    def test_a_search_on_workers_continues_it(self, tmp_path):
        with Search(SPACE, seed=3, save_to=tmp_path / "search") as search:
            run(search, 5)
        model = HyperParamModel(LocalWorkers())
        model.minimize(objective=loss, space=SPACE, max_evals=8, save_to=tmp_path / "search", verbose=0)
        assert params_of(model)[:5] == params_of(search)
        assert len(model.trials) == 8

    def test_a_closed_search_takes_no_results(self):
        search = Search(SPACE)
        trial = search.ask()
        search.ask()
        search.tell(trial, 0.5)
        assert repr(search) == "Search(metric='loss', trials=2, pending=1)"
        search.close()
        with pytest.raises(ConfigurationError, match="is not pending, and the search was closed"):
            search.tell(1, 1.0)
        with pytest.raises(SearchError, match="there is no further trial: it was closed"):
            search.ask()

    def test_a_trial_that_cannot_be_saved_raises_an_error(self, tmp_path, monkeypatch):
        def fail(*_):
            raise OSError("the disk is full")

        search = Search(SPACE, save_to=tmp_path / "search")
        trial = search.ask()
        monkeypatch.setattr(optuna.storages.journal.JournalFileBackend, "append_logs", fail)
        with pytest.raises(StorageError, match="the disk is full"):
            search.tell(trial, 0.5)
        assert [each.status for each in search.trials] == ["running"]
        monkeypatch.undo()
        assert search.tell(trial, 0.25).value == search.best_value == 0.5  # the study was told the first value
        assert saved_values(tmp_path / "search") == {0: 0.5}
        with pytest.raises(ConfigurationError, match="has ended"):
            search.tell(trial, 0.25)
        assert search.ask().number == 1

    @pytest.mark.parametrize("failing", ["suggest", "pruner"])
    def test_trials_are_saved_after_an_error_of_algorithm_or_pruner(self, tmp_path, failing):
        broken = []

        def check(kind):
            if kind in broken:
                broken.clear()
                raise RuntimeError("no idea")

        def suggest(new_ids, domain, trials, seed):
            check("suggest")
            return tpe.suggest(new_ids, domain, trials, seed)

        class Pruner(optuna.pruners.BasePruner):
            def prune(self, study, trial):
                check("pruner")
                return False

        with Search(SPACE, algo=suggest, pruner=Pruner(), seed=1, save_to=tmp_path / "search") as search:
            first, second = search.ask(), search.ask()
            broken.append(failing)
            with pytest.raises(ConfigurationError, match="failed: RuntimeError: no idea"):
                search.ask() if failing == "suggest" else search.report(first, 0.5)
            assert search.report(second, 0.75) is False
            search.tell(second)
            search.tell(first, 0.5)
            third = search.ask()
            assert third.number == 2
            search.tell(third, 0.25)
        assert saved_values(tmp_path / "search") == {0: 0.5, 1: 0.75, 2: 0.25}


class TestErrors:
    def test_a_result_needs_a_value_or_an_error(self):
        search = Search(SPACE, seed=1)
        trial = search.ask()
        with pytest.raises(ConfigurationError, match=r"trial 0 has no value: tell\(trial, value\), or tell\(trial, error="):
            search.tell(trial)
        for call in (search.tell, search.report):
            for value in ("good", True, np.False_):
                with pytest.raises(ConfigurationError, match=f"value={value!r}: expected a number"):
                    call(trial, value)
        search.tell(trial, 1.0)  # is still pending
        assert search.best_value == 1.0

    def test_a_trial_is_of_its_search(self):
        search, other = Search(SPACE, seed=1), Search(SPACE, seed=2)
        trials, others = [search.ask() for _ in range(3)], [other.ask() for _ in range(3)]
        for call in (search.tell, search.report):
            with pytest.raises(ConfigurationError, match="trial 1 is of another search: its params are not those"):
                call(others[1], 0.5)
            with pytest.raises(ConfigurationError, match=r"trial=True is not pending: .*Pending: \[0, 1, 2\]"):
                call(True, 0.5)
        search.report(trials[0], 0.5)
        search.tell(pickle.loads(pickle.dumps(trials[0])), 0.5)
        search.tell(np.int64(1), 0.25)
        assert search.tell(search.trials[2], 0.125).number == 2

    def test_an_algorithm_without_suggestions_ends_the_search(self):
        with pytest.raises(SearchError, match="there is no further trial: the search algorithm has no more suggestions"):
            Search(SPACE, algo=lambda new_ids, domain, trials, seed: []).ask()

    def test_arguments_are_checked(self):
        with pytest.raises(UnknownArgumentError, match="Search takes no argument 'max_evals'"):
            Search(SPACE, max_evals=3)
        with pytest.raises(ConfigurationError, match="seed=-1"):
            Search(SPACE, seed=-1)
        with pytest.raises(ConfigurationError, match="Search needs a space"):
            Search(None)


def test_models_in_a_folder_of_minimize_stay(tmp_path):
    with Search(SPACE, seed=1, save_to=tmp_path / "s") as search:
        search.tell(search.ask(), 1.0)
    model = tmp_path / "s" / "models" / "00000.npz"
    model.write_bytes(b"weights")
    with Search(SPACE, seed=1, save_to=tmp_path / "s") as search:
        search.tell(search.ask(), 0.5)
    assert model.exists()


def test_what_tell_refuses_says_why():
    search = Search(SPACE, seed=1)
    trial, other = search.ask(), search.ask()
    search.tell(trial, 0.25)
    for call, message in (
        (lambda: search.tell(trial, 1.0), r"has ended \(status 'ok', value 0\.25\).*expected a trial that ask\(\) returned"),
        (lambda: search.report(trial, 1.0), "has ended"),
        (lambda: search.tell([], 1.0), r"pending: expected a trial"),
        (lambda: search.tell(other, 3.0, error="no"), r"value=3\.0 and error='no': a trial has a value, or it failed"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            call()


def test_a_folder_of_a_later_version_is_rejected(tmp_path, monkeypatch):
    with monkeypatch.context() as later:
        later.setattr("sparkkeras.hyperopt.study._FORMAT", 2)
        run(Search(SPACE, save_to=tmp_path / "search"), 1).close()
    with pytest.raises(ConfigurationError, match="written by a later version of sparkkeras: upgrade"):
        Search(SPACE, save_to=tmp_path / "search")


def test_reading_a_search_that_is_not_there_writes_nothing(tmp_path):
    with pytest.raises(StorageError, match="there is no search in"):
        JournalBackend(str(tmp_path))
    assert list(tmp_path.iterdir()) == []
