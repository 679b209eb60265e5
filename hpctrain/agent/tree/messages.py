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
"""Most nodes of a job that a message may be about."""
STATE_REASON_CHARS = 200
"""Most characters of an agent's reason in a summary: a summary has those of all agents."""
MAX_HOPS = 16

Index = Annotated[int, Field(ge=0, lt=MAX_NODES)]
"""Index of a node in the job's list of nodes."""
Indices = Annotated[tuple[Index, ...], Field(max_length=MAX_NODES, strict=False)]


class State(NamedTuple):
    """What changes in the announcements of an agent. Usually many agents have the same state."""

    generation: Annotated[int, Field(ge=-1, lt=1 << 31)]
    phase: Phase
    reason: Annotated[str, Field(max_length=STATE_REASON_CHARS)]
    doing: Annotated[tuple[WorkerActivity, ...], Field(max_length=MAX_WORKERS_PER_NODE, strict=False)] = ()


class Identity(StrictModel):
    """Who the agent of a node is."""

    index: Index
    since: Number
    """The agent's beat from which on this holds. A restarted agent goes on counting above the beats of the last one."""
    incarnation: Text
    addr: Text
    store_port: Annotated[int, Field(ge=0, lt=1 << 16)]


class Row(NamedTuple):
    """The last life sign of an agent, as the sender knows it."""

    node: Index
    since: Number
    """`Identity.since` of the agent."""
    beat: Annotated[int, Field(gt=-(1 << 31), lt=1 << 31)]
    """The agent counts its summaries. Negative: a neighbour of the agent lost it after this beat."""
    state: Index
    """Place of the agent's state in `TreeSummary.states`."""


class TreeSummary(StrictModel):
    """A heartbeat on a connection of the tree: the newest beats and states of agents, the sender's own among them."""

    kind: Literal["summary"] = "summary"

    # JSON has no tuples, and a strict field takes no list for one.
    rows: Annotated[tuple[Row, ...], Field(max_length=MAX_NODES, strict=False)]
    states: Annotated[tuple[State, ...], Field(max_length=MAX_NODES, strict=False)]
    identities: Annotated[tuple[Identity, ...], Field(max_length=MAX_NODES, strict=False)] = ()
    """The sender's own, and those that the receiver has asked for."""
    asks: Indices = ()
    """Agents whose identities the receiver is asked for."""

    @model_validator(mode="after")
    def _rows_have_states(self) -> TreeSummary:
        if any(row.state >= len(self.states) for row in self.rows):
            raise ValueError("a row names a state that the summary does not have")
        return self


class Relayed(StrictModel):
    """A message of the agreement under way to agents that the receiver can reach."""

    kind: Literal["relayed"] = "relayed"

    origin: Index
    """The agent that sent it."""
    targets: Indices
    """The agents that it is for."""
    hops: Annotated[int, Field(ge=0, le=MAX_HOPS)]
    """How many connections it has used."""
    message: Annotated[Prepare | Promise | Refusal | AcceptRequest | Accepted | Decided, Field(discriminator="kind")]


class Detach(StrictModel):
    """The sender lives and closes this connection, because it has another way to the lowest node."""

    kind: Literal["detach"] = "detach"
