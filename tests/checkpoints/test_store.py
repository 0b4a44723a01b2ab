"""The settings and the files of checkpoints, which are complete or absent, whatever happens to the writer."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkkeras.checkpoints import values
from sparkkeras.checkpoints.store import Checkpoint, CheckpointStore
from sparkkeras.errors import ConfigurationError, StorageError, UnknownArgumentError
from sparkkeras.spark import filesystem
from tests.conftest import long

MODEL = b"a model" * 100
ARRAYS = [np.arange(5, dtype=np.float32), np.empty((0, 2)), np.array(7, np.int64), np.array([True, False]), np.array("é")]


@dataclass(frozen=True)
class Point:
    """A value that is registered."""

    x: Any
    y: Any


def state(number):
    return {"number": number, "weights": np.full(1000, number, np.float32), "empty": {}, "nothing": None}


def write(store, number):
    return store.write("a test", state(number), MODEL)


def number_of(store):
    """The number of the newest checkpoint, which is complete with its model."""
    found = store.newest(with_model=True)
    assert found.value["weights"].tolist() == [found.value["number"]] * 1000
    assert found.model == MODEL
    return found.value["number"]


def folders(path):
    return sorted(entry.name for entry in path.iterdir())


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(str(tmp_path / "run"), keep=3)


# The settings


def test_the_settings():
    given = Checkpoint(Path("runs/a"), every=3, every_seconds=60, keep=1)
    assert asdict(given) == {"path": "runs/a", "every": 3, "every_seconds": 60.0, "keep": 1}
    assert Checkpoint("a") == Checkpoint("a", "epoch", None, 3)


@pytest.mark.parametrize(
    ("name", "value"),
    [("path", ""), ("every", 0), ("every", "batch"), ("every_seconds", 0), ("every_seconds", "1"), ("keep", 0)],
)
def test_values_out_of_range(name, value):
    with pytest.raises(ConfigurationError, match=f"{name}={value!r}: expected"):
        Checkpoint(**{"path": "a", name: value})


def test_unknown_settings():
    with pytest.raises(UnknownArgumentError, match="'evry'.*Did you mean 'every'"):
        Checkpoint("a", evry=2)


# The files


def test_values_are_read_as_they_were_written(store):
    values.register(Point)
    nested = {
        "list": [1, 0.1, None, True, "é", float("inf"), b"\0\1", b"", (), (1, [2])],
        "dict": {"a": {"b": ARRAYS}, "numbered": {3: {}, -1: "x"}, "": {}},
        "scalar": np.float32(0.1),
        "object": Point(1, (2.5,)),
    }
    store.write("a test", nested)
    found = store.newest().value
    assert found["list"] == nested["list"]
    assert found["dict"]["numbered"] == nested["dict"]["numbered"]
    assert found["object"] == nested["object"]
    assert found["scalar"].dtype == np.float32
    assert found["scalar"] == nested["scalar"]
    for read, written in zip(found["dict"]["a"]["b"], ARRAYS, strict=True):
        assert read.dtype == written.dtype
        assert read.shape == written.shape
        assert read.tobytes() == written.tobytes()
        assert read.flags.writeable


def test_dtypes_that_numpy_does_not_define(store):
    dtype = pytest.importorskip("ml_dtypes").bfloat16
    store.write("a test", np.array([1.5, -2], dtype))
    assert store.newest().value.dtype == dtype
    assert store.newest().value.tolist() == [1.5, -2]


@pytest.mark.parametrize("value", [{1.5: 2}, {1: 2, "a": 3}, {1}, np.array([{}]), {"__array__": 0}], ids=str)
def test_other_values_are_rejected_with_their_place(store, value):
    with pytest.raises(ConfigurationError, match=r"state\['a'\]\[0\] cannot be stored"):
        store.write("a test", {"a": [value]})


def test_the_newest_are_kept(store, tmp_path):
    assert (store.newest(), store.names()) == (None, [])
    assert not (tmp_path / "run").exists()
    for number in range(5):
        write(store, number)
        assert number_of(store) == number
    *checkpoints, model = folders(tmp_path / "run")
    assert len(checkpoints) == 3
    assert store.names() == checkpoints[::-1]
    assert model == f"model-{store.names()[0][-8:]}.zip"


def test_a_resumed_run_has_a_model_of_its_own(store, tmp_path):
    """The one before is deleted with the last checkpoint that needs it, also by a process that is killed in between."""
    models = []
    for number in range(3):
        write(store, number)
        write(store, number)
        models.append(f"model-{store.names()[0][-8:]}.zip")
        store = CheckpointStore(store.path, keep=3)
    assert [name for name in folders(tmp_path / "run") if name.startswith("model-")] == sorted(models[1:])
    newest = store.names()[0]
    for name in store.names()[1:]:
        (tmp_path / "run" / name / "manifest.json").unlink()
    last = write(store, 3)
    assert folders(tmp_path / "run") == sorted([newest, last, models[2], f"model-{last[-8:]}.zip"])


@pytest.mark.parametrize("file", ["arrays.bin", "the model"])
@pytest.mark.parametrize("change", ["truncated", "changed", "missing"])
def test_a_damaged_checkpoint_is_reported_and_the_one_before_it_is_used(store, tmp_path, file, change):
    write(store, 1)
    store = CheckpointStore(store.path, keep=3)
    name = write(store, 2)
    path = tmp_path / "run" / (f"{name}/{file}" if file == "arrays.bin" else f"model-{name[-8:]}.zip")
    content = path.read_bytes()
    path.unlink()
    if change != "missing":
        path.write_bytes(content[:-1] + (b"" if change == "truncated" else bytes([content[-1] ^ 1])))
    with pytest.warns(UserWarning, match=f"00000002-.* is damaged, .*00000001-.* is used: {path.name}"):
        assert number_of(store) == 1
    if file == "the model":  # training does not need it
        assert store.newest().value["number"] == 2
    store = CheckpointStore(store.path, keep=3)
    write(store, 3)
    assert number_of(store) == 3


def test_all_damaged(store, tmp_path):
    (tmp_path / "run" / write(store, 1) / "arrays.bin").unlink()
    (tmp_path / "run" / write(store, 2) / "manifest.json").write_bytes(b"")
    with pytest.raises(StorageError, match="all checkpoints .*manifest.json .*arrays.bin"):
        store.newest()
    before = folders(tmp_path / "run")
    with pytest.raises(ConfigurationError, match="has 2 checkpoints"):
        CheckpointStore.open(Checkpoint(tmp_path / "run"), False)
    assert folders(tmp_path / "run") == before


def test_a_damaged_manifest_is_reported_and_its_folder_is_not_deleted(store, tmp_path):
    write(store, 1)
    damaged = write(store, 2)
    path = tmp_path / "run" / damaged / "manifest.json"
    content = path.read_bytes()
    for torn in (b"", content[:-1], content.replace(b'"size": ', b'"size": 1'), b"[]"):
        path.write_bytes(torn)
        with pytest.warns(UserWarning, match=f"{damaged} is damaged.*manifest.json is not"):
            assert number_of(store) == 1
    for number in range(3, 7):
        write(store, number)
    assert [int(name.split("-")[1]) for name in store.names()] == [6, 5, 4, 2]


@pytest.mark.parametrize("file", ["arrays.bin", "manifest.json"])
def test_an_error_of_the_store_is_raised_and_a_checksum_that_differs_is_damage(store, monkeypatch, file):
    write(store, 1)
    newest, read = write(store, 2), filesystem.read_bytes

    def fails(path):
        if path.endswith(f"{newest}/{file}"):
            raise error
        return read(path)

    monkeypatch.setattr(filesystem, "read_bytes", fails)
    error = StorageError("not respond")
    with pytest.raises(StorageError, match="^not respond"):
        store.newest()
    error = filesystem.ChecksumError("a block differs.")
    with pytest.warns(UserWarning, match=f"{newest} is damaged.*{file}.*block differs"):
        assert number_of(store) == 1


def test_a_checkpoint_of_another_kind(store):
    name = store.write("a run", None)
    assert store.newest("a run").name == store.newest().name == name
    with pytest.raises(ConfigurationError, match=f"{name} is of a run"):
        store.newest("a fit")


def test_a_later_format(store, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("sparkkeras.checkpoints.store._FORMAT", 2)
        write(store, 1)
    with pytest.raises(StorageError, match="later version"):
        store.newest()


def test_nothing_is_deleted_before_a_later_one_is_complete(store, tmp_path, monkeypatch):
    """Wherever a write fails, the checkpoints before it are those to resume from, and nothing is left of it."""
    for number in range(3):
        write(store, number)
    before = folders(tmp_path / "run")
    new_file = filesystem.new_file
    store = CheckpointStore(store.path, keep=3)
    for failing in ("arrays.bin", ".zip", "manifest.json"):

        def fails(path, *, atomic=True, failing=failing):
            if path.endswith(failing):
                raise StorageError("disk is full")
            return new_file(path, atomic=atomic)

        monkeypatch.setattr(filesystem, "new_file", fails)
        with pytest.raises(StorageError, match="disk is full"):
            write(store, 9)
        assert [name for name in folders(tmp_path / "run") if not name.endswith(".zip")] == before[:-1]
        assert number_of(store) == 2


def test_incomplete_folders_of_an_earlier_process_are_deleted(store, tmp_path):
    old = write(store, 1)
    torn = tmp_path / "run" / "checkpoint-00000002-00000000"
    shutil.copytree(tmp_path / "run" / old, torn)
    (torn / "manifest.json").unlink()
    (tmp_path / "run" / "notes").mkdir()
    new = write(CheckpointStore(str(tmp_path / "run"), keep=3), 3)
    assert folders(tmp_path / "run") == sorted([old, new, "notes", *(f"model-{name[-8:]}.zip" for name in (old, new))])
    assert new.startswith("checkpoint-00000003-")


WRITER = """
import sys
from pathlib import Path
from tests.checkpoints.test_store import write
from sparkkeras.checkpoints.store import Checkpoint, CheckpointStore

store = CheckpointStore(sys.argv[1], keep=2)
number = int(sys.argv[2])
while True:
    write(store, number)
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
        found = number_of(store)
        assert found in (int(reported.read_text()), int(reported.read_text()) + 1)
        assert len(store.names()) in (2, 3) or found == 1
        last = found


def test_a_store_on_a_uri_does_not_start_spark(tmp_path, monkeypatch):
    """The thread that writes would, after Spark has been stopped during training."""
    monkeypatch.setattr("pyspark.SparkContext._active_spark_context", None)
    monkeypatch.setattr("pyspark.SparkContext.__init__", None)
    with pytest.raises(StorageError, match="Spark has been stopped"):
        write(CheckpointStore(f"hdfs://host{tmp_path}/run"), 1)


def test_a_second_process_in_the_folder_is_an_error_and_loses_nothing(tmp_path):
    path = str(tmp_path / "run")
    first, third = (CheckpointStore.open(Checkpoint(path), True) for _ in range(2))
    first.check_writable()
    write(first, 1)
    with pytest.raises(StorageError, match="another process has written"):  # since it has read the folder
        third.check_writable()
    second = CheckpointStore.open(Checkpoint(path), True)
    newest = write(second, 2)
    with pytest.raises(StorageError, match=f"another process has written {newest}"):
        write(first, 3)
    write(second, 4)
    assert number_of(CheckpointStore(path)) == 4


def test_a_folder_that_cannot_be_written_is_an_error_before_training(tmp_path):
    (tmp_path / "file").touch()
    for name in ("file", "file/run"):
        with pytest.raises(StorageError, match="Not a directory"):
            CheckpointStore(str(tmp_path / name)).check_writable()
    CheckpointStore(str(tmp_path / "run")).check_writable()
    assert list((tmp_path / "run").iterdir()) == []
