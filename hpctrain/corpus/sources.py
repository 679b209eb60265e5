"""Text files as passages: which files, what of them is text, and which passages are kept aside for validation.

A passage is a whole document, or a piece of a long one cut at a line end. It is the unit that goes to training or to
validation, so that one long file can be split too, and the largest piece of text that is held in memory.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import os
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from hpctrain.base.errors import HpctrainError, InputError

TEXT_SUFFIXES = (".md", ".py", ".rst", ".tex", ".txt")
"""What is taken from a folder, plain or with .gz after it; a file that is named is taken whatever its suffix."""

PASSAGE_BYTES = (2 * 1024, 256 * 1024)
"""Smallest and largest size at which a document is cut."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class NotTextError(Exception):
    """A file is binary or not UTF-8."""


@dataclass
class Scan:
    """What a first reading of the files found; a few bytes a passage, whatever the size of the text."""

    files: list[tuple[Path, int]] = field(default_factory=list)
    """Each text file and how many passages of it are used."""
    sizes: array[int] = field(default_factory=lambda: array("I"))
    """Bytes of each passage."""
    hashes: array[int] = field(default_factory=lambda: array("Q"))
    """First eight bytes of each passage's SHA-256."""
    text_bytes: int = 0
    skipped_not_text: int = 0
    skipped_unreadable: int = 0


def list_files(inputs: Sequence[Path]) -> list[Path]:
    """The files to read, sorted, each once: those named, and those with a text suffix in the folders named.

    Hidden files and folders are left out, symbolic links to folders are not followed.

    Raises:
        InputError: one of the inputs does not exist, or is a pipe.
    """
    found: set[Path] = set()
    for path in inputs:
        if path.is_dir():
            found.update(_files_below(path))
        elif path.is_file():
            found.add(path)
        elif path.exists():
            # Text is read twice, which a pipe cannot be.
            raise InputError(f"IN: {path}: found a pipe or device, allowed: files and folders; save the text to a file")
        else:
            raise InputError(f"IN: {path}: no such file or folder")
    return sorted(found)


def passage_bytes(files: Sequence[Path], valid_fraction: float) -> int:
    """Where to cut documents: a quarter of the validation part, so that its size is met within that."""
    total = sum(path.stat().st_size for path in files if path.exists())
    return int(min(max(total * valid_fraction / 4, PASSAGE_BYTES[0]), PASSAGE_BYTES[1]))


def scan_files(
    files: Sequence[Path],
    size_bytes: int,
    limit_bytes: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Scan:
    """Read every file once to learn what is text, until `limit_bytes` of it; at least one passage is taken."""
    scan = Scan()
    for number, path in enumerate(files):
        full = False
        try:
            full = _scan_file(scan, path, size_bytes, limit_bytes)
        except NotTextError:
            scan.skipped_not_text += 1
        except OSError:
            scan.skipped_unreadable += 1
        progress(number + 1, len(files))
        if full:
            progress(len(files), len(files))
            break
    return scan


def validation_mask(scan: Scan, fraction: float) -> NDArray[np.bool_]:
    """Which passages are kept aside: those with the smallest hashes, up to `fraction` of the bytes.

    Decided by content, so that the order of the files does not matter and equal passages go the same way. With a
    fraction above 0 there is at least one, unless all the text is alike.
    """
    hashes, sizes = np.array(scan.hashes, dtype=np.uint64), np.array(scan.sizes, dtype=np.int64)
    if fraction <= 0 or len(hashes) < 2:
        return np.zeros(len(hashes), dtype=np.bool_)
    order = np.argsort(hashes, kind="stable")
    count = int(np.searchsorted(np.cumsum(sizes[order]), fraction * scan.text_bytes, side="right"))
    mask: NDArray[np.bool_] = hashes <= hashes[order[max(count, 1) - 1]]
    return np.zeros_like(mask) if mask.all() else mask


def read_passages(scan: Scan, size_bytes: int) -> Iterator[tuple[str, bool]]:
    """Every passage of the scanned files, with whether its document ends there.

    Raises:
        HpctrainError: a file is not what it was when it was scanned.
    """
    position = 0
    for path, count in scan.files:
        try:
            for number, text in enumerate(itertools.islice(passages(path, size_bytes), count)):
                if _hash(text) != scan.hashes[position]:
                    raise NotTextError
                position += 1
                yield text, number == count - 1
        except (NotTextError, OSError):
            raise HpctrainError(f"{path}: changed while it was read; run the command again") from None


def passages(path: Path, size_bytes: int) -> Iterator[str]:
    """The text of a file (.gz is unpacked), in pieces of at most `size_bytes`, cut at line ends where there are any.

    Raises:
        NotTextError: it is binary or not UTF-8.
        OSError: it cannot be read.
    """
    try:
        with _open(path) as file:
            rest = file.read(size_bytes).removeprefix(_BYTE_ORDER_MARK)
            while rest:
                rest += file.read(size_bytes - len(rest))
                cut = _cut(rest) if len(rest) == size_bytes else len(rest)
                yield _decode(rest[:cut])
                rest = rest[cut:] or file.read(size_bytes)
    except (EOFError, zlib.error) as error:
        raise OSError(f"damaged archive: {error}") from error


def _scan_file(scan: Scan, path: Path, size_bytes: int, limit_bytes: int | None) -> bool:
    """Add a file to the scan or, when it turns out not to be text, nothing of it; whether the limit is reached."""
    sizes, hashes, total, full = array("I"), array("Q"), 0, False
    for text in passages(path, size_bytes):
        size = len(text.encode())
        before = scan.text_bytes + total
        full = limit_bytes is not None and before > 0 and before + size > limit_bytes
        if full:
            break
        sizes.append(size)
        hashes.append(_hash(text))
        total += size
    if total:
        scan.files.append((path, len(sizes)))
        scan.sizes.extend(sizes)
        scan.hashes.extend(hashes)
        scan.text_bytes += total
    return full


def _files_below(folder: Path) -> Iterator[Path]:
    for here, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in names:
            if not name.startswith(".") and name.removesuffix(".gz").endswith(TEXT_SUFFIXES):
                yield Path(here, name)


def _open(path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    return path.open("rb")


def _cut(piece: bytes) -> int:
    """Where to cut a full piece: after its last line end, else before a character that may not be whole."""
    line_end = piece.rfind(b"\n") + 1
    if line_end:
        return line_end
    # A character of UTF-8 has at most four bytes, and all but its first begin with the bits 10.
    for back in range(1, min(5, len(piece))):
        if piece[-back] & 0xC0 != 0x80:
            return len(piece) - back
    return len(piece)


def _decode(piece: bytes) -> str:
    if b"\0" in piece:
        raise NotTextError
    try:
        return piece.decode()
    except UnicodeDecodeError:
        raise NotTextError from None


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
