"""TFRecord files: records of bytes behind one another, each with its length and two checksums. Knows neither Spark nor what
the bytes mean.

A record is its length (8 bytes, little-endian), the checksum of these bytes, the data, and its checksum (4 bytes each:
CRC-32C, rotated and offset, so that a checksum of data that holds checksums stays one). A file may be compressed as a whole.
"""

from __future__ import annotations

import functools
import io
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any

from sparkkeras.errors import ClusterError, DataError

LIBRARY = ("google_crc32c", "google-crc32c")
"""What computes checksums, on the driver and on all workers: the module, and the package that has it."""

SUFFIXES = {None: ".tfrecord", "gzip": ".tfrecord.gz", "zlib": ".tfrecord.zlib"}
"""The compressions there are, and how the names of their files end."""

EMPTY_BYTES = 24
"""No file of this size holds a record of any use, compressed or not: a record has 16 bytes beside its data."""

_HEAD, _FOOT = struct.Struct("<QI"), struct.Struct("<I")
_LENGTH = struct.Struct("<Q")
_WINDOW_BITS = {"gzip": 31, "zlib": 15}
_EITHER = 47
_CHUNK = 1 << 20


def framed(data: bytes) -> bytes:
    """One record as it stands in a file."""
    length = _LENGTH.pack(len(data))
    return b"".join((length, _FOOT.pack(_checksum(length)), data, _FOOT.pack(_checksum(data))))


def compressor(compression: str | None) -> Any:
    """What turns the bytes of a file, given piece by piece, into compressed ones: ``compress(piece)`` and ``flush()``."""
    return _Plain() if compression is None else zlib.compressobj(wbits=_WINDOW_BITS[compression])


def read_records(file: IO[bytes], name: str) -> Iterator[bytes]:
    """The records of a file, one after the other; whether and how it is compressed is seen from its first bytes.

    Args:
        file: The file, at its beginning; one that can seek.
        name: What messages call it.

    Raises:
        DataError: The file ends within a record, or a checksum does not fit. It names the file and the offset in bytes of
            the record, counted behind decompression.
    """
    head = file.read(_HEAD.size)
    file.seek(0)
    # The length of a plain file's first record may look like the mark of a compressed one, but not with its checksum.
    compressed = not _is_head(head) and _looks_compressed(head)
    source = io.BufferedReader(_Inflated(file, name), _CHUNK) if compressed else file
    offset = 0
    while head := source.read(_HEAD.size):
        if len(head) == _HEAD.size and not _is_head(head):
            found = " It does not begin like a TFRecord file." if offset == 0 else ""
            raise _broken(name, offset, f"the checksum of the record's length does not fit.{found}")
        length = _HEAD.unpack(head)[0] if len(head) == _HEAD.size else 0
        data = source.read(length)
        foot = source.read(_FOOT.size)
        if len(head) + len(data) + len(foot) < _HEAD.size + length + _FOOT.size:
            raise _broken(name, offset, "the file ends within a record.")
        if _FOOT.unpack(foot)[0] != _checksum(data):
            raise _broken(name, offset, "the checksum of the record's data does not fit.")
        yield data
        offset += _HEAD.size + length + _FOOT.size


def _broken(name: str, offset: int, what: str) -> DataError:
    return DataError(
        f"{name} is damaged, or no TFRecord file, at offset {offset}: {what} Write the file again, or leave it out."
    )


def _checksum(data: bytes) -> int:
    crc = _crc32c()(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


@functools.cache
def _crc32c() -> Callable[[bytes], int]:
    try:
        import google_crc32c
    except ImportError as error:
        raise ClusterError(
            f"the checksums of TFRecord files need {LIBRARY[1]}, which cannot be imported: pip install {LIBRARY[1]}, for "
            f"the driver and for all workers. {type(error).__name__}: {error}"
        ) from error
    found: Callable[[bytes], int] = google_crc32c.value
    return found


def _is_head(head: bytes) -> bool:
    return len(head) == _HEAD.size and _HEAD.unpack(head)[1] == _checksum(head[: _LENGTH.size])


def _looks_compressed(head: bytes) -> bool:
    return head[:2] == b"\x1f\x8b" or (head[:1] == b"\x78" and int.from_bytes(head[:2], "big") % 31 == 0)


class _Plain:
    """Compresses nothing."""

    def compress(self, piece: bytes) -> bytes:
        return piece

    def flush(self) -> bytes:
        return b""


class _Inflated(io.RawIOBase):
    """A gzip or zlib file, perhaps of several parts behind one another, as what it holds."""

    def __init__(self, file: IO[bytes], name: str) -> None:
        self._file, self._name = file, name
        self._inflate, self._rest, self._told = zlib.decompressobj(_EITHER), b"", 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            if self._inflate.eof:
                self._rest = self._inflate.unused_data or self._file.read(_CHUNK)
                if not self._rest:
                    return 0
                self._inflate = zlib.decompressobj(_EITHER)
            given = self._rest or self._file.read(_CHUNK)
            try:
                data = self._inflate.decompress(given, len(buffer))
            except zlib.error as error:
                raise _broken(self._name, self._told, f"its compressed data are damaged ({error}).") from error
            self._rest = self._inflate.unconsumed_tail
            if data:
                buffer[: len(data)] = data
                self._told += len(data)
                return len(data)
            if not given and not self._inflate.eof:
                raise _broken(self._name, self._told, "the file ends within its compressed data.")
