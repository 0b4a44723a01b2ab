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


def test_the_vector_has_the_floating_arrays_in_order_and_the_counters_stand_apart():
    arrays = [np.ones(2, np.float32), np.array(7, np.int64), np.full(3, 2, np.float32)]
    packed = Layout.of(arrays).pack(arrays)
    assert packed.vector.dtype == np.float32
    assert packed.vector.tolist() == [1, 1, 2, 2, 2]
    assert [each.tolist() for each in packed.integer_variables] == [7]
    assert packed.integer_variables[0].dtype == np.int64


def test_the_vector_is_as_wide_as_the_widest_array():
    narrow = [np.ones(1, np.float16), np.ones(1, ml_dtypes.bfloat16)]
    assert Layout.of(narrow).pack(narrow).vector.dtype == np.float32
    wide = [*narrow, np.ones(1, np.float64)]
    assert Layout.of(wide).pack(wide).vector.dtype == np.float64


def test_packing_copies():
    arrays = [np.ones(2, np.float32), np.array([5])]
    packed = Layout.of(arrays).pack(arrays)
    arrays[0][:] = 9
    arrays[1][:] = 9
    assert packed.vector.tolist() == [1, 1]
    assert packed.integer_variables[0].tolist() == [5]


def test_unpacking_a_vector_that_is_too_short_raises_an_error():
    layout = Layout.of([np.ones((2, 2), np.float32)])
    with pytest.raises(ValueError):
        layout.unpack(flat(1, 2, 3))


def test_nbytes_counts_vector_and_counters():
    assert flat(1, 2, integer_variables=[np.int64(3), np.int32(1)]).nbytes == 8 + 8 + 4


def test_floating_dtypes():
    for name in ("float16", "float64", "bfloat16", "float8_e4m3fn"):
        assert is_floating(np.dtype(getattr(ml_dtypes, name, name)))
        assert is_floating(name)
    assert not any(map(is_floating, ("int32", "bool", "complex64", "U3", "O")))


# The mean


def test_the_mean_of_three_by_rows():
    mean = average(iter([(flat(8, 0), 10), (flat(0, 4), 20), (flat(-4, 8), 10)]))
    assert mean.vector.tolist() == [1, 4]  # (80 + 0 - 40) / 40, (0 + 80 + 80) / 40
    assert mean.vector.dtype == np.float32


def test_a_replica_with_weight_zero_does_not_count():
    assert average([(flat(1, 2), 4), (flat(100, 100), 0)]).vector.tolist() == [1, 2]
    assert average([(flat(100, 100), 0), (flat(1, 2), 4)]).vector.tolist() == [1, 2]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("weights", [(7,), (60_000,), (3, 5), (100, 99, 99, 1)])
def test_the_mean_of_equal_replicas_is_exact(dtype, weights):
    replica = np.random.default_rng(0).normal(size=2000).astype(dtype)
    assert same(average([(Flat(replica), weight) for weight in weights]).vector, replica)


def test_float64_remains_float64():
    mean = average([(flat(1 / 3, dtype=np.float64), 1), (flat(2 / 3, dtype=np.float64), 1)])
    assert mean.vector.dtype == np.float64
    assert mean.vector[0] == pytest.approx(0.5, abs=1e-16)


def test_sums_are_computed_in_float64():
    # In float32, 2**24 + 1 is 2**24 again.
    replicas = [(flat(2.0**24), 1), (flat(1.0), 1), (flat(1.0), 1)]
    assert average(replicas).vector.tolist() == [(2.0**24 + 2) / 3]


def test_of_counters_the_largest_is_taken_one_by_one():
    mean = average([(flat(1, integer_variables=[3, [1, 9]]), 100), (flat(1, integer_variables=[5, [4, 2]]), 1)])
    assert mean.integer_variables[0].tolist() == 5
    assert mean.integer_variables[1].tolist() == [4, 9]


def test_averaging_does_not_change_the_replicas():
    replicas = [(flat(1, 2, integer_variables=[1]), 1), (flat(3, 4, integer_variables=[2]), 1)]
    average(replicas)
    assert replicas[0][0].vector.tolist() == [1, 2]
    assert replicas[0][0].integer_variables[0] == 1


@pytest.mark.parametrize("replicas", [[], [(flat(1), 0)]])
def test_the_mean_of_no_replicas_raises_an_error(replicas):
    with pytest.raises(ValueError, match="at least one replica"):
        average(replicas)
