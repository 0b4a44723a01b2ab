"""The data of a search, in one process; tests/integration/test_search.py has it from everywhere else."""

import numpy as np
import pytest

from sparkkeras.errors import DataError
from sparkkeras.hyperopt.data import fit_data

X, Y = np.zeros((4, 2), np.float32), np.ones(4)


def test_rows_to_validate_on_are_given_once():
    inside, beside = {"x": X, "y": Y, "validation_data": (X[:1], Y[:1])}, (X[:2], Y[:2])
    assert len(fit_data(inside)["validation_data"][0]) == 1
    assert len(fit_data({"x": X, "y": Y}, beside)["validation_data"][0]) == 2
    with pytest.raises(DataError, match="validation_data is in the dict of data and beside it"):
        fit_data(inside, beside)
