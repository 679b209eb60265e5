"""index.json of a corpus folder: its token shards, its tokenizer and what they were made from."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from hpctrain.records.cleaning import AS_IT_IS, Cleaning
from hpctrain.records.document import Document, Part

INDEX_NAME = "index.json"
"""Name of the index within a corpus folder."""


class TokenizerInfo(Part):
    """What turned text into tokens; two folders with equal entries may be trained on together."""

    kind: Literal["bytes", "trained", "given"]
    """bytes: a token for each byte. trained: byte-level BPE of this text. given: a tokenizer.json of the person's."""
    end_of_text: int = Field(ge=0)
    """Token that ends each document."""
    file: str | None = None
    """tokenizer.json within the folder; absent for bytes."""
    sha256: str | None = None
    """Content hash of that file."""


class Shard(Part):
    """One file of tokens, little-endian, nothing but tokens."""

    file: str
    """Name within the folder."""
    split: Literal["train", "valid"]
    """What it is for; valid was kept aside and is never trained on."""
    tokens: int = Field(ge=1)
    """How many."""
    sha256: str
    """Content hash of the file."""


class Sources(Part):
    """What the corpus was made from."""

    files: int = Field(ge=0)
    """Files that are in it."""
    documents: int = Field(default=0, ge=0)
    """Documents in them: records, or whole text files."""
    text_bytes: int = Field(ge=0)
    """Their size, uncompressed."""
    skipped_not_text: int = Field(default=0, ge=0)
    """Files left out because they are binary or not UTF-8."""
    skipped_unreadable: int = Field(default=0, ge=0)
    """Files left out because they could not be read: permission, a damaged archive."""
    skipped_bad: int = Field(default=0, ge=0)
    """Records left out because they are damaged or hold no text."""
    damaged_files: int = Field(default=0, ge=0)
    """Files, counted among these, of which what follows their damage is lost; of packed text files, all."""
    beside_records: int = Field(default=0, ge=0)
    """Text files left out because they lie in a folder with files of records."""
    other_splits: int = Field(default=0, ge=0)
    """Files left out because their names call them validation or test, beside others called train."""
    clean: Cleaning = AS_IT_IS
    """What was done to the text."""


class CorpusIndex(Document):
    """A corpus folder: shards, tokenizer, sources. The same text and options give the same index."""

    schema_kind: ClassVar[str] = "corpus"

    vocab_size: int = Field(ge=2)
    """Tokens are below this."""
    dtype: Literal["uint16", "uint32"]
    """How a token is stored."""
    tokenizer: TokenizerInfo
    """What made the tokens."""
    shards: list[Shard] = Field(min_length=1)
    """In the order in which they are read."""
    sources: Sources
    """What they were made from."""

    def tokens(self, split: str) -> int:
        """Tokens of one split."""
        return sum(shard.tokens for shard in self.shards if shard.split == split)
