"""bad_nodes.jsonl: nodes that a run had trouble with, for how long its next jobs do without them, and why."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from hpctrain.records.format.document import Document
from hpctrain.records.format.jsonl import read_jsonl
from hpctrain.records.format.node_set import NODE_NAME

BAD_NODES_FILE = "bad_nodes.jsonl"
"""File in a run folder; lines are only added, and a person may take some away."""


class BadNode(Document):
    """One node, once."""

    schema_kind: ClassVar[str] = "bad_node"

    node: str = Field(pattern=NODE_NAME)
    attempt: int
    """Attempt in which it was seen."""
    time_s: float
    """Seconds since 1970."""
    expires_s: float
    """From then on it may be used again, seconds since 1970."""
    reason: str
    """One sentence."""


def read_bad_nodes(folder: Path) -> list[BadNode]:
    """Every line of the file.

    Raises:
        FileError: a line is wrong; a name that is no host name is never passed on.
    """
    path = folder / BAD_NODES_FILE
    return [BadNode.from_json(value, str(path)) for value in read_jsonl(path)]
