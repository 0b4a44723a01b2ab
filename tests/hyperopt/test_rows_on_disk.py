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
        for index in range(len(batches)):
            np.testing.assert_allclose(batches[index][0].sum(axis=1), batches[index][1])
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
        model.compile("sgd", "mse")
        return model.fit(**arguments, epochs=2, verbose=0).history

    given = {"batch_size": 8, "validation_split": 0.3, "shuffle": False}
    on_disk = history(RowsOnDisk({}, {TRAINING: block}).fit_arguments(given))
    in_memory = history({"x": X, "y": Y, "sample_weight": block.sample_weight, **given})
    assert on_disk.keys() == in_memory.keys()
    for name, values in in_memory.items():
        np.testing.assert_allclose(on_disk[name], values, rtol=1e-5)


def test_rows_to_validate_on(block):
    data = RowsOnDisk({"x": X, "y": Y}, {VALIDATION: block})
    arguments = data.fit_arguments({"x": X, "y": Y, "batch_size": 8, "validation_batch_size": 20})
    assert arguments["x"] is X
    assert arguments["batch_size"] == 8
    assert len(arguments["validation_data"]) == 1


def test_what_build_returns_for_fit_counts_as_on_arrays(block):
    data, own = RowsOnDisk({}, {TRAINING: block, VALIDATION: block}), (X[:2], Y[:2])
    assert data.fit_arguments({"validation_data": own})["validation_data"] is own
    with pytest.raises(SearchDefinitionError, match="returned sample_weight, but the rows are in files.*as a column"):
        data.fit_arguments({"sample_weight": np.ones(20)})


def test_a_share_that_leaves_no_rows_to_train_on_is_rejected(block):
    with pytest.raises(SearchDefinitionError, match=r"validation_split=0.99 of 20 rows leaves none to train on"):
        RowsOnDisk({}, {TRAINING: block}).fit_arguments({"validation_split": 0.99})
