"""File systems and files of paths, listed and opened with pyarrow.fs, which needs no SparkSession."""

from __future__ import annotations

import glob
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sparkkeras.errors import StorageError, known_names
from sparkkeras.spark.filesystem import has_scheme

BUFFER_BYTES = 1 << 20
"""The size of the buffer of an open file."""

SCHEMES = ("file", "hdfs", "viewfs", "s3", "s3a", "gs", "gcs", "abfs", "abfss")
"""The schemes of URIs that pyarrow.fs opens."""


def file_system(path: str) -> tuple[Any, str]:
    """The pyarrow file system of a path, and the path on it.

    Raises:
        StorageError: pyarrow does not support the file system, or cannot reach it.
    """
    from pyarrow import fs

    scheme = path.partition(":")[0] if has_scheme(path) else "file"
    if scheme == "file":  # neither Spark nor this function decodes %20
        return fs.LocalFileSystem(), str(Path(re.sub("^file:(/*(?=/))?", "", path)).absolute())
    if scheme not in SCHEMES:
        raise StorageError(
            f"cannot open {path!r}: pyarrow does not support {scheme!r}. {known_names(scheme, SCHEMES)} Copy the files "
            "from or to one of these, or mount the file system and use its local path."
        )
    try:
        files, place = fs.FileSystem.from_uri(re.sub("^s3a:", "s3:", path))
    except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
        raise StorageError(f"cannot reach {path!r} through pyarrow: {str(error).splitlines()[0]}") from error
    return files, place


def list_files(path: str) -> tuple[Any, dict[str, int]]:
    """The pyarrow file system of a path, and the size in bytes of each file that Spark's file formats would read there.

    These are the files of a folder, and all files below its subfolders with names like ``column=value``, without hidden
    files and folders. (If a folder has both, Spark's formats leave out those that are not in subfolders.)

    Raises:
        StorageError: The path does not exist or cannot be reached, or has files only in other subfolders.
    """
    from pyarrow import fs

    files, place = file_system(path)
    sizes, skipped = dict[str, int](), False
    with storage_errors(f"cannot read {path!r}"):
        roots = files.get_file_info([place])
        if roots[0].type == fs.FileType.NotFound and files.type_name == "local":
            matches = files.get_file_info(sorted(glob.glob(place)))  # noqa: PTH207 - of any path
            roots = [info for info in matches if not _is_hidden(info)]
        if all(info.type == fs.FileType.NotFound for info in roots):
            raise StorageError(f"cannot read {path!r}: the path does not exist.")
        for root in roots:
            for info in _files_in(files, root):
                folder = info.path[len(root.path) :].rpartition("/")[0]
                if not folder or "=" in folder:
                    sizes[info.path] = info.size
                else:
                    skipped = True
    if skipped and not sizes:
        raise only_subfolders(path)
    return files, sizes


def only_subfolders(path: str) -> StorageError:
    """The error for a folder whose files are all in subfolders that are not read."""
    return StorageError(
        f"cannot read {path!r}: it has files only in subfolders; only those with names like column=value are read with "
        f"their parent. Load the subfolders, one by one or with a glob: {path.rstrip('/') + '/*'!r}."
    )


def _files_in(files: Any, root: Any) -> Iterator[Any]:
    """The file infos of a file, or of all files in a folder and its subfolders that are not hidden."""
    from pyarrow import fs

    if root.is_file:
        yield root
    elif root.type == fs.FileType.Directory:
        for info in files.get_file_info(fs.FileSelector(root.path)):
            if not _is_hidden(info):
                yield from _files_in(files, info)


def _is_hidden(info: Any) -> bool:
    """Whether Spark's file formats leave out a file or folder."""
    name = info.base_name
    return name.startswith(".") or (name.startswith("_") and "=" not in name)


def open_file(files: Any, name: str) -> io.BufferedReader:
    """Open a file for reading.

    Args:
        files: The pyarrow file system.
        name: The path on it.

    Raises:
        StorageError: It cannot be opened.
    """
    try:
        return io.BufferedReader(files.open_input_file(name), BUFFER_BYTES)
    except OSError as error:
        raise StorageError(
            f"a worker cannot read {name}: {error}. Local files must have the same path on all workers; otherwise use a "
            "file system such as hdfs: or s3a:."
        ) from error


@contextmanager
def storage_errors(what: str) -> Iterator[None]:
    """Raise a `StorageError` that begins with ``what`` in place of an ``OSError``."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"{what}: {error}.") from error
