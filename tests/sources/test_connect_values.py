"""Values in files beside the rows: chunks, writing, reading, and missing files."""

import pickle
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from sparkkeras.data import files
from sparkkeras.data.dataset import FilesMissing
from sparkkeras.data.values import Pickled
from sparkkeras.sources import connect_values
from sparkkeras.sources.connect_values import StoredShared


@dataclass(frozen=True)
class Value:
    name: str
    arrays: tuple


def some(name="some"):
    return Value(name, (np.arange(1000, dtype=np.float32), np.zeros((0, 3)), np.asfortranarray(np.ones((5, 7)))))


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """A machine with this temporary folder, and a process that has not read any value."""
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    monkeypatch.setattr(connect_values, "_latest", {})
    monkeypatch.setattr(connect_values, "CHUNK_BYTES", 1000)
    return tmp_path


def shared_of(value):
    """A shared value on the driver, and its copy in a task."""
    mine = StoredShared.of(Pickled.of(value), "dataset")
    return mine, pickle.loads(pickle.dumps(mine))


def write(mine):
    for start in mine.starts:
        pickle.loads(pickle.dumps(mine)).write(start, mine.pickled.between(start, start + mine.chunk))


def same(one, other):
    return one.name == other.name and all(map(np.array_equal, one.arrays, other.arrays))


def test_a_value_survives_the_round_trip_and_is_not_pickled_with_tasks():
    mine, received = shared_of(some())
    assert received == mine
    assert received.pickled is None
    assert len(pickle.dumps(mine)) < 500
    write(mine)
    assert len(mine.starts) > 4
    assert same(received.value, some())
    assert received.value is received.value
    assert received.value.arrays[0].flags.writeable


def test_a_failed_write_leaves_no_file(machine, monkeypatch):
    def half(path, data):
        with path.open("wb") as file:
            file.write(data[: len(data) // 2])
        raise OSError("no space left")

    mine, _ = shared_of(some())
    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", half)
        with pytest.raises(OSError, match="no space left"):
            write(mine)
    assert not list((machine / "dataset").iterdir())


@pytest.mark.parametrize("damage", ["not written", "one removed", "one truncated"])
def test_missing_or_incomplete_files_raise_an_error_and_can_be_written_again(machine, damage):
    mine, received = shared_of(some())
    if damage != "not written":
        write(mine)
        path = mine.path(mine.starts[-1])
        path.unlink() if damage == "one removed" else path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(FilesMissing):
        _ = received.value
    files.home("dataset").mkdir(exist_ok=True)
    for path in files.home("dataset").iterdir():
        path.unlink()
    write(mine)
    assert same(received.value, some())


def test_removing_a_value_keeps_the_others(machine):
    (one, of_one), (two, of_two) = shared_of(some("one")), shared_of(some("two"))
    write(one)
    write(two)
    assert of_one.value.name == "one"
    for _ in range(2):
        of_one.remove()
    with pytest.raises(FilesMissing):
        _ = of_one.value
    assert of_two.value.name == "two"
    assert len(list((machine / "dataset").iterdir())) == len(two.starts)
