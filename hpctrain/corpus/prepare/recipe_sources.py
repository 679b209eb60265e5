"""The sources of a recipe, and the lines of a run file that trains on them by their weights."""

from __future__ import annotations

from pathlib import Path

from hpctrain.corpus.input.inputs import expand
from hpctrain.corpus.prepare.options import SAMPLE_BYTES, CorpusSource, PrepareOptions
from hpctrain.records.corpus.recipe import Recipe, RecipeSource


def sources_of(recipe: Recipe, base: Path) -> list[CorpusSource]:
    """The sources of a recipe; its paths are relative to the folder `base`.

    Raises:
        InputError: a pattern matches no file.
    """
    return [
        CorpusSource(source.name, tuple(expand(source.path, base)), _options(recipe, source))
        for source in recipe.sources
    ]


def shared_options(recipe: Recipe, base: Path, force: bool, workers: int | None) -> PrepareOptions:
    """The options that all sources of a recipe share."""
    choice = recipe.tokenizer
    if choice != "bytes" and not choice.startswith("train:"):
        choice = str(base / choice)
    return PrepareOptions(choice, force=force, workers=workers, sample_bytes=recipe.sample_bytes or SAMPLE_BYTES)


def run_file_lines(recipe: Recipe, folder: Path) -> list[str]:
    """The lines of a run file that draw from the recipe's corpora by their weights."""
    entries = [f"    - {{path: {folder / source.name}, weight: {source.weight:g}}}" for source in recipe.sources]
    return ["data:", "  train:", *entries]


def _options(recipe: Recipe, source: RecipeSource) -> PrepareOptions:
    fraction = recipe.valid_fraction if source.valid_fraction is None else source.valid_fraction
    return PrepareOptions(
        valid_fraction=fraction,
        limit_bytes=source.limit_bytes,
        format=source.format,
        text_field=source.text_field,
        skip_bad=recipe.skip_bad,
        clean=source.clean or recipe.clean,
    )
