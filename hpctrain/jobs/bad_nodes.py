"""Decides which nodes are bad after an attempt, and which of them the next job excludes. The functions that decide are
pure; `record_bad_nodes` and `record_excluded_nodes` write bad_nodes.jsonl."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from hpctrain.base.atomic import append_line
from hpctrain.records.format.node_name import NODE_NAME
from hpctrain.records.history.ledger import BAD_NODES_FILE, BadNode, read_bad_nodes
from hpctrain.records.history.run_log import Event, nodes_at_start
from hpctrain.records.topology.topology import Topology
from hpctrain.runs.fault_fields import faults_by_node

HOUR_S = 3600.0
BLAME_DEATHS = 3
"""Fewest workers that have to die on one node in an attempt before the node is blamed."""
BLAME_DEATHS_SHARE = 2 / 3
"""Smallest share of an attempt's worker deaths for which the node is blamed; an error of the program would happen on
every node."""


def nodes_to_blame(events: Sequence[Event]) -> dict[str, str]:
    """Return {node: why it is to blame} for each node that an attempt's events show to be bad.

    Args:
        events: events of the attempt, in order.
    """
    lost: dict[str, str] = {}
    for event in events:
        if event.kind == "probed":
            lost |= dict.fromkeys(event.data.get("exclude", []), "the probe found it bad")
        elif event.kind == "node_lost":
            lost[event.data["node"]] = "it was lost"
        elif event.kind == "node_returned":
            lost.pop(event.data["node"], None)
    lost |= _nodes_missing_at_end(events)
    # An agent that crashed by an error of its own would have crashed on any node.
    crashed = {event.data["node"] for event in events if event.kind == "agent_crashed"}
    faulty = {
        node: f"it had this: {fault.words}" for node, fault in faults_by_node(events).items() if fault.names_a_node
    }
    blamed = {node: reason for node, reason in lost.items() if node not in crashed}
    return blamed | _nodes_where_workers_died(events) | faulty


def _nodes_missing_at_end(events: Sequence[Event]) -> dict[str, str]:
    """Return {node: reason} for each member of the last generation that was lost when the other members ended the
    attempt because too few of them were left.

    A node is not lost if its own agent ended the attempt, too, or if the agents left it out because of a broken link.
    """
    ends = [event for event in events if event.kind == "failed" and event.data.get("left")]
    speaking = {node for event in ends for node in [*event.data["left"], *event.data.get("left_out", []), event.node]}
    began = next((event for event in reversed(events) if event.kind == "generation_started"), None)
    members = list(began.data.get("members", [])) if began else nodes_at_start(events)
    return {node: "it was lost" for node in members if node not in speaking} if ends else {}


def _nodes_where_workers_died(events: Sequence[Event]) -> dict[str, str]:
    deaths = Counter(event.data.get("node", event.node) for event in events if event.kind == "worker_died")
    return {
        node: f"{count} of {deaths.total()} workers that died were on it"
        for node, count in deaths.items()
        if count >= BLAME_DEATHS and count >= BLAME_DEATHS_SHARE * deaths.total()
    }


def select_excluded_nodes(
    bad: Sequence[BadNode], now: float, allowed: Collection[str], usable: Collection[str], needed: int, fraction: float
) -> list[str]:
    """Return the names of the nodes that the next job excludes, sorted.

    They are at most the share `fraction` of the allowed nodes, and leave at least `needed` usable nodes. The nodes that
    were bad most often, and then most recently, are chosen first.

    Args:
        bad: lines of bad_nodes.jsonl.
        now: seconds since 1970.
        allowed: nodes that the job's request allows, whatever their state.
        usable: the allowed nodes that accept jobs now.
        needed: fewest nodes that the job runs on.
    """
    live = [
        line for line in bad if line.expires_s > now and line.node in allowed and re.fullmatch(NODE_NAME, line.node)
    ]
    times = Counter(line.node for line in live)
    newest = {line.node: line.time_s for line in sorted(live, key=lambda line: line.time_s)}
    most = math.floor(fraction * len(set(allowed)))
    spare = len(set(usable)) - needed
    chosen: list[str] = []
    for node in sorted(times, key=lambda name: (-times[name], -newest[name], name)):
        costs = node in usable
        if len(chosen) == most or (costs and spare <= 0):
            continue
        chosen.append(node)
        spare -= costs
    return sorted(chosen)


def record_bad_nodes(folder: Path, attempt: int, events: Sequence[Event], now: float, hours: float) -> None:
    """Add the nodes to blame for an attempt to the run's bad_nodes.jsonl. A name that is no host name is skipped.

    Args:
        folder: the run folder.
        events: events of the attempt, in order.
        now: seconds since 1970.
        hours: hours for which the next jobs exclude the nodes.

    Raises:
        StorageError: bad_nodes.jsonl cannot be written.
    """
    _record(folder, attempt, nodes_to_blame(events), now, hours)


def record_excluded_nodes(folder: Path, topology: Topology | None, now: float, hours: float) -> list[str]:
    """Add the nodes that the verdict of a new run's topology excludes to the run's bad_nodes.jsonl; return their names.

    Args:
        folder: the run folder.
        topology: the topology that the user gave; None: no node is excluded.
        now: seconds since 1970.
        hours: hours for which the next jobs exclude the nodes.

    Raises:
        StorageError: bad_nodes.jsonl cannot be written.
    """
    excluded = list(topology.verdict.exclude) if topology is not None else []
    _record(folder, 0, dict.fromkeys(excluded, "the topology given excludes it"), now, hours)
    return excluded


def _record(folder: Path, attempt: int, reasons: Mapping[str, str], now: float, hours: float) -> None:
    if hours <= 0 or not reasons:
        return
    # The end of an attempt may be processed twice.
    recorded = {line.node for line in read_bad_nodes(folder) if line.attempt == attempt}
    for node, reason in reasons.items():
        if re.fullmatch(NODE_NAME, node) and node not in recorded:
            line = BadNode(node=node, attempt=attempt, time_s=now, expires_s=now + hours * HOUR_S, reason=reason)
            append_line(folder / BAD_NODES_FILE, json.dumps(line.to_json()))
