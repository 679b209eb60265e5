"""How a corpus is made, and of what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hpctrain.corpus.input.inputs import FormatChoice
from hpctrain.corpus.prepare.shards import SHARD_TOKENS
from hpctrain.records.corpus.cleaning import NO_CLEANING, Cleaning

SAMPLE_BYTES = 4 * 1024 * 1024
"""Text that a tokenizer is trained on, unless more is asked for: a second of work."""

Progress = Callable[[str, int, int], None]
"""Called with the phase ('reading', 'encoding'), what is done of it and the whole (bytes on disk, bytes of text)."""


@dataclass(frozen=True)
class PrepareOptions:
    """How a corpus is made."""

    tokenizer: str = "bytes"
    """bytes, train:N, or the path of a tokenizer.json."""
    valid_fraction: float = 0.01
    """Share of the text kept aside for validation."""
    limit_bytes: int | None = None
    """Stop after that much text."""
    force: bool = False
    """Replace a corpus that lies in the folder, and drop the unfinished work of another command."""
    shard_tokens: int = SHARD_TOKENS
    """Most tokens in a shard."""
    format: FormatChoice = "auto"
    """What named files are; auto: by their names."""
    text_field: str = "text"
    """Field or column that holds the text of a record."""
    skip_bad: bool = False
    """Leave out and count records that cannot be used."""
    clean: Cleaning = NO_CLEANING
    """What is done to the text."""
    workers: int | None = None
    """Processes; None for as many as there are processors and units of work. Changes nothing in the result."""
    sample_bytes: int = SAMPLE_BYTES
    """Text that a tokenizer is trained on."""
    unit_bytes: int | None = None
    """Size of a unit of work on disk; None for one that fits the input."""


DEFAULTS = PrepareOptions()


@dataclass(frozen=True)
class CorpusSource:
    """Text that becomes one corpus folder."""

    name: str
    """Its folder within the output; '' for the output itself."""
    inputs: tuple[Path, ...]
    options: PrepareOptions


def no_progress(phase: str, done: int, total: int) -> None:
    """Tells nobody."""
