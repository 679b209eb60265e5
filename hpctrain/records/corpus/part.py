"""unit.json of a part of a corpus that is being made: what is finished, and how to verify it."""

from __future__ import annotations

from typing import ClassVar

from hpctrain.records.corpus.index import Shard
from hpctrain.records.format.document import Document

PART_NAME = "unit.json"
"""File name in the part's folder; the folder gets its final name only when it is complete."""


class CorpusPart(Document):
    """One work unit, turned into tokens."""

    schema_kind: ClassVar[str] = "corpus_part"

    text_sha256: str
    """Hash of the passages that it was made from."""
    shards: list[Shard]
    """Token shards in this folder; may be empty."""
