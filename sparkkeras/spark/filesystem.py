"""Atomic reads and writes of files on any file system that Spark can access.

Paths without a scheme are local. Paths with a scheme (``file:``, ``hdfs://``, ``s3a://``) use Spark's Hadoop file systems,
in the JVM of the driver; with Spark Connect, where this process has no JVM, queries of the session
(`sparkkeras.spark.remote_files`). These cannot write plain files, but data sets that the functions here read as files.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from sparkkeras.data.files import draft_of
from sparkkeras.errors import StorageError
from sparkkeras.spark.connect import active_remote_session
from sparkkeras.spark.job_errors import kerberos_advice
from sparkkeras.spark.remote_files import SUFFIX, ChecksumError, RemoteFiles, read_data_set

_OBJECT_STORES = {"s3", "s3a", "s3n", "gs", "oss", "cosn"}
"""The schemes of stores in which a file is complete as soon as it exists, and a rename is a copy."""


def read_bytes(path: str) -> bytes:
    """Read a file.

    Raises:
        ChecksumError: The file system has checksums, and the file has other contents.
        StorageError: The file does not exist or cannot be read.
    """
    if not has_scheme(path):
        with _local_errors("read", path):
            try:
                return Path(path).read_bytes()
            except IsADirectoryError as error:
                raise _folder_error(path, Path(path)) from error
            except FileNotFoundError:
                if not Path(path + SUFFIX).is_dir():
                    raise
                return read_data_set(Path(path + SUFFIX), path)
    if remote := _remote_files():
        return remote.read(path)
    hadoop = _Hadoop(path)
    with hadoop.errors("read"), _temporary() as local:
        is_data_set = not hadoop.files.exists(hadoop.target) and hadoop.files.exists(hadoop.path(path + SUFFIX))
        source = path + SUFFIX if is_data_set else path
        hadoop.files.copyToLocalFile(False, hadoop.path(source), hadoop.path(local.as_uri()), True)
        if is_data_set:
            return read_data_set(local, path)
        if local.is_dir():
            raise _folder_error(path, local)
        return local.read_bytes()


def _folder_error(path: str, local: Path) -> StorageError:
    """The error for a folder in place of a file; ``local`` is that folder, or a copy of it on this machine."""
    models = [f"{path.rstrip('/')}/{each.name}" for each in sorted(local.glob("*.keras"))]
    hint = f" It contains {', '.join(map(repr, models))}." if models else ""
    return StorageError(f"cannot read {path!r}: it is a folder; expected a file.{hint}")


def write_bytes(path: str, data: bytes, overwrite: bool = True) -> None:
    """Write a file atomically: write a temporary file in the same folder, then rename it, so readers see no partial file.

    Args:
        path: The path.
        data: The contents.
        overwrite: Whether to replace an existing file.

    Raises:
        StorageError: The folder does not exist or is not writable, the file exists and ``overwrite`` is ``False``, or the
            path is a directory.
        ClusterError: The path is a URI, and this process uses Spark Connect.
    """
    if has_scheme(path):
        with _temporary() as local:
            local.write_bytes(data)
            _put_hadoop(path, local, overwrite)
        return
    target = Path(path)
    if target.name in ("", ".."):
        raise StorageError(f"cannot write {path!r}: it is a directory; pass the path of a file.")
    if not overwrite and target.exists():
        raise StorageError(_exists(path))
    with _new_local_file(path, overwrite) as file:
        file.write(data)


@contextmanager
def _new_local_file(path: str, overwrite: bool = True) -> Iterator[BinaryIO]:
    try:
        with draft_of(Path(path), overwrite) as draft, draft.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except StorageError:
        raise
    except FileExistsError as error:
        raise StorageError(_exists(path)) from error
    except OSError as error:
        raise _write_error(path, error) from error


def _write_error(path: str, error: OSError) -> StorageError:
    """The error for a local path that cannot be written."""
    folder = Path(path).parent
    missing = f"the folder {str(folder)!r} does not exist. Create it first."
    reason = f"{error.strerror or error}." if folder.exists() else missing
    return StorageError(f"cannot write {path!r}: {reason}")


def put_file(path: str, source: Path) -> None:
    """Move or copy a local file to a path, atomically. The source may be gone afterwards; an existing file is replaced.

    Raises:
        StorageError: The folder does not exist or is not writable.
    """
    if has_scheme(path):
        _put_hadoop(path, source, overwrite=True)
        return
    try:
        with draft_of(Path(path)) as draft:
            shutil.move(source, draft)
            with draft.open("rb") as file:
                os.fsync(file.fileno())
    except OSError as error:
        raise _write_error(path, error) from error


@contextmanager
def new_file(path: str, *, atomic: bool = True) -> Iterator[BinaryIO]:
    """A file to write, which is at the path when the ``with`` block has ended without an error, and not before.

    With Spark Connect, a URI gets a data set in place of a plain file, and replacing it is not atomic.

    Args:
        path: The path.
        atomic: ``False`` writes a URI without a rename, which object stores do not have: readers may see a part of the file,
            also after an error. Local files are always written atomically.

    Raises:
        StorageError: The folder does not exist or is not writable, or its disk is full.
    """
    if not has_scheme(path):
        with _new_local_file(path) as file:
            yield file
        return
    with _temporary() as local:
        with local.open("wb") as file:
            yield file
        if remote := _remote_files():
            with local.open("rb") as file:
                remote.write(path, file)
        else:
            _put_hadoop(path, local, overwrite=True, atomic=atomic)


def folders_in(folder: str) -> list[str]:
    """The names of the folders in a folder, sorted; empty if the folder does not exist.

    Raises:
        StorageError: The folder cannot be read.
    """
    return _entries(folder)[1]


def names_in(folder: str) -> list[str]:
    """The names of the files in a folder, sorted; empty if the folder does not exist.

    Raises:
        StorageError: The folder cannot be read.
    """
    return _entries(folder)[0]


def _entries(folder: str) -> tuple[list[str], list[str]]:
    """The sorted names of the files in a folder, which data sets are as well, and of the other folders in it."""
    found: Collection[tuple[str, bool]] = ()
    if not has_scheme(folder):
        with _local_errors("read", folder), suppress(FileNotFoundError):
            found = [(path.name, path.is_dir()) for path in Path(folder).iterdir()]
    elif remote := _remote_files():
        found = {(name, bool(slash)) for name, slash, _ in (file.partition("/") for file in remote.files(folder))}
    else:
        hadoop = _Hadoop(folder)
        with hadoop.errors("read"):
            if hadoop.files.exists(hadoop.target):
                found = [(each.getPath().getName(), each.isDirectory()) for each in hadoop.files.listStatus(hadoop.target)]
    data_sets = {name for name, is_folder in found if is_folder and name.endswith(SUFFIX)}
    files = [name for name, is_folder in found if not is_folder]
    folders = [name for name, is_folder in found if is_folder and name not in data_sets]
    return sorted([*files, *(name.removesuffix(SUFFIX) for name in data_sets)]), sorted(folders)


def make_folder(folder: str) -> None:
    """Create a folder and its parents, unless it already exists.

    Raises:
        StorageError: The folder cannot be created.
    """
    if not has_scheme(folder):
        with _local_errors("create the folder", folder):
            Path(folder).mkdir(parents=True, exist_ok=True)
    elif not _remote_files():  # of which queries that write create it
        hadoop = _Hadoop(folder)
        with hadoop.errors("create"):
            hadoop.files.mkdirs(hadoop.target)


def remove(path: str) -> None:
    """Remove a file, if it exists.

    Raises:
        StorageError: The file exists and cannot be removed.
    """
    if not has_scheme(path):
        with _local_errors("remove", path):
            Path(path).unlink(missing_ok=True)
        remove_folder(path + SUFFIX)
    elif remote := _remote_files():
        remote.remove(path)
    else:
        hadoop = _Hadoop(path)
        with hadoop.errors("remove"):
            hadoop.files.delete(hadoop.target, False)
            hadoop.files.delete(hadoop.path(path + SUFFIX), True)


def remove_folder(folder: str) -> None:
    """Remove a folder with everything in it, if it exists.

    Raises:
        StorageError: It cannot be removed.
    """
    if not has_scheme(folder):
        with _local_errors("remove", folder), suppress(FileNotFoundError):
            shutil.rmtree(folder)
    elif remote := _remote_files():
        remote.remove_folder(folder)
    else:
        hadoop = _Hadoop(folder)
        with hadoop.errors("remove"):
            hadoop.files.delete(hadoop.target, True)


def exists(uri: str) -> bool:
    """Whether a URI names a file or folder, on a file system of Hadoop.

    Raises:
        StorageError: The file system cannot be read.
    """
    hadoop = _Hadoop(uri)
    with hadoop.errors("read"):
        return bool(hadoop.files.exists(hadoop.target))


def qualified(path: str) -> str:
    """The URI of a path on a file system of Hadoop; a path without a scheme is on Spark's default file system."""
    hadoop = _Hadoop(path)
    return str(hadoop.files.makeQualified(hadoop.target).toString())


@contextmanager
def new_folder(folder: str, *, overwrite: bool) -> Iterator[str]:
    """A folder to write on a file system of Hadoop, which has its name when the ``with`` block has ended without an error.

    A rename cannot replace a folder. So an existing one is renamed to `previous_folder` first, and removed when the new one
    has its name. If the process dies in between, both are complete.

    Args:
        folder: The path, which the caller has checked if ``overwrite`` is ``False``.
        overwrite: Whether to replace an existing folder.

    Raises:
        StorageError: Another process has created the folder and ``overwrite`` is ``False``, or a folder cannot be renamed.
            Then the old folder is unchanged, and the message names the new one.
    """
    hadoop = _Hadoop(folder)
    target, previous, draft = hadoop.target, hadoop.beside("previous"), hadoop.beside(uuid.uuid4().hex)
    name = str(draft.toString())
    try:
        yield name
        if not overwrite and exists(folder):  # a rename would move the new folder into it
            raise StorageError(f"another process created {folder!r} in the meantime: save to another path.")
    except BaseException:
        with suppress(Exception):
            hadoop.files.delete(draft, True)
        raise
    try:
        with hadoop.errors("write"):
            if overwrite and hadoop.files.exists(target):
                hadoop.files.delete(previous, True)  # a process died before it removed it
                hadoop.move(target, previous)
            hadoop.move(draft, target)
    except StorageError as error:
        with suppress(Exception):
            if overwrite and not hadoop.files.exists(target):
                hadoop.files.rename(previous, target)
        raise StorageError(f"the new folder {name!r} is complete, but cannot be renamed: {error}") from error
    if overwrite:
        with suppress(Exception):  # the new folder has its name
            hadoop.files.delete(previous, True)


def previous_folder(folder: str) -> str:
    """The path of a folder on a file system of Hadoop while `new_folder` replaces it."""
    return str(_Hadoop(folder).beside("previous").toString())


def has_scheme(path: str) -> bool:
    """Whether a path is a URI."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+:", path) is not None


def is_reachable(path: str) -> bool:
    """Whether Spark runs, if a path needs it. Other functions here start it."""
    from pyspark import SparkContext

    return not has_scheme(path) or _remote_files() is not None or SparkContext._active_spark_context is not None


def needs_slot(path: str) -> bool:
    """Whether writing to a path takes a slot of Spark: with Spark Connect, a URI is written by a query."""
    return has_scheme(path) and _remote_files() is not None


def _remote_files() -> RemoteFiles | None:
    """The file systems of the Spark Connect server, if this process uses one."""
    session = active_remote_session()
    return None if session is None else RemoteFiles(session)


@contextmanager
def _local_errors(verb: str, path: str) -> Iterator[None]:
    """Errors of local files become a `StorageError`."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"cannot {verb} {path!r}: {error.strerror or error}.") from error


def _put_hadoop(path: str, source: Path, overwrite: bool, atomic: bool = True) -> None:
    hadoop = _Hadoop(path)
    target = hadoop.target
    with hadoop.errors("write"):
        if not overwrite and hadoop.files.exists(target):
            raise StorageError(_exists(path))
        if not atomic or path.partition(":")[0] in _OBJECT_STORES:
            hadoop.put(source, target)
            return
        draft = hadoop.beside(f"{uuid.uuid4().hex}.tmp")
        try:
            hadoop.put(source, draft)
            hadoop.rename(draft, target, overwrite)
        finally:
            with suppress(Exception):
                hadoop.files.delete(draft, False)


_NO_CLIENT = re.compile(r"No FileSystem for scheme|ClassNotFoundException: Class \S+ not found")
_ADD_CLIENT = (
    ". Add the client of this file system to Spark, in the version of its Hadoop: for s3a://, which Hadoop has instead of "
    "s3://, spark.jars.packages=org.apache.hadoop:hadoop-aws:X.Y.Z."
)


class _Hadoop:
    """The Hadoop file system of a URI."""

    def __init__(self, path: str) -> None:
        from sparkkeras.spark.cluster import active_context

        context = active_context()
        jvm: Any = context._jvm
        self._jvm = jvm
        self._fs = jvm.org.apache.hadoop.fs
        self._conf = context._jsc.hadoopConfiguration()
        self._given = path
        with self.errors("reach"):
            self.target = self.path(path)
            self.files = self.target.getFileSystem(self._conf)

    def path(self, path: str) -> Any:
        return self._fs.Path(path)

    def beside(self, end: str) -> Any:
        """The path of a hidden file or folder next to this one."""
        target = self.files.makeQualified(self.target)
        return self._fs.Path(target.getParent() or target, f".{target.getName()}.{end}")

    def move(self, source: Any, target: Any) -> None:
        """Rename a file or folder to a name that does not exist.

        Raises:
            OSError: Hadoop only returns that it could not.
        """
        if not self.files.rename(source, target):
            raise OSError(f"the rename of {source.toString()} failed")

    def put(self, source: Path, target: Any) -> None:
        """Copy a local file; as a stream, since ``copyFromLocalFile`` of S3A waits forever for some servers."""
        local = self.path(source.as_uri())
        self._fs.FileUtil.copy(local.getFileSystem(self._conf), local, self.files, target, False, True, self._conf)

    def rename(self, draft: Any, target: Any, overwrite: bool) -> None:
        """Rename a file, optionally over the target; atomic if the file system supports it."""
        try:
            context = self._fs.FileContext.getFileContext(self.files.getUri(), self._conf)
        except Exception as error:
            if "UnsupportedFileSystemException" not in str(error):
                raise
            if overwrite:
                self.files.delete(target, False)
            self.move(draft, target)  # some vendors' file systems have only this rename, which cannot overwrite
            return
        option = self._jvm.java.lang.Class.forName("org.apache.hadoop.fs.Options$Rename")
        chosen = self._jvm.java.lang.Enum.valueOf(option, "OVERWRITE" if overwrite else "NONE")
        options = self._jvm.java.lang.reflect.Array.newInstance(option, 1)
        options[0] = chosen
        # In a FileContext, hdfs:///user is no path: it has no authority, which a FileSystem takes from fs.defaultFS.
        context.rename(self.files.makeQualified(draft), self.files.makeQualified(target), options)

    @contextmanager
    def errors(self, verb: str) -> Iterator[None]:
        try:
            yield
        except StorageError:
            raise
        except Exception as error:
            java = getattr(error, "java_exception", None)
            reason = f"{java.getClass().getSimpleName()}: {java.getMessage()}" if java is not None else str(error)
            reason = reason.partition("\n\tat ")[0]  # the stack of a NameNode
            if "FileAlreadyExists" in reason:
                raise StorageError(_exists(self._given)) from error
            kind = ChecksumError if "ChecksumException" in reason else StorageError
            advice = _ADD_CLIENT if _NO_CLIENT.search(reason) else kerberos_advice(reason)
            raise kind(f"cannot {verb} {self._given!r}: {reason}{advice}") from error


@contextmanager
def _temporary() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="sparkkeras-") as folder:
        yield Path(folder) / "file"


def _exists(path: str) -> str:
    return f"{path!r} already exists: pass overwrite=True to replace it, or another path."
