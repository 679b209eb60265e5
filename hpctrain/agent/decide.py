"""What an agent does next: a pure function of the time, what it sees and the settings. It always says why.

A generation ends for everybody when it ends for anybody. Then those who are left start the next one, if they are
at least half of the last: a generation's record is decided by one exclusive file, so two halves cannot both go on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hpctrain.agent.failure import WorkerFailure
from hpctrain.agent.stall import WorkerDoing, culprits, explain
from hpctrain.records.generation import Generation

Phase = Literal["joining", "running", "fault", "done", "stopped", "failed"]
Act = Literal["wait", "end_generation", "propose", "finish", "stop", "fail"]

RESUMABLE = 75
INFRASTRUCTURE = 76
NO_PROGRESS = 77
STRIKE_TURN_S = 0.5
"""All agents see a hang at the same time. The first node tells of it; each further one would do so this much later."""
STRIKE_TURNS = 10


@dataclass(frozen=True)
class Settings:
    """Limits that decisions are made by; times in seconds."""

    min_nodes: int = 1
    retries: int = 3
    heartbeat_timeout_s: float = 5.0
    progress_timeout_s: float = 120.0
    compiling_timeout_s: float = 120.0
    """In place of it while a worker may be compiling."""
    join_timeout_s: float = 60.0
    """How long the first generation waits for nodes that have not shown up."""
    collect_s: float = 2.0
    """How long a proposer waits for the others to say that they ended the generation too."""
    succession_s: float = 60.0
    """After this long without a record, the next node in order proposes one: the first may be hashing a checkpoint."""


@dataclass(frozen=True)
class PeerView:
    """Another agent, as seen from here."""

    node: str
    incarnation: str = ""
    connected: bool = False
    lost: bool = False
    """There was a connection and it closed; false again when it is back."""
    last_seen: float = 0.0
    generation: int = -1
    phase: Phase = "joining"
    reason: str = ""
    doing: tuple[WorkerDoing, ...] = ()
    """What its workers do, once they have made no step for a while."""


@dataclass(frozen=True)
class WorkerView:
    """The workers of this node, taken together."""

    running: int = 0
    exit_code: int | None = None
    """The first exit code that is not 0, or 0 when all are done; None while they run or when there are none."""
    last_progress: float = 0.0
    """When one of them last did anything: started, ready, or made a step."""
    compiling: bool = False
    """Whether one of them may be compiling: before its first step, or since it said so."""
    error: str | None = None
    """What it said before it left, in a line."""
    doing: tuple[WorkerDoing, ...] = ()
    """What they do, once they have made no step for a while."""
    failure: WorkerFailure | None = None
    """All that it said of it, and whose fault it is."""


@dataclass(frozen=True)
class View:
    """Everything a decision depends on."""

    me: str
    nodes: tuple[str, ...]
    """All nodes of the allocation, in order; the first that lives proposes."""
    phase: Phase
    phase_since: float
    reason: str = ""
    """Why this agent is in its phase."""
    record: Generation | None = None
    """The generation this agent is in, or was in last."""
    peers: tuple[PeerView, ...] = ()
    working: tuple[str, ...] = ()
    """Nodes that hold ranks in the generation's plan; a lost node that holds none is no reason to end it."""
    workers: WorkerView = field(default_factory=WorkerView)
    stop_wanted: bool = False
    """Somebody asked this node to save and leave."""
    checkpoint: str | None = None
    """The newest checkpoint on disk, to tell progress from failing over and over."""


@dataclass(frozen=True)
class Decision:
    """What to do and why."""

    act: Act
    reason: str
    members: tuple[str, ...] = ()
    """For `propose`: the nodes of the next generation. For `fail`: those that are left, where too few are."""
    exit_code: int = 0
    """For `stop` and `fail`."""
    failure: WorkerFailure | None = None
    """For a `fail` because of a worker's own error."""
    hung: tuple[WorkerDoing, ...] | None = None
    """For an `end_generation` because nothing moves: the ranks that are to blame, as far as that is known."""


def decide(now: float, view: View, settings: Settings) -> Decision:
    """The next act of this agent."""
    if view.phase == "running":
        return _while_running(now, view, settings)
    if view.phase in ("joining", "fault"):
        return _between(now, view, settings)
    # done, stopped, failed: the act was taken when the phase was entered; the caller only lingers.
    return Decision("wait", view.reason)


def alive(now: float, peer: PeerView, settings: Settings) -> bool:
    """Whether a peer can take part: connected, and heard of lately."""
    return peer.connected and now - peer.last_seen <= settings.heartbeat_timeout_s


def failures(view: View) -> int:
    """Failures in a row, that of the last generation included; after a checkpoint in between, counted from one."""
    if view.record is None:
        return 0
    progressed = view.checkpoint is not None and view.checkpoint != view.record.restore
    return 1 if progressed else view.record.failures + 1


def _while_running(now: float, view: View, settings: Settings) -> Decision:
    assert view.record is not None, "a running agent has a record"
    # Most common first: nothing happened.
    own = _own_workers(now, view, settings)
    if own is not None:
        return own
    for peer in view.peers:
        verdict = _peer_verdict(now, peer, view, settings)
        if verdict is not None:
            return verdict
    return Decision("wait", "training")


def _own_workers(now: float, view: View, settings: Settings) -> Decision | None:
    workers = view.workers
    if workers.exit_code == 0:
        return Decision("finish", "all steps are done")
    if workers.exit_code == RESUMABLE:
        return Decision("stop", "stopped at a checkpoint on request", exit_code=RESUMABLE)
    if workers.exit_code is not None and workers.failure is not None and workers.failure.fault.names_a_node:
        return _own_error(view, workers.exit_code)
    if workers.exit_code == INFRASTRUCTURE:
        told = f": {workers.error}" if workers.error else ""
        return Decision("end_generation", f"a worker lost contact with its peers{told}")
    if workers.exit_code is not None and workers.exit_code < 0:
        return Decision("end_generation", f"a worker of {view.me} was killed by signal {-workers.exit_code}")
    if workers.exit_code is not None:
        return _own_error(view, workers.exit_code)
    turn = view.working.index(view.me) if view.me in view.working else 0
    limit_s = settings.compiling_timeout_s if workers.compiling else settings.progress_timeout_s
    if workers.running and now - workers.last_progress > limit_s + min(turn, STRIKE_TURNS) * STRIKE_TURN_S:
        return _hung(view, limit_s)
    return None


def _own_error(view: View, code: int) -> Decision:
    """A worker's own error ends the attempt for everybody; whose fault it is says how the run goes on."""
    failure, reason = view.workers.failure, view.workers.error or f"a worker ended with exit code {code}"
    exit_code = INFRASTRUCTURE if failure is not None and failure.fault.is_infrastructure else 1
    return Decision("fail", f"{view.me}: {reason}", exit_code=exit_code, failure=failure)


def _hung(view: View, limit_s: float) -> Decision:
    doing = [*view.workers.doing, *(item for peer in view.peers for item in peer.doing)]
    known = f": {explain(doing)}" if doing else ""
    reason = f"{view.me}: no step for {limit_s:g} s{known}"
    return Decision("end_generation", reason, hung=culprits(doing))


def _peer_verdict(now: float, peer: PeerView, view: View, settings: Settings) -> Decision | None:
    record = view.record
    assert record is not None, "a running agent has a record"
    member = next((m for m in record.members if m.node == peer.node), None)
    same = peer.generation == record.number
    if same and peer.phase == "done":
        return Decision("finish", "all steps are done") if member else None
    if same and peer.phase == "stopped":
        return Decision("stop", peer.reason, exit_code=RESUMABLE)
    if peer.phase == "failed" and peer.generation >= record.number:
        return Decision("fail", peer.reason, exit_code=1)
    if member is None:
        return None
    if same and peer.phase == "fault":
        return Decision("end_generation", peer.reason)
    if peer.node not in view.working:
        return None
    if peer.connected and peer.incarnation != member.incarnation:
        return Decision("end_generation", f"node {peer.node} is gone")
    # A connection that closed before the generation began may be on its way back: the proposer counted on that node.
    older = peer.last_seen < view.phase_since
    if peer.lost and (not older or now - view.phase_since > settings.collect_s):
        return Decision("end_generation", f"node {peer.node} is gone")
    # A member that only the proposer has met yet gets as long as one that fell silent.
    if now - max(peer.last_seen, view.phase_since) > settings.heartbeat_timeout_s:
        return Decision("end_generation", f"node {peer.node} has been silent for {settings.heartbeat_timeout_s:g} s")
    return None


def _between(now: float, view: View, settings: Settings) -> Decision:
    if view.stop_wanted:
        return Decision("stop", "stopped on request between two generations", exit_code=RESUMABLE)
    for peer in view.peers:
        if peer.phase == "failed":
            return Decision("fail", peer.reason, exit_code=1)
    number = view.record.number if view.record else -1
    living = [peer for peer in view.peers if alive(now, peer, settings)]
    members = tuple(n for n in view.nodes if n == view.me or n in {peer.node for peer in living})
    waited = now - view.phase_since
    limit = settings.collect_s if view.record else settings.join_timeout_s
    everybody = len(members) == len(view.nodes) if view.record is None else True
    settled = everybody and all(peer.phase != "running" or peer.generation != number for peer in living)
    if not settled and waited < limit:
        return Decision("wait", "waiting for the other nodes")
    if _is_spectator(view) and not _enough_of_the_last(view, members):
        return _spectate(waited, settings)
    refusal = _too_few(view, members, settings)
    if refusal is not None:
        return refusal
    turn = members.index(view.me) * settings.succession_s
    if waited < turn + (0 if settled else limit):
        return Decision("wait", f"node {members[0]} proposes the next generation")
    return Decision("propose", view.reason or "start", members=members)


def _too_few(view: View, members: tuple[str, ...], settings: Settings) -> Decision | None:
    failed = failures(view)
    if failed > settings.retries:
        return Decision(
            "fail",
            f"{failed} failures in a row without a new checkpoint (recovery.retries is {settings.retries}); "
            f"last: {view.reason}",
            exit_code=NO_PROGRESS,
        )
    if len(members) < settings.min_nodes:
        return Decision(
            "fail",
            f"{len(members)} of the nodes are left ({', '.join(members)}), recovery.min_nodes is {settings.min_nodes}",
            members=members,
            exit_code=RESUMABLE,
        )
    if not _enough_of_the_last(view, members):
        last = _last_nodes(view)
        return Decision(
            "fail",
            f"only {len(set(members) & set(last))} of {len(last)} nodes can be reached from {view.me}: "
            "the others may be going on without it",
            exit_code=RESUMABLE,
        )
    return None


def _last_nodes(view: View) -> tuple[str, ...]:
    """The nodes that would have to be asked: members of the last generation, or all before the first."""
    return tuple(member.node for member in view.record.members) if view.record else view.nodes


def _enough_of_the_last(view: View, members: tuple[str, ...]) -> bool:
    """At least half of the last generation: nodes that were not in it do not count, or they could go on beside it."""
    last = _last_nodes(view)
    return 2 * len(set(members) & set(last)) >= len(last)


def _is_spectator(view: View) -> bool:
    """An agent that came (back) after the generation was made."""
    return view.record is not None and view.me not in _last_nodes(view)


def _spectate(waited: float, settings: Settings) -> Decision:
    if waited < settings.join_timeout_s:
        return Decision("wait", "waiting for the nodes of the last generation")
    return Decision("fail", "the nodes of the last generation cannot be reached", exit_code=RESUMABLE)
