"""Records of generations, and the fence against workers of old ones. A generation is a set of workers that train
together until one is lost or another plan is taken; the members of the generation before it vote on its record."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from hpctrain.base.errors import Superseded
from hpctrain.records.format.document import Document, Part
from hpctrain.records.format.file_name import PathBelow
from hpctrain.records.format.node_name import NODE_NAME
from hpctrain.records.history.memory_state import MemorySource

GENERATIONS = "generations"
"""Name of the folder in a run folder that has a record of each generation."""


class Member(Part):
    """An agent that takes part in a generation. A restarted agent is another member, because its incarnation
    differs."""

    node: str = Field(pattern=NODE_NAME)
    """Node of the agent."""
    incarnation: str
    """Host, process id and start time of the agent, as one text."""
    addr: str
    """Address at which other agents reach this agent."""
    store_port: int
    """Port that this agent keeps bound, so that torch's TCPStore of the next generation can listen on it."""


class StoreAddress(Part):
    """Address of the torch TCPStore through which a generation's workers find each other."""

    addr: str
    """Address of the listening socket."""
    port: int
    """Port of the listening socket."""
    node: str = Field(pattern=NODE_NAME)
    """Node of the listening socket: the node of rank 0."""


class Generation(Document):
    """The record of one generation, on which the agents have agreed."""

    schema_kind: ClassVar[str] = "generation"

    number: int = Field(ge=0)
    """Number of the generation; it counts up over the whole run, across attempts."""
    attempt: int = Field(ge=0)
    """Number of the attempt that the generation belongs to; the first attempt is 0."""
    members: list[Member]
    """All agents that take part in the generation, spares included."""
    plan: PathBelow
    """File of the generation's plan, within the run folder."""
    store: StoreAddress
    restore: PathBelow | None = None
    """Folder of the checkpoint to start from, within the run folder; None: start from the initial weights. With
    `memory` it is not read, and names the newest checkpoint."""
    memory: MemorySource | None = None
    """State in the members' memory to start from; None: start from `restore`."""
    first_weights: str = "the seed"
    """Source of the initial weights, in words."""
    reason: str
    """Why this generation was started."""
    proposer: str = ""
    """Incarnation of the agent that proposed this record."""
    failures: int = 0
    """Number of failures in a row before this generation, within the attempt. A generation that left a new checkpoint,
    or a later step in memory than every start before it, counts as the first failure."""
    newest_start: int = Field(default=0, ge=0)
    """Newest step from which a generation of the attempt has started, this one included."""


def record_file(generations: Path, number: int) -> Path:
    """Return the path of the record of generation `number` in the folder `generations`."""
    return generations / f"gen-{number:06d}.json"


def new_plan_name(number: int) -> str:
    """Return a name within the run folder for a copy of the plan of generation `number`. No other copy has it, so
    agents that propose the same generation do not write one file."""
    return f"{GENERATIONS}/plan-{number:06d}.{secrets.token_hex(4)}.json"


@dataclass(frozen=True)
class Fence:
    """Prevents a worker of an old generation from writing. A worker checks its fence right before it writes a row of
    metrics, a checkpoint or `latest`.

    Generations count up by one, so it is enough to look for the record of the next generation. The time between check
    and write is not covered: a process that is stopped within these microseconds may still write one row of metrics,
    which states its generation, or publish one checkpoint.
    """

    generations: Path
    """Folder in the run folder that has a record of each generation."""
    number: int
    """Number of the generation that the worker belongs to."""

    def check(self) -> None:
        """Check that the worker's generation is the newest.

        Raises:
            Superseded: there is a record of a newer generation.
        """
        if record_file(self.generations, self.number + 1).exists():
            raise Superseded(f"generation {self.number} is over: generation {self.number + 1} began meanwhile")
