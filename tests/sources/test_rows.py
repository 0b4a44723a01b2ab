"""Advice about how rows are shared out to workers."""

import warnings

import pytest

from sparkkeras.sources.rows import FEW_BATCHES, MANY_PARTITIONS, warn_of_partitions


def test_many_small_partitions_are_advised_against_with_the_numbers():
    words = r"64 partitions.*2 slots.*at most 1 batches of 32 rows.*SparkModel\(num_workers=2\)"
    with pytest.warns(UserWarning, match=words):
        warn_of_partitions(64, 2, 1, 32)


@pytest.mark.parametrize(("workers", "batches"), [(2 * MANY_PARTITIONS, 1), (64, FEW_BATCHES + 1), (2, 1)])
def test_few_or_large_partitions_are_not(workers, batches):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_partitions(workers, 2, batches, 32)
