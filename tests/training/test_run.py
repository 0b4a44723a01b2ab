"""The number of batches and rows of a run."""

import sys

import keras
import pytest

from sparkkeras.data.files import Handle
from sparkkeras.data.placement import TrainValidationSplit
from sparkkeras.training.run import Run
from sparkkeras.worker.batches import FitOptions


def run(train, batch_size=10, steps_per_epoch=None):
    found = Run("fit", [keras.Sequential()], {"steps_per_epoch": steps_per_epoch})
    found.split, found.options = TrainValidationSplit(train, (0,) * len(train)), FitOptions(batch_size)
    return found


@pytest.mark.parametrize(
    ("train", "steps_per_epoch", "batches"),
    [((25, 31, 0), None, 4), ((30,), None, 3), ((1,), None, 1), ((), None, 0), ((25, 31), 2, 2), ((25, 31), 9, 4)],
)
def test_batches_are_those_of_the_worker_with_the_most_batches(train, steps_per_epoch, batches):
    assert run(train, steps_per_epoch=steps_per_epoch).batches == batches


def test_num_workers_is_the_number_of_partitions_with_rows():
    assert run((25, 0, 31, 0, 1)).num_workers == 3


def test_rows_of_streams_are_of_an_unknown_number():
    handles = [Handle(0, "", None, None), Handle(1, "", 0, None)]
    split = TrainValidationSplit.split([handle.rows for handle in handles], 0.0)
    assert (split.train, split.workers, split.validation_spans) == ((None, 0), [0], ((0, 0), (0, 0)))
    assert (run(split.train).num_workers, run(split.train).steps, run(split.train).batches) == (1, None, sys.maxsize)
    assert (run(split.train, steps_per_epoch=3).steps, handles[0].nbytes) == (3, 0)
