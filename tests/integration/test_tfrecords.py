"""DataFrames as TFRecord files, and back."""

import dataclasses
import datetime
import decimal
import os
import re
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
from pyarrow import fs
from pyspark.errors import PythonException
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sparkkeras import ConfigurationError, DataError, StorageError, WorkerError
from sparkkeras.formats import tfrecords
from sparkkeras.formats.records import framed
from sparkkeras.formats.tfrecords import load_tfrecords, save_as_tfrecords
from tests.conftest import long

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
    """An Example of TensorFlow's; floats, whole numbers, or bytes, alone or in a list."""
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


# There and back


@pytest.mark.parametrize("compression", [None, "gzip", long("zlib")])
def test_rows_come_back_exactly(frame, spark, tmp_path, compression):
    path = tmp_path / "some data" / "rows"
    save_as_tfrecords(frame.repartition(3, "id"), f"file://{path}" if compression else str(path), compression=compression)
    suffix = {None: ".tfrecord", "gzip": ".tfrecord.gz", "zlib": ".tfrecord.zlib"}[compression]
    assert [name.endswith(suffix) for name in names(path) if name != "_SUCCESS"] == [True] * (len(names(path)) - 1)
    assert names(path.parent) == ["rows"]
    back = load_tfrecords(spark, str(path), schema=SCHEMA)
    assert back.schema == frame.schema
    assert by_id(back) == by_id(frame)


def test_each_partition_is_a_file_that_tensorflow_reads(spark, tmp_path):
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


def test_an_empty_frame_comes_back_where_the_schema_is_given(spark, tmp_path):
    for number, frame in enumerate(
        [spark.createDataFrame([], "x int"), spark.range(4).select(F.lit(1).alias("x")).limit(0)]
    ):
        path = str(tmp_path / str(number))
        save_as_tfrecords(frame, path, compression="gzip")
        assert "_SUCCESS" in names(path)
        back = load_tfrecords(spark, path, schema="x int")
        assert back.collect() == []
        assert back.columns == ["x"]
        with pytest.raises(DataError, match="no records.*give schema="):
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
    with pytest.raises(DataError, match=r"'n' is no bytes, but int64 in record 0 of .*/[ab]"):
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
    assert found("c") == [5]  # the folder that it stands in has brackets
    monkeypatch.chdir(tmp_path)
    assert found("in*/below/c") == [5]
    for path, words in [
        ("nowhere", "there is no such file or folder"),
        (f"{folder}/z-*", "there is no such file or folder"),
        ("nothing://here", "nothing"),
    ]:
        with pytest.raises(StorageError, match=rf"cannot read '{re.escape(repr(path)[1:-1])}': .*{words}"):
            load_tfrecords(spark, path)


def test_files_that_workers_cannot_open_are_handed_over_by_spark(frame, spark, tmp_path, monkeypatch):
    save_as_tfrecords(frame.repartition(2), str(tmp_path / "rows"), compression="gzip")
    monkeypatch.setattr(tfrecords, "_local", lambda file: False)
    back = load_tfrecords(spark, str(tmp_path / "rows"), schema=SCHEMA)
    assert by_id(back) == by_id(frame)
    assert set(load_tfrecords(spark, str(tmp_path / "rows")).columns) == set(frame.columns)
    monkeypatch.setattr(tfrecords, "_LARGEST_FILE", 10)
    with pytest.raises(StorageError, match=r"part-0000.* has \d+ bytes; on this file system .* below 2 GiB"):
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


# What cannot be


@pytest.mark.parametrize(
    ("kind", "value", "remedy"),
    [
        ("date", datetime.date(2020, 1, 1), "unix_date"),
        ("timestamp", datetime.datetime(2020, 1, 1), "unix_micros"),
        ("timestamp_ntz", datetime.datetime(2020, 1, 1), "Cast it to string"),
        ("decimal(5,2)", decimal.Decimal("1.5"), "Cast it to double"),
        ("map<string,int>", {"a": 1}, "map_keys"),
        ("struct<a:int>", (1,), "fields as columns"),
        ("array<array<int>>", [[1]], "flatten"),
        ("array<date>", [datetime.date(2020, 1, 1)], "unix_date"),
    ],
)
def test_types_that_an_example_cannot_hold_are_refused_by_name(spark, tmp_path, kind, value, remedy):
    frame = spark.createDataFrame([(1, value)], f"id int, odd {kind}")
    with pytest.raises(DataError, match=rf"column 'odd' has the type .*{remedy}"):
        save_as_tfrecords(frame, str(tmp_path / "rows"))
    with pytest.raises(DataError, match=rf"column 'odd' has the type .*{remedy}"):
        load_tfrecords(spark, str(tmp_path), schema=f"id int, odd {kind}")
    assert names(tmp_path) == []


def test_arguments_are_checked(spark, tmp_path):
    frame, path = spark.range(3), str(tmp_path / "rows")
    for call, error, words in [
        (lambda: save_as_tfrecords([1], path), DataError, r"rdd.toDF\(\)"),
        (lambda: load_tfrecords(spark.sparkContext, path), ConfigurationError, "expected a SparkSession"),
        (lambda: save_as_tfrecords(frame, path, compression="gz"), ConfigurationError, "Did you mean 'gzip'"),
        (lambda: save_as_tfrecords(frame, path, mode="append"), ConfigurationError, "'error', 'overwrite'"),
        (lambda: save_as_tfrecords(frame, "/"), ConfigurationError, "expected the path of a folder"),
        (lambda: save_as_tfrecords(frame, "dbfs:/rows"), StorageError, "'dbfs' is no file system of pyarrow's"),
        (lambda: save_as_tfrecords(frame.select("id", "id"), path), DataError, "no name twice"),
        (lambda: save_as_tfrecords(frame.select(), path), DataError, "at least one"),
        (lambda: load_tfrecords(spark, ""), ConfigurationError, "expected the path of a file"),
        (lambda: load_tfrecords(spark, path, schema="x no"), ConfigurationError, "is no DDL"),
        (lambda: load_tfrecords(spark, path, schema=["x"]), ConfigurationError, "expected a StructType or DDL"),
        (lambda: load_tfrecords(spark, path, schema=T.StructType()), ConfigurationError, "at least one"),
        (lambda: load_tfrecords(spark, path, schema="x int", binary_features=["x"]), ConfigurationError, "declare them"),
        (lambda: load_tfrecords(spark, path, binary_features="x"), ConfigurationError, r"\['x'\]"),
    ]:
        with pytest.raises(error, match=words):
            call()
    assert names(tmp_path) == []


def test_records_that_contradict_each_other_are_told_with_feature_and_file(spark, tmp_path):
    write(tmp_path / "a", example(n=1))
    write(tmp_path / "b", example(n=1), example(n=1.0))
    with pytest.raises(DataError, match=r"'n' holds int64 values in record 0 of .*, but float values in record 1 of .*/b"):
        load_tfrecords(spark, str(tmp_path))


def test_a_record_that_contradicts_the_schema_later_is_told_with_file_record_and_feature(spark, tmp_path):
    write(tmp_path / "a", *[example(n=1)] * 5000, example(n=[1, 2]))
    with pytest.raises(
        PythonException, match="DataError: record 5000 of file:.*/a: feature 'n' has 2 values.* says n bigint"
    ):
        load_tfrecords(spark, str(tmp_path)).collect()
    with pytest.raises(PythonException, match="DataError: record 0 of file:.*/a: feature 'n' holds int64 values"):
        load_tfrecords(spark, str(tmp_path), schema="n string").collect()


def test_damaged_files_are_told_with_file_and_offset(spark, tmp_path):
    write(tmp_path / "a", example(n=1), example(n=2))
    whole = (tmp_path / "a").read_bytes()
    (tmp_path / "a").write_bytes(whole[:-1])
    with pytest.raises(DataError, match=rf"file:.*/a is damaged.* at offset {len(whole) // 2}: the file ends"):
        load_tfrecords(spark, str(tmp_path))
    (tmp_path / "a").write_bytes(framed(b"no example"))
    with pytest.raises(DataError, match=r"record 0 of file:.*/a is no tf.train.Example"):
        load_tfrecords(spark, str(tmp_path))
    with pytest.raises(PythonException, match=r"DataError: record 0 of file:.*/a is no tf.train.Example"):
        load_tfrecords(spark, str(tmp_path), schema="n int").collect()


# Whole or not at all


@pytest.fixture(params=["renaming", "object store"])
def store(request, monkeypatch):
    """This machine's files, also treated as an object store would be."""
    if request.param == "object store":
        monkeypatch.setattr(tfrecords, "_OBJECT_STORES", {"local"})


@pytest.mark.usefixtures("store")
def test_what_is_there_is_refused_or_replaced_as_a_whole(spark, tmp_path):
    path = tmp_path / "rows"
    save_as_tfrecords(spark.range(0, 10, 1, 4), str(path))
    with pytest.raises(StorageError, match='is there already: give mode="overwrite"'):
        save_as_tfrecords(spark.range(3), str(path))
    assert load_tfrecords(spark, str(path)).count() == 10
    again = load_tfrecords(spark, str(path)).select((F.col("id") + 5).alias("id")).repartition(2)
    save_as_tfrecords(again, str(path), mode="overwrite")  # the rows that are replaced are read while others are written
    assert sorted(row.id for row in load_tfrecords(spark, str(path)).collect()) == list(range(5, 15))
    assert len(names(path)) == 3
    assert names(tmp_path) == ["rows"]


@pytest.mark.usefixtures("store")
def test_a_job_that_fails_leaves_what_was_there_and_nothing_else(spark, tmp_path):
    path = tmp_path / "rows"
    frame = spark.range(0, 10, 1, 2)

    def bad():
        """Rows whose last one fails when the other partition's file is there: a later one, nobody could remove."""
        known = set(tmp_path.rglob("part-00000*"))

        def others():
            return {file for file in tmp_path.rglob("part-00000*") if file.parent.name != "drafts"} - known

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
    with pytest.raises(DataError, match="column 'x' holds an array with a null"):
        save_as_tfrecords(nulls, str(tmp_path / "good"), mode="overwrite")
    assert names(tmp_path / "good") == before
    assert [file for file in names(tmp_path) if file != "rows"] == ["good"]


def test_a_folder_that_appears_meanwhile_is_not_replaced(spark, tmp_path, monkeypatch):
    path = tmp_path / "rows"
    prepare = tfrecords._Target.prepare

    def slowly(self):
        prepare(self)
        write(path / "others", example(n=1))

    monkeypatch.setattr(tfrecords._Target, "prepare", slowly)
    with pytest.raises(StorageError, match="is there already"):
        save_as_tfrecords(spark.range(3), str(path))
    assert names(path) == ["others"]
    assert names(tmp_path) == ["rows"]


def test_attempts_do_not_meet(tmp_path):
    target = tfrecords._Target.of(str(tmp_path / "rows"))
    target.prepare()
    fields = (tfrecords.Field("n", "bigint"),)
    task = tfrecords._Write(fields, target.files, target.drafts, target.whole, target.run, None)
    batch = pa.record_batch([pa.array([1, 2])], ["n"])

    def stopped():
        yield batch
        raise KeyboardInterrupt

    def slow(ends):
        yield batch
        list(task(iter([batch])))  # another attempt is through meanwhile
        if ends:
            target.commit({result["file"][0].as_py(): result["size"][0].as_py()}, "error")
            target.tidy(True)

    with pytest.raises(KeyboardInterrupt):
        list(task(stopped()))
    assert names(target.drafts) == names(target.whole) == []
    (result,) = task(slow(ends=False))
    assert len(names(target.whole)) == 2
    with pytest.raises(OSError):
        list(task(slow(ends=True)))
    assert names(tmp_path / "rows") == ["_SUCCESS", *result["file"].to_pylist()]
    assert names(tmp_path) == ["rows"]


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_was_there_stays_until_the_new_folder_has_its_name(tmp_path, kind):
    class Stubborn(fs.LocalFileSystem):
        def move(self, source, target):
            if source.endswith("/whole"):
                raise OSError("not now")
            super().move(source, target)

    path = tmp_path / "rows"
    write(path / "old" if kind == "folder" else path, example(n=1))
    target = tfrecords._Target.of(str(path))
    for files in [Stubborn(), target.files]:
        turn = dataclasses.replace(target, files=files)
        turn.prepare()
        if files is target.files:
            turn.commit({}, "overwrite")
            turn.tidy(True)
            assert names(path) == ["_SUCCESS"]
        else:
            with pytest.raises(OSError, match="not now"):
                turn.commit({}, "overwrite")
            turn.tidy(False)
            assert names(path) == ["old"] if kind == "folder" else path.is_file()
        assert names(tmp_path) == ["rows"]


def test_files_that_the_driver_does_not_see_are_told(spark, tmp_path, monkeypatch):
    monkeypatch.setattr(tfrecords._Target, "_listed", lambda self, folder: [])
    with pytest.raises(StorageError, match=r"1 of 1 file\(s\) .* cannot be seen from here.* share"):
        save_as_tfrecords(spark.range(0, 3, 1, 1), str(tmp_path / "rows"))
    assert names(tmp_path) == []
