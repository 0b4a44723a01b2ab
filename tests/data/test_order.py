"""The order of rows: each row once, in an order that depends only on the seed, with bounded memory."""

import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkkeras.data.order import RUN_BYTES, RowOrder

orders = st.fixed_dictionaries(
    {
        "rows": st.integers(0, 600),
        "row_bytes": st.sampled_from([0, 1, 3, 8, 40]),
        "batch_size": st.integers(1, 50),
        "seed": st.none() | st.tuples(st.integers(0, 99), st.integers(0, 3)),
        # As little as one batch per window: most partitions here have several windows.
        "shuffle_bytes": st.sampled_from([1, 50, 200, 1000, 4000, 100_000]),
    }
)


def numbers(order, first=0, last=None, max_bytes=1 << 20):
    """The row indices of the batches in [first, last)."""
    pieces = order.pieces(first, order.batches if last is None else last, max_bytes)
    rows = np.arange(order.rows)
    return np.concatenate([np.zeros(0, int), *(rows[piece] for piece in pieces)])


@settings(deadline=None, max_examples=200)
@given(orders, st.integers(1, 5000), st.data())
def test_every_row_comes_once_in_batches_of_bounded_size_that_may_be_split(arguments, max_bytes, data):
    order, batch = RowOrder(**arguments), arguments["batch_size"]
    pieces = [np.arange(order.rows)[piece] for piece in order.pieces(0, order.batches, max_bytes)]
    most = max(batch, max_bytes // max(1, order.row_bytes))
    assert all(len(piece) % batch == 0 for piece in pieces[:-1])
    assert all(0 < len(piece) <= most for piece in pieces)
    whole = numbers(RowOrder(**arguments))
    assert sorted(whole) == list(range(order.rows))
    assert np.array_equal(np.concatenate([whole[:0], *pieces]), whole)
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, order.batches), max_size=4))), order.batches]
    for first, last in data.draw(st.permutations(list(itertools.pairwise(cuts)))):
        asked = order if data.draw(st.booleans()) else RowOrder(**arguments)
        answer = numbers(asked, first, last, data.draw(st.integers(1, 5000)))
        assert np.array_equal(answer, whole[first * batch : last * batch])


SHAPES = {"as a whole": {"rows": 500, "row_bytes": 4}, "in windows": {"rows": 500, "row_bytes": 4, "shuffle_bytes": 400}}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_rows_are_shuffled_well_by_the_seed(shape):
    """A row's position after shuffling is uncorrelated with its position before."""
    seeds = [(7, 1, 2), (7, 1, 2), (7, 1, 3), (7, 2, 2), (8, 1, 2), (7, 2, 1)]
    one, same, *others = (numbers(RowOrder(**shape, batch_size=10, seed=seed)).tolist() for seed in seeds)
    assert one == same
    assert all(one != other for other in others)
    assert abs(np.corrcoef(np.arange(500), one)[0, 1]) < 0.3
    assert np.count_nonzero(np.diff(one) == 1) < 25


def test_without_a_seed_rows_keep_their_order():
    order = RowOrder(rows=23, row_bytes=4, batch_size=5, seed=None, shuffle_bytes=8)
    assert list(order.pieces(0, 5, 40)) == [slice(0, 10), slice(10, 20), slice(20, 23)]
    assert list(order.pieces(2, 4, 1)) == [slice(10, 15), slice(15, 20)]
    assert list(order.pieces(4, 9, 1000)) == [slice(20, 23)]


def large(rows=100_000, row_bytes=1024, window=1000):
    """A partition much larger than the shuffle window; a run has 62 rows."""
    return RowOrder(rows, row_bytes, batch_size=10, seed=(3,), shuffle_bytes=window * row_bytes)


def test_a_window_of_a_large_partition_is_read_in_runs_from_all_over_it_and_shuffled_unlike_others():
    window, other = (numbers(large(), first, first + 100) for first in (0, 100))
    breaks = np.count_nonzero(np.diff(np.sort(window)) != 1)
    assert breaks <= 1000 // 62 + 1
    assert window.min() < 30_000
    assert window.max() > 70_000
    assert np.count_nonzero(np.abs(np.diff(window)) <= 1) < 50
    assert np.count_nonzero(np.argsort(np.argsort(window)) == np.argsort(np.argsort(other))) < 20


def test_the_size_of_a_run_is_bounded():
    """With wide rows, a window still has many runs."""
    window = np.sort(numbers(RowOrder(20_000, RUN_BYTES // 2, 10, (3,), shuffle_bytes=RUN_BYTES * 500), 0, 100))
    breaks = np.count_nonzero(np.diff(window) != 1)
    assert breaks > 300


def test_memory_does_not_grow_with_the_partition():
    order = RowOrder(20_000_000, 4096, 32, (1,))
    tracemalloc.start()
    try:
        pieces = [piece.size for piece in order.pieces(1000, 1064, 4 * 1024 * 1024)]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert pieces == [1024, 1024]
    assert peak < 16 * 1024 * 1024  # a permutation of all rows would take 160 MB
