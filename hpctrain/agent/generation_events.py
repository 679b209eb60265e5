"""Writes the events of a generation that begins: which nodes left or came back, and what it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpctrain.agent.event_log import EventLog
from hpctrain.agent.view import PeerView
from hpctrain.records.history.generation import Generation
from hpctrain.records.plan.plan import Plan


def note_members(
    event_log: EventLog,
    record: Generation,
    last: Generation | None,
    nodes: Sequence[str],
    peers: Sequence[PeerView],
    left_out: Mapping[str, str],
) -> None:
    """Write an event for each node that has left or come back since the previous generation.

    Args:
        record: the next generation.
        last: the previous one; None before the first.
        nodes: all nodes of the job.
        peers: the other agents, as the agent that proposed knows them.
        left_out: living node that is no member of the next generation -> the reason.
    """
    before = set(nodes) if last is None else {member.node for member in last.members}
    now = {member.node for member in record.members}
    crashed = {view.node: view.reason for view in peers if view.phase == "crashed"}
    for node in sorted(before - now):
        if node in left_out:
            event_log.write("node_left_out", record.number, left_out[node], node=node)
        elif last is not None:
            known = {"crashed": True} if node in crashed else {}
            reason = crashed.get(node, f"node {node} is gone")
            event_log.write("node_lost", last.number, reason, node=node, **known)
    for node in sorted(now - before):
        number = record.number - 1 if last is None else last.number
        event_log.write("node_returned", number, f"node {node} is back", node=node)


def note_start(event_log: EventLog, record: Generation, plan: Plan, last_step: int) -> None:
    """Write the event that a generation has started.

    Args:
        record: the generation.
        plan: its plan.
        last_step: the newest step that the workers of this node have reported; 0 if none.
    """
    data: dict[str, object] = {name: getattr(record, name) for name in ("plan", "restore", "first_weights")}
    members = [member.node for member in record.members]
    if (source := record.memory) is not None:
        data["memory"] = {"generation": source.generation, "step": source.step, "in_place": bool(source.continued)}
        data |= {"restore_step": source.step, "lost_steps": max(0, last_step - source.step)}
    event_log.write(
        "generation_started", record.number, record.reason, members=members, **data, pp=plan.pp, dp=plan.dp,
        tp=plan.tp,
    )  # fmt: skip
