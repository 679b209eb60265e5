"""Finds faults of the network between nodes: slow nodes, slow links and oversubscribed switch levels. Pure."""

from __future__ import annotations

from collections import Counter

from hpctrain.probe.faults.node_faults import ProbeFinding, Severity, make_finding
from hpctrain.probe.measure.outcome import ProbeOutcome
from hpctrain.probe.measure.settings import ProbeSettings
from hpctrain.probe.pair_selection import outliers
from hpctrain.probe.pair_selection.measurement_schedule import retest_candidates
from hpctrain.probe.pair_selection.rounds import OVERSUBSCRIBED_FROM, NodePerformance, retested_links, retested_nodes
from hpctrain.probe.pair_selection.switches import SwitchTree

UNCONFIRMED_RATIO = 0.8
"""A node whose bandwidth is below this share of the median of all nodes is slow even without a retest. A link below
this share of the good pairs in its retest is slow."""
ASYMMETRIC_RATIO = 0.8
"""Ratio of the slower to the faster direction of a node or a link, below which the fault is ASYMMETRIC: only one
direction is slow."""
SHARED_RATIO = 0.7
"""Share of the median bandwidth below which a node that shares its machine with another node is slow. Such nodes
compete for cores, which costs some of them bandwidth and makes their latencies useless."""
MIN_NODES_TO_COMPARE = 3
"""Fewest living nodes with which a slow node is searched for: of two nodes, either may be the slow one."""


def network_faults(outcome: ProbeOutcome, tree: SwitchTree, settings: ProbeSettings) -> list[ProbeFinding]:
    """Return the faults SLOW_NODE, ASYMMETRIC and SLOW_LINK that the measurements show; none with fewer than
    `MIN_NODES_TO_COMPARE` living nodes."""
    if len(outcome.alive) < MIN_NODES_TO_COMPARE:
        return []
    suspects, links = retest_candidates(outcome, settings, tree)
    names, pairs = [outcome.nodes[node] for node in suspects], [(outcome.nodes[a], outcome.nodes[b]) for a, b in links]
    now = outliers.relative_performance(outcome.matrix(), tree)
    again = retested_nodes(outcome.retests, names, pairs)
    together = _of_one_machine(outcome)
    faults = []
    for node, name in zip(suspects, names, strict=True):
        figures = (float(now.sent[node]), float(now.received[node]), float(now.latency[node]))
        first = NodePerformance(*figures, int(now.partners[node]))
        fault = _judge(name, first, again.get(name), settings, name in together)
        if fault is not None:
            faults.append(fault)
    for (a, b), (there, back) in retested_links(outcome.retests, names, pairs).items():
        if min(there, back) < (SHARED_RATIO if {a, b} & together else UNCONFIRMED_RATIO):
            faults.append(_slow_link(a, b, there, back))
    return faults


def _of_one_machine(outcome: ProbeOutcome) -> set[str]:
    """Return the names of the nodes that share their machine with another node, by the boot id that nodes report."""
    machines = {name: place.facts.boot_id for name, place in outcome.joined.items() if place.facts}
    count = Counter(machine for machine in machines.values() if machine is not None)
    return {name for name, machine in machines.items() if machine is not None and count[machine] > 1}


def oversubscribed(ratios: dict[int, float]) -> list[ProbeFinding]:
    """Return a fault OVERSUBSCRIBED for each switch level that carries clearly less than its nodes send
    (`OVERSUBSCRIBED_FROM`).

    Args:
        ratios: switch level (1 is the lowest) -> its oversubscription, which includes that of the levels below it.
    """
    evidence = "one pair alone against all members of a cluster at once"
    fix = "let the plan keep a pipeline's neighbours on one switch, or ask for fewer with `#SBATCH --switches=1`"
    texts = [
        f"level {level} of the switches is oversubscribed {ratio:.1f}:1"
        for level, ratio in sorted(ratios.items())
        if ratio >= OVERSUBSCRIBED_FROM
    ]
    return [make_finding(None, "note", "OVERSUBSCRIBED", text, evidence, fix) for text in texts]


def _judge(
    name: str, first: NodePerformance, again: NodePerformance | None, settings: ProbeSettings, shared: bool
) -> ProbeFinding | None:
    """Return the fault of a suspected node; None when the node is fast enough.

    Args:
        first: figures of the node in the first measurement.
        again: figures of the node in its retest; None if there was no retest.
        shared: whether the node shares its machine with another node, which makes its latency useless.
    """
    slow_ratio = min(settings.slow_ratio, SHARED_RATIO) if shared else settings.slow_ratio
    if again is None:
        slow = first.bandwidth < min(slow_ratio, UNCONFIRMED_RATIO)
        late = first.latency > outliers.LATENCY_EXCLUDE and not settings.loopback and not shared
        leave_out = False
    else:
        slow = again.bandwidth < slow_ratio
        late = min(again.latency, first.latency) > outliers.LATENCY_WARN and not shared
        leave_out = max(again.bandwidth, first.bandwidth) < settings.exclude_ratio or (
            late and min(again.latency, first.latency) > outliers.LATENCY_EXCLUDE and settings.exclude_ratio > 0
        )
    if not slow and not late:
        return None
    severity: Severity = "exclude" if leave_out else "warn"
    fix = f"leave it out with --exclude={name}" if leave_out else "let the plan give it less traffic, or probe again"
    if slow and _is_one_sided(again or first):
        fix += "; its cable or port may be bad"
        return make_finding(name, severity, "ASYMMETRIC", _sides(first), _evidence(first, again), fix)
    text = f"its bandwidth is {_figure(first.bandwidth)} of the median" if slow else ""
    if late:
        text += f"{' and ' if text else ''}its latency is {first.latency:.1f} times the median"
    return make_finding(name, severity, "SLOW_NODE", text, _evidence(first, again), fix)


def _is_one_sided(seen: NodePerformance) -> bool:
    return seen.bandwidth < ASYMMETRIC_RATIO * max(seen.sent, seen.received)


def _sides(first: NodePerformance) -> str:
    return f"it sends at {_figure(first.sent)} and receives at {_figure(first.received)} of the median"


def _evidence(first: NodePerformance, again: NodePerformance | None) -> str:
    if again is None:
        return f"{first.times} partners; not measured again"
    return (
        f"{first.times} partners; {again.times} times more with good ones: sends at {_figure(again.sent)}, "
        f"receives at {_figure(again.received)} of good pairs, latency times {again.latency:.1f}"
    )


def _slow_link(a: str, b: str, there: float, back: float) -> ProbeFinding:
    text = f"link {a} - {b}: {_figure(there)} of good pairs there, {_figure(back)} back"
    evidence = "measured by itself again; both nodes are as fast as others with other partners"
    fix = "the plan keeps heavy traffic off it; tell the administrators if it stays"
    one_sided = min(there, back) < ASYMMETRIC_RATIO * max(there, back)
    return make_finding(None, "warn", "ASYMMETRIC" if one_sided else "SLOW_LINK", text, evidence, fix)


def _figure(ratio: float) -> str:
    return f"{ratio:.0%}"
