"""The messages on a connection of the tree: what an agent knows of all agents, and messages of the agreement for agents
to which the sender has no connection."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import Field, model_validator

from hpctrain.agent.agreement_messages import (
    Accepted,
    AcceptRequest,
    Decided,
    Number,
    Prepare,
    Promise,
    Refusal,
    StrictModel,
    Text,
)
from hpctrain.agent.hang_report import MAX_WORKERS_PER_NODE, WorkerActivity
from hpctrain.agent.view import Phase

MAX_NODES = 1 << 14
"""Largest number of nodes of a job; each `Index` is below it."""
STATE_REASON_CHARS = 200
"""Most characters of an agent's reason in a summary, because a summary has the reasons of all agents."""
MAX_HOPS = 16
"""Most connections through which a message of the agreement is passed on."""

Index = Annotated[int, Field(ge=0, lt=MAX_NODES)]
"""Index of a node in the job's list of nodes."""
Indices = Annotated[tuple[Index, ...], Field(max_length=MAX_NODES, strict=False)]


class State(NamedTuple):
    """The part of an agent's `Announcement` that may change with each heartbeat. Usually many agents have the same
    state, and a summary has it once."""

    generation: Annotated[int, Field(ge=-1, lt=1 << 31)]
    phase: Phase
    reason: Annotated[str, Field(max_length=STATE_REASON_CHARS)]
    doing: Annotated[tuple[WorkerActivity, ...], Field(max_length=MAX_WORKERS_PER_NODE, strict=False)] = ()


class Identity(StrictModel):
    """Incarnation and addresses of the agent of a node."""

    index: Index
    since: Number
    """Count of the agent's first heartbeat with this identity. A restarted agent counts on above the highest count of
    the node's last agent."""
    incarnation: Text
    addr: Text
    store_port: Annotated[int, Field(ge=0, lt=1 << 16)]


class Row(NamedTuple):
    """The newest heartbeat of an agent that the sender knows."""

    node: Index
    since: Number
    """`Identity.since` of the agent."""
    beat: Annotated[int, Field(gt=-(1 << 31), lt=1 << 31)]
    """Count of this heartbeat; each agent counts its own. Negative: a neighbour lost the agent after this heartbeat."""
    state: Index
    """Index of the agent's state in `TreeSummary.states`."""


class TreeSummary(StrictModel):
    """A heartbeat on a connection of the tree: the newest heartbeats and states of agents, the sender's own
    included."""

    kind: Literal["summary"] = "summary"

    # JSON has no tuples, and a strict field takes no list for one.
    rows: Annotated[tuple[Row, ...], Field(max_length=MAX_NODES, strict=False)]
    states: Annotated[tuple[State, ...], Field(max_length=MAX_NODES, strict=False)]
    identities: Annotated[tuple[Identity, ...], Field(max_length=MAX_NODES, strict=False)] = ()
    """The identity of the sender, and those that the receiver has asked for."""
    asks: Indices = ()
    """Agents whose identities the sender asks the receiver for."""

    @model_validator(mode="after")
    def _rows_have_states(self) -> TreeSummary:
        if any(row.state >= len(self.states) for row in self.rows):
            raise ValueError("a row names a state that the summary does not have")
        return self


class Relayed(StrictModel):
    """A message of the agreement that the receiver takes or passes on, because its targets have no connection to its
    origin."""

    kind: Literal["relayed"] = "relayed"

    origin: Index
    """The agent that sent the message first."""
    targets: Indices
    """The agents that this copy of the message is for; other copies reach the others."""
    hops: Annotated[int, Field(ge=0, le=MAX_HOPS)]
    """Number of agents that have passed the message on."""
    message: Annotated[Prepare | Promise | Refusal | AcceptRequest | Accepted | Decided, Field(discriminator="kind")]


class Detach(StrictModel):
    """Says that the sender closes this connection because it has another upstream, and is not lost."""

    kind: Literal["detach"] = "detach"
