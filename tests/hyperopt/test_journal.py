"""The journal of a search on disk, and resuming from it."""

import math
import shutil
from contextlib import contextmanager
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
from sparkkeras.hyperopt import JournalBackend, choice, loguniform, uniform
from sparkkeras.hyperopt.algorithms import SAMPLERS
from sparkkeras.hyperopt.journal import Journal
from sparkkeras.hyperopt.ledger import CONTINUE, PRUNE, Limits, TrialLedger, Worker
from sparkkeras.hyperopt.space import Space
from sparkkeras.hyperopt.study import SearchStudy
from sparkkeras.hyperopt.trials import FAILED, OK, PRUNED, Trial, pareto_front, ranked
from sparkkeras.spark import filesystem

SPACE = {"x": uniform(-1, 1), "optimizer": choice({"name": "sgd", "momentum": uniform(0, 1)}, {"name": "adam"})}
LOSS = {"loss": 1.0}


@contextmanager
def search(folder, *, space=SPACE, metrics=LOSS, seed=7, pruner=None, max_evals=None):
    """The ledger of a search in a folder, which saves trials without a thread."""
    journal, space = Journal(folder, None, *metrics.values()), Space(space)

    def save(trial, model):
        ledger.tell(trial)
        journal.flush()
        ledger.saved(trial.number)

    with journal.opened() as storage:
        study = SearchStudy(space, metrics, SAMPLERS["tpe"], seed, pruner, storage)
        ledger = TrialLedger(study, Limits(max_evals), lambda: 0.0, save=save)
        journal.add(ledger.finished)
        journal.flush()
        yield ledger


def ask(ledger):
    """The next trial and its lease."""
    assignment = ledger.ask(Worker("w"))
    assert assignment is not None, ledger.failure
    return next(trial for trial in ledger.running if trial.number == assignment.number), assignment.lease


def run(ledger):
    """Run trials until there are no more; returns how many."""
    count = 0
    while not ledger.is_over:
        trial, lease = ask(ledger)
        ledger.report(lease, 1, trial.params["x"])
        ledger.finish(lease, replace(ledger.extend_for_upload(lease), status=OK, value=trial.params["x"] ** 2))
        count += 1
    return count


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


def test_a_search_resumes_wherever_its_driver_was_killed(segments):
    """It repeats no trial that was finished, loses none, and has the trials of a search that was not interrupted.

    tests/hyperopt/test_study.py tests this on a local path.
    """
    with search(segments, max_evals=4) as ledger:
        assert run(ledger) == 4
        expected = ledger.finished
    known, names = 0, filesystem.names_in(f"{segments}/journal")
    for count in range(len(names) + 1):
        start = f"{segments}-{count}"
        for name in names[:count]:
            filesystem.write_bytes(f"{start}/journal/{name}", filesystem.read_bytes(f"{segments}/journal/{name}"))
        with search(start, max_evals=4) as ledger:
            finished = ledger.finished
            assert finished == expected[: len(finished)]
            assert len(finished) >= known
            assert run(ledger) == 4 - len(finished)
            assert ledger.finished == expected
        known = len(finished)
    assert known == 4


def test_trials_that_were_running_keep_number_and_parameters(any_folder):
    with search(any_folder) as ledger:
        (one, _), (two, lease) = ask(ledger), ask(ledger)
        ledger.finish(lease, replace(two, status=OK, value=0.5))
    with search(any_folder, max_evals=1) as ledger:
        assert ledger.is_over
        assert ledger.running == []
    with search(any_folder, seed=None, max_evals=2) as ledger:
        assert not ledger.is_over
        again, lease = ask(ledger)
        assert (again.number, again.params, again.attempts) == (0, one.params, 1)
        ledger.finish(lease, replace(again, status=OK, value=0.5))
        assert ledger.is_over


def test_a_trial_that_runs_again_is_pruned_by_new_epochs_only(folder):
    class Late(optuna.pruners.BasePruner):
        def prune(self, study, trial):
            return trial.last_step > 1

    with search(folder, pruner=Late()) as ledger:
        for _ in range(2):
            trial, lease = ask(ledger)
            assert [ledger.report(lease, epoch, 0.5) for epoch in (1, 2)] == [CONTINUE, PRUNE]
        ledger.finish(lease, replace(trial, status=PRUNED, value=0.5))
    with search(folder, pruner=Late()) as ledger:
        _, lease = ask(ledger)
        assert [ledger.report(lease, epoch, 0.5) for epoch in (1, 2)] == [CONTINUE, PRUNE]


def test_optuna_reads_the_journal_while_a_search_writes_it(any_folder):
    with search(any_folder, max_evals=2) as ledger:
        backends = [JournalBackend(any_folder)]
        if not filesystem.has_scheme(any_folder):
            backends.append(JournalFileBackend(str(log_of(any_folder))))
        studies = [optuna.load_study(study_name="sparkkeras", storage=JournalStorage(each)) for each in backends]
        for number, value in enumerate((0.5, 0.25)):
            trial, lease = ask(ledger)
            ledger.report(lease, 1, 0.75)
            ledger.finish(lease, replace(ledger.extend_for_upload(lease), status=OK, value=value))
            for study in studies:
                found = study.trials[number]
                assert (found.value, found.params, found.intermediate_values) == (value, trial.chosen, {1: 0.75})
                assert study.best_trial.number == number


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
    space = {"f": choice(abs, max), "lr": loguniform(1e-4, 1)}
    with search(any_folder, space=space) as ledger:
        for fields in (full, {"status": FAILED, "error": "it raised"}, {"status": OK, "value": -math.inf}):
            _, lease = ask(ledger)
            ledger.report(lease, 1, math.nan)
            ledger.finish(lease, replace(ledger.extend_for_upload(lease), **fields))
        trials = ledger.finished
    with search(any_folder, space=space) as ledger:
        assert repr(ledger.finished) == repr(trials)  # NaN does not equal itself


@pytest.mark.parametrize("damage", [b"{", b"null", b"{}"])
def test_a_damaged_journal_is_reported(folder, damage):
    with search(folder, max_evals=1) as ledger:
        run(ledger)
    log_of(folder).write_bytes(log_of(folder).read_bytes().replace(b"\n", b"\n" + damage + b"\n", 1))
    with pytest.raises(StorageError, match="is damaged"), search(folder):
        pass


# Settings


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"metrics": {"loss": -1.0}}, "mode .* 'min' there, 'max' now"),
        ({"metrics": {"mse": 1.0}, "seed": 8}, "metric differs .* seed differs"),
        ({"space": {"x": uniform(-1, 1), "y": uniform(0, 1)}}, "only there: 'optimizer', .* only now: 'y'"),
        ({"space": {**SPACE, "x": uniform(-1, 2)}}, "ranges"),
    ],
)
def test_a_search_with_other_settings_cannot_resume(folder, settings, words):
    with search(folder, max_evals=1) as ledger:
        run(ledger)
    with pytest.raises(ConfigurationError, match=f"another search: .*{words}"), search(folder, **settings):
        pass
    with search(folder) as ledger:
        assert len(ledger.finished) == 1


def test_another_search_may_start_in_a_folder_without_finished_trials(any_folder):
    """For example after an error in the space or the metric."""
    with search(any_folder) as ledger:
        ask(ledger)
    other = {"space": {"x": uniform(2, 3)}, "metrics": {"size": -1.0}, "seed": 8, "max_evals": 2}
    for count in (2, 0):
        with search(any_folder, **other) as ledger:
            assert run(ledger) == count
            assert ledger.study.direction.name == "MAXIMIZE"
            assert [each.number for each in ledger.finished] == [0, 1]
            assert all(2 <= each.params["x"] <= 3 for each in ledger.finished)


def test_two_searches_cannot_run_in_one_folder(folder):
    with search(folder, max_evals=1) as ledger:
        with pytest.raises(ConfigurationError, match="another search is running"), search(f"file:{folder}/"):
            pass
        run(ledger)
    with search(f"file:{folder}/") as ledger:
        assert len(ledger.finished) == 1


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
    with search(folder, max_evals=1) as ledger:
        assert run(ledger) == 1


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
