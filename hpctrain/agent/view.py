"""What an agent knows when it decides: itself, its workers, the other agents, and the limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from hpctrain.agent.hang_report import WorkerActivity
from hpctrain.agent.worker_failure import WorkerFailure
from hpctrain.base.net.vertex_cover import NodePair
from hpctrain.records.history.fault import CHECKPOINT_DAMAGED
from hpctrain.records.history.generation import Generation, Member
from hpctrain.records.run.recovery import Recovery

Phase = Literal["joining", "running", "fault", "done", "stopped", "failed", "cut_off", "crashed"]
"""State of an agent; `joining` is before its first generation, `fault` between two generations. An agent that is
`cut_off` leaves because it reaches less than half of the last generation's members; the others may go on."""


@dataclass(frozen=True)
class DecisionLimits:
    """The limits that decisions depend on; times in seconds."""

    recovery: Recovery = field(default_factory=Recovery)
    compiling_timeout_s: float = field(default_factory=lambda: Recovery().progress_timeout_s)
    """Replaces `recovery.progress_timeout_s` while a worker may be compiling."""
    join_timeout_s: float = 60.0
    """How long the first generation waits for nodes that have not connected yet."""
    collect_s: float = 2.0
    """How long an agent waits for news that is on its way: from a worker that ends after an error and, before the agent
    proposes, from the other agents, which end the generation too."""
    proposer_takeover_s: float = 60.0
    """If no record of the next generation appears for this long, the next node in order proposes one. The time is
    long, because the proposer may search for a plan first."""
    broken_links: tuple[NodePair, ...] = ()
    """Pairs of nodes whose link the probe could not measure: a generation has at most one node of each pair. Pairs
    with a node in `advised_against` do not count, because no plan uses that node."""
    advised_against: tuple[str, ...] = ()
    """Nodes that the probe's verdict excludes; of equally small choices of nodes to leave out, one with these is
    preferred."""


@dataclass(frozen=True)
class PeerView:
    """Another agent (the peer), as this agent knows it from the peer's heartbeats; `generation` is -1 before the first
    generation."""

    node: str
    incarnation: str = ""
    connected: bool = False
    """Whether a connection to the peer is open now."""
    lost: bool = False
    """Whether a connection existed and closed; False again once the peer is back."""
    last_seen: float = 0.0
    """When the peer's last heartbeat arrived, in seconds of this agent's clock. In a tree, heartbeats of agents that
    are no neighbours get `INDIRECT_S` more (`agent/tree/routing.py`)."""
    generation: int = -1
    phase: Phase = "joining"
    """State of the peer, as of its last heartbeat."""
    reason: str = ""
    """Why the peer is in `phase`; '' if it gave no reason."""
    doing: tuple[WorkerActivity, ...] = ()
    """Activity of the peer's workers, if they have made no step for half of the progress timeout; else empty."""
    unheard: tuple[int, ...] = ()
    """Indices in node order of the nodes that the peer does not hear."""
    addr: str = ""
    """Address at which other nodes reach the peer."""
    store_port: int = 0
    """Port that the peer keeps bound, for the TCPStore of the next generation."""


@dataclass(frozen=True)
class WorkerView:
    """The state of the workers of this node, taken together."""

    running: int = 0
    """Number of workers that run."""
    exit_code: int | None = None
    """Exit code of a worker that did not end with 0: of one that failed by itself, or stopped on request or for another
    plan; or if there is none, of one that lost its peers. 0 if all workers are done; None while workers run without a
    failure, or if there are none.
    """
    last_progress: float = 0.0
    """When a worker of this node last started or reported, in seconds of the agent's clock."""
    compiling: bool = False
    """Whether a worker may be compiling: it has made no step yet, or has reported that it compiles."""
    error: str | None = None
    """One line about the worker that failed; None if no worker failed, or if the cause is not known."""
    doing: tuple[WorkerActivity, ...] = ()
    """Activity of the workers, if they have made no step for half of the progress timeout; else empty."""
    leaving: bool = False
    """Whether a worker reported an error of its own and has not ended yet."""
    failure: WorkerFailure | None = None
    """The failure that `error` describes, with its fault; None if `error` is None."""
    waits_for_files: bool = False
    """Whether no worker has started yet, because the plan or a log is not open."""

    @property
    def checkpoint_damaged(self) -> bool:
        """Return whether the worker failed because the checkpoint to start from is damaged."""
        return self.failure is not None and self.failure.fault.name == CHECKPOINT_DAMAGED


@dataclass(frozen=True)
class AgentView:
    """What an agent knows of itself, its workers and the other agents; its decisions depend on this knowledge alone."""

    me: str
    """Name of this agent's node."""
    nodes: tuple[str, ...]
    """All nodes of the allocation, in order; the first living node proposes the next generation."""
    phase: Phase
    """State of this agent."""
    phase_since: float
    """When this agent entered its phase, in seconds of its clock."""
    reason: str = ""
    """Why this agent is in its phase."""
    record: Generation | None = None
    """The generation that this agent is in, or was in last; None before its first one."""
    peers: tuple[PeerView, ...] = ()
    """What this agent knows of the agent of each other node."""
    working: tuple[str, ...] = ()
    """Nodes that hold ranks in the generation's plan. The loss of another node ends the generation only if an agent
    then hears half of the members or fewer."""
    workers: WorkerView = field(default_factory=WorkerView)
    stop_wanted: bool = False
    """Whether this node was asked to save and stop."""
    incarnation: str = ""
    """Incarnation of this agent. A restarted agent is no member of a generation that names its node's earlier agent."""
    silent: Mapping[NodePair, float] = field(default_factory=dict)
    """Pair of nodes of which at least one does not hear the other (`ReachabilityTracker`) -> since when, by the agent's
    clock."""

    @cached_property
    def members(self) -> Mapping[str, Member]:
        """Node -> its agent that is a member of the generation; empty before the first one."""
        return {} if self.record is None else {member.node: member for member in self.record.members}

    @cached_property
    def nodes_at_work(self) -> frozenset[str]:
        """The nodes of `working`."""
        return frozenset(self.working)
