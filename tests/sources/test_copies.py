"""Copies of all rows on an executor, without Spark; tests/integration/test_search.py has searches on them."""

import numpy as np
import pytest

from sparkkeras.data.block import from_arrays
from sparkkeras.sources.copies import _copy


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
