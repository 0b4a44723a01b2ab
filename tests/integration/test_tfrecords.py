"""Saving DataFrames as TFRecord files and loading them."""

import io
import os
import re
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from pyspark.errors import AnalysisException, PythonException
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sparkkeras import ConfigurationError, DataError, StorageError, TFRecordDataSource, WorkerError
from sparkkeras.formats import tfrecords
from sparkkeras.formats.examples import Field
from sparkkeras.formats.records import framed
from sparkkeras.formats.tfrecord_source import read_batches
from sparkkeras.formats.tfrecords import load_tfrecords, save_as_tfrecords
from tests.processes import interrupted_when

SCHEMA = (
    "id bigint, flag boolean, tiny tinyint, small smallint, number int, single float, wide double, text string, "
    "data binary, bigs array<bigint>, texts array<string>"
)
ROWS = [
    (1, True, -128, 2**15 - 1, -(2**31), 1.5, -2.5, "", b"", [], ["", "ü"]),
    (2**63 - 1, False, 127, -1, 7, float("inf"), 0.25, "größe 🎈", b"\x00\xff", [-1, 2**62, 0], []),
    (-(2**63), *[None] * 10),
]


@pytest.fixture
def spark(sc):
    return SparkSession(sc)


@pytest.fixture
def frame(spark):
    return spark.createDataFrame(ROWS, SCHEMA)


def example(**values):
    """A serialized TensorFlow Example; values are floats, integers or bytes, single or in a list."""
    features = {}
    for name, value in values.items():
        listed = value if isinstance(value, list) else [value]
        kind = {float: "float_list", int: "int64_list", bytes: "bytes_list"}[type(listed[0])]
        features[name] = tf.train.Feature(**{kind: {"value": listed}})
    return tf.train.Example(features={"feature": features}).SerializeToString()


def write(path, *records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(map(framed, records)))


def names(folder):
    return sorted(os.listdir(folder))


def by_id(frame):
    return sorted(frame.collect(), key=lambda row: row.id)


# Round trips


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_rows_survive_a_round_trip_exactly(frame, spark, tmp_path, compression):
    path = tmp_path / "some data" / "rows"
    save_as_tfrecords(frame.repartition(3, "id"), f"file://{path}" if compression else str(path), compression=compression)
    suffix = {None: ".tfrecord", "gzip": ".tfrecord.gz"}[compression]
    assert [name.endswith(suffix) for name in names(path) if name != "_SUCCESS"] == [True] * (len(names(path)) - 1)
    assert names(path.parent) == ["rows"]
    back = load_tfrecords(spark, str(path), schema=SCHEMA)
    assert back.schema == frame.schema
    assert by_id(back) == by_id(frame)


def test_vectors_become_arrays_of_float32(spark, tmp_path):
    path = str(tmp_path / "rows")
    save_as_tfrecords(spark.createDataFrame([(Vectors.dense([0.1, 2.0]),), (None,)], ["v"]).coalesce(1), path)
    assert [row.v for row in load_tfrecords(spark, path).collect()] == [[np.float32(0.1), 2.0], None]
    with pytest.raises(DataError, match=r"column 'v' has the type vector, .*array_to_vector"):
        load_tfrecords(spark, path, schema=T.StructType().add("v", VectorUDT()))


def test_an_empty_frame_is_loaded_with_a_schema(spark, tmp_path):
    path = str(tmp_path / "rows")
    save_as_tfrecords(spark.range(4).select(F.lit(1).alias("x")).limit(0), path, compression="gzip")
    back = load_tfrecords(spark, path, schema="x int")
    assert (back.collect(), back.columns) == ([], ["x"])
    with pytest.raises(DataError, match="no record .* has features. Set schema,"):
        load_tfrecords(spark, path)


def test_columns_are_inferred_from_many_records_of_several_files(spark, tmp_path):
    write(tmp_path / "a", example(n=1, s=b"text", one=1.0))
    write(tmp_path / "b", *[example(n=4)] * 50, example(many=[1, 2], one=[1.0, 2.0], raw=b"\xff"))
    frame = load_tfrecords(spark, str(tmp_path))
    expected = "many:array<bigint>,n:bigint,one:array<float>,raw:binary,s:string"
    assert frame.schema.simpleString() == f"struct<{expected}>"
    assert frame.count() == 52
    assert frame.where("n = 1").collect() == [(None, 1, [1.0], None, "text")]
    binary = load_tfrecords(spark, str(tmp_path), binary_features=["s"])
    assert binary.schema.simpleString() == f"struct<{expected.replace('s:string', 's:binary')}>"
    with pytest.raises(DataError, match=r"feature 'n' holds int64 values in record 0 of .*/[ab]; expected bytes"):
        load_tfrecords(spark, str(tmp_path), binary_features=["n"])
    write(tmp_path / "b", example(n=1.0))
    with pytest.raises(DataError, match=r"'n' holds int64 values in record 0 of .*/a, but float values in record 0 of .*/b"):
        load_tfrecords(spark, str(tmp_path))


def test_a_path_is_a_file_a_folder_or_a_glob(spark, tmp_path, monkeypatch):
    for number, name in enumerate(["a-0", "a-1", "b-0", "_hidden", ".hidden", "below/c"]):
        write(tmp_path / "in [x]" / name, example(n=number))
    folder = f"{tmp_path}/in \\[x\\]"

    def found(path):
        return sorted(row.n for row in load_tfrecords(spark, path).collect())

    assert found(f"{folder}/") == [0, 1, 2]
    assert found(f"{folder}/a-1") == [1]
    assert found(f"file:{folder}/{{a,b}}-*") == [0, 1, 2]
    monkeypatch.chdir(tmp_path / "in [x]" / "below")
    assert found("c") == [5]  # the working directory has brackets in its name
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "parts" / "p=1" / "d", example(n=6))
    assert found("parts") == [6]
    write(tmp_path / "parent" / "plain" / "e", example(n=7))
    assert found("parent/*") == [7]
    for path, message in [
        ("nowhere", "the path does not exist"),
        (f"{folder}/z-*", "the path does not exist"),
        ("parent", "it has files only in subfolders"),
        ("nothing://here", "nothing"),
    ]:
        with pytest.raises(StorageError, match=rf"cannot read '{re.escape(repr(path)[1:-1])}': .*{message}"):
            load_tfrecords(spark, path)


def test_large_records_are_read_in_small_batches():
    data = io.BytesIO(framed(example(x=bytes(5 << 20))) * 10)
    sizes = [batch.num_rows for batch in read_batches(io.BufferedReader(data), "the file", [Field("x", "binary")])]
    assert sum(sizes) == 10
    assert max(sizes) < 5


# Errors


def test_types_that_an_example_cannot_hold_are_reported(spark, tmp_path):
    for kind, remedy in [
        ("date", "unix_date"),
        ("decimal(5,2)", "Cast it to double"),
        ("map<string,int>", "map_keys"),
        ("struct<a:int>", "fields as separate columns"),
        ("array<array<int>>", "flatten"),
        ("array<date>", "unix_date"),
    ]:
        frame = spark.createDataFrame([], f"id int, odd {kind}")
        with pytest.raises(DataError, match=rf"column 'odd' has the type .*{remedy}"):
            save_as_tfrecords(frame, str(tmp_path / "rows"))
        with pytest.raises(DataError, match=rf"column 'odd' has the type .*{remedy}"):
            load_tfrecords(spark, str(tmp_path), schema=frame.schema)
    assert names(tmp_path) == []


def test_invalid_arguments_are_reported(spark, tmp_path):
    frame, path = spark.range(3), str(tmp_path / "rows")
    for call, error, message in [
        (lambda: save_as_tfrecords([1], path), DataError, r"rdd.toDF\(\)"),
        (lambda: load_tfrecords(spark.sparkContext, path), ConfigurationError, "expected a SparkSession"),
        (lambda: save_as_tfrecords(frame, path, compression="gz"), ConfigurationError, "Did you mean 'gzip'"),
        (lambda: save_as_tfrecords(frame, path, mode="append"), ConfigurationError, "'error', 'overwrite'"),
        (lambda: save_as_tfrecords(frame, "/"), ConfigurationError, "expected the path of a folder"),
        (lambda: save_as_tfrecords(frame, "dbfs:/rows"), StorageError, "pyarrow does not support 'dbfs'"),
        (lambda: save_as_tfrecords(frame.select("id", "id"), path), DataError, "unique names"),
        (lambda: save_as_tfrecords(frame.select(), path), DataError, "at least one"),
        (lambda: load_tfrecords(spark, ""), ConfigurationError, "expected the path of a file"),
        (lambda: load_tfrecords(spark, path, schema="x no"), ConfigurationError, "is not valid DDL"),
        (lambda: load_tfrecords(spark, path, schema=["x"]), ConfigurationError, "expected a StructType or DDL"),
        (lambda: load_tfrecords(spark, path, schema="x int", binary_features=["x"]), ConfigurationError, "declare these"),
        (lambda: load_tfrecords(spark, path, binary_features="x"), ConfigurationError, r"\['x'\]"),
    ]:
        with pytest.raises(error, match=message):
            call()
    assert names(tmp_path) == []


def test_records_and_files_that_cannot_be_read_are_reported_with_their_place(spark, tmp_path):
    write(tmp_path / "a", *[example(n=1)] * 5000, example(n=[1, 2]))
    with pytest.raises(
        PythonException, match="DataError: record 5000 of file:.*/a: feature 'n' has 2 values.* says n bigint"
    ):
        load_tfrecords(spark, str(tmp_path)).collect()
    (tmp_path / "a").write_bytes(framed(example(n=1))[:-1])
    with pytest.raises(DataError, match=r"file:.*/a is damaged.* at offset 0: the file ends"):
        load_tfrecords(spark, str(tmp_path))
    (tmp_path / "a").write_bytes(framed(b"no example"))
    with pytest.raises(PythonException, match=r"DataError: record 0 of file:.*/a is not a tf.train.Example"):
        load_tfrecords(spark, str(tmp_path), schema="n int").collect()


# Atomic replacement


@pytest.mark.parametrize("kind", ["local", "hadoop"])
def test_an_existing_folder_is_kept_or_replaced_atomically(spark, tmp_path, hadoop_uri, kind):
    path = str(tmp_path / "rows") if kind == "local" else f"{hadoop_uri}/rows"  # the driver writes where pyarrow cannot
    save_as_tfrecords(spark.range(0, 10, 1, 4), path)
    with pytest.raises(StorageError, match='already exists: set mode="overwrite"'):
        save_as_tfrecords(spark.range(3), path)
    again = load_tfrecords(spark, path).select((F.col("id") + 5).alias("id")).repartition(2)
    save_as_tfrecords(again, path, mode="overwrite")  # reads the rows that it replaces
    assert sorted(row.id for row in load_tfrecords(spark, path).collect()) == list(range(5, 15))
    assert [name.split("-")[0] for name in names(tmp_path / "rows") if name[0] != "."] == ["_SUCCESS", "part", "part"]
    assert names(tmp_path) == ["rows"]


def test_a_large_file_that_only_spark_opens_is_reported(spark, hadoop_uri, monkeypatch):
    save_as_tfrecords(spark.range(3), f"{hadoop_uri}/rows")
    monkeypatch.setattr(tfrecords, "_LARGEST_FILE", 10)
    with pytest.raises(StorageError, match=r"part-0000.* has \d+ bytes; on this file system .* smaller than 2 GiB"):
        load_tfrecords(spark, f"{hadoop_uri}/rows")


def test_an_interrupt_ends_the_job_and_leaves_nothing(spark, tmp_path):
    """Also in a thread, which has no active session; nor has this one after the interrupt."""
    begun = tmp_path / "begun"

    def slow(number):
        begun.touch()
        time.sleep(60)
        return number

    rows = spark.range(2).select(F.udf(slow, "long")("id").alias("id"))
    with interrupted_when(begun.exists, seconds=20):
        save_as_tfrecords(rows, str(tmp_path / "rows"))
    deadline = time.monotonic() + 60
    while spark.sparkContext.statusTracker().getActiveJobsIds() or names(tmp_path) != ["begun"]:
        assert time.monotonic() < deadline, names(tmp_path)
        time.sleep(0.1)
    save_as_tfrecords(spark.range(3), str(tmp_path / "again"))
    with ThreadPoolExecutor(1) as thread:
        thread.submit(save_as_tfrecords, spark.range(3), str(tmp_path / "rows")).result()
    assert load_tfrecords(spark, str(tmp_path / "rows")).count() == 3


def test_a_failed_job_leaves_the_old_folder_and_nothing_else(spark, tmp_path):
    path = str(tmp_path / "rows")
    good = spark.range(0, 10, 1, 1)
    bad = good.select(F.array("id", F.when(F.col("id") < 9, 0)).alias("x"))
    with pytest.raises(DataError, match="column 'x' holds an array that contains a null"):
        save_as_tfrecords(bad, path)
    assert not any(file.is_file() for file in tmp_path.rglob("*"))
    save_as_tfrecords(good, path, mode="overwrite")
    before = names(path)
    fails = F.udf(lambda number: 1 // (9 - number), "long")
    with pytest.raises(WorkerError, match="ZeroDivisionError"):
        save_as_tfrecords(good.select(fails("id").alias("id")), path, mode="overwrite")
    assert names(path) == before
    assert names(tmp_path) == ["rows"]


def test_a_folder_that_appears_while_the_driver_writes_is_kept(spark, tmp_path, hadoop_uri):
    folder = str(tmp_path / "rows" / "theirs")
    other = F.udf(lambda number: os.makedirs(folder, exist_ok=True) or number, "long")
    with pytest.raises(StorageError, match=f"another process created '{hadoop_uri}/rows' in the meantime: save"):
        save_as_tfrecords(spark.range(3).select(other("id")), f"{hadoop_uri}/rows")
    assert names(tmp_path) == ["rows"]
    assert names(tmp_path / "rows") == ["theirs"]


# The format "tfrecord"


def test_the_format_appends_and_overwrites(frame, spark, tmp_path):
    spark.dataSource.register(TFRecordDataSource)
    path = str(tmp_path / "rows")
    rows = frame.repartition(2, "id").write.format("tfrecord")
    loaded = spark.read.format("tfrecord").schema(SCHEMA)
    rows.mode("append").save(path)
    rows.mode("append").option("compression", "GZIP").save(path)
    assert by_id(loaded.load(path)) == by_id(frame.union(frame))
    assert by_id(loaded.load(f"{path}/*.gz")) == by_id(frame)
    rows.mode("overwrite").option("compression", "zlib").save(path)
    assert {Path(name).suffix for name in names(path)} == {"", ".zlib"}
    assert by_id(loaded.load(path).select("texts", "id")) == by_id(frame.select("texts", "id"))
    inferred = spark.read.format("tfrecord").load(f"file:{path}").schema
    assert inferred == load_tfrecords(spark, path).schema
    assert names(tmp_path) == ["rows"]


def test_a_job_of_the_format_that_fails_changes_nothing(spark, tmp_path):
    spark.dataSource.register(TFRecordDataSource)
    path = str(tmp_path / "rows")
    good = spark.range(0, 10, 1, 2)
    good.write.format("tfrecord").mode("append").save(path)
    before = names(path)
    bad = good.select(F.array("id", F.when(F.col("id") < 9, 0)).alias("x"))
    with pytest.raises(PythonException, match="DataError: column 'x' holds an array that contains a null"):
        bad.write.format("tfrecord").mode("append").save(path)
    with pytest.raises(AnalysisException, match="ConfigurationError: compression='snappy' is not known"):
        good.write.format("tfrecord").mode("append").save(path, compression="snappy")
    with pytest.raises(AnalysisException, match='"tfrecord" cannot be written in the "ErrorIfExists" mode'):
        good.write.format("tfrecord").save(path)
    assert names(path) == before
    assert names(tmp_path) == ["rows"]


def test_workers_that_lack_the_package_read_and_write_the_format(sc, spark, tmp_path, monkeypatch):
    python = tmp_path / "python"
    library = sysconfig.get_paths()["purelib"]
    arguments = '"${@/sparkkeras.spark.daemon/pyspark.daemon}"'
    python.write_text(f"#!/bin/bash\nPYTHONSAFEPATH=1 PYTHONPATH={library} exec {sys.executable} -S {arguments}\n")
    python.chmod(0o755)
    assert b"No module named" in subprocess.run([python, "-c", "import sparkkeras"], capture_output=True).stderr
    with monkeypatch.context() as patched:
        patched.setattr(sc, "pythonExec", str(python))
        spark.dataSource.register(TFRecordDataSource)
    path = str(tmp_path / "rows")
    spark.range(0, 10, 1, 2).write.format("tfrecord").mode("append").save(path)
    assert sorted(row.id for row in spark.read.format("tfrecord").load(path).collect()) == list(range(10))
    with pytest.raises(AnalysisException, match="StorageError: cannot read '.*/nowhere': the path does not exist"):
        spark.read.format("tfrecord").load(f"{path}/nowhere")
