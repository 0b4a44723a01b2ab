"""Saving DataFrames as TFRecord files and loading them."""

import datetime
import decimal
import os
import re
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
from pyspark.errors import AnalysisException, PythonException
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sparkkeras import ConfigurationError, DataError, StorageError, TFRecordDataSource, WorkerError
from sparkkeras.formats import tfrecord_source, tfrecords
from sparkkeras.formats.records import framed
from sparkkeras.formats.tfrecords import load_tfrecords, save_as_tfrecords
from sparkkeras.spark import filesystem
from tests.conftest import long
from tests.processes import interrupted_when

SCHEMA = (
    "id bigint, flag boolean, tiny tinyint, small smallint, number int, single float, wide double, text string, "
    "data binary, flags array<boolean>, bigs array<bigint>, floats array<float>, wides array<double>, "
    "texts array<string>, datas array<binary>"
)
ROWS = [
    (1, True, -128, 2**15 - 1, -(2**31), 1.5, -2.5, "", b"", [True, False], [], [0.5, -1.0], [], ["", "ü"], [b"", b"\xff"]),
    (2**63 - 1, False, 127, -1, 7, float("inf"), 0.25, "größe 🎈", b"\x00\xff", [], [-1, 2**62, 0], [], [1.0], [], []),
    (-(2**63), *[None] * 14),
    (4, *[None] * 9, [5], None, None, ["a"], [b"b"]),
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
        feature = {
            float: lambda listed: {"float_list": tf.train.FloatList(value=listed)},
            int: lambda listed: {"int64_list": tf.train.Int64List(value=listed)},
            bytes: lambda listed: {"bytes_list": tf.train.BytesList(value=listed)},
        }[type(listed[0])]
        features[name] = tf.train.Feature(**feature(listed))
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def write(path, *records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(map(framed, records)))


def names(folder):
    return sorted(os.listdir(folder))


def by_id(frame):
    return sorted(frame.collect(), key=lambda row: row.id)


# Round trips


@pytest.mark.parametrize("compression", [None, "gzip", long("zlib")])
def test_rows_survive_a_round_trip_exactly(frame, spark, tmp_path, compression):
    path = tmp_path / "some data" / "rows"
    save_as_tfrecords(frame.repartition(3, "id"), f"file://{path}" if compression else str(path), compression=compression)
    suffix = {None: ".tfrecord", "gzip": ".tfrecord.gz", "zlib": ".tfrecord.zlib"}[compression]
    assert [name.endswith(suffix) for name in names(path) if name != "_SUCCESS"] == [True] * (len(names(path)) - 1)
    assert names(path.parent) == ["rows"]
    back = load_tfrecords(spark, str(path), schema=SCHEMA)
    assert back.schema == frame.schema
    assert by_id(back) == by_id(frame)


def test_each_partition_is_written_to_a_file_that_tensorflow_reads(spark, tmp_path):
    frame = spark.range(0, 100, 1, 5).select("id", F.array(F.col("id").cast("float"), F.lit(0.5)).alias("x"))
    save_as_tfrecords(frame.where("id < 60"), str(tmp_path / "rows"), compression="gzip")
    files = sorted(str(file) for file in (tmp_path / "rows").glob("part-*"))
    assert [Path(file).name[:11] for file in files] == [f"part-{number:05d}-" for number in range(5)]
    features = {"id": tf.io.FixedLenFeature([], tf.int64), "x": tf.io.FixedLenFeature([2], tf.float32)}
    found = [tf.io.parse_single_example(one, features) for one in tf.data.TFRecordDataset(files, compression_type="GZIP")]
    assert [int(one["id"]) for one in found] == list(range(60))
    np.testing.assert_array_equal(found[7]["x"], [7, 0.5])
    back = load_tfrecords(spark, str(tmp_path / "rows"))  # two of the files are empty
    assert back.schema.simpleString() == "struct<id:bigint,x:array<float>>"
    assert back.agg(F.sum("id"), F.count("*")).collect() == [(1770, 60)]


def test_doubles_and_vectors_become_float32(spark, tmp_path):
    rows = [(0.1, Vectors.dense([0.1, 2.0])), (0.2, Vectors.sparse(3, {1: 5.0})), (None, None)]
    save_as_tfrecords(spark.createDataFrame(rows, ["d", "v"]).coalesce(1), str(tmp_path / "rows"))
    back = load_tfrecords(spark, str(tmp_path / "rows"), schema="d double, v array<float>").collect()
    third = np.float32(0.1)
    with pytest.raises(DataError, match=r"column 'v' has the type vector, .*array_to_vector"):
        load_tfrecords(spark, str(tmp_path / "rows"), schema=T.StructType().add("v", VectorUDT()))
    assert [tuple(row) for row in back] == [(third, [third, 2.0]), (np.float32(0.2), [0, 5, 0]), (None, None)]


def test_an_empty_frame_is_loaded_with_a_schema(spark, tmp_path):
    for number, frame in enumerate(
        [spark.createDataFrame([], "x int"), spark.range(4).select(F.lit(1).alias("x")).limit(0)]
    ):
        path = str(tmp_path / str(number))
        save_as_tfrecords(frame, path, compression="gzip")
        assert "_SUCCESS" in names(path)
        back = load_tfrecords(spark, path, schema="x int")
        assert back.collect() == []
        assert back.columns == ["x"]
        with pytest.raises(DataError, match="no record .* has features. Set schema,"):
            load_tfrecords(spark, path)


def test_columns_are_inferred_from_many_records_of_several_files(spark, tmp_path):
    write(tmp_path / "a", example(n=1, s=b"text", one=1.0), example(n=2, s="ü".encode(), raw=b"ok"))
    write(tmp_path / "b", example(n=3, many=[1, 2], s=b"x"), *[example(n=4)] * 50, example(raw=b"\xff", one=[1.0, 2.0]))
    frame = load_tfrecords(spark, str(tmp_path))
    expected = "many:array<bigint>,n:bigint,one:array<float>,raw:binary,s:string"
    assert frame.schema.simpleString() == f"struct<{expected}>"
    assert frame.count() == 54
    assert frame.where("n = 1").collect() == [(None, 1, [1.0], None, "text")]
    binary = load_tfrecords(spark, str(tmp_path), binary_features=["s"])
    assert binary.schema.simpleString() == f"struct<{expected.replace('s:string', 's:binary')}>"
    with pytest.raises(DataError, match=r"no feature 'S'.*Did you mean 's'\?"):
        load_tfrecords(spark, str(tmp_path), binary_features=["S"])
    with pytest.raises(DataError, match=r"feature 'n' holds int64 values in record 0 of .*/[ab]; expected bytes"):
        load_tfrecords(spark, str(tmp_path), binary_features=["n"])


def test_a_path_is_a_file_a_folder_or_a_glob(spark, tmp_path, monkeypatch):
    for number, name in enumerate(["a-0", "a-1", "b-0", "_hidden", ".hidden", "below/c"]):
        write(tmp_path / "in [x]" / name, example(n=number))
    folder = f"{tmp_path}/in \\[x\\]"

    def found(path):
        return sorted(row.n for row in load_tfrecords(spark, path).collect())

    assert found(folder) == [0, 1, 2]
    assert found(f"{folder}/") == [0, 1, 2]
    assert found(f"{folder}/a-1") == [1]
    assert found(f"{folder}/a-*") == [0, 1]
    assert found(f"{folder}/{{a,b}}-0") == [0, 2]
    assert found(f"file:{folder}/b-0") == [2]
    assert found(f"file://{folder}/b-0") == [2]
    monkeypatch.chdir(tmp_path / "in [x]" / "below")
    assert found("c") == [5]  # the working directory has brackets in its name
    monkeypatch.chdir(tmp_path)
    assert found("in*/below/c") == [5]
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


def test_files_that_workers_cannot_open_are_read_by_spark(frame, spark, tmp_path, monkeypatch):
    save_as_tfrecords(frame.repartition(2), str(tmp_path / "rows"), compression="gzip")
    monkeypatch.setattr(tfrecords, "_local", lambda file: False)
    back = load_tfrecords(spark, str(tmp_path / "rows"), schema=SCHEMA)
    assert by_id(back) == by_id(frame)
    assert set(load_tfrecords(spark, str(tmp_path / "rows")).columns) == set(frame.columns)
    monkeypatch.setattr(tfrecords, "_LARGEST_FILE", 10)
    with pytest.raises(StorageError, match=r"part-0000.* has \d+ bytes; on this file system .* smaller than 2 GiB"):
        load_tfrecords(spark, str(tmp_path / "rows"))


def test_a_large_partition_is_read_in_pieces(spark, tmp_path):
    frame = spark.range(0, 10_000, 1, 1).select("id", F.array_repeat(F.col("id").cast("float"), 1000).alias("x"))
    save_as_tfrecords(frame, str(tmp_path / "rows"))
    (file,) = (tmp_path / "rows").glob("part-*")
    task = tfrecords._Read((tfrecords.Field("id", "bigint"), tfrecords.Field("x", "float", is_array=True)))
    sizes = [batch.num_rows for batch in task(iter([pa.record_batch([pa.array([f"file:{file}"])], ["path"])]))]
    assert sum(sizes) == 10_000
    assert max(sizes) < 5000
    back = load_tfrecords(spark, str(tmp_path / "rows"))
    assert back.where("x[999] = id").count() == 10_000


# Errors


@pytest.mark.parametrize(
    ("kind", "value", "remedy"),
    [
        ("date", datetime.date(2020, 1, 1), "unix_date"),
        ("timestamp", datetime.datetime(2020, 1, 1), "unix_micros"),
        ("timestamp_ntz", datetime.datetime(2020, 1, 1), "Cast it to string"),
        ("decimal(5,2)", decimal.Decimal("1.5"), "Cast it to double"),
        ("map<string,int>", {"a": 1}, "map_keys"),
        ("struct<a:int>", (1,), "fields as separate columns"),
        ("array<array<int>>", [[1]], "flatten"),
        ("array<date>", [datetime.date(2020, 1, 1)], "unix_date"),
    ],
)
def test_types_that_an_example_cannot_hold_are_reported(spark, tmp_path, kind, value, remedy):
    frame = spark.createDataFrame([(1, value)], f"id int, odd {kind}")
    with pytest.raises(DataError, match=rf"column 'odd' has the type .*{remedy}"):
        save_as_tfrecords(frame, str(tmp_path / "rows"))
    with pytest.raises(DataError, match=rf"column 'odd' has the type .*{remedy}"):
        load_tfrecords(spark, str(tmp_path), schema=f"id int, odd {kind}")
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
        (lambda: load_tfrecords(spark, path, schema=T.StructType()), ConfigurationError, "at least one"),
        (
            lambda: load_tfrecords(spark, path, schema="x int", binary_features=["x"]),
            ConfigurationError,
            "declare these columns binary",
        ),
        (lambda: load_tfrecords(spark, path, binary_features="x"), ConfigurationError, r"\['x'\]"),
    ]:
        with pytest.raises(error, match=message):
            call()
    assert names(tmp_path) == []


def test_records_that_contradict_each_other_are_reported_with_feature_and_file(spark, tmp_path):
    write(tmp_path / "a", example(n=1))
    write(tmp_path / "b", example(n=1), example(n=1.0))
    with pytest.raises(DataError, match=r"'n' holds int64 values in record 0 of .*, but float values in record 1 of .*/b"):
        load_tfrecords(spark, str(tmp_path))


def test_a_record_that_does_not_fit_the_schema_is_reported_with_file_record_and_feature(spark, tmp_path):
    write(tmp_path / "a", *[example(n=1)] * 5000, example(n=[1, 2]))
    with pytest.raises(
        PythonException, match="DataError: record 5000 of file:.*/a: feature 'n' has 2 values.* says n bigint"
    ):
        load_tfrecords(spark, str(tmp_path)).collect()
    with pytest.raises(PythonException, match="DataError: record 0 of file:.*/a: feature 'n' holds int64 values"):
        load_tfrecords(spark, str(tmp_path), schema="n string").collect()


def test_damaged_files_are_reported_with_file_and_offset(spark, tmp_path):
    write(tmp_path / "a", example(n=1), example(n=2))
    content = (tmp_path / "a").read_bytes()
    (tmp_path / "a").write_bytes(content[:-1])
    with pytest.raises(DataError, match=rf"file:.*/a is damaged.* at offset {len(content) // 2}: the file ends"):
        load_tfrecords(spark, str(tmp_path))
    (tmp_path / "a").write_bytes(framed(b"no example"))
    with pytest.raises(DataError, match=r"record 0 of file:.*/a is not a tf.train.Example"):
        load_tfrecords(spark, str(tmp_path))
    with pytest.raises(PythonException, match=r"DataError: record 0 of file:.*/a is not a tf.train.Example"):
        load_tfrecords(spark, str(tmp_path), schema="n int").collect()


# Atomic replacement


@pytest.fixture(params=["renaming", "object store"])
def store(request, monkeypatch):
    """The local file system, treated as such and as an object store."""
    if request.param == "object store":
        monkeypatch.setattr(tfrecord_source, "_OBJECT_STORES", {"local"})


@pytest.mark.usefixtures("store")
def test_an_existing_folder_is_kept_or_replaced_atomically(spark, tmp_path):
    path = tmp_path / "rows"
    save_as_tfrecords(spark.range(0, 10, 1, 4), str(path))
    with pytest.raises(StorageError, match='already exists: set mode="overwrite"'):
        save_as_tfrecords(spark.range(3), str(path))
    assert load_tfrecords(spark, str(path)).count() == 10
    again = load_tfrecords(spark, str(path)).select((F.col("id") + 5).alias("id")).repartition(2)
    save_as_tfrecords(again, str(path), mode="overwrite")  # reads the rows that it replaces
    assert sorted(row.id for row in load_tfrecords(spark, str(path)).collect()) == list(range(5, 15))
    assert len(names(path)) == 3
    assert names(tmp_path) == ["rows"]


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


@pytest.mark.usefixtures("store")
def test_a_failed_job_leaves_the_old_folder_and_nothing_else(spark, tmp_path):
    path = tmp_path / "rows"
    frame = spark.range(0, 10, 1, 2)

    def bad():
        """Rows of which the last one fails after the other partition's file was written, so that it can be cleaned up."""
        known = set(tmp_path.rglob("part-00000*"))

        def others():
            return {file for file in tmp_path.rglob("part-00000*") if file.parent.name != "partial"} - known

        def late(number):
            deadline = time.monotonic() + 100
            while number == 9 and not others() and time.monotonic() < deadline:
                time.sleep(0.05)
            if number == 9:
                raise RuntimeError("enough")
            return number

        return frame.select(F.udf(late, "long")("id").alias("id"))

    with pytest.raises(WorkerError, match="enough"):
        save_as_tfrecords(bad(), str(path))
    assert not any(file.is_file() for file in tmp_path.rglob("*"))
    save_as_tfrecords(frame, str(tmp_path / "good"))
    before = names(tmp_path / "good")
    with pytest.raises(WorkerError, match="enough"):
        save_as_tfrecords(bad(), str(tmp_path / "good"), mode="overwrite")
    nulls = frame.coalesce(1).select(F.array(F.lit(1), F.lit(None)).alias("x"))
    with pytest.raises(DataError, match="column 'x' holds an array that contains a null"):
        save_as_tfrecords(nulls, str(tmp_path / "good"), mode="overwrite")
    assert names(tmp_path / "good") == before
    assert [file for file in names(tmp_path) if file != "rows"] == ["good"]


# Through the driver


@pytest.fixture
def uri(hadoop_uri):
    """The URI of a folder that Spark can access, and pyarrow cannot."""
    return hadoop_uri


def test_the_driver_writes_where_pyarrow_cannot(spark, tmp_path, uri):
    path = f"{uri}/rows"
    save_as_tfrecords(spark.range(0, 10, 1, 4), path)
    with pytest.raises(StorageError, match='already exists: set mode="overwrite"'):
        save_as_tfrecords(spark.range(3), path)
    again = load_tfrecords(spark, path).select((F.col("id") + 5).alias("id")).repartition(2)
    save_as_tfrecords(again, path, mode="overwrite")  # reads the rows that it replaces
    assert sorted(row.id for row in load_tfrecords(spark, path).collect()) == list(range(5, 15))
    assert [name.split("-")[0] for name in names(tmp_path / "rows") if name[0] != "."] == ["_SUCCESS", "part", "part"]
    assert names(tmp_path) == ["rows"]


def test_a_folder_that_appears_while_the_driver_writes_is_kept(spark, tmp_path, uri):
    folder = str(tmp_path / "rows" / "theirs")
    other = F.udf(lambda number: os.makedirs(folder, exist_ok=True) or number, "long")
    with pytest.raises(StorageError, match=f"another process created '{uri}/rows' in the meantime: save to another path"):
        save_as_tfrecords(spark.range(3).select(other("id")), f"{uri}/rows")
    assert names(tmp_path) == ["rows"]
    assert names(tmp_path / "rows") == ["theirs"]


def test_a_rename_that_fails_loses_neither_old_nor_new_rows(spark, tmp_path, uri, monkeypatch):
    path, move = f"{uri}/rows", filesystem._Hadoop.move
    save_as_tfrecords(spark.range(10), path)

    def refused(draft, target):
        if target.path.endswith("/rows") and not draft.path.endswith("previous"):
            raise OSError("no")
        move(draft, target)

    monkeypatch.setattr(filesystem._Hadoop, "move", refused)
    with pytest.raises(StorageError, match=f"is complete, but cannot be renamed: cannot write '{path}': no") as caught:
        save_as_tfrecords(spark.range(3), path, mode="overwrite")
    (draft,) = set(names(tmp_path)) - {"rows"}
    assert f"the new folder '{uri}/{draft}'" in str(caught.value)
    for folder, rows in (("rows", 10), (draft, 3)):
        assert load_tfrecords(spark, f"{uri}/{folder}").count() == rows


# The format "tfrecord"


@pytest.fixture
def register(spark, sc, monkeypatch):
    """Registers the format, to be run by a Python."""

    def register(python=None):
        with monkeypatch.context() as patch:
            if python:
                patch.setattr(sc, "pythonExec", python)
            spark.dataSource.register(TFRecordDataSource)

    return register


def test_the_format_appends_and_overwrites(register, frame, spark, tmp_path):
    register()
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
    binary = spark.read.format("tfrecord").option("binary_features", "text, texts").load(path)
    assert binary.agg(F.max("text")).collect() == [("größe 🎈".encode(),)]
    assert names(tmp_path) == ["rows"]


def test_a_job_of_the_format_that_fails_changes_nothing(register, spark, tmp_path):
    register()
    path = str(tmp_path / "rows")
    good = spark.range(0, 10, 1, 2)
    good.write.format("tfrecord").mode("append").save(path)
    before = names(path)
    bad = good.select(F.array("id", F.when(F.col("id") < 9, 0)).alias("x"))
    for mode in "append", "overwrite":
        with pytest.raises(PythonException, match="DataError: column 'x' holds an array that contains a null"):
            bad.write.format("tfrecord").mode(mode).save(path)
    for options, message in [
        ({"compression": "snappy"}, "ConfigurationError: compression='snappy' is not known"),
        ({"compresion": "gzip"}, "ConfigurationError: the format tfrecord has no option 'compresion'"),
        ({"mode": "error"}, '"tfrecord" cannot be written in the "ErrorIfExists" mode'),
    ]:
        with pytest.raises(AnalysisException, match=message):
            good.write.format("tfrecord").mode("append").save(path, **options)
    assert names(path) == before
    assert names(tmp_path) == ["rows"]


def test_workers_that_lack_the_package_read_and_write_the_format(register, spark, tmp_path):
    python = tmp_path / "python"
    library = sysconfig.get_paths()["purelib"]
    arguments = '"${@/sparkkeras.spark.daemon/pyspark.daemon}"'
    python.write_text(f"#!/bin/bash\nPYTHONSAFEPATH=1 PYTHONPATH={library} exec {sys.executable} -S {arguments}\n")
    python.chmod(0o755)
    assert b"No module named" in subprocess.run([python, "-c", "import sparkkeras"], capture_output=True).stderr
    register(str(python))
    path = str(tmp_path / "rows")
    spark.range(0, 10, 1, 2).write.format("tfrecord").mode("append").save(path)
    assert sorted(row.id for row in spark.read.format("tfrecord").load(path).collect()) == list(range(10))
    with pytest.raises(AnalysisException, match="StorageError: cannot read '.*/nowhere': the path does not exist"):
        spark.read.format("tfrecord").load(f"{path}/nowhere")


@pytest.mark.cluster
def test_executors_read_and_write_the_format(register, spark, tmp_path):
    register()
    path = str(tmp_path / "rows")
    spark.range(0, 10, 1, 2).write.format("tfrecord").mode("overwrite").save(path)
    assert spark.read.format("tfrecord").load(path).agg(F.sum("id")).collect() == [(45,)]
    assert len(names(path)) == 3
