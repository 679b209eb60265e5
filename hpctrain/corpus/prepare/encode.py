"""The second of the two readings of a work unit (the first is the scan): its text is cleaned, and encoded to token
shards.

Cleaning can be Unicode normalization (NFKC), collapsing white space, and one sentence a line by the rules of spaCy's
sentencizer.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import re
import shutil
import sys
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.base.atomic import storage_errors, sync
from hpctrain.base.errors import FileError, HpctrainError, InputError
from hpctrain.corpus.input.documents import ReadOptions, read_file_range
from hpctrain.corpus.input.inputs import WorkUnit, require_library
from hpctrain.corpus.input.passages import NotTextError, Passage, batches, bucket_of, digest_of
from hpctrain.corpus.input.skipped import BadRecords
from hpctrain.corpus.prepare.scan import UnitScan
from hpctrain.corpus.prepare.shards import ShardWriter, file_sha256
from hpctrain.corpus.prepare.tokenizer import Tokenizer, load_tokenizer
from hpctrain.records.corpus import NO_CLEANING, PART_NAME, Cleaning, CorpusPart, Shard

BATCH_BYTES = 1024 * 1024
"""Bytes of text that are cleaned and encoded together; the tokenizer library's results take many times as much
memory."""


_RUN = re.compile(r"\s+")


class Cleaner:
    """Applies the cleaning steps of a `Cleaning` to passages."""

    def __init__(self, cleaning: Cleaning) -> None:
        self._cleaning = cleaning
        self._language = _load(cleaning.sentences) if cleaning.sentences else None

    def texts(self, passages: Sequence[Passage]) -> list[str]:
        """Return the cleaned text of each passage."""
        if self._cleaning == NO_CLEANING:
            return [passage.text for passage in passages]
        # spaCy keeps every word in its vocabulary for good, except those seen within a memory zone.
        zone = self._language.memory_zone() if self._language else contextlib.nullcontext()
        with zone:
            return [self._text(passage) for passage in passages]

    def _text(self, passage: Passage) -> str:
        text = passage.text
        if self._cleaning.normalize == "nfkc":
            text = unicodedata.normalize("NFKC", text)
        if self._cleaning.whitespace == "collapse":
            end = "" if passage.ends else _one(text[len(text.rstrip()) :])
            text = _RUN.sub(lambda match: _one(match[0]), text.strip()) + end
        if self._language is None:
            return text
        return "".join(self._one_a_line(line) for line in text.splitlines(keepends=True))

    def _one_a_line(self, line: str) -> str:
        """Return the line with a line end in place of the white space between two sentences; nothing else changes."""
        body = line.strip()
        if not body or self._language is None:
            return line
        sentences = (sentence.text.strip() for sentence in self._language(body).sents)
        start = line.index(body)
        lines = "\n".join(sentence for sentence in sentences if sentence)
        return f"{line[:start]}{lines}{line[start + len(body) :]}"


def check_cleaning(cleaning: Cleaning) -> None:
    """Check, before any other work, whether this machine can do all cleaning steps.

    Raises:
        InputError: sentences are to be split and spaCy is not installed, or does not know the language.
    """
    if cleaning.sentences:
        require_library("spacy", f"--sentences {cleaning.sentences}")
        _load(cleaning.sentences)


def _one(run: str) -> str:
    """Return what replaces a run of white space: a line end if the run has one, else a blank; '' for an empty run."""
    if not run:
        return ""
    return "\n" if "\n" in run or "\r" in run else " "


def _load(language: str) -> Any:
    with _without_torch():
        import spacy
    try:
        pipeline = spacy.blank(language)
    except ImportError:
        raise InputError(f"--sentences {language}: spaCy knows no such language; name one as en, de, zh") from None
    pipeline.add_pipe("sentencizer")
    # The default limit of 1,000,000 characters protects parsers; a passage is shorter, unless NFKC made it much longer.
    pipeline.max_length = sys.maxsize
    return pipeline


@contextlib.contextmanager
def _without_torch() -> Iterator[None]:
    """Make torch impossible to import in the `with` block, in which spaCy is imported: spaCy's library thinc would load
    torch, which takes seconds, and the sentencizer does not need it."""
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["torch"]


@dataclass(frozen=True)
class CleanTask:
    """Task that cleans some texts of the sample on which a tokenizer is trained."""

    texts: tuple[str, ...]
    clean: Cleaning

    def run(self, report: Callable[[int], None]) -> list[str]:
        """Return the cleaned texts; `report` is not called."""
        return _cleaner(self.clean).texts([Passage(text, 0, True) for text in self.texts])


@dataclass(frozen=True)
class EncodeTask:
    """Task that writes the token shards of a work unit. If whole shards of the same text exist already, it returns
    those."""

    unit: WorkUnit
    reading: ReadOptions
    scan: UnitScan
    """Result of the unit's scan: what of the unit is encoded."""
    valid_buckets: range
    """Hash buckets (`passages.bucket_of`) whose passages are for validation."""
    clean: Cleaning
    """Cleaning steps for the text."""
    tokenizer: str
    """'bytes' (one token a byte), or the path of the corpus's tokenizer.json."""
    tokenizer_sha256: str | None
    """SHA-256 of the file `tokenizer`; None for 'bytes'. Worker processes cache tokenizers by it, because the file may
    change between two calls."""
    dtype: str
    """Type in which the shards store a token id: uint16 or uint32."""
    shard_tokens: int
    """Most tokens in a shard."""
    folder: Path
    """Folder for the unit's shards: missing, or left by an interrupted command."""
    target: Path
    """The output folder of the whole command, which errors name."""

    def run(self, report: Callable[[int], None]) -> list[Shard]:
        """Return the token shards of the work unit, after encoding them if they do not exist. `report` is called
        with the bytes of text that were encoded since its last call.

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
        """Yield (passage, whether it is for validation). A passage's `ends` is also true where the document's next
        passage is in the other split, because then the document ends there within its own split."""
        for (passage, aside), (_, next_aside) in itertools.pairwise(itertools.chain(self._passages(), [(None, None)])):
            if passage is not None and aside is not None:
                yield passage if aside == next_aside else replace(passage, ends=True), aside

    def _passages(self) -> Iterator[tuple[Passage, bool]]:
        """Yield (passage, whether it is for validation) for the passages that the scan counted.

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
    """Return the shards that an interrupted command left in the folder; None unless all are whole and encode the text
    of the scan."""
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
