"""The journal of a search on disk, and resuming from it."""

import gc
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from sparkkeras.checkpoints.store import CheckpointStore
from sparkkeras.errors import ConfigurationError, StorageError
from sparkkeras.hyperopt.journal import Journal
from sparkkeras.hyperopt.trials import FAILED, OK, PRUNED, STOPPED, Trial, ranked
from sparkkeras.spark import filesystem

SETTINGS = {"space": "abc", "metric": "val_loss", "mode": "min", "seed": 7}


def params(chosen):
    """Hyper-parameters of a type that JSON cannot represent."""
    return {name: complex(value) for name, value in chosen.items()}


def trial(number, value=0.5, status=OK, **fields):
    return Trial(number, params({"x": number}), status, value, chosen={"x": number}, **fields)


def write(journal, *trials):
    with journal.opened(SETTINGS, params):
        for each in trials:
            journal.write(each)


def opened(journal, settings=SETTINGS):
    with journal.opened(settings, params) as trials:
        return trials


def keep(journal, number, *values, data=b"weights"):
    """Offer a model and keep it if it is wanted; then write its trial, as `TrialSaver` does."""
    if journal.wants(*values):
        draft = journal.draft(100 + number)
        draft.write_bytes(data + str(number).encode())
        journal.keep_model(number, values, draft, "npz")
        assert not draft.exists()
    journal.write(trial(number, values[0], values=values))
    journal.drop_surplus()


def models(journal):
    return filesystem.names_in(f"{journal.folder}/models")


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path / "deep" / "search")


def test_unfinished_drafts_are_removed(folder):
    journal = Journal(folder, None, 1.0)
    with journal.opened(SETTINGS, params):
        journal.draft(3).write_bytes(b"half")
    assert not journal.draft(3).exists()


# Trials


FULL = trial(
    12,
    0.25,
    PRUNED,
    best_epoch=2,
    history={"loss": [0.5, 0.25], "val_loss": [0.5, 0.25]},
    worker="host/1",
    seconds=1.5,
    ended=20.25,
    attempts=2,
    error="a message with\nä line break",
    traceback="Traceback",
    extra={"note": [1, {"a": None}]},
    intermediate_values=(0.5, 0.25),
)


def test_trials_are_restored_exactly(folder):
    trials = [trial(0), FULL, trial(3, None, FAILED, error="it raised"), trial(7, None, STOPPED)]
    write(Journal(folder, 10, 1.0), *trials)
    again = opened(Journal(folder, 10, 1.0))
    assert sorted(again, key=lambda each: each.number) == sorted(trials, key=lambda each: each.number)


def test_metrics_that_are_not_finite_are_restored(folder):
    write(Journal(folder, 10, 1.0), trial(0, history={"loss": [1.0, math.nan, math.inf]}, extra={"x": -math.inf}))
    (again,) = opened(Journal(folder, 10, 1.0))
    assert again.history["loss"][0] == 1.0
    assert math.isnan(again.history["loss"][1])
    assert (again.history["loss"][2], again.extra["x"]) == (math.inf, -math.inf)


def test_writing_a_trial_again_replaces_it(folder):
    write(Journal(folder, 10, 1.0), trial(0, 0.5), trial(0, 0.4))
    assert [each.value for each in opened(Journal(folder, 10, 1.0))] == [0.4]


def test_trial_files_show_readable_hyper_parameters(folder):
    write(Journal(folder, 10, 1.0), trial(3))
    assert json.loads((Path(folder) / "trials" / "00003.json").read_text())["params"] == "{'x': (3+0j)}"


def test_temporary_files_are_ignored(folder):
    write(Journal(folder, 10, 1.0), trial(0))
    (Path(folder) / "trials" / ".00001.json.abc.tmp").write_text('{"num')
    assert opened(Journal(folder, 10, 1.0)) == [trial(0)]


def test_trial_files_are_written_atomically(folder, monkeypatch):
    journal = Journal(folder, 10, 1.0)
    write(journal, trial(0, 0.5))
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(StorageError, match="cannot write .*00001.json.*No space left"):
        journal.write(trial(1))
    with pytest.raises(StorageError, match="No space left"):
        journal.write(trial(0, 0.1))
    monkeypatch.undo()
    assert opened(Journal(folder, 10, 1.0)) == [trial(0, 0.5)]
    assert sorted(path.name for path in (Path(folder) / "trials").iterdir()) == ["00000.json"]


@pytest.mark.parametrize("damage", [b"", b"{", b"[1, 2]", b"null", b"\xff", b"{}", b'{"number": 3}'])
def test_damaged_trials_are_reported_by_file_name(folder, damage):
    write(Journal(folder, 10, 1.0), trial(0), trial(1))
    (Path(folder) / "trials" / "00000.json").write_bytes(damage)
    with pytest.raises(StorageError, match="trials/00000.json' is damaged .*: remove it to resume without it"):
        opened(Journal(folder, 10, 1.0))
    (Path(folder) / "trials" / "00000.json").unlink()
    assert opened(Journal(folder, 10, 1.0)) == [trial(1)]


@pytest.mark.parametrize("damage", [b"", b"{", b"[1, 2]", b"null", b"\xff"])
def test_damaged_settings_are_reported_by_file_name(folder, damage):
    write(Journal(folder, 10, 1.0), trial(0))
    (Path(folder) / "search.json").write_bytes(damage)
    with pytest.raises(StorageError, match="search.json' is damaged .*: remove it to resume without it"):
        opened(Journal(folder, 10, 1.0))


# Settings


def test_settings_are_saved(folder):
    assert Journal(folder, 10, 1.0).settings() == {}
    write(Journal(folder, 10, 1.0))
    assert Journal(folder, 10, 1.0).settings() == {"format": 1, **SETTINGS}


@pytest.mark.parametrize(("name", "value"), [("metric", "loss"), ("mode", "max"), ("seed", 8)])
def test_a_search_with_other_settings_cannot_resume(folder, name, value):
    write(Journal(folder, 10, 1.0), trial(0))
    with pytest.raises(
        ConfigurationError,
        match=f"holds another search: its {name} differs .{SETTINGS[name]!r} in the folder, {value!r} now",
    ):
        opened(Journal(folder, 10, 1.0), {**SETTINGS, name: value})
    assert opened(Journal(folder, 10, 1.0)) == [trial(0)]


def test_all_differing_settings_are_reported(folder):
    write(Journal(folder, 10, 1.0), trial(0))
    with pytest.raises(ConfigurationError, match="its metric differs .*; its seed differs "):
        opened(Journal(folder, 10, 1.0), {**SETTINGS, "metric": "loss", "seed": 1})


def test_a_different_space_is_reported_by_its_labels(folder):
    settings = {"parameters": ["lr", "units"], **SETTINGS}
    for name, value, difference in [
        (
            "parameters",
            ["lr", "unit"],
            "the labels of its space differ (only in the folder: 'units'; only now: 'unit'). Resume it",
        ),
        ("parameters", ["lr"], "the labels of its space differ (only in the folder: 'units'). Resume it"),
        ("space", "xyz", "the ranges, options or conditions of its space differ (the labels are the same). Resume it"),
    ]:
        other = folder + str(len(difference))
        with Journal(other, 10, 1.0).opened(settings, params):
            Journal(other, 10, 1.0).write(trial(0))
        with pytest.raises(ConfigurationError, match=re.escape(f"holds another search: {difference}")):
            opened(Journal(other, 10, 1.0), {**settings, "space": "xyz", name: value})


def test_a_folder_of_a_later_version_is_rejected(folder):
    write(Journal(folder, 10, 1.0), trial(0))
    (Path(folder) / "search.json").write_text(json.dumps({"format": 2, **SETTINGS}))
    with pytest.raises(ConfigurationError, match="written by a later version of sparkkeras: upgrade"):
        opened(Journal(folder, 10, 1.0))


def test_another_search_may_start_in_a_folder_without_trials(folder):
    """For example after an error in the space or the metric."""
    write(Journal(folder, 10, 1.0))
    (Path(folder) / "search.json").write_text(json.dumps({"format": 2, **SETTINGS}))
    other = {**SETTINGS, "space": "xyz", "seed": 8}
    assert opened(Journal(folder, 10, 1.0), other) == []
    assert Journal(folder, 10, 1.0).settings() == {"format": 1, **other}


@pytest.mark.parametrize("scheme", ["", "file:"])
def test_two_searches_cannot_run_in_one_folder(folder, scheme):
    one, other = Journal(folder, 10, 1.0), Journal(f"{scheme}{folder}/", 10, 1.0)
    with one.opened(SETTINGS, params):
        with pytest.raises(ConfigurationError, match="another search is running in this folder"):
            opened(other)
        one.write(trial(0))
    assert opened(other) == [trial(0)]


def test_a_failed_search_releases_its_folder(folder):
    with pytest.raises(ZeroDivisionError), Journal(folder, 10, 1.0).opened(SETTINGS, params):
        _ = 1 / 0
    assert opened(Journal(folder, 10, 1.0)) == []


def test_a_folder_that_cannot_be_created_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot .*file/search.*: Not a directory"):
        opened(Journal(str(tmp_path / "file" / "search"), 10, 1.0))


def test_a_folder_with_other_files_is_rejected_and_unchanged(folder):
    Path(folder).mkdir(parents=True)
    (Path(folder) / "thesis.tex").write_text("text")
    with pytest.raises(ConfigurationError, match=r"holds other files \(thesis.tex\): give a new or empty folder"):
        opened(Journal(folder, 10, 1.0))
    assert [path.name for path in Path(folder).iterdir()] == ["thesis.tex"]


def test_a_folder_of_checkpoints_is_rejected(folder):
    CheckpointStore(folder).write("fit", None)
    with pytest.raises(
        ConfigurationError, match=r"holds other files \(checkpoint-00000001-\w+/\): give a new or empty folder"
    ):
        opened(Journal(folder, 10, 1.0))


@pytest.mark.parametrize("name", ["models/resnet.keras", "models/00001.keras", "trials/notes.json"])
def test_foreign_folders_with_the_same_names_are_rejected_and_unchanged(folder, name):
    path = Path(folder) / name
    path.parent.mkdir(parents=True)
    path.write_text("text")
    with pytest.raises(ConfigurationError, match=rf"holds other files \({name}\): give a new or empty folder"):
        opened(Journal(folder, 10, 1.0))
    assert path.read_text() == "text"
    assert [each for each in Path(folder).rglob("*") if each.is_file()] == [path]


def test_a_search_killed_while_it_wrote_its_settings_may_start_again(folder):
    Path(folder).mkdir(parents=True)
    (Path(folder) / ".search.json.abc.tmp").write_text("{")
    (Path(folder) / "search.lock").write_text("")
    assert opened(Journal(folder, 10, 1.0)) == []


def test_a_search_can_resume_after_its_settings_file_is_removed(folder):
    write(Journal(folder, 10, 1.0), trial(0))
    (Path(folder) / "search.json").unlink()
    assert opened(Journal(folder, 10, 1.0)) == [trial(0)]
    assert Journal(folder, 10, 1.0).settings() == {"format": 1, **SETTINGS}


# Models


VALUES = [0.5, 0.9, 0.1, 0.7, 0.3, 0.3, 0.8]


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("count", [0, 1, 3, 7, None])
def test_the_models_of_the_best_trials_are_kept(folder, sign, count):
    journal = Journal(folder, count, sign)
    with journal.opened(SETTINGS, params):
        for number, value in enumerate(VALUES):
            keep(journal, number, value)
            seen = [trial(n, v) for n, v in enumerate(VALUES[: number + 1])]
            best = sorted(each.number for each in ranked(seen, sign)[:count])
            assert models(journal) == [f"{n:05d}.npz" for n in best]
            assert [journal.has_model(n) for n in range(len(VALUES))] == [n in best for n in range(len(VALUES))]
    for number in best:
        assert journal.model_file(number) == (f"{number:05d}.npz", b"weights" + str(number).encode())


def test_all_models_of_the_pareto_front_are_kept(folder):
    """Also of trials that leave the best two and return to them when others have left the front."""
    values = [(1.0, 10.0), (2.0, 9.0), (2.5, 9.5), (3.0, 8.0), (0.5, 8.5), (4.0, 9.9)]
    after = [[0], [0, 1], [0, 1], [0, 1, 3], [3, 4], [3, 4]]
    journal = Journal(folder, 2, 1.0, 1.0)
    with journal.opened(SETTINGS, params):
        for number, expected in enumerate(after):
            keep(journal, number, *values[number])
            assert models(journal) == [f"{each:05d}.npz" for each in expected]
        assert not journal.wants(3.5, 9.0)
        assert journal.wants(0.4, 20.0)
    for count, expected in ((None, [3, 4]), (1, [3, 4]), (0, [])):
        again = Journal(folder, count, 1.0, 1.0)
        assert [each.values for each in opened(again)] == values
        assert models(again) == [f"{each:05d}.npz" for each in expected]


def test_with_several_metrics_other_models_are_kept_up_to_the_number(folder):
    journal = Journal(folder, 3, 1.0, -1.0)
    with journal.opened(SETTINGS, params):
        for number, values in enumerate([(0.5, 1.0), (0.6, 0.5), (0.55, 0.4), (0.7, 0.3), (0.4, 2.0)]):
            keep(journal, number, *values)
        assert models(journal) == ["00000.npz", "00002.npz", "00004.npz"]
    opened(again := Journal(folder, 3, 1.0, -1.0))
    assert models(again) == ["00000.npz", "00002.npz", "00004.npz"]


def test_trials_that_were_written_without_values_are_read(folder):
    """Of a single metric, before there could be several."""
    write(Journal(folder, 10, 1.0), trial(0), trial(1, None, FAILED))
    for path in (Path(folder) / "trials").iterdir():
        saved = json.loads(path.read_text())
        assert saved.pop("values") == [] if saved["status"] == FAILED else [0.5]
        path.write_text(json.dumps(saved))
    assert [each.values for each in opened(Journal(folder, 10, 1.0))] == [(0.5,), ()]


def test_ties_keep_the_model_of_the_lowest_trial_number(folder):
    journal = Journal(folder, 1, 1.0)
    with journal.opened(SETTINGS, params):
        for number in (5, 3, 4):
            keep(journal, number, 0.5)
    assert models(journal) == ["00003.npz"]


def test_a_model_is_removed_only_after_the_better_trial_is_written(folder):
    """Wherever the driver crashes in between, the best written trial has its model."""
    journal = Journal(folder, 1, 1.0)
    with journal.opened(SETTINGS, params):
        keep(journal, 0, 0.5)
        journal.draft(7).write_bytes(b"better")
        journal.keep_model(1, (0.25,), journal.draft(7), "npz")
        assert models(journal) == ["00000.npz", "00001.npz"]
    crashed = Journal(folder, 1, 1.0)
    assert opened(crashed) == [trial(0)]
    assert models(crashed) == ["00000.npz"]
    assert crashed.model_file(0) == ("00000.npz", b"weights0")


def test_resuming_removes_surplus_models_of_a_crashed_driver(folder):
    journal = Journal(folder, 1, 1.0)
    with journal.opened(SETTINGS, params):
        keep(journal, 0, 0.5)
        journal.draft(7).write_bytes(b"better")
        journal.keep_model(1, (0.25,), journal.draft(7), "npz")
        journal.write(trial(1, 0.25))
    crashed = Journal(folder, 1, 1.0)
    assert [each.number for each in opened(crashed)] == [0, 1]
    assert models(crashed) == ["00001.npz"]
    assert crashed.model_file(1) == ("00001.npz", b"better")


def test_a_failure_to_keep_a_model_removes_no_other_model(folder, monkeypatch):
    journal = Journal(folder, 1, 1.0)
    with journal.opened(SETTINGS, params):
        keep(journal, 0, 0.5)
        journal.draft(7).write_bytes(b"better")
        monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(StorageError, match="cannot write .*00001.npz.*No space left"):
            journal.keep_model(1, (0.25,), journal.draft(7), "npz")
        monkeypatch.undo()
        journal.drop_surplus()
    assert [path.name for path in (Path(folder) / "models").iterdir()] == ["00000.npz"]
    assert journal.has_model(0)
    assert not journal.has_model(1)


def test_the_model_of_a_repeated_trial_is_the_last_one(folder):
    journal = Journal(folder, 2, 1.0)
    with journal.opened(SETTINGS, params):
        for lease, (value, suffix) in enumerate(((0.25, "keras"), (0.5, "npz"))):
            journal.draft(lease).write_bytes(suffix.encode())
            journal.keep_model(0, (value,), journal.draft(lease), suffix)
        journal.write(trial(0, 0.5))
        journal.drop_surplus()
    assert journal.model_file(0) == ("00000.npz", b"npz")


def test_only_models_that_could_be_kept_are_wanted(folder):
    journal = Journal(folder, 2, -1.0)
    with journal.opened(SETTINGS, params):
        assert journal.wants(-100.0)
        keep(journal, 0, 0.5)
        keep(journal, 1, 0.7)
        assert not journal.wants(0.4)
        assert journal.wants(0.6)
    assert not Journal(folder, 0, 1.0).wants(-1e9)
    assert Journal(folder, None, 1.0).wants(1e9)


def test_models_of_an_earlier_call_count(folder):
    first = Journal(folder, 2, 1.0)
    with first.opened(SETTINGS, params):
        for number, value in enumerate([0.5, 0.4, 0.6]):
            keep(first, number, value)
    journal = Journal(folder, 2, 1.0)
    with journal.opened(SETTINGS, params):
        assert journal.model_file(1) == ("00001.npz", b"weights1")
        assert not journal.wants(0.55)
        keep(journal, 3, 0.45)
    assert models(journal) == ["00001.npz", "00003.npz"]


def test_resuming_with_a_smaller_number_removes_models(folder):
    first = Journal(folder, None, -1.0)
    with first.opened(SETTINGS, params):
        for number, value in enumerate(VALUES):
            keep(first, number, value)
    for count, expected in ((3, ["00001.npz", "00003.npz", "00006.npz"]), (1, ["00001.npz"]), (0, [])):
        journal = Journal(folder, count, -1.0)
        opened(journal)
        assert models(journal) == expected


def test_models_without_a_trial_are_removed(folder):
    journal = Journal(folder, 3, 1.0)
    with journal.opened(SETTINGS, params):
        keep(journal, 0, 0.5)
        journal.write(trial(2, None, FAILED))
    others = [".00003.npz.swp", "00001.npz.bak", "resnet.keras", "strange", "²²²²².npz"]
    for name in ("00001.npz", "00002.keras", f".00000.npz.{'5f' * 16}.tmp", *others):
        (Path(folder) / "models" / name).write_bytes(b"leftover")
    again = Journal(folder, 3, 1.0)
    opened(again)
    assert models(again) == sorted(["00000.npz", *others])
    assert again.model_file(0) == ("00000.npz", b"weights0")
    assert not again.has_model(1)


def test_models_are_stored_as_weights_or_whole_models(folder):
    journal = Journal(folder, 3, 1.0)
    with journal.opened(SETTINGS, params):
        for number, suffix in enumerate(("npz", "keras")):
            journal.draft(number).write_bytes(suffix.encode())
            journal.keep_model(number, (0.5,), journal.draft(number), suffix)
            journal.write(trial(number))
    again = Journal(folder, 3, 1.0)
    opened(again)
    assert [again.model_file(number) for number in range(2)] == [("00000.npz", b"npz"), ("00001.keras", b"keras")]


def test_drafts_of_two_leases_have_different_files(folder):
    journal = Journal(folder, 3, 1.0)
    assert journal.draft(1) != journal.draft(2)
    assert not str(journal.draft(1)).startswith(folder)


def test_a_missing_model_file_is_reported(folder):
    journal = Journal(folder, 3, 1.0)
    with journal.opened(SETTINGS, params):
        keep(journal, 0, 0.5)
    (Path(folder) / "models" / "00000.npz").unlink()
    with pytest.raises(StorageError, match="cannot read .*00000.npz"):
        journal.model_file(0)


# Temporary folders


def test_a_temporary_folder_is_removed_with_its_journal():
    journal = Journal(None, 3, 1.0)
    with journal.opened(SETTINGS, params):
        keep(journal, 0, 0.5)
    folder = Path(journal.folder)
    assert (folder / "models" / "00000.npz").exists()
    assert (folder / "trials" / "00000.json").exists()
    drafts = journal.draft(1).parent
    del journal
    gc.collect()
    assert not folder.exists()
    assert not drafts.exists()


def test_a_folder_of_the_user_is_kept(folder):
    journal = Journal(folder, 3, 1.0)
    write(journal, trial(0))
    drafts = journal.draft(1).parent
    assert drafts.exists()
    del journal
    gc.collect()
    assert not drafts.exists()
    assert (Path(folder) / "trials" / "00000.json").exists()


def test_copies_of_a_trial_with_other_numbers_can_be_written(folder):
    journal = Journal(folder, 3, 1.0)
    write(journal, FULL, replace(FULL, number=13))
    assert {each.number for each in opened(journal)} == {12, 13}
