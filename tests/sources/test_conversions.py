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
    assert np.isnan(floats[2].as_py())
    whole = column([1, missing, 3])
    assert whole.to_pylist() == [1, None, 3]
    assert str(whole.type) == "int64"
    assert column(np.array([True, missing], object)).to_pylist() == [True, None]


def test_missing_values_in_arrays_and_missing_arrays_become_nulls():
    inside = column(np.array([[1.5, None], [2.5, 3.5]], object))
    assert inside.to_pylist() == [[1.5, None], [2.5, 3.5]]
    assert column([[1, 2], None, [3, None]]).to_pylist() == [[1, 2], None, [3, None]]


@pytest.mark.parametrize("missing", [None, pd.NA, np.nan])
def test_strings_become_columns_of_strings(missing):
    assert column(np.array(["a", missing, "ü"], object)).to_pylist() == ["a", None, "ü"]
    assert column(np.array([["a", missing], [missing, missing]], object)).to_pylist() == [["a", None], None]
    assert column(np.array(["a", "bc"])).to_pylist() == ["a", "bc"]
    assert column([["a", "b"], ["c", "d"]]).to_pylist() == [["a", "b"], ["c", "d"]]


def test_values_that_are_no_strings_among_strings_are_reported():
    with pytest.raises(DataError, match=r"row 1 of 'features' holds 3, of the type int; expected strings"):
        column(np.array(["a", 3], object))
    with pytest.raises(DataError, match="'features' holds strings, of which there are no vectors"):
        to_data_frame(FakeSession(), np.array([["a"]]), vectors=True)


def test_only_data_frames_are_converted_to_arrays():
    with pytest.raises(DataError, match="frame is an array .*; expected a Spark DataFrame"):
        from_data_frame(np.zeros(3))
