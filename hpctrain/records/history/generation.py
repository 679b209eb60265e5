"""A generation: one set of workers that train together until one is lost. Its record is what agents agree on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from hpctrain.base.errors import Superseded
from hpctrain.records.format.document import Document, Part
from hpctrain.records.format.file_name import PathBelow
from hpctrain.records.format.node_set import NODE_NAME

GENERATIONS = "generations"
"""Folder in a run folder: one record for each generation that was decided."""


class Member(Part):
    """An agent as the others know it. A restarted agent is another member: its incarnation differs."""

    node: str = Field(pattern=NODE_NAME)
    incarnation: str
    """Host, pid and start time of the agent's process."""
    addr: str
    """Address the others reach it at."""
    store_port: int
    """Port this agent holds open, bound, for the store of the next generation."""


class StoreAddress(Part):
    """Where the workers meet."""

    addr: str
    port: int
    node: str = Field(pattern=NODE_NAME)
    """Node that holds the listening socket: that of rank 0."""


class Generation(Document):
    """What all agents of a generation know."""

    schema_kind: ClassVar[str] = "generation"

    number: int = Field(ge=0)
    """Counts up over the whole life of the run, attempts included."""
    attempt: int = Field(ge=0)
    """Start of the job: 0, then one more after each requeue."""
    members: list[Member]
    """Every agent that is alive, spares included."""
    plan: PathBelow
    """File of the plan, within the run folder."""
    store: StoreAddress
    restore: PathBelow | None = None
    """Checkpoint to start from, within the run folder; None: from the first weights."""
    first_weights: str = "the seed"
    """Where the weights come from that no checkpoint has, in words."""
    reason: str
    """Why this generation was started."""
    proposer: str = ""
    """Incarnation of the agent that proposed it."""
    failures: int = 0
    """Failures in a row without a checkpoint in between."""


def record_file(generations: Path, number: int) -> Path:
    """Where the record of a generation lies."""
    return generations / f"gen-{number:06d}.json"


@dataclass(frozen=True)
class Fence:
    """Keeps a worker that wakes late from writing: asked right before a row, a checkpoint or `latest` is written.

    Generations count up by one, so the record of the next one is all there is to look for. What a file system does
    between the question and the write is not covered: a process that is stopped within these microseconds writes one
    row or gives one checkpoint its name, and the row carries its generation.
    """

    generations: Path
    number: int
    """The generation that the writer belongs to."""

    def check(self) -> None:
        """Return while the writer's generation is the newest.

        Raises:
            Superseded: another one was decided.
        """
        if record_file(self.generations, self.number + 1).exists():
            raise Superseded(f"generation {self.number} is over: generation {self.number + 1} began meanwhile")
