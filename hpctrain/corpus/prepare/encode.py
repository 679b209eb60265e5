"""The second reading of a unit: its text, cleaned, as token shards in a folder that has its name when it is whole."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpctrain.base.atomic import storage_errors, sync_folder
from hpctrain.base.errors import FileError, HpctrainError
from hpctrain.corpus.input.file_reader import ReadOptions, read_file_range
from hpctrain.corpus.input.input_records import BadRecords
from hpctrain.corpus.input.passages import NotTextError, Passage, bucket_of, digest_of
from hpctrain.corpus.input.work_units import WorkUnit
from hpctrain.corpus.prepare.check import file_sha256
from hpctrain.corpus.prepare.clean import Cleaner
from hpctrain.corpus.prepare.scan import UnitScan
from hpctrain.corpus.prepare.shards import ShardWriter
from hpctrain.corpus.prepare.tokenizer import Tokenizer, load_tokenizer
from hpctrain.records.corpus.cleaning import Cleaning
from hpctrain.records.corpus.index import Shard
from hpctrain.records.corpus.part import PART_NAME, CorpusPart

BATCH_BYTES = 1024 * 1024
"""Text that is cleaned and encoded at once: what the library makes of it takes many times its size."""


@dataclass(frozen=True)
class CleanTask:
    """Cleans a part of the sample that a tokenizer is trained on."""

    texts: tuple[str, ...]
    clean: Cleaning

    def run(self, report: Callable[[int], None]) -> list[str]:
        """The cleaned texts."""
        return _cleaner(self.clean).texts([Passage(text, 0, True) for text in self.texts])


@dataclass(frozen=True)
class EncodeTask:
    """Writes the shards of a unit; asked again, it makes sure that they are whole."""

    unit: WorkUnit
    reading: ReadOptions
    scan: UnitScan
    valid_buckets: range
    """Passages in these buckets are for validation."""
    clean: Cleaning
    tokenizer: str
    """bytes, or the path of a tokenizer.json."""
    tokenizer_sha256: str | None
    """Its content: another file may lie at that path in the next call."""
    dtype: str
    shard_tokens: int
    folder: Path
    """Where the shards go; does not exist, or holds what was finished before."""
    target: Path
    """The folder that all this is for, named in errors."""

    def run(self, report: Callable[[int], None]) -> list[Shard]:
        """The shards in the folder; `report` is told the bytes of text that were dealt with.

        Raises:
            HpctrainError: a file is not what it was when it was scanned.
            StorageError: the shards cannot be written.
        """
        done = _finished(self.folder, self.scan)
        if done is not None:
            report(self.scan.text_bytes)
            return done
        temporary = self.folder.with_name(f"{self.folder.name}.tmp")
        with storage_errors(self.target):
            for old in (self.folder, temporary):
                shutil.rmtree(old, ignore_errors=True)
            temporary.mkdir(parents=True)
            shards = self._write(temporary, report)
            CorpusPart(text_sha256=self.scan.text_sha256, shards=shards).write(temporary / PART_NAME)
            sync_folder(temporary)
            temporary.rename(self.folder)
            sync_folder(self.folder.parent)
        return shards

    def _write(self, folder: Path, report: Callable[[int], None]) -> list[Shard]:
        tokenizer, cleaner = _tokenizer(self.tokenizer, self.tokenizer_sha256), _cleaner(self.clean)
        train = ShardWriter(folder, "train", self.dtype, self.shard_tokens)
        valid = ShardWriter(folder, "valid", self.dtype, self.shard_tokens)
        inside = False  # whether the document before has not ended
        with contextlib.closing(train), contextlib.closing(valid):
            for batch in self._batches():
                texts = cleaner.texts([passage for passage, _ in batch])
                encoded = tokenizer.encode(texts)
                for (passage, aside), text, tokens in zip(batch, texts, encoded, strict=True):
                    if text or inside:
                        all_tokens = np.append(tokens, tokenizer.end_of_text) if passage.ends else tokens
                        (valid if aside else train).append(all_tokens)
                        inside = not passage.ends
                report(sum(passage.size_bytes for passage, _ in batch))
            return train.finish() + valid.finish()

    def _batches(self) -> Iterator[list[tuple[Passage, bool]]]:
        """Passages, and whether they are for validation, in batches."""
        batch: list[tuple[Passage, bool]] = []
        held = 0
        for passage, aside in self._with_ends():
            batch.append((passage, aside))
            held += passage.size_bytes
            if held >= BATCH_BYTES:
                yield batch
                batch, held = [], 0
        if batch:
            yield batch

    def _with_ends(self) -> Iterator[tuple[Passage, bool]]:
        """Passages that end where their document does, or where what follows in their split is not what followed."""
        before: tuple[Passage, bool] | None = None
        for passage, aside in self._passages():
            if before is not None:
                yield before if before[1] == aside else (_ended(before[0]), before[1])
            before = (passage, aside)
        if before is not None:
            yield _ended(before[0]), before[1]

    def _passages(self) -> Iterator[tuple[Passage, bool]]:
        """The passages that the scan found, and whether they are for validation.

        Raises:
            HpctrainError: they are others now.
        """
        digest = hashlib.sha256()
        count = 0
        bad = BadRecords(skip=True)  # the scan has told them
        for number in self.scan.pieces:
            piece = self.unit[number]
            try:
                for passage in read_file_range(piece, self.reading, bad):
                    if count == self.scan.passages:
                        break
                    own = digest_of(passage.text)
                    digest.update(own)
                    count += 1
                    yield passage, bucket_of(own) in self.valid_buckets
            except (NotTextError, OSError):
                raise _changed(piece.path) from None
        if digest.hexdigest() != self.scan.text_sha256:
            paths = [self.unit[number].path for number in self.scan.pieces]
            raise _changed(paths[0], f" (or one of the {len(paths) - 1} behind it)" if len(paths) > 1 else "")


def _finished(folder: Path, scan: UnitScan) -> list[Shard] | None:
    """The shards that were written before, when all of them are whole and of that text."""
    try:
        part = CorpusPart.read(folder / PART_NAME)
        whole = all(file_sha256(folder / shard.file) == shard.sha256 for shard in part.shards)
    except (FileError, OSError):
        return None
    return part.shards if whole and part.text_sha256 == scan.text_sha256 else None


def _ended(passage: Passage) -> Passage:
    return Passage(passage.text, passage.size_bytes, True)


def _changed(path: Path, more: str = "") -> HpctrainError:
    return HpctrainError(f"{path}{more}: changed while it was read; run the command again")


@functools.lru_cache(maxsize=1)
def _tokenizer(choice: str, sha256: str | None) -> Tokenizer:
    return load_tokenizer(choice)


@functools.lru_cache(maxsize=4)
def _cleaner(cleaning: Cleaning) -> Cleaner:
    return Cleaner(cleaning)
