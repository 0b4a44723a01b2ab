"""The in-memory implementation of the dataset protocols."""

import numpy as np
import pytest

from sparkkeras.data.block import from_arrays
from sparkkeras.data.dataset import all_labels, common_spec
from sparkkeras.data.labels import LabelRange
from sparkkeras.data.local_dataset import LocalDataset
from sparkkeras.errors import DataError


def numbered(start, stop):
    numbers = np.arange(start, stop)
    return from_arrays(numbers.astype(np.float32)[:, None], numbers, None)


def dataset():
    return LocalDataset((numbered(0, 2), None, numbered(2, 5), numbered(5, 5)))


def test_handles_describe_each_partition():
    assert dataset().num_partitions == 4
    handles = dataset().handles
    assert [handle.partition for handle in handles] == [0, 1, 2, 3]
    assert [handle.rows for handle in handles] == [2, 0, 3, 0]
    assert [handle.spec is None for handle in handles] == [False, True, False, True]
    assert handles[2].labels == (LabelRange(2, 4, True),)
    assert common_spec(handles) == numbered(0, 1).spec
    assert all_labels(handles) == (LabelRange(0, 4, True),)
    assert dataset().max_result_bytes == 0


def test_partitions_of_different_specs_raise_an_error():
    wide = from_arrays(np.ones((2, 3), np.float32), np.ones(2, np.int64), None)
    with pytest.raises(DataError) as caught:
        common_spec(LocalDataset((None, numbered(0, 2), wide)).handles)
    assert "x has shape (1,), float32, y has shape (), int64 in partition 1" in str(caught.value)
    assert "x has shape (3,), float32, y has shape (), int64 in partition 2" in str(caught.value)


def test_empty_partitions_have_no_common_spec():
    assert common_spec(LocalDataset((None, numbered(0, 0))).handles) is None
    assert all_labels(LocalDataset((None,)).handles) == ()
