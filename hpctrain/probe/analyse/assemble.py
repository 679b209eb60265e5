"""Makes a topology with its verdict from the raw measurements of a probe.

The module also computes the offsets of the nodes' clocks. Nodes are judged by comparison with the other nodes, never by
nominal figures. Pure.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from ClusterShell.NodeSet import NodeSet

from hpctrain import __version__
from hpctrain.base.clock import utc_text
from hpctrain.probe.analyse.classes import fabric_of
from hpctrain.probe.faults.network_faults import network_faults, oversubscribed
from hpctrain.probe.faults.node_faults import ProbeFinding, device_faults, host_faults, interface_env, make_finding
from hpctrain.probe.measure.figures import AlphaBetaLine, PairFigures
from hpctrain.probe.measure.outcome import ALL_LINKS_MAX_NODES, PairResult, ProbeOutcome, pair_lines
from hpctrain.probe.measure.settings import ProbeSettings
from hpctrain.probe.pair_selection.measurement_schedule import switch_tree
from hpctrain.probe.pair_selection.rounds import oversubscription
from hpctrain.probe.pair_selection.switches import SwitchTree
from hpctrain.records.topology.link import BackendFigures, Link, LinkFigures
from hpctrain.records.topology.topology import DeviceType, Health, Node, Provenance, Reason, Topology, Verdict

CONTENDED = 0.9
"""Share of a transfer's time in which its thread needs a processor. Above this share the processor, not the network,
limits the transfer."""
SHARED_NOTE = (
    "the job had a part of each node, and other jobs may have run on the rest: figures may be below those of idle "
    "nodes, so no node is excluded for its speed"
)
Offset = tuple[float, float]
"""(seconds by which one clock is ahead of another, largest error in seconds)"""


def assemble(
    outcome: ProbeOutcome, settings: ProbeSettings, wall: float, job_id: str | None = None, partial: bool = False
) -> Topology:
    """Return the measured topology with the verdict.

    Args:
        wall: the time now in seconds since 1970, for `created` of the provenance.
        job_id: Slurm job of the probe; None without Slurm.
        partial: whether the probe still runs; the topology then has no switches.
    """
    matrix = outcome.matrix()
    tree = SwitchTree() if partial else switch_tree(outcome, settings)
    ratios = oversubscription(tree, matrix.index, outcome.contention)
    clocks, used = clock_offsets(outcome.nodes, outcome.whole_pairs), _used_interfaces(outcome.whole_pairs)
    types = _device_types(outcome)
    bare = [_node(name, outcome, clocks.get(name), used.get(name)) for name in outcome.nodes]
    if settings.shared:
        bare = [_without_cpu_power(node, types) for node in bare]
    faults = find_faults(outcome, bare, types, tree, ratios, settings)
    healths = node_healths(outcome, faults)
    fabric = fabric_of(matrix, tree, ratios, _links(outcome, settings.bulk_bytes), outcome.backend, settings)
    made = Topology(
        provenance=_provenance(outcome, settings, wall, job_id),
        device_types=types,
        nodes=[node.model_copy(update={"health": healths[node.id]}) for node in bare],
        fabric=fabric.model_copy(update={"broken": outcome.unmeasured()}),
        verdict=overall(outcome, healths, faults, bare, settings.loopback),
    )
    return made if len(outcome.nodes) <= ALL_LINKS_MAX_NODES else made.with_pairs(matrix.snapshot())


def _provenance(outcome: ProbeOutcome, settings: ProbeSettings, wall: float, job_id: str | None) -> Provenance:
    return Provenance(
        version=__version__,
        created=utc_text(wall),
        transport="tcp",
        loopback=settings.loopback,
        shared=settings.shared,
        mode=settings.mode,
        seed=settings.seed,
        rounds_done=outcome.rounds_done,
        rounds_planned=outcome.rounds_planned,
        wall_s=round(outcome.wall_s, 3),
        job_id=job_id,
        notes=[
            *([SHARED_NOTE] if settings.shared else []),
            *(f"{name}: {note}" for name, report in outcome.devices.items() for note in report.notes),
            *(
                f"messages over the training backend were not measured: {name}: {why}"
                for name, why in outcome.backend_failed.items()
            ),
        ],
    )


def _node(name: str, outcome: ProbeOutcome, clock: Offset | None, used: str | None) -> Node:
    place, report = outcome.joined.get(name), outcome.devices.get(name)
    facts = place.facts if place else None
    if facts is not None and clock is not None:
        facts = facts.model_copy(update={"clock_offset_s": clock[0], "clock_error_s": clock[1]})
    return Node(
        id=name,
        addr=place.addr if place else "",
        iface=used or (place.iface if place else None),
        host=place.host if place else None,
        host_facts=facts,
        devices=report.devices if report else [],
        intra_bytes_per_s=report.intra_bytes_per_s if report else None,
        intra_alpha_s=report.intra_alpha_s if report else None,
    )


def _without_cpu_power(node: Node, types: dict[str, DeviceType]) -> Node:
    """Return the node without the power figures of its CPUs, because the machine counts the power of all jobs on it
    together.
    """
    devices = [
        device.model_copy(update={"power_w": None}) if types[device.type].kind == "cpu" else device
        for device in node.devices
    ]
    return node.model_copy(update={"devices": devices})


def _used_interfaces(pairs: Sequence[PairResult]) -> dict[str, str]:
    """Return node -> the network interface that most of the node's sockets used. A node whose sockets report none is
    absent."""
    used: dict[str, list[str]] = {}
    for seen in (view for pair in pairs for view in pair.from_both_ends()):
        if seen.at_a.iface is not None:
            used.setdefault(seen.a, []).append(seen.at_a.iface)
    return {name: statistics.mode(names) for name, names in used.items()}


def _device_types(outcome: ProbeOutcome) -> dict[str, DeviceType]:
    merged: dict[str, DeviceType] = {}
    for report in outcome.devices.values():
        merged |= report.device_types
    return dict(sorted(merged.items()))


def _links(outcome: ProbeOutcome, bulk_bytes: int) -> list[Link]:
    order = {name: place for place, name in enumerate(outcome.nodes)}
    turned = [pair.seen_from(min(pair.a, pair.b, key=order.__getitem__)) for pair in outcome.pairs]
    alone = {(pair.a, pair.b): pair for pair in turned if pair.alone}
    loaded = {(pair.a, pair.b): pair for pair in turned if not pair.alone}
    ends = sorted(alone.keys() | loaded.keys())
    quiet = [alone.get(pair) or loaded[pair] for pair in ends]
    lines = pair_lines(quiet, bulk_bytes), pair_lines([pair.turned() for pair in quiet], bulk_bytes)
    links = []
    for pair, there, back in zip(quiet, *lines, strict=True):
        a, b, busy = pair.a, pair.b, loaded.get((pair.a, pair.b))
        ab = _figures(pair, busy, there, outcome.backend.get((a, b)))
        ba = _figures(pair.turned(), busy and busy.turned(), back, outcome.backend.get((b, a)))
        links.append(Link(a=a, b=b, ab=ab, ba=ba))
    return links


def _figures(
    quiet: PairResult, busy: PairResult | None, line: AlphaBetaLine, backend: tuple[str, BackendFigures] | None
) -> LinkFigures:
    """Return the figures of the direction from the first node of the pair to the second: latency as the sender measured
    it, bandwidth as the receiver timed it.

    If a loaded bandwidth was measured, the fitted beta is multiplied by isolated bandwidth / loaded bandwidth, because
    in a training step all nodes send at once.

    Args:
        quiet: measurement of the pair alone, else the one beside other pairs.
        busy: measurement beside other pairs; None if there was none.
        line: alpha and beta fitted to the messages of `quiet`.
        backend: the training backend and the figures of messages over it; None if not measured.
    """
    sender, receiver = quiet.at_a, quiet.at_b
    under_load = busy.at_b.bytes_per_s if busy else None
    return LinkFigures(
        latency_s=sender.latency,
        jitter=sender.latency.p95 / sender.latency.p50 if sender.latency.p50 > 0 else None,
        isolated_bytes_per_s=receiver.bytes_per_s if quiet.alone or quiet.concurrency == 1 else None,
        loaded_bytes_per_s=under_load,
        concurrency=quiet.concurrency,
        cpu_contended=_contended(sender, receiver),
        transport="tcp",
        iface=sender.iface,
        alpha_s=line.alpha_s,
        beta_s_per_byte=line.beta_s_per_byte * (receiver.bytes_per_s / under_load if under_load else 1.0),
        break_bytes=line.break_bytes,
        backend=dict([backend]) if backend else {},
        n=receiver.n,
    )


def _contended(sender: PairFigures, receiver: PairFigures) -> bool | None:
    shares = [share for share in (sender.sending_cpu, receiver.receiving_cpu) if share is not None]
    return max(shares) > CONTENDED if shares else None


def clock_offsets(nodes: Sequence[str], pairs: Iterable[PairResult]) -> dict[str, Offset]:
    """Return node -> (its clock minus the first node's clock, largest error), both in seconds.

    The first node's offset is exactly 0. For a node that did not measure with the first node, the offsets and the
    errors along a chain of measured pairs are added. A node that no such chain connects with the first node is absent.
    """
    between = _between(pairs)
    known: dict[str, Offset] = {nodes[0]: (0.0, 0.0)} if nodes else {}
    edge = list(known)
    while edge:
        reached: dict[str, Offset] = {}
        for source in edge:
            offset, error = known[source]
            for target, (step, step_error) in between.get(source, {}).items():
                if target not in known and (target not in reached or error + step_error < reached[target][1]):
                    reached[target] = (offset + step, error + step_error)
        known |= reached
        edge = list(reached)
    return known


def _between(pairs: Iterable[PairResult]) -> dict[str, dict[str, Offset]]:
    """Return node -> peer -> (the peer's clock minus the node's, largest error), both in seconds. Of several
    measurements of a pair the most accurate one counts."""
    best: dict[str, dict[str, Offset]] = {}
    for seen in (view for pair in pairs for view in pair.from_both_ends()):
        offset, error = seen.at_a.clock_offset_s, seen.at_a.clock_error_s
        if offset is None or error is None:
            continue
        if seen.b not in best.get(seen.a, {}) or error < best[seen.a][seen.b][1]:
            best.setdefault(seen.a, {})[seen.b] = (offset, error)
            best.setdefault(seen.b, {})[seen.a] = (-offset, error)
    return best


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
        types: name of a device type -> the type.
        ratios: switch level -> its oversubscription.
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
    """Return node -> its health with the reasons: bad when it is to be excluded, unknown when it could not be
    measured, degraded when it is used with a warning, else ok."""
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
    remain, when no device could be measured, or when a fault has the severity refuse.

    Args:
        loopback: whether the nodes are virtual nodes; the verdict then suggests neither `--exclude` for sbatch nor
            environment variables.
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
    """Return the reason of a fault, with the name of the faulty node in its text."""
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
    """Return the fault PROBE_FAILED for each node whose devices or links could not be measured, and for each broken
    link. The fault never excludes a node, because nothing is known about the node."""
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
    """Return the living nodes that tried to measure pairs and succeeded with none."""
    touched = {name for pair in outcome.broken for name in pair} - set(outcome.lost)
    if not touched:
        return set()
    matrix = outcome.matrix()
    return {name for name in touched if not matrix.measured[matrix.index[name]].any()}
