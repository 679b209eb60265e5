"""Reading .gz and .zst files as a stream of bytes, whatever their size; a cut-off archive is an error, never an end."""

from __future__ import annotations

import contextlib
import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

PACKINGS = (".gz", ".zst")
"""Suffixes of what is unpacked while it is read (RFC 1952, RFC 8878)."""

_CHUNK_BYTES = 64 * 1024


def bare_name(path: Path) -> str:
    """The name without .gz or .zst, in small letters."""
    name = path.name.lower()
    for packing in PACKINGS:
        name = name.removesuffix(packing)
    return name


def is_packed(path: Path) -> bool:
    """Whether the file is read from its beginning only."""
    return path.name.lower().endswith(PACKINGS)


@contextlib.contextmanager
def unpacked(path: Path) -> Iterator[BinaryIO]:
    """The bytes of a file, unpacked.

    Raises:
        OSError: it cannot be read, or is a damaged archive.
    """
    try:
        with path.open("rb") as raw:
            if path.name.lower().endswith(".gz"):
                with gzip.GzipFile(fileobj=raw) as file:
                    yield cast(BinaryIO, file)
            elif path.name.lower().endswith(".zst"):
                yield cast(BinaryIO, io.BufferedReader(_Zstandard(raw), _CHUNK_BYTES))
            else:
                yield raw
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise OSError(f"damaged archive: {error}") from error


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
            data = self._rest or self._raw.read(_CHUNK_BYTES)
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
