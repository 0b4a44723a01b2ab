"""Arrays as one flat vector, and means of such vectors, against numbers computed by hand."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkkeras.weights import Flat, Layout, average, is_floating


def flat(*values, integer_variables=(), dtype=np.float32):
    return Flat(np.array(values, dtype), tuple(np.array(each) for each in integer_variables))


def same(one, other):
    return one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 4), max_size=3).map(tuple),
            st.sampled_from(["float32", "float64", "float16", "bfloat16", "int64", "int32", "bool"]),
        ),
        max_size=6,
    ),
    st.integers(0, 99),
)
def test_any_list_of_arrays_survives_the_round_trip(kinds, seed):
    draw = np.random.default_rng(seed)
    arrays = [draw.normal(0, 3, shape).astype(np.dtype(name)).T for shape, name in kinds]  # not contiguous
    layout = Layout.of(arrays)
    packed = layout.pack(arrays)
    assert packed.vector.ndim == 1
    assert packed.vector.size == sum(array.size for array in arrays if is_floating(array.dtype))
    assert all(same(before, after) for before, after in zip(arrays, layout.unpack(packed), strict=True))


def test_floating_arrays_become_one_vector_in_their_order_and_counters_stand_apart():
    arrays = [np.ones(2, np.float32), np.array(7, np.int64), np.full(3, 2, np.float16)]
    packed = Layout.of(arrays).pack(arrays)
    for array in arrays:
        array[...] = 9  # of which packing has made a copy
    assert (packed.vector.dtype, packed.vector.tolist()) == (np.float32, [1, 1, 2, 2, 2])
    assert [(each.dtype, each.tolist()) for each in packed.integer_variables] == [(np.int64, 7)]
    assert packed.nbytes == 5 * 4 + 8
    with pytest.raises(ValueError):
        Layout.of(arrays[:1]).unpack(flat(1, 2, 3))


def test_the_vector_is_as_wide_as_the_widest_array():
    narrow = [np.ones(1, np.float16), np.ones(1, ml_dtypes.bfloat16)]
    for arrays, dtype in ((narrow, np.float32), ([*narrow, np.ones(1, np.float64)], np.float64)):
        assert Layout.of(arrays).pack(arrays).vector.dtype == dtype


def test_floating_dtypes():
    for name in ("float16", "float64", "bfloat16", "float8_e4m3fn"):
        assert is_floating(np.dtype(getattr(ml_dtypes, name, name)))
        assert is_floating(name)
    assert not any(map(is_floating, ("int32", "bool", "complex64", "U3", "O")))


# The mean


@pytest.mark.parametrize(
    ("replicas", "mean"),
    [
        ([((8, 0), 10), ((0, 4), 20), ((-4, 8), 10)], [1, 4]),  # (80 + 0 - 40) / 40, (0 + 80 + 80) / 40
        ([((1, 2), 4), ((100, 100), 0)], [1, 2]),
        ([((100, 100), 0), ((1, 2), 4)], [1, 2]),
        ([((2.0**24,), 1), ((1.0,), 1), ((1.0,), 1)], [(2.0**24 + 2) / 3]),  # in float32, 2**24 + 1 is 2**24 again
    ],
)
def test_the_mean_is_weighted_and_computed_in_float64(replicas, mean):
    given = [(flat(*values), weight) for values, weight in replicas]
    found = average(iter(given))
    assert (found.vector.dtype, found.vector.tolist()) == (np.float32, mean)
    assert [replica.vector.tolist() for replica, _ in given] == [list(values) for values, _ in replicas]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("weights", [(7,), (60_000,), (3, 5), (100, 99, 99, 1)])
def test_the_mean_of_equal_replicas_is_exact(dtype, weights):
    replica = np.random.default_rng(0).normal(size=2000).astype(dtype)
    assert same(average([(Flat(replica), weight) for weight in weights]).vector, replica)


def test_float64_remains_float64():
    mean = average([(flat(0.1, dtype=np.float64), 1), (flat(0.2, dtype=np.float64), 1)])
    assert mean.vector.dtype == np.float64
    assert mean.vector[0] == pytest.approx(0.15, rel=1e-15, abs=0)


def test_of_counters_the_largest_is_taken_one_by_one():
    replicas = [(flat(1, integer_variables=[3, [1, 9]]), 100), (flat(1, integer_variables=[5, [4, 2]]), 1)]
    assert [each.tolist() for each in average(replicas).integer_variables] == [5, [4, 9]]
    assert [each.tolist() for each in replicas[0][0].integer_variables] == [3, [1, 9]]


@pytest.mark.parametrize("replicas", [[], [(flat(1), 0)]])
def test_the_mean_of_no_replicas_raises_an_error(replicas):
    with pytest.raises(ValueError, match="at least one replica"):
        average(replicas)
