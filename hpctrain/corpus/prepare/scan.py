"""The first of the two readings of a work unit (the second is the encoding): it finds the files that are text, counts
bytes by hash bucket, and takes a sample of passages for training a tokenizer."""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
import json
import zipfile
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.base.atomic import storage_errors
from hpctrain.base.errors import InputError
from hpctrain.base.units import format_si
from hpctrain.corpus.input.documents import ReadOptions, read_file_range
from hpctrain.corpus.input.inputs import FileRange, WorkUnit
from hpctrain.corpus.input.passages import BUCKETS, NotTextError, Passage, bucket_of, digest_of, rank_of
from hpctrain.corpus.input.skipped import LISTED_IN_UNIT, BadRecords, SkippedInput

_HELD_PASSAGES = 2**16
"""Number of passages whose buckets and sizes are buffered before they are added to the sums."""

TextSample = list[tuple[int, str]]
"""(sampling rank, text) of the passages that a tokenizer may be trained on."""


def no_bytes() -> NDArray[np.int64]:
    """Return an array of zeros, in which the bytes of each hash bucket are to be counted: int64 [BUCKETS]."""
    return np.zeros(BUCKETS, dtype=np.int64)


@dataclass
class UnitScan:
    """Result of the scan of a work unit: what is used of its files, and what is skipped. Its size does not grow with
    the unit."""

    pieces: list[int] = field(default_factory=list)
    """Indices, within the unit, of the files and parts of files whose text is used."""
    passages: int = 0
    """Number of passages that are used."""
    documents: int = 0
    """Number of documents that are used."""
    text_bytes: int = 0
    """Bytes, in UTF-8, of the passages that are used."""
    text_sha256: str = ""
    """SHA-256 over the hashes of all passages that are used, in order."""
    skipped_not_text: int = 0
    """Number of files that are binary or not UTF-8."""
    skipped_unreadable: int = 0
    """Number of whole text files that cannot be read, among them damaged compressed ones."""
    skipped_bad: int = 0
    """Number of skipped records, plus one for each damaged file of records."""
    damaged_files: int = 0
    """Number of damaged files. Of a damaged file of records, what comes after the damage is lost; nothing is used of a
    damaged compressed text file."""
    skipped: list[SkippedInput] = field(default_factory=list)
    """The first LISTED_IN_UNIT skipped files and records."""


@dataclass(frozen=True)
class ScanTask:
    """Task that scans a work unit and stores the result in `scan_file`. The result includes a sample of up to
    `sample_bytes` of text, for training a tokenizer. If the file has a result already, the task reads that result
    instead."""

    unit: WorkUnit
    reading: ReadOptions
    scan_file: Path
    sample_bytes: int
    limit_bytes: int | None = None
    """Most bytes of text to take; None: no limit. With 0, one passage is taken, whatever its size."""

    def run(self, report: Callable[[int], None]) -> UnitScan:
        """Return the scan of the work unit. `report` is called with the number of bytes on disk that were scanned since
        its last call.

        Raises:
            InputError: a record cannot be used and may not be skipped, or a file of records or a part of a large text
                file cannot be read or is not text.
            StorageError: the result cannot be stored.
        """
        earlier = read_scan(self.scan_file, self.limit_bytes)
        if earlier is not None:
            report(sum(piece.size_bytes for piece in self.unit))
            return earlier[0]
        tally = _Tally(self.limit_bytes, self.sample_bytes)
        scan, bad = tally.scan, BadRecords(self.reading.skip_bad)
        for number, piece in enumerate(self.unit):
            before = scan.passages
            _scan_file_range(piece, self.reading, tally, bad)
            if scan.passages > before:
                scan.pieces.append(number)
            report(piece.size_bytes)
            if tally.full:
                break
        scan.text_sha256 = tally.digest.hexdigest()
        scan.skipped_bad = bad.count
        scan.damaged_files += len(bad.damaged)
        scan.skipped = [*scan.skipped, *bad.listed][:LISTED_IN_UNIT]
        _keep(self.scan_file, tally)
        return scan


def read_scan(path: Path, limit_bytes: int | None) -> tuple[UnitScan, NDArray[np.int64], TextSample] | None:
    """Return the stored scan of a work unit, the unit's bytes of text in each hash bucket ([BUCKETS]), and its sample
    for a tokenizer. Return None if the file is missing or damaged, or if the scan had another limit than `limit_bytes`.

    Args:
        path: file of the stored scan.
        limit_bytes: largest number of bytes of text that the scan takes from the unit; None: no limit.
    """
    try:
        with np.load(path) as file:
            head = json.loads(bytes(file["head"]))
            if head.pop("limit_bytes") != limit_bytes:
                return None
            sample = [(int(rank), str(text)) for rank, text in head.pop("sample")]
            buckets = no_bytes()
            buckets[file["filled"]] = file["bytes"]
            head["skipped"] = [SkippedInput(**entry) for entry in head["skipped"]]
            return UnitScan(**head), buckets, sample
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        return None


def validation_buckets(bytes_in_bucket: NDArray[np.int64], fraction: float) -> range:
    """Return the hash buckets whose passages are for validation: from bucket 0 on, as many as fit into the share
    `fraction` of all bytes, but not the last bucket with text. If not even the first bucket with text fits, the range
    holds only the bucket with the least text.

    The result does not depend on the order of the files, and equal passages are in the same split. With a fraction
    above 0 there is validation text, unless all the text is in one bucket; the bucket with the least text holds at most
    half of it.

    Args:
        bytes_in_bucket: bytes of all passages in each bucket, [BUCKETS].
    """
    filled = np.flatnonzero(bytes_in_bucket)
    if fraction <= 0 or len(filled) < 2:
        return range(0)
    sums = np.cumsum(bytes_in_bucket)
    limit = int(np.searchsorted(sums, fraction * sums[-1], side="right"))
    if limit > filled[0]:
        return range(min(limit, int(filled[-1])))
    least = int(filled[np.argmin(bytes_in_bucket[filled])])
    return range(least, least + 1)


def smallest(samples: Iterable[TextSample], size_bytes: int) -> TextSample:
    """Return pairs (sampling rank, text): the texts with the smallest sampling ranks in all samples, in the order of
    the sampling ranks. A text's sampling rank is a number from the text's hash (`rank_of`). The texts have together at
    most `size_bytes` bytes, but at least one is returned if there is any."""
    chosen = _Sample(size_bytes)
    for sample in samples:
        for rank, text in sample:
            chosen.add(rank, text, len(text.encode()))
    return chosen.texts()


class _Sample:
    """Collects a random sample of texts: those with the smallest sampling ranks, which follow from the texts' hashes.
    The sample has at most `size_bytes`, but at least one text.
    """

    def __init__(self, size_bytes: int) -> None:
        self._limit = size_bytes
        self._heap: list[tuple[int, str, int]] = []
        self._held = 0

    def add(self, rank: int, text: str, size: int) -> None:
        if self._held + size > self._limit and self._heap and rank >= -self._heap[0][0]:
            return
        heapq.heappush(self._heap, (-rank, text, size))
        self._held += size
        while self._held > self._limit and len(self._heap) > 1:
            self._held -= heapq.heappop(self._heap)[2]

    def texts(self) -> TextSample:
        return sorted((-rank, text) for rank, text, _ in self._heap)


@dataclass
class _Tally:
    """What the scan of a work unit counts: the UnitScan, the bytes in each hash bucket, and the sample for a tokenizer.
    `full` is whether the limit of bytes was reached.

    Args:
        limit_bytes: most bytes of text that are counted; None: no limit.
        sample_bytes: most bytes of text in the sample, unless its only text is longer; 0: no sample.
    """

    limit_bytes: int | None
    sample_bytes: int
    scan: UnitScan = field(default_factory=UnitScan)
    full: bool = False
    digest: Any = field(default_factory=hashlib.sha256)
    """Hash over the digests of all counted passages."""
    buckets: NDArray[np.int64] = field(default_factory=no_bytes)
    """[hash bucket] -> bytes of its passages, without those that `flush` has still to add."""
    sample: _Sample = field(init=False)
    _bucket: array[int] = field(default_factory=lambda: array("H"))
    _size: array[int] = field(default_factory=lambda: array("I"))
    """`_bucket` and `_size`: hash bucket and bytes of each passage that `flush` has still to add to `buckets`."""

    def __post_init__(self) -> None:
        self.sample = _Sample(self.sample_bytes)

    def add_all(self, passages: Iterator[Passage]) -> None:
        """Add passages to the counts until one does not fit within `limit_bytes`."""
        all(map(self.add, passages))

    def add(self, passage: Passage) -> bool:
        """Add a passage to the counts if it fits within `limit_bytes`; return whether it does."""
        scan, size, limit = self.scan, passage.size_bytes, self.limit_bytes
        if limit is not None and scan.text_bytes + size > limit and (limit or scan.passages):
            self.full = True
            return False
        digest = digest_of(passage.text)
        self.digest.update(digest)
        scan.passages += 1
        scan.documents += passage.ends
        scan.text_bytes += size
        self._bucket.append(bucket_of(digest))
        self._size.append(size)
        if self.sample_bytes:
            self.sample.add(rank_of(digest), passage.text, size)
        if len(self._size) >= _HELD_PASSAGES:
            self.flush()
        return True

    def flush(self) -> None:
        sums = np.bincount(np.asarray(self._bucket), np.asarray(self._size), minlength=len(self.buckets))
        self.buckets += sums.astype(np.int64)
        del self._bucket[:], self._size[:]


def _scan_file_range(piece: FileRange, reading: ReadOptions, tally: _Tally, bad: BadRecords) -> None:
    """Add the passages of a file or a part of one to the tally.

    Args:
        piece: the file, or the part of it.
        reading: options for reading the file.
        tally: what the scan of the work unit has counted so far.
        bad: gets the records that cannot be used.

    Raises:
        InputError: a part of a large file is not text or cannot be read; other parts may be in use already, so the file
            cannot be skipped.
    """
    if piece.format == "text" and piece.stop is None and not piece.start:
        _scan_whole_text(piece, reading, tally, bad)
        return
    try:
        tally.add_all(read_file_range(piece, reading, bad))
    except NotTextError:
        raise InputError(
            f"{piece.path}: found bytes that are not UTF-8 text after byte {piece.start:,}; convert it, or leave it out"
        ) from None
    except OSError as error:
        raise InputError(f"{piece.path}: cannot read: {error.strerror or error}; leave it out, or mend it") from None


def _scan_whole_text(piece: FileRange, reading: ReadOptions, tally: _Tally, bad: BadRecords) -> None:
    """Add the passages of a whole text file to the tally, or count the file as skipped. The file is read twice: first
    to check that all of it is text, because nothing may be used of a file that is not text."""
    size = 0
    try:
        for passage in read_file_range(piece, reading, bad):
            size += passage.size_bytes
    except NotTextError:
        tally.scan.skipped_not_text += 1
        after = f" after {format_si(size, 'B')}" if size else ""
        reason = f"binary, or not UTF-8{after}; nothing of it is used"
    except OSError as error:
        tally.scan.skipped_unreadable += 1
        reason = f"cannot read: {error.strerror}"
        if error.errno is None:
            tally.scan.damaged_files += 1
            reason = f"{error}; {format_si(size, 'B')} of text come before it, nothing of it is used"
    else:
        tally.add_all(read_file_range(piece, reading, bad))
        return
    tally.scan.skipped.append(SkippedInput(str(piece.path), reason))


def _keep(path: Path, tally: _Tally) -> None:
    """Store the tally in a file, atomically. The file's format has checksums; if a power cut damages it, the scan is
    repeated."""
    tally.flush()
    values = {"limit_bytes": tally.limit_bytes, "sample": tally.sample.texts()}
    head = json.dumps({**dataclasses.asdict(tally.scan), **values}).encode()
    filled = np.flatnonzero(tally.buckets)
    temporary = path.with_suffix(".tmp")
    with storage_errors(path):
        with temporary.open("wb") as file:
            np.savez(file, head=np.frombuffer(head, dtype=np.uint8), filled=filled, bytes=tally.buckets[filled])
        temporary.replace(path)
