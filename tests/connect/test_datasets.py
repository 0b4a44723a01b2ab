"""Datasets of Spark Connect pass the conformance suite of `tests.sources.conformance`."""

import pytest

from sparkkeras import to_data_frame
from sparkkeras.data.reader import Reader
from sparkkeras.data.schema import Schema
from sparkkeras.sources.source import as_source
from tests.sources.conformance import PARTS, DatasetConformance, numbered_block


def remote_frame_repartitioned(spark, block):
    return as_source(to_data_frame(spark, block.x, block.y), Reader(Schema())).dataset(PARTS)


def remote_arrays(spark, block):
    return as_source(block.x, Reader(Schema()), block.y).dataset(PARTS)


@pytest.mark.soak  # training, with missing files and large values, depends on all of it
class TestDatasets(DatasetConformance):
    @pytest.fixture(params=[remote_frame_repartitioned, remote_arrays], ids=lambda make: make.__name__)
    def dataset(self, request, spark):
        with request.param(spark, numbered_block()) as dataset:
            yield dataset

    def test_tasks_cannot_reach_the_driver(self, dataset):
        with dataset.stored() as stored:
            assert not stored.is_driver_here
