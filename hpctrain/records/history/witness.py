"""An entry in the journal of the witness, the acceptor in the run folder that breaks a tie between two halves of the
agents."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from hpctrain.records.format.document import Document
from hpctrain.records.history.generation import Generation


class WitnessEntry(Document):
    """What the witness has promised or accepted, as one entry of its journal."""

    schema_kind: ClassVar[str] = "witness"

    number: int = Field(ge=0)
    """Number of the generation to be decided."""
    round: int = Field(ge=1, lt=1 << 31)
    """Round of the ballot."""
    proposer: str = Field(min_length=1, max_length=255)
    """Incarnation of the agent whose ballot it is."""
    record: Generation | None = None
    """The record that the witness has accepted in this ballot; absent in a mere promise."""


def witness_file(generations: Path, number: int, entry: int) -> Path:
    """Return the path of an entry of the witness's journal in the folder `generations`.

    Args:
        number: number of the generation to be decided.
        entry: place of the entry in the journal, from 0.
    """
    return generations / f"witness-{number:06d}-{entry:04d}.json"
