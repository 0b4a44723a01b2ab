"""Batches that trials read from the files of their machine; tests/integration/test_search.py tests searches on these."""

import keras
import numpy as np
import pytest

from sparkkeras.data import files
from sparkkeras.data.block import from_arrays
from sparkkeras.hyperopt.reporting import SearchDefinitionError
from sparkkeras.hyperopt.rows_on_disk import TRAINING, VALIDATION, RowBatches, RowsOnDisk

X = np.arange(40, dtype=np.float64).reshape(20, 2)
Y = X.sum(axis=1)


@pytest.fixture
def block(tmp_path):
    weights = np.where(np.arange(20) < 10, 1.0, 2.0)
    return files.write([from_arrays(X, Y, weights)], 0, tmp_path).open()


def rows_of(batches):
    return np.concatenate([batches[index][0] for index in range(len(batches))])


def test_shuffled_batches_have_each_row_once_in_another_order_in_each_epoch(block):
    batches, same = RowBatches(block, 8, seed=3), RowBatches(block, 8, seed=3)
    epochs = []
    for _ in range(2):
        rows = rows_of(batches)
        np.testing.assert_array_equal(rows, rows_of(same))
        np.testing.assert_array_equal(np.sort(rows, axis=0), X)
        for x, y, _ in map(batches.__getitem__, range(len(batches))):
            np.testing.assert_allclose(x.sum(axis=1), y)
        epochs.append(rows)
        batches.on_epoch_end()
        same.on_epoch_end()
    assert not np.array_equal(*epochs)
    assert not np.array_equal(epochs[0], X)


@pytest.mark.core
def test_fit_trains_as_on_arrays(block):
    def history(arguments):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, "relu"), keras.layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=True)
        return model.fit(**arguments, epochs=2, verbose=0).history

    given = {"batch_size": 8, "validation_split": 0.3, "shuffle": False}
    on_disk = history(RowsOnDisk({}, {TRAINING: block}).fit_arguments(given))
    in_memory = history({"x": X, "y": Y, "sample_weight": block.sample_weight, **given})
    assert on_disk.keys() == in_memory.keys()
    for name, values in in_memory.items():
        np.testing.assert_allclose(on_disk[name], values, rtol=1e-5)


def test_arguments_of_fit_count_as_on_arrays(block):
    sent, own = {"x": X, "y": Y, "batch_size": 8}, (X[:2], Y[:2])
    given = RowsOnDisk(sent, {VALIDATION: block}).fit_arguments({**sent, "validation_batch_size": 20})
    assert given["x"] is X
    assert (given["batch_size"], len(given["validation_data"])) == (8, 1)
    data = RowsOnDisk({}, {TRAINING: block, VALIDATION: block})
    assert data.fit_arguments({"validation_data": own})["validation_data"] is own
    with pytest.raises(SearchDefinitionError, match="returned sample_weight"):
        data.fit_arguments({"sample_weight": np.ones(20)})
    with pytest.raises(SearchDefinitionError, match="validation_split=0.99"):
        data.fit_arguments({"validation_split": 0.99})
