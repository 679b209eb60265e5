"""unit.json of a part of a corpus that is being made: what is finished, and how to see that it is whole."""

from __future__ import annotations

from typing import ClassVar

from hpctrain.records.corpus.index import Shard
from hpctrain.records.format.document import Document

PART_NAME = "unit.json"
"""Name within the part's folder; the folder has its name only when it is whole."""


class CorpusPart(Document):
    """One unit of work, turned into tokens."""

    schema_kind: ClassVar[str] = "corpus_part"

    text_sha256: str
    """Hash over the passages that it was made of."""
    shards: list[Shard]
    """Files of tokens in this folder; may be none."""
