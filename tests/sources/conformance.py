"""The conformance suite of datasets: the behaviour that training strategies rely on, for every source of rows."""

from dataclasses import dataclass

import numpy as np

from sparkkeras.data.block import from_arrays
from sparkkeras.data.dataset import all_labels, common_spec

ROWS, PARTS = 23, 3
LARGE = 100_000
"""The length of a vector that does not travel with a task; see `sparkkeras.data.block.INLINE_BYTES`."""


def numbered_block():
    """Rows whose labels are their indices."""
    x = np.random.default_rng(0).random((ROWS, 4)).astype(np.float32)
    return from_arrays(x, np.arange(ROWS), None)


@dataclass(frozen=True)
class Labels:
    """Yields the labels of a partition, shifted by a shared number."""

    shift: object

    def __call__(self, context, blocks):
        found = [label for block in blocks for label in block.y.tolist()]
        if found:
            yield context.worker, [label + self.shift.value for label in found]


@dataclass(frozen=True)
class Noise:
    """Yields a vector drawn from the labels of a partition."""

    def __call__(self, context, blocks):
        labels = [label for block in blocks for label in block.y.tolist()]
        yield np.random.default_rng(labels).normal(size=10).astype(np.float32)


@dataclass(frozen=True)
class Scaled:
    """Yields a shared vector, times the number of the partition."""

    vector: object

    def __call__(self, context, blocks):
        for _ in blocks:
            pass
        yield self.vector.value * context.worker


@dataclass(frozen=True)
class Sum:
    """Adds vectors in three pieces and in their order, since the order affects rounding."""

    def __call__(self, results):
        total = np.zeros_like(results[0])
        for result in results:
            total += result
        return total

    def split(self, result, max_bytes):
        return np.array_split(result, 3)

    def join(self, pieces):
        return np.concatenate(pieces)


class DatasetConformance:
    """Tests of the fixture ``dataset``: `numbered_block` in `PARTS` partitions."""

    def test_every_row_is_processed_once_and_rows_keep_their_order(self, dataset, request):
        """Also within the partitions to which they are redistributed: otherwise, it would differ each time."""
        with dataset.share(100) as shift:
            results = dataset.run(Labels(shift)).collect()
        assert [worker for worker, _ in results] == list(range(PARTS))
        found = [label for _, labels in results for label in labels]
        assert sorted(found) == list(range(100, 100 + ROWS))
        assert all(labels == sorted(labels) for _, labels in results)
        assert found == sorted(found) or "repartitioned" in request.node.callspec.id

    def test_stored_rows_are_read_again_and_merged_on_the_workers(self, dataset, request):
        with dataset.stored() as stored, stored.share(0) as shift:
            first = stored.run(Labels(shift)).collect()
            assert stored.run(Labels(shift)).collect() == first
            sizes = [handle.rows for handle in stored.handles]
            assert sizes == [len(labels) for _, labels in first]
            assert (sum(sizes), stored.num_partitions) == (ROWS, PARTS)
            assert max(sizes) - min(sizes) <= 2
            assert [leaf.shape for leaf in common_spec(stored.handles).leaves] == [(4,), ()]
            assert [(found.low, found.high, found.all_integers) for found in all_labels(stored.handles)] == [
                (0, ROWS - 1, True)
            ]
            if "arrays_on_disk" not in request.node.callspec.id:  # whose files are the source
                again = stored.run(Labels(shift)).from_source([0, 2])
                assert {worker: list(found) for worker, found in again.items()} == {part: [first[part]] for part in (0, 2)}
            noise = stored.run(Noise())
            (merged,) = noise.reduce(Sum())
            np.testing.assert_array_equal(merged, Sum()(noise.collect()))  # to the bit

    def test_large_values_and_results_are_exact(self, dataset):
        vector = np.random.default_rng(0).normal(size=LARGE).astype(np.float32)
        with dataset.share(vector) as shared:
            results = dataset.run(Scaled(shared)).collect()
        np.testing.assert_array_equal(results, [vector * part for part in range(PARTS)])
        assert all(result.flags.writeable for result in results)
