"""Options and sources of a corpus, as `hpctrain data prepare` gets them: from its command line, or from a recipe, which
is a YAML file with several sources and their options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hpctrain.corpus.input.inputs import FormatChoice, expand
from hpctrain.corpus.prepare.shards import SHARD_TOKENS
from hpctrain.records.corpus import NO_CLEANING, Cleaning, Recipe

SAMPLE_BYTES = 4 * 1024 * 1024
"""Default size of the text sample on which a tokenizer is trained, in bytes; training then takes about a second."""

Progress = Callable[[str, int, int], None]
"""Function that is called with (phase, bytes done so far, bytes of the whole phase). Phase 'reading' counts bytes on
disk, phase 'encoding' bytes of text."""


@dataclass(frozen=True)
class PrepareOptions:
    """Options with which a corpus is made."""

    tokenizer: str = "bytes"
    """'bytes' (one token a byte); 'train:N', to train one with N tokens; or the path of a tokenizer.json."""
    valid_fraction: float = 0.01
    """Share of the text that is held out for validation."""
    limit_bytes: int | None = None
    """Most bytes of text that are taken from the input; None: all."""
    force: bool = False
    """Whether to replace a corpus in the output folder, and to drop unfinished work of another command there."""
    shard_tokens: int = SHARD_TOKENS
    """Most tokens in a shard."""
    format: FormatChoice = "auto"
    """Format of the input files; 'auto': by their names."""
    text_field: str = "text"
    """JSON field or table column that holds the text of a document."""
    skip_bad: bool = False
    """Whether to skip and count documents that cannot be used; else the first one ends the command."""
    clean: Cleaning = NO_CLEANING
    """Cleaning steps for the text."""
    workers: int | None = None
    """Number of processes; None: one for each CPU that this process may use (`usable_cpus`), but not more than there
    are work units. The result does not depend on the number of processes.
    """
    sample_bytes: int = SAMPLE_BYTES
    """Size of the text sample on which a tokenizer is trained, in bytes."""
    unit_bytes: int | None = None
    """Size of a work unit in bytes on disk; None: a size that fits the input."""


DEFAULTS = PrepareOptions()


@dataclass(frozen=True)
class CorpusSource:
    """Input files and options from which one corpus folder is made."""

    name: str
    """Name of the corpus folder within the output folder; '' if it is the output folder itself."""
    inputs: tuple[Path, ...]
    options: PrepareOptions


def no_progress(phase: str, done: int, total: int) -> None:
    """Do nothing: the progress callback of a caller that shows no progress."""


def sources_of(recipe: Recipe, base: Path) -> list[CorpusSource]:
    """Return the sources of a recipe (`hpctrain data prepare --recipe`); the recipe's paths are relative to the folder
    `base`.

    Raises:
        InputError: a pattern matches no file.
    """
    sources = []
    for source in recipe.sources:
        options = PrepareOptions(
            valid_fraction=recipe.valid_fraction if source.valid_fraction is None else source.valid_fraction,
            limit_bytes=source.limit_bytes,
            format=source.format,
            text_field=source.text_field,
            skip_bad=recipe.skip_bad,
            clean=source.clean or recipe.clean,
        )
        sources.append(CorpusSource(source.name, tuple(expand(source.path, base)), options))
    return sources


def shared_options(recipe: Recipe, base: Path, force: bool, workers: int | None) -> PrepareOptions:
    """Return the options that all sources of a recipe (`hpctrain data prepare --recipe`) share: tokenizer, its text
    sample, `force` and `workers`. The recipe's paths are relative to the folder `base`."""
    choice = recipe.tokenizer
    if choice != "bytes" and not choice.startswith("train:"):
        choice = str(base / choice)
    return PrepareOptions(choice, force=force, workers=workers, sample_bytes=recipe.sample_bytes or SAMPLE_BYTES)


def run_file_lines(recipe: Recipe, folder: Path) -> list[str]:
    """Return the lines of a run file that train on a recipe's corpora in `folder`, mixed by the recipe's weights."""
    entries = [f"    - {{path: {folder / source.name}, weight: {source.weight:g}}}" for source in recipe.sources]
    return ["data:", "  train:", *entries]
