"""States of parts of the rows are merged to the state of all, in whatever pieces."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from sparkkeras.preprocessing.states import MeanVariance, MergeStates, Quantiles, Tokens

VALUES = arrays(np.float32, array_shapes(min_dims=2, max_dims=3, max_side=8), elements=st.floats(-1e3, 1e3, width=32))


@given(VALUES, st.integers(1, 7))
def test_moments_of_parts_are_those_of_all(values, cut):
    whole = MeanVariance.of(values, [-1])
    if cut >= len(values):
        return
    merged = MeanVariance.of(values[:cut], [-1]).merge(MeanVariance.of(values[cut:], [-1]))
    reduced = tuple(range(values.ndim - 1))
    assert merged.moments.rows == whole.moments.rows
    np.testing.assert_allclose(merged.mean, values.astype(float).mean(reduced), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(merged.variance, values.astype(float).var(reduced), rtol=1e-6, atol=1e-6)


def test_quantiles_are_within_their_error():
    values = np.random.default_rng(0).exponential(size=50_000)
    epsilon = 0.01
    cuts = [0, 150, 349, 648, 20_000]  # parts of other sizes, of disjoint ranges
    parts = [Quantiles.of(part, epsilon) for part in np.split(np.sort(values), cuts[1:])]
    merged = parts[0]
    for part in parts[1:]:
        merged = merged.merge(part)
    ranks = np.searchsorted(np.sort(values), merged.values) / len(values)
    shares = merged.weights.cumsum() / merged.weights.sum()
    assert np.abs(ranks - shares).max() <= 2 * epsilon


WORDS = st.lists(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=4), min_size=1, max_size=30)


@given(WORDS, st.integers(1, 5), st.sampled_from([None, 3]))
def test_tokens_in_pieces_are_those_of_all(rows, parts, limit):
    width = max(map(len, rows))
    table = np.array([row + ["a"] * (width - len(row)) for row in rows], object)
    whole = Tokens.of(table, True, limit).reduced()
    halves = [Tokens.of(half, True, limit) for half in np.array_split(table, 2) if len(half)]
    merging = MergeStates(parts)
    pieces = [merging(piece) for piece in zip(*(merging.split([half], 1) for half in halves), strict=True)]
    (joined,) = merging.join(pieces)
    assert joined == whole
    assert list(joined.counts) == list(whole.counts)
    assert whole.rows == len(rows)
    expected = sorted(set(table.ravel()), key=lambda token: ((table == token).sum(), token), reverse=True)[:limit]
    assert list(whole.counts) == expected
    assert all(whole.rows_with[token] == (table == token).any(1).sum() for token in expected)
