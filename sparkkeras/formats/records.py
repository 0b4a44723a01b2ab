"""The TFRecord container format: a sequence of byte records. Independent of Spark and of the content of the records.

A record is the length of its data (8 bytes, little-endian), the checksum of these bytes, the data, and the checksum of the
data. A checksum has 4 bytes: a CRC-32C, masked (rotated and offset) because a CRC of data that contains CRCs is unreliable.
A file may be compressed as a whole. Specification: https://www.tensorflow.org/tutorials/load_data/tfrecord
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import IO, Any

from sparkkeras.errors import ClusterError, DataError

LIBRARY = ("google_crc32c", "google-crc32c")
"""The library that computes checksums, required on the driver and on all workers: its module and its package name."""

SUFFIXES = {None: ".tfrecord", "gzip": ".tfrecord.gz", "zlib": ".tfrecord.zlib"}
"""The file name suffix for each compression."""

EMPTY_BYTES = 24
"""Files up to this size, compressed or not, hold no useful record: a record has 16 bytes besides its data."""

_LENGTH, _HEAD, _FOOT = "<Q", "<QI", "<I"
_LENGTH_BYTES, _HEAD_BYTES, _FOOT_BYTES = 8, 12, 4
_WINDOW_BITS = {"gzip": 31, "zlib": 15}
_EITHER = 47
_CHUNK = 1 << 20


def framed(data: bytes) -> bytes:
    """Encode one record: length, data and checksums."""
    length = struct.pack(_LENGTH, len(data))
    return b"".join((length, struct.pack(_FOOT, _checksum(length)), data, struct.pack(_FOOT, _checksum(data))))


def compressor(compression: str | None) -> Any:
    """A streaming compressor with the methods ``compress(piece)`` and ``flush()``; ``None`` compresses nothing."""
    return (
        SimpleNamespace(compress=bytes, flush=bytes)
        if compression is None
        else zlib.compressobj(wbits=_WINDOW_BITS[compression])
    )


def read_records(file: io.BufferedReader, name: str) -> Iterator[bytes]:
    """Iterate over the records of a file. The compression is detected from the first bytes.

    Args:
        file: A buffered file, at its beginning.
        name: The name of the file in error messages.

    Raises:
        DataError: The file ends within a record, or a checksum does not match. The message has the file and the byte offset
            of the record in the decompressed data.
    """
    head = file.peek(_HEAD_BYTES)[:_HEAD_BYTES]
    # The length of a first record can look like a gzip or zlib header, but not if its checksum matches too.
    compressed = not _is_head(head) and _looks_compressed(head)
    source = io.BufferedReader(_Inflated(file, name), _CHUNK) if compressed else file
    offset = 0
    while head := source.read(_HEAD_BYTES):
        if len(head) == _HEAD_BYTES and not _is_head(head):
            hint = " The file does not start like a TFRecord file." if offset == 0 else ""
            raise _broken(name, offset, f"the checksum of the record's length does not match.{hint}")
        length = struct.unpack(_HEAD, head)[0] if len(head) == _HEAD_BYTES else 0
        data = source.read(length)
        foot = source.read(_FOOT_BYTES)
        if len(head) + len(data) + len(foot) < _HEAD_BYTES + length + _FOOT_BYTES:
            raise _broken(name, offset, "the file ends within a record.")
        if struct.unpack(_FOOT, foot)[0] != _checksum(data):
            raise _broken(name, offset, "the checksum of the record's data does not match.")
        yield data
        offset += _HEAD_BYTES + length + _FOOT_BYTES


def _broken(name: str, offset: int, what: str) -> DataError:
    return DataError(
        f"{name} is damaged or not a TFRecord file, at offset {offset}: {what} Write the file again, or leave it out."
    )


def _checksum(data: bytes) -> int:
    try:
        import google_crc32c
    except ImportError as error:
        raise ClusterError(
            f"the checksums of TFRecord files need {LIBRARY[1]}, which cannot be imported: pip install {LIBRARY[1]} on "
            f"the driver and on all workers. {type(error).__name__}: {error}"
        ) from error
    crc = int(google_crc32c.value(data))
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _is_head(head: bytes) -> bool:
    return len(head) == _HEAD_BYTES and struct.unpack(_HEAD, head)[1] == _checksum(head[:_LENGTH_BYTES])


def _looks_compressed(head: bytes) -> bool:
    return head[:2] == b"\x1f\x8b" or (head[:1] == b"\x78" and int.from_bytes(head[:2], "big") % 31 == 0)


class _Inflated(io.RawIOBase):
    """The decompressed content of a gzip or zlib file, which may consist of several concatenated members."""

    def __init__(self, file: IO[bytes], name: str) -> None:
        self._file, self._name = file, name
        self._inflate, self._rest, self._position = zlib.decompressobj(_EITHER), b"", 0

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
                raise _broken(self._name, self._position, f"its compressed data is damaged ({error}).") from error
            self._rest = self._inflate.unconsumed_tail
            if data:
                buffer[: len(data)] = data
                self._position += len(data)
                return len(data)
            if not given and not self._inflate.eof:
                raise _broken(self._name, self._position, "the file ends within its compressed data.")
