"""What runs on the workers, without Spark: rows that are collected, and results that pass through files."""

import os
import shutil
from dataclasses import make_dataclass, replace

import numpy as np
import pytest

from sparkkeras.data import files
from sparkkeras.data.block import from_arrays
from sparkkeras.data.values import ValueFile
from sparkkeras.errors import ClusterError, DataError, StorageError
from sparkkeras.sources import tasks
from sparkkeras.sources.arrays import _open_all
from sparkkeras.sources.copies import _copy
from sparkkeras.sources.tasks import Collect, OpenFiles, PiecesByRank, ReportsProblems, StorePieces, ThroughFiles
from tests.sources.conformance import LARGE, ROWS, numbered_block


@pytest.mark.parametrize("size", [1, LARGE])
def test_results_may_hold_objects_of_a_class_that_workers_cannot_import(tmp_path, size):
    key = make_dataclass("Key", ["number"])
    key.__module__ = "__main__"  # as on a worker that received the class from the user's script
    (found,) = ThroughFiles(lambda partition, rows: rows, tmp_path)(0, [([key(7)], np.ones(size))])
    assert isinstance(found, ValueFile) == (size == LARGE)
    (read,), ones = found.value if isinstance(found, ValueFile) else found
    assert read == key(7)
    assert len(ones) == size


def test_spark_reports_errors_with_their_causes(monkeypatch):
    monkeypatch.setenv("SPARK_SIMPLIFIED_TRACEBACK", "1")  # then it omits them

    def fail(partition, rows):
        raise ValueError

    with pytest.raises(ValueError):
        list(ReportsProblems(fail)(0, iter([])))
    assert "SPARK_SIMPLIFIED_TRACEBACK" not in os.environ


def test_a_folder_that_is_gone_is_reported(tmp_path):
    with pytest.raises(StorageError, match="/removed, .*No such file"):
        list(ThroughFiles(lambda partition, rows: rows, tmp_path / "removed")(0, [np.ones(LARGE)]))


def test_rows_of_several_partitions_move_to_a_rank(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    monkeypatch.setattr(tasks, "BLOCK_BYTES", 16)
    parts = [np.arange(10.0 * number, 10 * number + rows) for number, rows in enumerate((5, 1, 3, 0, 3))]
    written = [files.write([from_arrays(part, part, None)], number, tmp_path / "0") for number, part in enumerate(parts)]
    shutil.rmtree(written[4].directory)  # it is on another machine
    pieces = [list(PiecesByRank(2)(handle.partition, [handle])) for handle in written]
    assert [[rank for rank, _ in part] for part in pieces] == [[0] * 5, [1], [0] * 3, [], []]
    store = StorePieces("after", 2, tuple(written))
    first, third, fifth = store(0, pieces[2] + pieces[0])
    second, fourth = store(1, pieces[1])
    assert [handle.open().y.tolist() for handle in (first, second, third)] == [part.tolist() for part in parts[:3]]
    assert all(handle.directory.startswith(str(tmp_path / "after")) for handle in (first, second, third))
    assert (fourth, fifth) == (written[3], written[4])


def test_rows_with_another_checksum_than_at_first_and_removed_files_are_errors(tmp_path):
    handle = files.write([numbered_block()], 0, tmp_path)
    first = OpenFiles(Collect(), 1, (handle.checksum,))
    assert [block.rows for block in first(0, [handle])] == [ROWS]
    with pytest.raises(DataError, match="^the rows changed.*checkpoint"):
        list(first(0, [replace(handle, checksum=handle.checksum + 1)]))
    shutil.rmtree(handle.directory)
    with pytest.raises(ClusterError, match="removed .*part-0.*spark.local.dir"):
        list(_open_all([handle]))


# Copies of all rows on an executor; tests/integration/test_search.py has searches on them


def pieces(*keys):
    for number, partition, start in keys:
        yield number, partition, from_arrays(np.arange(start, start + 2.0), np.full(2, number), None)


def copied(given, folder):
    return [handle.open().x.tolist() for handle in _copy(given, folder)]


def test_rows_are_in_the_order_of_their_partitions_and_apart_by_their_number(tmp_path):
    given = pieces((0, 2, 20), (0, 2, 22), (1, 0, 50), (0, 0, 0), (0, 0, 2), (0, 1, 10))
    rows = [[0, 1, 2, 3, 10, 11, 20, 21, 22, 23], [50, 51]]
    assert copied(given, tmp_path) == rows
    assert copied(pieces((0, 0, 99)), tmp_path) == rows  # another task of the executor, whose pieces are not read
    assert len(list(tmp_path.glob("part*"))) == 2


def test_a_task_that_fails_leaves_nothing_that_later_ones_keep(tmp_path):
    def failing():
        yield from pieces((0, 0, 0), (0, 1, 10))
        raise OSError("the connection broke")

    for _ in range(3):
        with pytest.raises(OSError, match="the connection broke"):
            copied(failing(), tmp_path)
    assert copied(pieces((0, 1, 10), (0, 0, 0)), tmp_path) == [[0, 1, 10, 11]]
    assert len(list(tmp_path.glob("part*"))) == 1
