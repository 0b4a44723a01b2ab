"""Predictions of members for rows on the cluster, with the in-memory implementation of datasets. No Spark."""

from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import keras
import numpy as np
import pytest

from sparkkeras import DataError
from sparkkeras.data.block import Block, from_arrays
from sparkkeras.data.local_dataset import LocalDataset
from sparkkeras.ensembles.member_predictions import member_predictions
from sparkkeras.modeling.custom_code import ByValue
from sparkkeras.worker.batches import BatchOptions

A, B = np.random.default_rng(0).normal(size=(2, 30, 3)).astype(np.float32)
Y, WEIGHTS = np.arange(30), np.linspace(0, 1, 30, dtype=np.float32)


@dataclass
class Source:
    """Rows of which this process has a block, or the workers some partitions."""

    block: Block | None
    partitions: tuple = ()

    @contextmanager
    def dataset(self):
        yield LocalDataset(self.partitions)


def both(x, *cuts):
    """The same rows in this process, and in partitions on the cluster, one of them without rows."""
    block = from_arrays(x, Y, WEIGHTS, expected_x=len(x) if isinstance(x, tuple) else None)
    starts = (0, *cuts, 30)
    parts = (block[start:stop] for start, stop in pairwise(starts))
    return Source(block), Source(None, (None, *parts))


def untraced(model):
    """The same model, which predicts too few batches here to be traced."""
    model.run_eagerly = True
    return model


def one_input(seed):
    keras.utils.set_random_seed(seed)
    return untraced(keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "softmax")]))


def two_inputs(names, order=(0, 1), as_dict=False):
    """The first one minus twice the second one, whatever their names and order are."""
    inputs = [keras.Input((3,), name=name) for name in names]
    taken = [inputs[index] for index in order]
    outputs = keras.layers.Lambda(lambda x: x[0] - 2 * x[1], output_shape=(3,))(inputs)
    return untraced(keras.Model({tensor.name: tensor for tensor in taken} if as_dict else taken, outputs))


def found(models, source, **options):
    with member_predictions(models, source, BatchOptions(8, **options), {}) as (rows, predictions):
        return rows, list(predictions)


def test_rows_on_the_cluster_have_the_predictions_of_arrays():
    models = [one_input(seed) for seed in range(3)]  # workers load the same archive for all
    here, there = both(A, 16)
    (mine, predictions), (other, distributed) = found(models, here), found(models, there)
    assert mine.spec == other.spec
    np.testing.assert_array_equal(other.y, Y)
    np.testing.assert_array_equal(other.sample_weight, WEIGHTS)
    for model, one, two in zip(models, predictions, distributed, strict=True):
        np.testing.assert_allclose(one, model(A), rtol=1e-6)
        np.testing.assert_array_equal(one, two)  # both partitions begin with a whole batch


@pytest.mark.parametrize("x", [(A, B), {"b": B, "a": A}], ids=["tuple", "dict in another order"])
def test_each_member_gets_its_inputs(x):
    models = [
        two_inputs("ab"),
        two_inputs("ab", order=(1, 0)),
        two_inputs("ab", as_dict=True),
        two_inputs(("left", "right"), as_dict=True),  # matched by position
    ]
    for source in both(x, 10):
        for predictions in found(models, source)[1]:
            np.testing.assert_allclose(predictions, A - 2 * B, rtol=1e-5)


def test_the_transform_gets_features_and_labels():
    def odd_doubled(x, y):
        return 2 * x[y % 2 == 1], y[y % 2 == 1]

    block, model = from_arrays(A, Y, None), one_input(0)
    for source in (Source(block), Source(None, (block[:13], block[13:]))):
        rows, (predictions,) = found([model], source, transform=ByValue.dump(odd_doubled, "transform"))
        np.testing.assert_array_equal(rows.y, Y[1::2])
        np.testing.assert_allclose(predictions, model(2 * A[1::2]), rtol=1e-5)


def test_data_without_rows_is_reported():
    for source in (Source(from_arrays(A[:0], Y[:0], None)), Source(None, (None, None))):
        with pytest.raises(DataError, match="x_val has no rows"):
            found([one_input(0)], source)
