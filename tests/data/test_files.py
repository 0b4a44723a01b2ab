"""A partition on disk: written once, then memory-mapped."""

import pickle
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from sparkkeras.data import files
from sparkkeras.data.block import Block, Form, Structure, from_arrays
from sparkkeras.data.labels import LabelRange
from sparkkeras.data.text import to_text
from sparkkeras.errors import DataError, StorageError


def numbered(rows, start=0):
    numbers = np.arange(start, start + rows)
    x = np.stack([numbers, -numbers], 1).astype(np.float32), numbers.astype(ml_dtypes.bfloat16)  # which NumPy lacks
    return from_arrays(x, {"out": numbers % 5}, numbers / 2)


def equal(one, other):
    assert one.spec == other.spec
    return all(np.array_equal(mine, theirs) for mine, theirs in zip(one.arrays, other.arrays, strict=True))


def test_written_blocks_can_be_opened_and_not_changed(tmp_path):
    whole = numbered(10)
    handle = files.write(iter([whole[:1], whole[1:1], whole[1:8], whole[8:]]), 3, tmp_path / "data")
    assert (handle.partition, handle.rows, handle.spec) == (3, 10, whole.spec)
    assert handle.labels == (LabelRange(0, 4, True),)
    assert Path(handle.directory).parent == tmp_path / "data"
    opened = handle.open()
    assert equal(opened, whole)
    assert all(isinstance(array, np.memmap) for array in opened.arrays)
    with pytest.raises(ValueError, match="read-only"):
        opened.arrays[0][0] = 1


@pytest.mark.parametrize(
    "rows", [numbered(10), from_arrays(to_text(np.array(["é", "b", "", "dd", "e"]))[0], np.ones(5), None)]
)
def test_a_checksum_is_of_the_rows_in_their_order(tmp_path, rows):
    checksum = files.write([rows], 0, tmp_path).checksum
    assert files.write(iter([rows[:3], rows[3:]]), 1, tmp_path).checksum == checksum
    assert files.write([rows[::-1]], 0, tmp_path).checksum != checksum
    assert files.checksum_of(rows) == files.checksum_of(pickle.loads(pickle.dumps(rows))) != files.checksum_of(rows[::-1])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
@pytest.mark.parametrize("file", ["0.bin", "1.text", "1.offsets"])
def test_a_full_disk_is_reported_with_a_remedy(tmp_path, file):
    (tmp_path / file).symlink_to("/dev/full")
    block = Block(Form(Structure.several(2)), (np.zeros((3, 2)), to_text(np.array(["one", "two", "three"]))[0]))
    with pytest.raises(StorageError, match=f"{tmp_path}.*free some space.*spark.local.dir"):
        files._write_arrays([block], 0, tmp_path)


def test_errors_of_the_source_are_not_mistaken_for_those_of_the_disk(tmp_path):
    def failing():
        yield numbered(1)
        raise FileNotFoundError("photo.jpg")

    with pytest.raises(FileNotFoundError, match="photo"):
        files.write(failing(), 0, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_zero_rows(tmp_path):
    for number, blocks in enumerate([[], [numbered(0)], [numbered(0), numbered(0)]]):
        handle = files.write(blocks, number, tmp_path)
        assert (handle.rows, handle.spec, handle.labels) == (0, None, ())
        assert handle.open() is None


def test_arrays_of_width_zero(tmp_path):
    block = from_arrays((np.zeros((4, 0), np.float32), np.arange(4)), np.arange(4), None)
    opened = files.write([block[:1], block[1:]], 0, tmp_path).open()
    assert opened.x[0].shape == (4, 0)
    assert equal(opened, block)


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (
            from_arrays(np.ones((2, 4), np.float32), np.ones(2, np.int64), None),
            r"from row 3: x .* \(3,\) to",
        ),
        (
            from_arrays(np.ones((2, 3), np.float32), np.ones(2, np.int64), np.ones(2, np.float32)),
            r"from row 3: .* \['x', 'y'\] to",
        ),
    ],
)
def test_blocks_of_different_specs_raise_an_error_and_leave_no_files(tmp_path, second, words):
    first = from_arrays(np.ones((3, 3), np.float32), np.ones(3, np.int64), None)
    with pytest.raises(DataError, match=f"partition 5, {words}"):
        files.write([first, second], 5, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_concurrent_attempts_do_not_interfere(tmp_path):
    first = files.write([numbered(4)], 0, tmp_path)
    second = files.write([numbered(6, start=100)], 0, tmp_path)
    assert equal(first.open(), numbered(4))
    assert equal(second.open(), numbered(6, start=100))
    assert {entry.name for entry in tmp_path.iterdir()} == {Path(handle.directory).name for handle in (first, second)}


@pytest.mark.parametrize("rows", [4, 6])
def test_files_of_another_size_raise_file_not_found(tmp_path, rows):
    """The source returned different rows when it was read again, so the files do not match the handle."""
    handle = files.write([numbered(5)], 0, tmp_path)
    other = files.write([numbered(rows)], 0, tmp_path)
    shutil.rmtree(handle.directory)
    Path(other.directory).rename(handle.directory)
    with pytest.raises(FileNotFoundError):
        handle.open()


def test_files_in_the_executors_temporary_folder_are_found(tmp_path, monkeypatch):
    """One executor wrote the partition; another one, with its own copy of the partition, opens the handle."""
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{tmp_path / 'one'},{tmp_path / 'more'}")
    assert files.home("data") == tmp_path / "one" / "data"
    handle = files.write([numbered(3)], 4, files.home("data"))
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path / "two"))
    shutil.rmtree(tmp_path / "one")
    with pytest.raises(FileNotFoundError):
        handle.open()
    files.write([numbered(3)], 4, files.home("data"))
    assert equal(handle.open(), numbered(3))


def test_outside_spark_files_go_to_the_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("SPARK_LOCAL_DIRS", raising=False)
    monkeypatch.setattr(files.tempfile, "gettempdir", lambda: str(tmp_path))
    assert files.home("data") == tmp_path / "data"
