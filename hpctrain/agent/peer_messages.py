"""The heartbeat of an agent to each other agent, in a job in which each pair has a connection."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from hpctrain.agent.agreement_messages import REASON_CHARS, StrictModel, Text
from hpctrain.agent.hang_report import MAX_WORKERS_PER_NODE, WorkerActivity
from hpctrain.agent.view import PeerView, Phase

HEARTBEAT_S = 0.25
"""Seconds between two heartbeats."""


class Announcement(StrictModel):
    """A heartbeat: what an agent says about itself. `PeerView` describes the fields."""

    kind: Literal["heartbeat"] = "heartbeat"

    node: Text
    incarnation: Text
    addr: Text
    store_port: Annotated[int, Field(ge=0, lt=1 << 16)]
    generation: Annotated[int, Field(ge=-1, lt=1 << 31)]
    phase: Phase
    reason: Annotated[str, Field(max_length=REASON_CHARS)]
    # JSON has no tuples, and a strict field takes no list for one.
    doing: Annotated[tuple[WorkerActivity, ...], Field(max_length=MAX_WORKERS_PER_NODE, strict=False)] = ()
    unheard: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False)] = ()
    """Indices in node order of the nodes that the sender does not hear."""

    def seen(self, now: float) -> PeerView:
        """Return the view of the agent whose heartbeat this is, which arrived at `now` seconds of the receiver's
        clock."""
        fields = {name: value for name, value in self if name != "kind"}
        return PeerView(**fields, connected=True, last_seen=now)
