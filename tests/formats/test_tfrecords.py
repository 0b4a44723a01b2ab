"""TFRecord files and tf.train.Examples, compared with TensorFlow's reader and writer, and damaged on purpose."""

import functools
import gzip
import io
import sys
import zlib
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import types

from sparkkeras import ClusterError, DataError, load_tfrecords
from sparkkeras.formats import tfrecords
from sparkkeras.formats.examples import BYTES, FLOATS, INTS, Field, collect_stats, decode, encode, parse
from sparkkeras.formats.records import LIBRARY, SUFFIXES, compressor, framed, read_records
from sparkkeras.spark import probe
from sparkkeras.spark.worker_checks import check_optional

RECORDS = [b"", b"a", bytes(range(256)) * 9, b"\x00" * 70_000]
OPTIONS = {None: "", "gzip": "GZIP", "zlib": "ZLIB"}


def written(records, compression=None):
    packed = compressor(compression)
    return b"".join(packed.compress(framed(record)) for record in records) + packed.flush()


def read(data, name="the file"):
    return list(read_records(io.BufferedReader(io.BytesIO(data)), name))


def example(**features):
    """A TensorFlow Example from features given as ``(kind, values)``."""
    lists = {"bytes": tf.train.BytesList, "float": tf.train.FloatList, "int64": tf.train.Int64List}
    return tf.train.Example(
        features=tf.train.Features(
            feature={
                name: tf.train.Feature(**{f"{kind}_list": lists[kind](value=values)})
                for name, (kind, values) in features.items()
            }
        )
    )


# Files


@pytest.mark.parametrize("compression", SUFFIXES)
def test_our_files_and_those_of_tensorflow_are_the_same(tmp_path, compression):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.write_bytes(written(RECORDS, compression))
    found = tf.data.TFRecordDataset(str(ours), compression_type=OPTIONS[compression])
    assert [record.numpy() for record in found] == RECORDS
    with tf.io.TFRecordWriter(str(theirs), OPTIONS[compression]) as writer:
        for record in RECORDS:
            writer.write(record)
    assert read(theirs.read_bytes()) == RECORDS


def test_compressed_data_is_recognized_and_read_as_a_whole():
    record = bytes(0x8B1F)
    assert framed(record)[:2] == b"\x1f\x8b"  # its length looks like gzip
    assert read(framed(record)) == [record]
    assert read(written(RECORDS[:2], "gzip") + written(RECORDS[2:], "gzip")) == RECORDS
    record = np.random.default_rng(0).integers(0, 2, 3 << 20).astype(np.uint8).tobytes()
    assert read(written([record, record], "zlib")) == [record, record]
    assert read(gzip.compress(framed(bytes(5 << 20)) * 2)) == [bytes(5 << 20)] * 2


def test_a_flipped_bit_is_reported_with_file_and_offset():
    data = bytearray(written([b"first", b"second"]))
    offset = 16 + len(b"first")
    for place, message in [(offset, "length"), (offset + 9, "length"), (offset + 13, "data does")]:
        broken = data.copy()
        broken[place] ^= 1
        records = read_records(io.BufferedReader(io.BytesIO(bytes(broken))), "part-7")
        assert next(records) == b"first"
        with pytest.raises(DataError, match=f"part-7 .*offset {offset}: .*{message}"):
            next(records)
    with pytest.raises(DataError, match="offset 0: .*not start"):
        read(b"a,b,c\n1,2,3\n")


def test_a_truncated_file_is_reported():
    data = written([b"first", b"second"])
    for end in range(1, len(data)):
        if end == 16 + len(b"first"):
            continue
        with pytest.raises(DataError, match="ends within a record"):
            read(data[:end])
    with pytest.raises(DataError, match="ends within a record"):
        read(zlib.compress(data[:-1]))
    for compression in ("gzip", "zlib"):
        data = written([b"first", bytes(1000)], compression)
        for end in (len(data) // 2, len(data) - 1):
            with pytest.raises(DataError, match="ends within its compressed"):
                read(data[:end])
        with pytest.raises(DataError, match="data is damaged|checksum"):
            read(data[:-2] + b"zz")


# Examples


ARROW = {
    "boolean": (pa.bool_(), st.booleans()),
    "tinyint": (pa.int8(), st.integers(-(2**7), 2**7 - 1)),
    "int": (pa.int32(), st.integers(-(2**31), 2**31 - 1)),
    "bigint": (pa.int64(), st.integers(-(2**63), 2**63 - 1) | st.sampled_from([0, 127, 128, -1, 2**63 - 1, -(2**63)])),
    "float": (pa.float32(), st.floats(width=32, allow_nan=False)),
    "double": (pa.float64(), st.floats(width=32, allow_nan=False)),
    "string": (pa.string(), st.text(max_size=5)),
    "binary": (pa.binary(), st.binary(max_size=200)),
}


FIELDS = [Field(kind, kind) for kind in ARROW]
FIELDS += [Field(f"{kind}s", kind, is_array=True) for kind in ("bigint", "float", "string")]


def values_of(field):
    _, values = ARROW[field.value]
    return st.none() | (st.lists(values, max_size=5) if field.is_array else values)


def batch_of(rows, fields):
    kinds = [pa.list_(ARROW[field.value][0]) if field.is_array else ARROW[field.value][0] for field in fields]
    return pa.RecordBatch.from_pylist(rows, pa.schema(list(zip([field.name for field in fields], kinds, strict=True))))


ROWS = st.lists(st.fixed_dictionaries({field.name: values_of(field) for field in FIELDS}), max_size=3)


@settings(max_examples=30, deadline=None)
@given(rows=ROWS)
def test_rows_survive_a_round_trip_and_tensorflow_parses_them(rows):
    batch = batch_of(rows, FIELDS)
    records = encode(batch, FIELDS)
    assert len(records) == len(rows)
    assert encode(batch.slice(1, 1), FIELDS) == records[1:2]
    for row, record in zip(rows, records, strict=True):
        found = tf.train.Example.FromString(record).features.feature
        assert set(found) == {name for name, value in row.items() if value is not None}
        for field in FIELDS:
            value = row[field.name]
            if value is None:
                continue
            values = value if field.is_array else [value]
            expected = [one.encode() if isinstance(one, str) else one for one in values]
            kind = found[field.name].WhichOneof("kind")
            assert kind == {BYTES: "bytes_list", FLOATS: "float_list", INTS: "int64_list"}[field.kind]
            assert list(getattr(found[field.name], kind).value) == expected
    of_tensorflow = [tf.train.Example.FromString(record).SerializeToString() for record in records]
    for each in (records, of_tensorflow):
        assert decode([parse(record) for record in each], FIELDS, 0, "f").to_pylist() == rows


def test_unpacked_values_and_unknown_fields_are_parsed():
    def delimited(number, data):
        return bytes([number << 3 | 2, len(data)]) + data

    floats = delimited(2, b"\x0d" + np.float32(1.5).tobytes() + delimited(1, np.float32([2, 3]).tobytes()))
    integers = delimited(3, b"\x08\x05" + b"\x08\xac\x02" + delimited(1, b"\x07"))
    unknown = b"\x48\x80\x01" + b"\x51" + bytes(8) + b"\x5d" + bytes(4) + delimited(15, b"?")
    features = b"".join(
        delimited(1, delimited(1, name) + delimited(2, unknown + feature))
        for name, feature in [(b"f", floats), (b"i", floats), (b"i", floats + integers), (b"none", b"")]
    )
    record = unknown + b"\x0a" + bytes([len(features) & 0x7F | 0x80, len(features) >> 7]) + features
    expected = tf.train.Example.FromString(record).features.feature
    fields = [Field("f", "float", True), Field("i", "bigint", True), Field("none", "string")]
    (row,) = decode([parse(record)], fields, 0, "f").to_pylist()
    assert row == {"f": [1.5, 2, 3], "i": [5, 300, 7], "none": None}
    assert row["f"] == list(expected["f"].float_list.value)
    assert row["i"] == list(expected["i"].int64_list.value)


def test_damaged_examples_raise_value_error():
    record = example(x=("float", [1.0, 2.0]), y=("int64", [300, -1]), s=("bytes", [b"abc"])).SerializeToString()
    rejected = 0
    for end in range(1, len(record)):
        try:
            tf.train.Example.FromString(record[:end])
        except Exception:
            rejected += 1
            with pytest.raises(ValueError):
                parse(record[:end])
    assert rejected > 20
    with pytest.raises(ValueError, match="unknown wire type"):
        parse(b"\x0b")
    with pytest.raises(ValueError, match="ten bytes"):
        parse(b"\x08" + b"\xff" * 12)


@pytest.mark.parametrize("is_array", [False, True])
def test_a_finite_double_beyond_float32_is_reported(is_array):
    fields = [Field("x", "double", is_array)]
    largest = float(np.finfo(np.float32).max)
    rows = [{"x": [value] if is_array else value} for value in (float("inf"), float("nan"), -largest, -1e300)]
    encode(batch_of(rows[:-1], fields), fields)
    with pytest.raises(DataError, match=r"column 'x' .*-1e\+300.*Scale"):
        encode(batch_of(rows, fields), fields)


def test_vectors_are_written_as_lists_of_floats():
    parts = {"type": pa.int8(), "size": pa.int32(), "indices": pa.list_(pa.int32()), "values": pa.list_(pa.float64())}
    rows = [{"type": 1, "values": [1.0, 0.0, 2.0]}, {"type": 0, "size": 4, "indices": [1, 3], "values": [5.0, 6.0]}, None]
    batch = pa.record_batch([pa.array(rows, pa.struct(parts))], ["v"])
    records = [parse(record) for record in encode(batch, [Field("v", "double", is_array=True, is_vector=True)])]
    found = decode(records, [Field("v", "float", is_array=True)], 0, "f").to_pylist()
    assert [row["v"] for row in found] == [[1, 0, 2], [0, 5, 0, 6], None]


@pytest.mark.parametrize(
    ("field", "kind", "values", "message"),
    [
        (Field("x", "float"), "int64", [1], "int64 .* x float"),
        (Field("x", "bigint"), "int64", [], "0 values"),
        (Field("x", "int", True), "int64", [0, -(2**31) - 1], "-2147483649.* x array<int>"),
        (Field("x", "boolean"), "int64", [2], "holds 2,.* x boolean"),
        (Field("x", "string", True), "bytes", [b"ok", b"\xff"], "not UTF-8"),
    ],
)
def test_a_record_that_does_not_fit_the_schema_is_reported(field, kind, values, message):
    good = {BYTES: ("bytes", [b"0"]), FLOATS: ("float", [0.0]), INTS: ("int64", [0])}[field.kind]
    records = [example(x=good), example(), example(x=(kind, values))]
    parsed = [parse(record.SerializeToString()) for record in records]
    with pytest.raises(DataError, match=f"record 102 of part-7: feature 'x' .*{message}"):
        decode(parsed, [field], 100, "part-7")


def test_inference_considers_all_records():
    records = [
        example(a=("int64", [1]), b=("bytes", [b"text"]), c=("float", [1.0]), e=("bytes", [])),
        example(a=("int64", [2**62, -1]), b=("bytes", [b"\xff"]), d=("bytes", ["ü".encode()]), f=("int64", [-1])),
    ]
    seen = collect_stats((parse(record.SerializeToString()), "") for record in records)
    kinds = ["array<bigint>", "binary", "float", "string", "array<string>", "bigint"]
    assert {name: one.field(False).type_name for name, one in seen.items()} == dict(zip("abcdef", kinds, strict=True))
    assert seen["d"].field(True).type_name == "binary"


def test_a_warning_reports_names_in_a_schema_that_no_record_has(tmp_path, monkeypatch):
    path = tmp_path / "a"
    frame = SimpleNamespace(mapInArrow=lambda task, schema: [field.name for field in task.fields])
    monkeypatch.setattr(tfrecords, "_checked_workers", lambda session: None)
    monkeypatch.setattr(tfrecords, "_listed", lambda session, there: (frame, {f"file:{path}": path.stat().st_size}))

    def load(*names):
        fields = [types.StructField(name, types.IntegerType()) for name in names]
        return load_tfrecords(SimpleNamespace(read=None), "there", schema=types.StructType(fields))

    path.write_bytes(written([example(label=("int64", [1])).SerializeToString()]))
    assert load("label") == ["label"]
    with pytest.warns(UserWarning, match="'there' .*'lable'; .*'label'") as warned:
        load("lable", "label")
    assert warned[0].filename == __file__
    path.write_bytes(b"not a record")
    assert load("lable") == ["lable"]  # the task that reads the file raises the error


# Libraries on workers


def test_workers_without_the_checksum_library_are_reported_before_a_job(monkeypatch, tmp_path):
    assert LIBRARY[0] not in next(probe.probe())["missing"]
    monkeypatch.setattr(probe, "MODULES", (*probe.MODULES, "no_such_module"))
    (found,) = probe.probe()
    assert "no_such_module" in found["missing"]
    found |= {"host": "node7", "missing": [LIBRARY[0]]}
    cluster = SimpleNamespace(require=functools.partial(check_optional, [found]))
    monkeypatch.setattr(tfrecords, "cluster_of", lambda session: cluster)
    schema = types.StructType([types.StructField("x", types.IntegerType())])
    with pytest.raises(ClusterError, match="google-crc32c .*node7.*pip install"):
        load_tfrecords(SimpleNamespace(read=None), str(tmp_path), schema=schema)
    assert LIBRARY[0] in probe.MODULES


def test_a_worker_without_the_checksum_library_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    with pytest.raises(ClusterError, match="pip install google-crc32c"):
        framed(b"data")
