"""Opens .gz and .zst files of any size as a stream of their decompressed bytes; a truncated file raises an error
instead of ending early."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, cast

from hpctrain.base.errors import FileError
from hpctrain.base.regular_file import open_regular

COMPRESSED_SUFFIXES = (".gz", ".zst")
"""Suffixes of files that are decompressed while they are read: gzip (RFC 1952) and Zstandard (RFC 8878)."""

_CHUNK_BYTES = 64 * 1024
_FEED_BYTES = 2 * 1024
"""Compressed bytes given to one call of the Zstandard library. Four bytes can become a block of 128 KiB, so one call
returns at most 64 MiB."""
ALWAYS_ALLOWED_BYTES = 64 * 1024 * 1024
"""Decompressed bytes that any compressed file may have, however small it is."""
MAX_EXPANSION = 200
"""Largest ratio of decompressed bytes beyond ALWAYS_ALLOWED_BYTES to compressed bytes. Text has 3 to 15; a
decompression bomb has 1,000 (gzip) or 30,000 (zstd)."""


def uncompressed_name(path: Path) -> str:
    """Return the file's name in lower case and without .gz or .zst."""
    name = path.name.lower()
    for packing in COMPRESSED_SUFFIXES:
        name = name.removesuffix(packing)
    return name


@contextlib.contextmanager
def open_decompressed(path: Path) -> Iterator[BinaryIO]:
    """Open a file and yield a stream of its bytes, decompressed if its suffix is .gz or .zst.

    Raises:
        OSError: the file cannot be read, is a FIFO or device, is damaged, or expands more than MAX_EXPANSION allows.
    """
    try:
        with open_plain(path) as raw:
            if path.name.lower().endswith(".gz"):
                with gzip.GzipFile(fileobj=raw) as file:
                    yield cast(BinaryIO, io.BufferedReader(_ExpansionGuard(file.readinto1, raw), _CHUNK_BYTES))
            elif path.name.lower().endswith(".zst"):
                yield cast(BinaryIO, io.BufferedReader(_ExpansionGuard(_Zstandard(raw).readinto, raw), _CHUNK_BYTES))
            else:
                yield raw
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise OSError(f"damaged archive: {error}") from error


def open_plain(path: Path) -> BinaryIO:
    """Open a regular file without decompression; a symbolic link to the file is followed.

    Raises:
        OSError: the file cannot be read, or is a FIFO or device, which might never end.
    """
    try:
        return os.fdopen(open_regular(os.path.realpath(path)), "rb")
    except FileError as error:
        raise OSError(error.mistakes[0].text) from None


class _ExpansionGuard(io.RawIOBase):
    """A stream of decompressed bytes that raises an OSError when there are more of them than ALWAYS_ALLOWED_BYTES and
    MAX_EXPANSION allow for the compressed bytes read so far."""

    def __init__(self, unpack: Callable[[memoryview], int], packed: BinaryIO) -> None:
        """Create the stream; nothing is read yet.

        Args:
            unpack: fills the beginning of a buffer with decompressed bytes and returns their number. It raises an error
                about damage only after it has returned all bytes before the damage.
            packed: the compressed file that `unpack` reads.
        """
        self._unpack = unpack
        self._packed = packed
        self._count = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = self._unpack(buffer)
        self._count += count
        if self._count > ALWAYS_ALLOWED_BYTES + MAX_EXPANSION * self._packed.tell():
            raise OSError(
                f"unpacks to more than {MAX_EXPANSION} times its size, which no text does (the first "
                f"{ALWAYS_ALLOWED_BYTES // 2**20} MiB not counted); unpack it yourself and name the plain file "
                "if it is text"
            )
        return count


class _Zstandard(io.RawIOBase):
    """A stream of the decompressed bytes of a file with one or more Zstandard frames. The library's own reader would
    accept a truncated file."""

    def __init__(self, raw: BinaryIO) -> None:
        import zstandard

        self._raw = raw
        self._decompressor = zstandard.ZstdDecompressor()
        self._error = zstandard.ZstdError
        self._frame = self._decompressor.decompressobj()
        self._inside = False
        self._rest = b""
        self._out = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._out:
            data = self._rest or self._raw.read(_FEED_BYTES)
            self._rest = b""
            if not data:
                if self._inside:
                    raise EOFError("the file ends within a frame")
                return 0
            try:
                self._out = memoryview(self._frame.decompress(data))
            except self._error as error:
                raise OSError(f"damaged archive: {error}") from error
            self._inside = not self._frame.eof
            if self._frame.eof:
                self._rest = self._frame.unused_data
                self._frame = self._decompressor.decompressobj()
        count = min(len(buffer), len(self._out))
        buffer[:count] = self._out[:count]
        self._out = self._out[count:]
        return count
