"""The journal of a search on disk, and resuming from it."""

import math
import shutil
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from sparkkeras.errors import ConfigurationError, StorageError
from sparkkeras.hyperopt import JournalBackend, Search, choice, loguniform, uniform
from sparkkeras.hyperopt.algorithms import SAMPLERS
from sparkkeras.hyperopt.journal import Journal
from sparkkeras.hyperopt.space import Space
from sparkkeras.hyperopt.study import SearchStudy
from sparkkeras.hyperopt.trials import FAILED, OK, PRUNED, Trial, pareto_front, ranked
from sparkkeras.spark import filesystem

SPACE = {"x": uniform(-1, 1), "optimizer": choice({"name": "sgd", "momentum": uniform(0, 1)}, {"name": "adam"})}


def opened(folder, **arguments):
    return Search(**{"space": SPACE, "seed": 7, "save_to": folder, **arguments})


def run(search, count):
    for _ in range(count):
        trial = search.ask()
        search.tell(trial, trial.params["x"] ** 2)
    return search


def trial(number, value=0.5, status=OK, **fields):
    return Trial(number, {"x": number}, status, value, chosen={"x": number}, **fields)


def add(journal, *trials):
    """Open the folder of a search with these trials."""
    with journal.opened():
        journal.add(trials)


def keep(journal, number, *values, data=b"weights"):
    """Offer a model and keep it if it is wanted; then count its trial, as `TrialSaver` does. Returns the trial."""
    if journal.wants(*values):
        draft = journal.draft(100 + number)
        draft.write_bytes(data + str(number).encode())
        journal.keep_model(number, values, draft, "npz")
        assert not draft.exists()
    journal.count_model(number)
    journal.drop_surplus()
    return trial(number, values[0], values=values)


def models(journal):
    return filesystem.names_in(f"{journal.folder}/models")


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path / "deep" / "search")


@pytest.fixture
def segments(tmp_path, monkeypatch):
    """A folder on a file system that cannot append to files."""
    monkeypatch.setattr(filesystem, "uses_connect", lambda: True)
    return f"memory://{tmp_path}/search"


@pytest.fixture(params=["folder", "segments"])
def any_folder(request):
    """Both kinds of folders."""
    return request.getfixturevalue(request.param)


def log_of(folder):
    return Path(folder) / "journal.log"


# Resuming


def test_trials_that_were_running_keep_number_and_parameters(any_folder):
    with opened(any_folder) as search:
        one, two = search.ask(), search.ask()
        search.tell(two, 0.5)
    with opened(any_folder, seed=None) as search:
        again = search.ask()
        assert (again.number, again.params, again.attempts) == (0, one.params, 1)


def test_a_trial_that_runs_again_is_pruned_by_new_epochs_only(folder):
    class Late(optuna.pruners.BasePruner):
        def prune(self, study, trial):
            return trial.last_step > 1

    for count in (2, 1):  # the first trial is still running when the search is resumed
        with opened(folder, pruner=Late()) as search:
            for _ in range(count):
                trial = search.ask()
                assert [search.report(trial, 0.5), search.report(trial, 0.5)] == [False, True]
            search.tell(trial)
    assert [trial.status for trial in search.trials] == [PRUNED, PRUNED]


def test_optuna_reads_the_journal_while_a_search_writes_it(any_folder):
    with opened(any_folder) as search:
        trial = search.ask()
        backends = [JournalBackend(any_folder)]
        if not filesystem.has_scheme(any_folder):
            backends.append(JournalFileBackend(str(log_of(any_folder))))
        studies = [optuna.load_study(study_name="sparkkeras", storage=JournalStorage(each)) for each in backends]
        for value in (0.5, 0.25):
            search.report(trial, 0.75)
            search.tell(trial, value)
            for study in studies:
                best = study.best_trial
                assert (best.number, best.value, best.params) == (trial.number, value, trial.chosen)
                assert best.intermediate_values == {1: 0.75}
            trial = search.ask()


# Trials


def test_trials_are_restored_exactly(any_folder):
    full = {
        "status": PRUNED,
        "value": 0.25,
        "best_epoch": 2,
        "history": {"loss": [0.5, 0.25], "val_loss": [math.nan, math.inf]},
        "error": "a message with\nä line break",
        "traceback": "Traceback",
        "extra": {"note": [1, {"a": None}], "x": -math.inf},
    }
    space, trials = Space({"f": choice(abs, max), "lr": loguniform(1e-4, 1)}), []
    journal = Journal(any_folder, None, 1.0)
    with journal.opened() as storage:
        study = SearchStudy(space, {"loss": 1.0}, SAMPLERS["tpe"], storage=storage)
        for fields in (full, {"status": FAILED, "error": "it raised"}, {"status": OK, "value": -math.inf}):
            trials.append(replace(study.ask(trials), **fields))
            study.report(trials[-1].number, 1, math.nan)
            study.tell(trials[-1])
        journal.flush()
    with Journal(any_folder, None, 1.0).opened() as storage:
        study = SearchStudy(space, {"loss": 1.0}, SAMPLERS["tpe"], storage=storage)
        assert repr(study.earlier()) == repr(trials)  # NaN does not equal itself


@pytest.mark.parametrize("damage", [b"{", b"null", b"{}"])
def test_a_damaged_journal_is_reported(folder, damage):
    run(opened(folder), 1).close()
    log_of(folder).write_bytes(log_of(folder).read_bytes().replace(b"\n", b"\n" + damage + b"\n", 1))
    with pytest.raises(StorageError, match="is damaged"):
        opened(folder)


# Settings


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mode": "max", "metric": "mse", "seed": 8}, "metric differs .*mode differs .'min' there.* seed differs"),
        ({"space": {"x": uniform(-1, 1), "y": uniform(0, 1)}}, "only there: 'optimizer', .* only now: 'y'"),
        ({"space": {**SPACE, "x": uniform(-1, 2)}}, "ranges"),
    ],
)
def test_a_search_with_other_settings_cannot_resume(folder, settings, words):
    run(opened(folder), 1).close()
    with pytest.raises(ConfigurationError, match=f"another search: .*{words}") as caught:
        opened(folder, **settings)
    with opened(folder) as search:
        assert len(search.trials) == 1
    assert caught  # its traceback keeps what failed, but not the lock of the folder


def test_another_search_may_start_in_a_folder_without_finished_trials(any_folder):
    """For example after an error in the space or the metric."""
    with opened(any_folder) as search:
        search.ask()
    for count in (2, 0):
        with opened(any_folder, space={"x": uniform(2, 3)}, metric="size", mode="max", seed=8) as search:
            run(search, count)
            assert search.study.direction.name == "MAXIMIZE"
            assert [trial.number for trial in search.trials] == [0, 1]
            assert all(2 <= trial.params["x"] <= 3 for trial in search.trials)


def test_two_searches_cannot_run_in_one_folder(folder):
    with opened(folder) as search:
        with pytest.raises(ConfigurationError, match="another search is running"):
            opened(f"file:{folder}/")
        run(search, 1)
    with opened(f"file:{folder}/") as search:
        assert len(search.trials) == 1


def test_a_folder_that_cannot_be_created_is_reported(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="Not a directory"):
        add(Journal(str(tmp_path / "file" / "search"), 10, 1.0))


@pytest.mark.parametrize("name", ["thesis.tex", "data/", "models/00001.keras"])
def test_a_folder_with_other_files_is_rejected_and_unchanged(folder, name):
    path = Path(folder) / name
    path.parent.mkdir(parents=True)
    path.mkdir() if name.endswith("/") else path.touch()
    with pytest.raises(ConfigurationError, match=rf"other files \({name}\)"):
        add(Journal(folder, 10, 1.0))
    assert [each for each in Path(folder).rglob("*") if each.name != "models"] == [path]


def test_a_search_that_was_killed_at_its_start_may_start_again(folder):
    (Path(folder) / "models").mkdir(parents=True)
    (Path(folder) / "search.lock").touch()
    with opened(folder) as search:
        assert len(run(search, 1).trials) == 1


# Models


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=8),
    st.sampled_from([0, 1, 3, None]),
    st.sampled_from([(1.0,), (-1.0,), (1.0, -1.0)]),
)
def test_the_models_of_the_best_trials_and_of_the_pareto_front_are_kept(values, count, signs):
    trials, kept = [], []
    with TemporaryDirectory() as folder:
        journal = Journal(folder, count, *signs)
        with journal.opened():
            for index, each in enumerate(values):
                number = 7 * index % 11  # of trials with the same values, the one with the lowest number is kept
                trials.append(keep(journal, number, *map(float, each[: len(signs)])))
                front = pareto_front(trials, *signs) if len(signs) > 1 else []
                wanted = max(count or 0, len(front)) if count else count
                kept = ranked([*kept, trials[-1]], *signs)[:wanted]
                assert models(journal) == [f"{number:05d}.npz" for number in sorted(trial.number for trial in kept)]
                assert all(trial in kept for trial in front) or count == 0
        again = Journal(folder, count, *signs)
        add(again, *trials)
        assert models(again) == models(journal)


def test_a_model_is_removed_only_after_the_better_trial_is_written(folder):
    """Wherever the driver crashes in between, the best written trial has its model."""
    journal = Journal(folder, 1, 1.0)
    with journal.opened():
        first = keep(journal, 0, 0.5)
        journal.draft(7).write_bytes(b"better")
        journal.keep_model(1, (0.25,), journal.draft(7), "npz")
        journal.drop_surplus()
        assert models(journal) == ["00000.npz", "00001.npz"]
    shutil.copytree(folder, f"{folder}-written")
    for name, trials, data in (("", [first], b"weights0"), ("-written", [first, trial(1, 0.25)], b"better")):
        crashed, number = Journal(folder + name, 1, 1.0), len(trials) - 1
        add(crashed, *trials)
        assert models(crashed) == [f"{number:05d}.npz"]
        assert crashed.model_file(number) == (f"{number:05d}.npz", data)


def test_models_of_an_earlier_call_count(folder):
    first = Journal(folder, None, 1.0)
    assert first.wants(1e9)
    with first.opened():
        trials = [keep(first, number, value) for number, value in enumerate([0.5, 0.4, 0.6])]
    journal = Journal(folder, 2, 1.0)
    with journal.opened():
        journal.add(trials)
        assert models(journal) == ["00000.npz", "00001.npz"]
        assert journal.model_file(1) == ("00001.npz", b"weights1")
        assert [journal.wants(0.55), journal.wants(0.45)] == [False, True]
        keep(journal, 3, 0.45)
    assert models(journal) == ["00001.npz", "00003.npz"]


def test_models_without_a_trial_are_removed(folder):
    journal = Journal(folder, 3, 1.0)
    with journal.opened():
        trials = [keep(journal, 0, 0.5), trial(2, None, FAILED)]
    others = [".00003.npz.swp", "00001.npz.bak", "resnet.keras", "²²²²².npz"]
    for name in ("00001.npz", "00002.keras", f".00000.npz.{'5f' * 16}.tmp", *others):
        (Path(folder) / "models" / name).touch()
    again = Journal(folder, 3, 1.0)
    add(again, *trials)
    assert models(again) == sorted(["00000.npz", *others])
    assert again.model_file(0) == ("00000.npz", b"weights0")
    assert not again.has_model(1)


def test_a_missing_model_file_is_reported(folder):
    journal = Journal(folder, 3, 1.0)
    with journal.opened():
        keep(journal, 0, 0.5)
    (Path(folder) / "models" / "00000.npz").unlink()
    with pytest.raises(StorageError, match="00000.npz"):
        journal.model_file(0)
