"""recipe.yaml: several sources of text, each made into a corpus folder, with one tokenizer for all."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, field_validator

from hpctrain.records.corpus.cleaning import NO_CLEANING, Cleaning
from hpctrain.records.format.document import Document, OneOrSeveral, Part
from hpctrain.records.format.file_name import AnyPath
from hpctrain.records.format.yaml_file import read_yaml_model

RECIPE_NAME = "recipe.json"
"""Name of the recipe's copy in the folder made from it; the copy marks the folder as written by `hpctrain data
prepare`."""

Format = Literal["auto", "text", "jsonl", "parquet", "arrow"]


class RecipeSource(Part):
    """Text that becomes one corpus folder."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,99}$")
    """Name of the corpus folder made from this source."""
    path: OneOrSeveral[AnyPath] = Field(min_length=1, json_schema_extra={"type": ["array", "string"]})
    """Files and folders, relative to the recipe's folder; * ? [] match parts of names, ** matches folders."""
    format: Format = "auto"
    """Format of the files. auto: by their names."""
    text_field: str = Field(default="text", min_length=1)
    """Field or column that holds the text, in formats that have several."""
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """How often training draws from this source, relative to the other sources; does not change the corpus folder."""
    clean: Cleaning | None = None
    """Cleaning of this source's text. Default: the recipe's `clean`."""
    valid_fraction: float | None = Field(default=None, ge=0, lt=1)
    """Share of this source's text for validation. Default: the recipe's `valid_fraction`."""
    limit_bytes: int | None = Field(default=None, ge=1)
    """Most bytes of this source's text that are used. Default: all."""


class Recipe(Document):
    """How a corpus of several sources is made."""

    schema_kind: ClassVar[str] = "recipe"

    tokenizer: AnyPath = "bytes"
    """bytes; train:N, which trains one of N tokens on all sources together; or the path of a tokenizer.json, relative
    to the recipe's folder."""
    sample_bytes: int | None = Field(default=None, ge=1)
    """Bytes of text that a tokenizer is trained on. Default: 4 MiB."""
    valid_fraction: float = Field(default=0.01, ge=0, lt=1)
    """Share of each source's text for validation."""
    clean: Cleaning = NO_CLEANING
    """Cleaning of the text before it becomes tokens; a source may override it."""
    skip_bad: bool = False
    """Leave out and count records that cannot be read, instead of stopping at the first."""
    sources: list[RecipeSource] = Field(min_length=1)
    """The sources; `data.train` of a run lists their folders in this order."""

    @field_validator("sources")
    @classmethod
    def _own_names(cls, value: list[RecipeSource]) -> list[RecipeSource]:
        names = [source.name for source in value]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"found the name {twice[0]!r} twice; each source needs its own folder")
        return value


def read_recipe(path: Path) -> Recipe:
    """Read recipe.yaml.

    Raises:
        FileError: the file is missing, no YAML, or has errors; all are listed with their lines.
    """
    return read_yaml_model(path, Recipe, "sources: [{name: …, path: …}]")
