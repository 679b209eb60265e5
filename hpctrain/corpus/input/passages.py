"""Passages: a whole document, or a piece of a long one cut at a line end.

A passage is the unit that goes to training or to validation, so that one long document can be split too, and the
largest piece of a text file that is held in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

PASSAGE_BYTES = (2 * 1024, 256 * 1024)
"""Smallest and largest size at which a document is cut."""

BUCKETS = 2**16
"""Passages are told apart by the first two bytes of their hash where it is decided which of them are kept aside."""


class NotTextError(Exception):
    """A file is binary or not UTF-8."""


@dataclass(frozen=True)
class Passage:
    """A piece of text, as it was found."""

    text: str
    size_bytes: int
    ends: bool
    """Whether its document ends with it."""


def passage_bytes(total_bytes: int, valid_fraction: float) -> int:
    """Where to cut documents: a quarter of the validation part, so that its size is met within that."""
    return int(min(max(total_bytes * valid_fraction / 4, PASSAGE_BYTES[0]), PASSAGE_BYTES[1]))


def cut_record(text: str, size_bytes: int) -> Iterator[Passage]:
    """A document that is in memory, in pieces; nothing for an empty one.

    Raises:
        UnicodeEncodeError: it holds half a surrogate pair, which UTF-8 cannot tell.
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
    """Where to cut a full piece: after its last line end, else its last blank, else before a character that may not be
    whole."""
    for mark in (b"\n", b" "):
        end = piece.rfind(mark) + 1
        if end:
            return end
    # A character of UTF-8 has at most four bytes, and all but its first begin with the bits 10.
    for back in range(1, min(5, len(piece))):
        if piece[-back] & 0xC0 != 0x80:
            return len(piece) - back
    return len(piece)


def digest_of(text: str) -> bytes:
    """SHA-256: its bytes 0 and 1 choose the split, 2 to 9 the sample that a tokenizer is trained on."""
    return hashlib.sha256(text.encode()).digest()


def bucket_of(digest: bytes) -> int:
    """Which of the `BUCKETS` a passage is in."""
    return int.from_bytes(digest[:2], "big")


def rank_of(digest: bytes) -> int:
    """Passages with the smallest ranks make the sample; below 2**63."""
    return int.from_bytes(digest[2:10], "big") >> 1
