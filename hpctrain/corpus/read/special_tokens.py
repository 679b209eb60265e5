"""Finds the special tokens, which stand for no text: the mask, the sentinels and the decoder's start token.

A special token that the tokenizer has is used. Others get ids after all tokens of the data, so they extend the model's
vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.base.errors import FieldError, FileError
from hpctrain.corpus.read.index import read_indexes
from hpctrain.records.corpus.index import CorpusIndex
from hpctrain.records.format.bounds import TOKENIZER_BYTES
from hpctrain.records.format.document import read_json
from hpctrain.records.run.objective import AnyObjective, Masked, SpanCorruption, lengths

MASKS = ("[MASK]", "<mask>")
PADS = ("<pad>", "[PAD]")
"""Names of the padding token in published tokenizers; the first one present is used. T5's decoder starts with it."""


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of the special tokens; those that an objective does not need are None or empty."""

    data_vocabulary: int
    """Vocabulary size of the data: its tokens are below this."""
    vocabulary: int
    """Vocabulary size of the model: its inputs and targets are below this."""
    end_of_text: int
    mask: int | None = None
    start: int | None = None
    """First token that the decoder reads."""
    sentinels: tuple[int, ...] = ()
    """Sentinels in the order in which a sample uses them."""


def special_tokens(folders: Sequence[str | Path], objective: AnyObjective, seq_len: int) -> SpecialTokens:
    """Return the special tokens that an objective needs on the data of these folders.

    Raises:
        InputError: a folder is missing, or their tokenizers differ.
        FileError: the folder's tokenizer.json is missing or damaged.
    """
    index = read_indexes(folders)[0]
    match objective:
        case Masked():
            known = _known(Path(folders[0]), index)
            mask = _first(known, MASKS)
            if mask is not None:
                return SpecialTokens(index.vocab_size, index.vocab_size, index.tokenizer.end_of_text, mask)
            grown = index.vocab_size + 1
            return SpecialTokens(index.vocab_size, grown, index.tokenizer.end_of_text, mask=index.vocab_size)
        case SpanCorruption():
            return _for_spans(index, _known(Path(folders[0]), index), lengths(objective, seq_len).spans)
        case _:
            return SpecialTokens(index.vocab_size, index.vocab_size, index.tokenizer.end_of_text)


def _for_spans(index: CorpusIndex, known: Mapping[str, int], spans: int) -> SpecialTokens:
    """Return the start token and the sentinels; sentinels that the tokenizer lacks get descending ids at the end of the
    vocabulary, as in T5."""
    start = _first(known, PADS)
    sentinels = [known.get(f"<extra_id_{number}>") for number in range(spans)]
    first_new = index.vocab_size + (start is None)
    grown = first_new + sentinels.count(None)
    new = iter(range(grown - 1, first_new - 1, -1))
    return SpecialTokens(
        index.vocab_size,
        grown,
        index.tokenizer.end_of_text,
        start=index.vocab_size if start is None else start,
        sentinels=tuple(next(new) if token is None else token for token in sentinels),
    )


def _first(known: Mapping[str, int], names: Sequence[str]) -> int | None:
    return next((known[name] for name in names if name in known), None)


def _known(folder: Path, index: CorpusIndex) -> dict[str, int]:
    """Return the ids of the added tokens in the folder's tokenizer.json by name; empty for bytes."""
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
