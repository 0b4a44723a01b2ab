"""Files on any file system: reads, writes, and replacement of files and folders.

Paths without a scheme are local, and ``file:`` URIs as well. Hadoop's file systems open other URIs (``hdfs://``, ``s3a://``),
in the JVM of the driver. A client of Spark Connect has none: there, fsspec opens them, with the credentials of this process.
Its queries could write with those of the server, but only folders of files, without a rename, and in a free slot.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Self, TypeVar

from sparkkeras.data.files import draft_of
from sparkkeras.errors import StorageError
from sparkkeras.spark.job_errors import kerberos_advice
from sparkkeras.spark.settings import uses_connect

_OBJECT_STORES = {"s3", "s3a", "s3n", "gs", "oss", "cosn"}
"""The schemes of stores in which a file is complete as soon as it exists, and Hadoop's rename is a copy."""


P = TypeVar("P", bound="_Place")


class ChecksumError(StorageError):
    """The contents of a file are not those that were written."""


def read_bytes(path: str) -> bytes:
    """Read a file.

    Raises:
        ChecksumError: The file system has checksums, and the file has other contents.
        StorageError: The file does not exist or cannot be read.
    """
    place = _place(path)
    with place.errors("read"):
        try:
            return place.read()
        except Exception:
            if not place.is_folder():
                raise
    models = [f"{path.rstrip('/')}/{name}" for name in names_in(path) if name.endswith(".keras")]
    hint = f" It contains {', '.join(map(repr, models))}." if models else ""
    raise StorageError(f"cannot read {path!r}: it is a folder; expected a file.{hint}")


def write_bytes(path: str, data: bytes, overwrite: bool = True) -> None:
    """Write a file, like `new_file`.

    Args:
        path: The path.
        data: The contents.
        overwrite: Whether to replace an existing file.

    Raises:
        StorageError: The folder does not exist or is not writable, the file exists and ``overwrite`` is ``False``, or the
            path is a directory.
    """
    with _place(path).new_file(overwrite) as file:
        file.write(data)


def put_file(path: str, source: Path) -> None:
    """Move or copy a local file to a path, like `new_file`. The source may be gone afterwards; an existing file is replaced.

    Raises:
        StorageError: The folder does not exist or is not writable.
    """
    place = _place(path)
    with place.errors("write"):
        place.put(source)


def new_file(path: str, *, atomic: bool = True) -> AbstractContextManager[BinaryIO]:
    """A file to write, which is at the path when the ``with`` block has ended without an error, and not before.

    If the process dies meanwhile, there is the old file or the new one. With file systems of fsspec whose rename cannot
    replace a file, the old one may then be a hidden file, ``.name.previous``.

    Args:
        path: The path.
        atomic: ``False`` writes a URI without a rename, which object stores do not have: readers may see a part of the file,
            also after an error. Local files are always written atomically.

    Raises:
        StorageError: The folder does not exist or is not writable, or its disk is full.
    """
    return _place(path).new_file(atomic=atomic)


def folders_in(folder: str) -> list[str]:
    """The names of the folders in a folder, sorted; empty if the folder does not exist.

    Raises:
        StorageError: The folder cannot be read.
    """
    return names_in(folder, folders=True)


def names_in(folder: str, *, folders: bool = False) -> list[str]:
    """The names of the files, or of the ``folders``, in a folder, sorted; empty if the folder does not exist.

    Raises:
        StorageError: The folder cannot be read.
    """
    place = _place(folder)
    with place.errors("read"):
        return sorted(name for name, is_folder in place.entries() if is_folder == folders)


def make_folder(folder: str) -> None:
    """Create a folder and its parents, unless it already exists.

    Raises:
        StorageError: The folder cannot be created.
    """
    place = _place(folder)
    with place.errors("create the folder"):
        place.make_folder()


def remove(path: str) -> None:
    """Remove a file, or a folder with everything in it, if it exists.

    Raises:
        StorageError: It exists and cannot be removed.
    """
    place = _place(path)
    with place.errors("remove"):
        place.remove()


def exists(path: str) -> bool:
    """Whether there is a file or folder.

    Raises:
        StorageError: The file system cannot be read.
    """
    place = _place(path)
    with place.errors("read"):
        return place.exists()


def may_exist(path: str) -> bool:
    """Whether there is a file or folder where Spark reads and writes a path; with Spark Connect, only the server knows.

    Raises:
        StorageError: The file system cannot be read.
    """
    return uses_connect() or exists(qualified(path))


def qualified(path: str) -> str:
    """The same path; one without a scheme is on Spark's default file system (``fs.defaultFS``), with Spark Connect here."""
    if has_scheme(path) or uses_connect():
        return path
    hadoop = _Hadoop(path)
    return str(hadoop.files.makeQualified(hadoop.target).toString())


@contextmanager
def new_folder(folder: str, *, overwrite: bool) -> Iterator[str]:
    """A folder to write, which has its name when the ``with`` block has ended without an error.

    A rename cannot replace a folder. So an existing one is renamed to `previous_folder` first, and removed when the new one
    has its name. If the process dies in between, both are complete. Stores without renames get the new folder as
    `previous_folder` first, until it is also in its place, where its deepest files are written last.

    Args:
        folder: The path, which the caller has checked if ``overwrite`` is ``False``.
        overwrite: Whether to replace an existing folder.

    Raises:
        StorageError: Another process has created the folder and ``overwrite`` is ``False``, or a folder cannot be renamed.
            Then the old folder is unchanged, and the message names the new one.
    """
    target = _place(folder)
    previous = target.beside("previous")
    if not target.has_renames:
        with tempfile.TemporaryDirectory(prefix="sparkkeras-") as local:
            yield local
            _check_is_new(target, overwrite)
            with target.errors("write"):
                for place in (previous, target) if target.exists() else (target,):
                    place.remove()
                    for file in sorted(Path(local).rglob("*"), key=lambda file: len(file.parts)):
                        if file.is_file():
                            _place(f"{place.path}/{file.relative_to(local)}").put(file)
                previous.remove()
        return
    draft = target.beside(uuid.uuid4().hex)
    try:
        yield draft.path
        _check_is_new(target, overwrite)
    except BaseException:
        with suppress(Exception):
            draft.remove()
        raise
    try:
        with target.errors("write"):
            _replace(draft, target)
    except StorageError as error:
        raise StorageError(f"the new folder {draft.path!r} is complete, but cannot be renamed: {error}") from error


def _check_is_new(target: _Place, overwrite: bool) -> None:
    if not overwrite and exists(target.path):  # a rename would move the new folder into it
        raise StorageError(f"another process created {target.path!r} in the meantime: save to another path.")


def _replace(draft: P, target: P) -> None:
    """Rename a file or folder; what has its name is renamed to `previous_folder` first, and back after an error."""
    previous = target.beside("previous")
    is_there = target.exists()
    if is_there:
        previous.remove()  # a process died before it removed it
        target.move(previous)
    try:
        draft.move(target)
    except BaseException:
        with suppress(Exception):
            if is_there and not target.exists():
                previous.move(target)
        raise
    with suppress(Exception):  # the new one has its name
        previous.remove()


def previous_folder(folder: str) -> str:
    """The path of a folder while `new_folder` replaces it."""
    return _place(folder).beside("previous").path


def has_scheme(path: str) -> bool:
    """Whether a path is a URI."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+:", path) is not None


def can_open_uris() -> bool:
    """Whether URIs can be opened now. If they need Spark, and it does not run, the other functions start it."""
    from pyspark import SparkContext

    return uses_connect() or SparkContext._active_spark_context is not None


def is_reachable(path: str) -> bool:
    """Whether a path can be opened now; see `can_open_uris`."""
    return local_path(path) is not None or can_open_uris()


def local_path(path: str) -> str | None:
    """The path on this machine of a path without a scheme, or of a ``file:`` URI; ``None`` for others.

    Raises:
        StorageError: It is the URI of a file of another host.
    """
    if not has_scheme(path):
        return path
    if path[:5].lower() != "file:":
        return None
    if re.match("file://[^/]", path, re.IGNORECASE):
        raise StorageError(f"{path!r} names a host: expected file:/PATH or file:///PATH, which are on this machine.")
    return re.sub("^/*(?=/)", "", path[5:])  # neither Spark nor this function decodes %20


def _place(path: str) -> _Place:
    local = local_path(path)
    if local is not None:
        return _Local(path, local)
    return _Fsspec(path) if uses_connect() else _Hadoop(path)


class _Place(ABC):
    """A path on a file system.

    Attributes:
        path: The path, as it was given.
        has_renames: Whether files and folders can be renamed without a copy of what is in them.
    """

    path: str
    has_renames = True
    _raises: type[Exception] = Exception

    @contextmanager
    def errors(self, verb: str) -> Iterator[None]:
        """Errors of the file system become a `StorageError`."""
        try:
            yield
        except StorageError:
            raise
        except self._raises as error:
            raise self.translated(verb, error) from error

    @abstractmethod
    def translated(self, verb: str, error: Any) -> StorageError:
        """The error for one of the file system."""

    @abstractmethod
    def read(self) -> bytes: ...

    @abstractmethod
    def put(self, source: Path, overwrite: bool = True, atomic: bool = True) -> None:
        """Copy or move a local file to this path."""

    @abstractmethod
    def entries(self) -> list[tuple[str, bool]]:
        """The names in this folder, and whether each is a folder; empty if there is none."""

    @abstractmethod
    def make_folder(self) -> None: ...

    @abstractmethod
    def remove(self) -> None:
        """Remove the file, or the folder with everything in it, if it exists."""

    @abstractmethod
    def exists(self) -> bool: ...

    @abstractmethod
    def is_folder(self) -> bool: ...

    @abstractmethod
    def beside(self, end: str) -> Self:
        """The path of a hidden file or folder next to this one."""

    @abstractmethod
    def move(self, target: Self) -> None:
        """Rename to a path that does not exist."""

    @contextmanager
    def new_file(self, overwrite: bool = True, atomic: bool = True) -> Iterator[BinaryIO]:
        """See `new_file`."""
        with tempfile.TemporaryDirectory(prefix="sparkkeras-") as folder:
            local = Path(folder) / "file"
            with local.open("wb") as file:
                yield file
            with self.errors("write"):
                if not overwrite and self.exists():
                    raise StorageError(_exists(self.path))
                self.put(local, overwrite, atomic and self.path.partition(":")[0] not in _OBJECT_STORES)


class _Local(_Place):
    """A path on this machine."""

    _raises = OSError

    def __init__(self, path: str, target: str | Path) -> None:
        self.path, self.target = path, Path(target)

    def translated(self, verb: str, error: OSError) -> StorageError:
        if verb == "write" and isinstance(error, FileExistsError):
            return StorageError(_exists(self.path))
        folder = self.target.parent
        missing = f"the folder {str(folder)!r} does not exist. Create it first."
        is_missing = verb == "write" and not folder.exists()
        reason = missing if is_missing else f"{error.strerror or error}."
        return StorageError(f"cannot {verb} {self.path!r}: {reason}")

    def read(self) -> bytes:
        return self.target.read_bytes()

    @contextmanager
    def new_file(self, overwrite: bool = True, atomic: bool = True) -> Iterator[BinaryIO]:
        """See `new_file`; always atomic."""
        if self.target.name in ("", ".."):
            raise StorageError(f"cannot write {self.path!r}: it is a directory; pass the path of a file.")
        if not overwrite and self.target.exists():
            raise StorageError(_exists(self.path))
        with self.errors("write"), draft_of(self.target, overwrite) as draft, draft.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    def put(self, source: Path, overwrite: bool = True, atomic: bool = True) -> None:
        with draft_of(self.target, overwrite) as draft:
            shutil.move(source, draft)
            with draft.open("rb") as file:
                os.fsync(file.fileno())

    def entries(self) -> list[tuple[str, bool]]:
        with suppress(FileNotFoundError):
            return [(path.name, path.is_dir()) for path in self.target.iterdir()]
        return []

    def make_folder(self) -> None:
        self.target.mkdir(parents=True, exist_ok=True)

    def remove(self) -> None:
        with suppress(FileNotFoundError):
            if self.target.is_dir() and not self.target.is_symlink():
                shutil.rmtree(self.target)
            else:
                self.target.unlink()

    def exists(self) -> bool:
        return self.target.exists()

    def is_folder(self) -> bool:
        return self.target.is_dir()

    def beside(self, end: str) -> Self:
        path = self.target.absolute()
        beside = path.with_name(f".{path.name}.{end}")
        return type(self)(str(beside), beside)

    def move(self, target: Self) -> None:
        target.target.parent.mkdir(parents=True, exist_ok=True)
        self.target.rename(target.target)


class _Fsspec(_Place):
    """A URI on a file system that fsspec knows."""

    def __init__(self, path: str) -> None:
        try:
            from fsspec import AbstractFileSystem
            from fsspec.core import has_magic, url_to_fs
        except ImportError as error:
            raise StorageError(
                f"{path!r}: URIs with Spark Connect need fsspec, which is not installed. Use a local path, or pip install "
                "'sparkkeras[connect]'."
            ) from error
        scheme, _, place = path.partition(":")
        self.path = path = f"{scheme.lower()}:{place}"
        if "://" not in path or has_magic(path):  # fsspec takes the first for local paths, the others for patterns
            raise StorageError(
                f"{path!r}: with Spark Connect, expected SCHEME://PLACE/PATH without the characters *, ? and [."
            )
        with self.errors("reach"):
            self._given, self.target = url_to_fs(path)
        self.has_renames = type(self._given).mv is not AbstractFileSystem.mv

    @property
    def files(self) -> Any:
        """The file system, without what it remembers of files that others may have changed."""
        self._given.invalidate_cache()
        return self._given

    def translated(self, verb: str, error: Exception) -> StorageError:  # each file system has its own
        first = (str(error).splitlines() or [""])[0].rstrip(".")
        kind = "it does not exist" if isinstance(error, FileNotFoundError) else type(error).__name__
        advice = _NO_HDFS if verb == "reach" and self.path.startswith(("hdfs:", "viewfs:")) else ""
        if "not known" in first:
            advice = " Install the package with which fsspec opens it, such as s3fs, gcsfs or adlfs."
        return StorageError(f"cannot {verb} {self.path!r} with fsspec, which Connect needs: {kind} ({first}).{advice}")

    def read(self) -> bytes:
        return bytes(self.files.cat_file(self.target))

    def put(self, source: Path, overwrite: bool = True, atomic: bool = True) -> None:
        if self.has_renames:
            self.files.makedirs(self.target.rpartition("/")[0], exist_ok=True)
        if not (self.has_renames and atomic):  # in object stores, a file is complete as soon as it exists
            self.files.put_file(str(source), self.target)
            return
        draft = self.beside(f"{uuid.uuid4().hex}.tmp")
        try:
            self.files.put_file(str(source), draft.target)
            _replace(draft, self)
        finally:
            with suppress(Exception):
                draft.remove()

    def entries(self) -> list[tuple[str, bool]]:
        with suppress(FileNotFoundError):
            found = [(each["name"].rstrip("/"), each["type"]) for each in self.files.ls(self.target, detail=True)]
            here = self.target.rstrip("/")  # some stores list the empty object that stands for the folder
            return [(name.rpartition("/")[2], kind == "directory") for name, kind in found if name != here]
        return []

    def make_folder(self) -> None:
        if self.has_renames:
            self.files.makedirs(self.target, exist_ok=True)

    def remove(self) -> None:
        if self.exists():
            self.files.rm(self.target, recursive=True)

    def exists(self) -> bool:
        try:  # not exists(), which is False after any error
            self.files.info(self.target)
        except FileNotFoundError:
            return False
        return True

    def is_folder(self) -> bool:
        return bool(self.files.isdir(self.target))

    def beside(self, end: str) -> Self:
        folder, slash, name = self.path.rstrip("/").rpartition("/")
        return type(self)(f"{folder}{slash}.{name}.{end}")

    def move(self, target: Self) -> None:
        self.files.mv(self.target, target.target)
        if self.exists() or not target.exists():  # not all report it
            raise OSError(f"the rename of {self.path!r} failed")


_NO_HDFS = " Unless Hadoop's native client is installed here, use webhdfs://HOST:9870/PATH, s3a://, or a local path."

_NO_CLIENT = re.compile(r"No FileSystem for scheme|ClassNotFoundException: Class \S+ not found")
_ADD_CLIENT = (
    ". Add the client of this file system to Spark, in the version of its Hadoop: for s3a://, which Hadoop has instead of "
    "s3://, spark.jars.packages=org.apache.hadoop:hadoop-aws:X.Y.Z."
)


class _Hadoop(_Place):
    """A path on a file system of Hadoop."""

    def __init__(self, path: str) -> None:
        from sparkkeras.spark.cluster import active_context

        context = active_context()
        jvm: Any = context._jvm
        self._jvm = jvm
        self._fs = jvm.org.apache.hadoop.fs
        self._conf = context._jsc.hadoopConfiguration()
        self.path = path
        with self.errors("reach"):
            self.target = self._fs.Path(path)
            self.files = self.target.getFileSystem(self._conf)

    def read(self) -> bytes:
        if self.is_folder():
            raise IsADirectoryError(self.path)
        with tempfile.TemporaryDirectory(prefix="sparkkeras-") as folder:
            local = Path(folder) / "file"
            self.files.copyToLocalFile(False, self.target, self._fs.Path(local.as_uri()), True)
            return local.read_bytes()

    def put(self, source: Path, overwrite: bool = True, atomic: bool = True) -> None:
        if not atomic:
            self._copy(source)
            return
        draft = self.beside(f"{uuid.uuid4().hex}.tmp")
        try:
            draft._copy(source)
            draft._rename(self, overwrite)
        finally:
            with suppress(Exception):
                draft.remove()

    def _copy(self, source: Path) -> None:
        """Copy a local file here; as a stream, since ``copyFromLocalFile`` of S3A waits forever for some servers."""
        local = self._fs.Path(source.as_uri())
        self._fs.FileUtil.copy(local.getFileSystem(self._conf), local, self.files, self.target, False, True, self._conf)

    def entries(self) -> list[tuple[str, bool]]:
        if not self.exists():
            return []
        return [(each.getPath().getName(), each.isDirectory()) for each in self.files.listStatus(self.target)]

    def make_folder(self) -> None:
        self.files.mkdirs(self.target)

    def remove(self) -> None:
        self.files.delete(self.target, True)

    def exists(self) -> bool:
        return bool(self.files.exists(self.target))

    def is_folder(self) -> bool:
        return bool(self.files.getFileStatus(self.target).isDirectory())

    def beside(self, end: str) -> Self:
        target = self.files.makeQualified(self.target)
        parent = target.getParent() or target
        return type(self)(str(self._fs.Path(parent, f".{target.getName()}.{end}").toString()))

    def move(self, target: Self) -> None:
        if not self.files.rename(self.target, target.target):  # Hadoop only returns that it could not
            raise OSError(f"the rename of {self.target.toString()} failed")

    def _rename(self, target: Self, overwrite: bool) -> None:
        """Rename a file, optionally over the target; atomic if the file system supports it."""
        try:
            context = self._fs.FileContext.getFileContext(self.files.getUri(), self._conf)
        except Exception as error:
            if "UnsupportedFileSystemException" not in str(error):
                raise
            if overwrite:
                target.remove()
            self.move(target)  # some vendors' file systems have only this rename, which cannot overwrite
            return
        option = self._jvm.java.lang.Class.forName("org.apache.hadoop.fs.Options$Rename")
        chosen = self._jvm.java.lang.Enum.valueOf(option, "OVERWRITE" if overwrite else "NONE")
        options = self._jvm.java.lang.reflect.Array.newInstance(option, 1)
        options[0] = chosen
        # In a FileContext, hdfs:///user is no path: it has no authority, which a FileSystem takes from fs.defaultFS.
        context.rename(self.files.makeQualified(self.target), self.files.makeQualified(target.target), options)

    def translated(self, verb: str, error: Exception) -> StorageError:
        java = getattr(error, "java_exception", None)
        reason = f"{java.getClass().getSimpleName()}: {java.getMessage()}" if java is not None else str(error)
        reason = reason.partition("\n\tat ")[0]  # the stack of a NameNode
        if "FileAlreadyExists" in reason:
            return StorageError(_exists(self.path))
        kind = ChecksumError if "ChecksumException" in reason else StorageError
        advice = _ADD_CLIENT if _NO_CLIENT.search(reason) else kerberos_advice(reason)
        return kind(f"cannot {verb} {self.path!r}: {reason}{advice}")


def _exists(path: str) -> str:
    return f"{path!r} already exists: pass overwrite=True to replace it, or another path."
