"""Sums, broadcasts and barriers, without ranks: values of all, ranks that are out of step, ranks that end."""

import ml_dtypes
import numpy as np
import pytest

from sparkkeras.runner.exchanges import ALL_REDUCE, BARRIER, Exchanges, Kind, OutOfStepError, total

SUM = Kind(ALL_REDUCE, "float32", (2,))


def packed(*values):
    return np.array(values, np.float32).tobytes()


def test_a_repeated_value_counts_once():
    exchanges = Exchanges(2)
    for _ in range(2):
        exchanges.give(0, 1, SUM, packed(1, 2))
    assert exchanges.take(1) is None
    for _ in range(2):
        exchanges.give(1, 1, SUM, packed(10, 20))
    assert exchanges.take(1) == packed(11, 22)


def test_results_are_dropped_when_all_ranks_have_them():
    exchanges = Exchanges(2)
    for number in (1, 2, 3):
        for rank in (0, 1):
            exchanges.give(rank, number, Kind(BARRIER), b"")
    assert list(exchanges._exchanges) == [3]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (Kind(BARRIER), r"rank 0 called all_reduce\(.*rank 1 called barrier\(\)"),
        (Kind(ALL_REDUCE, "float32", (3,)), r"rank 1 called .*\(3,\)"),
    ],
)
def test_ranks_out_of_step_are_named(other, message):
    exchanges = Exchanges(2)
    exchanges.give(0, 1, SUM, packed(1, 2))
    exchanges.give(1, 1, other, packed(1, 2))
    with pytest.raises(OutOfStepError, match=message):
        exchanges.take(1)


def test_a_rank_may_end_when_it_has_given_its_last_value():
    exchanges = Exchanges(2)
    exchanges.give(0, 1, SUM, packed(1, 2))
    exchanges.give(1, 1, SUM, packed(1, 2))
    exchanges.end(1)
    assert exchanges.take(1) == packed(2, 4)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_small_floats_are_summed_in_four_bytes(dtype):
    ones = np.ones(1, dtype)
    assert total([ones * 256] + [ones / 8] * 8) == 257  # each eighth alone would be lost


@pytest.mark.parametrize("dtype", [np.int8, ml_dtypes.bfloat16])
def test_sums_keep_their_dtype(dtype):
    assert total([np.ones(1, dtype)] * 3).dtype == dtype
