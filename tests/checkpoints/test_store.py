"""The files of checkpoints: complete or absent, whatever happens to the writer."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from sparkkeras.checkpoints.checkpoint import Checkpoint
from sparkkeras.checkpoints.store import CheckpointStore
from sparkkeras.errors import ConfigurationError, StorageError
from sparkkeras.spark import filesystem
from tests.conftest import long

ARRAYS = [np.arange(5, dtype=np.float32), np.empty((0, 2)), np.array(7, np.int64), np.array([True, False]), np.array("é")]


def state(number):
    return {"number": number, "weights": np.full(1000, number, np.float32), "empty": {}, "nothing": None}


def save_model(file):
    file.write(b"a model" * 100)
    return {}


def number_of(found):
    assert (found.values["weights"] == found.values["number"]).all()
    assert found.values["weights"].shape == (1000,)
    assert found.model == b"a model" * 100
    return found.values["number"]


def folders(path):
    return sorted(entry.name for entry in path.iterdir())


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(str(tmp_path / "run"), keep=3)


def test_values_are_read_as_they_were_written(store):
    nested = {"list": [1, 0.1, None, True, "é", float("inf")], "dict": {"a": {"b": ARRAYS}}, "scalar": np.float32(0.1)}
    store.write(nested)
    found = store.newest().values
    assert found["list"] == nested["list"]
    assert found["scalar"].dtype == np.float32
    assert found["scalar"] == nested["scalar"]
    for read, written in zip(found["dict"]["a"]["b"], ARRAYS, strict=True):
        assert read.dtype == written.dtype
        assert read.shape == written.shape
        assert read.tobytes() == written.tobytes()


def test_dtypes_that_numpy_does_not_define(store):
    dtype = pytest.importorskip("ml_dtypes").bfloat16
    store.write({"a": np.array([1.5, -2], dtype)})
    assert store.newest().values["a"].dtype == dtype
    assert store.newest().values["a"].tolist() == [1.5, -2]


@pytest.mark.parametrize("value", [{1: 2}, {1}, np.array([{}]), {"__array__": 0}], ids=str)
def test_other_values_are_rejected_with_their_place(store, value):
    with pytest.raises(ConfigurationError, match=r"the state\['a'\]\[0\] cannot be stored in a checkpoint"):
        store.write({"a": [value]})


def test_an_empty_store(store, tmp_path):
    assert store.newest() is None
    assert store.names() == []
    assert not (tmp_path / "run").exists()


def test_the_newest_are_kept(store, tmp_path):
    for number in range(5):
        store.write(state(number), save_model)
        assert number_of(store.newest()) == number
    assert len(folders(tmp_path / "run")) == 3
    assert store.names() == folders(tmp_path / "run")[::-1]


@pytest.mark.parametrize("file", ["arrays.bin", "state.json", "model.keras"])
@pytest.mark.parametrize("change", ["truncated", "changed", "missing"])
def test_a_damaged_checkpoint_is_reported_and_the_one_before_it_is_used(store, tmp_path, file, change):
    store.write(state(1), save_model)
    path = tmp_path / "run" / store.write(state(2), save_model) / file
    content = path.read_bytes()
    for size in [0, 1, len(content) // 2, len(content) - 1] if change == "truncated" else [0]:
        if change == "missing":
            path.unlink()
        else:
            path.write_bytes(content[:size] if change == "truncated" else content[:-1] + bytes([content[-1] ^ 1]))
        message = f"checkpoint-00000002-.* is damaged, and checkpoint-00000001-.* is used: {file}"
        with pytest.warns(UserWarning, match=message):
            assert number_of(store.newest()) == 1
    store.write(state(3), save_model)
    assert number_of(store.newest()) == 3


def test_all_damaged(store, tmp_path):
    (tmp_path / "run" / store.write(state(1)) / "arrays.bin").unlink()
    (tmp_path / "run" / store.write(state(2)) / "manifest.json").write_bytes(b"")
    message = (
        "all checkpoints in .* are damaged: restore .*checkpoint-00000002-.*: manifest.json is not valid. "
        "checkpoint-00000001-.*: arrays.bin is missing."
    )
    with pytest.raises(StorageError, match=message):  # and no warning that another one is used
        store.newest()
    before = folders(tmp_path / "run")
    with pytest.raises(ConfigurationError, match="has 2 checkpoints of an earlier training"):
        CheckpointStore.open(Checkpoint(tmp_path / "run"), False)
    assert folders(tmp_path / "run") == before


def test_a_damaged_manifest_is_reported_and_its_folder_is_not_deleted(store, tmp_path):
    store.write(state(1), save_model)
    damaged = store.write(state(2), save_model)
    path = tmp_path / "run" / damaged / "manifest.json"
    content = path.read_bytes()
    contents = [content[:size] for size in (0, 1, len(content) // 2, len(content) - 1)]
    changed = json.loads(content)
    changed["content"]["files"]["arrays.bin"]["size"] += 1
    message = f"{damaged} is damaged, and checkpoint-00000001-.* is used: manifest.json is not valid"
    for torn in [*contents, json.dumps(changed).encode(), b"[]", b'{"checksum": 1}']:
        path.write_bytes(torn)
        with pytest.warns(UserWarning, match=message):
            assert number_of(store.newest()) == 1
        assert len(store.names()) == 2
    for number in range(3, 7):
        store.write(state(number), save_model)
    assert [int(name.split("-")[1]) for name in folders(tmp_path / "run")] == [2, 4, 5, 6]
    assert number_of(store.newest()) == 6


@pytest.mark.parametrize("file", ["arrays.bin", "manifest.json"])
def test_an_error_of_the_store_is_raised_and_a_checksum_that_differs_is_damage(store, monkeypatch, file):
    store.write(state(1), save_model)
    newest, read = store.write(state(2), save_model), filesystem.read_bytes

    def fails(path):
        if path.endswith(f"{newest}/{file}"):
            raise error
        return read(path)

    monkeypatch.setattr(filesystem, "read_bytes", fails)
    error = StorageError("the store does not respond.")
    with pytest.raises(StorageError, match="^the store does not respond"):
        store.newest()
    error = filesystem.ChecksumError("a block differs.")
    with pytest.warns(UserWarning, match=f"{newest} is damaged, .*: {file} has other contents .*: a block differs."):
        assert number_of(store.newest()) == 1


def test_a_checkpoint_of_another_kind(store):
    name = store.write({"kind": "run"})
    assert store.newest("run").name == store.newest().name == name
    message = f"the checkpoint {store.path}/{name} is of SparkRunner.run, and this is SparkModel.fit or KerasEstimator"
    with pytest.raises(ConfigurationError, match=message):
        store.newest("fit")
    store.write({"kind": "a later one"})
    with pytest.raises(ConfigurationError, match="is of something else, and this is a member of SparkEnsemble.fit"):
        store.newest("member")


def test_arrays_in_the_file_of_the_model_are_written_once(store, tmp_path):
    first, second = np.arange(6, dtype=np.float32).reshape(2, 3), np.array([7.0, 8.0])

    def save(file):
        file.write(b"head" + first.tobytes()[12:] + b"and" + first.tobytes()[:12])
        return {id(first): [(19, 31), (4, 16)]}

    path = tmp_path / "run" / store.write({"first": first, "second": second, "again": first}, save)
    assert (path / "arrays.bin").stat().st_size == second.nbytes
    found = store.newest()
    assert found.model.startswith(b"head")
    for name, expected in (("first", first), ("second", second), ("again", first)):
        np.testing.assert_array_equal(found.values[name], expected)
        assert found.values[name].flags.writeable


def test_an_earlier_format(store, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("sparkkeras.checkpoints.store._FORMAT", 1)
        store.write(state(1), save_model)
    assert number_of(store.newest()) == 1


def test_a_later_format(store, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("sparkkeras.checkpoints.store._FORMAT", 3)
        store.write(state(1))
    with pytest.raises(StorageError, match="written by a later version of sparkkeras: upgrade"):
        store.newest()


def test_nothing_is_deleted_before_a_later_one_is_complete(store, tmp_path, monkeypatch):
    """Wherever a write fails, the checkpoints before it are those to resume from, and nothing is left of it."""
    for number in range(3):
        store.write(state(number), save_model)
    before = folders(tmp_path / "run")
    new_file = filesystem.new_file
    for failing in ("arrays.bin", "state.json", "model.keras", "manifest.json"):

        def write(path, *, atomic=True, failing=failing):
            if path.endswith(failing):
                raise StorageError("the disk is full")
            return new_file(path, atomic=atomic)

        monkeypatch.setattr(filesystem, "new_file", write)
        with pytest.raises(StorageError, match="the disk is full"):
            store.write(state(9), save_model)
        assert folders(tmp_path / "run") == before
        assert number_of(store.newest()) == 2


def test_incomplete_folders_of_an_earlier_process_are_deleted(store, tmp_path):
    old = store.write(state(1), save_model)
    torn = tmp_path / "run" / "checkpoint-00000002-00000000"
    shutil.copytree(tmp_path / "run" / old, torn)
    (torn / "manifest.json").unlink()
    (tmp_path / "run" / "notes").mkdir()
    new = CheckpointStore(str(tmp_path / "run"), keep=3).write(state(3), save_model)
    assert folders(tmp_path / "run") == sorted([old, new, "notes"])
    assert new.startswith("checkpoint-00000003-")


def test_two_processes_never_write_to_one_folder(tmp_path):
    first, second = (CheckpointStore(str(tmp_path), keep=2) for _ in range(2))
    assert first.write(state(1)) != second.write(state(2))


WRITER = """
import sys
from pathlib import Path
from tests.checkpoints.test_store import save_model, state
from sparkkeras.checkpoints.store import CheckpointStore

store = CheckpointStore(sys.argv[1], keep=2)
number = int(sys.argv[2])
while True:
    store.write(state(number), save_model)
    Path(sys.argv[1] + ".new").write_text(str(number))
    Path(sys.argv[1] + ".new").replace(sys.argv[1] + ".written")
    number += 1
"""


@pytest.mark.parametrize("kills", [2, long(200)])
def test_a_writer_that_is_killed_leaves_complete_checkpoints(tmp_path, kills):
    store, reported = CheckpointStore(str(tmp_path / "run")), tmp_path / "run.written"
    last = 0
    for _ in range(kills):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "run"), str(last + 1)], cwd=os.getcwd())
        while not reported.exists() or int(reported.read_text()) <= last:
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(random.random() * 0.1)
        process.send_signal(signal.SIGKILL)
        process.wait()
        found = number_of(store.newest())
        assert found in (int(reported.read_text()), int(reported.read_text()) + 1)
        assert len(store.names()) in (2, 3) or found == 1
        last = found


def test_a_store_on_a_uri_does_not_start_spark(tmp_path, monkeypatch):
    """The thread that writes would, after Spark has been stopped during training."""
    from pyspark import SparkContext

    monkeypatch.setattr(SparkContext, "_active_spark_context", None)
    monkeypatch.setattr(SparkContext, "__init__", None)
    with pytest.raises(StorageError, match="Spark has been stopped"):
        CheckpointStore(f"file:{tmp_path}/run").write(state(1))


def test_a_second_process_in_the_folder_is_an_error_and_loses_nothing(tmp_path):
    path = str(tmp_path / "run")
    first, third = (CheckpointStore.open(Checkpoint(path), True) for _ in range(2))
    first.check_writable()
    first.write(state(1), save_model)
    with pytest.raises(StorageError, match="another process has written"):  # since it has read the folder
        third.check_writable()
    second = CheckpointStore.open(Checkpoint(path), True)
    newest = second.write(state(2), save_model)
    with pytest.raises(StorageError, match=rf"another process has written {newest} to .*a folder of its own"):
        first.write(state(3))
    second.write(state(4), save_model)
    assert number_of(CheckpointStore(path).newest()) == 4


def test_a_folder_that_cannot_be_written_is_an_error_before_training(tmp_path):
    (tmp_path / "file").touch()
    for name in ("file", "file/run"):
        with pytest.raises(StorageError, match="Not a directory"):
            CheckpointStore(str(tmp_path / name)).check_writable()
    CheckpointStore(str(tmp_path / "run")).check_writable()
    assert list((tmp_path / "run").iterdir()) == []
