"""Cleans text: Unicode NFKC, white space, one sentence per line by the rules of spaCy's sentencizer."""

from __future__ import annotations

import contextlib
import re
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any

from hpctrain.base.errors import InputError
from hpctrain.corpus.input.inputs import require_library
from hpctrain.corpus.input.passages import Passage
from hpctrain.records.corpus import NO_CLEANING, Cleaning

_RUN = re.compile(r"\s+")


class Cleaner:
    """Applies the steps of a `Cleaning` to passages."""

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
        """Return the line with line ends in place of the white space between sentences; nothing else changes."""
        body = line.strip()
        if not body or self._language is None:
            return line
        sentences = (sentence.text.strip() for sentence in self._language(body).sents)
        start = line.index(body)
        lines = "\n".join(sentence for sentence in sentences if sentence)
        return f"{line[:start]}{lines}{line[start + len(body) :]}"


def check_cleaning(cleaning: Cleaning) -> None:
    """Check before any work whether all cleaning steps are possible on this machine.

    Raises:
        InputError: spaCy is not installed, or does not know the language.
    """
    if cleaning.sentences:
        require_library("spacy", f"--sentences {cleaning.sentences}")
        _load(cleaning.sentences)


def _one(run: str) -> str:
    """Return the replacement of a run of white space."""
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
    """Hide torch while spaCy is imported: its library would load torch, and the sentencizer does not need it."""
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["torch"]
