"""Atomic writes of local files."""

import errno
import os
import stat
import sys
from unittest.mock import Mock

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from sparkkeras.errors import StorageError
from sparkkeras.spark import filesystem
from sparkkeras.spark.filesystem import ChecksumError, has_scheme, read_bytes, write_bytes


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


def test_a_written_file_is_read_and_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for content in (b"\0\1 a long first one", b""):
        write_bytes("model.keras", content)
        assert read_bytes("model.keras") == content
    assert names(tmp_path) == ["model.keras"]


def test_the_error_for_a_folder_names_the_models_in_it(tmp_path):
    (tmp_path / "model.keras").touch()
    with pytest.raises(StorageError, match="a folder.* contains '.*/model.keras'"):
        read_bytes(str(tmp_path))


def test_the_file_has_the_permissions_that_a_new_file_has(tmp_path):
    write_bytes(str(tmp_path / "ours"), b"1")
    (tmp_path / "plain").write_bytes(b"1")
    assert stat.S_IMODE((tmp_path / "ours").stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("error", "overwrite"), [(FULL, True), (FULL, False), (KeyboardInterrupt(), True)], ids=["full", "new", "interrupt"]
)
def test_a_failed_write_leaves_only_the_old_file(tmp_path, monkeypatch, error, overwrite):
    path = tmp_path / "model.keras"
    if overwrite:
        path.write_bytes(b"old")
    monkeypatch.setattr(filesystem.os, "fsync", Mock(side_effect=error))
    expected, words = (StorageError, r"model\.keras': No space left") if error is FULL else (KeyboardInterrupt, None)
    with pytest.raises(expected, match=words):
        write_bytes(str(path), b"new", overwrite)
    assert names(tmp_path) == (["model.keras"] if overwrite else [])
    assert not overwrite or path.read_bytes() == b"old"


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_without_overwrite_the_first_of_two_writers_wins(tmp_path, monkeypatch, when):
    path = tmp_path / "model.keras"
    fsync = os.fsync

    def other_writer(file):
        fsync(file)
        path.write_bytes(b"theirs")

    if when == "before":
        write_bytes(str(path), b"theirs", overwrite=False)
    else:
        monkeypatch.setattr(filesystem.os, "fsync", other_writer)
    with pytest.raises(StorageError, match="already exists: pass overwrite=True"):
        write_bytes(str(path), b"ours", overwrite=False)
    assert path.read_bytes() == b"theirs"
    assert names(tmp_path) == ["model.keras"]


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("nowhere/model.keras", "folder '.*nowhere' does not exist"),
        ("folder", "directory|already exists"),
        (".", "'.': it is a directory"),
        ("file/model.keras", "Not a directory"),
    ],
)
def test_a_path_that_cannot_be_written_is_named(tmp_path, monkeypatch, path, words, overwrite):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"1")
    with pytest.raises(StorageError, match=words):
        write_bytes(path, b"1", overwrite)
    assert names(tmp_path) == ["file", "folder"]


@pytest.mark.parametrize("name", ["missing.keras", ""])
def test_an_error_names_a_file_that_cannot_be_read(tmp_path, name):
    with pytest.raises(StorageError, match=str(tmp_path / name)) as caught:
        read_bytes(str(tmp_path / name))
    assert isinstance(caught.value, OSError)


def test_a_scheme_has_a_colon_and_more_than_one_letter():
    for path in ("hdfs://host/m.keras", "file:/tmp/m", "abfs+x://y"):
        assert has_scheme(path)
    for path in ("model.keras", "/tmp/m.keras", "./a:b", "C:\\models\\m.keras", "C:/m.keras", ""):
        assert not has_scheme(path)


def test_a_checksum_of_hadoop_that_differs_has_its_own_error():
    hadoop, error = filesystem._Hadoop.__new__(filesystem._Hadoop), Exception()
    hadoop.path, error.java_exception = "hdfs://a", Mock()
    error.java_exception.getClass().getSimpleName.return_value = "ChecksumException"
    with pytest.raises(ChecksumError, match="'hdfs://a': ChecksumException"), hadoop.errors("read"):
        raise error


@pytest.mark.parametrize("uri", ["file:{}", "FILE://{}"])
def test_a_uri_of_a_file_is_a_local_path(tmp_path, uri):
    write_bytes(uri.format(tmp_path / "file"), b"1")
    assert read_bytes(str(tmp_path / "file")) == b"1"
    assert names(tmp_path) == ["file"]
    with pytest.raises(StorageError, match="'file://host/file' names a host"):
        write_bytes("file://host/file", b"1")


# URIs with Spark Connect, which fsspec opens


class Renaming(MemoryFileSystem):
    """Has a rename of its own, which does nothing if the target exists, and reports nothing, as that of WebHDFS."""

    protocol = "renaming"
    store: dict = {}  # noqa: RUF012 - as that of its base class
    pseudo_dirs = [""]  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("renaming:/"))

    def mv(self, old, new):
        if not self.exists(new):
            self.copy(old, new, recursive=True)
            self.rm(old, recursive=True)


@pytest.fixture(params=["renaming", "memory"])
def folder(request, monkeypatch):
    """The URI of an empty folder on a file system with renames, or without."""
    fsspec.register_implementation("renaming", Renaming, clobber=True)
    monkeypatch.setattr(filesystem, "uses_connect", lambda: True)
    yield f"{request.param}://place/run"
    for kind in (MemoryFileSystem, Renaming):
        kind.store.clear()
        kind.pseudo_dirs[:] = [""]


def test_files_of_fsspec_are_replaced(folder):
    for content in (b"first", b"second"):
        write_bytes(f"{folder}/file", content)
        assert read_bytes(f"{folder}/file") == content
    with pytest.raises(StorageError, match="pass overwrite=True"):
        write_bytes(f"{folder}/file", b"third", overwrite=False)
    assert filesystem.names_in(folder) == ["file"]
    filesystem.remove(f"{folder}/file")
    filesystem.remove(f"{folder}/file")
    assert filesystem.names_in(folder) == []


def replace_folder(folder, content):
    with filesystem.new_folder(f"{folder}/model", overwrite=True) as draft:
        filesystem.make_folder(f"{draft}/metadata")
        write_bytes(f"{draft}/metadata/part", content)
        write_bytes(f"{draft}/weights", content)
        assert content != b"third"


def test_folders_of_fsspec_are_replaced(folder):
    for content in (b"first", b"second"):
        replace_folder(folder, content)
        assert [read_bytes(f"{folder}/model/{name}") for name in ("metadata/part", "weights")] == [content] * 2
    with pytest.raises(AssertionError):
        replace_folder(folder, b"third")
    assert read_bytes(f"{folder}/model/weights") == b"second"
    assert filesystem.folders_in(folder) == ["model"]
    filesystem.remove(f"{folder}/model")
    assert filesystem.folders_in(folder) == []


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("folder", ["renaming"], indirect=True)
def test_a_rename_of_fsspec_that_fails_leaves_the_old_file(folder, monkeypatch, failing):
    write_bytes(f"{folder}/file", b"old")
    rename, calls = Renaming.mv, []

    def mv(files, old, new):
        calls.append(new)
        if len(calls) != failing + 1:
            rename(files, old, new)

    monkeypatch.setattr(Renaming, "mv", mv)
    with pytest.raises(StorageError, match="'renaming://place/run/file' .*rename of .* failed"):
        write_bytes(f"{folder}/file", b"new")
    assert read_bytes(f"{folder}/file") == b"old"
    assert filesystem.names_in(folder) == ["file"]


@pytest.mark.parametrize("folder", ["memory"], indirect=True)
def test_a_store_without_renames_always_has_a_complete_folder(folder, monkeypatch):
    """Wherever the process dies: the old one or the new one, in its place or as the previous one."""
    put, remove = MemoryFileSystem.put_file, MemoryFileSystem.rm
    for last in range(12):
        replace_folder(folder, b"old")
        calls = []

        def dies(function, *arguments, calls=calls, last=last, **more):
            calls.append(function)
            if len(calls) > last:
                raise SystemExit
            return function(*arguments, **more)

        with monkeypatch.context() as patched:
            patched.setattr(MemoryFileSystem, "put_file", lambda *given, **more: dies(put, *given, **more))
            patched.setattr(MemoryFileSystem, "rm", lambda *given, **more: dies(remove, *given, **more))
            try:
                replace_folder(folder, b"new")
                break
            except SystemExit:
                pass
        is_there = filesystem.exists(f"{folder}/model/metadata/part")
        found = f"{folder}/model" if is_there else filesystem.previous_folder(f"{folder}/model")
        contents = {read_bytes(f"{found}/{name}") for name in ("metadata/part", "weights")}
        assert len(contents) == 1
        filesystem.remove(f"{folder}/model")
    assert last > 5


def test_errors_of_fsspec_are_not_taken_for_missing_files(folder, monkeypatch):
    monkeypatch.setattr(MemoryFileSystem, "info", Mock(side_effect=PermissionError("not yours")))
    with pytest.raises(StorageError, match="cannot read .*not yours"):
        filesystem.exists(folder)


def test_the_empty_object_of_a_folder_is_not_in_it(folder, monkeypatch):
    write_bytes(f"{folder}/file", b"1")
    listed = MemoryFileSystem.ls
    marker = {"name": "/place/run/", "type": "file", "size": 0}
    monkeypatch.setattr(MemoryFileSystem, "ls", lambda *given, **more: [marker, *listed(*given, **more)])
    assert filesystem.names_in(folder) == ["file"]


@pytest.mark.parametrize("uri", ["hdfs:/user/me/run", "memory://place/run*"])
def test_uris_that_fsspec_would_take_for_others_are_errors(folder, uri):
    with pytest.raises(StorageError, match="SCHEME://PLACE/PATH"):
        write_bytes(uri, b"1")


def test_a_missing_fsspec_is_an_error(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(StorageError, match=r"fsspec.*'sparkkeras\[connect\]'"):
        read_bytes(f"{folder}/file")
