"""Datasets in memory and on Spark pass the conformance suite; to add one, write a function and list it in DATASETS.

Datasets on Spark Connect are in `tests.connect.test_training`.
"""

from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from sparkkeras import to_data_frame
from sparkkeras.data.block import from_arrays
from sparkkeras.data.dataset import all_labels, common_spec
from sparkkeras.data.local_dataset import LocalDataset
from sparkkeras.data.placement import even_slices
from sparkkeras.data.reader import Reader
from sparkkeras.data.schema import Schema
from sparkkeras.errors import DataError, WorkerError
from sparkkeras.sources.arrays import rows_of
from sparkkeras.sources.source import as_source
from tests.sources.conformance import LARGE, PARTS, DatasetConformance, Scaled, numbered_block

READER = Reader(Schema())


@contextmanager
def in_memory(spark, block):
    yield LocalDataset(tuple(block[part] for part in even_slices(block.rows, PARTS)))


def rdd(spark, block):
    return as_source(spark.sparkContext.parallelize(list(rows_of(block)), PARTS), READER).dataset()


def rdd_repartitioned(spark, block):
    return as_source(spark.sparkContext.parallelize(list(rows_of(block)), 2), READER).dataset(PARTS)


def arrays_on_disk(spark, block):
    return as_source(block.x, READER, block.y).dataset(PARTS)


def frame(spark, block):
    return as_source(to_data_frame(spark, block.x, block.y).coalesce(1).repartitionByRange(PARTS, "label"), READER).dataset()


def frame_repartitioned(spark, block):
    return as_source(to_data_frame(spark, block.x, block.y), READER).dataset(PARTS)


DATASETS = [in_memory, rdd, rdd_repartitioned, arrays_on_disk, frame, frame_repartitioned]


class TestDatasets(DatasetConformance):
    @pytest.fixture(params=DATASETS, ids=lambda make: make.__name__)
    def dataset(self, request, spark):
        with request.param(spark, numbered_block()) as dataset:
            yield dataset

    def test_tasks_can_reach_the_driver(self, dataset):
        with dataset.stored() as stored:
            assert stored.is_driver_here
            with stored.everywhere() as parts:
                assert [part.open().rows for part in parts] == [handle.rows for handle in stored.handles]
            assert stored.without_rows(2).run(Count()).collect() == [0, 0]
            assert stored.background(lambda: 7).result() == 7


class Count:
    """Yields the number of rows."""

    def __call__(self, context, blocks):
        yield sum(block.rows for block in blocks)


def test_large_values_pass_through_files_that_are_removed(spark):
    def files():
        return set(Path(spark.sparkContext._temp_dir).rglob("values-*/*"))

    with arrays_on_disk(spark, numbered_block()) as dataset:
        before = files()
        with dataset.share(np.ones(LARGE)) as shared:
            assert [path.stat().st_size > 8 * LARGE for path in files() - before] == [True]
            with pytest.raises(WorkerError, match="broken"):
                dataset.run(Broken(shared)).collect()
            assert len(files() - before) == 1
            assert len(dataset.run(Scaled(shared)).collect()) == PARTS
        assert files() == before


@dataclass(frozen=True)
class Broken(Scaled):
    """Yields a large result and fails in the last partition."""

    def __call__(self, context, blocks):
        yield from super().__call__(context, blocks)
        if context.worker == PARTS - 1:
            raise RuntimeError("broken")


def test_partitions_of_different_specs_raise_an_error_and_empty_ones_have_none():
    def rows(width):
        return from_arrays(np.ones((2, width), np.float32), np.ones(2, np.int64), None)

    with pytest.raises(DataError, match=r"(?s)x has shape \(1,\).* partition 1.*\(3,\).* partition 2"):
        common_spec(LocalDataset((None, rows(1), rows(3))).handles)
    empty = LocalDataset((None, rows(1)[:0])).handles
    assert (common_spec(empty), all_labels(empty)) == (None, ())
