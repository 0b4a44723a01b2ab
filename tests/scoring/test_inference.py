"""Determining the shapes of transformed rows, on the driver or on the workers."""

import numpy as np
import pytest

from sparkkeras import ConfigurationError
from sparkkeras.data.block import from_arrays
from sparkkeras.data.local_dataset import LocalDataset
from sparkkeras.modeling.custom_code import ByValue
from sparkkeras.scoring.inference import transformed_spec_of_zeros, transformed_spec_on_driver, transformed_spec_on_workers
from sparkkeras.worker.batches import BatchOptions


def picks(x, y):
    """Requires a first value that is not 0, like a lookup by key."""
    assert (x[:, 0] > 0).all(), "no such row"
    return x[:, 1:].astype("int32"), y


ERROR = "AssertionError: no such row"
LINE = r"in line \d+ of test_inference\.py"

OPTIONS = BatchOptions(4, ByValue.dump(picks, "transform"))


def block(first):
    return from_arrays(np.full((6, 3), first, np.float32), np.zeros((6, 1), np.float32), None)


def test_a_transform_that_fails_on_zeros_is_checked_on_rows():
    assert transformed_spec_of_zeros(block(1.0).spec, OPTIONS) is None
    seen = transformed_spec_on_driver(block(1.0), OPTIONS)
    assert [(leaf.shape, str(leaf.dtype)) for leaf in seen.leaves] == [((2,), "int32"), ((1,), "float32")]
    assert transformed_spec_on_workers(LocalDataset((None, block(1.0), block(2.0))), OPTIONS) == seen


def test_a_transform_that_fails_on_rows_raises_an_error():
    with pytest.raises(ConfigurationError, match=rf"transform failed {LINE} on the first 4 rows: {ERROR}"):
        transformed_spec_on_driver(block(0.0), OPTIONS)
    with pytest.raises(ConfigurationError, match=rf"failed {LINE} on the first rows of partition 1: {ERROR}"):
        transformed_spec_on_workers(LocalDataset((block(1.0), block(0.0))), OPTIONS)
