"""`to_data_frame`: missing values in arrays become nulls; `from_data_frame` takes a DataFrame."""

from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest

from sparkkeras import from_data_frame, to_data_frame
from sparkkeras.errors import DataError


class FakeSession:
    """A session whose DataFrames are the Arrow tables that they are created from."""

    sparkContext = Mock()
    sparkContext._jsc.sc().isStopped.return_value = False

    def createDataFrame(self, table):
        return table


def column(values):
    return to_data_frame(FakeSession(), values)["features"].combine_chunks()


@pytest.mark.parametrize("missing", [None, pd.NA])
def test_missing_values_become_nulls_and_nan_stays(missing):
    floats = column(np.array([0.5, missing, np.nan], object))
    assert floats.is_null().to_pylist() == [False, True, False]
    whole = column([1, missing, 3])
    assert (whole.to_pylist(), str(whole.type)) == ([1, None, 3], "int64")
    assert column(np.array([True, missing], object)).to_pylist() == [True, None]
    assert column([[1, 2], missing, [3, missing]]).to_pylist() == [[1, 2], None, [3, None]]


@pytest.mark.parametrize("missing", [None, pd.NA, np.nan])
def test_strings_become_columns_of_strings(missing):
    assert column(np.array(["a", missing, "ü"], object)).to_pylist() == ["a", None, "ü"]
    assert column(np.array([["a", missing], [missing, missing]], object)).to_pylist() == [["a", None], None]
    assert column([["a", "b"], ["c", "d"]]).to_pylist() == [["a", "b"], ["c", "d"]]


def test_values_that_are_no_strings_among_strings_are_reported():
    with pytest.raises(DataError, match="row 1 of 'features' .*int"):
        column(np.array(["a", 3], object))
    with pytest.raises(DataError, match="holds strings.*vectors"):
        to_data_frame(FakeSession(), np.array([["a"]]), vectors=True)


def test_only_data_frames_are_converted_to_arrays():
    with pytest.raises(DataError, match="expected a Spark DataFrame"):
        from_data_frame(np.zeros(3))
