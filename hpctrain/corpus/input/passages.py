"""Passages: a passage is a whole document, or a piece of a long document, cut at a line end.

A passage is the unit of the split into training and validation, so that one long document can be split too. It is also
the largest piece of a text file that is in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

PASSAGE_BYTES = (2 * 1024, 256 * 1024)
"""Limits of the size at which documents are cut into passages, in bytes: the smallest and the largest."""

BUCKETS = 2**16
"""Number of hash buckets. A passage's bucket is the first two bytes of its hash, and the passages of some buckets are
for validation."""


Item = TypeVar("Item")


class NotTextError(Exception):
    """A file is binary or not UTF-8, so it is no text file."""


@dataclass(frozen=True)
class Passage:
    """A whole document or a piece of a long one, as read from the input."""

    text: str
    size_bytes: int
    """Bytes of the document, in UTF-8, that the passage takes."""
    ends: bool
    """Whether the document ends with this passage."""


def passage_bytes(total_bytes: int, valid_fraction: float) -> int:
    """Return the size in bytes at which documents are cut: a quarter of the validation part's size, within the limits
    PASSAGE_BYTES. The validation part then has its wanted size within about one passage."""
    return int(min(max(total_bytes * valid_fraction / 4, PASSAGE_BYTES[0]), PASSAGE_BYTES[1]))


def cut_record(text: str, size_bytes: int) -> Iterator[Passage]:
    """Yield the passages of a document, each of at most `size_bytes`; an empty document has none.

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
    """Return how many bytes of `piece` form a passage, if the document goes on after `piece`: those up to the last line
    end, else up to the last blank, else all before the last character, which may be incomplete."""
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
    """Yield the items, in order, in lists. A list ends as soon as the sum of its items' sizes reaches `size`; the last
    list may be smaller."""
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
    """Return the SHA-256 of a passage's text. Its bytes 0 and 1 are the passage's bucket, which decides whether the
    passage is for validation. Its bytes 2 to 9 give the passage's sampling rank (`rank_of`), which decides whether the
    passage is in the sample that a tokenizer is trained on."""
    return hashlib.sha256(text.encode()).digest()


def bucket_of(digest: bytes) -> int:
    """Return the hash bucket of a passage, in [0, BUCKETS), from the result of `digest_of`."""
    return int.from_bytes(digest[:2], "big")


def rank_of(digest: bytes) -> int:
    """Return the sampling rank of a passage, below 2**63, from the result of `digest_of`. The passages with the
    smallest ranks are the sample that a tokenizer is trained on."""
    return int.from_bytes(digest[2:10], "big") >> 1
