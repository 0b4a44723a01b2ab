"""Columns of text and images, a large model of tokens, and TFRecord files."""

import io
import os
import re
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import unquote

import keras
import numpy as np
import psutil
import pytest
import tensorflow as tf
from keras import layers
from PIL import Image
from pyspark.errors import AnalysisException, PythonException
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sparkkeras import (
    ConfigurationError,
    DataError,
    SparkModel,
    StorageError,
    TFRecordDataSource,
    WorkerError,
    from_data_frame,
    keras_udf,
    to_data_frame,
)
from sparkkeras.formats import tfrecords
from sparkkeras.formats.examples import Field
from sparkkeras.formats.images import image_loader
from sparkkeras.formats.records import framed
from sparkkeras.formats.tfrecord_source import read_batches
from sparkkeras.formats.tfrecords import load_tfrecords, save_as_tfrecords
from tests.processes import interrupted_when


@pytest.fixture
def spark(sc):
    return SparkSession(sc)


# Text

WORDS = ["good", "bad", "😀"]


def text_model():
    keras.utils.set_random_seed(0)
    text, size = keras.Input((1,), dtype="string", name="text"), keras.Input((1,), name="size")
    indices = keras.layers.TextVectorization(vocabulary=WORDS, output_sequence_length=4, name="words")(text)
    mean = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(5, 4)(indices))
    outputs = keras.layers.Dense(1, activation="sigmoid", name="good")(keras.layers.concatenate([mean, size]))
    made = keras.Model([text, size], outputs)
    made.compile(keras.optimizers.Adam(0.1), "binary_crossentropy")
    return made


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="only TensorFlow has strings")
def test_columns_of_text_and_numbers(spark):
    y, size = np.random.default_rng(0).integers(0, 2, 60), np.random.default_rng(1).normal(size=60)
    text = [f"{WORDS[1 - label]} film" + " 😀\0" * (row % 3) for row, label in enumerate(y)]
    rows = list(zip(text, size.tolist(), y.tolist(), strict=True))
    frame = spark.createDataFrame(rows, "text string, size double, good int")
    arrays = from_data_frame(frame, features="text", label=None)[0], size
    assert (type(arrays[0]), arrays[0].tolist()) == (np.ndarray, text)
    assert from_data_frame(to_data_frame(spark, arrays[0]), label=None)[0].tolist() == text
    spark_model = SparkModel(text_model(), seed=0)
    losses = spark_model.fit(frame, epochs=6, batch_size=8, verbose=0, validation_split=0.2).history["loss"]
    assert losses[-1] < 0.6 * losses[0]
    expected = spark_model.model.predict(arrays, verbose=0).reshape(-1)
    np.testing.assert_allclose(spark_model.predict(arrays).reshape(-1), expected, rtol=1e-5)
    loss = spark_model.model.evaluate(arrays, y, verbose=0)
    np.testing.assert_allclose(spark_model.evaluate(frame, verbose=0), loss, rtol=1e-5)
    frame = frame.withColumn("text", F.when(F.col("good") == 1, F.col("text")))
    function = keras_udf(spark_model.model)("text", "size")
    for scored in (frame.select(function), spark_model.predict(frame, on_invalid="null").select("prediction")):
        found = np.array([score for (score,) in scored.collect()], float)
        np.testing.assert_allclose(found, np.where(y == 1, expected, np.nan), rtol=1e-4)


VOCABULARY, LENGTH, WIDTH = 20_000, 32, 448


def transformer():
    keras.utils.set_random_seed(1)
    tokens = keras.Input((LENGTH,), dtype="int32", name="tokens")
    sequence = layers.Embedding(VOCABULARY, WIDTH)(tokens)
    for _ in range(4):
        normal = layers.LayerNormalization()(sequence)
        attended = layers.MultiHeadAttention(4, WIDTH // 4)(normal, normal, use_causal_mask=True)
        sequence = layers.Add()([sequence, attended])
        hidden = layers.Dense(4 * WIDTH, activation="gelu")(layers.LayerNormalization()(sequence))
        sequence = layers.Add()([sequence, layers.Dense(WIDTH)(hidden)])
    model = keras.Model(tokens, layers.Dense(2)(layers.GlobalAveragePooling1D()(sequence)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-4), loss, metrics=["accuracy"])
    return model


def memory():
    """The memory of this process and of its largest Python worker, without what they share, in bytes."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    used = []
    for process in processes:
        try:
            if "python" in process.name():
                used.append(process.memory_full_info().uss)
        except psutil.Error:
            used.append(0)
    return used[0], max(used[1:], default=0)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("mode", "transport"),
    [("synchronous", "http"), ("asynchronous", "http"), ("hogwild", "socket")],
)
def test_a_transformer_trains(sc, request, mode, transport):
    """With 20 million weights: its memory, and the bytes on the wire."""
    x = np.random.default_rng(0).integers(0, VOCABULARY, (48, LENGTH)).astype(np.int32)
    y = (x[:, 0] % 2).astype(np.int32)
    model = transformer()
    size = 4 * model.count_params()
    assert 70e6 < size < 90e6
    (before, _), seen = memory(), []
    look = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: seen.append(memory()))
    frequency = "epoch" if mode == "synchronous" else 1
    spark_model = SparkModel(model, mode, frequency=frequency, num_workers=2, parameter_server_mode=transport, seed=1)
    losses = spark_model.fit(x, y, batch_size=8, epochs=2, callbacks=[look], verbose=0).history["loss"]
    assert np.isfinite(losses).all()
    assert losses[1] < losses[0]
    driver, worker = np.max(seen, axis=0) - (before, 0)
    stats = spark_model.parameter_server_stats
    found = f"driver +{driver / size:.1f}, worker {worker / size:.1f} times the weights; {stats}"
    request.node.add_report_section("call", "memory", found)
    assert driver < 15 * size, "10 to 11 in a new process"
    assert worker < 30 * size, "with the libraries, which take about 8 times the weights"
    if stats is not None:
        assert stats.received_bytes < 1.02 * stats.pushes * size
        assert stats.sent_bytes < 1.02 * stats.pulls * size


# Images

SIZE = (12, 16)


@pytest.fixture
def photos(tmp_path):
    """The paths of PNGs with spaces in their names."""
    rng = np.random.default_rng(0)
    paths = [tmp_path / f"photo {number}.png" for number in range(6)]
    for number, path in enumerate(paths):
        Image.fromarray(rng.integers(0, 256, (20 + number, 24, 3), np.uint8)).save(path)
    return {str(path) for path in paths}


def predicted(frame, name, loader):
    """The pixels of each row by id, or None."""
    model = keras.Sequential([keras.Input((*SIZE, 3), name="image"), keras.layers.Flatten(name="pixels")], name="pixels")
    scored = SparkModel(model).predict(frame.select("id", name), features=name, loader=loader, output_col="p")
    return {row.id: row.p for row in scored.select("id", "p").collect()}


def resized(path):
    image = keras.utils.load_img(path, target_size=SIZE)
    return (keras.utils.img_to_array(image, data_format="channels_last") * np.float32(0.5)).ravel()


def test_all_kinds_of_columns_give_the_same_images(spark, photos, tmp_path):
    half = 0.5
    loader = image_loader(SIZE, preprocessing=lambda images: images * half)  # which workers cannot import
    files = spark.read.format("binaryFile").load(str(tmp_path))
    images = spark.read.format("image").load(str(tmp_path))
    frames = {
        "content": files.withColumnRenamed("path", "id"),
        "image": images.select(F.col("image.origin").alias("id"), "image"),
        "uri": files.select(F.col("path").alias("id"), F.col("path").alias("uri")),
        "file": files.select(F.col("path").alias("id"), F.col("_metadata.file_path").alias("file")),
    }
    for name, frame in frames.items():
        found = {unquote(re.sub("^file:(//)?", "", uri)): pixels for uri, pixels in predicted(frame, name, loader).items()}
        assert found.keys() == photos, name
        for path, pixels in found.items():
            np.testing.assert_array_equal(pixels, resized(path), err_msg=name)


def test_rows_without_an_image_are_null(spark, photos, tmp_path):
    (tmp_path / "bad.png").write_bytes(b"nothing")
    paths = [*photos, str(tmp_path / "bad.png"), str(tmp_path / "gone.png"), None]
    frame = spark.createDataFrame(list(enumerate(paths)), "id int, uri string")
    found = predicted(frame, "uri", image_loader(SIZE, on_error="null"))
    assert [pixels is None for _, pixels in sorted(found.items())] == [False] * 6 + [True] * 3


# TFRecord files

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


def test_rows_survive_a_round_trip_exactly(frame, spark, tmp_path):
    path = tmp_path / "some data" / "rows"
    save_as_tfrecords(frame.repartition(3, "id"), f"file://{path}", compression="gzip")
    assert {name.partition(".")[2] for name in names(path)} == {"", "tfrecord.gz"}
    assert names(path.parent) == ["rows"]
    back = load_tfrecords(spark, str(path), schema=SCHEMA)
    assert back.schema == frame.schema
    assert by_id(back) == by_id(frame)


def test_vectors_become_arrays_of_float32(spark, tmp_path):
    path = str(tmp_path / "rows")
    save_as_tfrecords(spark.createDataFrame([(Vectors.dense([0.1, 2.0]),), (None,)], ["v"]).coalesce(1), path)
    assert [row.v for row in load_tfrecords(spark, path).collect()] == [[np.float32(0.1), 2.0], None]
    with pytest.raises(DataError, match="'v' has the type vector.*array_to_vector"):
        load_tfrecords(spark, path, schema=T.StructType().add("v", VectorUDT()))


def test_an_empty_frame_is_loaded_with_a_schema(spark, tmp_path):
    path = str(tmp_path / "rows")
    save_as_tfrecords(spark.range(4).select(F.lit(1).alias("x")).limit(0), path, compression="gzip")
    back = load_tfrecords(spark, path, schema="x int")
    assert (back.collect(), back.columns) == ([], ["x"])
    with pytest.raises(DataError, match="has features. Set schema"):
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
    with pytest.raises(DataError, match="'n' holds int64 .*/[ab]; expected bytes"):
        load_tfrecords(spark, str(tmp_path), binary_features=["n"])
    write(tmp_path / "b", example(n=1.0))
    with pytest.raises(DataError, match="'n' holds int64 .*/a, but float .*/b"):
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
    for path, words in [("z-*", "does not exist"), ("parent", "only in subfolders"), ("nothing://here", "nothing")]:
        with pytest.raises(StorageError, match=rf"cannot read '{re.escape(path)}': .*{words}"):
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
    ]:
        schema = f"id int, odd {kind}"
        with pytest.raises(DataError, match=f"'odd' has the type .*{remedy}"):
            save_as_tfrecords(spark.createDataFrame([], schema), str(tmp_path / "rows"))
        with pytest.raises(DataError, match=f"'odd' has the type .*{remedy}"):
            load_tfrecords(spark, str(tmp_path), schema=schema)
    assert names(tmp_path) == []


def test_invalid_arguments_are_reported(spark, tmp_path):
    frame, path = spark.range(3), str(tmp_path / "rows")
    for call, error, given, words in [
        (save_as_tfrecords, DataError, {"df": [1]}, r"rdd.toDF\(\)"),
        (save_as_tfrecords, ConfigurationError, {"compression": "gz"}, "mean 'gzip'"),
        (save_as_tfrecords, ConfigurationError, {"mode": "append"}, "'error', 'overwrite'"),
        (save_as_tfrecords, ConfigurationError, {"path": "/"}, "path of a folder"),
        (save_as_tfrecords, StorageError, {"path": "dbfs:/rows"}, "not support 'dbfs'"),
        (save_as_tfrecords, DataError, {"df": frame.select("id", "id")}, "unique names"),
        (save_as_tfrecords, DataError, {"df": frame.select()}, "at least one"),
        (load_tfrecords, ConfigurationError, {"spark": spark.sparkContext}, "a SparkSession"),
        (load_tfrecords, ConfigurationError, {"path": ""}, "path of a file"),
        (load_tfrecords, ConfigurationError, {"schema": "x no"}, "not valid DDL"),
        (load_tfrecords, ConfigurationError, {"schema": ["x"]}, "StructType or DDL"),
        (load_tfrecords, ConfigurationError, {"schema": "x int", "binary_features": ["x"]}, "declare these"),
        (load_tfrecords, ConfigurationError, {"binary_features": "x"}, r"\['x'\]"),
    ]:
        source = {"df": frame} if call is save_as_tfrecords else {"spark": spark}
        with pytest.raises(error, match=words):
            call(**{**source, "path": path, **given})
    assert names(tmp_path) == []


def test_records_and_files_that_cannot_be_read_are_reported_with_their_place(spark, tmp_path):
    write(tmp_path / "a", *[example(n=1)] * 5000, example(n=[1, 2]))
    with pytest.raises(PythonException, match="DataError: record 5000 of file:.*/a: feature 'n' has 2"):
        load_tfrecords(spark, str(tmp_path)).collect()
    (tmp_path / "a").write_bytes(framed(example(n=1))[:-1])
    with pytest.raises(DataError, match="file:.*/a is damaged.* offset 0"):
        load_tfrecords(spark, str(tmp_path))
    (tmp_path / "a").write_bytes(framed(b"no example"))
    with pytest.raises(PythonException, match="DataError: record 0 of file:.*/a is not"):
        load_tfrecords(spark, str(tmp_path), schema="n int").collect()


# Atomic replacement


@pytest.mark.parametrize("kind", ["local", "hadoop"])
def test_an_existing_folder_is_kept_or_replaced_atomically(spark, tmp_path, hadoop_uri, kind):
    path = str(tmp_path / "rows") if kind == "local" else f"{hadoop_uri}/rows"  # the driver writes where pyarrow cannot
    save_as_tfrecords(spark.range(0, 10, 1, 4), path)
    with pytest.raises(StorageError, match="already exists: set mode"):
        save_as_tfrecords(spark.range(3), path)
    again = load_tfrecords(spark, path).select((F.col("id") + 5).alias("id")).repartition(2)
    save_as_tfrecords(again, path, mode="overwrite")  # reads the rows that it replaces
    assert sorted(row.id for row in load_tfrecords(spark, path).collect()) == list(range(5, 15))
    assert [name.split("-")[0] for name in names(tmp_path / "rows") if name[0] != "."] == ["_SUCCESS", "part", "part"]
    assert names(tmp_path) == ["rows"]


def test_a_large_file_that_only_spark_opens_is_reported(spark, hadoop_uri, monkeypatch):
    save_as_tfrecords(spark.range(3), f"{hadoop_uri}/rows")
    monkeypatch.setattr(tfrecords, "_LARGEST_FILE", 10)
    with pytest.raises(StorageError, match="part-0000.* smaller than 2 GiB"):
        load_tfrecords(spark, f"{hadoop_uri}/rows")


def test_an_interrupt_ends_the_job_and_leaves_nothing(spark, tmp_path):
    """Also in a thread, which has no active session; nor has this one after the interrupt."""
    begun = tmp_path / "begun"

    def slow(number):
        begun.touch()
        time.sleep(30)
        return number

    def jobs():
        return {job: tracker.getJobInfo(job) for job in tracker.getActiveJobsIds() if job not in before}

    tracker = spark.sparkContext.statusTracker()
    before = tracker.getActiveJobsIds()
    rows = spark.range(2).select(F.udf(slow, "long")("id").alias("id"))
    with interrupted_when(begun.exists, seconds=20):
        save_as_tfrecords(rows, str(tmp_path / "rows"))
    deadline = time.monotonic() + 60
    while jobs() or names(tmp_path) != ["begun"]:
        assert time.monotonic() < deadline, (jobs(), names(tmp_path))
        time.sleep(0.1)
    save_as_tfrecords(spark.range(3), str(tmp_path / "again"))
    with ThreadPoolExecutor(1) as thread:
        thread.submit(save_as_tfrecords, spark.range(3), str(tmp_path / "rows")).result()
    assert load_tfrecords(spark, str(tmp_path / "rows")).count() == 3


def test_a_failed_job_leaves_the_old_folder_and_nothing_else(spark, tmp_path):
    path = str(tmp_path / "rows")
    good = spark.range(0, 10, 1, 1)
    bad = good.select(F.array("id", F.when(F.col("id") < 9, 0)).alias("x"))
    with pytest.raises(DataError, match="'x' holds .* a null"):
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
    with pytest.raises(StorageError, match=f"another process created '{hadoop_uri}/rows'"):
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
    with pytest.raises(PythonException, match="DataError: .*'x' holds .* a null"):
        bad.write.format("tfrecord").mode("append").save(path)
    with pytest.raises(AnalysisException, match="ConfigurationError: compression='snappy'"):
        good.write.format("tfrecord").mode("append").save(path, compression="snappy")
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
    with pytest.raises(AnalysisException, match="StorageError: .*/nowhere': .* not exist"):
        spark.read.format("tfrecord").load(f"{path}/nowhere")
