"""Finds faults of the network between nodes: slow nodes, slow links and oversubscribed switch levels. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hpctrain.probe.faults.node_faults import ProbeFinding, Severity, make_finding
from hpctrain.probe.measure.outcome import ProbeOutcome
from hpctrain.probe.measure.settings import ProbeSettings
from hpctrain.probe.pair_selection import outliers
from hpctrain.probe.pair_selection.measurement_schedule import retest_candidates
from hpctrain.probe.pair_selection.rounds import OVERSUBSCRIBED_FROM, RetestResult, retested_links, retested_nodes
from hpctrain.probe.pair_selection.switches import SwitchTree

UNCONFIRMED_RATIO = 0.8
"""Share of the peers' bandwidth below which a node is slow even without a retest."""
ASYMMETRIC_RATIO = 0.8
"""Ratio of a node's slower to its faster direction, below which the fault is that direction and not the node."""
SHARED_RATIO = 0.7
"""Share of the peers' bandwidth below which a node that shares its machine with another is slow. Such nodes compete
for cores, which costs some of them bandwidth and makes their latencies useless."""
MIN_NODES_TO_COMPARE = 3
"""Fewest nodes to find a slow one: of two nodes, either may be the slow one."""


@dataclass(frozen=True)
class _SuspectFigures:
    """The relative performance of one suspect in the first measurement, and in its retest if there was one."""

    sent: float
    received: float
    latency: float
    partners: int
    again: RetestResult | None

    @property
    def bandwidth(self) -> float:
        return min(self.sent, self.received)


def network_faults(outcome: ProbeOutcome, tree: SwitchTree, settings: ProbeSettings) -> list[ProbeFinding]:
    """Return all faults of the network that the measurements show."""
    if len(outcome.alive) < MIN_NODES_TO_COMPARE:
        return []
    suspects, links = retest_candidates(outcome, settings, tree)
    names, pairs = [outcome.nodes[node] for node in suspects], [(outcome.nodes[a], outcome.nodes[b]) for a, b in links]
    now = outliers.relative_performance(outcome.matrix(), tree)
    again = retested_nodes(outcome.retests, names, pairs)
    together = _of_one_machine(outcome)
    faults = []
    for node, name in zip(suspects, names, strict=True):
        fault = _judge(name, _suspect_figures(now, node, again.get(name)), settings, name in together)
        if fault is not None:
            faults.append(fault)
    for (a, b), (there, back) in retested_links(outcome.retests, names, pairs).items():
        if min(there, back) < (SHARED_RATIO if {a, b} & together else UNCONFIRMED_RATIO):
            faults.append(_slow_link(a, b, there, back))
    return faults


def _of_one_machine(outcome: ProbeOutcome) -> set[str]:
    """Return the virtual nodes that share their machine with another node."""
    machines = {name: place.facts.boot_id for name, place in outcome.joined.items() if place.facts}
    count = Counter(machine for machine in machines.values() if machine is not None)
    return {name for name, machine in machines.items() if machine is not None and count[machine] > 1}


def oversubscribed(ratios: dict[int, float]) -> list[ProbeFinding]:
    """Return OVERSUBSCRIBED faults: switch levels that carry less than their nodes send.

    Args:
        ratios: oversubscription of each level, including the levels below it.
    """
    evidence = "one pair alone against all members of a cluster at once"
    fix = "let the plan keep a pipeline's neighbours on one switch, or ask for fewer with `#SBATCH --switches=1`"
    texts = [
        f"level {level} of the switches is oversubscribed {ratio:.1f}:1"
        for level, ratio in sorted(ratios.items())
        if ratio >= OVERSUBSCRIBED_FROM
    ]
    return [make_finding(None, "note", "OVERSUBSCRIBED", text, evidence, fix) for text in texts]


def _suspect_figures(now: outliers.RelativePerformance, node: int, again: RetestResult | None) -> _SuspectFigures:
    figures = (float(now.sent[node]), float(now.received[node]), float(now.latency[node]))
    return _SuspectFigures(*figures, int(now.partners[node]), again)


def _judge(name: str, seen: _SuspectFigures, settings: ProbeSettings, shared: bool) -> ProbeFinding | None:
    """Return the fault of a suspected node; None when it is as fast as others.

    Args:
        shared: whether the node shares its machine with another node, which makes its latency useless.
    """
    slow_ratio = min(settings.slow_ratio, SHARED_RATIO) if shared else settings.slow_ratio
    if seen.again is None:
        slow = seen.bandwidth < min(slow_ratio, UNCONFIRMED_RATIO)
        late = seen.latency > outliers.LATENCY_EXCLUDE and not settings.loopback and not shared
        leave_out = False
    else:
        slow = seen.again.bandwidth < slow_ratio
        late = min(seen.again.latency, seen.latency) > outliers.LATENCY_WARN and not shared
        leave_out = max(seen.again.bandwidth, seen.bandwidth) < settings.exclude_ratio or (
            late and min(seen.again.latency, seen.latency) > outliers.LATENCY_EXCLUDE and settings.exclude_ratio > 0
        )
    if not slow and not late:
        return None
    severity: Severity = "exclude" if leave_out else "warn"
    fix = f"leave it out with --exclude={name}" if leave_out else "let the plan give it less traffic, or probe again"
    if slow and _is_one_sided(seen):
        fix += "; its cable or port may be bad"
        return make_finding(name, severity, "ASYMMETRIC", _sides(seen), _evidence(seen), fix)
    text = f"its bandwidth is {_figure(seen.bandwidth)} of the median" if slow else ""
    if late:
        text += f"{' and ' if text else ''}its latency is {seen.latency:.1f} times the median"
    return make_finding(name, severity, "SLOW_NODE", text, _evidence(seen), fix)


def _is_one_sided(seen: _SuspectFigures) -> bool:
    sent, received = (seen.sent, seen.received) if seen.again is None else (seen.again.sent, seen.again.received)
    return min(sent, received) < ASYMMETRIC_RATIO * max(sent, received)


def _sides(seen: _SuspectFigures) -> str:
    return f"it sends at {_figure(seen.sent)} and receives at {_figure(seen.received)} of the median"


def _evidence(seen: _SuspectFigures) -> str:
    if seen.again is None:
        return f"{seen.partners} partners; not measured again"
    return (
        f"{seen.partners} partners; {seen.again.times} times more with good ones: sends at {_figure(seen.again.sent)}, "
        f"receives at {_figure(seen.again.received)} of good pairs, latency times {seen.again.latency:.1f}"
    )


def _slow_link(a: str, b: str, there: float, back: float) -> ProbeFinding:
    text = f"link {a} - {b}: {_figure(there)} of good pairs there, {_figure(back)} back"
    evidence = "measured by itself again; both nodes are as fast as others with other partners"
    fix = "the plan keeps heavy traffic off it; tell the administrators if it stays"
    one_sided = min(there, back) < ASYMMETRIC_RATIO * max(there, back)
    return make_finding(None, "warn", "ASYMMETRIC" if one_sided else "SLOW_LINK", text, evidence, fix)


def _figure(ratio: float) -> str:
    return f"{ratio:.0%}"
