"""Reading .gz and .zst files as a stream of bytes, whatever their size; a cut-off archive is an error, never an end."""

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
"""Suffixes of what is unpacked while it is read (RFC 1952, RFC 8878)."""

_CHUNK_BYTES = 64 * 1024
_FEED_BYTES = 2 * 1024
"""Given to the Zstandard library at once: a block of four bytes becomes 128 KiB, so this becomes 64 MiB at most."""
ALWAYS_ALLOWED_BYTES = 64 * 1024 * 1024
"""What a packed file may become whatever its size."""
MAX_EXPANSION = 200
"""Bytes that each packed one may become beyond that. Of text it is 3 to 15; of a bomb 1,000 (gzip) or 30,000 (zstd)."""


def uncompressed_name(path: Path) -> str:
    """The name without .gz or .zst, in small letters."""
    name = path.name.lower()
    for packing in COMPRESSED_SUFFIXES:
        name = name.removesuffix(packing)
    return name


def is_compressed(path: Path) -> bool:
    """Whether the file is read from its beginning only."""
    return path.name.lower().endswith(COMPRESSED_SUFFIXES)


@contextlib.contextmanager
def open_decompressed(path: Path) -> Iterator[BinaryIO]:
    """The bytes of a file, unpacked.

    Raises:
        OSError: it cannot be read, is a FIFO or device, a damaged archive, or one that unpacks to far more than text
            does.
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
    """A regular file as it lies on disk, which may be reached by a link.

    Raises:
        OSError: it cannot be read, or is a FIFO or device, which might never end.
    """
    try:
        return os.fdopen(open_regular(os.path.realpath(path)), "rb")
    except FileError as error:
        raise OSError(error.mistakes[0].text) from None


class _ExpansionGuard(io.RawIOBase):
    """What is unpacked, as long as it is not far more than what was read of the packed file."""

    def __init__(self, unpack: Callable[[memoryview], int], packed: BinaryIO) -> None:
        """
        Args:
            unpack: fills a part of a buffer, and fails only where nothing is left before the damage.
            packed: what it reads.
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
    """Frames one after another. The library's own reader takes the end of a cut-off file for the end of its text."""

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
