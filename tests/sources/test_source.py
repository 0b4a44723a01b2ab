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
from sparkkeras.sources.arrays import to_simple_rdd
from sparkkeras.sources.frame import ColumnMapping
from sparkkeras.sources.source import as_source


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return np.ones((2, 3)), np.ones(2)


def of_a_path(path):
    """A function that does not take the worker and the number of workers."""


def of_a_worker(worker, num_workers):
    return []


X, Y = np.ones((3, 1)), np.ones(3)
OF_TENSORFLOW = type("Dataset", (), {"as_numpy_iterator": None})()
OF_PANDAS_ON_SPARK = type(
    "DataFrame", (), {"__module__": "pyspark.pandas.frame", "columns": [], "to_spark": 1, "to_numpy": None}
)()


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        (((each for each in range(3)), Y), DataError, r"function make\(worker, num_workers\)"),
        ((Batches(), Y), DataError, r"function make\(worker, num_workers\)"),
        ((OF_TENSORFLOW, Y), DataError, r"function make\(worker, num_workers\)"),
        ((OF_PANDAS_ON_SPARK,), DataError, r"data.to_spark\(\)"),
        ((keras.Sequential([keras.Input((3,))]),), DataError, "expected a Spark DataFrame"),
        ((Batches,), DataError, "lambda worker, num_workers: Batches"),
        ((of_a_path,), DataError, r"make\(worker, num_workers, epoch\)"),
        ((of_a_worker, Y), ConfigurationError, "batches of a function"),
        ((X, "label"), ConfigurationError, "^y='label': only a DataFrame"),
        ((X, Y, sparse.csr_matrix(X)), DataError, r"^sample_weight .*\.toarray\(\)"),
    ],
)
def test_the_error_for_unsupported_data_suggests_a_conversion(given, kind, words):
    with pytest.raises(kind, match=words):
        as_source(given[0], Reader(Schema()), *given[1:])


def test_batches_have_no_lazy_predictions_on_spark_connect(monkeypatch):
    monkeypatch.setattr("sparkkeras.sources.source.active_cluster", lambda _: SimpleNamespace(is_driver_here=False))
    with pytest.raises(ConfigurationError, match="collect=False .*Spark Connect"):
        as_source(of_a_worker, Reader(Schema())).lazy()


def test_a_pandas_data_frame_requires_labels_and_has_no_named_columns():
    frame = pd.DataFrame({"a": [1.0, 2.0], "b": [3.0, 4.0]})
    with pytest.raises(DataError, match="^labels .*pandas.*spark.createDataFrame"):
        as_source(frame, Reader(Schema()))
    assert as_source(frame, Reader(Schema()), frame["b"]).block.rows == 2
    with pytest.raises(ConfigurationError, match="features= .*pandas.*spark.createDataFrame"):
        as_source(frame, Reader(Schema()), columns=ColumnMapping(features="a"))


def test_labels_that_are_none_raise_an_error():
    schema = Schema(outputs=(InputSpec("a", (1,)), InputSpec("b", (1,))))
    with pytest.raises(DataError, match=r"^y\['b'\] is None.*leave the labels out"):
        as_source(np.eye(3), Reader(schema), {"a": np.ones(3), "b": None})


def test_a_number_of_partitions_in_place_of_weights_is_an_error():
    with pytest.raises(ConfigurationError, match="^sample_weight=2: .*num_slices=2"):
        to_simple_rdd(None, [[1.0], [2.0]], [0.0, 1.0], 2)
