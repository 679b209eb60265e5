"""Makes the verdict on each node and on the allocation. Nodes are compared with their peers, never with nominal
figures. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ClusterShell.NodeSet import NodeSet

from hpctrain.probe.faults.network_faults import network_faults, oversubscribed
from hpctrain.probe.faults.node_faults import ProbeFinding, device_faults, host_faults, interface_env, make_finding
from hpctrain.probe.measure.outcome import ProbeOutcome
from hpctrain.probe.measure.settings import ProbeSettings
from hpctrain.probe.pair_selection.switches import SwitchTree
from hpctrain.records.topology.topology import DeviceType, Health, Node, Reason, Verdict


def find_faults(
    outcome: ProbeOutcome,
    nodes: Sequence[Node],
    types: dict[str, DeviceType],
    tree: SwitchTree,
    ratios: dict[int, float],
    settings: ProbeSettings,
) -> list[ProbeFinding]:
    """Return all faults of nodes, devices, links and switches.

    Args:
        ratios: oversubscription of each switch level.
    """
    hosts = [] if settings.loopback else host_faults([node for node in nodes if node.id not in outcome.lost])
    devices = device_faults(nodes, types, settings.slow_ratio if settings.loopback else 1.0)
    return [
        *_unreachable(outcome),
        *_unmeasured(outcome),
        *hosts,
        *devices,
        *network_faults(outcome, tree, settings),
        *oversubscribed(ratios),
    ]


def node_healths(outcome: ProbeOutcome, faults: Sequence[ProbeFinding]) -> dict[str, Health]:
    """Return the verdict on each node: bad when it is to be excluded, unknown when it could not be measured, degraded
    when it is used with a warning, else ok."""
    return {name: _health(name, outcome, faults) for name in outcome.nodes}


def overall(
    outcome: ProbeOutcome,
    healths: dict[str, Health],
    faults: Sequence[ProbeFinding],
    nodes: Sequence[Node],
    loopback: bool,
) -> Verdict:
    """Return the verdict on the allocation.

    Excluded nodes are a warning while more than half of the nodes remain. The verdict is refuse when half or fewer
    remain, when no device could be measured, or when a fault has severity refuse.
    """
    exclude = [name for name in outcome.nodes if healths[name].verdict == "bad"]
    by_severity = sorted(faults, key=lambda fault: ("refuse", "exclude", "warn", "note").index(fault.severity))
    remaining = len(outcome.nodes) - len(exclude)
    unmeasured = bool(outcome.devices_failed) and not outcome.devices
    refused = 2 * remaining <= len(outcome.nodes) or unmeasured or any(fault.severity == "refuse" for fault in faults)
    warned = any(fault.severity != "note" for fault in faults)
    usable = [node for node in nodes if node.id not in exclude]
    return Verdict(
        status="refuse" if refused else "warn" if warned else "go",
        exclude=exclude,
        faults=[_named(fault) for fault in by_severity],
        sbatch_hint=f"--exclude={NodeSet.fromlist(exclude)}" if exclude and not loopback else None,
        env={} if loopback else interface_env(usable),
    )


def _named(fault: ProbeFinding) -> Reason:
    """Return a fault as a reason, with the name of the faulty node in its text."""
    if fault.node is None:
        return fault.reason
    return fault.reason.model_copy(update={"text": f"{fault.node}: {fault.reason.text}"})


def _health(name: str, outcome: ProbeOutcome, faults: Sequence[ProbeFinding]) -> Health:
    of_node = [fault for fault in faults if fault.node == name]
    reasons = [fault.reason for fault in of_node]
    if any(fault.severity == "exclude" for fault in of_node):
        return Health(verdict="bad", reasons=reasons)
    if name in outcome.devices_failed or name in _without_links(outcome):
        return Health(verdict="unknown", reasons=reasons)
    slow = any(fault.severity == "warn" for fault in of_node)
    return Health(verdict="degraded" if slow else "ok", reasons=reasons)


def _unreachable(outcome: ProbeOutcome) -> list[ProbeFinding]:
    fix = "look at its log in the job's output and at `scontrol show node`; leave it out meanwhile"
    return [
        make_finding(name, "exclude", "UNREACHABLE", why, "the coordinating node's connection to it", fix)
        for name, why in outcome.lost.items()
    ]


def _unmeasured(outcome: ProbeOutcome) -> list[ProbeFinding]:
    """Return PROBE_FAILED for all that could not be measured. It never excludes a node, because nothing is known."""
    parts: list[tuple[str | None, str, str]] = [
        (name, f"its devices were not measured: {why}", "its measuring process")
        for name, why in outcome.devices_failed.items()
        if name not in outcome.lost
    ]
    for name in sorted(_without_links(outcome)):
        parts.append((name, "none of its links works", "every partner of its rounds"))
    for (a, b), why in outcome.broken.items():
        parts.append((None, f"link {a} - {b}: {why}", "both nodes answer the coordinating node"))
    again = "run `hpctrain probe` again"
    return [make_finding(name, "warn", "PROBE_FAILED", text, evidence, again) for name, text, evidence in parts]


def _without_links(outcome: ProbeOutcome) -> set[str]:
    """Return the living nodes all of whose pairs are broken."""
    touched = {name for pair in outcome.broken for name in pair} - set(outcome.lost)
    if not touched:
        return set()
    matrix = outcome.matrix()
    return {name for name in touched if not matrix.measured[matrix.index[name]].any()}
