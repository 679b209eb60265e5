"""Models of index.json and unit.json in corpus folders, and of recipe.yaml, from which several corpus folders are made.

index.json lists the token shards of a corpus folder, its tokenizer, and the counts of its input. unit.json lists the
token shards of one work unit, while the corpus folder is being made. recipe.yaml names several sources of text, each of
which becomes a corpus folder, with one tokenizer for all.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, field_validator

from hpctrain.records.format.document import VOCAB_MAX, Document, OneOrSeveral, Part
from hpctrain.records.format.file_name import AnyPath, PlainName
from hpctrain.records.format.yaml_file import read_yaml_model


class Cleaning(Part):
    """Cleaning steps for text, in the order in which they run; by default the text stays as it is."""

    normalize: Literal["none", "nfkc"] = "none"
    """nfkc: Unicode's compatibility composition (UAX #15), which makes full-width letters and ligatures plain."""
    whitespace: Literal["keep", "collapse"] = "keep"
    """collapse: a run of white space becomes one line end if it contains one, else one blank; both ends are trimmed."""
    sentences: str | None = Field(default=None, pattern=r"^[a-z]{2,3}$")
    """Language code, such as 'en': spaCy's sentencizer for that language puts each sentence into a line of its own."""


NO_CLEANING = Cleaning()
"""Settings without any cleaning step."""


INDEX_NAME = "index.json"
"""Name of the file within a corpus folder that lists its token shards, its tokenizer and the counts of its input."""
SHARD_TOKENS_MAX = 2**48
"""Most tokens of one token shard, well above any real one."""


class TokenizerInfo(Part):
    """The tokenizer of a corpus folder. A run may train on several corpus folders if their indexes have equal entries
    `tokenizer`.
    """

    kind: Literal["bytes", "trained", "given"]
    """bytes: a token for each byte. trained: byte-level BPE, trained on the text. given: the user's tokenizer.json."""
    end_of_text: int = Field(ge=0, le=VOCAB_MAX)
    """Id of the token that ends each document."""
    file: PlainName | None = None
    """Name of the tokenizer.json in the corpus folder; absent for bytes."""
    sha256: str | None = None
    """SHA-256 of tokenizer.json; absent for bytes."""


class Shard(Part):
    """A token shard: one file of token ids, little-endian, without a header."""

    file: PlainName
    """Name of the file within the corpus folder."""
    split: Literal["train", "valid"]
    """Whether the shard is for training or validation; a run never trains on valid."""
    tokens: int = Field(ge=1, le=SHARD_TOKENS_MAX)
    """Number of tokens in the file."""
    sha256: str
    """SHA-256 of the file."""


class Sources(Part):
    """Counts of the input that a corpus folder was made from."""

    files: int = Field(ge=0)
    """Input files that are in the corpus."""
    documents: int = Field(default=0, ge=0)
    """Documents in the corpus: lines or rows of files of records, or whole text files."""
    text_bytes: int = Field(ge=0)
    """Bytes of text in the corpus, uncompressed."""
    skipped_not_text: int = Field(default=0, ge=0)
    """Files left out because they are binary or not UTF-8."""
    skipped_unreadable: int = Field(default=0, ge=0)
    """Files left out because they could not be read: permission, a damaged archive."""
    skipped_bad: int = Field(default=0, ge=0)
    """Documents left out because their line or row is damaged or holds no text."""
    damaged_files: int = Field(default=0, ge=0)
    """Damaged files. A text file among them is also counted in skipped_unreadable, and all its text is lost. A file of
    records is also counted as one in skipped_bad, and its text after the damage is lost."""
    beside_records: int = Field(default=0, ge=0)
    """Text files left out because they are in a folder with files of records, such as JSON lines."""
    other_splits: int = Field(default=0, ge=0)
    """Files left out because their names say validation or test, next to files whose names say train."""
    clean: Cleaning = NO_CLEANING
    """Cleaning steps that the text went through."""


class CorpusIndex(Document):
    """index.json of a corpus folder: its token shards, tokenizer and sources. The same text and options give the same
    index."""

    schema_kind: ClassVar[str] = "corpus"

    vocab_size: int = Field(ge=2, le=VOCAB_MAX)
    """Size of the vocabulary; all token ids are smaller."""
    dtype: Literal["uint16", "uint32"]
    """Type in which the shards store a token id."""
    tokenizer: TokenizerInfo
    """The tokenizer that made the tokens."""
    shards: list[Shard] = Field(min_length=1)
    """Token shards, in the order of reading."""
    sources: Sources
    """Counts of the input that the corpus was made from."""

    @field_validator("shards")
    @classmethod
    def _files_of_their_own(cls, value: list[Shard]) -> list[Shard]:
        names = Counter(shard.file for shard in value)
        taken = next((name for name, count in names.items() if count > 1 or name == INDEX_NAME), None)
        if taken is not None:
            raise ValueError(f"{taken!r} is named twice or is the index itself; each shard is a file of its own")
        return value

    def tokens(self, split: str) -> int:
        """Return the number of tokens of one split: train or valid."""
        return sum(shard.tokens for shard in self.shards if shard.split == split)


PART_NAME = "unit.json"
"""Name of the file that lists the shards of a work unit, in the work unit's folder."""


class CorpusPart(Document):
    """unit.json: the token shards of one work unit, while a corpus folder is being made."""

    schema_kind: ClassVar[str] = "corpus_part"

    text_sha256: str
    """SHA-256 of the passages that the shards were made from."""
    shards: list[Shard]
    """Token shards in the work unit's folder; may be empty."""


RECIPE_NAME = "recipe.json"
"""Name of the recipe's copy in the folder that `hpctrain data prepare` makes from a recipe. The copy shows that
hpctrain wrote the folder."""

Format = Literal["auto", "text", "jsonl", "parquet", "arrow"]


class RecipeSource(Part):
    """A source of text in recipe.yaml, which becomes one corpus folder."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,99}$")
    """Name of the corpus folder made from this source."""
    path: OneOrSeveral[AnyPath] = Field(min_length=1, json_schema_extra={"type": ["array", "string"]})
    """Files and folders, relative to the recipe's folder; * ? [] match parts of names, ** matches folders."""
    format: Format = "auto"
    """Format of the files. auto: by the endings of their names."""
    text_field: str = Field(default="text", min_length=1)
    """Name of the field or column that holds the text, in formats with fields or columns."""
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """How often training draws from this source, relative to the other sources; does not change the corpus folder."""
    clean: Cleaning | None = None
    """Cleaning of this source's text. Default: the recipe's `clean`."""
    valid_fraction: float | None = Field(default=None, ge=0, lt=1)
    """Share of this source's text for validation. Default: the recipe's `valid_fraction`."""
    limit_bytes: int | None = Field(default=None, ge=1)
    """Most bytes of this source's text that are used. Default: all."""


class Recipe(Document):
    """recipe.yaml: how corpus folders are made from several sources of text, with one tokenizer for all."""

    schema_kind: ClassVar[str] = "recipe"

    tokenizer: AnyPath = "bytes"
    """The tokenizer of all sources. bytes: a token for each byte. train:N: a tokenizer of N tokens, trained on all
    sources together. Otherwise the path of a tokenizer.json, relative to the recipe's folder."""
    sample_bytes: int | None = Field(default=None, ge=1)
    """With tokenizer train:N: bytes of text that the tokenizer is trained on. Default: 4 MiB."""
    valid_fraction: float = Field(default=0.01, ge=0, lt=1)
    """Share of each source's text for validation."""
    clean: Cleaning = NO_CLEANING
    """Cleaning of the text before it becomes tokens; `clean` of a source replaces it."""
    skip_bad: bool = False
    """Whether documents that cannot be read are left out and counted. Otherwise the first one is an error."""
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
    """Return the recipe in the YAML file at `path`.

    Raises:
        FileError: the file is missing, no YAML, or has errors; all are listed with their lines.
    """
    return read_yaml_model(path, Recipe, "sources: [{name: …, path: …}]")
