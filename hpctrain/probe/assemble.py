"""From a probe's outcome to a topology, pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from hpctrain import __version__
from hpctrain.base.clock import utc_text
from hpctrain.probe.clocks import Offset, clock_offsets
from hpctrain.probe.cpu_time import CONTENDED
from hpctrain.probe.figures import PairFigures
from hpctrain.probe.line import fit_line
from hpctrain.probe.outcome import Joined, Outcome, PairResult
from hpctrain.probe.settings import ProbeSettings
from hpctrain.probe.verdict import node_healths, overall
from hpctrain.records.topology import (
    BackendFigures,
    DeviceType,
    Fabric,
    Link,
    LinkClass,
    LinkFigures,
    Node,
    Provenance,
    Topology,
)

ALL_LINKS_UP_TO = 64
"""Above this many nodes a pair is listed only when it is off its class; a pair that is absent has its values."""
OFF_CLASS = 0.10


def assemble(outcome: Outcome, settings: ProbeSettings, wall: float, job_id: str | None = None) -> Topology:
    """The topology that was measured, with the verdict.

    Args:
        wall: seconds since 1970, for the provenance.
        job_id: Slurm job that measured.
    """
    class_id = "loopback" if settings.loopback else "network"
    links = [_with_backend(link, outcome) for link in _links(outcome.pairs, class_id, settings.bulk_bytes)]
    clocks = clock_offsets(outcome.nodes, outcome.pairs)
    used = _used_interfaces(outcome.pairs)
    bare = [_node(name, outcome, clocks.get(name), used.get(name)) for name in outcome.nodes]
    healths = node_healths(outcome, bare, links, settings.slow_ratio)
    classes = _classes(links, class_id)
    return Topology(
        provenance=_provenance(outcome, settings, wall, job_id),
        device_types=_device_types(outcome),
        nodes=[node.model_copy(update={"health": healths[node.id]}) for node in bare],
        fabric=Fabric(classes=classes, links=_listed(links, classes, len(outcome.nodes))),
        verdict=overall(outcome, healths),
    )


def _provenance(outcome: Outcome, settings: ProbeSettings, wall: float, job_id: str | None) -> Provenance:
    return Provenance(
        version=__version__,
        created=utc_text(wall),
        transport="tcp",
        loopback=settings.loopback,
        mode="full",
        seed=settings.seed,
        rounds_done=outcome.rounds_done,
        rounds_planned=outcome.rounds_planned,
        wall_s=round(outcome.wall_s, 3),
        job_id=job_id,
        notes=[
            f"messages over the training backend were not measured: {name}: {why}"
            for name, why in outcome.backend_failed.items()
        ],
    )


def _node(name: str, outcome: Outcome, clock: Offset | None, used: str | None) -> Node:
    place = outcome.joined.get(name, Joined(addr="", port=0, iface=None, host=None))
    report = outcome.devices.get(name)
    facts = place.facts
    if facts is not None and clock is not None and name != outcome.nodes[0]:
        facts = facts.model_copy(update={"clock_offset_s": clock[0], "clock_error_s": clock[1]})
    return Node(
        id=name,
        addr=place.addr,
        iface=used or place.iface,
        host=place.host,
        host_facts=facts,
        devices=report.devices if report else [],
        intra_bytes_per_s=report.intra_bytes_per_s if report else None,
    )


def _used_interfaces(pairs: Sequence[PairResult]) -> dict[str, str]:
    """Node -> the interface that most of its sockets really used."""
    used: dict[str, list[str]] = {}
    for pair in pairs:
        for name, end in ((pair.a, pair.at_a), (pair.b, pair.at_b)):
            if end.iface is not None:
                used.setdefault(name, []).append(end.iface)
    return {name: statistics.mode(found) for name, found in used.items()}


def _device_types(outcome: Outcome) -> dict[str, DeviceType]:
    merged: dict[str, DeviceType] = {}
    for report in outcome.devices.values():
        merged |= report.device_types
    return dict(sorted(merged.items()))


def _links(pairs: Sequence[PairResult], class_id: str, bulk_bytes: int) -> list[Link]:
    alone = {(pair.a, pair.b): pair for pair in pairs if pair.alone}
    loaded = {(pair.a, pair.b): pair for pair in pairs if not pair.alone}
    links = []
    for a, b in sorted(alone.keys() | loaded.keys()):
        quiet, busy = alone.get((a, b)) or loaded[a, b], loaded.get((a, b))
        ab, ba = (_figures(quiet, busy, forward, bulk_bytes) for forward in (True, False))
        links.append(Link(a=a, b=b, class_=class_id, ab=ab, ba=ba))
    return links


def _figures(quiet: PairResult, busy: PairResult | None, forward: bool, bulk_bytes: int) -> LinkFigures:
    """One direction: latency as its sender saw it, bandwidth as its receiver timed it.

    Beta comes from the loaded bandwidth where there is one: in a training step all nodes talk at once.
    """
    sender, receiver = (quiet.at_a, quiet.at_b) if forward else (quiet.at_b, quiet.at_a)
    under_load = None if busy is None else (busy.at_b if forward else busy.at_a)
    # The line goes through a ping, the single messages, and the transfer, whose rate holds for its volume and for any
    # larger one. A ping counts as no bytes: its 8 are lost in the headers of its packet, and on a slow link their share
    # would make alpha negative.
    start_up_s, rate = sender.latency.p50, receiver.bytes_per_s
    streamed = [(float(size), start_up_s + size / rate) for size in (bulk_bytes, 2 * bulk_bytes)]
    line = fit_line([(0.0, start_up_s), *sender.ladder, *streamed])
    slowed = rate / under_load.bytes_per_s if under_load else 1.0
    return LinkFigures(
        latency_s=sender.latency,
        jitter=sender.latency.p95 / start_up_s if start_up_s > 0 else None,
        isolated_bytes_per_s=rate,
        loaded_bytes_per_s=under_load.bytes_per_s if under_load else None,
        concurrency=quiet.concurrency,
        cpu_contended=_contended(sender, receiver),
        transport="tcp",
        iface=sender.iface,
        alpha_s=line.alpha_s,
        beta_s_per_byte=line.beta_s_per_byte * slowed,
        break_bytes=line.break_bytes,
        n=receiver.n,
    )


def _contended(sender: PairFigures, receiver: PairFigures) -> bool | None:
    shares = [share for share in (sender.sending_cpu, receiver.receiving_cpu) if share is not None]
    return max(shares) > CONTENDED if shares else None


def _classes(links: Sequence[Link], class_id: str) -> list[LinkClass]:
    figures = [side for link in links for side in (link.ab, link.ba)]
    alphas = [side.alpha_s for side in figures if side.alpha_s is not None]
    betas = [side.beta_s_per_byte for side in figures if side.beta_s_per_byte is not None]
    if not alphas or not betas:
        return []
    alpha, beta = statistics.median(alphas), statistics.median(betas)
    return [
        LinkClass(id=class_id, alpha_s=alpha, beta_s_per_byte=beta, pairs=len(links), backend=_usual_backend(figures))
    ]


def _with_backend(link: Link, outcome: Outcome) -> Link:
    ends = {"ab": (link.a, link.b), "ba": (link.b, link.a)}
    found = {side: outcome.backend[pair] for side, pair in ends.items() if pair in outcome.backend}
    update = {
        side: getattr(link, side).model_copy(update={"backend": {name: figures}})
        for side, (name, figures) in found.items()
    }
    return link.model_copy(update=update)


def _usual_backend(sides: Sequence[LinkFigures]) -> dict[str, BackendFigures]:
    """Medians over the links, by backend."""
    measured: dict[str, list[BackendFigures]] = {}
    for side in sides:
        for name, figures in side.backend.items():
            measured.setdefault(name, []).append(figures)
    return {
        name: BackendFigures(
            alpha_s=statistics.median(each.alpha_s for each in found),
            beta_s_per_byte=statistics.median(each.beta_s_per_byte for each in found),
        )
        for name, found in measured.items()
    }


def _listed(links: list[Link], classes: Sequence[LinkClass], nodes: int) -> list[Link]:
    if nodes <= ALL_LINKS_UP_TO or not classes:
        return links
    return [link for link in links if _is_off(link, classes[0])]


def _is_off(link: Link, usual: LinkClass) -> bool:
    return any(
        value is not None and abs(value - expected) > OFF_CLASS * expected
        for side in (link.ab, link.ba)
        for value, expected in ((side.alpha_s, usual.alpha_s), (side.beta_s_per_byte, usual.beta_s_per_byte))
    )
