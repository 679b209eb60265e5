"""Decides what an agent does next: a pure function of the time, the agent's view and the limits. Every decision has a
reason.

A generation ends for all agents when it ends for one. The remaining agents then propose the next generation, if they
are at least half of the last one's members. This module decides when to propose a generation; whether the proposal is
agreed on, the members' votes decide (`agent/consensus.py`), so two halves cannot both go on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from hpctrain.agent.hang_report import WorkerActivity, blocking_workers, describe_hang
from hpctrain.agent.view import AgentView, DecisionLimits, PeerView
from hpctrain.agent.worker_failure import WorkerFailure
from hpctrain.base.errors import EXIT_INFRASTRUCTURE, EXIT_NEW_PLAN, EXIT_RESUMABLE
from hpctrain.base.net.vertex_cover import NodePair, vertex_cover

Act = Literal["wait", "end_generation", "propose", "finish", "stop", "fail"]

FOR_NEW_PLAN = "all ranks stopped after the same step, for another plan"
"""Reason of the end of a generation in which nothing failed. Agents pass it on as it is."""
HANG_REPORT_STAGGER_S = 0.5
"""Seconds by which a node with ranks waits longer to report a hang than the node with ranks before it. All agents see a
hang at the same time; usually only the first node reports it. After the first `HANG_REPORT_MAX_TURNS` nodes, all others
wait equally long."""
HANG_REPORT_MAX_TURNS = 10


@dataclass(frozen=True)
class Decision:
    """An agent's next act, and its reason."""

    act: Act
    reason: str
    members: tuple[str, ...] = ()
    """For `propose`: the nodes of the next generation. For `fail` with too few nodes: the nodes that remain, if
    the decision can name them; else empty."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Node that is no member -> the reason: the node and a member do not hear each other, or the probe could not
    measure the link between them. Before the first generation, also: the proposer never heard the node."""
    exit_code: int = 0
    """For `stop` and `fail`: exit code of the agent."""
    failure: WorkerFailure | None = None
    """For `fail` because of a worker's own error: that error, None if it is not known. Else None."""
    hung: tuple[WorkerActivity, ...] | None = None
    """For `end_generation` because of a hang: the workers that block the others, as far as they are known. Else
    None."""
    cut_off: bool = False
    """For `fail`: whether this agent leaves only because it reaches too few members of the last generation, so that the
    others may go on without it."""


@dataclass
class CutOffPatience:
    """How long an agent has to be cut off without a break before it leaves. In a tree of agents, a node that takes
    another upstream counts as lost until its heartbeats arrive through that upstream."""

    seconds: float
    since: float | None = None
    """When the agent's decisions began to say that it is cut off; None: the last one did not."""

    @classmethod
    def in_tree(cls, limits: DecisionLimits) -> CutOffPatience:
        """Return the patience in a tree: three heartbeat timeouts, because the next upstream may be lost, too."""
        return cls(3 * limits.recovery.heartbeat_timeout_s)

    def is_over(self, now: float, decision: Decision) -> bool:
        """Return whether an agent may act on a decision, at `now` seconds of its clock. Call it for each decision."""
        if not decision.cut_off:
            self.since = None
            return True
        self.since = now if self.since is None else self.since
        return now - self.since >= self.seconds


def decide(now: float, view: AgentView, limits: DecisionLimits) -> Decision:
    """Return the next act of an agent, with its reason, at `now` seconds of the agent's clock."""
    if view.phase == "running":
        return _while_running(now, view, limits)
    if view.phase in ("joining", "fault"):
        return _between(now, view, limits)
    # In every other phase, the agent acted when it entered the phase; now it only stays reachable.
    return Decision("wait", view.reason)


def alive(now: float, peer: PeerView, limits: DecisionLimits) -> bool:
    """Return whether a peer can be a member: it is connected, neither crashed nor cut off, and was heard within the
    last heartbeat timeout.

    Args:
        now: seconds of the agent's clock.
    """
    return (
        peer.connected
        and peer.phase not in ("crashed", "cut_off")
        and now - peer.last_seen <= limits.recovery.heartbeat_timeout_s
    )


def has_quorum(present: Collection[str], members: Collection[str]) -> bool:
    """Return whether at least half of `members`, the last generation's members, are present. Other present nodes do
    not count."""
    return 2 * len(set(present) & set(members)) >= len(members)


def _voters(view: AgentView, present: Collection[str]) -> list[str]:
    """Return the nodes of `present` whose agents vote on the next generation: members of the last one that have not
    restarted, or any node before the first generation."""
    if view.record is None:
        return [node for node in view.nodes if node in present]
    agents = {peer.node: peer.incarnation for peer in view.peers} | {view.me: view.incarnation}
    members = view.record.members
    return [m.node for m in members if m.node in present and agents.get(m.node) == m.incarnation]


def _while_running(now: float, view: AgentView, limits: DecisionLimits) -> Decision:
    assert view.record is not None, "a running agent has a record"
    if view.workers.leaving and now - view.workers.last_progress <= limits.collect_s:
        # Other workers may notice its end before its exit code is known, and only this code says whose fault the end
        # is.
        return Decision("wait", "a worker ends after an error")
    # This node's own workers first, then the other agents.
    verdict = _workers_end(now, view, limits)
    if verdict is not None:
        return verdict
    for peer in view.peers:
        verdict = _peer_end(peer, view) or _peer_fault(peer, view) or _peer_loss(now, peer, view, limits)
        if verdict is not None:
            return verdict
    if _is_spectator(view):
        if not any(alive(now, peer, limits) for peer in _members_seen(view)):
            return _without_members(now, view, limits)
        return Decision("wait", "training")
    return _part_alone(now, view, limits) or Decision("wait", "training")


def _part_alone(now: float, view: AgentView, limits: DecisionLimits) -> Decision | None:
    """Return the decision of a member that hears half of the members or fewer, itself included: to end the generation,
    because the others may go on without it. None if it hears more. The lost members may hold no rank, so that the
    workers notice nothing."""
    assert view.record is not None, "a running agent has a record"
    timeout_s, agents = limits.recovery.heartbeat_timeout_s, {peer.node: peer for peer in view.peers}
    others = [(member, agents[member.node]) for member in view.record.members if member.node in agents]
    # A member that this agent has never heard may still be connecting.
    heard = [
        peer
        for member, peer in others
        if peer.incarnation in ("", member.incarnation) and now - max(peer.last_seen, view.phase_since) <= timeout_s
    ]
    if not others or 2 * (len(heard) + 1) > len(others) + 1:
        return None
    words = f"{view.me} has heard only {len(heard)} of the {len(others)} other members for {timeout_s:g} s"
    return Decision("end_generation", words)


def _workers_end(now: float, view: AgentView, limits: DecisionLimits) -> Decision | None:
    workers = view.workers
    if workers.exit_code == 0:
        return Decision("finish", "all steps are done")
    if workers.exit_code == EXIT_NEW_PLAN:
        return Decision("end_generation", FOR_NEW_PLAN)
    if workers.exit_code == EXIT_RESUMABLE:
        return Decision("stop", "stopped at a checkpoint on request", exit_code=EXIT_RESUMABLE)
    if workers.exit_code is not None and workers.failure is not None and workers.failure.fault.names_a_node:
        return _worker_error(view, workers.exit_code)
    if workers.exit_code == EXIT_INFRASTRUCTURE and workers.checkpoint_damaged:
        return Decision("end_generation", f"the checkpoint is damaged: {workers.error}")
    if workers.exit_code == EXIT_INFRASTRUCTURE:
        details = f": {workers.error}" if workers.error else ""
        return Decision("end_generation", f"a worker lost contact with its peers{details}")
    if workers.exit_code is not None and workers.exit_code < 0:
        return Decision("end_generation", f"a worker of {view.me} was killed by signal {-workers.exit_code}")
    if workers.exit_code is not None:
        return _worker_error(view, workers.exit_code)
    turn = view.working.index(view.me) if view.me in view.working else 0
    limit_s = limits.compiling_timeout_s if workers.compiling else limits.recovery.progress_timeout_s
    if (
        workers.running
        and now - workers.last_progress > limit_s + min(turn, HANG_REPORT_MAX_TURNS) * HANG_REPORT_STAGGER_S
    ):
        return _hung(view, limit_s)
    return None


def _worker_error(view: AgentView, code: int) -> Decision:
    """Return the decision to end the attempt on all nodes after a worker's own error, with the fault's exit code."""
    failure, reason = view.workers.failure, view.workers.error or f"a worker ended with exit code {code}"
    exit_code = EXIT_INFRASTRUCTURE if failure is not None and failure.fault.is_infrastructure else 1
    return Decision("fail", f"{view.me}: {reason}", exit_code=exit_code, failure=failure)


def _hung(view: AgentView, limit_s: float) -> Decision:
    if view.workers.waits_for_files:
        words = f"its workers could not start for {limit_s:g} s: their plan or a log in the run folder is not open yet"
        return Decision("end_generation", f"{view.me}: {words}")
    doing = [*view.workers.doing, *(item for peer in view.peers for item in peer.doing)]
    known = f": {describe_hang(doing)}" if doing else ""
    reason = f"{view.me}: no step for {limit_s:g} s{known}"
    return Decision("end_generation", reason, hung=blocking_workers(doing))


def _peer_end(peer: PeerView, view: AgentView) -> Decision | None:
    """Return what follows if another agent is done, stopped or failed; None if nothing does. The end of a spectator (an
    agent outside of the generation) changes nothing, because the members may still be saving. But an agent that failed
    in a newer generation counts; while this agent knows no generation, any agent that failed counts.
    """
    if peer.phase not in ("done", "stopped", "failed"):
        return None
    member = _is_same_member(peer, view)
    if peer.phase == "failed" and (member or view.record is None or peer.generation > view.record.number):
        return Decision("fail", peer.reason, exit_code=1)
    if peer.phase == "done" and member:
        return Decision("finish", "all steps are done")
    if peer.phase == "stopped" and member:
        return Decision("stop", peer.reason, exit_code=EXIT_RESUMABLE)
    return None


def _peer_fault(peer: PeerView, view: AgentView) -> Decision | None:
    ended = peer.phase == "fault" and _is_same_member(peer, view)
    return Decision("end_generation", peer.reason) if ended else None


def _is_same_member(peer: PeerView, view: AgentView) -> bool:
    """Return whether a peer is in the same generation as this agent, as one of its members."""
    same = view.record is not None and peer.generation == view.record.number
    return same and peer.node in view.members


def _peer_loss(now: float, peer: PeerView, view: AgentView, limits: DecisionLimits) -> Decision | None:
    """Return what follows if another agent is silent or gone; None if nothing does, as for a node without ranks. A
    spectator (an agent outside of the generation) leaves the decision to the members, who know better whom they
    hear."""
    record = view.record
    assert record is not None, "a running agent has a record"
    member = view.members.get(peer.node)
    if member is None or peer.node not in view.nodes_at_work or _is_spectator(view):
        return None
    if peer.phase == "crashed":
        return Decision("end_generation", peer.reason)
    if peer.phase == "cut_off":
        return Decision("end_generation", f"node {peer.node} is gone")
    if peer.connected and peer.incarnation != member.incarnation:
        return Decision("end_generation", f"node {peer.node} is gone")
    # If the connection closed before the generation began, the node may be reconnecting: the proposer counted on it.
    older = peer.last_seen < view.phase_since
    if peer.lost and (not older or now - view.phase_since > limits.collect_s):
        return Decision("end_generation", f"node {peer.node} is gone")
    # A member that has connected only to the proposer yet gets as much time as one that fell silent.
    timeout_s = limits.recovery.heartbeat_timeout_s
    if now - max(peer.last_seen, view.phase_since) > timeout_s:
        return Decision("end_generation", f"node {peer.node} has been silent for {timeout_s:g} s")
    return None


def _members_seen(view: AgentView) -> list[PeerView]:
    last = frozenset(_last_nodes(view))
    return [peer for peer in view.peers if peer.node in last]


def _without_members(now: float, view: AgentView, limits: DecisionLimits) -> Decision:
    """Return the decision of a spectator (an agent outside of the generation) that hears no member: to end the
    generation once it has heard none for the heartbeat timeout."""
    newest = max([view.phase_since, *(peer.last_seen for peer in _members_seen(view))])
    if now - newest <= limits.recovery.heartbeat_timeout_s:
        return Decision("wait", "looking on")
    return Decision("end_generation", f"no node that trains was heard for {limits.recovery.heartbeat_timeout_s:g} s")


def _between(now: float, view: AgentView, limits: DecisionLimits) -> Decision:
    if view.stop_wanted:
        return Decision("stop", "stopped on request between two generations", exit_code=EXIT_RESUMABLE)
    for peer in view.peers:
        if (end := _peer_end(peer, view)) is not None:
            return end
    living = {peer.node: peer for peer in view.peers if alive(now, peer, limits)}
    limit = limits.collect_s if view.record else limits.join_timeout_s
    out = _cut_off(now, view, limits, {view.me, *living}, limit)
    if view.me in out:
        return Decision("wait", out[view.me])
    members = tuple(n for n in view.nodes if (n == view.me or n in living) and n not in out)
    waited = now - view.phase_since
    number = None if view.record is None else view.record.number
    at_work = any(peer.phase == "running" and peer.generation == number for peer in living.values())
    everybody = view.record is not None or len(members) + len(out) == len(view.nodes)
    # Two nodes that do not hear each other yet may still connect.
    meeting = any(not {a, b} & out.keys() for a, b in view.silent)
    settled = everybody and not at_work
    if meeting or (not settled and waited < limit):
        return Decision("wait", "waiting for the other nodes")
    if _is_spectator(view) and not has_quorum(_voters(view, members), _last_nodes(view)):
        return _spectate(waited, limits)
    if _is_spectator(view) and at_work:
        return Decision("wait", "the others train without this node")
    refusal = _too_few(view, members, out, limits)
    if refusal is not None:
        return refusal
    turn = members.index(view.me) * limits.proposer_takeover_s
    if waited < turn + (0 if settled else limit):
        return Decision("wait", f"node {members[0]} proposes the next generation")
    if view.record is None:
        unheard = sorted(set(view.nodes) - {*members, *out})
        out |= {node: f"{node} is left out: {view.me} did not hear it in {waited:.0f} s" for node in unheard}
    return Decision("propose", view.reason or "start", members=members, left_out=out)


def _cut_off(
    now: float, view: AgentView, limits: DecisionLimits, present: set[str], patience_s: float
) -> dict[str, str]:
    """Return node -> why it is left out of the next generation, as a sentence: it and another node do not hear each
    other, or the probe could not measure the link between them.

    Args:
        now: seconds of the agent's clock.
        present: nodes that can take part, as this agent sees it.
        patience_s: seconds without a heartbeat between two nodes after which one of the two is left out.
    """
    silent = sorted(pair for pair, since in view.silent.items() if now - since >= patience_s)
    # Plans use no node that the probe advises against, so its links carry nothing.
    broken = [pair for pair in limits.broken_links if set(pair) <= present - set(limits.advised_against)]
    last = frozenset(_last_nodes(view))
    outside = {node for node in view.nodes if node not in last}
    if view.record is not None:
        agents = {member.incarnation for member in view.record.members}
        outside.update(peer.node for peer in view.peers if peer.incarnation and peer.incarnation not in agents)
    out = vertex_cover(view.nodes, [*silent, *broken], first=outside.union(limits.advised_against))
    return {node: _cut_words(node, silent, broken) for node in out}


def _cut_words(node: str, silent: list[NodePair], broken: list[NodePair]) -> str:
    deaf, unmeasured = ([a if b == node else b for a, b in pairs if node in (a, b)] for pairs in (silent, broken))
    if deaf:
        return f"{node} is left out: it and {', '.join(deaf)} do not hear each other"
    return f"{node} is left out: the probe could not measure its link to {', '.join(unmeasured)}"


def _too_few(
    view: AgentView, members: tuple[str, ...], out: Mapping[str, str], limits: DecisionLimits
) -> Decision | None:
    min_nodes = limits.recovery.min_nodes
    if len(members) < min_nodes:
        remaining = f"{len(members)} of the nodes are left ({', '.join(members)}), recovery.min_nodes is {min_nodes}"
        reason = "; ".join([remaining, *out.values(), *_crashes(view)])
        cut_off = not has_quorum(_voters(view, members), _last_nodes(view))
        return Decision("fail", reason, members=members, left_out=out, exit_code=EXIT_RESUMABLE, cut_off=cut_off)
    if not has_quorum(_voters(view, members), _last_nodes(view)):
        return _minority(view, members, out)
    return None


def _minority(view: AgentView, members: tuple[str, ...], out: Mapping[str, str]) -> Decision:
    """Return the decision to fail, for agents that are less than half of the last generation. The decision names the
    remaining nodes only if no missing node is merely silent, because a silent node may be going on.

    Args:
        members: the nodes that could go on together.
        out: living node that cannot be a member -> the reason.
    """
    last = _last_nodes(view)
    there = _voters(view, members)
    crashed = {peer.node for peer in view.peers if peer.phase == "crashed"}
    unknown = set(last) - set(there) - out.keys() - crashed
    reached = f"can go on together ({', '.join(there)})" if out else f"can be reached from {view.me}"
    words = [*_crashes(view), f"only {len(there)} of {len(last)} nodes {reached}", *out.values()]
    words += ["the others may be going on without it"] if unknown else []
    known = members if out and not unknown else ()
    # Members of which nothing is known may be going on. If there are none, all agents come to this decision.
    return Decision(
        "fail", "; ".join(words), members=known, left_out=out, exit_code=EXIT_RESUMABLE, cut_off=bool(unknown)
    )  # fmt: skip


def _crashes(view: AgentView) -> list[str]:
    """Return the reason that each crashed agent gave, for the agents that were members of the last generation."""
    return [peer.reason for peer in _members_seen(view) if peer.phase == "crashed"]


def _last_nodes(view: AgentView) -> tuple[str, ...]:
    """Return the nodes that a quorum counts: the nodes of the last generation's members; all nodes of the allocation if
    there was no generation yet."""
    return tuple(member.node for member in view.record.members) if view.record else view.nodes


def _is_spectator(view: AgentView) -> bool:
    """Return whether this agent is no member of its generation, because it joined or restarted after the agents had
    agreed on that generation."""
    member = view.members.get(view.me)
    return view.record is not None and (member is None or member.incarnation != view.incarnation)


def _spectate(waited: float, limits: DecisionLimits) -> Decision:
    if waited < limits.join_timeout_s:
        return Decision("wait", "waiting for the nodes of the last generation")
    words = "the nodes of the last generation cannot be reached"
    return Decision("fail", words, exit_code=EXIT_RESUMABLE, cut_off=True)
