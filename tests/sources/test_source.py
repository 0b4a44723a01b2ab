"""Unsupported data raises an error that explains how to convert it."""

from types import SimpleNamespace

import keras
import numpy as np
import pandas as pd
import pytest
from scipy import sparse

from sparkkeras.data.reader import Reader
from sparkkeras.data.schema import InputSpec, Schema
from sparkkeras.errors import ConfigurationError, DataError
from sparkkeras.sources.frame import ColumnMapping
from sparkkeras.sources.source import as_source


class Rows(keras.utils.PyDataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return np.ones((2, 3)), np.ones(2)


@pytest.mark.parametrize(
    "data",
    [(each for each in range(3)), Rows(), type("Dataset", (), {"as_numpy_iterator": None})()],
    ids=["generator", "keras", "tf.data"],
)
def test_the_error_for_data_of_other_libraries_suggests_a_conversion(data):
    words = r"expected a Spark DataFrame, an RDD .*Pass a function make\(worker, num_workers\) instead"
    with pytest.raises(DataError, match=words):
        as_source(data, Reader(Schema()), np.ones(3))


def test_the_error_for_sparse_weights_suggests_a_conversion():
    with pytest.raises(DataError, match=r"^sample_weight .*Convert .* with \.toarray\(\): only the features and labels of"):
        as_source(np.eye(3), Reader(Schema()), np.ones(3), sparse.csr_matrix(np.eye(3)))


def test_batches_have_no_lazy_predictions_on_spark_connect(monkeypatch):
    monkeypatch.setattr("sparkkeras.sources.source.active_cluster", lambda _: SimpleNamespace(is_driver_here=False))
    with pytest.raises(ConfigurationError, match="collect=False returns an RDD, which Spark Connect does not support"):
        as_source(lambda worker, num_workers: [], Reader(Schema())).lazy()


def test_the_error_for_a_class_suggests_a_function_that_calls_it():
    class Batches(keras.utils.PyDataset):
        pass

    with pytest.raises(DataError, match="data is the class Batches.*lambda worker, num_workers: Batches.worker"):
        as_source(Batches, Reader(Schema()))


def test_a_function_takes_the_worker_and_the_number_of_workers():
    def make(path):
        return path

    with pytest.raises(DataError, match=r"cannot be called as make.*make\(worker, num_workers, epoch\)"):
        as_source(make, Reader(Schema()))
    with pytest.raises(ConfigurationError, match="the batches of a function contain them"):
        as_source(lambda worker, num_workers: [], Reader(Schema()), np.ones(3))
    with pytest.raises(DataError, match="expected a Spark DataFrame"):
        as_source(keras.Sequential([keras.Input((3,))]), Reader(Schema()))


@pytest.mark.parametrize(("given", "words"), [(("label", None), "y='label'"), ((np.ones(3), "w"), "sample_weight='w'")])
def test_arrays_have_no_named_columns(given, words):
    with pytest.raises(ConfigurationError, match=f"^{words}: only a DataFrame has named columns; pass an array of"):
        as_source(np.ones((3, 1)), Reader(Schema()), *given)


def test_a_pandas_on_spark_data_frame_is_converted_without_a_job():
    given = type("DataFrame", (), {"__module__": "pyspark.pandas.frame", "columns": [], "to_spark": 1, "to_numpy": None})()
    with pytest.raises(DataError, match=r"with a pandas-on-Spark DataFrame. To use .*: data.to_spark\(\)"):
        as_source(given, Reader(Schema()))


def test_a_pandas_data_frame_requires_labels_and_has_no_named_columns():
    frame = pd.DataFrame({"a": [1.0, 2.0], "b": [3.0, 4.0]})
    message = "^labels are missing: pass y= with a pandas DataFrame of shape .2, 2.*spark.createDataFrame"
    with pytest.raises(DataError, match=message):
        as_source(frame, Reader(Schema()))
    assert as_source(frame, Reader(Schema()), frame["b"]).block.rows == 2
    with pytest.raises(ConfigurationError, match=r"features= requires .* a pandas DataFrame .*spark.createDataFrame"):
        as_source(frame, Reader(Schema()), columns=ColumnMapping(features="a"))


@pytest.mark.parametrize("y", [(np.ones(3), None), {"a": np.ones(3), "b": None}])
def test_labels_that_are_none_raise_an_error(y):
    schema = Schema(outputs=(InputSpec("a", (1,)), InputSpec("b", (1,))))
    with pytest.raises(DataError, match=r"^y\[.*\] is None; .* For outputs without a loss, leave the labels out"):
        as_source(np.eye(3), Reader(schema), y)
