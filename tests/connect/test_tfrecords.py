"""TFRecord files with Spark Connect."""

import pytest

from sparkkeras import TFRecordDataSource
from sparkkeras.errors import DataError, StorageError
from sparkkeras.formats.tfrecords import load_tfrecords, save_as_tfrecords


@pytest.fixture
def frame(spark):
    return spark.createDataFrame([(1, "a", [1.0, 2.0]), (2, None, [])], "id int, s string, x array<double>")


def test_rows_survive_a_round_trip(spark, frame, tmp_path):
    path = str(tmp_path / "rows")
    save_as_tfrecords(frame, path, compression="gzip")
    back = load_tfrecords(spark, path, schema="id int, s string, x array<double>")
    assert sorted(back.collect()) == sorted(frame.collect())
    assert load_tfrecords(spark, path).dtypes == [("id", "bigint"), ("s", "string"), ("x", "array<float>")]
    assert [file.name for file in tmp_path.iterdir()] == ["rows"]


def test_errors_are_reported(spark, frame, tmp_path):
    path = str(tmp_path / "rows")
    save_as_tfrecords(frame, path)
    with pytest.raises(StorageError, match="the path does not exist"):
        load_tfrecords(spark, f"{path}/nowhere")
    with pytest.raises(DataError, match="no feature 'y'"):
        load_tfrecords(spark, f"{path}/*", binary_features=["y"])
    with pytest.raises(StorageError, match="already exists"):
        save_as_tfrecords(frame, path)
    with pytest.raises(DataError, match="contains a null"):
        save_as_tfrecords(spark.sql("select array(1, null) as x"), f"{path}2")
    assert [file.name for file in tmp_path.iterdir()] == ["rows"]


def test_the_format_is_read_and_written(spark, frame, tmp_path):
    spark.dataSource.register(TFRecordDataSource)
    path = str(tmp_path / "rows")
    for mode in "overwrite", "append":
        frame.write.format("tfrecord").mode(mode).option("compression", "gzip").save(path)
    back = spark.read.format("tfrecord").schema(frame.schema).load(path)
    assert sorted(back.collect()) == sorted(frame.collect() * 2)
    assert spark.read.format("tfrecord").load(path).dtypes == load_tfrecords(spark, path).dtypes
