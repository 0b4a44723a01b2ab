"""TFRecord files with Spark Connect."""

import pytest

from sparkkeras import TFRecordDataSource
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


def test_the_format_is_read_and_written(spark, frame, tmp_path):
    spark.dataSource.register(TFRecordDataSource)
    path = str(tmp_path / "rows")
    for mode in "overwrite", "append":
        frame.write.format("tfrecord").mode(mode).option("compression", "gzip").save(path)
    back = spark.read.format("tfrecord").schema(frame.schema).load(path)
    assert sorted(back.collect()) == sorted(frame.collect() * 2)
    assert spark.read.format("tfrecord").load(path).dtypes == load_tfrecords(spark, path).dtypes
