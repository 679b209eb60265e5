"""Passages: a passage is a whole document, or a piece of a long document, cut at a line end.

A passage is the unit of the split into training and validation, so that one long document can be split too. It is also
the largest piece of a text file in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

PASSAGE_BYTES = (2 * 1024, 256 * 1024)
"""Smallest and largest size in bytes at which documents are cut."""

BUCKETS = 2**16
"""Number of hash buckets (the first two bytes of a passage's hash), by which validation passages are chosen."""


Item = TypeVar("Item")


class NotTextError(Exception):
    """A file is binary or not UTF-8."""


@dataclass(frozen=True)
class Passage:
    """A whole document or a piece of a long one, as read from the input."""

    text: str
    size_bytes: int
    ends: bool
    """Whether the document ends with this passage."""


def passage_bytes(total_bytes: int, valid_fraction: float) -> int:
    """Return the size in bytes at which to cut documents: a quarter of the validation part, whose size then comes out
    right within a quarter."""
    return int(min(max(total_bytes * valid_fraction / 4, PASSAGE_BYTES[0]), PASSAGE_BYTES[1]))


def cut_record(text: str, size_bytes: int) -> Iterator[Passage]:
    """Yield the passages of a document in memory; an empty document has none.

    Raises:
        UnicodeEncodeError: the text holds half a surrogate pair, which UTF-8 cannot encode.
    """
    rest = text.encode()
    if 0 < len(rest) <= size_bytes:
        yield Passage(text, len(rest), True)
        return
    start = 0
    while start < len(rest):
        piece = rest[start : start + size_bytes]
        last = start + len(piece) == len(rest)
        stop = len(piece) if last else cut(piece)
        yield Passage(piece[:stop].decode(), stop, last)
        start += stop


def cut(piece: bytes) -> int:
    """Return the position at which to cut a full piece: after its last line end, else after its last blank, else before
    a character that may be incomplete."""
    for mark in (b"\n", b" "):
        end = piece.rfind(mark) + 1
        if end:
            return end
    # A UTF-8 character has at most four bytes, and all but its first begin with the bits 10.
    for back in range(1, min(5, len(piece))):
        if piece[-back] & 0xC0 != 0x80:
            return len(piece) - back
    return len(piece)


def batches(items: Iterable[Item], size_of: Callable[[Item], int], size: int) -> Iterator[list[Item]]:
    """Yield the items in lists whose sizes add up to `size` or just above; the last one may be smaller."""
    batch: list[Item] = []
    total = 0
    for item in items:
        batch.append(item)
        total += size_of(item)
        if total >= size:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def digest_of(text: str) -> bytes:
    """Return the SHA-256 of a passage's text. Its bytes 0 and 1 choose the split, bytes 2 to 9 the sample that a
    tokenizer is trained on."""
    return hashlib.sha256(text.encode()).digest()


def bucket_of(digest: bytes) -> int:
    """Return the bucket of a passage, in [0, `BUCKETS`)."""
    return int.from_bytes(digest[:2], "big")


def rank_of(digest: bytes) -> int:
    """Return the sampling rank of a passage, below 2**63; passages with the smallest ranks form the sample."""
    return int.from_bytes(digest[2:10], "big") >> 1
