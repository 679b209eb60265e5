"""Turns windows of tokens into model inputs and targets: a pure function of (seed, sample number, tokens).

An objective may need special tokens, which stand for no text: the mask, the sentinels and the decoder's start token. If
the tokenizer has such a token, it is used. Else the token gets an id after all tokens of the data, which extends the
model's vocabulary.

Every random choice is a hash of the seed, the sample's number in the run, and the position. So a sample does not depend
on the rank that makes it, nor on the batch. A window that comes again in a later epoch has another sample number, and
so other random choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpctrain.base.errors import FieldError, FileError
from hpctrain.corpus.read.tokens import read_indexes, splitmix64
from hpctrain.records.corpus import CorpusIndex
from hpctrain.records.format.document import TOKENIZER_BYTES, read_json
from hpctrain.records.model.span_corruption import Lengths
from hpctrain.records.run.objective import AnyObjective, Masked, NextToken, SpanCorruption, lengths

NO_TARGET = -100
"""Target of a position that the loss leaves out: the default `ignore_index` of torch's CrossEntropyLoss."""

MASKS = ("[MASK]", "<mask>")
"""Names of the mask token in published tokenizers; of these, the first one that a tokenizer has is used."""
PADS = ("<pad>", "[PAD]")
"""Names of the padding token in published tokenizers; of these, the first one that a tokenizer has is used. As in T5,
it is the first token that the decoder reads."""

Tokens = NDArray[np.int64]
UInt64 = NDArray[np.uint64]

_CHOICE, _KIND, _TOKEN, _NOISE, _UNCORRUPTED = range(1, 6)
"""Numbers of the independent streams of random numbers: masked positions, what replaces each, random tokens, and the
lengths of removed and of kept spans."""


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of an objective's special tokens, and the vocabulary sizes of the data and of the model. Where the objective
    does not need them, `mask` and `start` are None and `sentinels` is empty."""

    data_vocabulary: int
    """Vocabulary size of the data: token ids in the corpus are below it."""
    vocabulary: int
    """Vocabulary size of the model, with the special tokens: ids of inputs and targets are below it."""
    end_of_text: int
    """Token that ends a document."""
    mask: int | None = None
    """Token that replaces a masked token."""
    start: int | None = None
    """First token that the decoder reads; None without a decoder."""
    sentinels: tuple[int, ...] = ()
    """Sentinels in the order in which a sample uses them: the first replaces the first removed span."""


def special_tokens(folders: Sequence[str | Path], objective: AnyObjective, seq_len: int) -> SpecialTokens:
    """Return the special tokens that an objective needs on the data of the corpus folders, for sequences of `seq_len`
    tokens.

    Raises:
        InputError: a folder is missing, or the folders' tokenizers differ.
        FileError: the tokenizer.json of the first folder is missing or damaged.
    """
    index = read_indexes(folders)[0]
    size = index.vocab_size
    plain = SpecialTokens(size, size, index.tokenizer.end_of_text)
    if isinstance(objective, NextToken):
        return plain
    known = _known(Path(folders[0]), index)
    token = next((known[name] for name in (MASKS if isinstance(objective, Masked) else PADS) if name in known), None)
    first_new = size + (token is None)
    token = size if token is None else token
    if isinstance(objective, Masked):
        return replace(plain, vocabulary=first_new, mask=token)
    # Sentinels that the tokenizer lacks get descending ids at the end of the vocabulary, as in T5.
    spans = lengths(objective, seq_len).spans
    sentinels = [known.get(f"<extra_id_{number}>") for number in range(spans)]
    grown = first_new + sentinels.count(None)
    new = iter(range(grown - 1, first_new - 1, -1))
    ids = tuple(next(new) if number is None else number for number in sentinels)
    return replace(plain, vocabulary=grown, start=token, sentinels=ids)


def _known(folder: Path, index: CorpusIndex) -> dict[str, int]:
    """Return name -> id of the added tokens in the tokenizer.json of a corpus folder; empty if its tokens are bytes.

    Raises:
        FileError: the file cannot be read, or is no tokenizer.json of the tokenizers library.
    """
    if index.tokenizer.file is None:
        return {}
    path = folder / index.tokenizer.file
    detail = ""
    try:
        value = read_json(path, TOKENIZER_BYTES)
        added = (value.get("added_tokens") or []) if isinstance(value, dict) else None
        if isinstance(added, list) and all(_is_token(token, index.vocab_size) for token in added):
            return {token["content"]: token["id"] for token in added}
    except FileError as error:
        detail = f" ({error.mistakes[0].text})"
    text = f"is no tokenizer.json of the tokenizers library{detail}; prepare the folder again"
    raise FileError(path, [FieldError("", text)])


def _is_token(token: Any, vocab_size: int) -> bool:
    if not isinstance(token, dict) or not isinstance(token.get("content"), str):
        return False
    return type(token.get("id")) is int and 0 <= token["id"] < vocab_size


class Examples(NamedTuple):
    """Model inputs and targets of n samples. `records.model.span_corruption.Lengths` defines the widths of the
    arrays."""

    inputs: Tokens
    """Tokens that the model (or the encoder of an encoder-decoder) reads, [n, `Lengths.inputs`]."""
    targets: Tokens
    """Target tokens, [n, `Lengths.outputs`]; NO_TARGET where the loss leaves out the position."""
    decoder_tokens: Tokens | None = None
    """Tokens that the decoder of an encoder-decoder reads, [n, `Lengths.outputs`]; None for other models."""


def examples(
    objective: AnyObjective, special: SpecialTokens, seq_len: int, seed: int, samples: Tokens, rows: Tokens
) -> Examples:
    """Return the model inputs and targets of n samples.

    Args:
        special: the result of `special_tokens`.
        seq_len: the run's `data.seq_len`.
        seed: the run's seed, or a fixed one for validation, so that each validation has the same examples.
        samples: the samples' numbers in the run, [n].
        rows: the samples' windows of tokens, [n, `Lengths.raw` + 1]; the last column is the token after the window.

    Raises:
        InputError: with span corruption, no text has exactly `seq_len` tokens after its spans are replaced.
    """
    match objective:
        case NextToken():
            # Copies, because both would share the memory of a single row, and a caller may change the targets.
            return Examples(rows[:, :-1].copy(), rows[:, 1:].copy())
        case Masked():
            chosen = lengths(objective, seq_len).targets
            return _masked(objective, special, chosen, seed, samples, np.ascontiguousarray(rows[:, :-1]))
        case SpanCorruption():
            return _corrupted(special, lengths(objective, seq_len), seed, samples, rows[:, :-1])


def _masked(
    objective: Masked, special: SpecialTokens, chosen: int, seed: int, samples: Tokens, rows: Tokens
) -> Examples:
    count = rows.shape[1]
    # The smallest hashes of a sequence: the same number of positions in each, and every set of them equally likely.
    where = np.argpartition(_hashes(seed, _CHOICE, samples, count), chosen - 1, axis=1)[:, :chosen]
    line = np.arange(len(rows))[:, None]
    assert special.mask is not None, "an objective comes with its own special tokens"
    originals = rows[line, where]
    kind = _hashes(seed, _KIND, samples, count)[line, where] / 2.0**64
    other = _hashes(seed, _TOKEN, samples, count)[line, where] % np.uint64(special.data_vocabulary)
    shown = np.where(kind < objective.mask_fraction + objective.random_fraction, other.astype(np.int64), originals)
    inputs, targets = rows.copy(), np.full_like(rows, NO_TARGET)
    inputs[line, where] = np.where(kind < objective.mask_fraction, special.mask, shown)
    targets[line, where] = originals
    return Examples(inputs, targets)


def _corrupted(special: SpecialTokens, sizes: Lengths, seed: int, samples: Tokens, rows: Tokens) -> Examples:
    n, raw = rows.shape
    noise = sizes.outputs - 1 - sizes.spans
    uncorrupted = _segments(_hashes(seed, _UNCORRUPTED, samples, raw - noise - 1), sizes.spans, raw - noise)
    taken = _segments(_hashes(seed, _NOISE, samples, noise - 1), sizes.spans, noise)
    # A sequence begins with a kept segment; after that, taken and kept segments alternate.
    bounds = np.stack([uncorrupted, taken], axis=2).reshape(n, 2 * sizes.spans).cumsum(axis=1)
    begins = np.zeros((n, raw), dtype=np.int64)
    np.put_along_axis(begins, bounds[:, :-1], 1, axis=1)
    stretch = begins.cumsum(axis=1)  # number of the segment that a position is in; the odd ones are taken out
    noisy, first = stretch % 2 == 1, (begins == 1) & (stretch % 2 == 1)
    sentinel = np.array(special.sentinels, dtype=np.int64)[stretch // 2]
    end = np.full((n, 1), special.end_of_text, dtype=np.int64)
    inputs = np.where(first, sentinel, rows)[~noisy | first].reshape(n, sizes.inputs - 1)
    both = np.stack([sentinel, rows], axis=2)
    targets = both[np.stack([first, noisy], axis=2)].reshape(n, sizes.outputs - 1)
    targets = np.concatenate([targets, end], axis=1)
    start = np.full((n, 1), special.start, dtype=np.int64)
    decoder_tokens = np.concatenate([start, targets[:, :-1]], axis=1)
    return Examples(np.concatenate([inputs, end], axis=1), targets, decoder_tokens)


def _segments(hashes: UInt64, parts: int, total: int) -> Tokens:
    """Return the lengths of `parts` segments, each at least 1, that add up to `total`: [n, parts]. Every such partition
    is equally likely.

    Args:
        hashes: a random number for each place where a segment may end, before the last: [n, total - 1].
    """
    cuts = np.zeros((len(hashes), parts + 1), dtype=np.int64)
    cuts[:, -1] = total
    if parts > 1:
        places = np.argpartition(hashes, parts - 2, axis=1)[:, : parts - 1]
        cuts[:, 1:-1] = np.sort(places, axis=1) + 1
    return np.diff(cuts, axis=1)


def _hashes(seed: int, stream: int, samples: Tokens, count: int) -> UInt64:
    """Return random 64-bit numbers, [n, count]: `count` of them for each of the n samples. A number depends only on the
    seed, the stream, the sample's number and the column.

    Args:
        stream: number of the random stream; the random numbers of different streams are independent.
        samples: the samples' numbers in the run, [n].
    """
    base = splitmix64(splitmix64(np.full(samples.shape, seed % 2**64, dtype=np.uint64)) ^ samples.astype(np.uint64))
    keys = splitmix64(base + np.uint64(stream))
    positions = np.arange(count, dtype=np.uint64) * np.uint64(0xD1342543DE82EF95)
    return splitmix64(keys[:, None] + positions[None, :])
