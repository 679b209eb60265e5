"""Text files to a corpus folder: read once to learn what is there, then again to write tokens, in bounded memory."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hpctrain.base.errors import InputError
from hpctrain.corpus.shards import SHARD_TOKENS, ShardWriter, check_target, new_folder
from hpctrain.corpus.sources import (
    TEXT_SUFFIXES,
    Scan,
    list_files,
    passage_bytes,
    read_passages,
    scan_files,
    validation_mask,
)
from hpctrain.corpus.tokenizer import Tokenizer, load_tokenizer, train_tokenizer, trained_size
from hpctrain.records.corpus_index import INDEX_NAME, CorpusIndex, Shard, Sources

TRAINING_SAMPLE_BYTES = 4 * 1024 * 1024
"""Text that a tokenizer is trained on: enough for 32k merges, a second of work."""

BATCH_BYTES = 4 * 1024 * 1024
"""Text that is encoded at once, over all cores."""

Progress = Callable[[str, int, int], None]
"""Called with the phase ('reading', 'encoding'), what is done of it and the whole (files, bytes)."""


@dataclass(frozen=True)
class Options:
    """How a corpus is made."""

    tokenizer: str = "bytes"
    """bytes, train:N, or the path of a tokenizer.json."""
    valid_fraction: float = 0.01
    """Share of the text kept aside for validation."""
    limit_bytes: int | None = None
    """Stop after that much text."""
    force: bool = False
    """Replace a corpus that lies in the folder."""
    shard_tokens: int = SHARD_TOKENS
    """Most tokens in a shard."""


DEFAULTS = Options()


def no_progress(phase: str, done: int, total: int) -> None:
    """Tells nobody."""


def prepare(
    inputs: Sequence[Path], folder: Path, options: Options = DEFAULTS, progress: Progress = no_progress
) -> CorpusIndex:
    """Make a corpus folder of the inputs (files, or folders with text files); it appears only when it is whole.

    The same text and options give the same folder, byte for byte, in whatever order the inputs are named.

    Raises:
        InputError: an input is missing or holds no text, the folder holds something, or an option is wrong.
        StorageError: the folder cannot be written; nothing of it is left behind.
    """
    _check_options(options)
    check_target(folder, options.force)
    size = trained_size(options.tokenizer)
    given = load_tokenizer(options.tokenizer) if size is None else None
    files = list_files(inputs)
    cut = passage_bytes(files, options.valid_fraction)
    scan = scan_files(files, cut, options.limit_bytes, lambda done, total: progress("reading", done, total))
    if not scan.files:
        raise InputError(_nothing_found(inputs, scan))
    tokenizer = given or train_tokenizer(size or 0, _training_sample(scan, cut))
    with new_folder(folder) as temporary:
        index = _write(temporary, scan, cut, tokenizer, options, progress)
        index.write(temporary / INDEX_NAME)
    return index


def _check_options(options: Options) -> None:
    if not 0 <= options.valid_fraction < 1:
        raise InputError(f"--valid-fraction: found {options.valid_fraction:g}, allowed: from 0 to below 1")
    if options.limit_bytes is not None and options.limit_bytes < 1:
        raise InputError(f"--limit-bytes: found {options.limit_bytes}, allowed: 1 or more")


def _nothing_found(inputs: Sequence[Path], scan: Scan) -> str:
    skipped = scan.skipped_not_text + scan.skipped_unreadable
    return (
        f"IN: {', '.join(map(str, inputs))}: found no text ({skipped} files skipped); taken from folders are "
        f"{' '.join(TEXT_SUFFIXES)}, plain or .gz, as UTF-8; name other files one by one"
    )


def _training_sample(scan: Scan, cut: int) -> Iterator[str]:
    """Every n-th passage, so that all parts of the corpus have their share of the sample."""
    every = max(1, math.ceil(scan.text_bytes / TRAINING_SAMPLE_BYTES))
    for number, (text, _) in enumerate(read_passages(scan, cut)):
        if number % every == 0:
            yield text


def _write(
    folder: Path, scan: Scan, cut: int, tokenizer: Tokenizer, options: Options, progress: Progress
) -> CorpusIndex:
    dtype = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
    train = ShardWriter(folder, "train", dtype, options.shard_tokens)
    valid = ShardWriter(folder, "valid", dtype, options.shard_tokens)
    with contextlib.closing(train), contextlib.closing(valid):
        done = 0
        for batch in _batches(scan, cut, validation_mask(scan, options.valid_fraction)):
            for passage, tokens in zip(batch, tokenizer.encode([p.text for p in batch]), strict=True):
                writer = valid if passage.valid else train
                writer.append(np.append(tokens, tokenizer.end_of_text) if passage.ends else tokens)
            done += sum(passage.size_bytes for passage in batch)
            progress("encoding", done, scan.text_bytes)
        shards: list[Shard] = train.finish() + valid.finish()
    return CorpusIndex(
        vocab_size=tokenizer.vocab_size,
        dtype=dtype,
        tokenizer=tokenizer.save(folder),
        shards=shards,
        sources=Sources(
            files=len(scan.files),
            text_bytes=scan.text_bytes,
            skipped_not_text=scan.skipped_not_text,
            skipped_unreadable=scan.skipped_unreadable,
        ),
    )


@dataclass(frozen=True)
class _Passage:
    text: str
    size_bytes: int
    valid: bool
    ends: bool
    """Whether the end-of-text token follows."""


def _batches(scan: Scan, cut: int, valid: NDArray[np.bool_]) -> Iterator[list[_Passage]]:
    """Passages in batches that are worth spreading over all cores."""
    batch: list[_Passage] = []
    held = 0
    for number, (text, last) in enumerate(read_passages(scan, cut)):
        # Where the next passage goes to the other split, this one is followed by other text: end it here.
        ends = last or bool(valid[number + 1] != valid[number])
        batch.append(_Passage(text, scan.sizes[number], bool(valid[number]), ends))
        held += scan.sizes[number]
        if held >= BATCH_BYTES:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch
