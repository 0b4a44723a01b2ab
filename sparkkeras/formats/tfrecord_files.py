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

_SCHEMES = ("file", "hdfs", "viewfs", "s3", "s3a", "gs", "gcs", "abfs", "abfss")


def file_system(path: str) -> tuple[Any, str]:
    """The pyarrow file system of a path, and the path on it.

    Raises:
        StorageError: pyarrow does not support the file system, or cannot reach it.
    """
    from pyarrow import fs

    scheme = path.partition(":")[0] if has_scheme(path) else "file"
    if scheme == "file":  # neither Spark nor this function decodes %20
        return fs.LocalFileSystem(), str(Path(re.sub("^file:(/*(?=/))?", "", path)).absolute())
    if scheme not in _SCHEMES:
        raise StorageError(
            f"cannot open {path!r}: pyarrow does not support {scheme!r}. {known_names(scheme, _SCHEMES)} Copy the files "
            "from or to one of these, or mount the file system and use its local path."
        )
    try:
        files, place = fs.FileSystem.from_uri(re.sub("^s3a:", "s3:", path))
    except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
        raise StorageError(f"cannot reach {path!r} through pyarrow: {str(error).splitlines()[0]}") from error
    return files, place


def list_files(path: str) -> tuple[Any, dict[str, int]]:
    """The pyarrow file system of a path, and the size in bytes of each file there.

    Raises:
        StorageError: The path does not exist, or cannot be reached.
    """
    from pyarrow import fs

    files, place = file_system(path)
    with storage_errors(f"cannot read {path!r}"):
        kind = files.get_file_info(place).type
        if kind == fs.FileType.Directory:
            found = files.get_file_info(fs.FileSelector(place))
        else:
            is_pattern = kind == fs.FileType.NotFound and files.type_name == "local"
            found = files.get_file_info(glob.glob(place) if is_pattern else [place])  # noqa: PTH207 - of any path
    sizes = {info.path: info.size for info in found if info.is_file and not info.base_name.startswith((".", "_"))}
    if kind == fs.FileType.NotFound and not sizes:
        raise StorageError(f"cannot read {path!r}: the path does not exist.")
    return files, sizes


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
