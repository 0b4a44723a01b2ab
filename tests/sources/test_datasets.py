"""The conformance suite of datasets: what strategies rely on, whichever source the rows have. A new one adds a line."""

from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest

from sparkkeras.data.block import from_arrays
from sparkkeras.data.dataset import all_labels, common_spec
from sparkkeras.data.local import LocalDataset
from sparkkeras.data.schema import Reader, Schema
from sparkkeras.sources.arrays import even_slices, from_block
from sparkkeras.sources.rows import from_rows
from sparkkeras.spark.cluster import Cluster
from sparkkeras.worker import device

ROWS, PARTS = 23, 3


@pytest.fixture(scope="module")
def block():
    generator = np.random.default_rng(0)
    return from_arrays(generator.random((ROWS, 4)).astype(np.float32), np.arange(ROWS), None)


@contextmanager
def local(context, block):
    yield LocalDataset(tuple(block[part] for part in even_slices(block.rows, PARTS)))


@contextmanager
def rows(context, block):
    pairs = [(block.x[row], block.y[row]) for row in range(block.rows)]
    parts = [pairs[part] for part in even_slices(block.rows, PARTS)]
    rdd = context.parallelize(range(PARTS), PARTS).flatMap(lambda part: parts[part])
    yield from_rows(Cluster(context, device.worker_environment), rdd, Reader(Schema()), None)


@contextmanager
def dealt(context, block):
    pairs = [(block.x[row], block.y[row]) for row in range(block.rows)]
    cluster = Cluster(context, device.worker_environment)
    yield from_rows(cluster, context.parallelize(pairs, 2), Reader(Schema()), PARTS)


@contextmanager
def arrays(context, block):
    with from_block(Cluster(context, device.worker_environment), block, PARTS) as dataset:
        yield dataset


DATASETS = [local, rows, dealt, arrays]


@pytest.fixture(params=DATASETS, ids=lambda make: make.__name__)
def dataset(request, sc, block):
    with request.param(sc, block) as dataset:
        yield dataset


@dataclass(frozen=True)
class Labels:
    """Yields the labels of a partition, shifted by a shared number."""

    shift: object

    def __call__(self, context, blocks):
        found = [label for block in blocks for label in block.y.tolist()]
        if found:
            yield context.worker, [label + self.shift.value for label in found]


def total(results):
    return [sum(len(labels) for _, labels in results)]


def test_every_row_is_seen_once(dataset):
    assert dataset.num_partitions == PARTS
    with dataset.share(100) as shift:
        results = dataset.run(Labels(shift)).collect()
    assert [worker for worker, _ in results] == list(range(PARTS))
    assert sorted(label for _, labels in results for label in labels) == list(range(100, 100 + ROWS))


def test_stored_rows_can_be_read_again_and_again(dataset):
    with dataset.stored() as stored, stored.share(0) as shift:
        first = stored.run(Labels(shift)).collect()
        assert stored.run(Labels(shift)).collect() == first
        assert [handle.rows for handle in stored.handles] == [len(labels) for _, labels in first]
        assert sum(handle.rows for handle in stored.handles) == ROWS
        assert max(handle.rows for handle in stored.handles) - min(handle.rows for handle in stored.handles) <= 2
        spec = common_spec(stored.handles)
        assert [leaf.shape for leaf in spec.leaves] == [(4,), ()]
        assert [(found.low, found.high, found.whole) for found in all_labels(stored.handles)] == [(0, ROWS - 1, True)]


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_results_are_reduced_in_groups(dataset, groups):
    with dataset.stored() as stored, stored.share(0) as shift:
        reduced = stored.run(Labels(shift)).reduce(total, groups)
    assert len(reduced) == groups
    assert sum(part[0] for part in reduced) == ROWS


def test_lazy_results_run_when_they_are_asked_for(dataset):
    with dataset.share(0) as shift:
        lazy = dataset.run(Labels(shift)).lazy()
        results = lazy.collect() if hasattr(lazy, "collect") else list(lazy)
    assert sorted(label for _, labels in results for label in labels) == list(range(ROWS))


def test_rows_keep_their_order_unless_they_are_dealt(dataset, request):
    if "dealt" in request.node.name:
        return
    with dataset.share(0) as shift:
        results = dataset.run(Labels(shift)).collect()
    assert [label for _, labels in results for label in labels] == list(range(ROWS))
