"""The data of a search, without Spark; tests/integration/test_search.py tests RDDs and DataFrames."""

import numpy as np
import pytest

from sparkkeras.errors import ConfigurationError, DataError
from sparkkeras.hyperopt.data import fit_data, reader_of

X, Y = np.zeros((4, 2), np.float32), np.ones(4)


def test_validation_data_may_be_given_only_once():
    in_dict, separate = {"x": X, "y": Y, "validation_data": (X[:1], Y[:1])}, (X[:2], Y[:2])
    assert len(fit_data(in_dict)["validation_data"][0]) == 1
    assert len(fit_data({"x": X, "y": Y}, separate)["validation_data"][0]) == 2
    with pytest.raises(DataError, match="validation_data is given both in the dict of data and as an argument"):
        fit_data(in_dict, separate)


def test_functions_that_read_batches_are_not_for_searches():
    with pytest.raises(ConfigurationError, match=r"without arguments \(missing .* 'worker'\).*SparkModel.fit"):
        reader_of(lambda worker, num_workers: None)
    assert reader_of(lambda: (X, Y)) is not None
