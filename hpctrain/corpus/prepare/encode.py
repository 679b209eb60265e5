"""The second of two readings of a work unit: its text is cleaned and encoded to token shards in a folder."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hpctrain.base.atomic import storage_errors, sync
from hpctrain.base.errors import FileError, HpctrainError
from hpctrain.corpus.input.documents import ReadOptions, read_file_range
from hpctrain.corpus.input.inputs import WorkUnit
from hpctrain.corpus.input.passages import NotTextError, Passage, batches, bucket_of, digest_of
from hpctrain.corpus.input.skipped import BadRecords
from hpctrain.corpus.prepare.check import file_sha256
from hpctrain.corpus.prepare.clean import Cleaner
from hpctrain.corpus.prepare.scan import UnitScan
from hpctrain.corpus.prepare.shards import ShardWriter
from hpctrain.corpus.prepare.tokenizer import Tokenizer, load_tokenizer
from hpctrain.records.corpus import PART_NAME, Cleaning, CorpusPart, Shard

BATCH_BYTES = 1024 * 1024
"""Bytes of text that are cleaned and encoded at once; the library's results take many times that size."""


@dataclass(frozen=True)
class CleanTask:
    """Task that cleans a part of the text sample on which a tokenizer is trained."""

    texts: tuple[str, ...]
    clean: Cleaning

    def run(self, report: Callable[[int], None]) -> list[str]:
        """Return the cleaned texts."""
        return _cleaner(self.clean).texts([Passage(text, 0, True) for text in self.texts])


@dataclass(frozen=True)
class EncodeTask:
    """Task that writes the token shards of a work unit. If they exist already, it checks that they are whole."""

    unit: WorkUnit
    reading: ReadOptions
    scan: UnitScan
    valid_buckets: range
    """Passages in these buckets are validation passages."""
    clean: Cleaning
    tokenizer: str
    """'bytes', or the path of a tokenizer.json."""
    tokenizer_sha256: str | None
    """Hash of the tokenizer file, because the file at that path may have changed when the command runs again."""
    dtype: str
    shard_tokens: int
    folder: Path
    """Folder of the shards; it does not exist, or holds finished shards."""
    target: Path
    """The output folder of the whole command, named in errors."""

    def run(self, report: Callable[[int], None]) -> list[Shard]:
        """Return the shards in the folder; `report` receives the bytes of text that were encoded.

        Raises:
            HpctrainError: a file changed after it was scanned.
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
            sync(temporary)
            temporary.rename(self.folder)
            sync(self.folder.parent)
        return shards

    def _write(self, folder: Path, report: Callable[[int], None]) -> list[Shard]:
        tokenizer, cleaner = _tokenizer(self.tokenizer, self.tokenizer_sha256), _cleaner(self.clean)
        train = ShardWriter(folder, "train", self.dtype, self.shard_tokens)
        valid = ShardWriter(folder, "valid", self.dtype, self.shard_tokens)
        inside = False  # whether the last document has not ended yet
        with contextlib.closing(train), contextlib.closing(valid):
            for batch in batches(self._with_ends(), lambda item: item[0].size_bytes, BATCH_BYTES):
                texts = cleaner.texts([passage for passage, _ in batch])
                encoded = tokenizer.encode(texts)
                for (passage, aside), text, tokens in zip(batch, texts, encoded, strict=True):
                    if text or inside:
                        all_tokens = np.append(tokens, tokenizer.end_of_text) if passage.ends else tokens
                        (valid if aside else train).append(all_tokens)
                        inside = not passage.ends
                report(sum(passage.size_bytes for passage, _ in batch))
            return train.finish() + valid.finish()

    def _with_ends(self) -> Iterator[tuple[Passage, bool]]:
        """Yield (passage, whether it is for validation). The passage's `ends` is true also where the document's next
        passage is in the other split."""
        before: tuple[Passage, bool] | None = None
        for passage, aside in self._passages():
            if before is not None:
                yield before if before[1] == aside else (replace(before[0], ends=True), before[1])
            before = (passage, aside)
        if before is not None:
            yield replace(before[0], ends=True), before[1]

    def _passages(self) -> Iterator[tuple[Passage, bool]]:
        """Yield (passage, whether it is for validation) for the passages that the scan read.

        Raises:
            HpctrainError: the input has changed since the scan.
        """
        digest = hashlib.sha256()
        count = 0
        bad = BadRecords(skip=True)  # the scan has reported them
        for number in self.scan.pieces:
            piece = self.unit[number]
            try:
                for passage in read_file_range(piece, self.reading, bad):
                    if count == self.scan.passages:
                        break
                    passage_digest = digest_of(passage.text)
                    digest.update(passage_digest)
                    count += 1
                    yield passage, bucket_of(passage_digest) in self.valid_buckets
            except (NotTextError, OSError):
                raise _changed(piece.path) from None
        if digest.hexdigest() != self.scan.text_sha256:
            paths = [self.unit[number].path for number in self.scan.pieces]
            raise _changed(paths[0], f" (or one of the {len(paths) - 1} behind it)" if len(paths) > 1 else "")


def _finished(folder: Path, scan: UnitScan) -> list[Shard] | None:
    """Return the shards that an interrupted command left in the folder, if all are whole and encode the same text; else
    None."""
    try:
        part = CorpusPart.read(folder / PART_NAME)
        whole = all(file_sha256(folder / shard.file) == shard.sha256 for shard in part.shards)
    except (FileError, OSError):
        return None
    return part.shards if whole and part.text_sha256 == scan.text_sha256 else None


def _changed(path: Path, more: str = "") -> HpctrainError:
    return HpctrainError(f"{path}{more}: changed while it was read; run the command again")


@functools.lru_cache(maxsize=1)
def _tokenizer(choice: str, sha256: str | None) -> Tokenizer:
    return load_tokenizer(choice)


@functools.lru_cache(maxsize=4)
def _cleaner(cleaning: Cleaning) -> Cleaner:
    return Cleaner(cleaning)
