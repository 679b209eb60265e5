"""bad_nodes.jsonl: nodes that had faults in a run, the reason, and how long the run's next jobs exclude them."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from hpctrain.records.format.document import Document
from hpctrain.records.format.jsonl import read_jsonl
from hpctrain.records.format.node_set import NODE_NAME

BAD_NODES_FILE = "bad_nodes.jsonl"
"""File in a run folder; hpctrain only adds lines, and you may remove some."""


class BadNode(Document):
    """A line of bad_nodes.jsonl: one node that had a fault in one attempt."""

    schema_kind: ClassVar[str] = "bad_node"

    node: str = Field(pattern=NODE_NAME)
    attempt: int
    """Attempt in which the node had a fault."""
    time_s: float
    """Seconds since 1970."""
    expires_s: float
    """When the node may be used again, seconds since 1970."""
    reason: str
    """Why the node is excluded, in one sentence."""


def read_bad_nodes(folder: Path) -> list[BadNode]:
    """Return every line of the file.

    Raises:
        FileError: a line is invalid, for example its name is no host name.
    """
    path = folder / BAD_NODES_FILE
    return [BadNode.from_json(value, str(path)) for value in read_jsonl(path)]
