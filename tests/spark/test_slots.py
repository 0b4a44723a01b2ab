"""Warnings about the number of partitions."""

import warnings

import pytest

from sparkkeras.spark.slots import FEW_BATCHES, MANY_PARTITIONS, warn_of_partitions


def test_many_small_partitions_cause_a_warning_with_their_number_and_size():
    message = r"64 partitions.*2 slots.*at most 1 batch of 32 rows.*SparkModel\(num_workers=2\)"
    with pytest.warns(UserWarning, match=message):
        warn_of_partitions(64, 2, 1, 32)


@pytest.mark.parametrize(("workers", "batches"), [(2 * MANY_PARTITIONS, 1), (64, FEW_BATCHES + 1), (2, 1)])
def test_few_or_large_partitions_cause_no_warning(workers, batches):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_partitions(workers, 2, batches, 32)
