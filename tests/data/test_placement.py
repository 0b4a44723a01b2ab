"""Which rows each partition trains on, and which it validates on."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras.src.trainers.data_adapters.array_slicing import train_validation_split

from sparkkeras.data.placement import RowPlacement, TrainValidationSplit, even_slices
from sparkkeras.errors import ConfigurationError


def split(sizes, validation_split):
    return TrainValidationSplit.split(sizes, validation_split)


@pytest.mark.parametrize(
    ("sizes", "validation_split", "train", "validate"),
    [
        ((2, 5, 8), 0.2, (2, 4, 6), (0, 1, 2)),  # quotas 0.4, 1, 1.6: the largest remainder is the last one's
        ((1, 3), 0.9, (1, 1), (0, 2)),  # 4 rows wanted, but each partition keeps one
        ((3, 0, 5), 0.0, (3, 0, 5), (0, 0, 0)),
    ],
)
def test_rows_of_each_partition_for_training_and_validation(sizes, validation_split, train, validate):
    shares = split(sizes, validation_split)
    assert shares.train == train
    assert shares.validate == validate
    assert shares.validation_spans == tuple((size - held, size) for size, held in zip(sizes, validate, strict=True))


@settings(deadline=None, max_examples=400)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=8).filter(any), st.floats(0.001, 0.999))
def test_rows_are_apportioned_by_largest_remainders_and_each_partition_keeps_one(sizes, validation_split):
    total, filled = sum(sizes), sum(size > 0 for size in sizes)
    wanted = total - int(total * (1 - validation_split))
    if 0 < wanted < total:
        _, (held_by_keras,) = train_validation_split((np.zeros((total, 1)),), validation_split)
        assert len(held_by_keras) == wanted
    if min(wanted, total - filled) == 0:
        with pytest.raises(ConfigurationError):
            split(sizes, validation_split)
        return
    shares = split(sizes, validation_split)
    assert sum(shares.validate) == min(wanted, total - filled)
    assert [train + held for train, held in zip(shares.train, shares.validate, strict=True)] == sizes
    assert all((train > 0) == (size > 0) for train, size in zip(shares.train, sizes, strict=True))
    assert all(held >= 0 for held in shares.validate)
    quotas = [wanted * size / total for size in sizes]
    if any(int(quota) + 1 > size - 1 for quota, size in zip(quotas, sizes, strict=True) if size):
        return  # a partition may have only one training row left
    extra = [held - int(quota) for held, quota in zip(shares.validate, quotas, strict=True)]
    assert set(extra) <= {0, 1}
    remainders = {0: [0.0], 1: [1.0]}
    for one, quota in zip(extra, quotas, strict=True):
        remainders[one].append(quota - int(quota))
    assert max(remainders[0]) <= min(remainders[1])


@pytest.mark.parametrize(("sizes", "words"), [((1, 1, 1), "3 rows in 3 partitions"), ((), "0 rows in 0 partitions")])
def test_too_few_rows_are_reported(sizes, words):
    with pytest.raises(ConfigurationError, match=f"validation_split=0.9 of {words}.*validation_data"):
        split(sizes, 0.9)


@settings(deadline=None, max_examples=200)
@given(st.integers(2, 300), st.integers(1, 8), st.floats(0, 0.6), st.booleans())
def test_the_last_rows_of_arrays_are_for_validation_and_the_others_are_dealt(rows, parts, validation_split, shuffle):
    try:
        split = TrainValidationSplit.split([part.stop - part.start for part in even_slices(rows, parts)], validation_split)
    except ConfigurationError:
        return
    dealt = RowPlacement(shuffle, 3, validation_split).deal(rows, parts)
    train = [each[:count] for each, count in zip(dealt, split.train, strict=True)]
    held_out = [each[count:] for each, count in zip(dealt, split.train, strict=True)]
    assert np.concatenate(held_out).tolist() == list(range(sum(split.train), rows))
    assert sorted(np.concatenate(train)) == list(range(sum(split.train)))
    assert all((np.diff(each) > 0).all() for each in dealt)
    if not shuffle:
        assert np.concatenate(train).tolist() == list(range(sum(split.train)))


def test_arrays_are_dealt_by_the_seed():
    dealt = [[each.tolist() for each in RowPlacement(True, seed).deal(1000, 4)] for seed in (1, 1, 2)]
    assert dealt[0] == dealt[1] != dealt[2]
    means = [np.mean(each) for each in dealt[0]]
    assert 450 < min(means) < max(means) < 550
