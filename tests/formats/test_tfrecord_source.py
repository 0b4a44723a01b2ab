"""The data source of TFRecord files, run as Spark runs it, without Spark."""

import dataclasses
import os
import pickle

import pyarrow as pa
import pytest
from pyarrow import fs
from pyspark import cloudpickle
from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.types import ArrayType, LongType, StructType

from sparkkeras import ConfigurationError, DataError, StorageError, TFRecordDataSource
from sparkkeras.formats import tfrecord_source
from sparkkeras.formats.examples import Field
from sparkkeras.formats.tfrecord_source import TFRecordWriter

ROWS = pa.record_batch([pa.array([1, 2])], ["n"])
SCHEMA = StructType().add("n", "long", nullable=False)


def source(path, **options):
    return TFRecordDataSource(CaseInsensitiveDict({"path": str(path), **options}))


def writer(path, mode="error", **changed):
    return dataclasses.replace(TFRecordWriter.of(str(path), (Field("n", "bigint"),), mode, None), **changed)


def write(path, overwrite=False, schema=SCHEMA, rows=ROWS):
    job = source(path).writer(schema, overwrite)
    job.commit([job.write(iter([rows]))])


def read(path):
    reader = source(path).reader(SCHEMA)
    return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]


def names(folder):
    return sorted(os.listdir(folder))


def files(folder):
    """The names of all files in a folder and its subfolders."""
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


@pytest.fixture(params=["renaming", "object store"])
def renames(request, monkeypatch):
    """Whether folders can be renamed: the local file system, treated as such and as an object store."""
    if request.param == "object store":
        monkeypatch.setattr(tfrecord_source, "_OBJECT_STORES", {"local"})
    return request.param == "renaming"


@pytest.mark.usefixtures("renames")
def test_an_aborted_job_leaves_the_files_that_were_there(tmp_path):
    path = tmp_path / "rows"
    for overwrite in False, True, False:
        before = files(tmp_path)
        job = source(path).writer(SCHEMA, overwrite)
        job.abort([job.write(iter([ROWS])), None])
        assert files(tmp_path) == before
        write(path, overwrite)
    assert len(read(path)) == 4
    assert names(tmp_path) == ["rows"]


def test_files_that_were_appended_before_a_failure_are_deleted(tmp_path):
    class Full(fs.LocalFileSystem):
        def open_output_stream(self, path, **options):
            if path.endswith("_SUCCESS"):
                raise OSError("the disk is full")
            return super().open_output_stream(path, **options)

    write(tmp_path / "rows")
    before = names(tmp_path / "rows")
    job = writer(tmp_path / "rows", "append", files=Full())
    written = [job.write(iter([ROWS]))]
    with pytest.raises(StorageError, match="/rows': the disk is full"):
        job.commit(written)
    assert len(names(tmp_path / "rows")) == len(before) + 1
    job.abort(written)
    assert names(tmp_path / "rows") == before
    assert names(tmp_path) == ["rows"]


def test_the_columns_have_the_types_that_spark_expects(tmp_path):
    write(tmp_path / "rows")
    assert source(tmp_path / "rows").schema() == "`n` bigint"
    with pytest.warns(UserWarning, match="/rows' .*'m'.* Known: 'n'"):
        reader = source(tmp_path / "rows").reader(StructType().add("n", ArrayType(LongType())).add("m", "float"))
    (batch,) = reader.read(reader.partitions()[0])
    assert batch.to_pylist() == [{"n": [1], "m": None}, {"n": [2], "m": None}]
    with pytest.warns(UserWarning, match="'m'"):
        reader = source(tmp_path / "rows").reader(StructType().add("m", "float", False))
    with pytest.raises(DataError, match="'m' is missing.* m float"):
        list(reader.read(reader.partitions()[0]))


def test_a_path_is_a_file_a_folder_or_a_glob(tmp_path):
    write(tmp_path / "rows [1]")
    name = next(name for name in names(tmp_path / "rows [1]") if name.startswith("part"))
    (tmp_path / "rows [1]" / ".hidden").write_text("no record")
    for path in "rows [1]", f"rows [1]/{name}", "rows*/part*":
        assert read(tmp_path / path) == [{"n": 1}, {"n": 2}]
    (tmp_path / "empty").mkdir()
    assert list(source(tmp_path / "empty").reader(SCHEMA).partitions()) == []
    with pytest.raises(DataError, match="/empty': .*Set schema"):
        source(tmp_path / "empty").schema()
    with pytest.raises(StorageError, match="path does not exist"):
        source(tmp_path / "other*").schema()
    with pytest.raises(StorageError, match="is a file: append"):
        source(tmp_path / "rows [1]" / name).writer(SCHEMA, False)
    for options, message in ({"paths": '["a"]'}, r'paths=\["a"\]'), ({}, "path is missing"):
        with pytest.raises(ConfigurationError, match=message):
            TFRecordDataSource(CaseInsensitiveDict(options)).schema()


@pytest.mark.parametrize(
    "call",
    [lambda source: source.schema(), lambda source: source.reader(SCHEMA), lambda source: source.writer(SCHEMA, False)],
)
def test_unknown_options_are_reported(tmp_path, call):
    write(tmp_path / "rows")
    with pytest.raises(ConfigurationError, match="'compresion'. Known: .*mean 'compression'"):
        call(source(tmp_path / "rows", compresion="gzip"))
    # SQL uses the same options to read and write a view, and Spark adds some when it creates a table.
    call(source(tmp_path / "rows", compression="gzip", owner="me", location="there", provider="tfrecord"))


def test_binary_features_apply_to_inferred_columns(tmp_path):
    text = StructType().add("a", "string").add("b", "string").add("c", "string")
    write(tmp_path, schema=text, rows=pa.record_batch([pa.array(["x"])] * 3, ["a", "b", "c"]))
    inferred = source(tmp_path, binary_features="a, c")
    assert inferred.schema() == "`a` binary, `b` string, `c` binary"
    schema = StructType().add("a", "binary").add("b", "string").add("late", "binary")
    pickle.loads(cloudpickle.dumps(inferred)).reader(schema)  # without a warning
    with pytest.raises(DataError, match="binary_features: .*'A'.*'a'"):
        source(tmp_path, binary_features="A").schema()
    with pytest.raises(ConfigurationError, match="only without a schema"):
        source(tmp_path, binary_features="a").reader(schema)


def test_files_in_subfolders_are_read_as_spark_reads_them(tmp_path):
    folders = ["n=1", "n=1/deep", "deep/n=1", "_n=1", "other", "_hidden/n=1", ".hidden/n=1", "."]
    for number, folder in enumerate(folders):
        write(tmp_path / "rows" / folder, rows=pa.record_batch([pa.array([number])], ["n"]))
    assert sorted(row["n"] for row in read(tmp_path / "rows")) == [0, 1, 2, 3, 7]
    assert [row["n"] for row in read(tmp_path / "row*" / "*=*")] == [3, 0]
    write(tmp_path / "parent" / "plain")
    write(tmp_path / "parent" / "_hidden")
    for call in read, lambda path: source(path).schema():
        with pytest.raises(StorageError, match=r"subfolders; .* column=value .*/parent/\*'"):
            call(tmp_path / "parent")
    assert read(tmp_path / "parent" / "*") == read(tmp_path / "parent" / "plain")


def test_a_folder_that_another_process_creates_meanwhile_is_not_replaced(tmp_path):
    job = writer(tmp_path / "rows")
    written = [job.write(iter([ROWS]))]
    (tmp_path / "rows").mkdir()
    with pytest.raises(StorageError, match="already exists"):
        job.commit(written)
    job.abort(written)
    assert files(tmp_path) == []


def test_concurrent_attempts_do_not_interfere(tmp_path):
    job = writer(tmp_path / "rows")

    def stopped():
        yield ROWS
        raise KeyboardInterrupt

    def slow(ends):
        yield ROWS
        job.write(iter([ROWS]))  # another attempt finishes in the meantime
        if ends:
            job.commit([written])

    with pytest.raises(KeyboardInterrupt):
        job.write(stopped())
    assert names(job._partial) == names(job._complete) == []
    written = job.write(slow(ends=False))
    assert len(names(job._complete)) == 2
    with pytest.raises(OSError):
        job.write(slow(ends=True))
    assert names(tmp_path / "rows") == ["_SUCCESS", written.name]
    assert names(tmp_path) == ["rows"]


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_the_old_folder_is_kept_until_the_new_one_is_renamed(tmp_path, kind):
    class Stubborn(fs.LocalFileSystem):
        def move(self, source, target):
            if source.endswith("/complete"):
                raise OSError("not now")
            super().move(source, target)

    path = tmp_path / "rows"
    if kind == "folder":
        path.mkdir()
    (path / "old" if kind == "folder" else path).write_text("old")
    job = writer(path, "overwrite", files=Stubborn())
    with pytest.raises(StorageError, match="not now"):
        job.commit([])
    job.abort([])
    assert names(path) == ["old"] if kind == "folder" else path.is_file()
    assert names(tmp_path) == ["rows"]
    writer(path, "overwrite").commit([])
    assert names(path) == ["_SUCCESS"]
    assert names(tmp_path) == ["rows"]


@pytest.mark.usefixtures("renames")
def test_files_that_are_not_visible_on_the_driver_are_reported(tmp_path):
    job = writer(tmp_path / "rows")
    lost = dataclasses.replace(job.write(iter([ROWS])), size=7)
    with pytest.raises(StorageError, match="1 of 1 .*not visible"):
        job.commit([lost, None])
    job.abort([lost, None])
    assert files(tmp_path) == []
